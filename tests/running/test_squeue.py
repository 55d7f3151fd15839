"""An answer of the scheduler is read whole, or not at all."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.running.slurm.slurm_queue import (
    FIELD_END,
    RECORD_END,
    QueueLine,
    UnreadableAnswer,
    ask,
    parse_number,
    parse_sacct,
    parse_squeue,
    sacct_argv,
    scancel_argv,
    squeue_argv,
    words_of,
)

# What the squeue of Slurm 22.05.8 answered to `squeue_argv`, with TZ=UTC0, on a cluster of two nodes.
REAL = """\
3\x1fFAILED\x1fNonZeroExitCode\x1f2026-11-22T01:20:39\x1f2026-11-22T01:20:39\x1f1:00:00\x1f1:00:00\x1f0:00\x1f1\x1fmain\x1fb.sh\x1f(null)\x1e
2_[2-5%2]\x1fPENDING\x1fJobArrayTaskLimit\x1fN/A\x1fN/A\x1f1:00:00\x1f1:00:00\x1f0:00\x1f1\x1fmain\x1fsweep\x1f(null)\x1e
4\x1fPENDING\x1fPartitionTimeLimit\x1fN/A\x1fN/A\x1f4-03:00:00\x1f4-03:00:00\x1f0:00\x1f1\x1fmain\x1fa.sh\x1f(null)\x1e
1\x1fRUNNING\x1fNone\x1f2026-11-22T01:20:39\x1f2026-11-22T02:20:39\x1f1:00:00\x1f59:58\x1f0:02\x1f1\x1fmain\x1fna|me\x1fcom
ment $(x)\x1e
2_0\x1fRUNNING\x1fNone\x1f2026-11-22T01:20:39\x1f2026-11-22T02:20:39\x1f1:00:00\x1f59:58\x1f0:02\x1f1\x1fmain\x1fsweep\x1f(null)\x1e
"""


def test_parse_squeue_reads_a_real_answer() -> None:
    failed, waiting, for_ever, running, task = parse_squeue(REAL)
    assert (failed.number, failed.standing, failed.reason) == ("3", "ended", "NonZeroExitCode")
    assert (waiting.job_id, waiting.tasks, waiting.standing) == ("2", (2, 3, 4, 5), "pending")
    assert (for_ever.reason, for_ever.start_utc, for_ever.limit) == ("PartitionTimeLimit", "", "4-03:00:00")
    assert (running.name, running.comment, running.reason) == ("na|me", "com\nment $(x)", "")
    assert running.end_utc == "2026-11-22T02:20:39+00:00"
    assert (task.number, task.is_task(0), task.is_task(1), task.is_task(None)) == ("2_0", True, False, False)
    assert parse_squeue("") == []


@pytest.mark.parametrize("cut", [1, 40, len(REAL) // 2, len(REAL) - 3])
def test_an_answer_cut_short_says_nothing(cut: int) -> None:
    with pytest.raises(UnreadableAnswer):
        parse_squeue(REAL[:cut])


@pytest.mark.parametrize(
    "text", ["garbage", "garbage\n", "1 RUNNING\x1e\n", "\x1e\n", "x\x1fRUNNING" + "\x1f" * 10 + "\x1e"]
)
def test_something_else_is_no_answer(text: str) -> None:
    with pytest.raises(UnreadableAnswer):
        parse_squeue(text)


@settings(max_examples=200)
@given(st.text(max_size=60))
@example("1" + FIELD_END * 11 + RECORD_END)
@example("1_[" + "9" * 4000 + "]" + FIELD_END + "RUNNING" + FIELD_END * 10 + RECORD_END)
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UnreadableAnswer):
        assert all(isinstance(job, QueueLine) for job in parse_squeue(text))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("12", ("12", None, False)),
        ("12_3", ("12", (3,), False)),
        ("12_[3-5%2]", ("12", (3, 4, 5), False)),
        ("12_[0,7-9,20-30:5%1]", ("12", (0, 7, 8, 9, 20, 25, 30), False)),
        ("12_[1,3,...]", ("12", (1, 3), True)),
        ("12+1", ("12", None, False)),
        ("12.batch", ("12", None, False)),
    ],
)
def test_numbers(text: str, expected: Any) -> None:
    assert parse_number(text) == expected


@pytest.mark.parametrize("text", ["", "x", "12_", "12_[a]", "12_[1-999999999]", "12 13", "-1", "12_[1;2]"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(UnreadableAnswer):
        parse_number(text)


def test_parse_sacct_reads_state_end_and_exit_code() -> None:
    text = (
        "7|CANCELLED by 1000|0:0|2026-11-22T01:20:39|2026-11-22T01:21:39\n"
        "8_2|FAILED|137:0|2026-11-22T01:20:39|Unknown\n"
        "nonsense\n"
        "9|OUT_OF_MEMORY|0:125|Unknown|Unknown\n"
    )
    cancelled, killed, oom = parse_sacct(text)
    assert (cancelled.number, cancelled.state, cancelled.end_utc) == ("7", "CANCELLED", "2026-11-22T01:21:39+00:00")
    assert (killed.number, killed.exit_code, killed.end_utc) == ("8_2", "137:0", "")
    assert oom.standing == "ended"


def test_squeue_argv_and_its_like_are_lists_of_words() -> None:
    assert squeue_argv("al ice;")[3] == "--user=al ice;"
    assert sacct_argv(["7", "8_2"])[4] == "--jobs=7,8_2"
    assert scancel_argv("7", "x", "me") == ["scancel", "7"]
    assert scancel_argv("", "x", "me") == ["scancel", "--user=me", "--name=x"]


def test_lines_are_kept_and_read_back() -> None:
    for job in parse_squeue(REAL):
        assert QueueLine.from_dict(job.to_dict()) == job
    for damage in ({}, {"tasks": "x"}, {**parse_squeue(REAL)[0].to_dict(), "state": 7}):
        with pytest.raises((LabError, KeyError)):
            QueueLine.from_dict(damage)


@pytest.mark.skipif(shutil.which("squeue") is None, reason="SLURM's programs are not installed")
@pytest.mark.skipif(Path("/etc/slurm/slurm.conf").exists(), reason="there is a configuration here")
def test_ask_without_a_configuration_of_slurm_says_what_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `make cluster`, in a shell where its line was not copied."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    said = words_of(ask(["squeue"], 60))
    assert "export SLURM_CONF=/path/to/slurm.conf" in said and "resolve_ctls" not in said
