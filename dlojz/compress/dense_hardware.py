"""What zeros do not gain: one dense layer, masked, as sparse rows, or 2:4, timed beside the layer without zeros.

Layer 2. Invariant: each form is timed in turns with the dense layer on the same inputs, and what is kept are the
ratios within a round; `predicted_ratio` is the share of the multiplications that is left, which is what one expects.

The path for GPUs follows torch's documentation; it has never run on one, so no figure of 2:4 in hardware was measured.

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
from dlojz.compress.two_to_four import GROUP, KEPT, mask_2_of_4, packed_bytes
from dlojz.schema import LabError
from dlojz.text import say

Form = Literal["masked", "csr", "semi_structured"]
SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
GPU_CALLS = 20
"""Products between two waits for a GPU, so that what Python takes to launch one hides behind the one before."""
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
    """x Wᵀ for a weight in any layout."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        self.weight_OI = weight_OI  # no buffer: a sparse one has no place in a state dictionary

    def forward(self, x_BI: Tensor) -> Tensor:
        if self.weight_OI.layout == torch.sparse_csr:
            return (self.weight_OI @ x_BI.T).T
        return nn.functional.linear(x_BI, self.weight_OI)


def has_semi_structured(device: str | torch.device) -> bool:
    """Whether a device multiplies 2:4 weights: an NVIDIA GPU since Ampere."""
    kind = torch.device(device)
    if kind.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(kind) >= _AMPERE


def semi_structured(weight_OI: Tensor) -> Tensor:
    """A 2:4 weight as torch's semi-structured tensor, which a dense layer's product then takes.

    Args:
        weight_OI: with the 2:4 pattern, in 16 bits, on a GPU that has units for it.

    Raises:
        LabError: if the weight is on another device, or if torch refuses its shape or precision, or was built without
            the library that packs it.
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

    try:
        packed: Tensor = to_sparse_semi_structured(weight_OI)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        shape, why = " × ".join(str(length) for length in weight_OI.shape), _first_line(error)
        raise LabError(
            say(
                en=f"torch cannot pack this 2:4 weight, {shape} in {weight_OI.dtype}: {why}; use 16 bits and lengths "
                "that are multiples of 64.",
                fr=f"torch ne peut pas compacter ce poids 2:4, {shape} en {weight_OI.dtype} : {why} ; prenez 16 bits "
                "et des dimensions multiples de 64.",
            )
        ) from None
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

    A form that torch refuses is left out with a warning that says why; the others are timed all the same.

    Args:
        outputs: O, a multiple of 64 where the device has semi-structured tensors.
        inputs: I, a multiple of 4, and of 64 there too.
        batch: B, rows that are multiplied.
        sparsities: shares of zeros, from 0 to below 1.
        rounds: of timing.
        device: `cpu` (float32) or `cuda` (float16, and 2:4 beside the others where the GPU has it).
        seed: of the weights and inputs.

    Raises:
        LabError: if a sparsity is out of its range, or the device is a GPU and there is none.
    """
    _check_device(device)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
    dense_OI = torch.randn(outputs, inputs, generator=generator)
    x_BI = torch.randn(batch, inputs, generator=generator).to(device, dtype)
    masked = {one: (dense_OI * magnitude_mask(dense_OI, one)).to(device, dtype) for one in sparsities}
    dense = _Product(dense_OI.to(device, dtype))
    calls = GPU_CALLS if x_BI.is_cuda else 1
    cases: list[tuple[Form, float]] = [(form, one) for one in masked for form in ("masked", "csr")]
    if has_semi_structured(device):
        cases.append(("semi_structured", KEPT / GROUP))
    found = []
    for form, sparsity in cases:
        try:
            if form == "semi_structured":
                weight = semi_structured((dense_OI * mask_2_of_4(dense_OI)).to(device, dtype))
                size = packed_bytes((outputs, inputs), dtype.itemsize)
            else:
                # Half precision has no sparse product on the CPU, and on a GPU float32 would be another comparison.
                weight = masked[sparsity] if form == "masked" else _csr(masked[sparsity])
                size = _csr_bytes(weight) if form == "csr" else weight.numel() * dtype.itemsize
            # In pairs, one after the other: what slows the machine for a moment then slows both.
            _, one = latencies([dense, _Product(weight)], x_BI, rounds, calls)
        except (LabError, RuntimeError, NotImplementedError) as error:
            if not x_BI.is_cuda and form != "semi_structured":
                raise
            warnings.warn(_left_out(form, sparsity, _first_line(error)), stacklevel=2)
            continue
        share = size / (dense_OI.numel() * dtype.itemsize)
        found.append(
            SparseSpeed(form, sparsity, 1 - sparsity, share, one.ratio, one.ratio_low, one.ratio_high, one.seconds)
        )
    return found


def _check_device(device: str) -> None:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise LabError(
            say(
                en=f"the device {device!r} needs an NVIDIA GPU that torch can use, and there is none here: use 'cpu'.",
                fr=f"{device!r} demande un GPU NVIDIA dont torch puisse se servir, et il n’y en a pas ici : prenez "
                "'cpu'.",
            )
        )


def _left_out(form: Form, sparsity: float, why: str) -> str:
    return say(
        en=f"{form} with {sparsity:.0%} of zeros was left out: {why}",
        fr=f"{form} avec {100 * sparsity:.0f} % de zéros a été laissé de côté : {why}",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


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
