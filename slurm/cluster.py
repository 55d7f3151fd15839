"""A real SLURM on this machine, to try things on: two nodes of four cores and two GPUs each, none of which exist.

    python slurm/cluster.py start     # prints what to export; needs root, and Debian's slurm-wlm and munge
    python slurm/cluster.py status
    python slurm/cluster.py stop

One slurmctld, two slurmd, one munged, in a folder of their own (/tmp/dlojz-cluster); jobs run as root on this machine's
cores, however few there are. The GPUs are character devices that lead nowhere: the scheduler hands them out, nothing
computes on them. The tests start theirs through the same functions (tests/cluster/conftest.py).
"""

from __future__ import annotations

import argparse
import os
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo")
FOLDER = Path("/tmp/dlojz-cluster")
NODES, CORES, GPUS = 2, 4, 2
READY_S = 60
INSTALL = "apt-get install slurm-wlm munge"

CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
# A job that is put back into the queue waits until its old credential has expired: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
# Every address is 127.0.0.1: the daemons listen there alone.
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
MessageTimeout=6
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs={cores} \
RealMemory=4000 Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 State=UP
"""


class ClusterError(RuntimeError):
    """The cluster cannot be started; the message says why and what would help."""


@dataclass(frozen=True)
class Cluster:
    """A cluster, by its folder: configuration, logs, state and the numbers of its processes."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to speak with it, and nothing of a job that this process may be in."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return {**clean, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self, *, controller_only: bool = False) -> None:
        """Start all of it, or the controller anew with the state that it left.

        Raises:
            ClusterError: if a program is missing, or the nodes are not idle after a minute.
        """
        if controller_only:
            self._begin("slurmctld", "slurmctld", "-D")
        else:
            self._prepare()
            self._begin("munged", "munged", "--foreground", "--force", *self._munge_options())
            self._begin("slurmctld", "slurmctld", "-D", "-i")
            for node in range(NODES):
                self._begin(f"slurmd-n{node}", "slurmd", "-D", "-N", f"n{node}")
        self._wait_until_up(idle=not controller_only)

    def stop(self, only: str | None = None, kill: bool = False) -> list[str]:
        """End its processes, the last started first, or one of them; what they were is returned.

        With all of it end the steps of its jobs, which outlive the daemon that began them.
        """
        names = [only] if only else [*(f"slurmd-n{node}" for node in range(NODES)), "slurmctld", "munged"]
        ended = []
        for name in names:
            pid = self._alive(name)
            if pid is None:
                continue
            _end(pid, kill=kill)
            (self.folder / f"{name}.started").unlink(missing_ok=True)
            ended.append(name)
        if only:
            return ended
        (self.folder / "munge.key").unlink(missing_ok=True)  # the next start makes another
        return ended + [_end_step(pid) for pid in self.steps()]

    def ends_with_this_process(self) -> subprocess.Popen[bytes]:
        """Start a process that stops the cluster as soon as this one has ended, even if it is killed."""
        words = ["stop", f"--folder={self.folder}", f"--after={os.getpid()}"]
        return subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what is sent to the group of this process is not for it
        )

    def alive(self) -> list[str]:
        """Names of its processes that run."""
        names = ["munged", "slurmctld", *(f"slurmd-n{node}" for node in range(NODES))]
        return [name for name in names if self._alive(name) is not None]

    def steps(self) -> list[int]:
        """Process numbers of the daemons of its jobs' steps: known by SLURM_CONF, which they have from their slurmd.

        Another program may have the same in its environment, such as the shell of whoever tries the cluster.
        """
        ours = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it is gone, or somebody else's
                is_step = (process / "comm").read_text() == "slurmstepd\n"
                if is_step and ours in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return sorted(found)

    def _prepare(self) -> None:
        controller, *nodes = _free_ports(1 + NODES)
        host = socket.gethostname().partition(".")[0]
        (self.folder / "state").mkdir(exist_ok=True)
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        text = CONFIGURATION.format(
            host=host,
            folder=self.folder,
            port=controller,
            last=NODES - 1,
            first_port=nodes[0],
            last_port=nodes[-1],
            cores=CORES,
            gpus=GPUS,
        )
        for number in range(GPUS):
            device = self.folder / f"gpu{number}"
            if not device.exists():
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # what /dev/null is
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        (self.folder / "slurm.conf").write_text(text)

    def _munge_options(self) -> list[str]:
        folder = self.folder
        return [
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munge.pid",
            f"--seed-file={folder}/munge.seed",
            f"--log-file={folder}/munge.log",
        ]

    def _begin(self, name: str, program: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            process = subprocess.Popen(
                [_program(program), *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        (self.folder / f"{name}.started").write_text(f"{process.pid} {_born(process.pid)}")

    def _alive(self, name: str) -> int | None:
        """The process number of one of them, unless it is gone or belongs to another program by now."""
        try:
            pid, born = (self.folder / f"{name}.started").read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if _born(int(pid)) == born else None

    def _wait_until_up(self, *, idle: bool) -> None:
        deadline_s = time.monotonic() + READY_S
        said = ""
        while time.monotonic() < deadline_s:
            done = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%T"], env=self.environment, capture_output=True, text=True, check=False
            )
            said = done.stdout + done.stderr
            if done.returncode == 0 and (not idle or done.stdout.split() == ["idle"] * NODES):
                return
            time.sleep(0.2)
        logs = "\n".join(path.read_text(errors="replace")[-800:] for path in sorted(self.folder.glob("*.log")))
        raise ClusterError(f"the cluster did not come up: {said}\n{logs}")


def obstacle() -> str:
    """Why no cluster can be started here; empty where one can."""
    missing = [name for name in PROGRAMS if not _program(name)]
    if missing:
        return f"a real SLURM needs {', '.join(missing)}: {INSTALL}"
    return "" if os.geteuid() == 0 else "a real SLURM is started by root only"


def _program(name: str) -> str:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") or ""


def _free_ports(count: int) -> list[int]:
    """Consecutive free ports, below those that the system gives to clients."""
    begin = 17000 + 50 * secrets.randbelow(200)  # another cluster may be looking at this moment
    for first in range(begin, 30000, 50):
        ports = list(range(first, first + count))
        try:
            for port in ports:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return ports
    raise ClusterError("there are no free ports for a test cluster")


def _born(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _wait_for_the_end_of(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        select.select([os.pidfd_open(pid)], [], [])


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [deeper for child in found for deeper in _children(child)]


def _end(pid: int, *, kill: bool) -> None:
    family = [] if kill else _children(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
    for _ in range(100):
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        if not _born(pid):
            break
        time.sleep(0.05)
    for one in (pid, *family):
        with suppress(ProcessLookupError):
            if _born(one):
                os.kill(one, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _end_step(pid: int) -> str:
    """End a step's daemon with all that it has started; its name, e.g. `slurmstepd: [12.batch]`."""
    name, family = "slurmstepd", _children(pid)
    with suppress(OSError):
        name = Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")
    for one in (pid, *family):
        _end(one, kill=True)
    return name


def main(words: list[str]) -> int:
    """Run one command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["start", "stop", "status"])
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="configuration, logs and state (default: %(default)s)"
    )
    parser.add_argument("--after", type=int, metavar="PID", help="stop as soon as this process has ended")
    given = parser.parse_args(words)
    if given.after is not None:
        _wait_for_the_end_of(given.after)
    cluster = Cluster(given.folder)
    if given.command == "stop":
        print("stopped:", ", ".join(cluster.stop()) or "nothing was running")
        return 0
    if given.command == "start" and not cluster.alive():
        if obstacle():
            print(obstacle(), file=sys.stderr)
            return 1
        given.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            cluster.start()
        except (ClusterError, OSError) as error:
            cluster.stop()
            print(error, file=sys.stderr)
            return 1
    running = cluster.alive()
    print("running:", ", ".join(running) or "nothing")
    if running:
        print(f"\nexport SLURM_CONF={cluster.folder}/slurm.conf\n")
        print("sinfo\ndlojz run --dp 4 --on slurm --machine local --device cpu --steps 3")
    return 0 if running else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
