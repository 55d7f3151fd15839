"""The scheduler's job behind a run: `job.json`.

Layer 5. Invariant: a run that goes through a scheduler names its job before the job exists (its name is the run's), so
that a crash between the submission and the writing of its number loses nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dlojz.record import write_atomic
from dlojz.runs.logs import MAX_FILE_BYTES, read_regular
from dlojz.schema import Contract, LabError

FILE_NAME = "job.json"


class Job(Contract):
    """One run's place in a queue.

    The job's name and its comment are the run's id: unique, and without a character that a shell would read.
    """

    schema_version: Literal[1] = 1
    machine: str = Field(description="name of the machine file")
    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,100}$", description="of the job; the run's id, or its sweep's")
    job_id: str = Field("", pattern=r"^\d{0,18}$", description="the scheduler's number; empty while it is not known")
    array_task: int | None = Field(None, ge=0, description="index in the job array of a sweep")
    submitted_utc: str = Field("", description="when the scheduler was asked; empty before")

    @property
    def number(self) -> str:
        """The job as the scheduler writes it: `12`, or `12_3` for a task of an array."""
        return f"{self.job_id}_{self.array_task}" if self.job_id and self.array_task is not None else self.job_id

    def write(self, folder: Path) -> None:
        """Write `job.json`, whole or not at all."""
        write_atomic(folder / FILE_NAME, self.to_json())


def read_job(folder: Path) -> Job | None:
    """The job that the run folder names; None where it names none that can be read."""
    try:
        return Job.from_json(read_regular(folder / FILE_NAME, MAX_FILE_BYTES))
    except (OSError, LabError):
        return None
