"""Host of ranks that are threads: the process in which they run their cells, each with its own variables and output.

They share what a process has once: modules, the environment, the current folder. What a module keeps in its variables
is therefore the same on all of them; what a cell defines is each rank's own.

Importing this loads no torch; the notebook imports it to name the functions that run in the ranks' process.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import io
import json
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

from dlojz.base.language import say, use_language
from dlojz.processes.forks import hash_of_process
from dlojz.ranks.rank_setup import (
    LIVE_KEY,
    CellParts,
    described,
    fetched,
    interruptible,
    own_variables,
    shown_by,
    unpack,
)

if TYPE_CHECKING:
    from dlojz.ranks.thread_group import ThreadExchange

_PUBLISHED_BYTES_PER_S = 250_000  # of all ranks; a Jupyter server drops messages beyond 1 MB/s


class ThreadsCannot(RuntimeError):  # noqa: N818 - a sentence for the student
    """Raised in a cell that needs a process per rank."""


class _Refusing(importlib.abc.MetaPathFinder):
    """Refuse to import what cannot work with threads."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "deepspeed":
            raise ThreadsCannot(
                say(
                    en="DeepSpeed needs a process per rank, and these ranks are threads of one process: take up to 8 "
                    "ranks, e.g. %%ranks 4.",
                    fr="DeepSpeed a besoin d’un processus par rang, et ces rangs sont les threads d’un seul "
                    "processus : prenez 8 rangs au plus, par exemple %%ranks 4.",
                )
            )
        return None


class _Printed(io.TextIOBase):
    """Standard output of the rank that has the baton."""

    def __init__(self, host: ThreadHost) -> None:
        self._host = host

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Keep what a rank prints among its output."""
        self._host.output().keep("printed", text.encode("utf-8", "replace"))
        return len(text)

    def writable(self) -> bool:
        """It is."""
        return True


class ThreadHost:
    """Ranks of this process."""

    def __init__(self, size: int) -> None:
        import torch.distributed
        from IPython.core.getipython import get_ipython

        from dlojz.ranks.thread_group import ThreadExchange

        shell: Any = get_ipython()
        self.shell = shell
        shell.kernel.log.setLevel(logging.CRITICAL)
        shell.ask_exit = lambda: None  # quit() ends no rank
        torch.set_num_threads(1)
        shared = dict(shell.user_ns)
        self.namespaces: list[dict[str, Any]] = [
            shared
            | {
                "rank": rank, "world_size": size, "device": torch.device("cpu"), "torch": torch,
                "dist": torch.distributed, "__name__": "__main__", "hash": hash_of_process(rank),
            }
            for rank in range(size)
        ]  # fmt: skip
        self.given = frozenset(self.namespaces[0])
        self.outputs = [CellParts() for _ in range(size)]
        self.exchange: ThreadExchange = ThreadExchange(size, self._on_switch)
        sys.meta_path.insert(0, _Refusing())

    def _on_switch(self, rank: int) -> None:
        self.shell.user_ns = self.namespaces[rank]  # for magics, e.g. %timeit

    def output(self) -> CellParts:
        """Output of the rank that has the baton."""
        return self.outputs[self.exchange.baton.rank]

    def run(self, code: str, payload: dict[str, Any], *, live: bool) -> list[dict[str, Any]]:
        """Run a cell on every rank; return their answers, as `rank_setup.run` does for one."""
        if self.exchange.torn:
            self.exchange.forget()
        size = self.exchange.size
        self.outputs = [CellParts() for _ in range(size)]
        errors: list[BaseException | None] = [KeyboardInterrupt() for _ in range(size)]  # of a rank that never began
        shell_variables, shell_streams = self.shell.user_ns, (sys.stdout, sys.stderr)
        sys.stdout = sys.stderr = _Printed(self)
        show: Callable[[dict[str, Any]], None] = lambda bundle: self.output().show(bundle)  # noqa: E731

        def job(rank: int) -> Callable[[], None]:
            def run() -> None:
                try:
                    self.exchange.begin(rank)
                    errors[rank] = unpack(self.namespaces[rank], payload, lambda source: self._run(source, rank, None))
                    if errors[rank] is None:
                        errors[rank] = self._run(code, rank, None if quiet else show)
                except BaseException as error:
                    errors[rank] = error
                raised = errors[rank]
                self.exchange.end(rank, type(raised).__name__ if raised else None)

            return run

        quiet = self.shell.displayhook.semicolon_at_end_of_expression(code)
        try:
            with shown_by(self.shell, show, code), interruptible():
                self.exchange.baton.run([job(rank) for rank in range(size)], self._publisher(live))
        finally:
            sys.stdout, sys.stderr = shell_streams
            self.shell.user_ns = shell_variables
        for rank, error in enumerate(errors):  # also of a rank that never began, and could not say so itself
            self.exchange.end(rank, type(error).__name__ if error else None)
        return [self._answer(rank, error) for rank, error in enumerate(errors)]

    def _answer(self, rank: int, error: BaseException | None) -> dict[str, Any]:
        state = self.exchange.states[rank]
        return {
            "parts": self.outputs[rank].as_sent(),
            "cut": self.outputs[rank].cut,
            "error": described(error) if error else None,
            "last": state.get("last", ""),
            "torn": False,  # the next cell begins with calls forgotten; the groups stay
            "counts": {},
        }

    def _run(self, code: str, rank: int, show: Callable[[dict[str, Any]], None] | None) -> BaseException | None:
        """Run code among a rank's variables; show the value of its last line, if asked; return what it raised."""
        namespace, compiler = self.namespaces[rank], self.shell.compile
        try:
            text = self.shell.transform_cell(code)
            file = compiler.cache(text, self.shell.execution_count, raw_code=code)
            tree = compiler.ast_parse(text, file)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compiler(tree, file, "exec"), namespace)
            if last is not None:
                value = eval(compiler(ast.Expression(last.value), file, "eval"), namespace)
                if value is not None and show is not None:
                    show(self.shell.display_formatter.format(value)[0])
        except BaseException as error:
            return error
        return None

    def _publisher(self, live: bool) -> Callable[[], None]:
        """Return what publishes the output so far where it has grown, not faster than a server takes it."""
        published, not_before_s = "", 0.0

        def publish() -> None:
            nonlocal published, not_before_s
            if not live or time.monotonic() < not_before_s:
                return
            outputs = [{"parts": output.as_sent(), "cut": output.cut} for output in self.outputs]
            text = json.dumps(outputs)
            if text != published:
                published, not_before_s = text, time.monotonic() + len(text) / _PUBLISHED_BYTES_PER_S
                with suppress(Exception):  # the answer brings it all
                    self.shell.data_pub.publish_data({LIVE_KEY: {"ranks": outputs}})

        return publish


_host: ThreadHost | None = None


def _this_host() -> ThreadHost:
    if _host is None:
        raise RuntimeError("init_threads() comes first")
    return _host


def init_threads(size: int) -> dict[str, Any]:
    """Become the process of `size` ranks; return an empty answer, or `{"failure": …}`."""
    global _host
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _host = ThreadHost(size)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return {}


def run(
    code: str, number: int, limit_s: float, language: str, payload: dict[str, Any], *, live: bool = False
) -> dict[str, Any]:
    """Run a cell on all ranks; arguments are those of `rank_setup.run`.

    Returns:
        `ranks`: the answer of each.
    """
    use_language(language)
    return {"ranks": _this_host().run(code, payload, live=live)}


def fetch(name: str) -> list[dict[str, Any]]:
    """Fetch a variable of each rank, as `rank_setup.fetch` does for one."""
    host = _this_host()
    return [fetched(name, namespace, host.given) for namespace in host.namespaces]


def describe() -> list[dict[str, Any]]:
    """Describe each rank, as `rank_setup.describe` does; the memory is that of the process."""
    host = _this_host()
    memory_bytes = psutil.Process().memory_full_info().uss
    return [
        {
            "pid": os.getpid(),
            "device": "cpu",
            "memory_bytes": memory_bytes,
            "variables": len(own_variables(namespace, host.given)),
        }
        for namespace in host.namespaces
    ]
