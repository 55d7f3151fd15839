"""Try what tensor parallelism can split of a block, and prove it without the weights of its layers.

A region goes from the linear layers that are split by columns to the one behind them that is split by rows. It can be
split where each rank, given its part of the columns' outputs, computes its part of the row layer's input:

    MLP            fc1 → fc2, gate and up → down           each feature stands alone
    attention      query, key, value → out; qkv → out      each head stands alone

Nothing is read off names. Each repeated block is run on a few samples with random numbers for the outputs of its linear
layers, so that their weights are not needed. Changed outputs of one layer tell which layers read them. A candidate is
then run as a rank would run it: its part of the columns (of each part of a fused projection, or consecutive ones), and
the numbers of heads, or widths, in the attributes of its modules divided by the ranks. It is kept if it runs, gives the
row layer this rank's part of its input, and every other layer, and whoever reads the block, what it was given before.

Parameters that are read between the two layers, such as norms of queries, stay whole on each rank; each rank's gradient
of them is of its heads alone (`Region.inner`). A region that reads the block's trained input itself is not split.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3, for the two regions of a transformer block.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dlojz.models.foreign.tensor_regions import (
    Region,
    SplitLayer,
    fused_ways,
    head_counts,
    is_linear,
    own_columns,
    setting,
    widths,
)

MOST_RANKS, PRIMES = 16, (2, 3, 5, 7, 11, 13)
"""Largest number of ranks that is tried for a refusal to name what works, and the primes up to there."""
SEED = 0
TOLERANCE = 1e-4
"""A wrong split is wrong by the size of the numbers themselves."""


class _Run(NamedTuple):
    """What a run of a block gave its linear layers, and whoever called it."""

    inputs: dict[str, Tensor]
    outputs: list[Any]


class Candidate(NamedTuple):
    """Layers that may be split by columns, and the only one that reads them."""

    columns: tuple[str, ...]
    row: str


class Probe:
    """Block whose linear layers give random numbers, so that what happens between them can be looked at."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
            torch.manual_seed(SEED)
            self.block = copy.deepcopy(block).eval()
            owners = Counter(id(parameter) for part in block.modules() for parameter in part._parameters.values())
            self.layers = {path: layer for path, layer in self.block.named_modules() if is_linear(layer)}
            # A shared weight is not split.
            self._alone = {path for path in self.layers if owners[id(block.get_submodule(path).weight)] == 1}
            for path, layer in self.layers.items():
                layer.forward = self._stub(path)
            for part in self.block.modules():
                if part not in self.layers.values():
                    _fill(part)
            self.call = tree_map(_made, (args, kwargs))  # random numbers of the shapes of the call
            self._given: dict[str, Tensor] = {}
            self._calls, self._inputs = Counter[str](), dict[str, Tensor]()
            self.whole: _Run | None = self._run({})
            self.given = dict(self._given)
            self.candidates = [] if self.whole is None else list(self._candidates())
        self._kept: dict[tuple[Candidate, int], Region | None] = {}

    def _stub(self, path: str) -> Callable[[Tensor], Tensor]:
        # A weak reference, or a whole block's weights would wait for the garbage collector.
        width, probe = widths(self.layers[path])[1], weakref.proxy(self)

        def forward(x: Tensor) -> Tensor:
            probe._calls[path] += 1
            probe._inputs[path] = x
            if path not in probe._given:
                probe._given[path] = torch.rand(*x.shape[:-1], width) * 2 - 1  # from −1 to 1
            if probe._given[path].shape[:-1] != x.shape[:-1] or probe._calls[path] > 1:  # called twice: not split
                raise ValueError(path)
            return probe._given[path]

        return forward

    def _run(self, outputs: Mapping[str, Tensor]) -> _Run | None:
        """Run the block with these outputs of its layers; None where it fails, or calls one of them twice."""
        self._given, self._inputs = dict(outputs), {}
        self._calls.clear()
        args, kwargs = self.call
        try:
            output = self.block(*args, **kwargs)
        except Exception:  # of code from elsewhere, with shapes that it may not expect
            return None
        return _Run(self._inputs, tree_leaves(output))

    def _candidates(self) -> Iterator[Candidate]:
        """Layers that alone read the outputs of some layers, with these."""
        assert self.whole is not None
        readers: dict[str, set[str]] = {}
        for path in self.whole.inputs:
            changed = self._run({**self.given, path: self.given[path].flip(-1)})  # features in reverse order
            inputs = {} if changed is None else changed.inputs
            readers[path] = {
                reader for reader, x in self.whole.inputs.items() if reader in inputs and not _same(x, inputs[reader])
            }
        for row in self.whole.inputs:
            columns = tuple(path for path, rows in readers.items() if row in rows)
            if columns and {row, *columns} <= self._alone and all(readers[path] == {row} for path in columns):
                yield Candidate(columns, row)

    def degrees(self, candidate: Candidate) -> list[int]:
        """Numbers of ranks that can share a region: none where no prime number of them can."""
        inputs = widths(self.layers[candidate.row])[0]
        if all(inputs % prime or self.split(candidate, prime) is None for prime in PRIMES):
            return []
        return [size for size in range(2, MOST_RANKS + 1) if self.split(candidate, size) is not None]

    def split(self, candidate: Candidate, size: int) -> Region | None:
        """Split a region among so many ranks; None where they would not compute what one process does."""
        if (candidate, size) not in self._kept:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
                self._kept[candidate, size] = self._split(candidate, size)
        return self._kept[candidate, size]

    def _split(self, candidate: Candidate, size: int) -> Region | None:
        inner = self._inner(candidate)
        inputs = widths(self.layers[candidate.row])[0]
        if inner is None or inputs % size:
            return None
        cuts = [fused_ways(widths(self.layers[path])[1], inputs) for path in candidate.columns]
        heads, sizes = self._attributes(candidate, {inputs, *(dim for cut in cuts for parts in cut for dim in parts)})
        in_config = [
            (path, f"config.{key}", value)
            for path, module in self._around(candidate)
            for key, value in head_counts(getattr(module, "config", None))
        ]
        tried = [[], heads, [*heads, *sizes], *([[*heads, *in_config]] if in_config else [])]
        # From the fewest changed settings on: none (an MLP), heads, widths too, heads of a configuration.
        for parts, settings in product(product(*cuts), tried):
            if any(dim % size for part in parts for dim in part) or any(value % size for *_, value in settings):
                continue
            if all(self._is_right(candidate, parts, settings, size, rank) for rank in (0, size - 1)):  # the two ends
                columns = (
                    SplitLayer(path, "colwise", part) for path, part in zip(candidate.columns, parts, strict=True)
                )
                return Region(
                    "",
                    tuple(columns),
                    SplitLayer(candidate.row, "rowwise", (inputs,)),
                    self.heads(candidate),
                    tuple((owner, attribute, value // size) for owner, attribute, value in settings),
                    inner,
                )
        return None

    def _inner(self, candidate: Candidate) -> tuple[str, ...] | None:
        """Parameters that a region reads; None where it reads what others do too, or the block's trained input."""
        assert self.whole is not None
        names = {path for path, weight in self._trained() if _depends([self.whole.inputs[candidate.row]], weight)}
        outside_tensors = [tensor for path, tensor in self.whole.inputs.items() if path != candidate.row]
        outside_tensors += [tensor for tensor in self.whole.outputs if isinstance(tensor, Tensor)]
        shared = any(_depends(outside_tensors, weight) for path, weight in self._trained() if path in names)
        arguments = [tensor for tensor in tree_leaves(self.call) if isinstance(tensor, Tensor) and tensor.requires_grad]
        if shared or any(_depends([self.whole.inputs[candidate.row]], argument) for argument in arguments):
            return None
        return tuple(sorted(names))

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(path, weight) for path, weight in self.block.named_parameters() if weight.device.type != "meta"]

    def _attributes(
        self, candidate: Candidate, sizes: set[int]
    ) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
        """Numbers of heads, and widths, in the attributes of the modules around a region's layers."""
        around = self._around(candidate)
        heads = [(path, key, value) for path, module in around for key, value in head_counts(module)]
        width_settings = [
            (path, key, value)
            for path, module in around
            for key, value in vars(module).items()
            if type(value) is int and value in sizes and (path, key, value) not in heads and not key.startswith("_")
        ]
        return heads, width_settings

    def _around(self, candidate: Candidate) -> list[tuple[str, nn.Module]]:
        """Modules that hold a region's layers, from the innermost one with all of them inward."""
        names = [path.split(".")[:-1] for path in (candidate.row, *candidate.columns)]
        owners = [{".".join(segments[:depth]) for depth in range(len(segments) + 1)} for segments in names]
        common = max(set.intersection(*owners), key=len)  # innermost common module
        paths = {path for prefixes in owners for path in prefixes if path.startswith(common)}
        return [(path, self.block.get_submodule(path)) for path in sorted(paths)]

    def heads(self, candidate: Candidate) -> int:
        """Count the heads of a region whose features do not stand alone, where its modules tell; else 0."""
        head_numbers = [value for *_, value in self._attributes(candidate, set())[0]]
        sizes = [
            value
            for _, module in self._around(candidate)
            for key, value in vars(module).items()
            if key in ("head_dim", "head_size", "attention_head_size") and type(value) is int
        ]
        if not (head_numbers or sizes) or self._is_even(candidate):
            return 0
        return widths(self.layers[candidate.row])[0] // sizes[0] if sizes else max(head_numbers)

    def _is_even(self, candidate: Candidate) -> bool:
        """Whether each feature stands alone, as in an MLP: with all but the first of them changed, it is the same."""
        assert self.whole is not None
        inputs = widths(self.layers[candidate.row])[0]
        changed = dict(self.given)
        for path in candidate.columns:
            parts = fused_ways(widths(self.layers[path])[1], inputs)[0]
            first_mask = torch.cat([torch.arange(width) == 0 for width in parts])  # first feature of each part
            changed[path] = torch.where(first_mask, self.given[path], self.given[path].flip(-1))
        run = self._run(changed)
        row_input, expected = run and run.inputs.get(candidate.row), self.whole.inputs[candidate.row]
        return row_input is not None and _same(row_input[..., :1], expected[..., :1])

    def _is_right(
        self,
        candidate: Candidate,
        parts: Sequence[tuple[int, ...]],
        settings: Sequence[tuple[str, str, int]],
        size: int,
        rank: int,
    ) -> bool:
        """Run a rank's part of a region, and compare."""
        assert self.whole is not None
        outputs = dict(self.given)
        for path, layer_parts in zip(candidate.columns, parts, strict=True):
            outputs[path] = self.given[path].index_select(-1, own_columns(layer_parts, size, rank))
        changed = tuple((owner, attribute, value // size) for owner, attribute, value in settings)
        with setting(self.block, changed):
            run = self._run(outputs)
        if run is None or run.inputs.keys() != self.whole.inputs.keys():
            return False
        expected = dict(self.whole.inputs)
        row = expected[candidate.row]
        expected[candidate.row] = row.index_select(-1, own_columns(row.shape[-1:], size, rank))
        same_inputs = all(_same(run.inputs[path], x) for path, x in expected.items())
        pairs = zip(run.outputs, self.whole.outputs, strict=False)
        return (
            same_inputs
            and len(run.outputs) == len(self.whole.outputs)
            and all(_same(output, reference) if isinstance(output, Tensor) else True for output, reference in pairs)
        )


def _fill(part: nn.Module) -> None:
    """Give a module numbers instead of the meta device's."""
    for name, parameter in part._parameters.items():
        if parameter is not None:
            part._parameters[name] = nn.Parameter(_made(parameter).detach())
    for name, buffer in part._buffers.items():
        if buffer is not None:
            part._buffers[name] = _made(buffer)


def _made(tensor: Any) -> Any:
    """A tensor of the shape of another with random numbers; whole numbers are 0, and booleans True."""
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.is_floating_point():
        # From 0.1 to 1.1: no weight of a norm is 0.
        return (torch.rand(tensor.shape, dtype=tensor.dtype) + 0.1).requires_grad_(tensor.requires_grad)
    return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype)


def _same(x: Tensor, y: object) -> bool:
    return isinstance(y, Tensor) and x.shape == y.shape and torch.allclose(x, y, TOLERANCE, TOLERANCE)


def _depends(results: Sequence[Tensor], on: Tensor) -> bool:
    reached = [result for result in results if result.requires_grad]
    if not reached or not on.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(
        reached, [on], [torch.rand_like(result) for result in reached], retain_graph=True, allow_unused=True
    )
    return gradient is not None
