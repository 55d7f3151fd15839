"""Adapt Megatron-core to the lab: on CPUs, with weights under the lab's names, and an engine that the probes read.

Without a GPU, `torch.cuda.current_device()` and `device="cuda"` give the CPU: Megatron-core asks for them in the
buffers of sequence parallelism, of attention scores, of gradients and of the pipeline's messages, and in the count of
tokens of its pipeline schedules. Its arithmetic and its communication stay. Fused kernels (Transformer Engine, Apex)
have no CPU form; the configuration leaves them out. Its DDP keeps the gradients of all parameters in one contiguous
buffer during the whole training: that buffer is counted as gradients.

Both models lay out the rows of the attention's projection head by head, (N, 3, H), so that a rank's heads are
consecutive rows in either. A split parameter of Megatron-core names its dimension (`partition_dim`), and is that slice
of the lab's whole one.

    lab                                  Megatron-core
    blocks.0.token, .position            embedding.word_embeddings, .position_embeddings
    blocks.k.norm1, .norm2               decoder.layers.i.input_layernorm, .pre_mlp_layernorm
    blocks.k.qkv, .attention_project     decoder.layers.i.self_attention.linear_qkv, .linear_proj
    blocks.k.mlp_expand, .mlp_project    decoder.layers.i.mlp.linear_fc1, .linear_fc2
    blocks.n.norm, .output               decoder.final_layernorm, output_layer

Source: the attributes `tensor_model_parallel` and `partition_dim` of megatron-core's `tensor_parallel/layers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dlojz.config.run_config import RunConfig
from dlojz.libraries.seen_engines import SeenTorch
from dlojz.models.blocks import TransformerBlock, tied_names
from dlojz.models.gpt import GPT, Embedding
from dlojz.train import loop
from dlojz.train.engines.base import Inventory


class _OnCPU(TorchFunctionMode):
    """Context in which tensors asked for on CUDA are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:  # of the embedding that first and last stage share
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Run Megatron-core on the CPU within this context; with a GPU nothing changes."""
    if torch.cuda.is_available():
        yield
        return
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        with _OnCPU():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize


_OUTSIDE = {
    "embedding.word_embeddings": "blocks.0.token",
    "embedding.position_embeddings": "blocks.0.position",
    "decoder.final_layernorm": "blocks.{last}.norm",
    "output_layer": "blocks.{last}.output",
}
_IN_A_LAYER = {
    "input_layernorm": "norm1",
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "attention_project",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1": "mlp_expand",
    "mlp.linear_fc2": "mlp_project",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def own_name(name: str, *, depth: int, first_layer: int = 0) -> str:
    """Translate the name of one of Megatron-core's parameters into the lab's.

    Args:
        name: as `GPTModel.named_parameters()` has it; its layers are numbered within the stage.
        first_layer: number, from 0, of the first layer of this pipeline stage.

    Raises:
        KeyError: if the lab's GPT has no such parameter.

    Example:
        >>> own_name("decoder.layers.1.mlp.linear_fc1.bias", depth=4, first_layer=2)
        'blocks.4.mlp_expand.bias'
    """
    module, _, kind = name.rpartition(".")
    if match := _LAYER.fullmatch(module):
        # Block 0 of the lab is the embedding, so that layer i of a stage is block first_layer + i + 1.
        return f"blocks.{first_layer + int(match[1]) + 1}.{_IN_A_LAYER[match[2]]}.{kind}"
    return f"{_OUTSIDE[module].format(last=depth + 1)}.{kind}"


def model_options(lab_model: nn.Module) -> dict[str, Any]:
    """Options of `TransformerConfig` with which Megatron-core's GPT equals the lab's: no fused kernels, no dropout."""
    blocks = cast(GPT, lab_model).blocks
    block = cast(TransformerBlock, blocks[1])
    return {
        "num_layers": len(blocks) - 2,  # without embedding and head
        "hidden_size": block.qkv.in_features,
        "num_attention_heads": block.qkv.in_features // block.head_dim,
        "ffn_hidden_size": block.mlp_expand.out_features,
        "layernorm_epsilon": block.norm1.eps,
        "activation_func": partial(F.gelu, approximate=block.gelu),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,  # then overwritten by `load_weights`
        "batch_p2p_comm": False,
        # Fused kernels have no CPU form.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }


def table_options(lab_model: nn.Module) -> dict[str, Any]:
    """Options of `GPTModel` for the tables of the lab's `GPT`: words, learnt positions, whether the head is tied."""
    embedding = cast(Embedding, cast(GPT, lab_model).blocks[0])
    return {
        "share_embeddings_and_output_weights": bool(tied_names(lab_model)),
        "vocab_size": embedding.token.num_embeddings,
        "max_sequence_length": embedding.position.num_embeddings,
        "position_embedding_type": "learned_absolute",
    }


def own_part(parameter: Tensor, full_tensor: Tensor, *, tp: int, tp_rank: int) -> Tensor:
    """Take the slice of a whole tensor for one of Megatron-core's parameters on this tensor-parallel rank."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full_tensor
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    return full_tensor.chunk(tp, dim=dim)[tp_rank]  # a view


def own_parameters(model: nn.Module, depth: int) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a rank's parameters by the lab's names.

    Args:
        model: this rank's `GPTModel`, bare.
    """
    from megatron.core import parallel_state

    per_stage = depth // parallel_state.get_pipeline_model_parallel_world_size()  # by default, all stages alike
    first_layer = parallel_state.get_pipeline_model_parallel_rank() * per_stage
    for name, parameter in model.named_parameters():
        yield own_name(name, depth=depth, first_layer=first_layer), parameter


@torch.no_grad()
def load_weights(model: nn.Module, lab_model: nn.Module) -> None:
    """Copy the lab's weights into a rank's part of a `GPTModel`; nothing is sent.

    Args:
        model: this rank's part: its stage, its slices.
        lab_model: the lab's `GPT`.
    """
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    weights = lab_model.state_dict()
    for name, parameter in own_parameters(model, len(cast(GPT, lab_model).blocks) - 2):
        parameter.copy_(own_part(parameter, weights[name], tp=tp, tp_rank=tp_rank))


class SeenMegatron(SeenTorch):
    """Engine around a rank's part of a `GPTModel` in Megatron-core's `DistributedDataParallel`."""

    def __init__(self, config: RunConfig, module: nn.Module, device: torch.device) -> None:
        super().__init__(config, module, device)
        self._wrapped: Any = module
        self.module = cast(nn.Module, module.module)  # the wrapper's `buffers` is another list

    @property
    def group_names(self) -> dict[str, str]:
        """Axis of each of Megatron's process groups; the norm of the gradient goes to all ranks of a replica."""
        replica = "pp" if parallel_state.get_pipeline_model_parallel_world_size() > 1 else "tp"
        groups = (
            (parallel_state.get_embedding_group(False), "tied"),
            (parallel_state.get_model_parallel_group(), replica),
            (parallel_state.get_tensor_model_parallel_group(), "tp"),
            (parallel_state.get_data_parallel_group(with_context_parallel=True), "dp"),
            (parallel_state.get_pipeline_model_parallel_group(), "pp"),
        )
        return {str(group.group_name): axis for group, axis in groups if group is not None}

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        return int(parallel_state.get_data_parallel_world_size())

    def inventory(self) -> Inventory:
        tensors = super().inventory()
        # Not `parameter.grad`, which Megatron sets to None: one buffer, counted whole.
        gradients: list[Tensor] = [buffer.grad_data for buffer in self._wrapped.buffers]
        return tensors | {"gradients": [*gradients, *tensors["gradients"]], "buffers": []}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters by the lab's names, in the order of the lab's model; a collective call."""
        with torch.device("meta"):
            lab_model = loop.build_model(self.config)
        rank_parameters = dict(own_parameters(self.module, len(list(lab_model.blocks)) - 2))  # type: ignore[arg-type]
        stages, group = self.config.layout.pp, parallel_state.get_pipeline_model_parallel_group()
        for name, parameter in lab_model.named_parameters():
            owner = torch.tensor([parallel_state.get_pipeline_model_parallel_rank() if name in rank_parameters else -1])
            tensor = (
                self._whole(rank_parameters[name])
                if name in rank_parameters
                else torch.empty(parameter.shape, device=self.device)
            )
            if stages > 1:
                # Who: the stages of a pipeline, at the end of the run. What: the owner of this parameter, then itself.
                # How much: 8 bytes, and its own.
                dist.all_reduce(owner, op=dist.ReduceOp.MAX, group=group)
                dist.broadcast(tensor, dist.get_global_rank(group, int(owner)), group=group)
            yield name, tensor.cpu()

    def _whole(self, parameter: Tensor) -> Tensor:
        """Gather a parameter from the ranks of the tensor axis."""
        part = parameter.detach().contiguous()
        if not getattr(parameter, "tensor_model_parallel", False) or self.config.layout.tp == 1:
            return part.clone()
        parts = [torch.empty_like(part) for _ in range(self.config.layout.tp)]
        # Who: the ranks of the tensor axis, at the end of the run. What: their slices. How much: the parameter's bytes.
        dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts, dim=parameter.partition_dim)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Forget Megatron's groups: a process that trains once more makes its own."""
        parallel_state.destroy_model_parallel()
