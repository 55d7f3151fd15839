"""How the sequences of a text grow over the first steps: the pacing functions, and what cannot be asked of them.

Layer 1, loads no torch. Invariant: a length is a multiple of `curriculum_multiple`, never falls from step to step, and
is the whole `sequence_length` from `curriculum_steps` on.

Source: Li et al. 2021, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models"
(arXiv 2108.06084), §4; DeepSpeed's `CurriculumScheduler`, whose settings these are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig

START_SHARE = 8
"""Where no length is said, samples begin with so small a share of the whole."""


def curriculum_misfit(config: RunConfig) -> str | None:
    """Why a run's curriculum cannot be and what would work; None where it can."""
    if config.curriculum == "none":
        return None
    if config.sequence_length is None:
        return say(
            en=f"curriculum={config.curriculum!r} makes the samples of a text grow, but {config.model} reads images: "
            "use a gpt or llama model, or leave it out.",
            fr=f"curriculum={config.curriculum!r} fait croître les échantillons d’un texte, mais {config.model} lit "
            "des images : prenez un modèle gpt ou llama, ou retirez-le.",
        )
    return None
