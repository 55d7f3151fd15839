"""`--set METHOD.OPTION=VALUE` of `dlojz compress`: every option that `--list` shows, of one method at a time.

Layer 6. Invariant: a value is read as its default is typed; nothing that was typed is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dlojz.compress.methods import METHODS, method
from dlojz.schema import LabError, one_of
from dlojz.text import say

OPTION = "--set"
TRUTHS = {"true": True, "false": False}


def joined(words: Sequence[str]) -> list[str]:
    """The words of a command line with all its `--set` in one, behind the others."""
    others: list[str] = []
    settings: list[str] = []
    waiting = False
    for word in words:
        if waiting and not word.startswith("--"):
            settings.append(word)
            waiting = False
            continue
        if waiting:  # no value: left where it is, so that what splits the words says so
            others.append(OPTION)
        waiting = word == OPTION
        if waiting:
            continue
        if word.startswith(f"{OPTION}="):
            settings.append(word.partition("=")[2])
        else:
            others.append(word)
    if waiting:
        return [*others, OPTION]
    return [*others, OPTION, ",".join(settings)] if settings else others


def settings_of(text: str | None, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each method is told, from `METHOD.OPTION=VALUE`, several of them with commas between.

    Args:
        text: as it was typed; None or empty: nothing.
        methods: those of the board.

    Raises:
        LabError: for anything else, for a method that is not on the board, an option that it does not have, a value of
            another type, or an option that is set twice.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in filter(None, (one.strip() for one in (text or "").split(","))):
        place, equals, value = (one.strip() for one in part.partition("="))
        name, dot, option = place.partition(".")
        if not (equals and dot and name and option and value):
            raise LabError(
                say(
                    en=f"--set takes METHOD.OPTION=VALUE such as int8_static.samples=64, but {part!r} was received: "
                    "see --list.",
                    fr=f"--set attend MÉTHODE.OPTION=VALEUR comme int8_static.samples=64, mais {part!r} a été reçu : "
                    "voir --list.",
                )
            )
        chosen = method(name)
        if name not in methods:
            raise LabError(
                say(
                    en=f"--set {part} was received, but {name} is not on the board: add it to --methods.",
                    fr=f"--set {part} a été reçu, mais {name} n’est pas au tableau : ajoutez-la à --methods.",
                )
            )
        chosen.check_options([option])
        if option in found.setdefault(name, {}):
            raise LabError(
                say(
                    en=f"--set gives {place} twice: keep one of them.",
                    fr=f"--set donne {place} deux fois : gardez-en une.",
                )
            )
        found[name][option] = _typed(place, value, METHODS[name].options[option])
    return found


def _typed(place: str, text: str, default: Any) -> Any:
    """The value in the type of the default."""
    if isinstance(default, bool):
        if text.lower() not in TRUTHS:
            raise LabError(one_of(place, text, TRUTHS))
        return TRUTHS[text.lower()]
    if not isinstance(default, int | float):
        return text
    kind = type(default)
    try:
        value = kind(text)
        if math.isfinite(value):
            return value
    except ValueError:
        pass
    raise LabError(
        say(
            en=f"{place} takes a {'whole' if kind is int else 'finite'} number such as {default}, but {text!r} was "
            "received.",
            fr=f"{place} attend un nombre {'entier' if kind is int else 'fini'} comme {default}, mais {text!r} a été "
            "reçu.",
        )
    )
