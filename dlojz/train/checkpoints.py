"""Checkpoint manager: save and resume a training, as the loop sees it.

Rank 0 decides for all ranks. A checkpoint that cannot be written ends no training; nothing is sent unless one is
written. It holds weights, optimizer states and BatchNorm statistics, whole and by name; each rank's random numbers; the
number of finished steps, from which the place in the data follows. There are no gradients between two steps, and no
loss scale, as no engine runs in fp16.

A run resumed in the same layout on CPUs ends as the one that was not interrupted, bit for bit: every state is kept in
full, and the ranks sum their gradients in the same order as before. The exception is torch's DDP with more than two
replicas: after its first backward it fills its buckets anew, in the order in which the gradients came. A ring starts
the sum of an element at the rank that the element's place in the bucket says, so in the first step after an
interruption three or more addends are summed in another order, and the last bits differ. In another layout, or on
another number of ranks, the losses are the same to rounding.

Source: torch 2.13, `csrc/distributed/c10d/reducer.cpp`, `rebuild_buckets`; gloo, `allreduce.cc`, `ring`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog
from dlojz.train.checkpoint_files import CHECKPOINTS, CheckpointPolicy, newest, read_manifest, step_folder
from dlojz.train.checkpoint_tensors import CheckpointTensors, CheckpointWriter, already_there, keep_newest
from dlojz.train.engines.base import Engine

NOTHING = -1


class CheckpointManager:
    """Checkpoints of one run, on one rank.

    Args:
        policy: when checkpoints are written, and how many are kept.
        control: the lab's own group, of the CPU; None with one process.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        policy: CheckpointPolicy,
        events: EventLog,
        engine: Engine,
        control: dist.ProcessGroup | None,
    ) -> None:
        self._config, self._folder, self._policy, self._events = config, folder, policy, events
        self._engine, self._control = engine, control
        self._rank = control.rank() if control is not None else 0
        self.newest_step = NOTHING
        """The last step with a checkpoint, as far as this attempt knows."""
        self.problem = ""
        """Why the last checkpoint could not be written; empty where it could."""

    @property
    def _checkpoints(self) -> Path:
        return self._folder / CHECKPOINTS

    def resume(self) -> int:
        """Restore the newest valid checkpoint; returns the step to train next, 0 where there is none.

        Raises:
            LabError: if it is another training's.
        """
        step = NOTHING
        if self._rank == 0:
            # Rank 0 alone checks every byte; the others follow the step that it names.
            checkpoint = newest(self._folder)
            for reason in checkpoint.passed_over:
                self._events.write("checkpoint_damaged", reason=reason)
            step = checkpoint.manifest.step if checkpoint.manifest is not None else NOTHING
        step = self._told_by_first(step)
        if step == NOTHING:
            return 0
        folder = step_folder(self._checkpoints, step)
        manifest = read_manifest(folder)
        manifest.check_goes_on(self._config)
        with CheckpointTensors(folder, manifest) as source:
            self._engine.restore(source)
            self._engine.restore_buffers(source)
            _restore_random(source, self._rank)
        self.newest_step = step
        event_fields = {"step": step, "checkpoint": folder.name, "layout": manifest.layout.title}
        if self._engine.left_out:
            warnings.warn(self._engine.left_out, stacklevel=2)
            event_fields["left_out"] = self._engine.left_out
        self._events.write("resumed", **event_fields)
        return step

    def save(self, step: int) -> bool:
        """Save the state after so many steps; returns whether there is a checkpoint of it. A collective call.

        Failures, e.g. of a full disk, are reported in an event and end nothing.
        """
        started_s = time.perf_counter()
        self.problem = ""
        writer = self._begin(step)
        try:
            # All ranks go through all tensors, also once a write has failed: gathering is collective.
            for name, tensor in self._state():
                if writer is not None and not self._try(
                    writer, partial(CheckpointWriter.add, name=name, tensor=tensor)
                ):
                    writer = None
            if writer is not None and self._try(writer, CheckpointWriter.commit):
                with contextlib.suppress(OSError):
                    keep_newest(self._checkpoints, self._policy.keep, step)
        except LabError as error:  # a layout that cannot be kept: every rank is told so
            self.problem = str(error)
        finally:
            if writer is not None:
                writer.abandon()  # stopped meanwhile; what is committed stays
        is_saved = self._told_by_first(step if not self.problem else NOTHING) == step
        if is_saved:
            self.newest_step = step
            self._events.write("checkpoint", step=step, took_s=time.perf_counter() - started_s)
        elif self._rank == 0:
            self._events.write("checkpoint_failed", step=step, reason=self.problem)
        return is_saved

    def after_step(self, steps_done: int, stop: bool) -> str:
        """Save a checkpoint where one is due, or the run is to stop; returns why it ends, else nothing.

        Args:
            stop: whether any rank must stop; the same on all ranks. A run that is finished is not stopped.
        """
        stop = stop and steps_done < self._config.steps
        if stop or self._policy.due(steps_done):
            self.save(steps_done)
        return self._stopped(steps_done) if stop else ""

    def _stopped(self, steps_done: int) -> str:
        """Why a stopped run has ended, and how it is resumed."""
        sentence = (
            f"it was told to stop before the time limit (SIGUSR2), after {steps_done} of {self._config.steps} steps; "
        )
        if self.newest_step == steps_done:
            return (
                f"{sentence}a checkpoint holds them all: run the same configuration again, and it goes on from there, "
                "unless another run of it has completed, which is shown then; the same job script goes on in any case."
            )
        reason = self.problem.rstrip(".") or "rank 0 could not write"
        restart = (
            f"step {self.newest_step}, of which there is a checkpoint" if self.newest_step > 0 else "the beginning"
        )
        return f"{sentence}they could not be kept ({reason}): run again, it goes on from {restart}."

    def _begin(self, step: int) -> CheckpointWriter | None:
        """Writer on rank 0; None where there is a valid checkpoint of this step, or no room for one."""
        if self._rank or already_there(self._checkpoints, step):
            return None
        from dlojz.prediction.compute import checkpoint_bytes

        try:
            return CheckpointWriter(self._checkpoints, self._config, step, needed_bytes=checkpoint_bytes(self._config))
        except (OSError, LabError) as error:
            self.problem = str(error)
            return None

    def _try(self, writer: CheckpointWriter, act: Callable[[CheckpointWriter], object]) -> bool:
        try:
            act(writer)
        except (OSError, LabError) as error:
            self.problem = str(error)
            writer.abandon()
            return False
        return True

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """The whole state, in the same order on all ranks; whole tensors, needed on rank 0."""
        yield from self._engine.states()
        rank_state = _random_state(self._rank)
        buffers = self._engine.whole_buffers()
        # Whole along the tensor axis, they are the same on all its ranks: one of them is enough.
        if self._engine.axes.tp_rank == 0:
            rank_state |= {name: buffer.cpu() for name, buffer in buffers.items()}
        yield from _collected(rank_state, self._control)

    def _told_by_first(self, number: int) -> int:
        """Rank 0's number, on every rank."""
        if self._control is None:
            return number
        message = torch.tensor([number])
        # Who: rank 0 to all others, in the lab's own control group. What: a step, or that there is none. How much: 8
        # bytes, once at the start of a run and once per checkpoint.
        dist.broadcast(message, src=0, group=self._control)
        return int(message)


def _collected(rank_state: dict[str, Tensor], control: dist.ProcessGroup | None) -> Iterator[tuple[str, Tensor]]:
    """Rank 0: the tensors of all ranks, one rank after the other, each name once; the others: none."""
    if control is None:
        yield from rank_state.items()
        return
    contiguous = {name: tensor.contiguous() for name, tensor in rank_state.items()}
    packed = torch.frombuffer(bytearray(save(contiguous)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(control.size())]
    # Who: all ranks, in the control group. What: how many bytes each has to tell. How much: 8 bytes from each.
    dist.all_gather(sizes, torch.tensor([packed.numel()]), group=control)
    # Who: each rank to rank 0. What: its replica's BatchNorm statistics and its random numbers. How much: their bytes,
    # and 5 KiB.
    if control.rank() > 0:
        dist.send(packed, group=control, group_dst=0)
        return
    yielded_names = set(rank_state)
    yield from rank_state.items()
    for rank in range(1, control.size()):
        received = torch.empty(int(sizes[rank]), dtype=torch.uint8)
        dist.recv(received, group=control, group_src=rank)
        for name, tensor in load(received.numpy().tobytes()).items():
            if name not in yielded_names:
                yielded_names.add(name)
                yield name, tensor


def _random_state(rank: int) -> dict[str, Tensor]:
    """States of torch's own generators on this rank."""
    states = {f"random.{rank}/cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[f"random.{rank}/cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random(source: CheckpointTensors, rank: int) -> None:
    """Restore this rank's generators; a rank that was not there before keeps its own numbers."""
    if source.has(name := f"random.{rank}/cpu"):
        torch.set_rng_state(source.tensor(name))
    if source.has(name := f"random.{rank}/cuda") and torch.cuda.is_available():
        torch.cuda.set_rng_state(source.tensor(name))
