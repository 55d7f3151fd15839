"""Lab 12: a plain training loop rewritten for Accelerate, accumulation included.

Layer 6 (labs). Invariant: a loop is right when it goes through what `prepare` gives and its weights are those of
Accelerate's own recipe; the accelerator is a stand-in that behaves as the real one on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.library_stand_ins import AcceleratorStandIn, make_batches, make_model, make_optimizer, weights_of
from dlojz.labs.rank_evidence import same
from dlojz.labs.verdict import Said

CASES = ((1, 3, 71), (4, 10, 72), (3, 6, 73))
"""Accumulation, micro-batches and seed; in the second, two micro-batches are left over."""


def accelerate_loop(accelerator: Any, model: Any, optimizer: Any, loader: Sequence[Any]) -> None:
    """The loop as Accelerate's guide has it.

    Source: huggingface.co/docs/accelerate, "Performing gradient accumulation": `accumulate(model)` around forward,
    `accelerator.backward`, `optimizer.step` and `optimizer.zero_grad`.
    """
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()


def updates(micro_batches: int, accumulation: int) -> int:
    """Updates of one pass over a loader: the last, incomplete step counts.

    Source: Accelerate 1.15, `Accelerator._do_sync`: gradients are whole at the end of the loader too.
    """
    return -(-micro_batches // accumulation)


def _judge(answer: Callable[..., Any]) -> None:
    for accumulation, number, seed in CASES:
        batches, truth = make_batches(number, seed), make_model(seed)
        accelerate_loop(AcceleratorStandIn(accumulation), truth, make_optimizer(truth), batches)
        accelerator, model = AcceleratorStandIn(accumulation), make_model(seed)
        answer(accelerator, model, make_optimizer(model), batches)
        said = _unprepared(accelerator)
        if said is None and not same(weights_of(model), weights_of(truth)):
            said = _calls(accelerator, accumulation, number) or _other(accumulation, number)
        if said is not None:
            raise Wrong(str(said))


def _unprepared(accelerator: AcceleratorStandIn) -> Said | None:
    model, optimizer, loader = accelerator.model, accelerator.optimizer, accelerator.loader
    if model is None and optimizer is None and loader is None:
        return Said(
            "accelerator.prepare is never called: on several GPUs, each would train on all the data, for itself.",
            "accelerator.prepare n’est jamais appelé : sur plusieurs GPU, chacun s’entraînerait seul, sur toutes les "
            "données.",
        )
    if loader is None or not loader.passes:
        return Said(
            "The loop reads the loader as it was given, not the one that prepare gives: every rank would read all the "
            "data, and Accelerate would not see where it ends.",
            "La boucle lit le chargeur de départ, et non celui que rend prepare : chaque rang lirait toutes les "
            "données, et Accelerate n’en verrait pas la fin.",
        )
    if model is None or not model.forwards:
        return Said(
            "The forward pass goes through the model as it was given, not the one that prepare gives: on several GPUs "
            "its gradients would never be averaged.",
            "La passe avant utilise le modèle de départ, et non celui que rend prepare : sur plusieurs GPU, ses "
            "gradients ne seraient jamais moyennés.",
        )
    if optimizer is None or not optimizer.steps:
        return Said(
            "The optimizer that prepare gives is never used: the one from before updates at every micro-batch, "
            "and knows nothing of accumulation.",
            "L’optimiseur que rend prepare ne sert jamais : celui d’avant met à jour à chaque micro-batch, et ne sait "
            "rien de l’accumulation.",
        )
    return None


def _calls(accelerator: AcceleratorStandIn, accumulation: int, number: int) -> Said | None:
    if accelerator.outside:
        return Said(
            f"You call loss.backward(): the loss is not divided by the accumulation, {accumulation} "
            "(and in fp16 it would not be scaled): accelerator.backward(loss).",
            f"Vous appelez loss.backward() : la perte n’est pas divisée par l’accumulation, {accumulation} (et en fp16 "
            "elle ne serait pas mise à l’échelle) : accelerator.backward(loss).",
        )
    if any(abs(value - 1 / accumulation) > 1e-6 for value in accelerator.arrived):
        return Said(
            f"The loss is divided by the accumulation, {accumulation}, and accelerator.backward divides it once more: "
            "give it the loss as it is.",
            f"La perte est divisée par l’accumulation, {accumulation}, et accelerator.backward divise encore : "
            "donnez-lui la perte telle quelle.",
        )
    return _counted(accelerator, accumulation, number)


def _counted(accelerator: AcceleratorStandIn, accumulation: int, number: int) -> Said | None:
    optimizer = accelerator.optimizer
    if not accelerator.accumulated:
        return Said(
            "Without accelerator.accumulate, every micro-batch counts as the last of its step: the optimizer updates "
            f"{number} times, with gradients divided by {accumulation}.",
            "Sans accelerator.accumulate, chaque micro-batch compte comme le dernier de son pas : l’optimiseur met à "
            f"jour {number} fois, avec des gradients divisés par {accumulation}.",
        )
    if accelerator.accumulated < number:
        return Said(
            f"accumulate is entered for {accelerator.accumulated} of {number} micro-batches: it counts them, so "
            "enter it with each one.",
            f"On entre {accelerator.accumulated} fois dans accumulate pour {number} micro-batches : c’est lui qui les "
            "compte, entrez-y à chacun.",
        )
    if optimizer is None or not optimizer.zeroed:
        return Said(
            "Gradients are never zeroed: each update adds those of all steps before. With Accelerate, zeroing is still "
            "yours to call: optimizer.zero_grad() after optimizer.step().",
            "Les gradients ne sont jamais remis à zéro : chaque mise à jour y ajoute ceux de tous les pas précédents. "
            "Avec Accelerate, c’est encore à vous : optimizer.zero_grad() après optimizer.step().",
        )
    if optimizer.steps == number // accumulation < updates(number, accumulation):
        return Said(
            f"You count micro-batches yourself, and so miss the end of the loader: {number} micro-batches make "
            f"{updates(number, accumulation)} updates here, the last one with what is left. Call optimizer.step() each "
            "time; it knows when to act.",
            "Vous comptez les micro-batches vous-même, et manquez la fin du chargeur : ici, "
            f"{number} micro-batches font {updates(number, accumulation)} mises à jour, la dernière avec ce qui reste. "
            "Appelez optimizer.step() à chaque fois ; il sait quand agir.",
        )
    return None


def _other(accumulation: int, number: int) -> Said:
    return Said(
        f"After {number} micro-batches with an accumulation of {accumulation}, the weights are not those of "
        "Accelerate's recipe: within accumulate, for each micro-batch, forward, accelerator.backward, optimizer.step, "
        "optimizer.zero_grad.",
        f"Après {number} micro-batches avec une accumulation de {accumulation}, les poids ne sont pas ceux que donne "
        "Accelerate : dans accumulate, pour chaque micro-batch, passe avant, accelerator.backward, optimizer.step, "
        "optimizer.zero_grad.",
    )


ACCELERATE_LOOP = Exercise(
    id="accelerate-loop",
    title=Said("the loop for Accelerate", "la boucle pour Accelerate"),
    judge=_judge,
    praise=Said(
        "Right: your loop, and the accelerator decides when the optimizer really acts, at the end of the loader too.",
        "Exact : c’est votre boucle, et l’accélérateur décide quand l’optimiseur agit vraiment, à la fin du chargeur "
        "aussi.",
    ),
    hints=(
        Said(
            "prepare takes the three and gives them back, wrapped, in the same order; everything after it uses what it "
            "gave. What, in the plain loop, depends on the accumulation? It goes.",
            "prepare prend les trois et les rend, enveloppés, dans le même ordre ; tout ce qui suit se sert de ce "
            "qu’il a rendu. Qu’est-ce qui, dans la boucle simple, dépend de l’accumulation ? Cela disparaît.",
        ),
        Said(
            "for batch in loader: with accelerator.accumulate(model): accelerator.backward(model(batch)), then "
            "optimizer.step() and optimizer.zero_grad(), each time.",
            "for batch in loader : with accelerator.accumulate(model) : accelerator.backward(model(batch)), puis "
            "optimizer.step() et optimizer.zero_grad(), à chaque fois.",
        ),
    ),
)
