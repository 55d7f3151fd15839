"""Exercises of lab 09: error feedback, a challenge on the same idea, and when to freeze the variance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import significant
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import expect_several, normal
from dlojz.labs.kit.rank_judges import OUTPUT, refuse_errors, run_on_ranks
from dlojz.labs.lab09_optimizers.exercises_compression import compress
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

Compress = Callable[[Tensor], Tensor]
STEPS = 6


def feed_back(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    """Compress the values plus the error; return the message, and the new error.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD" (arXiv 1901.09847), algorithm EF-SGD.
    """
    message = compress(values + error)
    return message, values + error - message


def largest(values: Tensor) -> Tensor:
    """Keep the number of largest magnitude and set all others to zero."""
    sparse = torch.zeros_like(values)
    index = int(values.abs().argmax())
    sparse[index] = values[index]
    return sparse


def _use(answer: Callable[..., Any], seed: int, numel: int, compress: Compress) -> Tensor:
    """Everything told in some steps, and everything kept, end to end."""
    error, history = torch.zeros(numel), []
    for step in range(STEPS):
        result = answer(normal(100 * seed + step, numel) + 0.5, error.clone(), compress)
        message, error = expect_several(result, "(told, error)", 2)
        for tensor in (message, error):
            if not isinstance(tensor, torch.Tensor) or tensor.shape != (numel,):
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise TEXTS.wrong("error-feedback", "another shape of a result", numel=numel, shape=shape)
        history += [message, error]
    return torch.cat(history)


ERROR_FEEDBACK = TEXTS.exercise(
    "error-feedback",
    feed_back,
    trial=_use,
    cases=((1, 7, compress), (2, 40, compress), (3, 9, largest)),
    mistakes={
        "the error is computed but never said": (
            "compress(values + error) → compress(values); values + error - → values -"
        ),
        "the errors pile up and are never said": "compress(values + error) → compress(values)",
        "the old error is lost": "values + error - → values -",
        "the error has the wrong sign": "values + error - message → message - values - error",
        "you take the error away": "values + error → values - error",
        "the old error counts twice": "values + error - → values + 2 * error -",
        "the error is added after compression": (
            "compress(values + error) → compress(values); message, values + error → message + error, values"
        ),
        "the two results are swapped": "message, values + error - message → values + error - message, message",
        "nothing is compressed": "compress(values + error) → values + error",
        "what is left is taken from values alone": "values + error - message → values - compress(values)",
        "you compress twice": "compress(values + error) → compress(values) + compress(error)",
        "what is left forgets the new values": "values + error - → error -",
        "what was sent is not subtracted from what is left": "- message →",
        "you send what is left": "return message, → return values + error - message,",
        "what is left lost its sign": "values + error - message → (values + error - message).abs()",
        "you call your own compression": "compress: Compress → _: Compress",
        "nothing is left to say": "values + error - message → 0 * error",
        "you average values and error": "compress(values + error) → compress((values + error) / 2)",
    },
)


SENDING_STEPS, SENDING_SEED, MARGIN = 200, 5, 1.03
"""Steps of the challenge's training, its seed, and how far above DDP's its last loss may be."""
_SENT = {"reduce_scatter_tensor": 0.5, "recv": 0.0, "irecv": 0.0, "barrier": 0.0}
"""What one of two ranks sends in a collective, as a share of the tensor that is recorded; else all of it."""


def _noisy_classes() -> tuple[Tensor, Tensor]:
    """Samples of 4 classes and their labels, one in five drawn at random, so that gradients stay noisy."""
    draws = torch.Generator().manual_seed(SENDING_SEED)
    labels = torch.randint(4, (1024,), generator=draws)
    inputs = torch.randn(4, 16, generator=draws)[labels] + torch.randn(1024, 16, generator=draws)
    wrong = torch.rand(1024, generator=draws) < 0.2
    return inputs, torch.where(wrong, torch.randint(4, (1024,), generator=draws), labels)


def _sending_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Train a small network on this rank, whose gradients the answer averages; its loss on all samples at the end."""
    exchange, exchanged = dist.all_to_all_single, [0.0]

    def noted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        # torch's names: an answer may call it by them.
        # the row for this rank itself does not leave it
        exchanged[0] += input.nbytes * (size - 1) / size
        return exchange(output, input, *args, **kwargs)

    dist.all_to_all_single = noted  # on this rank, which ends with the trial
    inputs, labels = _noisy_classes()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    parameters = list(model.parameters())
    memory: dict[str, Any] = {}
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    order = torch.Generator().manual_seed(seed)
    mean = torch.zeros(0)
    for _ in range(SENDING_STEPS):
        # all ranks draw the same 128 samples; each takes every size-th
        batch = torch.randint(len(inputs), (128,), generator=order)[rank::size]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        mean = answer(gradient.clone(), memory)
        if not isinstance(mean, torch.Tensor) or mean.shape != gradient.shape:
            return {"shape": list(getattr(mean, "shape", [])), "numel": len(gradient)}, {OUTPUT: mean}
        for parameter, share in zip(
            parameters, mean.split([parameter.numel() for parameter in parameters]), strict=True
        ):
            parameter.grad = share.view_as(parameter).clone()
        optimizer.step()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(inputs), labels))
    record = {"loss": loss, "numel": len(mean), "exchanged": exchanged[0]}
    return record, {OUTPUT: torch.cat([parameter.detach().flatten() for parameter in parameters])}


def _mean(gradient: Tensor, memory: dict[str, Any]) -> Tensor:
    """As DDP does."""
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


class _SendingJudge:
    """Train with the answer on two ranks; its score is what it sends, in per cent of what DDP sends."""

    on_ranks = True
    cases = ((2, SENDING_SEED),)

    def __call__(self, answer: Callable[..., Any]) -> float:
        plain, answers = (run_on_ranks(_sending_trial, average, *self.cases[0]) for average in (_mean, answer))
        refuse_errors(answers)
        records, numel = [rank_answer.value for rank_answer in answers], plain[0].value["numel"]
        if (shape := next((record["shape"] for record in records if "shape" in record), None)) is not None:
            raise TEXTS.wrong("fewer-bytes", "a vector of another length", numel=numel, shape=tuple(shape))
        if not bool((answers[0].tensors[OUTPUT] == answers[1].tensors[OUTPUT]).all()):
            raise TEXTS.wrong("fewer-bytes", "different weights on two ranks")
        loss, ddp_loss = records[0]["loss"], plain[0].value["loss"]
        # not <=: a loss of NaN is refused too
        if not loss <= MARGIN * ddp_loss:
            raise TEXTS.wrong(
                "fewer-bytes", "too high a loss at the end", loss=significant(loss), ddp_loss=significant(ddp_loss)
            )
        # the busiest rank counts
        return round(100 * max(map(_sent_bytes, answers)) / max(map(_sent_bytes, plain)), 1)


def _sent_bytes(rank_answer: RankAnswer) -> float:
    """What a rank has sent: what its calls tell, and its all-to-all, whose tensors they do not tell."""
    calls = [call for call in rank_answer.calls if call["dtype"]]
    bytes_of = (_SENT.get(call["op"], 1.0) * call["numel"] * getattr(torch, call["dtype"]).itemsize for call in calls)
    return float(rank_answer.value["exchanged"] + sum(bytes_of))


FEWER_BYTES = TEXTS.challenge("fewer-bytes", _SendingJudge(), target=10)

Norms = Sequence[float]


def freeze_step(norms: Norms, beta2: float, threshold: float) -> int:
    """Find the first step whose norm of the variance is that of Δ = 1/(1 − β2) steps before, up to a threshold.

    Args:
        norms: of the variance after each step, counted from 0.
        beta2: its decay.
        threshold: least ratio of the smaller of the two norms to the larger, from 0 to 1.

    Returns:
        a step; the number of steps where there is none.

    Source: after Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), where the variance is frozen once its norm has
    become stable; that both directions count is ours.
    """
    # round, not int: 1 / (1 − 0.95) is 19.99… in floating point
    delta = round(1 / (1 - beta2))
    # from step Δ on: before it there is no norm to compare with
    for t in range(delta, len(norms)):
        before, after = norms[t - delta], norms[t]
        if min(before, after) / max(before, after) >= threshold:
            return t
    return len(norms)


def _freeze_cases() -> Iterator[tuple[list[float], float, float]]:
    rising = [1 - math.exp(-step / 20) + 0.01 for step in range(200)]
    falling = [1 + 6 * math.exp(-step / 25) for step in range(200)]
    hill = [(step + 1) * math.exp(-step / 15) + 0.5 for step in range(200)]
    yield from ((rising, 0.9, 0.9), (falling, 0.95, 0.96), (hill, 0.9, 0.95), (falling[:40], 0.95, 0.96))
    # At rest from the beginning: the first step that can be compared is the one, and the ratio equals the threshold.
    yield [2.0] * 30, 0.9, 1.0
    # Equal to the threshold later, once.
    yield [1.0] + [8.0 * (1 + step % 2) for step in range(14)] + [16.0] * 9, 0.8, 0.5
    # At rest from the beginning, then moving.
    yield [1.0] * 8 + [1.3**step for step in range(1, 30)] + [1.3**29] * 12, 0.8, 0.9
    # Never: the norm doubles with every step, and with beta2 = 0.95 floor and rounding of Δ differ.
    yield [2.0**step for step in range(40)], 0.95, 0.9


def _freeze_told(case: tuple[list[float], float, float]) -> Said:
    norms, beta2, threshold = case
    return TEXTS.sentence(
        "freeze-step",
        "the case",
        norms_count=len(norms),
        first_norm=significant(norms[0], 3),
        last_norm=significant(norms[-1], 3),
        beta2=beta2,
        threshold=threshold,
    )


_RATIO = "min(before, after) / max(before, after)"

FREEZE_STEP = TEXTS.exercise(
    "freeze-step",
    freeze_step,
    cases=_freeze_cases,
    told=_freeze_told,
    mistakes={
        "you compare neighbouring steps": (
            "delta = round(1 / (1 - beta2)) → delta = 1",
            "norms[t - delta] → norms[t - 1]",
            "norms[t - delta] → norms[t - 1]; range(delta, → range(",
        ),
        "ratio before / now, above 1 where the norm falls": f"{_RATIO} → before / after",
        "ratio now / before, above 1 where the norm rises": f"{_RATIO} → after / before",
        "you stop where the norm still moves": ">= threshold → <= threshold",
        "the step that is looked back to": (
            "return t → return t - delta",
            "return t → return t - delta; return len(norms) → return len(norms) - delta",
        ),
        "a norm compared with itself": "delta = round(1 / (1 - beta2)) → delta = 0",
        "ratio must exceed the threshold": ">= threshold → > threshold",
        "you begin one step late": "range(delta, → range(delta + 1,",
        "you begin before step Δ": ("range(delta, → range(1,", "range(delta, → range("),
        "not rounded to the nearest": ("round(1 → int(1", "round(1 → math.ceil(1"),
        "a step beside the right one": ("return t → return t + 1", "return t → return t - 1"),
        "wrong where there is no such step": (
            "return len(norms) → return -1",
            "return len(norms) → return len(norms) - 1",
            "return len(norms) → return 0",
        ),
        "you compare the difference of the norms": f"{_RATIO} → 1 - abs(before - after)",
        "you divide the larger by the smaller": f"{_RATIO} → max(before, after) / min(before, after)",
        "you return the last such step": "range(delta, len(norms)) → reversed(range(delta, len(norms)))",
    },
)
