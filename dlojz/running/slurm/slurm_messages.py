"""Explain SLURM's messages: why a job waits, and why sbatch refused it, with what can be done about it.

The scheduler's own words are always shown; those that are not known stay unexplained, never guessed.
"""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from dlojz.base.language import say
from dlojz.running.folder import visible

UNCERTAIN = re.compile(r"[Ss]ocket timed out|[Zz]ero [Bb]ytes were transmitted|did not answer")
"""Words of sbatch after which nobody knows whether the job was taken."""
_LIMIT = re.compile(r"(Assoc|QOS)(Grp|Max)([A-Za-z]*)")


@cache
def _messages() -> dict[str, list[dict[str, Any]]]:
    path = Path(__file__).with_name("data") / "slurm_messages.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def explain_refusal(words: str) -> str:
    """Explain a refusal of sbatch in one sentence; empty where it is not known."""
    for one in _messages()["refusal"]:
        if re.search(one["pattern"], words, re.IGNORECASE):
            return say(en=one["en"], fr=one["fr"])
    return ""


def explain_reason(reason: str) -> str:
    """Explain a raw reason of `squeue` in one sentence; empty where there is none."""
    name = reason.strip().strip("()")
    if name in ("", "None"):
        return ""
    key = name.partition(",")[0].replace(" ", "_").lower()
    for one in _messages()["reason"]:
        if any(fnmatchcase(key, pattern) for pattern in one["names"]):
            return say(en=one["en"], fr=one["fr"])
    limit = _LIMIT.match(name)
    if limit:
        return _explain_limit(*limit.groups())
    shown = visible(name)[:200]
    return say(
        en=f"it waits; the scheduler says why: {shown}.", fr=f"il attend ; raison donnée par l’ordonnanceur : {shown}."
    )


def _explain_limit(owner: str, kind: str, what: str) -> str:
    """Explain a limit by its owner (account or QoS), whether all its users share it, and what it counts."""
    en, fr = ("your account", "de votre compte") if owner == "Assoc" else ("the QoS", "de la QoS")
    shared = kind == "Grp"
    unit = what.partition("Per")[0].lower()  # WallDurationPerJob counts hours, not jobs
    counted = next((one for one in _messages()["counted"] if one["part"] in unit), None)
    counted = counted or {"en": "resources", "fr": "de ressources"}
    if not shared and any(word in what for word in ("WallDuration", "PerJob", "PerNode", "MinutesPerJob")):
        return say(
            en=f"{en} does not give one job so many {counted['en']}: it waits for ever; cancel it and ask for less.",
            fr=f"la limite {fr} n’accorde pas autant {counted['fr']} à un seul travail : il attendra sans fin ; "
            "annulez-le et demandez moins.",
        )
    if "Minutes" in what and shared:
        return say(
            en=f"the hours of {en} are used up: it starts when hours are added.",
            fr=f"les heures {fr} sont épuisées : il démarrera quand des heures seront ajoutées.",
        )
    return say(
        en=f"{en} has reached its limit of {counted['en']}{' together with all who share it' if shared else ''}: it "
        "starts when other jobs end.",
        fr=f"la limite {counted['fr']} {fr} est atteinte{', tous utilisateurs confondus' if shared else ''} : il "
        "démarrera quand d’autres travaux finiront.",
    )
