"""Register the optimizers: one entry each, with the facts that other rooms ask for.

To add an optimizer: its entry here, its name in `fields.OptimizerFields`, its class in `train.engines.base`
(or `replicated`, where it communicates). The forecast follows from the entry.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Describe one optimizer.

    Args:
        label: name, as papers write it.
        state_tensors: keys of its states that have the parameter's size.
        matrix_states: keys of its states of a matrix, where these are others: of one of Muon's hidden matrices, or of
            any that Adafactor factors into rows and columns.
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
        orthogonal: whether a hidden matrix's update is its momentum, made orthogonal.
        goes_in_passes: whether it updates each parameter by itself, so that the passes may (`in_backward`).
        whole_layers: whether it updates a layer as a whole, which a rank with a part of it cannot.
        elementwise: whether it updates each number by itself, so that a share is updated as in the whole.
        keeps_dtype: whether its states may have the weights' own type (bf16-true).
        block_elements: elements of a state of one byte each that share a scale in fp32; 0 where states are no bytes.
        is_paged: whether its states of one byte lie in memory that the driver moves to the host and back.
        runs: whether an engine runs it; else it is only predicted.
    """

    label: str
    state_tensors: tuple[str, ...] = ()
    matrix_states: tuple[str, ...] = ()
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
    orthogonal: bool = False
    goes_in_passes: bool = False
    whole_layers: bool = False
    elementwise: bool = False
    keeps_dtype: bool = False
    block_elements: int = 0
    is_paged: bool = False
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
EIGHT_BIT_BLOCK: Final = 256
"""Elements that share a scale (the largest magnitude, in fp32) in 8-bit optimizer states.

Source: Dettmers et al. 2022 (arXiv 2110.02861), §2; 256 in bitsandbytes (2,048 before 0.45) and in torchao. Both keep
tensors of fewer than 4,096 elements in fp32, and torchao those that 256 does not divide.
"""
_torch = partial(OptimizerSpec, has_forms=True, goes_in_passes=True, elementwise=True, keeps_dtype=True)
_eight_bit = partial(OptimizerSpec, state_tensors=_ADAM, block_elements=EIGHT_BIT_BLOCK, goes_in_passes=True,
                     keeps_dtype=True, runs=False)  # fmt: skip
_one_bit = partial(OptimizerSpec, compresses=True, has_first_stage=True, counts_steps=True, update_tensors=2)

# fmt: off
OPTIMIZERS: Final[dict[str, OptimizerSpec]] = {
    "sgd": _torch(label="SGD", deepspeed_names=("SGD",)),
    "momentum": _torch(label="momentum", state_tensors=("momentum_buffer",)),
    # DeepSpeed's `Adam` decouples weight decay by default: it is AdamW.
    "adamw": _torch(label="AdamW", state_tensors=_ADAM, counts_steps=True, deepspeed_names=("AdamW", "Adam")),
    "lamb": OptimizerSpec(label="LAMB", state_tensors=_ADAM, counts_steps=True, deepspeed_names=("Lamb",)),
    "adafactor": OptimizerSpec(label="Adafactor", state_tensors=("variance",), matrix_states=("row_var", "col_var"),
                               counts_steps=True, goes_in_passes=True, whole_layers=True, keeps_dtype=True),
    "muon": OptimizerSpec(label="Muon", state_tensors=_ADAM, matrix_states=("momentum_buffer",), counts_steps=True,
                          orthogonal=True, whole_layers=True, keeps_dtype=True),
    "one_bit_adam": _one_bit(label="1-bit Adam", baseline="adamw", state_tensors=_ADAM),
    "one_bit_lamb": _one_bit(label="1-bit LAMB", baseline="lamb", state_tensors=(*_ADAM, "exp_avg_sq_fresh"),
                             state_numbers=STATE_NUMBERS, update_tensors=4),
    "zero_one_adam": _one_bit(label="0/1 Adam", baseline="adamw", state_tensors=_ADAM),
    "local_sgd": OptimizerSpec(label="local SGD", baseline="sgd", goes_alone=True, has_first_stage=True,
                               replica_tensors=1),
    "diloco": OptimizerSpec(label="DiLoCo", baseline="adamw", goes_alone=True, counts_steps=True,
                            state_tensors=(*_ADAM, "outer_weights", "outer_momentum"), replica_tensors=3),
    "adamw_8bit": _eight_bit(label="8-bit AdamW"),
    "paged_adamw_8bit": _eight_bit(label="paged 8-bit AdamW", is_paged=True, whole_layers=True),
}
# fmt: on


def _which(fact: str) -> tuple[str, ...]:
    return tuple(name for name, spec in OPTIMIZERS.items() if getattr(spec, fact))


COMPRESSED: Final = _which("compresses")
LOCAL: Final = _which("goes_alone")
COMMUNICATING: Final = _which("communicates")
WITH_FIRST_STAGE: Final = _which("has_first_stage")
WITH_FORMS: Final = _which("has_forms")
IN_PASS: Final = _which("goes_in_passes")
ELEMENTWISE: Final = _which("elementwise")
KEEPING_DTYPE: Final = _which("keeps_dtype")
