"""ZeRO stage 3: each rank keeps only its share of the weights too; a block's weights are whole only while it computes.

Between two steps a rank holds one N-th of everything. During a pass at most two units are whole: the one that computes,
and the next one, which is on its way (prefetch). Units are used in the same order on every rank. The share, in the
weights' own type, is kept; what is gathered is a copy of all shares, and freed parameters have no elements (as in
DeepSpeed), so that none is used by mistake.

4Ψ/N bytes of weights and of gradients, one N-th of the optimizer's states; 3Ψ elements sent per micro-batch: weights
all-gathered for forward, freed, all-gathered again for backward, gradients reduce-scattered.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.3 and §7.2.2; prefetch: Rajbhandari et al. 2021, "ZeRO-Infinity"
(arXiv 2104.07857), §6.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dlojz.base.language import refusal
from dlojz.by_hand.zero.flat import FlatWeights, MakeOptimizer, Zero
from dlojz.by_hand.zero.stage2 import ZeroStage2


class ShardedWeights(FlatWeights):
    """Weights of one unit.

    Args:
        compute_dtype: type in which they are gathered; by default their own.

    Attributes:
        whole: all weights in `compute_dtype`; while they are freed, a tensor without memory.
        share: this rank's part of them in their own type, shape (share_numel,).
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        compute_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, group)
        # A clone: as a view it would keep the whole flat tensor in memory.
        self.share = nn.Parameter(self.share.detach().clone())
        # In the type of the computation; `free` takes its memory away.
        self.whole = torch.empty_like(self.whole, dtype=compute_dtype or self.whole.dtype)
        self._num_bytes = self.whole.untyped_storage().nbytes()
        self._nothing = self.whole.new_empty(0)
        self._arriving: Any = None
        self._gathered = True
        self.free()

    def start_gather(self) -> None:
        """Start to gather the whole weights, unless they are there or on their way; returns at once."""
        if self._gathered or self._arriving is not None:
            return
        # Autograd has kept views of this memory in forward; given back in the same place, they are right for backward.
        self.whole.untyped_storage().resize_(self._num_bytes)
        # Cast before it is sent: bf16 halves the bytes.
        share = self.share.detach().to(self.whole.dtype)
        if self.size == 1:
            self.whole.copy_(share)
            self._gathered = True
            self._show()
            return
        # Who: all N ranks. What: each gives its share of one unit's weights, shape (padded elements / N,), and has all
        # of them afterwards, shape (padded elements,). How much: 4 bytes per element (2 in bf16), 4Ψ for all units, for
        # forward and once more for backward; a rank sends (N − 1) / N of them.
        self._arriving = dist.all_gather_into_tensor(self.whole, share, group=self.group, async_op=True)

    def gather(self) -> None:
        """Gather the whole weights, and wait for them."""
        self.start_gather()
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving, self._gathered = None, True
            self._show()

    def free(self) -> None:
        """Free the memory of the whole weights; the share stays."""
        # Prefetched and not used: the message must arrive before the memory may go.
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        self._gathered = False
        for parameter in self.parameters:
            parameter.data = self._nothing
        self.whole.untyped_storage().resize_(0)

    def _show(self) -> None:
        for parameter, piece in zip(self.parameters, self.pieces(self.whole), strict=True):
            parameter.data = piece

    def gathered_share(self) -> Tensor:
        """Gather all weights in their own type, shape (size × share_numel,), in new memory; a collective call."""
        share = self.share.detach()
        if self.size == 1:
            return share.clone()
        weights = share.new_empty(self.size * self.share_numel)
        # Who: all N ranks. What and how much: as above, in the weights' own type; at the end of a run only.
        dist.all_gather_into_tensor(weights, share, group=self.group)
        return weights


def default_units(module: nn.Module) -> list[nn.Module]:
    """Choose the units: the blocks of a model that has `blocks`; else its children, those of its lists, or itself."""
    blocks = getattr(module, "blocks", None)
    if isinstance(blocks, nn.ModuleList):
        return list(blocks)
    units: list[nn.Module] = []
    for child in module.children():
        # A list is never called itself, so that nothing would gather its weights.
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        units += list(child.children()) if is_list else [child]
    return units or [module]


def parameters_of_units(
    module: nn.Module, units: Sequence[nn.Module]
) -> tuple[list[tuple[nn.Module, list[nn.Parameter]]], list[nn.Parameter]]:
    """Assign to each unit the trainable parameters that are its alone; returns also all others.

    Raises:
        LabError: if a unit is not part of the module.
    """
    parts = set(module.modules())
    for unit in units:
        if unit not in parts:
            name, model = type(unit).__name__, type(module).__name__
            raise refusal(
                en=f"the unit {name} is not part of {model}: give submodules of it, in the order of the forward pass.",
                fr=f"l’unité {name} ne fait pas partie de {model} : donnez-en des sous-modules, dans l’ordre de la "
                "passe avant.",
            )
    # A parameter of two units (a tied embedding, say) would be missing in one of them when the other frees it.
    owners = Counter(parameter for unit in units for parameter in unit.parameters())
    unit_parameters = [(unit, [p for p in unit.parameters() if p.requires_grad and owners[p] == 1]) for unit in units]
    remaining_parameters = [p for p in module.parameters() if p.requires_grad and owners[p] != 1]
    return [(unit, parameters) for unit, parameters in unit_parameters if parameters], remaining_parameters


class ZeroStage3(ZeroStage2):
    """Model whose optimizer states, gradients and weights are sharded. Use: see `Zero`.

    It is stage 2 with one bucket per unit, whose weights come and go.

    Args:
        units: the submodules whose weights are gathered together, in the order of the forward pass; by default
            `module.blocks`, else the module's children. Parameters in none of them, or in two, are gathered for the
            whole of forward and backward.
        compute_dtype: gather and compute in this type, e.g. `torch.bfloat16`, half the bytes; the shares, the
            gradients' sum and the update keep the module's type. Inputs, buffers and frozen weights are cast too.
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
        of_units, remaining_parameters = parameters_of_units(module, units)
        Zero.__init__(self, module, make_optimizer, group=group)
        self.compute_dtype, self.prefetch = compute_dtype, prefetch
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        for tensor in (*module.buffers(), *frozen):
            tensor.data = self._cast(tensor.data)
        self.rest = ShardedWeights(remaining_parameters, compute_dtype, group) if remaining_parameters else None
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
        """Wait for the weights of a unit, and start to gather those of the next one in this pass."""
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
        # With gradients on, but none through the output, nothing would call for a gather in backward: the weights stay.
        if outputs or not torch.is_grad_enabled():
            self.units[number].free()

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        """The gradient of a unit's output is ready: its own backward is next."""
        self._make_whole(number, number - 1)

    def backward(self, loss: Tensor) -> None:
        """Run backward: each unit's weights gathered before it, freed after it, its gradients reduced."""
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
        """Free all units, even one that was prefetched and not used."""
        for flat in self.flats:
            if isinstance(flat, ShardedWeights):
                flat.free()

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's share of the weights; nothing is sent: the next forward gathers them."""
        self._check_gradients()
        # Weights are still whole after an evaluation, or after a forward without backward.
        self._free_all()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        # Tensors are keys by identity.
        name_of: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        for flat in self.flats:
            if isinstance(flat, ShardedWeights):
                for parameter, weight in zip(flat.parameters, flat.pieces(flat.gathered_share()), strict=True):
                    yield name_of.pop(parameter), weight
        for parameter, name in name_of.items():  # frozen
            yield name, parameter.detach()

    def release(self) -> None:
        """Restore the module as `Zero` does; a collective call, after which every rank has all weights."""
        super().release()
        weights = dict(self.weights())
        for name, parameter in self.module.named_parameters():
            parameter.data = weights[name].clone()
