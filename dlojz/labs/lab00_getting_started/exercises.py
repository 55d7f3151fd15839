"""Exercises of lab 00: the global batch, the steps of an epoch, a ring all-reduce's bytes, two trainings compared.

Each reference is what the package itself computes with.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dlojz.config.layout import Layout
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.results.footprint import Traffic

TEXTS = Texts(__file__)

GLOBAL_BATCH = TEXTS.exercise(
    "global-batch",
    lambda micro_batch, micro_batches, dp: (
        Layout.from_dict({"micro_batch": micro_batch, "micro_batches": micro_batches, "dp": dp}).global_batch
    ),
    cases=((16, 1, 2), (8, 4, 3), (5, 3, 7), (1, 1, 1)),
    mistakes={
        "you leave micro_batches out": lambda micro, count, dp: micro * dp,
        "counts one replica only": lambda micro, count, dp: micro * count,
        "counts one micro-batch of one replica": lambda micro, count, dp: micro,
        "you add where the numbers multiply": lambda micro, count, dp: micro + count + dp,
        "you add micro_batch and micro_batches": lambda micro, count, dp: (micro + count) * dp,
        "you divide by dp": lambda micro, count, dp: micro * count // dp,
        "you divide by dp without rounding": lambda micro, count, dp: micro * count / dp,
    },
)


STEPS_PER_EPOCH = TEXTS.exercise(
    "steps-per-epoch",
    lambda num_samples, global_batch: num_samples // global_batch,
    cases=((1797, 32), (1000, 250), (100, 36), (64, 64), (20, 32), (7, 48)),
    mistakes={
        "you count the last, incomplete batch": lambda samples, batch: -(-samples // batch),
        "fractions of a step": lambda samples, batch: samples / batch,
        "you round to the nearest": lambda samples, batch: round(samples / batch),
        "you always add one step": lambda samples, batch: samples // batch + 1,
        "one step where no batch is full": lambda samples, batch: max(1, samples // batch),
        "loses the last batch where all are full": lambda samples, batch: (samples - 1) // batch,
        "number of samples read, not of steps": lambda samples, batch: samples // batch * batch,
        "you divide the batch by the samples": lambda samples, batch: batch // samples,
        "remainder in place of the quotient": lambda samples, batch: samples % batch,
    },
)


def _ring_sent_bytes(message_bytes: int, dp: int) -> float:
    traffic = Traffic(collective="all_reduce", group="dp", group_size=dp, count=1, message_bytes=message_bytes)
    return traffic.sent_bytes


RING_BYTES = TEXTS.exercise(
    "ring-bytes",
    _ring_sent_bytes,
    cases=((1_000_000, 2), (6_000, 3), (4_096, 8), (640, 64), (2_000, 1)),
    mistakes={
        "one half of the all-reduce only": lambda message, dp: message * (dp - 1) / dp,
        "all dp shares in each half": lambda message, dp: 2 * message,
        "you send the whole message at every stage": lambda message, dp: 2 * message * (dp - 1),
        "everything to everyone": lambda message, dp: message * (dp - 1),
        "one share only": lambda message, dp: message / dp,
        "you count one stage in each half": lambda message, dp: 2 * message / dp,
        "one stage too many": lambda message, dp: (2 * dp - 1) * message / dp,
        "the message itself": lambda message, dp: message,
    },
)


def _largest_gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    # The largest over the steps, not the mean: one step that differs is another training.
    return max(abs(loss - right) / abs(right) for loss, right in zip(losses, reference, strict=True))


def _refuse_other_lengths(answer: Callable[..., Any]) -> None:
    for losses, reference in (([2.0, 1.0, 0.5], [2.0, 1.0]), ([2.0, 1.0], [2.0, 1.0, 0.5]), ([2.0, 1.0], [2.0])):
        try:
            value = answer(losses, reference)
        except Exception:
            continue
        many, few = len(losses), len(reference)
        raise TEXTS.wrong(
            "same-training", "losses beyond the shorter curve are passed over", many=many, few=few, value=value
        )


SAME_TRAINING = TEXTS.exercise(
    "same-training",
    _largest_gap,
    cases=(
        # The largest gap lies in the middle, at the start, at the end; above the reference, and below it.
        ([2.0, 1.5, 0.5], [2.0, 1.2, 0.5]),
        ([1.0, 3.0, 2.0, 2.0], [2.0, 2.5, 2.0, 2.5]),
        ([0.9, 0.8], [1.2, 0.5]),
        ([2.3, 2.2], [2.3, 2.2]),
        ([1.2, 1.9], [1.6, 2.0]),
        # Small ones: rounding them away would make different trainings the same.
        ([2.0, 1 + 2**-14], [2.0, 1.0]),
        ([4.0 + 2**-13, 2.0], [4.0, 2.0]),
    ),
    then=_refuse_other_lengths,
)
