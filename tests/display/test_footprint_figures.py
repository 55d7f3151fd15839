"""The figures of a forecast, the calculator and its twin: lengths are figures, texts stay texts, nothing overlaps."""

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, use_language
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.run_figures import (
    FARTHEST,
    activation_curve_figure,
    compare_figure,
    far_limit,
    footprint_figure,
)
from dlojz.display.memory_tables import block_part, category_part, grouped_blocks, module_part
from dlojz.display.widgets.calculator import Calculator, calculator, still_calculator
from dlojz.planner.activation_budget import plan_activations
from dlojz.prediction.forecast import Forecast, forecast, heaviest
from dlojz.results.footprint import CATEGORIES
from dlojz.results.record import RunRecord

from .legible import DRAWN_IN
from .overlap import overlapping

MakeRecord = Callable[..., RunRecord]
DDP = {"dp": 2, "micro_batch": 16}


@pytest.fixture(scope="module")
def on_cpu() -> Forecast:
    return forecast(RunConfig.of(**DDP))


@pytest.fixture(scope="module")
def on_gpu() -> Forecast:
    return heaviest(RunConfig.of(model="gpt_tiny", micro_batch=512, **{"dp": 2}), "v100-16")


def test_the_stacks_are_as_high_as_their_bytes(on_gpu: Forecast) -> None:
    figure = footprint_figure(on_gpu)
    tops: dict[int, float] = {}
    for bar in figure.axes[0].patches:
        number = round(bar.get_x() + bar.get_width() / 2)  # type: ignore[attr-defined]
        tops[number] = max(tops.get(number, 0.0), bar.get_y() + bar.get_height())  # type: ignore[attr-defined]
    memory = on_gpu.memory
    expected = [memory.peak_bytes, memory.reserved_bytes, memory.device_bytes]
    assert [tops[number] for number in range(3)] == pytest.approx([(size or 0) / 2**30 for size in expected])
    longest = max(sum(held.values()) for _, held in grouped_blocks(on_gpu))
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[1].patches]  # type: ignore[attr-defined]
    assert max(ends) == pytest.approx(longest / 2**30)


def test_the_curve_of_a_budget_is_drawn_with_the_plan() -> None:
    """Time falls to nothing as memory grows; every row has a bar for each run of equal choices."""
    config = RunConfig.of(model="gpt_tiny", micro_batch=8)
    plan = plan_activations(config, int(0.8 * (forecast(config).memory.peak_bytes or 0)))
    figure = activation_curve_figure(plan)
    left, right = figure.axes
    line, diamond, budget = left.lines
    assert np.asarray(line.get_ydata())[-1] == 0 and np.asarray(line.get_ydata())[0] > 0
    assert np.asarray(diamond.get_xdata())[0] <= np.asarray(budget.get_xdata())[0]
    ends = {bar.get_x() + bar.get_width() for bar in right.patches}  # type: ignore[attr-defined]
    assert max(ends) == len(plan.choices) and format_bytes(plan.kept_peak_bytes) in figure.alt
    assert not overlapping(figure)


def test_a_near_limit_is_drawn_and_a_far_one_is_told(on_cpu: Forecast) -> None:
    peak = on_cpu.memory.peak_bytes or 0
    near = footprint_figure(on_cpu, limit_bytes=2 * peak)
    assert [line.get_ydata()[0] for line in near.axes[0].lines] == pytest.approx([2 * peak / 2**20])  # type: ignore[index]
    far = footprint_figure(on_cpu, limit_bytes=100 * peak)
    assert not far.axes[0].lines and "100 times as much" in far.axes[0].get_title(loc="left")
    assert far_limit(int(FARTHEST * peak), peak) == ""


@pytest.mark.parametrize("language", DRAWN_IN)
def test_footprint_figure_lays_no_text_on_another(
    on_cpu: Forecast, on_gpu: Forecast, make_record: MakeRecord, language: str, tmp_path: Path
) -> None:
    use_language(language)
    record = make_record(**DDP)
    for figure in (
        footprint_figure(on_gpu, tmp_path / "gpu.png"),
        footprint_figure(on_cpu, limit_bytes=2**26),
        compare_figure(_with_limit(record, 2**30)),
        compare_figure(_with_limit(record, 90 * 2**20)),
    ):
        assert overlapping(figure) == []
        assert figure.alt
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def _with_limit(record: RunRecord, limit_bytes: int) -> Any:
    from dlojz.compare import compare

    return compare(record.model_copy(update={"environment": {"memory_limit_bytes": str(limit_bytes)}}))


def test_a_comparison_tells_the_limit_that_held(make_record: MakeRecord) -> None:
    near, far = _with_limit(make_record(**DDP), 90 * 2**20), _with_limit(make_record(**DDP), 2**34)
    assert near.rows[0].limit_bytes == 90 * 2**20 and "2 ranks" in near.rows[0].limit_of
    drawn = [line.get_xdata()[0] for line in compare_figure(near).axes[0].lines if line.get_linestyle() == "--"]  # type: ignore[index]
    assert drawn == pytest.approx([90.0])
    panel = compare_figure(far).axes[0]
    assert not any(line.get_linestyle() == "--" for line in panel.lines)
    assert "limit: 16.0 GiB" in panel.get_title(loc="left")
    assert any("16.0 GiB" in sentence for sentence in far.findings())


def test_a_gpu_is_known_by_its_name(make_record: MakeRecord) -> None:
    from dlojz.compare import gpu_of

    for name, expected in {
        "Tesla V100-SXM2-32GB": "v100-32",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
    }.items():
        found = gpu_of(make_record(**DDP).model_copy(update={"environment": {"device": name}}))
        assert found is not None and found.name == expected
    assert gpu_of(make_record(**DDP).model_copy(update={"environment": {"device": "CPU"}})) is None


def test_category_part_block_part_and_module_part_add_up_to_the_peak(on_cpu: Forecast, on_gpu: Forecast) -> None:
    for one in (on_cpu, on_gpu):
        peak = one.memory.peak_bytes
        assert category_part(one).rows[-1][1] == format_bytes(peak)
        assert sum(sum(held.values()) for _, held in grouped_blocks(one)) == peak
        for part in (category_part(one), block_part(one), module_part(one)):
            assert sum(part.shares) == pytest.approx(1.0) and len(part.shares) == len(part.rows)
    assert {name for _, held in grouped_blocks(on_cpu) for name in held} <= set(CATEGORIES)
    assert any("×" in label for label, _ in grouped_blocks(on_gpu))  # equal blocks of a decoder stand together


def test_the_twin_shows_the_figures_of_the_forecast() -> None:
    answer = still_calculator(model="coatnet_tiny", dp=2, device="V100-32")
    told = heaviest(RunConfig.of(dp=2), "v100-32")
    assert answer.forecast == told
    shown = answer._repr_html_()
    assert "data:image/png;base64," in shown and 'alt="coatnet_tiny, DDP ×2' in shown
    for num_bytes in (told.memory.peak_bytes, told.memory.device_bytes, told.memory.activations_bytes):
        assert format_bytes(num_bytes) in shown.replace("\u00a0", " ")


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"model": "<b>"}, "unknown model &#x27;&lt;b&gt;&#x27;"),
        ({"engine": "deepspeed", "zero": 2, "pp": 2}, "use zero=1 or zero=0 with a pipeline"),
        ({"device": "moon"}, "unknown device"),
        ({"pp": 1024}, "pp=1024"),
    ],
)
def test_still_calculator_answers_an_impossible_choice_by_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    answer = still_calculator(**fields)
    assert answer.forecast is None and answer.figure is None and answer.parts == ()
    shown = answer._repr_html_()
    assert sentence in shown and "<b><b>" not in shown and "Traceback" not in shown


def test_calculator_computes_what_still_calculator_does() -> None:
    widget = Calculator(model="gpt_tiny", dp=2, micro_batch=4, weight_decay=0.5)
    for name, value in {"micro_batch": 8, "dp": 4, "engine": "DeepSpeed ZeRO-2", "device": "a100-40"}.items():
        widget.controls[name].value = value
    expected = still_calculator(
        model="gpt_tiny", dp=4, zero=2, engine="deepspeed", micro_batch=8, weight_decay=0.5, device="a100-40"
    )
    assert widget.answer == expected and widget.shown.value == expected._repr_html_()
    widget.controls["pp"].value = 2
    assert "cannot be combined" in widget.shown.value and "Traceback" not in widget.shown.value
    widget.controls["pp"].value = 1
    assert widget.shown.value == expected._repr_html_()


def test_calculator_takes_the_input_of_another_model_and_a_large_one_waits() -> None:
    widget = Calculator(model="gpt_tiny", micro_batch=4)
    before = widget.answer
    widget.controls["model"].value = "vit_tiny"
    assert widget.fields["image_size"] == 64 and "sequence_length" not in widget.fields
    assert widget.answer != before
    before = widget.answer
    widget.controls["model"].value = "llama_3_1_405b"
    assert widget.answer == before and "press" in widget.shown.value


def test_calculator_refuses_what_it_cannot_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LabError, match="unknown model"):
        calculator(model="gpt_tny")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LabError, match="still_calculator"):
        calculator(model="gpt_tiny")
