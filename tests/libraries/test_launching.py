"""Scripts in every way of starting them: by their path, as modules, by launchers, and from within a script.

What a script prints and sees is compared with the same script without dlojz.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import dlojz
from dlojz.base.files import CHECKOUT
from dlojz.results.record import RunRecord
from dlojz.running.run import Run
from tests.libraries.forked_scripts import run_on_forks

pytestmark = pytest.mark.timeout(900)

TRAIN = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn

    WEIGHTS = 4 * (8 * 4 + 4)

    def train(model, steps, samples=4):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            loss = model(torch.randn(samples, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss
"""
WEIGHT_BYTES = 4 * (8 * 4 + 4)


def written(folder: Path, text: str, name: str = "written.py") -> Path:
    """Write a script whose first lines are those above."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(text), encoding="utf-8")
    return path


def environment_of(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "DLOJZ_RUNS": str(folder / "runs"), "PYTHONPATH": str(CHECKOUT), **more}


def command(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of dlojz in a folder."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment_of(folder, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def only_run(folder: Path) -> Run:
    (run,) = dlojz.runs(folder / "runs")
    return run


def record_of(folder: Path) -> RunRecord:
    record = only_run(folder).record
    assert record is not None
    return record


def check_ddp_of_two(record: RunRecord, steps: int) -> None:
    """Two processes of DDP: one all-reduce of the gradients per step, 4 bytes per parameter."""
    assert record.status == "completed", record.reason
    assert record.config.layout.world_size == 2 and record.title.endswith(" ×2")
    assert len(record.losses) == steps
    assert [footprint.rank for footprint in record.footprints] == [0, 1]
    assert all(footprint.traffic("all_reduce") == WEIGHT_BYTES for footprint in record.footprints)
    predicted = record.script_prediction
    assert predicted is not None and predicted.footprint is not None
    assert predicted.footprint.traffic("all_reduce") == WEIGHT_BYTES


SEEN = """
    import json, signal
    train(nn.Linear(8, 4), 5)
    print(json.dumps({
        "environment": dict(os.environ), "argv": sys.argv, "path": [p for p in sys.path if p != CHECKOUT],
        "file": __file__, "name": __name__, "package": __package__, "spec": __spec__ and __spec__.name,
        "threads": torch.get_num_threads(), "folder": os.getcwd(),
        "handlers": [str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)],
        "distributed": dist.is_torchelastic_launched(),
    }))
"""


def seen(printed: str) -> dict[str, Any]:
    (line,) = [line for line in printed.splitlines() if line.startswith('{"environment"')]
    content: dict[str, Any] = json.loads(line)
    return content


@pytest.mark.parametrize("module", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_one_process_sees_what_plain_python_shows(tmp_path: Path, module: bool) -> None:
    script = written(tmp_path, f"CHECKOUT = {str(CHECKOUT)!r}" + textwrap.dedent(SEEN), "pkg/train.py")
    (tmp_path / "pkg" / "helper.py").touch()
    if module:
        script.write_text(script.read_text() + "from . import helper\n", encoding="utf-8")
    words = ["-m", "pkg.train"] if module else ["pkg/train.py"]
    # As in a session of SLURM, with variables of a run on several processes left over.
    more = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "MASTER_PORT": "4", "DLOJZ_LANG": "en"}
    environment = environment_of(tmp_path, **more)
    python = [sys.executable, *words, "--lr", "3"]
    alone = subprocess.run(python, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    plain = seen(alone.stdout)
    done = command(tmp_path, "dlojz", "run", *words, "--", "--lr", "3", **more)
    assert done.returncode == 0, done.stderr
    assert seen(done.stderr) == plain
    watched = command(tmp_path, "dlojz.watch", *words, "--lr", "3", **more)
    assert watched.returncode == 0 and "Warning" not in watched.stderr
    assert seen(watched.stdout) == plain
    assert all(run.record is not None and len(run.record.losses) == 5 for run in dlojz.runs(tmp_path / "runs"))
    assert f"threads {plain['threads']}" in " ".join(done.stdout.split())


SPAWNED = """
    import torch.multiprocessing as mp

    def work(rank, world_size):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", PORT
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        train(nn.parallel.DistributedDataParallel(nn.Linear(8, 4)), 6)
        if FAILS and rank == 1:
            raise ValueError("rank 1 has had enough")
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(work, args=(2,), nprocs=2)
"""


def spawned(*, fails: bool = False) -> str:
    from dlojz.processes.script_environment import free_port

    return f"PORT, FAILS = '{free_port()}', {fails}\n" + textwrap.dedent(SPAWNED)


def test_dlojz_run_watches_processes_of_mp_spawn(tmp_path: Path) -> None:
    run = dlojz.run(written(tmp_path, spawned()), device="cpu", root=tmp_path / "runs", progress=False)
    check_ddp_of_two(record_of(tmp_path), 6)
    assert run.title == "written.py ×2"


@pytest.mark.nightly
def test_record_names_the_cause_of_a_child_that_fails(tmp_path: Path) -> None:
    dlojz.run(written(tmp_path, spawned(fails=True)), device="cpu", root=tmp_path / "runs", progress=False)
    record = record_of(tmp_path)
    assert (record.status, record.reason) == ("failed", "rank 1: ValueError: rank 1 has had enough")
    assert len(record.losses) == 6


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_dlojz_run_watches_processes_without_a_group(tmp_path: Path, method: str) -> None:
    """As Hogwild: a model in shared memory, each process trains it; a process that only evaluates is none of them."""
    written(
        tmp_path,
        f"""
        import torch.multiprocessing as mp

        class Trainer(mp.get_context("{method}").Process):
            def __init__(self, model):
                super().__init__()
                self.model = model
            def run(self):
                train(self.model, 4)

        def evaluate(model):
            model(torch.randn(4, 8)).sum().backward()

        if __name__ == "__main__":
            torch.set_num_threads(1)
            model = nn.Linear(8, 4)
            model.share_memory()
            context = mp.get_context("{method}")
            processes = [Trainer(model), Trainer(model), context.Process(target=evaluate, args=(model,))]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            with torch.no_grad():
                model(torch.randn(4, 8))
    """,
    )
    run_on_forks(tmp_path / "written.py", root=tmp_path / "runs")
    record = record_of(tmp_path)
    assert record.status == "completed" and record.config.layout.world_size == 2
    assert len(record.losses) == 4 and [footprint.rank for footprint in record.footprints] == [0, 1]
    assert record.footprints[1].memory.weights_bytes == WEIGHT_BYTES


LAUNCHING_ITSELF = """
    import subprocess
    if "LOCAL_RANK" not in os.environ:  # as Lightning does: this process is rank 0, and starts the others
        ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
        other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **ranks, "LOCAL_RANK": "1"})
        os.environ.update(ranks, LOCAL_RANK="0")
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    train(nn.parallel.DistributedDataParallel(nn.Linear(8, 4)), 6)
    dist.barrier()
    dist.destroy_process_group()
    print("variables", sorted(name for name in os.environ if "DLOJZ" in name), flush=True)
"""


def test_processes_that_a_script_starts_as_programs_are_watched(tmp_path: Path) -> None:
    from dlojz.processes.script_environment import free_port

    script = written(tmp_path, f"PORT = '{free_port()}'\n" + textwrap.dedent(LAUNCHING_ITSELF))
    run = dlojz.run(script, device="cpu", root=tmp_path / "runs", progress=False)
    check_ddp_of_two(record_of(tmp_path), 6)
    assert "DLOJZ_WATCHED" not in run.logs(0) and run.logs(0).count("variables") == 2


UNDER_TORCHRUN = """
    dist.init_process_group("gloo")
    train(nn.parallel.DistributedDataParallel(nn.Linear(8, 4)), 6)
    dist.barrier()
    dist.destroy_process_group()
    names = sorted(name for name in os.environ if name.startswith(("DLOJZ_W", "RANK")))
    # In one write: torchrun's processes share a pipe, and print word by word (python -u).
    print(f"variables {names} {sys.argv[1:]}\\n", end="")
    sys.exit(int(sys.argv[-1]))  # DeepSpeed's launcher adds an argument of its own
"""


LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node 2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 written.py",
    "module": f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 -m pkg.written",
    "accelerate": "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 written.py",
    "deepspeed": "deepspeed --num_gpus 2 written.py",
}


@pytest.mark.parametrize(
    "name", [name if name == "torchrun" else pytest.param(name, marks=pytest.mark.nightly) for name in LAUNCHERS]
)
def test_record_shows_that_a_launcher_is_taken_as_it_stands(tmp_path: Path, name: str) -> None:
    launcher = LAUNCHERS[name].split()
    if launcher[0] in ("accelerate", "deepspeed") and importlib.util.find_spec(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    for path in ("written.py", "pkg/written.py"):
        written(tmp_path, UNDER_TORCHRUN, path)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "timm.py").touch()  # which Accelerate's command imports, and which may lack its torchvision
    more = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(stubs), str(CHECKOUT)]),
    }
    done = command(tmp_path, "dlojz", "run", "--", *launcher, "0", **more)
    assert done.returncode == 0, done.stderr
    check_ddp_of_two(record_of(tmp_path), 6)
    assert done.stderr.count("variables ['RANK'] ") == 2


@pytest.mark.parametrize("launched", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_watch_and_record_have_the_exit_code_of_the_script(tmp_path: Path, launched: bool) -> None:
    written(tmp_path, "train(nn.Linear(8, 4), 5)\nsys.exit(3)\n")
    words = ["dlojz.watch"] if launched else ["dlojz", "run"]
    done = command(tmp_path, *words, "written.py")
    assert done.returncode == 3
    record = record_of(tmp_path)
    assert record.status == "failed" and record.reason == "rank 0: written.py left with exit code 3 after step 5."


def test_record_takes_os_exit_after_training_for_no_failure(tmp_path: Path) -> None:
    script = written(tmp_path, "train(nn.Linear(8, 4), 8)\nos._exit(0)\n")
    run_on_forks(script, root=tmp_path / "runs")
    record = record_of(tmp_path)
    assert (record.status, len(record.losses)) == ("completed", 8)
    assert record.footprints[0].phases.step_s is not None and record.spans


@pytest.mark.nightly
def test_footprints_of_a_process_that_becomes_another_are_kept(tmp_path: Path) -> None:
    script = written(tmp_path, "train(nn.Linear(8, 4), 8)\nos.execvp('sh', ['sh', '-c', 'exit 0'])\n")
    dlojz.run(script, device="cpu", root=tmp_path / "runs", progress=False)
    record = record_of(tmp_path)
    assert (record.status, len(record.losses)) == ("completed", 8)
    assert record.footprints[0].phases.step_s is not None


INTERRUPTED = """
    import signal
    how = sys.argv[1]
    def leave(number, frame):
        print("caught", number, flush=True)
        sys.exit(0)
    if how == "handler":
        signal.signal(signal.SIGINT, leave)
    try:
        train(nn.Linear(8, 4), 5)
        print("ready", flush=True)
        time.sleep(120)
    except KeyboardInterrupt:
        print("saving", flush=True)
        if how == "raises":
            raise
"""


@pytest.mark.parametrize(
    "how", ["raises", *(pytest.param(how, marks=pytest.mark.nightly) for how in ("handles", "handler"))]
)
def test_dlojz_run_lets_ctrl_c_reach_the_script_and_is_cancelled(tmp_path: Path, how: str) -> None:
    said = "caught 2" if how == "handler" else "saving"
    written(tmp_path, INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, "-m", "dlojz", "run", "written.py", "--", how],
        cwd=tmp_path,
        env=environment_of(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("ready"):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=120)[1]
    assert process.returncode == {"handles": 0, "handler": 0, "raises": 130}[how]  # as without dlojz
    assert said in printed  # what it prints after the interruption is seen too
    run = only_run(tmp_path)
    assert said in run.logs(0)
    assert ("KeyboardInterrupt" in run.logs(0)) == (how == "raises")
    assert run.record is not None and run.record.status == "cancelled"
    assert run.record.reason == "the run was cancelled after step 5; what had been measured is kept."
    assert run.record.footprints


@pytest.mark.nightly
def test_record_of_an_interrupted_watch_is_cancelled_although_the_script_ends_well(tmp_path: Path) -> None:
    written(tmp_path, INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, "-m", "dlojz.watch", "written.py", "handles"],
        cwd=tmp_path,
        env=environment_of(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[0] == "saving\n" and process.returncode == 0
    record = record_of(tmp_path)
    assert record.status == "cancelled" and "was interrupted after step 5" in record.reason
