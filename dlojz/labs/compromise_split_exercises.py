"""Lab 08: stages or replicas: what the bubble costs, what the all-reduce costs, and which split fits.

Layer 6 (labs). Invariant: both costs are the closed forms of labs 03 and 05; a split that does not fit is never best.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from dlojz.labs.compromise_answers import Case, Numbers, PartMistake, by_parts
from dlojz.labs.exercise import Exercise
from dlojz.labs.verdict import Said
from dlojz.text import say

STATE_BYTES, GRADIENT_BYTES = 16, 2
"""Per parameter: what Adam in mixed precision keeps; what an all-reduce of bf16 gradients carries."""


def best_split(
    gpus: int,
    micro_batches: int,
    work_s: float,
    parameters: float,
    capacity_bytes: float,
    alpha_s: float,
    beta_s_per_byte: float,
) -> Numbers:
    """(pp, bubble, all-reduce) of the split pp × dp of the GPUs that fits and has the least seconds of both together.

    The bubble is (pp − 1) of a micro-batch's work_s / pp; the ring all-reduce of a stage's gradients among dp replicas
    takes 2 (dp − 1)(α + β · 2 · parameters / (pp · dp)). Their sum is linear in 1/pp: one end of what fits is best.

    Args:
        gpus: to split.
        micro_batches: of a step, all replicas together; dp must divide it.
        work_s: forward and backward of one micro-batch through the whole model on one GPU.
        parameters: of the whole model.
        capacity_bytes: of a GPU, for the states of its stage.
        alpha_s, beta_s_per_byte: of a link.

    Sources: Narayanan et al. 2021 (arXiv 2104.04473), §3.3.1; Patarasuk & Yuan 2009, §3.
    """
    return _least()(gpus, micro_batches, work_s, parameters, capacity_bytes, alpha_s, beta_s_per_byte)


Cost = Callable[..., float]


def _bubble_s(pp: int, dp: int, m: int, work_s: float, parameters: float, alpha: float, beta: float) -> float:
    return (pp - 1) * work_s / pp


def _reduce_s(pp: int, dp: int, m: int, work_s: float, parameters: float, alpha: float, beta: float) -> float:
    return 2 * (dp - 1) * (alpha + beta * GRADIENT_BYTES * parameters / pp / dp)


def _least(
    bubble: Cost = _bubble_s, reduce: Cost = _reduce_s, *, state_bytes: float = STATE_BYTES
) -> Callable[..., Numbers]:
    """The split that two costs choose, with the costs."""

    def found(gpus: int, m: int, work_s: float, parameters: float, capacity: float, *link: float) -> Numbers:
        priced = [
            (float(pp), bubble(pp, dp, m, work_s, parameters, *link), reduce(pp, dp, m, work_s, parameters, *link))
            for pp, dp in ((pp, gpus // pp) for pp in range(1, gpus + 1) if gpus % pp == 0)
            if m % dp == 0 and state_bytes * parameters / pp <= capacity
        ]
        return min(priced, key=lambda one: one[1] + one[2])

    return found


def _clusters() -> Iterator[Case]:
    dice = random.Random(3)
    for gpus in (16, 24, 64, 96, 128):
        for least in (1, 2, 3, 4, 5, 8):
            capacity = 8e10
            parameters = capacity / STATE_BYTES * least * dice.uniform(0.8, 0.98)
            work_s = 10 ** dice.uniform(-1.0, 1.0)
            # Around the balance of bubble and all-reduce, so that now the one and now the other wins.
            beta = work_s / parameters * 10 ** dice.uniform(-1.0, 0.0)
            yield gpus, gpus * dice.randrange(1, 5), work_s, parameters, capacity, 10 ** dice.uniform(-5.0, -3.5), beta


def _told_cluster(case: Case) -> str:
    gpus, m, work_s, parameters, capacity, alpha, beta = case
    return say(
        en=f"{gpus} GPUs of {capacity:.2g} bytes, {m} micro-batches of {work_s:.2g} s, {parameters:.2g} parameters, "
        f"α = {alpha:.2g} s, β = {beta:.2g} s per byte",
        fr=f"{gpus} GPU de {capacity:.2g} octets, {m} micro-batches de {work_s:.2g} s, {parameters:.2g} paramètres, "
        f"α = {alpha:.2g} s, β = {beta:.2g} s par octet".replace(".", ","),
    )


_WAYS: tuple[tuple[Callable[..., Numbers], Said], ...] = (
    (
        _least(state_bytes=0.0),
        Said(
            "You look at the seconds alone: 16 bytes of states per parameter, shared over pp stages, must fit into "
            "a GPU first.",
            "Vous ne regardez que les secondes : il faut d’abord que 16 octets d’états par paramètre, répartis sur "
            "pp étages, tiennent dans un GPU.",
        ),
    ),
    (
        _least(lambda *a: 0.0),
        Said(
            "You leave the bubble out, so the longest pipeline always wins.",
            "Vous oubliez la bulle : le plus long pipeline gagne alors toujours.",
        ),
    ),
    (
        _least(reduce=lambda *a: 0.0),
        Said(
            "You leave the all-reduce out, so the shortest pipeline that fits always wins.",
            "Vous oubliez l’all-reduce : le plus court pipeline qui tient gagne alors toujours.",
        ),
    ),
    (
        _least(reduce=lambda pp, dp, m, w, g, a, b: _reduce_s(1, dp, m, w, g, a, b)),
        Said(
            "Your all-reduce carries the gradients of the whole model; a rank has those of its stage, 1/pp of "
            "them: that is what a pipeline gains.",
            "Votre all-reduce transporte les gradients de tout le modèle ; un rang n’a que ceux de son étage, soit "
            "1/pp : c’est là que gagne un pipeline.",
        ),
    ),
    (
        _least(lambda pp, dp, m, w, g, a, b: (pp - 1) * w),
        Said(
            "Your bubble is pp times too long: a stage spends work_s / pp on a micro-batch, and pp − 1 such times "
            "are waited.",
            "Votre bulle est pp fois trop longue : un étage passe work_s / pp sur un micro-batch, et l’on attend "
            "pp − 1 fois cette durée.",
        ),
    ),
    (
        _least(lambda pp, dp, m, w, g, a, b: (pp - 1) / m * (m / dp * w / pp)),
        Said(
            "You take (p − 1)/m with the micro-batches of the whole step; each replica has its own pipeline, with "
            "m = micro_batches / dp of them.",
            "Vous prenez (p − 1)/m avec les micro-batches de tout le pas ; chaque réplique a son pipeline, avec "
            "m = micro_batches / dp.",
        ),
    ),
    (
        _least(reduce=lambda pp, dp, m, w, g, a, b: 2 * (dp - 1) * (a + b * GRADIENT_BYTES * g / pp)),
        Said(
            "Each step of the ring carries one chunk, 1/dp of the message; you send all of it 2 (dp − 1) times.",
            "Chaque étape de l’anneau ne transporte qu’un morceau, 1/dp du message ; vous l’envoyez entier "
            "2 (dp − 1) fois.",
        ),
    ),
    (
        _least(reduce=lambda pp, dp, m, w, g, a, b: _reduce_s(pp, dp, m, w, g / GRADIENT_BYTES, a, b)),
        Said(
            "You send as many bytes as there are parameters; a gradient in bf16 has 2 bytes.",
            "Vous envoyez autant d’octets que de paramètres ; un gradient en bf16 en compte 2.",
        ),
    ),
    (
        _least(reduce=lambda pp, dp, m, w, g, a, b: _reduce_s(pp, dp, m, w, g, a, b) / 2),
        Said(
            "Your all-reduce goes round once; it is a reduce-scatter, then an all-gather: 2 (dp − 1) steps.",
            "Votre all-reduce ne fait qu’un tour ; c’est un reduce-scatter, puis un all-gather : 2 (dp − 1) étapes.",
        ),
    ),
    (
        lambda gpus, *rest: (gpus / best_split(gpus, *rest)[0], *best_split(gpus, *rest)[1:]),
        Said(
            "You return dp, the number of replicas; pp is asked for, the number of stages.",
            "Vous renvoyez dp, le nombre de répliques ; on demande pp, le nombre d’étages.",
        ),
    ),
)


def _split_mistakes() -> Iterator[PartMistake]:
    """The same where only one number has the mistake."""
    for part in range(3):
        for way, says in _WAYS:
            yield PartMistake(part, lambda *case, way=way, part=part: way(*case)[part], says)
    yield PartMistake(
        1,
        lambda gpus, m, work_s, *rest: best_split(gpus, m, work_s, *rest)[1] / (m / gpus * work_s),
        Said(
            "The split is right; your second number is the bubble as a share of the work, but seconds are asked for.",
            "Le choix est juste ; votre second nombre est la bulle en part du travail, mais on demande des secondes.",
        ),
    )


BEST_SPLIT = Exercise(
    id="best-split",
    title=Said("bubble or all-reduce?", "la bulle ou l’all-reduce ?"),
    judge=by_parts(
        best_split,
        cases=_clusters,
        names=(
            Said("pp", "pp"),
            Said("the bubble in seconds", "la bulle en secondes"),
            Said("the all-reduce in seconds", "l’all-reduce en secondes"),
        ),
        told=_told_cluster,
        ways=_WAYS,
        mistakes=tuple(_split_mistakes()),
    ),
    praise=Said(
        "Right, for thirty clusters: stages pay in bubble, replicas in all-reduce, and the link decides.",
        "Exact, pour trente clusters : les étages se paient en bulle, les répliques en all-reduce, et le lien décide.",
    ),
    hints=(
        Said(
            "For each pp that divides gpus and fits: dp = gpus // pp. How long does a stage take for one micro-batch, "
            "and how many such times does the last stage wait? How many bytes of gradients does a rank have?",
            "Pour chaque pp qui divise gpus et qui tient : dp = gpus // pp. Combien dure un micro-batch sur un étage, "
            "et combien de ces durées le dernier étage attend-il ? Combien d’octets de gradients a un rang ?",
        ),
        Said(
            "bubble = (pp − 1) · work_s / pp; all_reduce = 2 (dp − 1)(α + β · 2 · parameters / (pp · dp)); keep the "
            "pp with the least sum, of those for which dp divides micro_batches and 16 · parameters / pp fits.",
            "bubble = (pp − 1) · work_s / pp ; all_reduce = 2 (dp − 1)(α + β · 2 · parameters / (pp · dp)) ; gardez "
            "le pp dont la somme est la plus petite, parmi ceux pour lesquels dp divise micro_batches et 16 · "
            "parameters / pp tient.",
        ),
    ),
)
