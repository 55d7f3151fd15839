"""Read the registry of failures that a line of a log gives away: pattern, role, sentence and advice of each.

The entries are those of `data/signatures.toml`, which says what the roles mean; the first pattern that matches counts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from dlojz.base.language import format_bytes, say
from dlojz.running.folder import visible

Role = Literal["cause", "killed", "wait", "lost", "report"]
_REGISTRY = Path(__file__).with_name("data") / "signatures.toml"
_MOST_CHARACTERS = 4000
_SIZE = r"([\d.]+) ([KMGT]iB)"
# Torch's message on CUDA: of 2.1 and later, and before it.
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL = re.compile(rf"(?:total capacity of |; ){_SIZE}(?: total capacity| of which)")
_ALLOCATED = re.compile(rf"{_SIZE} (?:is allocated by PyTorch|already allocated)")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total")


class Signature(NamedTuple):
    """Failure that is recognised by its text.

    Args:
        weak: as a line of its own it proves little, since programs also go on after it; as an exception it counts.
    """

    name: str
    kind: str
    role: Role
    en: str
    fr: str
    do_en: str
    do_fr: str
    pattern: str = "(?!)"  # matches nothing
    weak: bool = False

    def texts(self, rank: int | None, match: re.Match[str] | None = None, /, **words: str) -> tuple[str, str]:
        """Say what happened, on which rank, and what to do; `words` fill the places of the sentence."""
        # `path` and `path2` are one name: a pattern may have a name once.
        groups = match.groupdict().items() if match else ()
        words |= {name.rstrip("2"): visible(text) for name, text in groups if text}
        words |= {
            "who": say(en="The job", fr="Le travail") if rank is None else say(en=f"Rank {rank}", fr=f"Le rang {rank}"),
            "of_whom": say(en="of the job", fr="du travail")
            if rank is None
            else say(en=f"of rank {rank}", fr=f"du rang {rank}"),
            "0": visible(match[0])[:120] if match else "",
        }
        templates = say(en=self.en, fr=self.fr), say(en=self.do_en, fr=self.do_fr)
        sentence, advice = (
            re.sub(r"\{(\w+)\}", lambda name: words.get(name[1], ""), template) for template in templates
        )
        # A group that did not take part leaves no blank before the full stop.
        return re.sub(r" +(?=[.,](?: |$))", "", sentence), advice


@cache
def _registry() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads(_REGISTRY.read_text(encoding="utf-8"))


@cache
def signatures() -> dict[str, Signature]:
    """Read all entries by their name, in their order."""
    return {entry["name"]: Signature(**entry) for entry in _registry()["signature"]}  # type: ignore[arg-type]


@cache
def _any_pattern() -> re.Pattern[str]:
    # One search instead of seventy; the name of a group may stand only once in a pattern.
    patterns = "|".join(entry.pattern for entry in signatures().values())
    return re.compile(re.sub(r"\(\?P<\w+>", "(?:", patterns), re.MULTILINE)


def recognise(text: str) -> tuple[Signature, re.Match[str]] | None:
    """Find the first signature that matches a line, or an exception with the lines below it; None where none does."""
    text = text[:_MOST_CHARACTERS]
    if not _any_pattern().search(text):
        return None
    matches = ((entry, re.search(entry.pattern, text, re.MULTILINE)) for entry in signatures().values())
    return next(((entry, match) for entry, match in matches if match), None)


def phase_of(frames: Sequence[str]) -> str:
    """Say in which phase of a training the frames of a traceback were; empty where they do not tell."""
    for phase in _registry()["phase"]:
        if any(re.search(phase["pattern"], frame) for frame in frames):
            return say(en=phase["en"], fr=phase["fr"])
    return ""


def memory_account(text: str, phase: str = "") -> str:
    """Say what torch's message of a full GPU tells: asked, total, allocated, reserved; and what fragmentation means.

    Source: c10/cuda/CUDACachingAllocator.cpp ("Tried to allocate … of which … is free"), and its form before torch 2.1.
    """

    def num_bytes(pattern: re.Pattern[str]) -> float | None:
        match = pattern.search(text)
        return float(match[1]) * 1024 ** (1 + "KMGT".index(match[2][0])) if match else None

    asked, total, allocated = num_bytes(_ASKED), num_bytes(_TOTAL), num_bytes(_ALLOCATED)
    reserved, unallocated = num_bytes(_RESERVED), num_bytes(_UNALLOCATED)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = reserved - allocated
    quantities = (
        (say(en="asked at once", fr="demandés d’un coup"), asked),
        (say(en="on the GPU", fr="sur le GPU"), total),
        (say(en="allocated", fr="alloués"), allocated),
        (say(en="reserved, not allocated", fr="réservés, non alloués"), unallocated),
    )
    parts = [phase] if phase else []
    parts += [f"{format_bytes(quantity)} {label}" for label, quantity in quantities if quantity is not None]
    if unallocated is not None and asked is not None and unallocated > asked:
        parts.append(signatures()["fragmented"].texts(None)[0])
    return say(en="; ", fr=" ; ").join(parts)
