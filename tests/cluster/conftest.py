"""A real SLURM on this machine: one controller, two nodes, in a folder of its own, gone after the tests.

Debian's `slurm-wlm` (22.05) with munge; `make test` installs both where it may. Two slurmd stand for two nodes of four
cores each; nothing checks that the machine has them (`config_overrides`).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo")
NODES, CORES = 2, 4
READY_S = 60

CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs={cores} RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up.

    Args:
        folder: configuration, logs and state.
        environment: what a process needs to speak with it.
    """

    folder: Path
    environment: dict[str, str]


def _free_ports(count: int) -> list[int]:
    """Consecutive free ports, below those that the system gives to clients."""
    for first in range(17000, 30000, 50):
        ports = list(range(first, first + count))
        try:
            for port in ports:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return ports
    raise RuntimeError("no free ports for a test cluster")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The cluster, up."""
    missing = [name for name in PROGRAMS if not _program(name)]
    if missing:
        reason = f"a real SLURM needs {', '.join(missing)}: apt-get install slurm-wlm munge"
        if os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    if os.geteuid() != 0:
        pytest.skip("a real SLURM is started by root only")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents):  # munge refuses a socket in a folder that others cannot reach
        if parent.owner() == "root" and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    controller, *nodes = _free_ports(1 + NODES)
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(
        host=host,
        folder=folder,
        port=controller,
        last=NODES - 1,
        first_port=nodes[0],
        last_port=nodes[-1],
        cores=CORES,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        with open(folder / f"{name}.out", "ab") as out:
            started.append(subprocess.Popen([_program(name), *arguments], env=environment, stdout=out, stderr=out))

    try:
        start(
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munge.pid",
            f"--seed-file={folder}/munge.seed",
            f"--log-file={folder}/munge.log",
        )
        start("slurmctld", "-D", "-i")
        for node in range(NODES):
            start("slurmd", "-D", "-N", f"n{node}")
        _wait_until_idle(folder, environment)
        yield Slurm(folder, environment)
    finally:
        _end(started)


def _program(name: str) -> str:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") or ""


def _wait_until_idle(folder: Path, environment: dict[str, str]) -> None:
    deadline_s = time.monotonic() + READY_S
    states = ""
    while time.monotonic() < deadline_s:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True, check=False
        )
        states = done.stdout + done.stderr
        if done.stdout.split() == ["idle"] * NODES:
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text(errors="replace")[-800:] for path in sorted(folder.glob("*.log")))
    pytest.fail(f"the test cluster did not come up: {states}\n{logs}")


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    processes = [psutil.Process(one.pid) for one in reversed(started) if one.poll() is None]
    for process in processes:
        children = process.children(recursive=True)
        with suppress(psutil.Error):
            process.terminate()
        psutil.wait_procs([process], timeout=5)
        for one in (process, *children):
            with suppress(psutil.Error):
                one.kill()
    for popen in started:
        popen.wait()
