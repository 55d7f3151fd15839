"""What the ranks inherit, how they start and how they are stopped."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlojz.processes.start_rank import _exit_code
from dlojz.running import supervisor
from dlojz.running.supervisor import LaunchOutcome, on_cpu, prepare, watch


@pytest.mark.parametrize(
    ("cores", "processes", "given", "threads"),
    [
        (8, 2, None, "1"),
        (8, 2, "1", "1"),
        (8, 2, "3", "3"),
        (8, 2, "64", "4"),
        (2, 4, None, "1"),
        (2, 2, "many", "1"),
        (2, 2, "0", "1"),
    ],
)
def test_prepare_gives_threads_times_processes_at_most_the_cores(
    cores: int, processes: int, given: str | None, threads: str
) -> None:
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    prepare(environment, processes, "auto", cores)
    assert environment["OMP_NUM_THREADS"] == threads


def test_prepare_drops_foreign_identities_and_keeps_the_rest() -> None:
    environment = {
        "SLURM_STEP_ID": "1",
        "OMPI_COMM_WORLD_RANK": "3",
        "RANK": "3",
        "MASTER_PORT": "1",
        "HOME": "/h",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "^docker",
    }
    prepare(environment, 2, "cpu", 2)
    assert not {"SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "RANK", "MASTER_PORT"} & set(environment)
    assert environment["HOME"] == "/h"
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert environment["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize(
    ("device", "found", "cpu"),
    [
        ("cpu", ["nvidia0"], True),
        ("cuda", [], False),
        ("auto", ["null", "zero"], True),
        ("auto", ["nvidia0", "nvidiactl"], False),
        ("auto", ["kfd"], False),
    ],
)
def test_on_cpu_holds_only_where_no_gpu_driver_can_be(device: Any, found: list[str], cpu: bool, tmp_path: Path) -> None:
    for name in found:
        (tmp_path / name).touch()
    assert on_cpu(device, tmp_path) is cpu


def forked(ends: Callable[[], object]) -> int:
    """A child that does this and exits with 0, unless something else ends it."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the tests before have left
            ends()
        finally:
            os._exit(0)
    return pid


def wait_for_ever() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    time.sleep(600)


def test_ranks_that_all_end_well_need_no_signal() -> None:
    assert watch({rank: forked(lambda: None) for rank in range(3)}, lambda: False) == LaunchOutcome()


def test_watch_ends_the_others_at_the_first_failure_and_tells_both_codes() -> None:
    pids = {0: forked(wait_for_ever), 1: forked(lambda: os._exit(3))}
    assert watch(pids, lambda: False) == LaunchOutcome({0: -signal.SIGTERM, 1: 3})


def test_watch_counts_none_as_failed_whom_the_launcher_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 0.2)
    ready, told = os.pipe()

    def deaf() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(told, b"!")
        wait_for_ever()

    pids = {0: forked(wait_for_ever), 1: forked(deaf)}
    os.read(ready, 1)
    assert watch(pids, lambda: True) == LaunchOutcome(stopped=True)


def test_watch_starts_no_rank_after_a_stop() -> None:
    assert watch({}, lambda: True) == LaunchOutcome(stopped=True)


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (3, 3), (256 + 7, 7), (True, 1), ("why", 1)])
def test_a_forked_rank_exits_as_an_interpreter_would(given: object, code: int) -> None:
    assert _exit_code(given) == code
