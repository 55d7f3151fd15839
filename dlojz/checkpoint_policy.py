"""When a run keeps a checkpoint: `checkpoint_policy.json` of its folder.

Layer 1. Invariant: it says nothing of what is trained, so that two runs that differ in it alone are the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dlojz.record import write_atomic
from dlojz.schema import Contract, LabError

FILE_NAME = "checkpoint_policy.json"


class CheckpointPolicy(Contract):
    """When checkpoints are written besides the one on SIGUSR2, and how many are kept."""

    schema_version: Literal[1] = 1
    every_steps: int | None = Field(None, ge=1, description="steps between two; none: only when told to stop")
    keep: int = Field(2, ge=1, le=1000, description="the newest so many are kept")

    def due(self, finished_steps: int) -> bool:
        """Whether one is to be written after so many steps."""
        return self.every_steps is not None and finished_steps % self.every_steps == 0

    def write(self, folder: Path) -> None:
        """Write it into a run folder, whole or not at all."""
        write_atomic(folder / FILE_NAME, self.to_json())


def read_policy(folder: Path) -> CheckpointPolicy:
    """The policy of a run folder; the default where it has none.

    Raises:
        LabError: if the file is there and cannot be read, or is illegal.
    """
    try:
        return CheckpointPolicy.from_json((folder / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return CheckpointPolicy()
    except OSError as error:
        raise LabError(f"the {FILE_NAME} of run {folder.name} cannot be read: {error.strerror}.") from None
    except LabError as error:
        raise LabError(f"the {FILE_NAME} of run {folder.name} is not legal: {error}") from None
