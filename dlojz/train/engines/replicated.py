"""Engines that keep the whole model on each rank: DDP, DDP by hand, optimizers that communicate, updates in backward.

- torch's DistributedDataParallel: gradients are averaged by all-reduce (Li et al. 2020, "PyTorch Distributed:
  Experiences on Accelerating Data Parallel Training", arXiv 2006.15704), whole, or by torch's hooks in half the bytes
  or as the product of two thin matrices (torch 2.13, `distributed/algorithms/ddp_comm_hooks/default_hooks.py` and
  `powerSGD_hook.py`; Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2).
- The lab's DataParallel (`dlojz.by_hand.ddp`). With `update="in_backward"` a bucket is averaged, used and freed while
  backward runs; the weights are those of an update after backward, bit for bit (Jiang et al. 2021, "Optimizer Fusion",
  arXiv 2104.00237; see `dlojz.by_hand.optimizers.in_backward`).
- Optimizers that reduce themselves (`dlojz.by_hand.optimizers`): no gradient is averaged before the step; after a step
  that sends, all ranks hold the same weights (Tang et al. 2021, "1-bit Adam", arXiv 2102.02888).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dlojz.by_hand.ddp import DataParallel, _Flight, pieces_of
from dlojz.by_hand.optimizers.adam import OneBitAdam, ZeroOneAdam
from dlojz.by_hand.optimizers.communicating import Communicating
from dlojz.by_hand.optimizers.lamb import OneBitLamb
from dlojz.by_hand.optimizers.local_sgd import DiLoCo, LocalSGD, LocalSteps
from dlojz.config.layout import Layout
from dlojz.config.schedules import powersgd_restart_note, powersgd_start, resized_note
from dlojz.prediction.shapes import bucket_bytes_of
from dlojz.results.footprint import Overlap
from dlojz.train.checkpoint_tensors import CheckpointTensors
from dlojz.train.engines.base import Engine, Inventory, PassOptimizer, make_optimizer
from dlojz.train.engines.tensor_engines import PlainParameters

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
"""Maps a state and a bucket to a future of the bucket's averaged gradients."""
TINY = 1e-8
"""Added to the norm of a column before it divides: a layer without a gradient has columns of zeros."""


def attach_hook(
    model: DistributedDataParallel, layout: Layout, *, steps: int, group: dist.ProcessGroup | None
) -> powersgd.PowerSGDState | None:
    """Attach the layout's hook to a model's buckets; returns PowerSGD's state, else None.

    Args:
        model: wrapped by DDP, with no hook yet.
        steps: of the run, of which PowerSGD leaves the first ones alone (`schedules.powersgd_start`).
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
    """List the tensors that PowerSGD keeps from step to step: the errors of each bucket, P and Q."""
    tables = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
    return [tensor for tensors in tables for tensor in tensors.values()]


class DDPEngine(Engine):
    """Engine of torch's DDP over all replicas."""

    powersgd: PowerSGDState | None
    """State of PowerSGD, where gradients leave so."""

    def wrap(self, module: nn.Module) -> nn.Module:
        # BatchNorm statistics stay each rank's own, as in the sharded engines: broadcasting them would be one more
        # collective per step that has no part in the gradient. Newer torch renames the option, older knows only this.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        layout = self.config.layout
        options: dict[str, Any] = {"gradient_as_bucket_view": layout.gradient_as_bucket_view}
        if layout.bucket_mib is not None:  # given, it holds for the first bucket too
            options["bucket_cap_mb"] = layout.bucket_mib
        if self.device.type == "cuda":
            options["device_ids"] = [self.device.index]
        group = self.axes.group("dp")
        module = module.to(self.device)
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):  # which DDP does not take
            module = PlainParameters(module)
        model = DistributedDataParallel(module, process_group=group, broadcast_buffers=False, **options)
        model._set_ddp_runtime_logging_sample_rate(1)  # a few clock readings per step: it times every step
        self.powersgd = attach_hook(model, layout, steps=self.config.steps, group=group)
        return model

    def forward(self, inputs: Tensor, targets: Tensor, *, is_last: bool) -> Tensor:
        # Who: all dp ranks, in the last micro-batch's backward only. What: every gradient, in buckets, all-reduced
        # (mean). How much: 4 bytes per parameter and step, or what `gradient_hooks` makes of it.
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = is_last
        return super().forward(inputs, targets, is_last=is_last)

    def update(self) -> None:
        self.optimizer.step()
        # A gradient that is a view of its bucket stays there, as zeros: forgotten, it would be made anew elsewhere by
        # the first micro-batch, and accumulated beside the bucket.
        self.optimizer.zero_grad(set_to_none=not self.config.layout.gradient_as_bucket_view)

    def inventory(self) -> Inventory:
        """List also PowerSGD's errors, P and Q."""
        inventory = super().inventory()
        if self.powersgd is not None:
            inventory["optimizer"] += held(self.powersgd)
        return inventory

    def restore_buffers(self, source: CheckpointTensors) -> None:
        """Restore the buffers; PowerSGD begins anew, as its errors belong to buckets that DDP has yet to fill.

        Raises:
            LabError: if the buffers are another model's.
        """
        super().restore_buffers(source)
        if self.powersgd is not None:
            self.left_out = powersgd_restart_note(self.powersgd.start_powerSGD_iter)

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield plain tensors as updated ones with tensor parallelism; they share the DTensors' memory."""
        plain = {}
        if isinstance(self.model.module, PlainParameters):
            plain = {name.replace("/", "."): tensor for name, tensor in self.model.module.plain.items()}
        for name, parameter in self.module.named_parameters():
            yield name, parameter, plain.get(name, parameter)

    def communications(self) -> Overlap | None:
        """Read torch's reducer: the first bucket's departure, the last one's arrival, and pauses between.

        Source: torch `csrc/distributed/c10d/logger.cpp`, `set_runtime_stats_and_log`.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return None
        logger: Any = self.model.logger
        logger.set_runtime_stats_and_log()  # otherwise told in the next forward only
        told_ns = self.model._get_ddp_logging_data()
        if "backward_comm_time" not in told_ns:
            return None
        left_s = told_ns["backward_comm_time_start"] / 1e9 - (time.time() - time.perf_counter())
        arrived_s = left_s + told_ns["backward_comm_time"] / 1e9
        hidden_s = told_ns["backward_compute_comm_overlap_time"] / 1e9
        return Overlap.after_backward(((left_s, arrived_s),), left_s + hidden_s)


class ByHandEngine(Engine):
    """Engine of the lab's DataParallel over all replicas."""

    data_parallel: type[DataParallel] = DataParallel

    def wrap(self, module: nn.Module) -> nn.Module:
        group = self.axes.group("dp")
        return self.data_parallel(module.to(self.device), bucket_bytes=bucket_bytes_of(self.config), group=group)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        model = cast(DataParallel, self.model)
        if not is_last:
            with model.no_sync():
                super().backward(loss, is_last=is_last)
            return
        # Who: all dp ranks, in the last micro-batch's backward only. What: every gradient, in buckets, all-reduced
        # (sum, then divided). How much: 4 bytes per parameter and step.
        super().backward(loss, is_last=is_last)
        model.synchronize()

    def communications(self) -> Overlap | None:
        """Return the model's own timing, bucket by bucket."""
        return cast(DataParallel, self.model).timing


_OPTIMIZERS: dict[str, type[OneBitAdam] | type[OneBitLamb] | type[ZeroOneAdam]] = {
    "one_bit_adam": OneBitAdam,
    "one_bit_lamb": OneBitLamb,
    "zero_one_adam": ZeroOneAdam,
}


class CommunicatingEngine(Engine):
    """Engine of one replica per rank, averaged by an optimizer of `dlojz.by_hand.optimizers`."""

    optimizer: Communicating | LocalSteps

    def make_optimizer(self) -> Communicating | LocalSteps:
        """Make the optimizer, with the ranks over which it averages."""
        config, group = self.config, self.axes.group("dp")
        options: dict[str, Any] = {"weight_decay": config.weight_decay, "total_steps": config.steps, "group": group}
        parameters, rate, warmup_steps = self.model.parameters(), config.learning_rate, config.warmup_steps or 0
        if config.optimizer == "local_sgd":
            options["warmup_steps"] = warmup_steps
            return LocalSGD(parameters, rate, local_steps=config.local_steps or 1, **options)
        if config.optimizer == "diloco":
            return DiLoCo(parameters, rate, local_steps=config.local_steps or 1, **options)
        return _OPTIMIZERS[config.optimizer](parameters, rate, warmup_steps=warmup_steps, **options)

    def inventory(self) -> Inventory:
        inventory = super().inventory()
        compressor = getattr(self.optimizer, "compressor", None)
        if compressor is not None:
            inventory["optimizer"] += [compressor.worker_error, compressor.server_error]
        return inventory

    def whole_buffers(self) -> dict[str, Tensor]:
        """Return also the own states of this rank's optimizer, by `own.RANK/NAME`."""
        local_states = {
            f"own.{self.axes.dp_rank}/{name}": tensor for name, tensor in self.optimizer.own_states().items()
        }
        return super().whole_buffers() | local_states

    @torch.no_grad()
    def restore_buffers(self, source: CheckpointTensors) -> None:
        """Restore also the own states of the same rank's optimizer; with another number of ranks none, which is said.

        Raises:
            LabError: if the buffers are another model's.
        """
        super().restore_buffers(source)
        if isinstance(self.optimizer, LocalSteps):
            self.optimizer.taken = source.updates
        ranks, saved_ranks = self.config.layout.dp, _kept_ranks(source)
        if saved_ranks == ranks:
            kind = f"own.{self.axes.dp_rank}"
            self.optimizer.take_own_states({name: source.tensor(f"{kind}/{name}") for name in source.names(kind)})
        elif saved_ranks:
            self.left_out = resized_note(self.config.optimizer, saved_ranks, ranks)


def _kept_ranks(source: CheckpointTensors) -> int:
    """Number of ranks whose own states were kept, the first counted even where it had none."""
    ranks = 1
    while source.names(f"own.{ranks}"):
        ranks += 1
    return ranks if ranks > 1 else 0


class UpdatingDataParallel(DataParallel):
    """The lab's DataParallel, which updates each parameter as soon as its gradient is averaged.

    A bucket's gradients are freed once they are copied into its message, and the message once the next bucket has left:
    of 4Ψ bytes there are two buckets under way and the gradients of a third at most. Backward so waits for a bucket
    before it passes the next one, which may cost overlap.
    """

    hand_on: Callable[[Tensor], None]
    """Updates a parameter and frees its gradient; set before the first backward pass."""

    def _send(self) -> None:
        if self._next == 0:
            self._arrived = []
        bucket = self.buckets[self._next]
        super()._send()
        if self.size == 1:  # nobody to wait for: the optimizer's own hooks have done it
            return
        for parameter in bucket:
            parameter.grad = None
        while len(self._flying) > 1:
            self._arrive(self._flying.pop(0))

    def _arrive(self, flight: _Flight) -> None:
        bucket, mean = self.buckets[flight.bucket], flight.wait().div_(self.size)
        for parameter, piece in zip(bucket, pieces_of(mean, [parameter.shape for parameter in bucket]), strict=True):
            parameter.grad = piece
            self.hand_on(parameter)
        self._arrived.append((flight.bucket, flight.num_bytes, flight.left, flight.arrived))

    @torch.no_grad()
    def synchronize(self) -> None:
        """Send the remaining buckets, wait for the last ones, and update their parameters."""
        self._compute_end = self._watch.now()
        try:
            while self._next < len(self.buckets):
                self._send()
            while self._flying:
                self._arrive(self._flying.pop(0))
        finally:
            self._begin_step()


class ByHandInBackwardEngine(ByHandEngine):
    """Engine of the lab's DataParallel with an update per bucket, within the backward pass.

    Who: all dp ranks, while backward goes on. What: every gradient, in buckets, all-reduced (sum, then divided). How
    much: 4 bytes per parameter and step, as without.
    """

    data_parallel = UpdatingDataParallel

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimizer of a bucket's parameters as it arrives; one process waits for no bucket."""
        model = cast(UpdatingDataParallel, self.model)
        make = partial(make_optimizer, self.config)
        optimizer = PassOptimizer(self.module, self.config, make, hooked=model.size == 1)
        model.hand_on = optimizer.passes.update
        return optimizer
