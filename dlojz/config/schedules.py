"""Schedule what changes over the steps of a run: an optimizer's stages and a curriculum's lengths.

A legal run has a first stage of at least one step, and a second of at least one, or its replicas meet at least once;
the optimizers themselves (`dlojz.by_hand.optimizers`) refuse by the same sentences.

The forms of one update compute the same. They differ in how many kernels are launched, which temporaries are there, and
how long gradients live:

    form          kernels             temporaries of AdamW        gradients
    for_loop      some per parameter  twice the largest tensor    all, until the update
    foreach       some for all        one tensor per parameter    all, until the update
    fused         one for all         none                        all, until the update
    in_backward   some per parameter  twice the tensor's own      freed as they come: those of about one module
    in_forward    some per parameter  twice the tensor's own      all, until their module is used again

The sequences of a text grow over the first steps. A length is a multiple of `curriculum_multiple`, never falls from
step to step, and is the whole `sequence_length` from the last step of the pacing on. The lab counts a run's steps from
0, the pacing functions count from 1, as DeepSpeed does: step `s` of a run is their `t = s + 1`.

Source: torch 2.13, `optim/adam.py` and `optim/sgd.py` (for_loop, foreach, fused); Jiang et al. 2021, "Optimizer Fusion:
Efficient Training with Better Locality and Parallelism" (arXiv 2104.00237), backward-fusion and forward-fusion; torch
2.13, `distributed/algorithms/ddp_comm_hooks`; Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization" (arXiv 1905.13727); Li et al. 2021, "The Stability-Efficiency Dilemma: Investigating
Sequence Length Warmup for Training GPT Models" (arXiv 2108.06084); DeepSpeed's
`runtime/data_pipeline/curriculum_scheduler.py`, whose settings and lengths these are.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from dlojz.config.fields import CurriculumFields, RunFields, run_refused, run_sentence
from dlojz.config.optimizers import LOCAL

AT_ONCE: Final = ("for_loop", "foreach", "fused")
"""Forms of an update after the backward pass."""
IN_PASSES: Final = ("in_backward", "in_forward")
"""Forms of an update within the passes."""
LOCAL_STEPS: Final = 8
"""Default of H, for short runs; DiLoCo's paper has 500 (Douillard et al. 2023, arXiv 2311.08105)."""
WARMUP_SHARE: Final = 4
"""By default, one step in so many is of the first stage: 15 to 25 % is the advice.

Source: DeepSpeed's tutorial on 1-bit Adam, `freeze_step`."""
POWERSGD_LEAST_START: Final = 2
"""Steps in full before PowerSGD, at least: DDP fills its buckets anew in its second step, and errors belong to buckets.

Source: torch 2.13, `powerSGD_hook.py`, `PowerSGDState.__init__`."""
POWERSGD_START_SHARE: Final = 10
"""One step in so many is sent in full before PowerSGD begins: torch's advice is to start with 10 % of the run.

Source: torch 2.13, `powerSGD_hook.py`, docstring of `PowerSGDState`, `start_powerSGD_iter`."""
SETTLING_STEPS: Final = 2
"""The first step makes the optimizer's states, the second lets DDP and DeepSpeed settle their buckets."""


def default_warmup_steps(steps: int) -> int:
    """Default number of steps of the first stage."""
    return max(1, steps // WARMUP_SHARE)


def default_local_steps(steps: int) -> int:
    """Default number of steps that each replica takes alone."""
    return min(LOCAL_STEPS, steps)


def powersgd_start(steps: int) -> int:
    """Steps at the start of a run whose gradients PowerSGD sends in full."""
    return max(POWERSGD_LEAST_START, steps // POWERSGD_START_SHARE)


def powersgd_restart_note(steps: int) -> str:
    """Note for a resumed run whose gradients PowerSGD compresses: it starts without its errors."""
    return run_sentence("PowerSGD restarts", steps=steps)


def meets(step: int, local_steps: int, warmup_steps: int = 0, total_steps: int | None = None) -> bool:
    """Whether the replicas average after a step, from 0: after every H-th one behind the warm-up, and at the end.

    Args:
        local_steps: H, at least 1.
        warmup_steps: steps of the first stage, in which gradients are averaged; all replicas hold the same weights.
        total_steps: steps of the run, where they are known.

    Source: Stich 2018 (arXiv 1805.09767), algorithm 1, with synchronisation times H apart; Lin et al. 2018 (arXiv
    1808.07217) for the warm-up, "post-local SGD".
    """
    # However many steps they have gone alone since they last met.
    if step + 1 == total_steps:
        return True
    return step >= warmup_steps and (step + 1 - warmup_steps) % local_steps == 0


def sending_interval(config: RunFields) -> int:
    """Steps from one communication along the data axis to the next: H where replicas take steps alone, else 1."""
    return config.local_steps or 1


def settled_step(config: RunFields, first_step: int = 0, *, at_least: int = 0) -> int:
    """Find a step, from 0, with the communication of all later ones (except steps that replicas take alone).

    It is the third of the run (of the attempt, where it goes on from a checkpoint), the second of the second stage, or
    one after which the replicas meet.

    Args:
        at_least: the first step that counts for other reasons.
    """
    # Not one of the first two, in which states and buckets settle.
    last_step, step = config.steps - 1, max(first_step + SETTLING_STEPS, at_least)
    if config.optimizer in LOCAL:
        warmup_steps = config.warmup_steps or 0
        step = max(step, warmup_steps)
        while step < last_step and not meets(step, config.local_steps or 1, warmup_steps, config.steps):
            step += 1
    elif config.layout.gradient_compression == "powersgd":
        # The second step that is compressed.
        step = max(step, first_step + powersgd_start(config.steps) + 1)
    else:
        # The second step of the second stage.
        step = max(step, (config.warmup_steps or 0) + 1)
    return min(step, last_step)


def check_stages(warmup_steps: int, total_steps: int | None) -> None:
    """Check the number of warm-up steps: at least one, and fewer than the steps of the run.

    Raises:
        LabError: in one sentence.
    """
    if warmup_steps < 1:
        raise run_refused("warm-up steps", warmup_steps=warmup_steps)
    if total_steps is not None and warmup_steps >= total_steps:
        max_warmup = max(1, total_steps - 1)
        raise run_refused("no second stage", warmup_steps=warmup_steps, total_steps=total_steps, max_warmup=max_warmup)


def check_local_steps(local_steps: int, total_steps: int | None) -> None:
    """Check the number of local steps: replicas must average before the end of the run.

    Raises:
        LabError: in one sentence.
    """
    if local_steps < 1:
        raise run_refused("local steps", local_steps=local_steps)
    if total_steps is not None and local_steps > total_steps:
        raise run_refused("no meeting", local_steps=local_steps, total_steps=total_steps)


def no_effect_note(name: str) -> str:
    """Note for a compressing optimizer on one process: it has no effect."""
    return run_sentence("nothing to compress", name=name)


def single_replica_note(name: str) -> str:
    """Note for an averaging optimizer on one process: it has no effect."""
    return run_sentence("outer step alone" if name.lower() == "diloco" else "nothing to average", name=name)


def resized_note(name: str, old: int, ranks: int) -> str:
    """Note for a run resumed with another number of ranks than the checkpoint's: what is dropped."""
    return run_sentence("resized, local" if name in LOCAL else "resized, compressed", name=name, ranks=ranks, old=old)


_DEFAULTS: Final = {name: field.default for name, field in CurriculumFields.model_fields.items()}
MULTIPLE: Final[int] = _DEFAULTS["curriculum_multiple"]
"""Products of half-precision matrices are fastest on sides that are multiples of it.

Source: DeepSpeed's `CurriculumScheduler`, whose `difficulty_step` is to be a multiple of 8 for FP16."""
PLAIN: Final = {name: default for name, default in _DEFAULTS.items() if name != "curriculum"}
"""The fields of a curriculum, each as it is where no pacing function reads it."""
READ: Final[dict[str, tuple[str, ...]]] = {
    "none": (),
    "linear": ("curriculum_start", "curriculum_steps", "curriculum_multiple"),
    "root": ("curriculum_start", "curriculum_steps", "curriculum_multiple"),
    "discrete": ("curriculum_lengths", "curriculum_multiple"),
}
"""The fields that each pacing function reads."""
MAX_WRITTEN = 400
"""Letters that the lengths of a discrete curriculum may take."""
_STAGES = re.compile(r"[0-9]{1,9}:[0-9]{1,9}(,[0-9]{1,9}:[0-9]{1,9})*")


class LengthStretch(NamedTuple):
    """Steps in a row whose samples are of one length.

    Args:
        length: tokens per sample.
        first_step: the first of them, from 0.
        num_steps: how many they are, at least 1.
    """

    length: int
    first_step: int
    num_steps: int


def root_length(t: int, *, start: int, end: int, steps: int, degree: int = 2, multiple: int = MULTIPLE) -> int:
    """Compute tokens per sample of the t-th step, growing by a root of the steps: fast at first, then slower.

    Args:
        t: number of the step, from 1.
        start: tokens of the first samples; raised to a multiple where it is none.
        end: tokens of whole samples.
        steps: the step from which samples are whole.
        degree: of the root; 2 is the square root, 1 the linear pacing (`fixed_linear`).
        multiple: lengths are rounded down to a multiple of this.

    Source: DeepSpeed's `fixed_root`, operation for operation, so that roundings are the same; its `fixed_linear`, the
    pacing of Li et al. 2021 (arXiv 2108.06084), is the root of degree 1.
    """
    grown: float = (float(t) / steps) ** (1.0 / degree)
    length = math.floor(grown * (end - start) + start)
    # Rounded up: −(−a // b).
    lowest = -(-start // multiple) * multiple
    return min(max(length - length % multiple, lowest), end)


def discrete_length(t: int, *, lengths: Sequence[int], last_steps: Sequence[int]) -> int:
    """Compute tokens per sample of the t-th step, growing in stages.

    Args:
        t: number of the step, from 1.
        lengths: of the stages in turn, the whole length last.
        last_steps: number of the last step of each stage but the last, which has no end.

    Source: DeepSpeed's `fixed_discrete`.
    """
    # `zip` ends with the shorter one: the whole length has no last step.
    for length, last_step in zip(lengths, last_steps, strict=False):
        if t <= last_step:
            return length
    return lengths[-1]


def stages_of(written: str) -> tuple[tuple[int, int], ...]:
    """Parse the stages of a discrete curriculum, `(length, number of its last step)`, e.g. from `16:100,32:200`.

    Raises:
        LabError: if the text has another form.
    """
    dense = written.replace(" ", "")
    if len(dense) > MAX_WRITTEN or not _STAGES.fullmatch(dense):
        raise run_refused("curriculum", written=written[:60])
    pairs = (pair.partition(":") for pair in dense.split(","))
    return tuple((int(length), int(last_step)) for length, _, last_step in pairs)


def length_at(config: RunFields, step: int) -> int:
    """Compute tokens per sample of one step of a run, the same on all ranks.

    Args:
        step: from 0.

    Raises:
        LabError: if the run reads images.
    """
    full_length, t = whole_length(config), step + 1
    if config.curriculum == "none":
        return full_length
    if config.curriculum == "discrete":
        stages = stages_of(config.curriculum_lengths)
        lengths = [length for length, _ in stages]
        return discrete_length(t, lengths=[*lengths, full_length], last_steps=[last_step for _, last_step in stages])
    return root_length(
        t,
        # Without a start, samples are whole from the beginning.
        start=config.curriculum_start or full_length,
        end=full_length,
        steps=config.curriculum_steps or 1,
        degree=2 if config.curriculum == "root" else 1,
        multiple=config.curriculum_multiple,
    )


def stretches(config: RunFields) -> tuple[LengthStretch, ...]:
    """List the lengths of a run in turn, each with its steps: at most `sequence_length / curriculum_multiple`.

    Raises:
        LabError: if the run reads images.
    """
    length_stretches: list[LengthStretch] = []
    step = 0
    while step < config.steps:
        length = length_at(config, step)
        # Lengths never fall, so that the first step of a longer one is found by halving.
        after = bisect_right(
            range(config.steps), length, lo=step, key=lambda candidate_step: length_at(config, candidate_step)
        )
        length_stretches.append(LengthStretch(length, step, after - step))
        step = after
    return tuple(length_stretches)


def first_whole_step(config: RunFields) -> int:
    """The first step whose samples are whole, from 0: from there on a step takes most memory.

    Raises:
        LabError: if the run reads images.
    """
    return stretches(config)[-1].first_step


def whole_length(config: RunFields) -> int:
    """Tokens of a whole sample.

    Raises:
        LabError: if the run reads images.
    """
    if config.sequence_length is None:
        raise run_refused("images", config=config)
    return config.sequence_length
