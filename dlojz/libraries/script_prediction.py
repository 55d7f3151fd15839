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
import io
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.libraries.fake_steps import run_fake_steps
from dlojz.libraries.first_step import FirstStep, GivenTensor, ScriptModel, TensorShape
from dlojz.libraries.script_training import OptimizerUse, ScriptTraining, ZeroOptions, recognise, recognised_in
from dlojz.prediction.communication import DEEPSPEED_REDUCED_ELEMENTS, deepspeed_buckets
from dlojz.prediction.engine_memory import DDP, EngineMemory, Moments
from dlojz.prediction.engine_memory_sharded import FSDP2, DeepSpeed, DeepSpeed3, DeepSpeed12, last_parameter
from dlojz.prediction.forecast import Forecast, StepReplay, forecast_of
from dlojz.prediction.shapes import FP32_BYTES, ModelShapes, ParameterShape, fill_buckets, shapes_of
from dlojz.prediction.states import deepspeed_messages, padded_parameters, predict_states
from dlojz.prediction.trace import TraceMark, trace
from dlojz.results.footprint import STATES, Category, Footprint, Memory, Traffic
from dlojz.results.record import REST, ModuleMemory, ScriptLever, ScriptPrediction

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
    """Engine memory of a script's model in DDP."""


class _InFSDP2(_OfScript, FSDP2):
    """Engine memory of a script's model in FSDP2, whose frozen parameters are gathered, but not reduced."""

    def __init__(self, config: RunConfig, shapes: ModelShapes, trained: ModelShapes) -> None:
        super().__init__(config, shapes)
        names = {one.name for one in trained.parameters}
        self.frozen = frozenset(one.name for one in shapes.parameters) - names
        for name, unit in self.units.items():
            own = [one for one in unit if one.name in names]
            self.reduced[name] = config.layout.dp * sum(one.padded_rows_numel(config.layout.dp) for one in own)
            if own and len(own) < len(unit):
                self.last_of[name] = last_parameter(name, own)

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
) -> ScriptPrediction:
    """Predict a steady step of a script on rank 0; a note in the answer says what is not predicted, and why.

    Args:
        config: of the script.
        step: its first one, as far as it got.
        optimizers: those that it has made.
        device: the GPU's kind, where the lab knows it.
        on_gpu: whether it trains on a GPU.
        groups: axis of each process group with a name.
        limit_bytes: memory of a rank; the levers are predicted where the peak comes near it. 0: in any case.
    """
    answer: list[ScriptPrediction] = []

    def work() -> None:
        try:
            if step.fault is not None:
                raise step.fault
            answer.append(_predicted(config, step, optimizers, device, on_gpu, groups or {}, limit_bytes))
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
    with _undisturbed(step.models):
        thread = threading.Thread(target=work, name="dlojz-prediction", daemon=True)
        thread.start()
        thread.join()
    return answer[0]


def _unpredicted(step: FirstStep, optimizers: Sequence[torch.optim.Optimizer], note: str) -> ScriptPrediction:
    try:
        found = recognised_in(step, optimizers)
    except Exception:  # whatever the prediction has met already
        found = {}
    return ScriptPrediction(recognised=found, note=note)


@contextlib.contextmanager
def _undisturbed(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore random numbers and gradients, and print nothing."""
    state = random.getstate()
    gradients = [(one, one.grad) for model in models for one in model.parameters()]
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
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
) -> ScriptPrediction:
    training = recognise(step, optimizers, device, on_gpu, groups, config.layout.world_size)
    footprint, at_peak = _footprint(config, training, groups)
    levers: tuple[ScriptLever, ...] = ()
    needed_bytes = footprint.memory.needed_bytes or 0
    if limit_bytes is not None and needed_bytes >= NEAR_LIMIT * limit_bytes:
        levers = tuple(_levers(config, training, groups, needed_bytes))
    notes = []
    if step.loss is None:
        notes.append(
            say(
                en="its loss was not seen: the prediction is without what computes it.",
                fr="sa loss n’a pas été vue : la prédiction ne compte pas ce qui la calcule.",
            )
        )
    if not training.messages_known:
        notes.append(
            say(
                en="a custom communication hook sends the gradients: their bytes are counted, not predicted.",
                fr="un hook de communication propre au script envoie les gradients : leurs octets sont comptés, pas "
                "prédits.",
            )
        )
    return ScriptPrediction(
        recognised=recognised_in(step, optimizers),
        note=" ".join(notes),
        messages_known=training.messages_known,
        footprint=footprint,
        at_peak=at_peak,
        levers=levers,
    )


def _footprint(
    config: RunConfig, training: ScriptTraining, groups: dict[str, str]
) -> tuple[Footprint, tuple[ModuleMemory, ...]]:
    """Predict a footprint, with the modules at its peak."""
    if training.wrapper == "fakes":
        ran = run_fake_steps(config, training, groups)
        return ran.footprint, _largest_first(ran.at_peak)
    forecast, model, flops = _forecast(config, training)
    footprint = Footprint(
        source="predicted",
        parameters=sum(one.numel() for one in training.model.parameters()),
        memory=forecast.memory,
        step_flops=training.micro_batches * flops,
        communication=tuple(sorted(_traffic(training, model), key=lambda one: (one.collective, one.group))),
    )
    return footprint, _modules_at_peak(forecast, training, model)


def _config_of(config: RunConfig, training: ScriptTraining) -> RunConfig:
    """The nearest configuration of the lab's: degrees, stage, precision of the weights, micro-batches."""
    sharded = training.wrapper == "fsdp2"
    if zero := training.zero:
        layout = Layout(
            dp=training.ranks, zero=zero.stage, engine="deepspeed", micro_batches=training.micro_batches
        )
        precision = "fp32" if training.param_dtype == torch.float32 else "bf16"
        known = {"layout": layout, "precision": precision, "script": None, "fp32_gradients": zero.keeps_fp32_gradients}
        return config.model_copy(update=known)
    layout = Layout(
        dp=training.ranks,
        zero=3 if sharded and training.ranks > 1 else 0,
        micro_batches=training.micro_batches,
        gradient_as_bucket_view=training.bucket_view and training.ranks > 1,
    )
    precision = "fp32" if training.param_dtype == torch.float32 else "bf16"
    return config.model_copy(update={"layout": layout, "precision": precision, "script": None})


def _forecast(config: RunConfig, training: ScriptTraining) -> tuple[Forecast, ScriptModel, int]:
    """Forecast a step; return it with the copy that was traced, and the FLOPs of a micro-batch."""
    model = ScriptModel(training.model, training.parts, training.step, training.autocast)
    if training.checkpointed:
        for part in model.blocks[:-1]:
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    try:
        given = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in training.given]
        traced = on_cpu = trace(
            model, *given, compute=training.compute, loss=lambda value: value, on_gpu=training.on_gpu
        )
        if training.on_gpu:  # a GPU's attention is traced by its allocations alone, without products to count
            model.held.clear()
            on_cpu = trace(model, *given, compute=training.compute, loss=lambda value: value)
    finally:
        model.held.clear()
        for part in model.blocks:
            vars(part).pop("forward", None)
    ready = (event for event in traced.events if isinstance(event, TraceMark) and event.what == "ready")
    model.ready = tuple(event.name for event in ready)
    marks = (event for event in traced.events if isinstance(event, TraceMark) and event.what == "backward")
    model.in_backward = frozenset(event.name for event in marks)
    lab = _config_of(config, training)
    shapes = shapes_of(model)
    overlay = _overlay(lab, training, shapes, model)
    step = StepReplay(lab, traced, _states(lab, training, shapes, overlay, model), overlay)
    return forecast_of(step, 0, training.device), model, on_cpu.flops or 0


def _trained(shapes: ModelShapes, model: nn.Module) -> ModelShapes:
    """The same shapes without frozen parameters."""
    own = tuple(one for one in shapes.parameters if model.get_parameter(one.name).requires_grad)
    return replace(shapes, parameters=own)


def _overlay(lab: RunConfig, training: ScriptTraining, shapes: ModelShapes, model: ScriptModel) -> _OfScript:
    trained = _trained(shapes, model)
    overlay: _OfScript
    if training.zero is not None:
        overlay = _deepspeed_overlay(lab, training.zero, trained, model)
    elif training.wrapper == "fsdp2":
        overlay = sharded = _InFSDP2(lab, shapes, trained)
        numbers = {path: f"blocks.{number}" for number, path in enumerate((*training.parts, ""))}
        sharded.kept = frozenset(numbers[path] for path in training.kept_units) & set(sharded.units)
        sharded.reduced_each = training.reduce_bytes
    else:
        overlay = (_InDDP if training.wrapper == "ddp" else _OneProcess)(lab, trained)
        if training.wrapper == "ddp":
            overlay.keeps_gradients = not training.bucket_view
    overlay.on_gpu, overlay.update_use = training.on_gpu, training.use
    if training.zeroed_late and overlay.keeps_gradients | (training.wrapper == "fsdp2"):
        divided = lab.layout.dp if training.wrapper == "fsdp2" else 1
        padded = sum(one.padded_rows_numel(divided) for one in trained.parameters)
        overlay.former_bytes = FP32_BYTES * padded
    return overlay


def _deepspeed_overlay(lab: RunConfig, zero: ZeroOptions, trained: ModelShapes, model: ScriptModel) -> _OfScript:
    if zero.stage == 0:
        return _InDeepSpeed(lab, trained)
    sharded: DeepSpeed12
    if zero.stage == 3:
        sharded = _InDeepSpeed3(lab, trained, _of_modules(model))
    else:
        groups = _groups(zero, trained, model)
        whole = replace(trained, parameters=tuple(one for group in groups for one in group.parameters))
        sharded = _InDeepSpeed12(lab, whole)
        sharded.groups = groups
    sharded.bucket_elements = zero.bucket_elements
    return sharded


def _of_modules(model: ScriptModel) -> list[ParameterShape]:
    """List the parameters of each module; those of several modules once for each."""
    own = {id(model.get_parameter(one.name)): one for one in shapes_of(model).parameters}
    pairs = ((path, part) for path, part in model.named_modules() if part._parameters)
    return [
        replace(own[id(one)], name=f"{path}.{name}", module=path)
        for path, part in pairs
        for name, one in part._parameters.items()
        if one is not None
    ]


def _groups(zero: ZeroOptions, trained: ModelShapes, model: ScriptModel) -> tuple[ModelShapes, ...]:
    """Shapes of each group of parameters that DeepSpeed flattens, in its order."""
    own = {id(model.get_parameter(one.name)): one for one in trained.parameters}
    return tuple(replace(trained, parameters=tuple(own[id(one)] for one in group)) for group in zero.groups)


def _states(
    lab: RunConfig, training: ScriptTraining, shapes: ModelShapes, overlay: _OfScript, model: ScriptModel
) -> Memory:
    held = predict_states(lab, shapes)
    if isinstance(overlay, _InDeepSpeed12) and not isinstance(overlay, _InDeepSpeed3):
        each = [predict_states(lab, group) for group in overlay.groups]
        frozen = shapes.num_parameters - overlay.shapes.num_parameters
        of_frozen = {"weights": training.param_dtype.itemsize * frozen}
        held = held.model_copy(
            update={
                f"{category}_bytes": sum(one.category(category) or 0 for one in each) + of_frozen.get(category, 0)
                for category in STATES
            }
        )
    if training.wrapper == "fsdp2":
        reduced = predict_states(lab, _trained(shapes, model))
        held = held.model_copy(update={"gradients_bytes": reduced.gradients_bytes})
    elif training.wrapper != "deepspeed":
        held = held.model_copy(update={"gradients_bytes": FP32_BYTES * overlay.shapes.num_parameters})
    buffers = {id(one): one.numel() * one.element_size() for one in training.model.buffers()}
    known = {
        "weights_bytes": (held.weights_bytes or 0) + overlay.gathered_bytes(),
        "optimizer_bytes": training.use.states_bytes,
        "buffers_bytes": sum(buffers.values()),
    }
    return held.model_copy(update=known)


def _traffic(training: ScriptTraining, model: ScriptModel) -> Iterator[Traffic]:
    """What the wrapper hands to each collective in a step."""
    shapes, ranks = shapes_of(model), training.ranks
    if ranks * training.replicas == 1 or training.wrapper == "none":
        return
    line = partial(Traffic, group=training.group, group_size=ranks)
    if training.zero is not None:
        yield from _deepspeed_traffic(training, training.zero, model, line)
        return
    if training.wrapper == "ddp":
        named = {one.name: one for one in _trained(shapes, model).parameters}
        trained = [named[name] for name in model.ready]
        first_bytes, limit_bytes = training.bucket_bytes
        buckets = fill_buckets(trained, limit_bytes, first_bytes)
        times = training.step.synchronised or 1
        num_bytes = times * training.reduce_bytes * sum(one.numel for one in trained)
        yield line(collective="all_reduce", count=times * len(buckets), message_bytes=num_bytes)
        buffers = {id(one): one for one in training.model.buffers()}.values()
        if training.broadcasts_buffers and buffers:
            kinds = len({one.dtype for one in buffers})
            num_bytes = sum(one.numel() * one.element_size() for one in buffers)
            yield line(collective="broadcast", count=times * kinds, message_bytes=times * num_bytes)
        return
    kept = {f"blocks.{number}" for number, path in enumerate((*training.parts, "")) if path in training.kept_units}
    gathers = gathered = reductions = reduced = 0
    units = {f"blocks.{unit[-1].block}": unit for unit in shapes.units()}
    trained_names = {one.name for one in _trained(shapes, model).parameters}
    entered = [number for number, name in enumerate(units) if name in model.in_backward]
    lowest = min(entered, default=0) - 1  # prefetched in backward, though backward ends above it
    for number, (name, unit) in enumerate(units.items()):
        numel = ranks * sum(one.padded_rows_numel(ranks) for one in unit)
        times = 2 if name not in kept and number in (*entered, lowest) else 1
        gathers, gathered = gathers + times, gathered + times * numel * training.param_dtype.itemsize
        own = ranks * sum(one.padded_rows_numel(ranks) for one in unit if one.name in trained_names)
        reductions, reduced = reductions + bool(own), reduced + own * training.reduce_bytes
    times = training.micro_batches
    if ranks > 1:
        yield line(collective="all_gather", count=times * gathers, message_bytes=times * gathered)
        yield line(collective="reduce_scatter", count=times * reductions, message_bytes=times * reduced)
    if training.replicas > 1:  # each shard is reduced between the replicas, after its own reduce-scatter
        yield Traffic(
            collective="all_reduce",
            group=training.replica_group,
            group_size=training.replicas,
            count=times * reductions,
            message_bytes=times * reduced // ranks,
        )


def _deepspeed_traffic(
    training: ScriptTraining, zero: ZeroOptions, model: ScriptModel, line: partial[Traffic]
) -> Iterator[Traffic]:
    """What DeepSpeed's engine hands to each collective in a step.

    Source: as of `dlojz.prediction.communication`, whose rules these are with the script's own groups and buckets.
    """
    ranks, each, times = training.ranks, training.param_dtype.itemsize, training.micro_batches
    limit = zero.bucket_elements
    trained = _trained(shapes_of(model), model)
    named = {one.name: one for one in trained.parameters}
    ready = [named[name] for name in model.ready]
    numel = sum(one.numel for one in ready)
    checks, checks_bytes = len(zero.checks_bytes), sum(zero.checks_bytes)
    if zero.stage == 0:
        calls = -(-numel // DEEPSPEED_REDUCED_ELEMENTS)
        yield line(collective="all_reduce", count=calls + checks, message_bytes=each * numel + checks_bytes)
    elif zero.stage == 3:
        padded_of: Counter[str] = Counter()
        for one in _of_modules(model):
            padded_of[one.module] += ranks * one.padded_numel(ranks)
        gathered = 2 * times * each * sum(padded_of.values())
        padded = [ranks * one.padded_numel(ranks) for one in ready]
        buckets = len(deepspeed_buckets(padded, limit))
        yield line(collective="all_gather", count=2 * times * len(padded_of), message_bytes=gathered)
        yield line(collective="reduce_scatter", count=times * buckets, message_bytes=times * each * sum(padded))
        yield line(collective="all_reduce", count=checks, message_bytes=checks_bytes)
    else:
        # Stage 1 reduces once per step, in the parameters' order, stage 2 with every micro-batch, as gradients come.
        reductions = times if zero.stage == 2 else 1
        groups = _groups(zero, trained, model)
        order = ready if zero.stage == 2 else [one for group in groups for one in group.parameters]
        waiting = iter(order)
        filled = (list(islice(waiting, one)) for one in deepspeed_buckets((one.numel for one in order), limit))
        messages = reductions * sum(len(deepspeed_messages(groups, ranks, one, limit)) for one in filled)
        whole = [padded_parameters(group.num_parameters, ranks) for group in groups]
        gathers = sum(max(1, one // zero.gather_elements) if zero.gather_elements else 1 for one in whole)
        yield line(
            collective="all_reduce",
            count=messages + checks,
            message_bytes=reductions * each * numel + checks_bytes,
        )
        yield line(collective="all_gather", count=gathers, message_bytes=each * sum(whole))


def _modules_at_peak(forecast: Forecast, training: ScriptTraining, model: ScriptModel) -> tuple[ModuleMemory, ...]:
    """Bytes of the model's parts at the peak; states go with the parameters that they belong to."""
    paths = [*training.parts, ""]
    elements: Counter[str] = Counter()
    for parameter in shapes_of(model).parameters:
        elements[f"blocks.{parameter.block}"] += parameter.numel
    total = sum(elements.values())
    held: dict[str, Counter[Category]] = defaultdict(Counter)
    for block, by_category in forecast.at_peak_by_block:
        for category, num_bytes in by_category.items():
            if block or category not in STATES or category == "buffers":
                held[block][category] += num_bytes
                continue
            for name, numel in elements.items():
                held[name][category] += round(num_bytes * numel / total)
    return _largest_first({_path(block, paths): categories for block, categories in held.items()})


def _largest_first(held: Mapping[str, Counter[Category]]) -> tuple[ModuleMemory, ...]:
    named = sorted(held.items(), key=lambda pair: -sum(pair[1].values()))
    return tuple(ModuleMemory(module=path, bytes_by_category=dict(categories)) for path, categories in named)


def _path(block: str, paths: Sequence[str]) -> str:
    """The path in the script's model of a block; of the rest of the model `(rest)`, of no module nothing."""
    number = block.removeprefix("blocks.")
    return (paths[int(number)] or REST) if number.isdecimal() else ""


def _levers(
    config: RunConfig, training: ScriptTraining, groups: dict[str, str], now: int
) -> Iterator[ScriptLever]:
    """Predict what single changes of the script would save."""
    found: set[str] = set()
    for name, changed in _changes(training):
        if name in found:
            continue
        try:
            taken = _footprint(config, changed, groups)[0].memory.needed_bytes or 0
        except Exception:  # a change that the script's shapes do not take is no lever
            continue
        found.add(name)
        yield ScriptLever(name=name, taken_bytes=taken, saved_bytes=now - taken)


def _halved(given: tuple[TensorShape, ...], samples: int, flat: bool) -> tuple[TensorShape, ...]:
    """Halve what has so many samples; with `flat` also targets whose samples and tokens are one dimension."""

    def half(one: TensorShape) -> TensorShape:
        has = bool(one.shape) and (one.shape[0] % samples == 0 if flat else one.shape[0] == samples)
        return one._replace(shape=(one.shape[0] // 2, *one.shape[1:])) if has else one

    return tuple(map(half, given))


def _changes(training: ScriptTraining) -> Iterator[tuple[str, ScriptTraining]]:
    if training.zeroed_late:
        yield "zero-grad", replace(training, zeroed_late=False)
    if training.wrapper == "ddp" and not training.bucket_view:
        yield "bucket-view", replace(training, bucket_view=True)
    first = next(call for call in training.step.calls if call.function is None)
    read = (training.given[leaf.number].shape for leaf in first.leaves if isinstance(leaf, GivenTensor))
    batches = {shape[0] for shape in read if shape}
    if len(batches) == 1 and (samples := batches.pop()) % 2 == 0:
        twice = 2 * training.micro_batches
        for flat in (False, True):
            yield "micro-batch", replace(training, given=_halved(training.given, samples, flat), micro_batches=twice)
    if training.compute == "fp32" and training.param_dtype == torch.float32:
        yield "precision", replace(training, autocast=torch.bfloat16)
    if len(training.parts) > 1 and not training.checkpointed:
        yield "checkpointing", replace(training, checkpointed=True)
    if training.wrapper == "fsdp2" and training.kept_units:
        yield "zero-3", replace(training, kept_units=frozenset())
    elif training.wrapper == "ddp" and training.ranks > 1:
        divided = OptimizerUse(*(-(-one // training.ranks) for one in training.use))
        yield (
            "zero-3",
            replace(training, wrapper="fsdp2", units=(*training.parts, ""), kept_units=frozenset({""}), use=divided),
        )
