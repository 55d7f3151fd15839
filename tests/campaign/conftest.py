"""Campaigns and records made by hand, so that reading them needs no process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dlojz.campaign.campaign import Campaign
from dlojz.config.run_config import RunConfig
from dlojz.results.footprint import Footprint, Memory, Phases
from dlojz.results.record import RunRecord, write_record
from dlojz.running.store import claim

TINY = """
title = "Tiny <b>campaign</b>"
description = "One process and two."
time_limit_s = 60
[base]
model = "vit_tiny"
image_size = 32
steps = 4
[axes]
layout = [{ name = "alone", engine = "single", micro_batches = 2 }, { name = "DDP", dp = 2 }]
micro_batch = [2, 4]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def campaign() -> Campaign:
    return Campaign(
        title="by hand",
        base={"model": "vit_tiny", "image_size": 32, "steps": 4},
        axes={"layout": [{"name": "alone", "engine": "single"}, {"name": "DDP", "dp": 2}], "micro_batch": [2, 4]},
        time_limit_s=3600.0,
    )


@pytest.fixture
def keep_record() -> Callable[..., Path]:
    """A finished run of a configuration, in a root."""

    def keep(config: RunConfig, root: Path, status: str = "completed", rate: float = 100.0, **fields: object) -> Path:
        folder, _ = claim(config, root, force_new=True)
        footprint = Footprint(
            source="measured",
            memory=Memory(peak_bytes=2**20),
            phases=Phases(step_s=0.1),
            samples_per_s=rate,
        )
        content = {
            "run_id": folder.name,
            "config": config,
            "status": status,
            "footprints": (footprint,),
            "elapsed_s": 1800.0,
            **fields,
        }
        write_record(folder / "record.json", RunRecord(**content))
        return folder

    return keep
