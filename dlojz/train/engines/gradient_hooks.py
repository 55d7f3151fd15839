"""torch's own hooks on what DDP sends: gradients in half the bytes, or as the product of two thin matrices.

Layer 3, loads torch. Invariant: what is sent is a function of the bucket alone, in one order on all ranks; after the
hook all ranks hold the same gradient.

Source: torch 2.13, `distributed/algorithms/ddp_comm_hooks/default_hooks.py` and `powerSGD_hook.py`; Vogels et al. 2019
(arXiv 1905.13727), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from dlojz.layout import Layout
from dlojz.layout_gradients import powersgd_start

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
"""Takes a state and a bucket; gives what will hold the bucket's averaged gradients."""
TINY = 1e-8
"""Added to the norm of a column before it divides: a layer without a gradient has columns of zeros."""


def attach_hook(
    model: DistributedDataParallel, layout: Layout, *, steps: int, group: dist.ProcessGroup | None
) -> powersgd.PowerSGDState | None:
    """Let a model's buckets leave as the layout says; returns what PowerSGD keeps from step to step, else None.

    Args:
        model: as DDP has wrapped it, with no hook yet.
        layout: of the run.
        steps: of the run, of which PowerSGD leaves the first ones alone (`layout_gradients.powersgd_start`).
        group: the replicas; by default all ranks.
    """
    # Who: all replicas, bucket after bucket, as backward fills them. What: the bucket's gradients in 2 bytes each, all-
    # reduced; or three all-reduces: of what is too small to be worth it, in fp32, of all P (rows × rank), and of all Q
    # (columns × rank), as `predict.gradient_hooks` counts them.
    if layout.gradient_compression == "fp16":
        model.register_comm_hook(group, fp16_compress_hook)
    elif layout.gradient_compression == "bf16":
        model.register_comm_hook(group, in_bf16)
    elif layout.gradient_compression == "powersgd":
        start = powersgd_start(steps)
        state = powersgd.PowerSGDState(group, layout.powersgd_rank, start, orthogonalization_epsilon=TINY)
        gloo = dist.get_backend(group) == "gloo"
        model.register_comm_hook(state, waiting_powersgd if gloo else powersgd.powerSGD_hook)
        return state
    return None


class _Waiting:
    """`torch.distributed` as torch's hook sees it, but an all-reduce is over before it returns."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, **options: Any) -> Any:
        """See `torch.distributed.all_reduce`."""
        work = dist.all_reduce(tensor, **options)
        work.wait()
        return work


# torch's hook sends P and Q from where the former message has arrived. With gloo that is one of its two threads, which
# then waits there for a message that no thread is left to take, as soon as three buckets are under way; and the ranks
# may take up messages in different orders. Waited for, all messages leave from the thread of backward, in its order.
waiting_powersgd: Hook = FunctionType(
    powersgd.powerSGD_hook.__code__,
    {**vars(powersgd), "dist": _Waiting()},
    "waiting_powersgd",
    powersgd.powerSGD_hook.__defaults__,
)
"""torch's PowerSGD, message after message."""


# torch refuses its own hook by name where there is no NCCL, though gloo adds up bf16 as well.
in_bf16: Hook = FunctionType(bf16_compress_hook.__code__, vars(default_hooks), "in_bf16")
"""torch's gradients in bf16, on every backend."""


def held(state: powersgd.PowerSGDState) -> list[Tensor]:
    """The tensors that PowerSGD keeps from step to step: the errors of each bucket, P and Q."""
    kept = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
    return [tensor for tensors in kept for tensor in tensors.values()]
