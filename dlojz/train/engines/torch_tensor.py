"""torch's own tensor parallelism: `parallelize_module` on the blocks of the lab's models.

Layer 3. Invariant: a block takes and gives plain tensors, whole or this rank's tokens; DTensors live inside it alone.
So a pipeline, DDP and FSDP2 see blocks as they always are. Which layers are split by columns and which by rows is what
`dlojz.tensor` does; convolutions have no style of torch's, so that CoAtNet's stem and its MBConv blocks stay whole on
every rank, and so do the norms and embeddings that images need.

    layer                                style                communication
    query, key, value, qkv, mlp_expand   ColwiseParallel      backward: all-reduce of the region's input
    attention_project, mlp_project       RowwiseParallel      forward: all-reduce of its output
    token embedding                      RowwiseParallel      forward: all-reduce
    norms, with sequence parallelism     SequenceParallel     all-gather after it, reduce-scatter at the region's end

The gradient of a split embedding is made whole on every rank (V × D, torch's own rule), but for DDP and FSDP2, which
cut it at once.

Asynchronous tensor parallelism (`async_tensor_parallel`) compiles the blocks so that a product is cut in pieces that
overlap with their communication. It takes NVLink and symmetric memory, and has not been run here.

Source: torch 2.13, `torch/distributed/tensor/parallel/style.py`; Shoeybi et al. 2019 (arXiv 1909.08053), §3;
Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call

from dlojz.config import RunConfig
from dlojz.models import coatnet, gpt, llama
from dlojz.models.blocks import BlockList
from dlojz.models.transformer import TransformerBlock
from dlojz.tensor.axis import TensorAxis
from dlojz.tensor.cross_entropy import vocabulary_parallel_cross_entropy
from dlojz.tensor.slicing import own_slice, share_bounds
from dlojz.train.tensors import torch_parts

Loss = Callable[[Tensor, Tensor], Tensor]
Plan = dict[str, ParallelStyle]
TOKENS = Shard(1)


def parallelize(config: RunConfig, blocks: BlockList, axis: TensorAxis, mesh: DeviceMesh, loss: Loss) -> Loss:
    """Split a model among the ranks of the tensor axis, in place.

    Args:
        config: the run; its layout says which parts are split, and whether the sequence is.
        blocks: the whole model, with the same weights on every rank.
        axis: the ranks that share it.
        mesh: the same ranks, as torch wants them.
        loss: mean loss of whole logits.

    Returns:
        The mean loss of what the last block gives on this rank. Logits that are split along the vocabulary go to the
        lab's own cross-entropy, as torch's (`loss_parallel`) is a context around forward and backward, where a pipeline
        leaves no place for one.

    Raises:
        LabError: if no part of the model that torch can split matches the pattern.
    """
    chosen = torch_parts(blocks, config.layout.tensor_parts)
    for number, block in enumerate(blocks.blocks):
        halves = {part.rpartition(".")[2] for part in chosen if part.startswith(f"blocks.{number}.")}
        _split(block, halves, axis, mesh)
        if config.layout.async_tensor_parallel and halves:
            _overlap(block, axis)
    head = blocks.blocks[-1]
    if not isinstance(head, gpt.Head | llama.Head) or f"blocks.{len(blocks.blocks) - 1}.head" not in chosen:
        return loss
    start, _ = share_bounds(head.output.out_features, axis.size, axis.rank)
    return lambda logits, targets: vocabulary_parallel_cross_entropy(logits.float(), targets, start, axis)


def _split(block: nn.Module, parts: set[str], axis: TensorAxis, mesh: DeviceMesh) -> None:
    """Replace the layers of a block by this rank's part of them."""
    sequence = axis.sequence_parallel
    plan: Plan = {}
    if isinstance(block, llama.LlamaBlock | TransformerBlock):
        columns = {"attention": ("query", "key", "value"), "mlp": ("mlp_gate", "mlp_expand")}
        if isinstance(block, TransformerBlock):
            columns = {"attention": ("qkv",), "mlp": ("mlp_expand",)}
        for part, norm in (("attention", "norm1"), ("mlp", "norm2")):
            if part in parts:
                several = len(columns[part]) > 1
                plan |= {name: _columns(sequence and not several) for name in columns[part]}
                plan |= {f"{part}_project": _rows(sequence)}
                _prepare_norm(cast(nn.Module, getattr(block, norm)), mesh, sequence, several)
    elif isinstance(block, coatnet.AttentionBlock):
        if "attention" in parts:
            plan |= {"attention.qkv": _columns(sequence), "attention.project": _rows(sequence)}
            _split_bias(block.attention, axis)
        if "mlp" in parts:
            plan |= {"mlp_expand": _columns(sequence), "mlp_project": _rows(sequence)}
    elif isinstance(block, coatnet.Head) and parts:
        plan = {"hidden": _columns(sequence), "classifier": _rows(sequence)}
    elif isinstance(block, gpt.Head | llama.Head) and parts:
        plan = {"output": _columns(sequence)}
        _prepare_norm(block.norm, mesh, sequence, several=False)
    elif isinstance(block, nn.Embedding) and parts:
        _apply(block, mesh, _words(sequence))
    elif isinstance(block, gpt.Embedding) and parts:
        plan = {"token": _words(sequence)}
        if sequence:  # each rank adds the positions of its own tokens; in backward the parts are gathered
            plan["position"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    if plan:
        _apply(block, mesh, plan)


def _columns(sequence: bool) -> ParallelStyle:
    return ColwiseParallel(input_layouts=TOKENS if sequence else Replicate())


def _rows(sequence: bool) -> ParallelStyle:
    return RowwiseParallel(output_layouts=TOKENS if sequence else Replicate())


def _words(sequence: bool) -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS if sequence else Replicate())


def _prepare_norm(norm: nn.Module, mesh: DeviceMesh, sequence: bool, several: bool) -> None:
    """A norm on this rank's tokens where the sequence is split; and where several layers read it, entered once.

    Each layer by columns turns what it reads into a whole DTensor, whose gradient is one all-reduce: three layers,
    three of them. A DTensor that they share has one gradient, the sum of theirs.
    """
    if sequence:
        _apply(norm, mesh, SequenceParallel())
    if several:
        held = TOKENS if sequence else Replicate()
        entered = PrepareModuleOutput(output_layouts=held, desired_output_layouts=Replicate(), use_local_output=False)
        _apply(norm, mesh, entered)


def _split_bias(attention: coatnet.RelativeAttention, axis: TensorAxis) -> None:
    """A head's position bias goes with the head, as a plain parameter: torch has no style for one."""
    attention.position_bias = own_slice(attention.position_bias, 0, axis)
    held = cast(Any, attention)
    held.axis, held.split_dims = axis, {"position_bias": 0}


def _apply(module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | Plan) -> None:
    # Nothing is sent: every rank has built the same weights, and cuts its own part from them.
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                owner.register_parameter(name, _with_memory_of_its_own(parameter))


def _with_memory_of_its_own(parameter: DTensor) -> nn.Parameter:
    """A part that is a view would keep the whole weight alive."""
    own = parameter.to_local().detach()
    if own.untyped_storage().nbytes() == own.numel() * own.element_size():
        return cast(nn.Parameter, parameter)
    made = DTensor.from_local(
        own.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(made)


def _overlap(block: nn.Module, axis: TensorAxis) -> None:
    """Compile a block so that its products overlap with their communication: CUDA with NVLink only."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    if axis.group is not None:
        enable_symm_mem_for_group(axis.group.group_name)
    block.compile()


class PlainParameters(nn.Module):
    """A model of DTensors whose parameters are plain tensors, this rank's parts: what DDP accepts.

    The two share their memory. In forward each part becomes a DTensor again, and its gradient comes back plain; that of
    a norm with sequence parallelism is added up over the tensor axis then, once per micro-batch.

    Args:
        module: the model, whose own parameters stay DTensors.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that its parameters are not this module's too
        self._layouts: dict[str, DTensor] = {}
        self.plain = nn.ParameterDict()
        for name, parameter in module.named_parameters():
            own = parameter
            if isinstance(parameter, DTensor):
                self._layouts[name] = parameter
                own = nn.Parameter(parameter.to_local().detach())
            self.plain[name.replace(".", "/")] = own

    def forward(self, x: Tensor) -> Tensor:
        """As the model."""
        given: dict[str, Tensor] = {}
        for key, own in self.plain.items():
            name = key.replace("/", ".")
            whole = self._layouts.get(name)
            given[name] = own if whole is None else _as_dtensor(own, whole)
        output: Tensor = functional_call(self._module[0], given, (x,))
        return output


def _as_dtensor(own: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
