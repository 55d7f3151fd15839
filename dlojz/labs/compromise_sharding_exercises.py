"""Lab 08: an integer linear programme that chooses how each layer is shared out.

Layer 6 (labs). Invariant: a programme is judged by what it allows and what it costs: every choice of one strategy per
layer must be one of its solutions, at its true cost, and nothing cheaper may be.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dlojz.labs.compromise_answers import refuse_nothing, same, shown, written
from dlojz.labs.compromise_programme import Name, Programme, Row, solve, told
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

Costs = list[list[float]]
Matrices = list[list[list[float]]]
Objective = dict[Name, float]


def programme(costs: Costs, resharding: Matrices) -> Programme:
    """Objective and equations of the choice of one strategy per layer of a chain.

    s[v, k] says whether layer v takes strategy k; e[v, k, j] whether layer v takes k and layer v + 1 takes j. The row
    and column sums of e are the s of its two ends: the product s·s, made linear.

    Args:
        costs: of each layer, the communication of each strategy.
        resharding: between layers v and v + 1, what each pair of strategies costs.

    Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, equation 1, in the form of `dlojz.plan.alpa.intra_operator`.
    """
    objective: Objective = {("s", v, k): cost for v, some in enumerate(costs) for k, cost in enumerate(some)}
    equations: list[Row] = [({("s", v, k): 1.0 for k in range(len(some))}, 1.0) for v, some in enumerate(costs)]
    for v, matrix in enumerate(resharding):
        makers, readers = range(len(costs[v])), range(len(costs[v + 1]))
        objective |= {("e", v, k, j): matrix[k][j] for k in makers for j in readers}
        equations += [({("s", v, k): -1.0} | {("e", v, k, j): 1.0 for j in readers}, 0.0) for k in makers]
        equations += [({("s", v + 1, j): -1.0} | {("e", v, k, j): 1.0 for k in makers}, 0.0) for j in readers]
    return objective, equations


def chain_cost(costs: Costs, resharding: Matrices, picked: Sequence[int]) -> float:
    """What one strategy per layer costs."""
    return math.fsum(costs[v][k] for v, k in enumerate(picked)) + math.fsum(
        matrix[picked[v]][picked[v + 1]] for v, matrix in enumerate(resharding)
    )


def _chains() -> Iterator[tuple[Costs, Matrices]]:
    """Chains on which resharding decides: alone, each layer would choose otherwise."""
    dice = random.Random(6)
    for sizes in ((2, 2), (2, 3, 2), (3, 2, 3, 3), (2, 4, 3)):
        costs = [[float(dice.randrange(1, 20)) for _ in range(size)] for size in sizes]
        resharding = [
            [[float(dice.randrange(5, 60)) for _ in range(there)] for _ in range(here)]
            for here, there in itertools.pairwise(sizes)
        ]
        yield costs, resharding


def _judge(answer: Callable[..., Any]) -> None:
    for costs, resharding in _chains():
        made = _read(answer([list(one) for one in costs], [[list(row) for row in one] for one in resharding]), costs)
        _check_rows(made[1], costs)
        _check_objective(made[0], costs, resharding)
        _check_optimum(made, costs, resharding)


def _names(costs: Costs) -> set[Name]:
    own = {("s", v, k) for v, some in enumerate(costs) for k in range(len(some))}
    return own | {
        ("e", v, k, j)
        for v, (here, there) in enumerate(itertools.pairwise(costs))
        for k in range(len(here))
        for j in range(len(there))
    }  # fmt: skip


def _read(given: Any, costs: Costs) -> Programme:
    """The student's programme, or a sentence about its form."""
    refuse_nothing(given)
    if not (isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], Mapping)):
        raise Wrong(
            say(
                en=f"Return the objective, a dictionary, and the list of equations; your function returns "
                f"{shown(given)}.",
                fr=f"Renvoyez l’objectif, un dictionnaire, et la liste des équations ; votre fonction renvoie "
                f"{shown(given)}.",
            )
        )
    legal, equations = _names(costs), []
    for row in given[1]:
        if not (isinstance(row, tuple | list) and len(row) == 2 and isinstance(row[0], Mapping)):
            raise Wrong(
                say(
                    en="An equation is a pair: a dictionary of coefficients, and their sum, such as "
                    f"({{('s', 0, 0): 1, ('s', 0, 1): 1}}, 1); {shown(row)} stands among them.",
                    fr="Une équation est une paire : un dictionnaire de coefficients et la valeur de leur somme, comme "
                    f"({{('s', 0, 0): 1, ('s', 0, 1): 1}}, 1) ; {shown(row)} s’y trouve.",
                )
            )
        equations.append(({name: float(value) for name, value in row[0].items()}, float(row[1])))
    for name in itertools.chain(given[0], *(row[0] for row in equations)):
        if name not in legal:
            raise Wrong(
                say(
                    en=f"There is no variable {shown(name)} in a chain of {len(costs)} layers with "
                    f"{[len(some) for some in costs]} strategies: ('s', layer, strategy), and ('e', layer, strategy, "
                    "strategy of the next layer), all from 0.",
                    fr=f"Il n’y a pas de variable {shown(name)} dans une chaîne de {len(costs)} couches à "
                    f"{[len(some) for some in costs]} stratégies : ('s', couche, stratégie) et ('e', couche, "
                    "stratégie, stratégie de la couche suivante), tous à partir de 0.",
                )
            )
    return {name: float(value) for name, value in given[0].items()}, equations


def _point(costs: Costs, picked: Sequence[int]) -> dict[Name, float]:
    """The variables of one choice."""
    chosen: set[Name] = {("s", v, k) for v, k in enumerate(picked)}
    chosen |= {("e", v, k, j) for v, (k, j) in enumerate(itertools.pairwise(picked))}
    return {name: float(name in chosen) for name in _names(costs)}


def _choices(costs: Costs) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(some)) for some in costs))


def _check_rows(equations: Sequence[Row], costs: Costs) -> None:
    """Every choice of one strategy per layer must satisfy every equation."""
    for picked in _choices(costs):
        point = _point(costs, picked)
        for row, value in equations:
            found = math.fsum(factor * point[name] for name, factor in row.items())
            if not same(found, value):
                raise Wrong(
                    say(
                        en=f"An equation forbids a legal choice: if the layers take the strategies {list(picked)}, "
                        f"{told(row)} is {written(found)}, but you demand {written(value)}.",
                        fr=f"Une équation interdit un choix permis : si les couches prennent les stratégies "
                        f"{list(picked)}, {told(row)} vaut {written(found)}, mais vous exigez {written(value)}.",
                    )
                )


def _check_objective(objective: Mapping[Name, float], costs: Costs, resharding: Matrices) -> None:
    """Every choice must cost what it costs."""
    nothing: Costs = [[0.0] * len(some) for some in costs]
    free: Matrices = [[[0.0] * len(row) for row in matrix] for matrix in resharding]
    points = [(picked, _point(costs, picked)) for picked in _choices(costs)]
    found = [math.fsum(objective.get(name, 0.0) * value for name, value in point.items()) for _, point in points]

    def is_cost_of(own: Costs, between: Matrices) -> bool:
        return all(
            same(cost, chain_cost(own, between, picked)) for cost, (picked, _) in zip(found, points, strict=True)
        )

    if is_cost_of(costs, resharding):
        return
    if is_cost_of(costs, free):
        raise Wrong(
            say(
                en="Your objective leaves resharding out: the e, too, have a cost, resharding[v][k][j].",
                fr="Votre objectif oublie le changement de découpe : les e ont aussi un coût, resharding[v][k][j].",
            )
        )
    if is_cost_of(nothing, resharding):
        raise Wrong(
            say(
                en="Your objective counts resharding alone: the s, too, have a cost, costs[v][k].",
                fr="Votre objectif ne compte que le changement de découpe : les s ont aussi un coût, costs[v][k].",
            )
        )
    at = next(
        index
        for index, (cost, (picked, _)) in enumerate(zip(found, points, strict=True))
        if not same(cost, chain_cost(costs, resharding, picked))
    )
    right = written(chain_cost(costs, resharding, points[at][0]))
    raise Wrong(
        say(
            en=f"If the layers take the strategies {list(points[at][0])}, they cost {right}, but your objective says "
            f"{written(found[at])}.",
            fr=f"Si les couches prennent les stratégies {list(points[at][0])}, elles coûtent {right}, mais votre "
            f"objectif donne {written(found[at])}.",
        )
    )


def _check_optimum(made: Programme, costs: Costs, resharding: Matrices) -> None:
    """Nothing may be cheaper than the cheapest choice."""
    right = min(chain_cost(costs, resharding, picked) for picked in _choices(costs))
    found = solve(*made)
    if found is None:
        raise AssertionError("every choice satisfies every equation")
    if found.cost > right - 1e-6 * abs(right):
        return
    values = {name: found.values.get(name, 0.0) for name in _names(costs)}
    for v, some in enumerate(costs):
        taken = [k for k in range(len(some)) if values["s", v, k] > 0.5]
        if len(taken) != 1:
            raise Wrong(
                say(
                    en=f"Your programme finds {written(found.cost)}, less than any choice costs ({written(right)}): "
                    f"layer {v} takes {len(taken)} strategies. Demand that its s add up to 1.",
                    fr=f"Votre programme trouve {written(found.cost)}, moins que ne coûte aucun choix "
                    f"({written(right)}) : la couche {v} prend {len(taken)} stratégie(s). Exigez que la somme de ses s "
                    "soit 1.",
                )
            )
    for v, (here, there) in enumerate(itertools.pairwise(costs)):
        for end, layer, own in (("maker", v, here), ("reader", v + 1, there)):
            for k in range(len(own)):
                pairs = [
                    ("e", v, k, j) if end == "maker" else ("e", v, j, k)
                    for j in range(len(there if end == "maker" else here))
                ]
                total = math.fsum(values[pair] for pair in pairs)
                if not same(total, values["s", layer, k], 1e-4):
                    raise Wrong(_untied(v, layer, k, total, values["s", layer, k], found.cost, right))
    raise Wrong(
        say(
            en=f"Your programme finds {written(found.cost)}, less than any choice costs ({written(right)}).",
            fr=f"Votre programme trouve {written(found.cost)}, moins que ne coûte aucun choix ({written(right)}).",
        )
    )


def _untied(v: int, layer: int, k: int, total: float, chosen: float, cost: float, right: float) -> str:
    side_en = "over the strategies of the next layer" if layer == v else "over those of the layer before"
    side_fr = "sur les stratégies de la couche suivante" if layer == v else "sur celles de la couche précédente"
    return say(
        en=f"Your programme finds {written(cost)}, less than any choice costs ({written(right)}): s[{layer},{k}] is "
        f"{written(chosen)}, but the e[{v}] that go with it, added {side_en}, are {written(total)}. One equation per "
        "strategy must tie the two.",
        fr=f"Votre programme trouve {written(cost)}, moins que ne coûte aucun choix ({written(right)}) : "
        f"s[{layer},{k}] vaut {written(chosen)}, mais les e[{v}] qui s’y rapportent, sommés {side_fr}, valent "
        f"{written(total)}. Une équation par stratégie doit lier les deux.",
    )


PROGRAMME = Exercise(
    id="sharding-programme",
    title=Said("the choice of strategies as a linear programme", "le choix des stratégies en programme linéaire"),
    judge=_judge,
    praise=Said(
        "Right: every choice is allowed at its true cost, and nothing cheaper is. That is Alpa's inner level.",
        "Exact : chaque choix est permis, à son vrai coût, et rien de moins cher ne l’est. C’est le niveau interne "
        "d’Alpa.",
    ),
    hints=(
        Said(
            "Three kinds of equations. Each layer takes one strategy; and for each strategy k of layer v, the pairs "
            "e[v, k, …] are as many as s[v, k]. What is the third?",
            "Trois sortes d’équations. Chaque couche prend une stratégie ; et pour chaque stratégie k de la couche v, "
            "il y a autant de paires e[v, k, …] que vaut s[v, k]. Quelle est la troisième ?",
        ),
        Said(
            "Σ_k s[v, k] = 1; Σ_j e[v, k, j] − s[v, k] = 0 for each k; Σ_k e[v, k, j] − s[v + 1, j] = 0 for each j. "
            "The objective has costs[v][k] for s[v, k], resharding[v][k][j] for e[v, k, j].",
            "Σ_k s[v, k] = 1 ; Σ_j e[v, k, j] − s[v, k] = 0 pour chaque k ; Σ_k e[v, k, j] − s[v + 1, j] = 0 pour "
            "chaque j. L’objectif donne costs[v][k] à s[v, k] et resharding[v][k][j] à e[v, k, j].",
        ),
    ),
)
