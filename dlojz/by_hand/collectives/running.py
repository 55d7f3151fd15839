"""Run a collective's algorithm on real ranks, and measure collectives.

Each step of a program posts one receive and one send, waits, then adds or keeps; the tensor given is never written to.

Measured are torch's own functions or our programs, without the guard of the ranks. A collective is over when its
slowest rank is: each repeat counts by its maximum over ranks, a size by the median of its repeats, after warm-up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, say
from dlojz.by_hand.collectives.algorithm_catalogue import ALGORITHMS, Collective, algorithm, program
from dlojz.by_hand.collectives.algorithms import CollectiveStep

if TYPE_CHECKING:
    from torch import Tensor

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")


def run(name: str, tensor: Tensor, group: Any = None, *, per_node: int | None = None, watched: bool = True) -> Tensor:
    """Run a collective by hand, on every rank of a group, and return the result of torch's own.

    Every rank calls it with a tensor of the same shape and dtype; any shape, any dtype that can be added, contiguous or
    not, also with fewer elements than ranks. Chunks are those of `torch.tensor_split` of the flat tensor.

    Args:
        tensor: this rank's part; only read.
        per_node: ranks of one node, for `hierarchical_all_reduce`.
        watched: whether messages pass through the guard of the ranks, where one is installed.

    Returns:
        A new tensor. all-reduce and broadcast: of the same shape. reduce: the sum on rank 0, a partial sum elsewhere.
        all-gather: the ranks' tensors, one after the other along the first dimension. reduce-scatter and all-to-all:
        flat, the rank's chunk of the sum; the chunks received, by rank.

    Raises:
        LabError: if no process group exists, or a name or number is not legal.
    """
    import torch
    import torch.distributed as dist

    chosen = algorithm(name)
    if not (dist.is_available() and dist.is_initialized()):
        raise phrase.refused("no process group", name=name)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    steps = program(name, rank, size, per_node=per_node)
    chunks = _cut(chosen.collective, tensor, rank, chosen.num_chunks(size), size)
    # A block of an all-to-all comes from another rank, cut as this one cuts: it is as long as this rank's own.
    room = chunks[rank].numel() if chosen.collective == "all_to_all" else None
    for number, step in enumerate(steps):
        _do(step, number, chunks, room, group, watched)
    if chosen.collective == "reduce_scatter":
        return chunks[rank]
    # By number of chunk, or of rank for all-gather and all-to-all.
    result = torch.cat(chunks)
    if chosen.collective == "all_to_all":
        return result
    if chosen.collective == "all_gather":
        # torch joins along the first dimension; a scalar counts as one row.
        rows = tensor.shape[0] if tensor.dim() else 1
        return result.reshape(size * rows, *tensor.shape[1:])
    return result.reshape(tensor.shape)


def _cut(collective: Collective, tensor: Tensor, rank: int, chunks: int, size: int) -> list[Tensor]:
    """This rank's chunks, copied, and room for those that it will receive."""
    flat = tensor.detach().reshape(-1)
    if collective == "all_gather":
        # This rank's tensor, and empty room of the same length for each other rank's.
        return [flat.clone() if chunk == rank else flat.new_empty(flat.shape) for chunk in range(size)]
    return [part.clone() for part in flat.tensor_split(chunks)]


def _do(step: CollectiveStep, number: int, chunks: list[Tensor], room: int | None, group: Any, watched: bool) -> None:
    """One step: at most one message out and one in, at the same time."""
    import torch

    messages, lengths, incoming = [], [0], None
    if step.receive:
        lengths = [chunks[position].numel() if room is None else room for position in step.receive.chunks]
        incoming = chunks[0].new_empty(sum(lengths))
        # From the rank `source` to this one: `sum(lengths)` elements; the receive is posted before anything is sent.
        messages.append(("irecv", incoming, step.receive.source))
    if step.send:
        # To the rank `to`: the chunks one after the other, in one message.
        messages.append(("isend", torch.cat([chunks[chunk] for chunk in step.send.chunks]), step.send.to))
    for work in _posted([message for message in messages if message[1].numel()], number, group, watched):
        work.wait()
    # Only now: a chunk that was sent in this step went out as it was when the step began.
    if step.receive and incoming is not None:
        for position, part in zip(step.receive.chunks, torch.split(incoming, lengths), strict=True):
            chunks[position] = chunks[position] + part if step.receive.add else part


def _posted(messages: list[tuple[str, Tensor, int]], tag: int, group: Any, watched: bool) -> list[Any]:
    """Start the messages of a step; those of no elements are not sent, as both sides know."""
    import torch.distributed as dist

    if any(tensor.is_cuda for _, tensor, _ in messages):  # NCCL knows no tags, and needs both in one group call
        pairs = [
            dist.P2POp(getattr(dist, kind), tensor, group=group, group_peer=peer) for kind, tensor, peer in messages
        ]
        return list(dist.batch_isend_irecv(pairs))
    side = {"isend": "group_dst", "irecv": "group_src"}
    return [
        (getattr(dist, kind) if watched else unwatched(getattr(dist, kind)))(
            tensor, group=group, tag=tag, **{side[kind]: peer}
        )
        for kind, tensor, peer in messages
    ]


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's own function, without the guard before it."""
    return getattr(function, "__wrapped__", function)


SIZES_BYTES = tuple(4**power * 1024 for power in range(8))
"""1 KiB to 16 MiB."""
ELEMENT_BYTES = 4  # fp32
IN_A_ROW = 5  # calls whose mean is one time, on CPUs
LIBRARY = {
    "all_reduce": "ring_all_reduce",
    "all_gather": "ring_all_gather",
    "reduce_scatter": "ring_reduce_scatter",
    "broadcast": "tree_broadcast",
    "reduce": "tree_reduce",
    "all_to_all": "pairwise_all_to_all",
}
"""torch's collectives, and the algorithm whose formula is taken for their times."""


class TimedMessage(NamedTuple):
    """Measurement of one size; as JSON the list of its parts.

    Args:
        message_bytes: the whole tensor that is reduced, gathered or exchanged.
        time_s: until the slowest rank has finished.
        collective: one of torch's collectives (`all_reduce`) or of our algorithms (`ring_all_reduce`).
    """

    message_bytes: int
    time_s: float
    size: int
    collective: str = "all_reduce"


def algorithm_of(collective: str) -> str:
    """Return the algorithm whose formula is taken for a measured collective.

    Raises:
        LabError: if there is no such collective.
    """
    if collective not in LIBRARY and collective not in ALGORITHMS:
        raise LabError(one_of(say(en="collective", fr="communication"), collective, [*LIBRARY, *ALGORITHMS]))
    return LIBRARY.get(collective, collective)


def measure(
    collective: str = "all_reduce",
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    *,
    repeats: int = 15,
    warmup: int = 3,
    group: Any = None,
    tell: Callable[[int, int], None] | None = None,
) -> list[TimedMessage]:
    """Measure a collective; every rank of the group calls it with the same arguments.

    Args:
        collective: one of torch's (`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `reduce`, `all_to_all`)
            or of our algorithms (`names()`).
        sizes_bytes: sizes of the message, at least 4 bytes each; rounded up to whole fp32 elements for each rank.
        repeats: measurements of each size, at least 1, whose median counts: of one call on GPUs, else of `IN_A_ROW`.
        tell: called before each size, with the numbers of sizes done and in all.

    Returns:
        One point per size, the same on every rank.

    Raises:
        LabError: if there is no process group of at least 2 ranks, or an argument is not legal.
    """
    import torch
    import torch.distributed as dist

    algorithm_of(collective)
    _check(sizes_bytes, repeats, warmup)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
        raise phrase.refused("one rank measured")
    size = dist.get_world_size(group)
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    points = []
    for number, size_bytes in enumerate(sizes_bytes):
        if tell:
            tell(number, len(sizes_bytes))
        # Zeros: a sum repeated many times must not overflow.
        rank_elements = -(-size_bytes // (ELEMENT_BYTES * size))  # rounded up: all ranks have equal parts
        call = _call(collective, torch.zeros(rank_elements * size, dtype=torch.float32, device=device), group)
        # (repeats,): the first `warmup` calls are run and dropped.
        times_s = torch.tensor([_timed_s(call, group, on_gpu) for _ in range(warmup + repeats)][warmup:], device=device)
        # Every rank, once per size: its times, 4 bytes each, of which the largest count.
        unwatched(dist.all_reduce)(times_s, op=dist.ReduceOp.MAX, group=group)
        median_s = statistics.median(times_s.tolist())
        points.append(TimedMessage(rank_elements * size * ELEMENT_BYTES, median_s, size, collective))
    if tell:
        tell(len(sizes_bytes), len(sizes_bytes))
    return points


def _check(sizes_bytes: Sequence[int], repeats: int, warmup: int) -> None:
    wrong = [
        size for size in sizes_bytes if isinstance(size, bool) or not isinstance(size, int) or size < ELEMENT_BYTES
    ]
    if wrong or not sizes_bytes:
        wrong_size = repr(wrong[0]) if wrong else say(en="none", fr="aucune")
        raise phrase.refused("no sizes", element_bytes=ELEMENT_BYTES, wrong_size=wrong_size)
    for name, value, minimum in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise phrase.refused("no whole number", name=name, minimum=minimum, value=value)


def _timed_s(call: Callable[[], Any], group: Any, on_gpu: bool) -> float:
    """Seconds of one call, begun by all ranks at (nearly) the same moment; on CPUs the mean of several in a row.

    Where ranks share cores, some calls wait for a core for milliseconds. A median of single calls leaves these out, but
    a step's sum of calls has them.
    """
    import torch
    import torch.distributed as dist

    # Late ranks would count as communication.
    unwatched(dist.barrier)(group=group)
    if on_gpu:
        torch.cuda.synchronize()
    # NCCL's barrier returns before the GPU has passed it: hence the wait above, and again after the calls.
    calls = 1 if on_gpu else IN_A_ROW
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / calls


def _call(collective: str, message: Any, group: Any) -> Callable[[], Any]:
    """The timed call, on a whole message of zeros."""
    import torch.distributed as dist

    # (1/p of the message): what all-gather sends, and what reduce-scatter receives.
    part = message.tensor_split(dist.get_world_size(group))[0].clone()
    if collective in ALGORITHMS:
        rank_input = part if algorithm(collective).collective == "all_gather" else message
        return lambda: run(collective, rank_input, group, watched=False)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: unwatched(dist.all_reduce)(message, group=group),
        "all_gather": lambda: unwatched(dist.all_gather_into_tensor)(message, part, group=group),
        "reduce_scatter": lambda: unwatched(dist.reduce_scatter_tensor)(part, message, group=group),
        "broadcast": lambda: unwatched(dist.broadcast)(message, group_src=0, group=group),
        "reduce": lambda: unwatched(dist.reduce)(message, group_dst=0, group=group),
        "all_to_all": lambda: unwatched(dist.all_to_all_single)(message.clone(), message, group=group),
    }
    return calls[collective]
