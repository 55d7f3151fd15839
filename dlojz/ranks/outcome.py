"""How a cell ended on every rank, and the one error a notebook shows where it did not end well.

Layer 5, pure. Invariant: what several ranks have in common is said once, with the ranks it concerns; what is only the
consequence of another rank's error is not presented as an error of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

from dlojz.ranks.diagnosis import listed
from dlojz.text import language, say

NOT_DONE = "NotDone"
"""The class that stands for an exercise still to do; by name, since it belongs to a higher layer."""
_CONSEQUENCES = ("peer", "lost")
_FIRST_LINE = 1  # of the cell is `%%ranks`; what the ranks get begins below


@dataclass(frozen=True)
class Trouble:
    """What ended a cell on one rank.

    Args:
        name: class of the exception; empty where the process ended.
        message: its text.
        kind: for a fault between ranks its kind; `exit` where the process ended, `limit` or `stopped` where it was
            interrupted by the time limit or by the student; else empty.
        lines: line number (0: not of this cell), text and function of the student's own lines that led to it.
        exit_code: of a process that ended; negative for a signal, None where it is not known.
        limit_s: that was exceeded.
    """

    name: str
    message: str = ""
    kind: str = ""
    lines: tuple[tuple[int, str, str], ...] = ()
    exit_code: int | None = 0
    limit_s: float = 0


@dataclass(frozen=True)
class Answer:
    """What one rank says of a cell.

    Args:
        rank: from 0.
        parts: what it printed and displayed, in order (see `streams`).
        cut: whether it said more than is kept.
        trouble: what ended the cell, or None.
        last: the collective it called last, e.g. `all_reduce #3 [4] float32`.
        torn: whether the process group must be made anew.
        counts: collectives called, by group.
        kept: whether its variables are still there.
    """

    rank: int
    parts: tuple[Mapping[str, Any], ...] = ()
    cut: bool = False
    trouble: Trouble | None = None
    last: str = ""
    torn: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    kept: bool = True


class RanksError(RuntimeError):
    """A cell that did not end well on every rank; the message names the ranks.

    Args:
        answers: of all ranks.
        hint: a sentence that may help.
    """

    def __init__(self, answers: Sequence[Answer], hint: str = "") -> None:
        self.answers = tuple(answers)
        super().__init__("\n".join([*_sentences(answers), *([hint] if hint else [])]))

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of a stack of frames, none of which is the student's.
        return str(self).splitlines()


def still_to_do(answers: Iterable[Answer]) -> str:
    """The sentence of an exercise that is still to do, where that is all that was raised; else empty."""
    causes = _causes([answer.trouble for answer in answers if answer.trouble])
    if causes and all(trouble.name == NOT_DONE for trouble in causes):
        return causes[0].message
    return ""


def unknown_names(answers: Iterable[Answer]) -> set[str]:
    """Names that ranks did not know."""
    troubles = [answer.trouble for answer in answers if answer.trouble and answer.trouble.name == "NameError"]
    return {trouble.message.split("'")[1] for trouble in troubles if trouble.message.count("'") >= 2}


def must_rejoin(answers: Sequence[Answer]) -> bool:
    """Whether the ranks can no longer talk to one another as they are."""
    counts: dict[str, int] = {}
    for answer in answers:
        kind = answer.trouble.kind if answer.trouble else ""
        if answer.torn or kind in ("exit", "limit", "stopped"):
            return True
        # Members of a group have called it equally often; who is no member knows nothing of it.
        if any(counts.setdefault(group, count) != count for group, count in answer.counts.items()):
            return True
    return False


def _causes(troubles: Sequence[Trouble]) -> list[Trouble]:
    causes = [trouble for trouble in troubles if trouble.kind not in _CONSEQUENCES]
    return causes or list(troubles)


def _ranks(ranks: Iterable[int]) -> str:
    words = listed(ranks, french=language() == "fr")
    return words[0].upper() + words[1:]


def _sentences(answers: Sequence[Answer]) -> list[str]:
    causes = _causes([answer.trouble for answer in answers if answer.trouble])
    groups: dict[object, list[Answer]] = {}
    for answer in answers:
        if answer.trouble in causes:
            # A fault between ranks is told by each of them, each from its own line.
            key = answer.trouble.message if _between_ranks(answer.trouble) else answer.trouble
            groups.setdefault(key, []).append(answer)
    sentences = []
    for group in groups.values():
        troubles = [answer.trouble for answer in group if answer.trouble]
        sentences.append(_sentence(troubles[0], [answer.rank for answer in group]))
        sentences += dict.fromkeys(line for trouble in troubles for line in _own_lines(trouble))
    if any(_between_ranks(answer.trouble) for answer in answers):
        sentences += _last_calls(answers)
    return sentences + _what_now(answers)


def _between_ranks(trouble: Trouble | None) -> bool:
    return trouble is not None and trouble.kind not in ("", "exit", "limit", "stopped")


def _sentence(trouble: Trouble, ranks: list[int]) -> str:
    who = _ranks(ranks)
    plural = len(ranks) > 1
    if trouble.kind == "exit":
        return _ended(trouble, who, plural)
    if trouble.kind == "limit":
        return say(
            en=f"{who}: still running after {_seconds(trouble)}, the limit of this cell (--limit); interrupted.",
            fr=f"{who} : exécution non terminée au bout de {_seconds(trouble)}, la limite de cette cellule (--limit) ; "
            "interrompue.",
        )
    if trouble.kind == "stopped":
        return say(en=f"{who}: interrupted.", fr=f"{who} : exécution interrompue.")
    if _between_ranks(trouble):
        return trouble.message
    if trouble.name == "SystemExit":
        return say(en=f"{who} called", fr=f"{who} : appel de") + f" sys.exit({trouble.message})."
    colon = say(en=":", fr=" :")
    return f"{who}{colon} " + ": ".join(part for part in (trouble.name, trouble.message) if part)


def _seconds(trouble: Trouble) -> str:
    number = f"{trouble.limit_s:g}"
    return say(en=f"{number} s", fr=f"{number.replace('.', ',')} s")


def _ended(trouble: Trouble, who: str, plural: bool) -> str:
    code = trouble.exit_code
    stopped_fr = "les processus ont été arrêtés" if plural else "le processus a été arrêté"
    if trouble.limit_s:
        return say(
            en=f"{who}: still running after {_seconds(trouble)} and deaf to the interrupt; the process was ended.",
            fr=f"{who} : toujours en cours au bout de {_seconds(trouble)}, sans réagir à l’interruption ; "
            f"{stopped_fr}.",
        )
    if trouble.name == "KeyboardInterrupt":
        return say(
            en=f"{who}: deaf to the interrupt; the process was ended.",
            fr=f"{who} : aucune réaction à l’interruption ; {stopped_fr}.",
        )
    if code is None:
        return say(
            en=f"{who}: the process ended in the middle of the cell.",
            fr=f"{who} : le processus s’est arrêté au milieu de la cellule.",
        )
    if code >= 0:
        return say(
            en=f"{who}: the process ended by itself with exit code {code}, in the middle of the cell.",
            fr=f"{who} : le processus s’est terminé de lui-même, code de sortie {code}, au milieu de la cellule.",
        )
    try:
        name = Signals(-code).name
    except ValueError:
        name = str(-code)
    memory_en = " (a cell that needs too much memory ends like this)" if name == "SIGKILL" else ""
    memory_fr = " (c’est ainsi que finit une cellule qui demande trop de mémoire)" if name == "SIGKILL" else ""
    return say(
        en=f"{who}: the process was ended by the signal {name}{memory_en}.",
        fr=f"{who} : le processus a été arrêté par le signal {name}{memory_fr}.",
    )


def _own_lines(trouble: Trouble) -> list[str]:
    word = say(en="line", fr="ligne")
    lines = []
    for number, text, function in trouble.lines:
        place = f"{word} {number + _FIRST_LINE}" if number else ""
        place += (", " if place and function else "") + (f"{function}()" if function else "")
        lines.append(f"    {place or '·'}{say(en=':', fr=' :')} {text}")
    return lines


def _last_calls(answers: Sequence[Answer]) -> list[str]:
    none = say(en="no collective", fr="aucune communication collective")
    groups: dict[str, list[int]] = {}
    for answer in answers:
        groups.setdefault(answer.last or none, []).append(answer.rank)
    heading = say(en="Last call in this cell:", fr="Dernier appel dans cette cellule :")
    colon = say(en=":", fr=" :")
    return [heading, *(f"    {_ranks(ranks).lower()}{colon} {last}" for last, ranks in groups.items())]


def _what_now(answers: Sequence[Answer]) -> list[str]:
    lost = [answer.rank for answer in answers if not answer.kept]
    kept = [answer.rank for answer in answers if answer.kept]
    sentences = []
    if lost:
        en = f"{_ranks(lost)} {'start' if len(lost) > 1 else 'starts'} anew, without any variables"
        fr = f"{_ranks(lost)} : nouveau départ, sans aucune variable"
        if kept:
            en += f"; {listed(kept, french=False)} {'keep theirs' if len(kept) > 1 else 'keeps its own'}"
            fr += f" ; {listed(kept, french=True)} : variables conservées"
        sentences.append(say(en=f"{en}.", fr=f"{fr}."))
    if must_rejoin(answers):
        sentences.append(
            say(
                en="The process group is made anew before the next cell.",
                fr="Le groupe de processus sera reconstruit avant la prochaine cellule.",
            )
        )
    return sentences
