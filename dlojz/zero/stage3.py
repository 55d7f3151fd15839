"""ZeRO stage 3: each rank keeps its share alone, of the weights too; a block has whole weights only while it computes.

Layer 2. Invariant: between two steps a rank holds one N-th of everything. During a pass at most two units are whole:
the one that computes, and the next one, which is on its way (prefetch). Units are used in the same order on every rank.

4Ψ/N bytes of weights and of gradients, one N-th of the optimizer's states; 3Ψ elements sent per micro-batch: weights
all-gathered for forward, freed, all-gathered again for backward, gradients reduce-scattered.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.3 and §7.2.2; prefetch: Rajbhandari et al. 2021, "ZeRO-Infinity"
(arXiv 2104.07857), §6.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dlojz.zero.base import MakeOptimizer, Zero
from dlojz.zero.stage2 import ZeroStage2
from dlojz.zero.unit import ShardedWeights, default_units, parameters_of_units


class ZeroStage3(ZeroStage2):
    """A model whose optimizer states, gradients and weights are shared out. Use: see `Zero`.

    It is stage 2 with one bucket per unit, whose weights come and go. While they are gone, parameters have no elements.

    Args:
        module, make_optimizer, group: see `Zero`.
        units: the submodules whose weights are gathered together, in the order of the forward pass; by default
            `module.blocks`, else the module's children. What lies in none of them, or in two, is gathered for the
            whole of forward and backward.
        compute_dtype: gather and compute in this type, e.g. `torch.bfloat16`, half the bytes; the shares, the
            gradients' sum and the update stay in the module's own type. Inputs, buffers and frozen weights are cast
            too.
        prefetch: ask for the next unit's weights before a unit computes.

    Raises:
        LabError: as `Zero`, or if a unit is not part of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        units: Sequence[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        prefetch: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        units = default_units(module) if units is None else list(units)
        of_units, others = parameters_of_units(module, units)
        Zero.__init__(self, module, make_optimizer, group=group)
        self.compute_dtype, self.prefetch = compute_dtype, prefetch
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        for tensor in (*module.buffers(), *frozen):
            tensor.data = self._cast(tensor.data)
        self.rest = ShardedWeights(others, compute_dtype, group) if others else None
        self.units = [ShardedWeights(parameters, compute_dtype, group) for _, parameters in of_units]
        # Backward is done with the last unit first, with what is outside of all units last.
        self._reduce_in_backward([*self.units[::-1], *([self.rest] if self.rest else [])])
        for number, (unit, _) in enumerate(of_units):
            self._handles += [
                unit.register_forward_pre_hook(partial(self._before_forward, number)),
                unit.register_forward_hook(partial(self._after_forward, number)),
            ]
        self.optimizer = make_optimizer(self.shares)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(self._cast, (args, kwargs))
        if self.rest:
            self.rest.gather()
        output = self.module(*args, **kwargs)
        if self.rest and not torch.is_grad_enabled():
            self.rest.free()
        return output

    def _cast(self, value: Any) -> Any:
        real = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype) if real and self.compute_dtype else value

    def _make_whole(self, number: int, following: int) -> None:
        """Wait for the weights of a unit, and ask for those of the one that follows in this pass."""
        self.units[number].gather()
        if self.prefetch and 0 <= following < len(self.units):
            self.units[following].start_gather()

    def _before_forward(self, number: int, module: nn.Module, args: Any) -> None:
        # In backward a checkpointed block computes its forward again: its weights are there already, or wanted alone.
        self._make_whole(number, -1 if self._in_backward else number + 1)

    def _after_forward(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward:
            return  # computed again for backward, which needs the weights next
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in outputs:
            tensor.register_hook(partial(self._before_backward, number))
        if outputs or not torch.is_grad_enabled():
            self.units[number].free()

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        """The gradient of a unit's output is there: its own backward is next."""
        self._make_whole(number, number - 1)

    def backward(self, loss: Tensor) -> None:
        """Backward: each unit's weights gathered before it, freed after it, its gradients reduced."""
        if self.rest:
            self.rest.gather()
        super().backward(loss)
        self._free_all()

    def _reduce_next(self) -> None:
        flat = self.flats[self._next]
        if isinstance(flat, ShardedWeights):
            flat.free()  # all its gradients are there, so nothing computes with its weights any more
        super()._reduce_next()

    def _free_all(self) -> None:
        """Nothing stays whole, not even a unit that was prefetched and not used."""
        for flat in self.flats:
            if isinstance(flat, ShardedWeights):
                flat.free()

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's share of the weights; nothing is communicated: the next forward gathers them."""
        self._check_gradients()
        self._free_all()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        name_of: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        for flat in self.flats:
            if isinstance(flat, ShardedWeights):
                for parameter, weight in zip(flat.parameters, flat.pieces(flat.gathered_share()), strict=True):
                    yield name_of.pop(parameter), weight
        for parameter, name in name_of.items():  # frozen
            yield name, parameter.detach()

    def release(self) -> None:
        """As `Zero`: a collective call, after which every rank has all weights."""
        super().release()
        whole = dict(self.weights())
        for name, parameter in self.module.named_parameters():
            parameter.data = whole[name].clone()
