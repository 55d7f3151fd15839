"""`run`: start a training on several processes, or find the one that was started before.

Layer 5. Invariant: nothing is submitted twice by accident, and what was started needs no process of the caller's.
"""

from __future__ import annotations

import math
import os
from typing import Any

from dlojz.config import RunConfig
from dlojz.data import check_available
from dlojz.launch import local
from dlojz.launch.workers import cores_available
from dlojz.runs import Run
from dlojz.runs.owner import DEFAULT_WORKER
from dlojz.runs.store import claim, runs_root
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.train import check_runnable

__all__ = ["run"]

MAX_RANKS_PER_CORE = 8
_LATER = {"slurm": "submission to SLURM", "replay": "replay of stored records"}


def run(  # noqa: PLR0913 - one call is all that a student has to know
    config: RunConfig | None = None,
    *,
    on: str | None = None,
    again: bool = False,
    wait: bool = True,
    time_limit_s: float | None = None,
    processes: int | None = None,
    root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    worker_module: str = DEFAULT_WORKER,
    **fields: Any,
) -> Run:
    """Train what the configuration says, on real processes; the same configuration finds its earlier run again.

    Args:
        config: what to train; fields given besides replace those of it.
        on: `local` (the default): processes of this machine.
        again: make another run although there is one of this configuration.
        wait: follow it to its end (Ctrl-C cancels it); else return at once.
        time_limit_s: seconds after which it is stopped, > 0; by default none.
        processes: number of processes, checked against the degrees of the layout.
        root: folder of the runs; by default `$DLOJZ_RUNS`, or `runs/` of the checkout.
        progress: show a bar or not; by default where somebody looks.
        worker_module: Python module that every rank runs.
        **fields: fields of `RunConfig` and `Layout`, given flat.

    Returns:
        the run: queued, running or ended. It is found again while it is queued or running, and once it has completed,
        diverged or run out of memory; after any other end it is started anew.

    Raises:
        LabError: if the request is illegal or cannot be run here, or the root cannot be written.

    Example:
        `dlojz.run(model="coatnet_tiny", dp=2, zero=2, engine="deepspeed")`
    """
    wanted = _merge(config, fields)
    if processes is not None:
        wanted.layout.check_processes(processes)
    _check_backend(on)
    _check_time_limit(time_limit_s)
    check_runnable(wanted)
    check_available(wanted.data_name, wanted.data_root, global_batch=wanted.layout.global_batch)
    _check_processes(wanted.layout.world_size)
    folder, new = claim(wanted, runs_root(root), again=again, worker_module=worker_module, time_limit_s=time_limit_s)
    if new:
        local.start(folder)
    handle = Run(folder)
    return handle.watch(progress) if wait else handle


def _merge(config: RunConfig | None, fields: dict[str, Any]) -> RunConfig:
    if config is None:
        return RunConfig.of(**fields)
    if not isinstance(config, RunConfig):
        raise LabError(f"config is a RunConfig, but {type(config).__name__} was received: use RunConfig.of(...).")
    return RunConfig.of(**{**config.to_dict(), "layout": config.layout, **fields}) if fields else config


def _check_processes(processes: int) -> None:
    """A slip of the keyboard must not start a thousand processes on a machine that others use."""
    most = MAX_RANKS_PER_CORE * cores_available()
    if processes > most:
        raise LabError(
            say(
                en=f"{processes} processes were asked for, but this machine's {cores_available()} cores carry {most} "
                "at most: use smaller degrees here, or dlojz.predict, which starts none.",
                fr=f"{processes} processus ont été demandés, mais les {cores_available()} cœurs de cette machine en "
                f"portent {most} au plus : prenez des degrés plus petits, ou dlojz.predict, qui n'en lance aucun.",
            )
        )


def _check_backend(on: str | None) -> None:
    if on in _LATER:
        raise LabError(f"{_LATER[on]} (on={on!r}) is not there yet: use on='local', which runs on this machine.")
    if on not in (None, "local"):
        raise LabError(one_of("backend", on, ["local", *_LATER]))


def _check_time_limit(time_limit_s: float | None) -> None:
    if time_limit_s is not None and not (time_limit_s > 0 and math.isfinite(time_limit_s)):
        raise LabError(f"time_limit_s must be a number of seconds greater than 0, but {time_limit_s!r} was received.")
