"""The demo: its runs are one training laid out in eight ways."""

from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.cli import runs
from dlojz.cli.runs import demo_configs
from dlojz.config.run_config import RunConfig
from dlojz.running import launch


def test_every_run_of_the_demo_is_the_same_training() -> None:
    configs = demo_configs()
    assert [config.layout.strategy for config in configs] == [
        "single",
        "ddp",
        "fsdp2",
        "zero-0",
        "zero-1",
        "zero-2",
        "zero-3",
        "single",
    ]
    assert configs[-1].layout.pp == 2  # the model is divided, and nothing replicated
    assert len({config.layout.global_batch for config in configs}) == 1
    assert len({config.layout.micro_batch for config in configs}) == 1
    assert len({(config.model, config.data, config.seed, config.steps) for config in configs}) == 1
    assert {config.layout.world_size for config in configs[1:]} == {2}


def test_run_all_counts_its_runs_from_one(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def completed(config: RunConfig, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(state="completed", losses=[1.0] * 4, record=None, until_end=lambda draw: None)

    monkeypatch.setattr(launch, "run", completed)
    configs = [RunConfig.of(model="vit_tiny", steps=4, dp=dp) for dp in (1, 2)]
    assert len(runs._run_all(configs, False, None)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["1/2", "2/2"] and "4/4 (found again)" in lines[0]
