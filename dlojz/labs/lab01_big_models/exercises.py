"""Exercises of lab 01: attention, from an image to tokens, the relative position bias, and what attention costs.

The references are torch's own functions and the package's own models; parameters are counted on the package's block,
multiply-adds are those that torch counts.

Shape suffixes: T tokens, D width, N heads, H = D / N; C channels, H and W pixels, P patches, E = C × patch².
"""

import math
from collections.abc import Iterator
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


def _attended(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    """The same, written out: what the usual mistakes change."""
    scores_TT = q_TD @ k_TD.T / math.sqrt(q_TD.shape[-1])
    return scores_TT.softmax(-1) @ v_TD


ATTENTION = TEXTS.exercise(
    "attention",
    attention,
    cases=_queries,
    leaves={index: Said(name, name) for index, name in enumerate(("q", "k", "v"))},
    source=(_attended,),
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


_CUT = "part.unflatten(-1, (num_heads, -1)).transpose(0, 1)"
_JOINED = "heads_NTH.transpose(0, 1).flatten(1)"

MULTI_HEAD = TEXTS.exercise(
    "multi-head",
    multi_head,
    cases=_projections,
    leaves={index: Said(name, name) for index, name in enumerate(("x", "qkv", "out"))},
    source=(multi_head, _heads, _weights, _concatenate),
    mistakes={
        "the reshape mixes tokens and heads": f"{_CUT} → part.reshape(num_heads, len(x_TD), -1)",
        "you cut the columns head by head": (
            f"({_CUT} for part in (x_TD @ qkv_DE).chunk(3, -1)) → "
            "(x_TD @ qkv_DE).unflatten(-1, (num_heads, 3, -1)).permute(2, 1, 0, 3)"
        ),
        "a head takes every N-th column": (
            f"{_CUT} → part.unflatten(-1, (-1, num_heads)).permute(2, 0, 1)",
            f"{_CUT} → part.unflatten(-1, (-1, num_heads)).permute(2, 0, 1); "
            "heads_NTH.transpose(0, 1) → heads_NTH.permute(1, 2, 0)",
        ),
        "you average the heads": f"{_JOINED} → heads_NTH.mean(0).repeat(1, len(heads_NTH))",
        "the heads are joined without transposing back": f"{_JOINED} → heads_NTH.reshape(heads_NTH.shape[1], -1)",
        "you add the heads": f"{_JOINED} → heads_NTH.sum(0).repeat(1, len(heads_NTH))",
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


def relative_bias(table: Any, side: int) -> Any:
    """Bias of every (query, key) pair, shape (side², side²), from a table of (2 side − 1)² relative positions.

    Source: Dai et al. 2021 (arXiv 2106.04803), equation 3: w_{i−j}; equal to that of `dlojz.models.coatnet` (tested).
    """
    index = torch.arange(side * side)
    row, column = index // side, index % side
    # Differences run from -(side - 1) to side - 1; with side - 1 added they are indices.
    rows, columns = (place[:, None] - place[None, :] + side - 1 for place in (row, column))
    return table[rows, columns]


def _tables() -> Iterator[tuple[Any, int]]:
    for side, seed in ((3, 12), (4, 13), (2, 14)):
        yield random_tensors((2 * side - 1, 2 * side - 1), seed=seed)[0], side


RELATIVE_BIAS = TEXTS.exercise(
    "relative-bias",
    relative_bias,
    cases=_tables,
    leaves={0: Said("the table", "la table")},
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


def _tiled(image_CHW: Any, patch: int) -> Any:
    """The same, by reshaping: what the usual mistakes change."""
    channels, height, width = image_CHW.shape
    tiles = image_CHW.reshape(channels, height // patch, patch, width // patch, patch)
    # (rows, columns, C, patch, patch)
    return tiles.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


PATCHES = TEXTS.exercise(
    "patches",
    cut_in_patches,
    cases=_images,
    source=(_tiled,),
    mistakes={
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
)
