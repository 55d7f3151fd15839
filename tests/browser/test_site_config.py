"""The configuration for a site: what a student asks for becomes a job that holds nothing else."""

import asyncio
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hubs import need

CONFIG = Path(__file__).resolve().parents[2] / "slurm" / "jupyterhub" / "site_config.py"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration as JupyterHub loads it, with two kinds of node on offer."""
    for package in ("jupyterhub", "batchspawner"):
        need(importlib.util.find_spec(package), f"{package} (extra test)")
    from traitlets.config import PyFileConfigLoader

    monkeypatch.setenv("DLOJZ_HUB_PROFILES", "local,jean_zay_v100_32")
    return PyFileConfigLoader(str(CONFIG)).load_config()


def script(site: Any, asked: dict[str, Any]) -> str:
    spawner = site.JupyterHub.spawner_class(config=site)
    spawner.choose(asked)
    fields = {name.removeprefix("req_"): getattr(spawner, name) for name in spawner.trait_names() if name[:4] == "req_"}
    fields |= {"username": "ada", "homedir": "/srv/ada", "keepvars": "PATH", "cmd": "server"}
    over = {"account": asked["account"]} if "account" in asked else {}  # batchspawner lays what was asked for over it
    fields = {name: value for name, value in fields.items() if name not in over}
    return str(asyncio.run(spawner._get_batch_script(**fields, **over)))


@pytest.fixture(autouse=True)
def _without_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner's name and home are only known to a hub."""
    need(importlib.util.find_spec("batchspawner"), "batchspawner (extra test)")
    from batchspawner import SlurmSpawner

    for name in ("username", "homedir", "keepvars"):
        monkeypatch.setattr(SlurmSpawner, f"_req_{name}_default", lambda self: "", raising=False)


def test_a_profile_is_what_its_machine_file_says(site: Any) -> None:
    from dlojz.hardware.clusters import machine

    told = machine("jean_zay_v100_32")
    job = script(site, {"machine": told.name, "hours": "3", "account": "abc"})
    assert "#SBATCH --time=3:00:00\n" in job
    assert f"#SBATCH --cpus-per-task={told.cpus_per_gpu}\n" in job
    assert f"#SBATCH --gres={told.gres}:1\n" in job
    assert f"#SBATCH --account=abc{told.account_suffix}\n" in job
    assert re.search(r"^exec server$", job, re.MULTILINE)
    assert "--gres=gpu:1" in script(site, {"machine": "local", "hours": 1})


@pytest.mark.parametrize(
    "asked",
    [
        {"machine": "none"},
        {"machine": "local", "hours": "0"},
        {"machine": "local", "hours": "2"},
        {"machine": "local", "hours": "1\n#SBATCH --time=99:00:00"},
        {"machine": "local", "hours": 1, "account": "x\n#SBATCH --reservation=y"},
        {"machine": "local", "hours": 1, "account": "$(id)"},
        {"machine": "local", "hours": 1, "language": "de"},
        {"machine": "local", "hours": "²"},
        {"machine": ["local"]},
        {"machine": "local", "runtime": "99:00:00"},
        {"machine": "local", "cmd": "id"},
    ],
)
def test_what_is_not_on_offer_is_refused(site: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not on offer|choose one of|whole number|account is made|language is one"):
        script(site, asked)


def test_the_form_offers_the_profiles(site: Any) -> None:
    form = site.JupyterHub.spawner_class(config=site)._options_form_default()
    assert form.count("<option") == 2 + 2
    assert 'value="jean_zay_v100_32"' in form
    assert 'type="number" value="1" min="1" max="8"' in form  # two hours are more than the test cluster gives


@pytest.mark.parametrize(
    "said, standing",
    [
        ("RUNNING n0", "RUNNING"),
        ("COMPLETING n0", "RUNNING"),
        ("PENDING (null)", "PENDING"),
        ("CONFIGURING n0", "PENDING"),
        ("COMPLETED n0", "NOTFOUND"),
        ("", "NOTFOUND"),
        (RuntimeError("slurm_load_jobs error: Invalid job id specified"), "NOTFOUND"),
        (RuntimeError("slurm_load_jobs error: Unable to contact slurm controller (connect failure)"), "UNKNOWN"),
        (RuntimeError("slurm_load_jobs error: Zero Bytes were transmitted or received"), "UNKNOWN"),
        (RuntimeError("sudo: a password is required"), "UNKNOWN"),
        (RuntimeError(""), "UNKNOWN"),
        (OSError(12, "Cannot allocate memory"), "UNKNOWN"),
    ],
)
def test_a_scheduler_that_does_not_answer_says_nothing_of_a_server(
    site: Any, monkeypatch: pytest.MonkeyPatch, said: str | Exception, standing: str
) -> None:
    from batchspawner import SlurmSpawner

    environments = []

    async def answer(self: Any, cmd: str, input: Any = None, env: Any = None) -> str:  # noqa: A002 - its name there
        environments.append(env)
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(SlurmSpawner, "run_command", answer)
    monkeypatch.setenv("CONFIGPROXY_AUTH_TOKEN", "secret")
    spawner = site.JupyterHub.spawner_class(config=site, job_id="7")
    assert asyncio.run(spawner.query_job_status()).name == standing
    assert "secret" not in str(environments)


def test_a_job_is_cancelled_once_the_scheduler_is_back(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchspawner import SlurmSpawner

    asked: list[str] = []

    async def answer(self: Any, cmd: str, **_: Any) -> str:
        asked.append(cmd)
        if len(asked) < 3:
            raise RuntimeError("scancel: error: Unable to contact slurm controller (connect failure)")
        return ""

    monkeypatch.setattr(SlurmSpawner, "run_command", answer)
    spawner = site.JupyterHub.spawner_class(config=site, job_id="7")
    monkeypatch.setitem(type(spawner).cancel_batch_job.__globals__, "LOOK_S", 0)
    asyncio.run(spawner.cancel_batch_job())
    assert len(asked) == 3 and asked[0].endswith("scancel 7")


def test_the_link_to_the_code_in_a_home_finds_the_whole_course(tmp_path: Path) -> None:
    """A kernel that is started in the home folder imports the package through the link that lies there."""
    (tmp_path / "dlojz").symlink_to(CONFIG.parents[2] / "dlojz")
    code = (
        "import sys; sys.path.insert(0, ''); from dlojz.hardware.clusters import machine; print(machine('local').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "local\n", done.stderr
