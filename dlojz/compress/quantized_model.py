"""A whole model with integers for weights: which layers, what a file keeps of it, and how many bytes that is.

Layer 2. Invariant: the bytes are foreseen from the teacher's shapes and a scheme, and are those of what is stored, to
the byte; whatever is no linear layer (norms, positions, convolutions) stays as it is, in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dlojz.compress.calibration import Observed, linear_layers, refuse_no_data
from dlojz.compress.int8_linear import STATIC_SCHEME, Activations, QuantizedLinear
from dlojz.compress.quantized_packing import pack, packed_bytes, unpack
from dlojz.compress.quantizers import RangeChoice, Scheme
from dlojz.schema import LabError
from dlojz.text import say


def replace_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of a model in which some modules are others, in evaluation mode.

    Args:
        model: not changed.
        layers: by the path of the name that they take.
    """
    changed = copy.deepcopy(model)
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(changed.get_submodule(parent), own, layer)
    return changed.eval()


def quantize_model(
    model: nn.Module,
    scheme: Scheme,
    *,
    choice: RangeChoice = "min_max",
    activations: Activations = "float",
    activation_choice: RangeChoice = "min_max",
    observed: Mapping[str, Observed] | None = None,
) -> nn.Module:
    """A copy of a model whose linear layers are `QuantizedLinear`.

    Args:
        model: not changed.
        scheme: of the weights.
        choice: how the range of the weights is chosen.
        activations: what the inputs of these layers become.
        activation_choice: how the range of static inputs is chosen.
        observed: what calibration has seen; needed for static inputs.

    Raises:
        LabError: for static inputs without calibration, or with one that has not seen all layers.
    """
    if activations == "static":
        _check_seen(linear_layers(model), observed)
    return replace_layers(
        model,
        {
            name: QuantizedLinear(
                linear,
                scheme,
                choice=choice,
                activations=activations,
                activation_range=observed[name].range(STATIC_SCHEME, activation_choice)
                if activations == "static" and observed is not None
                else None,
            )
            for name, linear in linear_layers(model).items()
        },
    )


def _check_seen(layers: Iterable[str], observed: Mapping[str, Observed] | None) -> None:
    if not observed:
        refuse_no_data()
    unseen = [name for name in layers if name not in (observed or {})]
    if unseen:
        raise LabError(
            say(
                en=f"calibration has not seen {len(unseen)} of the linear layers, {unseen[0]} first, and their static "
                "grid is fixed by what it sees: observe(model, images) without names watches all of them.",
                fr=f"le calibrage n’a pas observé {len(unseen)} des couches linéaires, à commencer par {unseen[0]}, or "
                "leur grille statique se fixe d’après lui : observe(model, images) sans noms les observe toutes.",
            )
        )


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The layers of a model that keep integers, by the path of their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def stored_integers(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a file keeps: packed integers, scales, zero points that are not 0, and the rest as it is."""
    layers = quantized_layers(model)
    kept = {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] not in layers
    }
    for name, layer in layers.items():
        kept[f"{name}.weight"] = pack(layer.integers_OI, layer.scheme.bits)
        kept[f"{name}.scale"] = layer.scale_O1.detach()
        if not layer.scheme.symmetric:
            kept[f"{name}.zero_point"] = layer.zero_O1.to(torch.int8)
        if layer.bias is not None:
            kept[f"{name}.bias"] = layer.bias.detach()
        if layer.activations == "static":
            kept[f"{name}.input_scale"] = layer.input_scale
            kept[f"{name}.input_zero_point"] = layer.input_zero.to(torch.int8)
    return kept


def predicted_quantized_bytes(model: nn.Module, scheme: Scheme, activations: Activations = "float") -> int:
    """Bytes of `stored_integers`, from shapes alone.

    Per layer of O outputs and I inputs: ⌈O·I·bits / 8⌉ for the integers; 4 bytes per grid for its scale, 1 more for a
    zero point, with O grids per channel and 1 per tensor; 4·O for the bias; 5 for the grid of static inputs. All else
    keeps its own precision.
    """
    layers = linear_layers(model)
    total = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] not in layers
    )
    for linear in layers.values():
        outputs, inputs = linear.weight.shape
        total += packed_bytes(outputs * inputs, scheme.bits)
        total += (outputs if scheme.per_channel else 1) * (4 if scheme.symmetric else 5)
        total += 0 if linear.bias is None else 4 * outputs
        total += 5 if activations == "static" else 0
    return total


def load_integers(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Put what a file has kept back into a quantized model of the same scheme, in place."""
    layers = quantized_layers(model)
    with torch.no_grad():
        for name, layer in layers.items():
            shape = (layer.out_features, layer.in_features)
            layer.integers_OI.copy_(unpack(stored[f"{name}.weight"], layer.scheme.bits, shape))
            layer.scale_O1.copy_(stored[f"{name}.scale"])
            if not layer.scheme.symmetric:
                layer.zero_O1.copy_(stored[f"{name}.zero_point"])
            if layer.bias is not None:
                layer.bias.copy_(stored[f"{name}.bias"])
            if layer.activations == "static":
                layer.input_scale.copy_(stored[f"{name}.input_scale"])
                layer.input_zero.copy_(stored[f"{name}.input_zero_point"])
        for name, tensor in model.state_dict().items():
            if name.rpartition(".")[0] not in layers:
                tensor.copy_(stored[name])
