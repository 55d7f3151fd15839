"""What the test workers share: the events of a rank, written as the real worker writes them, without torch."""

import os
import sys
from pathlib import Path

from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
CONFIG = RunConfig.from_json((FOLDER / "config.json").read_text())


def begin() -> EventLog:
    """Open this rank's events and say that it has started."""
    log = EventLog(FOLDER / "events" / f"rank-{RANK}.jsonl")
    log.write(
        "start",
        rank=RANK,
        pid=os.getpid(),
        world_size=int(os.environ["WORLD_SIZE"]),
        environment={
            name: os.environ.get(name, "")
            for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "TORCH_FR_BUFFER_SIZE", "SLURM_PROCID", "MASTER_PORT")
        },
        time_utc="2030-01-01T00:00:00+00:00",
    )
    return log


def loss_at(step: int) -> float:
    """The loss that every test worker reports for a step: exact in binary, so that tests compare with ==."""
    return 4.0 - step / 1024


def step(log: EventLog, index: int) -> None:
    """Report one finished step."""
    log.write("step", step=index, loss=loss_at(index), step_s=0.01)
