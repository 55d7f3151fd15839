"""The way back from what a file keeps of a compressed model: it must hold all that answers need."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dlojz.compress.quantized_model import quantized_layers
from dlojz.compress.two_to_four import GROUP, KEPT, Packed


def unpack_2_of_4(packed: Packed) -> Tensor:
    """The dense weight, zeros put back."""
    outputs, inputs = packed.shape
    groups = outputs * inputs // GROUP
    nibble = torch.stack((packed.indices & 15, packed.indices >> 4), dim=1).flatten()[:groups].long()
    place_G2 = torch.stack((nibble & 3, nibble >> 2), dim=1)
    weight_G4 = packed.values_OK.new_zeros(groups, GROUP)
    weight_G4.scatter_(1, place_G2, packed.values_OK.reshape(groups, KEPT))
    return weight_G4.reshape(outputs, inputs)


def unpack_integers(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The integers that `pack` was given, int8 of that shape."""
    if bits == 8:
        return packed
    stream = ((packed.to(torch.int32).unsqueeze(1) >> torch.arange(8, device=packed.device)) & 1).flatten()
    values = torch.Size(shape).numel()
    unsigned = (stream[: values * bits].reshape(values, bits) << torch.arange(bits, device=packed.device)).sum(dim=1)
    return (unsigned - 2 ** (bits - 1)).to(torch.int8).reshape(shape)


def load_integers(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Put what a file has kept back into a quantized model of the same scheme: it must hold all that answers need."""
    layers = quantized_layers(model)
    for name, layer in layers.items():
        shape = (layer.out_features, layer.in_features)
        layer.integers_OI.copy_(unpack_integers(stored[f"{name}.weight"], layer.scheme.bits, shape))
        layer.scale_O1.data.copy_(stored[f"{name}.scale"])
        kept = {"bias": layer.bias is not None, "zero_O1": not layer.scheme.symmetric}
        kept |= dict.fromkeys(("input_scale", "input_zero"), layer.activations == "static")
        for tensor in (tensor for tensor, there in kept.items() if there):
            key = {"zero_O1": "zero_point", "input_zero": "input_zero_point"}.get(tensor, tensor)
            getattr(layer, tensor).data.copy_(stored[f"{name}.{key}"])
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in layers:
            tensor.copy_(stored[name])
