"""Running the programs of a scheduler: a list of words, a time limit, and what they said.

Layer 5. Invariant: never through a shell; however a program behaves, there is an answer, and no process is left.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from dlojz.runs.logs import visible
from dlojz.runs.squeue import ENVIRONMENT

TIMEOUT_S = 15.0
_MOST_WORDS = 2000
_FOREIGN = (
    *("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_"),
    *("PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_"),
)
_KEPT = ("SLURM_CONF", "SLURM_JWT")


class Answer(NamedTuple):
    """What a program of the scheduler said; `code` is None where it did not end in time or is not there."""

    code: int | None
    out: str
    err: str


def ask(argv: Sequence[str], timeout_s: float = TIMEOUT_S) -> Answer:
    """Run one program of the scheduler to its end, or for `timeout_s` seconds; never through a shell, never raises."""
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment() | ENVIRONMENT,
            start_new_session=True,  # a wrapper's children, which hold the pipes, end with it
        )
    except OSError as error:
        return Answer(None, "", f"{argv[0]}: {error.strerror}")
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Answer(None, "", f"{argv[0]} did not answer within {timeout_s:g} s")
    return Answer(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def clean_environment() -> dict[str, str]:
    """This process's environment without what changes a scheduler's program: its options, and the job one may be in.

    A filter such as `SQUEUE_PARTITION` would hide jobs, and a job that is hidden is taken for one that has ended.
    Source: section ENVIRONMENT VARIABLES of sbatch(1), squeue(1) and scancel(1).
    """
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}


def words_of(answer: Answer) -> str:
    """The scheduler's own words on what went wrong, in one line, control characters made visible."""
    said = visible(" ".join((answer.err.strip() or answer.out.strip()).split()))[:_MOST_WORDS]
    return said or f"exit code {answer.code}, without a word"


def user() -> str:
    """The name of this user, or the number of one that has none here."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
