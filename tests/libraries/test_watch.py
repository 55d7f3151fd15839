"""The watch that is put around a program: what it takes for the training, and what not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, Dataset

from dlojz.config.run_config import RunConfig
from dlojz.libraries.watched_training import ProgramWatch


class Resized(Dataset[Tensor]):
    """As images of ImageNet: what transforms a sample is a module."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Tensor:
        resized: Tensor = nn.Identity()(torch.full((1,), float(number)))
        return resized


def test_a_module_in_a_process_that_loads_is_no_model() -> None:
    """A forked process inherits the watch, which must not take a transform for the model, nor touch the device."""
    nothing: Any = None
    watch = ProgramWatch(RunConfig.of(model="vit_tiny", library="torch"), nothing, nothing, torch.device("cpu"), None,
        nothing)
    hook = register_module_forward_pre_hook(watch.called)
    try:
        assert [float(batch) for batch in DataLoader(Resized(), num_workers=1)] == [0.0, 1.0]
        with pytest.raises(AttributeError):  # in this process it is taken for the model, and there are no probes
            Resized()[0]
    finally:
        hook.remove()
