"""Exercises of lab 01: attention, from an image to tokens, the relative position bias, and what attention costs.

The references are torch's own functions and the package's own models; parameters are counted on the package's block,
multiply-adds are those that torch counts.

Shape suffixes: T tokens, D width, N heads, H = D / N; C channels, H and W pixels, P patches, E = C × patch².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts

TEXTS = Texts(__file__)


def attention(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    """Scaled dot-product attention of one head: each row is a mean of the rows of `v_TD`, shape (T, D).

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.
    """
    return F.scaled_dot_product_attention(q_TD[None], k_TD[None], v_TD[None])[0]


def random_tensors(*shapes: tuple[int, ...], seed: int) -> tuple[Any, ...]:
    """Normal tensors, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _queries() -> Iterator[tuple[Any, ...]]:
    # Not square, and more keys than queries in one of them: a transposition in the wrong place cannot hide.
    yield random_tensors((5, 8), (5, 8), (5, 8), seed=1)
    yield random_tensors((3, 16), (7, 16), (7, 16), seed=2)
    yield tuple(30 * tensor for tensor in random_tensors((6, 4), (6, 4), (6, 4), seed=3))


def _scores(scale: Callable[[int], float], dim: int | None = -1) -> Callable[..., Any]:
    def way(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
        # (T queries, D) @ (D, T keys): one row per query.
        scores_TT = q_TD @ k_TD.T / scale(q_TD.shape[-1])
        return (scores_TT if dim is None else scores_TT.softmax(dim)) @ v_TD

    return way


def _by_root_of_tokens(operand_index: int) -> Callable[..., Any]:
    """Scores divided by the root of the number of queries (0) or of keys (1)."""
    return lambda q, k, v: (q @ k.T / math.sqrt(len((q, k)[operand_index]))).softmax(-1) @ v


def _lower_scores(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    """Scores of later keys are 0, whose exponential still counts."""
    return (q_TD @ k_TD.T / math.sqrt(q_TD.shape[-1])).tril().softmax(-1) @ v_TD


def _causal(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    # (T, D) @ (D, T); keys after the query get -inf, which the softmax turns into 0.
    scores_TT = q_TD @ k_TD.T / math.sqrt(q_TD.shape[-1])
    return scores_TT.masked_fill(scores_TT.new_ones(scores_TT.shape).tril() == 0, -math.inf).softmax(-1) @ v_TD


ATTENTION = TEXTS.exercise(
    "attention",
    attention,
    cases=_queries,
    leaves={index: Said(name, name) for index, name in enumerate(("q", "k", "v"))},
    mistakes={
        "the scores are not divided by √D": _scores(lambda width: 1.0),
        "the scores are divided by D": _scores(float),
        "the scores are multiplied by √D": _scores(lambda width: 1 / math.sqrt(width)),
        "the softmax runs over the queries": _scores(math.sqrt, dim=0),
        "the softmax is missing": _scores(math.sqrt, dim=None),
        "attention weights without the values": lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1),
        "you divide by the square root of the number of tokens": tuple(
            _by_root_of_tokens(operand_index) for operand_index in (0, 1)
        ),
        "each query takes the value of its best key": lambda q, k, v: v[(q @ k.T).argmax(-1)],
        "your scores are masked by position": (_lower_scores, _causal),
        "you divide after the softmax": lambda q, k, v: (q @ k.T).softmax(-1) @ v / math.sqrt(q.shape[-1]),
        "one softmax runs over all scores together": lambda q, k, v: (
            (q @ k.T / math.sqrt(q.shape[-1])).flatten().softmax(0).view(len(q), -1) @ v
        ),
        "sigmoid in place of the softmax": lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).sigmoid() @ v,
        "you take the mean of the keys": lambda q, k, v: attention(q, k, k),
    },
)


def multi_head(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
    """Multi-head self-attention without biases; `qkv_DE` holds queries, keys and values side by side, E = 3 D.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2; same layout as `torch.nn.MultiheadAttention`.
    """
    return _concatenate(_heads(x_TD, qkv_DE, num_heads)) @ out_DD


def _heads(x_TD: Any, qkv_DE: Any, num_heads: int) -> Any:
    # x (T, D) @ qkv (D, 3D) gives queries, keys and values side by side; each is cut into N heads of width H = D / N.
    q_NTH, k_NTH, v_NTH = (part.unflatten(-1, (num_heads, -1)).transpose(0, 1) for part in (x_TD @ qkv_DE).chunk(3, -1))
    return _weights(q_NTH, k_NTH, q_NTH.shape[-1]) @ v_NTH


def _weights(q_NTH: Any, k_NTH: Any, scale: float) -> Any:
    return (q_NTH @ k_NTH.transpose(-2, -1) / math.sqrt(scale)).softmax(-1)


def _concatenate(heads_NTH: Any) -> Any:
    return heads_NTH.transpose(0, 1).flatten(1)


def _projections() -> Iterator[tuple[Any, ...]]:
    for tokens, width, num_heads, seed in ((5, 12, 3, 4), (7, 16, 4, 5), (6, 8, 2, 6)):
        yield (*random_tensors((tokens, width), (width, 3 * width), (width, width), seed=seed), num_heads)


def _reshaped_only(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
    tokens, width = x_TD.shape
    q, k, v = (part.reshape(num_heads, tokens, width // num_heads) for part in (x_TD @ qkv_DE).chunk(3, -1))
    return _concatenate(_weights(q, k, q.shape[-1]) @ v) @ out_DD


def _scaled_by(scale: Callable[[Any, int], float]) -> Callable[..., Any]:
    def way(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
        q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(0, 1) for part in (x_TD @ qkv_DE).chunk(3, -1))
        return _concatenate(_weights(q, k, scale(x_TD, num_heads)) @ v) @ out_DD

    return way


def _cut(spelled: str, *order: int) -> Callable[..., Any]:
    """The columns of the projection read as another grid, of parts (p), heads (n) and columns of a head (h)."""

    def way(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
        sizes = {"p": 3, "n": num_heads, "h": x_TD.shape[-1] // num_heads}
        # (T, 3D) as four dimensions, T first; the letters say which of the other three is parts, heads or columns.
        grid = (x_TD @ qkv_DE).unflatten(-1, [sizes[letter] for letter in spelled])
        parts = grid.permute(*(1 + spelled.index(letter) for letter in "pn"), 0, 1 + spelled.index("h"))
        q, k, v = (parts[part_index] for part_index in order)
        return _concatenate(_weights(q, k, q.shape[-1]) @ v) @ out_DD

    return way


def _strided(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
    """Heads of every N-th column, laid out in the same way."""
    q, k, v = (part.unflatten(-1, (-1, num_heads)).permute(2, 0, 1) for part in (x_TD @ qkv_DE).chunk(3, -1))
    return (_weights(q, k, q.shape[-1]) @ v).permute(1, 2, 0).flatten(1) @ out_DD


MULTI_HEAD = TEXTS.exercise(
    "multi-head",
    multi_head,
    cases=_projections,
    leaves={index: Said(name, name) for index, name in enumerate(("x", "qkv", "out"))},
    mistakes={
        "this is one head of width D": lambda x, qkv, out_DD, n: multi_head(x, qkv, out_DD, 1),
        "the reshape mixes tokens and heads": _reshaped_only,
        "you cut the columns head by head": _cut("nph", 0, 1, 2),
        "a head takes every N-th column": tuple(strided_heads for strided_heads in (_cut("phn", 0, 1, 2), _strided)),
        "you average the heads": lambda x, qkv, out_DD, n: _heads(x, qkv, n).mean(0).repeat(1, n) @ out_DD,
        "you cut into two heads whatever num_heads is": lambda x, qkv, out_DD, n: multi_head(x, qkv, out_DD, 2),
        "queries and keys are swapped": _cut("pnh", 1, 0, 2),
        "the scores are not divided by √H": _scaled_by(lambda x, heads: 1.0),
        "scores divided by √ of the number of heads": _scaled_by(lambda x, heads: heads),
        "the output projection is transposed": lambda x, qkv, out_DD, n: _concatenate(_heads(x, qkv, n)) @ out_DD.T,
        "the scores are divided by √D": _scaled_by(lambda x, heads: x.shape[-1]),
        "the heads are joined without transposing back": lambda x_TD, qkv_DE, out_DD, heads: (
            _heads(x_TD, qkv_DE, heads).reshape(x_TD.shape) @ out_DD
        ),
        "the output projection is missing": lambda x, qkv, out_DD, n: _concatenate(_heads(x, qkv, n)),
        "you add the heads": lambda x, qkv, out_DD, n: (_heads(x, qkv, n).sum(0).repeat(1, n)) @ out_DD,
    },
)


def block_parameters(width: int) -> int:
    """Parameters of a transformer block with biases, an MLP four times as wide and two layer norms: 12 D² + 13 D.

    Source: counted; the sum is that of `dlojz.models.blocks.TransformerBlock`.
    """
    from dlojz.models.blocks import TransformerBlock

    # No memory is taken: on the meta device parameters have a shape only.
    with torch.device("meta"):
        block = TransformerBlock(width, 1, 4 * width, causal=False, norm_eps=1e-6)
    return sum(parameter.numel() for parameter in block.parameters())


BLOCK_PARAMETERS = TEXTS.exercise(
    "block-parameters",
    block_parameters,
    cases=((64,), (192,), (768,)),
    mistakes={
        "12 D² alone, without biases and norms": lambda d: 12 * d * d,
        "10 D² alone, 2 D² and all vectors missing": lambda d: 10 * d * d,
        "4 D are missing, of norms or attention biases": lambda d: 12 * d * d + 9 * d,
        "the biases are missing": lambda d: 12 * d * d + 4 * d,
        "one layer norm is missing": lambda d: 12 * d * d + 11 * d,
        "the output projection of the attention is missing": lambda d: 11 * d * d + 12 * d,
        "the MLP alone": lambda d: 8 * d * d + 5 * d,
        "the bias of queries, keys and values is missing": lambda d: 12 * d * d + 10 * d,
        "one layer norm too many": lambda d: 12 * d * d + 15 * d,
        "one bias of D numbers is missing": lambda d: 12 * d * d + 12 * d,
        "the attention alone": lambda d: 4 * d * d + 4 * d,
    },
)


def attention_multiply_adds(num_tokens: int, width: int) -> int:
    """Multiply-adds of the matrix products of one self-attention, projections included: 4 T D² + 2 T² D.

    Source: counted on the products of Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """
    # Four projections (T, D) @ (D, D); then q kᵀ and weights @ v, each T·T·D.
    return 4 * num_tokens * width**2 + 2 * num_tokens**2 * width


ATTENTION_COST = TEXTS.exercise(
    "attention-cost",
    attention_multiply_adds,
    cases=((197, 768), (3136, 96), (49, 768), (12544, 64)),
    mistakes={
        "the four projections are missing": lambda t, d: 2 * t * t * d,
        "the projections alone": lambda t, d: 4 * t * d * d,
        "one of the two T² D products only": lambda t, d: 4 * t * d * d + t * t * d,
        "you count one projection": lambda t, d: t * d * d + 2 * t * t * d,
        "T and D are swapped": lambda t, d: 4 * d * t * t + 2 * d * d * t,
        "scores and mean counted as T D": lambda t, d: 4 * t * d * d + 2 * t * d,
        "one multiply-add per score": lambda t, d: 4 * t * d * d + 2 * t * t,
        "the output projection is missing": lambda t, d: 3 * t * d * d + 2 * t * t * d,
        "FLOPs in place of multiply-adds": lambda t, d: 2 * (4 * t * d * d + 2 * t * t * d),
        "you count the MLP too": lambda t, d: 12 * t * d * d + 2 * t * t * d,
    },
)


def _bias_by(row_sign: int, column_sign: int, swap: bool = False) -> Callable[[Any, int], Any]:
    def way(table: Any, side: int) -> Any:
        index = torch.arange(side * side)
        row, column = index // side, index % side
        rows = row_sign * (row[:, None] - row[None, :]) + side - 1
        columns = column_sign * (column[:, None] - column[None, :]) + side - 1
        # The sum with side - 1 brings the differences, -(side - 1) to side - 1, to indices from 0.
        return table[columns, rows] if swap else table[rows, columns]

    return way


def relative_bias(table: Any, side: int) -> Any:
    """Bias of every (query, key) pair, shape (side², side²), from a table of (2 side − 1)² relative positions.

    Source: Dai et al. 2021 (arXiv 2106.04803), equation 3: w_{i−j}; equal to that of `dlojz.models.coatnet` (tested).
    """
    return _bias_by(1, 1)(table, side)


def _tables() -> Iterator[tuple[Any, int]]:
    for side, seed in ((3, 12), (4, 13), (2, 14)):
        yield random_tensors((2 * side - 1, 2 * side - 1), seed=seed)[0], side


def _at(table: Any, side: int, index_of: Callable[[Any], Any]) -> Any:
    """The table read at places made from the offsets of rows and of columns."""
    index = torch.arange(side * side)
    row, column = index // side, index % side
    return table[index_of(row[:, None] - row[None, :]), index_of(column[:, None] - column[None, :])]


RELATIVE_BIAS = TEXTS.exercise(
    "relative-bias",
    relative_bias,
    cases=_tables,
    leaves={0: Said("the table", "la table")},
    mistakes={
        "the sign is reversed": _bias_by(-1, -1),
        "rows and columns are swapped": _bias_by(1, 1, swap=True),
        "you take the distance, without its sign": lambda table, side: _at(table, side, abs),
        "the indices are one too small": lambda table, side: _at(table, side, lambda offset: offset + side - 2),
        "you add the positions of query and key": lambda table, side: relative_bias(table, side).flip(1),
        "you return the table": lambda table, side: table,
        "only the difference of rows counts": lambda table, side: relative_bias(
            table[:, side - 1 :][:, :1].expand(table.shape), side
        ),
        "side − 1 is not added to the differences": lambda table, side: _at(table, side, lambda offset: offset),
        "every query gets the same row": lambda table, side: (
            table[:side, :side].reshape(-1)[None].expand(side * side, -1)
        ),
    },
)


def cut_in_patches(image_CHW: Any, patch: int) -> Any:
    """Patches in reading order, each flattened channel by channel, row by row: shape (P, C × patch²).

    Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), section 3.1; the order is that of a convolution's kernel.
    """
    # unfold gives (1, C·patch², P), channels outermost; one patch per row is wanted.
    return F.unfold(image_CHW[None], patch, stride=patch)[0].T


def _images() -> Iterator[tuple[Any, int]]:
    # Wider than high, so that rows and columns cannot be confused unnoticed.
    for channels, height, width, patch, seed in ((3, 8, 12, 4, 7), (1, 6, 10, 2, 8), (2, 9, 6, 3, 9)):
        yield random_tensors((channels, height, width), seed=seed)[0], patch


def _tiles(image_CHW: Any, patch: int) -> Any:
    """(C, rows, patch, columns, patch)."""
    channels, height, width = image_CHW.shape
    return image_CHW.reshape(channels, height // patch, patch, width // patch, patch)


PATCHES = TEXTS.exercise(
    "patches",
    cut_in_patches,
    cases=_images,
    mistakes={
        "a reshape alone, runs of pixels in place of squares": lambda image, patch: image.reshape(
            -1, image.shape[0] * patch**2
        ),
        "the patches come column by column": lambda image, patch: (
            _tiles(image, patch).permute(3, 1, 0, 2, 4).flatten(2).flatten(0, 1)
        ),
        "each row mixes pieces of several patches": lambda image, patch: (
            _tiles(image, patch).transpose(2, 3).reshape(-1, len(image) * patch**2)
        ),
        "within a patch the channels come last": lambda image, patch: (
            _tiles(image, patch).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
        ),
        "each patch is transposed": lambda image, patch: (
            _tiles(image, patch).permute(1, 3, 0, 4, 2).flatten(2).flatten(0, 1)
        ),
        "your patches overlap": lambda image_CHW, patch: F.unfold(image_CHW[None], patch)[0].T,
        "only the first channel is there": lambda image, patch: cut_in_patches(image[:1], patch),
        "one patch per row is expected": lambda image, patch: cut_in_patches(image, patch).T,
    },
)


def embed(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    """Tokens of a ViT: the class token, then the projected patches, positions added to all, T = P + 1.

    Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), equation 1.
    """
    # (1, D) above (P, E) @ (E, D), then one position per row: (P + 1, D).
    return torch.cat((class_token_D[None], patches_PE @ projection_ED)) + position_TD


def _sequences() -> Iterator[tuple[Any, ...]]:
    for patches, length, width, seed in ((4, 12, 6, 10), (9, 27, 8, 11)):
        yield random_tensors((patches, length), (length, width), (width,), (patches + 1, width), seed=seed)


TOKENS = TEXTS.exercise(
    "tokens",
    embed,
    cases=_sequences,
    leaves={
        1: Said("the projection", "la projection"),
        2: Said("the class token", "le token de classe"),
        3: Said("the positions", "les positions"),
    },
    mistakes={
        "the class token stands at the end": lambda patches_PE, projection_ED, class_token_D, position_TD: (
            torch.cat((patches_PE @ projection_ED, class_token_D[None])) + position_TD
        ),
        "the class token has got no position": lambda patches_PE, projection_ED, class_token_D, position_TD: torch.cat(
            (class_token_D[None], patches_PE @ projection_ED + position_TD[1:])
        ),
        "patches take positions 0 to P − 1": lambda patches_PE, projection_ED, class_token_D, position_TD: torch.cat(
            (class_token_D[None], patches_PE @ projection_ED + position_TD[:-1])
        ),
        "you take the positions away": lambda patches, projection, token, position: embed(
            patches, projection, token, -position
        ),
        "the class token is missing": lambda patches, projection, token, position: patches @ projection + position[1:],
        "every token gets the first position": lambda patches, projection, token, position: embed(
            patches, projection, token, position[:1]
        ),
        "positions rolled by one, the last comes first": lambda patches, projection, token, position: embed(
            patches, projection, token, position.roll(1, 0)
        ),
        "you multiply by the positions": lambda patches, projection, token, position: (
            embed(patches, projection, token, position * 0) * position
        ),
        "zeros in place of the class token": lambda patches, projection, token, position: embed(
            patches, projection, token * 0, position
        ),
        "you add the class token to every patch": lambda patches, projection, token, position: (
            patches @ projection + token + position[1:]
        ),
        "the class token alone gets its position": lambda patches_PE, projection_ED, class_token_D, position_TD: (
            torch.cat(((class_token_D + position_TD[0])[None], patches_PE @ projection_ED))
        ),
        "the positions are missing": lambda patches, projection, token, position: embed(
            patches, projection, token, position * 0
        ),
    },
)
