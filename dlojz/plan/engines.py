"""What each training library offers, so that no layout is searched that nothing can run.

Layer 4. Invariant: facts of the software, each with its source; how fast a library is, the cost model says
(`dlojz.predict.time.engines`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from dlojz.hardware import Precision
from dlojz.predict.time import ENGINES as COSTED
from dlojz.schema import LabError, one_of


class Offload(NamedTuple):
    """What a library can keep in the host's memory.

    Attributes:
        what: `optimizer` or `all`.
        zero: least ZeRO stage.
    """

    what: str
    zero: int


@dataclass(frozen=True)
class Offer:
    """What one library runs.

    Attributes:
        costed: its name in the cost model, without and with a pipeline.
        zero: stages without a pipeline.
        zero_pipeline: stages with one.
        schedules: of a pipeline.
        checkpointing: kinds; those that go with a split backward (zb-h1) are `none` alone.
        tensor: tensor parallelism for decoders, for image models.
        sequence: sequence parallelism.
        offload: what may lie in the host's memory, without a pipeline or tensor parallelism.
        uneven: whether stages may hold different numbers of layers.
        overlap: whether gradients are reduced beside the backward.
        fp32_gradients: precisions in which gradients are accumulated in fp32.
        context: ZeRO stages with which a sequence may be shared out (context parallelism of decoders whose attention
            is one kernel); none where it is not offered.
        experts: ZeRO stages with which experts may be shared out (expert parallelism), without and with a pipeline;
            none where it is not offered.
        source: where it says so.
    """

    costed: tuple[str, str]
    zero: tuple[int, ...]
    zero_pipeline: tuple[int, ...]
    schedules: tuple[str, ...]
    checkpointing: tuple[str, ...]
    tensor: tuple[bool, bool]
    sequence: bool
    offload: tuple[Offload, ...]
    uneven: bool
    overlap: bool
    fp32_gradients: tuple[Precision, ...]
    context: tuple[int, ...]
    experts: tuple[tuple[int, ...], tuple[int, ...]]
    source: str

    def gradient_bytes(self, precision: Precision) -> int:
        """Of an element of the accumulated gradients."""
        return 4 if precision in self.fp32_gradients or precision in ("fp32", "tf32") else 2

    def place(self, pipeline: bool) -> int:
        """Its place among the cost model's engines."""
        return COSTED.index(self.costed[pipeline])


_ALL_PRECISIONS: Final[tuple[Precision, ...]] = ("fp16", "bf16", "fp8")
OFFERS: Final[dict[str, Offer]] = {
    "megatron-core": Offer(
        ("megatron-core", "megatron-core"),
        (0, 1),
        (0, 1),
        ("1f1b", "interleaved"),
        ("none", "selective", "full"),
        (True, False),
        True,
        (),
        False,
        True,
        _ALL_PRECISIONS,
        (0, 1),
        ((0, 1), (0, 1)),
        "Megatron-LM, megatron/training/arguments.py: --use-distributed-optimizer is ZeRO-1; fp32 main gradients; "
        "--context-parallel-size, which Transformer Engine has for fused attention alone",
    ),
    "megatron-deepspeed": Offer(
        ("deepspeed", "megatron-deepspeed"),  # without a pipeline it is DeepSpeed's own ZeRO
        (0, 1, 2, 3),
        (0, 1),
        ("1f1b",),
        ("none", "full"),
        (True, False),
        False,
        (),
        True,
        False,
        ("bf16",),
        (),
        ((), ()),
        "bigscience-workshop/Megatron-DeepSpeed; DeepSpeed's pipeline engine refuses ZeRO-2 and 3",
    ),
    "deepspeed": Offer(
        ("deepspeed", "megatron-deepspeed"),
        (0, 1, 2, 3),
        (0, 1),
        ("1f1b",),
        ("none", "full"),
        (False, False),
        False,
        (Offload("optimizer", 1), Offload("all", 3)),
        True,
        False,
        (),
        (),
        ((0, 1, 2), ()),
        "deepspeed.ai, configuration JSON: zero_optimization, offload_optimizer, offload_param; pipeline engine; "
        "tutorial on mixtures of experts: ZeRO-2 with expert parallelism; its ZeRO-3 refuses deepspeed.moe layers",
    ),
    "torch": Offer(
        ("torchtitan", "torchtitan"),
        (0, 2, 3),
        (0, 2),
        ("1f1b", "gpipe", "interleaved", "zb-h1"),
        ("none", "selective", "full"),
        (True, False),
        True,
        (),
        True,
        True,
        _ALL_PRECISIONS,
        (2, 3),
        ((), ()),
        "torch.distributed: DDP, fully_shard (FSDP2), tensor.parallel, pipelining; as torchtitan puts them together; "
        "its parallel_dims.py: fsdp_enabled = dp_shard_enabled or cp_enabled, so that states are sharded over cp too",
    ),
    "by_hand": Offer(
        ("megatron", "megatron"),
        (0, 1, 2, 3),
        (0,),
        ("1f1b", "gpipe", "interleaved", "zb-h1"),
        ("none", "selective", "full"),
        (True, True),
        True,
        (),
        True,
        True,
        _ALL_PRECISIONS,
        (),
        ((0,), ()),
        "this package: tensor parallelism of convolutions too",
    ),
}
"""Libraries by the name under which they are asked for."""
OF_THE_LAB: Final = ("torch", "by_hand", "deepspeed")
"""Those that `dlojz.run` runs: searched for the catalogue's models."""
OF_MIXTURES: Final = (*OF_THE_LAB, "megatron-core")
"""Those searched for the catalogue's models with experts, which Megatron Core alone shares out in a pipeline too."""
OF_GIANTS: Final = ("megatron-core", "megatron-deepspeed", "torch", "deepspeed")
"""Those searched for decoders given by their sizes."""


def chosen(
    engines: str | tuple[str, ...] | list[str] | None, *, catalogue: bool, experts: bool = False
) -> tuple[str, ...]:
    """The libraries to search, in the order of `OFFERS`.

    Args:
        engines: names, one or several; without them, those that suit the model.
        catalogue: whether the model is of the catalogue, so that the lab can run it.
        experts: whether it has a mixture of experts.

    Raises:
        LabError: for an unknown name.
    """
    usual = (OF_MIXTURES if experts else OF_THE_LAB) if catalogue else OF_GIANTS
    wanted = usual if engines is None else engines
    names = tuple(one.strip() for one in wanted.split(",")) if isinstance(wanted, str) else tuple(wanted)
    legal = tuple(OFFERS) if catalogue else tuple(name for name in OFFERS if name != "by_hand")
    for name in names:
        if name not in legal:
            raise LabError(one_of("engine", name, legal))
    return tuple(name for name in OFFERS if name in names)
