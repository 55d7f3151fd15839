"""Likely wrong answers, and unusual right ones, written from the statements without a look at the checks.

Each wrong one is refused for what it does; each right one is accepted.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dlojz.labs
from dlojz.labs.kit.exercise import judge
from dlojz.labs.lab09_optimizers.exercises_compression import compress, read, write

EXERCISES: dict[str, Any] = {
    one.id: one
    for module in pkgutil.iter_modules(dlojz.labs.__path__)
    if module.name.startswith("lab")
    for one in importlib.import_module(f"dlojz.labs.{module.name}").EXERCISES
}

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
        own, places, width = len(buffer) // n, *buffer.shape[1:]
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
    own, *rest = len(buffer) // n, *buffer.shape[1:]
    made = own_experts(buffer.view(n, own, *rest).transpose(0, 1).reshape(own, -1, rest[1]))
    return sent(made.view(own, n, *rest).transpose(0, 1)).reshape(buffer.shape)


def laid_out(arranged: Callable[..., Any], restored: Callable[..., Any]) -> Callable[..., Any]:
    """Both exchanges, with other layouts around the experts."""

    def answer(buffer: Any, own_experts: Any) -> Any:
        n = dist.get_world_size()
        own, *rest = len(buffer) // n, *buffer.shape[1:]
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
    ("integer-linear", integer_linear(torch.mm), "the product alone needs the inputs first"),
    ("integer-linear", integer_linear(correction=lambda w: w.sum(dim=0)), "w_q.int().sum(1) in place of sum(0)"),
    ("integer-linear", integer_linear(correction=lambda w: w.sum(-1, keepdim=True)), "without keepdim"),
]
RIGHT: list[tuple[str, Any]] = [
    ("compressed-all-reduce", compressed_mean()),
    (
        "exchange",
        laid_out(
            lambda came, n, own, c, d: came.view(n, own, c, d).permute(1, 2, 0, 3),
            lambda made, n, own, c, d: made.view(own, c, n, d).permute(2, 0, 1, 3),
        ),
    ),
    ("integer-linear", integer_linear(lambda x, w: torch.tensordot(x, w, ([1], [1])))),
]


@pytest.mark.parametrize(("exercise_id", "answer", "words"), WRONG, ids=[f"{one[0]}-{one[2]}" for one in WRONG])
def test_a_likely_wrong_answer_is_refused_for_what_it_does(exercise_id: str, answer: Any, words: str) -> None:
    verdict = judge(EXERCISES[exercise_id], answer)
    assert verdict.state == "wrong"
    assert words in verdict.message


@pytest.mark.parametrize(("exercise_id", "answer"), RIGHT, ids=[one[0] for one in RIGHT])
def test_an_unusual_right_answer_is_accepted(exercise_id: str, answer: Any) -> None:
    verdict = judge(EXERCISES[exercise_id], answer)
    assert verdict.state == "right", verdict.message
