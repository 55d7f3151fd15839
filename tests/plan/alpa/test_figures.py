"""The figures hold what the plans hold, in words too, and in both languages."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlojz.plan.alpa.branches import Devices, two_towers
from dlojz.plan.alpa.examples import mlp
from dlojz.plan.alpa.inter_operator import StageOption, pipeline
from dlojz.plan.alpa.intra_operator import shard
from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.placement import exhaustive
from dlojz.text import use_language
from dlojz.viz.alpa_figure import placement_figure, sharding_figure, stages_figure


def texts(figure: object) -> str:
    from matplotlib.text import Text

    return " ".join(text.get_text() for text in figure.findobj(Text))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["en", "fr"])
def test_all_three_are_drawn(name: str, tmp_path: Path) -> None:
    try:
        use_language(name)
        plan = shard(mlp(8, 32, 2), DeviceMesh((1, 4)))
        drawn = texts(sharding_figure(plan, tmp_path / "sharding.png"))
        assert all(f"{tensor}  {spec}" in drawn for tensor, spec in plan.specs.items())
        assert drawn.count("all_reduce") == len(plan.communications)
        stages = pipeline(lambda first, last, submesh: [StageOption(last + 1.0, label="dp<1>")], 4, 4, 1, 2)
        drawn = texts(stages_figure(stages, tmp_path / "stages.png"))
        assert "0: dp<1>" in drawn
        placed = exhaustive(two_towers(2), Devices(2, 1e12))
        drawn = texts(placement_figure(placed, tmp_path / "placement.png"))
        assert all(slot.name in drawn for slot in placed.slots)
        assert {path.stat().st_size > 1000 for path in tmp_path.iterdir()} == {True}
        assert placed.figure().alt == placed.title()
    finally:
        use_language("en")
