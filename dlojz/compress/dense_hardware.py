"""What zeros do not gain: one dense layer, masked, as sparse rows, or 2:4, timed beside the layer without zeros.

Layer 2. Invariant: each form is timed in turns with the dense layer on the same inputs, and what is kept are the
ratios within a round; `predicted_ratio` is the share of the multiplications that is left, which is what one expects.

Shape suffixes: B rows of the inputs, O outputs, I inputs.

Source: Gale et al. 2020, "Sparse GPU kernels for deep learning" (arXiv 2006.10901), for why few zeros make nothing
faster; Mishra et al. 2021 (arXiv 2104.08378) for 2:4.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dlojz.compress.masks import magnitude_mask
from dlojz.compress.measuring import latencies
from dlojz.compress.two_to_four import mask_2_of_4
from dlojz.schema import LabError
from dlojz.text import say

Form = Literal["masked", "csr", "semi_structured"]
SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_INDEX_BYTES = 8
_AMPERE = (8, 0)


@dataclass(frozen=True)
class SparseSpeed:
    """One form of a layer, timed.

    Args:
        form: `masked` (dense, with zeros), `csr` (compressed sparse rows), `semi_structured` (2:4, on a GPU).
        sparsity: share of the weights that are zero.
        predicted_ratio: share of the multiplications that is left.
        bytes_ratio: bytes of this form of the weight to those of the dense one.
        ratio: seconds, in those of the dense layer in the same round; median over the rounds.
        ratio_low: a quarter of the rounds were below.
        ratio_high: a quarter were above.
        seconds: median.
    """

    form: Form
    sparsity: float
    predicted_ratio: float
    bytes_ratio: float
    ratio: float
    ratio_low: float
    ratio_high: float
    seconds: float


class _Product(nn.Module):
    """x Wᵀ for a weight in any layout; waits for a GPU, so that its answer is there when the clock is read."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        self.weight_OI = weight_OI  # no buffer: a sparse one has no place in a state dictionary

    def forward(self, x_BI: Tensor) -> Tensor:
        if self.weight_OI.layout == torch.sparse_csr:
            y_BO = (self.weight_OI @ x_BI.T).T
        else:
            y_BO = nn.functional.linear(x_BI, self.weight_OI)
        if y_BO.is_cuda:
            torch.cuda.synchronize()
        return y_BO


def has_semi_structured(device: str | torch.device) -> bool:
    """Whether a device multiplies 2:4 weights: an NVIDIA GPU since Ampere."""
    kind = torch.device(device)
    return kind.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(kind) >= _AMPERE


def semi_structured(weight_OI: Tensor) -> Tensor:
    """A 2:4 weight as torch's semi-structured tensor, which a dense layer's product then takes.

    Args:
        weight_OI: with the 2:4 pattern, in 16 bits, on a GPU that has units for it.

    Raises:
        LabError: if the weight is on another device.
    """
    if not has_semi_structured(weight_OI.device):
        raise LabError(
            say(
                en=f"torch multiplies 2:4 weights on NVIDIA GPUs since Ampere only, but this weight is on "
                f"{weight_OI.device}; two_to_four.pack shows the same format anywhere.",
                fr=f"torch ne multiplie des poids 2:4 que sur les GPU NVIDIA depuis Ampere, mais ce poids est sur "
                f"{weight_OI.device} ; two_to_four.pack montre le même format partout.",
            )
        )
    from torch.sparse import to_sparse_semi_structured

    packed: Tensor = to_sparse_semi_structured(weight_OI)
    return packed


def sparse_speed(
    outputs: int = 1024,
    inputs: int = 1024,
    batch: int = 64,
    sparsities: Sequence[float] = SPARSITIES,
    *,
    rounds: int = 30,
    device: str = "cpu",
    seed: int = 0,
) -> list[SparseSpeed]:
    """Time one dense layer with more and more zeros, in every form that the device has.

    Args:
        outputs: O, a multiple of 64 where the device has semi-structured tensors.
        inputs: I, a multiple of 4, and of 64 there too.
        batch: B, rows that are multiplied.
        sparsities: shares of zeros, from 0 to below 1.
        rounds: of timing.
        device: `cpu` (float32) or `cuda` (float16, and 2:4 beside the others where the GPU has it).
        seed: of the weights and inputs.

    Raises:
        LabError: if a sparsity is out of its range.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
    dense_OI = torch.randn(outputs, inputs, generator=generator)
    x_BI = torch.randn(batch, inputs, generator=generator).to(device, dtype)
    cases: list[tuple[Form, float, float, Tensor]] = []
    for sparsity in sparsities:
        masked_OI = dense_OI * magnitude_mask(dense_OI, sparsity)
        cases.append(("masked", sparsity, 1.0, masked_OI.to(device, dtype)))
        # Half precision has no sparse product on the CPU, and on a GPU float32 would be another comparison.
        rows = _csr(masked_OI.to(device, dtype))
        cases.append(("csr", sparsity, _csr_bytes(rows) / (dense_OI.numel() * dtype.itemsize), rows))
    if has_semi_structured(device):
        half = (dense_OI * mask_2_of_4(dense_OI)).to(device, dtype)
        cases.append(("semi_structured", 0.5, 9 / 16, semi_structured(half)))
    dense = _Product(dense_OI.to(device, dtype))
    found = []
    for form, sparsity, size, weight in cases:
        # In pairs, one after the other: what slows the machine for a moment then slows both.
        _, one = latencies([dense, _Product(weight)], x_BI, rounds)
        found.append(
            SparseSpeed(form, sparsity, 1 - sparsity, size, one.ratio, one.ratio_low, one.ratio_high, one.seconds)
        )
    return found


def crossing(speeds: Sequence[SparseSpeed], form: Form = "csr") -> float | None:
    """The sparsity from which a form is as fast as the dense layer, between those that were timed; None if never.

    Ratios are taken to change along a straight line from one sparsity to the next; what counts is the last time that
    the form was slower.
    """
    line = sorted(((one.sparsity, one.ratio) for one in speeds if one.form == form), key=lambda point: point[0])
    if not line or line[-1][1] > 1:
        return None
    slower = [index for index, (_, ratio) in enumerate(line) if ratio > 1]
    if not slower:
        return line[0][0]
    (before, high), (after, low) = line[slower[-1]], line[slower[-1] + 1]
    return before + (after - before) * (high - 1) / (high - low)


def _csr(weight_OI: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says of every CSR tensor that their support is a beta
        return weight_OI.to_sparse_csr()


def _csr_bytes(rows: Tensor) -> int:
    """Values, the column of each, and where each row begins."""
    return rows.values().numel() * (rows.dtype.itemsize + _INDEX_BYTES) + rows.crow_indices().numel() * _INDEX_BYTES
