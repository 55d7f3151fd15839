"""Permute channels so that 2:4 sparsity keeps more magnitude: the search, and the model that computes the same.

An order that is found keeps at least as much as the one given; for eight columns it is the best there is, and for more
no other exchange between any two groups is better, unless the sweeps ran out. Only the order of the model's sums
changes:

    hidden        units of an MLP         rows of the first layer, its biases, columns of the second
    value_output  dimensions of V, a head  rows of V, their biases, columns of the layer after the attention
    stream        dimensions of the whole residual stream: whatever writes to it, reads it or normalises it

2:4 groups lie along a layer's inputs: the dimensions of Q and K, whose order moves rows only, change none of them.

Shape suffixes: R rows, C columns, P pairs of groups, S ways of taking four columns of eight; D width of the stream, H
width of a head, O outputs, I inputs.

Source: Pool and Yu 2021, "Channel permutations for N:M sparsity" (NeurIPS), whose exhaustive search of a window of two
stripes this is, the windows visited as teams meet in a tournament.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dlojz.base.language import refusal
from dlojz.compress.two_to_four import GROUP, check_groups
from dlojz.models import gpt, vit
from dlojz.models.blocks import TransformerBlock, VocabularyHead, tied_names

_FOURS = list(combinations(range(2 * GROUP), GROUP))
_ALONE = [four for four in _FOURS if 0 in four]  # the other four of the eight are the other group: 35 ways
_OTHERS = [tuple(column for column in range(2 * GROUP) if column not in four) for four in _ALONE]
_CACHED = 8192
"""Pairs times rows that are worked on at once: few enough for what is computed of them to stay near the processor."""
Array = NDArray[np.float64]


def kept_magnitude(columns_RC: Tensor) -> float:
    """Sum the two largest magnitudes of every four in a row.

    Raises:
        LabError: if the columns are no multiple of 4.
    """
    check_groups(columns_RC.shape, "columns")
    grouped = columns_RC.detach().abs().double().unflatten(1, (-1, GROUP))  # (R, G, 4)
    return float(grouped.topk(2, dim=-1).values.sum())


def best_permutation(columns_RC: Tensor, sweeps: int = 6) -> Tensor:
    """Find an order of the columns that keeps at least as much magnitude: new column c is old column order[c].

    Every two groups of four meet once in a sweep, and share their eight columns in the best of the 35 ways; a sweep
    that brings nothing is the last.

    Args:
        columns_RC: the weights; rows that are permuted together are stacked.
        sweeps: at most so many.

    Raises:
        LabError: if the columns are no multiple of 4.
    """
    check_groups(columns_RC.shape, "columns")
    # numpy: hundreds of thousands of small operations, each too short to be worth waking torch's threads.
    magnitude_CR = np.ascontiguousarray(columns_RC.detach().cpu().abs().double().numpy().T)
    order_G4 = np.arange(len(magnitude_CR)).reshape(-1, GROUP)
    chunk = max(1, _CACHED // magnitude_CR.shape[1])
    for _ in range(sweeps):
        has_gain = False
        for pairs_P2 in _meetings(len(order_G4)):
            for start in range(0, len(pairs_P2), chunk):
                has_gain |= _share_out(magnitude_CR, order_G4, pairs_P2[start : start + chunk])
        if not has_gain:
            break
    return torch.from_numpy(order_G4.reshape(-1))


def _meetings(groups: int) -> list[NDArray[np.int64]]:
    """Rounds of a tournament: in each, every group meets at most one other; in all, every other group once."""
    teams = list(range(groups + groups % 2))  # of an odd number, one group rests in each round
    rounds = []
    for _ in range(len(teams) - 1):
        half = len(teams) // 2
        pairs = zip(teams[:half], reversed(teams[half:]), strict=True)
        rounds.append(np.array([pair for pair in pairs if max(pair) < groups], dtype=np.int64).reshape(-1, 2))
        # The first team stays, the others move round by one.
        teams = [teams[0], teams[-1], *teams[1:-1]]
    return rounds


def _share_out(magnitude_CR: Array, order_G4: NDArray[np.int64], pairs_P2: NDArray[np.int64]) -> bool:
    """Let pairs of groups share their columns at best, in place; whether any did."""
    eight_P8 = order_G4[pairs_P2].reshape(-1, 2 * GROUP)  # (P, 2, 4) → (P, 8)
    shares_PS = _kept_by_share(magnitude_CR[eight_P8.T])  # (P, S), S = 35
    best_P, present_P = shares_PS.argmax(axis=1), shares_PS[:, _ALONE.index(tuple(range(GROUP)))]
    # Below this a gain is rounding, and two shares of the same worth could be exchanged for ever.
    changed = shares_PS.max(axis=1) > present_P * (1 + 1e-12)
    for side, choices in enumerate((_ALONE, _OTHERS)):
        columns_P4 = np.take_along_axis(eight_P8[changed], np.array(choices)[best_P[changed]], axis=1)
        order_G4[pairs_P2[changed, side]] = columns_P4
    return bool(changed.any())


def _kept_by_share(magnitude_8PR: Array) -> Array:
    """What each pair of groups keeps in each of the 35 ways of sharing its eight columns."""
    # Sum and maximum of the 28 pairs of columns, (P, R) each: the 70 fours are made of them.
    total, largest = {}, {}
    for column, partner in combinations(range(2 * GROUP), 2):
        total[column, partner] = magnitude_8PR[column] + magnitude_8PR[partner]
        largest[column, partner] = np.maximum(magnitude_8PR[column], magnitude_8PR[partner])
    same_half_PR, split_PR = np.empty_like(magnitude_8PR[0]), np.empty_like(magnitude_8PR[0])

    def kept(four: tuple[int, ...]) -> Array:
        """The two largest of four are both of one half, or the largest of each."""
        low, high = (four[0], four[1]), (four[2], four[3])
        np.maximum(total[low], total[high], out=same_half_PR)
        np.add(largest[low], largest[high], out=split_PR)
        kept_P: Array = np.maximum(same_half_PR, split_PR, out=same_half_PR).sum(axis=1)  # (P,)
        return kept_P

    return np.stack([kept(four) + kept(complement) for four, complement in zip(_ALONE, _OTHERS, strict=True)], axis=1)


Kind = Literal["stream", "hidden", "value_output"]
_QUERY, _KEY, _VALUE = range(3)


@dataclass(frozen=True)
class KeptMagnitude:
    """Share of the magnitude that 2:4 keeps of the weights that one permutation moves.

    Args:
        block: name of the block; empty: the whole model.
        kind: of permutation.
        before: share from 0.5 to 1, in the order that the model had.
        after: in the order that was chosen.
        magnitude: sum of the magnitudes of these weights.
        head: of the attention, from 0; None: all of them, or none.
    """

    block: str
    kind: Kind
    before: float
    after: float
    magnitude: float
    head: int | None = None


def together(groups: Sequence[KeptMagnitude], block: str = "") -> KeptMagnitude:
    """Average several groups of weights by their magnitude; the kind is that of the first."""
    magnitude = sum(group.magnitude for group in groups)
    before = sum(group.before * group.magnitude for group in groups) / magnitude
    after = sum(group.after * group.magnitude for group in groups) / magnitude
    return KeptMagnitude(block, groups[0].kind, before, after, magnitude)


def permute_dense_pair(producer: nn.Linear, consumer: nn.Linear, order: Tensor) -> None:
    """Reorder the units between two consecutive dense layers in place: rows and biases of one, columns of the other.

    What stands between them treats each unit alone (GELU, ReLU), so the second layer adds the same terms.

    Args:
        producer: gives the units.
        consumer: reads them.
        order: new unit u is old unit order[u].
    """
    _take_rows(producer, order)
    _take_columns(consumer, order)


def permute_query_key(block: TransformerBlock, head: int, order: Tensor) -> None:
    """Reorder the dimensions in which one head compares queries and keys, in place: q · k is a sum over them.

    Args:
        head: from 0.
        order: of the H dimensions of a head.
    """
    for part in (_QUERY, _KEY):
        _permute_rows(block, head, part, order)


def permute_value_output(block: TransformerBlock, head: int, order: Tensor) -> None:
    """Reorder the dimensions of one head's values in place, and what reads them after the attention.

    Args:
        head: from 0.
        order: of the H dimensions of a head.
    """
    _permute_rows(block, head, _VALUE, order)
    columns = block.attention_project.weight.data[:, _columns(block, head)]
    # An index by `order` copies, so that the columns can be overwritten.
    block.attention_project.weight.data[:, _columns(block, head)] = columns[:, order]


def permute_stream(model: nn.Module, order: Tensor) -> None:
    """Reorder the dimensions of the residual stream of a ViT or a GPT in place.

    Args:
        model: a ViT, or a GPT without experts.
        order: of the D dimensions.

    Raises:
        LabError: if the model is another.
    """
    tied = tied_names(model)
    for block in _stream_blocks(model):
        if isinstance(block, vit.PatchEmbedding):
            _take_rows(block.project, order)
            for parameter in (block.class_token, block.position):
                parameter.data = parameter.data[..., order]
        elif isinstance(block, gpt.Embedding):
            for embedding in (block.token, block.position):
                embedding.weight.data = embedding.weight.data[:, order]
        for module in block.children():
            if isinstance(module, nn.LayerNorm):
                _take_rows(module, order)
        if isinstance(block, TransformerBlock):
            _take_rows(block.attention_project, order)
            _take_rows(block.mlp_project, order)
        if not (tied and isinstance(block, VocabularyHead)):  # a tied head is the embedding, which has been reordered
            for reader in _readers(block):
                _take_columns(reader, order)


def check_permutable(model: nn.Module) -> None:
    """Refuse a model whose residual stream cannot be reordered; its shapes are enough.

    Raises:
        LabError: unless it is a ViT, or a GPT without experts.
    """
    _stream_blocks(model)


def permuted_for_2_of_4(model: nn.Module, sweeps: int = 6) -> tuple[nn.Module, tuple[KeptMagnitude, ...]]:
    """Copy a model and permute its dimensions so that 2:4 keeps more and the output stays.

    Args:
        model: a ViT, or a GPT without experts.
        sweeps: of each search, at most.

    Returns:
        The copy, and what 2:4 keeps of each group of weights before and after.

    Raises:
        LabError: if the model is another.
    """
    permuted_model = copy.deepcopy(model)
    reader_columns = torch.cat(
        [reader.weight.data for block in _stream_blocks(permuted_model) for reader in _readers(block)]
    )
    order = best_permutation(reader_columns, sweeps)
    magnitudes = [_kept("", "stream", reader_columns, order)]
    permute_stream(permuted_model, order)
    for name, block in permuted_model.named_modules():
        if isinstance(block, TransformerBlock):
            magnitudes += _improve(name, block, sweeps)
    return permuted_model, tuple(magnitudes)


def _improve(name: str, block: TransformerBlock, sweeps: int) -> Iterator[KeptMagnitude]:
    columns = block.mlp_project.weight.data
    order = best_permutation(columns, sweeps)
    yield _kept(name, "hidden", columns, order)
    permute_dense_pair(block.mlp_expand, block.mlp_project, order)
    for head in range(block.attention_project.in_features // block.head_dim):
        # Head by head: a head weighs its own values only, and no order may cross heads.
        columns = block.attention_project.weight.data[:, _columns(block, head)]
        order = best_permutation(columns, sweeps)
        yield _kept(name, "value_output", columns, order, head)
        permute_value_output(block, head, order)


def _kept(block: str, kind: Kind, columns: Tensor, order: Tensor, head: int | None = None) -> KeptMagnitude:
    magnitude = float(columns.abs().double().sum()) or 1.0
    before, after = kept_magnitude(columns), kept_magnitude(columns[:, order])
    return KeptMagnitude(block, kind, before / magnitude, after / magnitude, magnitude, head)


def _stream_blocks(model: nn.Module) -> list[nn.Module]:
    block_types = (TransformerBlock, vit.PatchEmbedding, vit.ClassTokenHead, gpt.Embedding, VocabularyHead)
    blocks = list(getattr(model, "blocks", ()))
    unsupported = [
        block for block in blocks if not isinstance(block, block_types) or getattr(block, "mixture", None) is not None
    ]
    if unsupported or not blocks:
        type_name = type(unsupported[0] if unsupported else model).__name__
        raise refusal(
            en=f"permutations are written for ViT and for GPT without experts, but {type_name} was received; "
            "permute_dense_pair takes any two consecutive dense layers.",
            fr=f"les permutations sont écrites pour ViT et pour GPT sans experts, mais {type_name} a été reçu ; "
            "permute_dense_pair prend deux couches denses consécutives quelconques.",
        )
    return blocks


def _readers(block: nn.Module) -> list[nn.Linear]:
    if isinstance(block, TransformerBlock):
        return [block.qkv, block.mlp_expand]
    if isinstance(block, vit.ClassTokenHead):
        return [block.classifier]
    return [block.output] if isinstance(block, VocabularyHead) else []


def _permute_rows(block: TransformerBlock, head: int, part: int, order: Tensor) -> None:
    start = (3 * head + part) * block.head_dim  # see `dlojz.models.blocks.split_heads`: (head, 3, H)
    for parameter in (block.qkv.weight, block.qkv.bias):
        head_rows = parameter.data[start : start + block.head_dim]
        head_rows.copy_(head_rows[order])  # a view, overwritten by a copy of itself


def _columns(block: TransformerBlock, head: int) -> slice:
    return slice(head * block.head_dim, (head + 1) * block.head_dim)


def _take_rows(module: nn.Linear | nn.Conv2d | nn.LayerNorm, order: Tensor) -> None:
    module.weight.data = module.weight.data[order]
    if (bias := module.bias) is not None:
        bias.data = bias.data[order]


def _take_columns(layer: nn.Linear, order: Tensor) -> None:
    layer.weight.data = layer.weight.data[:, order].contiguous()
