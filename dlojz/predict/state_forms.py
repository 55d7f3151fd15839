"""Model states per parameter in closed form: by precision, optimizer, ZeRO stage, tensor and pipeline degree, offload.

Layer 3. Invariant: exact fractions, those of the papers. What libraries add (padding, whole parameters at the
edges of a partition, copies, buckets) is in `dlojz.predict.states`, which is exact for a model.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §3 and §5; where a figure is another's, it says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, get_args

from dlojz.footprint import Category
from dlojz.schema import LabError, one_of
from dlojz.text import say

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
EIGHT_BIT_BLOCK: Final = 256
"""Elements that share a scale (the largest magnitude, in fp32) in 8-bit optimizer states.

Source: Dettmers et al. 2022 (arXiv 2110.02861), §2; 256 in bitsandbytes (2,048 before 0.45) and in torchao. Both keep
tensors of fewer than 4,096 elements in fp32, and torchao those that 256 does not divide.
"""
MOMENT_BYTES: Final[dict[str, Fraction]] = {
    "sgd": Fraction(0),
    "momentum": Fraction(4),
    "adam": Fraction(8),
    "adamw": Fraction(8),
    "lamb": Fraction(8),
    "adamw_8bit": 2 * (1 + Fraction(4, EIGHT_BIT_BLOCK)),
}
"""Bytes that an optimizer keeps per parameter, its master copy not counted: moments in fp32, or twice 8 bits and their
scales, 2 + 1/32. LAMB's norms are one number per layer (You et al. 2020, arXiv 1904.00962)."""


@dataclass(frozen=True)
class StatesForm:
    """Bytes of the model states on one rank, per parameter of the whole model, as exact fractions.

    Args:
        device: by category, on the device.
        host: in host memory.
        nvme: on an NVMe disk.
    """

    device: dict[Category, Fraction]
    host: Fraction = Fraction(0)
    nvme: Fraction = Fraction(0)

    @property
    def device_per_parameter(self) -> Fraction:
        """Bytes on the device, all categories."""
        return sum(self.device.values(), Fraction(0))

    def device_bytes(self, parameters: int) -> int:
        """Bytes on the device for so many parameters, rounded up."""
        return math.ceil(self.device_per_parameter * parameters)

    def by_category(self, parameters: int) -> dict[Category, int]:
        """The same by category, each rounded up."""
        return {category: math.ceil(share * parameters) for category, share in self.device.items()}

    def host_bytes(self, parameters: int) -> int:
        """Bytes in host memory for so many parameters, rounded up; times the ranks of a node, what a node needs."""
        return math.ceil(self.host * parameters)

    def nvme_bytes(self, parameters: int) -> int:
        """Bytes on an NVMe disk for so many parameters, rounded up."""
        return math.ceil(self.nvme * parameters)


def bytes_per_parameter(  # noqa: PLR0913 — one argument per axis along which states are split or moved
    precision: Precision = "fp32",
    optimizer: Optimizer = "adamw",
    *,
    zero: int = 0,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    heaviest_stage: Fraction | float | None = None,
    offload: Offload = "none",
    nvme: bool = False,
) -> StatesForm:
    """Bytes of the model states on the heaviest rank, per parameter of the whole model.

    With w, g, m, o bytes per weight, gradient, master copy and optimizer state: w + g + m + o without ZeRO,
    w + g + (m + o)/N for stage 1, w + (g + m + o)/N for stage 2, (w + g + m + o)/N for stage 3 over N = dp ranks.
    Tensor parallelism divides by tp (layer norms and biases, which every rank keeps, are left out: below 0.1 % of a
    transformer), a pipeline by 1/pp or the share of its heaviest stage.

    Offload of the optimizer moves gradients, master copy and moments to host memory, in fp32, and leaves the weights:
    16 bytes per parameter and 2, over N. Offload of the parameters moves the weights too.

    Source: ZeRO, §5; ZeRO-Offload (arXiv 2101.06840), §4, where host gradients have 16 bit, DeepSpeed's have fp32;
    ZeRO-Infinity (arXiv 2104.07857), §5.1.

    Args:
        heaviest_stage: share of the parameters that the heaviest pipeline stage holds, above 0, at most 1.
        offload: to where states are moved from the device: none, of the optimizer (from ZeRO-1 on), of the parameters
            too (ZeRO-3).
        nvme: whether what is offloaded lies on an NVMe disk and not in host memory (ZeRO-3).

    Raises:
        LabError: if an argument is unknown or out of range, or if the stage cannot do what is asked.
    """
    _check(precision, optimizer, zero, (dp, tp, pp), heaviest_stage, offload, nvme)
    weight, gradient, master = (Fraction(each) for each in _WEIGHTS[precision])
    moments = MOMENT_BYTES[optimizer]
    share = Fraction(heaviest_stage).limit_denominator(10**9) if heaviest_stage is not None else Fraction(1, pp)
    share /= tp
    device: dict[Category, Fraction] = {
        "weights": share * weight / (dp if zero == 3 else 1),
        "gradients": share * gradient / (dp if zero >= 2 else 1),
        "optimizer": share * moments / (dp if zero >= 1 else 1),
        "master": share * master / (dp if zero >= 1 else 1),
    }
    moved = Fraction(0)
    if offload != "none":
        # What is updated on the host is a copy in fp32, with its gradient, whatever the device computes in.
        moved = share * (4 + 4 + moments) / dp
        device |= {"optimizer": Fraction(0), "master": Fraction(0)}
        if zero >= 2:
            device["gradients"] = Fraction(0)
    if offload == "parameters":
        moved += device["weights"]
        device["weights"] = Fraction(0)
    return StatesForm(device, nvme=moved) if nvme else StatesForm(device, host=moved)


def _check(
    precision: str,
    optimizer: str,
    zero: int,
    degrees: tuple[int, int, int],
    heaviest_stage: Fraction | float | None,
    offload: str,
    nvme: bool,
) -> None:
    for what, value, legal in (
        ("precision", precision, get_args(Precision)),
        ("optimizer", optimizer, get_args(Optimizer)),
        ("zero", zero, range(4)),
        ("offload", offload, get_args(Offload)),
    ):
        if value not in legal:
            raise LabError(one_of(what, value, [str(one) for one in legal]))
    for name, degree in zip(("dp", "tp", "pp"), degrees, strict=True):
        if degree < 1:
            raise LabError(
                say(
                    en=f"{name} counts ranks and must be at least 1, but {degree} was received.",
                    fr=f"{name} compte des rangs et vaut au moins 1, mais {degree} a été reçu.",
                )
            )
    if heaviest_stage is not None and not 0 < heaviest_stage <= 1:
        raise LabError(
            say(
                en=f"heaviest_stage is a share, above 0 and at most 1, but {heaviest_stage} was received.",
                fr=f"heaviest_stage est une part, entre 0 et 1, mais {heaviest_stage} a été reçu.",
            )
        )
    least = {"none": 0, "optimizer": 1, "parameters": 3}[offload]
    if zero < least or (nvme and (zero < 3 or offload == "none")):
        raise LabError(
            say(
                en=f"offload={offload!r}, nvme={nvme} was received with zero={zero}: states of the optimizer are "
                "offloaded from zero=1 on, parameters and anything to NVMe with zero=3.",
                fr=f"offload={offload!r}, nvme={nvme} a été reçu avec zero={zero} : on décharge les états de "
                "l’optimiseur à partir de zero=1 ; les paramètres, et tout vers un disque NVMe, avec zero=3.",
            )
        )
