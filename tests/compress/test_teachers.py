"""The key of a teacher that is kept: everything that its weights depend on."""

from __future__ import annotations

from dataclasses import replace

import torch

from dlojz.compress.task import Settings, _asked, digits, teacher_key


def test_other_images_labels_or_settings_are_another_teacher() -> None:
    task = digits().few(32)
    pixel, shifted = task.inputs_NCHW.clone(), (task.labels_N + 1) % 10
    pixel[3, 0, 5, 5] += 1
    asked = [
        _asked("vit_tiny", task, Settings()),
        _asked("vit_tiny", replace(task, inputs_NCHW=pixel), Settings()),
        _asked("vit_tiny", replace(task, labels_N=shifted), Settings()),
        _asked("vit_tiny", task, Settings(seed=1)),
        _asked("vit_mini", task, Settings()),
    ]
    assert len({teacher_key(one) for one in asked}) == len(asked)


def test_the_same_images_are_the_same_teacher_however_they_lie_in_memory() -> None:
    task = digits().few(32)
    strided = replace(task, inputs_NCHW=task.inputs_NCHW.contiguous(memory_format=torch.channels_last))
    assert strided.inputs_NCHW.stride() != task.inputs_NCHW.stride()
    assert teacher_key(_asked("vit_tiny", task, Settings())) == teacher_key(_asked("vit_tiny", strided, Settings()))
