"""Run a script of the user's, unchanged, and measure its training from outside.

Nothing of the script waits for the measurement: the ranks' clocks are compared once, when the script has made its
process group, and no collective of the lab's follows. What a traceback shows are the script's frames and torch's.

Processes that the script starts are watched too: those of `multiprocessing` by a wrapper of their `run`, programs by
the hook that their environment names. Each that trains claims a rank: that of its process group, or the next that is
free.

Source: CPython 3.11, `multiprocessing/process.py`, `_bootstrap` (calls `run`), `popen_fork.py` (ends by `os._exit`);
https://docs.python.org/3/library/signal.html (`set_wakeup_fd`: tells of a signal beside the handler of the script).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import io
import mmap
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import eval_frame

from dlojz.base.files import CHECKOUT
from dlojz.base.language import Sentences, say
from dlojz.base.machine import is_out_of_memory
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig, Script
from dlojz.libraries.training_watch import TrainingWatch
from dlojz.libraries.watched_training import watching
from dlojz.processes.hang_diagnosis import StallWatch
from dlojz.processes.script_environment import ProcessIdentity, restore_path
from dlojz.results.record import CHILDREN_EVENTS, UNTRAINED, EventLog, Status, append_event
from dlojz.train.loop import write_footprint
from dlojz.train.probes import Probes

TEXTS = Sentences(Path(__file__).parent / "data" / "watched_script.md")

_OWN = (str(CHECKOUT / "dlojz") + os.sep, "<frozen runpy>", "<frozen importlib")
"""Files whose frames are the lab's."""
_NO_TRAINING = ("torch.utils.data", "multiprocessing.managers", "multiprocessing.resource", "torch._inductor")
"""Modules whose functions run in processes that train nothing."""
_WRITTEN_EVERY_S = 1.0
_MOST_PROCESSES = 1024
_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_RESERVE_BYTES = 2**28
"""Address space, untouched and without memory behind it, that is left to the prediction where memory has run out."""
_UNCOMPILED = eval_frame.__file__
"""Where torch calls what it does not compile: the frame around a wrapper of the lab's."""


def without_own_frames(error: BaseException) -> BaseException:
    """Take the lab's frames out of an error's traceback, and out of those of its causes; returns the error."""
    link: BaseException | None = error
    visited: set[int] = set()
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        frames = []
        trace = link.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if not file.startswith(_OWN):
                frames.append(trace)
            # torch's frame around a wrapper of the lab's goes with it.
            elif frames and frames[-1].tb_frame.f_code.co_filename == _UNCOMPILED:
                frames.pop()
            trace = trace.tb_next
        traceback: TracebackType | None = None
        # From the innermost frame outward, as each traceback links to the next inner one.
        for frame in reversed(frames):
            traceback = TracebackType(traceback, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        link.__traceback__ = traceback
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


def _exit_code(end: SystemExit) -> int:
    """The exit code of a `sys.exit`, whose text is printed as Python prints it."""
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return 1


class Interrupts:
    """Signals that ask this process to stop, noted beside whatever handler the script has, within this context."""

    def __enter__(self) -> Interrupts:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Python writes the number of every signal into this pipe, whatever handler the script has.
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # in a thread that has forked
            signal.set_wakeup_fd(self._before)

    def came(self) -> bool:
        """Return whether such a signal has come."""
        with contextlib.suppress(OSError):
            return any(number in _INTERRUPTS for number in os.read(self._read, 4096))
        return False


def _rank_of_environment() -> int:
    """Read the rank that a launcher has given to this process; 0 without one."""
    # torchrun's name, then Slurm's.
    words = [os.environ.get(name, "") for name in ("RANK", "SLURM_PROCID")]
    return next((int(word) for word in words if word.isdecimal()), 0)


class ChildEvents:
    """Events of a process that was not launched by the lab: kept until its first step, then in the file of its rank.

    Args:
        become: called with the rank that was claimed and the number of processes of its group.
    """

    def __init__(self, folder: Path, become: Callable[[int, int], None]) -> None:
        self._folder, self._become = folder, become
        self._kept: list[tuple[str, dict[str, Any]]] = []
        # The first step claims a rank, or a collective in which it hangs: most processes that a script starts train
        # nothing.
        self._log: EventLog | None = None
        self._start_s = time.monotonic()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if self._log is None and (event == "step" or (event == "stalled" and fields["groups"])):
            self._log = EventLog(self._claimed())
            self._log.write("child_start", pid=os.getpid())
            for name, content in self._kept:
                self._log.write(name, **content)
        if self._log is None:
            if event != "stalled":  # it may be any process that the script has started
                self._kept.append((event, fields))
        else:
            self._log.write(event, **fields)

    @property
    def step_ends_s(self) -> Sequence[float]:
        """Times of the start and of the last ends of steps, on the monotonic clock."""
        return [self._start_s] if self._log is None else self._log.step_ends_s

    @property
    def is_claimed(self) -> bool:
        """Whether a rank is claimed, and the events are in its file."""
        return self._log is not None

    def close(self) -> None:
        """Flush to the disk and close, where anything was written."""
        if self._log is not None:
            self._log.close()

    def _claimed(self) -> Path:
        """Claim the file of this process's rank, or of the next that is free; a process started again takes its own."""
        joined = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if joined else _rank_of_environment()
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
        for number in range(rank, rank + _MOST_PROCESSES):
            path = self._folder / f"child-{number}.jsonl"
            # O_EXCL makes the claim atomic; a process that was started again takes its file as it is.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | (0 if is_restart else os.O_EXCL), 0o644))
                break
        self._become(number, dist.get_world_size() if joined else 1)
        return path


class ScriptWatch(TrainingWatch):
    """Watch of a script, in whatever process of it that trains."""

    def __init__(
        self, config: RunConfig, events: EventLog | ChildEvents, probes: Probes, device: torch.device, launched: bool
    ) -> None:
        super().__init__(config, events, probes, device)  # type: ignore[arg-type]
        self._is_launched = launched
        self._written_s = time.monotonic()
        self.starts_late = False
        """Whether nothing is traced before there is a process group or an optimizer: most children train nothing."""

    def become(self, rank: int, world_size: int) -> None:
        """Take a rank among so many processes, which the script has started itself."""
        self._probes.become(rank)
        self.config = self.config.model_copy(update={"layout": Layout(dp=world_size)})

    def meet(self) -> None:
        """Align the clocks of processes that were launched together; others are not waited for."""
        if not dist.is_initialized():
            return
        self._start_late()
        if self._is_launched and dist.get_world_size() == self.config.layout.world_size:
            super().meet()
        elif self.step == 0:
            self.become(dist.get_rank(), dist.get_world_size())

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer of the script's."""
        self._start_late()
        super().made(optimizer)

    def _start_late(self) -> None:
        if self.starts_late:
            self.starts_late = False
            self._probes.start()

    def _end_step(self, *boundary: Any) -> None:
        """End a step, and write the measurements so far: the process may be killed at any moment."""
        super()._end_step(*boundary)
        if time.monotonic() - self._written_s >= _WRITTEN_EVERY_S:
            self._written_s = time.monotonic()
            write_footprint(self._events, self._probes, self.parameters)

    def saw(self) -> str:
        """Say what the script was seen to do, where no optimizer made a step."""
        counts = {
            "optimizers": self.backward_calls and self._made,
            "backward": self.backward_calls,
            "forward": self._forwards,
            "processes": self.processes,
            "no gradients": self.untrained_calls,
        }
        key = next((key for key, count in counts.items() if count), "nothing")
        return TEXTS.say("seen", key, backward=self.backward_calls, count=counts.get(key))


_PRESENT: list[ScriptProcess] = []
"""The watch of this process, while its script runs."""


class ScriptProcess:
    """Watch one process of a script within this context, and the processes that it starts.

    Args:
        events: of its rank; of a process that the script has started, by default those of the rank that it claims.
        is_supervised: whether a launcher of the lab's tells the user what came of the run.
    """

    def __init__(
        self, config: RunConfig, identity: ProcessIdentity, events: EventLog | None = None, is_supervised: bool = True
    ) -> None:
        assert config.script is not None
        self.is_supervised = is_supervised
        self.script, self._folder = config.script, Path(identity.folder)
        self.is_child = events is None
        self.events = events or ChildEvents(self._folder / "events", self._become)
        on_gpu = config.device != "cpu" and torch.cuda.is_available()
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        device = torch.device("cuda", int(local_rank)) if on_gpu else torch.device("cpu")
        rank = _rank_of_environment() if identity.rank is None else identity.rank
        self.probes = Probes(config, rank, device)
        self._origin_s = identity.origin_s or time.perf_counter()
        if identity.origin_s is not None:
            self.probes.clock.align(identity.origin_s)
        self.watch = ScriptWatch(config, self.events, self.probes, device, not self.is_child)
        self._stalls = StallWatch(self.events)
        self._interrupts = Interrupts()
        self._undo = contextlib.ExitStack()
        self._has_ended = False

    def _become(self, rank: int, world_size: int) -> None:
        self.watch.become(rank, world_size)

    @property
    def _child_identity(self) -> ProcessIdentity:
        return ProcessIdentity(str(self._folder), origin_s=self._origin_s)

    def __enter__(self) -> ScriptProcess:
        self._undo.enter_context(self._interrupts)
        if not self.watch.starts_late:
            self.probes.start()
        undo = self._undo.enter_context(watching(self.watch, self.probes))
        undo.put(BaseProcess, "start", self._starting(BaseProcess.start))
        undo.put(subprocess.Popen, "__init__", self._starting_program(subprocess.Popen.__init__))
        undo.put(os, "system", self._calling(os.system))
        undo.put(os, "_exit", self._exiting(os._exit))
        # `execv` becomes `execve`, whose environment can name the hook.
        undo.put(os, "execv", self._becoming(os.execve))
        undo.put(os, "execve", self._becoming(os.execve))
        _PRESENT[:] = [self]
        self._stalls.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stalls.close()
        _PRESENT.clear()
        self._undo.close()

    def abandon(self) -> None:
        """Stop watching, in a process that was forked from this one, and write nothing."""
        _PRESENT.clear()
        self._has_ended = True
        for owner in (self.watch, self):
            vars(owner)["_events" if owner is self.watch else "events"] = _Unwritten()
        with contextlib.suppress(Exception):
            self.probes.close()
            self._undo.close()
        signal.set_wakeup_fd(-1)

    def _starting(self, start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
        """Wrap the start of a process of `multiprocessing`; one that loads data is left alone."""

        @functools.wraps(start)
        def watched(process: BaseProcess) -> None:
            target = getattr(getattr(process, "_target", None), "__module__", None) or ""
            # The wrapper goes with the process, forked or pickled; here it is taken off again.
            if not target.startswith(_NO_TRAINING):
                vars(process)["run"] = ChildRun(process, self._child_identity)
            try:
                start(process)
            finally:
                vars(process).pop("run", None)

        return watched

    def _starting_program(self, start: Callable[..., None]) -> Callable[..., None]:
        """Wrap the start of a program, whose environment then names the hook."""
        signature = inspect.signature(start)

        @functools.wraps(start)
        def watched(*args: Any, **kwargs: Any) -> None:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return start(*args, **kwargs)
            env = bound.arguments.get("env")
            environment = dict(os.environ if env is None else env)
            # An environment with bytes is left as it is, and its program is not watched.
            if all(isinstance(word, str) for item in environment.items() for word in item):
                bound.arguments["env"] = self._child_identity.put_with_hook(environment)
            return start(*bound.args, **bound.kwargs)

        return watched

    def _calling(self, call: Callable[[Any], int]) -> Callable[[Any], int]:
        """Wrap `os.system`, whose command takes the environment of this process."""

        @functools.wraps(call)
        def watched(words: Any) -> int:
            before = dict(os.environ)
            os.environ.update(self._child_identity.put_with_hook(before))
            try:
                return call(words)
            finally:
                ProcessIdentity.taken_from(os.environ)  # without the hook again

        return watched

    def _exiting(self, leave: Callable[[int], Any]) -> Callable[[int], Any]:
        """Wrap `os._exit`, after which nothing more is written."""

        @functools.wraps(leave)
        def watched(status: int) -> Any:
            with contextlib.suppress(Exception):
                self.end(SystemExit(status))
            return leave(status)

        return watched

    def _becoming(self, become: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what replaces this process by another program, which is watched if it runs a script."""

        @functools.wraps(become)
        def watched(path: Any, arguments: Any, environment: Any = None) -> Any:
            with contextlib.suppress(Exception):
                self.watch.report()
            # `execv` gives no environment: this process's own.
            plain = dict(os.environ if environment is None else environment)
            if all(isinstance(word, str) for item in plain.items() for word in item):
                plain = self._child_identity.put_with_hook(plain)
            return become(path, arguments, plain)

        return watched

    def outcome(self, error: BaseException | None) -> tuple[Status, str, int]:
        """Tell status, reason and exit code from how the script has ended: by an error, or None."""
        rank, after = self.probes.rank, f"after step {self.watch.step}"
        code = _exit_code(error) if isinstance(error, SystemExit) else int(error is not None)
        if isinstance(error, KeyboardInterrupt) or self._interrupts.came():
            # 128 and the signal's number, as a shell reports it.
            code = code if not isinstance(error, KeyboardInterrupt) else 128 + signal.SIGINT
            return "cancelled", f"the run was interrupted {after}; what had been measured is kept.", code
        # A child that leaves by `sys.exit` while it handles an error failed by that error.
        cause = error.__context__ if isinstance(error, SystemExit) and self.is_child else error
        if isinstance(cause, Exception):
            lines = str(cause).strip().splitlines() or [""]
            # torch's spawn puts the whole traceback of its child into the message, whose last line names the error.
            line = lines[-1 if type(cause).__name__ == "ProcessRaisedException" else 0]
            status: Status = "oom" if is_out_of_memory(cause) else "failed"
            reason = f"rank {rank}: {type(cause).__name__}: {line[:500]}{self._way_out(line)}"
            return (status if code else "completed"), reason, code
        if code:
            return "failed", f"rank {rank}: {self.script.name} left with exit code {code} {after}.", code
        return *self.watch.ended, 0

    def _way_out(self, error: str) -> str:
        """Say what to do where a script expects a launcher, and was started as Python starts it."""
        if "environment variable RANK expected" not in error or self.script.launched:
            return ""
        return say(
            en=" (it expects a launcher, as `python` alone is none: start it with --nproc, also with --nproc 1)",
            fr=" (il attend un lanceur, ce que `python` seul n’est pas : lancez-le avec --nproc, même --nproc 1)",
        )

    def end(self, error: BaseException | None) -> int:
        """Write all measurements, and how the script has ended; returns its exit code."""
        status, reason, code = self.outcome(error)
        if self._has_ended:
            return code
        self._has_ended = True
        with contextlib.suppress(OSError):  # a full disk must not hide how the script ended
            self.watch.report()
            if not self.is_child and not code and self.watch.saw_nothing and not self.children_train():
                sentence = TEXTS.say("no step", "at all", name=self.script.name, saw=self.watch.saw())
                reason = f"rank {self.probes.rank}: {sentence}"
                self.events.write(UNTRAINED, reason=reason, shown=not self.is_supervised)
                if not self.is_supervised and self.probes.rank == 0:
                    print(f"dlojz: {sentence}", file=sys.stderr, flush=True)
            if isinstance(self.events, ChildEvents) and not self.events.is_claimed:
                # It has trained nothing; if it failed, it is still what the process that started it will report.
                append_event(self._folder / "events" / CHILDREN_EVENTS, "child_end", status=status, reason=reason)
            self.events.write("child_end" if self.is_child else "end", status=status, reason=reason)
            self.events.close()
        return code

    def children_train(self) -> bool:
        """Return whether a process that a script of this run has started makes steps."""
        return any((self._folder / "events").glob("child-*.jsonl"))


class _Unwritten:
    """Events of a forked process, which are its parent's to write."""

    def write(self, event: str, **fields: Any) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


def _leave_parent() -> None:
    """Stop the watch that a forked process has inherited: it belongs to its parent."""
    for process in list(_PRESENT):
        process.abandon()


os.register_at_fork(after_in_child=_leave_parent)


class ChildRun:
    """The `run` of a process that a script starts with `multiprocessing`, watched; it is sent to the process."""

    def __init__(self, process: BaseProcess, identity: ProcessIdentity) -> None:
        self._process, self._identity = process, identity

    def __call__(self) -> None:
        """Run what the process was made for."""
        # This object is the instance's `run`: without it, the class's own runs.
        vars(self._process).pop("run", None)
        config = RunConfig.from_json((Path(self._identity.folder) / "config.json").read_text(encoding="utf-8"))
        watched, error = ScriptProcess(config, self._identity), None
        watched.watch.starts_late = True
        try:
            with watched:
                self._process.run()
        except BaseException as raised:
            error = without_own_frames(raised)
            raise
        finally:
            watched.end(error)


class _ScriptLoader(SourceFileLoader):
    """Loader of a script, as Python runs one: compiled anew, and never written down compiled."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the script."""
        del fullname
        with io.open_code(self.path) as file:
            return self.source_to_code(file.read(), self.path)


def _run(script: Script) -> None:
    """Run a script as Python does: a file by its path, a module by its name."""
    import_path = str(Path.cwd()) if script.module else str(Path(script.path).parent)
    if Path(script.path).is_dir():
        import_path = script.path
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = import_path  # which was that of `python -m dlojz.watch`
    else:
        sys.path.insert(0, import_path)
    sys.argv = [script.written or script.path, *script.arguments]
    if script.module:
        runpy.run_module(script.module, run_name="__main__", alter_sys=True)
    elif Path(script.path).is_dir():
        runpy.run_path(script.path, run_name="__main__")
    else:
        # Not `runpy.run_path`, whose `__main__` is gone before the exit handlers run.
        main = ModuleType("__main__")
        loader = _ScriptLoader("__main__", script.path)
        vars(main).update(__file__=script.path, __cached__=None, __loader__=loader, __builtins__=builtins)
        vars(main)["__annotations__"] = {}
        sys.modules["__main__"] = main
        loader.exec_module(main)


def _observing(script: Script, folder: Path, rank: int) -> contextlib.AbstractContextManager[None]:
    if script.observation is None:
        return contextlib.nullcontext()
    from dlojz.libraries.scripts.rank_observer import observed

    return observed(script.observation, folder, rank)


def run_script(
    config: RunConfig,
    identity: ProcessIdentity,
    events: EventLog | None,
    is_supervised: bool,
    on_failure: Callable[[], object] = lambda: None,
) -> int:
    """Run the script of a configuration in this process, and write its events; returns its exit code.

    Args:
        events: of its rank, which its start is written to; None of a process that claims a rank when it trains.
        is_supervised: as `ScriptProcess` takes it.
        on_failure: called before the end of a script that failed is written.
    """
    script = config.script
    assert script is not None
    process = ScriptProcess(config, identity, events, is_supervised)
    watch = process.watch

    def end() -> None:
        if watch.saw_nothing and not process.is_child and not process.children_train():
            line = line_of(script.path)
            values = {"name": script.name, "first_step_s": script.first_step_s, "saw": watch.saw()}
            sentence = TEXTS.say("no step", "in time at a line" if line else "in time", line=line, **values)
            sys.stdout.flush()
            print(f"dlojz: {sentence}", file=sys.stderr, flush=True)
            process.events.write(UNTRAINED, reason=f"rank {process.probes.rank}: {sentence}", shown=True)
            process.events.write("end", status="failed", reason=f"rank {process.probes.rank}: {sentence}")
            leave(2)

    leave = os._exit
    deadline = threading.Timer(script.first_step_s, end)
    deadline.daemon = True
    if script.folder:
        os.chdir(script.folder)
    restore_path()
    reserve = mmap.mmap(-1, _RESERVE_BYTES)
    error: BaseException | None = None
    deadline.start()
    try:
        with process, _observing(script, Path(identity.folder), process.probes.rank):
            _run(script)
    except BaseException as raised:
        error = raised
        # The reserve is given back before the prediction runs.
        if is_out_of_memory(raised):
            reserve.close()
            watch.predict(0)
    deadline.cancel()
    if error is not None and not isinstance(error, SystemExit):
        without_own_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        on_failure()
    return process.end(error)
