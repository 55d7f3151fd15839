"""Rules of thumb for memory: closed forms of model states and activations, as the papers give them, in exact fractions.

**Model states** per parameter by precision, optimizer, ZeRO stage, tensor and pipeline degree, offload. Padding, copies
and buckets of libraries are in `dlojz.prediction.states`, which is exact for a model. Source: Rajbhandari et al. 2020
(arXiv 1910.02054), §3 and §5, unless said otherwise.

**Rules** of bytes per parameter by name, from `data/rules_of_thumb.toml`; each is a sum of parts, with their precision.

**Activations** of transformers in 16 bit with dropout masks of 1 byte; statistics of layer norms are left out (16·s·b
bytes per layer on a GPU). Symbols: s sequence length, b samples per micro-batch, h hidden size, a attention heads, L
layers, t tensor-parallel ranks, v vocabulary. "KOR" is Korthikanti et al. 2022 (arXiv 2205.05198), "INF" Rajbhandari et
al. 2021 (arXiv 2104.07857).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, say
from dlojz.config.optimizers import EIGHT_BIT_BLOCK, OPTIMIZERS
from dlojz.results.footprint import Category

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Precision = Literal["fp32", "fp16_amp", "bf16", "bf16_fp32_gradients", "autocast"]
"""fp32: all in fp32. fp16_amp, bf16: weights and gradients in 16 bit, a master copy in fp32 (ZeRO, §3.1).
bf16_fp32_gradients: the same with gradients kept in fp32; those of 16 bit live for one layer at a time (Megatron).
autocast: all states in fp32; only the products are computed in 16 bit (torch.autocast)."""
Optimizer = Literal["sgd", "momentum", "adam", "adamw", "lamb", "adamw_8bit"]
Offload = Literal["none", "optimizer", "parameters"]

_WEIGHTS: Final[dict[str, tuple[int, int, int]]] = {
    "fp32": (4, 4, 0),
    "autocast": (4, 4, 0),
    "fp16_amp": (2, 2, 4),
    "bf16": (2, 2, 4),
    "bf16_fp32_gradients": (2, 4, 4),
}
"""Bytes of a weight, of its gradient and of its master copy."""
MOMENT_BYTES: Final[dict[str, Fraction]] = {
    **{name: Fraction(4 * len(OPTIMIZERS[name].state_tensors)) for name in get_args(Optimizer) if name in OPTIMIZERS},
    "adam": Fraction(8),
    "adamw_8bit": 2 * (1 + Fraction(4, EIGHT_BIT_BLOCK)),
}
"""Bytes that an optimizer keeps per parameter, its master copy not counted: moments in fp32, or twice 8 bits and their
scales, 2 + 1/32. LAMB's norms are one number per layer (You et al. 2020, arXiv 1904.00962)."""


@dataclass(frozen=True)
class StatesForm:
    """Model states on one rank, in bytes per parameter of the whole model, as exact fractions.

    Attributes:
        device: by category, on the device.
        host: offloaded, in host memory or on an NVMe disk.
    """

    device: dict[Category, Fraction]
    host: Fraction = Fraction(0)

    @property
    def device_per_parameter(self) -> Fraction:
        """Bytes on the device, all categories."""
        return sum(self.device.values(), Fraction(0))

    def device_bytes(self, parameters: int) -> int:
        """Bytes on the device for so many parameters, rounded up."""
        return math.ceil(self.device_per_parameter * parameters)

    def host_bytes(self, parameters: int) -> int:
        """Bytes in host memory for so many parameters, rounded up; a node needs them once per rank."""
        return math.ceil(self.host * parameters)


def bytes_per_parameter(
    precision: Precision = "fp32",
    optimizer: Optimizer = "adamw",
    *,
    zero: int = 0,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    offload: Offload = "none",
) -> StatesForm:
    """Compute the bytes of model states on the heaviest rank, per parameter of the whole model.

    With w, g, m, o bytes per weight, gradient, master copy and optimizer state: w + g + m + o without ZeRO,
    w + g + (m + o)/N for stage 1, w + (g + m + o)/N for stage 2, (w + g + m + o)/N for stage 3 over N = dp ranks.
    Tensor parallelism divides by tp (layer norms and biases, whole on every rank, are left out: below 0.1 % of a
    transformer), a pipeline by pp.

    Offload of the optimizer (from ZeRO-1 on) moves gradients, master copy and moments to host memory, in fp32, and
    leaves the weights: 16 bytes per parameter and 2, over N. Offload of the parameters (ZeRO-3) moves the weights too.

    Source: ZeRO, §5; ZeRO-Offload (arXiv 2101.06840), §4, where host gradients have 16 bit, DeepSpeed's have fp32;
    ZeRO-Infinity (arXiv 2104.07857), §5.1.

    Raises:
        LabError: if an argument is unknown or out of range, or the stage cannot offload it.
    """
    _check(precision, optimizer, zero, (dp, tp, pp), offload)
    weight, gradient, master = (Fraction(num_bytes) for num_bytes in _WEIGHTS[precision])
    moments = MOMENT_BYTES[optimizer]
    share = Fraction(1, pp * tp)
    # Stage 1 shards what the optimizer keeps, stage 2 the gradients too, stage 3 the weights too.
    device: dict[Category, Fraction] = {
        "weights": share * weight / (dp if zero == 3 else 1),
        "gradients": share * gradient / (dp if zero >= 2 else 1),
        "optimizer": share * moments / (dp if zero >= 1 else 1),
        "master": share * master / (dp if zero >= 1 else 1),
    }
    host_bytes = Fraction(0)
    if offload != "none":
        # What is updated on the host is a copy in fp32, with its gradient, whatever the device computes in.
        host_bytes = share * (4 + 4 + moments) / dp
        device |= {"optimizer": Fraction(0), "master": Fraction(0)}
        if zero >= 2:  # stage 1 accumulates whole gradients on the device
            device["gradients"] = Fraction(0)
    if offload == "parameters":
        host_bytes += device["weights"]
        device["weights"] = Fraction(0)
    return StatesForm(device, host_bytes)


def _check(precision: str, optimizer: str, zero: int, degrees: tuple[int, int, int], offload: str) -> None:
    for argument, value, legal in (
        ("precision", precision, get_args(Precision)),
        ("optimizer", optimizer, get_args(Optimizer)),
        ("zero", zero, range(4)),
        ("offload", offload, get_args(Offload)),
    ):
        if value not in legal:
            raise LabError(one_of(argument, value, [str(choice) for choice in legal]))
    for name, degree in zip(("dp", "tp", "pp"), degrees, strict=True):
        if degree < 1:
            raise phrase.refused("no degree", name=name, degree=degree)
    if zero < {"none": 0, "optimizer": 1, "parameters": 3}[offload]:
        raise phrase.refused("nothing to offload", offload=offload, zero=zero)


@dataclass(frozen=True)
class RulePart:
    """Part of a rule; its precision is empty where it is no tensor of the model."""

    category: Category
    bytes_per_parameter: int
    precision: str


@dataclass(frozen=True)
class RuleOfThumb:
    """Rule of thumb: bytes per parameter, their parts and sources, and where it holds, in the reader's language."""

    name: str
    parts: tuple[RulePart, ...]
    sources: tuple[str, ...]
    about: Callable[[], str]

    @property
    def bytes_per_parameter(self) -> int:
        """Sum of the parts."""
        return sum(part.bytes_per_parameter for part in self.parts)

    def total_bytes(self, parameters: int) -> int:
        """Bytes of a model of so many parameters."""
        return self.bytes_per_parameter * parameters


_FILE = Path(__file__).parent / "data" / "rules_of_thumb.toml"
RULES: Final[dict[str, RuleOfThumb]] = {
    row["name"]: RuleOfThumb(
        row["name"],
        tuple(RulePart(*part) for part in row["parts"]),
        tuple(row["sources"]),
        partial(say, **row["about"]),  # made when it is asked for, in the language of that moment
    )
    for row in tomllib.loads(_FILE.read_text(encoding="utf-8"))["rule"]
}
"""The rules by name, the smallest first."""


Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Shape:
    """Shape of a micro-batch in a transformer layer.

    Args:
        sequence_length: s, tokens.
        micro_batch: b, samples.
        hidden: h.
        heads: a, of attention.
    """

    sequence_length: int
    micro_batch: int
    hidden: int
    heads: int

    @property
    def sbh(self) -> int:
        """Elements of one activation tensor of the layer."""
        return self.sequence_length * self.micro_batch * self.hidden

    @property
    def scores(self) -> int:
        """Elements of the attention scores: a·s²·b, each of which is kept as 5 bytes (softmax, mask, after dropout)."""
        return self.heads * self.sequence_length**2 * self.micro_batch


def layer_parts(shape: Shape, *, tp: int = 1, sequence_parallel: bool = False) -> dict[str, Fraction]:
    """Compute the bytes that a layer keeps for backward, by part: attention 11·sbh + 5·a·s²·b, MLP 19·sbh, norms 4·sbh.

    With tensor parallelism each of attention and MLP keeps 3·sbh whole on every rank (its input and its last dropout
    mask) and the norms 4·sbh; sequence parallelism shards these too.
    Source: KOR, §4.1, table 2.
    """
    whole_share = Fraction(1, tp) if sequence_parallel else Fraction(1)
    sbh = shape.sbh
    return {
        # 8 of attention and 16 of the MLP are the 24/t of the paper; 3 and 3, with 4 of the norms, its 10.
        "attention": 3 * sbh * whole_share + Fraction(8 * sbh + 5 * shape.scores, tp),
        "mlp": 3 * sbh * whole_share + Fraction(16 * sbh, tp),
        "layer_norm": 4 * sbh * whole_share,
    }


def layer_bytes(
    shape: Shape, *, tp: int = 1, sequence_parallel: bool = False, checkpointing: Checkpointing = "none"
) -> Fraction:
    """Compute the bytes that one layer keeps for backward.

    none: sbh(34 + 5as/h); with tensor parallelism sbh(10 + 24/t + 5as/(ht)); with sequence parallelism too,
    sbh/t (34 + 5as/h). Selective recomputation drops the term 5as/h. Full recomputation keeps the layer's input,
    2·sbh, sharded with sequence parallelism.

    Source: KOR, §4 and §5, table 2.

    Raises:
        LabError: if `checkpointing` is none of these.
    """
    if checkpointing not in get_args(Checkpointing):
        raise LabError(one_of("checkpointing", checkpointing, get_args(Checkpointing)))
    if checkpointing == "full":
        return Fraction(2 * shape.sbh, tp if sequence_parallel else 1)
    # Selective recomputation keeps all but the scores.
    total = sum(layer_parts(shape, tp=tp, sequence_parallel=sequence_parallel).values(), Fraction(0))
    return total - Fraction(5 * shape.scores, tp) if checkpointing == "selective" else total


def infinity_activation_bytes(shape: Shape, layers: int) -> int:
    """Compute all activations of a step, 2·b·s·nl·(16·hd + 2·heads·s). Source: INF, §3."""
    return 2 * infinity_activation_working_bytes(shape) * layers


def infinity_checkpoint_bytes(shape: Shape, layers: int, layers_per_checkpoint: int = 1) -> Fraction:
    """Compute activation checkpoints, 2·b·s·hd·nl/ci. Source: INF, §3, equation 3."""
    return Fraction(2 * shape.sbh * layers, layers_per_checkpoint)


def infinity_activation_working_bytes(shape: Shape, layers_per_checkpoint: int = 1) -> int:
    """Compute the working memory of recomputation between two checkpoints, b·s·ci·(16·hd + 2·heads·s).

    Source: INF, §3, equation 5.
    """
    tokens = shape.micro_batch * shape.sequence_length
    return layers_per_checkpoint * tokens * (16 * shape.hidden + 2 * shape.heads * shape.sequence_length)
