"""Worker: what every rank runs from its first event to its last, whatever the engine and the launcher.

    python -m dlojz.running.worker RUN_FOLDER

Whatever happens, what was measured is already in the rank's event file, and the last event says how the rank ended. Of
a run that hung, the collectives that each rank called last tell who did not come. They are read from torch's flight
recorder, in its JSON and never its dump file, which is a pickle; reading them raises nothing, since it is done while a
rank fails.

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (`dump_json`, keys of an entry) and init.cpp
(`_dump_fr_trace_json` for gloo, `_dump_nccl_trace_json` for NCCL). The recorder is on where `TORCH_FR_BUFFER_SIZE` is
set, which every launcher does.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from dlojz.base.machine import StopRequest, cores_available, die_with_parent, is_out_of_memory, rank_limit_bytes
from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog, Status

KEPT = 32
"""Last calls kept of each group: a rank may be so many behind the others, and its missing call is still found."""
_BINDINGS = "torch._C._distributed_c10d"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

Calls = dict[str, list[list[Any]]]


def last_calls() -> Calls:
    """Read the last collectives of this rank, by the name of their group, each as `[number, operation, type, shape]`.

    The number counts the collectives of the group from 1: ranks that agree have the same ones. Sends and receives are
    left out. Empty where there was none, or torch has no recorder.
    """
    found: dict[str, dict[int, list[Any]]] = {}
    for name in _DUMPS:
        dump = getattr(sys.modules.get(_BINDINGS), name, None)
        try:
            told = json.loads(dump(includeCollectives=True, onlyActive=False)) if dump else {}
            for entry in told.get("entries") or ():
                if not entry["is_p2p"]:
                    group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
                    found.setdefault(group, {})[number] = [number, *_described(entry)]
        except Exception:  # an unknown format tells nothing, and must not hide why the rank failed
            continue
    return {group: [calls[number] for number in sorted(calls)[-KEPT:]] for group, calls in found.items()}


def _described(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Describe an entry by operation, type and shape: `all_reduce`, `Float`, `[10]`."""
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    types = ",".join(map(str, entry["input_dtypes"]))
    shapes = ",".join("[" + ",".join(map(str, size)) + "]" for size in entry["input_sizes"])
    return operation[:80], types[:80], shapes[:80]


def log_last_calls(events: EventLog) -> None:
    """Log the last collectives into this rank's events, where there are any."""
    with contextlib.suppress(OSError, ValueError):  # a full disk must not hide why the rank failed
        calls = last_calls()
        if calls:
            events.write("collectives", groups=calls)


STOPPED_IN_TIME = 75
"""Exit code of a rank that has kept a checkpoint before the time limit: the job may be sent again (EX_TEMPFAIL)."""


class Stopped(BaseException):
    """SIGTERM arrived: the launcher wants this rank to end."""


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped


def environment(world_size: int = 1) -> dict[str, str]:
    """Collect versions and machine for the record, with the memory limit of each of so many ranks."""
    found = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": str(cores_available()),
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS", ""),
        "memory_limit_bytes": str(rank_limit_bytes(world_size)),
    }
    for package in ("dlojz", "torch", "deepspeed", "timm", "numpy", "idr-torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def trainer_of(config: RunConfig) -> Callable[..., tuple[Status, str]]:
    """Return the function that trains a run: the lab's own loop, a library's program, or the user's script."""
    if config.script:
        from dlojz.libraries.watched_script import run_script

        return run_script
    if config.library == "none":
        from dlojz.train.loop import train

        return train
    from dlojz.libraries.watched_training import train_as_written

    return train_as_written


def _without_own_frames(error: BaseException) -> BaseException:
    """Leave the frames of the script and of its libraries in an error's traceback."""
    from dlojz.libraries.watched_script import without_own_frames

    return without_own_frames(error)


def _is_untrained(error: BaseException) -> bool:
    """Whether a script has ended without training anything."""
    from dlojz.libraries.watched_script import UntrainedError

    return isinstance(error, UntrainedError)


def main(folder: Path) -> int:
    """Train as RUN_FOLDER/config.json says; returns the exit code.

    Raises:
        SystemExit: with that code, for a script, whose exit handlers then run; with 2 if it has trained nothing.
    """
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
    scripted = untrained = False
    try:
        config = RunConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
        scripted = config.script is not None
        config.layout.check_processes(world_size)
        local_rank = int(idr_torch.local_rank)
        train = trainer_of(config)
        status, reason = train(config, folder, events, rank=rank, local_rank=local_rank, stop=stop)
    except Stopped:
        status, reason = "cancelled", f"rank {rank} was told to stop (SIGTERM)."
    except BaseException as error:
        status = "oom" if is_out_of_memory(error) else "failed"
        lines = str(error).strip().splitlines() or [""]
        reason = f"rank {rank}: {type(error).__name__}: {lines[0][:500]}"
        if scripted and _is_untrained(error):
            untrained, reason = True, f"rank {rank}: {error}"
            print(f"dlojz: {error}", file=sys.stderr)
        elif status == "failed" or scripted:
            import traceback

            traceback.print_exception(_without_own_frames(error) if scripted else error)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if status in ("failed", "cancelled"):
            log_last_calls(events)  # of a run that hung: who came to which collective, and who did not
        with contextlib.suppress(OSError):  # a full disk must not hide how it ended from the exit code
            events.write("end", status=status, reason=reason)
            events.close()
    code = {"completed": 0, "diverged": 0, "timeout": STOPPED_IN_TIME}.get(status, 1)
    if scripted:
        sys.exit(2 if untrained else code)
    return code


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank whose peers are gone must not wait for them in an exit handler
