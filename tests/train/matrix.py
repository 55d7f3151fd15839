"""Runs many configurations one after the other in the processes of one launch: torch is imported once for all.

python matrix.py FOLDER PROCESSES    (FOLDER/NAME/config.json for each run; the ranks are forked)
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.filterwarnings("ignore")
import torch  # noqa: E402

from dlojz.base.machine import StopRequest  # noqa: E402
from dlojz.config.run_config import RunConfig  # noqa: E402
from dlojz.results.record import EventLog  # noqa: E402
from dlojz.running.supervisor import load  # noqa: E402
from dlojz.running.worker import trainer_of  # noqa: E402


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


def main(folder: Path, processes: int) -> int:
    """Import once what the ranks of all runs need, then fork them."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for path in folder.glob("*/config.json"):
        load(RunConfig.from_json(path.read_text()))
    return fork_ranks(train_all, folder, processes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
