"""Recognise how a user's script trains, from the objects of its first step: what wraps the model, and how.

Known are one process, DDP, FSDP1, FSDP2, DTensor plans, torch's pipelines and DeepSpeed's ZeRO; what cannot be
predicted is refused in one sentence.

Source: torch 2.13, `distributed/fsdp/_fully_shard/_fsdp_state.py`, `_root_post_forward` and `_lazy_init` (the root is
not resharded after forward unless asked); `nn/parallel/distributed.py`, `_sync_buffers`. DeepSpeed 0.19,
`runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`, `runtime/zero/config.py`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences
from dlojz.hardware import Device
from dlojz.libraries.scripts.first_step import (
    FirstStep,
    GivenTensor,
    TensorShape,
    fsdp_units,
    is_deepspeed_pipeline,
    param_groups,
    plain_copy,
    schedule_stages,
    unwrapped,
)
from dlojz.libraries.seen_engines import COMPRESSING, hook_of
from dlojz.models.foreign.building import repeated_parts
from dlojz.prediction.shapes import DDP_FIRST_BUCKET_BYTES, FP32_BYTES
from dlojz.prediction.trace import Allocation, Compute, Follower
from dlojz.results.footprint import Category

TEXTS = Sentences(Path(__file__).parent / "data" / "script_training.md")


class OptimizerUse(NamedTuple):
    """Bytes that an optimizer keeps from step to step and takes besides during an update, and FLOPs of its products."""

    states_bytes: int
    update_bytes: int
    flops: int = 0


_NO_USE = OptimizerUse(0, 0)


def zero_redundancy_class() -> tuple[type[Any], ...]:
    """Return torch's ZeRO-1 if the script has imported it: to import it compiles seven optimizers that nobody uses."""
    package = sys.modules.get("torch.distributed.optim")
    return (package.ZeroRedundancyOptimizer,) if package else ()


def acting(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Leave out optimizers that a sharding one has made, and calls itself."""
    all_optimizers = list(optimizers)
    within = {id(optimizer.optim) for optimizer in all_optimizers if isinstance(optimizer, zero_redundancy_class())}
    return [optimizer for optimizer in all_optimizers if id(optimizer) not in within]


def use_of(
    optimizers: Iterable[torch.optim.Optimizer],
    on_gpu: bool,
    in_turn: Sequence[Tensor] = (),
    without: frozenset[int] = frozenset(),
) -> OptimizerUse:
    """Run two updates of each optimizer on fake tensors of its parameters' (or its shards') shapes.

    Args:
        on_gpu: whether they do so on a GPU.
        in_turn: tensors that an optimizer updates one after the other, where they are not its parameters.
        without: identities of parameters that get no gradient.

    Raises:
        LabError: if an optimizer wraps another, or its update cannot be run without numbers.
    """
    uses = []
    for sharding in optimizers:
        optimizer = sharding.optim if isinstance(sharding, zero_redundancy_class()) else sharding
        name = type(optimizer).__name__
        if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
            raise _refuse("another optimizer inside", name=name)
        try:
            if in_turn:
                tensor_uses = [_fake_updates(optimizer, on_gpu, [[(_shard(tensor), True)]]) for tensor in in_turn]
                states, update_bytes, flops = zip(*tensor_uses, strict=True)
                use = OptimizerUse(sum(states), max(update_bytes), sum(flops))
            else:
                shards = [
                    [
                        (_shard(parameter), parameter.requires_grad and id(parameter) not in without)
                        for parameter in group["params"]
                    ]
                    for group in optimizer.param_groups
                ]
                try:
                    use = _fake_updates(optimizer, on_gpu, shards)
                except KeyError:  # before torch 2.13, Adagrad makes its states when it is built, and never again
                    use = _fake_updates(optimizer, on_gpu, shards, _state_shapes(optimizer))
            uses.append(use._replace(states_bytes=use.states_bytes + _states_of_frozen(optimizer, on_gpu)))
        except Exception as error:
            raise TEXTS.refusal("update", "refusal", name=name, error=type(error).__name__) from error
    return OptimizerUse(
        sum(use.states_bytes for use in uses),
        max((use.update_bytes for use in uses), default=0),
        sum(use.flops for use in uses),
    )


class _UpdateFollower(Follower):
    """Follower of an update: a number that it asks of a fake tensor, such as a norm, is 1, as no size depends on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _states_of_frozen(optimizer: torch.optim.Optimizer, on_gpu: bool) -> int:
    """Bytes of states of parameters that are never updated: an optimizer like Adagrad makes them when it is built."""
    frozen = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if not parameter.requires_grad
    ]
    states = [
        state
        for parameter in frozen
        for state in optimizer.state.get(parameter, {}).values()
        if isinstance(state, Tensor)
    ]
    shards = [state.to_local() if isinstance(state, DTensor) else state for state in states]
    return sum(shard.numel() * shard.element_size() for shard in shards if shard.ndim or not on_gpu)


def _fake_updates(
    optimizer: torch.optim.Optimizer,
    on_gpu: bool,
    shards: Sequence[Sequence[tuple[TensorShape, bool]]],
    built_with: Sequence[Sequence[StateShapes]] = (),
) -> OptimizerUse:
    with FakeTensorMode():
        fake: torch.optim.Optimizer = object.__new__(type(optimizer))
        fake.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
        fake.state = defaultdict(dict)
        fake.param_groups = []
        states: list[Tensor] = []
        for number, (group, group_shards) in enumerate(zip(optimizer.param_groups, shards, strict=False)):
            parameters = [_fake_parameter(*shard) for shard in group_shards]
            if built_with:
                pairs = zip(parameters, built_with[number], strict=True)
                fake.state.update(
                    (parameter, _fake_state(shapes)) for parameter, shapes in pairs if parameter.requires_grad
                )
            states += [
                tensor for parameter in parameters for tensor in (parameter, parameter.grad) if tensor is not None
            ]
            # On a GPU foreach is torch's default, which it would not take for fake tensors of the CPU.
            at_once = {"foreach": True} if on_gpu and group.get("foreach", 0) is None and not group.get("fused") else {}
            fake.param_groups.append({**group, **at_once, "params": parameters})
        follower = _UpdateFollower()
        follower.ignore(states)
        with follower:
            type(optimizer).step(fake)
            begun, flops = len(follower.events), follower.flops
            state_tensors = [
                tensor for state in fake.state.values() for tensor in state.values() if isinstance(tensor, Tensor)
            ]
            # On a GPU scalar states, such as a counter of steps, stay on the host.
            states_bytes = sum(
                tensor.numel() * tensor.element_size() for tensor in state_tensors if tensor.ndim or not on_gpu
            )
            # A second update: what it takes besides the states, which exist by now.
            type(optimizer).step(fake)
    held_bytes = peak_bytes = 0
    for event in follower.events[begun:]:
        held_bytes += event.delta_bytes if isinstance(event, Allocation) else 0
        peak_bytes = max(peak_bytes, held_bytes)
    return OptimizerUse(states_bytes, peak_bytes, follower.flops - flops)


def _shard(parameter: Tensor) -> TensorShape:
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return TensorShape(tuple(shard.shape), shard.dtype)


def _fake_parameter(spec: TensorShape, requires_grad: bool) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype), requires_grad=requires_grad)
    if requires_grad:
        parameter.grad = torch.empty(spec.shape, dtype=spec.dtype)
    return parameter


StateShapes = dict[str, TensorShape]


def _state_shapes(optimizer: torch.optim.Optimizer) -> list[list[StateShapes]]:
    """List the states of each group's parameters, without their numbers."""
    return [
        [{name: _shard(state) for name, state in optimizer.state[parameter].items()} for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def _fake_state(shapes: StateShapes) -> dict[str, Tensor]:
    # A counter of steps is read as a number, which a fake tensor has if it is made of one.
    return {
        name: torch.empty(spec.shape, dtype=spec.dtype) if spec.shape else torch.tensor(0, dtype=spec.dtype)
        for name, spec in shapes.items()
    }


class ZeroOptions(NamedTuple):
    """Options of DeepSpeed that its memory and its messages depend on.

    Attributes:
        stage: of ZeRO, 0 to 3.
        bucket_elements: gradients that are reduced at once.
        groups: trained parameters of the copy, flattened group by group in this order; in stages 1 and 2.
        checks_bytes: of each message of the update that asks for the gradients' norm, or for infinite ones.
        keeps_fp32_gradients: whether gradients of 16-bit weights are kept in fp32.
        sub_group_elements: elements of a shard that stage 3 updates at once.
    """

    stage: int
    bucket_elements: int
    groups: tuple[tuple[nn.Parameter, ...], ...] = ()
    checks_bytes: tuple[int, ...] = ()
    keeps_fp32_gradients: bool = False
    sub_group_elements: int | None = None


@dataclass(frozen=True)
class ScriptTraining:
    """What a script trains with, and how: all that its prediction needs.

    Args:
        units: of FSDP2, by path; empty otherwise.
        kept_units: those of them whose weights stay whole between forward and backward.
        ranks: that divide the model, or under DDP that hold it whole.
        replicas: groups of such ranks, each with all shards (HSDP).
        in_turn: tensors that they update one after the other, where these are not their parameters.
        optimizer_ranks: ranks among which states and update are divided.
        copied: copy of each parameter, by the identity of the script's own.
        others: bytes that other trained models and optimizers of the script hold, by category.
        use: of the optimizers, once the trace has told which parameters get a gradient.
        reduce_bytes: of an element of a gradient that is sent; None where it is the gradient's own.
        finds_unused: whether DDP looks in each step for parameters that forward has not used.
        not_reduced: parameters whose gradients DDP leaves alone.
        messages_known: False where a custom hook sends DDP's gradients.
    """

    model: nn.Module
    parts: tuple[str, ...]
    step: FirstStep
    wrapper: str
    ranks: int
    device: Device | None
    on_gpu: bool
    given: tuple[TensorShape, ...]
    units: tuple[str, ...] = ()
    kept_units: frozenset[str] = frozenset()
    param_dtype: torch.dtype = torch.float32
    reduce_bytes: int | None = None
    finds_unused: bool = False
    not_reduced: frozenset[str] = frozenset()
    group: str = "dp"
    replicas: int = 1
    replica_group: str = "dp"
    bucket_view: bool = False
    bucket_bytes: tuple[int, int] = (0, 0)
    broadcasts_buffers: bool = False
    messages_known: bool = True
    autocast: torch.dtype | None = None
    checkpointed: bool = False
    micro_batches: int = 1
    zeroed_late: bool = False
    zero: ZeroOptions | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    in_turn: tuple[Tensor, ...] = ()
    optimizer_ranks: int = 1
    copied: Mapping[int, Any] = field(default_factory=dict)
    use: OptimizerUse = _NO_USE
    others: Mapping[Category, int] = field(default_factory=dict)

    def with_use(self, ready: frozenset[int]) -> ScriptTraining:
        """Add what the optimizers keep and take.

        Args:
            ready: identities of the copy's parameters that get a gradient; DeepSpeed gives zeros to the others.

        Raises:
            LabError: if an update cannot be run without numbers.
        """
        parameters = {
            number: parameter for number, parameter in self.copied.items() if isinstance(parameter, nn.Parameter)
        }
        without = frozenset(number for number, parameter in parameters.items() if id(parameter) not in ready)
        use = use_of(self.optimizers, self.on_gpu, self.in_turn, frozenset() if self.zero else without)
        # Each rank has its part, rounded up.
        return replace(self, use=OptimizerUse(*(-(-amount // self.optimizer_ranks) for amount in use)))

    @property
    def compute(self) -> Compute:
        """Precision of the trace: weights cast by FSDP2, products cast by autocast, or neither.

        DeepSpeed's weights of 16 bit are so in the copy already.
        """
        if self.param_dtype != torch.float32 and self.zero is None:
            return "bf16"
        recorded = any(call.autocast is not None for call in self.step.calls if call.function is None)
        return "autocast" if recorded or self.autocast is not None else "fp32"


def recognised_in(step: FirstStep, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, str]:
    """Describe what was recognised, in a few words each."""
    descriptions = {"model": ", ".join(type(unwrapped(model)[0]).__name__ for model in step.models)}
    for model in step.models[:1]:
        inner, around = unwrapped(model)
        units = fsdp_units(inner)
        flat = [part for part in inner.modules() if isinstance(part, FullyShardedDataParallel)]
        descriptions["wrapper"] = "FSDP2" if units else "FSDP1" if flat else "none"
        if isinstance(around, DistributedDataParallel):
            descriptions["wrapper"] = "DDP"
            if hook := hook_of(around):
                descriptions["communication hook"] = getattr(hook, "__name__", type(hook).__name__)
        elif around is not None:
            descriptions["wrapper"], descriptions["ZeRO"] = "DeepSpeed", str(int(around._config.zero_config.stage))
        elif is_deepspeed_pipeline(inner):
            descriptions["wrapper"] = "DeepSpeed (pipeline)"
        if flat:
            descriptions["units"], descriptions["sharding"] = str(len(flat)), flat[0].sharding_strategy.name
        if units:
            descriptions["units"] = ", ".join(name or "(root)" for name, _ in units)
            if any(group.mesh_info.mesh.ndim > 1 for group in _param_groups(units)):
                descriptions["wrapper"] = "FSDP2 (HSDP)"
            kept_units = [name or "(root)" for name, unit in units if not _reshards(unit)]
            descriptions["kept after forward"] = ", ".join(kept_units) or "none"
        if _is_tensor_parallel(inner):
            descriptions["wrapper"] = f"FSDP2, {TENSOR_PARALLEL}" if units else TENSOR_PARALLEL
            descriptions["mesh"] = _mesh_of(inner)
    if step.schedule is not None:
        stages = schedule_stages(step.schedule)
        descriptions["wrapper"] = f"pipelining ({type(step.schedule).__name__})"
        descriptions["stages"] = f"{', '.join(str(stage.stage_index) for stage in stages)} / {stages[0].num_stages}"
        descriptions["micro-batches"] = str(step.schedule._n_microbatches)
    descriptions["optimizer"] = ", ".join(map(_optimizer_title, acting(optimizers)))
    model_call = next((call for call in step.calls if call.function is None), None)
    if model_call is not None:
        inputs = [leaf for leaf in model_call.leaves if isinstance(leaf, GivenTensor)]
        descriptions["batch"] = ", ".join(str(step.given[leaf.number]) for leaf in inputs)
        descriptions["autocast"] = str(model_call.autocast or "none").removeprefix("torch.")
    descriptions["backward passes"] = str(step.backwards)
    return descriptions


def _optimizer_title(optimizer: torch.optim.Optimizer) -> str:
    inner = f" ({type(optimizer.optim).__name__})" if isinstance(optimizer, zero_redundancy_class()) else ""
    return type(optimizer).__name__ + inner


def _broadcasts_buffers(ddp: DistributedDataParallel) -> bool:
    name = "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"  # before torch 2.13
    return bool(getattr(ddp, name))


def _reshards(unit: FSDPModule) -> bool:
    return any(group.post_forward_mesh_info is not None for group in param_groups(unit))


TENSOR_PARALLEL = "DTensor (parallelize_module)"


def _is_tensor_parallel(module: nn.Module) -> bool:
    """Whether DTensors divide a model by other means than FSDP2."""
    units = fsdp_units(module)
    if not units:
        return any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return any(parameter.is_dtensor for group in _param_groups(units) for parameter in group.fsdp_params)


def _param_groups(units: Iterable[tuple[str, FSDPModule]]) -> list[Any]:
    return [group for _, unit in units for group in param_groups(unit)]


def _mesh_of(module: nn.Module) -> str:
    meshes = [parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)]
    mesh = max(meshes, key=lambda candidate: candidate.ndim)
    names = mesh.mesh_dim_names or [str(number) for number in range(mesh.ndim)]
    return " × ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))


def _refuse(key: str, **values: object) -> LabError:
    return TEXTS.refusal("not predicted", "refusal", reason=TEXTS.sentence("not predicted", key, **values))


def recognise(
    step: FirstStep,
    optimizers: Sequence[torch.optim.Optimizer],
    device: Device | None,
    on_gpu: bool,
    groups: dict[str, str],
    ranks: int,
) -> ScriptTraining:
    """Read off a script's objects what its prediction needs.

    Raises:
        LabError: if they are of a kind that is not predicted.
    """
    if not step.calls:
        raise _refuse("no whole model")
    if len(step.models) > 1 and step.schedule is None:
        raise _refuse("several models")
    if step.updates_within_backward:
        raise _refuse("updates within backward")
    inner, around = unwrapped(step.models[0])
    if is_deepspeed_pipeline(inner):  # more micro-batches are in flight in its first stage than in its last
        raise _refuse("deepspeed pipeline")
    if step.calls[0].method and not getattr(inner, "automatic_optimization", True):
        raise _refuse("manual optimization")
    if step.schedule is not None or _is_run_on_fakes(inner) or (fsdp_units(inner) and _is_special(inner, optimizers)):
        return _on_fakes(step, optimizers, device, on_gpu)
    ddp = around if isinstance(around, DistributedDataParallel) else None
    engine: Any = around if ddp is None else None
    units = fsdp_units(inner)
    copied: dict[int, Any] = {}
    plain = plain_copy(inner, copied)
    in_turn = getattr(engine.optimizer, "fp32_partitioned_groups_flat", ()) if engine is not None else ()
    training = ScriptTraining(
        model=plain,
        parts=tuple(repeated_parts(plain) or _children(plain)),
        step=step,
        wrapper="ddp" if ddp else "none",
        ranks=ranks if ddp else 1,
        device=device,
        on_gpu=on_gpu,
        given=tuple(step.given),
        micro_batches=max(1, step.backwards),
        zeroed_late=step.zeroed_late,
        optimizers=tuple(acting(optimizers)),
        in_turn=tuple(in_turn),
        copied=copied,
    )
    if units:
        return _in_units(training, units, groups)
    if engine is not None:
        return _in_deepspeed(training, engine, copied)
    if ddp is None:
        return training
    if getattr(ddp, "mixed_precision", None) is not None:
        raise _refuse("mixed precision of ddp")
    cap_bytes = int(ddp.bucket_bytes_cap)
    # torch's first bucket is small, unless the script has chosen a size.
    limits = (DDP_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else cap_bytes, cap_bytes)
    group = str(ddp.process_group.group_name)
    return replace(
        training,
        ranks=int(ddp.process_group.size()),
        group=groups.get(group, "dp"),
        bucket_view=bool(ddp.gradient_as_bucket_view),
        bucket_bytes=limits,
        broadcasts_buffers=_broadcasts_buffers(ddp),
        reduce_bytes=2 if hook_of(ddp) in COMPRESSING else None,
        messages_known=hook_of(ddp) in (None, *COMPRESSING),
        finds_unused=bool(ddp.find_unused_parameters) and not ddp.static_graph,
        not_reduced=frozenset(getattr(ddp, "parameters_to_ignore", ())),
    )


def _is_run_on_fakes(module: nn.Module) -> bool:
    """Whether the wrapper's own code is run on fake tensors, as no engine memory of the lab's describes it."""
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        return True
    units = fsdp_units(module)
    names = [name for name, _ in units if name]
    nested = any(name.startswith(f"{ancestor}.") for name in names for ancestor in names)
    shared = any(len(param_groups(unit)) > 1 or unit._get_fsdp_state()._modules_to_run_forward for _, unit in units)
    meshes = {group.mesh_info.mesh for group in _param_groups(units)}
    return nested or shared or len(meshes) > 1 or _is_tensor_parallel(module)


def _is_special(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether units of FSDP2 hold other types than fp32, or an optimizer reads more of a parameter than a shard."""
    kinds = tuple(getattr(torch.optim, name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name))
    types = {parameter.dtype for parameter in module.parameters()}
    return types != {torch.float32} or any(isinstance(optimizer, kinds) for optimizer in optimizers)


def _on_fakes(
    step: FirstStep, optimizers: Sequence[torch.optim.Optimizer], device: Device | None, on_gpu: bool
) -> ScriptTraining:
    """Describe a training whose wrappers run on fake tensors."""
    for model in step.models:
        _, around = unwrapped(model)
        if around is not None:
            name = "DDP" if isinstance(around, DistributedDataParallel) else "DeepSpeed"
            raise _refuse("divided otherwise too", name=name)
    inner = unwrapped(step.models[0])[0]
    return ScriptTraining(
        model=inner,
        parts=tuple(repeated_parts(inner) or _children(inner)),
        step=step,
        wrapper="fakes",
        ranks=1,
        device=device,
        on_gpu=on_gpu,
        given=tuple(step.given),
        micro_batches=1 if step.schedule is not None else max(1, step.backwards),
        zeroed_late=step.zeroed_late,
        optimizers=tuple(acting(optimizers)),
    )


def _children(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_children() if any(True for _ in part.parameters())]


def _in_units(training: ScriptTraining, units: list[tuple[str, FSDPModule]], groups: dict[str, str]) -> ScriptTraining:
    """Add FSDP2's units."""
    names = [name for name, _ in units if name]
    states = {name: unit._get_fsdp_state() for name, unit in units}
    unit_groups = _param_groups(units)
    if "" not in states and any(
        not name.startswith(tuple(f"{unit_name}." for unit_name in names))
        for name, _ in training.model.named_parameters()
    ):
        raise _refuse("outside of all units")
    if training.step.synchronised < training.step.backwards:
        raise _refuse("whole gradients")
    if any(type(group.offload_policy).__name__ != "OffloadPolicy" for group in unit_groups):
        raise _refuse("offloads")
    policy_group = unit_groups[0]
    dtype = policy_group.mp_policy.param_dtype or torch.float32
    reduced = policy_group.mp_policy.reduce_dtype or dtype
    kept_units = frozenset(name for name, unit in units if not _reshards(unit))
    shard_group = getattr(policy_group.mesh_info, "shard_process_group")  # noqa: B009 - of a mesh that shards
    between = getattr(policy_group.mesh_info, "replicate_process_group", None)
    return replace(
        training,
        parts=tuple(names),
        wrapper="fsdp2",
        ranks=int(shard_group.size()),
        units=tuple(states),
        kept_units=kept_units,
        param_dtype=dtype,
        reduce_bytes=reduced.itemsize,
        group=groups.get(str(shard_group.group_name), "dp"),
        replicas=int(between.size()) if between is not None else 1,
        replica_group=groups.get(str(between.group_name), "dp") if between is not None else "dp",
    )


_NOT_ZERO: tuple[tuple[str, object], ...] = (
    ("zero_hpz_partition_size", 1),
    ("zero_quantized_weights", False),
    ("zero_quantized_nontrainable_weights", False),
    ("zero_quantized_gradients", False),
    ("mics_shard_size", -1),
    ("zenflow", None),
    ("parameter_alignment", False),
    ("use_multi_rank_bucket_allreduce", True),
    ("legacy_stage1", False),
    ("contiguous_gradients", True),
)
"""Options of DeepSpeed's ZeRO, with the one value of each that is predicted."""
_TEXTBOOK = ("param_persistence_threshold", "max_reuse_distance", "prefetch_bucket_size")
"""Options of stage 3 that must be 0: each module's weights are gathered for it alone, and freed after it."""


def _in_deepspeed(training: ScriptTraining, engine: Any, copied: dict[int, Any]) -> ScriptTraining:
    """Add DeepSpeed's engine."""
    zero, optimizer = engine._config.zero_config, engine.optimizer
    stage = int(zero.stage)
    _check_deepspeed(engine, zero, stage)
    parameters = list(training.model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    types = {parameter.dtype for parameter in parameters}
    if len(types) > 1:
        raise _refuse("several types")
    if stage == 3 and len(trained) < len(parameters):
        raise _refuse("frozen parameters")
    dtype = types.pop()
    groups: tuple[tuple[nn.Parameter, ...], ...] = ()
    checks = (8,) * (len(optimizer.fp16_groups) if stage == 3 else 0)  # of the gradients of each sub-group
    if stage == 0 and dtype == torch.float32 and engine.gradient_clipping() > 0:
        checks = (FP32_BYTES,)
    if stage in (1, 2):
        groups = tuple(
            tuple(copied[id(parameter)] for parameter in group) for group in optimizer.round_robin_bit16_groups
        )
        norms = (FP32_BYTES,) * len(groups) if optimizer.compute_grad_norm else ()
        checks = (*norms, 1) if optimizer.check_grad_overflow else norms
    return replace(
        training,
        wrapper="deepspeed",
        ranks=int(engine.dp_world_size),
        param_dtype=dtype,
        zero=ZeroOptions(
            stage=stage,
            bucket_elements=int(zero.reduce_bucket_size),
            groups=groups,
            checks_bytes=checks,
            keeps_fp32_gradients=dtype != torch.float32 and engine.get_data_types()[1] == torch.float32,
            sub_group_elements=max(1, int(zero.sub_group_size)) if stage == 3 else None,
        ),
    )


def _check_deepspeed(engine: Any, zero: Any, stage: int) -> None:
    """Refuse what is not predicted of DeepSpeed."""
    if type(engine).__name__ != "DeepSpeedEngine":
        raise _refuse("another engine", name=type(engine).__name__)
    if engine.has_moe_layers:
        raise _refuse("experts")
    if engine.torch_autocast_enabled():
        raise _refuse("torch_autocast")
    if type(engine.optimizer).__name__ == "BF16_Optimizer":
        raise _refuse("sums in fp32")
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, name)
        if offload is not None and str(getattr(offload.device, "value", offload.device)) != "none":
            raise _refuse("deepspeed offloads", name=name)
    if stage:
        for name, predicted in _NOT_ZERO:
            setting = getattr(zero, name, predicted)
            if setting != predicted:
                raise _refuse("option of deepspeed", name=name, setting=setting)
    if stage in (1, 2) and zero.overlap_comm:
        raise _refuse("overlap_comm")
    if stage == 3:
        for name in _TEXTBOOK:
            setting = int(getattr(zero, name))
            if setting:
                raise _refuse("prefetches", name=name, setting=setting)
