"""Split the blocks of a model over a tensor-parallel axis: those whose names match a pattern.

The split model keeps the blocks and names of the whole one; each rank keeps its slices and no view of the whole
weights. Every rank computes the parts that the pattern leaves out.

Source: the choice by pattern is SageMaker's (`smp.tensor_parallelism`, SageMaker model parallel library v1 docs).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say
from dlojz.by_hand.tensor.axis import TensorAxis
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
from dlojz.by_hand.tensor.split_linears import split_linears
from dlojz.models import coatnet, gpt, llama
from dlojz.models.blocks import BlockList, Loss, TransformerBlock, VocabularyHead, loss_of, tie, tied_names

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
        raise refusal(
            en=f"sequence_parallel needs every part split, as a whole one would miss the other ranks' tokens, but "
            f"the pattern {pattern!r} leaves out {sorted(set(names) - chosen)[0]}: leave the pattern out.",
            fr="sequence_parallel demande que toutes les parties soient découpées, car il manquerait à une partie "
            f"entière les tokens des autres rangs, mais le motif {pattern!r} laisse de côté "
            f"{sorted(set(names) - chosen)[0]} : retirez le motif.",
        )
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
        chosen: the parts that are split, of `names`.
        tied: the names of the shared parameter, as `tied_names` gives them.

    Raises:
        LabError: if the embedding is split and the tied head is not, or the other way round.
    """
    ends = {names[0], names[-1]}
    # One of the two alone: the shared matrix would be split for one reader and whole for the other.
    if tied and len(ends & chosen) == 1:
        (split,), (part,) = ends & chosen, ends - chosen
        raise refusal(
            en=f"embedding and head share one matrix, but the pattern {pattern!r} splits {split} and leaves {part} "
            "whole: write a pattern that matches both, e.g. embedding|head, or none of them.",
            fr=f"l’embedding et la tête partagent une seule matrice, mais le motif {pattern!r} découpe {split} et "
            f"laisse {part} entière : écrivez un motif qui vaut pour les deux, par exemple embedding|head, ou pour "
            "aucune.",
        )


def parallel_loss(model: BlockList) -> Loss:
    """Return the mean loss for what the model's last block gives: all logits, or this rank's words of them."""
    head = model.blocks[-1]
    if not isinstance(head, ParallelHead):
        return loss_of(model)
    # fp32, whatever autocast computed the logits in: exponentials are summed.
    return lambda logits, targets: vocabulary_parallel_cross_entropy(logits.float(), targets, head.start, head.axis)


def _nothing_matches(model: str, pattern: str, names: list[str]) -> str:
    if not names:
        return say(
            en=f"{model} has no tensor-parallel form: use a model of the coatnet, vit, gpt or llama families, or tp=1.",
            fr=f"{model} n’a pas de forme Tensor Parallel : prenez un modèle des familles coatnet, vit, gpt ou llama, "
            "ou tp=1.",
        )
    return say(
        en=f"no part of {model} matches {pattern!r}: its parts are called {names[0]}, …, {names[-1]}; write e.g. "
        "attention, mlp, or blocks\\.[0-3]\\.",
        fr=f"aucune partie de {model} ne correspond à {pattern!r} : elles s’appellent {names[0]}, …, {names[-1]} ; "
        "écrivez par exemple attention, mlp, ou blocks\\.[0-3]\\.",
    )
