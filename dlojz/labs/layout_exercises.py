"""Lab 00: the global batch and the epoch.

Layer 6 (labs). Invariant: each reference is what the package itself computes with.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlojz.config import Layout
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said


def _global_batch(micro_batch: int, micro_batches: int, dp: int) -> int:
    return Layout.from_dict({"micro_batch": micro_batch, "micro_batches": micro_batches, "dp": dp}).global_batch


def _batches() -> Iterator[tuple[int, int, int]]:
    yield from ((16, 1, 2), (8, 4, 3), (5, 3, 7), (1, 1, 1))


GLOBAL_BATCH = Exercise(
    id="global-batch",
    title=Said("the global batch", "la taille de batch globale"),
    judge=by_reference(
        _global_batch,
        cases=_batches,
        mistakes=(
            Mistake(
                lambda micro, count, dp: micro * dp,
                Said(
                    "You leave micro_batches out: a replica accumulates the gradients of several micro-batches "
                    "before the optimizer moves, and all of them belong to the step.",
                    "Vous oubliez micro_batches : une réplique accumule les gradients de plusieurs micro-batches "
                    "avant que l’optimiseur n’avance, et tous comptent dans le pas.",
                ),
            ),
            Mistake(
                lambda micro, count, dp: micro * count,
                Said(
                    "That is what one replica reads: the other replicas read as many samples of their own in the "
                    "same step.",
                    "C’est ce que lit une seule réplique : dans le même pas, les autres en lisent autant de leur côté.",
                ),
            ),
            Mistake(
                lambda micro, count, dp: micro,
                Said(
                    "That is one micro-batch of one replica: count the micro-batches, then the replicas.",
                    "C’est un seul micro-batch d’une seule réplique : comptez les micro-batches, puis les répliques.",
                ),
            ),
            Mistake(
                lambda micro, count, dp: micro + count + dp,
                Said(
                    "You add where the numbers multiply: dp replicas, each with micro_batches micro-batches, each of "
                    "micro_batch samples.",
                    "Vous additionnez alors que les nombres se multiplient : dp répliques, ayant chacune micro_batches "
                    "micro-batches, de micro_batch échantillons chacun.",
                ),
            ),
            Mistake(
                lambda micro, count, dp: micro * count / dp,
                Said(
                    "You divide by dp: with data parallelism each replica keeps its own micro-batches, so more "
                    "replicas make the global batch larger.",
                    "Vous divisez par dp : avec le parallélisme de données, chaque réplique garde ses propres "
                    "micro-batches ; davantage de répliques agrandissent donc le batch global.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: micro_batch × micro_batches × dp. Three layouts with the same product train on the same samples.",
        "Exact : micro_batch × micro_batches × dp. Trois répartitions de même produit lisent les mêmes échantillons.",
    ),
    hints=(
        Said(
            "How many samples does one replica read before the optimizer moves?",
            "Combien d’échantillons une réplique lit-elle avant que l’optimiseur n’avance ?",
        ),
        Said(
            "One replica reads micro_batches micro-batches of micro_batch samples; there are dp replicas.",
            "Une réplique lit micro_batches micro-batches de micro_batch échantillons ; il y a dp répliques.",
        ),
    ),
)


def _steps_per_epoch(num_samples: int, global_batch: int) -> int:
    return num_samples // global_batch


def _epochs() -> Iterator[tuple[int, int]]:
    yield from ((1797, 32), (1000, 250), (100, 36), (64, 64))


STEPS_PER_EPOCH = Exercise(
    id="steps-per-epoch",
    title=Said("the number of steps per epoch", "le nombre de pas par époque"),
    judge=by_reference(
        _steps_per_epoch,
        cases=_epochs,
        mistakes=(
            Mistake(
                lambda samples, batch: -(-samples // batch),
                Said(
                    "You count the last, incomplete batch as a step; the sampler of the lab drops it, so that every "
                    "step trains on a batch of the same size.",
                    "Vous comptez le dernier batch, incomplet, comme un pas ; l’échantillonneur du TP l’écarte, pour "
                    "que chaque pas porte sur un batch de même taille.",
                ),
            ),
            Mistake(
                lambda samples, batch: samples / batch,
                Said(
                    "A number of steps is whole: there is no fraction of a step. The incomplete batch is dropped.",
                    "Un nombre de pas est entier : il n’y a pas de fraction de pas. Le batch incomplet est écarté.",
                ),
            ),
            Mistake(
                lambda samples, batch: round(samples / batch),
                Said(
                    "You round to the nearest: an incomplete batch then counts as soon as it is half full, but it is "
                    "always dropped.",
                    "Vous arrondissez au plus proche : un batch incomplet compte alors dès qu’il est à moitié plein, "
                    "mais il est toujours écarté.",
                ),
            ),
            Mistake(
                lambda samples, batch: samples // batch + 1,
                Said(
                    "You always add one step, even where the samples fill the batches exactly; the incomplete batch is "
                    "dropped.",
                    "Vous ajoutez toujours un pas, même quand les échantillons remplissent exactement les batches ; "
                    "le batch incomplet est écarté.",
                ),
            ),
            Mistake(
                lambda samples, batch: samples % batch,
                Said(
                    "% gives what is left over; the question is how many batches were filled before.",
                    "% donne ce qui reste ; on demande combien de batches ont été remplis avant.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right. Twice the replicas, half the steps: the optimizer moves half as often per epoch.",
        "Exact. Deux fois plus de répliques, deux fois moins de pas : l’optimiseur avance deux fois moins souvent "
        "par époque.",
    ),
    hints=(
        Said(
            "How many whole batches can be filled with the samples?",
            "Combien de batches entiers peut-on remplir avec les échantillons ?",
        ),
        Said(
            "It is an integer division; what remains is dropped.", "C’est une division entière ; le reste est écarté."
        ),
    ),
)
