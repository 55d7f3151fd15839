"""What cannot be asked of a curriculum, and what it is by default.

Layer 1, loads no torch. Invariant: a curriculum that exists begins shorter than the whole length, reaches it within the
run, and carries no number that its pacing function does not read.

Source: Li et al. 2021 (arXiv 2108.06084); the settings of DeepSpeed's `CurriculumScheduler`.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from dlojz.curriculum import MULTIPLE, stages_of
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig

START_SHARE: Final = 8
"""Where no length is said, samples begin with so small a share of the whole."""
STEPS_SHARE: Final = 2
"""Where no number of steps is said, samples are whole after so small a share of the run."""
MAX_DIGITS: Final = 12
"""Longer numbers are refused by their own field."""
PLAIN: Final[dict[str, object]] = {
    "curriculum_start": None,
    "curriculum_steps": None,
    "curriculum_root": 2,
    "curriculum_multiple": MULTIPLE,
    "curriculum_lengths": "",
}
"""The fields of a curriculum, each as it is where no pacing function reads it."""
READ: Final[dict[str, tuple[str, ...]]] = {
    "none": (),
    "linear": ("curriculum_start", "curriculum_steps", "curriculum_multiple"),
    "root": ("curriculum_start", "curriculum_steps", "curriculum_root", "curriculum_multiple"),
    "discrete": ("curriculum_lengths", "curriculum_multiple"),
}
"""The fields that each pacing function reads."""


def fill_in_curriculum(filled: dict[str, Any], steps: object) -> None:
    """Put what a curriculum is by default where nothing was given, so that equal runs are written alike.

    Args:
        filled: fields of a run, the length of its sequences among them; what is no number is left to its own field.
        steps: of the run.
    """
    kind, written = filled.get("curriculum", "none"), filled.get("curriculum_lengths")
    if kind == "discrete" and isinstance(written, str):
        filled["curriculum_lengths"] = written.replace(" ", "")
    if kind not in ("linear", "root"):
        return
    whole, multiple = _number(filled.get("sequence_length")), _number(filled.get("curriculum_multiple", MULTIPLE))
    if filled.get("curriculum_start") is None and whole and multiple:
        filled["curriculum_start"] = max(multiple, whole // START_SHARE // multiple * multiple)
    if filled.get("curriculum_steps") is None and (run := _number(steps)):
        filled["curriculum_steps"] = max(1, run // STEPS_SHARE)


def _number(value: object) -> int | None:
    """A whole number, which a command line gives as text."""
    written = str(value)
    return int(written) if written.isdecimal() and len(written) <= MAX_DIGITS else None


def curriculum_misfit(config: RunConfig) -> str | None:
    """Why a run's curriculum cannot be and what would work; None where it can.

    Raises:
        LabError: if the lengths of a discrete one are not written as such.
    """
    if (foreign := _unread(config)) is not None:
        return foreign
    if config.curriculum == "none":
        return None
    if config.sequence_length is None:
        return say(
            en=f"curriculum={config.curriculum!r} makes the samples of a text grow, but {config.model} reads images: "
            "use a gpt or llama model, or leave it out.",
            fr=f"curriculum={config.curriculum!r} fait croître les échantillons d’un texte, mais {config.model} lit "
            "des images : prenez un modèle gpt ou llama, ou retirez-le.",
        )
    whole = config.sequence_length
    misfit = _multiple_misfit(config, whole, "sequence_length") or _shared_misfit(config)
    if misfit is not None:
        return misfit
    return _stages_misfit(config, whole) if config.curriculum == "discrete" else _pacing_misfit(config, whole)


def _unread(config: RunConfig) -> str | None:
    """Why a field was given that this curriculum does not read."""
    kind = config.curriculum
    for name, plain in PLAIN.items():
        value = getattr(config, name)
        if value == plain or name in READ[kind]:
            continue
        readers = [other for other, names in READ.items() if name in names]
        works = ", ".join(f"curriculum={other!r}" for other in readers)
        return say(
            en=f"{name}={value!r} was received, but curriculum={kind!r} does not read it: use {works}, or leave it "
            "out.",
            fr=f"{name}={value!r} a été reçu, mais curriculum={kind!r} ne le lit pas : prenez {works}, ou retirez-le.",
        )
    return None


def _multiple_misfit(config: RunConfig, length: int, name: str) -> str | None:
    """Why a length is none of the curriculum."""
    multiple = config.curriculum_multiple
    if length % multiple == 0:
        return None
    return say(
        en=f"lengths are multiples of curriculum_multiple={multiple}, but {name}={length} is none: use another "
        f"length, or curriculum_multiple={math.gcd(length, multiple)}.",
        fr=f"les longueurs sont des multiples de curriculum_multiple={multiple}, mais {name}={length} n’en est pas "
        f"un : prenez une autre longueur, ou curriculum_multiple={math.gcd(length, multiple)}.",
    )


def _shared_misfit(config: RunConfig) -> str | None:
    """Why the ranks that share the tokens of a sample could not."""
    tp, multiple = config.layout.tp, config.curriculum_multiple
    if not config.layout.sequence_parallel or multiple % tp == 0:
        return None
    return say(
        en=f"sequence_parallel shares each length among tp={tp} ranks, but lengths are multiples of {multiple}: use "
        f"curriculum_multiple={math.lcm(multiple, tp)}.",
        fr=f"sequence_parallel partage chaque longueur entre tp={tp} rangs, mais les longueurs sont des multiples de "
        f"{multiple} : prenez curriculum_multiple={math.lcm(multiple, tp)}.",
    )


def _pacing_misfit(config: RunConfig, whole: int) -> str | None:
    """Why a linear or root pacing cannot be."""
    start, steps = config.curriculum_start or whole, config.curriculum_steps or 1
    if start >= whole:
        return say(
            en=f"a curriculum ends longer than it starts, but curriculum_start={start} and sequence_length={whole} "
            f"were received: use a start below {whole}.",
            fr=f"un curriculum finit plus long qu’il ne commence, mais curriculum_start={start} et "
            f"sequence_length={whole} ont été reçus : prenez un début inférieur à {whole}.",
        )
    if (misfit := _multiple_misfit(config, start, "curriculum_start")) is not None:
        return misfit
    if steps > config.steps:
        return say(
            en=f"curriculum_steps={steps} ends beyond the {config.steps} steps of the run, whose samples would never "
            f"be whole: use at most {config.steps}, or more steps.",
            fr=f"curriculum_steps={steps} finit au-delà des {config.steps} pas de l’entraînement, dont les "
            f"échantillons ne seraient jamais entiers : prenez au plus {config.steps}, ou davantage de pas.",
        )
    return None


def _stages_misfit(config: RunConfig, whole: int) -> str | None:
    """Why a discrete curriculum cannot be."""
    if not config.curriculum_lengths:
        return say(
            en="curriculum='discrete' needs its lengths and their last steps: give curriculum_lengths, such as "
            "16:100,32:200.",
            fr="curriculum='discrete' demande ses longueurs et leurs derniers pas : donnez curriculum_lengths, "
            "par exemple 16:100,32:200.",
        )
    stages = stages_of(config.curriculum_lengths)
    lengths, last_steps = [0, *(length for length, _ in stages), whole], [0, *(last for _, last in stages)]
    rising = {say(en="lengths", fr="les longueurs"): lengths, say(en="steps", fr="les pas"): last_steps}
    for what, values in rising.items():
        before, after = next((pair for pair in pairwise(values) if pair[1] <= pair[0]), (0, 1))
        if after <= before:
            return say(
                en=f"the {what} of a curriculum rise, up to the whole sequence_length={whole}, but "
                f"curriculum_lengths={config.curriculum_lengths} goes from {before} to {after}: write them in "
                "order, without the whole.",
                fr=f"{what} d’un curriculum croissent, jusqu’à sequence_length={whole}, mais "
                f"curriculum_lengths={config.curriculum_lengths} va de {before} à {after} : écrivez-les dans l’ordre, "
                "sans la longueur entière.",
            )
    for length, _ in stages:
        if (misfit := _multiple_misfit(config, length, say(en="length", fr="longueur"))) is not None:
            return misfit
    if last_steps[-1] >= config.steps:
        return say(
            en=f"curriculum_lengths={config.curriculum_lengths} ends beyond the {config.steps} steps of the run, whose "
            f"samples would never be whole: end it at step {config.steps - 1} at most, or take more steps.",
            fr=f"curriculum_lengths={config.curriculum_lengths} finit au-delà des {config.steps} pas de "
            f"l’entraînement, dont les échantillons ne seraient jamais entiers : terminez-le au pas "
            f"{config.steps - 1} au plus, ou prenez davantage de pas.",
        )
    return None
