"""The task of lab 11: what is learnt from, what judges, and the share that is right."""

import torch
from torch import Tensor, nn

from dlojz.compress.task import HELD_OUT, accuracy, digits, logits


def test_digits_hold_out_what_judges_from_learning() -> None:
    task = digits()
    assert (len(task.labels_N), len(task.held_out_labels_N)) == (1797 - HELD_OUT, HELD_OUT)
    assert task.inputs_NCHW.shape[1:] == (3, 16, 16)
    seen = {image.numpy().tobytes() for image in task.inputs_NCHW}
    assert not any(image.numpy().tobytes() in seen for image in task.held_out_NCHW)
    assert set(task.held_out_labels_N.tolist()) == set(range(10))


def test_accuracy_is_the_share_that_is_right() -> None:
    task = digits()

    class Always(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.full((len(inputs),), 3), 10).float()

    assert accuracy(Always(), task) == int((task.held_out_labels_N == 3).sum()) / 360
    assert logits(Always(), task.held_out_NCHW).shape == (360, 10)
