"""Launch runs: `run` on this machine or a cluster, sweeps, and replays of runs that were measured elsewhere.

A run that was started before is found again, so that nothing is submitted twice by accident. The launcher of a local
run has its own session and outlives the notebook.

A sweep is one job array on a cluster, for runs that ask for the same nodes, time and interpreter; elsewhere its runs
follow one another. Each run has its own folder, as it would alone.

A replay (`on="replay"`) shows a record that is shipped with the package. It is never taken for a measurement made here:
its environment has `replayed_from`, and its folder names another worker, so that `on="local"` does not find it again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import psutil

from dlojz.base.errors import LabError
from dlojz.base.files import CHECKOUT, write_atomic
from dlojz.base.language import one_of
from dlojz.base.machine import cores_available, remedy_of_locks, stale_locks
from dlojz.config.run_config import RunConfig
from dlojz.data import check_available
from dlojz.hardware.clusters import Machine
from dlojz.libraries.library_catalogue import check_checkpoints, own_python
from dlojz.processes.script_environment import ProcessIdentity
from dlojz.processes.standby import Standby
from dlojz.results.record import RunRecord, read_record, write_record
from dlojz.runnable import check_runnable
from dlojz.running import supervisor
from dlojz.running.folder import DEFAULT_WORKER, JOB_FILE, Job, read_owner
from dlojz.running.limits import JobRequest, NodeRequest, admit, chosen
from dlojz.running.run import Run
from dlojz.running.run_view import phrase
from dlojz.running.slurm import slurm_job
from dlojz.running.slurm.slurm_job import SCRIPT, Array, array_script, job_script, prepare, recorded, send
from dlojz.running.slurm.slurm_queue import explain_refusal
from dlojz.running.state import LOGS, RECORD, read_config
from dlojz.running.store import claim, record_refusal, runs_root
from dlojz.train.checkpoint_files import CheckpointPolicy

_standby: Standby | None = None
_standby_lock = threading.Lock()


def start(folder: Path) -> None:
    """Start the launcher of a run folder, detached: forked by the process that stands by, where the ranks are forked.

    Raises:
        LabError: if it cannot be started; the run is recorded as failed then.
    """
    config = read_config(folder)
    # A script begins in a new interpreter, in the folder where it was asked for, as torchrun begins it.
    forked = supervisor.on_cpu(config.device) and sys.platform.startswith("linux") and config.script is None
    try:
        with open(folder / LOGS / "launcher.log", "ab") as log:
            if forked:
                _launch_from_standby(folder, config, log)
            else:
                process = subprocess.Popen(
                    # -P: a student's random.py in the current folder must not shadow the standard library's.
                    [sys.executable, "-P", "-m", supervisor.__name__, str(folder)],
                    stdin=None if config.script and _is_piped(0) else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=ProcessIdentity(str(folder)).put_into(os.environ) if config.script else _environment(),
                )
                _hand_over(folder, process.pid)
                # Without a wait the launcher stays a zombie as long as the notebook lives.
                threading.Thread(target=process.wait, daemon=True).start()
    except OSError as error:
        reason = phrase("launcher not started", folder=folder, reason=error.strerror or error)
        record_refusal(folder, reason)  # or the run would seem to wait as long as this process lives
        raise LabError(reason) from None


def _is_piped(descriptor: int) -> bool:
    """Whether input comes from a file or a pipe, which a detached process can read, unlike a terminal."""
    try:
        os.fstat(descriptor)
    except OSError:  # closed
        return False
    return not os.isatty(descriptor)


def _launch_from_standby(folder: Path, config: RunConfig, log: IO[bytes]) -> None:
    """Have the launcher forked by this process's standby; the first run starts it, and one in a new environment."""
    global _standby
    environment = _environment()
    supervisor.prepare(environment, config.layout.world_size, "cpu", cores_available())  # torch reads some of it once
    with _standby_lock:
        for _ in range(2):  # the second time with a new standby
            if _standby is None or not _standby.serves(environment):
                if _standby is not None:
                    _standby.close()
                _standby = Standby(environment, log)
            # Until the launcher has its own number the standby drives the run: it must not look abandoned meanwhile.
            _hand_over(folder, _standby.pid)
            try:
                _standby.launch(folder, supervisor.__name__, environment, supervisor.common_modules(config))
                return
            except BrokenPipeError:  # it was killed since the last run
                _standby = None
    raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))


def _hand_over(folder: Path, pid: int) -> None:
    """Name the process that drives a run from now on; the launcher writes this too, some time later."""
    owner = read_owner(folder)
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if owner is not None:
            owner.handed_to(pid).write(folder)


def _environment() -> dict[str, str]:
    """Return the caller's environment, in which this package is found although it may not be installed."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


FOLDER = Path(__file__).with_name("replays")
WORKER = "dlojz.running.launch"
"""Named in launch.json in place of the worker: no measured run has this one."""
REPLAYED_FROM = "replayed_from"
"""Key of the environment of a replayed record."""
LISTED = 3
MOST_DIFFERENCES, MOST_CHARACTERS = 6, 40


def shipped() -> dict[str, Path]:
    """Return the shipped records: the hash of the configuration → the file."""
    return {path.stem: path for path in sorted(FOLDER.rglob("*.json"))}


def is_replayed(record: RunRecord) -> bool:
    """Return whether a record was replayed, not measured."""
    return REPLAYED_FROM in record.environment


def find(config: RunConfig) -> RunRecord:
    """Find the shipped record of a configuration.

    Raises:
        LabError: if none is shipped; it lists the nearest configurations that are, with what differs.
    """
    path = shipped().get(config.hash)
    record = read_record(path) if path else None
    # The hash only finds the file; the configuration in it decides.
    if record is None or record.config != config:
        raise LabError(_none_of(config))
    return record


def replayed_run(config: RunConfig, root: str | os.PathLike[str] | None = None) -> Run:
    """Make a run folder with the shipped record of a configuration, marked as replayed, or find an earlier one.

    Raises:
        LabError: if no such record is shipped, or the root cannot be written.
    """
    record = find(config)
    folder, _ = claim(config, runs_root(root), worker_module=WORKER)
    # Asked of the folder, not of `claim`: a process that ended between the two has left a folder without a record.
    if not (folder / RECORD).exists():
        try:
            write_record(folder / RECORD, _marked(record, folder.name))
        except OSError as error:
            raise phrase.refused("record not replayed", folder=folder, error=error) from None
    return Run(folder)


def _marked(record: RunRecord, run_id: str) -> RunRecord:
    """Rename the record after its new folder, and say what it is a replay of."""
    device_label = record.environment.get("device") or f"CPU, {record.environment.get('cores', '?')} cores"
    day = record.started_utc[:10]
    provenance = phrase("replayed record", record=record, day=day, device_label=device_label)
    return record.model_copy(
        update={"run_id": run_id, "environment": {**record.environment, REPLAYED_FROM: provenance}}
    )


def _none_of(config: RunConfig) -> str:
    """Write the message for a configuration without record."""

    def flat(candidate: RunConfig) -> dict[str, object]:
        content = candidate.to_dict()
        layout = content.pop("layout")
        return {**content, **layout}

    request_fields = flat(config)
    candidates: list[tuple[bool, int, str]] = []
    for path in shipped().values():
        try:
            shipped_config = read_record(path).config
        except LabError:
            continue
        differing = [f"{key}={value}" for key, value in flat(shipped_config).items() if request_fields[key] != value]
        # A sentence has room for a few.
        changes = [word if len(word) <= MOST_CHARACTERS else f"{word[:MOST_CHARACTERS]}…" for word in differing]
        changes = [*changes[:MOST_DIFFERENCES], *(["…"] if len(changes) > MOST_DIFFERENCES else [])]
        # Sorted so: the same model first, then the fewest fields that differ.
        candidates.append(
            (shipped_config.model != config.model, len(differing), f"{shipped_config.title} ({', '.join(changes)})")
        )
    if not candidates:
        return phrase("no record to replay")
    nearest_titles = "; ".join(words for _, _, words in sorted(candidates)[:LISTED])
    return phrase("no such record", config=config, nearest_titles=nearest_titles)


SWEEPS = ".sweeps"
MAX_TASKS = 1000
"""Tasks of one array: slurm.conf's MaxArraySize is 1001 where a site does not change it."""

New = tuple[Path, RunConfig, NodeRequest]


def submit_array(
    new: Sequence[New], root: Path, machine: Machine, request: JobRequest, worker_module: str, at_once: int
) -> None:
    """Submit runs that have just been claimed, as one job array per shape.

    Args:
        new: folder, configuration and allocation of each.
        at_once: how many of an array may run at the same time, at least 1.

    Raises:
        LabError: if the scheduler refuses one of the arrays (its runs are recorded as failed; those of the others
            stay), or the folders cannot be written.
    """
    # `groupby` joins neighbours only: runs of one shape must follow each other.
    shaped = sorted(new, key=lambda new_run: (_shape(new_run), new_run[0].name))
    for _, same_shape in groupby(shaped, key=_shape):
        runs = list(same_shape)
        for offset in range(0, len(runs), MAX_TASKS):
            _submit_one(runs[offset : offset + MAX_TASKS], root, machine, request, worker_module, at_once)


def _shape(run: New) -> tuple[int, int, int, str, str]:
    """Return what the runs of one array have in common: nodes, time, and the interpreter."""
    _, config, node_request = run
    return (
        node_request.nodes,
        node_request.ranks_per_node,
        node_request.minutes,
        node_request.qos,
        str(own_python(config) or ""),
    )


def _submit_one(
    runs: Sequence[New], root: Path, machine: Machine, request: JobRequest, worker_module: str, at_once: int
) -> None:
    submission_time = datetime.now(UTC)
    name = f"{submission_time:%Y%m%d-%H%M%S}-sweep-{secrets.token_hex(4)}"
    folder = root / SWEEPS / name
    _, config, node_request = runs[0]
    array = Array(folder, len(runs), min(at_once, len(runs)))
    job = Job(machine=machine.name, name=name, submitted_utc=submission_time.isoformat(timespec="seconds"))
    jobs = [(run, Job(**{**job.to_dict(), "array_task": task})) for task, (run, _, _) in enumerate(runs)]
    with recorded([run for run, _ in jobs]):
        text = array_script(
            machine, config, node_request, array, worker_module=worker_module, requeues=request.requeues
        )
        (folder / LOGS).mkdir(parents=True)
        # Task n of the array takes line n + 1.
        write_atomic(folder / "folders.txt", "".join(f"{run}\n" for run, _, _ in runs))
        write_atomic(folder / SCRIPT, text)
        (folder / SCRIPT).chmod(0o755)
        for (run, run_config, run_request), (_, its_job) in zip(runs, jobs, strict=True):
            # With its own script, this run alone can be sent again.
            run_script = job_script(
                machine, run_config, run_request, run, worker_module=worker_module, requeues=request.requeues
            )
            prepare(run, run_script, its_job)
    send(folder, jobs)


MAX_RANKS_PER_CORE = 8
BACKENDS = ("local", "slurm", "replay")


def run(  # noqa: PLR0913 - one call is all that a student has to know
    config: RunConfig | str | os.PathLike[str] | None = None,
    *,
    args: Sequence[str] = (),
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
        config: what to train; fields given besides replace those of it. Or the path of a script, which is started
            unchanged, always anew, as torchrun starts it, and measured from outside; `device` and `first_step_s` are
            the fields that it takes (`RunConfig.of_script`).
        args: words of the script's command line.
        on: `local`: processes of this machine; `slurm`: a job on a cluster; `replay`: a record that is shipped with the
            package. By default `slurm` where there is a scheduler and device='cuda' is asked for, else `local`.
        machine: name of a machine file (`dlojz machines`); by default `$DLOJZ_MACHINE`, or this cluster's.
        account, qos, reservation: for the scheduler; by default what the machine file and the environment tell.
        again: make another run although there is one of this configuration.
        wait: follow it to its end (Ctrl-C cancels it); else return at once.
        time_limit_s: seconds after which it is stopped, > 0; by default none, or the machine file's. A job saves a
            checkpoint shortly before, goes back to the queue up to three times, and goes on from there.
        checkpoint_every: steps between two checkpoints; by default one is kept only before the time limit.
        processes: number of processes, checked against the degrees of the layout; a script is started as torchrun does,
            and without a number as `python` starts it, once.
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
    if isinstance(config, str | os.PathLike):
        run_config = RunConfig.of_script(config, args, processes=processes, **_script_fields(fields))
    else:
        run_config = _merge(config, fields)
    if processes is not None:
        run_config.layout.check_processes(processes)
    backend = _backend(on, run_config)
    _check_time_limit(time_limit_s)
    base = runs_root(root)
    if backend == "replay":
        return replayed_run(run_config, base)
    _check(run_config, checkpoint_every)
    claimed = partial(_claim, base, force_new=again, worker_module=worker_module, checkpoint_every=checkpoint_every)
    if backend == "slurm":
        request = JobRequest(account=account, qos=qos, reservation=reservation, time_limit_s=time_limit_s)
        site = chosen(run_config, machine, request)
        node_request = admit(site, run_config, request)
        folder, new = claimed(run_config, node_request.minutes * 60.0)
        if new:
            slurm_job.submit(folder, site, run_config, node_request, request, worker_module)
        else:
            slurm_job.recover(folder)  # the process that sent it may have died before it recorded the number
    else:
        _check_processes(run_config.layout.world_size)
        folder, new = claimed(run_config, time_limit_s)
        if new:
            # A run that goes on here after a job of it has ended is no job any more.
            (folder / JOB_FILE).unlink(missing_ok=True)
            # A script would wait on such a lock without a word.
            if run_config.script and (locks := stale_locks()):
                print(f"dlojz: {remedy_of_locks(locks)}", file=sys.stderr)
            start(folder)
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
    # A mixed sweep too runs one after the other.
    if backends != {"slurm"}:
        common: dict[str, Any] = {"again": again, "time_limit_s": time_limit_s, "root": root}
        common |= {"worker_module": worker_module, "checkpoint_every": checkpoint_every}
        return [run(config, on=_backend(on, config), machine=machine, **common) for config in configs]
    _check_time_limit(time_limit_s)
    request = JobRequest(account=account, qos=qos, reservation=reservation, time_limit_s=time_limit_s)
    site = chosen(configs[0], machine, request)
    # All are checked before the first folder is claimed: if one is refused, none is sent.
    node_requests = []
    for config in configs:
        _check(config, checkpoint_every)
        node_requests.append(admit(site, config, request))
    base, folders, new = runs_root(root), [], []
    claimed = partial(_claim, base, force_new=again, worker_module=worker_module, checkpoint_every=checkpoint_every)
    for config, node_request in zip(configs, node_requests, strict=True):
        folder, fresh = claimed(config, node_request.minutes * 60.0)
        folders.append(folder)
        if fresh:
            new.append((folder, config, node_request))
    submit_array(new, base, site, request, worker_module, at_once)
    return [Run(folder) for folder in folders]


def _check(config: RunConfig, checkpoint_every: int | None) -> None:
    """Refuse what cannot be run, whose library keeps no checkpoints, or whose data are not there."""
    if config.script:
        return
    check_runnable(config)
    check_checkpoints(config, checkpoint_every)
    check_available(config.data_name, config.data_root, global_batch=config.layout.global_batch)


def _claim(
    root: Path,
    config: RunConfig,
    time_limit_s: float | None,
    *,
    force_new: bool,
    worker_module: str,
    checkpoint_every: int | None,
) -> tuple[Path, bool]:
    policy = CheckpointPolicy(every_steps=checkpoint_every) if checkpoint_every is not None else None
    force_new = force_new or config.script is not None  # what a script reads may have changed
    return claim(
        config, root, force_new=force_new, worker_module=worker_module, time_limit_s=time_limit_s, policy=policy
    )


def _merge(config: RunConfig | None, fields: dict[str, Any]) -> RunConfig:
    if config is None:
        return RunConfig.of(**fields)
    if not isinstance(config, RunConfig):
        raise LabError(f"config is a RunConfig, but {type(config).__name__} was received: use RunConfig.of(...).")
    return RunConfig.of(**{**config.to_dict(), "layout": config.layout, **fields}) if fields else config


def _script_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Refuse fields that say nothing of a script; returns the others."""
    legal = ("device", "first_step_s")
    for name in fields:
        if name not in (*legal, "observation"):
            raise phrase.refused("field says nothing to a script", name=name, legal=", ".join(legal))
    return fields


def _check_processes(processes: int) -> None:
    """Refuse more processes than this machine bears: a typing error must not start a thousand."""
    limit = MAX_RANKS_PER_CORE * cores_available()
    if processes > limit:
        raise phrase.refused("too many processes", processes=processes, cores=cores_available(), limit=limit)


def _backend(on: str | None, config: RunConfig) -> str:
    if config.script and on not in (None, "local", "slurm"):
        raise phrase.refused("no backend of a script", on=on)
    if on is None:
        return "slurm" if config.device == "cuda" and not config.script and slurm_job.available() else "local"
    if on not in BACKENDS:
        raise LabError(one_of("backend", on, BACKENDS))
    if on == "slurm" and not slurm_job.available():
        raise LabError(explain_refusal("sbatch: not found"))
    return on


def _check_time_limit(time_limit_s: float | None) -> None:
    if time_limit_s is not None and not (time_limit_s > 0 and math.isfinite(time_limit_s)):
        raise LabError(f"time_limit_s must be a number of seconds greater than 0, but {time_limit_s!r} was received.")
