"""Tensor parallelism under every engine: the model is split before the engine lays it over the data axis.

Layer 3. Invariant: whatever splits the model (`dlojz.tensor`, or torch), the engine sees a model with this rank's
parameters only, the loss that fits its last block, and a way back to the whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlojz.config import RunConfig
from dlojz.models.blocks import BlockList
from dlojz.tensor.axis import TensorAxis
from dlojz.tensor.slicing import gather_whole, share_bounds, split_dims
from dlojz.tensor.split import parallel_loss, split_model
from dlojz.train.axes import Axes

Loss = Callable[[Tensor, Tensor], Tensor]


class TensorShare:
    """What a rank holds of a model along the tensor axis; with tp=1 all of it.

    Args:
        config: the run.
        model: the whole model, with the same weights on every rank; its blocks are replaced.
        axes: this rank's place.
        loss: mean loss of whole logits.

    Attributes:
        loss: mean loss of what this rank's last block gives.
    """

    def __init__(self, config: RunConfig, model: nn.Module, axes: Axes, loss: Loss) -> None:
        layout = config.layout
        self.axis, self.loss = TensorAxis(), loss
        self._shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        self._dims: dict[str, int] = {}
        if layout.tp == 1:
            return
        blocks = cast(BlockList, model)
        self.axis = TensorAxis(axes.group("tp"), sequence_parallel=layout.sequence_parallel)
        if layout.engine == "torch":
            from dlojz.train.engines.torch_tensor import parallelize

            assert axes.mesh is not None
            self.loss = parallelize(config, blocks, self.axis, axes.mesh["tp"], loss)
        else:
            self.loss = parallel_loss(split_model(blocks, self.axis, layout.tensor_parts))
        self._dims = split_dims(model)

    def whole(self, name: str, own: Tensor) -> Tensor:
        """A whole parameter from what this rank holds of it; a collective call where it is split."""
        # Who: the ranks that share the parameter, at the end of a run. What: their slices. How much: its bytes.
        tensor: Tensor = own.full_tensor() if isinstance(own, DTensor) else own
        return gather_whole(tensor, self._dims[name], self._shapes[name], self.axis) if name in self._dims else tensor

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of a whole parameter along the tensor axis where the lab has split it."""
        if name not in self._dims:
            return whole
        dim = self._dims[name]
        start, end = share_bounds(whole.shape[dim], self.axis.size, self.axis.rank)
        return whole.narrow(dim, start, end - start)

    def beside(self, buffer: str, own: Tensor) -> str | None:
        """The split parameter whose channels a buffer has; None where the buffer is whole on each rank.

        Only BatchNorm has buffers: its statistics are split as its weight is, its count of batches never.
        """
        weight = f"{buffer.rpartition('.')[0]}.weight"
        return weight if own.ndim and weight in self._dims else None

    def settle(self, parameters: Iterable[Tensor]) -> None:
        """Before an update: gradients that are still the ranks' own parts of a sum are added up (engine torch)."""
        if self.axis.size > 1:
            settle(parameters)

    def pretending(self) -> AbstractContextManager[None]:
        """Within it shapes can be asked for without the other ranks."""
        return self.axis.pretending() if self.axis.size > 1 else nullcontext()


def settle(parameters: Iterable[Tensor]) -> None:
    """Lay each DTensor's gradient as its parameter lies.

    With sequence parallelism each rank has found its own tokens' share of a norm's gradient. Who: the ranks of the
    tensor axis, once per step. What: the gradient of each norm parameter, all-reduced. How much: its bytes. Of an
    embedding, torch has made the whole table's gradient on every rank: each keeps its part, and nothing is sent.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
