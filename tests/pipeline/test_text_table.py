"""The drawing in text: exactly what the timeline says, whatever the width."""

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.pipeline.exchange_formats import common_quantum, labels_of, text_table
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import simulate


def test_text_table_draws_1f1b_as_on_the_blackboard() -> None:
    assert text_table(simulate(build("1f1b", 2, 3))).splitlines() == [
        "       0        3        6        9",
        "rank 0 F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "rank 1 .  F0 B0--- F1 B1--- F2 B2--- .  .",
    ]


def test_common_quantum_cuts_a_unit_into_a_thousand_at_most() -> None:
    for parts, expected in ((1000, 1e-3), (1001, None)):
        timeline = simulate(build("1f1b", 2, 2), Costs(forward=1 + 1 / parts))
        assert common_quantum(timeline) == (expected and pytest.approx(expected))


def test_text_table_goes_on_below_in_even_blocks() -> None:
    lines = text_table(simulate(build("1f1b", 2, 6)), width=40).splitlines()
    blocks = [block.splitlines() for block in "\n".join(lines).split("\n\n")]
    assert len(blocks) == 2 and all(len(block) == 3 for block in blocks)
    assert max(map(len, lines)) <= 40 and blocks[1][0].split()[0] == "11"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_every_action_with_a_duration_is_drawn_once_and_in_order(name: str, latency: float) -> None:
    timeline = simulate(build(name, 4, 8), Costs(latency=latency, evict=0.25, load=0.25))
    labels = labels_of(timeline.schedule)
    rows: dict[str, list[str]] = {}
    for line in text_table(timeline, width=4000).splitlines()[1:]:
        rows.setdefault(line[:7], []).extend(line[7:].split())
    durations = timeline.durations
    for rank in range(4):
        part = timeline.of_rank(rank)
        expected = [labels[number] for number in range(part.start, part.stop) if durations[number] > 0]
        drawn = [cell.rstrip("-") for cell in rows[f"rank {rank} "] if cell != "."]
        assert drawn == expected
    for width in (40, 80):
        assert all(len(line) <= width for line in text_table(timeline, width).splitlines() if line.startswith("rank"))


def test_labels_of_chunks_directions_and_slices_are_told_apart() -> None:
    assert labels_of(build("interleaved", 2, 2))[:4] == ["aF0", "aF1", "bF0", "bF1"]
    assert {label[0] for label in labels_of(build("chimera", 2, 2))} == {"d", "u"}
    assert labels_of(build("terapipe", 2, 1, token_slices=2))[:2] == ["F0.0", "F0.1"]
    assert any("&" in label for label in labels_of(build("dualpipe", 4, 8)))


def test_without_a_common_quantum_each_column_tells_its_middle() -> None:
    timeline = simulate(build("gpipe", 2, 4), Costs(forward=0.1234567, backward=0.7654321))
    assert common_quantum(timeline) is None
    note, *rows = text_table(timeline, width=60).splitlines()
    assert "one column =" in note and all(len(row) == 60 for row in rows)
    share = sum(row[7:].count(".") for row in rows) / (2 * 53)
    assert share == pytest.approx(timeline.bubble_fraction, abs=2 / 53)  # a border of a bar falls into a column


def test_text_table_has_the_readers_words_and_refuses_a_width_too_small() -> None:
    with pytest.raises(LabError, match="at least 40"):
        text_table(simulate(build("gpipe", 2, 2)), width=10)
    use_language("fr")
    assert "rang 1 .  F0" in text_table(simulate(build("gpipe", 2, 2)))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (16, 64)])
def test_repr_of_schedule_and_timeline_fits_ten_lines_and_a_notebook_draws_it(ranks: int, micro_batches: int) -> None:
    schedule = build("1f1b", ranks, micro_batches)
    timeline = simulate(schedule, Costs())
    for shown in (repr(schedule), repr(timeline)):
        assert len(shown.splitlines()) <= 10
        assert len(shown) < 1500
        assert shown.startswith(f"1f1b: {ranks} ranks, {micro_batches} micro-batches")
    assert f"makespan {timeline.makespan:g}" in repr(timeline)
    assert repr(schedule).splitlines()[1].startswith("0: 0F0 0F1")
    assert timeline._repr_mimebundle_()[0]["image/png"].startswith(b"\x89PNG")
