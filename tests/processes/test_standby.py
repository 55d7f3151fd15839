"""Runs are launched by a process that stands by: what has been imported is used again, and nothing else is."""

import errno
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dlojz.processes import standby
from dlojz.running import launch, supervisor
from dlojz.running.folder import read_owner
from dlojz.running.run import Run

WORKER = """
import json, os, sys
from pathlib import Path
launcher = os.getppid()
said = {"said": %r, "launcher": launcher, "variable": os.environ.get("DLOJZ_TRIED"), "here": os.getcwd()}
said["parent"] = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
said["torch"] = "torch" in sys.modules
Path(sys.argv[1], "said.json").write_text(json.dumps(said))
"""


COMMON = supervisor.common_modules


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that runs import as `tried`, and a standby of the test's own, which imports nothing of its own."""
    monkeypatch.setattr(supervisor, "common_modules", lambda config: [])  # torch takes 5 s
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(launch, "_standby", None)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tried.py"
    path.write_text(WORKER % "first")
    return path


def tried() -> dict[str, object]:
    """What a new run of the worker says; it trains nothing, and so the run has failed."""
    run = launch.run(model="coatnet_tiny", worker_module="tried", again=True)
    assert run.state == "failed"
    content: dict[str, object] = json.loads((run.folder / "said.json").read_text())
    return content


def check_gone(pid: int) -> None:
    """A process ends; the limit is only there to end a test that fails."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)


def test_where_no_file_can_be_written_the_owner_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk; nothing half written stays."""
    owner = tmp_path / "launch.json"
    owner.write_text('{"pid": 1, "process_start_s": 0}')

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            standby._sign(owner)
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]
    standby._sign(owner)
    assert json.loads(owner.read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]


def test_launchers_are_forked_by_one_process_and_have_the_code_and_the_folder_of_now(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "common_modules", COMMON)
    first = tried()
    assert first["torch"]
    worker.write_text(WORKER % "second")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("DLOJZ_TRIED", "yes")
    second = tried()
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["launcher"] != second["launcher"]
    assert (first["said"], first["variable"], first["here"]) == ("first", None, str(tmp_path))
    assert (second["said"], second["variable"], second["here"]) == ("second", "yes", str(tmp_path / "elsewhere"))


def test_another_environment_has_another_process(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may have read any of these variables when it was imported."""
    first = tried()["parent"]
    monkeypatch.setenv("OMP_SCHEDULE", "dynamic")
    second = tried()["parent"]
    assert isinstance(first, int) and first != second
    check_gone(first)


def test_one_that_was_killed_is_started_again(worker: Path) -> None:
    first = tried()["parent"]
    assert isinstance(first, int)
    process = psutil.Process(first)
    process.kill()
    process.wait(20)
    assert tried()["parent"] != first


def test_a_launcher_that_cannot_start_is_seen_to_have_ended(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose package has just got a syntax error: it must not seem to wait for ever."""
    (tmp_path / "broken.py").write_text("this is no Python")
    monkeypatch.setattr(launch.supervisor, "__name__", "broken")
    run: Run = launch.run(model="coatnet_tiny")
    assert run.state == "failed"
    assert "SyntaxError" in (run.folder / "logs" / "launcher.log").read_text()
    owner = read_owner(run.folder)
    assert owner is not None and launch._standby is not None
    assert owner.pid not in (os.getpid(), launch._standby.pid)


def test_it_ends_with_the_process_that_made_it_and_the_run_goes_on(worker: Path, tmp_path: Path) -> None:
    worker.write_text(f"import time\ntime.sleep(2)\n{WORKER % 'late'}")
    program = (
        "from dlojz.running import launch, supervisor\n"
        "supervisor.common_modules = lambda config: []\n"
        "run = launch.run(model='coatnet_tiny', worker_module='tried', wait=False)\n"
        "print(run.folder, launch._standby.pid)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    folder, _, pid = told.stdout.strip().rpartition(" ")
    Run(Path(folder)).follow(progress=False)
    assert json.loads(Path(folder, "said.json").read_text())["said"] == "late"
    check_gone(int(pid))


def test_it_gives_its_memory_back_when_nothing_is_asked_for() -> None:
    program = "from dlojz.processes.standby import serve; serve(0.2)"
    waiting = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    assert waiting.wait(60) == 0


def test_a_fork_of_its_maker_has_another(worker: Path) -> None:
    """Two processes that write into one pipe would mix their requests."""
    tried()
    made = launch._standby
    assert made is not None
    environment = made._lasting
    assert made.serves(environment)
    pid = os.fork()
    if pid == 0:
        os._exit(made.serves(environment))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_a_run_changes_from_one_to_the_next_needs_no_other() -> None:
    """The labs set such variables; nothing but this package reads them, after the fork."""
    lasting = standby._lasting({"DLOJZ_RUNS": "here", "PWD": "/", "OMP_NUM_THREADS": "1"})
    assert lasting == {"OMP_NUM_THREADS": "1"}
