"""What the engines themselves cost, beside what they compute: measured on blocks that compute next to nothing.

Layer 3. Invariant: a wrapped model minus the same model bare, both on the same ranks one after the other, so that what
is left is the engine's own code and its messages' starts; every rank makes the same calls in the same order.

    kind        what is measured                                                         size
    checkpoint  a block whose forward is done again in backward                          blocks, tensors
    ddp         hooks, copies into buckets, one message                                  blocks, tensors
    fsdp2       a block's weights gathered once, its gradients scattered (ZeRO-2)        blocks, tensors
    fsdp3       the same, gathered twice (ZeRO-3)                                        blocks, tensors
    dtensor     a pair of layers split by columns and rows: two messages                 messages
    meeting     an all-reduce between two computations: ranks that waited for a message  nothing
                wake up, and none begins before the last has come

Before them the chain of `measuring_chain`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from dlojz.predict.time.measuring import Timed
from dlojz.predict.time.measuring_chain import CHAIN, chain

WIDTH: Final = 8
TOYS: Final = ((2, 1), (8, 1), (8, 5))
"""Blocks, and linear layers with a norm in each: four tensors a layer."""
TENSORS_PER_LAYER: Final = 4
PAIRS: Final = (2, 8)
MEETING_ELEMENTS: Final = 2**14
MEETING_PRODUCTS: Final = 4
"""Of 512 × 128 × 512 each: some milliseconds on one core, what lies between two messages of a small model."""
LEAST_S: Final = 1e-7
"""What an engine is taken to cost where the difference of two measurements drowns."""
LEAST_CALLS: Final = 3
MEETING_S: Final = 0.005
"""About what products and message take together."""
LEAST_MEETINGS: Final = 41

Call = Callable[[], Any]


def measure_engines(*, windows: int, window_s: float, tell: Call | None = None) -> list[Timed]:
    """Measure on this rank, together with all others of its process group; on CPUs.

    Args:
        windows: how often each is timed, at least 1; the median counts.
        window_s: seconds of each, about.
        tell: called before each measurement.
    """
    import torch.distributed as dist

    found = []
    if tell:
        tell()
    whole = chain()
    found.append(CHAIN._replace(seconds=statistics.median(_call_s(whole, window_s) for _ in range(windows))))
    for timed, bare, wrapped in _pairs():
        if tell:
            tell()
        # By turns, so that what else the machine does falls on both.
        both = [(_call_s(wrapped, window_s), _call_s(bare, window_s)) for _ in range(windows)]
        extra_s = statistics.median(one - other for one, other in both)
        found.append(timed._replace(seconds=max(extra_s, LEAST_S)))
    if dist.is_initialized() and dist.get_world_size() > 1:
        if tell:
            tell()
        found.append(Timed("meeting", (), _meeting_s(4 * windows * window_s), "meeting"))
    return found


def count_engines(ranks: int) -> int:
    """How many measurements `measure_engines` makes with so many ranks."""
    return 1 + (len(TOYS) if ranks == 1 else 4 * len(TOYS) + len(PAIRS) + 1)


def _call_s(call: Call, window_s: float) -> float:
    """Seconds of one call on the slowest rank, in a window that all ranks begin together; the same calls on all."""
    import torch
    import torch.distributed as dist

    several = dist.is_initialized() and dist.get_world_size() > 1

    def slowest(seconds: float) -> float:
        if not several:
            return seconds
        told = torch.tensor(seconds, dtype=torch.float64)
        # Who: all ranks. What: their seconds, of which the largest count. How much: 8 bytes.
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return float(told)

    call()
    start_s = time.perf_counter()
    call()
    calls = max(LEAST_CALLS, int(window_s / slowest(time.perf_counter() - start_s)))
    if several:
        # Who: all ranks. What: nothing but that each is there. How much: a few bytes.
        dist.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    return slowest((time.perf_counter() - start_s) / calls)


def _block(layers: int) -> Any:
    from torch import nn

    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))))


def _toy(blocks: int, layers: int) -> Any:
    from torch import nn

    return nn.Sequential(*(_block(layers) for _ in range(blocks)))


def _pairs() -> Iterator[tuple[Timed, Call, Call]]:
    """What is timed, the bare call, and the call with the engine."""
    import torch
    import torch.distributed as dist

    x = torch.randn(4, WIDTH, requires_grad=True)

    def step(model: Any) -> Call:
        return lambda: model(x).sum().backward()

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for blocks, layers in TOYS:
        size = (blocks, blocks * layers * TENSORS_PER_LAYER)
        model = _toy(blocks, layers)
        bare, again = step(model), _forward_twice(model, x)
        for kind, wrapped in _wrapped(blocks, layers, ranks):
            label = f"{kind} {size[0]} × {size[1] // blocks}"
            yield Timed(kind, size, 0.0, label), again if kind == "checkpoint" else bare, step(wrapped)
    if ranks == 1:
        return
    for pairs in PAIRS:
        messages = 2 * pairs
        yield Timed("dtensor", (messages,), 0.0, f"dtensor {messages}"), step(_layers(pairs)), step(_split(pairs))


def _forward_twice(model: Any, x: Any) -> Call:
    """A step with a second forward: what recomputing computes, without what keeps its books."""

    def call() -> None:
        model(x)
        model(x).sum().backward()

    return call


def _wrapped(blocks: int, layers: int, ranks: int) -> Iterator[tuple[str, Any]]:
    yield "checkpoint", _Checkpointed(_toy(blocks, layers))
    if ranks == 1:
        return
    import warnings

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        yield "ddp", DistributedDataParallel(_toy(blocks, layers), broadcast_buffers=False)
    mesh = init_device_mesh("cpu", (ranks,))
    for kind, reshard in (("fsdp2", False), ("fsdp3", True)):
        model = _toy(blocks, layers)
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        yield kind, fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


class _Checkpointed:
    """Blocks of which each is computed again in backward."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __call__(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _layers(pairs: int) -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(pairs)))


def _split(pairs: int) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _layers(pairs)
    for pair in model:
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return model


def _meeting_s(window_s: float) -> float:
    """Median seconds of a message after products, mean of the ranks: those that come first wait for the others."""
    import torch
    import torch.distributed as dist

    left, right = torch.randn(512, 512), torch.randn(512, 128)
    message = torch.zeros(MEETING_ELEMENTS)
    waited_s = []
    for _ in range(max(LEAST_MEETINGS, int(window_s / MEETING_S))):
        for _ in range(MEETING_PRODUCTS):
            torch.mm(left, right)
        start_s = time.perf_counter()
        # Who: all ranks. What: zeros in fp32. How much: 64 KiB.
        dist.all_reduce(message)
        waited_s.append(time.perf_counter() - start_s)
    told = torch.tensor(waited_s, dtype=torch.float64)
    # Who: all ranks. What: how long each waited every time, of which the mean counts. How much: 8 bytes each.
    dist.all_reduce(told)
    return statistics.median((told / dist.get_world_size()).tolist())
