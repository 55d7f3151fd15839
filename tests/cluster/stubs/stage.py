"""What the stub workers share: a rank's events, as the real worker writes them, and its signals."""

import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
CONFIG = RunConfig.from_json((FOLDER / "config.json").read_text())
LOG = EventLog(FOLDER / "events" / f"rank-{RANK}.jsonl")
told: list[int] = []


def begin() -> None:
    """Say that the rank has started; SIGTERM and SIGUSR2 are noted from now on."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: told.append(number))
    world_size = int(os.environ["WORLD_SIZE"])
    met = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "SLURMD_NODENAME")}
    now = datetime.now(UTC).isoformat()
    LOG.write("start", rank=RANK, pid=os.getpid(), world_size=world_size, environment=met, time_utc=now)


def step(index: int) -> None:
    """One finished step, whose loss is exact in binary."""
    LOG.write("step", step=index, loss=4.0 - index / 1024, step_s=0.01)
    time.sleep(0.05)


def end(status: str, reason: str, code: int) -> None:
    """The rank's last word."""
    LOG.write("end", status=status, reason=reason)
    LOG.close()
    sys.exit(code)
