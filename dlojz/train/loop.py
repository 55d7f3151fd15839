"""The training loop: one for every engine.

Layer 3. Invariant: a loss that is not finite on any rank is known to all ranks before the update, so that no rank
trains on after another has diverged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz import data as datasets
from dlojz import models
from dlojz.checkpoint_policy import read_policy
from dlojz.config import RunConfig
from dlojz.curriculum import length_at
from dlojz.data.lengths import CutToLength
from dlojz.data.sampling import MicroBatchSampler, micro_batches
from dlojz.layout_experts import routing_of
from dlojz.moe.parallel import mixtures
from dlojz.record import EventLog, Status
from dlojz.schema import LabError
from dlojz.train import engines
from dlojz.train.engines.pipeline import PipelineEngine
from dlojz.train.mixtures import LoadWatch
from dlojz.train.probes.probes import Probes
from dlojz.train.resume import Keeper
from dlojz.train.stop import StopRequest, ignore_stop_signal
from dlojz.train.telling import align_clocks, finish, leave, tell_measured, write_footprint

GROUP_TIMEOUT = timedelta(minutes=5)


def choose_device(config: RunConfig, local_rank: int) -> torch.device:
    """The device of this rank.

    Raises:
        LabError: if there are fewer GPUs than ranks on this node.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LabError(
            f"rank {local_rank} of this node has no GPU of its own: {config.layout.world_size} ranks were asked for, "
            f"but {torch.cuda.device_count()} GPUs are here; use fewer ranks or device='cpu'."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def describe_device(device: torch.device) -> str:
    """What a rank computes on, in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def init_process_group(folder: Path, device: torch.device, rank: int, world_size: int) -> None:
    """Join the ranks: through the launcher's store where there is one, else through a file of the run folder."""
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    # Not as `file://`: a folder's name may hold what ends the path of an address.
    store = None if "MASTER_ADDR" in os.environ else dist.FileStore(str(folder.resolve() / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


class SamplerFrom(MicroBatchSampler):
    """The sampler of a run that goes on: the micro-batches of the steps that are finished are not read again.

    Args:
        skipped: micro-batches of this replica that were used.
        num_samples, sizes: see `MicroBatchSampler`.
    """

    def __init__(self, skipped: int, num_samples: int, **sizes: int) -> None:
        super().__init__(num_samples, **sizes)
        self._skipped = skipped

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), self._skipped, None)


def open_batches(config: RunConfig, dp_rank: int, first_step: int = 0) -> CutToLength:
    """This replica's micro-batches from a step on, without end, their samples as long as their step has them."""
    layout = config.layout
    dataset = datasets.load(
        config.data_name,
        family=models.spec(config.model).family,
        num_classes=config.num_classes,
        seed=config.seed,
        image_size=config.image_size,
        sequence_length=config.sequence_length,
        data_root=config.data_root,
    )
    sampler = SamplerFrom(
        first_step * layout.micro_batches,
        len(dataset),  # type: ignore[arg-type]
        micro_batch=layout.micro_batch,
        global_batch=layout.global_batch,
        dp=layout.dp,
        dp_rank=dp_rank,
        seed=config.seed,
    )
    workers = 4 if config.data_name == "imagenet" else 0
    whole = micro_batches(dataset, sampler, num_workers=workers, worker_init_fn=ignore_stop_signal)
    length_of = partial(length_at, config) if config.sequence_length is not None else None
    return CutToLength(whole, length_of, micro_batches=layout.micro_batches, first_step=first_step)


def build_model(config: RunConfig) -> torch.nn.Module:
    """The model of a run, with the same weights on every rank and in every layout."""
    torch.manual_seed(config.seed)
    model = models.build(
        config.model,
        image_size=config.image_size,
        sequence_length=config.sequence_length,
        num_classes=config.num_classes,
        checkpointing=config.layout.checkpointing,
        routing=routing_of(config),
    )
    for _, mixture in mixtures(model):
        mixture.auxiliary_scale = 1 / config.layout.micro_batches
    return model


def accumulate(
    engine: engines.Engine, batches: Iterator[tuple[Tensor, Tensor]], micro_batches: int, probes: Probes | None
) -> Tensor:
    """Forward and backward of one step's micro-batches; returns their mean loss (a scalar on the device).

    In a pipeline it is this rank's part of it, and the mean over all ranks the loss: see `PipelineEngine.run`.
    """
    if isinstance(engine, PipelineEngine):
        samples = [engine.take(*_read(engine, batches, probes)) for _ in range(micro_batches)]
        with probes.clock.pipeline() if probes else nullcontext():
            return engine.run(samples)
    losses = []
    for index in range(micro_batches):
        last = index == micro_batches - 1
        inputs, targets = _read(engine, batches, probes)
        loss = engine.forward(inputs, targets, last=last)
        engine.backward(loss, last=last)
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def _read(
    engine: engines.Engine, batches: Iterator[tuple[Tensor, Tensor]], probes: Probes | None
) -> tuple[Tensor, Tensor]:
    """The next micro-batch, on the device."""
    if probes is None:
        inputs, targets = (tensor.to(engine.device) for tensor in next(batches))
        return inputs, targets
    with probes.clock.phase("data"):
        with probes.loading():
            samples = next(batches)
        inputs, targets = (tensor.to(engine.device) for tensor in samples)
        probes.loaded(inputs, targets)
    return inputs, targets


def agree(loss: Tensor, stop: bool, control: dist.ProcessGroup | None) -> tuple[float, bool]:
    """Mean loss of the global batch, and whether any rank was told to stop: the same on every rank.

    The loss is NaN or infinite on every rank if it is so on one.
    """
    if control is None:
        return float(loss), stop
    message = torch.tensor([float(loss), float(stop)])
    # Who: all ranks, in the lab's own control group. What: one loss and one flag in fp32, summed. How much: 8 bytes per
    # step.
    dist.all_reduce(message, group=control)
    return float(message[0]) / control.size(), bool(message[1] > 0)


def train(
    config: RunConfig,
    folder: Path,
    events: EventLog,
    *,
    rank: int,
    local_rank: int,
    stop: StopRequest | None = None,
) -> tuple[Status, str]:
    """Train on this rank and write what happens into `events`; returns how it ended and why.

    A run whose folder holds a checkpoint goes on from it. When `stop` is wanted on any rank, all of them finish the
    step, keep a checkpoint and end with status `timeout`.
    """
    train_so = _train_with_own_engine
    if config.library != "none":  # then it is the library's loop that trains
        from dlojz.libraries.training import train_as_written as train_so
    return train_so(config, folder, events, rank=rank, local_rank=local_rank, stop=stop or StopRequest())


def _train_with_own_engine(
    config: RunConfig, folder: Path, events: EventLog, *, rank: int, local_rank: int, stop: StopRequest
) -> tuple[Status, str]:
    layout = config.layout
    device = choose_device(config, local_rank)
    init_process_group(folder, device, rank, layout.world_size)
    control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if layout.world_size > 1 else None
    events.write("device", device=describe_device(device))
    probes = Probes(config, rank, device, control)
    parameters = 0
    probes.start()
    try:
        model = build_model(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        engine = engines.build(config, model, device)
        del model  # a pipeline rank keeps its stages only
        probes.attach(engine)
        watch = LoadWatch(engine)
        keeper = Keeper(config, folder, read_policy(folder), events, engine, control)
        with probes.loading():
            first_step = keeper.resume()
            batches = open_batches(config, rank // layout.tp % layout.dp, first_step)
        probes.begin_at(first_step)
        ended: tuple[Status, str] = ("completed", "")
        if control is not None:
            align_clocks(probes, control, events)
        for step in range(first_step, config.steps):
            probes.start_step(step)
            mean = accumulate(engine, batches, layout.micro_batches, probes)
            loss, stopping = agree(mean, stop.wanted, control)
            if not math.isfinite(loss):
                ended = (
                    "diverged",
                    f"the loss became {loss} at step {step}; the weights were "
                    f"{'' if config.update == 'in_backward' else 'not '}updated with it. "
                    f"Try a smaller learning rate than {config.learning_rate:g}.",
                )
                break
            engine.update()
            step_s = probes.end_step()
            watch.tell(events, step)
            tokens = batches.take_tokens() * layout.dp
            events.write("step", step=step, loss=loss, step_s=step_s, **({"tokens": tokens} if tokens else {}))
            tell_measured(events, probes, step, rank, parameters)
            with probes.loading():
                stopped = keeper.after_step(step + 1, stopping)
            if stopped:
                ended = ("timeout", stopped)
                break
    finally:
        # However it ends, a stopped run included: what was measured is told.
        probes.close()
        write_footprint(events, probes, parameters)
        events.write("spans", spans=[span.to_dict() for span in probes.clock.spans()])
    if ended[0] == "timeout":
        leave(engine)  # there is no time to lose
    else:
        finish(config, folder, events, engine, rank)
    return ended
