"""A campaign through a real SLURM: interrupted, it leaves its jobs and finds them again; another is cancelled."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import DONE, INTERRUPTED, main
from dlojz.running.folder import Job, read_job
from dlojz.running.run import Run

from .conftest import until

TWO = """
title = "Two points"
time_limit_s = 120
[base]
model = "vit_tiny"
data = "synthetic"
image_size = 32
steps = {steps}
[axes]
micro_batch = [1, 2]
"""


def _campaign(folder: Path, name: str, steps: int) -> list[str]:
    path = folder / f"{name}.toml"
    path.write_text(TWO.format(steps=steps))
    return ["bench", str(path), "--on", "slurm", "--machine", "local", "--account", "course"]


def _jobs(runs: list[Run]) -> list[Job]:
    return [job for one in runs if (job := read_job(one.folder))]


class Impatient:
    """In place of the clock of whoever waits for the queue: presses Ctrl-C instead of sleeping, once it is wanted."""

    pressed = True
    wanted: Callable[[], bool] = staticmethod(lambda: True)

    def sleep(self, seconds: float) -> None:
        if self.pressed and self.wanted():
            raise KeyboardInterrupt
        time.sleep(seconds / 10)


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> Impatient:
    clock = Impatient()
    monkeypatch.setattr("dlojz.campaign.results.time", clock)
    return clock


def test_an_interrupted_campaign_finds_its_jobs_again_and_another_is_cancelled(
    here: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], somebody: Impatient
) -> None:
    words = _campaign(tmp_path, "two", steps=2)
    assert main(words) == INTERRUPTED
    assert "stay in the queue" in capfd.readouterr().err
    root = here / "on-local"
    runs = sorted((Run(folder) for folder in root.glob("2*")), key=lambda one: one.config.layout.micro_batch)
    sent = _jobs(runs)
    assert len({job.job_id for job in sent}) == 1 and all(job.job_id for job in sent)
    assert "#SBATCH --account=course\n" in (runs[0].folder / "job.sh").read_text()
    for one, job in zip(runs, sent, strict=True):  # as if it had died before the number was written down
        Job(**{**job.to_dict(), "job_id": ""}).write(one.folder)

    other = _campaign(tmp_path, "other", steps=100_000)
    assert main(other) == INTERRUPTED
    assert main([*other, "--cancel"]) == DONE
    assert "2 of 2 points were queued or running" in capfd.readouterr().err
    cancelled = [Run(folder) for folder in sorted(root.glob("2*")) if Run(folder).config.steps == 100_000]
    assert until(lambda: [one.state for one in cancelled] == ["cancelled"] * 2)

    somebody.pressed = False
    assert main([*words, "--json"]) == DONE
    rows = json.loads(capfd.readouterr().out)
    assert [(row["state"], row["run_id"]) for row in rows] == [("completed", one.run_id) for one in runs]
    assert _jobs(runs) == sent
    assert len(list((root / ".sweeps").iterdir())) == 2  # one for each campaign
    assert (here / "campaigns" / "two" / "report.html").is_file()


TWELVE = """
title = "Twelve points"
time_limit_s = 600
[base]
model = "vit_tiny"
data = "synthetic"
image_size = 32
steps = 5
engine = "torch"
[axes]
dp = [1, 2, 4]
micro_batch = [1, 2, 3, 4]
"""


@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_twelve_points_on_two_nodes_interrupted_and_resumed_to_their_end(
    here: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    somebody: Impatient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "twelve.toml"
    path.write_text(TWELVE)
    words = ["bench", str(path), "--on", "slurm", "--machine", "local", "--account", "course"]
    root = here / "on-local"

    def completed() -> list[str]:
        return sorted(folder.name for folder in root.glob("2*") if Run(folder).state == "completed")

    somebody.wanted = lambda: len(completed()) >= 3
    assert main(words) == INTERRUPTED
    assert "stay in the queue" in capfd.readouterr().err
    early, sent = completed(), sorted(folder.name for folder in root.glob("2*"))
    assert len(early) >= 3 and len(sent) == 12

    somebody.pressed = False
    assert main([*words, "--json"]) == DONE
    rows = json.loads(capfd.readouterr().out)
    assert [row["state"] for row in rows] == ["completed"] * 12
    assert sorted(row["run_id"] for row in rows) == sent  # none was sent a second time
    jobs = [(root / row["run_id"] / "job.sh").read_text() for row in rows]
    assert sorted(re.findall(r"^#SBATCH --nodes=(\d)", "\n".join(jobs), re.M)) == ["1"] * 8 + ["2"] * 4  # dp = 4

    report = here / "campaigns" / "twelve" / "report.html"
    english = report.read_text(encoding="utf-8")
    monkeypatch.setenv("DLOJZ_LANG", "fr")
    use_language("fr")
    assert main(words) == DONE  # all of it is there: only the report is written again
    assert completed() == sent
    french = report.read_text(encoding="utf-8")
    assert "The messages of 12 of 12 completed points are those predicted" in english
    assert "Les messages de 12 points terminés sur 12 sont ceux prédits" in french
    for text, word in ((english, "completed"), (french, "terminé")):
        assert text.count(word) >= 12
        assert text.count("<svg") + text.count("<img") >= 1
    assert '<html lang="en"' in english and '<html lang="fr"' in french
    assert sorted(folder.name for folder in root.glob("2*")) == sent
