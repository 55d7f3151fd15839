"""Run one task of a job: find the other ranks, fork the rank, record its exit code.

Ranks, size and address come from idr_torch. The task of rank 0 takes a free port between 10,000 and 32,767, below those
that systems give to clients, and writes address and port into the run folder, once per start of the job (less than 100
bytes); the others read them there. Each task forks its rank before torch is imported, so that it can record an end by
SIGKILL too.

Run by srun as `python -m dlojz.running.slurm.slurm_rank RUN_FOLDER MODULE`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.machine import PARENT_VARIABLE, die_with_parent
from dlojz.processes.forks import fork
from dlojz.processes.start_rank import fork_main
from dlojz.results.record import append_event, read_events
from dlojz.running.folder import Job, read_job
from dlojz.running.slurm.slurm_job import STOPPED_IN_TIME
from dlojz.running.state import CANCEL, EVENTS, LAUNCHER_EVENTS, LOGS, RECORD

FIRST_PORT, PORT_TRIES, JOBS_APART = 10_000, 5, 4_550
"""Each job number has its own five ports: 10,000 + 5 · (number mod 4,550), at most 32,749."""
MEETING_S = 300.0
POLL_S = 0.2
TOGETHER_S = 10.0


def ports_of(job_id: int) -> list[int]:
    """Return the ports of a job's rendezvous, in the order in which they are tried."""
    base_port = FIRST_PORT + PORT_TRIES * (job_id % JOBS_APART)
    return list(range(base_port, base_port + PORT_TRIES))


def free_port(ports: list[int]) -> int:
    """Return the first of these ports on which no program listens.

    Raises:
        OSError: EADDRINUSE, if all are taken.
    """
    for port in ports:
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
            try:
                probe.bind(("", port))
                probe.listen()
            except OSError as error:
                problem = error
                continue
        return port
    raise problem


def address_of(node: str) -> str:
    """Return the name by which the other ranks reach this computer: the node's if it resolves, else its own."""
    for name in (node, socket.gethostname()):
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name, None)
            return name
    return "127.0.0.1"


def meeting_file(folder: Path, start: str) -> Path:
    """Return the file with rank 0's address and port in this start of the job."""
    return folder / f".meeting-{start}.json"


def meet(folder: Path, start: str, rank: int, node: str, job_id: int) -> tuple[str, int]:
    """Return address and port of rank 0.

    Raises:
        LabError: if rank 0 has not written them within five minutes.
        OSError: on rank 0, if it finds no free port or cannot write.
    """
    path = meeting_file(folder, start)
    if rank == 0:
        endpoint = (address_of(node), free_port(ports_of(job_id)))
        write_atomic(path, json.dumps(endpoint))
        return endpoint
    deadline_s = time.monotonic() + MEETING_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, LabError, TypeError, ValueError):
            address, port = parse_json(path.read_bytes())
            return str(address), int(port)
        # A network file system may keep the old listing for a while; reading it refreshes it.
        with contextlib.suppress(OSError):
            os.scandir(folder).close()
        time.sleep(0.1)
    raise LabError(f"rank {rank} waited {MEETING_S:g} s for rank 0 to say where the ranks meet; is its node gone?")


def open_anew(folder: Path, start: str, nodes: str) -> None:
    """Set a former record aside and name the job, on rank 0, since a job may be sent again by hand."""
    with contextlib.suppress(OSError):
        if (folder / RECORD).is_file() and not (folder / RECORD).is_symlink():
            shelf = folder / "attempts"
            shelf.mkdir(exist_ok=True)
            (folder / RECORD).rename(shelf / f"record-{time.time_ns()}.json")
    job = read_job(folder)
    number = str(int(os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ["SLURM_JOB_ID"]))
    if job is None or job.job_id != number:
        job_fields: dict[str, Any] = job.to_dict() if job else {"machine": "", "name": folder.name}
        array = os.environ.get("SLURM_ARRAY_TASK_ID")
        with contextlib.suppress(OSError, LabError):
            Job(**{**job_fields, "job_id": number, "array_task": int(array) if array else None}).write(folder)
    append_event(folder / EVENTS / LAUNCHER_EVENTS, "started", start=start, nodes=nodes)


def start_name() -> str:
    """Return the name of this start of the job: its number, and how often it was requeued."""
    return f"{int(os.environ['SLURM_JOB_ID'])}-{int(os.environ.get('SLURM_RESTART_COUNT') or 0)}"


def keep(folder: Path, module: str) -> int:
    """Fork the rank, wait for its end and record it; return the exit code for srun."""
    # These signals are meant for the rank, and sent to every process of the task: the first to save, the second to end.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    rank, start = int(os.environ["SLURM_PROCID"]), start_name()
    parent = os.getpid()
    # Before anything heavy is imported, and before there is any other thread.
    pid = fork(lambda: _be_rank(folder, module, rank, start, parent), reset=(signal.SIGTERM,))
    code = _wait(pid, folder / CANCEL if rank == 0 else None)
    exited = {"rank": rank, "start": start, "code": code, "time_s": time.time()}
    append_event(folder / EVENTS / f"task-{rank}.jsonl", "exit", **exited)
    if code == STOPPED_IN_TIME:
        _wait_for_peers(folder, start)
    # A signal as a shell reports it: 128 + its number.
    return code if code >= 0 else 128 - code


def _wait_for_peers(folder: Path, start: str) -> None:
    """Let ranks that saved end together: srun kills the peers of the first, which would hide their exit code."""
    ranks = range(int(os.environ["SLURM_STEP_NUM_TASKS"]))
    deadline_s = time.monotonic() + TOGETHER_S
    while time.monotonic() < deadline_s:
        if all(_has_ended(folder / EVENTS / f"task-{rank}.jsonl", start) for rank in ranks):
            return
        time.sleep(POLL_S)


def _has_ended(path: Path, start: str) -> bool:
    try:
        return any(event["event"] == "exit" and event.get("start") == start for event in read_events(path))
    except OSError:
        return False


def _wait(pid: int, request: Path | None) -> int:
    """Wait for the rank's exit code (negative: signal); a cancel request ends it, and srun then ends the others."""
    halt = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if request is not None and not halt and os.path.exists(request):  # noqa: PTH110 - False where it cannot answer
            halt = True
            os.kill(pid, signal.SIGTERM)
        time.sleep(POLL_S)


def _be_rank(folder: Path, module: str, rank: int, start: str, parent: int) -> NoReturn:
    """Find the other ranks, in the forked process, then become the worker."""
    # The rank ends with this process: `die_with_parent` checks that it is still its parent.
    os.environ[PARENT_VARIABLE] = str(parent)
    try:
        die_with_parent()
        _find_peers(folder, rank, start)
    except BaseException as error:
        with contextlib.suppress(OSError), open(folder / LOGS / f"rank-{rank}.log", "a", encoding="utf-8") as log:
            log.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)
    fork_main(str(folder), module)


def _find_peers(folder: Path, rank: int, start: str) -> None:
    """Set a rank's environment variables."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
    os.environ["PYTHONFAULTHANDLER"] = "1"
    warnings.filterwarnings("ignore", module="idr_torch")
    if rank == 0:
        open_anew(folder, start, os.environ.get("SLURM_STEP_NODELIST", ""))
    import idr_torch  # which imports torch: seconds

    # idr_torch sets these variables itself when first asked; what is set after that stays.
    node = str(idr_torch.master_addr)
    address, port = meet(folder, start, rank, node, int(os.environ["SLURM_JOB_ID"]))
    os.environ["RANK"] = str(idr_torch.rank)
    os.environ["LOCAL_RANK"] = str(idr_torch.local_rank)
    os.environ["WORLD_SIZE"] = str(idr_torch.size)
    os.environ["LOCAL_WORLD_SIZE"] = str(idr_torch.local_world_size)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


if __name__ == "__main__":
    result = keep(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result)  # an interpreter that shuts down catches no signal any more, and srun is about to send one
