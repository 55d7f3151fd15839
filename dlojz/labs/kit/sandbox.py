"""Sandbox: run a student's function in a child of the kernel, with limits; load DeepSpeed without its messages.

Whatever the function does (loop for ever, exit, fill the memory, flood the output), the kernel gets an answer within
`WALL_S` seconds (longer on a loaded machine: `dlojz.base.machine`) and stays usable. It is a guard against accidents,
not against malice.

A function written in a notebook cannot be pickled, so the child is a fork: it has the function already.
"""

import builtins
import faulthandler
import gc
import json
import os
import selectors
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import psutil

from dlojz.base.machine import adopt_orphans, patience
from dlojz.processes.forks import fork, hash_of_process
from dlojz.running.supervisor import kill_descendants

WALL_S = 10.0
MEMORY_BYTES = 2 * 2**30  # on top of what the kernel has mapped already
OUTPUT_BYTES = 64 * 2**10
FILE_BYTES = 64 * 2**20
MORE_PROCESSES = 64
"""Processes and threads that an answer may start, of a user who is not root, whom no such limit holds."""


@dataclass(frozen=True)
class SandboxOutcome:
    """How the child ended.

    Args:
        end: `answered`, `too_long` (beyond `WALL_S`), `flood` (printed beyond `OUTPUT_BYTES`), or
            `died` without answer.
        answer: What the job returned, as JSON data; None unless `answered`.
        printed: What it printed, cut at `OUTPUT_BYTES`.
        exit_code: Of the child; negative for the signal that ended it.
        limit_s: Seconds it was given.
    """

    end: Literal["answered", "too_long", "flood", "died"]
    answer: Any = None
    printed: str = ""
    exit_code: int = 0
    limit_s: float = WALL_S


def run_limited(job: Callable[[], Any], *, wall_s: float | None = None) -> SandboxOutcome:
    """Run `job` in a forked child and bring back its JSON answer.

    Args:
        job: Called without arguments in the child; must return JSON data.
        wall_s: Seconds after which the child is ended, with all it has started; by default `WALL_S`, on a loaded
            machine as many times more as there is work per core.
    """
    limit_s = WALL_S * patience() if wall_s is None else wall_s
    answer_read, answer_write = os.pipe()
    print_read, print_write = os.pipe()

    def child() -> NoReturn:
        os.close(answer_read)
        os.close(print_read)
        _child(job, answer_write, print_write, cpu_s=int(limit_s) + 1)

    _end_history_thread()
    pid = fork(child, reset=(signal.SIGINT, signal.SIGTERM))
    os.close(answer_write)
    os.close(print_write)
    end: Literal["too_long", "flood"] | None = "too_long"
    try:
        end, texts = _listen({answer_read: 2**20, print_read: OUTPUT_BYTES}, time.monotonic() + limit_s)
    finally:
        # Nothing that the child started outlives the check: it adopts those that leave its session, starts none while
        # it is stopped, and has ended them itself where it came to its end.
        if end is not None:
            with suppress(ProcessLookupError, psutil.Error):
                os.kill(pid, signal.SIGSTOP)
                kill_descendants(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(answer_read)
        os.close(print_read)
    printed = texts[print_read].decode("utf-8", "replace")
    if end == "too_long":
        return SandboxOutcome("too_long", printed=printed, limit_s=limit_s)
    if end is not None:
        return SandboxOutcome("flood", printed=printed)
    try:
        return SandboxOutcome("answered", json.loads(texts[answer_read]), printed)
    except ValueError:
        return SandboxOutcome("died", printed=printed, exit_code=os.waitstatus_to_exitcode(status))


def _end_history_thread() -> None:
    """End IPython's history thread, which it starts anew when needed.

    IPython does so itself before a fork, but where the thread has just looked whether to stop it would wait for ever.
    """
    for thread in threading.enumerate():
        if thread.name == "IPythonHistorySavingThread":
            thread._stop_now = True  # type: ignore[attr-defined]
            deadline_s = time.monotonic() + 1.0
            while thread.is_alive() and time.monotonic() < deadline_s:
                thread.save_flag.set()  # type: ignore[attr-defined]
                thread.join(0.02)


def _listen(limits: dict[int, int], deadline: float) -> tuple[Literal["too_long", "flood"] | None, dict[int, bytes]]:
    """Read the pipes until all are closed, one exceeds its limit, or the time is up."""
    texts = dict.fromkeys(limits, b"")
    with selectors.DefaultSelector() as selector:
        for descriptor in limits:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return "too_long", texts
            for key, _ in selector.select(left_s):
                chunk = os.read(key.fd, 2**16)
                if not chunk:
                    selector.unregister(key.fd)
                texts[key.fd] += chunk
                if len(texts[key.fd]) > limits[key.fd]:
                    texts[key.fd] = texts[key.fd][: limits[key.fd]]
                    return "flood", texts
    return None, texts


def _child(job: Callable[[], Any], answer_fd: int, print_fd: int, *, cpu_s: int) -> NoReturn:
    """The child's whole life; it never returns into the kernel's code."""
    code = 1
    try:
        # What the kernel has thrown away is the kernel's to collect: closing one of its sockets here, in a process
        # without its threads, could take a wake-up away from it.
        gc.freeze()
        faulthandler.disable()  # it would write to the kernel's own stderr
        os.setsid()
        adopt_orphans()
        _separate_streams(print_fd)
        _limit(cpu_s)
        answer = json.dumps(job()).encode()
        sys.stdout.flush()
        while answer:
            answer = answer[os.write(answer_fd, answer) :]
        code = 0
    finally:
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # which raises where there is no child
            kill_descendants()
        os._exit(code)


def _separate_streams(print_fd: int) -> None:
    """Let nothing of the child reach the notebook's own streams, nor wait for its keyboard."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(print_fd, 1)
    os.dup2(print_fd, 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115

    def no_keyboard(prompt: object = "") -> str:
        raise EOFError("input() has no keyboard in a check")

    builtins.input = no_keyboard


def _threads_of_user() -> int:
    """Count the threads of all processes of this user, which the system's limit counts too."""
    user_id, thread_count = os.getuid(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user_id:
                thread_count += sum(1 for _ in (folder / "task").iterdir())
    return thread_count


def _limit(cpu_s: int) -> None:
    with suppress(ModuleNotFoundError):  # a system without limits: those of seconds and output are the parent's
        _limit_by_system(cpu_s)
    if "torch" in sys.modules:
        # OpenMP's threads did not come along with the fork: a parallel region would wait for them for ever.
        sys.modules["torch"].set_num_threads(1)


def _limit_by_system(cpu_s: int) -> None:
    import resource

    limits = {resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0}
    statm = Path("/proc/self/statm")
    if statm.is_file():  # elsewhere, as on macOS, what is in use is not known, so that no limit can be added to it
        mapped_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        limits |= {
            resource.RLIMIT_AS: mapped_bytes + MEMORY_BYTES,
            resource.RLIMIT_NPROC: _threads_of_user() + MORE_PROCESSES,
        }
    for name, limit in limits.items():
        hard = resource.getrlimit(name)[1]
        resource.setrlimit(name, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def load_deepspeed() -> Any:
    """Load DeepSpeed on a rank of a notebook, which has a process group and computes on CPUs.

    It looks for a compiler and for libraries of the system while it is imported, and says so: that is not shown.
    """
    import torch.distributed as dist

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # DeepSpeed insists on it, whatever the launcher
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, at two collectives that DeepSpeed calls
    with silenced():
        import deepspeed

        # An inference-only shared-memory operator that DeepSpeed would compile for 40 s at its first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def silenced() -> Iterator[None]:
    """Discard what this process, and those it starts, write to the two standard streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved_streams = [os.dup(number) for number in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nothing, number)
        yield
    finally:
        for number, before in zip((1, 2), saved_streams, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nothing)


@contextmanager
def hashes_of_another_process() -> Iterator[None]:
    """Let `hash` give, for what a text or bytes are in, what a process with another PYTHONHASHSEED might."""
    builtin_hash, builtins.hash = builtins.hash, hash_of_process("another")
    try:
        yield
    finally:
        builtins.hash = builtin_hash
