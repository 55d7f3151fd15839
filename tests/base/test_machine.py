"""How long an answer is waited for: as asked on a quiet machine, longer on a busy one, never without end."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import dlojz.base.machine
from dlojz.base.errors import LabError
from dlojz.base.machine import (
    MOST,
    MemoryLimit,
    c_output_discarded,
    keep_freed_memory,
    meet_on_loopback,
    patience,
    rank_limit,
    refuse_windows,
)


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


MEBIBYTES_HELD = """
import psutil
from dlojz.base.machine import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
blocks = [bytearray(8 << 20) for _ in range(16)]
del blocks
print(psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_kept_where_it_is_asked_for():
    programs = [[sys.executable, "-c", MEBIBYTES_HELD.format(keep=keep)] for keep in (False, True)]
    held = [int(subprocess.run(program, capture_output=True, check=True).stdout) for program in programs]
    assert held[1] > held[0] + 100  # of 128 MiB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_keep_freed_memory_asks_for_the_largest_threshold_that_glibc_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc, malloc.c, `do_set_mmap_threshold`: at most half of HEAP_MAX_SIZE, 32 MiB; M_MMAP_THRESHOLD is -3."""
    asked: dict[int, int] = {}
    library = SimpleNamespace(mallopt=lambda parameter, value: asked.update({parameter: value}) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert keep_freed_memory()
    assert asked == {-3: 32 * 2**20, -1: 2**31 - 1}


def test_rank_limit_by_ulimit_is_what_is_left_of_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 GiB allowed, of which 300 MiB are mapped; a share of the machine of 8 GiB is more for one rank, less for 16."""
    monkeypatch.setattr(dlojz.base.machine, "machine_limit", lambda: MemoryLimit(8 * 2**30))
    monkeypatch.setattr(dlojz.base.machine, "system_limit", lambda name: {"RLIMIT_AS": 2**30}[name])
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=300 * 2**20))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert rank_limit(1) == MemoryLimit(724 * 2**20, "ulimit")
    assert rank_limit(16) == MemoryLimit(512 * 2**20)


def test_refuse_windows_says_what_to_install() -> None:
    with pytest.raises(LabError, match="wsl --install"):
        refuse_windows()


@pytest.mark.parametrize(
    ("named", "always", "kept"),
    [
        (None, True, "lo"),
        ("ib0", True, "lo"),
        ("eth0", True, "lo"),
        (None, False, None),
        ("ib0", False, "lo"),
        ("eth0", False, "eth0"),
        ("ib0,eth0", False, "ib0,eth0"),
    ],
)
def test_meet_on_loopback_whatever_is_named(
    named: str | None, always: bool, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [], "eth0": []})
    environment = {"GLOO_SOCKET_IFNAME": named} if named else {}
    meet_on_loopback(environment, always=always)
    assert environment == ({"GLOO_SOCKET_IFNAME": kept} if kept else {})
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"en0": []})
    environment = {"GLOO_SOCKET_IFNAME": "ib0"}
    meet_on_loopback(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0"}, "a system whose loopback has another name"
