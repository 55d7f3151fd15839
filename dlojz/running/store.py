"""Store of the runs: claim a folder, list them, reopen one.

A run folder appears whole: it is filled under a hidden name, then renamed. Its name is unique, and every listing is
read from the folders. A run that goes on keeps its folder: what its former attempt has left is set aside in it, the
record last, so that it has ended until all is ready.

A job script that is written by hand runs `python -m dlojz.running.store model=coatnet_tiny dp=4 steps=20`, which prints
the path of the folder; a job that is requeued finds the folder that it began with.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
import unicodedata
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from dlojz.base.errors import LabError
from dlojz.base.fault_injection import faultpoint
from dlojz.base.files import write_atomic
from dlojz.base.language import Sentences
from dlojz.config.run_config import RunConfig
from dlojz.running.ending import Ending
from dlojz.running.folder import DEFAULT_WORKER, Job, Owner, read_job, read_owner, this_process
from dlojz.running.folder import JOB_FILE as JOB
from dlojz.running.state import (
    CANCEL,
    CONFIG,
    EVENTS,
    LAUNCHER_EVENTS,
    LOGS,
    RECORD,
    State,
    read_all_events,
    read_config,
    read_state,
    record_end,
)

if TYPE_CHECKING:
    from dlojz.train.checkpoint_files import CheckpointPolicy

phrase = Sentences(Path(__file__).parent / "data" / "runs.md")

REUSED = frozenset({"queued", "running", "completed", "diverged", "oom"})
REOPENED = frozenset({"timeout", "failed", "cancelled"})
"""States after which a run goes on, where it has a checkpoint."""
ATTEMPTS = "attempts"
_OF_AN_ATTEMPT = (CANCEL, "store", JOB, "job.sh", f"{EVENTS}/{LAUNCHER_EVENTS}", LOGS, RECORD)
"""Files of one attempt that the next one must not find, in the order in which they are set aside."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{12}-[0-9a-f]{4}")
_LOCK_S = 120


def runs_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all runs.

    It is the one given, else `$DLOJZ_RUNS`, else `runs/` of the checkout one is in, else `$WORK/dlojz-runs`, else
    `./runs`.

    Raises:
        LabError: if its name is no UTF-8, which torch's store cannot open, or holds a control character.
    """
    if root is not None:
        return _readable(Path(root).expanduser().absolute())
    if os.environ.get("DLOJZ_RUNS"):
        return _readable(Path(os.environ["DLOJZ_RUNS"]).expanduser().absolute())
    working_folder = _readable(Path.cwd())
    for folder in (working_folder, *working_folder.parents):
        if (folder / "pyproject.toml").is_file() and (folder / "dlojz").is_dir():
            return folder / "runs"
    return Path(os.environ["WORK"], "dlojz-runs").absolute() if os.environ.get("WORK") else working_folder / "runs"


def _readable(root: Path) -> Path:
    """Return the folder itself."""
    name = str(root)
    if any(unicodedata.category(sign) in ("Cc", "Cs") for sign in name):
        raise phrase.refused("folder without a readable name", name=name)
    return root


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of a run.

    Raises:
        LabError: if the name is illegal, or the folder is a symbolic link or outside the root.
    """
    if not _SAFE_NAME.fullmatch(run_id):
        raise phrase.refused("no name of a run", run_id=run_id[:100])
    folder = root / run_id
    if folder.is_symlink() or not folder.resolve().is_relative_to(root.resolve()):
        raise phrase.refused("symbolic link", run_id=run_id, root=root)
    return folder


def run_ids(root: Path, containing: str = "") -> list[str]:
    """List the names of run folders that contain a text, newest first; empty where the root does not exist.

    Raises:
        LabError: if the root exists and cannot be read.
    """
    try:
        names = [entry.name for entry in root.iterdir() if containing in entry.name and _looks_like_run(entry)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise phrase.refused("runs cannot be read", root=root, error=error) from None
    # Newest first: by the second in the name; within a second, by when config.json was written.
    return sorted(names, key=lambda name: (name[:15], _born_ns(root / name), name), reverse=True)


def _looks_like_run(entry: Path) -> bool:
    if _RUN_ID.fullmatch(entry.name):
        return True
    # Under another name it is a run if it holds the files of one.
    return bool(_SAFE_NAME.fullmatch(entry.name)) and ((entry / CONFIG).is_file() or (entry / RECORD).is_file())


def _born_ns(folder: Path) -> int:
    try:
        return (folder / CONFIG).stat().st_mtime_ns
    except OSError:
        return 0


def claim(
    config: RunConfig,
    root: Path,
    *,
    force_new: bool = False,
    worker_module: str = DEFAULT_WORKER,
    time_limit_s: float | None = None,
    policy: CheckpointPolicy | None = None,
) -> tuple[Path, bool]:
    """Claim the folder of the run of a configuration: an earlier one that can be used again, else a new one.

    Of several processes that ask for the same configuration at once, one makes the folder and the others find it. An
    earlier run that was cut off (timeout, failed, cancelled) and has a checkpoint is reopened, to go on from it.

    Args:
        policy: when the run keeps checkpoints; given, it replaces that of a run which goes on.

    Returns:
        the folder, and whether it is new or goes on (then the caller has to start it).

    Raises:
        LabError: if the root cannot be written, or the worker module or the time limit is illegal.
    """
    from dlojz.train.checkpoint_files import listing

    owner = this_process(worker_module, time_limit_s, datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Without a lock: a new folder has a name of its own in any case.
        if force_new:
            return _create(config, root, owner, policy), True
        locks = root / ".locks"
        locks.mkdir(exist_ok=True)
        # One lock per configuration: different ones do not wait for each other.
        with FileLock(locks / f"{config.hash}.lock", timeout=_LOCK_S):
            cut_off: Path | None = None
            for folder, state in runs_of(config, root, worker_module):
                if state in REUSED:
                    return folder, False
                if cut_off is None and state in REOPENED and listing(folder):
                    cut_off = folder
            if cut_off is not None:
                _reopen(cut_off, owner, policy)
                return cut_off, True
            return _create(config, root, owner, policy), True
    except Timeout:
        raise phrase.refused("lock held", root=root, lock_s=_LOCK_S) from None
    except OSError as error:
        problem = error.strerror or error
        raise phrase.refused("runs cannot be written", root=root, problem=problem) from None


def runs_of(config: RunConfig, root: Path, worker_module: str) -> Iterator[tuple[Path, State]]:
    """Find the runs of a configuration that can be read, and their states, newest first.

    Raises:
        LabError: if the root exists and cannot be read.
    """
    for run_id in run_ids(root, config.hash):
        folder = root / run_id
        owner = read_owner(folder)
        # A replay names another worker and is no measurement of this configuration.
        if owner is not None and owner.worker_module != worker_module:
            continue
        try:
            if not folder.is_symlink() and read_config(folder) == config:
                yield folder, read_state(folder)[0]
        except LabError:
            continue


def _reopen(folder: Path, owner: Owner, policy: CheckpointPolicy | None) -> None:
    """Reopen a run that has ended; a crash meanwhile leaves it ended, or queued, with nothing lost."""
    faultpoint("store.reopen:1")
    shelf = folder / ATTEMPTS
    shelf.mkdir(exist_ok=True)
    number = max((int(entry.name) for entry in shelf.iterdir() if entry.name.isdecimal()), default=0) + 1
    shelf = shelf / f"{number}"
    shelf.mkdir()
    if policy is not None:
        policy.write(folder)
    owner.write(folder)
    faultpoint("store.reopen:2")
    for name in _OF_AN_ATTEMPT:
        # LOGS has been moved away; the next attempt needs the folder before RECORD goes, which makes it queued.
        if name == RECORD:
            (folder / LOGS).mkdir(exist_ok=True)
            faultpoint("store.reopen:3")
        if os.path.lexists(folder / name):
            (folder / name).rename(shelf / Path(name).name)
    faultpoint("store.reopen:4")


def _create(config: RunConfig, root: Path, owner: Owner, policy: CheckpointPolicy | None) -> Path:
    creation_time = datetime.now(UTC)
    # Hidden: a name that begins with a dot is in no listing.
    draft = root / f".new-{uuid.uuid4().hex}"
    draft.mkdir()
    faultpoint("store.create:1")
    try:
        (draft / EVENTS).mkdir()
        (draft / LOGS).mkdir()
        owner.write(draft)
        write_atomic(draft / CONFIG, config.to_json())
        if policy is not None:
            policy.write(draft)
        faultpoint("store.create:2")
        while True:
            # Four hexadecimal digits tell runs of the same second and configuration apart.
            folder = root / f"{creation_time:%Y%m%d-%H%M%S}-{config.hash}-{secrets.token_hex(2)}"
            try:
                # A folder with files is never replaced: a name that was taken in the meantime is refused.
                draft.rename(folder)
                return folder
            except OSError:
                if not folder.is_dir():
                    raise
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def record_refusal(folder: Path, reason: str) -> None:
    """Record that a run never started, so that nobody waits for it."""
    with contextlib.suppress(OSError, LabError):
        record_end(folder, read_config(folder), read_all_events(folder), Ending("failed", reason), 0.0)


def folder_of_job(words: Sequence[str], root: Path) -> Path:
    """Return the folder of the run of this job, new unless the job has begun it before.

    Args:
        words: fields of `RunConfig` and `Layout`, each as NAME=VALUE.

    Raises:
        LabError: if a word or the configuration is not legal, or the root cannot be written.
    """
    from dlojz.runnable import check_runnable

    number = os.environ.get("SLURM_JOB_ID", "")
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        for run_id in run_ids(root):
            job = read_job(root / run_id)
            if job is not None and job.job_id == number:
                return root / run_id
    config = RunConfig.of(**dict(_field(word) for word in words))
    check_runnable(config)
    folder, _ = claim(config, root, force_new=True, worker_module=DEFAULT_WORKER)
    if number:
        submitted_utc = datetime.now(UTC).isoformat(timespec="seconds")
        Job(machine="", name=folder.name, job_id=number, submitted_utc=submitted_utc).write(folder)
    return folder


def _field(word: str) -> tuple[str, Any]:
    name, sign, value = word.partition("=")
    if not sign:
        raise LabError(f"{word[:100]!r} is no field: write NAME=VALUE, as in dp=4.")
    # `dp=4` is a number; `model=gpt_tiny` is no JSON and stays a text.
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


if __name__ == "__main__":
    try:
        print(folder_of_job(sys.argv[1:], runs_root()))
    except LabError as error:
        sys.exit(f"dlojz: {error}")
