"""DeepSpeed engines: ZeRO 0 to 3 and its pipeline.

The same optimizer as in every other engine is given to DeepSpeed, which wraps it. Stage 0 replicates all, 1 shards
optimizer states, 2 gradients too, 3 weights too. Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models" (arXiv 1910.02054).

For checkpoints, weights in fp32 and moments are read out of DeepSpeed's optimizers and put back, one whole parameter at
a time, into the copy that is updated and the weights that forward reads. DeepSpeed's own checkpoints (one file per
rank, pickled) are neither written nor read. Source: DeepSpeed 0.19, `utils/tensor_fragment.py`
(`safe_get_full_fp32_param` and the like, whose setter forgets the padding of stage 3 and the weights of 16 bit),
`runtime/zero/stage3.py`.

The pipeline is 1F1B with ZeRO-0 or ZeRO-1 over the data axis. DeepSpeed executes its own instruction list,
`TrainSchedule`, but for its last instruction, the update, which waits until the loss is known to be finite on every
rank. Source: DeepSpeed 0.19, `runtime/pipe/engine.py`, `module.py`, `schedule.py`; Narayanan et al. 2019, "PipeDream"
(SOSP), for 1F1B.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dlojz.by_hand.activation_offload import offload_of
from dlojz.config.deepspeed_json import deepspeed_json
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import BlockList, loss_of
from dlojz.pipeline.schedule import BACKWARD, FORWARD, Action
from dlojz.train.axes import Axes
from dlojz.train.checkpoint_tensors import CheckpointTensors
from dlojz.train.engines.base import WEIGHTS, Engine, Inventory, begun, make_optimizer, optimizer_states
from dlojz.train.engines.pipeline_engines import PipelineEngine
from dlojz.train.engines.tensor_engines import TensorShare

_FLATS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
"""Attributes of stages 1 and 2, stage 0 in bf16, and stage 3 with what they update: flat pieces of a copy in fp32."""


def whole_state(optimizer: Any, parameter: Tensor, kind: str) -> Tensor:
    """Gather one parameter, or one of its moments, whole and in fp32; a collective call over the data axis.

    Who: the ranks that share it. What: it, all-gathered (stage 3), or summed from pieces that are zero on all ranks but
    one. How much: 4 bytes per element.
    """
    ds_parameter: Any = parameter
    key = None if kind == WEIGHTS else kind
    if hasattr(ds_parameter, "ds_id"):  # stage 3
        full_tensor: Tensor = optimizer.get_full_hp_param(ds_parameter, key)
    elif hasattr(ds_parameter, "_hp_mapping"):  # stages 1 and 2; stage 0 in bf16
        full_tensor = ds_parameter.get_full_hp_param(key)
    else:
        updated = _updated(optimizer, parameter)
        full_tensor = updated if key is None else _inner(optimizer).state[updated][key]
    return full_tensor.detach().float()


def begin(optimizer: Any, kinds: tuple[str, ...], updates: int) -> None:
    """Make the optimizer's states before its first step."""
    for flat in next((list(getattr(optimizer, name)) for name in _FLATS if getattr(optimizer, name, None)), []):
        begun(_inner(optimizer), flat, kinds, updates)
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


def put_state(optimizer: Any, parameter: Tensor, kind: str, full_tensor: Tensor, updates: int) -> None:
    """Put a whole parameter, or a moment, into this rank's share of it; nothing is sent."""
    ds_parameter: Any = parameter
    key = None if kind == WEIGHTS else kind
    full_tensor = full_tensor.to(parameter.device)
    if hasattr(ds_parameter, "ds_id"):
        share, _ = optimizer._get_fp32_opt_state_partition(
            ds_parameter, release_swap_buffers=False, optim_state_key=key
        )
        part = _partition(full_tensor, share.numel(), optimizer._get_param_partition_rank(ds_parameter))
        share[: part.numel()].copy_(part)  # what is beyond is padding
        if key is None:
            # The shard that forward gathers, besides the copy in fp32.
            ds_parameter.ds_tensor.data[: part.numel()].copy_(part)
    elif hasattr(ds_parameter, "_hp_mapping"):
        ds_parameter.set_full_hp_param(full_tensor, key)
        if key is None:
            ds_parameter.data.copy_(full_tensor)
    elif key is None:
        ds_parameter.data.copy_(full_tensor)
        _updated(optimizer, parameter).data.copy_(full_tensor)
    else:
        begun(_inner(optimizer), _updated(optimizer, parameter), (key,), updates)[key].copy_(full_tensor)


def _inner(optimizer: Any) -> Any:
    """The optimizer that DeepSpeed wraps; itself, where it is not wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _updated(optimizer: Any, parameter: Tensor) -> Tensor:
    """What stage 0 updates for a parameter: itself, or its copy in fp32 where it has 16 bit."""
    groups = zip(getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", []), strict=False)
    for low, high in groups:
        for model_parameter, copied in zip(low, high, strict=True):
            if model_parameter is parameter:
                return copied
    return parameter


def _partition(full_tensor: Tensor, share_numel: int, rank: int) -> Tensor:
    flat = full_tensor.flatten()
    start = min(rank * share_numel, flat.numel())
    return flat[start : min(start + share_numel, flat.numel())]


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and dictionaries, as DeepSpeed keeps them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for element in value:
            yield from _tensors(element)


_HOST_BUFFERS = (
    "param_buffer_of_bit16_for_cpu_offload_groups",  # stages 1 and 2: updated weights on their way back
    "temp_grad_buffer_for_cpu_offload",
    "accumulated_grads_in_cpu",  # stages 1 and 2: gradients of the micro-batches before the last
    "grad_partitions_flat_buffer",  # stage 3: the same
)
"""Attributes of DeepSpeed's optimizers that are in host memory once the optimizer is offloaded."""


def load_deepspeed(device: torch.device) -> Any:
    """Load the library for a device."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed insists on it, whatever the launcher
    import deepspeed

    # An inference-only shared-memory operator that DeepSpeed would compile for 40 s at its first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedEngine(Engine):
    """Engine of DeepSpeed with the ZeRO stage of the layout."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        deepspeed = load_deepspeed(device)
        self.config, self.device, self.module = config, device, model.to(device)
        self.axes = Axes(config.layout, device)
        # Frozen ones would be flattened with the others, and get states.
        optimizer = make_optimizer(config, [weight for weight in self.module.parameters() if weight.requires_grad])
        self.model: Any
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=deepspeed_json(config), dist_init_required=False
        )
        self.share = TensorShare(config, self.module, self.axes, loss_of(self.module))
        self.offload = offload_of(config.layout, self.module)

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the weights themselves are bf16

    def forward(self, inputs: Tensor, targets: Tensor, *, is_last: bool) -> Tensor:
        if self.config.precision == "bf16":
            inputs = tree_map(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor, inputs)
        with self.activations():
            logits = self.model(inputs)
        return self.loss(logits, targets)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        # Who: all dp ranks. What: stages 0 and 1 all-reduce the gradient with the last micro-batch, stages 2 and 3
        # reduce it with every one. How much: see dlojz.prediction.communication.
        self.model.backward(loss)  # divides by the number of micro-batches itself
        if not is_last:
            self.model.step()  # counts the micro-batch; it updates nothing before the last

    def update(self) -> None:
        # Stages 1 and 2: each rank updates its share of the weights, then all shares are all-gathered.
        self.model.step()

    def inventory(self) -> Inventory:
        zero: Any = self.optimizer
        parameters = list(self.module.parameters())
        shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        updated = self._updated()
        gradients = [tensor.grad for tensor in (*parameters, *updated) if tensor.grad is not None]
        for name in (
            "averaged_gradients",
            "fp32_groups_gradients_flat",
            "grad_partitions_flat_buffer",
            "all_grad_tensors",
        ):
            gradients += _tensors(getattr(zero, name, None))
        parameter_ids = {id(parameter) for parameter in parameters}
        inventory: Inventory = {
            "weights": shards or [*parameters],
            "gradients": gradients,
            "optimizer": optimizer_states(_inner(zero)),
            "master": [tensor for tensor in updated if id(tensor) not in parameter_ids],
            "buffers": list(self.module.buffers()),
            # Stage 3: parameters that are gathered whole at this moment.
            "workspace": [*parameters] if shards else [],
        }
        # Compared by storage, as views of a flat buffer are tensors of their own.
        elsewhere = {tensor.untyped_storage()._cdata for tensor in self._states_on_host()}
        return {
            category: [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in elsewhere]
            for category, tensors in inventory.items()
        }

    def offloaded(self) -> list[Tensor]:
        """List activations, and the states that the layout offloads."""
        return [*super().offloaded(), *self._states_on_host()]

    def _updated(self) -> list[Tensor]:
        """What the optimizer updates: the parameters themselves, or flat pieces of a copy of them."""
        zero: Any = self.optimizer
        return [
            *(parameter for group in _inner(zero).param_groups for parameter in group["params"]),
            *(tensor for name in _FLATS for tensor in _tensors(getattr(zero, name, []))),
        ]

    def _states_on_host(self) -> list[Tensor]:
        """States in host memory, with the buffers of their transfers.

        With the optimizer go the master copy, its gradient in fp32 and the gradients of the micro-batches; with the
        parameters the shards of the weights too.
        """
        if self.config.layout.offload not in ("optimizer", "parameters"):
            return []
        zero: Any = self.optimizer
        updated = self._updated()
        host_tensors = [*updated, *(tensor.grad for tensor in updated if tensor.grad is not None)]
        host_tensors += optimizer_states(_inner(zero))
        for name in _HOST_BUFFERS:
            host_tensors += _tensors(getattr(zero, name, None))
        if self.config.layout.offload == "parameters":
            host_tensors += [
                parameter.ds_tensor for parameter in self.module.parameters() if hasattr(parameter, "ds_tensor")
            ]
            host_tensors += _tensors(getattr(zero, "param_groups_fp16_flat_cpu_memory", None))
        return host_tensors

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        for name, parameter in self.module.named_parameters():
            # Who: all dp ranks. What: one parameter, gathered whole (stage 3); at the end of the run only.
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.config.layout.zero == 3):
                yield name, parameter.detach().float().cpu().clone()

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Gather one kind of state."""
        for name, parameter, _ in self.named():
            yield name, whole_state(self.optimizer, parameter, kind).cpu()

    @torch.no_grad()
    def restore(self, source: CheckpointTensors) -> None:
        """Restore DeepSpeed's copy in fp32 and the weights that forward reads."""
        names = [name for name, _, _ in self.named()]
        kinds = [WEIGHTS, *(kind for kind in self.moments if source.has(f"{kind}/{names[0]}"))]
        begin(self.optimizer, tuple(kinds[1:]), source.updates)
        for name, parameter, _ in self.named():
            for kind in kinds:
                put_state(self.optimizer, parameter, kind, source.tensor(f"{kind}/{name}"), source.updates)

    def close(self) -> None:
        self.model.destroy()


class DeepSpeedPipelineEngine(PipelineEngine, DeepSpeedEngine):
    """Engine of DeepSpeed's pipeline, with the partition method of the layout."""

    def build(self, blocks: BlockList) -> None:
        deepspeed = load_deepspeed(self.device)
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed(dist_init_required=False)  # over the groups that there are already
        layout = self.config.layout
        with redirect_stdout(io.StringIO()):  # it prints its partition; `dlojz partition` shows it
            pipe: Any = PipelineModule(
                layers=list(blocks.blocks),
                num_stages=layout.pp,
                loss_fn=self.loss,
                partition_method=layout.partition,
                activation_checkpoint_interval=int(layout.checkpointing == "full"),
            )
        if tuple(pipe.parts) != self.bounds:
            raise RuntimeError(f"DeepSpeed has cut the model at {pipe.parts}, but {self.bounds} was predicted.")
        self.module = pipe
        pipe.get_tied_weights_and_groups = self._tied_weights
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=pipe,
            optimizer=make_optimizer(self.config, pipe.parameters()),
            config=deepspeed_json(self.config),
            dist_init_required=False,
        )
        self._observe(self.model)

    def _tied_weights(self) -> list[tuple[Tensor, Any]]:
        """List this rank's copy of a tied embedding, whose gradient DeepSpeed adds to the other's before the update.

        DeepSpeed ties whole layers (`TiedLayerSpec`); here the embedding and the head share one of their parameters.
        """
        tied = set(self._first_names.values()) if self._tied_group is not None else set()
        return [(parameter, self._tied_group) for name, parameter, _ in self.named() if name in tied]

    def _observe(self, engine: Any) -> None:
        """Route DeepSpeed's forward and backward instructions through `perform`, numbered as they come."""
        from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

        self._count = {FORWARD: 0, BACKWARD: 0}

        def through(kind: str, instruction: Callable[..., None], pipeline: Any, **operands: Any) -> None:
            action = Action(kind, self.pp_rank, self._count[kind])
            self._count[kind] += 1
            self.perform(action, lambda: instruction(pipeline, **operands))

        instructions = dict(engine._INSTRUCTION_MAP)
        instructions[ForwardPass] = _Unbound(partial(through, FORWARD, instructions[ForwardPass]))
        instructions[BackwardPass] = _Unbound(partial(through, BACKWARD, instructions[BackwardPass]))
        engine._INSTRUCTION_MAP = instructions

    @property
    def group_names(self) -> dict[str, str]:
        grid: Any = self.model.grid
        groups = {"pp": grid.get_pipe_parallel_group(), "dp": grid.get_data_parallel_group()}
        # DeepSpeed's "model parallel" ranks are all that share a replica: here, those of a pipeline.
        axis_names = {str(group.group_name): axis for axis, group in groups.items()}
        return {**super().group_names, str(grid.get_model_parallel_group().group_name): "pp", **axis_names}

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        # Who: neighbouring stages; dp ranks of a stage. What: one boundary activation or its gradient per micro-batch,
        # blocking; then the stage's gradients, all-reduced. How much: see dlojz.prediction.communication.
        if self.config.precision == "bf16":
            inputs = [tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in inputs]
        engine: Any = self.model
        self._count.update({FORWARD: 0, BACKWARD: 0})
        engine.module.train()
        engine.set_dataiterator(iter(list(zip(inputs, targets, strict=True))))
        engine.total_loss = engine.total_additional_losses = None
        engine._compute_loss = True
        engine._exec_schedule(_WithoutUpdate(engine._train_schedule()))
        return [engine.total_loss] if engine.is_last_stage() else []

    def reduce_gradients(self) -> None:
        """Nothing: DeepSpeed's schedule ends with its own reduction."""

    def update(self) -> None:
        cast(Any, self.model)._exec_optimizer_step()

    def own_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().float() for name, parameter, _ in self.named()}

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the parameters: DeepSpeed numbers the blocks of a stage as the model does."""
        for name, parameter in self.module.named_parameters():
            full_name = f"blocks.{name}"
            yield self._first_names.get(full_name, full_name), parameter, parameter

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Gather one kind of state; a stage's own ranks make each tensor whole first."""
        stage_tensors = {name: whole_state(self.optimizer, parameter, kind) for name, parameter, _ in self.named()}
        yield from self._from_owners(stage_tensors)

    def buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield this rank's buffers."""
        for name, buffer in self.module.named_buffers():
            yield self.axes.dp_rank, f"blocks.{name}", buffer


class _Unbound:
    """Callable class for an instruction, which DeepSpeed binds to its engine with `MethodType`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function(*args, **kwargs)


class _WithoutUpdate:
    """Schedule of DeepSpeed's without its optimizer step."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def num_pipe_buffers(self) -> int:
        """Return the schedule's number of buffers."""
        return int(self._schedule.num_pipe_buffers())

    def __iter__(self) -> Iterator[list[Any]]:
        from deepspeed.runtime.pipe.schedule import OptimizerStep

        for commands in self._schedule:
            yield [command for command in commands if not isinstance(command, OptimizerStep)]
