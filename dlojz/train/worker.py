"""The worker: what every rank runs, whatever the engine and the launcher.

    python -m dlojz.train.worker RUN_FOLDER

Layer 3. Invariant: whatever happens, what was measured is already in the rank's event file, and the last event says
how the rank ended.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from dlojz.config import RunConfig
from dlojz.record import EventLog
from dlojz.train.host import rank_limit_bytes
from dlojz.train.last_calls import tell
from dlojz.train.lifeline import die_with_parent
from dlojz.train.stop import StopRequest

STOPPED_IN_TIME = 75
"""Exit code of a rank that has kept a checkpoint before the time limit: the job may be sent again (EX_TEMPFAIL)."""


class Stopped(BaseException):
    """SIGTERM arrived: the launcher wants this rank to end."""


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped


def environment(world_size: int = 1) -> dict[str, str]:
    """Versions and machine, as a record keeps them, with what each of so many ranks may take of its memory."""
    found = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS", ""),
        "memory_limit_bytes": str(rank_limit_bytes(world_size)),
    }
    for package in ("dlojz", "torch", "deepspeed", "timm", "numpy", "idr-torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was refused, on the host or on a device."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def main(folder: Path) -> int:
    """Train as RUN_FOLDER/config.json says; returns the exit code."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    stop = StopRequest()
    stop.listen()
    import warnings

    warnings.filterwarnings("ignore", module="idr_torch")
    import idr_torch

    rank, world_size = int(idr_torch.rank), int(idr_torch.size)
    events = EventLog(folder / "events" / f"rank-{rank}.jsonl")
    events.write(
        "start",
        rank=rank,
        pid=os.getpid(),
        world_size=world_size,
        environment=environment(world_size),
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    status, reason = "failed", ""
    try:
        config = RunConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
        config.layout.check_processes(world_size)
        from dlojz.train.loop import train

        status, reason = train(config, folder, events, rank=rank, local_rank=int(idr_torch.local_rank), stop=stop)
    except Stopped:
        status, reason = "cancelled", f"rank {rank} was told to stop (SIGTERM)."
    except BaseException as error:
        status = "oom" if out_of_memory(error) else "failed"
        lines = str(error).strip().splitlines() or [""]
        reason = f"rank {rank}: {type(error).__name__}: {lines[0][:500]}"
        if status == "failed":
            import traceback

            traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if status in ("failed", "cancelled"):
            tell(events)  # of a run that hung: who came to which collective, and who did not
        with contextlib.suppress(OSError):  # a full disk must not hide how it ended from the exit code
            events.write("end", status=status, reason=reason)
            events.close()
    return {"completed": 0, "diverged": 0, "timeout": STOPPED_IN_TIME}.get(status, 1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank whose peers are gone must not wait for them in an exit handler
