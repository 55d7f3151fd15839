"""Lab 03: data parallelism in its simplest form: gradients averaged after backward, or after several of them.

Layer 6 (labs). Invariant: the answer is held to the gradients of one process on the data of all ranks, and to what it
communicated for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.gradient_trials import (
    LABELS,
    MICRO_BATCHES,
    Batch,
    batch_of,
    gradients,
    loss_of,
    make_model,
    true_gradients,
)
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor, nn

_WEIGHTS = "weights"


def average_gradients(model: nn.Module, only: Callable[[int, Tensor], bool] = lambda index, parameter: True) -> None:
    """Replace every gradient by its mean over the ranks; `only` leaves some out, to spoil it.

    Source: Li et al. 2020 (arXiv 2006.15704), §3.1: averaged gradients keep replicas equal, not averaged weights.
    """
    import torch.distributed as dist

    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and only(index, parameter):
            # Who: all ranks. What: one gradient, of its parameter's shape, summed. How much: its bytes.
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _average_weights(model: nn.Module) -> None:
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def _backward_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    import torch
    from torch.nn.utils import parameters_to_vector

    model = make_model(seed)
    loss_of(model, batch_of(rank, seed)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # replicas have equal weights; here they differ, to see that nobody averages them
    answer(model)
    return {**gradients(model), _WEIGHTS: parameters_to_vector(model.parameters()).detach()}


def _weights_of(rank: int, seed: int) -> Tensor:
    from torch.nn.utils import parameters_to_vector

    return parameters_to_vector(make_model(seed).parameters()).detach() + rank


def _mean_gradients(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return {
        **true_gradients(seed, [batch_of(other, seed) for other in range(size)]),
        _WEIGHTS: _weights_of(rank, seed),
    }


def _own_gradients(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return true_gradients(seed, [batch_of(rank, seed)])


AVERAGE_GRADIENTS = Exercise(
    id="average-gradients",
    title=Said("averaging the gradients", "la moyenne des gradients"),
    judge=by_ranks(
        trial=_backward_trial,
        expected=_mean_gradients,
        local=_own_gradients,
        labels={**LABELS, _WEIGHTS: Said("the weights of a rank", "les poids d’un rang")},
        mistakes=(
            Mistake(
                _average_weights,
                Said(
                    "You average the weights; it is the gradients, parameter.grad, that differ between replicas after "
                    "backward.",
                    "Vous moyennez les poids ; or ce sont les gradients, parameter.grad, qui diffèrent entre répliques "
                    "après la passe arrière.",
                ),
            ),
            Mistake(
                lambda model: average_gradients(model, lambda index, parameter: index == 0),
                Said(
                    "Only the first parameter is averaged: look at where your loop ends (a return inside it?).",
                    "Seul le premier paramètre est moyenné : regardez où finit votre boucle (un return à l’intérieur "
                    "?).",
                ),
            ),
            Mistake(
                lambda model: average_gradients(model, lambda index, parameter: parameter.dim() > 1),
                Said(
                    "The biases are left out: they are parameters like the others, and have a gradient.",
                    "Les biais sont oubliés : ce sont des paramètres comme les autres, et ils ont un gradient.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: the same gradients on every rank, those of one process that had read all the batches.",
        "Exact : sur chaque rang, les mêmes gradients, ceux d’un processus qui aurait lu tous les batches.",
    ),
    hints=(
        Said(
            "What does all-reduce leave in a tensor, and what is missing for a mean? Do so for every "
            "model.parameters().",
            "Que laisse l’all-reduce dans un tenseur, et que manque-t-il pour une moyenne ? Faites-le pour chacun des "
            "model.parameters().",
        ),
        Said(
            "dist.all_reduce(parameter.grad) works in place; then divide parameter.grad, in place too, by "
            "dist.get_world_size().",
            "dist.all_reduce(parameter.grad) travaille en place ; divisez ensuite parameter.grad, en place aussi, par "
            "dist.get_world_size().",
        ),
    ),
)


def _micro_batches(rank: int, seed: int) -> list[Batch]:
    return [batch_of(rank, seed, number) for number in range(MICRO_BATCHES)]


def _accumulate(
    model: nn.Module, batches: Sequence[Batch], *, share: float | None = None, average: bool = True
) -> None:
    for batch in batches:
        (loss_of(model, batch) * (1 / len(batches) if share is None else share)).backward()
    if average:
        average_gradients(model)


def _accumulation_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    model = make_model(seed)
    answer(model, _micro_batches(rank, seed))
    return gradients(model)


def _of_all(seed: int, ranks: Iterable[int]) -> dict[str, Tensor]:
    return true_gradients(seed, [batch for rank in ranks for batch in _micro_batches(rank, seed)])


def _inspect_traffic(answers: list[RankAnswer], size: int) -> None:
    """The gradients are right; did they travel once?"""
    whole = sum(parameter.numel() for parameter in make_model(0).parameters())
    for answer in answers:
        sent = sum(call["numel"] for call in answer.calls if call["op"] == "all_reduce")
        if sent > whole:
            times = sent / whole
            raise Wrong(
                say(
                    en=f"The gradients are right, but they are communicated {times:g} times: {sent} numbers go through "
                    f"all-reduce for a model of {whole}. Add up the gradients of all micro-batches on the rank, then "
                    "average once, after the loop.",
                    fr="Les gradients sont justes, mais ils sont communiqués "
                    + f"{times:g}".replace(".", ",")
                    + f" fois : {sent} nombres passent par l’all-reduce pour un modèle qui en compte {whole}. Cumulez "
                    "sur le rang les gradients de tous les micro-batches, puis faites une seule moyenne, après la "
                    "boucle.",
                )
            )


ACCUMULATION = Exercise(
    id="accumulation",
    title=Said("accumulating gradients", "l’accumulation de gradients"),
    judge=by_ranks(
        trial=_accumulation_trial,
        expected=lambda rank, size, seed: _of_all(seed, range(size)),
        local=lambda rank, size, seed: _of_all(seed, [rank]),
        labels=LABELS,
        mistakes=(
            Mistake(
                lambda model, batches: _accumulate(model, batches, share=1.0),
                Said(
                    "The gradients are as many times too large as there are micro-batches: backward adds up, so divide "
                    "each loss by len(micro_batches).",
                    "Les gradients sont trop grands d’un facteur égal au nombre de micro-batches : la passe arrière "
                    "cumule ; divisez donc chaque perte par len(micro_batches).",
                ),
            ),
            Mistake(
                lambda model, batches: _accumulate(model, batches[-1:], share=1.0),
                Said(
                    "Only the last micro-batch counts: zero_grad inside the loop wipes out those before.",
                    "Seul le dernier micro-batch compte : un zero_grad dans la boucle efface les précédents.",
                ),
            ),
            Mistake(
                lambda model, batches: _accumulate(model, batches[-1:], share=1 / len(batches)),
                Said(
                    "Only the last micro-batch counts, divided by their number: zero_grad inside the loop wipes out "
                    "those before.",
                    "Seul compte le dernier micro-batch, divisé par leur nombre : un zero_grad dans la boucle efface "
                    "les précédents.",
                ),
            ),
            Mistake(
                lambda model, batches: _accumulate(model, batches[:1], share=1.0),
                Said(
                    "Only the first micro-batch counts: look at where your loop ends.",
                    "Seul le premier micro-batch compte : regardez où finit votre boucle.",
                ),
            ),
            Mistake(
                lambda model, batches: _accumulate(model, batches, share=1.0, average=False),
                Said(
                    "Two things are missing: the loss of each micro-batch is to be divided by their number, and the "
                    "gradients are never averaged over the ranks.",
                    "Il manque deux choses : diviser la perte de chaque micro-batch par leur nombre, et faire la "
                    "moyenne des gradients entre les rangs.",
                ),
            ),
        ),
        inspect=_inspect_traffic,
    ),
    praise=Said(
        "Right: the gradients of a batch as many times larger, for the communication of a single one.",
        "Exact : les gradients d’un batch d’autant plus grand, pour le prix d’une seule communication.",
    ),
    hints=(
        Said(
            "loss.backward() adds to parameter.grad what is there already. What becomes of a mean of means?",
            "loss.backward() ajoute à ce que parameter.grad contient déjà. Que devient une moyenne de moyennes ?",
        ),
        Said(
            "In the loop: the loss divided by len(micro_batches), then backward. After the loop, once: "
            "average_gradients(model).",
            "Dans la boucle : la perte divisée par len(micro_batches), puis backward. Après la boucle, une fois : "
            "average_gradients(model).",
        ),
    ),
)
