"""Data parallelism by hand: the whole model on every rank, gradients averaged while backward still computes.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv 2006.15704),
§3.2.2 (buckets), §3.2.3 (overlap), §3.2.4 (accumulation).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.language import MEBIBYTE, Sentences
from dlojz.results.footprint import Overlap

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

BUCKET_BYTES = 25 * MEBIBYTE


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank's number in a group, and its number of ranks: (0, 1) for one process."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def give_from_first(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Copy the values of the group's first rank to all ranks."""
    if ranks_of(group)[1] == 1:
        return
    # `broadcast` takes the global number of the rank, within a group too.
    source = dist.get_global_rank(group, 0) if group is not None else 0
    # A transposed weight is made contiguous, sent, and copied back into its own layout.
    value = tensor.detach().contiguous()
    # Who: the first rank to all others. What: some weights or a buffer. How much: its bytes, once per run.
    dist.broadcast(value, src=source, group=group)
    tensor.detach().copy_(value)


def pieces_of(flat: Tensor, shapes: Iterable[torch.Size]) -> Iterator[Tensor]:
    """Cut a flat tensor into views of these shapes, one after the other; what is left over is padding."""
    start = 0
    for shape in shapes:
        yield flat[start : start + shape.numel()].view(shape)
        start += shape.numel()


def fill_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Fill buckets in the order given, each until it holds `bucket_bytes` or the type of the numbers changes."""
    buckets: list[list[Tensor]] = []
    filled_bytes = 0
    for parameter in parameters:
        # The parameter that fills a bucket still belongs to it: a bucket may be larger than `bucket_bytes`.
        if not buckets or filled_bytes >= bucket_bytes or parameter.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(parameter)
        filled_bytes += parameter.nbytes
    return buckets


@dataclass(frozen=True)
class BucketCommunication:
    """All-reduce of one bucket on this rank, with the wait for late ranks; seconds of `time.perf_counter`."""

    bucket: int
    num_bytes: int
    left_s: float
    arrived_s: float


class _Stopwatch:
    """Clock of one device: seconds of the host, or on a GPU, whose calls return at once, events in its streams."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._origin_s = device.type == "cuda", time.perf_counter()
        # On a GPU the first event: times of later ones are counted from it.
        self._origin = self.now()

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        if not self._cuda:
            return float(moment)
        moment.synchronize()
        return self._origin_s + float(self._origin.elapsed_time(moment)) / 1e3  # ms to s


class _Flight:
    """Bucket under way: its gradients in one flat tensor, and their all-reduce."""

    def __init__(self, bucket: int, flat: Tensor, group: dist.ProcessGroup | None, watch: _Stopwatch) -> None:
        self.bucket, self.num_bytes = bucket, flat.nbytes
        self.left = self.arrived = watch.now()
        # Who: all ranks of the group. What: one bucket of gradients, shape (elements,), summed; the call returns at
        # once. How much: num_bytes; of these, each of N ranks sends 2 (N − 1) / N in a ring.
        self._flat, self._work = flat, dist.all_reduce(flat, group=group, async_op=True)
        # The future calls back when the sum is there, not when somebody waits: that is the arrival.
        self._landed = self._work.get_future().then(partial(self._land, watch))

    def _land(self, watch: _Stopwatch, _: object) -> None:
        self.arrived = watch.now()

    def wait(self) -> Tensor:
        self._work.wait()
        # The callback has run too, so that `arrived` is set.
        self._landed.wait()
        return self._flat


class DataParallel(nn.Module):
    """Model that averages its gradients over the ranks of a group.

    A training step is `loss = criterion(model(inputs), targets)`, `loss.backward()`, `model.synchronize()`,
    `optimizer.step()`, `optimizer.zero_grad()`. Rank 0's weights and buffers are copied to all ranks at the start;
    after that buffers (BatchNorm's statistics) stay each rank's own.

    Args:
        module: the whole model; freeze parameters before it is wrapped. Wrapped again, it obeys the last wrapper.
        bucket_bytes: a bucket leaves once it holds so much.
        overlap: send each bucket as soon as it is full, while backward runs; otherwise all of them after it.
        group: the ranks that average; by default all. One process communicates nothing.

    Raises:
        LabError: if nothing can be trained, or `bucket_bytes` is below 1.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not parameters:
            name = type(module).__name__
            raise phrase.refused("no parameter", name=name)
        if bucket_bytes < 1:
            raise phrase.refused("no bucket", bucket_bytes=bucket_bytes)
        self.module, self.overlap, self.group = module, overlap, group
        self.size = ranks_of(group)[1]
        # Backward reaches the last layers first: in reverse order, the first buckets are full early.
        self.buckets = self.fill(parameters[::-1], bucket_bytes)
        self._watch = _Stopwatch(parameters[0].device)
        self._compute_end = self._watch.now()
        self._arrived: list[tuple[int, int, Any, Any]] = []
        self._communicates = True
        self._begin_step()
        for handle in module.__dict__.pop("_data_parallel_hooks", ()):  # a cell of a notebook is run twice
            handle.remove()
        module.__dict__["_data_parallel_hooks"] = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_is_ready, number))
            for number, bucket in enumerate(self.buckets)
            for parameter in bucket
        ]
        if self.size > 1:
            self._broadcast()

    def fill(self, parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
        """Fill the buckets, in the order in which they are sent."""
        return fill_buckets(parameters, bucket_bytes)

    def _broadcast(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            give_from_first(tensor, self.group)

    def _begin_step(self) -> None:
        self._ready: set[Tensor] = set()
        self._flying: list[_Flight] = []
        # Gradients that each bucket still waits for.
        self._missing = [len(bucket) for bucket in self.buckets]
        self._next, self._accumulated = 0, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._ready and torch.is_grad_enabled():
            raise phrase.refused("never averaged")
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward only adds to this rank's gradients; the next backward outside sends the sum of all."""
        before, self._communicates = self._communicates, False
        try:
            yield
        finally:
            self._communicates = before

    def _gradient_is_ready(self, number: int, parameter: Tensor) -> None:
        """Send every full bucket whose predecessors are sent: all ranks must send in the same order."""
        if not self._communicates:
            self._accumulated = True
            return
        if parameter in self._ready:
            raise phrase.refused("backward twice")
        self._ready.add(parameter)
        self._missing[number] -= 1
        while self.overlap and self._next < len(self.buckets) and not self._missing[self._next]:
            self._send()

    def _send(self) -> None:
        """Send the next bucket; a parameter without a gradient counts as zeros."""
        if self.size > 1:
            # (elements of the bucket,): one message instead of one per parameter.
            flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in self.buckets[self._next]])
            try:
                self._flying.append(_Flight(self._next, flat, self.group, self._watch))
            except BaseException:
                self._begin_step()  # the others did not answer: this step is lost, the next one starts afresh
                raise
        self._next += 1

    @torch.no_grad()
    def synchronize(self) -> None:
        """Send the remaining buckets, wait for all, and put the mean over the ranks into the gradients.

        Raises:
            LabError: if no backward pass came before.
        """
        if not (self._ready or self._accumulated):
            raise phrase.refused("no gradient")
        # End of this rank's backward: for `timing`, communication after it is exposed.
        self._compute_end, self._arrived = self._watch.now(), []
        try:
            while self._next < len(self.buckets):
                self._send()
            while self._flying:
                # The sum over the ranks, divided once per bucket: all-reduce itself knows no mean here.
                flight = self._flying.pop(0)
                bucket, mean = self.buckets[flight.bucket], flight.wait().div_(self.size)
                for parameter, piece in zip(bucket, pieces_of(mean, [weight.shape for weight in bucket]), strict=True):
                    _gradient(parameter).copy_(piece)
                self._arrived.append((flight.bucket, flight.num_bytes, flight.left, flight.arrived))
        finally:
            self._begin_step()

    @property
    def communications(self) -> tuple[BucketCommunication, ...]:
        """Buckets that the last step has sent; empty before the first, and for one process."""
        seconds = self._watch.seconds
        return tuple(BucketCommunication(n, size, seconds(a), seconds(b)) for n, size, a, b in self._arrived)

    @property
    def timing(self) -> Overlap:
        """Overlap of the last step's communication with its backward pass: `exposed_s` and `hidden_s`."""
        intervals = tuple((communication.left_s, communication.arrived_s) for communication in self.communications)
        return Overlap.after_backward(intervals, self._watch.seconds(self._compute_end))


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter; zeros, from now on, where backward has not used it."""
    # Another rank may have used it, and all must send as many elements.
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.detach()
