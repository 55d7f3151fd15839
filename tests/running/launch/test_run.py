"""What `run` refuses, in one sentence, before anything is written."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.running.launch import _merge, run


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"dp": 3, "processes": 2}, "dp=3, tp=1, pp=1 needs 3 processes"),
        (
            {"on": "slurm", "machine": "lokal"},
            "on='local'" if shutil.which("sbatch") is None else "did you mean 'local'",
        ),
        ({"on": "replay", "model": "gpt2"}, "replay"),
        ({"checkpoint_every": 0}, "every_steps must be at least 1"),
        ({"on": "locl"}, "did you mean 'local'"),
        ({"time_limit_s": 0}, "greater than 0"),
        ({"time_limit_s": float("nan")}, "greater than 0"),
        ({"tp": 2, "engine": "deepspeed"}, "tp=2 is not run with engine 'deepspeed'"),
        ({"modle": "coatnet_tiny"}, "did you mean 'model'"),
        ({"config": {"model": "coatnet_tiny"}}, "dict was received"),
        ({"worker_module": "os; rm"}, "worker_module"),
    ],
)
def test_refusals_leave_no_folder(request_: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(LabError) as refusal:
        run(**{"root": tmp_path / "runs", "wait": False, **request_})
    assert words in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_merge_replaces_fields_of_the_configuration() -> None:
    config = RunConfig.of(model="coatnet_tiny", dp=2, steps=7)
    assert _merge(config, {}) is config
    merged = _merge(config, {"zero": 3, "seed": 5})
    assert merged == RunConfig.of(model="coatnet_tiny", dp=2, zero=3, steps=7, seed=5)
