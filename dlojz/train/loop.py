"""Train: the loop of every rank, from process group to last checkpoint, and the events that it reports.

One loop serves every engine. A loss that is not finite on any rank is known to all ranks before the update, so that no
rank trains on after another has diverged. What was measured is in the event file before anything that can fail after
it. Final weights are safetensors, written atomically.

Clocks of the ranks are aligned with rank 0's; half of the shortest round trip is the uncertainty. Source: Cristian
1989, "Probabilistic clock synchronization" (Distributed Computing 3), §4.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dlojz import data as datasets
from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.machine import StopRequest, ignore_stop_signal
from dlojz.by_hand.chunked_loss import chunk_loss
from dlojz.by_hand.context_parallel import own_tokens
from dlojz.config.fields import block_choices
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import length_at
from dlojz.data.datasets import CutToLength, MicroBatchSampler, micro_batches
from dlojz.models.experts.layer import mixtures
from dlojz.prediction.shapes import count_parameters
from dlojz.results.record import EventLog, Status
from dlojz.train.checkpoint_files import read_policy
from dlojz.train.checkpoints import CheckpointManager
from dlojz.train.engines import base
from dlojz.train.probes import Probes

if TYPE_CHECKING:
    from dlojz.train.engines.base import Engine

ROUND_TRIPS = 12


class ClockOffset(NamedTuple):
    """Offset from this rank's `time.perf_counter` to rank 0's, and its uncertainty."""

    offset_s: float
    uncertainty_s: float


def offset_to_first(group: dist.ProcessGroup | None, clock: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Compare this rank's clock with rank 0's; a collective call.

    Args:
        group: all ranks, of a backend that communicates from the CPU; None with one process.
    """
    if group is None or group.size() == 1:
        return ClockOffset(0.0, 0.0)
    message = torch.zeros(1, dtype=torch.float64)
    best = ClockOffset(0.0, float("inf"))
    for peer in range(1, group.size()):
        for _ in range(ROUND_TRIPS):
            # Who: rank 0 and one other. What: a question and the time as the answer. How much: 8 bytes each way.
            if group.rank() == 0:
                dist.recv(message, peer, group=group)  # of all ranks: each has the same number in it
                message.fill_(clock())
                dist.send(message, peer, group=group)
            elif group.rank() == peer:
                asked_s = clock()
                dist.send(message, 0, group=group)
                dist.recv(message, 0, group=group)
                answered_s = clock()
                # Rank 0 has read its clock somewhere within the round trip: in the middle, give or take half of it.
                half_s = (answered_s - asked_s) / 2
                if half_s < best.uncertainty_s:
                    best = ClockOffset(float(message) - asked_s - half_s, half_s)
    return best if group.rank() else ClockOffset(0.0, 0.0)


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Hash names, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().float().contiguous()
        # The shape too: without it a matrix and its flattened copy would have one hash.
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write all weights as safetensors, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


FOOTPRINT_EVERY = 10
"""Steps between two footprints in the event file, which a killed run leaves behind."""


def align_clocks(probes: Probes, control: dist.ProcessGroup, events: EventLog) -> None:
    """Align the timelines of all ranks with one moment of rank 0's clock."""
    clock = offset_to_first(control)
    # Who: all ranks, once, in the control group. What: that all are there, then rank 0's time. How much: 8 bytes.
    dist.barrier(group=control)
    origin_s = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.broadcast(origin_s, src=0, group=control)
    probes.clock.align(float(origin_s) - clock.offset_s)
    events.write("clock", offset_s=clock.offset_s, uncertainty_s=clock.uncertainty_s)


def report_measured(events: EventLog, probes: Probes, step: int, rank: int, parameters: int) -> None:
    """Write the measurements that are due at the end of a step."""
    if step == probes.steady_step and rank == 0:
        events.write("memory_timeline", samples=[sample.to_dict() for sample in probes.timeline])
    if step == probes.steady_step or step % FOOTPRINT_EVERY == FOOTPRINT_EVERY - 1:
        write_footprint(events, probes, parameters)


def write_footprint(events: EventLog, probes: Probes, parameters: int) -> None:
    """Write all measurements so far."""
    if (footprint := probes.footprint(parameters)) is not None:
        events.write("footprint", footprint=footprint.to_dict())


def finish(config: RunConfig, folder: Path, events: EventLog, engine: base.Engine, rank: int) -> None:
    """Checksum (and, if asked, save) the final weights, then leave."""
    if rank == 0:
        weights = dict(engine.weights())
        events.write("weights", sha256=weights_sha256(weights))
        if config.keep_weights:
            save_weights(folder / "weights.safetensors", weights)
    else:
        # Gathering is a collective call: every rank takes part, rank 0 alone keeps the result.
        for _ in engine.weights():
            pass
    leave(engine)


def leave(engine: base.Engine) -> None:
    """Leave the process group in good order."""
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


class LoadWatch:
    """Record what the experts of a model were given within one step on this rank; nothing is sent.

    Args:
        engine: its backward pass is watched if its model has mixtures, so that a forward pass that checkpointing runs
            again is recorded once.
    """

    def __init__(self, engine: Engine) -> None:
        modules = engine.module.named_modules() if hasattr(engine, "module") else ()
        self._layers = [
            (name, layer) for name, layer in modules if hasattr(layer, "routing") and hasattr(layer, "last")
        ]
        self._loads: dict[str, list[Any]] = {}
        if self._layers:
            self._watch(engine)

    def _watch(self, engine: Engine) -> None:
        backward = engine.backward

        def noting(loss: Tensor, *, is_last: bool) -> None:
            for name, layer in self._layers:
                # Before the pass itself, in which recomputation sets `last` anew.
                self._loads.setdefault(name, []).append(layer.last)
            backward(loss, is_last=is_last)

        engine.backward = noting  # type: ignore[method-assign]

    def report(self, events: EventLog, step: int) -> None:
        """Write the step's loads, one per mixture, summed over its micro-batches, and start again at zero."""
        if not self._layers:
            return
        layers = [
            {
                "layer": name,
                "tokens": sum(load.tokens_E for load in loads).tolist(),
                "capacity": sum(load.capacity for load in loads),
                "dropped": float(sum(load.dropped_share for load in loads)) / len(loads),
            }
            for name, loads in self._loads.items()
        ]
        self._loads = {}
        events.write("experts", step=step, layers=layers)


GROUP_TIMEOUT = timedelta(minutes=5)


def choose_device(config: RunConfig, local_rank: int) -> torch.device:
    """Choose the device of this rank.

    Raises:
        LabError: if there are fewer GPUs than ranks on this node.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LabError(
            f"rank {local_rank} of this node has no GPU: {config.layout.world_size} ranks were asked for, "
            f"but {torch.cuda.device_count()} GPUs are here; use fewer ranks or device='cpu'."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def describe_device(device: torch.device) -> str:
    """Name the device of a rank."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def init_process_group(folder: Path, device: torch.device, rank: int, world_size: int) -> None:
    """Join the ranks: through the launcher's store if there is one, else through a file of the run folder."""
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    # Not as `file://`: a folder's name may hold what ends the path of an address.
    store = None if "MASTER_ADDR" in os.environ else dist.FileStore(str(folder.resolve() / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


def open_dataset(config: RunConfig) -> Any:
    """Open the data set of a run, its samples as the model reads them."""
    spec = models.spec(config.built_model)
    tokens, targets = config.sequence_length, config.target_length
    return datasets.load(
        config.data_name,
        family=spec.family,
        num_classes=config.num_classes,
        seed=config.seed,
        image_size=config.image_size,
        sequence_length=(tokens, targets) if tokens and targets else tokens,
        data_root=config.data_root,
        example=spec.example,
    )


def open_batches(config: RunConfig, dp_rank: int, first_step: int = 0, *, cp_rank: int = 0) -> CutToLength:
    """Open this replica's endless micro-batches from a step on, their samples as long as their step has them.

    With context parallelism this rank's tokens of each sample, in zigzag order.
    """
    layout = config.layout
    dataset = open_dataset(config)
    sampler = MicroBatchSampler(
        len(dataset),
        micro_batch=layout.micro_batch,
        global_batch=layout.global_batch,
        dp=layout.dp,
        dp_rank=dp_rank,
        seed=config.seed,
        skipped=first_step * layout.micro_batches,
    )
    workers = 4 if config.data_name == "imagenet" else 0
    batches = micro_batches(dataset, sampler, num_workers=workers, worker_init_fn=ignore_stop_signal)
    cuts = config.sequence_length is not None and config.target_length is None
    length_of = partial(length_at, config) if cuts else None
    token_slice = partial(own_tokens, rank=cp_rank, size=layout.cp, order="zigzag") if layout.cp > 1 else None
    return CutToLength(batches, length_of, micro_batches=layout.micro_batches, first_step=first_step, own=token_slice)


def build_model(config: RunConfig) -> torch.nn.Module:
    """Build the model of a run, with the same weights on every rank and in every layout."""
    torch.manual_seed(config.seed)
    model = models.build(
        config.built_model,
        image_size=config.image_size,
        sequence_length=config.sequence_length,
        num_classes=config.num_classes,
        checkpointing=config.layout.checkpointing,
        routing=config.routing,
    )
    if config.layout.loss_chunks > 1:
        chunk_loss(model, config.layout.loss_chunks)
    if config.layout.activation_plan:
        model.plan_activations(block_choices(config.layout.activation_plan))
    for _, mixture in mixtures(model):
        mixture.auxiliary_scale = 1 / config.layout.micro_batches
    return model


def _build_engine(config: RunConfig, device: torch.device, probes: Probes) -> tuple[base.Engine, int]:
    """Build this rank's engine, and count the parameters of the whole model."""
    with probes.loading():
        models.spec(config.built_model)  # reads a file of one's own, whose example inputs are no part of a training
    model = build_model(config)
    # Before an engine shards them; bytes of quantized layers are not one weight each.
    plain = config.lora_base == "none"
    parameters = sum(weight.numel() for weight in model.parameters()) if plain else count_parameters(config)
    # A pipeline rank keeps its stages only: the whole model is gone after the return.
    return base.build(config, model, device), parameters


def accumulate(
    engine: base.Engine, batches: Iterator[tuple[Tensor, Tensor]], micro_batches: int, probes: Probes | None
) -> Tensor:
    """Run forward and backward of one step's micro-batches; returns their mean loss (a scalar on the device).

    In a pipeline it is this rank's part of it, and the mean over all ranks is the loss: see `PipelineEngine.run`.
    """
    if engine.config.layout.pp > 1:
        from dlojz.train.engines.pipeline_engines import PipelineEngine  # loads the schedules and their simulator

        assert isinstance(engine, PipelineEngine)
        samples = [engine.take(*_read(engine, batches, probes)) for _ in range(micro_batches)]
        with probes.clock.pipeline() if probes else nullcontext():
            return engine.run(samples)
    losses = []
    for index in range(micro_batches):
        is_last = index == micro_batches - 1
        inputs, targets = _read(engine, batches, probes)
        loss = engine.forward(inputs, targets, is_last=is_last)
        engine.backward(loss, is_last=is_last)
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def _read(
    engine: base.Engine, batches: Iterator[tuple[Tensor, Tensor]], probes: Probes | None
) -> tuple[Tensor, Tensor]:
    """The next micro-batch, on the device."""
    if probes is None:
        inputs, targets = tree_map(lambda tensor: tensor.to(engine.device), next(batches))
        return inputs, targets
    with probes.clock.phase("data"):
        with probes.loading():
            samples = next(batches)
        inputs, targets = tree_map(lambda tensor: tensor.to(engine.device), samples)
        probes.loaded(*tree_leaves((inputs, targets)))
    return inputs, targets


def diverged(loss: float, step: int, config: RunConfig, *, updated: bool) -> str:
    """Explain the end of a run whose loss is no number."""
    return (
        f"the loss became {loss} at step {step}; the weights were {'' if updated else 'not '}updated with it. "
        f"Try a smaller learning rate than {config.learning_rate:g}."
    )


def agree(loss: Tensor, stop: bool, control: dist.ProcessGroup | None) -> tuple[float, bool]:
    """Average the loss over the global batch, and tell whether any rank must stop: the same on every rank.

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
    config: RunConfig, folder: Path, events: EventLog, *, rank: int, local_rank: int, stop: StopRequest | None = None
) -> tuple[Status, str]:
    """Train on this rank and write events; returns how it ended and why.

    A run whose folder holds a checkpoint resumes it. When `stop` is wanted on any rank, all of them finish the step,
    write a checkpoint and end with status `timeout`.
    """
    layout = config.layout
    device = choose_device(config, local_rank)
    init_process_group(folder, device, rank, layout.world_size)
    control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if layout.world_size > 1 else None
    events.write("device", device=describe_device(device))
    probes = Probes(config, rank, device, control)
    parameters = 0
    probes.start()
    try:
        engine, parameters = _build_engine(config, device, probes)
        probes.attach(engine)
        watch = LoadWatch(engine)
        keeper = CheckpointManager(config, folder, read_policy(folder), events, engine, control)
        with probes.loading():
            first_step = keeper.resume()
            batches = open_batches(config, engine.axes.dp_rank, first_step, cp_rank=engine.axes.cp_rank)
        probes.begin_at(first_step)
        ended: tuple[Status, str] = ("completed", "")
        if control is not None:
            align_clocks(probes, control, events)
        for step in range(first_step, config.steps):
            probes.start_step(step)
            mean = accumulate(engine, batches, layout.micro_batches, probes)
            loss, stopping = agree(mean, stop is not None and stop.wanted, control)
            if not math.isfinite(loss):
                ended = "diverged", diverged(loss, step, config, updated=config.update == "in_backward")
                break
            engine.update()
            step_s = probes.end_step()
            watch.report(events, step)
            tokens = batches.take_tokens() * layout.dp
            events.write("step", step=step, loss=loss, step_s=step_s, **({"tokens": tokens} if tokens else {}))
            report_measured(events, probes, step, rank, parameters)
            with probes.loading():
                stopped = keeper.after_step(step + 1, stopping)
            if stopped:
                ended = ("timeout", stopped)
                break
    finally:
        # However it ends, the measurements are reported.
        probes.close()
        write_footprint(events, probes, parameters)
        events.write("spans", spans=[span.to_dict() for span in probes.clock.spans()])
    if ended[0] == "timeout":
        leave(engine)  # there is no time to lose
    else:
        finish(config, folder, events, engine, rank)
    return ended
