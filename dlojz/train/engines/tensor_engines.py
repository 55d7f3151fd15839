"""Tensor-parallel engines: the lab's layers (`dlojz.by_hand.tensor`) and torch's `parallelize_module`.

The model is split before the engine distributes it over the data axis: the engine sees a model with this rank's
parameters only, the loss that fits its last block, and a way back to the whole parameters.

With torch's, a block takes and gives plain tensors, whole or this rank's tokens; DTensors live inside it alone, so that
pipelines, DDP and FSDP2 see blocks as they always are. Columns and rows are those of `dlojz.by_hand.tensor`; torch has
no style for convolutions: CoAtNet's stem and its MBConv blocks stay whole on every rank, and so do the norms and
embeddings that images need.

    layer                                style                communication
    query, key, value, qkv, mlp_expand   ColwiseParallel      backward: all-reduce of the region's input
    attention_project, mlp_project       RowwiseParallel      forward: all-reduce of its output
    token embedding                      RowwiseParallel      forward: all-reduce
    norms, with sequence parallelism     SequenceParallel     all-gather after it, reduce-scatter at the region's end

The gradient of a split embedding is made whole on every rank (V × D, torch's rule), but for DDP and FSDP2, which cut it
at once.

A model from elsewhere is split into plain tensors with the lab's operators (`dlojz.by_hand.tensor.split`),
whatever the engine of the data axis.

Source: torch 2.13, `torch/distributed/tensor/parallel/style.py`; Shoeybi et al. 2019 (arXiv 1909.08053), §3;
Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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

from dlojz.base.language import refusal
from dlojz.by_hand.tensor.axis import TensorAxis, gather_whole, own_slice, share_bounds, split_dims, split_parts
from dlojz.by_hand.tensor.layers import vocabulary_parallel_cross_entropy
from dlojz.by_hand.tensor.split import check_tied, parallel_loss, parts_of, split_model
from dlojz.config.run_config import RunConfig
from dlojz.models import coatnet, gpt, llama
from dlojz.models.blocks import BlockList, TransformerBlock, VocabularyHead, tie, tied_names
from dlojz.models.foreign.tensor_regions import own_columns
from dlojz.train.axes import Axes

Loss = Callable[[Tensor, Tensor], Tensor]


class TensorShare:
    """Share of a rank of a model along the tensor axis; with tp=1 all of it.

    Args:
        model: the whole model, with the same weights on every rank; its blocks are replaced.

    Attributes:
        loss: mean loss of the output of this rank's last block.
    """

    def __init__(self, config: RunConfig, model: nn.Module, axes: Axes, loss: Loss) -> None:
        layout = config.layout
        self.axis, self.loss = TensorAxis(), loss
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._dims: dict[str, int] = {}
        self._parts: dict[str, Sequence[int]] = {}
        if layout.tp == 1:
            return
        blocks = cast(BlockList, model)
        self.axis = TensorAxis(axes.group("tp"), sequence_parallel=layout.sequence_parallel)
        if layout.engine == "torch" and blocks.tensor_plan is None:
            assert axes.mesh is not None
            self.loss = parallelize(config, blocks, self.axis, axes.mesh["tp"], loss)
        else:
            self.loss = parallel_loss(split_model(blocks, self.axis, layout.tensor_parts))
        self._dims, self._parts = split_dims(model), split_parts(model)

    def whole(self, name: str, local_tensor: Tensor) -> Tensor:
        """Gather a whole parameter from the ranks' parts; a collective call where it is split."""
        # Who: the ranks that share the parameter, at the end of a run. What: their slices. How much: its bytes.
        tensor: Tensor = local_tensor.full_tensor() if isinstance(local_tensor, DTensor) else local_tensor
        if name not in self._dims:
            return tensor
        return gather_whole(tensor, self._dims[name], self._shapes[name], self.axis, self._parts.get(name))

    def part(self, name: str, full_tensor: Tensor) -> Tensor:
        """Cut this rank's part of a whole parameter, where the lab has split it."""
        if name not in self._dims:
            return full_tensor
        dim = self._dims[name]
        if name in self._parts:
            # A fused matrix is cut in each of its parts: a slice of the whole would mix queries with keys.
            columns = own_columns(self._parts[name], self.axis.size, self.axis.rank, full_tensor.device)
            return full_tensor.index_select(dim, columns)
        start, end = share_bounds(full_tensor.shape[dim], self.axis.size, self.axis.rank)
        return full_tensor.narrow(dim, start, end - start)

    def beside(self, buffer: str, local_buffer: Tensor) -> str | None:
        """Return the split parameter whose channels a buffer has; None where the buffer is whole on each rank.

        Only BatchNorm has buffers: its statistics are split as its weight is, its count of batches is not.
        """
        weight = f"{buffer.rpartition('.')[0]}.weight"
        return weight if local_buffer.ndim and weight in self._dims else None

    def settle(self, parameters: Iterable[Tensor]) -> None:
        """Sum gradients that are still the ranks' parts of a sum, before an update (engine torch)."""
        if self.axis.size > 1:
            settle(parameters)

    def pretending(self) -> AbstractContextManager[None]:
        """Return a context in which shapes can be asked for without the other ranks."""
        return self.axis.pretending() if self.axis.size > 1 else nullcontext()


def settle(parameters: Iterable[Tensor]) -> None:
    """Distribute each DTensor's gradient as its parameter.

    With sequence parallelism each rank has its own tokens' share of a norm's gradient. Who: the ranks of the tensor
    axis, once per step. What: the gradient of each norm parameter, all-reduced. How much: its bytes. Of an embedding,
    torch has made the whole table's gradient on every rank: each keeps its part, and nothing is sent.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


Plan = dict[str, ParallelStyle]
TOKENS = Shard(1)
NOT_TORCHS = ("stem", "convolution")
"""Parts that the lab splits and torch does not."""


def parallelize(config: RunConfig, blocks: BlockList, axis: TensorAxis, mesh: DeviceMesh, loss: Loss) -> Loss:
    """Split a model over the ranks of the tensor axis, in place.

    Args:
        config: the run; its layout says which parts are split, and whether the sequence is.
        blocks: the whole model, with the same weights on every rank.

    Returns:
        The mean loss of the last block's output on this rank. Logits split along the vocabulary go to the lab's own
        cross-entropy: torch's (`loss_parallel`) is a context around forward and backward, for which a pipeline has no
        place.

    Raises:
        LabError: if no part of the model that torch can split matches the pattern.
    """
    chosen = torch_parts(blocks, config.layout.tensor_parts)
    tied = tied_names(blocks)
    for number, block in enumerate(blocks.blocks):
        halves = {part.rpartition(".")[2] for part in chosen if part.startswith(f"blocks.{number}.")}
        _split(block, halves, axis, mesh)
    tie(blocks, tied)  # embedding and head have the same rows of the one matrix
    head = blocks.blocks[-1]
    if not isinstance(head, VocabularyHead) or f"blocks.{len(blocks.blocks) - 1}.head" not in chosen:
        return loss
    # First word of this rank's rows of the vocabulary.
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
                # Where several layers read the norm's output, `_prepare_norm` makes it whole for all of them.
                plan |= {name: _columns(sequence and not several) for name in columns[part]}
                plan |= {f"{part}_project": _rows(sequence)}
                _prepare_norm(cast(nn.Module, getattr(block, norm)), mesh, sequence, several)
    elif isinstance(block, coatnet.AttentionBlock):
        if "attention" in parts:
            plan |= {"attention.qkv": _columns(sequence), "attention.project": _rows(sequence)}
            _split_bias(block.attention, axis)
        if "mlp" in parts:
            plan |= {"mlp_expand": _columns(sequence), "mlp_project": _rows(sequence)}
    elif isinstance(block, coatnet.PoolingHead) and parts:
        plan = {"hidden": _columns(sequence), "classifier": _rows(sequence)}
    elif isinstance(block, VocabularyHead) and parts:
        plan = {"output": _columns(sequence)}
        _prepare_norm(block.norm, mesh, sequence, several=False)
    elif isinstance(block, nn.Embedding) and parts:
        _apply(block, mesh, _words(sequence))
    elif isinstance(block, gpt.Embedding) and parts:
        plan = {"token": _words(sequence)}
        if sequence:  # each rank adds the positions of its tokens; in backward the parts are gathered
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
    """Run a norm on this rank's tokens where the sequence is split; and where several layers read it, enter once.

    Each column-parallel layer turns its input into a whole DTensor, whose gradient is one all-reduce: three layers,
    three of them. A DTensor that they share has one gradient, the sum of theirs.
    """
    if sequence:
        _apply(norm, mesh, SequenceParallel())
    if several:
        layout = TOKENS if sequence else Replicate()
        style = PrepareModuleOutput(output_layouts=layout, desired_output_layouts=Replicate(), use_local_output=False)
        _apply(norm, mesh, style)


def _split_bias(attention: coatnet.RelativeAttention, axis: TensorAxis) -> None:
    """Split the position bias by heads, as a plain parameter: torch has no style for it."""
    attention.position_bias = own_slice(attention.position_bias, 0, axis)
    module = cast(Any, attention)
    module.axis, module.split_dims = axis, {"position_bias": 0}


def _apply(module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | Plan) -> None:
    # Nothing is sent: every rank has built the same weights, and cuts its own part from them.
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                owner.register_parameter(name, _with_memory_of_its_own(parameter))


def _with_memory_of_its_own(parameter: DTensor) -> nn.Parameter:
    """Copy a part that is a view, which would keep the whole weight alive."""
    local_tensor = parameter.to_local().detach()
    # No larger memory behind it: it is no view.
    if local_tensor.untyped_storage().nbytes() == local_tensor.numel() * local_tensor.element_size():
        return cast(nn.Parameter, parameter)
    return nn.Parameter(as_dtensor(local_tensor.clone(), parameter))


class PlainParameters(nn.Module):
    """Model of DTensors whose parameters are plain tensors, this rank's parts: what DDP accepts.

    The two share their memory. In forward each part becomes a DTensor again, and its gradient comes back plain; that of
    a norm with sequence parallelism is summed over the tensor axis then, once per micro-batch.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that its parameters are not this module's too
        self._layouts: dict[str, DTensor] = {}
        self.plain = nn.ParameterDict()
        for name, parameter in module.named_parameters():
            plain_parameter = parameter
            if isinstance(parameter, DTensor):
                self._layouts[name] = parameter
                plain_parameter = nn.Parameter(parameter.to_local().detach())
            self.plain[name.replace(".", "/")] = plain_parameter  # a parameter's name may have no dot

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        parameters: dict[str, Tensor] = {}
        for key, local_tensor in self.plain.items():
            name = key.replace("/", ".")
            dtensor = self._layouts.get(name)
            parameters[name] = local_tensor if dtensor is None else as_dtensor(local_tensor, dtensor)
        output: Tensor = functional_call(self._module[0], parameters, (x,))
        return output


def as_dtensor(local_tensor: Tensor, like: DTensor) -> DTensor:
    """Wrap a rank's part as a DTensor distributed as `like`."""
    return DTensor.from_local(
        local_tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def torch_parts(model: BlockList, pattern: str = "") -> set[str]:
    """Name the parts that engine torch splits: those that match, but for convolutions.

    Args:
        pattern: regular expression, as in `dlojz.by_hand.tensor.split.split_model`; by default everything.

    Raises:
        LabError: if none is left, with some that could be; or one alone of two that share a matrix.
    """
    names = [name for name in parts_of(model) if not name.endswith(NOT_TORCHS)]
    chosen = {name for name in names if re.search(pattern, name)}
    if not chosen:
        kind = type(model).__name__
        raise refusal(
            en=f"engine 'torch' splits no part of {kind} that matches {pattern!r}: it can split {_some(names)}; "
            "convolutions are split by engine='by_hand' alone.",
            fr=f"engine='torch' ne découpe aucune partie de {kind} qui corresponde à {pattern!r} : il sait découper "
            f"{_some(names)} ; seul engine='by_hand' découpe les convolutions.",
        )
    check_tied(chosen, names, tied_names(model), pattern)
    return chosen


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, …, {names[-1]}"
