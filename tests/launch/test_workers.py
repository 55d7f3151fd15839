"""What the ranks inherit."""

from __future__ import annotations

import pytest

from dlojz.launch.workers import prepare


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
def test_threads_times_processes_is_at_most_the_cores(
    cores: int, processes: int, given: str | None, threads: str
) -> None:
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    prepare(environment, processes, "auto", cores)
    assert environment["OMP_NUM_THREADS"] == threads


def test_foreign_identities_are_dropped_and_the_rest_is_kept() -> None:
    environment = {
        "SLURM_STEP_ID": "1",
        "OMPI_COMM_WORLD_RANK": "3",
        "RANK": "3",
        "MASTER_PORT": "1",
        "HOME": "/h",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    prepare(environment, 2, "cpu", 2)
    assert not {"SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "RANK", "MASTER_PORT"} & set(environment)
    assert (environment["HOME"], environment["GLOO_SOCKET_IFNAME"]) == ("/h", "eth0")
    assert environment["DS_ACCELERATOR"] == "cpu"
