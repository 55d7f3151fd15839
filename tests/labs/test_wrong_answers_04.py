"""The bank of wrong answers of lab 04, on one process and on real ranks.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""
# ruff: noqa: PLC3002 - an answer that takes one more name fits on its line

import json
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.labs import lab04_zero
from dlojz.labs.kit.exercise import Verdict, judge
from dlojz.labs.lab04_zero.exercises_cost import (
    FEWEST_MESSAGES,
    LIMIT_MIB,
    SIZES_MIB,
    all_at_once_seconds,
    compare_with_compute,
    offload_bytes,
    sent_bytes,
    zero_3_seconds,
)
from dlojz.labs.lab04_zero.exercises_stages import gather, state_bytes
from tests.display.legible import DRAWN_IN
from tests.labs.answers import deepspeed_settings
from tests.labs.bank import Answer, BankTests

EXERCISES = {exercise.id: exercise for exercise in lab04_zero.EXERCISES}


def states(p: float, n: int, stage: int) -> float:
    total = 12 * p / n if stage else 12 * p
    total += 2 * p / n if stage > 1 else 2 * p
    return total + (2 * p / n if stage > 2 else 2 * p)


def states_of_one_part(p: float, n: int, stage: int) -> float:
    parts = [12 * p, 2 * p, 2 * p]
    if stage:
        parts[stage - 1] /= n
    return sum(parts)


def sharded(weights: Any, make_optimizer: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = weights.view(size, -1)[rank]
    optimizer = make_optimizer([mine])

    def step(gradient: Any) -> None:
        mine.grad = gradient
        optimizer.step()
        dist.all_gather(list(weights.view(size, -1)), mine.clone())

    return step


def sharded_by_broadcasts(weights: Any, make_optimizer: Any) -> Any:
    own = torch.nn.Parameter(weights.chunk(dist.get_world_size())[dist.get_rank()].clone())
    optimizer = make_optimizer([own])

    def step(gradient: Any) -> None:
        own.grad = gradient
        optimizer.step()
        for rank, part in enumerate(weights.chunk(dist.get_world_size())):
            if rank == dist.get_rank():
                part.copy_(own.detach())
            dist.broadcast(part, src=rank)

    return step


def optimizer_of_everything(weights: Any, make_optimizer: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer([weights])

    def step(gradient: Any) -> None:
        weights.grad = torch.zeros_like(weights)
        weights.grad.chunk(size)[rank].copy_(gradient)
        optimizer.step()
        dist.all_gather_into_tensor(weights, weights.chunk(size)[rank].clone())

    return step


def never_gathers(weights: Any, make_optimizer: Any) -> Any:
    share = weights.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = make_optimizer([share])

    def step(gradient: Any) -> None:
        share.grad = gradient
        optimizer.step()

    return step


def optimizer_anew(weights: Any, make_optimizer: Any) -> Any:
    share = weights.chunk(dist.get_world_size())[dist.get_rank()]

    def step(gradient: Any) -> None:
        share.grad = gradient
        make_optimizer([share]).step()
        dist.all_gather_into_tensor(weights, share)

    return step


def always_the_first_share(weights: Any, make_optimizer: Any) -> Any:
    share = weights.chunk(dist.get_world_size())[0]
    optimizer = make_optimizer([share])

    def step(gradient: Any) -> None:
        share.grad = gradient
        optimizer.step()
        dist.all_gather_into_tensor(weights, share)

    return step


def adds_weights(weights: Any, make_optimizer: Any) -> Any:
    alone = never_gathers(weights, make_optimizer)

    def step(gradient: Any) -> None:
        alone(gradient)
        dist.all_reduce(weights)

    return step


def sums_padded_shares(weights: Any, make_optimizer: Any) -> Any:
    alone = never_gathers(weights, make_optimizer)

    def step(gradient: Any) -> None:
        alone(gradient)
        for rank, part in enumerate(weights.chunk(dist.get_world_size())):
            if rank != dist.get_rank():
                part.zero_()
        dist.all_reduce(weights)

    return step


def gathers_too_early(weights: Any, make_optimizer: Any) -> Any:
    alone = never_gathers(weights, make_optimizer)
    share = weights.chunk(dist.get_world_size())[dist.get_rank()]

    def step(gradient: Any) -> None:
        dist.all_gather_into_tensor(weights, share)
        alone(gradient)

    return step


def flat_of(gradients: Any) -> Any:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def padded(flat: Any) -> Any:
    size = dist.get_world_size()
    share = (flat.numel() + size - 1) // size
    return torch.cat([flat, torch.zeros(share * size - flat.numel())])


def reduced(flat: Any) -> Any:
    share = torch.empty(flat.numel() // dist.get_world_size())
    dist.reduce_scatter_tensor(share, flat)
    return share


def scattered(gradients: Any) -> Any:
    return reduced(padded(flat_of(gradients)) / dist.get_world_size())


def reduces_everything(gradients: Any) -> Any:
    flat = padded(flat_of(gradients))
    dist.all_reduce(flat)
    return flat.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


def brings_all_together(gradients: Any) -> Any:
    flat = padded(flat_of(gradients))
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    return torch.stack(everybody).mean(0).chunk(dist.get_world_size())[dist.get_rank()]


def drops_the_rest(gradients: Any) -> Any:
    size = dist.get_world_size()
    flat = flat_of(gradients)
    return reduced(flat[: flat.numel() // size * size].contiguous()) / size


def pads_each(gradients: Any) -> Any:
    return reduced(torch.cat([padded(gradient.flatten()) for gradient in gradients])) / dist.get_world_size()


def pads_where_nothing_is_missing(gradients: Any) -> Any:
    flat, size = flat_of(gradients), dist.get_world_size()
    return reduced(F.pad(flat, (0, size - flat.numel() % size))) / size


def pads_in_front(gradients: Any) -> Any:
    flat = flat_of(gradients)
    return reduced(F.pad(flat, (-flat.numel() % dist.get_world_size(), 0))) / dist.get_world_size()


def every_other(gradients: Any) -> Any:
    flat = padded(flat_of(gradients))
    dist.all_reduce(flat)
    return flat[dist.get_rank() :: dist.get_world_size()] / dist.get_world_size()


def own_part(gradients: Any) -> Any:
    return padded(flat_of(gradients)).chunk(dist.get_world_size())[dist.get_rank()]


def neighbours_part(gradients: Any) -> Any:
    size = dist.get_world_size()
    return reduced(padded(flat_of(gradients)).view(size, -1).roll(-1, 0).flatten()) / size


def linear(*, keep: bool = False, average: bool = True, of_x: bool = False, whole: bool = False) -> Answer:
    """A layer in stage 3, as the lab's skeleton leads to it, with something else done."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any, share: Any) -> Any:
            weight = gather(share)
            context.save_for_backward(x, weight if keep else share)
            context.rows = len(share)
            return x @ weight.T

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            x, kept = context.saved_tensors
            size = dist.get_world_size()
            weight = kept if keep else gather(kept)
            all_rows = gradient.T @ x
            if whole:
                dist.all_reduce(all_rows)
                rows = all_rows.chunk(size)[dist.get_rank()]
            else:
                rows = torch.empty(context.rows, x.shape[1])
                dist.reduce_scatter_tensor(rows, all_rows.contiguous())
            back = gradient @ weight
            if of_x:
                dist.all_reduce(back)
                back /= size
            return back, rows / size if average else rows

    return Layer.apply


class KeepsWeightInContext(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any, share: Any) -> Any:
        context.save_for_backward(x)
        context.weight = gather(share)
        return x @ context.weight.T

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        (x,) = context.saved_tensors
        size = dist.get_world_size()
        rows = torch.empty(len(context.weight) // size, x.shape[1])
        dist.reduce_scatter_tensor(rows, (gradient.T @ x / size).contiguous())
        return gradient @ context.weight, rows


class NeverReduces(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any, share: Any) -> Any:
        context.save_for_backward(x, share)
        return x @ gather(share).T

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        x, share = context.saved_tensors
        rows = (gradient.T @ x).chunk(dist.get_world_size())[dist.get_rank()]
        return gradient @ gather(share), rows


def settings(config: RunConfig, bucket_mib: float) -> Any:
    layout = config.layout
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": {
            "stage": layout.zero,
            "reduce_bucket_size": bucket_mib * 2**20 / (4 if config.precision == "fp32" else 2),
            "overlap_comm": True,
        },
    }
    if config.precision == "bf16":
        made["bf16"] = {"enabled": True}
    if layout.offload != "none":
        made["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.offload == "parameters":
        made["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    return made


def changed(**changes: Any) -> Answer:
    """The right settings with some keys changed; None leaves one out."""

    def answer(config: RunConfig, bucket_mib: float) -> Any:
        made = deepspeed_settings(config, bucket_mib)
        for key, value in changes.items():
            part = made
            *way, last = key.split("__")
            for name in way:
                part = part[name]
            part[last] = value(config, bucket_mib) if callable(value) else value
            if value is None:
                del part[last]
        return made

    return answer


def sent(passes: tuple[int, int, int, int]) -> Answer:
    return lambda w, n, stage, m: w * (n - 1) / n * passes[stage]


def states_by_list(p: float, n: int, stage: int) -> float:
    return sum(share / (n if stage >= first else 1) for first, share in [(1, 12 * p), (2, 2 * p), (3, 2 * p)])


def states_by_cases(p: int, n: int, stage: int) -> Any:
    if stage == 0:
        return 16 * p
    if stage == 1:
        return 4 * p + 12 * p / n
    return 2 * p + 14 * p / n if stage == 2 else 16 * p / n


def sharded_with_parameter(weights: Any, make_optimizer: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    share = torch.nn.Parameter(weights.chunk(size)[rank])
    optimizer = make_optimizer([share])

    def step(gradient: Any) -> None:
        optimizer.zero_grad()
        share.grad = gradient.clone()
        optimizer.step()
        parts = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(parts, share.detach())
        weights.copy_(torch.cat(parts))

    return step


def sharded_by_slice(weights: Any, make_optimizer: Any) -> Any:
    length = len(weights) // dist.get_world_size()
    mine = weights[dist.get_rank() * length : (dist.get_rank() + 1) * length]
    optimizer = make_optimizer([mine])

    def step(gradient: Any) -> Any:
        mine.grad = gradient
        optimizer.step()
        whole = torch.empty_like(weights)
        dist.all_gather_into_tensor(whole, mine)
        weights.copy_(whole)
        return weights

    return step


def sharded_asynchronously(weights: Any, make_optimizer: Any) -> Any:
    share = weights.split(weights.numel() // dist.get_world_size())[dist.get_rank()]
    optimizer = make_optimizer([share])

    def step(gradient: Any) -> None:
        if share.grad is None:
            share.grad = torch.empty_like(share)
        share.grad.copy_(gradient)
        optimizer.step()
        dist.all_gather_into_tensor(weights, share.clone(), async_op=True).wait()

    return step


class Sharded:
    def __init__(self, weights: Any, make_optimizer: Any) -> None:
        self.weights = weights
        self.share = weights.view(dist.get_world_size(), -1)[dist.get_rank()].detach().clone()
        self.optimizer = make_optimizer([self.share])

    def __call__(self, gradient: Any) -> None:
        self.share.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_gather_into_tensor(self.weights, self.share)


def sharded_by_sends(weights: Any, make_optimizer: Any) -> Any:
    """The gather around a ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = weights.chunk(size)
    optimizer = make_optimizer([chunks[rank]])

    def step(gradient: Any) -> None:
        chunks[rank].grad = gradient
        optimizer.step()
        for hop in range(size - 1):
            sending = dist.isend(chunks[(rank - hop) % size].clone(), (rank + 1) % size)
            dist.recv(chunks[(rank - hop - 1) % size], (rank - 1) % size)
            sending.wait()

    return step


def sharded_in_a_list(weights: Any, make_optimizer: Any) -> Any:
    shares = list(weights.tensor_split(dist.get_world_size()))
    optimizer = make_optimizer([shares[dist.get_rank()]])

    def step(gradient: Any) -> None:
        shares[dist.get_rank()].grad = gradient
        with torch.no_grad():
            optimizer.step()
        dist.all_gather(shares, shares[dist.get_rank()].clone())

    return step


def reduced_by_list(gradients: Any) -> Any:
    flat = padded(flat_of(gradients))
    share = torch.zeros(len(flat) // dist.get_world_size())
    dist.reduce_scatter(share, list(flat.chunk(dist.get_world_size())))
    return share.div_(dist.get_world_size())


def reduced_share_by_share(gradients: Any) -> Any:
    flat, size = padded(flat_of(gradients)), dist.get_world_size()
    for rank, share in enumerate(flat.chunk(size)):
        dist.reduce(share, dst=rank)
    return flat.chunk(size)[dist.get_rank()] / size


def reduced_by_all_to_all(gradients: Any) -> Any:
    flat = padded(flat_of(gradients))
    arrived = torch.empty_like(flat)
    dist.all_to_all_single(arrived, flat)
    return arrived.view(dist.get_world_size(), -1).mean(0)


def reduced_in_place(gradients: Any) -> Any:
    size = dist.get_world_size()
    total = sum(gradient.numel() for gradient in gradients)
    flat, start = torch.zeros(-(-total // size) * size), 0
    for gradient in gradients:
        flat[start : start + gradient.numel()] = gradient.ravel()
        start += gradient.numel()
    flat /= size
    share = torch.empty(len(flat) // size)
    dist.reduce_scatter_tensor(share, flat, op=dist.ReduceOp.SUM)
    return share


def reduced_with_vectors(gradients: Any) -> Any:
    flat = torch.nn.utils.parameters_to_vector(gradients)
    flat = F.pad(flat, (0, (dist.get_world_size() - len(flat)) % dist.get_world_size()))
    share = flat.new_zeros(len(flat) // dist.get_world_size())
    dist.reduce_scatter_tensor(share, flat, async_op=True).wait()
    return torch.true_divide(share, dist.get_world_size())


def reduced_by_ring(gradients: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(padded(flat_of(gradients)).chunk(size))
    for step in range(size - 1):
        sending = dist.isend(chunks[(rank - 1 - step) % size], (rank + 1) % size)
        arrived = torch.empty_like(chunks[0])
        dist.recv(arrived, (rank - 1) % size)
        sending.wait()
        here = (rank - 2 - step) % size
        chunks[here] = chunks[here] + arrived
    return chunks[rank] / size


def layer(*, sum_of: Answer, transposed: bool = False) -> Answer:
    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any, share: Any) -> Any:
            context.save_for_backward(x, share)
            return F.linear(x, gather(share)) if not transposed else (gather(share) @ x.T).T

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            x, share = context.saved_tensors
            return gradient.mm(gather(share)), sum_of(gradient, x, share) / dist.get_world_size()

    return Layer.apply


def by_einsum(gradient: Any, x: Any, share: Any) -> Any:
    rows = torch.zeros_like(share)
    dist.reduce_scatter_tensor(rows, torch.einsum("bo,bi->oi", gradient, x).contiguous())
    return rows


def by_chunks(gradient: Any, x: Any, share: Any) -> Any:
    rows = torch.empty_like(share)
    dist.reduce_scatter(rows, [part.contiguous() for part in torch.chunk(gradient.t() @ x, dist.get_world_size())])
    return rows


def by_exchange(gradient: Any, x: Any, share: Any) -> Any:
    sent = (gradient.T @ x).contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent)
    return arrived.view(-1, *share.shape).sum(0)


def by_reduces(gradient: Any, x: Any, share: Any) -> Any:
    parts = [part.contiguous() for part in (gradient.T @ x).split(len(share))]
    for rank, part in enumerate(parts):
        dist.reduce(part, dst=rank)
    return parts[dist.get_rank()]


class GathersByLists(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any, share: Any) -> Any:
        context.x, context.share = x, share
        parts = [torch.empty_like(share) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, share)
        return torch.cat([x @ part.T for part in parts], dim=1)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        x_gradient = gradient @ gather(context.share)
        rows = torch.empty_like(context.share)
        dist.reduce_scatter_tensor(rows, (gradient.T @ context.x).contiguous())
        rows /= dist.get_world_size()
        return x_gradient, rows


def sent_by_cases(w: float, n: int, stage: int, m: int) -> float:
    one_pass = w * (n - 1) / n
    if stage < 2:
        return 2 * one_pass
    return one_pass + m * one_pass if stage == 2 else one_pass * m * 3


def sent_pass_by_pass(w: float, n: int, stage: int, m: int) -> float:
    passes = 0
    for _ in range(m):
        passes += 1 if stage == 2 else 3 if stage == 3 else 0
    passes += {0: 2, 1: 2, 2: 1, 3: 0}[stage]
    return passes * (w - w / n)


def settings_in_steps(config: RunConfig, bucket_mib: float) -> Any:
    bytes_each = {"bf16": 2, "fp32": 4}[config.precision]
    made: dict[str, Any] = {
        "train_batch_size": config.layout.global_batch,
        "train_micro_batch_size_per_gpu": config.layout.micro_batch,
        "gradient_accumulation_steps": config.layout.micro_batches,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": int(config.layout.zero),
            "reduce_bucket_size": round(bucket_mib * 1024**2 / bytes_each),
        },
    }
    if config.layout.offload != "none":
        made["zero_optimization"].update(offload_optimizer={"device": "cpu"})
        if config.layout.offload == "parameters":
            made["zero_optimization"].update(offload_param={"device": "cpu"})
    return made


def offload_by_parts(p: float, n: int, offload: str) -> Any:
    device = np.array([16, 2, 0]) * p / n
    host = np.array([0, 16, 18]) * p / n
    return tuple(np.stack([device, host])[:, ["none", "optimizer", "parameters"].index(offload)])


def offload_by_cases(p: float, n: int, offload: str) -> Any:
    weights = gradients = 2 * p / n
    master_and_moments = 12 * p / n
    if offload == "none":
        return weights + gradients + master_and_moments, 0
    host = master_and_moments + 2 * gradients
    return (weights, host) if offload == "optimizer" else (0, host + weights)


def times_by_loop(sizes: Any, p: int, a: float, b: float) -> float:
    total = 0.0
    for size in sizes:
        for _ in range(3):
            for _ in range(p - 1):
                total += a + b * size / p
    return total


FORTH = [("gather", [0, 1, 2]), ("forward", 0), ("forward", 1), ("forward", 2), ("free", [0, 1, 2])]
LAST = [("gather", [3]), ("forward", 3), ("backward", 3), ("free", [3])]
MIDDLE = [("gather", [2]), ("backward", 2), ("free", [2]), ("gather", [1]), ("backward", 1), ("free", [1])]
FIRST = [("reduce", [1, 2, 3]), ("gather", [0]), ("backward", 0), ("free", [0]), ("reduce", [0])]
PLAN: list[tuple[str, Any]] = [*FORTH, *LAST, *MIDDLE, *FIRST]


def layer_by_layer() -> list[tuple[str, Any]]:
    """As ZeRO-3 does it: three messages for each layer."""
    plan: list[tuple[str, Any]] = []
    for layer in range(4):
        plan += [("gather", layer), ("forward", layer), ("free", layer)]
    for layer in reversed(range(4)):
        plan += [("gather", layer), ("backward", layer), ("free", layer), ("reduce", layer)]
    return plan


def with_the_last_kept() -> list[tuple[str, Any]]:
    """The last layer stays whole from its forward to its backward."""
    plan = layer_by_layer()
    place = plan.index(("free", 3))
    return plan[:place] + plan[place + 2 :]


def freed_one_by_one() -> list[tuple[str, Any]]:
    plan: list[tuple[str, Any]] = []
    for name, layers in PLAN:
        plan += [(name, [one]) for one in layers] if name == "free" and len(layers) > 1 else [(name, layers)]
    return plan


def freed_as_it_goes() -> list[tuple[str, Any]]:
    forth: list[tuple[str, Any]] = [("gather", (2, 1, 0))]
    for layer in range(3):
        forth += [("forward", layer), ("free", layer)]
    return [*forth, *LAST, *MIDDLE, *FIRST]


def fewest_by_search(sizes: tuple[int, ...], limit: int) -> int:
    """The least number of messages over all plans: breadth-first over what is whole, messages alone counting."""
    count = len(sizes)
    some = [{one for one in range(count) if bits >> one & 1} for bits in range(1, 2**count)]
    start = (0, frozenset[int](), frozenset[int]())
    cost, waiting = {start: 0}, deque([start])
    while waiting:
        here = done, weights, gradients = waiting.popleft()
        if done == 2 * count and not weights and not gradients:
            return cost[here]
        layer = done if done < count else 2 * count - 1 - done
        further = [((done, weights - one, gradients), 0) for one in some if one <= weights]
        further += [((done, weights | one, gradients), 1) for one in some if not one & weights]
        further += [((done, weights, gradients - one), 1) for one in some if one <= gradients]
        if done < 2 * count and layer in weights:
            further.append(((done + 1, weights, gradients | ({layer} if done >= count else set())), 0))
        for there, more in further:
            room = sum(sizes[one] for held in there[1:] for one in held)
            if room <= limit and cost[here] + more < cost.get(there, 10**9):
                cost[there] = cost[here] + more
                (waiting.append if more else waiting.appendleft)(there)
    raise AssertionError


BANK: dict[str, list[tuple[Answer, str]]] = {
    "zero-states": [
        (states_of_one_part, "you stop sharding those of the stages before"),
        (lambda p, n, stage: (2 * p, 2 * p, 12 * p)[0] / n, "is expected, but your function returns"),
        (lambda p, n, stage: 16 * p / n, "even without ZeRO"),
        (lambda p, n, stage: 16 * p / n if stage > 0 else 16 * p, "You shard everything from stage 1"),
        (
            lambda p, n, stage: (
                p * (8 / (n if stage else 1) + 2 / (n if stage > 1 else 1) + 2 / (n if stage > 2 else 1))
            ),
            "The fp32 master copy is missing",
        ),
        (
            lambda p, n, stage: (
                p * (8 / (n if stage else 1) + 4 / (n if stage > 1 else 1) + 4 / (n if stage > 2 else 1))
            ),
            "That is fp32 throughout",
        ),
        (
            lambda p, n, stage: (
                p * (2 / (n if stage else 1) + 2 / (n if stage > 1 else 1) + 12 / (n if stage > 2 else 1))
            ),
            "The order is the other way round",
        ),
        (
            lambda p, n, stage: p * (16 if stage == 0 else 4 + 12 / n if stage == 1 else 2 + 14 / n),
            "Stage 3 is like stage 2 in your function",
        ),
        (lambda p, n, stage: int(states(p, n, stage)) // 16, "is expected, but your function returns"),
        (lambda p, n, stage: states(p, n, stage) * n, "should be"),
        (lambda p, n, stage: states(p, n, stage + 1) if stage < 3 else states(p, n, 3), "You are one stage ahead"),
        (
            lambda p, n, stage: (
                p * (2 / (n if stage > 1 else 1) + 2 / (n if stage > 2 else 1) + 16 / (n if stage else 1))
            ),
            "You count 16 bytes for the optimizer",
        ),
        (
            lambda p, n, stage: (
                p * (12 / (n if stage else 1) + 2 / (n if stage > 2 else 1) + 2 / (n if stage > 2 else 1))
            ),
            "The gradients are sharded from stage 2 on, not from",
        ),
        (lambda p, n, stage: p * (12 / (n - 1) if stage else 12) + 4 * p, "is expected, but your function returns"),
        (lambda p, n, stage: states(p, n, stage) / p, "should be"),
        (lambda p, n, stage: p * (16, 2 + 14 / n, 4 + 12 / n, 16 / n)[stage], "Stages 1 and 2 have changed places"),
        (lambda p, n, stage: p * (16, 4 + 12 / n, 2 + 14 / n, 14 / n)[stage], "In stage 3 you leave the weights out"),
    ],
    "shard-optimizer": [
        (optimizer_of_everything, "24 numbers of 24"),
        (never_gathers, "the all-gather is missing"),
        (optimizer_anew, "made anew in every step"),
        (always_the_first_share, "Every rank updates the first share"),
        (adds_weights, "All-reduce adds up the weights"),
        (sums_padded_shares, "an all-reduce of them sends twice as much"),
        (gathers_too_early, "gathered before the update"),
        (lambda weights, make: sharded(weights, make)(torch.zeros(len(weights) // dist.get_world_size())), "step"),
        (lambda w, make: sharded(w.clone(), make), "The weights have not changed on any rank"),
        (
            lambda w, make: (lambda s: lambda g: s(g / dist.get_world_size()))(sharded(w, make)),
            "You divide the gradient by the number of ranks",
        ),
        (
            lambda w, make: sharded(w, make)(torch.zeros(len(w) // dist.get_world_size())) or None,
            "Your function must return the function step, without",
        ),
        (
            lambda w, make: (
                lambda o: (
                    lambda g: (
                        o.step(),
                        dist.all_gather_into_tensor(w, w.chunk(dist.get_world_size())[dist.get_rank()]),
                    )[0]
                )
            )(make([w.chunk(dist.get_world_size())[dist.get_rank()]])),
            "The weights have not changed on any rank",
        ),
        (
            lambda w, make: (lambda s, o: lambda g: (setattr(s, "grad", g), o.step(), dist.broadcast(w, src=0))[1])(
                w.chunk(dist.get_world_size())[dist.get_rank()], make([w.chunk(dist.get_world_size())[dist.get_rank()]])
            ),
            "The weights have not changed on any rank",
        ),
        (
            lambda w, make: (lambda s: lambda g: (dist.all_reduce(g), s(g))[1])(sharded(w, make)),
            "You add up the gradients that the ranks are given, but",
        ),
    ],
    "shard-gradients": [
        (lambda gradients: reduced(padded(flat_of(gradients))), "times too large"),
        (reduces_everything, "the all-reduce brings the whole sum to every rank"),
        (brings_all_together, "N times the memory"),
        (drops_the_rest, "has the shape"),
        (pads_where_nothing_is_missing, "Where nothing is missing"),
        (pads_each, "You pad each gradient by itself"),
        (pads_in_front, "The zeros stand in front"),
        (every_other, "every N-th number"),
        (own_part, "Every rank keeps its own part"),
        (neighbours_part, "The order of the ranks is another one"),
        (lambda gradients: None, "returns nothing"),
        (
            lambda g: reduced(padded(flat_of(g)) / dist.get_world_size()).view(-1, 1),
            "right order, but on rank 0 their shape is (13, 1)",
        ),
        (lambda g: scattered(g[::-1]), "You lay the gradients end to end from the last to the"),
        (lambda g: scattered(g[:-1]), "The last gradient is missing"),
        (lambda g: scattered([x.T if x.dim() == 2 else x for x in g]), "Your matrices are laid out column by column"),
        (lambda g: scattered(g) / dist.get_world_size(), "The share of the gradient is 2 times too small"),
        (lambda g: reduced(padded(flat_of(g)) / 2), "Wrong values on ranks 0–2, the share of the gradient"),
        (lambda g: [scattered([x]) for x in g], "Your function returns a list, but a torch tensor is"),
    ],
    "shard-weights": [
        (linear(keep=True), "stay in memory from the forward pass to the backward pass"),
        (KeepsWeightInContext.apply, "stay in memory from the forward pass"),
        (NeverReduces.apply, "Every rank keeps its own part"),
        (linear(average=False), "times too large"),
        (linear(of_x=True), "You average the gradient of x"),
        (linear(whole=True), "a reduce-scatter gives each rank its rows"),
        (lambda x, share: x @ share.T, "raised RuntimeError"),
        (lambda x, share: x @ gather(share).T, "nothing links the result to it"),
        (lambda x, share: linear()(x, share) / dist.get_world_size(), "The output is divided by the number of ranks"),
        (lambda x, share: linear()(x, share.detach()), "There is no gradient of the first layer's share"),
        (lambda x, share: linear()(x.detach(), share), "There is no gradient of x"),
        (
            lambda x, share: x @ torch.cat([share] * dist.get_world_size()).T,
            "You repeat this rank's rows in place of those of the",
        ),
        (
            lambda x, share: (
                x
                @ (lambda w: (dist.all_reduce(w), w)[1])(
                    F.pad(
                        share,
                        (
                            0,
                            0,
                            dist.get_rank() * len(share),
                            (dist.get_world_size() - 1 - dist.get_rank()) * len(share),
                        ),
                    )
                ).T
            ),
            "Every rank keeps its own part of the gradient of the",
        ),
    ],
    "zero-volume": [
        (lambda w, n, stage, m: w * (2, 2, m + 1, 3 * m)[stage], "a rank never sends the part that is its own"),
        (sent((2, 2, 2, 3)), "right for one micro-batch"),
        (sent((2, 2, 2, 2)), "is expected, but your function returns"),
        (lambda w, n, stage, m: m * sent((2, 2, 2, 3))(w, n, stage, m), "Not everything is repeated"),
        (lambda w, n, stage, m: sent((2, 2, 2 * m, 3 * m))(w, n, stage, m), "only the reduce-scatter is repeated"),
        (lambda w, n, stage, m: sent((2, 2, m + 1, 2 * m))(w, n, stage, m), "the weights are freed after the forward"),
        (lambda w, n, stage, m: sent((2, 2, 1 + m, 1 + 2 * m))(w, n, stage, m), "gradients too are reduced"),
        (lambda w, n, stage, m: sent((2, 3, 2 + m, 3 * m))(w, n, stage, m), "half an all-reduce"),
        (lambda w, n, stage, m: sent((1, 2, 1 + m, 3 * m))(w, n, stage, m), "An all-reduce counts twice"),
        (
            lambda w, n, stage, m: sent((2, 2, m, 3 * m))(w, n, stage, m),
            "In stage 2 the all-gather of the updated weights is",
        ),
        (lambda w, n, stage, m: sent((1, 1, m + 1, 3 * m))(w, n, stage, m), "In stages 0 and 1 one pass is missing"),
        (
            lambda w, n, stage, m: sent((2, 1 + m, m + 1, 3 * m))(w, n, stage, m),
            "In stage 1 the gradients are accumulated whole, and",
        ),
        (lambda w, n, stage, m: sent((2, 2, m + 1, 3 * m))(w, n, stage, m) * n, "should be"),
        (lambda w, n, stage, m: sent((2, 2, m + 1, 3 * m))(w, n, stage, m) / n, "should be"),
        (
            lambda w, n, stage, m: sent((2, 2, m + 1, m))(w, n, stage, m),
            "In stage 3 you count one pass per micro-batch",
        ),
        (
            lambda w, n, stage, m: sent((4, 2, m + 1, 3 * m))(w, n, stage, m),
            "In stage 0 there is one all-reduce, two passes",
        ),
        (lambda w, n, stage, m: sent((2, 2, m + 1, m + 2))(w, n, stage, m), "twice per step only"),
        (lambda w, n, stage, m: (2, 2, m + 1, 3 * m)[stage] * w / n, "You count one share"),
    ],
    "deepspeed-json": [
        (changed(zero_optimization__stage=None), "zero_optimization.stage"),
        (changed(zero_optimization__stage=lambda config, bucket: 4), "0, 1, 2, 3"),
        (changed(bf16=None), "precision='fp32'"),
        (changed(bf16=True), "bf16 must be an object"),
        (changed(train_batch_size=lambda c, b: c.layout.micro_batch * c.layout.micro_batches), "of all 4 ranks"),
        (
            changed(train_micro_batch_size_per_gpu=lambda c, b: c.layout.global_batch, train_batch_size=None),
            "is the global batch",
        ),
        (changed(train_batch_size=None, gradient_accumulation_steps=None), "gradient_accumulation_steps"),
        (changed(gradient_accumulation_steps=1), "is not micro-batch"),
        (changed(train_batch_size=None, train_micro_batch_size_per_gpu=None), "gives no size of batch"),
        (changed(zero_optimization__reduce_bucket_size=None), "500,000,000"),
        (changed(zero_optimization__reduce_bucket_size=lambda c, b: b * 2**20), "DeepSpeed counts elements"),
        (changed(zero_optimization__reduce_bucket_size=lambda c, b: b), "DeepSpeed counts elements"),
        (changed(zero_optimization__reduce_bucket_size=lambda c, b: b * 2**20 // 4), "gradients of 2 bytes"),
        (changed(zero_optimization__offload_optimizer=lambda c, b: "cpu"), "must be an object"),
        (changed(zero_optimization__offload_optimizer=lambda c, b: {"device": "cpu"}), "offload="),
        (changed(zero_optimization__bucket=5), "zero_optimization"),
        (changed(zero_optimisation={}), "did you mean 'zero_optimization'"),
        (lambda config, bucket: None, "returns nothing"),
        (lambda config, bucket: str(deepspeed_settings(config, bucket)), "A dictionary is expected"),
        (changed(zero_optimization__stage=lambda c, b: {c.layout.zero}), "cannot be written as JSON"),
    ],
    "offload-bytes": [
        (lambda p, n, offload: offload_bytes(p, n, offload)[::-1], "swapped"),
        (lambda p, n, offload: offload_bytes(p, 1, offload), "on the host too"),
        (
            lambda p, n, offload: {"none": (16 * p / n, 0), "optimizer": (2 * p / n, 12 * p / n)}.get(
                offload, (0, 14 * p / n)
            ),
            "The gradient is missing on the host",
        ),
        (
            lambda p, n, offload: {"none": (16 * p / n, 0), "optimizer": (2 * p / n, 14 * p / n)}.get(
                offload, (0, 16 * p / n)
            ),
            "not 2",
        ),
        (
            lambda p, n, offload: {"none": (16 * p / n, 0), "optimizer": (4 * p / n, 12 * p / n)}.get(
                offload, (2 * p / n, 14 * p / n)
            ),
            "The gradients do not stay on the device",
        ),
        (
            lambda p, n, offload: (
                {"none": 16 * p / n, "optimizer": 2 * p}.get(offload, 0),
                offload_bytes(p, n, offload)[1],
            ),
            "are not whole",
        ),
        (lambda p, n, offload: offload_bytes(p, n, offload)[0], "should return 2 numbers"),
        (lambda p, n, offload: (0, 0), "The bytes on the device: your function returns 0 in every case"),
        (lambda p, n, offload: None, "returns nothing"),
        (
            lambda p, n, o: (
                {"none": 16, "optimizer": 2, "parameters": 2}[o] * p / n,
                {"none": 0, "optimizer": 16, "parameters": 16}[o] * p / n,
            ),
            'For "parameters" you leave the weights on the device',
        ),
        (
            lambda p, n, o: (
                {"none": 16, "optimizer": 4, "parameters": 2}[o] * p / n,
                {"none": 0, "optimizer": 16, "parameters": 18}[o] * p / n,
            ),
            "On the device you still count the 16-bit gradients",
        ),
        (
            lambda p, n, o: (
                {"none": 16, "optimizer": 2, "parameters": 0}[o] * p / n,
                {"none": 0, "optimizer": 16, "parameters": 20}[o] * p / n,
            ),
            'For "parameters" you count the weights on the host in',
        ),
        (
            lambda p, n, o: (
                {"none": 16, "optimizer": 2, "parameters": 0}[o] * p,
                {"none": 0, "optimizer": 16, "parameters": 18}[o] * p,
            ),
            "These are the bytes of the whole model",
        ),
        (
            lambda p, n, o: {"none": (16 * p / n, 0), "optimizer": (2 * p / n, 16 * p / n)}.get(o, (0, 16 * p / n)),
            "weights are missing",
        ),
    ],
    "offload-time": [
        (lambda n, tokens, flops, pcie: 6 * tokens / flops / (4 / n / pcie), "the other way round"),
        (lambda n, tokens, flops, pcie: 2 / n / pcie * flops / 6 / tokens, "That is one direction"),
        (lambda n, tokens, flops, pcie: 4 / pcie * flops / 6 / tokens, "its own share only"),
        (lambda n, tokens, flops, pcie: 8 / n / pcie * flops / 6 / tokens, "The transfers are in 16 bit"),
        (lambda n, tokens, flops, pcie: 16 / n / pcie * flops / 6 / tokens, "never travel"),
        (lambda n, tokens, flops, pcie: 4 / n / pcie * flops / 2 / tokens, "the forward pass alone"),
        (lambda n, tokens, flops, pcie: 4 / n * pcie * flops / 6 / tokens, "is expected"),
        (lambda n, tokens, flops, pcie: 4 / n / pcie * flops / 6, "should be"),
        (
            lambda n, tokens, flops, pcie: 4 / n / pcie * flops / 4 / tokens,
            "You count the backward pass alone, 4 operations per",
        ),
        (lambda n, tokens, flops, pcie: 4 * n / pcie * flops / 6 / tokens, "You multiply by the number of ranks"),
        (lambda n, tokens, flops, pcie: 4 / n / pcie * flops / 6 / (tokens * n), "should be"),
        (lambda n, tokens, flops, pcie: 4 / n / pcie + 6 * tokens / flops, "You add both times"),
    ],
    "zero-time": [
        (
            lambda sizes, p, a, b: sum((p - 1) * (a + b * n / p) for n in sizes),
            "the gradients alone, or the weights alone",
        ),
        (lambda sizes, p, a, b: sum(2 * (p - 1) * (a + b * n / p) for n in sizes), "two collectives per layer"),
        (lambda sizes, p, a, b: 3 * (p - 1) * (a + b * sum(sizes) / p), "all layers in one message"),
        (lambda sizes, p, a, b: sum(3 * a + 3 * b * n * (p - 1) / p for n in sizes), "paid once per collective"),
        (lambda sizes, p, a, b: sum(6 * (p - 1) * (a + b * n / p) for n in sizes), "three all-reduces"),
        (lambda sizes, p, a, b: sum(3 * (p - 1) * (a + b * n) for n in sizes), "the whole layer"),
        (lambda sizes, p, a, b: 3 * (p - 1) * b * sum(sizes) / p, "The latency is missing"),
        (lambda s, p, a, b: sum(3 * p * (a + b * n / p) for n in s), "One step too many"),
        (lambda s, p, a, b: sum(3 * (p - 1) * (a + b * n / p) for n in s[:-1]), "The last layer is missing"),
        (lambda s, p, a, b: max(3 * (p - 1) * (a + b * n / p) for n in s), "That is the slowest layer"),
        (lambda s, p, a, b: 3 * (p - 1) * (a + b * sum(s) / len(s) / p), "That is one layer of average size"),
        (lambda s, p, a, b: sum(3 * (a + b * n / p) for n in s), "You count one step per collective"),
        (
            lambda s, p, a, b: sum(4 * (p - 1) * (a + b * n / p) for n in s),
            "In every case your result is 1.33 times too large",
        ),
        (lambda s, p, a, b: 3 * (p - 1) * a * len(s), "The bytes are missing"),
    ],
    "fewest-messages": [
        (lambda: [("gather", [0, 1, 2, 3]), *PLAN[1:]], "16 MiB are whole, where 12 are allowed"),
        (lambda: [*FORTH[:-1], *LAST, *MIDDLE, *FIRST], "16 MiB are whole, where 12 are allowed"),
        (lambda: PLAN[1:], "the weights of layer 0 are not whole; gather them before"),
        (lambda: [*FORTH, *MIDDLE, *LAST, *FIRST], "it is the turn of forward 3"),
        (lambda: [*FORTH, *LAST[:2], ("backward", 2)], "it is the turn of backward 3"),
        (lambda: [*PLAN, ("gather", 0), ("forward", 0)], "all passes are over"),
        (lambda: PLAN[:-1], "the gradients of [0] are not reduced"),
        (lambda: [one for one in PLAN if one != ("free", [0])], "the weights of [0] are still whole"),
        (lambda: [("gather", 0), *PLAN], "the weights of layer 0 are whole already"),
        (lambda: [*FORTH, ("free", 1), *LAST], "there is nothing to free"),
        (lambda: [*FORTH, ("reduce", [3]), *LAST], "there is no whole gradient of layer 3"),
        (lambda: [*FORTH, *LAST], "The plan ends after 5 of 8 passes"),
        (lambda: [("send", [0])], "An operation is a name"),
        (lambda: [("gather", [0, 4])], "An operation is a name"),
        (lambda: [("gather", [0, 0])], "An operation is a name"),
        (lambda: ["gather 0"], "An operation is a name"),
        (lambda: "gather 0", "Return a list of operations"),
        (lambda: PLAN * 20, "look for a loop that adds too many"),
        (lambda: None, "Your function returns nothing"),
    ],
}

REFERENCES: dict[str, Answer] = {
    "fewest-messages": lambda: PLAN,
    "zero-states": states,
    "shard-optimizer": sharded,
    "shard-gradients": scattered,
    "shard-weights": linear(),
    "zero-volume": lambda w, n, stage, m: sent((2, 2, m + 1, 3 * m))(w, n, stage, m),
    "deepspeed-json": settings,
    "offload-bytes": lambda p, n, offload: [
        p / n * {"none": 16, "optimizer": 2, "parameters": 0}[offload],
        p / n * {"none": 0, "optimizer": 16, "parameters": 18}[offload],
    ],
    "offload-time": lambda n, tokens, flops, pcie: 4 / (n * pcie) / (6 * tokens / flops),
    "zero-time": lambda sizes, p, a, b: 3 * (p - 1) * (a * len(sizes) + b * sum(sizes) / p),
}
OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("fewest-messages", freed_one_by_one),
    ("fewest-messages", freed_as_it_goes),
    ("fewest-messages", lambda: tuple((name, (*layers,) if type(layers) is list else layers) for name, layers in PLAN)),
    ("fewest-messages", lambda: [(name, layers if type(layers) is list else [layers]) for name, layers in PLAN]),
    ("fewest-messages", lambda: [[name, layers] for name, layers in PLAN]),
    ("fewest-messages", lambda: [(name, np.array(layers)) for name, layers in PLAN]),
    ("fewest-messages", lambda: [(name, {*layers} if type(layers) is list else layers) for name, layers in PLAN]),
    ("shard-optimizer", sharded_by_broadcasts),
    ("shard-gradients", lambda gradients: reduced(padded(flat_of(gradients))) / dist.get_world_size()),
    ("deepspeed-json", deepspeed_settings),
    ("deepspeed-json", changed(gradient_accumulation_steps=None)),
    ("zero-states", states_by_list),
    ("zero-states", states_by_cases),
    ("zero-states", lambda p, n, stage: p * (16 - (0, 12, 14, 16)[stage] * (1 - 1 / n))),
    ("zero-states", lambda p, n, stage: p * np.dot([12, 2, 2], [1 / n if stage > k else 1 for k in range(3)])),
    ("zero-states", lambda p, n, stage: (2 + 2 + 12, 4 + 12 / n, 2 + 14 / n, 16 / n)[stage] * p),
    ("shard-optimizer", sharded_with_parameter),
    ("shard-optimizer", sharded_by_slice),
    ("shard-optimizer", sharded_asynchronously),
    ("shard-optimizer", Sharded),
    ("shard-optimizer", sharded_by_sends),
    ("shard-optimizer", sharded_in_a_list),
    ("shard-gradients", reduced_by_list),
    ("shard-gradients", reduced_share_by_share),
    ("shard-gradients", reduced_by_all_to_all),
    ("shard-gradients", reduced_in_place),
    ("shard-gradients", reduced_with_vectors),
    ("shard-gradients", reduced_by_ring),
    ("shard-weights", layer(sum_of=by_einsum)),
    ("shard-weights", layer(sum_of=by_chunks)),
    ("shard-weights", layer(sum_of=by_exchange)),
    ("shard-weights", layer(sum_of=by_reduces)),
    ("shard-weights", layer(sum_of=by_einsum, transposed=True)),
    ("shard-weights", GathersByLists.apply),
    ("shard-weights", lambda x, share: linear()(x, share).clone()),
    ("zero-volume", sent_by_cases),
    ("zero-volume", lambda w, n, stage, m: (w - w / n) * {2: m + 1, 3: m + m + m}.get(stage, 2)),
    ("zero-volume", sent_pass_by_pass),
    ("zero-volume", lambda w, n, stage, m: w * (1 - 1 / n) * [2, 2, 1 + m, 3 * m][stage]),
    ("zero-volume", lambda w, n, stage, m: np.array([2, 2, m + 1, 3 * m])[stage] * w * (n - 1) / n),
    ("deepspeed-json", settings_in_steps),
    ("deepspeed-json", changed(train_batch_size=None)),
    ("deepspeed-json", changed(train_micro_batch_size_per_gpu=None)),
    ("deepspeed-json", changed(steps_per_print=100)),
    ("deepspeed-json", lambda c, b: json.loads(json.dumps(deepspeed_settings(c, b)))),
    (
        "deepspeed-json",
        changed(zero_optimization__reduce_bucket_size=lambda c, b: int(b * 2**20 / (2 + 2 * (c.precision == "fp32")))),
    ),
    ("offload-bytes", offload_by_parts),
    ("offload-bytes", offload_by_cases),
    (
        "offload-bytes",
        lambda p, n, offload: torch.tensor({"none": [16, 0], "optimizer": [2, 16]}.get(offload, [0, 18])) * p / n,
    ),
    (
        "offload-bytes",
        lambda p, n, o: (
            p / n * (16 if o == "none" else 2 * (o == "optimizer")),
            p / n * (0 if o == "none" else 16 + 2 * (o == "parameters")),
        ),
    ),
    ("offload-time", lambda n, tokens, flops, pcie: 4 * flops / (n * pcie * 6 * tokens)),
    ("offload-time", lambda n, tokens, flops, pcie: 2 / 3 / n * flops / pcie / tokens),
    ("offload-time", lambda n, tokens, flops, pcie: 4e9 / n / pcie / (6e9 * tokens / flops)),
    (
        "offload-time",
        lambda n, tokens, flops, pcie: (2 / n / pcie + 2 / n / pcie) / (2 * tokens / flops + 4 * tokens / flops),
    ),
    ("zero-time", times_by_loop),
    ("zero-time", lambda sizes, p, a, b: sum(3 * (p - 1) * (a + b * n / p) for n in sizes)),
    ("zero-time", lambda sizes, p, a, b: (3 * (p - 1) * (a + b * np.array(sizes) / p)).sum()),
    (
        "zero-time",
        lambda sizes, p, a, b: math.fsum(2 * (p - 1) * (a + b * n / p) + (p - 1) * (a + b * n / p) for n in sizes),
    ),
]


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab04_zero.PREDICTIONS
    wrong, right, others = BANK, REFERENCES, OTHER_RIGHT_ANSWERS


@pytest.mark.parametrize(("first", "messages"), [(layer_by_layer, 12), (with_the_last_kept, 11)])
def test_judge_finds_a_first_plan_valid_and_short_of_the_target(first: Answer, messages: int) -> None:
    verdict = judge(EXERCISES["fewest-messages"], first)
    assert (verdict.state, verdict.score) == ("note", messages)
    assert "target: 7" in verdict.message


def test_no_plan_has_fewer_messages_than_the_target() -> None:
    assert fewest_by_search(SIZES_MIB, LIMIT_MIB) == FEWEST_MESSAGES.target == 7


def test_state_bytes_and_zero_3_seconds_are_what_the_package_computes() -> None:
    from dlojz.by_hand import collectives
    from dlojz.prediction.rules_of_thumb import bytes_per_parameter

    for stage in range(4):
        form = bytes_per_parameter("fp16_amp", "adam", zero=stage, dp=8)
        assert state_bytes(10**6, 8, stage) == form.device_per_parameter * 10**6
    for offload in ("none", "optimizer", "parameters"):
        form = bytes_per_parameter("fp16_amp", "adam", zero=3, dp=8, offload=offload)  # type: ignore[arg-type]
        assert offload_bytes(8 * 10**6, 8, offload) == (form.device_bytes(8 * 10**6), form.host_bytes(8 * 10**6))

    network = {"alpha_s": 2e-5, "beta_s_per_byte": 1e-9}
    sizes = [4096, 10**6, 640]
    one_by_one = sum(
        2 * collectives.cost_s("ring_all_gather", size, 6, **network)
        + collectives.cost_s("ring_reduce_scatter", size, 6, **network)
        for size in sizes
    )
    assert zero_3_seconds(sizes, 6, *network.values()) == pytest.approx(one_by_one, rel=1e-12)
    at_once = collectives.cost_s("ring_all_reduce", sum(sizes), 6, **network)
    assert all_at_once_seconds(sizes, 6, *network.values()) == pytest.approx(at_once, rel=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sent_bytes_are_those_of_the_labs_own_zero(stage: int, micro_batches: int) -> None:
    from dlojz.prediction.communication import predict_communication
    from dlojz.prediction.shapes import RankPart

    config = RunConfig.of(model="coatnet_tiny", engine="by_hand", dp=2, zero=stage, micro_batches=micro_batches)
    part = RankPart(config)
    sent = sum(traffic.sent_bytes for traffic in predict_communication(part) if traffic.group == "dp")
    assert sent == sent_bytes(4 * part.shapes.num_parameters, 2, stage, micro_batches)


def test_the_published_table_agrees_to_its_last_digit() -> None:
    from dlojz.labs.lab04_zero.figures import table_1

    unit, agree = table_1(state_bytes).notes  # type: ignore[union-attr]
    assert (unit, agree) == ("Stages: GB (10⁹ bytes) per GPU.", "54 of 54 cells agree to the last digit printed.")
    assert table_1(lambda p, n, stage: 1.01 * state_bytes(p, n, stage)).notes != table_1(state_bytes).notes  # type: ignore[union-attr]


@pytest.mark.parametrize("language", DRAWN_IN)
def test_figures_of_the_students_functions(language: str) -> None:
    from dlojz.hardware import DEVICES
    from dlojz.labs import NotDone
    from dlojz.labs.lab04_zero import figures
    from dlojz.labs.lab04_zero.exercises_cost import transfer_over_compute

    def undone(*_: Any) -> Any:
        raise NotDone("zero-states")

    use_language(language)  # type: ignore[arg-type]
    link = {"flops_per_s": 4e14, "pcie_bytes_per_s": 25e9}
    for said in (
        figures.table_1(undone),
        figures.states_by_ranks(undone, 1e9, []),
        figures.offloading(undone, **link),
        figures.lost_time(undone, [("coatnet_tiny", 8)]),
    ):
        assert isinstance(said, Verdict)
        assert said.state == "todo"
    drawn = figures.states_by_ranks(state_bytes, 7.5e9, [DEVICES["h100"]])
    assert not isinstance(drawn, Verdict)
    assert [line.get_ydata()[6] * 2**30 for line in drawn.axes[0].lines[:4]] == pytest.approx(
        [state_bytes(7.5e9, 64, stage) for stage in range(4)]
    )
    assert not isinstance(figures.offloading(transfer_over_compute, **link), Verdict)
    cases = [("coatnet_tiny", 8), ("coatnet_tiny", 64)]
    lost = figures.lost_time(zero_3_seconds, cases)
    assert not isinstance(lost, Verdict)
    zero_2, zero_3 = (list(line.get_ydata()) for line in lost.axes[0].lines[:2])
    assert zero_3 > zero_2
    assert zero_3 == [compare_with_compute(*case)["ZeRO-3"] for case in cases]


def test_the_stages_are_drawn_as_they_were_predicted_and_measured() -> None:
    from types import SimpleNamespace

    from dlojz.base.errors import LabError
    from dlojz.labs.lab04_zero import figures
    from dlojz.prediction import predict

    config = RunConfig.of(model="coatnet_tiny", engine="by_hand", dp=2, zero=2, micro_batch=2)
    measured = predict(config).model_copy(update={"source": "measured"})
    run: Any = SimpleNamespace(config=config, record=SimpleNamespace(footprint=lambda rank=0: measured))
    memory, sent = figures.stages([run]).axes
    rows = {round(bar.get_y() + bar.get_height() / 2, 1) for bar in memory.patches}
    assert rows == {-0.2, 0.2}
    drawn_bytes = sum(bar.get_width() for bar in memory.patches) * 2**20
    states = sum(measured.memory.category(name) or 0 for name in figures.SHOWN)
    assert drawn_bytes == pytest.approx(2 * states)
    assert sum(bar.get_width() for bar in sent.patches) == pytest.approx(2 * 2)  # 2 passes, predicted and measured
    with pytest.raises(LabError, match="was not measured"):
        figures.stages([SimpleNamespace(config=config, record=None)])  # type: ignore[list-item]
