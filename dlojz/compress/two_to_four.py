"""2:4 sparsity: masks, packing, and the speed of sparse layers.

Of every four consecutive weights of a row, the two largest stay; groups lie along the input dimension, which a matrix
product sums over.

Shape suffixes: B rows of inputs, O outputs, I inputs, G groups of four in a row, K values that stay in a row (I / 2).

Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378), for 2:4; Gale et al. 2020,
"Sparse GPU kernels for deep learning" (arXiv 2006.10901), for why few zeros make nothing faster.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import percent, refusal, say
from dlojz.compress.masks import magnitude_mask
from dlojz.compress.task import latencies

GROUP = 4
KEPT = 2


def check_groups(shape: Sequence[int], name: str = "weight") -> None:
    """Refuse a weight whose rows do not divide into groups of four.

    Raises:
        LabError: if it has no two dimensions, or an input dimension that is not a multiple of 4.
    """
    if len(shape) != 2 or shape[1] % GROUP or not shape[1]:
        dimensions = " × ".join(str(length) for length in shape)
        raise refusal(
            en=f"2:4 keeps two of every four weights along the input dimension, which must be a multiple of 4 in "
            f"a matrix (outputs × inputs), but {name} is {dimensions}.",
            fr=f"2:4 garde deux poids sur quatre le long de la dimension d’entrée, qui doit être un multiple de 4 "
            f"dans une matrice (sorties × entrées), mais {name} mesure {dimensions}.",
        )


def mask_2_of_4(weight_OI: Tensor) -> Tensor:
    """Mask all but the two largest magnitudes of every four of a row; of equal ones, the first stays.

    Raises:
        LabError: if the inputs are no multiple of 4.
    """
    check_groups(weight_OI.shape)
    magnitude_OG4 = weight_OI.detach().abs().unflatten(1, (-1, GROUP))  # (O, G, 4)
    # (O, G, 4, 1) against (O, G, 1, 4): each weight with each of its group.
    row, column = magnitude_OG4.unsqueeze(-1), magnitude_OG4.unsqueeze(-2)
    earlier = torch.ones(GROUP, GROUP, dtype=torch.bool, device=weight_OI.device).tril(-1)
    before = (column > row) | ((column == row) & earlier)  # [.., i, j]: j comes before i in the order of magnitudes
    return (before.sum(dim=-1) < KEPT).flatten(1)  # at most one comes before it


@dataclass(frozen=True)
class Packed:
    """Packed 2:4 weight, as hardware keeps it.

    Args:
        values_OK: the two that stay of each group, in their order; (O, I / 2).
        indices: where they stood, 2 bits each: a nibble for each group, two groups in a byte; uint8.
        shape: (O, I).
    """

    values_OK: Tensor
    indices: Tensor
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of values and indices together."""
        return self.values_OK.nbytes + self.indices.nbytes


def packed_bytes(shape: Sequence[int], element_bytes: int = 4) -> int:
    """Compute the bytes of a packed weight: half the values, and half a byte for each group of four, rounded up.

    In float32 it is 17 / 32 of the dense weight, in 16 bits 9 / 16.

    Raises:
        LabError: if the inputs are no multiple of 4.

    Example:
        >>> packed_bytes((128, 512)) / (128 * 512 * 4)
        0.53125
    """
    check_groups(shape)
    groups = shape[0] * shape[1] // GROUP
    return groups * KEPT * element_bytes + (groups + 1) // 2


def pack(weight_OI: Tensor) -> Packed:
    """Pack a 2:4 weight: keep its values and their places only.

    Raises:
        LabError: if the inputs are no multiple of 4, or a group has more than two weights that are not zero.
    """
    check_groups(weight_OI.shape)
    weight_OG4 = weight_OI.detach().unflatten(1, (-1, GROUP))
    too_many = int(((weight_OG4 != 0).sum(dim=-1) > KEPT).sum())
    if too_many:
        raise refusal(
            en=f"a packed 2:4 weight has two values in each group of four, but {too_many} groups have more; apply "
            "its mask first.",
            fr=f"un poids 2:4 compacté a deux valeurs par groupe de quatre, mais {too_many} groupes en ont plus ; "
            "appliquez d’abord son masque.",
        )
    kept_OG4 = mask_2_of_4(weight_OI).unflatten(1, (-1, GROUP))
    # Places of the two that stay, rising; of a group with more zeros, zeros stay too.
    place_OG2 = kept_OG4.int().topk(KEPT, dim=-1, sorted=False).indices.sort(dim=-1).values
    nibble = (place_OG2[..., 0] | (place_OG2[..., 1] << 2)).flatten().to(torch.uint8)  # 2 bits each
    if nibble.numel() % 2:
        nibble = torch.cat((nibble, nibble.new_zeros(1)))
    indices = nibble[0::2] | (nibble[1::2] << 4)  # two groups in a byte, the first in the low half
    outputs, inputs = weight_OI.shape
    return Packed(weight_OG4.gather(-1, place_OG2).flatten(1), indices, (outputs, inputs))


Form = Literal["masked", "csr", "semi_structured"]
SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
GPU_CALLS = 20
"""Products between two waits for a GPU, so that what Python takes to launch one hides behind the one before."""
_INDEX_BYTES = 8
_AMPERE = (8, 0)


@dataclass(frozen=True)
class SparseSpeed:
    """Timing of one form of a layer.

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
            return (self.weight_OI @ x_BI.T).T  # (O, I) @ (I, B): a CSR matrix stands on the left
        return nn.functional.linear(x_BI, self.weight_OI)


def has_semi_structured(device: str | torch.device) -> bool:
    """Tell whether a device multiplies 2:4 weights: an NVIDIA GPU since Ampere."""
    kind = torch.device(device)
    if kind.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(kind) >= _AMPERE


def semi_structured(weight_OI: Tensor) -> Tensor:
    """Convert a 2:4 weight to torch's semi-structured tensor, which a dense layer's product then takes.

    Args:
        weight_OI: with the 2:4 pattern, in 16 bits, on a GPU that has units for it.

    Raises:
        LabError: if the weight is on another device, or if torch refuses its shape or precision, or was built without
            the library that packs it.
    """
    if not has_semi_structured(weight_OI.device):
        raise refusal(
            en=f"torch multiplies 2:4 weights on NVIDIA GPUs since Ampere only, but this weight is on "
            f"{weight_OI.device}; two_to_four.pack shows the same format anywhere.",
            fr=f"torch ne multiplie des poids 2:4 que sur les GPU NVIDIA depuis Ampere, mais ce poids est sur "
            f"{weight_OI.device} ; two_to_four.pack montre le même format partout.",
        )
    from torch.sparse import to_sparse_semi_structured

    try:
        packed: Tensor = to_sparse_semi_structured(weight_OI)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        shape, reason = " × ".join(str(length) for length in weight_OI.shape), _first_line(error)
        raise refusal(
            en=f"torch cannot pack this 2:4 weight, {shape} in {weight_OI.dtype}: {reason}; use 16 bits and lengths "
            "that are multiples of 64.",
            fr=f"torch ne peut pas compacter ce poids 2:4, {shape} en {weight_OI.dtype} : {reason} ; prenez 16 bits "
            "et des dimensions multiples de 64.",
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

    Raises:
        LabError: if a sparsity is out of its range, or the device is a GPU and there is none.
    """
    _check_device(device)
    # Drawn on the CPU: the same numbers on every device.
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
    dense_OI = torch.randn(outputs, inputs, generator=generator)
    x_BI = torch.randn(batch, inputs, generator=generator).to(device, dtype)
    masked = {sparsity: (dense_OI * magnitude_mask(dense_OI, sparsity)).to(device, dtype) for sparsity in sparsities}
    dense = _Product(dense_OI.to(device, dtype))
    calls = GPU_CALLS if x_BI.is_cuda else 1
    cases: list[tuple[Form, float]] = [(form, sparsity) for sparsity in masked for form in ("masked", "csr")]
    if has_semi_structured(device):
        cases.append(("semi_structured", KEPT / GROUP))
    speeds = []
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
            _, latency = latencies([dense, _Product(weight)], x_BI, rounds, calls)
        except (LabError, RuntimeError, NotImplementedError) as error:
            # A CPU runs both forms; a GPU may lack one.
            if not x_BI.is_cuda and form != "semi_structured":
                raise
            message = say(
                en=f"{form} with {percent(sparsity, 0)} of zeros was left out: {_first_line(error)}",
                fr=f"{form} avec {percent(sparsity, 0)} de zéros a été laissé de côté : {_first_line(error)}",
            )
            warnings.warn(message, stacklevel=2)
            continue
        share = size / (dense_OI.numel() * dtype.itemsize)
        speeds.append(
            SparseSpeed(
                form,
                sparsity,
                1 - sparsity,
                share,
                latency.ratio,
                latency.ratio_low,
                latency.ratio_high,
                latency.seconds,
            )
        )
    return speeds


def _check_device(device: str) -> None:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise refusal(
            en=f"the device {device!r} needs an NVIDIA GPU that torch can use, and there is none here: use 'cpu'.",
            fr=f"{device!r} demande un GPU NVIDIA dont torch puisse se servir, et il n’y en a pas ici : prenez 'cpu'.",
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def crossing(speeds: Sequence[SparseSpeed], form: Form = "csr") -> float | None:
    """Find the sparsity from which a form is as fast as the dense layer, between those timed; None if never.

    Ratios are taken to change along a straight line from one sparsity to the next; what counts is the last time that
    the form was slower.
    """
    line = sorted(((speed.sparsity, speed.ratio) for speed in speeds if speed.form == form), key=lambda point: point[0])
    if not line or line[-1][1] > 1:  # slower even with the most zeros
        return None
    slower = [index for index, (_, ratio) in enumerate(line) if ratio > 1]
    if not slower:
        return line[0][0]  # as fast from the first on
    (before, high), (after, low) = line[slower[-1]], line[slower[-1] + 1]
    return before + (after - before) * (high - 1) / (high - low)


def _csr(weight_OI: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says of every CSR tensor that their support is a beta
        return weight_OI.to_sparse_csr()


def _csr_bytes(rows: Tensor) -> int:
    """Values, the column of each, and where each row begins."""
    return rows.values().numel() * (rows.dtype.itemsize + _INDEX_BYTES) + rows.crow_indices().numel() * _INDEX_BYTES
