"""Figures and tables of lab 05: what is drawn is what was given; what is still to do is said."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.base.table import Table
from dlojz.config.run_config import RunConfig
from dlojz.labs import NotDone
from dlojz.labs.kit import figures as sheet
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.lab05_pipeline import figures
from dlojz.labs.lab05_pipeline import figures as measures
from dlojz.labs.lab05_pipeline.exercises_orders import kept, pipeline_step
from dlojz.labs.lab05_pipeline.exercises_runs import first_fit, stale_sgd
from dlojz.pipeline.exchange_formats import from_csv
from dlojz.pipeline.orders.asynchronous import threshold
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.shortest_schedule import optimum
from dlojz.pipeline.simulator import simulate
from dlojz.results.record import Span
from tests.display.legible import DRAWN_IN
from tests.labs.answers import one_f_one_b, unblocked, under_cap, without_bubble

COATNET = RunConfig.of(model="coatnet_tiny")


def undone(*_: Any) -> Any:
    raise NotDone("pipeline-bubble")


def test_figures_of_pipelines_say_what_is_to_do() -> None:
    for said in (
        figures.bubbles(undone, ("gpipe",), ((2, 4),)),
        figures.beside_gpipe(undone, 2, 4),
        figures.repaired(undone, 2, 4),
        figures.capped(undone, 4, 8, (3,)),
        figures.own(undone, 2, 4),
        measures.cuts(undone, COATNET, 2),
        measures.swings(undone, 0.5, (0,)),
        measures.thresholds(undone, (0,)),
        measures.memory(undone, [_run("gpipe")]),
    ):
        assert isinstance(said, Verdict)
        assert said.state == "todo"
    assert from_csv(figures.csv_of(undone, 2, 4)).orders == build("1f1b", 2, 4).orders


@pytest.mark.parametrize("language", DRAWN_IN)
def test_a_picture_shows_itself_in_few_colours(language: str) -> None:
    from PIL import Image

    use_language(language)  # type: ignore[arg-type]
    picture = figures.beside_gpipe(one_f_one_b, 2, 3)
    assert isinstance(picture, sheet.Picture)
    bundle, _ = picture._repr_mimebundle_()
    image = Image.open(io.BytesIO(bundle["image/png"]))
    assert image.getcolors(sheet.COLOURS)
    assert len(bundle["image/png"]) < len(picture.figure.png())
    assert bundle["text/plain"] == picture.figure.alt


def test_the_capped_schedules_stand_beside_the_optimum() -> None:
    picture = figures.capped(under_cap, 4, 8, (2, 3, 4))
    assert isinstance(picture, sheet.Picture)
    mine, best = (list(line.get_ydata()) for line in picture.figure.axes[0].lines[:2])
    assert mine == best == [optimum(4, 8, memory_limit=limit).value for limit in (2, 3, 4)] == [51, 39, 33]


def test_every_schedule_is_reckoned_with_the_same_work() -> None:
    sheet = figures.all_schedules(("gpipe", "interleaved", "chimera", "zb-h2", "zb-v"), 4, 8)
    lines = {row[0]: row[1:7] for row in sheet.rows}
    assert lines == {
        "gpipe": ("33", "33", "27.3%", "8", "× 1", "48"),
        "interleaved": ("28.5", "28.5", "15.8%", "2.5 – 5.5", "× 1", "112"),
        "chimera": ("30", "30", "20.0%", "3 – 4", "× 2", "48"),
        "zb-h2": ("27", "24", "11.1%", "7", "× 1", "48"),
        "zb-v": ("25.5", "24", "5.9%", "4", "× 1", "96"),
    }
    for name in lines:
        schedule = build(name, 4, 8)
        assert simulate(schedule, figures.chunk_costs(schedule)).ideal == pytest.approx(24)


def test_a_sheet_is_escaped_and_aligned() -> None:
    sheet = Table(("a", "b"), (("<i>", "1"), ("x", "100")))
    assert str(sheet) == "a      b\n<i>    1\nx    100"
    assert "<i>" not in sheet._repr_html_()
    assert "&lt;i&gt;" in sheet._repr_html_()


def test_deadlock_of_an_order_tells_that_it_runs_or_where_it_blocks() -> None:
    crossed = [["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]]
    assert "rank 0 at 0B0 waits for 1B0 of rank 1" in figures.deadlock_of(crossed, 2)
    order = [one_f_one_b(rank, 2, 4) for rank in range(2)]
    assert figures.deadlock_of(order, 4) == "runs to its end in 15 time units; kept: 2, 1"
    assert "deadlock of blocking sends" in figures.deadlock_of(order, 4, "rendezvous")
    backward_first = [["F0", "B0"], ["B0", "F0"]]
    assert "1B0 before 1F0" in figures.deadlock_of(backward_first, 1)


def test_the_students_schedules_are_drawn() -> None:
    for picture in (figures.repaired(unblocked, 2, 4), figures.own(without_bubble, 2, 4), figures.drawn("zb-h2", 2, 4)):
        assert isinstance(picture, sheet.Picture)
    assert figures.csv_of(without_bubble, 2, 4).startswith("0F0,0F1,0I0,0W0,")


def test_an_order_that_is_not_whole_or_cannot_run_is_told_and_not_drawn() -> None:
    one_f = [one_f_one_b(rank, 2, 4) for rank in range(2)]
    for said, words in (
        (figures.beside_gpipe(lambda rank, ranks, micro_batches: ["F0"], 4, 8), "0B0 is missing"),
        (figures.beside_gpipe(lambda rank, ranks, micro_batches: None, 4, 8), "returns nothing"),
        (figures.repaired(lambda: one_f, 2, 4), "deadlock of blocking sends"),
        (figures.own(lambda: [["F0"], ["F0"]], 2, 4), "is missing"),
        (figures.capped(lambda *size: one_f, 4, 8, (3,)), "4 lists are expected"),
    ):
        assert isinstance(said, Verdict)
        assert said.state == "wrong"
        assert words in said.message
    assert from_csv(figures.csv_of(lambda: [["F0"], ["F0"]], 2, 4)).orders == build("1f1b", 2, 4).orders
    drawn = figures.beside_gpipe(one_f_one_b, 4, 8)
    assert isinstance(drawn, sheet.Picture)
    assert "your schedule" in drawn.figure.alt


def test_the_students_bubble_is_tabled() -> None:
    sheet = figures.bubbles(pipeline_step, ("gpipe", "1f1b"), ((4, 8),))
    assert isinstance(sheet, Table)
    assert [row[3:] for row in sheet.rows] == [("33 | 33", "27.3% | 27.3%", "37.5% | 37.5%")] * 2
    use_language("fr")
    assert "27,3 %" in str(figures.bubbles(pipeline_step, ("gpipe",), ((4, 8),)))


def test_a_cut_of_the_students_stands_first() -> None:
    picture = measures.cuts(first_fit, COATNET, 3)
    assert isinstance(picture, sheet.Picture)
    titles = [axes.get_title(loc="left").split("\n")[0] for axes in picture.figure.axes if axes.get_title(loc="left")]
    assert titles == ["yours", "DeepSpeed", "torchgpipe", "equal numbers"]


def test_staleness_is_counted_per_stage() -> None:
    rows = {row[0]: row[1:] for row in measures.staleness(4, 24).rows}
    assert rows["pipedream"] == ("3 2 1 0", "3 2 1 0", "4 3 2 1", "yes")
    assert rows["pipedream-2bw"] == ("1 1 1 1", "1 1 1 1", "2 2 2 2", "yes")
    assert rows["pipedream-no-stashing"] == ("3 2 1 0", "0 0 0 0", "1 1 1 1", "no")


def test_thresholds_stand_beside_the_law() -> None:
    sheet = measures.thresholds(stale_sgd, (1, 2))
    assert isinstance(sheet, Table)
    assert [row[2] for row in sheet.rows] == [f"{threshold(delay):.3g}" for delay in (1, 2)]
    assert [row[1] for row in sheet.rows] == ["1", "0.618"]


def test_losses_are_drawn_by_name() -> None:
    picture = measures.losses({"GPipe": [1.0, 0.5], "PipeDream": [1.0, 2.0]})
    assert isinstance(picture, sheet.Picture)
    assert [line.get_label() for line in picture.figure.axes[0].lines] == ["GPipe", "PipeDream"]
    assert isinstance(measures.swings(stale_sgd, 0.5, (0, 3)), sheet.Picture)


def _run(name: str, steps: int = 3, activation_bytes: int = 800) -> Any:
    """A run whose steps take what the simulator says, the second one twice as long."""
    config = RunConfig.of(model="vit_tiny", image_size=32, pp=2, micro_batches=4, schedule=name, engine="by_hand")
    timeline = simulate(build(name, 2, 4), Costs(latency=0.5))
    schedule = timeline.schedule
    spans = tuple(
        Span(
            rank=schedule.rank_of(action),
            step=step,
            phase="forward" if action.kind == "F" else "backward",
            start_s=100 * step + (2 if step == 1 else 1) * float(start),
            end_s=100 * step + (2 if step == 1 else 1) * float(end),
            action=str(action),
        )
        for step in range(steps)
        for action, start, end in zip(schedule.actions, timeline.starts, timeline.ends, strict=True)
    )
    memory = SimpleNamespace(activations_bytes=activation_bytes, weights_bytes=64)
    sent = SimpleNamespace(group="pp", collective="send", count=4, message_bytes=4096)
    footprint = SimpleNamespace(memory=memory, communication=[sent])
    return SimpleNamespace(config=config, record=SimpleNamespace(spans=spans, footprint=lambda rank: footprint))


def test_the_step_of_median_length_is_laid_over() -> None:
    run = _run("1f1b")
    both = measures.overlay_of(run)
    true = simulate(build("1f1b", 2, 4), Costs(latency=0.5)).makespan
    assert both.measured.makespan == pytest.approx(true)
    assert both.costs.of_stage("forward", 0) == pytest.approx(1)
    assert isinstance(measures.laid_over(run), sheet.Picture)


def test_memory_and_messages_are_those_of_the_record() -> None:
    sheet = measures.memory(kept, [_run("gpipe"), _run("1f1b", activation_bytes=400)])
    assert isinstance(sheet, Table)
    assert [row[2] for row in sheet.rows] == ["4", "4", "2", "1"]
    assert [row[4] for row in sheet.rows] == ["200 B", "200 B", "200 B", "400 B"]
    assert [row[4] for row in measures.traffic(_run("1f1b")).rows] == ["4 × 1.00 KiB"] * 2


def test_measures_and_overlay_of_a_run_without_a_record_are_refused() -> None:
    run: Any = SimpleNamespace(config=_run("1f1b").config, record=None)
    for read in (
        measures.overlay_of,
        measures.traffic,
        lambda one: measures.activation_bytes(one, 0),
        lambda one: measures.memory(kept, [one]),
    ):
        with pytest.raises(LabError, match="run it again"):
            read(run)
