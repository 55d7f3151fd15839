"""The same programs on real ranks: each step posts one receive and one send, waits, then adds or keeps.

Layer 2. Invariant: what is simulated is what is sent; a step of a rank is at most one message each way, whatever the
number of chunks in it. The tensor given is never written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.collectives.catalogue import Collective, algorithm, program
from dlojz.collectives.steps import Step
from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor


def run(name: str, tensor: Tensor, group: Any = None, *, per_node: int | None = None, watched: bool = True) -> Tensor:
    """Do a collective by hand, on every rank of a group, and return what torch's own gives there.

    Every rank calls it with a tensor of the same shape and dtype; any shape, any dtype that can be added, contiguous or
    not, also with fewer elements than ranks. Chunks are those of `torch.tensor_split` of the flat tensor.

    Args:
        name: one of `names()`.
        tensor: this rank's part; only read.
        group: process group; by default all ranks.
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
        raise LabError(
            say(
                en=f"{name} needs ranks that share a process group, and there is none here: "
                "run it in a `%%ranks` cell.",
                fr=f"{name} demande des rangs qui partagent un groupe de processus, et il n’y en a pas ici : "
                "exécutez-le dans une cellule `%%ranks`.",
            )
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    steps = program(name, rank, size, per_node=per_node)
    held = _cut(chosen.collective, tensor, rank, chosen.num_chunks(size), size)
    # A block of an all-to-all comes from another rank, cut as this one cuts: it is as long as this rank's own.
    room = held[rank].numel() if chosen.collective == "all_to_all" else None
    for number, step in enumerate(steps):
        _do(step, number, held, room, group, watched)
    if chosen.collective == "reduce_scatter":
        return held[rank]
    whole = torch.cat(held)
    if chosen.collective == "all_to_all":
        return whole
    if chosen.collective == "all_gather":
        rows = tensor.shape[0] if tensor.dim() else 1
        return whole.reshape(size * rows, *tensor.shape[1:])
    return whole.reshape(tensor.shape)


def _cut(collective: Collective, tensor: Tensor, rank: int, chunks: int, size: int) -> list[Tensor]:
    """This rank's chunks, copied: what it has, and room for what it will receive."""
    flat = tensor.detach().reshape(-1)
    if collective == "all_gather":
        return [flat.clone() if chunk == rank else flat.new_empty(flat.shape) for chunk in range(size)]
    return [part.clone() for part in flat.tensor_split(chunks)]


def _do(step: Step, number: int, held: list[Tensor], room: int | None, group: Any, watched: bool) -> None:
    """One step: at most one message out and one in, at the same time."""
    import torch

    messages, lengths, incoming = [], [0], None
    if step.receive:
        lengths = [held[place].numel() if room is None else room for place in step.receive.chunks]
        incoming = held[0].new_empty(sum(lengths))
        # From the rank `source` to this one: `sum(lengths)` elements; the receive is posted before anything is sent.
        messages.append(("irecv", incoming, step.receive.source))
    if step.send:
        # To the rank `to`: the chunks one after the other, in one message.
        messages.append(("isend", torch.cat([held[chunk] for chunk in step.send.chunks]), step.send.to))
    for work in _posted([message for message in messages if message[1].numel()], number, group, watched):
        work.wait()
    if step.receive and incoming is not None:
        for place, part in zip(step.receive.chunks, torch.split(incoming, lengths), strict=True):
            held[place] = held[place] + part if step.receive.add else part


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
    """torch's own function, where a guard stands before it."""
    return getattr(function, "__wrapped__", function)
