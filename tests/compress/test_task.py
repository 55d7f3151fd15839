"""The task of a compression: what is learnt from, what judges, and what has no label."""

from __future__ import annotations

import pytest
import torch

from dlojz.base.errors import LabError
from dlojz.compress.task import HELD_OUT, UNKNOWN, digits


def test_digits_hold_out_what_judges_from_learning() -> None:
    task = digits()
    assert (len(task.labels_N), len(task.held_out_labels_N)) == (1797 - HELD_OUT, HELD_OUT)
    assert task.inputs_NCHW.shape[1:] == (3, 16, 16) and task.num_classes == 10
    seen = {image.numpy().tobytes() for image in task.inputs_NCHW}
    assert not any(image.numpy().tobytes() in seen for image in task.held_out_NCHW)
    assert set(task.held_out_labels_N.tolist()) == set(range(10))


def test_batches_are_each_sample_once_in_an_order_of_the_seed() -> None:
    task = digits().few(100)
    batches = list(task.batches(32, seed=1))
    assert len(batches) == task.batches_per_epoch(32) == 3
    seen = torch.cat([inputs for inputs, _ in batches])
    assert len({image.numpy().tobytes() for image in seen}) == len({
        image.numpy().tobytes() for image in task.inputs_NCHW
    }) - 4  # fmt: skip
    again, other = (torch.cat([labels for _, labels in task.batches(32, seed)]) for seed in (1, 2))
    assert torch.equal(torch.cat([labels for _, labels in batches]), again) and not torch.equal(again, other)
    assert [len(labels) for _, labels in task.few(10).batches(32, 0)] == [10]


def test_of_a_partly_labelled_task_the_images_stay() -> None:
    task = digits()
    partly = task.partly_labelled(100)
    assert partly.inputs_NCHW is task.inputs_NCHW
    assert torch.equal(partly.labels_N[:100], task.labels_N[:100])
    assert set(partly.labels_N[100:].tolist()) == {UNKNOWN} and UNKNOWN not in task.labels_N


@pytest.mark.parametrize("samples", [0, -1, 1438])
def test_few_and_partly_labelled_refuse_samples_that_are_not_there(samples: int) -> None:
    for ask in (digits().few, digits().partly_labelled):
        with pytest.raises(LabError, match=f"samples must be from 1 to 1437, .* but {samples} was received"):
            ask(samples)
