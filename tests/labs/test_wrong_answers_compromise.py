"""The bank of wrong answers of lab 08, each with the words that it must be told.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import dlojz
from dlojz.hardware import cluster
from dlojz.labs import lab08_compromise as lab
from dlojz.labs.kit.exercise import Challenge, judge
from dlojz.labs.lab08_compromise.compromise_tables import bloom_layouts
from dlojz.labs.lab08_compromise.exercises_alpa import KNOWN, chain_cost, perceptron, shortest_step, solve
from dlojz.labs.lab08_compromise.exercises_layouts import (
    FEWEST_GPUS,
    best_split,
    choose,
    compare_rounds,
    rank_bytes,
    shares_of_peak,
)
from dlojz.planner.alpa.graph import mlp
from dlojz.planner.alpa.intra_operator import shard
from dlojz.planner.alpa.mesh import DeviceMesh
from tests.labs import student_answers_compromise as student
from tests.labs.answers import programme
from tests.labs.bank import Answer, BankTests

EXERCISES = {one.id: one for one in lab.EXERCISES if not isinstance(one, Challenge)}


def held(
    *,
    sharded: tuple[int, int, int] = (3, 2, 1),
    sizes: tuple[int, int, int] = (2, 4, 12),
    tp: bool = True,
    flight: Callable[[Any, int], float] = lambda one, stage: min(one.pp - stage, one.micro_batches),
) -> Answer:
    def answer(layout: Any, stage: int, parameters: float, micro_batch_bytes: float) -> list[float]:
        own = parameters / layout.tp if tp else parameters
        states = []
        for size, least in zip(sizes, sharded, strict=True):
            states.append(size * own / layout.dp if layout.zero >= least else size * own)
        return [*states, flight(layout, stage) * micro_batch_bytes]

    return answer


def split(
    *,
    bubble: Answer = lambda pp, dp, m, work: (pp - 1) * work / pp,
    message: Answer = lambda pp, parameters: 2 * parameters / pp,
    chunk: Answer = lambda dp: dp,
    rounds: int = 2,
    fits: bool = True,
    key: Answer = lambda one: one[1] + one[2],
    first: Answer = lambda pp, dp: pp,
) -> Answer:
    def answer(gpus: int, m: int, work: float, parameters: float, capacity: float, alpha: float, beta: float) -> Any:
        best: Any = None
        for pp in range(1, gpus + 1):
            dp = gpus // pp
            if gpus % pp or m % dp or (fits and 16 * parameters / pp > capacity):
                continue
            reduce = rounds * (dp - 1) * (alpha + beta * message(pp, parameters) / chunk(dp))
            one = (first(pp, dp), bubble(pp, dp, m, work), reduce)
            if best is None or key(one) < key(best):
                best = one
        return best

    return answer


def choosing(
    *,
    gpus_used: bool = True,
    heads_whole: bool = True,
    fits: bool = True,
    key: Answer = lambda one: -one.dp * one.micro_batch * one.micro_batches / one.step_s,
) -> Answer:
    def answer(layouts: Any, gpus: int, heads: int, capacity_bytes: float) -> Any:
        able = []
        for one in layouts:
            used = one.dp * one.tp * one.pp == gpus or not gpus_used
            if used and (heads % one.tp == 0 or not heads_whole) and (one.memory_bytes <= capacity_bytes or not fits):
                able.append(one)
        return sorted(able, key=key)[0]

    return answer


def linear(
    *,
    one_each: bool = True,
    at_most: float = 1.0,
    makers: bool = True,
    readers: bool = True,
    own: bool = True,
    between: bool = True,
    swapped: bool = False,
    pairs: bool = False,
    shift: int = 0,
) -> Answer:
    def answer(costs: Any, resharding: Any) -> Any:
        objective: dict[Any, float] = {}
        rows: list[Any] = []
        for v in range(len(costs)):
            some = range(len(costs[v]))
            for k in some:
                objective["s", v, k + shift] = costs[v][k] if own else 0
            if one_each:
                rows.append(({("s", v, k + shift): 1 for k in some}, at_most))
        for v in range(len(resharding)):
            here, there = range(len(costs[v])), range(len(costs[v + 1]))
            for k, j in itertools.product(here, there):
                right = resharding[v][k][j]
                other = resharding[v][min(j, len(here) - 1)][min(k, len(there) - 1)]
                objective["e", v, k, j] = (other if swapped else right) if between else 0
            if pairs:
                rows.append(({("e", v, k, j): 1 for k in here for j in there}, 1))
            if makers:
                for k in here:
                    rows.append(({("s", v, k): -1, **{("e", v, k, j): 1 for j in there}}, 0))
            if readers:
                for j in there:
                    rows.append(({("s", v + 1, j): -1, **{("e", v, k, j): 1 for k in here}}, 0))
        return objective, rows

    return answer


def stages(
    *,
    total: Answer = lambda added, t_max, b: added + (b - 1) * t_max,
    limited: bool = True,
    spare: bool = False,
) -> Answer:
    def answer(time_of: Answer, layers: int, gpus: int, micro_batches: int) -> float:
        sizes = [n for n in (1, 2, 4, 8) if n <= gpus]

        def least(t_max: float) -> float:
            @cache
            def rest(first: int, left: int) -> float:
                if first == layers:
                    return 0.0 if left == 0 or spare else math.inf
                best = math.inf
                for last in range(first, layers):
                    for n in sizes:
                        if n <= left and (time_of(first, last, n) <= t_max or not limited):
                            best = min(best, time_of(first, last, n) + rest(last + 1, left - n))
                return best

            return rest(0, gpus)

        times = {time_of(i, j, n) for i in range(layers) for j in range(i, layers) for n in sizes}
        return min(total(least(t), t, micro_batches) for t in times)

    return answer


def equal_stages(time_of: Answer, layers: int, gpus: int, micro_batches: int) -> float:
    best = math.inf
    for count in (1, 2, 4, 8):
        if count <= min(layers, gpus) and layers % count == 0 and gpus % count == 0:
            size = layers // count
            times = [time_of(i * size, (i + 1) * size - 1, gpus // count) for i in range(count)]
            best = min(best, sum(times) + (micro_batches - 1) * max(times))
    return best


def shares(
    *,
    model: Callable[[bool], float] = lambda again: 6,
    hardware: Callable[[bool], float] = lambda again: 8 if again else 6,
    gpus: Callable[[int], int] = lambda n: n,
) -> Answer:
    def answer(parameters: float, tokens_per_s: float, n: int, peak: float, again: bool) -> tuple[float, float]:
        share = parameters * tokens_per_s / peak / gpus(n)
        return model(again) * share, hardware(again) * share

    return answer


def rounds(
    ratio: Answer = lambda a, b: float(np.median(np.array(b) / np.array(a))),
    *,
    sides: int = 2,
    ties: bool = False,
    exactly: bool = False,
    most: float = 1.0,
) -> Answer:
    def answer(first_s: Any, second_s: Any) -> tuple[float, float]:
        ahead = sum(a < b for a, b in zip(first_s, second_s, strict=True))
        behind = sum(a > b for a, b in zip(first_s, second_s, strict=True))
        n = len(first_s) if ties else ahead + behind
        wins = max(ahead, behind)
        heads = [wins] if exactly else range(wins, n + 1)
        return ratio(first_s, second_s), min(most, sides * sum(math.comb(n, k) for k in heads) / 2**n)

    return answer


REFERENCES: dict[str, Answer] = {
    "rank-bytes": rank_bytes,
    "best-split": best_split,
    "choose-layout": choose,
    "sharding-programme": programme,
    "pipeline-stages": shortest_step,
    "paired-rounds": compare_rounds,
    "shares-of-peak": shares_of_peak,
}

OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("rank-bytes", held()),
    ("rank-bytes", lambda *asked: np.array(held()(*asked))),
    ("best-split", split()),
    ("sharding-programme", linear()),
    ("sharding-programme", linear(pairs=True)),
    ("pipeline-stages", stages()),
    ("shares-of-peak", lambda *asked: np.array(shares()(*asked))),
    ("shares-of-peak", lambda p, t, n, peak, again: [p * t / n / peak * k for k in (6, 6 + 2 * again)]),
    (
        "shares-of-peak",
        lambda p, t, n, peak, again: torch.tensor([6.0, 6.0 + 2 * again]).double() * p * t / n / peak,
    ),
]

BANK: dict[str, list[tuple[Answer, str]]] = {
    "rank-bytes": [
        (held(tp=False), "Your weights are those of a whole stage"),
        (held(sharded=(9, 2, 1)), "You never shard the weights"),
        (held(sharded=(1, 1, 1)), "You shard the weights from ZeRO-1 on"),
        (held(sharded=(3, 0, 0)), "You shard the gradients over the replicas in every case"),
        (held(sharded=(3, 1, 1)), "You shard the gradients from ZeRO-1 on"),
        (held(sharded=(3, 2, 2)), "You shard the optimizer from ZeRO-2 on"),
        (held(sizes=(2, 2, 12)), "You count 2 bytes per parameter for the gradients"),
        (held(sizes=(2, 4, 8)), "You count 8 bytes per parameter for the optimizer"),
        (held(flight=lambda one, stage: one.micro_batches), "as GPipe does"),
        (held(flight=lambda one, stage: min(one.pp, one.micro_batches)), "as much as the first"),
        (held(flight=lambda one, stage: min(stage + 1, one.micro_batches)), "from the wrong end"),
        (held(flight=lambda one, stage: min(one.pp - 1 - stage, one.micro_batches)), "One micro-batch too few"),
        (held(flight=lambda one, stage: one.pp - stage), "cannot keep more than it has"),
        (held(flight=lambda one, stage: 1), "a single micro-batch"),
        (lambda *asked: held()(*asked)[::-1], "but in another order"),
        (lambda *asked: sum(held()(*asked)), "4 numbers, weights, gradients, optimizer, activations"),
        (lambda *asked: [1.01 * one for one in held()(*asked)], "Weights: in every case your result is 1% too large"),
        (lambda *asked: None, "returns nothing"),
    ],
    "best-split": [
        (split(fits=False), "seconds alone"),
        (split(key=lambda one: one[2]), "pp should be 1, but your function gives 16"),
        (split(key=lambda one: one[1]), "the shortest pipeline that fits always wins"),
        (split(message=lambda pp, parameters: 2 * parameters), "gradients of the whole model"),
        (split(message=lambda pp, parameters: parameters / pp), "a gradient in bf16 has 2 bytes"),
        (split(bubble=lambda pp, dp, m, work: (pp - 1) * work), "pp times too long"),
        (split(bubble=lambda pp, dp, m, work: (pp - 1) / m * (m / dp * work / pp)), "micro-batches of the whole step"),
        (split(chunk=lambda dp: 1), "you send all of it 2 (dp − 1) times"),
        (split(rounds=1), "goes round once"),
        (split(first=lambda pp, dp: dp), "You return dp"),
        (lambda *asked: split()(*asked)[0], "3 numbers, pp"),
        (lambda *asked: (1, *split()(*asked)[1:]), "Pp: your function returns 1 in every case"),
    ],
    "choose-layout": [
        (choosing(key=lambda one: one.step_s), "You compare steps"),
        (choosing(key=lambda one: one.memory_bytes), "the most memory to spare"),
        (choosing(key=lambda one: one.dp * one.micro_batch * one.micro_batches / one.step_s), "the slowest of those"),
        (choosing(gpus_used=False), "dp · tp · pp must use them all"),
        (choosing(heads_whole=False), "does not divide the 64 attention heads"),
        (choosing(fits=False), "Drop what does not fit"),
        (choosing(key=lambda one: one.tp), "can run too"),
        (lambda layouts, *rest: layouts.index(choosing()(layouts, *rest)), "Return one of the layouts"),
        (lambda *asked: None, "returns nothing"),
    ],
    "sharding-programme": [
        (linear(own=False), "counts resharding alone"),
        (linear(between=False), "leaves resharding out"),
        (linear(swapped=True), "but your objective says"),
        (linear(one_each=False), "takes 0 strategies"),
        (linear(at_most=2.0), "An equation forbids a legal choice"),
        (linear(makers=False), "added over the strategies of the next layer"),
        (linear(readers=False), "added over those of the layer before"),
        (linear(makers=False, readers=False), "must tie the two"),
        (linear(makers=False, readers=False, pairs=True), "must tie the two"),
        (linear(shift=1), "There is no variable ('s', 0, 2)"),
        (lambda costs, resharding: linear()(costs, resharding)[0], "Return the objective"),
        (lambda costs, resharding: (linear()(costs, resharding)[0], [[1, 2, 3]]), "An equation is a pair"),
    ],
    "pipeline-stages": [
        (stages(total=lambda added, t_max, b: added), "the sum of the stages alone"),
        (stages(total=lambda added, t_max, b: b * t_max if added < math.inf else math.inf), "You count B · max t"),
        (stages(total=lambda added, t_max, b: added + b * t_max), "One micro-batch too many"),
        (stages(limited=False), "ignores t_max"),
        (stages(spare=True), "leave GPUs without work"),
        (equal_stages, "equal stages only"),
        (lambda time_of, layers, gpus, b: b * time_of(0, layers - 1, gpus), "all layers into one stage"),
        (lambda *asked: 1.001 * stages()(*asked), "in every case your result is 0.1% too large"),
        (lambda *asked: math.inf, "a minimum over nothing"),
    ],
    "paired-rounds": [
        (rounds(lambda a, b: statistics.median(x / y for x, y in zip(a, b, strict=True))), "the other way round"),
        (rounds(lambda a, b: statistics.median(b) / statistics.median(a)), "Your ratio of medians"),
        (rounds(lambda a, b: sum(b) / sum(a)), "Your ratio of means"),
        (rounds(lambda a, b: min(b) / min(a)), "Your ratio of the best times"),
        (rounds(lambda a, b: float(np.mean(np.array(b) / np.array(a)))), "You take the mean of the ratios"),
        (rounds(sides=1), "one-sided"),
        (rounds(ties=True), "You count ties"),
        (rounds(exactly=True), "exactly so many wins"),
        (rounds(most=9.0), "A probability is at most 1"),
        (lambda a, b: (rounds()(a, b)[0], 1 - rounds()(a, b)[1]), "1 − p"),
        (lambda a, b: rounds()(a, b)[1], "2 numbers, the ratio, p"),
    ],
    "shares-of-peak": [
        (shares(model=lambda again: 8 if again else 6), "Your MFU counts recomputation"),
        (shares(model=lambda again: 8), "Your MFU takes 8 operations"),
        (shares(model=lambda again: 2), "You count the forward alone"),
        (shares(model=lambda again: 4), "You count the backward alone"),
        (shares(gpus=lambda n: 1), "You divide by the peak of one GPU"),
        (shares(model=lambda again: 600), "in per cent"),
        (shares(hardware=lambda again: 6), "Your HFU leaves recomputation out"),
        (shares(hardware=lambda again: 8), "Your HFU always takes 8"),
        (shares(hardware=lambda again: 12 if again else 6), "8, not 12"),
        (lambda *asked: shares()(*asked)[::-1], "in another order"),
        (lambda *asked: shares()(*asked)[0], "2 numbers, the MFU, the HFU"),
    ],
}


WRONG = {name: [*answers, *student.WRONG[name]] for name, answers in BANK.items()}


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right = WRONG, REFERENCES
    others = (*OTHER_RIGHT_ANSWERS, *student.RIGHT)


def test_the_bytes_by_hand_are_those_of_the_planner() -> None:
    plan = dlojz.plan("gpt3-175b", "jean_zay_a100", gpus=384, batch=1536, engines="megatron-core", simulate=1)
    chosen = plan.choose(dp=8, tp=4, pp=12, zero=1, schedule="1f1b", chunks=1)
    for rank in chosen.ranks:
        parameters = rank.parts["weights"] / 2 * chosen.candidate.tp
        kept = rank.parts["activations"] / rank.in_flight
        found = rank_bytes(chosen.candidate, rank.stage, parameters, kept)
        names = ("weights", "gradients", "optimizer", "activations")
        assert found == pytest.approx([rank.parts[name] for name in names], rel=1e-12)


@pytest.mark.parametrize("batch", [32, 200, 1024])
def test_the_chain_of_a_perceptron_costs_what_its_graph_of_operators_does(batch: int) -> None:
    mesh = DeviceMesh((1, 4))
    chain = perceptron(batch, 256, 6, mesh)
    found = solve(*programme(chain.costs, chain.resharding))
    assert found is not None
    assert found.cost == pytest.approx(shard(mlp(batch, 256, 6), mesh).cost, rel=1e-12)
    assert chain_cost(chain.costs, chain.resharding, found.strategies()) == pytest.approx(found.cost, rel=1e-12)
    if batch == 32:
        assert found.cost == pytest.approx(245_765.05, rel=1e-9)  # Alpa, test_mlp.py


def test_blooms_layout_is_the_fastest_of_those_measured_for_it_that_fit() -> None:
    layouts, capacity = bloom_layouts(), cluster("jean_zay_a100").gpu.memory_bytes
    found = choose(layouts, 384, 64, capacity)
    assert (found.dp, found.tp, found.pp, found.micro_batch) == (8, 4, 12, 2)
    assert sum(one.memory_bytes > capacity for one in layouts) == 3  # those that ran out of memory


def test_the_known_answers_of_the_dynamic_programme() -> None:
    """Found by trying every plan."""
    found = {
        name: shortest_step(stages, stages.layers, gpus, batches)[0] for name, (stages, gpus, batches) in KNOWN.items()
    }
    expected = {"A": 16.0, "B": 20.0, "C": 8 / 3, "D": 134.0, "E": 340 / 9, "F": 41.25}
    assert found == pytest.approx(expected, rel=1e-9)


def planned(days: float, *, nodes: tuple[int, ...]) -> dict[str, Any]:
    """The fastest layout of the first number of nodes that is in time."""
    for count in nodes:
        asked = dlojz.plan("megatron-18b", "jean_zay_a100", 8 * count, 512, engines="megatron-core", simulate=1)
        best = asked.choose()
        if best.estimated_s * 100e9 / (512 * 2048) <= days * 86_400:
            return {name: getattr(best.candidate, name) for name in FIELDS}
    raise AssertionError(days)


FIELDS = ("dp", "tp", "pp", "zero", "micro_batch", "checkpointing")
SLOW = {"dp": 8, "tp": 1, "pp": 4, "zero": 1, "micro_batch": 1, "checkpointing": "none"}
CHALLENGERS: list[tuple[Answer, str, str]] = [
    (lambda days: planned(days, nodes={45.0: (2,), 30.0: (3,), 19.0: (5,)}[days]), "right", "80 GPUs"),
    (lambda days: planned(days, nodes={45.0: (2,), 30.0: (4,), 19.0: (8,)}[days]), "note", "112 GPUs"),
    (lambda days: {**SLOW, "dp": 64}, "wrong", "at most 128 GPUs"),
    (lambda days: SLOW, "wrong", "For 19 days your layout takes"),
    (lambda days: {**SLOW, "pp": 1}, "wrong", "GB"),
    (lambda days: {**SLOW, "dp": 3}, "wrong", "whole nodes of 8"),
    (lambda days: [8, 1, 4], "wrong", "Return a dictionary"),
    (lambda days: {**SLOW, "tp": None}, "wrong", "whole numbers"),
]


@pytest.mark.parametrize(("answer", "state", "words"), CHALLENGERS)
def test_the_fewest_gpus_are_counted_where_the_deadlines_are_kept(answer: Answer, state: str, words: str) -> None:
    verdict = judge(FEWEST_GPUS, answer)
    assert (verdict.state, words in verdict.message) == (state, True), verdict.message
