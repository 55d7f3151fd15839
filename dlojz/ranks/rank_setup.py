"""Live rank: its process, process group and streams, the cells that it runs; the limit of ranks; the controller.

Every call of the notebook is answered with plain data, and nothing is raised; between cells an interrupt changes
nothing.

Run as `python -m dlojz.ranks.rank_setup FOLDER [HOST]`, it is ipyparallel's controller, through which the notebook's
messages reach the ranks: it takes messages signed with a key in a folder that only its owner reads, listens on the
loopback interface by default, and ends with the process that started it, as do the helpers it forks.
"""

from __future__ import annotations

import base64
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, say, use_language
from dlojz.base.machine import cores_available, die_with_parent, meet_on_loopback, memory_free_bytes
from dlojz.processes.forks import hash_of_process

TEXT_BYTES = 64 * 2**10
IMAGE_BYTES = 1024 * 2**10
"""Of all figures of a cell, as PNG."""
PIPE_BYTES = 2**20
"""More than a pipe holds: 64 KiB on Linux, 1 MiB where a page has 64 KiB. Source: pipe(7), "Pipe capacity"."""
LIVE_KEY = "output"
"""Under which a rank publishes what its cell has shown so far: `parts` and `cut`, as in the answer."""
_PUBLISH_EVERY_S = 0.2
_PUBLISHED_BYTES_PER_S = 250_000  # of one rank; a Jupyter server drops messages beyond 1 MB/s
# gloo prints how many peers it has, each time a group is made.
_CHATTER = ("[Gloo] Rank ",)


class CellParts:
    """Output of one cell on one rank, in order: what was printed, values and figures; text up to `TEXT_BYTES`."""

    def __init__(self) -> None:
        self.cut = False
        self._parts: list[dict[str, Any]] = []
        self._kept_bytes = self._image_bytes = 0

    def keep(self, kind: str, text: bytes) -> None:
        """Add text: `printed`, or a `value` that was displayed."""
        prefix = text[: TEXT_BYTES - self._kept_bytes]
        self.cut |= len(prefix) < len(text)
        self._kept_bytes += len(prefix)
        if not prefix:
            return
        if kind == "printed" and self._parts and self._parts[-1]["kind"] == "printed":
            self._parts[-1]["text"] += prefix
        else:
            self._parts.append({"kind": kind, "text": bytearray(prefix)})

    def show(self, bundle: dict[str, Any]) -> None:
        """Add a displayed value or figure.

        Args:
            bundle: representations by MIME type; its text and its PNG are kept, never its HTML.
        """
        text = str(bundle.get("text/plain", ""))
        image = bundle.get("image/png")
        if image is not None:
            encoded = image if isinstance(image, str) else base64.b64encode(image).decode()
            encoded = "".join(encoded.split())
            if self._image_bytes + len(encoded) <= IMAGE_BYTES:
                self._image_bytes += len(encoded)
                self._parts.append({"kind": "image", "png": encoded, "text": text[:200]})
                return
            self.cut = True
        self.keep("value", text.encode("utf-8", "replace"))

    def as_sent(self) -> list[dict[str, Any]]:
        """Return the output so far as text, without gloo's chatter."""
        answer = []
        for part in self._parts:
            decoded_part = dict(part)
            if part["kind"] != "image":
                decoded_part["text"] = part["text"].decode("utf-8", "replace")
            if part["kind"] == "printed":
                lines = decoded_part["text"].splitlines(keepends=True)
                decoded_part["text"] = "".join(line for line in lines if not line.startswith(_CHATTER))
            if decoded_part["text"] or "png" in decoded_part:
                answer.append(decoded_part)
        return answer


class Streams:
    """Capture of all that this process prints: by print, os.write, a child process or a library in C.

    It is read at once and kept up to `TEXT_BYTES` a cell; the rest is thrown away, so that nothing fills up or blocks.

    Args:
        log: file for what the process itself reports outside of cells.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._read, self._write = (_out_of_the_way(descriptor) for descriptor in os.pipe())
        os.set_blocking(self._read, False)
        self._lock = threading.Lock()
        self._listening = False
        self._changed = threading.Event()
        self._publish: Callable[[dict[str, Any]], None] | None = None
        self._output = CellParts()
        if log is not None:
            report = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            # Loggers that are made later hold on to this one.
            sys.__stderr__ = open(_out_of_the_way(report), "w", buffering=1, errors="replace")  # type: ignore[misc]  # noqa: SIM115
            sys.stderr = sys.__stderr__
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._point_here()
        # The lock may be held at the very moment a cell forks; in the child nobody would give it back.
        os.register_at_fork(after_in_child=self._forget_lock)
        threading.Thread(target=self._listen, daemon=True, name="streams").start()
        threading.Thread(target=self._publish_changes, daemon=True, name="live output").start()

    def begin(self, publish: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Begin a cell: forget the former output, and reopen streams that a cell has closed.

        Args:
            publish: called, from a thread, with the output so far whenever it has grown.
        """
        with self._lock:
            self._publish = publish
            self._output = CellParts()
            self._listening = True
        self._point_here()
        self._stdout_before, self._stderr_before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115

    def show(self, bundle: dict[str, Any]) -> None:
        """Add a displayed value or figure after what was printed before it (see `CellParts`)."""
        self._drain()
        with self._lock:
            self._output.show(bundle)
            self._changed.set()

    def end(self) -> tuple[list[dict[str, Any]], bool]:
        """End the cell; return its output in order, and whether some was left out."""
        self._drain()
        with self._lock:
            self._listening = False
            parts, cut = self._output.as_sent(), self._output.cut
            self._output = CellParts()
        with suppress(OSError, ValueError):
            sys.stdout.close()
        self._point_here()
        sys.stdout, sys.stderr = self._stdout_before, self._stderr_before
        return parts, cut

    def _publish_changes(self) -> None:
        """Publish the whole output again where it has grown: a message that is lost is made up for by the next."""
        while True:
            self._changed.wait()
            time.sleep(_PUBLISH_EVERY_S)  # what is printed at once travels at once
            self._changed.clear()
            sent_bytes = 0
            with self._lock:  # `end` waits for it: nothing is published under the name of the next call
                if self._listening and self._publish is not None:
                    parts = self._output.as_sent()
                    sent_bytes = sum(len(part["text"]) + len(part.get("png", "")) for part in parts)
                    with suppress(Exception):  # the answer brings it all
                        self._publish({LIVE_KEY: {"parts": parts, "cut": self._output.cut}})
            time.sleep(sent_bytes / _PUBLISHED_BYTES_PER_S)

    def _forget_lock(self) -> None:
        self._lock, self._changed = threading.Lock(), threading.Event()

    def _point_here(self) -> None:
        for descriptor in (1, 2):
            os.dup2(self._write, descriptor)

    def _listen(self) -> None:
        import select

        while True:
            select.select([self._read], [], [])
            with self._lock:
                self._read_pipe(2**16)

    def _read_pipe(self, limit_bytes: int) -> None:
        """Keep what waits in the pipe, which the other thread may have emptied; the lock is held."""
        with suppress(BlockingIOError):
            text = os.read(self._read, limit_bytes)
            if self._listening:
                self._output.keep("printed", text)
                self._changed.set()

    def _drain(self) -> None:
        """Read all that has been printed until now; what a child prints meanwhile is not waited for."""
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with self._lock:
            self._read_pipe(PIPE_BYTES)


def _out_of_the_way(descriptor: int) -> int:
    """Move a descriptor to a number that no cell closes by accident, not inherited by child processes."""
    new_descriptor = 100
    with suppress(OSError):  # of the first number that is not open
        while os.fstat(new_descriptor):
            new_descriptor += 1
    os.dup2(descriptor, new_descriptor, inheritable=False)
    os.close(descriptor)
    return new_descriptor


GROUP_TIMEOUT_S = 30
"""How long a collective that torch starts from C++, where the guard does not look, may wait."""


class RankContext:
    """State of this process as a rank: its number, device, process group, guard and variables.

    Args:
        local_size: how many ranks run on this machine.
        local_rank: this one's number among those.
    """

    def __init__(self, rank: int, size: int, local_rank: int, local_size: int) -> None:
        import torch.distributed
        from IPython.core.getipython import get_ipython

        self.rank, self.size = rank, size
        self.guard: Any = None
        self.group: Any = None
        if local_size == size:
            meet_on_loopback(os.environ)  # ranks on several nodes need the interface that the user names
        self._former_groups: list[tuple[float, Any]] = []
        shell: Any = get_ipython()
        self.shell = shell
        shell.kernel.log.setLevel(logging.CRITICAL)  # it would report each question in the midst of what a cell prints
        self.shell.autoawait = False  # the loop that would run a coroutine is the one that waits for this cell
        self.shell.ask_exit = lambda: None  # quit() ends no rank
        self.shell._showtraceback = lambda *_: None  # what was raised is part of the answer
        warnings.filterwarnings("ignore", message="To exit: use")
        torch.set_num_threads(1)
        self.on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
        self.device = torch.device("cuda", local_rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        else:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed logs on each rank that it has found no GPU
        self.shell.user_ns.update(
            rank=rank, world_size=size, device=self.device, torch=torch, dist=torch.distributed, __name__="__main__"
        )
        # Forks share one hash seed, processes that torchrun starts do not: what depends on it must not seem to agree.
        self.shell.user_ns["hash"] = hash_of_process(rank)
        self.given = frozenset(self.shell.user_ns)

    def init_group(self, meeting_point: str, board: str) -> None:
        """Make the process group anew; all ranks do so at the same time."""
        import torch.distributed as dist

        from dlojz.processes.guard import Guard
        from dlojz.processes.status_board import StatusBoard

        if dist.is_initialized():
            # Kept for a while: its end would wait for threads that still wait in a collective which nobody will
            # complete; once they have given up, its sockets are closed.
            now_s = time.monotonic()
            self._former_groups = [
                former_group for former_group in self._former_groups if now_s - former_group[0] < 2 * GROUP_TIMEOUT_S
            ]
            self._former_groups.append((now_s, dist.group.WORLD))
            dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo",
            init_method=meeting_point,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        self.group = dist.group.WORLD
        if self.guard is not None:
            self.guard.reset()
        elif board:
            self.guard = Guard(StatusBoard(Path(board), self.rank, self.size))
            self.guard.install()
        self._meet()

    def _meet(self) -> None:
        """Wait until all are connected, without the guard: a cell starts on all ranks or on none."""
        import torch.distributed as dist

        barrier = getattr(dist.barrier, "__wrapped__", dist.barrier)
        # Every rank, no data; one GPU per rank where there are GPUs.
        barrier(device_ids=[self.device.index] if self.on_gpu else None)

    @property
    def torn(self) -> bool:
        """Whether the group must be made anew before the next cell."""
        import torch.distributed as dist

        group_intact = dist.is_initialized() and dist.group.WORLD is self.group
        return not group_intact or bool(self.guard and self.guard.torn)


_context: RankContext | None = None
streams: Streams | None = None


def init_rank(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, Any]:
    """Become a rank; return an empty answer, or `{"failure": …}`."""
    global _context, streams
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if streams is None:
            streams = Streams()
        _context = RankContext(rank, size, local_rank, local_size)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return {}


def init_group(meeting_point: str, board: str) -> dict[str, Any]:
    """Make the process group anew; return an empty answer, or `{"failure": …}`."""
    try:
        this_rank().init_group(meeting_point, board)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return {}


def whereabouts() -> dict[str, Any]:
    """Return which rank idr_torch takes this process for: `rank`, `local_rank`, `local_size`, `host`, `master`."""
    import idr_torch

    return {
        "rank": idr_torch.rank,
        "local_rank": idr_torch.local_rank,
        "local_size": idr_torch.local_world_size,
        "host": socket.gethostname(),
        "master": idr_torch.master_addr,
    }


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def describe() -> dict[str, Any]:
    """Return this rank's `pid`, `device`, `memory_bytes` (without what it shares) and number of `variables`."""
    return {
        "pid": os.getpid(),
        "device": str(this_rank().device),
        "memory_bytes": psutil.Process().memory_full_info().uss,
        "variables": len(own_variables(this_rank().shell.user_ns, this_rank().given)),
    }


def fetch(name: str) -> dict[str, Any]:
    """Return the `value` of a variable; else the `problem`, with the `names` there are or the value's `type`."""
    context = this_rank()
    return fetched(name, context.shell.user_ns, context.given)


def fetched(name: str, namespace: Mapping[str, Any], given: Set[str]) -> dict[str, Any]:
    """Return what `fetch` does, from the variables of a rank; `given` are those that no cell has made."""
    if name not in namespace:
        return {"problem": "unknown", "names": own_variables(namespace, given)}
    try:
        value = _on_the_host(namespace[name])
        if not _can_travel(value):
            raise TypeError("made in a cell")
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}", "type": type(namespace[name]).__name__}
    return {"value": value}


def own_variables(namespace: Mapping[str, Any], given: Set[str]) -> list[str]:
    """Return the names that cells have made."""
    return [name for name in namespace if name not in given and not name.startswith("_")]


def this_rank() -> RankContext:
    """Return this process's context.

    Raises:
        RuntimeError: if it is no rank yet.
    """
    if _context is None:
        raise RuntimeError("this process is not a rank yet")
    return _context


def _on_the_host(value: Any) -> Any:
    """Copy the tensors of a value into main memory, without their history; what holds no tensor stays as it is."""
    import torch

    if isinstance(value, torch.Tensor):
        # Cloned: a view would bring its whole storage along.
        return value.detach().cpu().clone()
    if type(value) in (list, tuple):
        return type(value)(_on_the_host(item) for item in value)
    if type(value) is dict:
        return {key: _on_the_host(item) for key, item in value.items()}
    return value


def _can_travel(value: Any) -> bool:
    """Return whether the notebook can rebuild the value; raise where it cannot even be serialized."""
    from ipyparallel.serialize import serialize_object

    serialize_object(value)
    return type(value).__module__ != "__main__" and not callable(value)


_LONGEST_WAIT_S = 25.0
_MESSAGE_CHARACTERS = 2000


def run(
    code: str, number: int, limit_s: float, language: str, payload: dict[str, Any], *, live: bool = False
) -> dict[str, Any]:
    """Run a cell on this rank.

    Args:
        number: of the cell, the same on every rank.
        limit_s: seconds the whole cell may take; a collective waits at most half of it for ranks that still compute.
        language: of the reader.
        payload: what was sent along (see `live.payload`): `modules`, `sources` and `values`.
        live: whether to publish the output so far while the cell runs.

    Returns:
        `parts` and `cut` (see `Streams`), `error` (None or `name`, `message`, `kind`, `lines`), `last` (the collective
        last called), `torn`, and `counts` (collectives called per group).
    """
    context, output = this_rank(), streams
    if output is None:
        raise RuntimeError("init_rank() comes before run()")
    me = os.getpid()
    use_language(language)
    error: BaseException | None = None
    shell, guard = context.shell, context.guard
    number_of_cell = shell.execution_count
    output.begin(shell.data_pub.publish_data if live else None)
    try:
        with shown_by(shell, output.show, code), interruptible():
            error = unpack(shell.user_ns, payload, lambda source: _raised(shell.run_cell(source, store_history=False)))
            if error is None:
                if guard is not None:
                    guard.limit_s = min(_LONGEST_WAIT_S, limit_s / 2)
                    guard.begin(number)
                error = _raised(shell.run_cell(code, store_history=False))
                if error is None and context.on_gpu:
                    import torch

                    torch.cuda.synchronize()
    except BaseException as raised:  # an interrupt that came between two lines of IPython's own
        error = raised
    finally:
        if os.getpid() != me:
            os._exit(0)  # a child that a cell has forked and that fell out of the cell: no second rank
    shell.execution_count = number_of_cell
    if guard is not None:
        guard.end(type(error).__name__ if error else None)
    parts, cut = output.end()
    return {
        "parts": parts,
        "cut": cut,
        "error": described(error) if error else None,
        "last": guard.last if guard else "",
        "torn": context.torn,
        "counts": guard.counts() if guard else {},
    }


def _raised(result: Any) -> BaseException | None:
    """Return what ended a cell that IPython has run."""
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


@contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt reach this process meanwhile."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def shown_by(shell: Any, show: Callable[[dict[str, Any]], None], code: str) -> Iterator[None]:
    """Redirect what a cell displays, and the value of its last line, to `show`."""
    from IPython.core.displaypub import DisplayPublisher

    class Publisher(DisplayPublisher):
        def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
            show(data)

        def clear_output(self, *_: Any, **__: Any) -> None:
            pass

    quiet = shell.displayhook.semicolon_at_end_of_expression(code)

    def show_value(value: Any = None) -> None:
        if value is not None and not quiet:
            show(shell.display_formatter.format(value)[0])

    publisher, hook = shell.display_pub, shell.display_trap.hook
    shell.display_pub, shell.display_trap.hook = Publisher(), show_value
    try:
        yield
    finally:
        shell.display_pub, shell.display_trap.hook = publisher, hook


def unpack(
    namespace: dict[str, Any], payload: dict[str, Any], run_source: Callable[[str], BaseException | None]
) -> BaseException | None:
    """Define what the notebook has sent along; return the exception that a definition raises.

    Args:
        run_source: runs one of the sources in it; returns what it raised.
    """
    for name, (module, attribute) in payload.get("modules", {}).items():
        try:
            imported = importlib.import_module(module)
            for part in attribute.split(".") if attribute else ():
                imported = getattr(imported, part)
            namespace[name] = imported
        except (ImportError, AttributeError) as error:
            return error
    namespace.update(payload.get("values", {}))
    return next((raised for raised in map(run_source, payload.get("sources", ())) if raised is not None), None)


def described(error: BaseException) -> dict[str, Any]:
    """Describe an exception: `name`, `message`, `kind` of a fault between ranks, and the student's `lines`."""
    message = ""
    with suppress(Exception):  # __str__ may be a student's own
        message = str(error)
    if isinstance(error, SyntaxError):
        message = error.msg
    if isinstance(error, SystemExit):
        message = "" if error.code is None else repr(error.code)
    return {
        "name": type(error).__name__,
        "message": message[:_MESSAGE_CHARACTERS],
        "kind": getattr(error, "kind", "") if type(error).__name__ == "CollectiveFault" else "",
        "lines": _own_lines(error),
    }


def _own_lines(error: BaseException) -> list[tuple[int, str, str]]:
    """Return the lines of this cell and of earlier ones that led to the error: number, text, function."""
    from ipykernel.compiler import get_tmp_directory

    if isinstance(error, SyntaxError):
        return [(error.lineno or 0, (error.text or "").strip(), "")]
    written_here = (get_tmp_directory(), "<ipython-input")
    frames = [
        (frame.lineno or 0, (frame.line or "").strip(), "" if frame.name == "<module>" else frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(written_here)
    ]
    return frames[-3:] if len(frames) <= 3 else [frames[0], *frames[-2:]]


MOST_RANKS = 256
MOST_PROCESSES = 8
"""Of ranks that are processes where nothing else is asked for; more are threads of one process."""
RANK_BYTES = 64 * 2**20
"""Memory of one more rank: 40 MiB once it has run an all-reduce (`%ranks status`), and some variables."""
_RANKS_PER_CORE = 8


class RanksRefused(LabError):  # noqa: N818 - a sentence for the student, not a fault
    """Refusal of a request about ranks, in a sentence or in both languages; a notebook shows it without a traceback."""

    def __init__(self, sentence: str = "", *, en: str = "", fr: str = "") -> None:
        super().__init__(sentence or say(en=en, fr=fr))

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class RanksToDo(RanksRefused):
    """Raised where a cell needs, on every rank that failed by itself, an exercise that is still to do."""


def number_of_ranks(text: object) -> int:
    """Parse a number of ranks, as written after `%%ranks`.

    Raises:
        RanksRefused: if it is no whole number from 1 to `MOST_RANKS`.
    """
    try:
        number = int(str(text)) if not isinstance(text, bool) else 0
    except ValueError:
        number = 0
    if 1 <= number <= MOST_RANKS:
        return number
    raise RanksRefused(
        en=f"a number of ranks is a whole number from 1 to {MOST_RANKS}, e.g. %%ranks 4, but {str(text)!r} was "
        "received.",
        fr=f"un nombre de rangs est un entier de 1 à {MOST_RANKS}, par exemple %%ranks 4, mais {str(text)!r} a été "
        "reçu.",
    )


def refuse_too_many(size: int, *, cores: int | None = None, available_bytes: int | None = None) -> None:
    """Refuse more ranks than the machine bears.

    Args:
        cores: of this process; by default those it has.
        available_bytes: memory that is free; by default what the system says.

    Raises:
        RanksRefused: with the memory they would take, and how to insist.
    """
    cores = cores or cores_available()
    available_bytes = memory_free_bytes() if available_bytes is None else available_bytes
    if size <= _RANKS_PER_CORE * cores and size * RANK_BYTES <= available_bytes:
        return
    demand, free = format_bytes(size * RANK_BYTES), format_bytes(available_bytes)
    raise RanksRefused(
        en=f"{size} ranks would take about {demand} of memory ({free} free) and share {cores} "
        f"core{'s' if cores > 1 else ''}: take fewer, or insist with --force.",
        fr=f"{size} rangs prendraient environ {demand} de mémoire ({free} libres) et se partageraient {cores} "
        f"cœur{'s' if cores > 1 else ''} : prenez-en moins, ou insistez avec --force.",
    )


# A new rank is announced at its first heartbeat: at the default of 3 s, waiting for it would take most of the start.
_HEARTBEAT_MS = 250
# The supervisor, its parent, declares a rank lost; a missed heartbeat only means that the machine is busy.
_MISSES = 10_000


def profile(folder: Path) -> Path:
    """Return the folder of the controller's files, used in place of the user's own profile."""
    return folder / "profile"


def connection_file(folder: Path, side: str) -> Path:
    """Return the file that tells how to reach the controller; `side` is `client` (notebook) or `engine` (rank)."""
    return profile(folder) / "security" / f"ipcontroller-{side}.json"


_REGISTRATION_S = 60


def preload() -> None:
    """Import what takes each rank seconds: torch and ipyparallel's engine, once, in the supervisor that forks them."""
    for name in ("torch._dynamo", "torch.distributed", "ipykernel.kernelbase", "ipyparallel.engine.app"):
        importlib.import_module(name)  # the first optimizer of a process imports torch._dynamo


def be_a_rank(folder: Path, name: str) -> NoReturn:
    """Serve the notebook until the supervisor ends; never return into the supervisor's code.

    Args:
        name: by which the notebook addresses this process; no other ever had it.
    """
    global streams
    code = 1
    try:
        die_with_parent()
        os.setsid()  # what a cell starts can be ended together with it
        # The supervisor has no threads, and a child of a cell that forks has none of this process's: both may fork.
        os.register_at_fork(after_in_child=die_with_parent)
        with suppress(OSError):  # where memory runs out, the system ends a rank, not the notebook
            Path("/proc/self/oom_score_adj").write_text("1000")
        from ipykernel.kernelbase import Kernel
        from ipyparallel.engine.app import IPEngine
        from traitlets.config import Config

        # `run` listens to SIGINT around the cell alone: an interrupt between a message and the cell that it brings
        # would make the answer a failure.
        for hook in ("pre_handler_hook", "post_handler_hook"):
            setattr(Kernel, hook, lambda _: None)

        class Engine(IPEngine):
            """Engine that reads no configuration files of the user; its streams are those of `Streams`."""

            def load_config_file(self, *_: Any, **__: Any) -> None:
                """Read nothing."""

            def redirect_output(self, *_: Any) -> None:
                """Leave the streams alone: what a cell prints comes back with its answer."""

        streams = Streams(log=folder / "log")
        config = Config()
        config.ProfileDir.location = str(profile(folder))
        config.IPEngine.url_file = str(connection_file(folder, "engine"))
        config.IPEngine.enable_nanny = False  # the supervisor is one
        config.IPEngine.max_heartbeat_misses = 0  # a rank ends with its supervisor, not when the machine is busy
        config.IPEngine.timeout = _REGISTRATION_S
        config.IPEngine.log_level = "ERROR"
        application = Engine.instance(config=config)
        application.initialize([])
        application.ident = name
        application.start()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.__stderr__)
    finally:
        os._exit(code)


def main(folder: Path, host: str = "127.0.0.1") -> None:
    """Run ipyparallel's controller until the parent ends.

    Args:
        host: name or address on which the ranks reach this machine.
    """
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    from ipyparallel.controller.app import IPController
    from traitlets.config import Config

    class Controller(IPController):
        """Controller that reads no configuration files of the user."""

        def load_config_file(self, *_: Any, **__: Any) -> None:
            """Read nothing."""

    config = Config()
    config.ProfileDir.location = str(profile(folder))
    config.IPController.use_threads = True
    config.IPController.db_class = "NoDB"  # an answer goes to who asked; to keep it here would fill the memory
    config.IPController.ip = socket.gethostbyname(host)
    config.IPController.broadcast_scheduler_depth = 0
    config.TaskScheduler.scheme_name = "none"
    config.HeartMonitor.period = _HEARTBEAT_MS
    config.HeartMonitor.max_heartmonitor_misses = _MISSES
    config.IPController.log_level = "CRITICAL"
    application = Controller(config=config)
    application.initialize([])
    application.start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
