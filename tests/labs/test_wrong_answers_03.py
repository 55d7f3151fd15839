"""The bank of wrong answers of lab 03, on one process and on real ranks.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlojz.labs import lab03_data_parallel
from dlojz.labs.lab03_data_parallel.exercises_ddp import fill_buckets
from dlojz.labs.lab03_data_parallel.exercises_ring import fit_alpha_beta, ring_seconds
from tests.labs.bank import BankTests

EXERCISES = {exercise.id: exercise for exercise in lab03_data_parallel.EXERCISES}
Answer = Callable[..., Any]


def neighbours() -> tuple[int, int, int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, size, (rank + 1) % size, (rank - 1) % size


def ring(x: Any) -> None:
    rank, size, right, left = neighbours()
    chunks = list(torch.chunk(x, size))
    for step in range(2 * (size - 1)):
        sending = dist.isend(chunks[(rank - step) % size], right)
        arrived = torch.empty_like(chunks[0])
        dist.recv(arrived, left)
        sending.wait()
        kept = chunks[(rank - step - 1) % size]
        kept.copy_(arrived if step >= size - 1 else kept + arrived)


def ring_given_back(x: Any) -> Any:
    ring(x)
    return x


def ring_of_a_copy(x: Any) -> Any:
    copied = x.clone()
    ring(copied)
    return copied


def ring_half(x: Any) -> Any:
    rank, size, right, left = neighbours()
    chunks = x.view(size, -1)
    for step in range(size - 1):
        sending = dist.isend(chunks[(rank - step) % size], right)
        arrived = torch.empty_like(chunks[0])
        dist.recv(arrived, left)
        sending.wait()
        chunks[(rank - step - 1) % size] += arrived
    return x


def ring_always_adds(x: Any) -> None:
    rank, size, right, left = neighbours()
    chunks = x.view(size, -1)
    for step in range(2 * (size - 1)):
        sending = dist.isend(chunks[(rank - step) % size], right)
        arrived = torch.empty_like(chunks[0])
        dist.recv(arrived, left)
        sending.wait()
        chunks[(rank - step - 1) % size] += arrived


def ring_starts_again(x: Any) -> None:
    ring_half(x)
    rank, size, right, left = neighbours()
    chunks = x.view(size, -1)
    for step in range(size - 1):
        sending = dist.isend(chunks[(rank - step) % size], right)
        arrived = torch.empty_like(chunks[0])
        dist.recv(arrived, left)
        sending.wait()
        chunks[(rank - step - 1) % size] = arrived


def ring_of_whole_tensors(x: Any) -> Any:
    _, size, right, left = neighbours()
    total, passed_on = x.clone(), x.clone()
    for _ in range(size - 1):
        sending = dist.isend(passed_on, right)
        arrived = torch.empty_like(x)
        dist.recv(arrived, left)
        sending.wait()
        total += arrived
        passed_on = arrived
    return x.copy_(total)


def ring_sends_first(x: Any) -> None:
    rank, size, right, left = neighbours()
    chunks = x.view(size, -1)
    arrived = torch.empty_like(chunks[0])
    for step in range(size - 1):
        dist.send(chunks[(rank - step) % size], right)
        dist.recv(arrived, left)
        chunks[(rank - step - 1) % size] += arrived


def ring_one_step_short(x: Any) -> None:
    rank, size, right, _ = neighbours()
    if rank < size - 1:
        dist.send(x, right)


def ring_of_the_library(x: Any) -> None:
    dist.all_reduce(x)


def fit_relative(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> tuple[float, float]:
    n, t = np.array(message_bytes), np.array(seconds)
    a, b = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones_like(t), rcond=None)[0]
    return a / (2 * (size - 1)), b * size / (2 * (size - 1))


def fit_in_fp32(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> Any:
    n, t = torch.tensor(message_bytes), torch.tensor(seconds)
    line = torch.linalg.lstsq(torch.stack([1 / t, n / t], dim=1), torch.ones_like(t)[:, None]).solution.flatten()
    return line * torch.tensor([1, size]) / (2 * (size - 1))


def fit_absolute(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> tuple[float, float]:
    b, a = np.polyfit(message_bytes, seconds, 1)
    return a / (2 * (size - 1)), b * size / (2 * (size - 1))


def fit_ends(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> tuple[float, float]:
    b = (seconds[-1] - seconds[0]) / (message_bytes[-1] - message_bytes[0])
    a = seconds[0] - b * message_bytes[0]
    return a / (2 * (size - 1)), b * size / (2 * (size - 1))


def fit_whole_line(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> tuple[float, float]:
    a, b = fit_relative(message_bytes, seconds, size)
    return a * 2 * (size - 1), b * 2 * (size - 1) / size


def average(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.div_(dist.get_world_size())
        dist.all_reduce(parameter.grad)


def only_sums(model: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def only_divides(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def averages_a_copy(model: Any) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def averages_weights(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())


def ends_too_early(model: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        break


def weights_without_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def reduces_to_rank_0(model: Any) -> None:
    for parameter in model.parameters():
        before = parameter.grad.clone()
        dist.reduce(parameter.grad, dst=0)
        if dist.get_rank() == 0:
            parameter.grad /= dist.get_world_size()
        else:
            parameter.grad.copy_(before)


def forgets_rank_1(model: Any) -> None:
    if dist.get_rank() != 1:
        average(model)


def buckets_forwards(gradient_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    return cut(range(len(gradient_bytes)), gradient_bytes, limit_bytes)


def cut(order: Any, gradient_bytes: Sequence[int], limit_bytes: int, *, rest: bool = True) -> list[list[int]]:
    buckets, bucket, held = [], [], 0
    for index in order:
        bucket.append(index)
        held += gradient_bytes[index]
        if held >= limit_bytes:
            buckets.append(bucket)
            bucket, held = [], 0
    if bucket and rest:
        buckets.append(bucket)
    return buckets


def buckets_right(gradient_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    return cut(reversed(range(len(gradient_bytes))), gradient_bytes, limit_bytes)


def buckets_with_an_empty_one(gradient_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    right = buckets_right(gradient_bytes, limit_bytes)
    return [*right, []] if sum(gradient_bytes[index] for index in right[-1]) >= limit_bytes else right


def buckets_below_the_limit(gradient_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    for index in range(len(gradient_bytes) - 1, -1, -1):
        if buckets[-1] and sum(gradient_bytes[each] for each in buckets[-1]) + gradient_bytes[index] > limit_bytes:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def hooked(model: Any, *, mean: bool = True, wait: bool = True, late_division: bool = False) -> Callable[[], None]:
    works: list[Any] = []

    def hook(parameter: Any) -> None:
        if mean and not late_division:
            parameter.grad.div_(dist.get_world_size())
        works.append(dist.all_reduce(parameter.grad, async_op=True))
        if late_division:
            parameter.grad.div_(dist.get_world_size())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def synchronize() -> None:
        while wait and works:
            works.pop().wait()

    return synchronize


def divides_after_the_wait(model: Any) -> Callable[[], None]:
    works: list[Any] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: works.append((dist.all_reduce(parameter.grad, async_op=True), parameter))
        )

    def synchronize() -> None:
        for work, parameter in works:
            work.wait()
            parameter.grad /= dist.get_world_size()
        works.clear()

    return synchronize


def waits_in_the_hook(model: Any) -> Callable[[], None]:
    def hook(parameter: Any) -> None:
        parameter.grad.div_(dist.get_world_size())
        dist.all_reduce(parameter.grad, async_op=True).wait()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return lambda: None


def blocks_in_the_hook(model: Any) -> Callable[[], None]:
    def hook(parameter: Any) -> None:
        parameter.grad.div_(dist.get_world_size())
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return lambda: None


def sends_after_backward(model: Any) -> Callable[[], None]:
    def synchronize() -> None:
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        for work in works:
            work.wait()
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()

    return synchronize


def calls_synchronize(model: Any) -> Any:
    return hooked(model)()


def accumulate(model: Any, micro_batches: Any) -> None:
    for inputs, targets in micro_batches:
        (F.cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    average(model)


def accumulate_sum(model: Any, micro_batches: Any) -> None:
    for inputs, targets in micro_batches:
        F.cross_entropy(model(inputs), targets).backward()
    average(model)


def accumulate_forgetting(model: Any, micro_batches: Any) -> None:
    for inputs, targets in micro_batches:
        model.zero_grad()
        (F.cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    average(model)


def accumulate_talking(model: Any, micro_batches: Any) -> None:
    for inputs, targets in micro_batches:
        (F.cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
        average(model)


def accumulate_alone(model: Any, micro_batches: Any) -> None:
    for inputs, targets in micro_batches:
        (F.cross_entropy(model(inputs), targets) / len(micro_batches)).backward()


def accumulate_in_one_pass(model: Any, micro_batches: Any) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    F.cross_entropy(model(inputs), targets).backward()
    average(model)


def accumulate_losses(model: Any, micro_batches: Any) -> None:
    losses = [F.cross_entropy(model(inputs), targets) for inputs, targets in micro_batches]
    torch.stack(losses).mean().backward()
    average(model)


def accumulate_then_divide(model: Any, micro_batches: Any) -> None:
    for inputs, targets in micro_batches:
        F.cross_entropy(model(inputs), targets).backward()
    for parameter in model.parameters():
        parameter.grad /= len(micro_batches)
    average(model)


def permuted(num_samples: int, seed: int) -> list[int]:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()


def shard(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> list[int]:
    share = num_samples // size
    return permuted(num_samples, seed + epoch)[rank * share : (rank + 1) * share]


def shard_padded(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> list[int]:
    order = permuted(num_samples, seed + epoch)
    return (order + order[: -num_samples % size])[rank::size]


def shard_unseeded(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> list[int]:
    order = list(range(num_samples))
    random.shuffle(order)
    return order[rank::size][: num_samples // size]


def shard_then_shuffle(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> list[int]:
    mine = list(range(rank, num_samples, size))[: num_samples // size]
    return [mine[index] for index in permuted(len(mine), seed + epoch)]


def shard_with_replacement(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed + epoch)
    share = num_samples // size
    return rank * share + torch.randint(share, (share,), generator=generator)


def warm(step: int, base_rate: float, scale: float, warmup_steps: int) -> float:
    if step >= warmup_steps:
        return scale * base_rate
    return base_rate + (scale * base_rate - base_rate) * step / warmup_steps


BANK: dict[str, list[tuple[Answer, str]]] = {
    "ring-all-reduce": [
        (ring_half, "That is the reduce-scatter"),
        (ring_always_adds, "you still add what arrives"),
        (ring_starts_again, "starts with the wrong chunk"),
        (ring_of_whole_tensors, "Send one chunk per step"),
        (ring_sends_first, "Deadlock between ranks"),
        (ring_one_step_short, "rank 0"),
        (ring_of_a_copy, "it must be replaced in place"),
        (ring_of_the_library, "torch's own all_reduce"),
        (dist.all_reduce, "torch's own all_reduce"),
        (lambda x: x, "Every rank keeps its own part"),
    ],
    "ring-time": [
        (lambda n, p, a, b: (p - 1) * (a + b * n / p), "That is half of it"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + b * n), "the whole message here"),
        (lambda n, p, a, b: 2 * (p - 1) * b * n / p, "latency is missing"),
        (lambda n, p, a, b: a + 2 * (p - 1) * b * n / p, "paid once only"),
        (lambda n, p, a, b: 2 * p * (a + b * n / p), "One step too many"),
        (lambda n, p, a, b: a + b * n, "one message from one rank to another"),
        (lambda n, p, a, b: 2 * (a + b * n) * math.log(p, 2), "That is a tree"),
    ],
    "alpha-beta": [
        (fit_absolute, "minimise gaps in seconds"),
        (fit_ends, "two measurements alone"),
        (fit_whole_line, "that of the whole all-reduce"),
        (lambda n, t, p: fit_relative(n, t, p)[::-1], "swap them"),
        (lambda n, t, p: (fit_relative(n, t, p)[0], fit_relative(n, t, p)[1] / p), "lacks a factor p"),
        (lambda n, t, p: fit_relative(n, t, p)[0], "should return 2 numbers"),
        (lambda n, t, p: None, "returns nothing"),
        (lambda n, t, p: (t[0], t[-1] / n[-1]), "should be"),
    ],
    "average-gradients": [
        (only_sums, "times too large"),
        (only_divides, "the sum over the ranks is missing"),
        (averages_a_copy, "its result is thrown away"),
        (averages_weights, "You average the weights"),
        (ends_too_early, "Only the first parameter"),
        (weights_without_biases, "The biases are left out"),
        (reduces_to_rank_0, "all-reduce, not reduce"),
        (forgets_rank_1, "rank 1"),
    ],
    "buckets": [
        (buckets_forwards, "begin with the first parameters"),
        (lambda sizes, limit: buckets_forwards(sizes, limit)[::-1], "reverse the list of buckets"),
        (lambda sizes, limit: cut(range(len(sizes))[::-1], sizes, limit, rest=False), "not quite full"),
        (buckets_below_the_limit, "before it exceeds the limit"),
        (lambda sizes, limit: cut(range(len(sizes))[::-1], sizes, limit + 1), "≥, not >"),
        (lambda sizes, limit: [[index] for index in reversed(range(len(sizes)))], "One bucket per gradient"),
        (buckets_with_an_empty_one, "is expected, but your function returns"),
        (lambda sizes, limit: len(buckets_right(sizes, limit)), "A list of buckets is expected"),
    ],
    "overlap": [
        (lambda model: hooked(model, mean=False), "times too large"),
        (lambda model: hooked(model, wait=False), "synchronize() does not wait"),
        (lambda model: hooked(model, mean=False, wait=False), "its result is thrown away"),
        (lambda model: hooked(model, late_division=True), "right after sending"),
        (waits_in_the_hook, "wait() is called in the hook"),
        (blocks_in_the_hook, "each hook waits for its all-reduce"),
        (sends_after_backward, "none leaves before backward has ended"),
        (calls_synchronize, "must return the function synchronize"),
        (lambda model: lambda: None, "Every rank keeps its own part"),
    ],
    "accumulation": [
        (accumulate_sum, "as many times too large as there are micro-batches"),
        (accumulate_forgetting, "Only the last micro-batch counts, divided"),
        (accumulate_talking, "communicated 3 times"),
        (accumulate_alone, "Every rank keeps its own part"),
        (accumulate_in_one_pass, "one forward pass reads"),
        (accumulate_losses, "Call backward in the loop"),
    ],
    "sampler": [
        (lambda num_samples, rank, size, epoch, seed: permuted(num_samples, seed + epoch), "the same samples"),
        (lambda num_samples, rank, size, epoch, seed: shard(num_samples, 0, size, epoch, seed), "the same samples"),
        (lambda num_samples, rank, size, epoch, seed: shard(num_samples, rank, size, epoch, seed + rank), "two ranks"),
        (lambda num_samples, rank, size, epoch, seed: shard(num_samples, rank, size, 0, seed), "set_epoch"),
        (
            lambda num_samples, rank, size, epoch, seed: permuted(num_samples, seed + epoch)[rank::size],
            "waits for ever for the others",
        ),
        (lambda num_samples, rank, size, epoch, seed: range(num_samples)[rank::size][: num_samples // size], "sorted"),
        (lambda num_samples, rank, size, epoch, seed: shard(num_samples, rank, size, epoch, 0), "The seed changes"),
        (
            lambda num_samples, rank, size, epoch, seed: shard(num_samples, rank, size, epoch, seed + rank * epoch),
            "two ranks",
        ),
        (
            lambda num_samples, rank, size, epoch, seed: shard(num_samples, rank, size, min(epoch, 1), seed),
            "set_epoch",
        ),
        (
            lambda num_samples, rank, size, epoch, seed: shard(num_samples // size * size, rank, size, epoch, seed),
            "is never read",
        ),
        (shard_padded, "what fills no whole share is dropped"),
        (shard_unseeded, "two different answers"),
        (shard_then_shuffle, "always reads the same part"),
        (shard_with_replacement, "twice in one epoch"),
    ],
    "learning-rate": [
        (lambda step, base_rate, scale, warmup_steps: base_rate * scale, "without warm-up"),
        (lambda step, base_rate, scale, warmup_steps: warm(step, 0, 1, warmup_steps), "is expected"),
        (
            lambda step, base_rate, scale, warmup_steps: min(step / warmup_steps, 1) * scale * base_rate,
            "You start from zero",
        ),
        (lambda step, base_rate, scale, warmup_steps: warm(step, base_rate, scale**0.5, warmup_steps), "square root"),
        (
            lambda step, base_rate, scale, warmup_steps: (
                base_rate + step / warmup_steps * (scale * base_rate - base_rate)
            ),
            "goes on rising",
        ),
        (lambda step, base_rate, scale, warmup_steps: base_rate, "never changes"),
    ],
}

REFERENCES: dict[str, Answer] = {
    "ring-all-reduce": ring,
    "ring-time": lambda n, p, a, b: 2 * (p - 1) * a + 2 * (1 - 1 / p) * n * b,
    "alpha-beta": fit_relative,
    "average-gradients": average,
    "buckets": buckets_right,
    "overlap": hooked,
    "accumulation": accumulate,
    "sampler": shard,
    "learning-rate": warm,
}
OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("alpha-beta", fit_in_fp32),
    ("overlap", divides_after_the_wait),
    ("accumulation", accumulate_then_divide),
    ("ring-all-reduce", ring_given_back),
    ("sampler", lambda n, rank, size, epoch, seed: torch.tensor(permuted(n, seed + epoch))[rank::size][: n // size]),
]


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab03_data_parallel.PREDICTIONS
    wrong, right, others = BANK, REFERENCES, OTHER_RIGHT_ANSWERS


def test_the_references_are_what_the_package_computes() -> None:
    from dlojz.by_hand import collectives
    from dlojz.by_hand.ddp import fill_buckets as package_buckets

    for message_bytes, size in ((10**6, 4), (4096, 7), (100, 1)):
        predicted_s = collectives.cost_s("ring_all_reduce", message_bytes, size, alpha_s=2e-5, beta_s_per_byte=1e-9)
        assert ring_seconds(message_bytes, size, 2e-5, 1e-9) == pytest.approx(predicted_s, rel=1e-12)

    sizes = [float(2**power) for power in range(10, 24, 2)]
    seconds = [ring_seconds(size, 4, 3e-5, 2e-10) * (1 + (-1) ** index / 10) for index, size in enumerate(sizes)]
    fitted = collectives.fit([(int(n), t, 4, "all_reduce") for n, t in zip(sizes, seconds, strict=True)])
    assert fit_alpha_beta(sizes, seconds, 4) == pytest.approx((fitted.alpha_s, fitted.beta_s_per_byte), rel=1e-9)

    parameters = [torch.empty(numel) for numel in (5, 100, 3, 3, 40, 7, 1, 60)]
    ours = fill_buckets([4 * parameter.numel() for parameter in parameters], 160)
    theirs = package_buckets(parameters[::-1], 160)
    assert [[id(parameters[index]) for index in bucket] for bucket in ours] == [
        [id(parameter) for parameter in bucket] for bucket in theirs
    ]
