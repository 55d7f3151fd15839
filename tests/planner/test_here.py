"""Planning for this machine: what is searched, what is refused, and that the order is the cost model's."""

from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.by_hand.collectives.running import TimedMessage
from dlojz.cost_model.measured_machine import Measured, Setup, local_step_s
from dlojz.cost_model.measuring import COLLECTIVES, PRODUCTS, Timed
from dlojz.planner.this_machine import Here, plan_here
from dlojz.runnable import check_runnable


def setup_of(ranks: int) -> Setup:
    timings = [Timed("product", (*size, 1), 2 * size[0] * size[1] * size[2] / 4e10, "product") for size in PRODUCTS]
    timings += [Timed("pass", (size,), size / 1e10, "pass") for size in (10**6, 10**7)]
    timings.append(Timed("launch", (), 1e-5, "launch"))
    timings += [Timed("update", size, 1e-4 * size[0], "update") for size in ((8, 256), (64, 256))]
    points = [
        TimedMessage(size, 1e-4 * ranks + size / 1e9, ranks, name)
        for name in (*COLLECTIVES, "p2p")
        for size in (2**10, 2**20)
        if ranks > 1
    ]
    return Setup(ranks=ranks, timings=tuple(timings), points=tuple(points))


@pytest.fixture(scope="module")
def machine() -> Measured:
    return Measured(
        machine="here", processor="a CPU", cores=2, memory_bytes=2**34, date="2026-11-22", versions={},
        setups=(setup_of(1), setup_of(2), setup_of(4)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(machine: Measured) -> Here:
    return plan_here("gpt_tiny", 4, 16, measured=machine)


def test_every_row_runs_the_whole_batch_on_all_ranks(made: Here, machine: Measured) -> None:
    assert len(made.rows) > 50
    for one in made.rows:
        layout = one.config.layout
        check_runnable(one.config)
        assert layout.world_size == 4
        assert layout.dp * layout.micro_batch * layout.micro_batches == 16
        assert one.step_s == pytest.approx(local_step_s(machine, one.config))
    steps = [one.step_s for one in made.rows]
    assert steps == sorted(steps)
    assert len({one.config.layout for one in made.rows}) == len(made.rows)


def test_every_kind_of_layout_is_among_them(made: Here) -> None:
    degrees = {(one.config.layout.dp, one.config.layout.tp, one.config.layout.pp) for one in made.rows}
    assert degrees == {(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)}
    assert {one.config.layout.zero for one in made.rows} == {0, 2, 3}
    kinds = made.kinds()
    assert kinds[0] is made.best is made.rows[0]
    assert [one.step_s for one in kinds] == sorted(one.step_s for one in kinds)
    assert made.table(3)[0][2] == "+0 %"
    # A schedule that takes at least as many micro-batches as stages is refused with fewer, in its own words.
    assert any("zb-h1 needs at least" in why for why in made.refused.values())


def test_the_bytes_are_the_forecasts(made: Here) -> None:
    from dlojz.prediction.forecast import forecast

    pipeline = next(one for one in made.rows if one.config.layout.pp == 4)
    assert pipeline.peak_bytes == max(forecast(pipeline.config, rank).memory.peak_bytes or 0 for rank in range(4))


def test_plan_here_shows_its_answer(made: Here, tmp_path: Any) -> None:
    measured = {one.title: 1.1 * one.step_s for one in made.kinds()[:3]}
    made.figure(measured, tmp_path / "here.png")
    assert (tmp_path / "here.png").stat().st_size > 10_000
    assert made.best.title in repr(made) and "<table>" in made._repr_html_()
    assert made.as_dict(2)["rows"][0]["step_s"] == made.best.step_s


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("coatnet_tiny", 8, 16), "--ranks 8"),
        (("coatnet_7", 2, 16), "does not fit here"),
        (("nothing", 2, 16), "unknown model"),
        (("gpt_tiny", 0, 16), "ranks"),
        (("gpt_tiny", 2, -1), "batch"),
    ],
)
def test_plan_here_refuses_what_cannot_be_planned(machine: Measured, asked: tuple[str, int, int], said: str) -> None:
    model, ranks, batch = asked
    with pytest.raises(LabError, match=said) as refusal:
        plan_here(model, ranks, batch, measured=machine)
    assert "\n" not in str(refusal.value)


def test_plan_here_names_the_command_without_a_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(LabError, match="dlojz calibrate"):
        plan_here("gpt_tiny")
