"""Predict the run of a user's script, from what is recognised of its training in its first step.

From outside are seen: what wraps the model, the shapes of its first batch, the operations from its output to the loss,
the optimizer, and when gradients are set to zero. A copy of the model without its wrappers is traced on fake tensors,
and replayed by the engine memory of that wrapper (`dlojz.prediction.forecast`), as a model of the catalogue is. No
measured figure enters.

Known so are one process, DDP, FSDP2 along one axis or two (HSDP), with parameters in fp32, and DeepSpeed's ZeRO. FSDP1,
tensor parallelism, nested units of FSDP2 and pipelines run their own code on fake tensors (`fake_steps`). What else a
script holds, such as data sets in memory, is not predicted. Gradients set to zero after the step or before
forward are freed before forward. Its FLOPs are counted on the traced operators, by the formulas of the probe.

The copy is traced in a thread, which has no modes of the script's thread and which the watch does not listen to; random
numbers, printed text and gradients of the script are as before.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, say
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.libraries.scripts.fake_steps import run_fake_steps
from dlojz.libraries.scripts.first_step import FirstStep, GivenTensor, Replacements, ScriptModel, TensorShape
from dlojz.libraries.scripts.script_training import (
    OptimizerUse,
    ScriptTraining,
    ZeroOptions,
    recognise,
    recognised_in,
    zero_redundancy_class,
)
from dlojz.prediction.communication import (
    DeepSpeedSizes,
    MessageBytes,
    fsdp2_messages,
    traffic_of,
    zero_0_messages,
    zero_1_or_2_messages,
    zero_3_messages,
)
from dlojz.prediction.engine_memory import DDP, EngineMemory, Moments, StepReplay
from dlojz.prediction.engine_memory_sharded import FSDP2, DeepSpeed, DeepSpeed3, DeepSpeed12
from dlojz.prediction.forecast import Forecast, forecast_of
from dlojz.prediction.model_trace import gathered_modules
from dlojz.prediction.shapes import FP32_BYTES, ModelShapes, ParameterShape, by_reader, shapes_of
from dlojz.prediction.states import fill_ddp_buckets, predict_states
from dlojz.prediction.trace import TraceMark, ValuesNeededError, trace
from dlojz.results.footprint import STATES, Category, Footprint, Memory, Traffic
from dlojz.results.record import OTHERS, REST, ModuleMemory, ScriptLever, ScriptPrediction

TEXTS = Sentences(Path(__file__).parent / "data" / "script_prediction.md")

NEAR_LIMIT = 0.7
"""Share of a rank's memory from which on the levers of a script are predicted too."""


class _OfScript(EngineMemory):
    """Engine memory of a script: its own optimizer's update, and its own moment of setting gradients to zero."""

    update_use = OptimizerUse(0, 0)
    former_bytes = 0
    """Gradients of the step before that are there until backward."""

    def begin_step(self, step: Moments) -> None:
        super().begin_step(step)
        step.ledger.hold("former gradients", "gradients", self.former_bytes)

    def begin_backward(self, step: Moments) -> None:
        super().begin_backward(step)
        step.ledger.drop("former gradients")

    def update_bytes(self, sizes: list[int]) -> int:
        """Return what the script's optimizer takes."""
        return self.update_use.update_bytes


class _OneProcess(_OfScript):
    """Engine memory of a script's plain model."""


class _InDDP(_OfScript, DDP):
    """Engine memory of a script's model in DDP, whose buckets hold gradients of any type, or none."""

    reduced: Sequence[ParameterShape] = ()
    """Parameters in the buckets, used or not, in the order in which they are registered."""

    @property
    def bucket_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.reduced)

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        category: Category = "workspace" if self.keeps_gradients else "gradients"
        return {"buckets": (category, self.bucket_bytes)}


class _InFSDP2(_OfScript, FSDP2):
    """Engine memory of a script's model in FSDP2, whose root unit may stay gathered until the step's end."""

    def end_step(self, step: Moments) -> None:
        for unit in self.order:
            step.ledger.drop(("shard", unit))
            if unit in self.kept:
                step.ledger.drop(("weights", unit))


class _InDeepSpeed(DeepSpeed, _OfScript):
    """Engine memory of a script's model in DeepSpeed, stage 0."""


class _InDeepSpeed12(DeepSpeed12, _InDeepSpeed):
    """Engine memory of a script's model in DeepSpeed, stages 1 and 2."""


class _InDeepSpeed3(DeepSpeed3, _InDeepSpeed12):
    """Engine memory of a script's model in DeepSpeed, stage 3."""

    def __init__(self, config: RunConfig, shapes: ModelShapes, modules: Sequence[ParameterShape]) -> None:
        self.modules = modules
        super().__init__(config, shapes)

    def of_modules(self) -> Sequence[ParameterShape]:
        return self.modules

    def has_tied_head(self) -> bool:
        return len(self.modules) > len(self.shapes.parameters)


def predict_training(
    config: RunConfig,
    step: FirstStep,
    optimizers: Sequence[torch.optim.Optimizer],
    device: Device | None,
    *,
    on_gpu: bool = False,
    groups: dict[str, str] | None = None,
    limit_bytes: int | None = None,
    other_bytes: Mapping[Category, int] | None = None,
) -> ScriptPrediction:
    """Predict a steady step of a script on rank 0; a note in the answer says what is not predicted, and why.

    Args:
        device: the GPU's kind, where the lab knows it.
        on_gpu: whether it trains on a GPU.
        limit_bytes: memory of a rank; the levers are predicted where the peak comes near it. 0: in any case.
        other_bytes: bytes that other trained models and optimizers of the script hold, by category.
    """
    answer: list[ScriptPrediction] = []
    muted: set[int] = set()

    def work() -> None:
        muted.add(threading.get_ident())
        try:
            if step.fault is not None:
                raise step.fault
            with step.repeating():
                settings = (device, on_gpu, groups or {}, limit_bytes, other_bytes or {})
                answer.append(_predicted(config, step, optimizers, *settings))
        except ValuesNeededError as error:  # the advice to measure is for a model that does not run
            answer.append(_unpredicted(step, optimizers, f"{error.cause}."))
        except LabError as error:
            answer.append(_unpredicted(step, optimizers, str(error)))
        except Exception as error:
            note = say(
                en=f"its model cannot be traced ({type(error).__name__}: {str(error)[:200]}).",
                fr=f"son modèle ne peut pas être suivi ({type(error).__name__} : {str(error)[:200]}).",
            )
            answer.append(_unpredicted(step, optimizers, note))

    with FakeTensorMode():
        pass  # torch 2.11 for CUDA, without a GPU, ends where a thread that is gone was the first to enter one
    with _undisturbed(step.models, muted):
        thread = threading.Thread(target=work, name="dlojz-prediction", daemon=True)
        thread.start()
        thread.join()
    return answer[0]


def _unpredicted(step: FirstStep, optimizers: Sequence[torch.optim.Optimizer], note: str) -> ScriptPrediction:
    try:
        recognised = recognised_in(step, optimizers)
    except Exception:  # whatever the prediction has met already
        recognised = {}
    return ScriptPrediction(recognised=recognised, note=note)


class _Muted:
    """Text stream that drops what some threads write to it; all else is the stream's own.

    Args:
        stream: the script's.
        muted: identities of these threads, which may still be added.
    """

    def __init__(self, stream: Any, muted: set[int]) -> None:
        self._stream, self._muted = stream, muted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        return len(text) if threading.get_ident() in self._muted else int(self._stream.write(text))


@contextlib.contextmanager
def _undisturbed(models: Iterable[nn.Module], muted: set[int]) -> Iterator[None]:
    """Restore random numbers and gradients; what the prediction's threads print, log or warn of reaches nobody."""

    def unless_muted(method: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() in muted else method(*args, **kwargs)

        return told

    state = random.getstate()
    gradients = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    with torch.random.fork_rng(devices=[]), Replacements() as undo:
        undo.put(sys, "stdout", _Muted(sys.stdout, muted))
        undo.put(sys, "stderr", _Muted(sys.stderr, muted))
        undo.put(warnings, "_showwarnmsg", unless_muted(warnings._showwarnmsg))  # type: ignore[attr-defined]
        undo.put(logging.Logger, "handle", unless_muted(logging.Logger.handle))
        yield
    random.setstate(state)
    for parameter, gradient in gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient


def _predicted(
    config: RunConfig,
    step: FirstStep,
    optimizers: Sequence[torch.optim.Optimizer],
    device: Device | None,
    on_gpu: bool,
    groups: dict[str, str],
    limit_bytes: int | None,
    other_bytes: Mapping[Category, int],
) -> ScriptPrediction:
    training = recognise(step, optimizers, device, on_gpu, groups, config.layout.world_size)
    training = replace(training, others=other_bytes)
    footprint, at_peak = _footprint(config, training, groups)
    recognised = recognised_in(step, optimizers)
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in training.model.modules())
    levers: tuple[ScriptLever, ...] = ()
    if is_recurrent or "communication hook" in recognised:
        footprint, at_peak = _without_peak(footprint, *(["activations_bytes"] if is_recurrent else [])), ()
    elif limit_bytes is not None and (needed_bytes := footprint.memory.needed_bytes or 0) >= NEAR_LIMIT * limit_bytes:
        levers = tuple(_levers(config, training, groups, needed_bytes))
    if not training.messages_known:  # a custom hook may compute anything
        footprint = footprint.model_copy(update={"step_flops": None})
    is_unwrapped = config.layout.world_size > 1 and training.wrapper == "none"
    notes = {
        "recurrent layers": is_recurrent,
        "no loss": step.loss is None,
        "no wrapper": is_unwrapped,
        "custom hook": not training.messages_known,
        "compressing hook": training.messages_known and "communication hook" in recognised,
    }
    return ScriptPrediction(
        recognised=recognised,
        note=" ".join(TEXTS.say("notes", key) for key, applies in notes.items() if applies),
        messages_known=training.messages_known and not is_unwrapped,
        footprint=footprint,
        at_peak=at_peak,
        levers=levers,
    )


def _without_peak(footprint: Footprint, *besides: str) -> Footprint:
    """Leave out of a prediction what depends on memory that is not known.

    Args:
        besides: other fields of the memory that depend on it.
    """
    names = ("workspace_bytes", "peak_bytes", "peak_moment", "at_peak_bytes")
    memory = footprint.memory.model_copy(update=dict.fromkeys((*names, *besides)))
    return footprint.model_copy(update={"memory": memory})


def _footprint(
    config: RunConfig, training: ScriptTraining, groups: dict[str, str]
) -> tuple[Footprint, tuple[ModuleMemory, ...]]:
    """Predict a footprint, with the modules at its peak."""
    if training.wrapper == "fakes":
        ran = run_fake_steps(config, training, groups)
        return _with_others(ran.footprint, _largest_first(ran.at_peak), training.others)
    footprint, at_peak = _replayed(config, training)
    return _with_others(footprint, at_peak, training.others)


def _with_others(
    footprint: Footprint, at_peak: tuple[ModuleMemory, ...], other_bytes: Mapping[Category, int]
) -> tuple[Footprint, tuple[ModuleMemory, ...]]:
    """Add the states of models and optimizers that the step leaves as they are."""
    if not other_bytes:
        return footprint, at_peak
    memory, held_bytes = footprint.memory, sum(other_bytes.values())
    sums: dict[str, Any] = {
        f"{category}_bytes": (memory.category(category) or 0) + num_bytes for category, num_bytes in other_bytes.items()
    }
    sums["peak_bytes"] = (memory.peak_bytes or 0) + held_bytes
    sums["at_peak_bytes"] = dict(Counter(memory.at_peak_bytes or {}) + Counter(other_bytes))
    modules = (*at_peak, ModuleMemory(module=OTHERS, bytes_by_category=dict(other_bytes)))
    return footprint.model_copy(update={"memory": memory.model_copy(update=sums)}), modules


def _config_of(config: RunConfig, training: ScriptTraining) -> RunConfig:
    """The nearest configuration of the lab's: degrees, stage, precision of the weights, micro-batches."""
    zero, divides = training.zero, training.ranks > 1
    fields: dict[str, Any] = {"gradient_as_bucket_view": training.bucket_view and divides}
    if zero is not None:
        fields = {"engine": "deepspeed", "zero": zero.stage, "sub_group_size": zero.sub_group_elements}
    elif training.wrapper == "fsdp2" and divides:
        fields["zero"] = 3
    changes = {
        "layout": Layout(dp=training.ranks, micro_batches=training.micro_batches, **fields),
        "precision": "fp32" if training.param_dtype == torch.float32 else "bf16",
        "script": None,
        "fp32_gradients": zero.keeps_fp32_gradients if zero else config.fp32_gradients,
    }
    return config.model_copy(update=changes)


def _replayed(config: RunConfig, training: ScriptTraining) -> tuple[Footprint, tuple[ModuleMemory, ...]]:
    """Trace a copy of the model, and replay a step of the trace by the engine memory of its wrapper."""
    model = ScriptModel(training.model, training.parts, training.step, training.autocast)
    if training.checkpointed:
        for part in model.blocks[:-1]:
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    try:
        inputs = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in training.given]
        traced = on_cpu = trace(
            model, *inputs, compute=training.compute, loss=lambda value: value, on_gpu=training.on_gpu
        )
        if training.on_gpu:  # a GPU's attention is traced by its allocations alone, without products to count
            model.held.clear()
            on_cpu = trace(model, *inputs, compute=training.compute, loss=lambda value: value)
    finally:
        model.held.clear()
        for part in model.blocks:
            vars(part).pop("forward", None)
    marks = [event for event in traced.events if isinstance(event, TraceMark)]
    model.ready = tuple(mark.name for mark in marks if mark.what == "ready")
    model.in_backward = frozenset(mark.name for mark in marks if mark.what == "backward")
    model.in_forward = frozenset(mark.name for mark in marks if mark.what == "forward")
    training = training.with_use(frozenset(id(model.get_parameter(name)) for name in model.ready))
    lab = _config_of(config, training)
    shapes = shapes_of(model)
    overlay = _overlay(lab, training, shapes, model)
    step = StepReplay(lab, traced, _states(lab, training, shapes, overlay, model), overlay)
    forecast = forecast_of(step, 0, training.device)
    traffic = sorted(_traffic(training, model, overlay, marks), key=lambda line: (line.collective, line.group))
    footprint = Footprint(
        source="predicted",
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        memory=forecast.memory,
        step_flops=training.micro_batches * (on_cpu.flops or 0) + training.use.flops,
        communication=tuple(traffic),
    )
    return footprint, _modules_at_peak(forecast, training, model)


def _reached(shapes: ModelShapes, model: ScriptModel, training: ScriptTraining) -> ModelShapes:
    """The same shapes with parameters that get no gradient as frozen: those that forward does not use.

    Of DeepSpeed without those that are frozen in truth: it fills the gradients of the others with zeros.
    """
    reached = shapes.trained_only(frozenset(model.ready))
    if training.zero is None:
        return reached
    parameters = (parameter for parameter in reached.parameters if model.get_parameter(parameter.name).requires_grad)
    return replace(reached, parameters=tuple(parameters))


def _overlay(lab: RunConfig, training: ScriptTraining, shapes: ModelShapes, model: ScriptModel) -> _OfScript:
    reached = _reached(shapes, model, training)
    overlay: _OfScript
    if training.zero is not None:
        overlay = _deepspeed_overlay(lab, training.zero, reached, model)
    elif training.wrapper == "fsdp2":
        overlay = sharded = _InFSDP2(lab, reached)
        numbers = {path: f"blocks.{number}" for number, path in enumerate((*training.parts, ""))}
        sharded.kept = frozenset(numbers[path] for path in training.kept_units) & set(sharded.units)
        sharded.order = [name for name in sharded.order if name in model.in_forward]
        sharded.reduced_each = training.reduce_bytes or FP32_BYTES
    else:
        overlay = (_InDDP if training.wrapper == "ddp" else _OneProcess)(lab, reached.trained)
        if isinstance(overlay, _InDDP):
            overlay.keeps_gradients = not training.bucket_view
            shape_of = _shape_of(shapes, model)
            overlay.reduced = [
                shape_of[id(parameter)]
                for name, parameter in training.model.named_parameters()
                if parameter.requires_grad and name not in training.not_reduced
            ]
    overlay.on_gpu, overlay.update_use = training.on_gpu, training.use
    if training.zeroed_late and overlay.keeps_gradients | (training.wrapper == "fsdp2"):
        gradients = reached if training.zero else reached.trained
        overlay.former_bytes = sum(parameter.num_bytes for parameter in gradients.parameters)
        if training.wrapper == "fsdp2":
            overlay.former_bytes = predict_states(lab, reached).gradients_bytes or 0
    return overlay


def _deepspeed_overlay(lab: RunConfig, zero: ZeroOptions, reached: ModelShapes, model: ScriptModel) -> _OfScript:
    if zero.stage == 0:
        return _InDeepSpeed(lab, reached)
    sharded: DeepSpeed12
    if zero.stage == 3:
        sharded = _InDeepSpeed3(lab, reached, _of_modules(model))
    else:
        shape_of = _shape_of(reached, model)
        groups = [tuple(shape_of[id(parameter)] for parameter in group) for group in zero.groups]
        in_groups = tuple(parameter for group in groups for parameter in group)
        sharded = _InDeepSpeed12(lab, replace(reached, parameters=in_groups))
        sharded.groups = tuple(replace(reached, parameters=group) for group in groups)
    sharded.bucket_elements = zero.bucket_elements
    return sharded


def _of_modules(model: ScriptModel) -> tuple[ParameterShape, ...]:
    """List the parameters that each module reads; those of several modules once for each."""
    shape_of = _shape_of(shapes_of(model), model)
    pairs = ((path, part) for path, part in model.named_modules() if part._parameters)
    parameters = (
        replace(shape_of[id(parameter)], name=f"{path}.{name}", module=path)
        for path, part in pairs
        for name, parameter in part._parameters.items()
        if parameter is not None
    )
    return by_reader(parameters, model)


def _shape_of(shapes: ModelShapes, model: ScriptModel) -> dict[int, ParameterShape]:
    """Shape of each parameter of the copy, by its identity."""
    return {id(model.get_parameter(shape.name)): shape for shape in shapes.parameters}


def _states(
    lab: RunConfig, training: ScriptTraining, shapes: ModelShapes, overlay: _OfScript, model: ScriptModel
) -> Memory:
    # DeepSpeed has gradients of all parameters but those that are frozen; stage 3 divides the latter, too.
    states = predict_states(lab, shapes if training.zero else _reached(shapes, model, training))
    if training.zero and not isinstance(overlay, _InDeepSpeed3):
        groups = overlay.groups if isinstance(overlay, _InDeepSpeed12) else (overlay.shapes,)
        group_states = [predict_states(lab, group) for group in groups]
        frozen = shapes.num_parameters - overlay.shapes.num_parameters
        of_frozen = {"weights": training.param_dtype.itemsize * frozen}
        states = states.model_copy(
            update={
                f"{category}_bytes": sum(memory.category(category) or 0 for memory in group_states)
                + of_frozen.get(category, 0)
                for category in STATES
            }
        )
    view_bytes = overlay.bucket_bytes if isinstance(overlay, _InDDP) and training.bucket_view else 0
    buffers = {id(buffer): buffer.numel() * buffer.element_size() for buffer in training.model.buffers()}
    changes = {
        "weights_bytes": (states.weights_bytes or 0) + overlay.gathered_bytes(),
        "gradients_bytes": view_bytes or states.gradients_bytes,
        "optimizer_bytes": training.use.states_bytes,
        "buffers_bytes": sum(buffers.values()),
    }
    return states.model_copy(update=changes)


def _traffic(
    training: ScriptTraining, model: ScriptModel, overlay: _OfScript, marks: Sequence[TraceMark]
) -> Iterator[Traffic]:
    """What the wrapper hands to each collective in a step."""
    ranks, times = training.ranks, training.micro_batches
    messages: MessageBytes = {}
    if training.zero is not None:
        messages = _deepspeed_messages(training, training.zero, overlay, marks)
    elif isinstance(overlay, _InDDP):
        messages = _ddp_messages(training, model, overlay)
    elif isinstance(overlay, _InFSDP2):
        messages = fsdp2_messages(
            {name: overlay.units[name] for name in overlay.order},
            ranks,
            unsharded=overlay.kept,
            in_backward=model.in_backward,
            gathered_bytes=training.param_dtype.itemsize,
            reduced_bytes=overlay.reduced_each,
        )
        messages = {collective: times * each_bytes for collective, each_bytes in messages.items()}
    if ranks > 1:
        yield from traffic_of(messages, training.group, ranks)
    if training.replicas > 1:  # each shard is reduced between the replicas, after its own reduce-scatter
        shards = [num_bytes // ranks for num_bytes in messages["reduce_scatter"]]
        yield from traffic_of({"all_reduce": shards}, training.replica_group, training.replicas)


def _ddp_messages(training: ScriptTraining, model: ScriptModel, overlay: _InDDP) -> MessageBytes:
    """Bytes of what DDP hands to each collective in a step.

    Source: torch 2.13, `nn/parallel/distributed.py`, `_ddp_init_helper` (buckets in the order of registration, for good
    where unused parameters are looked for); `csrc/distributed/c10d/reducer.cpp`, `rebuild_buckets` (in the order in
    which gradients come) and `all_reduce_local_used_map` (one int32 for each parameter).
    """
    first_bytes, limit_bytes = training.bucket_bytes
    position = {name: number for number, name in enumerate(() if training.finds_unused else model.ready)}
    order = sorted(overlay.reduced, key=lambda parameter: position.get(parameter.name, len(position)))
    reduced = [
        sum((training.reduce_bytes or parameter.element_bytes) * parameter.numel for parameter in bucket)
        for bucket in fill_ddp_buckets(order, limit_bytes, first_bytes)
    ]
    if training.finds_unused:
        reduced.append(torch.int32.itemsize * len(order))
    buffers: dict[torch.dtype, int] = Counter()
    for buffer in training.model.buffers() if training.broadcasts_buffers else ():
        buffers[buffer.dtype] += buffer.nbytes
    times = training.step.synchronised or 1
    messages: MessageBytes = {"all_reduce": times * reduced, "broadcast": times * list(buffers.values())}
    for optimizer in training.optimizers:
        if isinstance(optimizer, zero_redundancy_class()):
            messages["broadcast"] += _sharded_broadcasts(optimizer)
    return {collective: each_bytes for collective, each_bytes in messages.items() if each_bytes}


def _sharded_broadcasts(optimizer: Any) -> list[int]:
    """Bytes of a step's broadcasts: each rank sends all others the parameters that it has updated.

    Source: torch 2.13, `distributed/optim/zero_redundancy_optimizer.py`, `_broadcast_params_from_rank`.
    """
    if optimizer.parameters_as_bucket_view:
        return [bucket.nbytes for buckets in optimizer._buckets for bucket in buckets]
    return [parameter.nbytes for group in optimizer.param_groups for parameter in group["params"]]


def _deepspeed_messages(
    training: ScriptTraining, zero: ZeroOptions, overlay: _OfScript, marks: Sequence[TraceMark]
) -> MessageBytes:
    """Bytes of what DeepSpeed's engine hands to each collective in a step."""
    ready = [overlay.by_name[mark.name] for mark in marks if mark.what == "ready"]
    element_bytes = training.param_dtype.itemsize
    sizes = DeepSpeedSizes(
        training.ranks, training.micro_batches, element_bytes, zero.checks_bytes, zero.bucket_elements
    )
    if isinstance(overlay, _InDeepSpeed3):
        modules = gathered_modules(marks, overlay.whole)
        return zero_3_messages(sizes, [overlay.whole[module] for module in modules], ready)
    if isinstance(overlay, _InDeepSpeed12):
        return zero_1_or_2_messages(sizes, zero.stage, overlay.groups, ready)
    return zero_0_messages(sizes, overlay.shapes.num_parameters)


def _modules_at_peak(forecast: Forecast, training: ScriptTraining, model: ScriptModel) -> tuple[ModuleMemory, ...]:
    """Bytes of the model's parts at the peak; states go with the parameters that they belong to."""
    paths = [*training.parts, ""]
    elements: Counter[str] = Counter()
    for parameter in shapes_of(model).parameters:
        elements[f"blocks.{parameter.block}"] += parameter.numel
    total = sum(elements.values())
    bytes_by_block: dict[str, Counter[Category]] = defaultdict(Counter)
    for block, by_category in forecast.at_peak_by_block:
        for category, num_bytes in by_category.items():
            if block or category not in STATES or category == "buffers":
                bytes_by_block[block][category] += num_bytes
                continue
            for name, numel in elements.items():
                # States go to the blocks by their numbers of parameters.
                bytes_by_block[name][category] += round(num_bytes * numel / total)
    return _largest_first({_path(block, paths): categories for block, categories in bytes_by_block.items()})


def _largest_first(bytes_by_module: Mapping[str, Counter[Category]]) -> tuple[ModuleMemory, ...]:
    ranking = sorted(bytes_by_module.items(), key=lambda pair: -sum(pair[1].values()))
    return tuple(ModuleMemory(module=path, bytes_by_category=dict(categories)) for path, categories in ranking)


def _path(block: str, paths: Sequence[str]) -> str:
    """The path in the script's model of a block; of the rest of the model `(rest)`, of no module nothing."""
    number = block.removeprefix("blocks.")
    return (paths[int(number)] or REST) if number.isdecimal() else ""


def _levers(
    config: RunConfig, training: ScriptTraining, groups: dict[str, str], needed_bytes: int
) -> Iterator[ScriptLever]:
    """Predict what single changes of the script would save."""
    lever_names: set[str] = set()
    for name, changed in _changes(training):
        if name in lever_names:
            continue
        try:
            taken_bytes = _footprint(config, changed, groups)[0].memory.needed_bytes or 0
        except Exception:  # a change that the script's shapes do not take is no lever
            continue
        lever_names.add(name)
        yield ScriptLever(name=name, taken_bytes=taken_bytes, saved_bytes=needed_bytes - taken_bytes)


def _halved(specs: tuple[TensorShape, ...], samples: int, flat: bool) -> tuple[TensorShape, ...]:
    """Halve what has so many samples; with `flat` also targets whose samples and tokens are one dimension."""

    def half(spec: TensorShape) -> TensorShape:
        has = bool(spec.shape) and (spec.shape[0] % samples == 0 if flat else spec.shape[0] == samples)
        return spec._replace(shape=(spec.shape[0] // 2, *spec.shape[1:])) if has else spec

    return tuple(map(half, specs))


def _changes(training: ScriptTraining) -> Iterator[tuple[str, ScriptTraining]]:
    if training.zeroed_late:
        yield "zero-grad", replace(training, zeroed_late=False)
    if training.wrapper == "ddp" and not training.bucket_view:
        yield "bucket-view", replace(training, bucket_view=True)
    model_call = next(call for call in training.step.calls if call.function is None)
    shapes = (training.given[leaf.number].shape for leaf in model_call.leaves if isinstance(leaf, GivenTensor))
    batches = {shape[0] for shape in shapes if shape}
    if len(batches) == 1 and (samples := batches.pop()) % 2 == 0:
        twice = 2 * training.micro_batches
        for flat in (False, True):
            yield "micro-batch", replace(training, given=_halved(training.given, samples, flat), micro_batches=twice)
    of_fp32 = all(parameter.dtype == torch.float32 for parameter in training.model.parameters())
    if training.compute == "fp32" and training.param_dtype == torch.float32 and of_fp32:
        yield "precision", replace(training, autocast=torch.bfloat16)
    if len(training.parts) > 1 and not training.checkpointed:
        yield "checkpointing", replace(training, checkpointed=True)
    if training.wrapper == "fsdp2" and training.kept_units:
        yield "zero-3", replace(training, kept_units=frozenset())
    elif training.wrapper == "ddp" and training.ranks > 1 and of_fp32:
        units = (*training.parts, "")
        divided = replace(training, wrapper="fsdp2", units=units, kept_units=frozenset({""}))
        yield "zero-3", replace(divided, optimizer_ranks=training.ranks)
