"""Schedules as CSV: torch reads the same actions, what is read back is what was written, and a bad file is refused."""

import csv
import io
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.pipeline.exchange_formats import from_csv, load_csv, read_csv, to_csv, torch_refusal, write_csv
from dlojz.pipeline.schedule import Action
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build

VALID = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("name", SCHEDULES)
def test_from_csv_reads_back_what_to_csv_wrote(name: str) -> None:
    schedule = build(name, 4, 8)
    read = from_csv(to_csv(schedule), name)
    assert (read.orders, read.placement, read.micro_batches) == (
        schedule.orders,
        schedule.placement,
        schedule.micro_batches,
    )
    assert (read.token_slices, read.asynchronous) == (schedule.token_slices, schedule.updates)
    assert from_csv(to_csv(schedule).replace(",", ",,")).orders == schedule.orders  # an empty cell is a pause


@pytest.mark.parametrize("name", [name for name in SCHEDULES if torch_refusal(build(name, 4, 8)) is None])
def test_torch_reads_the_same_actions(name: str) -> None:
    from torch.distributed.pipelining.schedules import _Action

    rows = list(csv.reader(io.StringIO(to_csv(build(name, 4, 8)))))
    for order, row in zip(build(name, 4, 8).orders, rows, strict=True):
        for action, cell in zip(order, row, strict=True):
            read = _Action.from_str(cell)
            parts = read.sub_actions or (read,)
            told = [(p.computation_type.value, p.stage_index, p.microbatch_index) for p in parts]
            assert told == [(e.kind, e.stage, e.micro_batch) for e in action.elements]
            assert read.sub_actions or str(read) == cell


def test_communications_follow_from_the_rest_and_are_read_over() -> None:
    text = "0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n0UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0\n\n\n"
    assert from_csv(text).orders == (
        (Action("F", 0, 0), Action("B", 0, 0)),
        (Action("F", 1, 0), Action("B", 1, 0)),
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", ["holds no action"]),
        (" , ,\n\n", ["holds no action"]),
        (VALID + "\n0F2", ["row 3", "no action"]),
        ("0F0,0X1\n", ["row 1, column 2", "'0X1'"]),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,0F1", ["stage 0 is on rank 0", "rank 1"]),
        ("0F0,0B0\n2F0,2B0\n", ["stage 1", "without a gap"]),
        ("0F0,0B0,0F2,0B2", ["micro-batch 1", "without a gap"]),
        ("0F99999999999,0B99999999999", ["micro-batch 0"]),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", ["0B1 is missing"]),
        ("0B0,0F0", ["0B0 before 0F0"]),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1", ["deadlock", "1F1"]),
        ("0F0,0W0,0I0", ["0W0 before 0I0"]),
        ("(0F0;0F0;0B0)OVERLAP_F_B", ["is no action"]),
        ("=1+1,0F0", ["row 1, column 1"]),
        ("0F" + "9" * 5000, ["row 1, column 1", "is no action"]),
        ("0F٣,0B٣", ["is no action"]),
        ("0F0\x00,0B0", ["is no action"]),
        ("0F0,\n" * 1025, ["more than 1024 rows"]),
        ("0F0," * 200_001, ["more than 200000 actions"]),
        ("," * (4 * 1024 * 1024 + 1), ["characters"]),
    ],
)
def test_from_csv_refuses_bad_text_in_one_sentence(text: str, expected: list[str]) -> None:
    with pytest.raises(LabError) as refusal:
        from_csv(text)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400
    assert all(words in str(refusal.value) for words in expected)


def test_read_csv_lets_an_editor_hold_what_cannot_be_executed() -> None:
    assert read_csv("0B0,0F0").orders == ((Action("B", 0, 0), Action("F", 0, 0)),)


def test_load_csv_and_write_csv_with_files(tmp_path: Path) -> None:
    path = write_csv(build("zb-v", 2, 4), tmp_path / "new" / "zbv.csv")
    assert load_csv(path).name == "zbv" and load_csv(path).orders == build("zb-v", 2, 4).orders
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + VALID.encode())
    assert load_csv(tmp_path / "bom.csv").ranks == 2
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    for bad in (tmp_path / "bytes.csv", tmp_path / "none.csv", tmp_path):
        with pytest.raises(LabError, match="cannot be read"):
            load_csv(bad)
    with pytest.raises(LabError, match="cannot be written"):
        write_csv(build("gpipe", 2, 2), tmp_path / "bom.csv" / "x.csv")


def test_what_torch_cannot_execute_is_told_with_its_reason() -> None:
    told = {name: torch_refusal(build(name, 4, 8)) for name in SCHEDULES}
    refused = {name for name, reason in told.items() if reason}
    asynchronous = {name for name, one in SCHEDULES.items() if one.family == "asynchronous"}
    assert refused == {"chimera", "dualpipe", "terapipe", "bpipe"} | asynchronous
    assert "on two" in str(told["chimera"]) and "token slices" in str(told["terapipe"])
    use_language("fr")
    assert "sur deux" in str(torch_refusal(build("chimera", 4, 8)))
    with pytest.raises(LabError, match="ligne 1, colonne 2"):
        from_csv("0F0,0X1")


@pytest.mark.parametrize("theirs, ours", [("LoopedBFS", "looped-bfs"), ("DualPipeV", "dualpipe-v")])
def test_from_csv_reads_the_orders_that_torch_dumps(theirs: str, ours: str) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    text = io.StringIO()
    csv.writer(text).writerows(get_schedule_ops(theirs, 4, 8, 2))  # as its `_dump_csv` does
    assert from_csv(text.getvalue()).orders == build(ours, 4, 8).orders
