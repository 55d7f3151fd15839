"""Exercises of lab 01: attention, from an image to tokens, the relative position bias, and what attention costs.

The references are torch's own functions and the package's own models; parameters are counted on the package's block,
multiply-adds are those that torch counts.

Shape suffixes: T tokens, D width, N heads, H = D / N; C channels, H and W pixels, P patches, E = C × patch².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from dlojz.labs.kit.exercise import Exercise, Mistake, Said
from dlojz.labs.kit.judges import Judge


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


def _by_root_of_tokens(of: int) -> Callable[..., Any]:
    """Scores divided by the root of the number of queries (0) or of keys (1)."""
    return lambda q, k, v: (q @ k.T / math.sqrt(len((q, k)[of]))).softmax(-1) @ v


def _lower_scores(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    """Scores of later keys are 0, whose exponential still counts."""
    return (q_TD @ k_TD.T / math.sqrt(q_TD.shape[-1])).tril().softmax(-1) @ v_TD


def _causal(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    scores_TT = q_TD @ k_TD.T / math.sqrt(q_TD.shape[-1])
    return scores_TT.masked_fill(scores_TT.new_ones(scores_TT.shape).tril() == 0, -math.inf).softmax(-1) @ v_TD


ATTENTION = Exercise(
    id="attention",
    title=Said("self-attention", "l’auto-attention"),
    judge=Judge(
        attention,
        cases=_queries,
        leaves={place: Said(name, name) for place, name in enumerate(("q", "k", "v"))},
        mistakes=(
            Mistake(
                _scores(lambda width: 1.0),
                "The scores are not divided by √D: a dot product of D terms grows with √D, and the softmax then "
                "keeps nearly one token only.",
                "Les scores ne sont pas divisés par √D : un produit scalaire de D termes grandit comme √D, et le "
                "softmax ne garde alors presque qu’un seul token.",
            ),
            Mistake(
                _scores(float),
                "The scores are divided by D, but should be by √D: their standard deviation grows as √D.",
                "Les scores sont divisés par D au lieu de √D : c’est comme √D que leur écart-type grandit.",
            ),
            Mistake(
                _scores(lambda width: 1 / math.sqrt(width)),
                "The scores are multiplied by √D; divide them.",
                "Les scores sont multipliés par √D ; divisez-les.",
            ),
            Mistake(
                _scores(math.sqrt, dim=0),
                "The softmax runs over the queries (dim=0); each query shares its attention among the keys: dim=-1.",
                "Le softmax porte sur les requêtes (dim=0) ; or chaque requête répartit son attention entre les "
                "clés : dim=-1.",
            ),
            Mistake(
                _scores(math.sqrt, dim=None),
                "The softmax is missing: the weights of one query must be positive and sum to 1.",
                "Le softmax manque : les poids d’une requête doivent être positifs et de somme 1.",
            ),
            Mistake(
                lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1),
                "These are the attention weights; the output is their product with the values.",
                "Ce sont les poids d’attention ; la sortie est leur produit avec les valeurs.",
            ),
            *(
                Mistake(
                    _by_root_of_tokens(of),
                    "You divide by the square root of the number of tokens; it is the width D, the number of terms of "
                    "a dot product, that counts.",
                    "Vous divisez par la racine du nombre de tokens ; c’est la largeur D, le nombre de termes d’un "
                    "produit scalaire, qui compte.",
                )
                for of in (0, 1)
            ),
            Mistake(
                lambda q, k, v: v[(q @ k.T).argmax(-1)],
                "Each query takes the value of its best key alone (argmax): the softmax weighs the values of all keys.",
                "Chaque requête prend la valeur de sa seule meilleure clé (argmax) : le softmax pondère les valeurs de "
                "toutes les clés.",
            ),
            *(
                Mistake(
                    way,
                    "Your scores are masked by position (tril): here each query sees all keys.",
                    "Vos scores sont masqués selon la position (tril) : ici, chaque requête voit toutes les clés.",
                )
                for way in (_lower_scores, _causal)
            ),
            Mistake(
                lambda q, k, v: (q @ k.T).softmax(-1) @ v / math.sqrt(q.shape[-1]),
                "You divide after the softmax; it is the scores, before it, that are divided by √D.",
                "Vous divisez après le softmax ; ce sont les scores, avant lui, que l’on divise par √D.",
            ),
            Mistake(
                lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).flatten().softmax(0).view(len(q), -1) @ v,
                "One softmax runs over all scores together; each query has weights that sum to 1: dim=-1.",
                "Un seul softmax porte sur tous les scores à la fois ; chaque requête a ses propres poids, de "
                "somme 1 : dim=-1.",
            ),
            Mistake(
                lambda q, k, v: (q @ k.T / math.sqrt(q.shape[-1])).sigmoid() @ v,
                "A sigmoid treats each score by itself; the weights of one query must sum to 1: that is the softmax.",
                "Une sigmoïde traite chaque score à part ; les poids d’une requête doivent avoir pour somme 1 : "
                "c’est le softmax.",
            ),
            Mistake(
                lambda q, k, v: attention(q, k, k),
                "You take the mean of the keys; it is the values that are mixed.",
                "Vous faites la moyenne des clés ; ce sont les valeurs que l’on mélange.",
            ),
        ),
    ),
    praise_en="Right: the same values as torch's scaled_dot_product_attention.",
    praise_fr="Exact : les mêmes valeurs que scaled_dot_product_attention de torch.",
    hint_en="Three steps: scores between every query and every key, softmax over the keys, mean of the values.",
    hint_fr="Trois étapes : les scores entre chaque requête et chaque clé, un softmax sur les clés, la moyenne des "
    "valeurs.",
    nearer_en="The scores are q_TD @ k_TD.T divided by the square root of the width, q_TD.shape[-1].",
    nearer_fr="Les scores sont q_TD @ k_TD.T, divisés par la racine carrée de la largeur, q_TD.shape[-1].",
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


def _scaled_by(scale: Callable[[Any, int], float]) -> Callable[..., Any]:
    def way(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
        q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(0, 1) for part in (x_TD @ qkv_DE).chunk(3, -1))
        return _concatenate(_weights(q, k, scale(x_TD, num_heads)) @ v) @ out_DD

    return way


def _cut(spelled: str, *order: int) -> Callable[..., Any]:
    """The columns of the projection read as another grid, of parts (p), heads (n) and columns of a head (h)."""

    def way(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
        sizes = {"p": 3, "n": num_heads, "h": x_TD.shape[-1] // num_heads}
        grid = (x_TD @ qkv_DE).unflatten(-1, [sizes[letter] for letter in spelled])
        parts = grid.permute(*(1 + spelled.index(letter) for letter in "pn"), 0, 1 + spelled.index("h"))
        q, k, v = (parts[place] for place in order)
        return _concatenate(_weights(q, k, q.shape[-1]) @ v) @ out_DD

    return way


def _strided(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
    """Heads of every N-th column, laid out in the same way."""
    q, k, v = (part.unflatten(-1, (-1, num_heads)).permute(2, 0, 1) for part in (x_TD @ qkv_DE).chunk(3, -1))
    return (_weights(q, k, q.shape[-1]) @ v).permute(1, 2, 0).flatten(1) @ out_DD


MULTI_HEAD = Exercise(
    id="multi-head",
    title=Said("multi-head attention", "l’attention multi-têtes"),
    judge=Judge(
        multi_head,
        cases=_projections,
        leaves={place: Said(name, name) for place, name in enumerate(("x", "qkv", "out"))},
        mistakes=(
            Mistake(
                lambda x, qkv, out, n: multi_head(x, qkv, out, 1),
                "This is one head of width D: cut queries, keys and values into num_heads heads of width D / "
                "num_heads, and let each attend on its own.",
                "C’est une seule tête de largeur D : découpez requêtes, clés et valeurs en num_heads têtes de "
                "largeur D / num_heads, chacune avec sa propre attention.",
            ),
            Mistake(
                _reshaped_only,
                "The reshape mixes tokens and heads: split the last dimension, (T, N, H), then transpose to (N, T, H).",
                "Le reshape mélange tokens et têtes : découpez la dernière dimension, (T, N, H), puis transposez "
                "en (N, T, H).",
            ),
            Mistake(
                _cut("nph", 0, 1, 2),
                "You cut the columns head by head, each with its query, key and value; all queries come first, then "
                "all keys, then all values: cut in 3 parts first, then in heads.",
                "Vous découpez les colonnes tête par tête, avec requête, clé et valeur dans chacune ; or toutes les "
                "requêtes viennent d’abord, puis toutes les clés, puis toutes les valeurs : coupez d’abord en 3 parts, "
                "puis en têtes.",
            ),
            *(
                Mistake(
                    way,
                    "A head takes every N-th column; head n has the neighbouring columns n·H to (n + 1)·H − 1.",
                    "Une tête prend une colonne sur N ; or la tête n a les colonnes voisines n·H à (n + 1)·H − 1.",
                )
                for way in (_cut("phn", 0, 1, 2), _strided)
            ),
            Mistake(
                lambda x, qkv, out, n: _heads(x, qkv, n).mean(0).repeat(1, n) @ out,
                "You average the heads; lay them side by side instead, so that the output has width D again.",
                "Vous moyennez les têtes ; mettez-les plutôt côte à côte, pour retrouver la largeur D.",
            ),
            Mistake(
                lambda x, qkv, out, n: multi_head(x, qkv, out, 2),
                "You cut into two heads whatever num_heads is.",
                "Vous découpez en deux têtes quel que soit num_heads.",
            ),
            Mistake(
                _cut("pnh", 1, 0, 2),
                "Queries and keys are swapped: the projection holds the queries first, then the keys, then the values.",
                "Requêtes et clés sont échangées : la projection contient d’abord les requêtes, puis les clés, puis "
                "les valeurs.",
            ),
            Mistake(
                _scaled_by(lambda x, heads: 1.0),
                "The scores are not divided by √H, the square root of a head's width.",
                "Les scores ne sont pas divisés par √H, la racine de la largeur d’une tête.",
            ),
            Mistake(
                _scaled_by(lambda x, heads: heads),
                "You divide by the square root of the number of heads; H is the width of one head, D / num_heads.",
                "Vous divisez par la racine du nombre de têtes ; H est la largeur d’une tête, D / num_heads.",
            ),
            Mistake(
                lambda x, qkv, out, n: _concatenate(_heads(x, qkv, n)) @ out.T,
                "The output projection is transposed: the heads, side by side, are multiplied by out_DD as it is.",
                "La projection de sortie est transposée : les têtes, côte à côte, se multiplient par out_DD tel quel.",
            ),
            Mistake(
                _scaled_by(lambda x, heads: x.shape[-1]),
                "The scores are divided by √D; a head has width H = D / num_heads, so divide by √H.",
                "Les scores sont divisés par √D ; une tête a la largeur H = D / num_heads, divisez donc par √H.",
            ),
            Mistake(
                lambda x_TD, qkv_DE, out_DD, heads: _heads(x_TD, qkv_DE, heads).reshape(x_TD.shape) @ out_DD,
                "The heads are joined without transposing back: (N, T, H) becomes (T, N, H) first, then (T, D).",
                "Les têtes sont recollées sans transposition : (N, T, H) redevient d’abord (T, N, H), puis (T, D).",
            ),
            Mistake(
                lambda x, qkv, out, n: _concatenate(_heads(x, qkv, n)),
                "The output projection is missing: the heads, side by side, go through out_DD, which lets them mix.",
                "La projection de sortie manque : les têtes, mises côte à côte, passent par out_DD, qui leur "
                "permet de se mélanger.",
            ),
            Mistake(
                lambda x, qkv, out, n: (_heads(x, qkv, n).sum(0).repeat(1, n)) @ out,
                "You add the heads; lay them side by side instead, so that the output has width D again.",
                "Vous additionnez les têtes ; mettez-les plutôt côte à côte, pour retrouver la largeur D.",
            ),
        ),
    ),
    praise_en="Right. Each head looks at the image in its own way, and all of them are computed at once.",
    praise_fr="Exact. Chaque tête regarde l’image à sa façon, et toutes se calculent en même temps.",
    hint_en="(x_TD @ qkv_DE).chunk(3, dim=-1) gives queries, keys and values; each is (T, D). Which shape lets "
    "matrix products run head by head?",
    hint_fr="(x_TD @ qkv_DE).chunk(3, dim=-1) donne requêtes, clés et valeurs, chacune de forme (T, D). Quelle forme "
    "permet de faire les produits matriciels tête par tête ?",
    nearer_en="unflatten(-1, (num_heads, -1)).transpose(0, 1) gives (N, T, H); at the end transpose(0, 1).flatten(1) "
    "comes back to (T, D).",
    nearer_fr="unflatten(-1, (num_heads, -1)).transpose(0, 1) donne (N, T, H) ; à la fin, transpose(0, 1).flatten(1) "
    "revient à (T, D).",
)


def block_parameters(width: int) -> int:
    """Parameters of a transformer block with biases, an MLP four times as wide and two layer norms: 12 D² + 13 D.

    Source: counted; the sum is that of `dlojz.models.blocks.TransformerBlock`.
    """
    import torch

    from dlojz.models.blocks import TransformerBlock

    with torch.device("meta"):
        block = TransformerBlock(width, 1, 4 * width, causal=False, norm_eps=1e-6)
    return sum(parameter.numel() for parameter in block.parameters())


BLOCK_PARAMETERS = Exercise(
    id="block-parameters",
    title=Said("parameters of an attention block", "les paramètres d’un bloc d’attention"),
    judge=Judge(
        block_parameters,
        cases=((64,), (192,), (768,)),
        mistakes=(
            Mistake(
                lambda d: 12 * d * d,
                "That is the part that matters for large models, 12 D²; the biases (9 D) and the two layer norms "
                "(4 D) are missing for an exact count.",
                "C’est la part qui compte pour les gros modèles, 12 D² ; pour un compte exact, il manque les "
                "biais (9 D) et les deux LayerNorm (4 D).",
            ),
            Mistake(
                lambda d: 10 * d * d,
                "2 D² are missing, and all vectors: four matrices of the attention (queries, keys, values, output) "
                "and two of the MLP, four times as wide, make 12 D².",
                "Il manque 2 D², et tous les vecteurs : les quatre matrices de l’attention (requêtes, clés, valeurs, "
                "sortie) et les deux du MLP, quatre fois plus large, font 12 D².",
            ),
            Mistake(
                lambda d: 12 * d * d + 9 * d,
                "4 D are missing: so many have the two layer norms (each a scale and a shift per channel), and so many "
                "the biases of the attention (3 D for queries, keys and values, D for the output).",
                "Il manque 4 D : c’est ce qu’ont les deux LayerNorm (chacune une échelle et un décalage par canal), et "
                "aussi les biais de l’attention (3 D pour requêtes, clés et valeurs, D pour la sortie).",
            ),
            Mistake(
                lambda d: 12 * d * d + 4 * d,
                "The biases are missing: 3 D for the fused projection, D at its exit, 4 D and D in the MLP.",
                "Les biais manquent : 3 D pour la projection fusionnée, D à sa sortie, 4 D et D dans le MLP.",
            ),
            Mistake(
                lambda d: 12 * d * d + 11 * d,
                "One layer norm is missing, or each has lost its shift: there are two, with a scale and a shift each.",
                "Il manque une LayerNorm, ou le décalage de chacune : il y en a deux, avec échelle et décalage.",
            ),
            Mistake(
                lambda d: 11 * d * d + 12 * d,
                "The output projection of the attention (D² + D) is missing.",
                "La projection de sortie de l’attention (D² + D) manque.",
            ),
            Mistake(
                lambda d: 8 * d * d + 5 * d,
                "That is the MLP alone; the block also has an attention and two layer norms.",
                "C’est le MLP seul ; le bloc a aussi une attention et deux LayerNorm.",
            ),
            Mistake(
                lambda d: 12 * d * d + 10 * d,
                "The bias of queries, keys and values, 3 D, is missing.",
                "Il manque le biais des requêtes, clés et valeurs, 3 D.",
            ),
            Mistake(
                lambda d: 12 * d * d + 15 * d,
                "One layer norm too many: the block has two, one before the attention and one before the MLP.",
                "Une LayerNorm de trop : le bloc en a deux, l’une avant l’attention, l’autre avant le MLP.",
            ),
            Mistake(
                lambda d: 12 * d * d + 12 * d,
                "One bias of D numbers is missing: the output of the attention and that of the MLP have one each.",
                "Il manque un biais de D nombres : la sortie de l’attention et celle du MLP en ont un chacune.",
            ),
            Mistake(
                lambda d: 4 * d * d + 4 * d,
                "That is the attention alone; the block also has an MLP, D → 4 D → D, and two layer norms.",
                "C’est l’attention seule ; le bloc a aussi un MLP, D → 4 D → D, et deux LayerNorm.",
            ),
        ),
    ),
    praise_en="Right: 12 D² + 13 D, whatever the number of heads. Width costs squared, depth only once.",
    praise_fr="Exact : 12 D² + 13 D, quel que soit le nombre de têtes. La largeur coûte au carré, la profondeur une "
    "fois.",
    hint_en="Linear layers: D → 3 D and D → D in the attention, D → 4 D and 4 D → D in the MLP. A linear layer a → b "
    "with bias has a b + b parameters.",
    hint_fr="Couches linéaires : D → 3 D et D → D dans l’attention, D → 4 D et 4 D → D dans le MLP. Une couche "
    "linéaire a → b avec biais a a b + b paramètres.",
    nearer_en="Matrices: (3 + 1 + 4 + 4) D². Biases: (3 + 1 + 4 + 1) D. Two layer norms: 2 × 2 D.",
    nearer_fr="Matrices : (3 + 1 + 4 + 4) D². Biais : (3 + 1 + 4 + 1) D. Deux LayerNorm : 2 × 2 D.",
)


def attention_multiply_adds(num_tokens: int, width: int) -> int:
    """Multiply-adds of the matrix products of one self-attention, projections included: 4 T D² + 2 T² D.

    Source: counted on the products of Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """
    return 4 * num_tokens * width**2 + 2 * num_tokens**2 * width


ATTENTION_COST = Exercise(
    id="attention-cost",
    title=Said("what attention costs", "ce que coûte l’attention"),
    judge=Judge(
        attention_multiply_adds,
        cases=((197, 768), (3136, 96), (49, 768), (12544, 64)),
        mistakes=(
            Mistake(
                lambda t, d: 2 * t * t * d,
                "That is q kᵀ and the mean of the values; the four projections, 4 T D², are missing.",
                "C’est q kᵀ et la moyenne des valeurs ; il manque les quatre projections, 4 T D².",
            ),
            Mistake(
                lambda t, d: 4 * t * d * d,
                "Those are the projections; the part that grows with T², q kᵀ and the mean of the values, is missing.",
                "Ce sont les projections ; il manque la part qui croît comme T² : q kᵀ et la moyenne des valeurs.",
            ),
            Mistake(
                lambda t, d: 4 * t * d * d + t * t * d,
                "There are two products with T² D multiply-adds: q kᵀ, then weights times values.",
                "Il y a deux produits de T² D multiplications-additions : q kᵀ, puis poids fois valeurs.",
            ),
            Mistake(
                lambda t, d: t * d * d + 2 * t * t * d,
                "You count one projection; there are four: queries, keys, values, output.",
                "Vous comptez une projection ; il y en a quatre : requêtes, clés, valeurs, sortie.",
            ),
            Mistake(
                lambda t, d: 4 * d * t * t + 2 * d * d * t,
                "T and D are swapped: a projection is a product of (T, D) and (D, D), so T D².",
                "T et D sont échangés : une projection est un produit de (T, D) par (D, D), soit T D².",
            ),
            Mistake(
                lambda t, d: 4 * t * d * d + 2 * t * d,
                "Scores and mean grow with T²: every query meets every key.",
                "Les scores et la moyenne croissent comme T² : chaque requête rencontre chaque clé.",
            ),
            Mistake(
                lambda t, d: 4 * t * d * d + 2 * t * t,
                "A score is a dot product of D terms, so T² D multiply-adds for all of them, and as many for the mean.",
                "Un score est un produit scalaire de D termes : T² D multiplications-additions pour tous, et "
                "autant pour la moyenne.",
            ),
            Mistake(
                lambda t, d: 3 * t * d * d + 2 * t * t * d,
                "The output projection, T D², is missing.",
                "La projection de sortie, T D², manque.",
            ),
            Mistake(
                lambda t, d: 2 * (4 * t * d * d + 2 * t * t * d),
                "Those are FLOPs, two per multiply-add; the question counts multiply-adds, as papers on vision do.",
                "Ce sont des FLOP, deux par multiplication-addition ; on compte ici les "
                "multiplications-additions, comme les articles de vision.",
            ),
            Mistake(
                lambda t, d: 12 * t * d * d + 2 * t * t * d,
                "You count the MLP too; the question is about the attention alone.",
                "Vous comptez aussi le MLP ; la question porte sur l’attention seule.",
            ),
        ),
    ),
    praise_en="Right: 4 T D² + 2 T² D. Twice the side of the image is four times the tokens, and sixteen times the "
    "second term.",
    praise_fr="Exact : 4 T D² + 2 T² D. Une image deux fois plus large et plus haute, c’est quatre fois plus de "
    "tokens, et seize fois le second terme.",
    hint_en="A product of an (a, b) matrix with a (b, c) one takes a b c multiply-adds. There are six products.",
    hint_fr="Le produit d’une matrice (a, b) par une matrice (b, c) coûte a b c multiplications-additions. Il y a six "
    "produits.",
    nearer_en="Four projections (T, D) × (D, D), then q kᵀ: (T, D) × (D, T), then (T, T) × (T, D).",
    nearer_fr="Quatre projections (T, D) × (D, D), puis q kᵀ : (T, D) × (D, T), puis (T, T) × (T, D).",
)


def _bias_by(row_sign: int, column_sign: int, swap: bool = False) -> Callable[[Any, int], Any]:
    def way(table: Any, side: int) -> Any:
        import torch

        index = torch.arange(side * side)
        row, column = index // side, index % side
        rows = row_sign * (row[:, None] - row[None, :]) + side - 1
        columns = column_sign * (column[:, None] - column[None, :]) + side - 1
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


def _at(table: Any, side: int, place: Callable[[Any], Any]) -> Any:
    """The table read at places made from the offsets of rows and of columns."""
    import torch

    index = torch.arange(side * side)
    row, column = index // side, index % side
    return table[place(row[:, None] - row[None, :]), place(column[:, None] - column[None, :])]


def _without_offset(table: Any, side: int) -> Any:
    return _at(table, side, lambda offset: offset)


RELATIVE_BIAS = Exercise(
    id="relative-bias",
    title=Said("the relative position bias", "le biais de position relative"),
    judge=Judge(
        relative_bias,
        cases=_tables,
        leaves={0: Said("the table", "la table")},
        mistakes=(
            Mistake(
                _bias_by(-1, -1),
                "The sign is reversed: the difference is query − key, and yours is key − query.",
                "Le signe est inversé : la différence est requête − clé, et la vôtre est clé − requête.",
            ),
            Mistake(
                _bias_by(1, 1, swap=True),
                "Rows and columns are swapped: the first index of the table is the difference of rows.",
                "Lignes et colonnes sont échangées : le premier indice de la table est la différence des lignes.",
            ),
            Mistake(
                lambda table, side: _at(table, side, abs),
                "You take the distance, without its sign: the table has another number for each direction.",
                "Vous prenez la distance, sans son signe : la table a un autre nombre pour chaque direction.",
            ),
            Mistake(
                lambda table, side: _at(table, side, lambda offset: offset + side - 2),
                "The indices are one too small: the offset −(side − 1) is row 0, so add side − 1.",
                "Les indices sont trop petits de 1 : le décalage −(side − 1) est la ligne 0, ajoutez donc side − 1.",
            ),
            Mistake(
                lambda table, side: relative_bias(table, side).flip(1),
                "You add the positions of query and key; the offset is their difference.",
                "Vous additionnez les positions de la requête et de la clé ; le décalage est leur différence.",
            ),
            Mistake(
                lambda table, side: table,
                "You return the table, one number for each offset: one row per query and one column per key are asked "
                "for, side² × side².",
                "Vous renvoyez la table, un nombre par décalage : on demande une ligne par requête et une colonne par "
                "clé, soit side² × side².",
            ),
            Mistake(
                lambda table, side: relative_bias(table[:, side - 1 :][:, :1].expand(table.shape), side),
                "Only the difference of rows counts in your answer: the second index of the table is that of columns.",
                "Seule la différence des lignes compte dans votre réponse : le second indice de la table est celle des "
                "colonnes.",
            ),
            Mistake(
                _without_offset,
                "The differences go from −(side − 1) to side − 1, but an index starts at 0: without adding side "
                "− 1, Python reads the negative ones from the end of the table.",
                "Les différences vont de −(side − 1) à side − 1, mais un indice commence à 0 : sans ajouter side "
                "− 1, Python lit les négatives depuis la fin de la table.",
            ),
            Mistake(
                lambda table, side: table[:side, :side].reshape(-1)[None].expand(side * side, -1),
                "Every query gets the same row: this is an absolute position of the key, not one relative to the "
                "query.",
                "Chaque requête reçoit la même ligne : c’est une position absolue de la clé, et non relative à la "
                "requête.",
            ),
        ),
    ),
    praise_en="Right. Two pairs at the same distance share one number, wherever they are: that is how attention gets "
    "something of a convolution.",
    praise_fr="Exact. Deux paires de même décalage partagent un nombre, où qu’elles soient : l’attention reprend ainsi "
    "quelque chose de la convolution.",
    hint_en="Token t stands at row t // side and column t % side. What is the difference of rows of all pairs, as a "
    "(T, T) tensor?",
    hint_fr="Le token t est à la ligne t // side et à la colonne t % side. Quelle est la différence des lignes de "
    "toutes les paires, en un tenseur (T, T) ?",
    nearer_en="row[:, None] - row[None, :] + side - 1 is the first index, the same with columns the second; a table "
    "can be indexed by two tensors at once.",
    nearer_fr="row[:, None] - row[None, :] + side - 1 est le premier indice, de même avec les colonnes pour le "
    "second ; une table s’indexe par deux tenseurs à la fois.",
)


def cut_in_patches(image_CHW: Any, patch: int) -> Any:
    """Patches in reading order, each flattened channel by channel, row by row: shape (P, C × patch²).

    Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), section 3.1; the order is that of a convolution's kernel.
    """
    import torch.nn.functional as F

    return F.unfold(image_CHW[None], patch, stride=patch)[0].T


def _images() -> Iterator[tuple[Any, int]]:
    # Wider than high, so that rows and columns cannot be confused unnoticed.
    for channels, height, width, patch, seed in ((3, 8, 12, 4, 7), (1, 6, 10, 2, 8), (2, 9, 6, 3, 9)):
        yield random_tensors((channels, height, width), seed=seed)[0], patch


def _tiles(image_CHW: Any, patch: int) -> Any:
    """(C, rows, patch, columns, patch)."""
    channels, height, width = image_CHW.shape
    return image_CHW.reshape(channels, height // patch, patch, width // patch, patch)


def _overlapping(image_CHW: Any, patch: int) -> Any:
    import torch.nn.functional as F

    return F.unfold(image_CHW[None], patch)[0].T


PATCHES = Exercise(
    id="patches",
    title=Said("an image cut in patches", "une image découpée en patches"),
    judge=Judge(
        cut_in_patches,
        cases=_images,
        mistakes=(
            Mistake(
                lambda image, patch: image.reshape(-1, image.shape[0] * patch**2),
                "A reshape alone cuts the image into runs of pixels along the rows, not into squares: separate "
                "rows and columns of patches first.",
                "Un reshape seul coupe l’image en suites de pixels le long des lignes, pas en carrés : séparez "
                "d’abord les lignes et les colonnes de patches.",
            ),
            Mistake(
                lambda image, patch: _tiles(image, patch).permute(3, 1, 0, 2, 4).flatten(2).flatten(0, 1),
                "The patches come column by column; read them like a text, row by row.",
                "Les patches viennent colonne par colonne ; lisez-les comme un texte, ligne par ligne.",
            ),
            Mistake(
                lambda image, patch: _tiles(image, patch).transpose(2, 3).reshape(-1, len(image) * patch**2),
                "Each row mixes pieces of several patches: after cutting, the channels still come first. Bring the "
                "rows and columns of patches in front of them (permute), then flatten.",
                "Chaque ligne mélange des morceaux de plusieurs patches : après la découpe, les canaux sont encore "
                "devant. Amenez devant eux les lignes et les colonnes de patches (permute), puis aplatissez.",
            ),
            Mistake(
                lambda image, patch: _tiles(image, patch).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1),
                "Within a patch the channels come last; the statement asks for channel by channel, as in the "
                "kernel of a convolution.",
                "Dans un patch, les canaux viennent en dernier ; l’énoncé demande canal par canal, comme dans le "
                "noyau d’une convolution.",
            ),
            Mistake(
                lambda image, patch: _tiles(image, patch).permute(1, 3, 0, 4, 2).flatten(2).flatten(0, 1),
                "Each patch is transposed: within a patch, too, rows come before columns.",
                "Chaque patch est transposé : dans un patch aussi, les lignes viennent avant les colonnes.",
            ),
            Mistake(
                _overlapping,
                "Your patches overlap: the next one begins `patch` pixels further, not one (stride=patch).",
                "Vos patches se recouvrent : le suivant commence `patch` pixels plus loin, et non un seul "
                "(stride=patch).",
            ),
            Mistake(
                lambda image, patch: cut_in_patches(image[:1], patch),
                "Only the first channel is there: a patch holds all of them, C × patch² numbers.",
                "Il n’y a que le premier canal : un patch les contient tous, soit C × patch² nombres.",
            ),
            Mistake(
                lambda image, patch: cut_in_patches(image, patch).T,
                "One patch per row is expected: transpose the result.",
                "On attend un patch par ligne : transposez le résultat.",
            ),
        ),
    ),
    praise_en="Right: from here on, an image is a sequence like a sentence.",
    praise_fr="Exact : à partir d’ici, une image est une séquence comme une phrase.",
    hint_en="Reshape to five dimensions, so that “which row of patches” and “which row within the patch” are apart.",
    hint_fr="Passez à cinq dimensions, pour séparer « quelle ligne de patches » et « quelle ligne dans le patch ».",
    nearer_en="reshape(C, H // patch, patch, W // patch, patch), then permute(1, 3, 0, 2, 4), then flatten twice.",
    nearer_fr="reshape(C, H // patch, patch, W // patch, patch), puis permute(1, 3, 0, 2, 4), puis flatten deux fois.",
)


def embed(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    """Tokens of a ViT: the class token, then the projected patches, positions added to all, T = P + 1.

    Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), equation 1.
    """
    import torch

    return torch.cat((class_token_D[None], patches_PE @ projection_ED)) + position_TD


def _sequences() -> Iterator[tuple[Any, ...]]:
    for patches, length, width, seed in ((4, 12, 6, 10), (9, 27, 8, 11)):
        yield random_tensors((patches, length), (length, width), (width,), (patches + 1, width), seed=seed)


def _class_last(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    import torch

    return torch.cat((patches_PE @ projection_ED, class_token_D[None])) + position_TD


def _class_without_position(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    import torch

    return torch.cat((class_token_D[None], patches_PE @ projection_ED + position_TD[1:]))


def _class_position_only(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    import torch

    return torch.cat(((class_token_D + position_TD[0])[None], patches_PE @ projection_ED))


def _shifted_positions(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    import torch

    return torch.cat((class_token_D[None], patches_PE @ projection_ED + position_TD[:-1]))


TOKENS = Exercise(
    id="tokens",
    title=Said("class token and positions", "le token de classe et les positions"),
    judge=Judge(
        embed,
        cases=_sequences,
        leaves={
            1: Said("the projection", "la projection"),
            2: Said("the class token", "le token de classe"),
            3: Said("the positions", "les positions"),
        },
        mistakes=(
            Mistake(
                _class_last,
                "The class token stands at the end; it is token 0, where the head of a ViT looks for it.",
                "Le token de classe est à la fin ; c’est le token 0, là où la tête d’un ViT le cherche.",
            ),
            Mistake(
                _class_without_position,
                "The class token has got no position: position_TD has one row more than there are patches, and "
                "its first row is for the class token.",
                "Le token de classe n’a pas reçu de position : position_TD a une ligne de plus qu’il n’y a de "
                "patches, et la première est pour lui.",
            ),
            Mistake(
                _shifted_positions,
                "The positions are shifted by one: row 0 belongs to the class token, row 1 to the first patch.",
                "Les positions sont décalées d’un rang : la ligne 0 est celle du token de classe, la ligne 1 "
                "celle du premier patch.",
            ),
            Mistake(
                lambda patches, projection, token, position: embed(patches, projection, token, -position),
                "You take the positions away: add them.",
                "Vous retranchez les positions : ajoutez-les.",
            ),
            Mistake(
                lambda patches, projection, token, position: patches @ projection + position[1:],
                "The class token is missing: T = P + 1 tokens are expected, the class token first.",
                "Le token de classe manque : on attend T = P + 1 tokens, celui de classe en premier.",
            ),
            Mistake(
                lambda patches, projection, token, position: embed(patches, projection, token, position[:1]),
                "Every token gets the first position; token t gets row t.",
                "Chaque token reçoit la première position ; le token t reçoit la ligne t.",
            ),
            Mistake(
                lambda patches, projection, token, position: embed(patches, projection, token, position.roll(1, 0)),
                "The positions are shifted by one, and the last comes first: token t gets row t.",
                "Les positions sont décalées d’un rang, la dernière en tête : le token t reçoit la ligne t.",
            ),
            Mistake(
                lambda patches, projection, token, position: embed(patches, projection, token, position * 0) * position,
                "You multiply by the positions; they are added.",
                "Vous multipliez par les positions ; elles s’ajoutent.",
            ),
            Mistake(
                lambda patches, projection, token, position: embed(patches, projection, token * 0, position),
                "The place of the class token is kept, but zeros stand there: put class_token_D itself.",
                "La place du token de classe est gardée, mais remplie de zéros : mettez-y class_token_D lui-même.",
            ),
            Mistake(
                lambda patches, projection, token, position: patches @ projection + token + position[1:],
                "You add the class token to every patch; it is one more token, in front of them (torch.cat).",
                "Vous ajoutez le token de classe à chaque patch ; c’est un token de plus, devant eux (torch.cat).",
            ),
            Mistake(
                _class_position_only,
                "The class token alone gets its position; the patches need theirs too, or they come in no order.",
                "Seul le token de classe reçoit sa position ; les patches ont besoin de la leur, sinon ils n’ont "
                "pas d’ordre.",
            ),
            Mistake(
                lambda patches, projection, token, position: embed(patches, projection, token, position * 0),
                "The positions are missing: without them the model sees a bag of patches, in no order.",
                "Les positions manquent : sans elles, le modèle voit un sac de patches, sans ordre.",
            ),
        ),
    ),
    praise_en="Right. Token 0 will gather what the class needs; the others remember where they come from.",
    praise_fr="Exact. Le token 0 rassemblera ce qu’il faut pour la classe ; les autres se souviennent de leur place.",
    hint_en="Three operations: a matrix product, torch.cat, an addition. In which order, so that the class token gets "
    "a position too?",
    hint_fr="Trois opérations : un produit matriciel, torch.cat, une addition. Dans quel ordre, pour que le token de "
    "classe reçoive lui aussi une position ?",
    nearer_en="torch.cat wants tensors of as many dimensions: class_token_D[None] has shape (1, D).",
    nearer_fr="torch.cat veut des tenseurs de même nombre de dimensions : class_token_D[None] est de forme (1, D).",
)
