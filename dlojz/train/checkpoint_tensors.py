"""Write and read the tensors of a checkpoint.

A checkpoint is filled under a temporary name, flushed to the disk, renamed, and committed by a last small file; nothing
that is committed is ever written to again. After a crash at any moment the former checkpoints are intact, and left-over
folders are deleted once their writer is gone. Reading opens only safetensors files that the manifest names; verify the
checkpoint first (`checkpoint_files.verify`), as no checksum is computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlojz.base.errors import LabError
from dlojz.base.fault_injection import faultpoint
from dlojz.base.files import write_atomic
from dlojz.base.language import format_bytes
from dlojz.config.run_config import RunConfig
from dlojz.train.checkpoint_files import (
    COMMIT,
    MANIFEST,
    KeptFile,
    KeptTensor,
    Manifest,
    is_committed,
    sha256_of,
    step_folder,
    step_folders,
    verify,
)

FILE_BYTES = 2**30
"""Tensors are collected in host memory up to so many bytes, then written."""
SPARE_BYTES = 64 * 2**20
"""Bytes that must stay free on the file system besides the checkpoint, for the record and the events."""
_OLD_S = 24 * 3600.0
_LEFT_OVER = re.compile(r"step-\d{6,12}\.(?:tmp|aside)-([A-Za-z0-9.-]*)-(\d+)-[0-9a-f]{32}")


class CheckpointWriter:
    """Writer of one checkpoint, tensor by tensor.

    Args:
        checkpoints: folder of all checkpoints of the run; made if missing.
        needed_bytes: of all its tensors, as predicted; checked before anything is written.
        file_bytes: a file is closed once it has so many.

    Raises:
        OSError: if the folder cannot be made.
        LabError: if the file system has no room for it.
    """

    def __init__(
        self, checkpoints: Path, config: RunConfig, step: int, *, needed_bytes: int = 0, file_bytes: int = FILE_BYTES
    ) -> None:
        self._checkpoints, self._config, self._step, self._file_bytes = checkpoints, config, step, file_bytes
        checkpoints.mkdir(exist_ok=True)
        # Before the check for room, as it frees some.
        sweep(checkpoints)
        # Before the first byte: a full disk would stop the training's own log too.
        _check_room(checkpoints, needed_bytes)
        self._folder = _unique(checkpoints, step, "tmp")
        self._folder.mkdir()
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[KeptFile] = []
        self._tensors: dict[str, KeptTensor] = {}
        faultpoint("checkpoint.write:1")

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one whole tensor.

        Raises:
            OSError: if it cannot be written.
            LabError: if the name is taken.
        """
        if name in self._tensors:
            raise LabError(f"the checkpoint has a tensor {name} already.")
        num_bytes = tensor.numel() * tensor.element_size()
        # A tensor larger than a file's limit has a file of its own.
        if self._waiting and self._waiting_bytes + num_bytes > self._file_bytes:
            self._flush()
        # Safetensors refuses tensors that share memory, and a view would keep all of it.
        self._waiting[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self._waiting_bytes += num_bytes
        entry = KeptTensor(file=self._next, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        self._tensors[name] = entry

    @property
    def _next(self) -> str:
        return f"tensors-{len(self._files):04d}.safetensors"

    def _flush(self) -> None:
        faultpoint("checkpoint.write:2")
        path = self._folder / self._next
        try:
            save_file(self._waiting, path)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{path.name} cannot be written: {error}") from None
        faultpoint("checkpoint.write:3")
        # Before its name is in the manifest: a crash must not leave a manifest of lost bytes.
        _flush_to_disk(path)
        size, digest = sha256_of(path)
        self._files.append(KeptFile(name=path.name, bytes=size, sha256=digest))
        self._waiting, self._waiting_bytes = {}, 0

    def commit(self) -> Path:
        """Commit: from now on this is the newest checkpoint of the run; returns its folder.

        Raises:
            OSError: if it cannot be finished; then there is none of this step.
        """
        if self._waiting:
            self._flush()
        faultpoint("checkpoint.manifest:1")
        # Files and manifest reach the disk, then the folder gets its name, then COMMIT is written. What is cut off
        # before leaves a folder that no reader takes for a checkpoint.
        manifest = Manifest(
            step=self._step,
            config=self._config,
            files=tuple(self._files),
            tensors=self._tensors,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={name: version(name) for name in ("dlojz", "torch")},
        ).to_json()
        (self._folder / MANIFEST).write_text(manifest, encoding="utf-8")
        _flush_to_disk(self._folder / MANIFEST)
        _flush_to_disk(self._folder)
        faultpoint("checkpoint.manifest:2")
        folder = step_folder(self._checkpoints, self._step)
        if os.path.lexists(folder):  # of an attempt that was cut off before it committed, or damaged since
            folder.rename(_unique(self._checkpoints, self._step, "aside"))
        faultpoint("checkpoint.rename:1")
        self._folder.rename(folder)
        self._folder = folder
        # A rename changes the folder above: its list of names goes to the disk.
        _flush_to_disk(self._checkpoints)
        faultpoint("checkpoint.rename:2")
        commit_record = {"manifest_sha256": hashlib.sha256(manifest.encode()).hexdigest()}
        faultpoint("checkpoint.commit:1")
        write_atomic(folder / COMMIT, json.dumps(commit_record))  # from here on it counts
        _flush_to_disk(folder)
        faultpoint("checkpoint.commit:2")
        return folder

    def abandon(self) -> None:
        """Remove what was written, unless it is committed."""
        if not is_committed(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)


def already_there(checkpoints: Path, step: int) -> bool:
    """Tell whether there is a valid checkpoint of a step, which need not be written again."""
    folder = step_folder(checkpoints, step)
    try:
        verify(folder)
    except LabError:
        return False
    return True


def keep_newest(checkpoints: Path, keep: int, step: int) -> None:
    """Delete the checkpoints before a committed one, but for the newest `keep`, itself among them.

    Each loses its COMMIT first, so that a half-deleted one is not taken as valid. A later step's, which can only be
    damaged, stays until that step is reached again.
    """
    earlier = [folder for folder_step, folder in step_folders(checkpoints) if folder_step <= step]
    committed = [folder for folder in earlier if is_committed(folder)]
    newest_folders = set(committed[:keep])
    for folder in earlier:
        if folder not in newest_folders:
            faultpoint("checkpoint.clean:1")
            (folder / COMMIT).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    sweep(checkpoints)


def sweep(checkpoints: Path) -> None:
    """Delete temporary folders whose writer is gone, or that are a day old; others may be in use."""
    for entry in list(checkpoints.iterdir()):
        name = _LEFT_OVER.fullmatch(entry.name)
        if name and not entry.is_symlink() and (".aside-" in entry.name or _is_left(entry, name[1], int(name[2]))):
            shutil.rmtree(entry, ignore_errors=True)


def _is_left(entry: Path, host: str, pid: int) -> bool:
    # Of another host's processes nothing is known but the age of what they have left.
    if host == _host() and not psutil.pid_exists(pid):
        return True
    try:
        return time.time() - entry.stat().st_mtime > _OLD_S
    except OSError:
        return False


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())


def _unique(checkpoints: Path, step: int, kind: str) -> Path:
    return checkpoints / f"{step_folder(checkpoints, step).name}.{kind}-{_host()}-{os.getpid()}-{uuid.uuid4().hex}"


def _check_room(checkpoints: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(checkpoints).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        raise LabError(
            f"a checkpoint takes {format_bytes(needed_bytes)}, but {checkpoints} has {format_bytes(free_bytes)} free: "
            "delete runs that are no longer needed, or keep fewer checkpoints."
        )


def _flush_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


COUNT = "count/updates"
"""Name of Adam's count of updates, by which it corrects the bias of its moments."""


class CheckpointTensors:
    """Tensors of a verified checkpoint, by name; a context that closes the files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest, self._folder = manifest, folder
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def step(self) -> int:
        """Steps that are finished."""
        return self.manifest.step

    @property
    def updates(self) -> int:
        """Updates that the optimizer has counted; the steps, if it counts none."""
        return int(self.tensor(COUNT)) if self.has(COUNT) else self.step

    def has(self, name: str) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self.manifest.tensors

    def names(self, kind: str) -> list[str]:
        """List the names of all tensors of a kind, without the kind."""
        return [name.partition("/")[2] for name in self.manifest.tensors if name.partition("/")[0] == kind]

    def tensor(self, name: str) -> Tensor:
        """Read a whole tensor, on the CPU.

        Raises:
            LabError: if there is none of this name, or it is not what the manifest says.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise LabError(f"the checkpoint {self._folder.name} has no tensor {name}: it is of another model.")
        try:
            if entry.file not in self._files:
                # Maps the file: only the tensors that are asked for are read.
                opened = safe_open(self._folder / entry.file, framework="pt", device="cpu")
                self._files[entry.file] = self._open.enter_context(opened)
            full_tensor: Tensor = self._files[entry.file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise LabError(f"{entry.file} of {self._folder.name} cannot be read: {error}.") from None
        # The hash of the file is right, but its tensors may still not be those of the manifest.
        if tuple(full_tensor.shape) != entry.shape or str(full_tensor.dtype) != f"torch.{entry.dtype}":
            raise LabError(f"the tensor {name} of {self._folder.name} is not what its manifest says.")
        return full_tensor

    def replicas(self) -> int:
        """Count the replicas with buffers."""
        kinds = {name.partition("/")[0] for name in self.manifest.tensors}
        return sum(kind.startswith("buffers.") for kind in kinds)
