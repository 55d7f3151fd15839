"""The bank of wrong answers of lab 03, on one process and on real ranks.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""
# ruff: noqa: PLC3002 - an answer that takes one more name fits on its line

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
from dlojz.labs.kit.exercise import Challenge, judge
from dlojz.labs.lab03_data_parallel.exercises_ddp import fill_buckets
from dlojz.labs.lab03_data_parallel.exercises_ring import FEW_MESSAGES, fit_alpha_beta, ring_seconds
from tests.labs.bank import Answer, BankTests

EXERCISES = {one.id: one for one in lab03_data_parallel.EXERCISES if not isinstance(one, Challenge)}


def neighbours() -> tuple[int, int, int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, size, (rank + 1) % size, (rank - 1) % size


def passed_round(x: Any, rounds: int, keep: Answer) -> Any:
    """In `rounds` times around the ring, but for its last step, `keep` makes of chunk and arrival what stays."""
    rank, size, right, left = neighbours()
    chunks = x.view(size, -1)
    for step in range(rounds * (size - 1)):
        sending = dist.isend(chunks[(rank - step) % size], right)
        arrived = torch.empty_like(chunks[0])
        dist.recv(arrived, left)
        sending.wait()
        kept = chunks[(rank - step - 1) % size]
        kept.copy_(keep(kept, arrived, step < size - 1))
    return x


def ring(x: Any) -> None:
    passed_round(x, 2, lambda kept, arrived, adds: kept + arrived if adds else arrived)


def ring_half(x: Any) -> Any:
    return passed_round(x, 1, lambda kept, arrived, adds: kept + arrived)


def ring_of_a_copy(x: Any) -> Any:
    copied = x.clone()
    ring(copied)
    return copied


def ring_adds_into_the_tuple(x: Any) -> None:
    rank, size, right, left = neighbours()
    chunks = x.chunk(size)
    received = torch.empty_like(chunks[0])
    for step in range(size - 1):
        sending = dist.isend(chunks[(rank - step) % size], right)
        dist.recv(received, left)
        sending.wait()
        chunks[(rank - step - 1) % size] += received


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


def keeps_old_works(model: Any) -> Callable[[], None]:
    works: list[Any] = []

    def hook(parameter: Any) -> None:
        works.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def synchronize() -> None:
        for parameter, work in works:
            work.wait()
            parameter.grad.div_(dist.get_world_size())

    return synchronize


def in_each_hook(send: Answer) -> Answer:
    """What is sent is divided before, in a hook; afterwards there is nothing to wait for."""

    def answer(model: Any) -> Callable[[], None]:
        def hook(parameter: Any) -> None:
            parameter.grad.div_(dist.get_world_size())
            send(parameter.grad)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        return lambda: None

    return answer


def sends_after_backward(model: Any) -> Callable[[], None]:
    def synchronize() -> None:
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        for work in works:
            work.wait()
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()

    return synchronize


def accumulate(
    scaled: Answer = lambda loss, count: loss / count,
    before: Answer = lambda model: None,
    after: Answer = lambda model: None,
    end: Answer = average,
) -> Answer:
    """The losses as `scaled`, and what is done before and after each backward pass, and at the end."""

    def answer(model: Any, micro_batches: Any) -> None:
        for inputs, targets in micro_batches:
            before(model)
            scaled(F.cross_entropy(model(inputs), targets), len(micro_batches)).backward()
            after(model)
        end(model)

    return answer


def accumulate_in_one_pass(model: Any, micro_batches: Any) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    F.cross_entropy(model(inputs), targets).backward()
    average(model)


def accumulate_losses(model: Any, micro_batches: Any) -> None:
    losses = [F.cross_entropy(model(inputs), targets) for inputs, targets in micro_batches]
    torch.stack(losses).mean().backward()
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


def ring_of_parity(x: Any) -> Any:
    """Blocking sends: rank 0 receives first."""
    rank, size, right, left = neighbours()
    chunks, arrived = x.split(len(x) // size), x.new_empty(len(x) // size)
    for step in range(2 * (size - 1)):
        if rank == 0:
            dist.recv(arrived, left)
            dist.send(chunks[-step % size], right)
        else:
            dist.send(chunks[(rank - step) % size], right)
            dist.recv(arrived, left)
        here = chunks[(rank - 1 - step) % size]
        here.copy_(here + arrived if step < size - 1 else arrived)
    return x


def ring_in_a_batch(x: Any) -> None:
    rank, size, right, left = neighbours()
    chunks = x.reshape(size, -1)
    for step in range(2 * (size - 1)):
        arrived = torch.empty_like(chunks[0])
        sent = dist.P2POp(dist.isend, chunks[(rank - step) % size], right)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, arrived, left)]):
            work.wait()
        if step < size - 1:
            chunks[(rank - 1 - step) % size] += arrived
        else:
            chunks[(rank - 1 - step) % size] = arrived


def ring_the_other_way(x: Any) -> None:
    rank, size, right, left = neighbours()
    chunks = x.chunk(size)
    arrived = torch.empty_like(chunks[0])
    for step in range(2 * (size - 1)):
        sending = dist.isend(chunks[(rank + step) % size], left)
        dist.recv(arrived, right)
        sending.wait()
        here = chunks[(rank + step + 1) % size]
        here.copy_(here + arrived if step < size - 1 else arrived)


def fit_weighted(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> Any:
    b, a = np.polyfit(message_bytes, seconds, 1, w=1 / np.array(seconds))
    return a / (2 * (size - 1)), b * size / (2 * (size - 1))


def fit_by_normal_equations(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> list[float]:
    w = [1 / t**2 for t in seconds]
    s, sn = sum(w), sum(w * n for w, n in zip(w, message_bytes, strict=True))
    snn = sum(w * n * n for w, n in zip(w, message_bytes, strict=True))
    st = sum(w * t for w, t in zip(w, seconds, strict=True))
    snt = sum(w * n * t for w, n, t in zip(w, message_bytes, seconds, strict=True))
    b = (s * snt - sn * st) / (s * snn - sn * sn)
    return [(st - b * sn) / s / 2 / (size - 1), b * size / 2 / (size - 1)]


def fit_by_pinv(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> Any:
    n, t = np.array(message_bytes, dtype=float), np.array(seconds, dtype=float)
    return np.linalg.pinv(np.c_[np.ones_like(n), n] / t[:, None]).sum(1) * [1, size] / (2 * (size - 1))


def fit_directly(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> Any:
    """α and β as unknowns: no conversion at the end."""
    n, t = np.array(message_bytes), np.array(seconds)
    rows = np.column_stack([2 * (size - 1) / t, 2 * (size - 1) / size * n / t])
    alpha_s, beta = np.linalg.lstsq(rows, np.ones(len(t)), rcond=None)[0]
    return float(alpha_s), float(beta)


def fit_in_double(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> Any:
    n, t = torch.tensor(message_bytes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    rows = torch.stack([1 / t, n / t], 1)
    a, b = torch.linalg.lstsq(rows, torch.ones(len(t), 1, dtype=torch.float64)).solution
    return a / (2 * (size - 1)), b * size / (2 * (size - 1))


def average_with_avg(model: Any) -> None:
    for parameter in model.parameters():
        parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, parameter.grad)
        parameter.grad.copy_(sum(parts) / len(parts))


def average_all_at_once(model: Any) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def average_asynchronously(model: Any) -> None:
    works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
    for work, parameter in zip(works, model.parameters(), strict=True):
        work.wait()
        parameter.grad.mul_(1 / dist.get_world_size())


def average_by_ring(model: Any) -> None:
    for parameter in model.parameters():
        flat = F.pad(parameter.grad.flatten(), (0, -parameter.grad.numel() % dist.get_world_size()))
        ring(flat)
        flat /= dist.get_world_size()
        parameter.grad.copy_(flat[: parameter.grad.numel()].view_as(parameter.grad))


def average_through_rank_0(model: Any) -> None:
    for parameter in model.parameters():
        dist.reduce(parameter.grad, dst=0)
        if dist.get_rank() == 0:
            parameter.grad /= dist.get_world_size()
        dist.broadcast(parameter.grad, src=0)


def average_by_name(model: Any) -> None:
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad.copy_(parameter.grad / dist.get_world_size())


def average_a_copy_put_back(model: Any) -> None:
    for parameter in reversed(list(model.parameters())):
        mean = parameter.grad.clone()
        dist.all_reduce(mean)
        parameter.grad[:] = mean / dist.get_world_size()


def buckets_by_while(gradient_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    left, buckets = list(range(len(gradient_bytes))), []
    while left:
        bucket: list[int] = []
        while left and sum(gradient_bytes[index] for index in bucket) < limit_bytes:
            bucket.append(left.pop())
        buckets.append(bucket)
    return buckets


def overlapped(model: Any, *, send: Answer, finish: Answer) -> Callable[[], None]:
    works: dict[Any, Any] = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: works.__setitem__(p, send(p)))

    def synchronize() -> None:
        for parameter, work in works.items():
            finish(parameter, work)
        works.clear()

    return synchronize


def waited(parameter: Any, work: Any) -> None:
    work.wait()


def waited_and_divided(parameter: Any, work: Any) -> None:
    work.wait()
    parameter.grad.div_(dist.get_world_size())


def sent_copy(parameter: Any) -> Any:
    mean = parameter.grad / dist.get_world_size()
    return dist.all_reduce(mean, async_op=True), mean


def waited_and_put_back(parameter: Any, work: Any) -> None:
    work[0].wait()
    parameter.grad.copy_(work[1])


class Overlap:
    def __init__(self, model: Any) -> None:
        self.works: list[Any] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.send)

    def send(self, parameter: Any) -> None:
        parameter.grad *= 1 / dist.get_world_size()
        self.works += [dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, async_op=True)]

    def __call__(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def accumulate_by_autograd(model: Any, micro_batches: Any) -> None:
    for inputs, targets in micro_batches:
        loss = F.cross_entropy(model(inputs), targets) / len(micro_batches)
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    average(model)


def accumulate_mean_of_sum(model: Any, micro_batches: Any) -> None:
    samples = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        (F.cross_entropy(model(inputs), targets, reduction="sum") / samples).backward()
    average_all_at_once(model)


def accumulate_everything_divided(model: Any, micro_batches: Any) -> None:
    for inputs, targets in micro_batches:
        F.cross_entropy(model(inputs), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= len(micro_batches) * dist.get_world_size()


def accumulate_in_a_hook(model: Any, micro_batches: Any) -> None:
    """Only in the last backward is there something to send."""
    for number, (inputs, targets) in enumerate(micro_batches):
        finish = hooked(model) if number == len(micro_batches) - 1 else None
        (F.cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    assert finish is not None
    finish()


def shard_by_numpy(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> Any:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)[rank::size][: num_samples // size]


def shard_by_random(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> list[int]:
    order = random.Random(f"{seed} {epoch}").sample(range(num_samples), num_samples)
    return order[rank * (num_samples // size) :][: num_samples // size]


def shard_of_torch(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> list[int]:
    sampler = torch.utils.data.DistributedSampler(
        range(num_samples), num_replicas=size, rank=rank, seed=seed, drop_last=True
    )
    sampler.set_epoch(epoch)
    return list(sampler)[: num_samples // size]


def shard_viewed(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> Any:
    order = torch.tensor(permuted(num_samples, 1000 * seed + epoch), dtype=torch.int32)
    return order[: num_samples // size * size].view(-1, size)[:, rank]


def shard_sorted_by_key(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> list[int]:
    torch.manual_seed(seed * 7919 + epoch)
    order = torch.rand(num_samples).argsort()
    return [int(order[place]) for place in range(rank, num_samples // size * size, size)]


def warm_on_a_line(step: int, base_rate: float, scale: float, warmup_steps: int) -> Any:
    return np.interp(step, [0, warmup_steps], [base_rate, scale * base_rate])


def warm_by_torch(step: int, base_rate: float, scale: float, warmup_steps: int) -> Any:
    start = torch.tensor(base_rate, dtype=torch.float64)
    return torch.lerp(start, scale * start, min(step, warmup_steps) / warmup_steps)


def ring_s(n: float, p: int, a: float, b: float) -> float:
    return 2 * (p - 1) * (a + b * n / p)


def scaled(batch: int, size: int, image_s: float, sizes: Sequence[int], a: float, b: float) -> tuple[float, float]:
    sent_s = 0.0
    for each in sizes:
        sent_s += ring_s(each, size, a, b)
    one, strong = batch * image_s, batch * image_s / size + sent_s
    return one / strong / size, one / (one + sent_s)


def scaled_by_rates(batch: int, size: int, image_s: float, sizes: Sequence[int], a: float, b: float) -> list[float]:
    sent_s = 2 * (size - 1) * (len(sizes) * a + b * sum(sizes) / size)
    alone = 1 / image_s
    return [images / (images / size * image_s + sent_s) / (size * alone) for images in (batch, batch * size)]


def scaled_by_overhead(batch: int, size: int, image_s: float, sizes: Sequence[int], a: float, b: float) -> Any:
    sent_s = np.sum([ring_s(each, size, a, b) for each in sizes])
    return np.array([1 / (1 + sent_s * size / (batch * image_s)), 1 / (1 + sent_s / (batch * image_s))])


def exchange_halves(x: Any) -> None:
    rank, start, end, walked = dist.get_rank(), 0, len(x), []
    for distance in (1, 2):
        walked.append((distance, start, end))
        middle = (start + end) // 2
        mine, others = (slice(start, middle), slice(middle, end))[:: -1 if rank & distance else 1]
        received = torch.empty(mine.stop - mine.start)
        sending = dist.isend(x[others].clone(), rank ^ distance)
        dist.recv(received, rank ^ distance)
        sending.wait()
        x[mine] += received
        start, end = mine.start, mine.stop
    for distance, first, last in reversed(walked):
        others = slice(first, start) if start > first else slice(end, last)
        received = torch.empty(others.stop - others.start)
        sending = dist.isend(x[start:end].clone(), rank ^ distance)
        dist.recv(received, rank ^ distance)
        sending.wait()
        x[others] = received
        start, end = first, last


def exchange_everything(x: Any) -> None:
    for distance in (1, 2):
        received = torch.empty_like(x)
        sending = dist.isend(x.clone(), dist.get_rank() ^ distance)
        dist.recv(received, dist.get_rank() ^ distance)
        sending.wait()
        x += received


def scatter_and_gather_directly(x: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = x.view(size, -1)
    sent = chunks.clone()
    for step in range(1, size):
        received = torch.empty_like(chunks[0])
        sending = dist.isend(sent[(rank + step) % size], (rank + step) % size)
        dist.recv(received, (rank - step) % size)
        sending.wait()
        chunks[rank] += received
    for step in range(1, size):
        sending = dist.isend(chunks[rank].clone(), (rank + step) % size)
        dist.recv(chunks[(rank - step) % size], (rank - step) % size)
        sending.wait()


def through_rank_0(x: Any) -> None:
    dist.reduce(x, 0)
    dist.broadcast(x, 0)


BANK: dict[str, list[tuple[Answer, str]]] = {
    "efficiency": [
        (lambda *case: scaled(*case)[::-1], "The two are swapped"),
        (lambda *case: tuple(case[1] * each for each in scaled(*case)), "Those are speed-ups"),
        (lambda *case: (scaled(*case)[0],) * 2, "Both are the efficiency of strong scaling"),
        (lambda *case: (scaled(*case)[1],) * 2, "Both are the efficiency of weak scaling"),
        (lambda b, p, s, sizes, *net: scaled(b, p, s, [sum(sizes)], *net), "as one message"),
        (lambda *case: scaled(*case)[0], "should return 2 numbers"),
        (lambda *case: (1, 1), "The communication is missing"),
        (lambda *case: tuple(1 / each for each in scaled(*case)), "Turned over"),
        (
            lambda b, p, s, sizes, *net: scaled(b, p, s, sizes, net[0] / p, net[1] / p),
            "its seconds are not divided",
        ),
        (lambda *case: None, "returns nothing"),
    ],
    "mfu": [
        (lambda rate, flops, p, peak: flops * rate / p / peak, "Only the forward pass counts"),
        (lambda rate, flops, p, peak: 2 * flops * rate / p / peak, "Backward counts as much as forward"),
        (lambda rate, flops, p, peak: 4 * flops * rate / p / peak, "a forward that is recomputed"),
        (lambda rate, flops, p, peak: 3 * flops * rate / peak, "the rate of all processes together"),
        (lambda rate, flops, p, peak: 300 * flops * rate / p / peak, "in percent"),
        (lambda rate, flops, p, peak: p * peak / (3 * flops * rate), "Turned over"),
        (lambda rate, flops, p, peak: 3 * flops * rate / p, "divide them by the peak"),
        (lambda rate, flops, p, peak: None, "returns nothing"),
    ],
    "ring-all-reduce": [
        (ring_half, "That is the reduce-scatter"),
        (ring_adds_into_the_tuple, "gives a tuple of views: write into a view"),
        (lambda x: passed_round(x, 2, lambda kept, arrived, adds: kept + arrived), "you still add what arrives"),
        (lambda x: passed_round(ring_half(x), 1, lambda kept, arrived, adds: arrived), "starts with the wrong chunk"),
        (ring_of_whole_tensors, "Send one chunk per step"),
        (ring_sends_first, "Deadlock between ranks"),
        (ring_one_step_short, "rank 0"),
        (ring_of_a_copy, "it must be replaced in place"),
        (ring_of_the_library, "torch's own all_reduce"),
        (dist.all_reduce, "torch's own all_reduce"),
        (lambda x: x, "Every rank keeps its own part"),
        (lambda x: x.mul_(dist.get_world_size()), "differs between rank 0 and rank 1"),
        (lambda x: (ring(x), x.div_(dist.get_world_size()))[1], "That is the mean"),
        (
            lambda x: dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x),
            "Every rank keeps its own part of the sum",
        ),
        (lambda x: dist.reduce(x, 0), "differs between rank 0 and rank 1"),
        (
            lambda x: (lambda parts: (dist.all_gather(parts, x), x.copy_(sum(parts)))[:0] or None)(
                [torch.empty_like(x) for _ in range(dist.get_world_size())]
            ),
            "The sum is right, but it is torch's own all_gather that",
        ),
    ],
    "ring-time": [
        (lambda n, p, a, b: (p - 1) * (a + b * n / p), "That is half of it"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + b * n), "the whole message here"),
        (lambda n, p, a, b: 2 * (p - 1) * b * n / p, "latency is missing"),
        (lambda n, p, a, b: a + 2 * (p - 1) * b * n / p, "paid once only"),
        (lambda n, p, a, b: 2 * p * (a + b * n / p), "One step too many"),
        (lambda n, p, a, b: a + b * n, "one message from one rank to another"),
        (lambda n, p, a, b: 2 * (a + b * n) * math.log(p, 2), "That is a tree"),
        (lambda n, p, a, b: 2 * (p - 1) * a + b * n / p, "The latency is paid in every step, but the bytes once"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + n / p / b), "You divide by β; it is in seconds per byte, the inverse"),
        (lambda n, p, a, b: 2 * (p - 1) * (a * b + n / p), "is expected, but your function returns"),
        (lambda n, p, a, b: 2 * p * (p - 1) * (a + b * n / p), "should be"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + 4 * b * n / p), "You multiply by 4 bytes per number, but message_bytes"),
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
        (lambda n, t, p: (fit_relative(n, t, p)[0], 1 / fit_relative(n, t, p)[1]), "α is right"),
        (lambda n, t, p: tuple(np.array(fit_relative(n, t, p)) * (p - 1) / p), "should be"),
        (lambda n, t, p: fit_relative(n, t, 4), "You compute with 4 ranks whatever `size` is"),
        (lambda n, t, p: (lambda x: (np.exp(x[1]), np.exp(x[0])))(np.polyfit(np.log(n), np.log(t), 1)), "should be"),
        (lambda n, t, p: tuple(2 * x for x in fit_relative(n, t, p)), "Both are twice too large"),
        (
            lambda n, t, p: (fit_relative(n, t, p)[0], fit_relative(n, t, p)[1] * 2 * (p - 1) / p),
            "your β is still the slope",
        ),
        (
            lambda n, t, p: (fit_relative(n, t, p)[0] * 2 * (p - 1), fit_relative(n, t, p)[1]),
            "your α is still the line",
        ),
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
        (
            lambda model: [dist.broadcast(p.grad, src=0) for p in model.parameters()] and None,
            "Every rank holds rank 0's own part of the gradient of",
        ),
        (
            lambda model: [p.grad.zero_() for p in model.parameters()] and None,
            "Wrong values on ranks 0 and 1, the gradient of 0.weight",
        ),
        (
            lambda model: [setattr(p, "grad", p.grad / dist.get_world_size()) for p in model.parameters()] and None,
            "Every rank divides its own part of the gradient of",
        ),
        (
            lambda model: [(dist.all_reduce(p.grad), p.grad.div_(2)) for p in model.parameters()] and None,
            "Wrong values on ranks 0–2, the gradient of 0.weight",
        ),
        (
            lambda model: [(dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)) for p in model.parameters()] and None,
            "You take the largest of the ranks' gradients, not their",
        ),
        (
            lambda model: [average(model), *(p.data.sub_(0.1 * p.grad) for p in model.parameters())].clear(),
            "Wrong values on ranks 0 and 1, the weights of a rank",
        ),
    ],
    "buckets": [
        (buckets_forwards, "begin with the first parameters"),
        (lambda sizes, limit: buckets_forwards(sizes, limit)[::-1], "reverse the list of buckets"),
        (lambda sizes, limit: cut(range(len(sizes))[::-1], sizes, limit, rest=False), "not quite full"),
        (buckets_below_the_limit, "before it exceeds the limit"),
        (lambda sizes, limit: cut(range(len(sizes))[::-1], sizes, limit + 1), "≥, not >"),
        (lambda sizes, limit: [[index] for index in reversed(range(len(sizes)))], "One bucket per gradient"),
        (buckets_with_an_empty_one, "an empty bucket is no bucket"),
        (lambda sizes, limit: [*buckets_right(sizes, limit), []], "The last bucket is empty"),
        (lambda sizes, limit: (bucket for bucket in buckets_right(sizes, limit)), "so it gives a generator"),
        (lambda sizes, limit: len(buckets_right(sizes, limit)), "A list of buckets is expected"),
        (lambda sizes, limit: [b[::-1] for b in buckets_right(sizes, limit)], "The buckets are right, but within a"),
        (lambda sizes, limit: [[sizes[i] for i in b] for b in buckets_right(sizes, limit)], "You return sizes"),
        (lambda sizes, limit: [list(range(len(sizes)))[::-1]], "All gradients are in one bucket"),
        (lambda sizes, limit: [[i + 1 for i in b] for b in buckets_right(sizes, limit)], "You number the parameters"),
        (lambda sizes, limit: [i for b in buckets_right(sizes, limit) for i in b], "A list of buckets is expected,"),
        (
            lambda sizes, limit: [[len(sizes) - 1 - i for i in b] for b in buckets_right(sizes, limit)],
            "The cut is right, but you number the parameters from",
        ),
        (lambda sizes, limit: buckets_right(sizes, limit)[::-1], "their list is turned round"),
    ],
    "overlap": [
        (lambda model: hooked(model, mean=False), "times too large"),
        (lambda model: hooked(model, wait=False), "synchronize() does not wait"),
        (lambda model: hooked(model, mean=False, wait=False), "its result is thrown away"),
        (lambda model: hooked(model, late_division=True), "right after sending"),
        (keeps_old_works, "Empty the list"),
        (in_each_hook(lambda g: dist.all_reduce(g, async_op=True).wait()), "wait() is called in the hook"),
        (in_each_hook(lambda g: dist.all_reduce(g, op=dist.ReduceOp.SUM)), "each hook waits for its all-reduce"),
        (sends_after_backward, "none leaves before backward has ended"),
        (lambda model: hooked(model)(), "must return the function synchronize"),
        (lambda model: lambda: None, "Every rank keeps its own part"),
        (lambda model: (average(model), lambda: None)[1], "'NoneType' object has no attribute"),
        (lambda model: lambda: average(model), "The gradients are right, but none leaves before"),
        (
            lambda model: (
                [
                    p.register_hook(lambda g: (dist.all_reduce(g), g / dist.get_world_size())[1])
                    for p in model.parameters()
                ]
                and (lambda: None)
            ),
            "The gradients are right, but each hook waits for its",
        ),
        (
            lambda model: hooked(torch.nn.Sequential(list(model.children())[-1])),
            "Every rank keeps its own part of the gradient of",
        ),
        (lambda model: None, "Your function must return the function synchronize,"),
    ],
    "accumulation": [
        (accumulate(scaled=lambda loss, count: loss), "as many times too large as there are micro-batches"),
        (accumulate(before=lambda model: model.zero_grad()), "Only the last micro-batch counts, divided"),
        (accumulate(after=average, end=lambda model: None), "communicated 3 times"),
        (accumulate(end=lambda model: None), "Every rank keeps its own part"),
        (accumulate_in_one_pass, "one forward pass reads"),
        (accumulate_losses, "Call backward in the loop"),
        (
            lambda model, mb: (
                [(lambda x: x.backward())(F.cross_entropy(model(x), y) / len(mb)) for x, y in mb[:-1]]
                and average(model)
            ),
            "The last micro-batch is missing",
        ),
        (
            lambda model, mb: [(F.cross_entropy(model(x), y) / len(y)).backward() for x, y in mb] and average(model),
            "You divide each loss by the number of samples of a",
        ),
        (accumulate(end=only_sums), "The gradient of 0.weight is 2 times too large, as many"),
        (accumulate(scaled=lambda loss, count: loss / 2), "You divide by 2 whatever the number of micro-batches"),
        (
            lambda model, mb: (F.cross_entropy(model(mb[0][0]), mb[0][1]).backward(), average(model))[1],
            "Only the first micro-batch counts",
        ),
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
        (
            lambda num_samples, rank, size, epoch, seed: torch.tensor(permuted(num_samples, seed)).roll(7 * epoch)[
                rank::size
            ][: num_samples // size],
            "follow the same one in every epoch",
        ),
        (shard_padded, "the shares are filled up to the same length"),
        (shard_unseeded, "two different answers"),
        (shard_then_shuffle, "always reads the same part"),
        (shard_with_replacement, "twice in one epoch"),
        (
            lambda num_samples, rank, size, epoch, seed: [i + 1 for i in shard(num_samples, rank, size, epoch, seed)],
            "Sample 24 does not exist",
        ),
        (
            lambda num_samples, rank, size, epoch, seed: shard(num_samples, rank, size, seed, seed),
            "Every epoch has the same order",
        ),
        (
            lambda num_samples, rank, size, epoch, seed: permuted(num_samples, seed * epoch)[rank::size][
                : num_samples // size
            ],
            "In epoch 0 the seed changes nothing",
        ),
        (
            lambda num_samples, rank, size, epoch, seed: permuted(num_samples, seed + epoch)[
                rank * size : (rank + 1) * size
            ],
            "For 24 samples and 4 ranks each share has 4 samples,",
        ),
        (
            lambda num_samples, rank, size, epoch, seed: torch.randperm(num_samples)[rank::size][: num_samples // size],
            "Asked twice for the same epoch, your function gives two",
        ),
        (
            lambda num_samples, rank, size, epoch, seed: [
                i for i in permuted(num_samples, seed + epoch) if i % size == rank
            ][: num_samples // size],
            "A rank always reads the same part of the data, in",
        ),
        (
            lambda num_samples, rank, size, epoch, seed: range(
                rank * (num_samples // size), (rank + 1) * (num_samples // size)
            ),
            "The samples are divided among the ranks, but not",
        ),
    ],
    "learning-rate": [
        (lambda step, base_rate, scale, warmup_steps: base_rate * scale, "without warm-up"),
        (lambda step, base_rate, scale, warmup_steps: warm(step, 0, 1, warmup_steps), "in every case of this check"),
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
        (lambda step, r, k, n: min(r + step / n * r, k * r), "You rise by base_rate during the warm-up, and go on"),
        (lambda step, r, k, n: r if step < n else k * r, "That is a jump at the end of the warm-up"),
        (lambda step, r, k, n: warm(step + 1, r, k, n), "You are one step ahead"),
        (lambda step, r, k, n: r * k ** min(1, step / n), "The rate is multiplied by the same factor in each step"),
        (lambda step, r, k, n: warm(step, r, k, n) if step <= n else r, "After the warm-up your rate falls back to"),
        (lambda step, r, k, n: warm(step, r, 1 + k, n), "You rise by scale times the base rate, and arrive at"),
        (lambda step, r, k, n: warm(step, r, k, n - 1), "You arrive one step too early"),
    ],
}

REFERENCES: dict[str, Answer] = {
    "efficiency": scaled,
    "mfu": lambda rate, flops, p, peak: 3 * rate * flops / peak / p,
    "ring-all-reduce": ring,
    "ring-time": lambda n, p, a, b: 2 * (p - 1) * a + 2 * (1 - 1 / p) * n * b,
    "alpha-beta": fit_relative,
    "average-gradients": average,
    "buckets": buckets_right,
    "overlap": hooked,
    "accumulation": accumulate(),
    "sampler": shard,
    "learning-rate": warm,
}
OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("efficiency", scaled_by_rates),
    ("efficiency", scaled_by_overhead),
    ("mfu", lambda rate, flops, p, peak: np.float64(rate / p) * flops / peak * 3),
    ("alpha-beta", fit_in_fp32),
    ("overlap", divides_after_the_wait),
    ("sampler", lambda n, rank, size, epoch, seed: torch.tensor(permuted(n, seed + epoch))[rank::size][: n // size]),
    ("ring-all-reduce", ring_of_parity),
    ("ring-all-reduce", ring_in_a_batch),
    ("ring-all-reduce", ring_the_other_way),
    ("ring-time", lambda n, p, a, b: sum(a + n / p * b for _ in range(2 * p - 2))),
    ("ring-time", lambda n, p, a, b: np.dot([a, b], [2 * (p - 1), 2 * (p - 1) / p * n])),
    ("alpha-beta", fit_weighted),
    ("alpha-beta", fit_by_normal_equations),
    ("alpha-beta", fit_by_pinv),
    ("alpha-beta", fit_directly),
    ("alpha-beta", fit_in_double),
    ("average-gradients", average_with_avg),
    ("average-gradients", average_all_at_once),
    ("average-gradients", average_asynchronously),
    ("average-gradients", average_by_ring),
    ("average-gradients", average_through_rank_0),
    ("average-gradients", average_by_name),
    ("average-gradients", average_a_copy_put_back),
    ("buckets", lambda sizes, limit: tuple(map(tuple, buckets_right(sizes, limit)))),
    ("buckets", lambda sizes, limit: [np.array(bucket) for bucket in buckets_right(sizes, limit)]),
    ("buckets", lambda sizes, limit: [torch.tensor(bucket) for bucket in buckets_by_while(sizes, limit)]),
    ("buckets", lambda sizes, limit: [list(map(np.int64, bucket)) for bucket in buckets_by_while(sizes, limit)]),
    ("overlap", Overlap),
    ("overlap", lambda model: overlapped(model, send=sent_copy, finish=waited_and_put_back)),
    (
        "overlap",
        lambda model: overlapped(
            model, send=lambda p: dist.all_reduce(p.grad, async_op=True), finish=waited_and_divided
        ),
    ),
    (
        "overlap",
        lambda model: overlapped(
            model, send=lambda p: dist.all_reduce(p.grad.div_(dist.get_world_size()), async_op=True), finish=waited
        ),
    ),
    (
        "overlap",
        lambda model: overlapped(
            model, send=lambda p: dist.all_reduce(p.grad.data, async_op=True).get_future(), finish=waited_and_divided
        ),
    ),
    ("overlap", lambda model: Overlap(model).__call__),
    ("accumulation", accumulate_by_autograd),
    ("accumulation", accumulate_mean_of_sum),
    ("accumulation", accumulate_everything_divided),
    ("accumulation", accumulate_in_a_hook),
    ("sampler", shard_by_numpy),
    ("sampler", shard_by_random),
    ("sampler", shard_of_torch),
    ("sampler", shard_viewed),
    ("sampler", shard_sorted_by_key),
    ("sampler", lambda n, rank, size, epoch, seed: tuple(shard(n, rank, size, epoch, seed))),
    ("learning-rate", warm_on_a_line),
    ("learning-rate", warm_by_torch),
    ("learning-rate", lambda step, rate, k, n: (rate * (n - min(step, n)) + k * rate * min(step, n)) / n),
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


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (exchange_halves, "right", "Target reached: 4"),
        (ring, "note", "A valid answer: 6 messages"),
        (scatter_and_gather_directly, "note", "A valid answer: 6 messages"),
        (exchange_everything, "wrong", "as many as a ring sends"),
        (through_rank_0, "wrong", "messages between two ranks only"),
        (dist.all_reduce, "wrong", "messages between two ranks only"),
        (ring_half, "wrong", "differs between rank 0"),
        (ring_of_a_copy, "wrong", "Every rank keeps its own part"),
    ],
)
def test_the_challenge_counts_messages_within_the_bytes_of_a_ring(answer: Answer, state: str, words: str) -> None:
    verdict = judge(FEW_MESSAGES, answer)
    assert (verdict.state, words in verdict.message) == (state, True), verdict.message
