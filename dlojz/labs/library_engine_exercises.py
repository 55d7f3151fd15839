"""Lab 12: a plain training loop rewritten for DeepSpeed's engine.

Layer 6 (labs). Invariant: a loop is right when the weights are those of the plain loop; how it is written does not
matter. The engine is a stand-in that behaves as DeepSpeed's without ZeRO, where every mistake shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.library_stand_ins import EngineStandIn, make_batches, make_model, make_optimizer, weights_of
from dlojz.labs.rank_evidence import same
from dlojz.labs.verdict import Said

CASES = ((1, 3, 61), (4, 8, 62), (2, 5, 63))
"""Accumulation, micro-batches and seed; the last leaves one micro-batch for the next step."""

NOT_REDUCED = Said(
    "On one process the weights are right. But the engine's backward is never called, and it is the one that averages "
    "gradients over the ranks: on several, each would learn for itself.",
    "Sur un seul processus, les poids sont justes. Mais la passe arrière du moteur n’est jamais appelée, et c’est elle "
    "qui moyenne les gradients entre les rangs : à plusieurs, chacun apprendrait pour soi.",
)


def plain_loop(model: Any, optimizer: Any, batches: Sequence[Any], accumulation: int) -> None:
    """The loop without library: share of the mean, backward, and every `accumulation` micro-batches an update."""
    for number, batch in enumerate(batches, start=1):
        loss = model(batch) / accumulation
        loss.backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def deepspeed_loop(engine: Any, batches: Sequence[Any]) -> None:
    """The same for DeepSpeed's engine.

    Source: deepspeed.ai, "Getting Started": forward, `engine.backward(loss)`, `engine.step()` for each micro-batch.
    """
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()


def _judge(answer: Callable[..., Any]) -> None:
    for accumulation, number, seed in CASES:
        batches = make_batches(number, seed)
        truth = make_model(seed)
        plain_loop(truth, make_optimizer(truth), batches, accumulation)
        engine = EngineStandIn(make_model(seed), accumulation)
        answer(engine, batches)
        if not same(weights_of(engine.module), weights_of(truth)):
            said = _counts(engine, number) or _sizes(engine, accumulation, number)
            raise Wrong(str(said or _other(accumulation, number)))
        if engine.backwards < number:
            raise Wrong(str(NOT_REDUCED))


def _counts(engine: EngineStandIn, number: int) -> Said | None:
    """What was not called as often as there are micro-batches."""
    if engine.forwards == 0:
        return Said(
            "The engine's forward is never called: engine(batch) gives the loss.",
            "La passe avant du moteur n’est jamais appelée : engine(batch) donne la perte.",
        )
    if engine.forwards < number:
        return Said(
            f"Your loop ends after {engine.forwards} of {number} micro-batches (a return inside it?).",
            f"Votre boucle s’arrête après {engine.forwards} micro-batches sur {number} (un return à l’intérieur ?).",
        )
    if engine.backwards < number:
        return Said(
            f"engine.backward is called for {engine.backwards} of {number} micro-batches: each one has its own, "
            "before its activations are thrown away.",
            f"engine.backward est appelé {engine.backwards} fois pour {number} micro-batches : chacun a le sien, avant "
            "que ses activations ne soient libérées.",
        )
    return None


def _sizes(engine: EngineStandIn, accumulation: int, number: int) -> Said | None:
    if any(abs(value - 1 / accumulation) > 1e-6 for value in engine.arrived):
        return Said(
            f"The loss is divided by the accumulation, {accumulation}, and so divides the engine's backward once more: "
            "give it the loss as it is.",
            f"La perte est divisée par l’accumulation, {accumulation}, et engine.backward divise encore : donnez-lui "
            "la perte telle quelle.",
        )
    if engine.steps == 0:
        return Said(
            "engine.step is never called: no weight changes.",
            "engine.step n’est jamais appelé : aucun poids ne change.",
        )
    if engine.steps == number // accumulation != number:
        return Said(
            f"engine.step is called every {accumulation} micro-batches only. But it counts them itself, and "
            f"believes that only {engine.steps} of {number} have passed. Call it after each.",
            f"engine.step n’est appelé que tous les {accumulation} micro-batches. Or c’est lui qui les compte : il "
            f"croit qu’il n’en est passé que {engine.steps} sur {number}. Appelez-le après chacun.",
        )
    if engine.steps != number:
        return Said(
            f"Number of calls of engine.step for {number} micro-batches: {engine.steps}. Call it once after each.",
            f"engine.step est appelé {engine.steps} fois pour {number} micro-batches : appelez-le une fois après "
            "chacun.",
        )
    if engine.zeroed:
        return Said(
            "You zero the gradients with every micro-batch, and lose those of the ones before: engine.step zeroes them "
            "when it has used them. (With ZeRO-2 the same line does nothing: a fault that comes and goes with the "
            "JSON.)",
            "Vous remettez les gradients à zéro à chaque micro-batch, et perdez ceux des précédents : engine.step s’en "
            "charge, une fois qu’il s’en est servi. (En ZeRO-2, la même ligne ne fait rien : une erreur qui va et "
            "vient avec le JSON.)",
        )
    return None


def _other(accumulation: int, number: int) -> Said:
    return Said(
        f"After {number} micro-batches with an accumulation of {accumulation}, the weights are not those of the plain "
        "loop: for each micro-batch, in this order, forward, engine.backward, engine.step.",
        f"Après {number} micro-batches avec une accumulation de {accumulation}, les poids ne sont pas ceux de la "
        "boucle simple : pour chaque micro-batch, dans cet ordre, passe avant, engine.backward, engine.step.",
    )


DEEPSPEED_LOOP = Exercise(
    id="deepspeed-loop",
    title=Said("the loop for DeepSpeed", "la boucle pour DeepSpeed"),
    judge=_judge,
    praise=Said(
        "Right: the weights of the plain loop. Division, counting and zeroing are the engine's; the JSON decides.",
        "Exact : les poids de la boucle simple. Diviser, compter, remettre à zéro, c’est le moteur ; le JSON décide.",
    ),
    hints=(
        Said(
            "Which lines of the plain loop need to know the accumulation? The engine knows it from the JSON: these "
            "lines are its own.",
            "Quelles lignes de la boucle simple ont besoin de l’accumulation ? Le moteur la connaît par le JSON : ces "
            "lignes-là lui reviennent.",
        ),
        Said(
            "Three lines in the loop, without any if: loss = engine(batch), engine.backward(loss), engine.step().",
            "Trois lignes dans la boucle, sans aucun if : loss = engine(batch), engine.backward(loss), engine.step().",
        ),
    ),
)
