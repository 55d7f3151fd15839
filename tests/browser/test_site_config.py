"""The configuration for a site: what a student asks for becomes a job that holds nothing else."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import need

CONFIG = Path(__file__).resolve().parents[2] / "slurm" / "jupyterhub" / "site_config.py"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration as JupyterHub loads it, with two kinds of node on offer."""
    for package in ("jupyterhub", "batchspawner"):
        need(importlib.util.find_spec(package), f"{package} (requirements-tests.txt)")
    from traitlets.config import PyFileConfigLoader

    monkeypatch.setenv("DLOJZ_HUB_PROFILES", "local,jean_zay_v100_32")
    return PyFileConfigLoader(str(CONFIG)).load_config()


def script(site: Any, asked: dict[str, Any]) -> str:
    spawner = site.JupyterHub.spawner_class(config=site)
    spawner.choose(asked)
    fields = {name.removeprefix("req_"): getattr(spawner, name) for name in spawner.trait_names() if name[:4] == "req_"}
    fields |= {"username": "ada", "homedir": "/srv/ada", "keepvars": "PATH", "cmd": "exec server"}
    return str(asyncio.run(spawner._get_batch_script(**fields)))


@pytest.fixture(autouse=True)
def _without_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner's name and home are only known to a hub."""
    need(importlib.util.find_spec("batchspawner"), "batchspawner (requirements-tests.txt)")
    from batchspawner import SlurmSpawner

    for name in ("username", "homedir", "keepvars"):
        monkeypatch.setattr(SlurmSpawner, f"_req_{name}_default", lambda self: "", raising=False)


def test_a_profile_is_what_its_machine_file_says(site: Any) -> None:
    from dlojz.launch.machines import machine

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
    ],
)
def test_what_is_not_on_offer_is_refused(site: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose one of|whole number|account is made|language is one"):
        script(site, asked)


def test_the_form_offers_the_profiles(site: Any) -> None:
    form = site.JupyterHub.spawner_class(config=site)._options_form_default()
    assert form.count("<option") == 2 + 2
    assert 'value="jean_zay_v100_32"' in form
