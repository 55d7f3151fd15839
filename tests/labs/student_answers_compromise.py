"""Answers of lab 08 as students write them, from its text alone: right ones, and wrong ones with their words."""

import math
import statistics
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from scipy.stats import binomtest

from tests.labs.bank import Answer


def held(
    own: Any = lambda parameters, layout: parameters / layout.tp,
    sizes: Any = (2, 4, 12),
    over: Any = lambda layout, least: layout.dp if layout.zero >= least else 1,
    kept: Any = lambda one, layout, stage: one * min(layout.pp - stage, layout.micro_batches),
    held_in: Any = tuple,
) -> Answer:
    return lambda layout, stage, parameters, one: held_in([
        *(size * own(parameters, layout) / over(layout, 3 - i) for i, size in enumerate(sizes)),
        kept(one, layout, stage),
    ])  # fmt: skip


def held_in_whole_bytes(layout: Any, stage: int, parameters: Any, micro_batch_bytes: Any) -> Any:
    return tuple(Fraction(one) for one in held()(layout, stage, parameters, micro_batch_bytes))


def best(
    fits: Any = lambda parameters, pp, capacity: 16 * parameters / pp <= capacity,
    divides: Any = lambda gpus, pp, m: gpus % pp == 0 and m % (gpus // pp) == 0,
    bubble: Any = lambda pp, dp, m, work: (pp - 1) * work / pp,
    reduce: Any = lambda pp, dp, parameters, alpha, beta: 2 * (dp - 1) * (alpha + beta * 2 * parameters / pp / dp),
    key: Any = lambda one: one[1] + one[2],
    choose: Any = min,
    out: Any = lambda one: one,
) -> Answer:
    def answer(gpus: int, m: int, work: float, parameters: float, capacity: float, alpha: float, beta: float) -> Any:
        able = [
            (pp, bubble(pp, gpus // pp, m, work), reduce(pp, gpus // pp, parameters, alpha, beta))
            for pp in range(1, gpus + 1)
            if divides(gpus, pp, m) and fits(parameters, pp, capacity)
        ]
        return out(choose(able, key=key))

    return answer


def best_by_numpy(gpus: int, m: int, work: float, parameters: float, capacity: float, alpha: float, beta: float) -> Any:
    pp = np.array([p for p in range(1, gpus + 1) if not gpus % p])
    dp = gpus // pp
    keep = (m % dp == 0) & (pp * capacity >= 16 * parameters)
    pp, dp = pp[keep], dp[keep]
    bubble, reduce = work - work / pp, 2 * (dp - 1) * (alpha + 2 * beta * parameters / (pp * dp))
    i = (bubble + reduce).argmin()
    return pp[i], bubble[i], reduce[i]


def able(layouts: Any, gpus: int, heads: int, capacity: float) -> list[Any]:
    return [
        one
        for one in layouts
        if one.dp * one.tp * one.pp == gpus and not heads % one.tp and one.memory_bytes <= capacity
    ]


def speed(one: Any) -> float:
    return one.dp * one.micro_batch * one.micro_batches / one.step_s


def linear(
    objective: Any = lambda costs, matrices: (
        {("s", v, k): c for v, some in enumerate(costs) for k, c in enumerate(some)}
        | {("e", v, k, j): c for v, m in enumerate(matrices) for k, row in enumerate(m) for j, c in enumerate(row)}
    ),
    ones: Any = lambda v, n: ({("s", v, k): 1 for k in range(n)}, 1),
    makers: Any = lambda v, k, n: ({("s", v, k): 1, **{("e", v, k, j): -1 for j in range(n)}}, 0),
    readers: Any = lambda v, j, n: ({("s", v + 1, j): 1, **{("e", v, k, j): -1 for k in range(n)}}, 0),
    held_in: Any = tuple,
) -> Answer:
    def answer(costs: Any, resharding: Any) -> Any:
        rows = [ones(v, len(some)) for v, some in enumerate(costs)]
        for v in range(len(resharding)):
            a, b = len(costs[v]), len(costs[v + 1])
            rows += [row for k in range(a) if (row := makers(v, k, b))]
            rows += [row for j in range(b) if (row := readers(v, j, a))]
        return held_in((objective(costs, resharding), [row for row in rows if row]))

    return answer


def shortest(
    t_of: Any = lambda b, added, slowest: added + (b - 1) * slowest,
    sizes: Any = lambda gpus: [n for n in (1, 2, 4, 8, 16, 32) if n <= gpus],
    last: Any = lambda gpus: gpus == 0,
    end: Any = min,
) -> Answer:
    def answer(time_of: Answer, layers: int, gpus: int, micro_batches: int) -> Any:
        @cache
        def plans(first: int, left: int) -> frozenset[tuple[float, float]]:
            """Sum and maximum of every way to place what remains, those aside that another beats."""
            if first == layers:
                return frozenset({(0.0, 0.0)} if last(left) else ())
            found = set()
            for stop in range(first, layers):
                for n in sizes(left):
                    t = time_of(first, stop, n)
                    found |= {(t + added, max(t, slowest)) for added, slowest in plans(stop + 1, left - n)}
            return frozenset(p for p in found if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in found))

        return end(t_of(micro_batches, *plan) for plan in plans(0, gpus))

    return answer


def paired(
    ratio: Any = lambda a, b: statistics.median(y / x for x, y in zip(a, b, strict=True)),
    p: Any = lambda ahead, behind: binomtest(ahead, ahead + behind).pvalue if ahead + behind else 1.0,
) -> Answer:
    def answer(first_s: Any, second_s: Any) -> Any:
        ahead = sum(1 for x, y in zip(first_s, second_s, strict=True) if x < y)
        behind = sum(1 for x, y in zip(first_s, second_s, strict=True) if x > y)
        return ratio(first_s, second_s), p(ahead, behind)

    return answer


RIGHT: list[tuple[str, Answer]] = [
    ("rank-bytes", held_in_whole_bytes),
    ("best-split", best_by_numpy),
    ("best-split", best(choose=lambda able, key: sorted(able, key=key)[0], out=list)),
    (
        "best-split",
        best(reduce=lambda pp, dp, p, alpha, beta: sum(alpha + beta * 2 * p / (pp * dp) for _ in range(2 * dp - 2))),
    ),
    ("choose-layout", lambda *asked: max(able(*asked), key=speed)),
    ("sharding-programme", linear()),
    ("sharding-programme", linear(held_in=list)),
    ("sharding-programme", linear(ones=lambda v, n: [{("s", v, k): 2 for k in range(n)}, 2])),
    (
        "sharding-programme",
        linear(makers=lambda v, k, n: ({("s", v, k): -0.5, **{("e", v, k, j): 0.5 for j in range(n)}}, 0.0)),
    ),
    (
        "sharding-programme",
        linear(makers=lambda v, k, n: ({("s", v, k): 1, **{("e", v, k, j): -1 for j in range(n)}}, 0) if k else None),
    ),
    (
        "sharding-programme",
        lambda costs, matrices: (linear()(costs, matrices)[0], tuple(linear()(costs, matrices)[1][::-1])),
    ),
    (
        "sharding-programme",
        lambda costs, matrices: (
            {k: np.float64(v) for k, v in linear()(costs, matrices)[0].items()},
            linear()(costs, matrices)[1],
        ),
    ),
    ("sharding-programme", linear(ones=lambda v, n: ({("s", v, k): 1 for k in range(n)}, 1) if v else None)),
    ("pipeline-stages", shortest(end=lambda found: np.min(list(found)))),
    ("paired-rounds", paired()),
    ("paired-rounds", paired(ratio=lambda a, b: np.median(np.divide(b, a)))),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "rank-bytes": [
        (held(sizes=(4, 4, 12)), "bytes per parameter for the weights, where"),
        (held(sizes=(2, 4, 16)), "bytes per parameter for the optimizer, where"),
        (held(own=lambda parameters, layout: parameters / layout.tp / layout.pp), "You divide the weights by pp:"),
        (held(own=lambda parameters, layout: parameters * layout.tp), "You multiply the weights by tp: each of the"),
        (held(over=lambda layout, least: layout.tp if layout.zero >= least else 1), "ZeRO divides the weights by dp,"),
        (held(over=lambda layout, least: layout.dp if layout.zero == least else 1), "only (==): a higher stage does"),
        (held(over=lambda layout, least: 1), "You never shard the weights over the"),
        (
            held(kept=lambda one, layout, stage: one * min(layout.pp - stage, layout.micro_batches) / layout.tp),
            "micro_batch_bytes is already what one rank",
        ),
        (
            held(kept=lambda one, layout, stage: one * max(layout.pp - stage, layout.micro_batches)),
            "You take the larger of the two numbers: a",
        ),
        (
            held(kept=lambda one, layout, stage: one * min(layout.pp - stage + 1, layout.micro_batches)),
            "One micro-batch too many: the last stage",
        ),
        (held(kept=lambda one, layout, stage: one * layout.micro_batches / layout.dp), "You divide the micro-batches"),
    ],
    "best-split": [
        (best(divides=lambda gpus, pp, m: gpus % pp == 0), "You give replicas that the micro-batches"),
        (best(fits=lambda parameters, pp, capacity: 16 * parameters <= capacity * pp * 2), "per parameter, over pp"),
        (best(fits=lambda parameters, pp, capacity: 16 * parameters / pp < capacity), "States that fill a GPU exactly"),
        (best(key=lambda one: max(one[1], one[2])), "You compare the longer of the two waits: a"),
        (best(choose=max), "You take the split that waits most: take the"),
        (best(bubble=lambda pp, dp, m, work: pp * work / pp), "Your bubble is pp times a stage's length: pp −"),
        (best(bubble=lambda pp, dp, m, work: (pp - 1) * work / pp / m), "You divide the bubble by the micro-batches"),
        (
            best(reduce=lambda pp, dp, p, alpha, beta: 2 * (dp - 1) / dp * (alpha + beta * 2 * p / pp)),
            "You divide the latency by dp too: each of the",
        ),
        (
            best(reduce=lambda pp, dp, p, alpha, beta: 2 * dp * (alpha + beta * 2 * p / pp / dp)),
            "), and none with one replica.",
        ),
        (best(reduce=lambda pp, dp, p, alpha, beta: 2 * (dp - 1) * beta * 2 * p / pp / dp), "α is left out: each step"),
        (
            best(reduce=lambda pp, dp, p, alpha, beta: 2 * (dp - 1) * (alpha + beta * 4 * p / pp / dp)),
            "bytes per gradient: in bf",
        ),
        (best(out=lambda one: (one[0], one[2], one[1])), "The numbers are right, but in another order"),
        (best(out=lambda one: (one[0], one[1] + one[2], 0.0)), "You add the two waits up: return each by"),
    ],
    "choose-layout": [
        (lambda *asked: able(*asked)[0], "samples per second; dp"),
        (lambda *asked: min(able(*asked), key=lambda one: one.step_s / one.micro_batch), "samples per second; dp"),
        (
            lambda *asked: max(able(*asked), key=lambda one: one.dp * one.micro_batch / one.step_s),
            "You count one micro-batch per step: a replica",
        ),
        (
            lambda *asked: max(able(*asked), key=lambda one: one.micro_batch * one.micro_batches / one.step_s),
            "You count the samples of one replica: a step",
        ),
        (lambda *asked: max(able(*asked), key=lambda one: one.memory_bytes), "samples per second; dp"),
        (lambda *asked: max(able(*asked), key=lambda one: one.dp), "samples per second; dp"),
        (lambda *asked: [max(able(*asked), key=speed)], "Return one of the layouts that you were"),
        (lambda *asked: speed(max(able(*asked), key=speed)), "Return one of the layouts that you were"),
    ],
    "sharding-programme": [
        (linear(ones=lambda v, n: ({("s", v, k): 1 for k in range(n)}, n)), "An equation forbids a legal choice: if"),
        (linear(ones=lambda v, n: ({("s", v, k): 1 for k in range(n)}, 0)), "An equation forbids a legal choice: if"),
        (linear(ones=lambda v, n: None), "strategies. Demand that its s add up to"),
        (linear(makers=lambda v, k, n: ({("e", v, k, j): 1 for j in range(n)}, 1)), "An equation forbids a legal"),
        (
            linear(makers=lambda v, k, n: ({("s", v, k): 1, **{("e", v, k, j): 1 for j in range(n)}}, 0)),
            "An equation forbids a legal choice: if the",
        ),
        (
            linear(readers=lambda v, j, n: ({("s", v, j): 1, **{("e", v, k, j): -1 for k in range(n)}}, 0)),
            "An equation forbids a legal choice: if the",
        ),
        (linear(makers=lambda v, k, n: None), "] that go with it, added over the strategies"),
        (
            linear(
                objective=lambda costs, m: {("s", v, k): c for v, some in enumerate(costs) for k, c in enumerate(some)}
            ),
            "Your objective leaves resharding out: the e",
        ),
        (
            linear(objective=lambda costs, m: {name: -c for name, c in linear()(costs, m)[0].items()}),
            "If the layers take the strategies",
        ),
        (lambda costs, m: (linear()(costs, m)[0], []), "strategies. Demand that its s add up to"),
        (lambda costs, m: min(costs[0]), "Return the objective, a dictionary, and the"),
    ],
    "pipeline-stages": [
        (shortest(t_of=lambda b, added, slowest: b * added), "You make the micro-batches wait for one"),
        (shortest(t_of=lambda b, added, slowest: added + slowest), "The micro-batches are left out: the slowest"),
        (shortest(t_of=lambda b, added, slowest: slowest), "That is the slowest stage alone: the step is"),
        (shortest(sizes=lambda gpus: range(1, gpus + 1)), "GPUs and the like: groups have"),
        (
            lambda time_of, layers, gpus, b: (
                sum(time_of(i, i, 1) for i in range(layers)) + (b - 1) * max(time_of(i, i, 1) for i in range(layers))
            ),
            "You make a stage of each layer, on one GPU",
        ),
    ],
    "paired-rounds": [
        (paired(p=lambda ahead, behind: max(ahead, behind) / (ahead + behind)), "You give the share of the rounds"),
        (paired(p=lambda ahead, behind: 0.5 ** max(ahead, behind)), "That is how likely as many tosses in a row"),
        (paired(p=lambda ahead, behind: 2 * 0.5 ** (ahead + behind)), "That is how likely one wins every round"),
        (
            paired(p=lambda ahead, behind: binomtest(ahead, ahead + behind, alternative="greater").pvalue),
            "Your p is one-sided: a result as one-sided",
        ),
        (
            paired(p=lambda ahead, behind: binomtest(behind, ahead + behind, alternative="greater").pvalue),
            "Your p is one-sided: a result as one-sided",
        ),
        (
            paired(
                p=lambda ahead, behind: min(
                    1,
                    2
                    * sum(math.comb(ahead + behind, k) for k in range(max(ahead, behind) + 1, ahead + behind + 1))
                    / 2 ** (ahead + behind),
                )
            ),
            "You count only results that are more",
        ),
        (
            paired(ratio=lambda a, b: statistics.median(y - x for x, y in zip(a, b, strict=True))),
            "You take differences in seconds: divide round",
        ),
        (
            paired(ratio=lambda a, b: statistics.geometric_mean(y / x for x, y in zip(a, b, strict=True))),
            "You take the geometric mean of the ratios",
        ),
        (
            paired(ratio=lambda a, b: sorted(y / x for x, y in zip(a, b, strict=True))[len(a) // 2]),
            "With an even number of rounds the median is",
        ),
        (lambda a, b: paired()(a, b)[::-1], "The numbers are right, but in another order"),
        (lambda a, b: paired()(sorted(a), sorted(b)), "You sort each list: the n-th of each come"),
    ],
    "shares-of-peak": [],
}
