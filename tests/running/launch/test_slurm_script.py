"""The job script, word by word, and what cannot get into it."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.hardware.clusters import Machine
from dlojz.running.limits import JobRequest, allocate
from dlojz.running.slurm.slurm_job import Array, array_script, job_script

ROOT = Path(dlojz.__file__).parent.parent
FACTS: dict[str, Any] = {
    "name": "mine",
    "title": "t",
    "source": "s",
    "date": "2026-01-31",
    "max_hours": 10,
    "max_nodes": 4,
    "gpus_per_node": 4,
    "cpus_per_gpu": 10,
    "device": "v100-32",
}
FULL = Machine(
    **FACTS,
    partition="gpu",
    constraint="v100-32g",
    reservation="course",
    account_suffix="@v100",
    qos=({"name": "normal", "max_hours": 2},),
    memory_gib_per_node=160,
    gres="gpu:tesla",
    nomultithread=True,
    setup=(("module", "purge"), ("source", "$WORK/venv/bin/activate")),
    torch_module="pytorch-gpu/py3/2.8.0",
    environment={"NCCL_DEBUG": "WARN"},
    python="python",
)
GOLDEN = Path(__file__).with_name("golden_job.sh").read_text(encoding="utf-8")
"""The script of a run on `FULL`, where ROOT stands for the folder of the package."""


def script(
    machine: Machine,
    folder: str,
    *,
    dp: int = 8,
    module: str = "dlojz.running.worker",
    library: str = "none",
    **request: Any,
) -> str:
    config = RunConfig.of(model="vit_tiny", dp=dp, library=library)
    wanted = JobRequest(**request)
    asked, refusals = allocate(machine, config, wanted, environment={})
    assert not refusals
    return job_script(machine, config, asked, Path(folder), worker_module=module, requeues=wanted.requeues)


def test_job_script_is_the_golden_one_word_for_word() -> None:
    text = script(FULL, "/runs of mine/20260131-120000-0123456789ab-cdef", account="abc@v100", time_limit_s=5401)
    assert text == GOLDEN.replace("ROOT", str(ROOT))


def test_what_a_machine_does_not_say_is_not_asked_for() -> None:
    plain = Machine(**{**FACTS, "device": "cpu", "gres": ""})
    text = script(plain, "/runs/r", dp=2)
    for option in ("partition", "constraint", "account", "qos", "reservation", "gres", "mem", "hint", "exclusive"):
        assert f"#SBATCH --{option}" not in text
    assert "#SBATCH --ntasks-per-node=2\n" in text
    assert "export DS_ACCELERATOR=cpu\n" in text
    assert f"PYTHON={sys.executable}\n" in text


def test_job_script_gives_a_library_with_its_own_environment_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "its own"
    own.touch()
    monkeypatch.setenv("DLOJZ_COLOSSALAI", str(own))
    assert "PYTHON=python\n" in script(FULL, "/runs/r", account="a@v100", library="torch")
    assert f"PYTHON='{own}'\n" in script(FULL, "/runs/r", account="a@v100", library="colossalai")


def test_allocate_gives_part_of_a_node_its_part_of_the_memory_and_whole_nodes_all() -> None:
    assert "#SBATCH --mem=80G\n" in script(FULL, "/runs/r", dp=2, account="a@v100")
    whole = Machine(**{**FULL.to_dict(), "exclusive": True})
    text = script(whole, "/runs/r", dp=2, account="a@v100")
    assert "#SBATCH --mem=160G\n#SBATCH" in text
    assert "#SBATCH --exclusive\n" in text


def test_job_script_has_french_only_in_its_comments() -> None:
    use_language("fr")
    text = script(FULL, "/runs of mine/20260131-120000-0123456789ab-cdef", account="abc@v100", time_limit_s=5401)
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    golden = GOLDEN.replace("ROOT", str(ROOT)).splitlines()
    assert lines == [line for line in golden if not line.startswith("# ")]
    assert "# Une tâche par rang : 8 en tout." in text


@pytest.mark.parametrize(
    "folder", ["/runs/a'b $(touch x) `x` ; # é/r", "/runs/-x/r", "/runs/#SBATCH --exclusive/r", "/runs/a&b|c/r"]
)
def test_job_script_keeps_a_hostile_path_one_word(folder: str, tmp_path: Path) -> None:
    text = script(FULL, folder, account="a@v100")
    path = tmp_path / "job.sh"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    (line,) = [line for line in text.splitlines() if line.startswith("FOLDER=")]
    assert shlex.split(line) == [f"FOLDER={folder}"]
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert sum("exclusive" in line for line in directives) == ("exclusive" in folder)
    told = subprocess.run(["bash", "-c", f'{line}; printf %s "$FOLDER"'], capture_output=True, text=True, check=True)
    assert told.stdout == folder


@pytest.mark.parametrize("folder", ['/a"b/r', "/a\\b/r", "/a%b/r", "/a\nb/r", "/a\x1bb/r", "relative/r"])
def test_job_script_refuses_a_path_that_the_scheduler_would_read(folder: str) -> None:
    with pytest.raises(LabError, match="cannot be given to the scheduler"):
        script(FULL, folder, account="a@v100")


@pytest.mark.parametrize("name", ["a b", "r\n#SBATCH --exclusive", "é"])
def test_job_script_refuses_a_name_that_is_no_name(name: str) -> None:
    with pytest.raises(LabError):
        script(FULL, f"/runs/{name}", account="a@v100")


def test_job_script_refuses_a_module_that_is_no_module() -> None:
    with pytest.raises(LabError, match="no name of a Python module"):
        script(FULL, "/runs/r", account="a@v100", module="x; reboot")


def test_an_array_takes_the_folder_of_its_task(tmp_path: Path) -> None:
    config = RunConfig.of(model="vit_tiny", dp=4)
    request = JobRequest(account="a@v100", time_limit_s=600)
    asked, _ = allocate(FULL, config, request, environment={})
    sweep = tmp_path / "a sweep's" / "20260131-120000-sweep-01234567"
    text = array_script(
        FULL, config, asked, Array(sweep, 3, 2), worker_module="dlojz.running.worker", requeues=request.requeues
    )
    assert "#SBATCH --array=0-2%2\n" in text
    assert "#SBATCH --output=logs/%a.log\n" in text
    run = tmp_path / "run 1"
    (run / "logs").mkdir(parents=True)
    sweep.mkdir(parents=True)
    (sweep / "folders.txt").write_text(f"/nowhere\n{run}\n")
    chosen = text[text.index("FOLDER=") : text.index("\n# Cancelled")]
    subprocess.run(
        ["bash", "-c", f'set -u\n{chosen}\nprintf %s "$FOLDER"'],
        env={"SLURM_ARRAY_TASK_ID": "1", "PATH": "/bin"},
        check=True,
    )
    assert (run / "logs" / "slurm.log").read_text() == str(run)
