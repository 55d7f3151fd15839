"""Run folders: unique, whole, found again, and never outside their root."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.running.run import find, runs, survey
from dlojz.running.state import read_state
from dlojz.running.store import claim, run_folder, run_ids, runs_root
from dlojz.train.checkpoint_files import CheckpointPolicy, read_policy
from dlojz.train.checkpoint_tensors import CheckpointWriter

PROCESSES, SUBMISSIONS = 8, 50


def test_claim_finds_the_run_of_the_same_configuration(config: RunConfig, tmp_path: Path) -> None:
    first, new = claim(config, tmp_path)
    again, new_again = claim(RunConfig.from_dict(config.to_dict()), tmp_path)
    assert (new, new_again, first) == (True, False, again)


def test_claim_makes_another_run_for_again_and_for_other_configurations(config: RunConfig, tmp_path: Path) -> None:
    other = RunConfig.of(model="coatnet_tiny", dp=2, steps=5)
    folders = {claim(config, tmp_path)[0], claim(config, tmp_path, force_new=True)[0], claim(other, tmp_path)[0]}
    assert len(folders) == 3 == len(runs(tmp_path))


def test_a_folder_from_before_is_read_under_the_name_that_it_has(
    make_folder: Callable[..., Path], told: Callable[..., list[dict[str, Any]]]
) -> None:
    """Its name carries the hash of its time, and its configuration lacks the fields that came later."""
    config = RunConfig.of(model="coatnet_tiny", dp=2)
    end = {"event": "end", "status": "completed", "reason": ""}
    folder = make_folder(config, {0: told(1, end), 1: told(1, end)})
    older = config.to_dict()
    for later in ("update", "curriculum", "library", "experts"):
        del older[later]
    for later in ("ep", "gradient_compression", "powersgd_rank"):
        del older["layout"][later]
    (folder / "config.json").write_text(json.dumps(older))
    named = folder.rename(folder.parent / "20261122-012243-404e1d80149c-875e")
    assert config.hash not in named.name
    run = find("20261122-012243", named.parent)
    assert (run.folder, run.config, run.state) == (named, config, "completed")
    assert run.record is not None and run.record.config == config
    assert [one.folder for one in runs(named.parent)] == [named]


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ("completed", True),
        ("diverged", True),
        ("oom", True),
        ("failed", False),
        ("timeout", False),
        ("cancelled", False),
    ],
)
def test_claim_knows_which_ended_runs_serve_again(
    status: str,
    found: bool,
    config: RunConfig,
    make_folder: Callable[..., Path],
    told: Callable[..., list[dict[str, Any]]],
) -> None:
    end = {"event": "end", "status": status, "reason": "so it was"}
    folder = make_folder(config, {0: told(1, end), 1: told(1, end)})
    assert claim(config, folder.parent) == (folder, False) if found else claim(config, folder.parent)[1]


def keep_checkpoint(folder: Path, config: RunConfig, step: int) -> None:
    writer = CheckpointWriter(folder / "checkpoints", config, step)
    writer.add("weights/blocks.0.weight", torch.ones(2, 2))
    writer.commit()


@pytest.mark.parametrize("status", ["failed", "timeout", "cancelled"])
def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint(
    status: str,
    config: RunConfig,
    make_folder: Callable[..., Path],
    told: Callable[..., list[dict[str, Any]]],
) -> None:
    """In its own folder, its losses kept, its end and all that would be taken for the next attempt's set aside."""
    end = {"event": "end", "status": status, "reason": "so it was"}
    folder = make_folder(config, {0: told(2, end), 1: told(2, end)})
    keep_checkpoint(folder, config, 2)
    (folder / "cancel").touch()
    (folder / "logs" / "rank-0.log").write_text("MemoryError of the first attempt")
    (folder / "events" / "launcher.jsonl").write_text(json.dumps(end) + "\n")
    assert read_state(folder)[0] == status
    policy = CheckpointPolicy(every_steps=1)
    assert claim(config, folder.parent, policy=policy) == (folder, True)
    assert read_policy(folder) == policy
    assert read_state(folder)[0] in ("queued", "running")
    assert runs(folder.parent)[0].losses == (2.0, 1.875)
    left = {path.name for path in (folder / "attempts" / "1").rglob("*")}
    assert left == {"record.json", "cancel", "launcher.jsonl", "logs", "rank-0.log"}
    assert list((folder / "logs").iterdir()) == []
    # Who asks meanwhile finds it; when it is cut off again, it goes on again.
    assert claim(config, folder.parent) == (folder, False)
    end_of_owner(folder)
    assert read_state(folder)[0] in ("failed", "timeout")
    assert claim(config, folder.parent) == (folder, True)
    assert sorted(path.name for path in (folder / "attempts").iterdir()) == ["1", "2"]


def test_claim_makes_another_run_on_demand_and_prefers_one_that_serves(
    config: RunConfig, make_folder: Callable[..., Path], told: Callable[..., list[dict[str, Any]]]
) -> None:
    done = {"event": "end", "status": "completed", "reason": ""}
    serves = make_folder(config, {0: told(4, done), 1: told(4, done)})
    late = {**done, "status": "timeout"}
    cut_off = make_folder(config, {0: told(2, late), 1: told(2, late)})
    keep_checkpoint(cut_off, config, 2)
    assert claim(config, serves.parent) == (serves, False)
    assert claim(config, serves.parent, force_new=True)[0] not in (serves, cut_off)


def test_a_checkpoint_that_was_never_committed_is_none(
    config: RunConfig, make_folder: Callable[..., Path], told: Callable[..., list[dict[str, Any]]]
) -> None:
    folder = make_folder(config, {0: told(2)})
    keep_checkpoint(folder, config, 2)
    (folder / "checkpoints" / "step-000002" / "COMMIT").unlink()
    assert claim(config, folder.parent)[0] != folder


def end_of_owner(folder: Path) -> None:
    """Its launcher is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    owner = json.loads((folder / "launch.json").read_text())
    (folder / "launch.json").write_text(json.dumps({**owner, "pid": process.pid}))


SUBMITTER = """
import json, sys
from pathlib import Path
from dlojz.config.run_config import RunConfig
from dlojz.running.store import claim
root, number, submissions = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
same = RunConfig.of(model="coatnet_tiny", dp=2)
repeated = RunConfig.of(model="coatnet_tiny", dp=4)
others = [RunConfig.of(model="coatnet_tiny", seed=number * submissions + i) for i in range(submissions)]
print("ready", flush=True)
sys.stdin.readline()
made = [[claim(same, root) for _ in others], [claim(other, root) for other in others],
        [claim(repeated, root, force_new=True) for _ in others]]
print(json.dumps([[(folder.name, new) for folder, new in part] for part in made]), flush=True)
sys.stdin.readline()  # a submitter that is gone is taken for a run that failed
"""


def test_claim_makes_one_run_where_many_processes_submit_at_once(tmp_path: Path) -> None:
    submitters = [
        subprocess.Popen(
            [sys.executable, "-c", SUBMITTER, str(tmp_path), str(number), str(SUBMISSIONS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    assert [submitter.stdout.readline() for submitter in submitters] == ["ready\n"] * PROCESSES  # type: ignore[union-attr]
    for submitter in submitters:
        print("go", file=submitter.stdin, flush=True)
    parts = [json.loads(submitter.stdout.readline()) for submitter in submitters]  # type: ignore[union-attr]
    listed = set(run_ids(tmp_path))
    for submitter in submitters:
        submitter.communicate("enough\n")
    same, own, more = ([answer for part in parts for answer in part[kind]] for kind in range(3))
    assert len({name for name, _ in same}) == 1 == sum(new for _, new in same)
    assert len({name for name, _ in own}) == PROCESSES * SUBMISSIONS == sum(new for _, new in own)
    # All in the same seconds, of the same configuration: only the last four digits of these names differ.
    assert len({name for name, _ in more}) == PROCESSES * SUBMISSIONS
    assert listed == {name for name, _ in same + own + more}
    assert all((tmp_path / name / "config.json").is_file() for name in listed)


@pytest.mark.parametrize(
    "name", ["../x", "/etc", "..", ".", "", ".locks", "a/b", "a\nb", "a b", "$(touch x)", "x" * 200, "é", "a\0b"]
)
def test_run_folder_and_find_refuse_hostile_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(LabError):
        run_folder(tmp_path, name)
    with pytest.raises(LabError):
        find(name, tmp_path)


def test_survey_and_find_follow_no_links(config: RunConfig, tmp_path: Path) -> None:
    folder, _ = claim(config, tmp_path / "elsewhere")
    root = tmp_path / "runs"
    root.mkdir()
    (root / folder.name).symlink_to(folder)
    with pytest.raises(LabError, match="symbolic link"):
        find(folder.name, root)
    good, bad = survey(root)
    assert good == [] and "symbolic link" in bad[folder.name]


def test_a_foreign_folder_is_no_run_and_a_gutted_one_is_named(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = claim(config, tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    gutted = tmp_path / "20300101-000000-0123456789ab-cdef"
    gutted.mkdir()
    assert [run.folder for run in runs(tmp_path)] == [folder]
    said = capsys.readouterr().err
    assert gutted.name in said and "config.json" in said and "notes" not in said


def test_runs_come_newest_first(config: RunConfig, tmp_path: Path) -> None:
    made = [claim(config, tmp_path, force_new=True)[0] for _ in range(5)]
    for age, folder in enumerate(reversed(made)):
        os.utime(folder / "config.json", (2e9 - age, 2e9 - age))
    assert [run.folder for run in runs(tmp_path)] == made[::-1]


def test_find_by_prefix_and_its_refusals(config: RunConfig, tmp_path: Path) -> None:
    one, _ = claim(config, tmp_path)
    assert find(one.name, tmp_path).folder == find(one.name[:-1], tmp_path).folder == one
    assert find(str(one), tmp_path).folder == one
    claim(config, tmp_path, force_new=True)
    with pytest.raises(LabError, match="give more of it"):
        find(one.name[:4], tmp_path)
    with pytest.raises(LabError, match=one.name):
        find(f"x{one.name[1:]}", tmp_path)
    with pytest.raises(LabError, match="there is no run in"):
        find("anything", tmp_path / "empty")


def test_which_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "dlojz").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    (checkout / "notebooks").mkdir()
    (tmp_path / "away").mkdir()
    monkeypatch.delenv("DLOJZ_RUNS", raising=False)
    monkeypatch.setenv("WORK", str(tmp_path / "work"))
    monkeypatch.chdir(checkout / "notebooks")
    assert runs_root() == checkout / "runs"
    monkeypatch.chdir(tmp_path / "away")
    assert runs_root() == tmp_path / "work" / "dlojz-runs"
    monkeypatch.delenv("WORK")
    assert runs_root() == tmp_path / "away" / "runs"
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "chosen"))
    assert runs_root() == tmp_path / "chosen"
    assert runs_root(tmp_path / "given") == tmp_path / "given"


def test_claim_refuses_a_root_that_cannot_be_written_in_one_sentence(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match=r"cannot be written in .*Set root= or"):
        claim(config, tmp_path / "file" / "runs")
    with pytest.raises(LabError, match="cannot be read"):
        runs(tmp_path / "file")
    assert runs(tmp_path / "missing") == []


def test_runs_leave_out_a_draft_left_by_a_crash(config: RunConfig, tmp_path: Path) -> None:
    draft = tmp_path / ".new-0123"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(config.to_dict()))
    assert runs(tmp_path) == []
