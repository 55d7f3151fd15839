"""Answers of lab 08 as students write them, from its text alone: right ones, and wrong ones with their words."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.optimize import lsq_linear
from scipy.stats import binomtest

Answer = Callable[..., Any]


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


def held_by_match(layout: Any, stage: int, parameters: Any, micro_batch_bytes: Any) -> Any:
    w, g, o = (bytes_each * parameters / layout.tp for bytes_each in (2, 4, 12))
    match layout.zero:
        case 1:
            o /= layout.dp
        case 2:
            g, o = g / layout.dp, o / layout.dp
        case 3:
            w, g, o = w / layout.dp, g / layout.dp, o / layout.dp
    under_way = 0
    for number in range(layout.micro_batches):
        under_way += number < layout.pp - stage
    return w, g, o, under_way * micro_batch_bytes


def held_in_whole_bytes(layout: Any, stage: int, parameters: Any, micro_batch_bytes: Any) -> Any:
    return tuple(Fraction(one) for one in held()(layout, stage, parameters, micro_batch_bytes))


def fitted(solve: Any) -> Answer:
    def answer(message_bytes: Any, seconds: Any, factor: float) -> Any:
        n, t = np.asarray(message_bytes, dtype=float) * factor, np.asarray(seconds, dtype=float)
        return solve(np.column_stack([1 / t, n / t]), np.ones(len(t)))

    return answer


def by_bounds(rows: Any, ones: Any) -> Any:
    scale = rows.max(axis=0)
    return lsq_linear(rows / scale, ones, bounds=(0, np.inf), tol=1e-14).x / scale


def by_every_face(rows: Any, ones: Any) -> Any:
    """The free minimum if it is legal, else the better of the two edges."""
    best = min(
        (np.append(x, 0.0) for x in (np.array([rows[:, 0].sum() / (rows[:, 0] ** 2).sum()]),)),
        key=lambda x: ((rows @ x - ones) ** 2).sum(),
    )
    candidates = [best, np.array([0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()])]
    free = np.linalg.lstsq(rows / rows.max(0), ones, rcond=None)[0] / rows.max(0)
    if (free >= 0).all():
        candidates.append(free)
    return min(candidates, key=lambda x: float(((rows @ x - ones) ** 2).sum())).tolist()


def by_descent(rows: Any, ones: Any) -> Any:
    scale = rows.max(axis=0)
    a = rows / scale
    x = np.full(2, 0.5)
    for _ in range(4000):  # coordinate descent keeps within the bounds
        for j in range(2):
            rest = ones - a[:, 1 - j] * x[1 - j]
            x[j] = max(0.0, (a[:, j] @ rest) / (a[:, j] @ a[:, j]))
    return tuple(x / scale)


def by_normal_equations(rows: Any, ones: Any) -> Any:
    (aa, ab), (_, bb) = rows.T @ rows
    a1, b1 = rows.sum(0)
    alpha, beta = (bb * a1 - ab * b1) / (aa * bb - ab**2), (aa * b1 - ab * a1) / (aa * bb - ab**2)
    if alpha < 0:
        return 0, b1 / bb
    return (a1 / aa, 0) if beta < 0 else (alpha, beta)


def unbounded(rows: Any, ones: Any) -> Any:
    return np.linalg.lstsq(rows / rows.max(0), ones, rcond=None)[0] / rows.max(0)


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


def chosen_in_a_loop(layouts: Any, gpus: int, heads: int, capacity_bytes: float) -> Any:
    found, fastest = None, 0.0
    for one in layouts:
        if one.dp * one.pp * one.tp != gpus or heads % one.tp != 0 or one.memory_bytes > capacity_bytes:
            continue
        if speed(one) > fastest:
            found, fastest = one, speed(one)
    return found


def front_by_numpy(points: Any) -> Any:
    p = np.array(points)
    beats = (p[:, None] <= p[None]).all(-1) & (p[:, None] < p[None]).any(-1)
    return np.flatnonzero(~beats.any(0))


def front_by_torch(points: Any) -> Any:
    p = torch.tensor(points, dtype=torch.float64)
    beats = (p.unsqueeze(1) <= p).all(-1) & (p.unsqueeze(1) < p).any(-1)
    return (~beats.any(0)).nonzero().flatten()


def front_by_removal(points: Any) -> Any:
    left = set(range(len(points)))
    for i, j in itertools.permutations(range(len(points)), 2):
        if all(a <= b for a, b in zip(points[i], points[j], strict=True)) and points[i] != points[j]:
            left.discard(j)
    return left


def front_by_order(points: Any) -> Any:
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: tuple(points[i])):
        if not any(
            all(a <= b for a, b in zip(points[j], points[i], strict=True)) and points[j] != points[i] for j in found
        ):
            found.append(i)
    return tuple(found)


def front(beats: Any) -> Answer:
    return lambda points: [i for i, p in enumerate(points) if not any(beats(q, p) for q in points)]


def beats(q: Any, p: Any) -> bool:
    return all(a <= b for a, b in zip(q, p, strict=True)) and any(a < b for a, b in zip(q, p, strict=True))


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


def shortest_by_table(time_of: Answer, layers: int, gpus: int, micro_batches: int) -> Any:
    sizes = [2**i for i in range(gpus.bit_length()) if 2**i <= gpus]
    times = sorted({time_of(i, j, n) for i in range(layers) for j in range(i, layers) for n in sizes})
    best = math.inf
    for t_max in times:
        table = np.full((layers + 1, gpus + 1), np.inf)
        table[layers, 0] = 0.0
        for first, left in itertools.product(range(layers - 1, -1, -1), range(gpus + 1)):
            for stop, n in itertools.product(range(first, layers), sizes):
                if n <= left and time_of(first, stop, n) <= t_max:
                    table[first, left] = min(table[first, left], time_of(first, stop, n) + table[stop + 1, left - n])
        best = min(best, table[0, gpus] + (micro_batches - 1) * t_max)
    return best


def paired(
    ratio: Any = lambda a, b: statistics.median(y / x for x, y in zip(a, b, strict=True)),
    p: Any = lambda ahead, behind: binomtest(ahead, ahead + behind).pvalue if ahead + behind else 1.0,
) -> Answer:
    def answer(first_s: Any, second_s: Any) -> Any:
        ahead = sum(1 for x, y in zip(first_s, second_s, strict=True) if x < y)
        behind = sum(1 for x, y in zip(first_s, second_s, strict=True) if x > y)
        return ratio(first_s, second_s), p(ahead, behind)

    return answer


def p_by_tosses(ahead: int, behind: int) -> float:
    n, gap = ahead + behind, abs(ahead - behind)
    rows = [math.comb(n, k) for k in range(n + 1) if abs(n - 2 * k) >= gap]
    return sum(rows) / 2**n


def p_by_pascal(ahead: int, behind: int) -> float:
    row = [1.0]
    for _ in range(ahead + behind):
        row = [a / 2 + b / 2 for a, b in zip([0.0, *row], [*row, 0.0], strict=True)]
    return min(1.0, 2 * sum(row[: min(ahead, behind) + 1]))


def p_of_one_tail(ahead: int, behind: int) -> float:
    n = ahead + behind
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(ahead, behind) + 1)) / 2**n)


def errors(
    rate: Any = statistics.median,
    fitted: Any = lambda row: row.fitted,
    judged: Any = lambda row: not row.fitted,
    gap: Any = lambda guess, row: abs(guess / row.measured_s - 1),
    mean: Any = statistics.mean,
    speed_of: Any = lambda row: row.work / row.measured_s,
    held_in: Any = tuple,
) -> Answer:
    def answer(rows: Any) -> Any:
        r = rate([speed_of(row) for row in rows if fitted(row)])
        kept = [row for row in rows if judged(row)]
        return held_in(
            (mean([gap(row.predicted_s, row) for row in kept]), mean([gap(row.work / r, row) for row in kept]))
        )

    return answer


def errors_by_numpy(rows: Any) -> Any:
    work, t, guess = (np.array([getattr(row, n) for row in rows]) for n in ("work", "measured_s", "predicted_s"))
    fitted = np.array([row.fitted for row in rows])
    rate = np.median(work[fitted] / t[fitted])
    return np.abs(np.stack([guess, work / rate]) / t - 1)[:, ~fitted].mean(1)


RIGHT: list[tuple[str, Answer]] = [
    ("rank-bytes", held()),
    ("rank-bytes", held_by_match),
    ("rank-bytes", held(held_in=list)),
    ("rank-bytes", held_in_whole_bytes),
    ("rank-bytes", held(kept=lambda one, layout, stage: one * sorted([layout.pp - stage, layout.micro_batches])[0])),
    ("bounded-fit", fitted(by_bounds)),
    ("bounded-fit", fitted(by_every_face)),
    ("bounded-fit", fitted(by_descent)),
    ("bounded-fit", fitted(by_normal_equations)),
    ("bounded-fit", lambda *asked: torch.tensor(np.array(fitted(by_bounds)(*asked)))),
    ("best-split", best()),
    ("best-split", best_by_numpy),
    ("best-split", best(choose=lambda able, key: sorted(able, key=key)[0], out=list)),
    (
        "best-split",
        best(reduce=lambda pp, dp, p, alpha, beta: sum(alpha + beta * 2 * p / (pp * dp) for _ in range(2 * dp - 2))),
    ),
    ("choose-layout", chosen_in_a_loop),
    ("choose-layout", lambda *asked: max(able(*asked), key=speed)),
    ("choose-layout", lambda *asked: sorted(able(*asked), key=speed)[-1]),
    ("choose-layout", lambda *asked: min(able(*asked), key=lambda one: 1 / speed(one))),
    ("choose-layout", lambda *asked: able(*asked)[int(np.argmax([speed(one) for one in able(*asked)]))]),
    (
        "choose-layout",
        lambda layouts, *rest: layouts[
            max((speed(one), i) for i, one in enumerate(layouts) if one in able(layouts, *rest))[1]
        ],
    ),
    ("pareto-front", front(beats)),
    ("pareto-front", front_by_numpy),
    ("pareto-front", front_by_torch),
    ("pareto-front", front_by_removal),
    ("pareto-front", front_by_order),
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
    ("pipeline-stages", shortest()),
    ("pipeline-stages", shortest_by_table),
    ("pipeline-stages", shortest(end=lambda found: np.min(list(found)))),
    ("pipeline-stages", shortest(end=lambda found: sorted(found)[0])),
    ("paired-rounds", paired()),
    ("paired-rounds", paired(p=p_by_tosses)),
    ("paired-rounds", paired(p=p_by_pascal)),
    ("paired-rounds", paired(p=p_of_one_tail)),
    ("paired-rounds", paired(ratio=lambda a, b: np.median(np.divide(b, a)))),
    ("held-out", errors()),
    ("held-out", errors_by_numpy),
    ("held-out", errors(mean=lambda gaps: sum(gaps) / len(gaps), held_in=list)),
    ("held-out", errors(gap=lambda guess, row: abs(guess - row.measured_s) / row.measured_s, rate=np.median)),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "rank-bytes": [
        (held(sizes=(4, 4, 12)), ""),
        (held(sizes=(2, 4, 16)), ""),
        (held(own=lambda parameters, layout: parameters / layout.tp / layout.pp), ""),
        (held(own=lambda parameters, layout: parameters * layout.tp), ""),
        (held(over=lambda layout, least: layout.tp if layout.zero >= least else 1), ""),
        (held(over=lambda layout, least: layout.dp if layout.zero == least else 1), ""),
        (held(over=lambda layout, least: 1), ""),
        (held(kept=lambda one, layout, stage: one * min(layout.pp - stage, layout.micro_batches) / layout.tp), ""),
        (held(kept=lambda one, layout, stage: one * max(layout.pp - stage, layout.micro_batches)), ""),
        (held(kept=lambda one, layout, stage: one * min(layout.pp - stage + 1, layout.micro_batches)), ""),
        (held(kept=lambda one, layout, stage: one * layout.micro_batches / layout.dp), ""),
    ],
    "bounded-fit": [
        (lambda n, t, factor: np.polyfit(np.array(n) * factor, t, 1)[::-1], ""),
        (lambda n, t, factor: (0.0, float(np.median(np.array(t) / (np.array(n) * factor)))), ""),
        (lambda n, t, factor: (min(t), 0.0), ""),
        (lambda n, t, factor: np.abs(fitted(unbounded)(n, t, factor)), ""),
        (lambda n, t, factor: np.array(fitted(by_bounds)(n, t, factor)) * [1, factor], ""),
        (lambda n, t, factor: np.array(fitted(by_bounds)(n, t, factor)) * [1e6, 1e9], ""),
        (
            lambda n, t, factor: [
                x if i == 0 or x == 0 else 1 / x for i, x in enumerate(fitted(by_normal_equations)(n, t, factor))
            ],
            "",
        ),
        (lambda n, t, factor: np.array(fitted(by_bounds)(n[:2], t[:2], factor)), ""),
        (lambda n, t, factor: (max(t), 0.0), ""),
    ],
    "best-split": [
        (best(divides=lambda gpus, pp, m: gpus % pp == 0), ""),
        (best(fits=lambda parameters, pp, capacity: 16 * parameters <= capacity * pp * 2), ""),
        (best(fits=lambda parameters, pp, capacity: 16 * parameters / pp < capacity), ""),
        (best(key=lambda one: max(one[1], one[2])), ""),
        (best(choose=max), ""),
        (best(bubble=lambda pp, dp, m, work: pp * work / pp), ""),
        (best(bubble=lambda pp, dp, m, work: (pp - 1) * work / pp / m), ""),
        (best(reduce=lambda pp, dp, p, alpha, beta: 2 * (dp - 1) / dp * (alpha + beta * 2 * p / pp)), ""),
        (best(reduce=lambda pp, dp, p, alpha, beta: 2 * dp * (alpha + beta * 2 * p / pp / dp)), ""),
        (best(reduce=lambda pp, dp, p, alpha, beta: 2 * (dp - 1) * beta * 2 * p / pp / dp), ""),
        (best(reduce=lambda pp, dp, p, alpha, beta: 2 * (dp - 1) * (alpha + beta * 4 * p / pp / dp)), ""),
        (best(out=lambda one: (one[0], one[2], one[1])), ""),
        (best(out=lambda one: (one[0], one[1] + one[2], 0.0)), ""),
    ],
    "choose-layout": [
        (lambda *asked: able(*asked)[0], ""),
        (lambda *asked: min(able(*asked), key=lambda one: one.step_s / one.micro_batch), ""),
        (lambda *asked: max(able(*asked), key=lambda one: one.dp * one.micro_batch / one.step_s), ""),
        (lambda *asked: max(able(*asked), key=lambda one: one.micro_batch * one.micro_batches / one.step_s), ""),
        (lambda *asked: max(able(*asked), key=lambda one: one.memory_bytes), ""),
        (lambda *asked: max(able(*asked), key=lambda one: one.dp), ""),
        (lambda *asked: [max(able(*asked), key=speed)], ""),
        (lambda *asked: speed(max(able(*asked), key=speed)), ""),
    ],
    "pareto-front": [
        (front(lambda q, p: sum(q) < sum(p)), ""),
        (front(lambda q, p: any(a < b for a, b in zip(q, p, strict=True))), ""),
        (front(lambda q, p: q < p), ""),
        (front(lambda q, p: q[0] < p[0] and q[-1] <= p[-1]), ""),
        (front(lambda q, p: all(a >= b for a, b in zip(q, p, strict=True)) and q != p), ""),
        (lambda points: [i for i in front(beats)(points) if points.index(points[i]) == i], ""),
        (lambda points: [i + 1 for i in front(beats)(points)], ""),
        (lambda points: [i for i in range(len(points)) if i not in front(beats)(points)], ""),
        (lambda points: front(beats)(points)[:-1], ""),
        (lambda points: [i in front(beats)(points) for i in range(len(points))], ""),
    ],
    "sharding-programme": [
        (linear(ones=lambda v, n: ({("s", v, k): 1 for k in range(n)}, n)), ""),
        (linear(ones=lambda v, n: ({("s", v, k): 1 for k in range(n)}, 0)), ""),
        (linear(ones=lambda v, n: None), ""),
        (linear(makers=lambda v, k, n: ({("e", v, k, j): 1 for j in range(n)}, 1)), ""),
        (linear(makers=lambda v, k, n: ({("s", v, k): 1, **{("e", v, k, j): 1 for j in range(n)}}, 0)), ""),
        (linear(readers=lambda v, j, n: ({("s", v, j): 1, **{("e", v, k, j): -1 for k in range(n)}}, 0)), ""),
        (linear(makers=lambda v, k, n: None), ""),
        (
            linear(
                objective=lambda costs, m: {("s", v, k): c for v, some in enumerate(costs) for k, c in enumerate(some)}
            ),
            "",
        ),
        (linear(objective=lambda costs, m: {name: -c for name, c in linear()(costs, m)[0].items()}), ""),
        (lambda costs, m: (linear()(costs, m)[0], []), ""),
        (lambda costs, m: min(costs[0]), ""),
    ],
    "pipeline-stages": [
        (shortest(t_of=lambda b, added, slowest: b * added), ""),
        (shortest(t_of=lambda b, added, slowest: added + slowest), ""),
        (shortest(t_of=lambda b, added, slowest: slowest), ""),
        (shortest(sizes=lambda gpus: range(1, gpus + 1)), ""),
        (
            shortest(end=lambda found: next(iter(found)), t_of=lambda b, added, slowest: -(added + (b - 1) * slowest)),
            "",
        ),
        (shortest(end=max), ""),
        (shortest(last=lambda left: True), ""),
        (
            lambda time_of, layers, gpus, b: (
                sum(time_of(i, i, 1) for i in range(layers)) + (b - 1) * max(time_of(i, i, 1) for i in range(layers))
            ),
            "",
        ),
    ],
    "paired-rounds": [
        (paired(p=lambda ahead, behind: max(ahead, behind) / (ahead + behind)), ""),
        (paired(p=lambda ahead, behind: 0.5 ** max(ahead, behind)), ""),
        (paired(p=lambda ahead, behind: 2 * 0.5 ** (ahead + behind)), ""),
        (paired(p=lambda ahead, behind: binomtest(ahead, ahead + behind, alternative="greater").pvalue), ""),
        (paired(p=lambda ahead, behind: binomtest(behind, ahead + behind, alternative="greater").pvalue), ""),
        (
            paired(
                p=lambda ahead, behind: min(
                    1,
                    2
                    * sum(math.comb(ahead + behind, k) for k in range(max(ahead, behind) + 1, ahead + behind + 1))
                    / 2 ** (ahead + behind),
                )
            ),
            "",
        ),
        (paired(ratio=lambda a, b: statistics.median(y - x for x, y in zip(a, b, strict=True))), ""),
        (paired(ratio=lambda a, b: statistics.geometric_mean(y / x for x, y in zip(a, b, strict=True))), ""),
        (paired(ratio=lambda a, b: sorted(y / x for x, y in zip(a, b, strict=True))[len(a) // 2]), ""),
        (lambda a, b: paired()(a, b)[::-1], ""),
        (lambda a, b: paired()(sorted(a), sorted(b)), ""),
    ],
    "held-out": [
        (errors(mean=statistics.median), ""),
        (errors(mean=max), ""),
        (errors(gap=lambda guess, row: (guess / row.measured_s - 1) ** 2), ""),
        (errors(gap=lambda guess, row: abs(guess / row.measured_s - 1) * 100), ""),
        (errors(gap=lambda guess, row: abs(math.log(guess / row.measured_s))), ""),
        (errors(rate=max), ""),
        (errors(speed_of=lambda row: row.work / row.predicted_s), ""),
        (errors(rate=statistics.harmonic_mean), ""),
        (lambda rows: (errors()(rows)[0], errors(gap=lambda guess, row: guess)(rows)[1]), ""),
    ],
}
