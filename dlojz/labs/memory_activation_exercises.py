"""Lab 02: the peak of a step, and the activations of one transformer layer.

Layer 6 (labs). Invariant: the layer's reference is the published form, which a trace of the layer confirms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.predict.activation_forms import Shape, layer_bytes

Samples = Sequence[Mapping[str, int]]


def peak_bytes(samples: Samples) -> int:
    """Largest sum over the categories at one and the same moment."""
    return max(sum(sample.values()) for sample in samples)


def _steps() -> Iterator[tuple[list[dict[str, int]]]]:
    # Activations and gradients do not have their maxima together; the peak lies in the middle, early, late.
    states = {"weights": 40, "optimizer": 80}
    yield ([{**states, "activations": a, "gradients": g} for a, g in ((10, 0), (90, 0), (95, 4), (30, 30), (0, 40))],)
    yield ([{**states, "activations": a, "gradients": g} for a, g in ((5, 0), (20, 0), (8, 30), (0, 41), (0, 39))],)
    yield ([{"weights": 7, "workspace": w, "activations": a} for w, a in ((60, 0), (2, 50), (3, 55), (1, 12))],)


PEAK = Exercise(
    id="peak",
    title=Said("the peak of a step", "le pic d’un pas"),
    judge=by_reference(
        peak_bytes,
        cases=_steps,
        mistakes=(
            Mistake(
                lambda samples: sum(max(sample.get(name, 0) for sample in samples) for name in samples[0]),
                Said(
                    "You add the largest value of each category, but these do not occur at the same moment: "
                    "activations are released while gradients appear. Sum first, then take the largest.",
                    "Vous additionnez la plus grande valeur de chaque catégorie, or elles n’ont pas lieu au même "
                    "moment : les activations sont libérées pendant que les gradients apparaissent. Faites d’abord "
                    "la somme, puis prenez la plus grande.",
                ),
            ),
            Mistake(
                lambda samples: max(max(sample.values()) for sample in samples),
                Said(
                    "That is the largest single category; at one moment all categories are in memory together.",
                    "C’est la plus grande des catégories ; à un instant donné, toutes sont ensemble en mémoire.",
                ),
            ),
            Mistake(
                lambda samples: sum(samples[-1].values()),
                Said(
                    "That is the end of the step, when the activations are gone already; the peak lies earlier.",
                    "C’est la fin du pas, quand les activations ont déjà disparu ; le pic a lieu plus tôt.",
                ),
            ),
            Mistake(
                lambda samples: sum(sum(sample.values()) for sample in samples),
                Said(
                    "You add the moments up; memory is given back and used again from one to the next.",
                    "Vous additionnez les instants ; d’un instant à l’autre, la mémoire est rendue puis réutilisée.",
                ),
            ),
            Mistake(
                lambda samples: sum(sum(sample.values()) for sample in samples) / len(samples),
                Said(
                    "That is the mean over the step; what does not fit for one instant does not fit.",
                    "C’est la moyenne sur le pas ; ce qui ne tient pas un instant ne tient pas.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: the largest of the sums, not the sum of the largest.",
        "Exact : le maximum des sommes, et non la somme des maximums.",
    ),
    hints=(
        Said(
            "How many bytes are held at one moment, all categories together?",
            "Combien d’octets sont occupés à un instant donné, toutes catégories confondues ?",
        ),
        Said("max over the samples of sum(sample.values()).", "Le max, sur les instants, de sum(sample.values())."),
    ),
)


def transformer_layer_bytes(s: int, b: int, h: int, a: int) -> int:
    """Bytes that one transformer layer keeps for backward in 16 bit, with dropout and attention written out.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), §4.1: s·b·h·(34 + 5·a·s/h).
    """
    return int(layer_bytes(Shape(sequence_length=s, micro_batch=b, hidden=h, heads=a)))


def _shapes() -> Iterator[tuple[int, int, int, int]]:
    yield from ((128, 2, 64, 4), (1024, 1, 768, 12), (2048, 4, 12288, 96), (197, 8, 192, 3))


def _sbh(factor: float, score_factor: float = 5) -> Callable[[int, int, int, int], float]:
    return lambda s, b, h, a: factor * s * b * h + score_factor * a * s * s * b


BLOCK_ACTIVATIONS = Exercise(
    id="block-activations",
    title=Said("activations of a transformer layer", "les activations d’une couche de transformer"),
    judge=by_reference(
        transformer_layer_bytes,
        cases=_shapes,
        mistakes=(
            Mistake(
                _sbh(34, 0),
                Said(
                    "The scores are missing: softmax, its dropout mask and its product with the values keep a·s²·b "
                    "elements each.",
                    "Il manque les scores : le softmax, le masque de son dropout et son produit avec les valeurs "
                    "gardent chacun a·s²·b éléments.",
                ),
            ),
            Mistake(
                _sbh(34, 2),
                Said(
                    "Of the scores you count the result of the softmax alone; its dropout keeps a mask, and the "
                    "product with the values keeps what comes out of that dropout.",
                    "Des scores, vous ne comptez que le résultat du softmax ; or son dropout garde un masque, et le "
                    "produit avec les valeurs garde ce qui sort de ce dropout.",
                ),
            ),
            Mistake(
                _sbh(36, 6),
                Said(
                    "A dropout mask takes 1 byte per element, not 2: one mask of a·s²·b and two of s·b·h.",
                    "Un masque de dropout prend 1 octet par élément, et non 2 : un masque de a·s²·b, deux de s·b·h.",
                ),
            ),
            Mistake(
                _sbh(32, 4),
                Said(
                    "The dropout masks are missing, 1 byte per element: one of a·s²·b and two of s·b·h.",
                    "Il manque les masques de dropout, 1 octet par élément : un de a·s²·b et deux de s·b·h.",
                ),
            ),
            Mistake(
                _sbh(30),
                Said(
                    "The layer norms are missing: each keeps its input.",
                    "Il manque les LayerNorm : chacune garde son entrée.",
                ),
            ),
            Mistake(
                _sbh(26),
                Said(
                    "The MLP keeps two tensors of width 4 h: what goes into the GELU, and what comes out of it, which "
                    "the second linear layer keeps.",
                    "Le MLP garde deux tenseurs de largeur 4 h : ce qui entre dans la GELU, et ce qui en sort, que "
                    "garde la seconde couche linéaire.",
                ),
            ),
            Mistake(
                _sbh(11),
                Said("That is the attention alone: 11·sbh.", "C’est l’attention seule : 11·sbh."),
            ),
            Mistake(
                _sbh(15),
                Said(
                    "The MLP is missing: two linear layers, the GELU between them, the dropout after.",
                    "Il manque le MLP : deux couches linéaires, la GELU entre elles, le dropout après.",
                ),
            ),
            Mistake(
                _sbh(17, 2.5),
                Said(
                    "You count elements; a number in bf16 takes 2 bytes (a mask, 1).",
                    "Vous comptez des éléments ; un nombre en bf16 prend 2 octets (un masque, 1).",
                ),
            ),
            Mistake(
                lambda s, b, h, a: 34 * s * b * h + 5 * s * s * b,
                Said(
                    "Each head has scores of its own: a·s²·b elements, not s²·b.",
                    "Chaque tête a ses propres scores : a·s²·b éléments, et non s²·b.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: sbh (34 + 5as/h). The first term grows with the tokens, the second with their square.",
        "Exact : sbh (34 + 5as/h). Le premier terme croît comme le nombre de tokens, le second comme son carré.",
    ),
    hints=(
        Said(
            "Go through forward line by line. A linear layer keeps its input; a product of two activations keeps both; "
            "softmax keeps its result; GELU and LayerNorm keep their input; a sum keeps nothing.",
            "Suivez forward ligne à ligne. Une couche linéaire garde son entrée ; un produit de deux activations garde "
            "les deux ; le softmax garde son résultat ; GELU et LayerNorm gardent leur entrée ; une somme ne garde "
            "rien.",
        ),
        Said(
            "Attention: input 2, q and k 4, v 2, input of the output layer 2, mask 1, so 11·sbh, plus 5·as²b. MLP: 2 + "
            "8 + 8 + 1. Two norms: 2 each.",
            "Attention : entrée 2, q et k 4, v 2, entrée de la projection de sortie 2, masque 1, soit 11·sbh, plus "
            "5·as²b. MLP : 2 + 8 + 8 + 1. Deux LayerNorm : 2 chacune.",
        ),
    ),
)
