"""Lab 01: what attention costs, in parameters and in multiply-adds.

Layer 6 (labs). Invariant: parameters are counted on the package's own block, multiply-adds are those torch counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said


def block_parameters(width: int) -> int:
    """Parameters of a transformer block with biases, an MLP four times as wide and two layer norms: 12 D² + 13 D.

    Source: counted; the sum is that of `dlojz.models.transformer.TransformerBlock`.
    """
    import torch

    from dlojz.models.transformer import TransformerBlock

    with torch.device("meta"):
        block = TransformerBlock(width, 1, 4 * width, causal=False, norm_eps=1e-6)
    return sum(parameter.numel() for parameter in block.parameters())


def _widths() -> Iterator[tuple[int]]:
    yield from ((64,), (192,), (768,))


BLOCK_PARAMETERS = Exercise(
    id="block-parameters",
    title=Said("parameters of an attention block", "les paramètres d’un bloc d’attention"),
    judge=by_reference(
        block_parameters,
        cases=_widths,
        mistakes=(
            Mistake(
                lambda d: 12 * d * d,
                Said(
                    "That is the part that matters for large models, 12 D²; the biases (9 D) and the two layer norms "
                    "(4 D) are missing for an exact count.",
                    "C’est la part qui compte pour les gros modèles, 12 D² ; pour un compte exact, il manque les "
                    "biais (9 D) et les deux LayerNorm (4 D).",
                ),
            ),
            Mistake(
                lambda d: 12 * d * d + 9 * d,
                Said(
                    "The two layer norms are missing: each has a scale and a shift per channel.",
                    "Les deux LayerNorm manquent : chacune a une échelle et un décalage par canal.",
                ),
            ),
            Mistake(
                lambda d: 12 * d * d + 4 * d,
                Said(
                    "The biases are missing: 3 D for the fused projection, D at its exit, 4 D and D in the MLP.",
                    "Les biais manquent : 3 D pour la projection fusionnée, D à sa sortie, 4 D et D dans le MLP.",
                ),
            ),
            Mistake(
                lambda d: 12 * d * d + 11 * d,
                Said(
                    "One layer norm is missing, or each has lost its shift: there are two, with a scale and a shift "
                    "each.",
                    "Il manque une LayerNorm, ou le décalage de chacune : il y en a deux, avec échelle et décalage.",
                ),
            ),
            Mistake(
                lambda d: 11 * d * d + 12 * d,
                Said(
                    "The output projection of the attention (D² + D) is missing.",
                    "La projection de sortie de l’attention (D² + D) manque.",
                ),
            ),
            Mistake(
                lambda d: 4 * d * d + 4 * d,
                Said(
                    "That is the attention alone; the block also has an MLP, D → 4 D → D, and two layer norms.",
                    "C’est l’attention seule ; le bloc a aussi un MLP, D → 4 D → D, et deux LayerNorm.",
                ),
            ),
            Mistake(
                lambda d: 4 * d * d + 8 * d * d + 5 * d + 4 * d,
                Said(
                    "The biases of the attention are missing: 3 D for queries, keys and values, D for the output.",
                    "Les biais de l’attention manquent : 3 D pour requêtes, clés et valeurs, D pour la sortie.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: 12 D² + 13 D, whatever the number of heads. Width costs squared, depth only once.",
        "Exact : 12 D² + 13 D, quel que soit le nombre de têtes. La largeur coûte au carré, la profondeur une fois.",
    ),
    hints=(
        Said(
            "Linear layers: D → 3 D and D → D in the attention, D → 4 D and 4 D → D in the MLP. A linear layer a → b "
            "with bias has a b + b parameters.",
            "Couches linéaires : D → 3 D et D → D dans l’attention, D → 4 D et 4 D → D dans le MLP. Une couche "
            "linéaire a → b avec biais a a b + b paramètres.",
        ),
        Said(
            "Matrices: (3 + 1 + 4 + 4) D². Biases: (3 + 1 + 4 + 1) D. Two layer norms: 2 × 2 D.",
            "Matrices : (3 + 1 + 4 + 4) D². Biais : (3 + 1 + 4 + 1) D. Deux LayerNorm : 2 × 2 D.",
        ),
    ),
)


def attention_multiply_adds(num_tokens: int, width: int) -> int:
    """Multiply-adds of the matrix products of one self-attention, projections included: 4 T D² + 2 T² D.

    Source: counted on the products of Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """
    return 4 * num_tokens * width**2 + 2 * num_tokens**2 * width


def _costs() -> Iterator[tuple[int, int]]:
    yield from ((197, 768), (3136, 96), (49, 768), (12544, 64))


ATTENTION_COST = Exercise(
    id="attention-cost",
    title=Said("what attention costs", "ce que coûte l’attention"),
    judge=by_reference(
        attention_multiply_adds,
        cases=_costs,
        mistakes=(
            Mistake(
                lambda t, d: 2 * t * t * d,
                Said(
                    "That is q kᵀ and the mean of the values; the four projections, 4 T D², are missing.",
                    "C’est q kᵀ et la moyenne des valeurs ; il manque les quatre projections, 4 T D².",
                ),
            ),
            Mistake(
                lambda t, d: 4 * t * d * d,
                Said(
                    "Those are the projections; the part that grows with T², q kᵀ and the mean of the values, is "
                    "missing.",
                    "Ce sont les projections ; il manque la part qui croît comme T² : q kᵀ et la moyenne des valeurs.",
                ),
            ),
            Mistake(
                lambda t, d: 4 * t * d * d + t * t * d,
                Said(
                    "There are two products with T² D multiply-adds: q kᵀ, then weights times values.",
                    "Il y a deux produits de T² D multiplications-additions : q kᵀ, puis poids fois valeurs.",
                ),
            ),
            Mistake(
                lambda t, d: 3 * t * d * d + 2 * t * t * d,
                Said("The output projection, T D², is missing.", "La projection de sortie, T D², manque."),
            ),
            Mistake(
                lambda t, d: 2 * (4 * t * d * d + 2 * t * t * d),
                Said(
                    "Those are FLOPs, two per multiply-add; the question counts multiply-adds, as papers on vision do.",
                    "Ce sont des FLOP, deux par multiplication-addition ; on compte ici les "
                    "multiplications-additions, comme les articles de vision.",
                ),
            ),
            Mistake(
                lambda t, d: 12 * t * d * d + 2 * t * t * d,
                Said(
                    "You count the MLP too; the question is about the attention alone.",
                    "Vous comptez aussi le MLP ; la question porte sur l’attention seule.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: 4 T D² + 2 T² D. Twice the side of the image is four times the tokens, and sixteen times the second "
        "term.",
        "Exact : 4 T D² + 2 T² D. Une image deux fois plus large et plus haute, c’est quatre fois plus de tokens, et "
        "seize fois le second terme.",
    ),
    hints=(
        Said(
            "A product of an (a, b) matrix with a (b, c) one takes a b c multiply-adds. There are six products.",
            "Le produit d’une matrice (a, b) par une matrice (b, c) coûte a b c multiplications-additions. Il y a six "
            "produits.",
        ),
        Said(
            "Four projections (T, D) × (D, D), then q kᵀ: (T, D) × (D, T), then (T, T) × (T, D).",
            "Quatre projections (T, D) × (D, D), puis q kᵀ : (T, D) × (D, T), puis (T, T) × (T, D).",
        ),
    ),
)
