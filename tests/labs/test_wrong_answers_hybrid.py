"""The bank of wrong answers of lab 07, on one process and on real ranks.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlojz.by_hand.tensor.axis import add_up, copy
from dlojz.config.layout import AXES, Layout, RankGrid
from dlojz.config.run_config import RunConfig
from dlojz.labs import lab07_hybrid as lab
from dlojz.labs.kit.exercise import judge
from dlojz.labs.lab07_hybrid.exercises import (
    CASES,
    PER_NODE,
    PLACED,
    ROUNDS,
    SIZES,
    between_nodes,
    between_share,
    gradients,
    groups_of,
    layout_3d,
    make_part,
    messages_of,
    missing_degree,
    place_of,
    placed,
)
from dlojz.prediction.link_traffic import crossing
from dlojz.results.footprint import Traffic
from tests.labs import student_answers_hybrid as student
from tests.labs.answers import hybrid_step
from tests.labs.bank import Answer, BankTests

EXERCISES = {exercise.id: exercise for exercise in lab.EXERCISES}


def derived(processes: int, dp: int | None, pp: int | None, tp: int | None) -> list[int]:
    known = 1
    for degree in (dp, pp, tp):
        known *= degree or 1
    if processes % known or (None not in (dp, pp, tp) and known != processes):
        raise ValueError(processes)
    return [degree or processes // known for degree in (dp, pp, tp)]


def rounded(processes: int, dp: int | None, pp: int | None, tp: int | None) -> tuple[int, int, int]:
    known = (dp or 1) * (pp or 1) * (tp or 1)
    return dp or processes // known, pp or processes // known, tp or processes // known


def subtracted(processes: int, dp: int | None, pp: int | None, tp: int | None) -> tuple[int, int, int]:
    rest = processes - sum(degree for degree in (dp, pp, tp) if degree)
    return dp or rest, pp or rest, tp or rest


def strided(axis: str, dp: int, pp: int, tp: int) -> list[range]:
    """Another right way: a step per axis, and the ranks from which a group begins."""
    step, size = {"tp": (1, tp), "dp": (tp, dp), "pp": (tp * dp, pp)}[axis]
    return [range(r, r + step * size, step) for r in range(dp * pp * tp) if r // step % size == 0]


def consecutive(axis: str, dp: int, pp: int, tp: int) -> list[list[int]]:
    size = {"tp": tp, "dp": dp, "pp": pp}[axis]
    return [list(range(first, first + size)) for first in range(0, dp * pp * tp, size)]


def by_key(key: Callable[[int, int, int], Any], order: str = "pdt") -> Answer:
    """Groups of the ranks whose `key(p, d, t)` is equal, ranks numbered with the last letter innermost."""

    def groups(axis: str, dp: int, pp: int, tp: int) -> list[list[int]]:
        sizes, found = {"p": pp, "d": dp, "t": tp}, {}
        rank = 0
        for a in range(sizes[order[0]]):
            for b in range(sizes[order[1]]):
                for c in range(sizes[order[2]]):
                    at = dict(zip(order, (a, b, c), strict=True))
                    mine = key(at["p"], at["d"], at["t"])
                    found.setdefault(mine[["pp", "dp", "tp"].index(axis)], []).append(rank)
                    rank += 1
        return list(found.values())

    return groups


def others(p: int, d: int, t: int) -> tuple[Any, Any, Any]:
    return (d, t), (p, t), (p, d)


def ring(
    per_rank: Callable[[str, float, int], float] = lambda collective, m, n: ROUNDS[collective] * (n - 1) / n * m,
    *,
    node: Callable[[int, int], int] = lambda rank, gpus_per_node: rank // gpus_per_node,
    closed: bool = True,
    count: Callable[[int, int], int] = lambda crossings, n: crossings,
) -> Answer:
    def answer(collective: str, message_bytes: int, group: Any, gpus_per_node: int) -> float:
        crossings, n = 0, len(group)
        for i in range(n if closed else n - 1):
            if node(group[i], gpus_per_node) != node(group[(i + 1) % n], gpus_per_node):
                crossings += 1
        return count(crossings, n) * per_rank(collective, message_bytes, n)

    return answer


def step(
    *,
    over: str = "dp",
    divided: str = "dp",
    output: str | None = "tp",
    inward: str | None = "tp",
    bias_first: bool = False,
    names: tuple[str, ...] = ("scale", "w1", "w2", "bias"),
    backward: bool = True,
) -> Answer:
    def answer(part: Any, x: Any, targets: Any, dp: Any, tp: Any) -> None:
        axes = {"dp": dp, "tp": tp}
        x = x * part["scale"]
        hidden = torch.relu((copy(x, axes[inward]) if inward else x) @ part["w1"].T)
        y = hidden @ part["w2"].T
        if bias_first:
            y = y + part["bias"]
        y = add_up(y, axes[output]) if output else y
        if not bias_first:
            y = y + part["bias"]
        if backward:
            torch.nn.functional.mse_loss(y, targets).backward()
        sizes = {"dp": dp.size, "tp": tp.size, "world": dist.get_world_size(), "": 1}
        for name in names if backward else ():
            if over == "world":
                dist.all_reduce(part[name].grad)
            elif over:
                axes[over].all_reduce(part[name].grad)
            part[name].grad /= sizes[divided]

    return answer


def shared_by_hand(part: Any, x: Any, targets: Any, dp: Any, tp: Any) -> None:
    """Another right way: without `copy`, the gradient of what is whole on every rank added up over tp by hand."""
    y = add_up(torch.relu((x * part["scale"]) @ part["w1"].T) @ part["w2"].T, tp) + part["bias"]
    torch.nn.functional.mse_loss(y, targets).backward()
    tp.all_reduce(part["scale"].grad)
    for parameter in part.values():
        parameter.grad /= dp.size
        dp.all_reduce(parameter.grad)


def never_meets(part: Any, x: Any, targets: Any, dp: Any, tp: Any) -> None:
    step()(part, x, targets, dp, tp)
    if dist.get_rank() == 0:
        dp.all_reduce(torch.zeros(3))


def layout(**changes: Callable[[int, int, int, int, int], Any]) -> Answer:
    def answer(n: int, pp: int, tp: int, b: int, batch: int) -> Layout:
        dp = n // (pp * tp)
        fields: dict[str, Any] = {"dp": dp, "pp": pp, "tp": tp, "micro_batch": b, "micro_batches": batch // (b * dp)}
        fields |= {name: change(n, pp, tp, b, batch) for name, change in changes.items()}
        return Layout(**{"engine": "by_hand", **fields})

    return answer


def passed(own: Any, step: int = 1) -> Any:
    """Send to the rank `step` further; what the rank as far before has sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(own)
    works = [dist.isend(own.contiguous(), (rank + step) % size), dist.irecv(arrived, (rank - step) % size)]
    for work in works:
        work.wait()
    return arrived


def tour(k: Any, v: Any, step: int = 1, together: bool = True, rounds: int | None = None) -> Any:
    """Yield the keys and values of each rank, this one's first."""
    for number in range(rounds or dist.get_world_size()):
        if number and together:
            k, v = passed(torch.stack((k, v)), step)
        elif number:
            k, v = passed(k, step), passed(v, step)
        yield k, v


def attention_ring(root: bool = True, divided: bool = True, wide: Any = None, **how: Any) -> Answer:
    def answer(q: Any, k: Any, v: Any) -> Any:
        scale = q.shape[-1] ** -0.5 if root else 1.0
        output, total = torch.zeros_like(q, dtype=wide), torch.zeros_like(q[..., :1], dtype=wide)
        for keys, values in tour(k, v, **how):
            weights = torch.exp(torch.einsum("bnsh,bnth->bnst", q * scale, keys))
            output += weights @ values
            total += weights.sum(-1, keepdim=True)
        return (output / total if divided else output).to(q.dtype)

    return answer


def attention_online(q: Any, k: Any, v: Any) -> Any:
    """With the largest score so far taken away."""
    output, total, largest = 0.0, 0.0, torch.full_like(q[..., :1], -torch.inf)
    for keys, values in tour(k, v):
        scores = q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        shrunk, weights = (largest - new).exp(), (scores - new).exp()
        output, total = output * shrunk + weights @ values, total * shrunk + weights.sum(-1, keepdim=True)
        largest = new
    return output / total


def attention_by_lse(q: Any, k: Any, v: Any) -> Any:
    outputs, sums = [], []
    for keys, values in tour(k, v):
        scores = q @ keys.mT / q.shape[-1] ** 0.5
        outputs.append(scores.softmax(-1) @ values)
        sums.append(scores.logsumexp(-1))
    shares = torch.stack(sums).softmax(0)
    return (torch.stack(outputs) * shares.unsqueeze(-1)).sum(0)


def attention_of_blocks(merge: Answer, **how: Any) -> Answer:
    """Each block with its own softmax."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: merge(torch.stack([attend(q, keys, values) for keys, values in tour(k, v, **how)]))


def attention_gathered(q: Any, k: Any, v: Any) -> Any:
    every = [[torch.empty_like(one) for _ in range(dist.get_world_size())] for one in (k, v)]
    for found, one in zip(every, (k, v), strict=True):
        dist.all_gather(found, one)
    return torch.nn.functional.scaled_dot_product_attention(q, *(torch.cat(one, dim=2) for one in every))


def attention_back_again(q: Any, k: Any, v: Any) -> Any:
    output, total = 0.0, 0.0
    for _ in range(dist.get_world_size()):
        weights = (q @ k.mT / q.shape[-1] ** 0.5).exp()
        output, total = output + weights @ v, total + weights.sum(-1, keepdim=True)
        k, v = passed(torch.stack((k, v)))
    return output / total


def in_order(messages: Any, nodes: int, per_node: int) -> Any:
    return [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]


def by_neighbours(messages: Any, nodes: int, per_node: int) -> Any:
    """Each node: a rank that is left, and those it exchanges most with."""
    left, found = set(range(nodes * per_node)), []
    while left:
        first = min(left)
        near = sorted(left - {first}, key=lambda r: -messages.get((first, r), 0) - messages.get((r, first), 0))
        found.append([first, *near[: per_node - 1]])
        left -= set(found[-1])
    return found


def by_swaps(messages: Any, nodes: int, per_node: int) -> Any:
    """Swap two ranks as long as that helps, from several beginnings."""

    def cost(order: list[int]) -> int:
        node = {rank: place // per_node for place, rank in enumerate(order)}
        return sum(mib for (a, b), mib in messages.items() if node[a] != node[b])

    best: list[int] = list(range(nodes * per_node))
    for seed in range(40):
        order = random.Random(seed).sample(range(nodes * per_node), nodes * per_node)
        swapped = True
        while swapped:
            swapped = False
            for i, j in itertools.combinations(range(len(order)), 2):
                other = order.copy()
                other[i], other[j] = other[j], other[i]
                if cost(other) < cost(order):
                    order, swapped = other, True
        best = min(best, order, key=cost)
    return [best[node * per_node : (node + 1) * per_node] for node in range(nodes)]


REFERENCES: dict[str, Answer] = {
    "grid-place": place_of,
    "grid-degrees": missing_degree,
    "grid-groups": groups_of,
    "between-nodes": between_nodes,
    "hybrid-step": hybrid_step,
    "layout-3d": layout_3d,
    "ring-attention": attention_ring(),
    "rank-placement": placed,
}

OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("grid-place", lambda r, dp, pp, tp: [r // (dp * tp), (r // tp) % dp, r % tp]),
    ("grid-degrees", derived),
    ("grid-groups", strided),
    ("grid-groups", by_key(others)),
    ("hybrid-step", step()),
    ("hybrid-step", shared_by_hand),
    ("ring-attention", attention_ring(together=False)),
    ("ring-attention", attention_ring(step=-1)),
    ("ring-attention", attention_ring(wide=torch.float64)),
    ("ring-attention", attention_online),
    ("ring-attention", attention_by_lse),
    ("ring-attention", lambda q, k, v: attention_ring()(q, k, v).clone()),
    ("ring-attention", lambda q, k, v: attention_ring(root=False)(q / math.sqrt(q.shape[-1]), k, v)),
    ("rank-placement", by_swaps),
    ("rank-placement", lambda *case: tuple(map(tuple, placed(*case)))),
    ("rank-placement", lambda *case: [set(node) for node in placed(*case)]),
    ("rank-placement", lambda *case: placed(*case)[::-1]),
    ("rank-placement", lambda *case: [sorted(node, reverse=True) for node in placed(*case)]),
    ("layout-3d", lambda *asked: RunConfig.of(model="coatnet_tiny", **layout_3d(*asked).model_dump())),
]

BANK: dict[str, list[tuple[Answer, str]]] = {
    "grid-place": [
        (lambda r, dp, pp, tp: (r % pp, r // pp % dp, r // (pp * dp)), "the other way round"),
        (lambda r, dp, pp, tp: (r // tp % pp, r // (tp * pp), r % tp), "dp and pp have changed places"),
        (lambda r, dp, pp, tp: (r // (tp * dp), r % dp, r // dp % tp), "dp and tp have changed places"),
        (lambda r, dp, pp, tp: (r % tp, r // tp % dp, r // (tp * dp)), "but in another order"),
        (lambda r, dp, pp, tp: (r // (tp * dp), r // tp, r % tp), "dp_rank grows beyond dp"),
        (lambda r, dp, pp, tp: (r % pp, r % dp, r % tp), "the remainder of the rank itself three times"),
        (lambda r, dp, pp, tp: (r // (tp * pp), r // tp % dp, r % tp), "at (pp, dp, tp)"),
        (lambda r, dp, pp, tp: (r / tp / dp, r / tp % dp, r % tp), "divide with //"),
        (lambda r, dp, pp, tp: r % tp, "Three numbers are expected"),
        (lambda r, dp, pp, tp: None, "returns nothing"),
    ],
    "grid-degrees": [
        (rounded, "no whole degree makes this product"),
        (subtracted, "degrees multiply"),
        (lambda n, dp, pp, tp: rounded(n, dp, pp, tp)[::-1], "in another order"),
        (lambda n, dp, pp, tp: (dp or n // (pp or 1), pp or n, tp or n), "divide by tp=2 too"),
        (lambda n, dp, pp, tp: (dp or 1, pp or 1, tp or 1), "which makes 8 processes, not 16"),
        (lambda n, dp, pp, tp: (dp or n / pp / tp, pp, tp), "divide with //"),
        (lambda n, dp, pp, tp: n // (pp * tp), "Three numbers are expected"),
    ],
    "grid-groups": [
        (consecutive, "consecutive ranks along every axis"),
        (by_key(others, "dpt"), "The axes dp and pp have changed places"),
        (by_key(others, "tdp"), "The order of the axes is the other way round"),
        (by_key(lambda p, d, t: (p, d, t)), "You group the ranks that have the same place"),
        (
            lambda axis, dp, pp, tp: [
                range(i, dp * pp * tp, dp * pp * tp // {"tp": tp, "dp": dp, "pp": pp}[axis])
                for i in range(dp * pp * tp // {"tp": tp, "dp": dp, "pp": pp}[axis])
            ],
            "right for pp, the outermost axis, alone",
        ),
        (lambda axis, dp, pp, tp: [[r] for r in range(dp * pp * tp)], "have 2 rank(s) each, 8 groups in all"),
        (lambda axis, dp, pp, tp: strided(axis, dp, pp, tp)[:-1], "stands in no group"),
        (lambda axis, dp, pp, tp: [*strided(axis, dp, pp, tp), [0]], "stands in two groups"),
        (lambda axis, dp, pp, tp: [[1 + r for r in g] for g in strided(axis, dp, pp, tp)], "There is no rank 16"),
        (
            lambda axis, dp, pp, tp: strided(axis, dp, pp, tp) if axis != "pp" else consecutive(axis, dp, pp, tp),
            "you put ranks 0 and 1 into one group along pp",
        ),
        (lambda axis, dp, pp, tp: 3, "A list of groups"),
    ],
    "between-nodes": [
        (ring(closed=False), "Your chain does not close"),
        (ring(lambda c, m, n: ROUNDS[c] * m), "You count the whole message"),
        (ring(lambda c, m, n: m), "one whole message per boundary"),
        (ring(lambda c, m, n: (n - 1) / n * m), "you count one round for each"),
        (ring(lambda c, m, n: 2 * (n - 1) / n * m), "two rounds for every collective"),
        (ring(count=lambda crossings, n: n if crossings else 0), "as soon as it touches two nodes"),
        (ring(count=lambda crossings, n: min(crossings, 1)), "You count one rank only"),
        (ring(count=lambda crossings, n: n), "stay inside it"),
        (ring(node=lambda rank, per: rank % per), "the number of a GPU within its node"),
        (ring(lambda c, m, n: ROUNDS[c] * (n - 1) * m), "is expected, but your function returns"),
        (lambda c, m, group, per: None, "returns nothing"),
        (
            lambda c, m, group, w: ROUNDS[c] * (len(group) - 1) / len(group) * m * len({r // w for r in group}),
            "one even where",
        ),
    ],
    "hybrid-step": [
        (step(over="world", divided="world"), "averaged over all ranks"),
        (step(over="tp", divided="tp", output="dp", inward="dp"), "The two axes are swapped"),
        (step(over="tp", divided="tp"), "The gradients are averaged over tp"),
        (step(divided="world"), "divided by all ranks"),
        (step(divided="tp"), "divided by tp.size"),
        (step(divided=""), "dp.size times too large"),
        (step(over="", divided=""), "the replicas drift apart"),
        (step(inward=None), "Only scale is wrong"),
        (step(output=None), "its own term of the output alone"),
        (step(bias_first=True), "The bias is added on every rank"),
        (step(names=("w1", "w2")), "scale and bias are left out"),
        (step(backward=False), "No parameter has a gradient"),
        (never_meets, "rank 0"),
    ],
    "layout-3d": [
        (layout(dp=lambda n, pp, tp, b, batch: n // pp), "dp=4 makes 16 processes"),
        (layout(pp=lambda n, pp, tp, b, batch: tp, tp=lambda n, pp, tp, b, batch: pp), "are swapped"),
        (layout(tp=lambda n, pp, tp, b, batch: 1), "You give pp=2 and tp=1"),
        (layout(micro_batches=lambda n, pp, tp, b, batch: batch // b), "so divide by dp too"),
        (layout(micro_batches=lambda n, pp, tp, b, batch: max(batch // (b * n), 1)), "you divide by all processes"),
        (layout(micro_batches=lambda n, pp, tp, b, batch: batch), "a step reads 64 samples"),
        (layout(micro_batch=lambda n, pp, tp, b, batch: batch), "one forward reads 2 samples"),
        (layout(engine=lambda *asked: "torch"), "the engine is 'torch'"),
        (lambda n, pp, tp, b, batch: {"pp": pp}, "A dlojz.Layout is expected"),
        (lambda n, pp, tp, b, batch: None, "returns nothing"),
    ],
    "ring-attention": [
        (torch.nn.functional.scaled_dot_product_attention, "keys of this rank's tokens alone"),
        (attention_ring(rounds=1), "keys of this rank's tokens alone"),
        (attention_of_blocks(lambda blocks: blocks.mean(0)), "the mean of the blocks' outputs"),
        (attention_of_blocks(lambda blocks: blocks.sum(0)), "each divided by its own sum"),
        (attention_ring(divided=False), "not divided by the sum of the exponentials"),
        (attention_ring(root=False), "the root of H"),
        (attention_gathered, "a collective brings the ranks' tensors together"),
        (attention_back_again, "the last one brings its own back"),
    ],
    "rank-placement": [
        (lambda messages, nodes, per: None, "returns nothing"),
        (lambda messages, nodes, per: nodes, "A list of groups such as"),
        (lambda messages, nodes, per: in_order(messages, nodes, per)[1:], "stands in no group"),
        (lambda messages, nodes, per: [list(range(nodes * per))], "gets 16 ranks"),
        (lambda messages, nodes, per: in_order(messages, per * 2, nodes // 2), "gets 2 ranks"),
        (
            lambda messages, nodes, per: [[rank + 1 for rank in node] for node in in_order(messages, nodes, per)],
            "There is no rank 16",
        ),
        (lambda messages, nodes, per: [[0, 1, 2, 3]] * nodes, "stands in two groups"),
    ],
}


WRONG = {name: [*answers, *student.WRONG.get(name, ())] for name, answers in BANK.items()}


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right = WRONG, REFERENCES
    others = (*OTHER_RIGHT_ANSWERS, *student.RIGHT)


@pytest.mark.parametrize("answer", [in_order, by_neighbours])
def test_a_placement_that_parts_what_sends_much_is_valid_and_misses_the_target(answer: Answer) -> None:
    verdict = judge(EXERCISES["rank-placement"], answer)
    assert verdict.state == "note"
    assert verdict.score > EXERCISES["rank-placement"].target


def test_between_share_of_the_target_is_what_a_search_from_many_beginnings_finds() -> None:
    for grid in PLACED:
        messages = messages_of(*grid)
        greedy, searched = (between_share(messages, place(messages, 4, PER_NODE)) for place in (placed, by_swaps))
        assert greedy == pytest.approx(searched)


def test_the_references_are_the_grid_itself() -> None:
    for dp, pp, tp in SIZES:
        grid = RankGrid(dp=dp, pp=pp, tp=tp)
        for rank in range(grid.world_size):
            assert place_of(rank, dp, pp, tp) == grid.coordinates(rank)
        for axis in AXES:
            assert {frozenset(group) for group in strided(axis, dp, pp, tp)} == set(map(frozenset, grid.groups(axis)))


def test_what_leaves_a_node_is_what_the_links_carry() -> None:
    for collective in ROUNDS:
        for order in ("tp-dp-pp", "pp-dp-tp"):
            grid = RankGrid(dp=2, pp=2, tp=4, gpus_per_node=4, order=order)
            for axis in AXES:
                told = Traffic(
                    collective=collective, group=axis, group_size=grid.size(axis), count=1, message_bytes=960
                )
                between = crossing([[told]] * grid.world_size, grid).bytes_of(axis, between=True)
                assert between == sum(between_nodes(collective, 960, group, 4) for group in grid.groups(axis))


def test_gradients_in_two_dimensions_are_those_of_one_process() -> None:
    """What the judge holds answers to, against autograd on the whole layer and the whole batch."""
    dp, tp, seed = 2, 3, 5
    parts = [make_part(rank, dp, tp, seed) for rank in range(dp * tp)]
    w1 = torch.cat([part["w1"] for part, _, _ in parts[:tp]]).detach().requires_grad_()
    w2 = torch.cat([part["w2"] for part, _, _ in parts[:tp]], dim=1).detach().requires_grad_()
    scale, bias = (parts[0][0][name].detach().clone().requires_grad_() for name in ("scale", "bias"))
    x, targets = (torch.cat([parts[rank][n] for rank in range(0, dp * tp, tp)]) for n in (1, 2))
    torch.nn.functional.mse_loss(torch.relu((x * scale) @ w1.T) @ w2.T + bias, targets).backward()
    for rank, found in enumerate(gradients(dp, tp, seed)):
        torch.testing.assert_close(found["gradient of w1"], w1.grad.chunk(tp)[rank % tp])
        torch.testing.assert_close(found["gradient of w2"], w2.grad.chunk(tp, dim=1)[rank % tp])
        torch.testing.assert_close(found["gradient of scale"], scale.grad)
        torch.testing.assert_close(found["gradient of bias"], bias.grad)


def test_a_specification_gives_the_batch_that_was_asked_for() -> None:
    for asked in CASES:
        layout = layout_3d(*asked)
        assert (layout.world_size, layout.global_batch) == (asked.processes, asked.global_batch)
