"""What a file keeps of a pruned model: a bit for each place and the values that stay, or 2:4 values and indices.

Layer 2. Invariant: `restore` gives the pruned weights back to the bit; the bytes are known from shapes and sparsity
alone, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dlojz.compress import masks
from dlojz.compress.measuring import stored_weights
from dlojz.compress.two_to_four import Packed, linear_layers, pack, packed_bytes, unpack

BITS, VALUES, INDICES = ".mask_bits", ".kept_values", ".kept_indices"


def pack_bits(mask: Tensor) -> Tensor:
    """Eight places of a mask in a byte, the first in the lowest bit; uint8, the last byte filled up with zeros."""
    bits = mask.flatten().to(torch.uint8)
    bits = torch.cat((bits, bits.new_zeros(-bits.numel() % 8))).reshape(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, elements: int) -> Tensor:
    """The mask, flat, of so many places."""
    return ((packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:elements].bool()


def bitmask_tensors(model: nn.Module, kept: masks.Masks) -> dict[str, Tensor]:
    """What a file keeps of a masked model: of each pruned weight a mask and the values that stay, the rest whole."""
    stored = stored_weights(model)
    for layer, mask in kept.items():
        weight = stored.pop(f"{layer}.weight")
        stored[layer + BITS] = pack_bits(mask)
        stored[layer + VALUES] = weight[mask]
    return stored


def two_to_four_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All that a file keeps of a model whose dense layers are 2:4."""
    stored = stored_weights(model)
    for layer in linear_layers(model):
        packed = pack(stored.pop(f"{layer}.weight"))
        stored[layer + VALUES], stored[layer + INDICES] = packed.values_OK, packed.indices
    return stored


def restore(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Give a model of the same shapes, in place, what a file has kept."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    whole = {name: tensor for name, tensor in stored.items() if name in shapes}
    for name, values in stored.items():
        layer = name.removesuffix(VALUES)
        if layer == name:
            continue
        shape = shapes[f"{layer}.weight"]
        if layer + BITS in stored:
            weight = values.new_zeros(shape.numel())
            weight[unpack_bits(stored[layer + BITS], shape.numel())] = values
            whole[f"{layer}.weight"] = weight.reshape(shape)
        else:
            whole[f"{layer}.weight"] = unpack(Packed(values, stored[layer + INDICES], (shape[0], shape[1])))
    model.load_state_dict(whole)


def bitmask_bytes(model: nn.Module, sparsity: float, *, per_layer: bool = False) -> int:
    """Bytes of `bitmask_tensors`, from shapes and sparsity: a bit for each place, the values that stay, the rest.

    Args:
        model: of the shapes; its weights are not looked at.
        sparsity: share of the weights that go, from 0 to below 1.
        per_layer: the same share of each layer, else of all together.

    Raises:
        LabError: unless 0 ≤ sparsity < 1.
    """
    found = [module.weight for module in masks.prunable(model).values()]
    elements, size = [weight.numel() for weight in found], found[0].element_size()
    groups = elements if per_layer else [sum(elements)]
    kept = sum(count - masks.pruned_count(count, sparsity) for count in groups)
    return _dense_bytes(model) - sum(elements) * size + sum((count + 7) // 8 for count in elements) + kept * size


def two_to_four_bytes(model: nn.Module) -> int:
    """Bytes of `two_to_four_tensors`, from shapes alone.

    Raises:
        LabError: if the inputs of a dense layer are no multiple of 4.
    """
    found = [layer.weight for layer in linear_layers(model).values()]
    dense = sum(weight.numel() * weight.element_size() for weight in found)
    return _dense_bytes(model) - dense + sum(packed_bytes(weight.shape, weight.element_size()) for weight in found)


def _dense_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
