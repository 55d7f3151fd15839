"""Split the blocks of a model over a tensor-parallel axis: those whose names match a pattern.

The split model keeps the blocks and names of the whole one; each rank keeps its slices and no view of the whole
weights. Every rank computes the parts that the pattern leaves out.

Of a module from elsewhere, `dlojz.models.foreign.tensor_plan` finds the regions, and linear layers are split; all else
stays its code. Each rank keeps its part of the layers' weights; the numbers of heads in the modules around them become
its own. A column-parallel layer enters the region itself: three layers that read one tensor send three gradients of it,
as with torch's `ColwiseParallel`.

    layer                     forward                      backward
    column-parallel           -                            all-reduce of its input's gradient
    row-parallel              all-reduce of its output     -
    read between the two      -                            all-reduce of its gradient

Shape suffixes: D in-features, F out-features; d = D / n, f = F / n of one of n ranks; … any dimensions before.

Source: the choice by pattern is SageMaker's (`smp.tensor_parallelism`, SageMaker model parallel library v1 docs);
Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences
from dlojz.by_hand.tensor.axis import TensorAxis, add_up, copy
from dlojz.by_hand.tensor.convolution import ParallelMBConvBlock, ParallelStem
from dlojz.by_hand.tensor.layers import (
    ParallelEmbedding,
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)
from dlojz.by_hand.tensor.split_blocks import (
    ParallelAttentionBlock,
    ParallelCoAtNetHead,
    ParallelHead,
    ParallelLlamaBlock,
    ParallelTransformerBlock,
)
from dlojz.models import coatnet, gpt, llama
from dlojz.models.blocks import BlockList, Loss, TransformerBlock, VocabularyHead, loss_of, tie, tied_names
from dlojz.models.foreign.tensor_regions import Region, SplitLayer, own_columns, put

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

EVERYTHING = ""
"""The pattern that every part's name matches."""

_HALVES: dict[type[nn.Module], Callable[..., nn.Module]] = {
    TransformerBlock: ParallelTransformerBlock,
    llama.LlamaBlock: ParallelLlamaBlock,
    coatnet.AttentionBlock: ParallelAttentionBlock,
}
"""Blocks of two regions, each of which can be split alone."""
_WHOLES: dict[type[nn.Module], tuple[str, Callable[..., nn.Module]]] = {
    nn.Embedding: ("embedding", VocabularyParallelEmbedding),
    gpt.Embedding: ("embedding", ParallelEmbedding),
    VocabularyHead: ("head", ParallelHead),
    coatnet.Stem: ("stem", ParallelStem),
    coatnet.MBConvBlock: ("convolution", ParallelMBConvBlock),
    coatnet.PoolingHead: ("head", ParallelCoAtNetHead),
}
"""Blocks of one region, with its name."""


def parts_of(model: BlockList) -> Iterator[str]:
    """Name the parts of a model that can be split, e.g. `blocks.3.attention`, `blocks.3.mlp`, `blocks.9.head`."""
    for number, block in enumerate(model.blocks):
        if type(block) in _HALVES:
            yield from (f"blocks.{number}.attention", f"blocks.{number}.mlp")
        elif type(block) in _WHOLES:
            yield f"blocks.{number}.{_WHOLES[type(block)][0]}"


def split_model(model: BlockList, axis: TensorAxis, pattern: str = EVERYTHING) -> BlockList:
    """Replace the blocks of a model by this rank's parts of them, in place.

    Args:
        model: the whole model, with the same weights on all ranks of the axis.
        pattern: regular expression; parts whose names it matches anywhere are split (see `parts_of`), all by default.

    Raises:
        LabError: if no part matches; or one alone of two that share a matrix; or there are too few heads, channels or
            features for the ranks; or of a model from elsewhere nothing can be split.
    """
    # A model from elsewhere: its regions were found by its code, not by the classes of its blocks.
    if model.tensor_plan is not None:
        return split_linears(model, axis, model.tensor_plan(axis.size, pattern))
    names = list(parts_of(model))
    chosen = {name for name in names if re.search(pattern, name)}
    if not chosen:
        raise LabError(_nothing_matches(type(model).__name__, pattern, names))
    tied = tied_names(model)
    check_tied(chosen, names, tied, pattern)
    if axis.sequence_parallel and chosen != set(names):
        raise phrase.refused("sequence parallel in part", pattern=pattern, left_out=sorted(set(names) - chosen)[0])
    for number, block in enumerate(model.blocks):
        prefix = f"blocks.{number}."
        if type(block) in _HALVES:
            halves = {half: prefix + half in chosen for half in ("attention", "mlp")}
            if any(halves.values()):
                # Slices are copies: once replaced, the whole block leaves memory.
                model.blocks[number] = _HALVES[type(block)](block, axis, **halves)
        elif type(block) in _WHOLES:
            name, parallel = _WHOLES[type(block)]
            if prefix + name in chosen:
                model.blocks[number] = parallel(block, axis)
    tie(model, tied)  # embedding and head have the same rows of the one matrix
    return model


def check_tied(chosen: set[str], names: Sequence[str], tied: Mapping[str, str], pattern: str) -> None:
    """Refuse to split only one of the two parts that share a matrix.

    Args:
        tied: the names of the shared parameter, as `tied_names` gives them.

    Raises:
        LabError: if the embedding is split and the tied head is not, or the other way round.
    """
    ends = {names[0], names[-1]}
    # One of the two alone: the shared matrix would be split for one reader and whole for the other.
    if tied and len(ends & chosen) == 1:
        (split,), (part,) = ends & chosen, ends - chosen
        raise phrase.refused("tied and split in part", pattern=pattern, split=split, part=part)


def parallel_loss(model: BlockList) -> Loss:
    """Return the mean loss for what the model's last block gives: all logits, or this rank's words of them."""
    head = model.blocks[-1]
    if not isinstance(head, ParallelHead):
        return loss_of(model)
    # fp32, whatever autocast computed the logits in: exponentials are summed.
    return lambda logits, targets: vocabulary_parallel_cross_entropy(logits.float(), targets, head.start, head.axis)


def _nothing_matches(model: str, pattern: str, names: list[str]) -> str:
    if not names:
        return phrase("no tensor-parallel form", model=model)
    return phrase("no part matches", model=model, pattern=pattern, first_name=names[0], last_name=names[-1])


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
