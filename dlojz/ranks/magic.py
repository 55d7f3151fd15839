"""Magics of the notebook: `%%ranks` and `%ranks`.

A cell shows its ranks' output while it runs, and leaves that output in the notebook and nothing else, no time and no
progress; a mistake in the first line is answered by one sentence.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlojz.base.display_hook import QUIET
from dlojz.base.errors import LabError
from dlojz.base.language import one_of, say
from dlojz.ranks.cluster import inside_allocation
from dlojz.ranks.live import LIMIT_S, Ranks, payload, show
from dlojz.ranks.rank_setup import MOST_PROCESSES, RanksRefused, number_of_ranks

_COMMANDS = ("start", "stop", "status", "restart")
_OPTIONS = ("--with", "--limit", "--force", "--threads")
_NOTE_AFTER_S = 1.0
THREADS = "DLOJZ_RANK_THREADS"
"""Set to 1, all ranks of notebooks are threads, e.g. on a hub with little memory: one process per notebook."""


@dataclass
class RanksCommand:
    """Parsed first line of a cell, or line of `%ranks`.

    Args:
        command: `run` for a cell; else `start`, `stop`, `status` or `restart`.
        size: number of ranks; None: as many as there are.
        force: whether to start more ranks than the machine bears, as processes.
        threads: whether the ranks are threads of one process; more than `MOST_PROCESSES` are, unless forced.
    """

    command: str = "run"
    size: int | None = None
    names: tuple[str, ...] = ()
    limit_s: float = LIMIT_S
    force: bool = False
    threads: bool = False


def parse(line: str, *, is_cell: bool) -> RanksCommand:
    """Parse what follows `%%ranks` or `%ranks`.

    Raises:
        RanksRefused: in one sentence, naming the word and what would work.
    """
    try:
        words = shlex.split(line)
    except ValueError:
        # An unclosed quote, which shlex refuses.
        words = line.split()
    request = RanksCommand() if is_cell else RanksCommand(command="status")
    if words and not is_cell and not words[0].startswith("-") and not words[0].isdecimal():
        request.command = words.pop(0)
        if request.command not in _COMMANDS:
            raise RanksRefused(one_of(say(en="command", fr="commande"), request.command, _COMMANDS))
    # `%ranks 4` and `%ranks --force 4` mean start.
    elif words and not is_cell:
        request.command = "start"
    while words:
        word, equals, value = words.pop(0).partition("=")
        if word == "--force":
            request.force = True
        elif word == "--threads":
            request.threads = True
        elif word in ("--with", "--limit"):
            if not equals:
                value = words.pop(0) if words and not words[0].startswith("-") else ""
            if word == "--with":
                while value.endswith(",") and words:  # `--with a, b`
                    value += words.pop(0)
                request.names += _names(value)
            else:
                request.limit_s = _seconds(value)
        elif word.startswith("-"):
            raise RanksRefused(one_of("option", word, _OPTIONS))
        elif request.size is None:
            request.size = number_of_ranks(word)
        else:
            raise RanksRefused(
                en=f"one number of ranks is enough, but {request.size} and {word!r} were received.",
                fr=f"un seul nombre de rangs suffit, mais {request.size} et {word!r} ont été reçus.",
            )
    return request


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or not all(name.isidentifier() for name in names):
        raise RanksRefused(
            en=f"--with takes names of the notebook, e.g. --with model,batch, but {text!r} was received.",
            fr=f"--with attend des noms du notebook, par exemple --with model,batch, mais {text!r} a été reçu.",
        )
    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise RanksRefused(
            en=f"--limit takes seconds, more than 0 and at most a day, e.g. --limit 30, but {text!r} was received.",
            fr=f"--limit attend des secondes, plus de 0 et un jour au plus, par exemple --limit 30, mais {text!r} "
            "a été reçu.",
        )
    return seconds


class RanksMagics:
    """Magics of one notebook."""

    def __init__(self, shell: Any, ranks: Ranks) -> None:
        self._shell, self.ranks = shell, ranks

    def __call__(self, line: str, cell: str | None = None) -> None:
        """Run `%ranks line`, or `%%ranks line` and a cell.

        Raises:
            RanksRefused: for a line that is not understood.
            RanksError: if the cell failed on a rank.
        """
        request = parse(line, is_cell=cell is not None)
        # Before any rank is started: what cannot be sent is refused at once.
        packed = payload(request.names, self._shell.user_ns)
        try:
            if request.command == "stop":
                self.ranks.stop()
            elif request.command == "restart":
                with StartingNote() as note:
                    self.ranks.restart(progress=note)
            elif request.command == "start" or cell is not None:
                self._ensure(request)
            if cell is not None:
                sent_values = [self._shell.user_ns[name] for name in request.names]
                self.ranks.run(cell, limit_s=request.limit_s, packed=packed, hint=self.ranks.advice(sent_values))
            elif request.command == "status":
                show(self.ranks.status())
        except LabError as refused:
            # RanksRefused is what a notebook shows without a traceback.
            raise (refused if isinstance(refused, RanksRefused) else RanksRefused(str(refused))) from None

    def _ensure(self, request: RanksCommand) -> None:
        """Start as many ranks as asked for, unless they run."""
        size = request.size or self.ranks.size
        many = size > MOST_PROCESSES and not request.force and not inside_allocation()
        threads = request.threads or many or os.environ.get(THREADS) == "1"
        if size == self.ranks.size and (threads == self.ranks.threads or request.size is None):
            if not self.ranks:
                raise RanksRefused(str(self.ranks))
            return
        old_size = self.ranks.size
        with StartingNote() as note:
            self.ranks.start(size, force=request.force, threads=threads, progress=note)
        if old_size:
            print(
                say(
                    en=f"{size} fresh ranks take the place of the {old_size} before, whose variables are gone.",
                    fr=f"Nouveaux rangs : {size}, à la place de {old_size} ; les variables des précédents sont "
                    "perdues.",
                )
            )


class StartingNote:
    """Note that the ranks are starting, shown after a second and taken back at the end."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._said = False

    def __call__(self) -> None:
        """Show the note once a second has passed."""
        if not self._said and time.monotonic() - self._begun_s > _NOTE_AFTER_S and os.environ.get(QUIET) != "off":
            self._said = True
            text = say(en="The ranks are starting (a few seconds) …", fr="Démarrage des rangs (quelques secondes)…")
            print(text, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Callable[[], None]:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._said:
            return
        from IPython.core.getipython import get_ipython
        from IPython.display import clear_output

        # In a notebook the kernel takes the note back; in a terminal the line is overwritten.
        if hasattr(get_ipython(), "kernel"):
            clear_output()
        else:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def register(shell: Any) -> None:
    """Give a notebook the magics and the variable `ranks`; a second time changes nothing."""
    magics = shell.magics_manager.magics["cell"].get("ranks")
    if not isinstance(magics, RanksMagics):
        magics = RanksMagics(shell, Ranks(namespace=shell.user_ns))
        for kind in ("line", "cell"):
            shell.register_magic_function(magics, kind, "ranks")
    shell.user_ns["ranks"] = magics.ranks
