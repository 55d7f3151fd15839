"""2:4 sparsity: masks and packing.

Of every four consecutive weights of a row, the two largest stay; groups lie along the input dimension, which a matrix
product sums over.

Shape suffixes: O outputs, I inputs, G groups of four in a row, K values that stay in a row (I / 2).

Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlojz.base.language import refusal
from dlojz.compress import GROUP, KEPT, check_groups


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
