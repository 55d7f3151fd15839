"""Exercises of lab 00: the global batch, the steps of an epoch, a ring all-reduce's bytes, two trainings compared.

Each reference is what the package itself computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlojz.config.layout import Layout
from dlojz.labs.kit.exercise import Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge
from dlojz.results.footprint import Traffic

GLOBAL_BATCH = Exercise(
    id="global-batch",
    title=Said("the global batch", "la taille de batch globale"),
    judge=Judge(
        lambda micro_batch, micro_batches, dp: (
            Layout.from_dict({"micro_batch": micro_batch, "micro_batches": micro_batches, "dp": dp}).global_batch
        ),
        cases=((16, 1, 2), (8, 4, 3), (5, 3, 7), (1, 1, 1)),
        mistakes=(
            Mistake(
                lambda micro, count, dp: micro * dp,
                "You leave micro_batches out: a replica accumulates the gradients of several micro-batches "
                "before the optimizer moves, and all of them belong to the step.",
                "Vous oubliez micro_batches : une réplique accumule les gradients de plusieurs micro-batches "
                "avant que l’optimiseur n’avance, et tous comptent dans le pas.",
            ),
            Mistake(
                lambda micro, count, dp: micro * count,
                "That is what one replica reads: the other replicas read as many other samples in the same step.",
                "C’est ce que lit une seule réplique : dans le même pas, les autres en lisent autant de leur côté.",
            ),
            Mistake(
                lambda micro, count, dp: micro,
                "That is one micro-batch of one replica: count the micro-batches, then the replicas.",
                "C’est un seul micro-batch d’une seule réplique : comptez les micro-batches, puis les répliques.",
            ),
            Mistake(
                lambda micro, count, dp: micro + count + dp,
                "You add where the numbers multiply: dp replicas, each with micro_batches micro-batches, each of "
                "micro_batch samples.",
                "Vous additionnez alors que les nombres se multiplient : dp répliques, ayant chacune micro_batches "
                "micro-batches, de micro_batch échantillons chacun.",
            ),
            Mistake(
                lambda micro, count, dp: (micro + count) * dp,
                "You add micro_batch and micro_batches; a replica reads micro_batches times micro_batch samples.",
                "Vous additionnez micro_batch et micro_batches ; une réplique lit micro_batches fois micro_batch "
                "échantillons.",
            ),
            Mistake(
                lambda micro, count, dp: micro * count // dp,
                "You divide by dp: more replicas read more samples in one step, they do not share those of one.",
                "Vous divisez par dp : plus de répliques lisent plus d’échantillons en un pas, elles ne se "
                "partagent pas ceux d’une seule.",
            ),
            Mistake(
                lambda micro, count, dp: micro * count / dp,
                "You divide by dp: with data parallelism each replica keeps its own micro-batches, so more "
                "replicas make the global batch larger.",
                "Vous divisez par dp : avec le parallélisme de données, chaque réplique garde ses propres "
                "micro-batches ; davantage de répliques agrandissent donc le batch global.",
            ),
        ),
    ),
    praise_en="Right: micro_batch × micro_batches × dp. Three layouts with the same product train on the same samples.",
    praise_fr="Exact : micro_batch × micro_batches × dp. Trois répartitions de même produit lisent les mêmes "
    "échantillons.",
    hint_en="How many samples does one replica read before the optimizer moves?",
    hint_fr="Combien d’échantillons une réplique lit-elle avant que l’optimiseur n’avance ?",
    nearer_en="One replica reads micro_batches micro-batches of micro_batch samples; there are dp replicas.",
    nearer_fr="Une réplique lit micro_batches micro-batches de micro_batch échantillons ; il y a dp répliques.",
)


STEPS_PER_EPOCH = Exercise(
    id="steps-per-epoch",
    title=Said("the number of steps per epoch", "le nombre de pas par époque"),
    judge=Judge(
        lambda num_samples, global_batch: num_samples // global_batch,
        cases=((1797, 32), (1000, 250), (100, 36), (64, 64), (20, 32), (7, 48)),
        mistakes=(
            Mistake(
                lambda samples, batch: -(-samples // batch),
                "You count the last, incomplete batch as a step; the sampler of the lab drops it, so that every "
                "step trains on a batch of the same size.",
                "Vous comptez le dernier batch, incomplet, comme un pas ; l’échantillonneur du TP l’écarte, pour "
                "que chaque pas porte sur un batch de même taille.",
            ),
            Mistake(
                lambda samples, batch: samples / batch,
                "A number of steps is whole: there is no fraction of a step. The incomplete batch is dropped.",
                "Un nombre de pas est entier : il n’y a pas de fraction de pas. Le batch incomplet est écarté.",
            ),
            Mistake(
                lambda samples, batch: round(samples / batch),
                "You round to the nearest: an incomplete batch then counts as soon as it is half full, but it is "
                "always dropped.",
                "Vous arrondissez au plus proche : un batch incomplet compte alors dès qu’il est à moitié plein, "
                "mais il est toujours écarté.",
            ),
            Mistake(
                lambda samples, batch: samples // batch + 1,
                "You always add one step, even where the samples fill the batches exactly; the incomplete batch is "
                "dropped.",
                "Vous ajoutez toujours un pas, même quand les échantillons remplissent exactement les batches ; "
                "le batch incomplet est écarté.",
            ),
            Mistake(
                lambda samples, batch: max(1, samples // batch),
                "Where the samples do not fill a single batch your function still gives one step: that batch is "
                "incomplete, and dropped like any other.",
                "Quand les échantillons ne remplissent pas un seul batch, votre fonction donne encore un pas : ce "
                "batch est incomplet, et écarté comme un autre.",
            ),
            Mistake(
                lambda samples, batch: (samples - 1) // batch,
                "Where the samples fill the batches exactly, you lose the last one: it is complete, and counts.",
                "Quand les échantillons remplissent exactement les batches, vous perdez le dernier : il est "
                "complet, et compte.",
            ),
            Mistake(
                lambda samples, batch: samples // batch * batch,
                "That is the number of samples that are read; divide it by the batch to get the steps.",
                "C’est le nombre d’échantillons lus ; divisez-le par le batch pour obtenir les pas.",
            ),
            Mistake(
                lambda samples, batch: batch // samples,
                "You divide the batch by the samples: it is the other way round.",
                "Vous divisez le batch par les échantillons : c’est l’inverse.",
            ),
            Mistake(
                lambda samples, batch: samples % batch,
                "% gives what is left over; the question is how many batches were filled before.",
                "% donne ce qui reste ; on demande combien de batches ont été remplis avant.",
            ),
        ),
    ),
    praise_en="Right. Twice the replicas, half the steps: the optimizer moves half as often per epoch.",
    praise_fr="Exact. Deux fois plus de répliques, deux fois moins de pas : l’optimiseur avance deux fois moins "
    "souvent par époque.",
    hint_en="How many whole batches can be filled with the samples?",
    hint_fr="Combien de batches entiers peut-on remplir avec les échantillons ?",
    nearer_en="It is an integer division; what remains is dropped.",
    nearer_fr="C’est une division entière ; le reste est écarté.",
)


def _ring_sent_bytes(message_bytes: int, dp: int) -> float:
    traffic = Traffic(collective="all_reduce", group="dp", group_size=dp, count=1, message_bytes=message_bytes)
    return traffic.sent_bytes


RING_BYTES = Exercise(
    id="ring-bytes",
    title=Said("bytes sent by a ring all-reduce", "octets envoyés par un all-reduce en anneau"),
    judge=Judge(
        _ring_sent_bytes,
        cases=((1_000_000, 2), (6_000, 3), (4_096, 8), (640, 64), (2_000, 1)),
        mistakes=(
            Mistake(
                lambda message, dp: message * (dp - 1) / dp,
                "That is half of it: after the reduce-scatter each rank holds one reduced share, and an "
                "all-gather of the same length brings it to the others.",
                "C’est la moitié : après le reduce-scatter chaque rang détient une part réduite, et un "
                "all-gather de même longueur l’apporte aux autres.",
            ),
            Mistake(
                lambda message, dp: 2 * message,
                "Nearly, for many ranks: but a rank never sends all dp shares, it sends dp − 1 of them in each "
                "half; try dp = 1, where nothing needs sending.",
                "Presque, quand il y a beaucoup de rangs : mais un rang n’envoie jamais les dp parts, il en "
                "envoie dp − 1 dans chaque moitié ; essayez dp = 1, où rien n’est à envoyer.",
            ),
            Mistake(
                lambda message, dp: 2 * message * (dp - 1),
                "You send the whole message at every stage of the ring; each stage sends one share of it, "
                "message_bytes / dp.",
                "Vous envoyez tout le message à chaque étape de l’anneau ; une étape n’en envoie qu’une part, "
                "message_bytes / dp.",
            ),
            Mistake(
                lambda message, dp: message * (dp - 1),
                "That is the naive way, everything to everyone: in a ring each stage sends one share, "
                "message_bytes / dp, to one neighbour.",
                "C’est la façon naïve, tout à tout le monde : dans un anneau, chaque étape envoie une part, "
                "message_bytes / dp, à un seul voisin.",
            ),
            Mistake(
                lambda message, dp: message / dp,
                "That is one share, what a rank sends in a single stage; there are dp − 1 stages in each of the "
                "two halves.",
                "C’est une part, ce qu’un rang envoie à une seule étape ; chacune des deux moitiés compte dp − 1 "
                "étapes.",
            ),
            Mistake(
                lambda message, dp: 2 * message / dp,
                "You count one stage in each half; there are dp − 1 of them in each.",
                "Vous comptez une étape dans chaque moitié ; il y en a dp − 1 dans chacune.",
            ),
            Mistake(
                lambda message, dp: (2 * dp - 1) * message / dp,
                "One stage too many: dp − 1 in each half, so 2 (dp − 1) in all; with dp = 1 nothing is sent.",
                "Une étape de trop : dp − 1 dans chaque moitié, donc 2 (dp − 1) en tout ; avec dp = 1, rien n’est "
                "envoyé.",
            ),
            Mistake(
                lambda message, dp: message,
                "That is the message itself; count what one rank sends: two halves of dp − 1 stages, one share each.",
                "C’est le message lui-même ; comptez ce qu’envoie un rang : deux moitiés de dp − 1 étapes, une "
                "part à chacune.",
            ),
        ),
    ),
    praise_en="Right: 2 (dp − 1) / dp times the message, so never more than twice, however many replicas there are.",
    praise_fr="Exact : 2 (dp − 1) / dp fois le message, donc jamais plus du double, quel que soit le nombre de "
    "répliques.",
    hint_en="The message is cut in dp shares. How many stages has the ring in the reduce-scatter, and how many in the "
    "all-gather?",
    hint_fr="Le message est coupé en dp parts. Combien d’étapes compte l’anneau pour le reduce-scatter, et combien "
    "pour l’all-gather ?",
    nearer_en="dp − 1 stages in each of the two halves; at each stage a rank sends message_bytes / dp.",
    nearer_fr="dp − 1 étapes dans chacune des deux moitiés ; à chaque étape, un rang envoie message_bytes / dp.",
)


def _largest_gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    return _over(losses, reference, reference)


def _over(losses: Sequence[float], reference: Sequence[float], divisors: Sequence[float]) -> float:
    steps = zip(losses, reference, divisors, strict=True)
    return max(abs(loss - right) / abs(divisor) for loss, right, divisor in steps)


def _loss_curves() -> Iterator[tuple[list[float], list[float]]]:
    # The largest gap lies in the middle, at the start, at the end; above the reference, and below it.
    yield [2.0, 1.5, 0.5], [2.0, 1.2, 0.5]
    yield [1.0, 3.0, 2.0, 2.0], [2.0, 2.5, 2.0, 2.5]
    yield [0.9, 0.8], [1.2, 0.5]
    yield [2.3, 2.2], [2.3, 2.2]
    yield [1.2, 1.9], [1.6, 2.0]
    # Small ones: rounding them away would make different trainings the same.
    yield [2.0, 1 + 2**-14], [2.0, 1.0]
    yield [4.0 + 2**-13, 2.0], [4.0, 2.0]


def _refuse_other_lengths(answer: Callable[..., Any]) -> None:
    for losses, reference in (([2.0, 1.0, 0.5], [2.0, 1.0]), ([2.0, 1.0], [2.0, 1.0, 0.5]), ([2.0, 1.0], [2.0])):
        try:
            value = answer(losses, reference)
        except Exception:
            continue
        many, few = len(losses), len(reference)
        raise Wrong(
            en=f"For {many} losses against {few} your function returns {value} and raises no error: curves of "
            "different lengths are not the same training; zip with strict=True refuses them (NumPy and torch do not "
            "where one has a single loss: compare the lengths first).",
            fr=f"Pour {many} pertes face à {few}, votre fonction renvoie {value} sans lever d’erreur : des courbes de "
            "longueurs différentes ne sont pas le même entraînement ; zip avec strict=True les refuse (NumPy et torch "
            "ne le font pas si l’une n’a qu’une perte : comparez d’abord les longueurs).",
        )


SAME_TRAINING = Exercise(
    id="same-training",
    title=Said("are two trainings the same?", "deux entraînements sont-ils les mêmes ?"),
    judge=Judge(
        _largest_gap,
        cases=_loss_curves,
        mistakes=(
            Mistake(
                lambda losses, reference: abs(losses[-1] - reference[-1]) / abs(reference[-1]),
                "You look at the last step only; two trainings may part in the middle: compare every step.",
                "Vous ne regardez que le dernier pas ; deux entraînements peuvent s’écarter au milieu : comparez "
                "chaque pas.",
            ),
            Mistake(
                lambda losses, reference: max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
                "That is the absolute gap: the same 0.1 is small beside 2.3 and large beside 0.2; divide by the "
                "reference.",
                "C’est l’écart absolu : le même 0,1 est petit devant 2,3 et grand devant 0,2 ; divisez par la "
                "référence.",
            ),
            Mistake(
                lambda losses, reference: max((a - b) / b for a, b in zip(losses, reference, strict=True)),
                "Without an absolute value, losses below the reference count as no gap at all.",
                "Sans valeur absolue, des pertes inférieures à la référence ne comptent pas comme un écart.",
            ),
            Mistake(
                lambda losses, reference: sum(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)),
                "You add the gaps of all steps: a long training would look worse than a short one. Take the "
                "largest.",
                "Vous additionnez les écarts de tous les pas : un long entraînement paraîtrait pire qu’un court. "
                "Prenez le plus grand.",
            ),
            Mistake(
                lambda losses, reference: min(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)),
                "You take the smallest gap: one step that agrees would hide all others. Take the largest.",
                "Vous prenez le plus petit écart : un seul pas qui concorde cacherait tous les autres. Prenez le "
                "plus grand.",
            ),
            Mistake(
                lambda losses, reference: _over(losses, reference, [max(reference)] * len(reference)),
                "You divide the largest absolute gap by the largest loss; divide step by step, each gap by the "
                "reference of the same step.",
                "Vous divisez le plus grand écart absolu par la plus grande perte ; divisez pas à pas, chaque "
                "écart par la référence du même pas.",
            ),
            Mistake(
                lambda losses, reference: _over(losses, reference, [reference[0]] * len(reference)),
                "You divide every gap by the first loss; divide each by the reference of the same step.",
                "Vous divisez chaque écart par la première perte ; divisez chacun par la référence du même pas.",
            ),
            Mistake(
                lambda losses, reference: max(abs(round(a / b - 1, 3)) for a, b in zip(losses, reference, strict=True)),
                "You round the gap: small ones become zero, and different trainings the same.",
                "Vous arrondissez l’écart : les petits deviennent nuls, et des entraînements différents "
                "paraissent les mêmes.",
            ),
            Mistake(
                lambda losses, reference: _largest_gap(reference, losses),
                "You divide by your own loss; divide by the reference, the one that is trusted.",
                "Vous divisez par votre propre perte ; divisez par la référence, celle à laquelle on se fie.",
            ),
            Mistake(
                lambda losses, reference: (
                    sum(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)) / len(losses)
                ),
                "You average: one bad step among many good ones disappears. Take the largest.",
                "Vous faites la moyenne : un mauvais pas parmi beaucoup de bons disparaît. Prenez le plus grand écart.",
            ),
        ),
        then=_refuse_other_lengths,
    ),
    praise_en="Right. Every parallel layout of this course will be held to this measure.",
    praise_fr="Exact. Chaque parallélisme de ce cours sera jugé à cette aune.",
    hint_en="Go through both curves together, step by step; what is the relative gap at one step?",
    hint_fr="Parcourez les deux courbes ensemble, pas à pas ; quel est l’écart relatif à un pas donné ?",
    nearer_en="The largest of |loss − reference| / |reference| over zip(losses, reference, strict=True).",
    nearer_fr="Le plus grand des |loss − reference| / |reference| sur zip(losses, reference, strict=True).",
)
