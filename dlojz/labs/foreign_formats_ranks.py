"""What the ranks of a notebook need to write DeepSpeed's checkpoint and DCP's, and to compare what they read.

Layer 6 (labs), loads torch. Invariant: nothing is saved or loaded here; whoever does so sees it in the notebook.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dlojz.config import RunConfig


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


def zero_2(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's settings for ZeRO stage 2 of a run in fp32; its buckets are those of a small model."""
    return {
        "train_micro_batch_size_per_gpu": config.layout.micro_batch,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2**20, "allgather_bucket_size": 2**20},
        "zero_allow_untested_optimizer": True,
    }


def shard(model: nn.Module) -> nn.Module:
    """FSDP2 over all ranks, with one unit per block; in place.

    Who: all ranks. What: each block's weights are all-gathered for its forward and its backward, its gradient is
    reduce-scattered. How much: 3 × 4Ψ · (N − 1) / N bytes sent per rank and step (ZeRO-3).
    """
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # no block changes its output in place
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def deepspeed_states(engine: Any) -> dict[str, Any]:
    """What this rank updates under ZeRO-2 and what Adam keeps of it, as copies."""
    zero = engine.optimizer
    held = {"master": list(zero.single_partition_of_fp32_groups), "adam": zero.optimizer.state_dict()["state"]}
    return {"states": [tensor.detach().clone() for _, tensor in tensors(held)]}


def tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested dictionaries and lists, by the path to them."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, f"{name}/{key}")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from tensors(value, f"{name}/{number}")


def differing(left: Any, right: Any) -> dict[str, int]:
    """Tensors of this rank that are not the same bits in two nests of the same form.

    Returns:
        Their number among those that are sharded (DTensors), and among those of which the rank has a whole one.
    """
    counted = {"sharded": 0, "whole": 0}
    other = dict(tensors(right))
    for name, one in tensors(left):
        kind = "sharded" if isinstance(one, DTensor) else "whole"
        counted[kind] += not torch.equal(*(_bits(tensor) for tensor in (one, other[name])))
    return counted


def _bits(tensor: Tensor) -> Tensor:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach().contiguous().reshape(-1).view(torch.uint8)
