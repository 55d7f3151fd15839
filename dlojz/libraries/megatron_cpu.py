"""Megatron-core where there is no GPU: it asks CUDA for its device in the middle of its layers, and gets the CPU.

Layer 3. Invariant: no arithmetic and no communication of the library is touched, only where it lays its buffers; with
a GPU nothing is changed at all. What needs this: `torch.cuda.current_device()` in the buffers of sequence parallelism,
of attention scores, of gradients and of the pipeline's messages, and `device="cuda"` in the count of tokens of its
pipeline schedules. Fused kernels (Transformer Engine, Apex) have no CPU form, and are left out by the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnCPU(TorchFunctionMode):
    """Within it a tensor that is asked for on CUDA is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Within it Megatron-core runs on the CPU; nothing happens where there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        with _OnCPU():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize
