"""Answers of lab 07 as students write them, from its text alone: right ones, and wrong ones with their words."""

import itertools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import dlojz
from dlojz.by_hand.tensor.axis import add_up, copy
from tests.labs.bank import Answer


def place(rank: int, dp: int, pp: int, tp: int) -> tuple[int, int, int]:
    return rank // (dp * tp), rank // tp % dp, rank % tp


def degrees(
    off: Any = lambda n, known, given: n % known or (None not in given and known != n),
    fill: Any = lambda n, known: n // known,
    order: Any = lambda d: d,
) -> Answer:
    def answer(processes: int, dp: Any = None, pp: Any = None, tp: Any = None) -> Any:
        given, known = (dp, pp, tp), 1
        for degree in given:
            known *= 1 if degree is None else degree
        if off(processes, known, given):
            raise ValueError("no whole degree")
        return order(tuple(fill(processes, known) if degree is None else degree for degree in given))

    return answer


def degrees_case_by_case(processes: int, dp: Any = None, pp: Any = None, tp: Any = None) -> Any:
    if dp is None:
        dp = processes // (pp * tp)
    elif pp is None:
        pp = processes // (dp * tp)
    elif tp is None:
        tp = processes // (dp * pp)
    if dp * pp * tp != processes:
        raise ValueError
    return dp, pp, tp


def degrees_by_trying(processes: int, dp: Any = None, pp: Any = None, tp: Any = None) -> Any:
    ranges = [range(1, processes + 1) if d is None else [d] for d in (dp, pp, tp)]
    found = [d for d in itertools.product(*ranges) if d[0] * d[1] * d[2] == processes]
    if not found:
        raise ValueError(f"{processes} processes")
    return found[0]


def degrees_asserted(processes: int, dp: Any = None, pp: Any = None, tp: Any = None) -> Any:
    known = (dp or 1) * (pp or 1) * (tp or 1)
    assert processes % known == 0
    return dp or processes // known, pp or processes // known, tp or processes // known


def degrees_of_two(processes: int, dp: Any = None, pp: Any = None, tp: Any = None) -> Any:
    if dp and pp and tp:
        if processes % (dp * pp * tp):
            raise ValueError
        return dp, pp, tp
    return degrees()(processes, dp, pp, tp)


NUMBER = {"pp": 0, "dp": 1, "tp": 2}


def groups_of_an_array(axis: str, dp: int, pp: int, tp: int) -> Any:
    grid = np.moveaxis(np.arange(dp * pp * tp).reshape(pp, dp, tp), NUMBER[axis], -1)
    return grid.reshape(-1, grid.shape[-1])


def groups_in_branches(axis: str, dp: int, pp: int, tp: int) -> Any:
    if axis == "tp":
        return [list(range(i, i + tp)) for i in range(0, dp * pp * tp, tp)]
    if axis == "dp":
        return [[(p * dp + d) * tp + t for d in range(dp)] for p in range(pp) for t in range(tp)]
    return [[i + p * dp * tp for p in range(pp)] for i in range(dp * tp)]


def groups_by_rank(axis: str, dp: int, pp: int, tp: int) -> Any:
    def same(a: int, b: int) -> bool:
        one, other = list(place(a, dp, pp, tp)), list(place(b, dp, pp, tp))
        del one[NUMBER[axis]], other[NUMBER[axis]]
        return one == other

    n = dp * pp * tp
    return {tuple(b for b in range(n) if same(a, b)) for a in range(n)}


def between(
    crossing: Any = lambda a, b, per: a // per != b // per,
    neighbours: Any = lambda group: zip(group, [*group[1:], group[0]], strict=True),
    each: Any = lambda c, m, n: (2 if c == "all_reduce" else 1) * (n - 1) / n * m,
    total: Any = lambda crossings, group, each: crossings * each,
) -> Answer:
    def answer(collective: str, message_bytes: int, group: Any, gpus_per_node: int) -> Any:
        crossings = sum(crossing(a, b, gpus_per_node) for a, b in neighbours(group))
        return total(crossings, group, each(collective, message_bytes, len(group)))

    return answer


def between_by_numpy(collective: str, message_bytes: int, group: Any, gpus_per_node: int) -> Any:
    nodes = np.array(group) // gpus_per_node
    n = len(nodes)
    return (nodes != np.roll(nodes, -1)).sum() * (n - 1) * message_bytes * {"all_reduce": 2}.get(collective, 1) / n


def between_by_match(collective: str, message_bytes: int, group: Any, gpus_per_node: int) -> Any:
    n = len(group)
    match collective:
        case "all_reduce":
            each = 2 * message_bytes * (n - 1) / n
        case "reduce_scatter" | "all_gather":
            each = message_bytes * (n - 1) / n
    node = [rank // gpus_per_node for rank in group]
    return sum(each for i in range(n) if node[i] != node[i - 1])


def nodes_touched(collective: str, message_bytes: int, group: Any, gpus_per_node: int) -> Any:
    n, nodes = len(group), len({rank // gpus_per_node for rank in group})
    return (nodes if nodes > 1 else 0) * (2 if collective == "all_reduce" else 1) * (n - 1) / n * message_bytes


def step(
    inside: Any = lambda part, x, tp: F.linear(copy(x * part["scale"], tp), part["w1"]).relu(),
    outside: Any = lambda part, h, tp: add_up(F.linear(h, part["w2"]), tp) + part["bias"],
    loss: Any = F.mse_loss,
    reduce: Any = lambda p, dp, tp: dp.all_reduce(p.grad).div_(dp.size),
) -> Answer:
    def answer(part: Any, x: Any, targets: Any, dp: Any, tp: Any) -> None:
        loss(outside(part, inside(part, x, tp), tp), targets).backward()
        for parameter in part.values():
            reduce(parameter, dp, tp)

    return answer


def step_in_one_message(part: Any, x: Any, targets: Any, dp: Any, tp: Any) -> None:
    step(reduce=lambda p, dp, tp: None)(part, x, targets, dp, tp)
    flat = torch.cat([p.grad.flatten() for p in part.values()])
    dp.all_reduce(flat)
    for p, piece in zip(part.values(), flat.split([p.numel() for p in part.values()]), strict=True):
        p.grad = piece.view_as(p) / dp.size


def step_of_a_smaller_loss(part: Any, x: Any, targets: Any, dp: Any, tp: Any) -> None:
    step(loss=lambda y, t: F.mse_loss(y, t) / dp.size, reduce=lambda p, dp, tp: dp.all_reduce(p.grad))(
        part, x, targets, dp, tp
    )


def step_by_autograd(part: Any, x: Any, targets: Any, dp: Any, tp: Any) -> None:
    names = list(part)
    h = torch.relu(copy(part["scale"] * x, tp) @ part["w1"].mT)
    y = add_up(torch.einsum("bh,oh->bo", h, part["w2"]), tp) + part["bias"]
    gradients = torch.autograd.grad((y - targets).pow(2).mean(), [part[name] for name in names])
    for name, gradient in zip(names, gradients, strict=True):
        part[name].grad = dp.all_reduce(gradient.contiguous()) / dp.size


def step_without_dp_and_copy(part: Any, x: Any, targets: Any, dp: Any, tp: Any) -> None:
    y = add_up(torch.relu((x * part["scale"]) @ part["w1"].T) @ part["w2"].T, tp) + part["bias"]
    ((y - targets) ** 2).mean().backward()


def layout(
    dp: Any = lambda n, pp, tp: n // (pp * tp),
    micro: Any = lambda batch, b, dp: batch // (b * dp),
    engine: str = "by_hand",
    pp: Any = lambda pp, tp: pp,
    tp: Any = lambda pp, tp: tp,
    make: Any = dlojz.Layout,
) -> Answer:
    return lambda n, stages, slices, b, batch: make(
        dp=dp(n, stages, slices), pp=pp(stages, slices), tp=tp(stages, slices), micro_batch=b,
        micro_batches=micro(batch, b, dp(n, stages, slices)), engine=engine,
    )  # fmt: skip


RIGHT: list[tuple[str, Answer]] = [
    ("grid-place", lambda r, dp, pp, tp: np.unravel_index(r, (pp, dp, tp))),
    ("grid-place", lambda r, dp, pp, tp: torch.tensor(place(r, dp, pp, tp))),
    ("grid-degrees", degrees()),
    ("grid-degrees", degrees_case_by_case),
    ("grid-degrees", degrees_by_trying),
    ("grid-degrees", lambda n, dp=None, pp=None, tp=None: np.array(degrees()(n, dp, pp, tp))),
    ("grid-groups", groups_of_an_array),
    ("grid-groups", groups_by_rank),
    ("grid-groups", lambda *asked: [g[::-1] for g in reversed(groups_in_branches(*asked))]),
    ("grid-groups", lambda *asked: tuple(map(set, groups_in_branches(*asked)))),
    ("between-nodes", between_by_numpy),
    ("between-nodes", between_by_match),
    ("hybrid-step", step()),
    ("hybrid-step", step(reduce=lambda p, dp, tp: dp.all_reduce(p.grad.div_(dp.size)))),
    (
        "hybrid-step",
        step(inside=lambda part, x, tp: torch.relu((copy(x, tp) * copy(part["scale"], tp)) @ part["w1"].T)),
    ),
    ("hybrid-step", step_in_one_message),
    ("hybrid-step", step_of_a_smaller_loss),
    ("hybrid-step", step_by_autograd),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "grid-place": [
        (lambda r, dp, pp, tp: (r // (dp * tp), r % (dp * tp), r % tp), "at (pp, dp, tp) ="),
        (lambda r, dp, pp, tp: (r // (dp * tp) + 1, r // tp % dp + 1, r % tp + 1), "at (pp, dp, tp) ="),
        (lambda r, dp, pp, tp: (r // (dp * pp), r // pp % dp, r % pp), "at (pp, dp, tp) ="),
        (lambda r, dp, pp, tp: (r // tp % dp, r // (dp * tp), r % tp), "at (pp, dp, tp) ="),
        (lambda r, dp, pp, tp: (r // 4, r // 2 % 2, r % 2), "at (pp, dp, tp) ="),
        (lambda r, dp, pp, tp: (r // (dp * tp), r // tp % dp), "Three numbers are expected, (pp_rank"),
        (lambda r, dp, pp, tp: (r // (dp * tp), r // tp % tp, r % tp), "at (pp, dp, tp) ="),
    ],
    "grid-degrees": [
        (degrees_asserted, "dp=None, pp="),
        (degrees_of_two, "processes="),
        (degrees(order=lambda d: (d[1], d[0], d[2])), "For processes="),
        (degrees(order=lambda d: {"dp": d[0], "pp": d[1], "tp": d[2]}), "Three numbers are expected, (dp, pp, tp),"),
        (degrees(fill=lambda n, known: n - known), "For processes="),
        (
            lambda n, dp=None, pp=None, tp=None: (
                None if n % ((dp or 1) * (pp or 1) * (tp or 1)) else degrees(off=lambda *a: False)(n, dp, pp, tp)
            ),
            "dp=None, pp=",
        ),
    ],
    "grid-groups": [
        (lambda axis, dp, pp, tp: groups_in_branches(axis, dp, pp, tp)[0], "A list of groups such as"),
        (
            lambda axis, dp, pp, tp: groups_in_branches({"dp": "tp", "tp": "dp", "pp": "pp"}[axis], dp, pp, tp),
            "into one group along tp, but they differ",
        ),
        (lambda axis, dp, pp, tp: groups_in_branches(axis, pp, dp, tp), "groups in all, but you return"),
        (lambda axis, dp, pp, tp: [list(range(dp * pp * tp))], "groups in all, but you return"),
        (
            lambda axis, dp, pp, tp: (
                [list(range(i, i + tp)) for i in range(0, 8, tp)]
                if axis == "tp"
                else groups_in_branches(axis, dp, pp, tp)
            ),
            "stands in no group (of",
        ),
        (
            lambda axis, dp, pp, tp: [g for g in groups_in_branches(axis, dp, pp, tp) if 0 in g],
            "stands in no group (of",
        ),
    ],
    "between-nodes": [
        (nodes_touched, "You count the nodes that the group touches"),
        (between(each=lambda c, m, n: 2 * (n - 1) / n * m if c == "all_reduce" else m), "The all-reduce is right; of"),
        (between(each=lambda c, m, n: (2 if c == "all_reduce" else 1) * m / n), "/n per round: each rank sends n −"),
        (between(neighbours=lambda group: itertools.combinations(group, 2)), "You count every pair of ranks on"),
        (between(crossing=lambda a, b, per: abs(a - b) >= per), "You compare the distance of two ranks with"),
        (between(crossing=lambda a, b, per: a // 8 != b // 8), "GPUs whatever gpus_per_node is."),
        (between(crossing=lambda a, b, per: a // per == b // per), "You count the messages that stay inside a"),
        (between(total=lambda crossings, group, each: 2 * crossings * each), "Twice too much: in a ring each rank"),
    ],
    "hybrid-step": [
        (step_without_dp_and_copy, "Two things are missing: what enters the"),
        (step(loss=lambda y, t: ((y - t) ** 2).sum()), "Your loss is a sum over samples and features"),
        (step(reduce=lambda p, dp, tp: dp.all_reduce(p.grad / dp.size)), "The layer is right, but the replicas drift"),
        (step(inside=lambda part, x, tp: F.gelu(copy(x * part["scale"], tp) @ part["w1"].T)), ""),
        (step(inside=lambda part, x, tp: torch.relu(copy(x, tp) @ part["w1"].T)), "Your function raised TypeError"),
        (
            step(inside=lambda part, x, tp: torch.relu((copy(x, tp) * part["scale"]) @ part["w1"].T)),
            "Only scale is wrong: each slice finds a part",
        ),
    ],
    "layout-3d": [
        (layout(dp=lambda n, pp, tp: n), "Your function raised LabError"),
        (layout(dp=lambda n, pp, tp: 2), "processes: a replica is made of"),
        (layout(dp=lambda n, pp, tp: n - pp - tp if n > pp + tp else 1), "processes: a replica is made of"),
        (layout(micro=lambda batch, b, dp: batch // dp), "samples: each of the"),
        (layout(micro=lambda batch, b, dp: 1), "samples: you divide by all processes, but the"),
        (layout(micro=lambda batch, b, dp: -(-batch // (b * dp)) + 1), "With micro_batches="),
        (layout(make=dict), "A dlojz.Layout is expected, but an object of"),
    ],
}
