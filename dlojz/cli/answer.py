"""What goes to stdout and what goes to stderr.

Layer 6. Invariant: with `--json`, stdout carries exactly one JSON document whatever any library prints, because file
descriptor 1 leads to stderr while the work is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, RenderableType


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[Callable[[Any], None]]:
    """Yield the one function that answers: a JSON document, or something rich prints.

    Args:
        as_json: whether everything else written to stdout meanwhile, also by child processes, goes to stderr.
    """
    if not as_json:
        yield show
        return
    sys.stdout.flush()
    answer_to = os.dup(1)
    os.dup2(2, 1)
    try:
        yield lambda data: _write(answer_to, data)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os.dup2(answer_to, 1)
        os.close(answer_to)


def _write(descriptor: int, data: Any) -> None:
    text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with open(os.dup(descriptor), "w", encoding="utf-8") as stdout:
        stdout.write(text)


def show(renderable: RenderableType) -> None:
    """Print something on stdout, as wide as the terminal (100 columns where there is none)."""
    console(stderr=False).print(renderable, markup=False, highlight=False, soft_wrap=isinstance(renderable, str))


def tell(sentence: str) -> None:
    """Say something on stderr, beside the answer."""
    print(sentence, file=sys.stderr, flush=True)


def console(stderr: bool = True) -> Console:
    """A console on one of the two streams."""
    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else 100
    return Console(file=stream, width=wide, highlight=False)
