"""Worker of a run whose ranks share one GPU: joined by gloo, what stages send goes through host memory.

`benchmarks/gpu_units.py` names it as `worker_module`. NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_units import messages_through_host
from dlojz.config.run_config import RunConfig
from dlojz.running import worker
from dlojz.train import loop


def choose_device(config: RunConfig, local_rank: int) -> torch.device:
    """The one GPU, for every rank; the CPU for a run that asks for it."""
    del local_rank
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def init_process_group(folder: Path, device: torch.device, rank: int, world_size: int) -> None:
    """Join the ranks by gloo, through a file of the run folder."""
    store: Any = dist.FileStore(str(folder.resolve() / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=loop.GROUP_TIMEOUT)
    if device.type == "cuda":
        messages_through_host()


def main(folder: Path) -> int:
    """Train as the folder's configuration says; returns the exit code."""
    loop.choose_device, loop.init_process_group = choose_device, init_process_group
    return worker.main(folder)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
