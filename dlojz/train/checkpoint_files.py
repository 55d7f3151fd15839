"""Checkpoint files: when they are written (`checkpoint_policy.json`), their manifests, which checkpoint is valid.

Runs that differ in their policy alone are the same run. A manifest names each tensor once, in a file of its folder. A
folder is a checkpoint if it belongs to this user, no link leads into or out of it, its COMMIT holds the sha256 of its
manifest, and every file has the size and the sha256 of the manifest. Looking changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from dlojz.base.contract import Contract, parse_json
from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import Sentences, refusal
from dlojz.config.layout import Layout
from dlojz.config.run_config import ReadContract, RunConfig

TEXTS = Sentences(Path(__file__).parent / "data" / "checkpoint_files.md")

FILE_NAME = "checkpoint_policy.json"


class CheckpointPolicy(Contract):
    """Policy of a run's checkpoints, besides the one on SIGUSR2: how often they are written, and how many are kept."""

    schema_version: Literal[1] = 1
    every_steps: int | None = Field(None, ge=1, description="steps between two; none: only when told to stop")
    keep: int = Field(2, ge=1, le=1000, description="the newest so many are kept")

    def due(self, finished_steps: int) -> bool:
        """Tell whether a checkpoint is due after so many steps."""
        return self.every_steps is not None and finished_steps % self.every_steps == 0

    def write(self, folder: Path) -> None:
        """Write the policy into a run folder, atomically."""
        write_atomic(folder / FILE_NAME, self.to_json())


def read_policy(folder: Path) -> CheckpointPolicy:
    """Read the policy of a run folder; the default where it has none.

    Raises:
        LabError: if the file is there and cannot be read, or is illegal.
    """
    try:
        return CheckpointPolicy.from_json((folder / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return CheckpointPolicy()
    except OSError as error:
        raise LabError(f"the {FILE_NAME} of run {folder.name} cannot be read: {error.strerror}.") from None
    except LabError as error:
        raise LabError(f"the {FILE_NAME} of run {folder.name} is not legal: {error}") from None


MANIFEST, COMMIT = "manifest.json", "COMMIT"
FILE_PATTERN = r"^tensors-\d{4,6}\.safetensors$"
SHA_PATTERN = r"^[0-9a-f]{64}$"
MAX_MANIFEST_BYTES = 64 * 2**20
LATER = ("layout", "steps", "keep_weights", "device", "data_root")
"""Fields in which a run may differ from the one whose checkpoint it resumes."""


class KeptFile(Contract):
    """File of tensors."""

    name: str = Field(pattern=FILE_PATTERN)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=SHA_PATTERN)


class KeptTensor(Contract):
    """File, shape and type of a tensor."""

    file: str = Field(pattern=FILE_PATTERN)
    shape: tuple[int, ...]
    dtype: str = Field(description="torch's name of it, e.g. float32")


class Manifest(ReadContract):
    """Manifest of a checkpoint.

    Tensors are named `KIND/NAME`: `weights/blocks.0.conv.weight`, `exp_avg/…`, `exp_avg_sq/…`, `momentum_buffer/…`;
    `count/updates` is Adam's count of its updates, `buffers.1/…` are those of replica 1, `own.1/…` states of the
    optimizer of replica 1 alone (the errors of a compression), `random.1/cpu` is rank 1's generator.
    """

    schema_version: Literal[1] = 1
    step: int = Field(ge=0, description="steps that are finished; the next one to train is the same number")
    config: RunConfig
    files: tuple[KeptFile, ...]
    tensors: dict[str, KeptTensor]
    created_utc: str = ""
    versions: dict[str, str] = Field(default_factory=dict, description="of dlojz and torch")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [file.name for file in self.files]
        if len(set(names)) < len(names):
            raise TEXTS.refusal("not used", "file named twice")
        strangers = {tensor.file for tensor in self.tensors.values()} - set(names)
        if strangers:
            raise TEXTS.refusal("not used", "tensor in a strange file", file=min(strangers))
        return self

    @property
    def layout(self) -> Layout:
        """Layout when this was written; a reader may have another."""
        return self.config.layout

    @property
    def bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.bytes for file in self.files)

    def check_goes_on(self, config: RunConfig) -> None:
        """Refuse a run that is another training than the one of this checkpoint.

        The layout may differ, as long as the global batch is the same: the data continue from the step.

        Raises:
            LabError: naming the first field that differs, with both values.
        """
        saved_fields, theirs = self.config.to_dict(), config.to_dict()
        pairs = {name: (saved_fields[name], theirs[name]) for name in saved_fields if name not in LATER}
        # Of the layout only this matters: a step reads the same samples in any other.
        pairs["global_batch"] = (self.layout.global_batch, config.layout.global_batch)
        for name, (original, run_value) in pairs.items():
            if original != run_value:
                raise refusal(
                    en=f"the checkpoint at step {self.step} was kept with {name}={original!r}, but this run has "
                    f"{name}={run_value!r}: only the layout may differ, with the same global batch.",
                    fr=f"le checkpoint du pas {self.step} a été gardé avec {name}={original!r}, mais cette exécution a "
                    f"{name}={run_value!r} : seul le layout peut différer, pour le même batch global.",
                )


CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d{6,12})")
_MAX_COMMIT_BYTES = 4096
_CHUNK_BYTES = 2**20


class Checkpoint(NamedTuple):
    """Committed checkpoint in a listing."""

    folder: Path
    step: int
    bytes: int
    committed_utc: str
    layout: Layout


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint after so many steps."""
    return checkpoints / f"step-{step:06d}"


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """List steps and folders with a checkpoint's name, newest first, committed or not, without links."""
    if checkpoints.is_symlink():
        return []
    try:
        entries = list(os.scandir(checkpoints))
    except OSError:
        return []
    folders = [
        (int(name[1]), checkpoints / entry.name)
        for entry in entries
        if (name := _STEP.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
    ]
    # By the number of the step, and not by time, which a copy may change.
    return sorted(folders, reverse=True)


def is_committed(folder: Path) -> bool:
    """Tell whether there is a COMMIT file, whatever its content."""
    return os.path.lexists(folder / COMMIT)


def open_owned(path: Path) -> int:
    """Open a regular file of this user's for reading; returns the descriptor.

    Raises:
        LabError: if it is missing, a link, no regular file, or another user's.
    """
    try:
        # A link at this path is refused; a named pipe is opened without a wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise TEXTS.refusal("not used", "symbolic link", name=path.name) from None
        raise TEXTS.refusal("not used", "file cannot be read", name=path.name, cause=error.strerror) from None
    # Of what is open, and not of the path, which may stand for another file by now.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        key = "not yours" if stat.S_ISREG(status.st_mode) else "no regular file"
        raise TEXTS.refusal("not used", key, name=path.name)
    return descriptor


def _read(path: Path, most_bytes: int) -> bytes:
    with os.fdopen(open_owned(path), "rb") as file:
        # One byte more than allowed tells that a file is too long, without reading all of it.
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise TEXTS.refusal("not used", "too large", name=path.name, most_bytes=most_bytes)
    return content


def sha256_of(path: Path) -> tuple[int, str]:
    """Compute size and sha256 of a regular file of this user's.

    Raises:
        LabError: as `open_owned`.
    """
    digest, size = hashlib.sha256(), 0
    with os.fdopen(open_owned(path), "rb") as file:
        # Piece by piece: a file may have 1 GiB and more.
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a committed checkpoint; its tensors are not read.

    Raises:
        LabError: if the folder is not this user's, is not committed, or its manifest is damaged.
    """
    # Of the folder itself: a link to one is refused.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise TEXTS.refusal("not used", "no folder of yours", name=folder.name)
    if not is_committed(folder):
        raise TEXTS.refusal("not used", "not finished", file=COMMIT)
    # COMMIT is written last and holds the hash of the manifest, which holds those of all files.
    commit = parse_json(_read(folder / COMMIT, _MAX_COMMIT_BYTES))
    content = _read(folder / MANIFEST, MAX_MANIFEST_BYTES)
    commit_sha256 = commit.get("manifest_sha256") if isinstance(commit, dict) else None
    if commit_sha256 != hashlib.sha256(content).hexdigest():
        raise TEXTS.refusal("not used", "do not belong together", manifest=MANIFEST, commit=COMMIT)
    data = parse_json(content)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > 1:
        raise TEXTS.refusal("not used", "newer version", version=version)
    manifest = Manifest.from_dict(data)
    # A renamed folder would be taken for another step.
    if _STEP.fullmatch(folder.name) and int(folder.name.partition("-")[2]) != manifest.step:
        raise TEXTS.refusal("not used", "another step", step=manifest.step)
    return manifest


def verify(folder: Path) -> Manifest:
    """Check every byte of a checkpoint against its manifest.

    Raises:
        LabError: naming the damaged file.
    """
    try:
        manifest = read_manifest(folder)
        for file in manifest.files:
            size, digest = sha256_of(folder / file.name)
            if size != file.bytes:
                raise TEXTS.refusal("not used", "other size", name=file.name, size=size, written=file.bytes)
            if digest != file.sha256:
                raise TEXTS.refusal("not used", "other content", name=file.name)
    except OSError as error:
        raise TEXTS.refusal("not used", "cannot be read", name=folder.name, cause=error.strerror) from None
    except LabError as error:
        raise TEXTS.refusal("not used", "refusal", name=folder.name, reason=str(error).rstrip(".")) from None
    return manifest


class NewestCheckpoint(NamedTuple):
    """Newest valid checkpoint, and why newer ones are not used."""

    folder: Path | None
    manifest: Manifest | None
    passed_over: tuple[str, ...]


def newest(run_folder: Path) -> NewestCheckpoint:
    """Find the newest committed checkpoint of a run whose every byte is valid; both None where there is none."""
    passed_over: list[str] = []
    for _, folder in step_folders(run_folder / CHECKPOINTS):
        try:
            return NewestCheckpoint(folder, verify(folder), tuple(passed_over))
        except LabError as error:
            if is_committed(folder):  # one that was never finished is no loss
                passed_over.append(str(error))
    return NewestCheckpoint(None, None, tuple(passed_over))


def listing(run_folder: Path) -> list[Checkpoint]:
    """List the committed checkpoints of a run, newest first, without reading tensors; damaged ones are left out."""
    checkpoints = []
    for step, folder in step_folders(run_folder / CHECKPOINTS):
        try:
            manifest = read_manifest(folder)
        # One damaged checkpoint must not hide the others.
        except (LabError, OSError):
            continue
        checkpoints.append(Checkpoint(folder, step, manifest.bytes, manifest.created_utc, manifest.layout))
    return checkpoints
