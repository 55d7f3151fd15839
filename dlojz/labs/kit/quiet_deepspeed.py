"""Import DeepSpeed without its messages on the ranks of a notebook, which have a process group already."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def load_deepspeed() -> Any:
    """DeepSpeed, ready for ranks that have a process group already and compute on CPUs.

    It looks for a compiler and for libraries of the system while it is imported, and says so: that is not shown.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # DeepSpeed insists on it, whatever the launcher
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, at two collectives that DeepSpeed calls
    with _silent():
        import deepspeed

        # An inference-only shared-memory operator that DeepSpeed would compile for 40 s at its first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing of this process, nor of those it starts, is written to its two streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nothing, number)
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nothing)
