"""Measuring this machine: one process, two, four, each time all of them at work.

Layer 5. Invariant: the processes are gone when a measurement ends; on CPUs they are forked and have one thread each, as
the launcher's ranks have; on GPUs each has its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from dlojz.hardware import GPUS
from dlojz.predict.time.measured import Measured, Setup
from dlojz.predict.time.measuring import WINDOW_S, WINDOWS, measure_rank
from dlojz.schema import LabError
from dlojz.text import say

Tell = Callable[[int, int], None]
Watch = Callable[[int], AbstractContextManager[Tell]]
LIBRARIES = ("torch", "numpy", "dlojz")
WALL_S = 180.0
LIMIT_S = 30.0
ATTEMPTS = 2
"""A message that was lost on a busy machine is no reason to measure nothing."""
QUICK = {"windows": 1, "window_s": 0.01}
FULL = {"windows": WINDOWS, "window_s": WINDOW_S}


def measure_machine(
    ranks: Sequence[int] = (1, 2, 4), *, quick: bool = False, device: str = "auto", watch: Watch | None = None
) -> Measured:
    """Measure with each number of ranks at once.

    Args:
        ranks: growing, from 1 on; on GPUs at most as many as there are.
        quick: less than a quarter of the time, and less exact.
        device: auto, cpu or cuda.
        watch: told of each number of ranks, gives what is told how far it has come.

    Raises:
        LabError: if a rank fails, or there is no such device.
    """
    import torch

    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise LabError(
            say(
                en="device='cuda' was received, but torch finds no GPU here: use device='cpu'.",
                fr="device='cuda' a été reçu, mais torch ne trouve pas de GPU ici : prenez device='cpu'.",
            )
        )
    load = os.getloadavg()[0]
    asked = [one for one in ranks if not on_gpu or one <= torch.cuda.device_count()]
    pace = QUICK if quick else FULL
    setups = []
    for number in asked:
        timings, points = _on_gpus(number, pace) if on_gpu else _on_cores(number, pace, watch)
        setups.append(Setup.from_dict({"ranks": number, "timings": timings, "points": points}))
    title = torch.cuda.get_device_name(0) if on_gpu else _processor()
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else psutil.virtual_memory().total
    return Measured(
        machine=platform.node() or "local",
        processor=title,
        gpu=gpu_name(title, memory) if on_gpu else "cpu",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions=_versions(),
        load=load,
        setups=tuple(setups),
    )


def gpu_name(title: str, memory_bytes: int) -> str:
    """The GPU in `dlojz.hardware` that a driver's title names; `cpu`, whose peaks are measured, where there is none."""
    gigabytes = memory_bytes / 1e9
    words = title.lower().replace("-", " ").split()
    for name in GPUS:
        family, _, size = name.partition("-")
        if family in words and (not size or abs(float(size) - gigabytes) < 0.15 * float(size)):
            return name
    return "cpu"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for row in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if row.startswith("model name"):
                return row.partition(":")[2].strip()
    return platform.machine() or "CPU"


def _on_cores(number: int, pace: dict[str, Any], watch: Watch | None) -> Any:
    """On forked ranks, the first of which is watched."""
    from dlojz.ranks.forks import spmd

    def measured(rank: int, size: int) -> Any:
        if rank or watch is None:
            return [list(part) for part in measure_rank(**pace)]
        with watch(size) as tell:
            return [list(part) for part in measure_rank(**pace, tell=tell)]

    for _ in range(ATTEMPTS):
        answers = spmd(measured, number, wall_s=WALL_S, limit_s=LIMIT_S)
        failed = next((one for one in answers if one.error is not None), None)
        if failed is None:
            break
    if failed is not None and failed.error is not None:
        why = failed.error.message or failed.error.name or failed.error.kind
        raise LabError(
            say(
                en=f"rank {failed.rank} of {number} could not measure: {why} (`dlojz doctor` examines this machine).",
                fr=f"le rang {failed.rank} sur {number} n’a pas pu mesurer : {why} (`dlojz doctor` examine cette "
                "machine).",
            )
        )
    return answers[0].value


def _on_gpus(number: int, pace: dict[str, Any]) -> Any:
    """On spawned processes, one GPU each, joined by NCCL; a single one needs no other process."""
    if number == 1:
        return [list(part) for part in measure_rank(**pace)]
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory(prefix="dlojz-calibrate-") as folder:
        spawn(_gpu_rank, args=(number, folder, pace), nprocs=number)
        return json.loads((Path(folder) / "answer.json").read_text(encoding="utf-8"))


def _gpu_rank(rank: int, number: int, folder: str, pace: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), number)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=rank, world_size=number)
    found = [list(part) for part in measure_rank(**pace)]
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
