"""The fake scheduler for a test: executables on PATH, their scenario, and what they were asked.

In a conftest:
    @pytest.fixture
    def fake(tmp_path, monkeypatch):
        with fixture.scheduler(tmp_path, monkeypatch) as found:
            yield found
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("sbatch", "squeue", "scancel", "sacct", "scontrol", "srun")

# What a real Slurm 22.05 says.
DOWN = {"code": 1, "err": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"}
NO_ACCOUNTING = {"command": "^sacct ", "code": 1, "err": "Slurm accounting storage is disabled\n", "times": 0}
FIELD_END, RECORD_END = "\x1f", "\x1e\n"


def line(number: str, state: str, reason: str = "None", **more: str) -> str:
    """One record of squeue's answer, as the real one writes it (see tests/cluster for the real one)."""
    cells = {
        "start": "N/A",
        "end": "N/A",
        "limit": "1:00:00",
        "left": "59:58",
        "used": "0:02",
        "nodes": "1",
        "partition": "main",
        "name": "a.sh",
        "comment": "(null)",
        **more,
    }
    return FIELD_END.join([number, state, reason, *cells.values()]) + RECORD_END


def squeue(*lines: str, **more: Any) -> dict[str, Any]:
    """A step in which squeue lists these jobs."""
    return {"command": r"^squeue --noheader --states=all --user=\S+ --format=", "out": "".join(lines), **more}


@dataclass(frozen=True)
class Fake:
    """The fake scheduler.

    Args:
        folder: its scenario and what it was asked.
    """

    folder: Path

    def plays(self, *steps: dict[str, Any]) -> None:
        """Answer so from now on."""
        (self.folder / "calls").unlink(missing_ok=True)
        (self.folder / "scenario.json").write_text(json.dumps(steps), encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        """The commands asked so far, in order."""
        path = self.folder / "calls"
        return [json.loads(told)["command"] for told in path.read_text().splitlines()] if path.exists() else []

    @property
    def unexpected(self) -> str:
        """Commands that nothing expected."""
        path = self.folder / "unexpected"
        return path.read_text() if path.exists() else ""


@contextmanager
def scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A scheduler that at first answers nothing; at the end, whatever it was not told to expect fails the test."""
    home = folder / "fakeslurm"
    (home / "bin").mkdir(parents=True)
    program = Path(__file__).with_name("program.py").read_text(encoding="utf-8")
    for name in PROGRAMS:
        path = home / "bin" / name
        path.write_text(f"#!{sys.executable} -IS\n{program}", encoding="utf-8")
        path.chmod(0o755)
    # Nothing else is on PATH: a command that the fake lacks is not run by the real one.
    monkeypatch.setenv("PATH", f"{home / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("FAKESLURM", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    fake = Fake(home)
    fake.plays()
    yield fake
    assert fake.unexpected == ""
