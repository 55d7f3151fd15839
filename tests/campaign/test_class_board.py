"""The class at a glance: students' folders are read, never written, and whatever is in them."""

import importlib.util
import json
import os
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.campaign.class_board import Student, pseudonyms, read_class, told_problems
from dlojz.cli.teach import board_html, board_table
from dlojz.config.run_config import RunConfig
from dlojz.running import launch

Keep = Callable[..., Path]
DDP = RunConfig.of(model="coatnet_tiny", dp=2)
HUB = Path(__file__).resolve().parents[2] / "slurm" / "jupyterhub" / "singleuser.py"
HOSTILE = "x; rm -rf <img src=x onerror=alert(1)>"


def _progress(root: Path, lab: str, **done: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    content = {"schema_version": 1, "done": {name.replace("_", "-"): at for name, at in done.items()}}
    (root / f"progress-{lab}.json").write_text(json.dumps(content))


def _by_name(folder: Path) -> dict[str, Student]:
    return {student.name: student for student in read_class(folder)}


def test_exercises_best_runs_hours_and_activity(keep_record: Keep, tmp_path: Path) -> None:
    root = tmp_path / "ada" / "runs"
    _progress(root, "00", start="2030-01-01T10:00:00+00:00", ring_all="2030-01-01T11:00:00+00:00")
    _progress(root, "01", memory="2030-01-01T10:30:00+00:00")
    keep_record(DDP, root, rate=100.0)
    keep_record(RunConfig.of(model="coatnet_tiny", dp=1), root, rate=300.0)
    keep_record(RunConfig.of(model="vit_tiny", dp=1), root, rate=50.0)
    keep_record(RunConfig.of(model="vit_tiny", dp=4), root, status="failed", rate=9999.0)
    (tmp_path / "bob" / "checkout" / "runs").mkdir(parents=True)
    _progress(tmp_path / "bob" / "checkout" / "runs", "02", batch="2030-01-01T10:00:00+00:00")
    (tmp_path / "notes.txt").write_text("no student")
    board = _by_name(tmp_path)
    ada = board["ada"]
    assert (ada.lab, ada.exercise, ada.done) == ("00", "ring-all", {"00": 2, "01": 1})
    assert [(best.model, best.samples_per_s) for best in ada.best] == [("coatnet_tiny", 300.0), ("vit_tiny", 50.0)]
    assert ada.runs == 4 and ada.rank_hours == 0.5 * (2 + 1 + 1 + 4)
    assert ada.last_utc is not None and not ada.problems
    assert board["bob"].done == {"02": 1} and set(board) == {"ada", "bob"}


def test_read_class_joins_the_progress_of_several_roots(tmp_path: Path) -> None:
    """The exercise done last and the better score count, wherever they stand; a text that is no time does not."""
    first, second = (tmp_path / "ada" / name for name in ("runs", "copy/runs"))
    _progress(first, "01", memory="2030-01-01T12:00:00+00:00")
    _progress(second, "00", start="2030-01-01T10:00:00+00:00", ring_all="zzz")
    for root, score in ((first, 3.0), (second, 9.0)):
        content = {"schema_version": 1, "done": {}, "scores": {"fewest-messages": score}}
        (root / "progress-04.json").write_text(json.dumps(content))
    ada = _by_name(tmp_path)["ada"]
    assert (ada.lab, ada.exercise) == ("01", "memory")
    assert ada.scores == {"04": ("fewest-messages", 3.0)}, "fewer messages are better"


def test_the_last_activity_is_what_the_files_say_and_not_when_they_were_copied(
    keep_record: Keep, tmp_path: Path
) -> None:
    """Every file of these folders is a second old; the students were last active in 2024 and 2025."""
    ada, bob, eve = (tmp_path / name / "runs" for name in ("ada", "bob", "eve"))
    _progress(ada, "00", start="2024-05-01T10:00:00+00:00", ring="2024-05-01T11:00:00", bad="yesterday")
    keep_record(DDP, ada, started_utc="2024-05-01T12:00:00+00:00", elapsed_s=90.0)  # of an older dlojz
    keep_record(DDP, bob, ended_utc="2025-02-03T04:05:06+00:00", started_utc="2025-02-03T04:00:00+00:00")
    keep_record(DDP, eve, started_utc="", elapsed_s=1.0)
    board = _by_name(tmp_path)
    assert str(board["ada"].last_utc) == "2024-05-01 12:01:30+00:00"
    assert str(board["bob"].last_utc) == "2025-02-03 04:05:06+00:00"
    assert board["eve"].last_utc is None


def test_runs_of_unknown_length_count_no_gpu_hours_and_are_remarked(keep_record: Keep, tmp_path: Path) -> None:
    keep_record(DDP, tmp_path / "ada" / "runs", elapsed_s=None)
    keep_record(DDP, tmp_path / "bob" / "runs", elapsed_s=None)
    keep_record(DDP, tmp_path / "bob" / "runs", elapsed_s=900.0)
    ada, bob = board_table(read_class(tmp_path)).rows
    assert (ada[7], bob[7]) == ("—", "0.5")  # 2 ranks × a quarter of an hour
    assert str(bob[9]) == "the GPU-hours leave out runs whose length is not known (1)."


def test_gpu_hours_count_all_ranks(keep_record: Keep, tmp_path: Path) -> None:
    """A quarter of an hour on 2 replicas of 2 stages, and on 2 ranks of tensor parallelism: 4/4 + 2/4."""
    of_stages = RunConfig.of(model="vit_tiny", dp=2, pp=2, micro_batches=2)
    keep_record(of_stages, tmp_path / "ada" / "runs", elapsed_s=900.0)
    keep_record(RunConfig.of(model="vit_tiny", tp=2), tmp_path / "ada" / "runs", elapsed_s=900.0)
    [ada] = read_class(tmp_path)
    assert ada.rank_hours == 1.5


def test_the_table_in_french(keep_record: Keep, tmp_path: Path) -> None:
    _progress(tmp_path / "ada" / "runs", "00", start="2030-01-01T10:00:00+00:00")
    keep_record(DDP, tmp_path / "ada" / "runs", rate=12.34, elapsed_s=910.0)
    (tmp_path / "ada" / "runs" / "2" / "x").mkdir(parents=True)
    (tmp_path / "ada" / "runs" / "2" / "record.json").write_text('{"schema_version": 2}')
    use_language("fr")
    table = board_table(read_class(tmp_path))
    ((name, exercise, done, *_, best, runs, hours, _, remarks),) = table.rows
    assert table.head[7] == "heures GPU" and (name, exercise, done, runs) == ("ada", "00 start", "00 : 1", "1")
    assert best == "coatnet_tiny, DDP ×2, batch 32 : 12,3 échantillons/s" and hours == "0,506"
    assert remarks == "un bilan vient d’une version plus récente de dlojz : mettez-le à jour."


def test_a_replayed_run_counts_for_nothing(tmp_path: Path) -> None:
    launch.replayed_run(DDP, tmp_path / "ada" / "runs")
    [ada] = read_class(tmp_path)
    assert (ada.runs, ada.replays, ada.rank_hours, ada.best) == (0, 1, 0.0, [])


def test_hostile_folders_are_told_and_stop_nothing(keep_record: Keep, tmp_path: Path) -> None:
    keep_record(DDP, tmp_path / "good" / "runs")
    (tmp_path / "linked").symlink_to(tmp_path / "good")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "runs").symlink_to("/etc")
    runs = tmp_path / "odd" / "runs"
    newer = keep_record(DDP, runs)
    (newer / "record.json").write_text(json.dumps({"schema_version": 99}))
    damaged = keep_record(DDP, runs)
    (damaged / "record.json").write_text("[" * 100_000)
    pipe = keep_record(DDP, runs)
    (pipe / "record.json").unlink()
    os.mkfifo(pipe / "record.json")
    link = keep_record(DDP, runs)
    (link / "record.json").unlink()
    (link / "record.json").symlink_to("/etc/passwd")
    huge = keep_record(DDP, runs)
    with (huge / "record.json").open("ab") as file:
        file.truncate(2**40)
    moved = keep_record(DDP, runs)
    moved.rename(runs / "another-name")
    (runs / "progress-00.json").write_text('{"done": {"<img>": "x", "fine": "2030"}}')
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    board = _by_name(tmp_path)
    assert board["good"].runs == 1
    assert board["linked"].problems == ["a symbolic link is not followed."]
    assert board["secret"].problems == ["a symbolic link is not followed."]
    told = " ".join(board["odd"].problems)
    for words in ("newer version", "damaged", "no regular file", "symbolic link", "beyond the"):
        assert words in told
    assert board["odd"].problems.count("a record is damaged and left out.") == 2
    assert "2 × a record is damaged and left out." in told_problems(board["odd"])
    assert board["odd"].done == {"00": 1}
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before  # nothing is set aside or rebuilt here


def test_names_are_only_text(tmp_path: Path) -> None:
    (tmp_path / HOSTILE).mkdir()
    (tmp_path / "two\nlines").mkdir()
    page = board_html(board_table(read_class(tmp_path)))
    assert "<img" not in page and "x; rm -rf &lt;img src=x onerror=alert(1)&gt;" in page
    assert "two\\u000alines" in page


def test_pseudonyms_are_stable_secret_and_leave_no_name(keep_record: Keep, tmp_path: Path) -> None:
    folder, key = tmp_path / "class", tmp_path / "config" / "board.key"
    for name in ("zoe_martin", "adam_durand"):
        root = folder / name / "runs"
        (keep_record(DDP, root) / "record.json").write_text("damaged")
    (folder / "yves_link").symlink_to(folder / "zoe_martin")
    board = read_class(folder, pseudonyms(key))
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    table = board_table(board)
    assert not any(name in str(table) + board_html(table) for name in ("zoe", "adam", "yves", str(folder)))
    assert read_class(folder, pseudonyms(key)) == board  # another process, the same key
    names = [student.name for student in board]
    assert names == sorted(names) and len(set(names)) == 3 and all(name.startswith("P-") for name in names)
    assert [s.name for s in read_class(folder, pseudonyms(tmp_path / "other.key"))] != names


@pytest.mark.parametrize("content", ["", "short", "ab" * 31, "é" * 32])
def test_a_key_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    key = tmp_path / "key"
    key.write_text(content)
    with pytest.raises(LabError, match="holds no key of 32 bytes"):
        pseudonyms(key)
    with pytest.raises(LabError, match="cannot be used"):
        pseudonyms(tmp_path)


def test_a_class_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="cannot be read"):
        read_class(tmp_path / "none")


def _as_nobody(act: Callable[[], None], gid: int, uid: int = 65534) -> None:
    """Call something in a process of another user."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _hub() -> Any:
    spec = importlib.util.spec_from_file_location("singleuser", HUB)
    assert spec is not None and spec.loader is not None
    hub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hub)
    return hub


def test_private_folders_hold_what_is_compiled(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir(mode=0o777)
    named = _hub().private_folders(tmp_path)
    assert named == _hub().private_folders(tmp_path) and "TORCHINDUCTOR_CACHE_DIR" in named
    for folder in named.values():
        assert folder.startswith(str(tmp_path / ".cache")) and stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / ".cache").stat().st_mode) == 0o700
    code = "from torch._inductor.runtime.runtime_utils import cache_dir; print(cache_dir())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **named}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == named["TORCHINDUCTOR_CACHE_DIR"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_runs_that_the_instructor_cannot_read_are_remarked(keep_record: Keep) -> None:
    """As the hub makes them: a folder of the instructors' group, written with the umask of the student's server."""
    hub = _hub()
    instructors, student = 4242, 4243
    with tempfile.TemporaryDirectory() as name:  # which other users can enter, as pytest's folders they cannot
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "ada").mkdir()
        os.chown(folder / "ada", student, instructors)
        (folder / "ada").chmod(0o2750)
        runs = folder / "ada" / "runs"

        def write(umask: int) -> None:
            os.umask(umask)
            _progress(runs, "00", start="2030-01-01T10:00:00+00:00")
            keep_record(DDP, runs, rate=100.0)

        def sees(count: int, remarks: list[str]) -> None:
            (ada,) = read_class(folder)
            assert (ada.runs, told_problems(ada)) == (count, remarks)

        assert hub.umask_for(runs) == 0o027 and hub.umask_for(folder) == 0o077
        _as_nobody(lambda: write(hub.umask_for(runs)), gid=student, uid=student)
        _as_nobody(lambda: sees(1, []), gid=instructors)
        _as_nobody(lambda: write(0o077), gid=student, uid=student)
        closed = ["the folder of a run cannot be read: Permission denied."]
        _as_nobody(lambda: sees(1, closed), gid=instructors)
        (runs / "progress-00.json").chmod(0o600)
        _as_nobody(lambda: sees(1, ["a file cannot be read: Permission denied.", *closed]), gid=instructors)
