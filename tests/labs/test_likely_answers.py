"""Likely wrong answers, and unusual right ones, written from the statements without a look at the checks.

Each wrong one is refused for what it does; each right one is accepted.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlojz.labs.kit.exercise import judge
from dlojz.labs.lab09_optimizers.exercises_compression import compress, read, write
from tests.labs.bank import exercises_of_all_labs, first_of_each

EXERCISES = exercises_of_all_labs()

# ---- labs 01 to 07


def states_of(device: tuple[int, int, int], host: tuple[int, int, int]) -> Callable[..., Any]:
    """Bytes per parameter on the device and on the host, by what is offloaded."""
    place = {"none": 0, "optimizer": 1, "parameters": 2}
    return lambda parameters, ranks, offload: tuple(
        side[place[offload]] * parameters / ranks for side in (device, host)
    )


def ring(step: int = -1) -> Callable[..., Any]:
    """The ring by batched messages; how the number of the chunk changes from step to step of the all-gather."""

    def answer(x: Any) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        chunks, received = x.chunk(size), torch.empty(len(x) // size)

        def pass_on(place: int) -> None:
            messages = [
                dist.P2POp(dist.isend, chunks[place % size].clone(), (rank + 1) % size),
                dist.P2POp(dist.irecv, received, (rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        for s in range(size - 1):
            pass_on(rank - s)
            chunks[(rank - s - 1) % size].add_(received)
        for s in range(size - 1):
            pass_on(rank + 1 + step * s)
            chunks[(rank + step * s) % size].copy_(received)
        return x

    return answer


def accumulated_by_hand(model: Any, micro_batches: Any) -> None:
    parameters = list(model.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for x, y in micro_batches:
        found = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        torch._foreach_add_(total, found)
    for parameter, gradient in zip(parameters, total, strict=True):
        dist.all_reduce(gradient)
        parameter.grad = gradient / (dist.get_world_size() * len(micro_batches))


def stale(step: float, delay: int, updates: int) -> list[float]:
    weights = [1.0]
    for t in range(updates):
        weights.append(weights[t] - step * weights[t - delay if t >= delay else t])
    return weights


def nodes_less_one(collective: str, message_bytes: float, group: Any, gpus_per_node: int) -> float:
    rounds, n = (2 if collective == "all_reduce" else 1), len(group)
    return rounds * (n - 1) / n * message_bytes * (len({rank // gpus_per_node for rank in group}) - 1)


# ---- labs 12 and 13


def samples_gathered_as_objects(values: Any, real: int) -> Any:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values.tolist())
    return torch.tensor([row for rows in found for row in rows])[:real]


def overlaps(length: Callable[[int, int], int], leave_out: bool = True) -> Callable[..., Any]:
    """Pieces of old shares: how long a new share is, and whether empty ones are left out."""

    def answer(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Any:
        old, new = math.ceil(elements / old_ranks), length(elements, new_ranks)
        first, last = min(rank * new, elements), min((rank + 1) * new, elements)
        spans = [(r, max(first, r * old) - r * old, min(last, (r + 1) * old) - r * old) for r in range(old_ranks)]
        return [span for span in spans if span[1] < span[2] or not leave_out]

    return answer


# ---- lab 09


def compressed_mean(worker: Callable[[Any], Any] = lambda vector: vector, together: bool = False) -> Callable[..., Any]:
    """The compressed all-reduce: what a worker does to its vector first, and whether the means are written together."""

    def answer(values: Any, worker_error: Any, server_error: Any) -> Any:
        size, rank = dist.get_world_size(), dist.get_rank()
        worker_error += values
        told = torch.stack([write(chunk) for chunk in worker(worker_error).view(size, -1)])
        worker_error -= torch.cat([read(message) for message in told])
        received = torch.empty_like(told)
        dist.all_to_all_single(received, told)
        server_error += torch.stack([read(message) for message in received]).mean(0)
        if together:
            means = torch.empty(size, len(server_error))
            dist.all_gather_into_tensor(means, server_error[None])
            found = read(write(means.flatten()))
            server_error -= found.view(size, -1)[rank]
            return found
        own = write(server_error)
        server_error -= read(own)
        dist.all_gather_into_tensor(received, own[None])
        return torch.cat([read(message) for message in received])

    return answer


# ---- lab 10


def sent(rows: Any) -> Any:
    received = torch.empty(rows.shape)
    dist.all_to_all_single(received, rows.contiguous())
    return received


def through_experts(then: Callable[..., Any]) -> Callable[..., Any]:
    """All is right up to the experts; `then(made, n, own, C, D)` is the rest."""

    def answer(buffer: Any, own_experts: Any) -> Any:
        n = dist.get_world_size()
        own, (_, places, width) = len(buffer) // n, buffer.shape
        rows = sent(buffer).view(n, own, places, width).transpose(0, 1).reshape(own, n * places, width)
        return then(own_experts(rows), n, own, places, width)

    return answer


def all_reduced(made: Any, n: int, own: int, places: int, width: int) -> Any:
    rows = made.view(own, n, places, width).transpose(0, 1).reshape(n * own, places, width)
    dist.all_reduce(rows)
    return rows


def with_residual(buffer: Any, own_experts: Any) -> Any:
    return buffer + through_experts(
        lambda made, n, own, *rest: sent(made.view(own, n, *rest).transpose(0, 1)).reshape(n * own, *rest)
    )(buffer, own_experts)


def buffer_sent_back(buffer: Any, own_experts: Any) -> Any:
    through_experts(lambda made, *sizes: made)(buffer, own_experts)
    return sent(buffer)


def not_sent_first(buffer: Any, own_experts: Any) -> Any:
    n = dist.get_world_size()
    own, rest = len(buffer) // n, list(buffer.shape[1:])
    made = own_experts(buffer.view(n, own, *rest).transpose(0, 1).reshape(own, -1, rest[1]))
    return sent(made.view(own, n, *rest).transpose(0, 1)).reshape(buffer.shape)


def laid_out(arranged: Callable[..., Any], restored: Callable[..., Any]) -> Callable[..., Any]:
    """Both exchanges, with other layouts around the experts."""

    def answer(buffer: Any, own_experts: Any) -> Any:
        n = dist.get_world_size()
        own, rest = len(buffer) // n, list(buffer.shape[1:])
        made = own_experts(arranged(sent(buffer), n, own, *rest).reshape(own, -1, rest[1]))
        return sent(restored(made, n, own, *rest)).reshape(buffer.shape)

    return answer


# ---- lab 11


def integer_linear(
    product: Callable[[Any, Any], Any] = lambda x, w: x @ w.T, correction: Callable[[Any], Any] = lambda w: w.sum(1)
) -> Callable[..., Any]:
    return lambda x_q, x_scale, x_zero, w_q, w_scale: (
        x_scale * w_scale.T * (product(x_q.int(), w_q.int()) - x_zero * correction(w_q.int()))
    )


WRONG: list[tuple[str, Any, str]] = [
    ("attention", lambda q, k, v: (q @ k.T / len(k) ** 0.5).softmax(-1) @ v, "the square root of the number of tokens"),
    (
        "patches",
        lambda image, side: image.unfold(1, side, side).unfold(2, side, side).reshape(-1, len(image) * side**2),
        "Each row mixes pieces of several patches",
    ),
    (
        "data-parallel-bytes",
        lambda psi, sample, batch, dp: 16 * psi / dp + (4 * psi if dp > 1 else 0) + sample * batch / dp,
        "You divide the states by dp",
    ),
    ("ring-all-reduce", ring(step=1), "the number of the chunk goes up with each step"),
    ("offload-bytes", states_of((16, 4, 0), (0, 16, 18)), "you still count the 16-bit gradients"),
    ("stale-sgd", stale, "your gradient is fresh: it is that of the first weights"),
    ("between-nodes", nodes_less_one, "You count the nodes less one"),
    ("grid-degrees", lambda n, *d: tuple(one or n // sum(x for x in d if x) for one in d), "by their product"),
    ("shares-to-read", overlaps(lambda elements, ranks: elements // ranks), "the length of a new share is rounded up"),
    ("shares-to-read", overlaps(lambda n, ranks: math.ceil(n / ranks), leave_out=False), "there is nothing to read"),
    (
        "shares-to-read",
        lambda elements, old, new, rank: overlaps(lambda n, ranks: math.ceil(n / ranks))(elements, new, old, rank),
        "You exchange the two cuts",
    ),
    ("compressed-all-reduce", compressed_mean(worker=compress), "messages all have the scale of its whole vector"),
    ("compressed-all-reduce", compressed_mean(together=True), "The servers' means are compressed together"),
    (
        "exchange",
        through_experts(lambda made, n, own, c, d: sent(made).view(own, n, c, d).transpose(0, 1).reshape(-1, c, d)),
        "after the second all-to-all",
    ),
    (
        "exchange",
        through_experts(
            lambda made, n, own, c, d: (
                sent(made.view(own, n, c, d).transpose(0, 1)).view(n, own, c, d).transpose(0, 1).reshape(-1, c, d)
            )
        ),
        "is read with two dimensions swapped",
    ),
    (
        "exchange",
        through_experts(lambda made, n, own, c, d: sent(made.view(n, own, c, d).transpose(0, 1)).reshape(-1, c, d)),
        "you read it as (ranks, own experts, C, D)",
    ),
    (
        "exchange",
        through_experts(lambda made, n, own, c, d: sent(made.view(own, n, c, d).transpose(1, 2)).reshape(-1, c, d)),
        "the places of rank 0, then those of rank 1",
    ),
    (
        "exchange",
        through_experts(lambda made, n, own, c, d: sent(made.view(own, c, n, d).permute(2, 0, 1, 3)).reshape(-1, c, d)),
        "the places of rank 0, then those of rank 1",
    ),
    ("exchange", through_experts(lambda made, n, own, c, d: made.reshape(-1, c, d)), "a second all-to-all must bring"),
    ("exchange", through_experts(lambda made, *sizes: made), "a second all-to-all must bring"),
    (
        "exchange",
        through_experts(lambda made, n, own, c, d: sent(made.view(own, n, c, d).transpose(0, 1))),
        "right and in the right order, but on rank 0 their shape is (2, 2, 5, 4)",
    ),
    ("exchange", through_experts(all_reduced), "you add up what all ranks have computed"),
    ("exchange", with_residual, "You add the tokens themselves"),
    ("exchange", buffer_sent_back, "which no expert has seen"),
    ("exchange", not_sent_first, "The first all-to-all is missing"),
    (
        "exchange",
        laid_out(
            lambda came, n, own, c, d: came.view(own, n, c, d).transpose(0, 1),
            lambda made, n, own, c, d: made.view(own, n, c, d).transpose(0, 1),
        ),
        "you read what arrives as (own experts, ranks, C, D)",
    ),
    (
        "exchange",
        laid_out(
            lambda came, n, own, c, d: came.view(n, own, c, d).permute(1, 2, 0, 3),
            lambda made, n, own, c, d: made.view(own, n, c, d).transpose(0, 1),
        ),
        "merged places first, then ranks",
    ),
    ("integer-linear", integer_linear(lambda x, w: x @ w), "the product alone needs the inputs first"),
    ("integer-linear", integer_linear(correction=lambda w: w.sum(dim=0)), "w_q.int().sum(1) in place of sum(0)"),
    ("integer-linear", integer_linear(correction=lambda w: w.sum(-1, keepdim=True)), "without keepdim"),
]
RIGHT: list[tuple[str, Any]] = [
    ("ring-all-reduce", ring()),
    ("accumulation", accumulated_by_hand),
    ("offload-bytes", states_of((16, 2, 0), (0, 16, 18))),
    ("gather-metrics", samples_gathered_as_objects),
    ("compressed-all-reduce", compressed_mean()),
    (
        "exchange",
        laid_out(
            lambda came, n, own, c, d: came.view(n, own, c, d).permute(1, 2, 0, 3),
            lambda made, n, own, c, d: made.view(own, c, n, d).permute(2, 0, 1, 3),
        ),
    ),
]


@pytest.mark.parametrize(("exercise_id", "answer", "words"), first_of_each(WRONG))
def test_judge_refuses_a_likely_wrong_answer_for_what_it_does(exercise_id: str, answer: Any, words: str) -> None:
    verdict = judge(EXERCISES[exercise_id], answer)
    assert verdict.state == "wrong"
    assert words in verdict.message


@pytest.mark.parametrize(("exercise_id", "answer"), RIGHT, ids=[one[0] for one in RIGHT])
def test_judge_accepts_an_unusual_right_answer(exercise_id: str, answer: Any) -> None:
    verdict = judge(EXERCISES[exercise_id], answer)
    assert verdict.state == "right", verdict.message
