"""2:4 sparsity: of every four consecutive weights of a row, the two largest stay; packed, they take half the place.

Layer 2. Invariant: groups lie along the input dimension, the one a matrix product adds over; `unpack(pack(w))` is `w`
to the bit for every weight that has the pattern.

Shape suffixes: O outputs, I inputs, G groups of four in a row, K values that stay in a row (I / 2).

Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlojz.schema import LabError
from dlojz.text import say

GROUP = 4
KEPT = 2


def check_groups(shape: Sequence[int], name: str = "weight") -> None:
    """Refuse a weight whose rows do not divide into groups of four.

    Raises:
        LabError: if it has no two dimensions, or an input dimension that is not a multiple of 4.
    """
    if len(shape) != 2 or shape[1] % GROUP or not shape[1]:
        listed = " × ".join(str(length) for length in shape)
        raise LabError(
            say(
                en=f"2:4 keeps two of every four weights along the input dimension, which must be a multiple of 4 in "
                f"a matrix (outputs × inputs), but {name} is {listed}.",
                fr=f"2:4 garde deux poids sur quatre le long de la dimension d’entrée, qui doit être un multiple de 4 "
                f"dans une matrice (sorties × entrées), mais {name} mesure {listed}.",
            )
        )


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that 2:4 is for, by name.

    Raises:
        LabError: if the inputs of one of them are no multiple of 4.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in found.items():
        check_groups((module.out_features, module.in_features), name)
    return found


def mask_2_of_4(weight_OI: Tensor) -> Tensor:
    """True at the two largest magnitudes of every four of a row; of equal ones, the first stays.

    Raises:
        LabError: if the inputs are no multiple of 4.
    """
    check_groups(weight_OI.shape)
    magnitude_OG4 = weight_OI.detach().abs().unflatten(1, (-1, GROUP))
    own, other = magnitude_OG4.unsqueeze(-1), magnitude_OG4.unsqueeze(-2)
    earlier = torch.ones(GROUP, GROUP, dtype=torch.bool, device=weight_OI.device).tril(-1)
    before = (other > own) | ((other == own) & earlier)  # [.., i, j]: j comes before i in the order of magnitudes
    return (before.sum(dim=-1) < KEPT).flatten(1)


def masks_2_of_4(model: nn.Module) -> dict[str, Tensor]:
    """The mask of every dense layer of a model, by name.

    Raises:
        LabError: if the inputs of a layer are no multiple of 4.
    """
    return {name: mask_2_of_4(layer.weight) for name, layer in linear_layers(model).items()}


def magnitude_kept(weight_OI: Tensor) -> float:
    """Share of the sum of all magnitudes that 2:4 leaves, from 0.5 to 1.

    Source: the quantity that Pool and Yu 2021, "Channel permutations for N:M sparsity", make large.
    """
    magnitude_OI = weight_OI.detach().abs().double()
    total = magnitude_OI.sum()
    return float((magnitude_OI * mask_2_of_4(weight_OI)).sum() / total) if total > 0 else 1.0


@dataclass(frozen=True)
class Packed:
    """A 2:4 weight as hardware keeps it.

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
        """Of values and indices together."""
        values, indices = self.values_OK, self.indices
        return values.numel() * values.element_size() + indices.numel() * indices.element_size()


def packed_bytes(shape: Sequence[int], element_bytes: int = 4) -> int:
    """Bytes of a packed weight: half the values, and half a byte for each group of four, rounded up.

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
    """Keep of a 2:4 weight its values and their places only.

    Raises:
        LabError: if the inputs are no multiple of 4, or a group has more than two weights that are not zero.
    """
    check_groups(weight_OI.shape)
    weight_OG4 = weight_OI.detach().unflatten(1, (-1, GROUP))
    too_many = int(((weight_OG4 != 0).sum(dim=-1) > KEPT).sum())
    if too_many:
        raise LabError(
            say(
                en=f"a packed 2:4 weight has two values in each group of four, but {too_many} groups have more; apply "
                "its mask first.",
                fr=f"un poids 2:4 compacté a deux valeurs par groupe de quatre, mais {too_many} groupes en ont plus ; "
                "appliquez d’abord son masque.",
            )
        )
    kept_OG4 = mask_2_of_4(weight_OI).unflatten(1, (-1, GROUP))
    place_OG2 = kept_OG4.int().topk(KEPT, dim=-1, sorted=False).indices.sort(dim=-1).values
    nibble = (place_OG2[..., 0] | (place_OG2[..., 1] << 2)).flatten().to(torch.uint8)
    if nibble.numel() % 2:
        nibble = torch.cat((nibble, nibble.new_zeros(1)))
    indices = nibble[0::2] | (nibble[1::2] << 4)
    outputs, inputs = weight_OI.shape
    return Packed(weight_OG4.gather(-1, place_OG2).flatten(1), indices, (outputs, inputs))


def unpack(packed: Packed) -> Tensor:
    """The dense weight, zeros put back."""
    outputs, inputs = packed.shape
    groups = outputs * inputs // GROUP
    nibble = torch.stack((packed.indices & 15, packed.indices >> 4), dim=1).flatten()[:groups].long()
    place_G2 = torch.stack((nibble & 3, nibble >> 2), dim=1)
    weight_G4 = packed.values_OK.new_zeros(groups, GROUP)
    weight_G4.scatter_(1, place_G2, packed.values_OK.reshape(groups, KEPT))
    return weight_G4.reshape(outputs, inputs)
