"""Split linear layers of a module from elsewhere, by the regions that are found in it; all else stays its code.

`dlojz.models.foreign.tensor_plan` finds the regions. Each rank keeps its part of the layers' weights; the numbers of
heads in the modules around them become its own. A column-parallel layer enters the region itself: three layers that
read one tensor send three gradients of it, as with torch's `ColwiseParallel`.

    layer                     forward                      backward
    column-parallel           -                            all-reduce of its input's gradient
    row-parallel              all-reduce of its output     -
    read between the two      -                            all-reduce of its gradient

Shape suffixes: D in-features, F out-features; d = D / n, f = F / n of one of n ranks; … any dimensions before.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.by_hand.tensor.axis import TensorAxis
from dlojz.by_hand.tensor.operators import add_up, copy
from dlojz.models.blocks import BlockList
from dlojz.models.foreign.tensor_regions import Region, SplitLayer, own_columns, put


class LinearShare(nn.Module):
    """Linear layer of which a rank holds the outputs of its columns, or the inputs of its rows.

    Args:
        linear: `nn.Linear`, or transformers' `Conv1D`, whose weight is (in, out).
        layer: how it is split.
    """

    weight: Tensor
    bias: Any

    def __init__(self, linear: nn.Module, layer: SplitLayer, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.by_columns = axis, layer.style == "colwise"
        self.transposed = not isinstance(linear, nn.Linear)
        # Columns are the out-features: dimension 0 in nn.Linear, 1 in Conv1D; rows are the other dimension.
        self.split_dims = {"weight": int(self.by_columns == self.transposed)}
        if self.by_columns and linear.bias is not None:
            self.split_dims["bias"] = 0
        self.split_parts = dict.fromkeys(self.split_dims, layer.parts)
        for name in ("weight", "bias"):
            tensor = getattr(linear, name)
            if name in self.split_dims:
                # Of a fused layer this rank's share of every part, not one contiguous run.
                indices = own_columns(layer.parts, axis.size, axis.rank, tensor.device)
                tensor = nn.Parameter(tensor.detach().index_select(self.split_dims[name], indices))
            self.register_parameter(name, tensor)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """``(…, D)`` to ``(…, f)``, or ``(…, d)`` to ``(…, F)``."""
        weight = self.weight.T if self.transposed else self.weight
        bias: Tensor | None = self.bias
        if self.by_columns:
            # Who: the ranks of the axis, in backward. What: the gradient of x, all-reduced. How much: its bytes.
            return F.linear(copy(x, self.axis), weight, bias)
        # Who: the ranks of the axis. What: their partial products (…, F), all-reduced. How much: its bytes.
        y = add_up(F.linear(x, weight), self.axis)
        # After the sum: added by every rank before it, the bias would count n times.
        return y if bias is None else y + bias.to(y.dtype)


def split_linears(model: BlockList, axis: TensorAxis, regions: Iterable[Region]) -> BlockList:
    """Replace the linear layers of the regions by this rank's part of them, in place."""
    for region in regions:
        block = model.parts[region.block]
        for layer in region.layers:
            module_path, _, leaf = layer.path.rpartition(".")
            setattr(block.get_submodule(module_path), leaf, LinearShare(block.get_submodule(layer.path), layer, axis))
        put(block, region.settings)
        inner: dict[str, list[str]] = {}
        for path in region.inner:
            module_path, _, leaf = path.rpartition(".")
            inner.setdefault(module_path, []).append(leaf)
        for module_path, names in inner.items():
            _share(block.get_submodule(module_path), names, axis)
    return model


def _share(module: nn.Module, names: Sequence[str], axis: TensorAxis) -> None:
    """Let a module compute with parameters whose gradients are summed over the ranks, each of which has its heads'.

    Who: the ranks of the axis, in backward. What: these gradients, all-reduced. How much: their bytes.
    """
    plain: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: module._parameters[name] for name in names}
        try:
            for name, parameter in parameters.items():
                assert parameter is not None
                module._parameters[name] = copy(parameter, axis)  # type: ignore[assignment]  # for this call alone
            return plain(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    # An attribute of the instance, which goes before the method of the class.
    module.forward = forward
