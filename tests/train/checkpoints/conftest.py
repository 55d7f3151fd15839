"""Checkpoints written by hand, so that reading them needs no training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlojz.config.run_config import RunConfig
from dlojz.train.checkpoint_files import CHECKPOINTS
from dlojz.train.checkpoint_tensors import CheckpointWriter

Write = Callable[..., Path]


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.of(model="llama_tiny", steps=100)


@pytest.fixture
def write(tmp_path: Path, config: RunConfig) -> Write:
    """Write the checkpoint of a step into tmp_path; its weights are all of that number."""

    def make(step: int, *, tensors: int = 3, file_bytes: int = 100) -> Path:
        writer = CheckpointWriter(tmp_path / CHECKPOINTS, config, step, file_bytes=file_bytes)
        for number in range(tensors):
            writer.add(f"weights/blocks.{number}.weight", torch.full((5, 4), float(step)))
        return writer.commit()

    return make
