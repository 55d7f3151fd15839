"""A cell on one rank: run it, and answer what it said and how it ended.

Layer 5, runs on the rank. Invariant: whatever a cell does, the answer is plain data; between cells an interrupt changes
nothing.
"""

from __future__ import annotations

import importlib
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dlojz.ranks import seat as place
from dlojz.ranks.streams import Streams
from dlojz.text import use_language

_LONGEST_WAIT_S = 25.0
_MESSAGE_CHARACTERS = 2000


def run(code: str, number: int, limit_s: float, language: str, belongings: dict[str, Any]) -> dict[str, Any]:
    """Run a cell on this rank.

    Args:
        code: of the cell.
        number: of the cell, the same on every rank.
        limit_s: seconds the whole cell may take; a collective waits at most half of it for ranks that still compute.
        language: of the reader.
        belongings: what was sent along (see `carry`): `modules`, `sources` and `values`.

    Returns:
        `parts` and `cut` (see `Streams`), `error` (None or `name`, `message`, `kind`, `lines`), `last` (the collective
        last called), `torn`, and `counts` (collectives called per group).
    """
    seat, said = place.seated(), place.streams
    if said is None:
        raise RuntimeError("sit() comes before run()")
    me = os.getpid()
    use_language(language)
    error: BaseException | None = None
    number_of_cell = seat.shell.execution_count
    said.begin()
    try:
        with _shown_by(seat.shell, said, code), _interruptible():
            error = _unpack(seat.shell, belongings)
            if error is None:
                if seat.guard is not None:
                    seat.guard.limit_s = min(_LONGEST_WAIT_S, limit_s / 2)
                    seat.guard.begin(number)
                result = seat.shell.run_cell(code, store_history=False)
                error = result.error_before_exec or result.error_in_exec
                if error is None and seat.on_gpu:
                    import torch

                    torch.cuda.synchronize()
    except BaseException as raised:  # an interrupt that came between two lines of IPython's own
        error = raised
    finally:
        if os.getpid() != me:
            os._exit(0)  # a child that a cell has forked and that fell out of the cell: no second rank
    seat.shell.execution_count = number_of_cell
    if seat.guard is not None:
        seat.guard.end(type(error).__name__ if error else None)
    parts, cut = said.end()
    return {
        "parts": parts,
        "cut": cut,
        "error": _described(error) if error else None,
        "last": seat.guard.last if seat.guard else "",
        "torn": seat.torn,
        "counts": seat.guard.counts() if seat.guard else {},
    }


@contextmanager
def _interruptible() -> Iterator[None]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _shown_by(shell: Any, said: Streams, code: str) -> Iterator[None]:
    """Lead what a cell displays, and the value of its last line, to the streams."""
    from IPython.core.displaypub import DisplayPublisher

    class Publisher(DisplayPublisher):
        def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
            said.show(data)

        def clear_output(self, *_: Any, **__: Any) -> None:
            pass

    quiet = shell.displayhook.semicolon_at_end_of_expression(code)

    def show_value(value: Any = None) -> None:
        if value is not None and not quiet:
            said.show(shell.display_formatter.format(value)[0])

    publisher, hook = shell.display_pub, shell.display_trap.hook
    shell.display_pub, shell.display_trap.hook = Publisher(), show_value
    try:
        yield
    finally:
        shell.display_pub, shell.display_trap.hook = publisher, hook


def _unpack(shell: Any, belongings: dict[str, Any]) -> BaseException | None:
    """Make what the notebook has sent along known to the cell; the exception where a definition raises one."""
    for name, (module, attribute) in belongings.get("modules", {}).items():
        try:
            imported = importlib.import_module(module)
            for part in attribute.split(".") if attribute else ():
                imported = getattr(imported, part)
            shell.user_ns[name] = imported
        except (ImportError, AttributeError) as error:
            return error
    shell.user_ns.update(belongings.get("values", {}))
    for source in belongings.get("sources", ()):
        result = shell.run_cell(source, store_history=False)
        raised: BaseException | None = result.error_before_exec or result.error_in_exec
        if raised is not None:
            return raised
    return None


def _described(error: BaseException) -> dict[str, Any]:
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
    """The lines of the cell, and of functions of earlier ones, that led to the error: number, text, function."""
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
