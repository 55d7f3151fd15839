"""Lab 07: one step in two dimensions, on real ranks: which collective goes over which axis.

Layer 6 (labs). Invariant: the gradients are held to those of one process that reads the whole batch through the whole
layer; what a wrong way would give is computed here, in one process, without any communication.

Shape suffixes: D width of the stream, H hidden width of one rank, B samples of one replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.grid import Grid
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.hybrid_trials import NAMES, Part, Way, gradients, make_part
from dlojz.labs.rank_diagnosis import diagnose
from dlojz.labs.rank_evidence import gathered, same
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

DEGREES = {4: (2, 2), 3: (3, 1)}
"""(dp, tp) by number of ranks; in the second case the two differ, so that none stands for the other."""
CASES = ((4, 21), (3, 22))
_LABELS = {f"gradient of {name}": Said(f"the gradient of {name}", f"le gradient de {name}") for name in NAMES}


def hybrid_step(part: Part, x: Tensor, targets: Tensor, dp: Any, tp: Any) -> None:
    """Forward and backward of this rank's slice, its gradients averaged over the replicas.

    Args:
        part: `scale` (D,) and `bias` (D,), whole on every rank; `w1` (H, D) and `w2` (D, H), this rank's slices.
        x: (B, D), the samples of this replica, the same on all its tensor ranks.
        targets: (B, D), likewise.
        dp: the axis of the replicas, a `dlojz.tensor.axis.TensorAxis`.
        tp: the axis of the slices.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3, for the layer; §3 "Hybrid Model and Data Parallelism" for
    gradients, all-reduced over the ranks of the data axis alone.
    """
    import torch

    from dlojz.tensor.operators import add_up, copy

    # In backward, `copy` adds up over tp what each slice has found for its input: (B, D).
    h_BH = torch.relu(copy(x * part["scale"], tp) @ part["w1"].T)
    # Who: the ranks of tp. What: their terms of the output. How much: (B, D).
    y_BD = add_up(h_BH @ part["w2"].T, tp) + part["bias"]
    ((y_BD - targets) ** 2).mean().backward()
    for parameter in part.values():
        # Who: the ranks of dp, which hold the same slice. What: its gradient. How much: its bytes.
        dp.all_reduce(parameter.grad)
        parameter.grad /= dp.size


RIGHT = Way()
_WAYS: tuple[tuple[Way, Said], ...] = (
    (
        Way(reduced="world", divided="world"),
        Said(
            "The gradients are averaged over all ranks: that mixes slices of different columns. Only the ranks of dp "
            "hold the same slice; give the collective that axis.",
            "Les gradients sont moyennés sur tous les rangs : cela mélange des tranches de colonnes différentes. Seuls "
            "les rangs de dp détiennent la même tranche ; donnez cet axe à la communication collective.",
        ),
    ),
    (
        Way(added="dp", copied="dp", reduced="tp", divided="tp"),
        Said(
            "The two axes are swapped: you add up outputs of different samples over dp, and average different slices "
            "over tp.",
            "Les deux axes sont échangés : vous additionnez sur dp les sorties d’échantillons différents, et moyennez "
            "sur tp des tranches différentes.",
        ),
    ),
    (
        Way(reduced="tp", divided="tp"),
        Said(
            "The gradients are averaged over tp: these ranks hold different slices. The replicas, which hold the same "
            "one, are the ranks of dp.",
            "Les gradients sont moyennés sur tp : ces rangs détiennent des tranches différentes. Les répliques, qui "
            "détiennent la même, sont les rangs de dp.",
        ),
    ),
    (
        Way(divided="world"),
        Said(
            "The gradients are summed over dp, but divided by all ranks: those of tp are slices, not replicas, and are "
            "no reason to divide.",
            "Les gradients sont sommés sur dp, mais divisés par le nombre de tous les rangs : ceux de tp sont des "
            "tranches, non des répliques, et ne donnent pas lieu à division.",
        ),
    ),
    (
        Way(divided="tp"),
        Said(
            "The gradients are summed over dp, but divided by tp.size: the mean is over the replicas, dp.size.",
            "Les gradients sont sommés sur dp, mais divisés par tp.size : la moyenne se fait sur les répliques, "
            "dp.size.",
        ),
    ),
    (
        Way(divided=""),
        Said(
            "The gradients are summed over the replicas, dp.size times too large: each loss is a mean over its own "
            "samples, so divide by dp.size.",
            "Les gradients sont sommés sur les répliques, dp.size fois trop grands : chaque perte est une moyenne sur "
            "ses échantillons, divisez donc par dp.size.",
        ),
    ),
    (
        Way(reduced="", divided=""),
        Said(
            "The layer is right, but the replicas go apart: average every gradient over dp after backward.",
            "La couche est juste, mais les répliques s’éloignent : après la passe arrière, faites la moyenne de chaque "
            "gradient sur dp.",
        ),
    ),
    (
        Way(copied=""),
        Said(
            "Only scale is wrong: each slice finds a part of its gradient alone. What enters the column-parallel layer "
            "goes through copy(…, tp), whose backward adds these parts up.",
            "Seul scale est faux : chaque tranche n’en trouve qu’une partie du gradient. Ce qui entre dans la couche "
            "découpée par colonne passe par copy(…, tp), dont la passe arrière additionne ces parties.",
        ),
    ),
    (
        Way(added="", copied=""),
        Said(
            "Each rank uses its own term of the output alone: add the terms up over tp before the loss, and pass what "
            "enters through copy.",
            "Chaque rang n’utilise que son propre terme de la sortie : additionnez les termes sur tp avant la perte, "
            "et faites passer l’entrée par copy.",
        ),
    ),
    (
        Way(added=""),
        Said(
            "Each rank uses its own term of the output alone: the second layer is split by rows, so add its terms up "
            "over tp before the loss.",
            "Chaque rang n’utilise que son propre terme de la sortie : la seconde couche est découpée par ligne, "
            "additionnez donc ses termes sur tp avant la perte.",
        ),
    ),
    (
        Way(bias_each=True),
        Said(
            "The bias is added on every rank before the sum over tp, so it counts tp.size times: add it once, after "
            "add_up.",
            "Le biais est ajouté sur chaque rang avant la somme sur tp, il compte donc tp.size fois : ajoutez-le une "
            "fois, après add_up.",
        ),
    ),
    (
        Way(only_slices=True),
        Said(
            "scale and bias are left out of the average: they are whole on every rank, but each replica finds their "
            "gradient from its own samples.",
            "scale et bias sont oubliés dans la moyenne : ils sont entiers sur chaque rang, mais chaque réplique "
            "trouve leur gradient à partir de ses seuls échantillons.",
        ),
    ),
)


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Tensor | None]]:
    import torch.distributed as dist

    from dlojz.tensor.axis import TensorAxis

    dp, tp = DEGREES[size]
    grid, axes = Grid(dp=dp, tp=tp), {}
    for axis in ("dp", "tp"):
        for group in grid.groups(axis):
            made = dist.new_group(list(group))  # every rank makes every group, and keeps its own
            if rank in group:
                axes[axis] = TensorAxis(made)
    part, x, targets = make_part(rank, dp, tp, seed)
    answer(part, x, targets, axes["dp"], axes["tp"])
    return None, {f"gradient of {name}": part[name].grad for name in NAMES}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    dp, tp = DEGREES[size]
    seed = next(seed for ranks, seed in CASES if ranks == size)
    given, truth = [one.tensors for one in answers], gradients(dp, tp, seed, RIGHT)
    if _equal(given, truth):
        return
    if not any(given):
        raise Wrong(
            say(
                en="No parameter has a gradient: call backward on the loss.",
                fr="Aucun paramètre n’a de gradient : appelez backward sur la perte.",
            )
        )
    for way, says in _WAYS:
        if _equal(given, gradients(dp, tp, seed, way)):
            raise Wrong(str(says))
    for evidence in gathered(given, truth, labels=_LABELS):
        said = diagnose(evidence)
        if said is not None:
            raise Wrong(str(said))


def _equal(given: list[dict[str, Tensor]], expected: list[Part]) -> bool:
    return all(
        name in mine and same(mine[name], theirs[name])
        for mine, theirs in zip(given, expected, strict=True)
        for name in theirs
    )


STEP_2D = Exercise(
    id="hybrid-step",
    title=Said("one step in two dimensions", "un pas en deux dimensions"),
    judge=by_ranks(trial=_trial, expected=lambda rank, size, seed: {}, cases=CASES, inspect=_inspect),
    praise=Said(
        "Right, on 2 × 2 ranks and on 3 × 1: the gradients of one process that reads the whole batch.",
        "Exact, sur 2 × 2 rangs et sur 3 × 1 : les gradients d’un seul processus qui lit tout le batch.",
    ),
    hints=(
        Said(
            "Ask of each tensor: which ranks hold a part of the same sum? Terms of one output are on tp; gradients of "
            "one slice, from other samples, on dp.",
            "Demandez-vous, pour chaque tenseur : quels rangs détiennent une part de la même somme ? Les termes d’une "
            "même sortie sont sur tp ; les gradients d’une même tranche, issus d’autres échantillons, sur dp.",
        ),
        Said(
            "copy(x * scale, tp) before w1; add_up(h @ w2.T, tp), and only then + bias. After backward, for every "
            "parameter: dp.all_reduce(parameter.grad), then divide by dp.size.",
            "copy(x * scale, tp) avant w1 ; add_up(h @ w2.T, tp), et seulement ensuite + bias. Après backward, pour "
            "chaque paramètre : dp.all_reduce(parameter.grad), puis division par dp.size.",
        ),
    ),
)
