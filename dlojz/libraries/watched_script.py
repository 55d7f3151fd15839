"""Run a script of the user's, unchanged, and measure its training from outside.

Nothing of the script waits for the measurement: the ranks' clocks are compared once, when the script has made its
process group, and no collective of the lab's follows. What a traceback shows are the script's frames and torch's.
"""

from __future__ import annotations

import mmap
import os
import runpy
import sys
import threading
from pathlib import Path
from types import TracebackType

import torch
from torch._dynamo import eval_frame

from dlojz.base.errors import LabError
from dlojz.base.files import CHECKOUT
from dlojz.base.language import say
from dlojz.base.machine import StopRequest, is_out_of_memory
from dlojz.config.run_config import RunConfig
from dlojz.libraries.training_watch import TrainingWatch, watching
from dlojz.results.record import EventLog, Status
from dlojz.train.probes import Probes

_OWN = (str(CHECKOUT / "dlojz") + os.sep, "<frozen runpy>")
"""Files whose frames are the lab's."""
UNTRAINED = "untrained"
"""Event of a rank whose script has made no step of an optimizer."""
_RESERVE_BYTES = 2**28
"""Address space, untouched and without memory behind it, that is left to the prediction where memory has run out."""
_UNCOMPILED = eval_frame.__file__
"""Where torch calls what it does not compile: the frame around a wrapper of the lab's."""


class UntrainedError(LabError):
    """A script has made no step of an optimizer."""


def without_own_frames(error: BaseException) -> BaseException:
    """Take the lab's frames out of an error's traceback, and out of those of its causes; returns the error."""
    link: BaseException | None = error
    known: set[int] = set()
    while link is not None and id(link) not in known:
        known.add(id(link))
        frames = []
        trace = link.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if not file.startswith(_OWN):
                frames.append(trace)
            elif frames and frames[-1].tb_frame.f_code.co_filename == _UNCOMPILED:
                frames.pop()
            trace = trace.tb_next
        shown: TracebackType | None = None
        for frame in reversed(frames):
            shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        link.__traceback__ = shown
        link = link.__cause__ or link.__context__
    return error


def line_of(path: str) -> int | None:
    """Return the line of a script that the main thread is in; None where it is not in the script."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename == path:
            return frame.f_lineno
        frame = frame.f_back
    return None


def no_step_in_time(name: str, first_step_s: float, saw: str, line: int | None) -> str:
    """Say that a script trains nothing, with what it was seen to do, and the line where it is."""
    at = say(en=f" in its line {line}", fr=f" à sa ligne {line}") if line else ""
    return say(
        en=f"{name} made no optimizer step within {first_step_s:g} s and was ended{at} ({saw}): if it only begins "
        "slowly, give it more time with --first-step-s.",
        fr=f"{name} n’a fait aucun pas d’optimiseur en {first_step_s:g} s et a été arrêté{at} ({saw}) : s’il est "
        "seulement lent à démarrer, donnez-lui plus de temps par --first-step-s.",
    )


def no_step_at_all(name: str, saw: str) -> str:
    """Say that a script has ended without training anything, with what it was seen to do."""
    return say(
        en=f"{name} ended before any optimizer made a step, so that nothing was measured ({saw}).",
        fr=f"{name} s’est terminé avant le premier pas d’un optimiseur : rien n’a donc été mesuré ({saw}).",
    )


def _exit_code(end: SystemExit) -> int:
    """The exit code of a `sys.exit`, whose text is printed as Python prints it."""
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return 1


def run_script(
    config: RunConfig, folder: Path, events: EventLog, *, rank: int, local_rank: int, stop: StopRequest
) -> tuple[Status, str]:
    """Run the script of a configuration on this rank and write its events.

    Returns the status and its reason.

    Raises:
        BaseException: any error of the script's.
        UntrainedError: if it has ended without a step of an optimizer.
    """
    del folder, stop  # a script keeps no checkpoint of the lab's
    script = config.script
    assert script is not None
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    probes = Probes(config, rank, device)
    watch = TrainingWatch(config, events, probes, device)

    def end() -> None:
        if watch.step == 0:
            sentence = no_step_in_time(script.name, script.first_step_s, watch.saw(), line_of(script.path))
            sys.stdout.flush()
            print(f"dlojz: {sentence}", file=sys.stderr, flush=True)
            events.write(UNTRAINED)
            events.write("end", status="failed", reason=f"rank {rank}: {sentence}")
            os._exit(2)

    deadline = threading.Timer(script.first_step_s, end)
    deadline.daemon = True
    if script.folder:
        os.chdir(script.folder)
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, str(Path(script.path).parent))
    code = 0
    reserve = mmap.mmap(-1, _RESERVE_BYTES)
    probes.start()
    deadline.start()
    try:
        with watching(watch, probes):
            runpy.run_path(script.path, run_name="__main__")
    except SystemExit as left:
        code = _exit_code(left)
    except BaseException as error:
        if is_out_of_memory(error):
            reserve.close()
            watch.predict(0)
        raise
    finally:
        deadline.cancel()
        watch.report()
    if code:
        return "failed", f"rank {rank}: {script.name} left with exit code {code} after step {watch.step}."
    if watch.step == 0:
        events.write(UNTRAINED)
        raise UntrainedError(no_step_at_all(script.name, watch.saw()))
    return watch.ended
