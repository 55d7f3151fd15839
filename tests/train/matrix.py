"""Runs many configurations one after the other in the processes of one launch: torch is imported once for all.

torchrun … matrix.py FOLDER    (FOLDER/NAME/config.json for each run)
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import idr_torch  # noqa: E402
import torch  # noqa: E402

from dlojz.config import RunConfig  # noqa: E402
from dlojz.record import EventLog  # noqa: E402
from dlojz.train.loop import train  # noqa: E402


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


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(idr_torch.rank)
    os.environ.pop("MASTER_ADDR")  # each run joins through a file store of its own
    for run in sorted(path.parent for path in folder.glob("*/config.json")):
        config = RunConfig.from_json((run / "config.json").read_text())
        (run / "events").mkdir(exist_ok=True)
        events = EventLog(run / "events" / f"rank-{rank}.jsonl")
        status, reason = train(config, run, events, rank=rank, local_rank=rank)
        forget_deepspeed()
        events.write("end", status=status, reason=reason)
        events.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
