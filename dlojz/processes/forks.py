"""Fork processes: `fork` for one child, and `spmd`, which runs one function on several ranks.

The child never returns into the parent's code, and no signal is lost between the fork and the child's own handlers.

The ranks of `spmd` are processes joined by a gloo group and guarded. They start in a fraction of a second because they
have the memory of the process that forks them, functions of a notebook included; nothing outlives the call. A rank
returns JSON and tensors (safetensors): nothing is unpickled.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlojz.base.language import refusal
from dlojz.base.machine import PARENT_VARIABLE, die_with_parent, meet_on_loopback
from dlojz.processes.status_board import StatusBoard, is_gone

if TYPE_CHECKING:
    from torch import Tensor


def fork(child: Callable[[], object], *, reset: Iterable[signal.Signals] = ()) -> int:
    """Fork a child that runs one function; return its process number.

    Args:
        child: ends the child by `os._exit` or by becoming another program; an exception is printed on stderr, and the
            child then exits with code 1.
        reset: signals for which the child begins with the system's default handler.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Blocked: a signal that the child got with the parent's handlers would be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _live(child, reset, before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


_HASH = hash
"""Python's own, which a name may hide from here on."""


def hash_of_process(name: object) -> Callable[[Any], int]:
    """A `hash` that, of texts, bytes and what they are in, gives what a process of its own would.

    Forks share one hash seed, and ranks that `torchrun` starts have one each: what depends on it would seem to agree.

    Args:
        name: of the process; another one gives other numbers.
    """

    def salted(value: Any) -> int:
        # Numbers hash alike in every process, texts with the seed of their process.
        return _HASH((value, str(name), "hash seed")) if _is_salted(value) else _HASH(value)

    return salted


def _is_salted(value: Any) -> bool:
    return isinstance(value, str | bytes) or (isinstance(value, tuple | frozenset) and any(map(_is_salted, value)))


def _live(child: Callable[[], object], reset: Iterable[signal.Signals], mask: Iterable[int]) -> NoReturn:
    try:
        for number in reset:
            signal.signal(number, signal.SIG_DFL)
        # Last: until here no signal can meet the parent's handlers.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        child()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


MAX_FORKS = 64
WALL_S = 60.0
LIMIT_S = 10.0


@dataclass(frozen=True)
class ForkedError:
    """Exception that ended the function on one rank.

    Args:
        message: its text; for `lost` the exit code, for `time` the limit in seconds.
        kind: of a `CollectiveFault`; `lost` where the process ended without an answer, `time` where it was stopped;
            else empty.
        line: number of the last line of the function's own file that was running; 0 where there is none.
    """

    name: str
    message: str
    kind: str = ""
    line: int = 0
    text: str = ""


@dataclass(frozen=True)
class RankAnswer:
    """Result of the function on one rank.

    Args:
        tensors: tensors it returned, by name; `value` is the name of one that stood alone.
        calls: the collectives and messages it has called, in order: `op`, `numel`, `dtype`.
    """

    rank: int
    value: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: ForkedError | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)


def spmd(
    function: Callable[[int, int], Any],
    size: int,
    *,
    wall_s: float = WALL_S,
    limit_s: float = LIMIT_S,
    blame: Sequence[str] = (),
) -> list[RankAnswer]:
    """Run `function(rank, size)` on forked ranks that share a process group; return the answers by rank.

    Args:
        function: returns None, JSON data, a tensor, or a pair of JSON data and a dictionary of tensors.
        size: number of ranks, 1 to 64.
        wall_s: seconds after which all are stopped.
        limit_s: seconds a rank may wait in a collective for ranks that still compute.
        blame: files whose lines an error quotes; by default the one the function is written in.

    Raises:
        LabError: if `size` is illegal.
    """
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_FORKS:
        raise refusal(
            en=f"a number of ranks is a whole number from 1 to {MAX_FORKS}, but {size!r} was received.",
            fr=f"un nombre de rangs est un entier de 1 à {MAX_FORKS}, mais {size!r} a été reçu.",
        )
    import torch.distributed  # noqa: F401 - imported here, once, for all ranks

    code = getattr(function, "__code__", None)
    parent = os.getpid()
    files = tuple(blame) or ((code.co_filename,) if code else ())
    with tempfile.TemporaryDirectory(prefix="dlojz-ranks-") as name:
        folder = Path(name)
        StatusBoard.create(folder / "board", size)
        readers: list[int] = []
        pids: list[int] = []
        try:
            for rank in range(size):
                reader, writer = os.pipe()
                # The child writes; it closes its own read end and those of the ranks before it.
                pipes = (writer, reader, *readers)
                pid = fork(partial(_rank, function, rank, size, folder, pipes, limit_s, files, parent))
                # A pipe ends only when nobody holds its write end any more.
                os.close(writer)
                readers.append(reader)
                pids.append(pid)
            texts, late = _collect(readers, time.monotonic() + wall_s)
        finally:
            statuses = [_end(pid) for pid in pids]
            for reader in readers:
                os.close(reader)
    return [
        _answer(rank, text, wall_s if rank in late else None, status)
        for rank, (text, status) in enumerate(zip(texts, statuses, strict=True))
    ]


def first_failure(answers: Iterable[RankAnswer]) -> tuple[int, str] | None:
    """Return the first rank that failed, and why; None where none did."""
    failed = ((answer.rank, answer.error) for answer in answers if answer.error is not None)
    return next(((rank, error.message or error.name or error.kind) for rank, error in failed), None)


def _collect(readers: list[int], deadline_s: float) -> tuple[list[bytes], set[int]]:
    """Read each rank's answer until it closes its pipe; return the answers and the ranks that were late."""
    texts = [b""] * len(readers)
    with selectors.DefaultSelector() as selector:
        for rank, reader in enumerate(readers):
            selector.register(reader, selectors.EVENT_READ, rank)
        while selector.get_map():
            left_s = deadline_s - time.monotonic()
            ready = selector.select(left_s) if left_s > 0 else []
            # Time is up: who has not closed its pipe is late.
            if not ready:
                return texts, {key.data for key in selector.get_map().values()}
            for key, _ in ready:
                part = os.read(key.fd, 2**16)
                texts[key.data] += part
                # Read without a byte: the rank has closed its end.
                if not part:
                    selector.unregister(key.fd)
    return texts, set()


def _end(pid: int) -> int:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _answer(rank: int, text: bytes, late_s: float | None, exit_code: int) -> RankAnswer:
    """Parse what a rank sent; `late_s` is the limit that it did not keep, in seconds."""
    from safetensors.torch import load

    # A line of JSON, then the tensors as safetensors.
    head, _, body = text.partition(b"\n")
    try:
        answer = json.loads(head)
        tensors = load(body) if body else {}
    except Exception:  # cut off, or nothing was sent
        cause = ("lost", str(exit_code)) if late_s is None else ("time", f"{late_s:.0f}")
        return RankAnswer(rank, error=ForkedError("", cause[1], kind=cause[0]))
    error = ForkedError(**answer["error"]) if answer["error"] else None
    return RankAnswer(rank, answer["value"], tensors, error, answer["calls"])


def _rank(
    function: Callable[[int, int], Any],
    rank: int,
    size: int,
    folder: Path,
    pipes: tuple[int, ...],
    limit_s: float,
    files: tuple[str, ...],
    parent: int,
) -> NoReturn:
    """Live as a rank, in the child: join the others, call the function, send the answer, exit."""
    code = 1
    gc.freeze()  # garbage of the parent (sockets, threads' locks) is not to be collected here
    write, *readers = pipes
    for descriptor in readers:
        os.close(descriptor)
    try:
        os.environ[PARENT_VARIABLE] = str(parent)
        die_with_parent()
        os.register_at_fork(after_in_child=_die_with_rank)
        board = StatusBoard(folder / "board", rank, size)
        value, tensors, error, calls = _called(function, board, f"file://{folder}/store", limit_s, files)
        _send(write, {"value": value, "error": error and vars(error), "calls": calls}, tensors)
        code = 0
        _stay(board)
    finally:
        os._exit(code)


def _called(
    function: Callable[[int, int], Any], board: StatusBoard, store: str, limit_s: float, files: tuple[str, ...]
) -> tuple[Any, dict[str, Tensor], ForkedError | None, list[dict[str, Any]]]:
    import torch
    import torch.distributed as dist

    from dlojz.processes.guard import CollectiveFault, Guard

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    meet_on_loopback(os.environ)
    rank, size = board.rank, board.size
    timeout = timedelta(seconds=max(60.0, 2 * limit_s))  # beyond the guard's limit, so that the guard names who waits
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    guard = Guard(board, limit_s)
    dist.barrier()  # once all are connected: from here on the guard's clock is fair
    guard.install()
    guard.begin(1)
    error: ForkedError | None = None
    value: Any = None
    tensors: dict[str, Tensor] = {}
    try:
        value, tensors = _parted(function(rank, size))
        # What is no JSON fails here, as an error of this rank.
        json.dumps(value)
    except BaseException as raised:  # a student's function may raise anything, SystemExit included
        kind = raised.kind if isinstance(raised, CollectiveFault) else ""
        line, text = _own_line(raised, files)
        error = ForkedError(type(raised).__name__, str(raised), kind, line, text)
        value, tensors = None, {}
    guard.end(error.name if error else None)
    return value, tensors, error, guard.log


def _stay(board: StatusBoard) -> None:
    """Wait until all have ended: another may still communicate with this rank, whose sockets close with it."""
    while not all(state.get("state") == "ended" or is_gone(state.get("pid")) for state in board.read_all()):
        time.sleep(0.002)


def _die_with_rank() -> None:
    """End what a rank forks with the rank."""
    os.environ.pop(PARENT_VARIABLE, None)
    die_with_parent()


def _parted(result: Any) -> tuple[Any, dict[str, Tensor]]:
    import torch

    if isinstance(result, torch.Tensor):
        return None, {"value": result}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return result
    return result, {}


def _own_line(error: BaseException, files: tuple[str, ...]) -> tuple[int, str]:
    # Frames of the function's own files, the innermost last.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return (frames[-1].lineno or 0, frames[-1].line or "") if frames else (0, "")


def _send(write: int, answer: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    # Copies: safetensors takes no tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with open(write, "wb") as pipe:
        pipe.write(json.dumps(answer).encode() + b"\n" + (save(copies) if copies else b""))
