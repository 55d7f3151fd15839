"""`run`: start a training on several processes, or find the one that was started before.

Layer 5. Invariant: nothing is submitted twice by accident, and what was started needs no process of the caller's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from dlojz.checkpoint_policy import CheckpointPolicy
from dlojz.config import RunConfig
from dlojz.data import check_available
from dlojz.launch import local, replay, slurm
from dlojz.launch.cost import Preview, chosen, preview
from dlojz.launch.limits import Request, admit
from dlojz.launch.slurm_refusals import explain_refusal
from dlojz.launch.sweep import submit_array
from dlojz.launch.workers import cores_available
from dlojz.libraries import check_checkpoints
from dlojz.runs import Run
from dlojz.runs.job import FILE_NAME as JOB_FILE
from dlojz.runs.owner import DEFAULT_WORKER
from dlojz.runs.store import claim, runs_root
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.train import check_runnable

__all__ = ["Preview", "preview", "run", "submit_many"]

MAX_RANKS_PER_CORE = 8
BACKENDS = ("local", "slurm", "replay")


def run(  # noqa: PLR0913 - one call is all that a student has to know
    config: RunConfig | None = None,
    *,
    on: str | None = None,
    machine: str | None = None,
    account: str = "",
    qos: str = "",
    reservation: str = "",
    again: bool = False,
    wait: bool = True,
    time_limit_s: float | None = None,
    checkpoint_every: int | None = None,
    processes: int | None = None,
    root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    worker_module: str = DEFAULT_WORKER,
    **fields: Any,
) -> Run:
    """Train what the configuration says, on real processes; the same configuration finds its earlier run again.

    Args:
        config: what to train; fields given besides replace those of it.
        on: `local`: processes of this machine; `slurm`: a job on a cluster; `replay`: a record that is shipped with the
            package. By default `slurm` where there is a scheduler and device='cuda' is asked for, else `local`.
        machine: name of a machine file (`dlojz machines`); by default `$DLOJZ_MACHINE`, or this cluster's.
        account, qos, reservation: for the scheduler; by default what the machine file and the environment tell.
        again: make another run although there is one of this configuration.
        wait: follow it to its end (Ctrl-C cancels it); else return at once.
        time_limit_s: seconds after which it is stopped, > 0; by default none, or the machine file's. A job saves a
            checkpoint shortly before, goes back to the queue up to three times, and goes on from there.
        checkpoint_every: steps between two checkpoints; by default one is kept only before the time limit.
        processes: number of processes, checked against the degrees of the layout.
        root: folder of the runs; by default `$DLOJZ_RUNS`, or `runs/` of the checkout.
        progress: show a bar or not; by default where somebody looks.
        worker_module: Python module that every rank runs.
        **fields: fields of `RunConfig` and `Layout`, given flat.

    Returns:
        the run: queued, running or ended. It is found again while it is queued or running, and once it has completed,
        diverged or run out of memory; after any other end it goes on from its checkpoint, or is started anew.

    Raises:
        LabError: if the request is illegal or cannot be run here, the scheduler refuses it, or the root cannot be
            written.

    Example:
        `dlojz.run(model="coatnet_tiny", dp=2, zero=2, engine="deepspeed")`
    """
    wanted = _merge(config, fields)
    if processes is not None:
        wanted.layout.check_processes(processes)
    backend = _backend(on, wanted)
    _check_time_limit(time_limit_s)
    policy = CheckpointPolicy(every_steps=checkpoint_every) if checkpoint_every is not None else None
    base = runs_root(root)
    if backend == "replay":
        return replay.run(wanted, base)
    check_runnable(wanted)
    check_checkpoints(wanted, checkpoint_every)
    check_available(wanted.data_name, wanted.data_root, global_batch=wanted.layout.global_batch)
    request = Request(account=account, qos=qos, reservation=reservation, time_limit_s=time_limit_s)
    if backend == "slurm":
        _check_sender()
        site = chosen(wanted, machine, request)
        asked = admit(site, wanted, request)
        limit_s = asked.minutes * 60.0
        folder, new = claim(wanted, base, again=again, worker_module=worker_module, time_limit_s=limit_s, policy=policy)
        if new:
            slurm.submit(folder, site, wanted, asked, request, worker_module)
        else:
            slurm.recover(folder)  # who sent it may have died before the number was written down
    else:
        _check_processes(wanted.layout.world_size)
        folder, new = claim(
            wanted, base, again=again, worker_module=worker_module, time_limit_s=time_limit_s, policy=policy
        )
        if new:
            # A run that goes on here after a job of it has ended is no job any more.
            (folder / JOB_FILE).unlink(missing_ok=True)
            local.start(folder)
    handle = Run(folder)
    return handle.follow(progress) if wait else handle


def submit_many(  # noqa: PLR0913 - as `run`
    configs: Sequence[RunConfig],
    *,
    on: str | None = None,
    machine: str | None = None,
    account: str = "",
    qos: str = "",
    reservation: str = "",
    again: bool = False,
    time_limit_s: float | None = None,
    checkpoint_every: int | None = None,
    at_once: int = 4,
    root: str | os.PathLike[str] | None = None,
    worker_module: str = DEFAULT_WORKER,
) -> list[Run]:
    """Start a sweep: one job array on a cluster (it returns at once), one run after the other elsewhere.

    Args:
        configs: what to train; those that have run before are found again.
        at_once: on a cluster, how many of them may run at the same time, at least 1.
        on, machine, account, qos, reservation, again: as for `run`.
        time_limit_s, checkpoint_every, root, worker_module: as for `run`.

    Returns:
        the runs, in the order of the configurations.

    Raises:
        LabError: if one of them is illegal or would be refused (then none is sent), or the scheduler refuses.
    """
    if at_once < 1:
        raise LabError(f"at_once must be at least 1, but {at_once!r} was received.")
    backends = {_backend(on, config) for config in configs}
    if backends != {"slurm"}:
        common: dict[str, Any] = {"again": again, "time_limit_s": time_limit_s, "root": root}
        common |= {"worker_module": worker_module, "checkpoint_every": checkpoint_every}
        return [run(config, on=_backend(on, config), machine=machine, **common) for config in configs]
    _check_sender()
    _check_time_limit(time_limit_s)
    request = Request(account=account, qos=qos, reservation=reservation, time_limit_s=time_limit_s)
    policy = CheckpointPolicy(every_steps=checkpoint_every) if checkpoint_every is not None else None
    site = chosen(configs[0], machine, request)
    asked = []
    for config in configs:
        check_runnable(config)
        check_checkpoints(config, checkpoint_every)
        check_available(config.data_name, config.data_root, global_batch=config.layout.global_batch)
        asked.append(admit(site, config, request))
    base, folders, new = runs_root(root), [], []
    for config, one in zip(configs, asked, strict=True):
        limit_s = one.minutes * 60.0
        folder, fresh = claim(
            config, base, again=again, worker_module=worker_module, time_limit_s=limit_s, policy=policy
        )
        folders.append(folder)
        if fresh:
            new.append((folder, config, one))
    submit_array(new, base, site, request, worker_module, at_once)
    return [Run(folder) for folder in folders]


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


def _backend(on: str | None, config: RunConfig) -> str:
    if on is None:
        return "slurm" if config.device == "cuda" and slurm.available() else "local"
    if on not in BACKENDS:
        raise LabError(one_of("backend", on, BACKENDS))
    return on


def _check_sender() -> None:
    if not slurm.available():
        raise LabError(explain_refusal("sbatch: not found"))


def _check_time_limit(time_limit_s: float | None) -> None:
    if time_limit_s is not None and not (time_limit_s > 0 and math.isfinite(time_limit_s)):
        raise LabError(f"time_limit_s must be a number of seconds greater than 0, but {time_limit_s!r} was received.")
