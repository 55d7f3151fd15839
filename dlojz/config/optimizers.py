"""Register the optimizers: one entry each, with the facts that other rooms ask for.

To add an optimizer: its entry here, its name in `fields.OptimizerFields`, its class in `train.engines.base`
(or `replicated`, where it communicates). The forecast follows from the entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Describe one optimizer.

    Args:
        label: name, as papers write it.
        state_tensors: keys of its states that have the parameter's size.
        state_numbers: keys of its states that are one number per parameter.
        counts_steps: whether it keeps the number of updates too, one number per parameter.
        update_tensors: tensors of a parameter's size that a compressing update takes besides the mean.
        replica_tensors: tensors of a parameter's size that each replica but the first has for itself between two
            meetings (the weights, the moments of an inner AdamW); just after a meeting one less.
        deepspeed_names: its names in DeepSpeed's JSON, the usual one first; empty where DeepSpeed has it not.
        baseline: optimizer with the same inner update that sends everything; empty for one that is a baseline.
        compresses: whether it sends one bit per number in its second stage.
        goes_alone: whether its replicas take steps alone, then meet.
        has_first_stage: whether it takes `warmup_steps`.
        has_forms: whether torch has all forms of its update (`update=`).
        elementwise: whether it updates each number by itself, so that a share is updated as in the whole.
        keeps_dtype: whether its states may have the weights' own type (bf16-true).
        runs: whether an engine runs it; else it is only predicted.
    """

    label: str
    state_tensors: tuple[str, ...] = ()
    state_numbers: tuple[str, ...] = ()
    counts_steps: bool = False
    update_tensors: int = 0
    replica_tensors: int = 0
    deepspeed_names: tuple[str, ...] = ()
    baseline: str = ""
    compresses: bool = False
    goes_alone: bool = False
    has_first_stage: bool = False
    has_forms: bool = False
    elementwise: bool = False
    keeps_dtype: bool = False
    runs: bool = True

    @property
    def numbers(self) -> int:
        """Tensors of one number that it keeps per parameter."""
        return len(self.state_numbers) + self.counts_steps

    @property
    def communicates(self) -> bool:
        """Whether it averages over the ranks itself."""
        return self.compresses or self.goes_alone


_ADAM: Final = ("exp_avg", "exp_avg_sq")
STATE_NUMBERS: Final = ("c_avg", "factor")
_torch = partial(OptimizerSpec, has_forms=True, elementwise=True, keeps_dtype=True)
_one_bit = partial(OptimizerSpec, compresses=True, has_first_stage=True, counts_steps=True, update_tensors=2)

# fmt: off
OPTIMIZERS: Final[dict[str, OptimizerSpec]] = {
    "sgd": _torch(label="SGD", deepspeed_names=("SGD",)),
    "momentum": _torch(label="momentum", state_tensors=("momentum_buffer",)),
    # DeepSpeed's `Adam` decouples weight decay by default: it is AdamW.
    "adamw": _torch(label="AdamW", state_tensors=_ADAM, counts_steps=True, deepspeed_names=("AdamW", "Adam")),
    "lamb": OptimizerSpec(label="LAMB", state_tensors=_ADAM, counts_steps=True, deepspeed_names=("Lamb",)),
    "one_bit_adam": _one_bit(label="1-bit Adam", baseline="adamw", state_tensors=_ADAM),
    "one_bit_lamb": _one_bit(label="1-bit LAMB", baseline="lamb", state_tensors=(*_ADAM, "exp_avg_sq_fresh"),
                             state_numbers=STATE_NUMBERS, update_tensors=4),
    "zero_one_adam": _one_bit(label="0/1 Adam", baseline="adamw", state_tensors=_ADAM),
    "local_sgd": OptimizerSpec(label="local SGD", baseline="sgd", goes_alone=True, has_first_stage=True,
                               replica_tensors=1),
    "diloco": OptimizerSpec(label="DiLoCo", baseline="adamw", goes_alone=True, counts_steps=True,
                            state_tensors=(*_ADAM, "outer_weights", "outer_momentum"), replica_tensors=3),
    "adamw_8bit": OptimizerSpec(label="8-bit AdamW", state_tensors=_ADAM, keeps_dtype=True, runs=False),
}
# fmt: on


def _which(fact: str) -> tuple[str, ...]:
    return tuple(name for name, spec in OPTIMIZERS.items() if getattr(spec, fact))


COMPRESSED: Final = _which("compresses")
LOCAL: Final = _which("goes_alone")
COMMUNICATING: Final = _which("communicates")
WITH_FIRST_STAGE: Final = _which("has_first_stage")
WITH_FORMS: Final = _which("has_forms")
ELEMENTWISE: Final = _which("elementwise")
KEEPING_DTYPE: Final = _which("keeps_dtype")
