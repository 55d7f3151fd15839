"""Logs are safe to show."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlojz.running.folder import MAX_LOG_BYTES, last_line, read_regular, read_tail, visible


@given(st.text("aé \t\n\r\0\x07\x1b\x7f\x9b\u200b\u202e\u2066\u2028\ufeff\ud800\U000e0001"))
def test_visible_leaves_nothing_invisible(text: str) -> None:
    shown = visible(text)
    assert all(char.isprintable() or char in "\n\t" or char.isspace() for char in shown)
    assert not any(char in shown for char in "\x1b\r\x07\u202e\u2066\u2028\u200b")


def test_visible_leaves_ordinary_text_unchanged() -> None:
    assert visible("étage 1 → 2\n\tΨ = 4 µs\n") == "étage 1 → 2\n\tΨ = 4 µs\n"


def test_tail_is_capped_even_when_every_byte_becomes_an_escape(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"begin" + b"\x1b" * (4 * MAX_LOG_BYTES) + b"end")
    tail = read_tail(log)
    assert len(tail) == MAX_LOG_BYTES and tail.endswith("end") and "begin" not in tail


def test_read_tail_of_links_pipes_and_missing_files_is_empty(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    assert [read_tail(tmp_path / name) for name in ("link", "pipe", "missing")] == ["", "", ""]


def test_read_regular_refuses_a_file_that_is_longer_than_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_regular(tmp_path / "file", 4)


def test_last_line_is_short_and_says_something() -> None:
    assert last_line("a\nb\n \n") == "b"
    assert len(last_line("x" * 10_000)) == 301
    assert last_line("") == ""
