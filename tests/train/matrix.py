"""Runs many configurations one after the other on ranks that are forked once, by a process that has imported torch.

Tests call `train` or `do_in_forks`: pytest's own process has imported it. A cluster's test, which has none, starts
python matrix.py FOLDER PROCESSES    (FOLDER/NAME/config.json for each run)
"""

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from dlojz.base.machine import StopRequest, die_with_parent
from dlojz.config.run_config import RunConfig
from dlojz.processes.forks import fork
from dlojz.results.record import EventLog
from dlojz.runnable import check_runnable
from dlojz.running.supervisor import load
from dlojz.running.worker import trainer_of

LIMIT_S = 900
"""Seconds after which all ranks of a call are killed."""


def forget_deepspeed() -> None:
    """DeepSpeed caches process groups for the life of a process; here the next run makes new ones."""
    if "deepspeed" not in sys.modules:
        return
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    for name, value in vars(groups).items():
        if name.isupper() and isinstance(value, dict):
            value.clear()
        elif name.startswith("_") and name.isupper():
            setattr(groups, name, None)


def train_all(folder: Path, rank: int) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    os.environ.pop("MASTER_ADDR", None)  # each run joins through a file store of its own
    for run in sorted(path.parent for path in folder.glob("*/config.json")):
        config = RunConfig.from_json((run / "config.json").read_text())
        (run / "events").mkdir(exist_ok=True)
        events = EventLog(run / "events" / f"rank-{rank}.jsonl")
        status, reason = trainer_of(config)(config, run, events, rank=rank, local_rank=rank, stop=StopRequest())
        forget_deepspeed()
        events.write("end", status=status, reason=reason)
        events.close()


def forked(work: Callable[[Path, int], object], folder: Path, rank: int, processes: int) -> int:
    """One rank, as a copy of this process; its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        work(folder, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def fork_ranks(work: Callable[[Path, int], object], folder: Path, processes: int) -> int:
    """Fork the ranks and wait for all; one that fails ends the others."""
    ranks = {forked(work, folder, rank, processes) for rank in range(processes)}
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def load_all(configs: Iterable[RunConfig]) -> None:
    """Import once what the ranks of all runs need: 3 to 6 s, which each of them would take."""
    for config in configs:
        load(config)


def do_in_forks(
    work: Callable[[Path, int], object], folder: Path, processes: int, configs: Iterable[RunConfig]
) -> None:
    """Call `work(folder, rank)` on forked ranks; the first that fails ends the others, and we say what it printed.

    The ranks are children of one fork of this process, and end with it. What changes other libraries when it is
    imported (DeepSpeed, Megatron) is imported in that fork.
    """
    configs = list(configs)
    load_all(config for config in configs if config.library == "none" and config.layout.engine != "deepspeed")
    with tempfile.TemporaryFile() as printed:
        launcher = fork(partial(_launch, work, folder, processes, configs, printed.fileno()))
        deadline_s = time.monotonic() + LIMIT_S
        status = None
        try:
            while status is None and time.monotonic() < deadline_s:
                time.sleep(0.02)
                pid, ended = os.waitpid(launcher, os.WNOHANG)
                status = ended if pid else None
        finally:
            if status is None:
                os.kill(launcher, signal.SIGKILL)
                os.waitpid(launcher, 0)
        printed.seek(0)
        text = printed.read().decode(errors="replace")[-3000:]
    assert status == 0, text if status is not None else f"not done after {LIMIT_S} s: {text}"


def _launch(
    work: Callable[[Path, int], object], folder: Path, processes: int, configs: Iterable[RunConfig], printed: int
) -> NoReturn:
    die_with_parent()
    warnings.filterwarnings("ignore")
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    load_all(configs)
    os._exit(fork_ranks(work, folder, processes))


def train(folder: Path, configs: Mapping[str, RunConfig], processes: int) -> None:
    """Train each configuration in its folder, FOLDER/NAME."""
    for name, config in configs.items():
        check_runnable(config)
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(config.to_json())
    do_in_forks(train_all, folder, processes, configs.values())


def main(folder: Path, processes: int) -> int:
    """Train all configurations of a folder on forked ranks."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore")
    load_all(RunConfig.from_json(path.read_text()) for path in folder.glob("*/config.json"))
    return fork_ranks(train_all, folder, processes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
