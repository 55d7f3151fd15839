"""The test cluster itself: what all other tests here rely on."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import ask, cluster_module, reachable, until

BEGUN = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import cluster
cluster._program = lambda name: "/bin/sleep"
begun = cluster.Cluster(Path(sys.argv[2]))
begun.ends_with_this_process()
begun._begin("munged", "munged", "600")
print("begun", flush=True)
time.sleep(600)
"""
"""Begins what would be a daemon, and waits to be killed."""


def test_tasks_run_on_two_nodes_and_know_their_rank(slurm: Any) -> None:
    code = "import idr_torch as i; print(i.rank, i.world_size, i.local_rank)"
    done = subprocess.run(
        ["srun", "-N", "2", "-n", "4", "--ntasks-per-node=2", "-l", sys.executable, "-W", "ignore", "-c", code],
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0: 0 4 0", "1: 1 4 1", "2: 2 4 0", "3: 3 4 1"]


def sleeper(cluster: Any) -> tuple[str, psutil.Process, psutil.Process]:
    """A job that sleeps: its number, the daemon of its step, and what it runs."""
    job = ask(cluster, "sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--wrap=exec sleep 600").strip()
    assert job.isdecimal(), job
    name = f"slurmstepd: [{job}.batch]"

    def found() -> tuple[str, psutil.Process, psutil.Process] | None:
        for pid in cluster.steps():
            with suppress(psutil.NoSuchProcess):  # of another job, that ends just now
                step = psutil.Process(pid)
                tasks = step.children(recursive=True) if " ".join(step.cmdline()).startswith(name) else []
                if tasks and tasks[-1].cmdline() == ["sleep", "600"]:
                    return job, step, tasks[-1]
        return None

    told: tuple[str, psutil.Process, psutil.Process] = until(found)
    return told


def is_over(process: psutil.Process) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_cluster_that_is_stopped_ends_its_own_steps_and_nothing_else(
    slurm: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = type(slurm)(reachable(tmp_path_factory.mktemp("other")))
    job, step, task = sleeper(slurm)
    shell = None
    try:
        other.start()
        shell = subprocess.Popen(["sleep", "600"], env=other.environment)  # of whoever tries that cluster
        number, its_step, its_task = sleeper(other)
        assert other.steps() == [its_step.pid]
        assert other.stop("slurmd-n1") == ["slurmd-n1"] and not is_over(its_step), "a part of it ends alone"
        ended = other.stop()
        assert ended == ["slurmd-n0", "slurmctld", "munged", f"slurmstepd: [{number}.batch]"]
        assert is_over(its_step) and is_over(its_task) and other.steps() == []
        assert shell.poll() is None and not is_over(step) and not is_over(task)
        assert other.stop() == []
    finally:
        other.stop()
        if shell is not None:
            shell.kill()
            shell.wait()
        ask(slurm, "scancel", job)
    until(lambda: step.pid not in slurm.steps())


def test_a_cluster_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    """Although that is killed and can tidy nothing up."""
    module = cluster_module()
    cluster = module.Cluster(tmp_path)
    words = [str(Path(module.__file__).parent), str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-c", BEGUN, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        assert cluster.alive() == ["munged"]
    finally:
        process.kill()
        process.communicate()
    until(lambda: not cluster.alive())
