"""How the sequences of a text grow over the first steps: the pacing functions, and the tokens of each step.

Layer 1, loads no torch. Invariant: a length is a multiple of `curriculum_multiple`, never falls from step to step, and
is the whole `sequence_length` from the last step of the pacing on. The lab counts a run's steps from 0, the pacing
functions count from 1, as DeepSpeed does: step `s` of a run is their `t = s + 1`.

Source: Li et al. 2021, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models"
(arXiv 2108.06084); DeepSpeed's `runtime/data_pipeline/curriculum_scheduler.py`, whose settings and lengths these are.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig

MULTIPLE = 8
"""Products of half-precision matrices are fastest on sides that are multiples of it.

Source: DeepSpeed's `CurriculumScheduler`, whose `difficulty_step` is to be a multiple of 8 for FP16."""
MAX_WRITTEN = 400
"""Letters that the lengths of a discrete curriculum may take."""
_STAGES = re.compile(r"[0-9]{1,9}:[0-9]{1,9}(,[0-9]{1,9}:[0-9]{1,9})*")


class Stretch(NamedTuple):
    """Steps in a row whose samples are of one length.

    Args:
        length: tokens per sample.
        first_step: the first of them, from 0.
        num_steps: how many they are, at least 1.
    """

    length: int
    first_step: int
    num_steps: int


def linear_length(t: int, *, start: int, end: int, steps: int, multiple: int = MULTIPLE) -> int:
    """Tokens per sample of the t-th step, where they grow in proportion to the steps.

    Args:
        t: number of the step, from 1.
        start: tokens of the first samples; raised to a multiple where it is none.
        end: tokens of whole samples.
        steps: the step from which samples are whole.
        multiple: lengths are rounded down to a multiple of this.

    Source: Li et al. 2021 (arXiv 2108.06084), the pacing function of sequence length warmup; DeepSpeed's
    `fixed_linear`.
    """
    return root_length(t, start=start, end=end, steps=steps, degree=1, multiple=multiple)


def root_length(t: int, *, start: int, end: int, steps: int, degree: int = 2, multiple: int = MULTIPLE) -> int:
    """Tokens per sample of the t-th step, where they grow by a root of the steps: fast at first, then slower.

    Args:
        t: number of the step, from 1.
        start: tokens of the first samples; raised to a multiple where it is none.
        end: tokens of whole samples.
        steps: the step from which samples are whole.
        degree: of the root; 2 is the square root, 1 the linear pacing.
        multiple: lengths are rounded down to a multiple of this.

    Source: DeepSpeed's `fixed_root`, operation for operation, so that roundings are the same.
    """
    grown: float = (float(t) / steps) ** (1.0 / degree)
    length = math.floor(grown * (end - start) + start)
    lowest = -(-start // multiple) * multiple
    return min(max(length - length % multiple, lowest), end)


def discrete_length(t: int, *, lengths: Sequence[int], last_steps: Sequence[int]) -> int:
    """Tokens per sample of the t-th step, where they grow in stages.

    Args:
        t: number of the step, from 1.
        lengths: of the stages in turn, the whole length last.
        last_steps: number of the last step of each stage but the last, which has no end.

    Source: DeepSpeed's `fixed_discrete`.
    """
    for length, last_step in zip(lengths, last_steps, strict=False):
        if t <= last_step:
            return length
    return lengths[-1]


def stages_of(written: str) -> tuple[tuple[int, int], ...]:
    """The stages of a discrete curriculum, `(length, number of its last step)`, from text such as `16:100,32:200`.

    Raises:
        LabError: if the text is not so made.
    """
    dense = written.replace(" ", "")
    if len(dense) > MAX_WRITTEN or not _STAGES.fullmatch(dense):
        raise LabError(
            say(
                en="curriculum_lengths is a list of lengths and their last steps such as 16:100,32:200, but "
                f"{written[:60]!r} was received.",
                fr="curriculum_lengths est une liste de longueurs et de leurs derniers pas, comme 16:100,32:200, "
                f"mais {written[:60]!r} a été reçu.",
            )
        )
    pairs = (pair.partition(":") for pair in dense.split(","))
    return tuple((int(length), int(last_step)) for length, _, last_step in pairs)


def length_at(config: RunConfig, step: int) -> int:
    """Tokens per sample of one step of a run, the same on all ranks.

    Args:
        config: a run on text.
        step: from 0.

    Raises:
        LabError: if the run reads images.
    """
    whole, t = whole_length(config), step + 1
    if config.curriculum == "none":
        return whole
    if config.curriculum == "discrete":
        stages = stages_of(config.curriculum_lengths)
        lengths = [length for length, _ in stages]
        return discrete_length(t, lengths=[*lengths, whole], last_steps=[last_step for _, last_step in stages])
    return root_length(
        t,
        start=config.curriculum_start or whole,
        end=whole,
        steps=config.curriculum_steps or 1,
        degree=config.curriculum_root if config.curriculum == "root" else 1,
        multiple=config.curriculum_multiple,
    )


def stretches(config: RunConfig) -> tuple[Stretch, ...]:
    """The lengths of a run in turn, each with its steps; there are at most `sequence_length / curriculum_multiple`.

    Raises:
        LabError: if the run reads images.
    """
    found: list[Stretch] = []
    step = 0
    while step < config.steps:
        length = length_at(config, step)
        after = bisect_right(range(config.steps), length, lo=step, key=lambda at: length_at(config, at))
        found.append(Stretch(length, step, after - step))
        step = after
    return tuple(found)


def lengths_of(config: RunConfig) -> tuple[int, ...]:
    """Tokens per sample of every step.

    Raises:
        LabError: if the run reads images.
    """
    return tuple(stretch.length for stretch in stretches(config) for _ in range(stretch.num_steps))


def tokens_at(config: RunConfig, step: int) -> int:
    """Tokens of one step's global batch: samples times their length.

    Raises:
        LabError: if the run reads images.
    """
    return config.layout.global_batch * length_at(config, step)


def total_tokens(config: RunConfig) -> int:
    """Tokens that a run reads in all its steps, over all replicas.

    Raises:
        LabError: if the run reads images.
    """
    return config.layout.global_batch * sum(stretch.length * stretch.num_steps for stretch in stretches(config))


def first_whole_step(config: RunConfig) -> int:
    """The first step whose samples are whole, from 0: from there on a step takes most memory.

    Raises:
        LabError: if the run reads images.
    """
    return stretches(config)[-1].first_step


def whole_length(config: RunConfig) -> int:
    """Tokens of a whole sample.

    Raises:
        LabError: if the run reads images.
    """
    if config.sequence_length is None:
        raise LabError(
            say(
                en=f"{config.model} reads images, which have no tokens: use a gpt or llama model.",
                fr=f"{config.model} lit des images, qui n’ont pas de tokens : prenez un modèle gpt ou llama.",
            )
        )
    return config.sequence_length
