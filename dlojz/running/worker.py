"""Worker: what every rank runs from its first event to its last, whatever the engine and the launcher.

    python -m dlojz.running.worker RUN_FOLDER

Whatever happens, what was measured is already in the rank's event file, and the last event says how the rank ended. Of
a run that hung, the collectives that each rank called last tell who did not come (`dlojz.processes.hang_diagnosis`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dlojz.base.machine import PARENT_VARIABLE, StopRequest, die_with_parent, is_out_of_memory
from dlojz.config.run_config import RunConfig, Script
from dlojz.processes.hang_diagnosis import StallWatch, last_calls
from dlojz.processes.script_environment import OF_RANKS, ProcessIdentity
from dlojz.results.record import EventLog, Status, start_of


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


def trainer_of(config: RunConfig) -> Callable[..., tuple[Status, str]]:
    """Return the function that trains a run: the lab's own loop, or a library's program."""
    if config.library == "none":
        from dlojz.train.loop import train

        return train
    from dlojz.libraries.watched_training import train_as_written

    return train_as_written


def script_main(folder: Path, identity: ProcessIdentity, script: Script | None = None) -> NoReturn:
    """Run a process of the user's script, in the environment that it would have without dlojz.

    Args:
        script: what this process runs, where a launcher or the script itself has started it.

    Raises:
        SystemExit: with the script's exit code, so that exit handlers run.
    """
    is_supervised = os.environ.pop(PARENT_VARIABLE, None) is not None
    if is_supervised:
        faulthandler.enable()
    config = RunConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
    if script is not None:
        config = config.model_copy(update={"script": script})
    events = None
    if identity.rank is not None:
        events = EventLog(folder / "events" / f"rank-{identity.rank}.jsonl")
        events.write("start", pid=os.getpid(), **start_of(identity.rank, identity.world_size))
    atexit.register(_die_interrupted)  # before the script's, so that it is called after them
    from dlojz.libraries.watched_script import run_script

    on_failure = partial(log_last_calls, events) if events else lambda: None
    code = run_script(config, identity, events, is_supervised, on_failure)
    # Exit handlers are still to run; the last of them, `_die_interrupted`, ends the process.
    if code == _INTERRUPTED:
        _interrupted.append(code)
    sys.exit(code)


_INTERRUPTED = 128 + signal.SIGINT
_interrupted: list[int] = []


def _die_interrupted() -> None:
    """End by SIGINT, as Python ends after a KeyboardInterrupt that nobody has caught."""
    if _interrupted:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _identity_of(folder: Path) -> ProcessIdentity | None:
    """Return who this process of a script is: as its launcher says, or as a scheduler's job; None of a lab's run."""
    if (identity := ProcessIdentity.taken_from(os.environ)) is not None:
        return identity
    script = RunConfig.from_json((folder / "config.json").read_text(encoding="utf-8")).script
    if script is None:
        return None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # As `python train.py` sees it, which has no variables of a rank.
    if not script.launched:
        for name in OF_RANKS:
            os.environ.pop(name, None)
    return ProcessIdentity(str(folder), rank, world_size)


def main(folder: Path) -> int:
    """Train as RUN_FOLDER/config.json says; returns the exit code.

    Raises:
        SystemExit: with that code, for a script, whose exit handlers then run.
    """
    die_with_parent()
    if (identity := _identity_of(folder)) is not None:
        script_main(folder, identity)
    signal.signal(signal.SIGTERM, _stop)
    stop = StopRequest()
    stop.listen()
    import warnings

    warnings.filterwarnings("ignore", module="idr_torch")
    import idr_torch

    rank, world_size = int(idr_torch.rank), int(idr_torch.size)
    events = EventLog(folder / "events" / f"rank-{rank}.jsonl")
    events.write("start", pid=os.getpid(), **start_of(rank, world_size))
    status, reason = "failed", ""
    stalls = StallWatch(events)
    stalls.start()
    try:
        config = RunConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
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
        # A lack of memory is explained by its message; a failure needs its traceback in the log.
        if status == "failed":
            import traceback

            traceback.print_exception(error)
    finally:
        # Neither a second SIGTERM nor the warning before the time limit may cut the last events short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        stalls.close()
        if status in ("failed", "cancelled"):
            log_last_calls(events)  # of a run that hung: who came to which collective, and who did not
        with contextlib.suppress(OSError):  # a full disk must not hide how it ended from the exit code
            events.write("end", status=status, reason=reason)
            events.close()
    return {"completed": 0, "diverged": 0, "timeout": STOPPED_IN_TIME}.get(status, 1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank whose peers are gone must not wait for them in an exit handler
