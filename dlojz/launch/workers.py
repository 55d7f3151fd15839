"""The ranks of a run on this machine, through torch's elastic launcher.

Layer 5. Invariant: no fixed port (the store takes a free one), no restart, no more threads than cores, and no variable
of an enclosing SLURM step that would give the ranks another identity.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from dlojz.train.lifeline import PARENT_VARIABLE

STOP_GRACE_S = 6
# Peers of a failed rank get SIGTERM at once and SIGKILL after 30 s; only what ended before that is a cause.
_SAME_MOMENT_S = 5
_FOREIGN = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
_IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """Exit codes of the ranks that failed first (negative: signal), and whether the launcher was told to stop."""

    exit_codes: Mapping[int, int] = field(default_factory=dict)
    stopped: bool = False


def prepare(
    environment: MutableMapping[str, str], processes: int, device: Literal["auto", "cpu", "cuda"], cores: int
) -> None:
    """Set what the ranks inherit, in place."""
    for name in list(environment):
        if name.startswith(_FOREIGN) or name in _IDENTITY:
            del environment[name]
    # One core stands for one device: one rank on one core is then what the throughput of several is compared with. Who
    # asks for more threads gets them, as far as there are cores.
    share = max(1, cores // processes)
    given = environment.get("OMP_NUM_THREADS", "")
    environment["OMP_NUM_THREADS"] = str(min(share, int(given)) if given.isdecimal() and int(given) else 1)
    environment["TORCH_FR_BUFFER_SIZE"] = "20000"
    environment["PYTHONUNBUFFERED"] = "1"
    environment["PYTHONFAULTHANDLER"] = "1"
    environment[PARENT_VARIABLE] = str(os.getpid())
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    if "lo" in psutil.net_if_addrs():
        # The machine's own name need not resolve for processes of one machine to meet.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


def cores_available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> None:
    """Import torch's launcher, which takes seconds."""
    import torch.distributed.launcher.api  # noqa: F401


def run_ranks(folder: Path, processes: int, device: Literal["auto", "cpu", "cuda"], worker_module: str) -> Outcome:
    """Start the ranks and wait until all have ended, or one has failed (then the others are stopped)."""
    from torch.cuda import is_available
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    prepare(os.environ, processes, device if device != "auto" or is_available() else "cpu", cores_available())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=folder.name,
        max_restarts=0,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        shutdown_timeout=STOP_GRACE_S,
        # Each rank opens its own log: the launcher would open the two streams apart, and one would cut the other.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        launch_agent(config, sys.executable, ["-P", "-m", "dlojz.launch.rank", str(folder), worker_module])
    except ChildFailedError as error:
        first = min(failure.timestamp for failure in error.failures.values())
        return Outcome(
            {
                rank: failure.exitcode
                for rank, failure in error.failures.items()
                if failure.timestamp - first < _SAME_MOMENT_S
            }
        )
    except SignalException:
        return Outcome(stopped=True)
    return Outcome()
