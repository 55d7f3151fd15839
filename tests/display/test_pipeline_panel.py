"""The panel answers whatever is chosen or typed, as its still twin does, and escapes what is typed."""

from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.display.widgets import pipeline_panel as panels
from dlojz.display.widgets.pipeline_panel import PipelinePanel, pipeline_panel, still_panel
from dlojz.pipeline.exchange_formats import to_csv
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build


def test_it_shows_what_is_asked_for_and_follows_every_control() -> None:
    panel = PipelinePanel(ranks=4, micro_batches=8)
    assert panel.answer.timeline is not None and panel.answer.timeline.makespan == 33
    assert "<svg" in panel.shown.value and "27.3 %" in panel.shown.value and "37.5 %" in panel.shown.value
    makespans: dict[str, float] = {}
    moves = {"latency": 0.25, "micro_batches": 16, "forward": 2.0, "stage_times": "1, 2, 1, 1", "schedule": "gpipe"}
    for name, value in moves.items():
        panel.controls[name].value = value
        assert panel.answer.timeline is not None
        makespans[name] = panel.answer.timeline.makespan
    assert makespans["latency"] == 37 and len(set(makespans.values())) == 5
    assert panel.order.value == to_csv(build("gpipe", 4, 16))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_chosen(name: str) -> None:
    answer = still_panel(schedule=name)
    assert answer.timeline is not None and answer.problems == () and "<svg" in answer.html()


def test_pipeline_panel_says_what_does_not_fit_in_place_of_the_drawing() -> None:
    panel = PipelinePanel(schedule="chimera")
    panel.controls["ranks"].value = 3
    assert "even number of ranks" in panel.shown.value and "<svg" not in panel.shown.value
    panel.controls["ranks"].value = 4
    panel.controls["color_by"].value = "version"
    assert "asynchronous" in panel.shown.value
    panel.controls["color_by"].value = "kind"
    for text in ("1, 2", "1, x, 1, 1", "nan, 1, 1, 1", "-1, 1, 1, 1"):
        panel.controls["stage_times"].value = text
        assert 'role="status"' in panel.shown.value and "<svg" not in panel.shown.value
    panel.controls["stage_times"].value = ""
    assert "<svg" in panel.shown.value


def test_pipeline_panel_tells_and_draws_a_broken_memory_limit() -> None:
    panel = PipelinePanel(memory_limit=3)
    assert "rank 0 keeps 4 stage-micro-batches at 0F3" in panel.shown.value and "<svg" in panel.shown.value
    broken = still_panel(schedule="zb-h1", memory_limit=3).html()  # 27 time units, where 31 are the least with 3
    assert "for the memory limit, broken here" in broken and broken.count("(reached)") == 1
    panel.controls["memory_limit"].value = "4"
    assert "keeps 4" not in panel.shown.value


def test_the_order_is_edited_with_instant_validation() -> None:
    panel = PipelinePanel(ranks=2, micro_batches=2)
    assert panel.order.disabled and panel.order.value == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    panel.by_hand.value = True
    assert not panel.order.disabled and panel.controls["schedule"].disabled
    panel.order.value = "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n"
    assert "0B1 is missing" in panel.shown.value
    panel.order.value = "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1"
    assert "deadlock" in panel.shown.value
    panel.order.value = '0F0,"<img src=x onerror=alert(1)>"'
    assert "<img" not in panel.shown.value and "row 1, column 2" in panel.shown.value
    panel.order.value = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1"
    assert panel.answer.timeline is not None and panel.answer.timeline.makespan == 12
    panel.controls["latency"].value = 1.0
    assert panel.order.value.startswith("0F0,0B0,0F1") and panel.answer.timeline.makespan == 16
    panel.by_hand.value = False
    assert panel.order.value == to_csv(build("1f1b", 2, 2))


def test_the_still_twin_shows_the_same_without_widgets() -> None:
    still = still_panel(schedule="zb-h1", latency=0.25, memory_limit=4, idle=True)
    html = still._repr_html_()
    assert 'src="data:image/png;base64,' in html and "<svg" not in html and "critical" not in repr(still)
    assert "zb-h1: 4 ranks, 8 micro-batches: makespan" in repr(still)
    refused = still_panel(csv="0F0,<b>")
    assert refused.figure is None and "&lt;b&gt;" in refused._repr_html_() and "row 1, column 2" in repr(refused)
    assert still_panel(csv="0F0,0B0").timeline is not None
    assert "whole number" in repr(still_panel(ranks="four")) and "did you mean 'ranks'" in repr(still_panel(rank=4))


def test_both_languages() -> None:
    use_language("fr")
    panel = PipelinePanel()
    assert "fraction de bulle" in panel.shown.value and panel.controls["latency"].description == "latence c"
    assert "27,3 %" in panel.shown.value and ">durée 33, bulle" in panel.shown.value


def test_pipeline_panel_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"rank": 4}
    with pytest.raises(LabError, match="did you mean 'ranks'"):
        pipeline_panel(**fields)
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    with pytest.raises(LabError, match="install"):
        panels.pipeline_panel()
