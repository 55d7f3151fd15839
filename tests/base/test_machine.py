"""How long an answer is waited for: as asked on a quiet machine, longer on a busy one, never without end."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import dlojz.base.machine
from dlojz.base.machine import MOST, c_output_discarded, patience


@pytest.mark.parametrize(
    ("told", "factor"),
    [
        ("0.10 0.20 0.30 1/200 99\n", 1.0),  # quiet
        ("8.00 2.00 1.00 1/200 99\n", 2.0),  # the last minute, on four cores
        ("1.00 2.00 1.00 12/200 99\n", 3.0),  # what waits now
        ("900.0 2.00 1.00 1/200 99\n", MOST),
        ("", 1.0),
        ("a b c d e", 1.0),
    ],
)
def test_the_factor_is_the_work_per_core(
    told: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loadavg").write_text(told)
    monkeypatch.setattr(dlojz.base.machine, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert patience() == factor


def test_a_machine_that_tells_nothing_is_taken_for_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlojz.base.machine, "_LOAD", tmp_path / "none")
    assert patience() == 1.0


def test_c_output_is_discarded(capfd):
    libc = ctypes.CDLL(None)
    print("before")
    with c_output_discarded():
        libc.puts(b"a line of a C library")
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"
