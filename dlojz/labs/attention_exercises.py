"""Lab 01: attention by hand.

Layer 6 (labs). Invariant: the references are torch's own functions.

Shape suffixes: T tokens, D width, N heads, H = D / N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said


def attention(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    """Scaled dot-product attention of one head: each row is a mean of the rows of `v_TD`, shape (T, D).

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.
    """
    import torch.nn.functional as F

    return F.scaled_dot_product_attention(q_TD[None], k_TD[None], v_TD[None])[0]


def random_tensors(*shapes: tuple[int, ...], seed: int) -> tuple[Any, ...]:
    """Normal tensors, the same at every call."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _queries() -> Iterator[tuple[Any, ...]]:
    # Not square, and more keys than queries in one of them: a transposition in the wrong place cannot hide.
    yield random_tensors((5, 8), (5, 8), (5, 8), seed=1)
    yield random_tensors((3, 16), (7, 16), (7, 16), seed=2)
    yield tuple(30 * tensor for tensor in random_tensors((6, 4), (6, 4), (6, 4), seed=3))


def _scores(scale: Callable[[int], float], dim: int | None = -1) -> Callable[..., Any]:
    def way(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
        scores_TT = q_TD @ k_TD.T / scale(q_TD.shape[-1])
        return (scores_TT if dim is None else scores_TT.softmax(dim)) @ v_TD

    return way


ATTENTION = Exercise(
    id="attention",
    title=Said("self-attention", "l’auto-attention"),
    judge=by_reference(
        attention,
        cases=_queries,
        mistakes=(
            Mistake(
                _scores(lambda width: 1.0),
                Said(
                    "The scores are not divided by √D: a dot product of D terms grows with √D, and the softmax then "
                    "keeps nearly one token only.",
                    "Les scores ne sont pas divisés par √D : un produit scalaire de D termes grandit comme √D, et le "
                    "softmax ne garde alors presque qu’un seul token.",
                ),
            ),
            Mistake(
                _scores(float),
                Said(
                    "The scores are divided by D, but should be by √D: their standard deviation grows as √D.",
                    "Les scores sont divisés par D au lieu de √D : c’est comme √D que leur écart-type grandit.",
                ),
            ),
            Mistake(
                _scores(lambda width: 1 / math.sqrt(width)),
                Said(
                    "The scores are multiplied by √D; divide them.", "Les scores sont multipliés par √D ; divisez-les."
                ),
            ),
            Mistake(
                _scores(math.sqrt, dim=0),
                Said(
                    "The softmax runs over the queries (dim=0); each query shares its attention among the keys: "
                    "dim=-1.",
                    "Le softmax porte sur les requêtes (dim=0) ; or chaque requête répartit son attention entre les "
                    "clés : dim=-1.",
                ),
            ),
            Mistake(
                _scores(math.sqrt, dim=None),
                Said(
                    "The softmax is missing: the weights of one query must be positive and sum to 1.",
                    "Le softmax manque : les poids d’une requête doivent être positifs et de somme 1.",
                ),
            ),
            Mistake(
                lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1),
                Said(
                    "These are the attention weights; the output is their product with the values.",
                    "Ce sont les poids d’attention ; la sortie est leur produit avec les valeurs.",
                ),
            ),
            Mistake(
                lambda q, k, v: attention(q, k, k),
                Said(
                    "You take the mean of the keys; it is the values that are mixed.",
                    "Vous faites la moyenne des clés ; ce sont les valeurs que l’on mélange.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: the same values as torch's scaled_dot_product_attention.",
        "Exact : les mêmes valeurs que scaled_dot_product_attention de torch.",
    ),
    hints=(
        Said(
            "Three steps: scores between every query and every key, softmax over the keys, mean of the values.",
            "Trois étapes : les scores entre chaque requête et chaque clé, un softmax sur les clés, la moyenne des "
            "valeurs.",
        ),
        Said(
            "The scores are q_TD @ k_TD.T divided by the square root of the width, q_TD.shape[-1].",
            "Les scores sont q_TD @ k_TD.T, divisés par la racine carrée de la largeur, q_TD.shape[-1].",
        ),
    ),
)


def multi_head(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
    """Multi-head self-attention without biases; `qkv_DE` holds queries, keys and values side by side, E = 3 D.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2; same layout as `torch.nn.MultiheadAttention`.
    """
    return _concatenate(_heads(x_TD, qkv_DE, num_heads)) @ out_DD


def _heads(x_TD: Any, qkv_DE: Any, num_heads: int) -> Any:
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


def _scaled_by_width(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(0, 1) for part in (x_TD @ qkv_DE).chunk(3, -1))
    return _concatenate(_weights(q, k, x_TD.shape[-1]) @ v) @ out_DD


def _not_transposed_back(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
    return _heads(x_TD, qkv_DE, num_heads).reshape(x_TD.shape) @ out_DD


MULTI_HEAD = Exercise(
    id="multi-head",
    title=Said("multi-head attention", "l’attention multi-têtes"),
    judge=by_reference(
        multi_head,
        cases=_projections,
        mistakes=(
            Mistake(
                lambda x, qkv, out, n: multi_head(x, qkv, out, 1),
                Said(
                    "This is one head of width D: cut queries, keys and values into num_heads heads of width D / "
                    "num_heads, and let each attend on its own.",
                    "C’est une seule tête de largeur D : découpez requêtes, clés et valeurs en num_heads têtes de "
                    "largeur D / num_heads, chacune avec sa propre attention.",
                ),
            ),
            Mistake(
                _reshaped_only,
                Said(
                    "The reshape mixes tokens and heads: split the last dimension, (T, N, H), then transpose to (N, "
                    "T, H).",
                    "Le reshape mélange tokens et têtes : découpez la dernière dimension, (T, N, H), puis transposez "
                    "en (N, T, H).",
                ),
            ),
            Mistake(
                _scaled_by_width,
                Said(
                    "The scores are divided by √D; a head has width H = D / num_heads, so divide by √H.",
                    "Les scores sont divisés par √D ; une tête a la largeur H = D / num_heads, divisez donc par √H.",
                ),
            ),
            Mistake(
                _not_transposed_back,
                Said(
                    "The heads are joined without transposing back: (N, T, H) becomes (T, N, H) first, then (T, D).",
                    "Les têtes sont recollées sans transposition : (N, T, H) redevient d’abord (T, N, H), puis (T, D).",
                ),
            ),
            Mistake(
                lambda x, qkv, out, n: _concatenate(_heads(x, qkv, n)),
                Said(
                    "The output projection is missing: the heads, side by side, go through out_DD, which lets them "
                    "mix.",
                    "La projection de sortie manque : les têtes, mises côte à côte, passent par out_DD, qui leur "
                    "permet de se mélanger.",
                ),
            ),
            Mistake(
                lambda x, qkv, out, n: (_heads(x, qkv, n).sum(0).repeat(1, n)) @ out,
                Said(
                    "You add the heads; lay them side by side instead, so that the output has width D again.",
                    "Vous additionnez les têtes ; mettez-les plutôt côte à côte, pour retrouver la largeur D.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right. Each head looks at the image in its own way, and all of them are computed at once.",
        "Exact. Chaque tête regarde l’image à sa façon, et toutes se calculent en même temps.",
    ),
    hints=(
        Said(
            "(x_TD @ qkv_DE).chunk(3, dim=-1) gives queries, keys and values; each is (T, D). Which shape lets "
            "matrix products run head by head?",
            "(x_TD @ qkv_DE).chunk(3, dim=-1) donne requêtes, clés et valeurs, chacune de forme (T, D). Quelle forme "
            "permet de faire les produits matriciels tête par tête ?",
        ),
        Said(
            "unflatten(-1, (num_heads, -1)).transpose(0, 1) gives (N, T, H); at the end transpose(0, 1).flatten(1) "
            "comes back to (T, D).",
            "unflatten(-1, (num_heads, -1)).transpose(0, 1) donne (N, T, H) ; à la fin, transpose(0, 1).flatten(1) "
            "revient à (T, D).",
        ),
    ),
)
