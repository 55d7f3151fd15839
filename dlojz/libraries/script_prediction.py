"""Predict the run of a user's script, from what is recognised of its training in its first step.

From outside are seen: what wraps the model, the shapes of its first batch, the operations from its output to the loss,
the optimizer, and when gradients are set to zero. A copy of the model without its wrappers is traced on fake tensors,
and replayed by the engine memory of that wrapper (`dlojz.prediction.forecast`), as a model of the catalogue is. No
measured figure enters.

Known are one process, DDP, and FSDP2 along one axis, with parameters in fp32. What else a script holds, such as data
sets in memory, is not predicted. Gradients set to zero after the step or before forward are freed before forward.

The copy is traced in a thread, which has no modes of the script's thread and which the watch does not listen to; random
numbers, printed text and gradients of the script are as before.

Source: torch 2.13, `distributed/fsdp/_fully_shard/_fsdp_state.py`, `_root_post_forward` and `_lazy_init` (the root is
not resharded after forward unless asked); `nn/parallel/distributed.py`, `_sync_buffers`.
"""

from __future__ import annotations

import contextlib
import io
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.libraries.first_step import (
    FirstStep,
    GivenTensor,
    ScriptModel,
    TensorShape,
    fsdp_units,
    plain_copy,
    unwrapped,
)
from dlojz.models.foreign.building import repeated_parts
from dlojz.prediction.engine_memory import DDP, EngineMemory, Moments
from dlojz.prediction.engine_memory_sharded import FSDP2
from dlojz.prediction.forecast import Forecast, StepReplay, forecast_of
from dlojz.prediction.shapes import DDP_FIRST_BUCKET_BYTES, FP32_BYTES, ModelShapes, fill_buckets, shapes_of
from dlojz.prediction.states import predict_states
from dlojz.prediction.trace import Allocation, Compute, Follower, TraceMark, trace
from dlojz.results.footprint import STATES, Category, Footprint, Memory, Traffic
from dlojz.results.record import ModuleMemory, ScriptLever, ScriptPrediction

NEAR_LIMIT = 0.7
"""Share of a rank's memory from which on the levers of a script are predicted too."""


class OptimizerUse(NamedTuple):
    """Bytes that an optimizer keeps from step to step, and takes besides during an update."""

    states_bytes: int
    update_bytes: int


def use_of(optimizers: Iterable[torch.optim.Optimizer], on_gpu: bool) -> OptimizerUse:
    """Run two updates of each optimizer on fake tensors of its parameters' (or its shards') shapes.

    Raises:
        LabError: if an update depends on the values of the gradients.
    """
    states_bytes = update_bytes = 0
    for optimizer in optimizers:
        try:
            kept, taken = _fake_updates(optimizer, on_gpu)
        except Exception as error:
            name = type(optimizer).__name__
            raise refusal(
                en=f"the update of {name} cannot be traced without memory ({type(error).__name__}).",
                fr=f"la mise à jour de {name} ne peut pas être suivie sans mémoire ({type(error).__name__}).",
            ) from error
        states_bytes, update_bytes = states_bytes + kept, max(update_bytes, taken)
    return OptimizerUse(states_bytes, update_bytes)


def _fake_updates(optimizer: torch.optim.Optimizer, on_gpu: bool) -> tuple[int, int]:
    shards = [[(_shard(one), one.requires_grad) for one in group["params"]] for group in optimizer.param_groups]
    with FakeTensorMode():
        fake: torch.optim.Optimizer = object.__new__(type(optimizer))
        fake.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
        fake.state = defaultdict(dict)
        fake.param_groups = []
        states: list[Tensor] = []
        for group, own in zip(optimizer.param_groups, shards, strict=True):
            parameters = [_fake_parameter(*one) for one in own]
            states += [tensor for one in parameters for tensor in (one, one.grad) if tensor is not None]
            at_once = {"foreach": True} if on_gpu and group.get("foreach", 0) is None and not group.get("fused") else {}
            fake.param_groups.append({**group, **at_once, "params": parameters})
        follower = Follower()
        follower.ignore(states)
        with follower:
            type(optimizer).step(fake)
            begun = len(follower.events)
            kept = [one for state in fake.state.values() for one in state.values() if isinstance(one, Tensor)]
            states_bytes = sum(one.numel() * one.element_size() for one in kept if one.ndim or not on_gpu)
            type(optimizer).step(fake)
    held = most = 0
    for event in follower.events[begun:]:
        held += event.delta_bytes if isinstance(event, Allocation) else 0
        most = max(most, held)
    return states_bytes, most


def _shard(parameter: Tensor) -> TensorShape:
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return TensorShape(tuple(own.shape), own.dtype)


def _fake_parameter(own: TensorShape, requires_grad: bool) -> nn.Parameter:
    made = nn.Parameter(torch.empty(own.shape, dtype=own.dtype), requires_grad=requires_grad)
    if requires_grad:
        made.grad = torch.empty(own.shape, dtype=own.dtype)
    return made


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

    def update(self, step: Moments) -> None:
        """Take what the script's optimizer takes."""
        step.ledger.hold_briefly("update", "workspace", self.update_use.update_bytes)


class _OneProcess(_OfScript):
    """Engine memory of a script's plain model."""


class _InDDP(_OfScript, DDP):
    """Engine memory of a script's model in DDP."""


class _InFSDP2(_OfScript, FSDP2):
    """Engine memory of a script's model in FSDP2."""

    def end_step(self, step: Moments) -> None:
        for unit in self.order:
            step.ledger.drop(("shard", unit))
            if unit in self.kept:
                step.ledger.drop(("weights", unit))


@dataclass(frozen=True)
class _Training:
    """What a script trains with, and how: all that its prediction needs.

    Args:
        units: of FSDP2, by path; empty otherwise.
        kept_units: those of them whose weights stay whole between forward and backward.
    """

    model: nn.Module
    parts: tuple[str, ...]
    step: FirstStep
    wrapper: str
    ranks: int
    use: OptimizerUse
    device: Device | None
    on_gpu: bool
    given: tuple[TensorShape, ...]
    units: tuple[str, ...] = ()
    kept_units: frozenset[str] = frozenset()
    param_dtype: torch.dtype = torch.float32
    reduce_bytes: int = FP32_BYTES
    group: str = "dp"
    bucket_view: bool = False
    bucket_bytes: tuple[int, int] = (0, 0)
    broadcasts_buffers: bool = False
    autocast: torch.dtype | None = None
    checkpointed: bool = False
    micro_batches: int = 1
    zeroed_late: bool = False

    @property
    def compute(self) -> Compute:
        """Precision of the trace: weights cast by FSDP2, products cast by autocast, or neither."""
        if self.param_dtype != torch.float32:
            return "bf16"
        recorded = any(call.autocast is not None for call in self.step.calls if call.function is None)
        return "autocast" if recorded or self.autocast is not None else "fp32"


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
            answer.append(_predicted(config, step, optimizers, device, on_gpu, groups or {}, limit_bytes))
        except LabError as error:
            answer.append(ScriptPrediction(recognised=recognised_in(step, optimizers), note=str(error)))
        except Exception as error:
            note = say(
                en=f"its model cannot be traced ({type(error).__name__}: {str(error)[:200]}).",
                fr=f"son modèle ne peut pas être suivi ({type(error).__name__} : {str(error)[:200]}).",
            )
            answer.append(ScriptPrediction(recognised=recognised_in(step, optimizers), note=note))

    with _undisturbed(step.models):
        thread = threading.Thread(target=work, name="dlojz-prediction", daemon=True)
        thread.start()
        thread.join()
    return answer[0]


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


def recognised_in(step: FirstStep, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, str]:
    """Describe what was recognised, in a few words each."""
    found = {"model": ", ".join(type(unwrapped(model)[0]).__name__ for model in step.models)}
    for model in step.models[:1]:
        inner, ddp = unwrapped(model)
        units = fsdp_units(inner)
        flat = [part for part in inner.modules() if isinstance(part, FullyShardedDataParallel)]
        found["wrapper"] = "DDP" if ddp else "FSDP2" if units else "FSDP1" if flat else "none"
        if flat:
            found["units"], found["sharding"] = str(len(flat)), flat[0].sharding_strategy.name
        if units:
            found["units"] = ", ".join(name or "(root)" for name, _ in units)
            kept = [name or "(root)" for name, unit in units if not _reshards(unit)]
            found["kept after forward"] = ", ".join(kept) or "none"
    found["optimizer"] = ", ".join(type(one).__name__ for one in optimizers)
    first = next((call for call in step.calls if call.function is None), None)
    if first is not None:
        read = [leaf for leaf in first.leaves if isinstance(leaf, GivenTensor)]
        found["batch"] = ", ".join(str(step.given[leaf.number]) for leaf in read)
        found["autocast"] = str(first.autocast or "none").removeprefix("torch.")
    found["backward passes"] = str(step.backwards)
    return found


def _reshards(unit: FSDPModule) -> bool:
    return any(group.post_forward_mesh_info is not None for group in unit._get_fsdp_state()._fsdp_param_groups)


def _predicted(
    config: RunConfig,
    step: FirstStep,
    optimizers: Sequence[torch.optim.Optimizer],
    device: Device | None,
    on_gpu: bool,
    groups: dict[str, str],
    limit_bytes: int | None,
) -> ScriptPrediction:
    training = _recognise(step, optimizers, device, on_gpu, groups, config.layout.world_size)
    forecast, model = _forecast(config, training)
    levers: tuple[ScriptLever, ...] = ()
    if limit_bytes is not None and (forecast.memory.needed_bytes or 0) >= NEAR_LIMIT * limit_bytes:
        levers = tuple(_levers(config, training, forecast.memory.needed_bytes or 0))
    note = "" if step.loss is not None else say(
        en="its loss was not seen: the prediction is without what computes it.",
        fr="sa loss n’a pas été vue : la prédiction ne compte pas ce qui la calcule.",
    )
    return ScriptPrediction(
        recognised=recognised_in(step, optimizers),
        note=note,
        footprint=Footprint(
            source="predicted",
            parameters=sum(one.numel() for one in training.model.parameters()),
            memory=forecast.memory,
            communication=tuple(_traffic(training, model)),
        ),
        at_peak=_modules_at_peak(forecast, training, model),
        levers=levers,
    )


def _refuse(en: str, fr: str) -> LabError:
    return refusal(en=f"its training is not predicted: {en}.", fr=f"son entraînement n’est pas prédit : {fr}.")


def _recognise(
    step: FirstStep,
    optimizers: Sequence[torch.optim.Optimizer],
    device: Device | None,
    on_gpu: bool,
    groups: dict[str, str],
    ranks: int,
) -> _Training:
    """Read off a script's objects what its prediction needs.

    Raises:
        LabError: if they are of a kind that is not predicted.
    """
    if not step.calls:
        raise _refuse("no model was called as a whole with gradients", "aucun modèle n’a été appelé en entier")
    if len(step.models) > 1:
        raise _refuse("it trains several models", "il entraîne plusieurs modèles")
    if step.updates_within_backward:
        raise _refuse("its optimizer updates within backward", "son optimiseur met à jour pendant la passe arrière")
    inner, ddp = unwrapped(step.models[0])
    if type(step.models[0]).__module__.startswith("deepspeed."):
        raise _refuse("DeepSpeed wraps its model", "DeepSpeed enveloppe son modèle")
    if any(isinstance(part, FullyShardedDataParallel) for part in inner.modules()):
        raise _refuse(
            "its model is in FSDP1, which `fully_shard` replaces",
            "son modèle est dans FSDP1, que `fully_shard` remplace",
        )
    parameters = list(inner.parameters())
    if any(one.dtype != torch.float32 for one in parameters):
        raise _refuse("not all its parameters are in fp32", "ses paramètres ne sont pas tous en fp32")
    units = fsdp_units(inner)
    if not units and any(isinstance(one, DTensor) for one in parameters):
        raise _refuse("its model is divided by other means than FSDP2", "son modèle est divisé autrement que par FSDP2")
    plain = plain_copy(inner)
    training = _Training(
        model=plain,
        parts=tuple(repeated_parts(plain) or _children(plain)),
        step=step,
        wrapper="ddp" if ddp else "none",
        ranks=ranks if ddp else 1,
        use=use_of(optimizers, on_gpu),
        device=device,
        on_gpu=on_gpu,
        given=tuple(step.given),
        micro_batches=max(1, step.backwards),
        zeroed_late=step.zeroed_late,
    )
    if units:
        return _in_units(training, units, groups)
    if ddp is None:
        return training
    cap_bytes = int(ddp.bucket_bytes_cap)
    limits = (DDP_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else cap_bytes, cap_bytes)
    group = str(ddp.process_group.group_name)
    return replace(
        training,
        ranks=int(ddp.process_group.size()),
        group=groups.get(group, "dp"),
        bucket_view=bool(ddp.gradient_as_bucket_view),
        bucket_bytes=limits,
        broadcasts_buffers=bool(ddp.forward_sync_buffers),
    )


def _children(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_children() if any(True for _ in part.parameters())]


def _in_units(training: _Training, units: list[tuple[str, FSDPModule]], groups: dict[str, str]) -> _Training:
    """Add FSDP2's units.

    Raises:
        LabError: if they are nested, leave parameters out, or go along several axes.
    """
    names = [name for name, _ in units if name]
    states = {name: unit._get_fsdp_state() for name, unit in units}
    held = [group for state in states.values() for group in state._fsdp_param_groups]
    if "" not in states and any(not name.startswith(tuple(f"{one}." for one in names)) for name in _owned(training)):
        raise _refuse(
            "a part of its model is in no unit of FSDP2", "une partie du modèle n’est dans aucune unité FSDP2"
        )
    if any(name.startswith(f"{other}.") for name in names for other in names):
        raise _refuse("units of FSDP2 are nested", "des unités FSDP2 sont imbriquées")
    if any(len(state._fsdp_param_groups) > 1 or len(state._modules_to_run_forward) > 0 for state in states.values()):
        raise _refuse("a unit of FSDP2 has several modules", "une unité FSDP2 a plusieurs modules")
    if len({group.mesh_info.mesh.ndim for group in held} | {1}) > 1:
        raise _refuse("FSDP2 goes along several axes", "FSDP2 suit plusieurs axes")
    if any(not one.requires_grad for one in training.model.parameters()):
        raise _refuse("FSDP2 holds frozen parameters", "FSDP2 a des paramètres gelés")
    if training.step.synchronised < training.step.backwards:
        raise _refuse("FSDP2 accumulates whole gradients", "FSDP2 accumule des gradients entiers")
    if any(type(group.offload_policy).__name__ != "OffloadPolicy" for group in held):
        raise _refuse("FSDP2 offloads to the host", "FSDP2 décharge vers l’hôte")
    first = held[0]
    dtype = first.mp_policy.param_dtype or torch.float32
    reduced = first.mp_policy.reduce_dtype or dtype
    kept = frozenset(name for name, unit in units if not _reshards(unit))
    shard_group = getattr(first.mesh_info, "shard_process_group")  # noqa: B009 - of a mesh that shards
    return replace(
        training,
        parts=tuple(names),
        wrapper="fsdp2",
        ranks=int(shard_group.size()),
        units=tuple(states),
        kept_units=kept,
        param_dtype=dtype,
        reduce_bytes=reduced.itemsize,
        group=groups.get(str(shard_group.group_name), "dp"),
    )


def _owned(training: _Training) -> list[str]:
    return [name for name, _ in training.model.named_parameters()]


def _config_of(config: RunConfig, training: _Training) -> RunConfig:
    """The nearest configuration of the lab's: degrees, stage, precision of the weights, micro-batches."""
    sharded = training.wrapper == "fsdp2"
    layout = Layout(
        dp=training.ranks,
        zero=3 if sharded and training.ranks > 1 else 0,
        micro_batches=training.micro_batches,
        gradient_as_bucket_view=training.bucket_view and training.ranks > 1,
    )
    precision = "fp32" if training.param_dtype == torch.float32 else "bf16"
    return config.model_copy(update={"layout": layout, "precision": precision, "script": None})


def _forecast(config: RunConfig, training: _Training) -> tuple[Forecast, ScriptModel]:
    model = ScriptModel(training.model, training.parts, training.step, training.autocast)
    if training.checkpointed:
        for part in model.blocks[:-1]:
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    try:
        traced = trace(
            model,
            *(torch.empty(one.shape, dtype=one.dtype, device="meta") for one in training.given),
            compute=training.compute,
            loss=lambda value: value,
            on_gpu=training.on_gpu,
        )
    finally:
        model.held.clear()
        for part in model.blocks:
            vars(part).pop("forward", None)
    ready = (event for event in traced.events if isinstance(event, TraceMark) and event.what == "ready")
    model.ready = tuple(event.name for event in ready)
    lab = _config_of(config, training)
    shapes = shapes_of(model)
    overlay = _overlay(lab, training, shapes, model)
    step = StepReplay(lab, traced, _states(lab, training, shapes, overlay), overlay)
    return forecast_of(step, 0, training.device), model


def _trained(shapes: ModelShapes, model: nn.Module) -> ModelShapes:
    """The same shapes without frozen parameters."""
    own = tuple(one for one in shapes.parameters if model.get_parameter(one.name).requires_grad)
    return replace(shapes, parameters=own)


def _overlay(lab: RunConfig, training: _Training, shapes: ModelShapes, model: nn.Module) -> _OfScript:
    trained = _trained(shapes, model)
    overlay: _OfScript
    if training.wrapper == "fsdp2":
        overlay = sharded = _InFSDP2(lab, shapes)
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


def _states(lab: RunConfig, training: _Training, shapes: ModelShapes, overlay: _OfScript) -> Memory:
    held = predict_states(lab, shapes)
    if training.wrapper != "fsdp2":
        held = held.model_copy(update={"gradients_bytes": FP32_BYTES * overlay.shapes.num_parameters})
    buffers = {id(one): one.numel() * one.element_size() for one in training.model.buffers()}
    known = {
        "weights_bytes": (held.weights_bytes or 0) + overlay.gathered_bytes(),
        "optimizer_bytes": training.use.states_bytes,
        "buffers_bytes": sum(buffers.values()),
    }
    return held.model_copy(update=known)


def _traffic(training: _Training, model: ScriptModel) -> Iterator[Traffic]:
    """What the wrapper hands to each collective in a step."""
    shapes, ranks = shapes_of(model), training.ranks
    if ranks == 1 or training.wrapper == "none":
        return
    line = partial(Traffic, group=training.group, group_size=ranks)
    if training.wrapper == "ddp":
        named = {one.name: one for one in _trained(shapes, model).parameters}
        trained = [named[name] for name in model.ready]
        first_bytes, limit_bytes = training.bucket_bytes
        buckets = fill_buckets(trained, limit_bytes, first_bytes)
        times = training.step.synchronised or 1
        numel = sum(one.numel for one in trained)
        yield line(collective="all_reduce", count=times * len(buckets), message_bytes=times * FP32_BYTES * numel)
        buffers = {id(one): one for one in training.model.buffers()}.values()
        if training.broadcasts_buffers and buffers:
            kinds = len({one.dtype for one in buffers})
            num_bytes = sum(one.numel() * one.element_size() for one in buffers)
            yield line(collective="broadcast", count=times * kinds, message_bytes=times * num_bytes)
        return
    kept = {f"blocks.{number}" for number, path in enumerate((*training.parts, "")) if path in training.kept_units}
    gathers = gathered = reductions = reduced = 0
    for unit in shapes.units():
        numel = ranks * sum(one.padded_rows_numel(ranks) for one in unit)
        times = 1 if f"blocks.{unit[-1].block}" in kept else 2
        gathers, gathered = gathers + times, gathered + times * numel * training.param_dtype.itemsize
        reductions, reduced = reductions + 1, reduced + numel * training.reduce_bytes
    times = training.micro_batches
    yield line(collective="all_gather", count=times * gathers, message_bytes=times * gathered)
    yield line(collective="reduce_scatter", count=times * reductions, message_bytes=times * reduced)


def _modules_at_peak(forecast: Forecast, training: _Training, model: ScriptModel) -> tuple[ModuleMemory, ...]:
    """Bytes of the model's parts at the peak, the largest first; states go with the parameters that they belong to."""
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
    named = [(_path(block, paths), dict(categories)) for block, categories in held.items()]
    named.sort(key=lambda pair: -sum(pair[1].values()))
    return tuple(ModuleMemory(module=path, bytes_by_category=categories) for path, categories in named)


def _path(block: str, paths: Sequence[str]) -> str:
    """The path in the script's model of a block; of the rest of the model `(rest)`, of no module nothing."""
    number = block.removeprefix("blocks.")
    return (paths[int(number)] or "(rest)") if number.isdecimal() else ""


def _levers(config: RunConfig, training: _Training, now: int) -> Iterator[ScriptLever]:
    """Predict what single changes of the script would save."""
    found: set[str] = set()
    for name, changed in _changes(training):
        if name in found:
            continue
        try:
            taken = _forecast(config, changed)[0].memory.needed_bytes or 0
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


def _changes(training: _Training) -> Iterator[tuple[str, _Training]]:
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
    if training.compute == "fp32":
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
