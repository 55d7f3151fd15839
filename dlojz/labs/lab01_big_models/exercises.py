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


def _scaled_by_width(x_TD: Any, qkv_DE: Any, out_DD: Any, num_heads: int) -> Any:
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(0, 1) for part in (x_TD @ qkv_DE).chunk(3, -1))
    return _concatenate(_weights(q, k, x_TD.shape[-1]) @ v) @ out_DD


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
                _scaled_by_width,
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
                lambda d: 12 * d * d + 9 * d,
                "The two layer norms are missing: each has a scale and a shift per channel.",
                "Les deux LayerNorm manquent : chacune a une échelle et un décalage par canal.",
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
                lambda d: 4 * d * d + 4 * d,
                "That is the attention alone; the block also has an MLP, D → 4 D → D, and two layer norms.",
                "C’est l’attention seule ; le bloc a aussi un MLP, D → 4 D → D, et deux LayerNorm.",
            ),
            Mistake(
                lambda d: 4 * d * d + 8 * d * d + 5 * d + 4 * d,
                "The biases of the attention are missing: 3 D for queries, keys and values, D for the output.",
                "Les biais de l’attention manquent : 3 D pour requêtes, clés et valeurs, D pour la sortie.",
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


def _without_offset(table: Any, side: int) -> Any:
    import torch

    index = torch.arange(side * side)
    row, column = index // side, index % side
    return table[row[:, None] - row[None, :], column[:, None] - column[None, :]]


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
                lambda patches, projection, token, position: patches @ projection + position[1:],
                "The class token is missing: T = P + 1 tokens are expected, the class token first.",
                "Le token de classe manque : on attend T = P + 1 tokens, celui de classe en premier.",
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
