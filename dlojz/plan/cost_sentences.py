"""Why bytes or seconds refuse a layout, with the stage and the category that weigh most.

Layer 4. Invariant: the figures of a sentence add up to those of the search.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlojz.plan.candidate import Candidate, layouts_of
from dlojz.plan.question import Question
from dlojz.plan.ranks import fullest, rank_memories
from dlojz.plan.reasons import decimal, gigabytes, part_words, shortest
from dlojz.plan.search import Found
from dlojz.text import say


def cost_sentence(
    question: Question, found: Found, one: Candidate, reason: str, step_s: float, host_bytes: float
) -> str:
    """Why bytes or seconds refuse a layout, with the stage and the category that weigh most."""
    if reason == "hours":
        assert question.steps is not None and question.hours is not None
        took, limit = decimal(step_s * question.steps / 3600), shortest(question.hours)
        name = f" ({question.limit})" if question.limit else ""
        return say(
            en=f"{question.steps} steps would take {took} h, but {limit} h are allowed{name}.",
            fr=f"{question.steps} itérations prendraient {took} h, mais {limit} h sont accordées{name}.",
        )
    if reason == "host":
        here = min(one.gpus, question.cluster.gpus_per_node)
        needs, has = gigabytes(host_bytes * here), gigabytes(question.cluster.host_memory_bytes)
        return say(
            en=f"{here} ranks of a node would offload {needs}, but its memory is {has}.",
            fr=f"{here} rangs d’un nœud déchargeraient {needs}, mais sa mémoire est de {has}.",
        )
    rank = fullest(rank_memories(question.subject, layouts_of([one], found.space)))
    name = max(rank.parts, key=lambda part: rank.parts[part])
    over = gigabytes(rank.total_bytes - question.device_bytes)
    return say(
        en=f"OOM by {over} on stage {rank.stage}: ", fr=f"OOM de {over} sur l’étage {rank.stage} : "
    ) + weight_words(question, one, rank.parts, name, rank.in_flight, rank.layers)


def weight_words(
    question: Question, one: Candidate, parts: Mapping[str, float], name: str, held: float, layers: int
) -> str:
    """What fills the fullest rank: its largest category with how it comes about, and the rest."""
    states = sum(parts[key] for key in ("weights", "gradients", "optimizer"))
    if name == "activations":
        each = parts[name] / held if held else 0.0
        return say(
            en=f"activations {gigabytes(parts[name])} = {decimal(held, 0 if held % 1 == 0 else 1)} in flight × "
            f"{gigabytes(each)} of {layers} layers; states {gigabytes(states)}.",
            fr=f"activations {gigabytes(parts[name])} = {decimal(held, 0 if held % 1 == 0 else 1)} en vol × "
            f"{gigabytes(each)} de {layers} couches ; états {gigabytes(states)}.",
        )
    kept = gigabytes(parts["activations"])
    if name in ("weights", "gradients", "optimizer"):
        return say(
            en=f"model states {gigabytes(states)} of {layers} layers on dp {one.dp}, ZeRO-{one.zero}; "
            f"activations {kept}.",
            fr=f"états du modèle {gigabytes(states)} pour {layers} couches, dp {one.dp}, ZeRO-{one.zero} ; "
            f"activations {kept}.",
        )
    mark = say(en=";", fr=" ;")
    return (
        f"{part_words(name)} {gigabytes(parts[name])}{mark} "
        + say(en="states", fr="états")
        + f" {gigabytes(states)}{mark} activations {kept}."
    )
