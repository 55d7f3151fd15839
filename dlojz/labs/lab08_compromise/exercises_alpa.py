"""Exercises of lab 08 on Alpa: stages by dynamic programming, shardings by an integer linear programme.

The references are `dlojz.planner.alpa`'s two levels. A programme is judged by what it allows and what it costs: every
choice of one strategy per layer must be a solution, at its true cost, and nothing cheaper may be.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dlojz.base.language import shortest, significant
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts
from dlojz.labs.kit.judges import Case, refuse_nothing, shown
from dlojz.planner.alpa.graph import ELEMENT_BYTES
from dlojz.planner.alpa.inter_operator import PipelinePlan, StageOption, pipeline
from dlojz.planner.alpa.mesh import DeviceMesh, ShardingSpec, resharding_cost

TEXTS = Texts(__file__)

TimeOf = Callable[[int, int, int], float]
"""Seconds of a stage for one micro-batch: first layer, last layer (included), GPUs."""


class StageTimes:
    """Times of stages, from the work of their layers and the efficiency of GPUs that share a stage.

    Args:
        work: of each layer, in any unit of time of one GPU.
        efficiency: of 1, 2, 4, … GPUs that share a stage.
        title: as a table shows it.
    """

    def __init__(self, work: tuple[float, ...], efficiency: tuple[float, ...], title: str = "") -> None:
        self.work, self.efficiency, self.title = work, efficiency, title

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.work)

    def __call__(self, first_layer: int, last_layer: int, gpus: int) -> float:
        """Time of a stage for one micro-batch."""
        return sum(self.work[first_layer : last_layer + 1]) / (gpus * self.efficiency[gpus.bit_length() - 1])

    def __repr__(self) -> str:
        return self.title or f"Stages({self.work}, {self.efficiency})"


EIGHT, FALLING = (1.0,) * 8, (1.0, 0.9, 0.75)
KNOWN: dict[str, tuple[StageTimes, int, int]] = {
    "A": (StageTimes(EIGHT, (1.0, 1.0, 1.0), "A"), 4, 8),
    "B": (StageTimes(EIGHT, FALLING, "B"), 4, 8),
    "C": (StageTimes(EIGHT, FALLING, "C"), 4, 1),
    "D": (StageTimes(EIGHT, FALLING, "D"), 4, 64),
    "E": (StageTimes((4.0, 1.0, 1.0, 1.0, 1.0), FALLING, "E"), 4, 16),
    "F": (StageTimes((1.0, 1.0, 1.0, 1.0, 4.0), (1.0, 0.9, 0.8, 0.6), "F"), 8, 32),
}
"""Times, GPUs and micro-batches; their optima (tests/plan) were found by trying every plan."""


def plan_of(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> PipelinePlan:
    """Make the package's plan."""
    return pipeline(
        lambda first_layer, last_layer, shape: (StageOption(time_of(first_layer, last_layer, shape.num_devices)),),
        layers,
        micro_batches,
        1,
        gpus,
    )


def shortest_step(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> tuple[float]:
    """Return the least Σ t + (B − 1) · max t over all plans that use every layer once, in order, and all GPUs.

    Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equations 2 to 5.
    """
    return (plan_of(time_of, layers, gpus, micro_batches).step_s,)


def _greedy(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> float:
    """The best number of equal stages: so many layers, so many GPUs each."""
    step_times = []
    for count in range(1, min(layers, gpus) + 1):
        if layers % count == 0 and gpus % count == 0 and (gpus // count).bit_count() == 1:
            stage_layers = layers // count
            times = [
                time_of(first_layer, first_layer + stage_layers - 1, gpus // count)
                for first_layer in range(0, layers, stage_layers)
            ]
            step_times.append(sum(times) + (micro_batches - 1) * max(times))
    return min(step_times)


def _cases() -> Iterator[Case]:
    for time_of, gpus, micro_batches in KNOWN.values():
        yield time_of, time_of.layers, gpus, micro_batches
    dice = random.Random(11)
    for layers, gpus, micro_batches in ((4, 4, 3), (6, 8, 10), (5, 2, 7), (2, 8, 5)):
        work = tuple(float(dice.randrange(1, 9)) for _ in range(layers))
        # Four GPUs take longer than two: a plan of few layers would rather spare some.
        yield StageTimes(work, (1.0, 0.85, 0.35, 0.15)), layers, gpus, micro_batches


def _told(case: Case) -> Said:
    time_of, layers, gpus, micro_batches = case
    name = f"{time_of} " if time_of.title else ""
    return TEXTS.sentence(
        "pipeline-stages",
        "the case",
        name=name,
        layers=layers,
        work=list(time_of.work),
        gpus=gpus,
        efficiency=list(time_of.efficiency),
        micro_batches=micro_batches,
    )


def _powers(gpus: int) -> Iterable[int]:
    return [2**power for power in range(gpus.bit_length())]


def _plans(
    total: Callable[[float, float, int], float], sizes: Callable[[int], Iterable[int]] = _powers, *, spare: bool = False
) -> Callable[..., float]:
    """The least of another total (of sum, maximum, micro-batches) over every plan, or in a wrong space of plans.

    Plans that another one beats in both numbers are left out.

    Args:
        total: of sum and maximum of the stages' times, and of the micro-batches.
        sizes: of the groups of GPUs that a stage may have, of those that are left.
        spare: whether GPUs may be left without work.
    """

    def found(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> float:
        @cache
        def plans(first_layer: int, remaining_gpus: int) -> frozenset[tuple[float, float]]:
            if first_layer == layers:
                # all layers are placed: a plan must use every GPU, unless `spare`
                return frozenset(() if remaining_gpus and not spare else ((0.0, 0.0),))
            candidates = {
                (t + t_sum, max(t, slowest))
                for last_layer in range(first_layer, layers)
                for size in sizes(remaining_gpus)
                if size <= remaining_gpus
                # binds t: the time is computed once for all plans of the rest
                for t in (time_of(first_layer, last_layer, size),)
                for t_sum, slowest in plans(last_layer + 1, remaining_gpus - size)
            }
            return frozenset(
                pair
                for pair in candidates
                if not any(o != pair and o[0] <= pair[0] and o[1] <= pair[1] for o in candidates)
            )

        return min(total(t_sum, slowest, micro_batches) for t_sum, slowest in plans(0, gpus))

    return found


def _unlimited(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> float:
    """The least sum whatever the slowest stage, with the shortest time of any stage besides."""
    spans = [(first_layer, last_layer) for first_layer in range(layers) for last_layer in range(first_layer, layers)]
    fastest = min(time_of(*span, size) for span in spans for size in _powers(gpus))
    return _plans(lambda t_sum, slowest, b: t_sum)(time_of, layers, gpus, 1) + (micro_batches - 1) * fastest


_STAGE_WAYS = {
    "you minimise the sum of the stages alone": _plans(lambda t_sum, slowest, b: t_sum),
    "you count B · max t": _plans(lambda t_sum, slowest, b: b * slowest),
    "one micro-batch too many": _plans(lambda t_sum, slowest, b: t_sum + b * slowest),
    "your sum ignores t_max": _unlimited,
    "your plans leave GPUs without work": _plans(lambda t_sum, slowest, b: t_sum + (b - 1) * slowest, spare=True),
    "you cut into equal stages only": _greedy,
    "you put all layers into one stage on all GPUs": lambda time_of, layers, gpus, b: b * time_of(0, layers - 1, gpus),
    "you make the micro-batches wait for one another": _plans(lambda t_sum, slowest, b: b * t_sum),
    "the micro-batches are left out": _plans(lambda t_sum, slowest, b: t_sum + slowest),
    "that is the slowest stage alone": _plans(lambda t_sum, slowest, b: slowest),
    "you give stages groups of 3 GPUs and the like": _plans(
        lambda t_sum, slowest, b: t_sum + (b - 1) * slowest, lambda gpus: range(1, gpus + 1)
    ),
    "you make a stage of each layer, on one GPU": lambda time_of, layers, gpus, b: (
        sum(time_of(i, i, 1) for i in range(layers)) + (b - 1) * max(time_of(i, i, 1) for i in range(layers))
    ),
}

STAGES = TEXTS.exercise(
    "pipeline-stages",
    shortest_step,
    cases=_cases,
    parts=(Said("the step", "la durée du pas"),),
    told=_told,
    mistakes={key: MistakeWay(way, part=0) for key, way in _STAGE_WAYS.items()},
    tolerance=1e-6,
)


Name = tuple[Any, ...]
"""('s', layer, strategy), which is 0 or 1, or ('e', layer, strategy, strategy of the next layer), from 0 to 1."""
Row = tuple[dict[Name, float], float]
"""Coefficients, and what the sum of coefficient × variable must be."""
Programme = tuple[dict[Name, float], list[Row]]
"""Objective, and equations."""


@dataclass(frozen=True)
class Solution:
    """Optimum of a programme."""

    cost: float
    values: dict[Name, float]

    def strategies(self) -> list[int]:
        """Strategy of each layer; the first of several, -1 for none."""
        layers = 1 + max((name[1] for name in self.values if name[0] == "s"), default=-1)
        # > 0.5: the solver gives whole numbers up to a tolerance
        picks = [[k for k in range(len(self.values)) if self.values.get(("s", v, k), 0.0) > 0.5] for v in range(layers)]
        return [layer_picks[0] if layer_picks else -1 for layer_picks in picks]


def solve(objective: Mapping[Name, float], equations: Sequence[tuple[Mapping[Name, float], float]]) -> Solution | None:
    """Solve a programme; None if its equations contradict each other.

    Args:
        objective: cost of each variable; 0 for those that are left out.
        equations: coefficients and value of each.

    Source: `scipy.optimize.milp` (HiGHS), which `dlojz.planner.alpa.intra_operator` uses too.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    names = sorted({*objective, *(name for row, _ in equations for name in row)}, key=str)
    columns = {name: number for number, name in enumerate(names)}
    if not names:
        return Solution(0.0, {})
    matrix = np.zeros((len(equations), len(names)))
    for number, (row, _) in enumerate(equations):
        for name, factor in row.items():
            matrix[number, columns[name]] = factor
    cost = np.array([objective.get(name, 0.0) for name in names])
    largest = float(np.abs(cost).max()) or 1.0  # the solver's tolerances are absolute
    values = np.array([value for _, value in equations])
    answer = milp(
        cost / largest,
        constraints=[LinearConstraint(matrix, values, values)] if len(equations) else [],
        # only the s must be whole: where they are, the equations leave the e no fraction
        integrality=np.array([float(name[0] == "s") for name in names]),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if answer.x is None:
        return None
    return Solution(float(cost @ answer.x), dict(zip(names, answer.x.tolist(), strict=True)))


def told(row: Mapping[Name, float]) -> str:
    """Write the left side of an equation."""
    parts = []
    for (kind, *indices), factor in row.items():
        sign = "− " if factor < 0 else "+ "
        times = "" if abs(factor) == 1 else f"{shortest(abs(factor))}·"
        parts.append(f"{sign}{times}{kind}[{','.join(map(str, indices))}]")
    return " ".join(parts).removeprefix("+ ") or "0"


@dataclass(frozen=True)
class Chain:
    """Chain of layers, each of which takes one of several strategies.

    Attributes:
        costs: of each layer, the communication of each strategy.
        resharding: between each layer and the next, what every pair of strategies costs.
    """

    strategies: tuple[str, ...]
    costs: list[list[float]]
    resharding: list[list[list[float]]]


def perceptron(batch: int, width: int, layers: int, mesh: DeviceMesh) -> Chain:
    """Price a multi-layer perceptron as a chain: forward, backward and the gradients of its weights.

    A layer is split by columns (its outputs), by rows (its inputs), or along the batch. By columns it reads the whole
    input, and its input's gradient is all-reduced, except the first layer's, which nobody needs; by rows its output is
    all-reduced; along the batch its weights' gradients are.

    Args:
        batch: samples of a micro-batch.
        width: of every layer, in and out.
        layers: at least 1.
        mesh: the devices; axis 1 is used.

    Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.1; Shoeybi et al. 2019 (arXiv 1909.08053), §3, for the two splits.
    """
    message, matrix = batch * width * ELEMENT_BYTES, width * width * ELEMENT_BYTES
    reads = [ShardingSpec.named(name) for name in ("RR", "RS1", "S1R")]
    makes = [ShardingSpec.named(name) for name in ("RS1", "RR", "S1R")]
    activation, weights = mesh.all_reduce(message, (1,)), mesh.all_reduce(matrix, (1,))
    bias = mesh.all_reduce(width * ELEMENT_BYTES, (1,))
    costs = [[activation if layer else 0.0, activation, weights + bias] for layer in range(layers)]
    # Forward from what one makes to what the next reads; backward the gradient, the other way.
    between = [
        [
            resharding_cost(source, target, message, mesh) + resharding_cost(target, source, message, mesh)
            for target in reads
        ]
        for source in makes
    ]
    return Chain(("column", "row", "batch"), costs, [between for _ in range(layers - 1)])


Costs = list[list[float]]
Matrices = list[list[list[float]]]


def _same(number: float, reference: float, tolerance: float = 1e-6) -> bool:
    return math.isclose(number, reference, rel_tol=tolerance, abs_tol=1e-12)


def chain_cost(costs: Costs, resharding: Matrices, picked: Sequence[int]) -> float:
    """Sum the costs of one strategy per layer."""
    return math.fsum(costs[v][k] for v, k in enumerate(picked)) + math.fsum(
        matrix[picked[v]][picked[v + 1]] for v, matrix in enumerate(resharding)
    )


def _chains() -> Iterator[tuple[Costs, Matrices]]:
    """Chains on which resharding decides: alone, each layer would choose otherwise."""
    dice = random.Random(6)
    for sizes in ((2, 2), (2, 3, 2), (3, 2, 3, 3), (2, 4, 3)):
        costs = [[float(dice.randrange(1, 20)) for _ in range(size)] for size in sizes]
        resharding = [
            [[float(dice.randrange(5, 60)) for _ in range(next_size)] for _ in range(size)]
            for size, next_size in itertools.pairwise(sizes)
        ]
        yield costs, resharding


def _check_programme(answer: Callable[..., Any], costs: Costs, resharding: Matrices) -> None:
    programme = _read(
        answer([list(layer_costs) for layer_costs in costs], [[list(row) for row in matrix] for matrix in resharding]),
        costs,
    )
    _check_rows(programme[1], costs)
    _check_objective(programme[0], costs, resharding)
    _check_optimum(programme, costs, resharding)


def _names(costs: Costs) -> set[Name]:
    strategy_names = {("s", v, k) for v, layer_costs in enumerate(costs) for k in range(len(layer_costs))}
    return strategy_names | {
        ("e", v, k, j)
        for v, (layer_costs, next_costs) in enumerate(itertools.pairwise(costs))
        for k in range(len(layer_costs))
        for j in range(len(next_costs))
    }  # fmt: skip


def _read(answer: Any, costs: Costs) -> Programme:
    """The student's programme, or a sentence about its form."""
    refuse_nothing(answer)
    if not (isinstance(answer, tuple | list) and len(answer) == 2 and isinstance(answer[0], Mapping)):
        raise TEXTS.wrong("sharding-programme", "no objective and equations", answer=shown(answer))
    legal, equations = _names(costs), []
    for row in answer[1]:
        if not (isinstance(row, tuple | list) and len(row) == 2 and isinstance(row[0], Mapping)):
            raise TEXTS.wrong("sharding-programme", "no equation", row=shown(row))
        equations.append(({name: float(value) for name, value in row[0].items()}, float(row[1])))
    for name in itertools.chain(answer[0], *(row[0] for row in equations)):
        if name not in legal:
            raise TEXTS.wrong(
                "sharding-programme",
                "no such variable",
                name=shown(name),
                costs_count=len(costs),
                strategies=[len(layer) for layer in costs],
            )
    return {name: float(value) for name, value in answer[0].items()}, equations


def _point(costs: Costs, picked: Sequence[int]) -> dict[Name, float]:
    """The variables of one choice."""
    chosen: set[Name] = {("s", v, k) for v, k in enumerate(picked)}
    chosen |= {("e", v, k, j) for v, (k, j) in enumerate(itertools.pairwise(picked))}
    return {name: float(name in chosen) for name in _names(costs)}


def _choices(costs: Costs) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(layer_costs)) for layer_costs in costs))


def _check_rows(equations: Sequence[Row], costs: Costs) -> None:
    """Every choice of one strategy per layer must satisfy every equation."""
    for picked in _choices(costs):
        point = _point(costs, picked)
        for row, value in equations:
            total = math.fsum(factor * point[name] for name, factor in row.items())
            if not _same(total, value):
                raise TEXTS.wrong(
                    "sharding-programme",
                    "a legal choice is forbidden",
                    picked=list(picked),
                    row=told(row),
                    total=significant(total, 5),
                    value=significant(value, 5),
                )


def _check_objective(objective: Mapping[Name, float], costs: Costs, resharding: Matrices) -> None:
    """Every choice must cost what it costs."""
    nothing: Costs = [[0.0] * len(layer_costs) for layer_costs in costs]
    free: Matrices = [[[0.0] * len(row) for row in matrix] for matrix in resharding]
    points = [(picked, _point(costs, picked)) for picked in _choices(costs)]
    totals = [math.fsum(objective.get(name, 0.0) * value for name, value in point.items()) for _, point in points]

    def is_cost_of(layer_costs: Costs, between: Matrices) -> bool:
        return all(
            _same(cost, chain_cost(layer_costs, between, picked))
            for cost, (picked, _) in zip(totals, points, strict=True)
        )

    if is_cost_of(costs, resharding):
        return
    if is_cost_of(costs, free):
        raise TEXTS.wrong("sharding-programme", "your objective leaves resharding out")
    if is_cost_of(nothing, resharding):
        raise TEXTS.wrong("sharding-programme", "your objective counts resharding alone")
    wrong_index = next(
        index
        for index, (cost, (picked, _)) in enumerate(zip(totals, points, strict=True))
        if not _same(cost, chain_cost(costs, resharding, picked))
    )
    right = significant(chain_cost(costs, resharding, points[wrong_index][0]), 5)
    raise TEXTS.wrong(
        "sharding-programme",
        "another objective",
        points=list(points[wrong_index][0]),
        right=right,
        totals=significant(totals[wrong_index], 5),
    )


def _check_optimum(programme: Programme, costs: Costs, resharding: Matrices) -> None:
    """Nothing may be cheaper than the cheapest choice."""
    right = min(chain_cost(costs, resharding, picked) for picked in _choices(costs))
    optimum = solve(*programme)
    if optimum is None:
        raise AssertionError("every choice satisfies every equation")
    if optimum.cost > right - 1e-6 * abs(right):
        return
    # a variable that the programme does not name is 0 in its solution
    explanation = _slack({name: optimum.values.get(name, 0.0) for name in _names(costs)}, costs)
    cheaper, cheapest = significant(optimum.cost, 5), significant(right, 5)
    raise TEXTS.wrong(
        "sharding-programme", "less than any choice costs", cheaper=cheaper, cheapest=cheapest, explanation=explanation
    )


def _slack(values: Mapping[Name, float], costs: Costs) -> Said:
    """Which equation is missing, from a solution that is no choice."""
    for v, layer_costs in enumerate(costs):
        strategy_count = sum(values["s", v, k] > 0.5 for k in range(len(layer_costs)))
        if strategy_count != 1:
            return Said(
                f": layer {v} takes {strategy_count} strategies. Demand that its s add up to 1",
                f" : la couche {v} prend {strategy_count} stratégie(s). Exigez que la somme de ses s soit 1",
            )
    for v, (front_costs, back_costs) in enumerate(itertools.pairwise(costs)):
        for layer, strategy_costs, partner_costs in ((v, front_costs, back_costs), (v + 1, back_costs, front_costs)):
            for k in range(len(strategy_costs)):
                # strategy k of layer v is row k of e[v]; of layer v + 1 it is column k
                pairs = [("e", v, k, j) if layer == v else ("e", v, j, k) for j in range(len(partner_costs))]
                total = math.fsum(values[pair] for pair in pairs)
                if not _same(total, values["s", layer, k], 1e-4):
                    return _untied(v, layer, k, significant(total, 5), significant(values["s", layer, k], 5))
    return Said("", "")


def _untied(v: int, layer: int, k: int, total: str, chosen: str) -> Said:
    side_en = "over the strategies of the next layer" if layer == v else "over those of the layer before"
    side_fr = "sur les stratégies de la couche suivante" if layer == v else "sur celles de la couche précédente"
    return Said(
        f": s[{layer},{k}] is {chosen}, but the e[{v}] that go with it, added {side_en}, are {total}. One equation per "
        "strategy must tie the two",
        f" : s[{layer},{k}] vaut {chosen}, mais les e[{v}] qui s’y rapportent, sommés {side_fr}, valent {total}. Une "
        "équation par stratégie doit lier les deux",
    )


PROGRAMME = TEXTS.exercise("sharding-programme", cases=_chains, trial=_check_programme)
