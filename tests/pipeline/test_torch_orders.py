"""Our orders are torch's wherever torch has the schedule; and its known faults, so that an upgrade is noticed.

Nothing is executed: the schedule classes are given stages that are none.
"""

import json
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining import _schedule_visualizer as visualizer
from torch.distributed.pipelining import schedules, stage

from dlojz.pipeline.schedule import parse_action
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import simulate

SIZES = [(2, 2), (2, 4), (2, 6), (4, 4), (4, 8), (4, 10), (4, 12), (8, 8), (8, 16), (8, 24)]
FEW = [(2, 1), (4, 1), (4, 2), (4, 3), (4, 6), (8, 3), (8, 5), (8, 12)]


def torch_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Any:
    """The schedule's object; one chunk too, which `get_schedule_ops` refuses for some classes."""
    stub = mock.create_autospec(stage.PipelineStage, instance=True)
    stub.group_rank, stub.group_size, stub.submod = 0, ranks, None
    stub.num_stages = ranks * chunks
    made = getattr(schedules, str(SCHEDULES[name].torch_class))
    single = issubclass(made, schedules.PipelineScheduleSingle)
    return made(stub if single else [stub] * chunks, micro_batches)


def orders_of(schedule: Any) -> list[list[str]]:
    """Compute actions as text, rank after rank, without the idle cells."""
    order = schedule.pipeline_order
    texts = [[str(cell) for cell in order[rank] if cell is not None] for rank in sorted(order)]
    return [[text for text in row if "REDUCE_GRAD" not in text] for row in texts]


def ours(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> list[list[str]]:
    return [[str(action) for action in order] for order in build(name, ranks, micro_batches, chunks=chunks).orders]


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("interleaved", 2),
        ("interleaved", 3),
        ("looped-bfs", 2),
        ("looped-bfs", 3),
        ("interleaved-zb", 1),
        ("interleaved-zb", 2),
        ("interleaved-zb", 3),
        ("zb-v", 2),
        ("gpipe", 1),
    ],
)
def test_the_order_is_torchs(name: str, chunks: int) -> None:
    for ranks, micro_batches in SIZES + FEW:
        expected = orders_of(torch_schedule(name, ranks, micro_batches, chunks))
        assert ours(name, ranks, micro_batches, chunks) == expected, (ranks, micro_batches)


def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_chunk() -> None:
    for ranks, micro_batches in SIZES:
        expected = orders_of(torch_schedule("zb-h1", ranks, micro_batches, 1))
        assert ours("zb-h1", ranks, micro_batches) == expected, (ranks, micro_batches)


def test_the_order_of_dualpipe_v_is_torchs() -> None:
    for ranks, micro_batches in [(2, 4), (2, 5), (2, 8), (4, 8), (4, 9), (4, 16), (8, 16), (8, 24)]:
        expected = orders_of(torch_schedule("dualpipe-v", ranks, micro_batches, 2))
        assert ours("dualpipe-v", ranks, micro_batches) == expected, (ranks, micro_batches)


@pytest.mark.parametrize("micro_batches", [4, 8, 13])
def test_1f1b_is_torchs_but_for_its_last_rank(micro_batches: int) -> None:
    """Torch's `pipeline_order` begins the last rank with micro-batch 1 and ends with m, which does not exist.

    Training is right, since Schedule1F1B does not execute that order; a simulation that starts from it would not be.
    """
    theirs = orders_of(torch_schedule("1f1b", 4, micro_batches, 1))
    own = ours("1f1b", 4, micro_batches)
    assert theirs[:3] == own[:3]
    assert theirs[3] != own[3], "torch has repaired the last rank of Schedule1F1B.pipeline_order"
    assert theirs[3][0] == "3F1"
    assert f"3F{micro_batches}" in theirs[3]
    wrong = {rank: [schedules._Action.from_str(text) for text in row] for rank, row in enumerate(theirs)}
    with pytest.raises(AssertionError, match="without first running Forward"):
        schedules._validate_schedule(wrong, 4, 4, micro_batches)


def test_torch_accepts_and_refuses_the_same_numbers_of_micro_batches() -> None:
    for micro_batches in range(1, 26):
        refusals = []
        for make in (lambda m: ours("interleaved", 4, m), lambda m: torch_schedule("interleaved", 4, m, 2)):
            try:
                make(micro_batches)
                refusals.append(False)
            except ValueError:
                refusals.append(True)
        assert refusals[0] == refusals[1], micro_batches


def test_every_action_of_torch_is_read_and_written_back() -> None:
    for name in ("zb-v", "dualpipe-v", "interleaved"):
        for row in orders_of(torch_schedule(name, 4, 8, 2)):
            assert [str(parse_action(text)) for text in row] == row


# --- faults of torch 2.13: if one of these tests fails, torch has repaired it and the note in the lab can go ---


def test_single_chunk_schedules_have_lost_their_idle_cells() -> None:
    """`_add_reduce_grad` drops them, so GPipe and 1F1B are drawn without bubbles, and spacing them fails."""
    for name in ("GPipe", "1F1B"):
        rows = visualizer.get_schedule_ops(name, 4, 8)
        assert all(cell is not None for row in rows for cell in row)
        with pytest.raises(TypeError):
            visualizer.get_schedule_ops(name, 4, 8, with_comms=True)
    with pytest.raises(RuntimeError, match="REDUCE_GRAD"):
        visualizer.get_schedule_ops("GPipe", 4, 8, add_spacing=True)
    with pytest.raises(RuntimeError, match="No progress"):
        visualizer.get_schedule_ops("1F1B", 4, 8, add_spacing=True)


def test_get_schedule_ops_with_spacing_moves_actions_to_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Finished rows are removed while they are counted, so that what follows lands on the wrong rank."""
    rows = visualizer.get_schedule_ops("ZBVZeroBubble", 4, 8, add_spacing=True)
    assert {cell.stage_index for cell in rows[0] if cell is not None} == {0, 1, 2, 3, 7}
    assert len(capsys.readouterr().out.splitlines()) > 100


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v"])
def test_torchs_own_simulation_knows_not_its_own_actions(name: str) -> None:
    with pytest.raises(ValueError, match="Unsupported action type .*UNSHARD"):
        torch_schedule(name, 4, 8, 2)._simulate()


def test_overlapped_actions_break_torchs_simulation() -> None:
    order = {0: [schedules._Action.from_str(text) for text in ("0F0", "(0F1;0B0)OVERLAP_F_B", "0B1")]}
    with pytest.raises(KeyError, match="-1"):
        schedules._simulate_comms_compute(order, {0: 0}.__getitem__, 1)


def test_the_trace_of_torch_gives_every_action_the_same_time(tmp_path: Any) -> None:
    order = {0: [schedules._Action.from_str(text) for text in ("0F0", "0I0", "0W0")]}
    schedules._dump_chrometrace(order, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["dur"] for event in events] == [1, 1, 1]
    assert [event["cat"] for event in events] == ["computation", "communication", "computation"]


def test_torch_schedule_has_idle_cells_in_interleaved_zero_bubble_that_are_no_times() -> None:
    """`_add_bubbles_to_actions` knows F and B, not I: it pads nothing once the first I is out."""
    timeline = simulate(build("interleaved-zb", 4, 2))
    waits = 0.0
    for rank, row in torch_schedule("interleaved-zb", 4, 2, 2).pipeline_order.items():
        cells = [None if cell is None else str(cell) for cell in row]
        first = next(number for number, cell in enumerate(cells) if cell and "I" in cell)
        assert None not in cells[first:]
        kinds = [action.kind for action in timeline.schedule.orders[rank]]
        behind = slice(timeline.of_rank(rank).start + kinds.index("I"), timeline.of_rank(rank).stop)
        waits += timeline.ends[behind].max() - timeline.starts[behind].min() - timeline.durations[behind].sum()
    assert waits > 0
