"""The bank of wrong answers of lab 05, on one process and on real ranks.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""
# ruff: noqa: PLC3002 - an answer that takes one more name fits on its line

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlojz.labs import lab05_pipeline as lab
from dlojz.labs.kit.exercise import Challenge, judge
from dlojz.labs.lab05_pipeline.exercises_orders import BEST, CASES, DEADLOCK_KEPT, FRUGAL, LIMIT, kept, pipeline_step
from dlojz.labs.lab05_pipeline.exercises_runs import first_fit, largest_step, run_stage, smallest_bottleneck, stale_sgd
from dlojz.pipeline.orders.asynchronous import threshold
from dlojz.pipeline.orders.zero_bubble import list_schedule
from dlojz.pipeline.partition import exact
from dlojz.pipeline.schedule import Costs, Schedule, parse_action
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.shortest_schedule import optimum
from dlojz.pipeline.simulator import peak_activations, simulate
from tests.labs.answers import deepspeed_pipeline, one_f_one_b, unblocked, under_cap, without_bubble
from tests.labs.bank import Answer, BankTests

EXERCISES = {exercise.id: exercise for exercise in lab.EXERCISES if not isinstance(exercise, Challenge)}


def by_slots(p: int, m: int, f: float, b: float) -> list[float]:
    done = [0.0] * p
    for _ in range(m):
        at = 0.0
        for stage in range(p):
            at = done[stage] = max(done[stage], at) + f
    length = done[-1] + (m + p - 1) * b
    work = m * (f + b)
    return [length, (length - work) / length, (length - work) / work]


def other_1f1b(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """The other writing: p − 1 − r forwards, then (forward, backward) in turn, then the backwards left."""
    warm_up = min(ranks - 1 - rank, micro_batches)
    order = [f"{rank}F{k}" for k in range(warm_up)]
    for k in range(micro_batches - warm_up):
        order += [f"{rank}F{k + warm_up}", f"{rank}B{k}"]
    return order + [f"{rank}B{k}" for k in range(micro_batches - warm_up, micro_batches)]


def gpipe(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return [f"F{k}" for k in range(micro_batches)] + [f"B{k}" for k in range(micro_batches)]


def warm_up_of(warm_up: Callable[[int, int], int]) -> Answer:
    def order(rank: int, ranks: int, micro_batches: int) -> list[str]:
        ahead = min(warm_up(rank, ranks), micro_batches)
        actions = [f"F{k}" for k in range(ahead)]
        for k in range(micro_batches):
            actions.append(f"B{k}")
            if k + ahead < micro_batches:
                actions.append(f"F{k + ahead}")
        return actions

    return order


def one_at_a_time(rank: int, ranks: int, micro_batches: int) -> list[str]:
    return [f"{kind}{k}" for k in range(micro_batches) for kind in "FB"]


def never_drains(rank: int, ranks: int, micro_batches: int) -> list[str]:
    ahead = min(ranks - rank, micro_batches)
    actions = [f"F{k}" for k in range(ahead)]
    for k in range(micro_batches - ahead):
        actions += [f"B{k}", f"F{k + ahead}"]
    return actions


def too_few_micro_batches_forgotten(rank: int, ranks: int, micro_batches: int) -> list[str]:
    ahead = ranks - rank
    actions = [f"F{k}" for k in range(ahead)]
    for k in range(micro_batches):
        actions += [f"B{k}"] + ([f"F{k + ahead}"] if k + ahead < micro_batches else [])
    return actions


def rows(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


def shorter_warm_up(ranks: int, micro_batches: int, limit: int) -> list[list[str]]:
    """1F1B with fewer forwards in front, and then in turn all the same: ranks wait for forwards that cannot come."""
    return [warm_up_of(lambda r, p: min(p - r, limit))(rank, ranks, micro_batches) for rank in range(ranks)]


def stage_of(receive_type: Any = None, *, track: bool = True, order: str = "right") -> Answer:
    def answer(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        if rank > 0:
            x = torch.empty(shape, dtype=receive_type or dtype)
            dist.recv(x, rank - 1)
            x = x.requires_grad_() if track else x
        y = stage(x)
        if rank < last:
            if order != "receives first":
                dist.send(y, rank + 1)
            gradient = torch.zeros_like(y)
            dist.recv(gradient, rank + 1)
            if order == "receives first":
                dist.send(y, rank + 1)
            y.backward(torch.ones_like(y) if order == "ones" else gradient)
        else:
            loss_of(y).backward()
        if rank > 0:
            dist.send(x.detach() if order == "activation" else x.grad, rank - 1)

    return answer


def forward_only(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        x = torch.empty(shape, dtype=dtype)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank < last:
        dist.send(y.detach(), rank + 1)


def cut_strictly(weights: Any, limit: int) -> list[int]:
    bounds, load = [0], 0
    for block, weight in enumerate(weights):
        if load and load + weight >= limit:
            bounds.append(block)
            load = 0
        load += weight
    return [*bounds, len(weights)]


def fits_recursively(weights: Any, limit: int) -> tuple[int, ...]:
    """From the end: also the fewest stages, with other bounds."""
    bounds, load = [len(weights)], 0
    for block in range(len(weights) - 1, -1, -1):
        if load + weights[block] > limit:
            bounds.append(block + 1)
            load = 0
        load += weights[block]
    return (0, *reversed(bounds))


def stale(step: float, delay: int, updates: int) -> list[float]:
    past = [1.0] * (delay + 1)
    for _ in range(updates):
        past.append(past[-1] - step * past[-1 - delay])
    return past[delay:]


def settings(config: Any, **changes: Any) -> tuple[int, int, dict[str, Any]]:
    layout = config.layout
    document = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": {"stage": layout.zero},
    } | changes
    return layout.world_size, layout.pp, {key: value for key, value in document.items() if value is not None}


def order_of_a_machine(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """A backward as soon as enough forwards are ahead, or none is left."""
    forwards = backwards = 0
    order = []
    while backwards < micro_batches:
        if forwards < micro_batches and forwards - backwards < ranks - rank:
            order.append("F" + str(forwards))
            forwards += 1
        else:
            order.append("B" + str(backwards))
            backwards += 1
    return order


def stage_asynchronous(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    works = []
    if rank > 0:
        x = torch.empty(shape, dtype=dtype)
        dist.irecv(x, rank - 1).wait()
        x.requires_grad = True
    y = stage(x)
    if rank < last:
        works.append(dist.isend(y.detach(), rank + 1))
        gradient = torch.zeros(shape, dtype=dtype)
        dist.irecv(gradient, rank + 1).wait()
        torch.autograd.backward(y, gradient)
    else:
        torch.autograd.backward(loss_of(y))
    if rank > 0:
        works.append(dist.isend(x.grad, rank - 1))
    for work in works:
        work.wait()


def stage_of_a_leaf(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank:
        buffer = torch.zeros(*shape, dtype=dtype)
        dist.recv(buffer, src=rank - 1)
        x = buffer.clone().requires_grad_(True)
    y = stage(x)
    if rank == last:
        loss = loss_of(y)
        loss.backward()
    if rank != last:
        dist.send(y.data, dst=rank + 1)
        arrived = torch.empty(y.shape, dtype=y.dtype)
        dist.recv(arrived, src=rank + 1)
        y.backward(gradient=arrived)
    if rank:
        dist.send(x.grad.contiguous(), dst=rank - 1)


def stage_asked_for(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
    """The gradients are asked for, then put where they belong."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        dist.recv(x.data, rank - 1)
    y, gradient = stage(x), None
    if rank < last:
        dist.send(y.detach(), rank + 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
    parameters = list(stage.parameters())
    wanted = [*parameters, x] if rank > 0 else parameters
    found = torch.autograd.grad(loss_of(y) if rank == last else y, wanted, gradient)
    for parameter, one in zip(parameters, found, strict=False):
        parameter.grad = one
    if rank > 0:
        dist.send(found[-1], rank - 1)


def stage_as_a_loss(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
    """The received gradient as the weights of a sum."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        x = torch.zeros(shape, dtype=dtype)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank < last:
        dist.send(y, rank + 1)
        weights = torch.zeros_like(y)
        dist.recv(weights, rank + 1)
    loss = loss_of(y) if rank == last else (y * weights).sum()
    loss.backward()
    if rank > 0:
        dist.send(x.grad, rank - 1)


def stage_with_a_hook(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
    """The gradient leaves as soon as it is there."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        x = torch.empty(shape, dtype=dtype)
        dist.recv(x, rank - 1)
        x.requires_grad_().register_hook(lambda gradient: dist.send(gradient, rank - 1))
    y = stage(x)
    if rank == last:
        loss_of(y).backward()
        return
    dist.send(y.detach(), rank + 1)
    dist.recv(gradient := torch.empty(shape, dtype=dtype), rank + 1)
    y.backward(gradient)


def stage_in_two_functions(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def received(source: int) -> Any:
        tensor = torch.empty(shape, dtype=dtype)
        dist.recv(tensor, source)
        return tensor

    x = x if rank == 0 else received(rank - 1).requires_grad_()
    y = stage(x)
    if rank < last:
        dist.send(y.detach().clone(), rank + 1)
        y.backward(received(rank + 1))
    else:
        loss_of(y).backward()
    if rank > 0:
        dist.send(x.grad, rank - 1)


def bounds_by_dynamic_programming(weights: Any, limit: int) -> Any:
    best: list[list[int]] = [[0]]
    for end in range(1, len(weights) + 1):
        best.append(min((best[k] + [end] for k in range(end) if sum(weights[k:end]) <= limit), key=len))
    return best[-1]


def stale_in_numpy(step: float, delay: int, updates: int) -> Any:
    weights = np.ones(updates + 1)
    for t in range(updates):
        weights[t + 1] = weights[t] - step * weights[max(0, t - delay)]
    return weights


def stale_recursive(step: float, delay: int, updates: int) -> Any:
    if updates == 0:
        return (1.0,)
    before = stale_recursive(step, delay, updates - 1)
    return (*before, before[-1] - step * before[max(updates - 1 - delay, 0)])


ZB = "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"


def stage_changed(
    *,
    twice: bool = False,
    two: bool = False,
    back: bool = True,
    everywhere: bool = False,
    of_sum: bool = False,
    weights: bool = False,
    loss: float = 1.0,
) -> Answer:
    def answer(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any = None) -> None:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        if two:
            last = 1
        if rank > 0:
            x = torch.empty(shape, dtype=dtype)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if everywhere:
            loss_of(y).backward(retain_graph=True)
        if rank < last:
            dist.send(y.detach(), rank + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient / shape[0] if of_sum else gradient, retain_graph=twice)
            if twice:
                y.backward(gradient)
        elif not everywhere:
            (loss * loss_of(y)).backward()
        if rank > 0:
            handed = next(stage.parameters()).grad if weights else x.grad if back else torch.zeros_like(x)
            dist.send(handed, rank - 1)

    return answer


REFERENCES: dict[str, Answer] = {
    "pipeline-bubble": pipeline_step,
    "one-f-one-b": one_f_one_b,
    "kept-micro-batches": kept,
    "unblock": unblocked,
    "memory-cap": under_cap,
    "stage-boundary": run_stage,
    "first-fit": first_fit,
    "zero-bubble": without_bubble,
    "stale-sgd": stale_sgd,
    "pipeline-json": deepspeed_pipeline,
}

OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("pipeline-bubble", by_slots),
    ("one-f-one-b", other_1f1b),
    ("one-f-one-b", lambda r, p, m: list(build("1f1b", p, m).orders[r])),
    ("unblock", lambda: rows("F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3")),
    ("unblock", lambda: rows("0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3", "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3")),
    ("memory-cap", lambda p, m, n: optimum(p, m, memory_limit=n).schedule.orders),
    ("memory-cap", lambda p, m, n: list_schedule(p, m, priority="backward-first", cap=lambda r: min(n, p - r))),
    ("stage-boundary", stage_of()),
    ("first-fit", fits_recursively),
    ("zero-bubble", lambda: rows("F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3", "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3")),
    ("pipeline-json", settings),
    ("pipeline-json", lambda c: settings(c, train_batch_size=c.layout.global_batch, gradient_accumulation_steps=None)),
    ("pipeline-bubble", lambda p, m, f, b: np.array([(m + p - 1) * (f + b), 1 - m / (m + p - 1), (m + p - 1) / m - 1])),
    ("one-f-one-b", lambda r, p, m: tuple(order_of_a_machine(r, p, m))),
    ("one-f-one-b", lambda r, p, m: np.array(order_of_a_machine(r, p, m))),
    ("kept-micro-batches", lambda s, r, p, m: {"gpipe": m, "1f1b": np.minimum(p - r, m)}[s]),
    ("unblock", lambda: tuple(map(tuple, rows("F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3")))),
    ("unblock", lambda: [np.array(row) for row in unblocked()]),
    ("unblock", lambda: rows(*["F0 B0 F1 F2 B1 F3 B2 B3"] * 2)),
    ("unblock", lambda: rows(*["F0 F1 B0 B1 F2 F3 B2 B3"] * 2)),
    ("memory-cap", lambda p, m, n: [[str(action) for action in row] for row in under_cap(p, m, n).orders]),
    ("memory-cap", lambda p, m, n: [[str(action)[1:] for action in row] for row in under_cap(p, m, n).orders]),
    ("memory-cap", lambda p, m, n: tuple(tuple(row) for row in under_cap(p, m, n).orders)),
    ("memory-cap", lambda p, m, n: optimum(p, m, memory_limit=n).schedule),
    ("memory-cap", lambda p, m, n: [np.array([str(action) for action in row]) for row in under_cap(p, m, n).orders]),
    ("stage-boundary", stage_asynchronous),
    ("stage-boundary", stage_of_a_leaf),
    ("stage-boundary", stage_asked_for),
    ("stage-boundary", stage_as_a_loss),
    ("stage-boundary", stage_with_a_hook),
    ("stage-boundary", stage_in_two_functions),
    ("first-fit", bounds_by_dynamic_programming),
    ("zero-bubble", lambda: rows(ZB, "F0 I0 F1 I1 W0 F2 W1 I2 F3 I3 W2 W3")),
    ("zero-bubble", lambda: rows(ZB, "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W3 W2")),
    ("zero-bubble", lambda: tuple(map(tuple, without_bubble()))),
    ("zero-bubble", lambda: [np.array(row) for row in without_bubble()]),
    ("stale-sgd", stale_in_numpy),
    ("stale-sgd", stale_recursive),
    ("pipeline-json", lambda c: settings(c, train_batch_size=c.layout.global_batch)),
    ("pipeline-json", lambda c: list(settings(c, train_batch_size=c.layout.global_batch))),
    (
        "pipeline-json",
        lambda c: settings(c, train_batch_size=c.layout.global_batch, train_micro_batch_size_per_gpu=None),
    ),
    ("pipeline-json", lambda c: settings(c, steps_per_print=10)),
    ("pipeline-json", lambda c: (np.int64(c.layout.dp * c.layout.pp), np.int64(c.layout.pp), settings(c)[2])),
]

BANK: dict[str, list[tuple[Answer, str]]] = {
    "pipeline-bubble": [
        (lambda p, m, f, b: (p * (m * f + m * b), 0, 0), "the naive way"),
        (lambda p, m, f, b: (m * f + m * b, 0, 0), "the work of one stage"),
        (lambda p, m, f, b: (f * (p + m) + b * (p + m), 0, 0), "one too many"),
        (lambda p, m, f, b: ((p - 1) * f + m * (f + b), 0, 0), "but not the draining"),
        (lambda p, m, f, b: (f * (p + m - 1), 0, 0), "The backward pass is missing"),
        (lambda p, m, f, b: ((m + p - 1) * max(f, b), 0, 0), "the length should be"),
        (lambda p, m, f, b: ((m + p - 1) * (f + b), (p - 1) / m, (p - 1) / m), "Your fraction is the overhead"),
        (lambda p, m, f, b: ((m + p - 1) * (f + b), m / (m + p - 1), 0), "the share of time in which the ranks"),
        (lambda p, m, f, b: ((m + p - 1) * (f + b), (p - 1) * f + (p - 1) * b, 0), "Your fraction is a time"),
        (lambda p, m, f, b: ((m + p - 1) * (f + b), (p - 1) / (m + p - 1), (p - 1) / (m + p - 1)), "may well exceed 1"),
        (lambda p, m, f, b: ((m + p - 1) * (f + b), (p - 1) / (m + p - 1), (p + m - 1) / m), "only the idle time"),
        (lambda p, m, f, b: (m + p - 1) * (f + b), "should return 3 numbers"),
        (lambda p, m, f, b: None, "returns nothing"),
        (lambda p, m, f, b: ((m + p - 1) * (f + b), (p - 1) / m, (p - 1) / (m + p - 1)), "The numbers are right, but"),
        (lambda p, m, f, b: ((m + p - 1) * (f + b), 100 * (p - 1) / (m + p - 1), 100 * (p - 1) / m), "The fraction"),
        (lambda p, m, f, b: ((m + p) * (f + b), p / (m + p), p / m), "The length is one too many"),
        (lambda p, m, f, b: ((m + p - 1) * (f + b) * p, (p - 1) / (m + p - 1), (p - 1) / m), "should be"),
        (lambda p, m, f, b: (9 * (f + b), 3 / 9, 3 / 6), "should be"),
    ],
    "one-f-one-b": [
        (gpipe, "this is GPipe"),
        (warm_up_of(lambda r, p: r + 1), "the wrong way round"),
        (warm_up_of(lambda r, p: p - r - 1), "one forward short"),
        (warm_up_of(lambda r, p: 2 * (p - r) - 1), "but 1F1B keeps 4 there"),
        (one_at_a_time, "takes 96 time units and not 33"),
        (never_drains, "0B4 is missing"),
        (too_few_micro_batches_forgotten, "outside the schedule"),
        (lambda r, p, m: "F0 B0", "A list of actions"),
        (lambda r, p, m: [("F", k) for k in range(m)], "one of its entries is a tuple"),
        (lambda r, p, m: ["G0"], "is no action"),
        (lambda r, p, m: None, "returns nothing"),
        (lambda r, p, m: [a.lower() for a in one_f_one_b(r, p, m)], "'f0' is no action"),
        (lambda r, p, m: one_f_one_b(0, p, m), "rank 1 keeps up to 4 micro-batches, but 1F1B keeps 3"),
        (lambda r, p, m: [f"{k}F" for k in range(m)] + [f"{k}B" for k in range(m)], "'0F' is no action"),
        (lambda r, p, m: [a[0] + str(int(a[1:]) + 1) for a in one_f_one_b(r, p, m)], "0F0 is missing"),
        (lambda r, p, m: gpipe(r, p, m)[:m] + gpipe(r, p, m)[m:][::-1], "rank 0 keeps up to 8 micro-batches, but 1F1B"),
        (lambda r, p, m: one_f_one_b(r, p, m)[:-1], "0B7 is missing"),
        (lambda r, p, m: [one_f_one_b(k, p, m) for k in range(p)], "An order holds texts such as 'F0', but one of its"),
        (lambda r, p, m: " ".join(one_f_one_b(r, p, m)), 'A list of actions such as ["F0", "B0"] is expected, but'),
    ],
    "kept-micro-batches": [
        (lambda s, r, p, m: m if s == "gpipe" else min(m, p), "what rank 0 keeps"),
        (lambda s, r, p, m: p - r if s == "1f1b" else m, "cannot keep more than there are"),
        (lambda s, r, p, m: min(1 + r, m) if s == "1f1b" else m, "the wrong way round"),
        (lambda s, r, p, m: min(m, p - r), "GPipe keeps more"),
        (lambda s, r, p, m: min(m, p - 1 - r) if s == "1f1b" else m, "even the last rank keeps 1"),
        (lambda s, r, p, m: 1 if s == "1f1b" else m, "For 1F1B you keep one micro-batch on every rank"),
        (lambda s, r, p, m: m, "For 1F1B you give all micro-batches, as for GPipe"),
        (lambda s, r, p, m: min(m, p - r) if s == "gpipe" else m, "GPipe and 1F1B are swapped"),
        (lambda s, r, p, m: min(m, p - r + 1) if s == "1f1b" else m, "For 1F1B you count one micro-batch too many"),
        (lambda s, r, p, m: min(m, p - r) if s == "1f1b" else p, "GPipe runs all forwards first, so it keeps as many"),
        (lambda s, r, p, m: max(m, p - r) if s == "1f1b" else m, "For 1F1B take the smaller of the two numbers"),
    ],
    "unblock": [
        (lambda: rows("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"), "That is 1F1B still"),
        (lambda: rows("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 F2 B1 B2 F3 B3"), "rank 0 sends the output of 0F1"),
        (lambda: rows("F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3"), "a rank keeps 4 micro-batches"),
        (lambda: rows("F0 B0 F1 B1 F2 B2 F3 B3", "F0 B0 F1 B1 F2 B2 F3 B3"), "as without a pipeline"),
        (lambda: rows("F0 F1 B0 F2 B1 F3 B2", "F0 F1 B0 F2 B1 F3 B2 B3"), "0B3 is missing"),
        (lambda: rows("F0 F1 B0 F2 B1 F3 B2 B3"), "2 lists are expected"),
        (lambda: rows("B0 F0 F1 F2 B1 F3 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3"), "runs 0B0 before 0F0"),
        (lambda: rows("F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"), "Deadlock of blocking sends"),
        (lambda: rows("F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 B1 F2 B0 F3 B2 B3"), "deadlock"),
        (lambda: "F0 F1 B0 F2 B1 F3 B2 B3", "One list of actions per rank is expected, but a str was"),
        (lambda: rows("F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3 B3"), "1B3 stands 2 times"),
        (lambda: rows("F1 F2 B1 F3 B2 F4 B3 B4", "F1 F2 B1 F3 B2 F4 B3 B4"), "0F0 is missing"),
    ],
    "memory-cap": [
        (lambda p, m, limit: list_schedule(p, m), "rank 0 keeps 8"),
        (lambda p, m, limit: list_schedule(p, m, cap=limit), "78 time units, and 39 are possible"),
        (shorter_warm_up, "48 time units, and 39 are possible"),
        (lambda p, m, limit: list_schedule(p, m, priority="backward-first"), "A forward must wait"),
        (lambda p, m, limit: list_schedule(p, m, priority="backward-first", cap=1), "use the memory there is"),
        (lambda p, m, limit: build("1f1b", p, m), "rank 0 keeps 4"),
        (lambda p, m, limit: list_schedule(p, m + 1, cap=limit), "9 micro-batches"),
        (lambda p, m, n: [gpipe(r, p, m) for r in range(p)], "rank 0 keeps 8. A forward must wait until a backward"),
        (lambda p, m, n: list_schedule(4, 8, priority="backward-first", cap=3), "rank 0 keeps 3. A forward must wait"),
        (lambda p, m, n: under_cap(p, m, n).orders[0], "4 lists are expected, one per rank, but 16 were returned"),
        (lambda p, m, n: under_cap(p, m, n + 1), "rank 0 keeps 4. A forward must wait until a backward"),
        (lambda p, m, n: [list(map(str, row))[:-1] for row in under_cap(p, m, n).orders], "0B7 is missing"),
        (lambda p, m, n: [one_at_a_time(r, p, m) for r in range(p)], "the step takes 96 time units, and 39 are"),
    ],
    "stage-boundary": [
        (stage_of(track=False), "call x.requires_grad_() before the stage runs"),
        (stage_of(order="ones"), "The gradient that has been received is not used"),
        (stage_of(order="activation"), "You send back the activation"),
        (stage_of(order="receives first"), "Deadlock between ranks 0 and 1"),
        (stage_of(torch.float32), "[3, 4] float64, but rank 1 calls recv #1 [3, 4] float32"),
        (forward_only, "There is no gradient of the stage's weight"),
        (
            lambda stage, x, loss_of, shape, dtype, send: loss_of(
                stage(x if x is not None else torch.zeros(shape, dtype=dtype))
            ).backward(),
            "What was received asks for no gradient, so there will be",
        ),
        (stage_changed(twice=True), "backward runs twice from the received gradient, and"),
        (stage_changed(loss=2.0), "your result is 2 times too large: look for a factor"),
        (stage_changed(two=True), "Missing message"),
        (stage_changed(back=False), "What you send back is zero everywhere"),
        (stage_changed(weights=True), "Wrong values on rank"),
        (stage_changed(everywhere=True), "Wrong values on rank"),
        (stage_changed(of_sum=True), "Wrong values on rank"),
    ],
    "first-fit": [
        (cut_strictly, ", exactly the limit."),
        (lambda weights, limit: first_fit(weights, limit)[:-1], "the number of blocks"),
        (lambda weights, limit: list(range(len(weights) + 1)), "are enough"),
        (lambda weights, limit: len(weights), "A list of whole numbers"),
        (lambda weights, limit: None, "returns nothing"),
        (lambda w, limit: first_fit(w, limit)[1:], "your function returns [1, 3, 4], but bounds rise from 0"),
        (lambda w, limit: [0, len(w)], "a stage of your cut [0, 4] weighs 10. Look before you"),
        (lambda w, limit: [w[a:b] for a, b in pairwise(first_fit(w, limit))], "A list of whole numbers is expected,"),
        (lambda w, limit: [b - a for a, b in pairwise(first_fit(w, limit))], "your function returns [1, 2, 1], but"),
        (lambda w, limit: first_fit(sorted(w), limit), "a stage of your cut [0, 2, 3, 4] weighs 7. Look before"),
        (lambda w, limit: [0, *(b + 1 for b in first_fit(w, limit)[1:-1]), len(w)], "a stage of your cut [0, 2, 4, 4]"),
        (
            lambda w, limit: [round(k * len(w) / -(-sum(w) // limit)) for k in range(-(-sum(w) // limit) + 1)],
            "a stage of your cut [0, 2, 4] weighs 7. Look before you",
        ),
    ],
    "zero-bubble": [
        (lambda: [one_f_one_b(rank, 2, 4) for rank in range(2)], "write I and W in place of B"),
        (
            lambda: rows("F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3", "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"),
            "but 14 time units",
        ),
        (
            lambda: rows("F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3", "F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3"),
            "but the limit is 2",
        ),
        (lambda: rows("F0 F1 I0 F2 I1 F3 I2 I3", "F0 I0 F1 I1 F2 I2 F3 I3"), "has both parts"),
        (lambda: rows("F0 F1 W0 I0 F2 I1 W1 F3 I2 W2 I3 W3", "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"), "0W0 before 0I0"),
        (
            lambda: rows("F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"),
            "rank 0 keeps 3 stage-micro-batches at 0F2, but the",
        ),
        (lambda: rows("F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"), "2 lists are expected, one per rank, but 1 were"),
        (
            lambda: rows("F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3", "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2"),
            "1I3 is there, but 1W3 is missing",
        ),
        (
            lambda: rows("F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3", "F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3"),
            "rank 0 keeps 3 stage-micro-batches at 0F2, but the",
        ),
    ],
    "stale-sgd": [
        (lambda a, d, n: [(1 - a) ** k for k in range(n + 1)], "Your gradient is fresh"),
        (lambda a, d, n: stale(a, d + 1, n), "one update too old"),
        (lambda a, d, n: stale(a, d, n)[1:], "w(0) to w(9), 10 values"),
        (lambda a, d, n: [2 * weight for weight in stale(a, d, n)], "begins with w(0) = 1"),
        (lambda a, d, n: None, "returns nothing"),
        (lambda a, d, n: [1.0] + [1.0 - a * k for k in range(1, n + 1)], "Your gradient is always that of w = 1; it"),
        (lambda a, d, n: stale(a, max(0, d - 1), n), "Your gradient is one update too fresh"),
        (lambda a, d, n: stale(a, d, n)[-1], "A list of weights, w(0) to w(updates), is expected"),
        (lambda a, d, n: stale(a, d, n + 1), "For updates=9 the list holds w(0) to w(9), 10 values,"),
        (lambda a, d, n: stale(-a, d, n), "You add the gradient"),
        (lambda a, d, n: stale(2 * a, d, n), "The gradient of w²/2 is w, not 2w"),
        (lambda a, d, n: [1.0] * (d + 1) + stale(a, d, n)[1 : n - d + 1], "For updates=1 the list holds w(0) to w(1),"),
        (
            lambda a, d, n: (
                lambda w: [w.append(w[-1] - a * (w[-1 - d] if len(w) > d else 0)) for _ in range(n)] and w
            )([1.0]),
            "Before there are `delay` updates, the gradient is that",
        ),
    ],
    "pipeline-json": [
        (
            lambda c: settings(c, train_batch_size=c.layout.micro_batch * c.layout.micro_batches * c.layout.world_size),
            "counts every rank",
        ),
        (lambda c: (c.layout.world_size, c.layout.world_size, settings(c)[2]), "You give -p 4"),
        (lambda c: (c.layout.pp, c.layout.pp, settings(c)[2]), "is a whole pipeline of 2 ranks, 4 in all"),
        (lambda c: settings(c, gradient_accumulation_steps=None), "the pipeline is never full"),
        (lambda c: settings(c, zero_optimization={"stage": 2}), "cannot be combined with pp=2"),
        (lambda c: settings(c, zero_optimization=None), "zero_optimization.stage"),
        (lambda c: settings(c, train_micro_batch_size_per_gpu=c.layout.global_batch), "train_micro_batch_size_per_gpu"),
        (lambda c: settings(c)[2], "Three things are expected"),
        (lambda c: None, "returns nothing"),
        (
            lambda c: settings(c, train_batch_size=c.layout.micro_batch * c.layout.micro_batches),
            "DeepSpeed or the lab refuses",
        ),
        (lambda c: (c.layout.world_size, c.layout.dp, settings(c)[2]), "You give -p 2, the replicas"),
        (
            lambda c: settings(c, gradient_accumulation_steps=c.layout.micro_batches * c.layout.pp),
            "DeepSpeed would run your settings with",
        ),
        (lambda c: settings(c, zero_optimization=c.layout.zero), "DeepSpeed or the lab refuses"),
        (lambda c: (c.layout.pp, c.layout.world_size, settings(c)[2]), "You give -p 4; -p is the number of stages of"),
        (lambda c: settings(c, zero_optimization={"stage": 3}), "DeepSpeed or the lab refuses"),
        (lambda c: (4, 2, settings(c)[2]), "You give -p 2, the replicas"),
    ],
}


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right, others = BANK, REFERENCES, OTHER_RIGHT_ANSWERS


def priority_of(kinds: str) -> Any:
    return lambda action, _: (kinds.index(action.kind), action.micro_batch)


FRUGAL_ANSWERS = (
    (lambda: list_schedule(4, 8, priority=priority_of("FIW"), cap=[3, 3, 2, 1], split=True), "right", 9),
    (lambda: [one_f_one_b(rank, 4, 8) for rank in range(4)], "note", 10),
    (lambda: list_schedule(4, 8, priority="backward-first", cap=[4, 3, 2, 1], split=True), "note", 10),
    (lambda: build("zb-h1", 4, 8), "note", 16),
)
FRUGAL_REFUSED = (
    (lambda: under_cap(4, 8, 3), "39 time units, longer than 1F1B's 33"),
    (lambda: list_schedule(4, 8, priority="backward-first", cap=2, split=True), "longer than 1F1B's 33. Rank"),
    (lambda: [one_f_one_b(rank, 2, 8) for rank in range(2)], "4 lists are expected"),
    (lambda: [["F0", "B0"]] * 4, "is missing"),
    (lambda: None, "returns nothing"),
)


@pytest.mark.parametrize(("answer", "state", "score"), FRUGAL_ANSWERS)
def test_judge_of_frugal_counts_what_is_kept(answer: Answer, state: str, score: float) -> None:
    verdict = judge(FRUGAL, answer)
    assert (verdict.state, verdict.score) == (state, score)


@pytest.mark.parametrize(("answer", "words"), FRUGAL_REFUSED)
def test_judge_of_frugal_refuses_what_breaks_its_rules(answer: Answer, words: str) -> None:
    verdict = judge(FRUGAL, answer)
    assert verdict.state == "wrong"
    assert words in verdict.message


def stage_in_halves(*, early: bool = True, blocking: bool = False) -> Answer:
    def answer(stage: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any) -> Any:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        send = dist.send if blocking else send
        if rank > 0:
            x = torch.empty(shape, dtype=dtype)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if early and rank < last:
            send(y.detach(), rank + 1)
        yield
        if not early and rank < last:
            send(y.detach(), rank + 1)
        gradient = None
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
        (y if rank < last else loss_of(y)).backward(gradient)
        if rank > 0:
            send(x.grad, rank - 1)

    return answer


def test_judge_tells_the_two_halves_of_a_stage_apart() -> None:
    assert judge(EXERCISES["stage-boundary"], stage_in_halves()).state == "right"
    for answer in (stage_in_halves(early=False), stage_in_halves(blocking=True)):
        verdict = judge(EXERCISES["stage-boundary"], answer)
        assert verdict.state == "wrong"
        assert "Before yield nothing has been sent" in verdict.message


def test_pipeline_step_and_kept_are_what_simulate_finds() -> None:
    for p, m, f, b in ((4, 9, 1, 2), (8, 16, 2, 3), (3, 2, 5, 1)):
        costs = Costs(forward=f, backward=b)
        for name in ("gpipe", "1f1b"):
            schedule = build(name, p, m)
            timeline = simulate(schedule, costs)
            found = (timeline.makespan, timeline.bubble_fraction, timeline.bubble_overhead)
            assert found == pytest.approx(pipeline_step(p, m, f, b), rel=1e-12)
            assert peak_activations(schedule) == tuple(kept(name, rank, p, m) for rank in range(p))


def test_optimum_is_what_is_asked_for_and_no_better() -> None:
    def read(orders: list[list[str]]) -> Schedule:
        spelled = [[parse_action(f"{rank}{a}" if a[0] in "FB" else a) for a in row] for rank, row in enumerate(orders)]
        return Schedule.of("custom", spelled, [0, 1], 4)

    repaired = read(unblocked())
    assert max(peak_activations(repaired)) == LIMIT
    assert simulate(repaired, Costs(sends="rendezvous")).makespan == 18
    assert optimum(2, 4, split=True, memory_limit=DEADLOCK_KEPT).value == BEST
    for p, m, limit in CASES:
        assert simulate(under_cap(p, m, limit)).makespan == optimum(p, m, memory_limit=limit).value
    assert optimum(4, 8, memory_limit=3).value == 39


def test_the_search_finds_the_smallest_bottleneck() -> None:
    for weights, stages in (([4, 20, 2, 13, 4, 1, 3, 1, 4, 6, 4], 4), ([7, 2, 5, 10, 8], 2), (list(range(1, 10)), 3)):
        assert smallest_bottleneck(first_fit, weights, stages) == exact(weights, stages).bottleneck


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_the_measured_threshold_is_the_law(delay: int) -> None:
    # 1e-3 of bisection, and runs that are finite: the law within half a percent.
    assert largest_step(stale_sgd, delay) == pytest.approx(threshold(delay), rel=5e-3)
