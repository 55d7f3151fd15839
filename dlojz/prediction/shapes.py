"""Shapes of a model's parameters and buffers on the meta device, and the part of them that a rank holds.

Parameters are in the order of `model.parameters()`, on which every engine's flattening rests. A tensor-parallel rank's
part is read off the model that it trains, split on a pretended axis. Experts: with N tokens of a rank's micro-batch, E
experts, k choices and factor f, an expert's buffer has C = ⌈f·k·N/E⌉ rows of D numbers; each all-to-all carries the
E·C·D numbers of all buffers, of which the share of the rank's own experts, 1/ep, stays. Figures equal the probe's.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), for the two all-to-alls of a mixture's forward pass, each
with another in backward (`dlojz.models.experts.exchange`); Narayanan et al. 2021 (arXiv 2104.04473), §2, for contiguous
stages and for the order of the ranks: tensor innermost, pipeline outermost.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from dlojz import models
from dlojz.base.language import MEBIBYTE, Sentences, say
from dlojz.config.compatibility import has_tied_head
from dlojz.config.engines import ENGINES, STRATEGIES
from dlojz.config.fields import block_choices
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.models.experts.routing import all_to_all_bytes
from dlojz.models.foreign.elsewhere import ADAPTERS
from dlojz.models.foreign.names import is_elsewhere
from dlojz.models.sizes import CoAtNetSize, DeepSeekSize, GPTSize, LlamaSize, QwenSize
from dlojz.pipeline.partition import stage_bounds
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.results.footprint import Collective, Traffic

if TYPE_CHECKING:
    from dlojz.models.blocks import BlockList
    from dlojz.models.checkpointing import Checkpointing
    from dlojz.models.experts.routing import Routing

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

FP32_BYTES = 4
HALF_BYTES = 2
ELEMENT_BYTES = {
    **{"float64": 8, "float32": FP32_BYTES, "float16": HALF_BYTES, "bfloat16": HALF_BYTES},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1},
}
"""Bytes of a number of a parameter, by the name of its type."""
AUTOCAST = tuple(name for name in STRATEGIES if ENGINES[name].autocast)
"""Engines that keep fp32 weights and buffers in every precision, and compute in another by autocast."""
DDP_FIRST_BUCKET_BYTES = 1 * MEBIBYTE
"""The first bucket of torch's DDP is small, so that it leaves early."""
BUCKET_BYTES = 25 * MEBIBYTE
"""Default size of a bucket of torch's DDP (`bucket_cap_mb`) and of the engine by hand (`dlojz.by_hand.ddp`)."""


@dataclass(frozen=True)
class ParameterShape:
    """Shape of a parameter, and its place in the model."""

    name: str
    shape: tuple[int, ...]
    block: int
    """Number of the model's block it belongs to."""
    module: str
    """Name of the module that owns it directly."""
    is_expert: bool = False
    """Whether its first dimension counts the experts of a mixture."""
    tied: bool = False
    """Whether the last block, the head, computes with it too."""
    dtype: str = "float32"
    is_trained: bool = True
    """Whether it needs a gradient; else it is frozen."""
    is_hidden_matrix: bool = False
    """Whether Muon updates it by its orthogonal momentum."""

    @property
    def is_floating_point(self) -> bool:
        """Whether it is cast with a model; quantized weights are bytes, which stay as they are."""
        return self.dtype != "uint8"

    @property
    def is_cast(self) -> bool:
        """Whether a cast of the model to 16 bits casts it: adapters stay in fp32."""
        return self.is_floating_point and not self.module.endswith(ADAPTERS)

    @property
    def element_bytes(self) -> int:
        """Bytes of one of its numbers."""
        return ELEMENT_BYTES[self.dtype]

    def cast_bytes(self, cast_bytes: int | None) -> int:
        """Return the bytes of one of its numbers where weights are cast to so many; None: to none."""
        return cast_bytes if cast_bytes and self.is_floating_point else self.element_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.element_bytes * self.numel

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def padded_rows_numel(self, dp: int) -> int:
        """Elements of one shard when dimension 0 is cut into `dp` equal parts, the last ones padded (FSDP2)."""
        # A scalar is one row.
        rows = self.shape[0] if self.shape else 1
        return -(-rows // dp) * (self.numel // rows)

    def rows_numel(self, dp: int, rank: int) -> int:
        """Elements of one rank's shard without its padding (FSDP2)."""
        rows = self.shape[0] if self.shape else 1
        share = -(-rows // dp)
        # With fewer rows than ranks, or a short last share, the last ranks hold nothing.
        return max(0, min(share, rows - rank * share)) * (self.numel // rows)

    def padded_numel(self, dp: int) -> int:
        """Elements of one shard when the flattened parameter is cut into `dp` parts (DeepSpeed stage 3)."""
        return -(-self.numel // dp)


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a model's parameters and buffers."""

    parameters: tuple[ParameterShape, ...]
    float_buffer_elements: int
    integer_buffer_bytes: int
    buffers: tuple[tuple[int, int, int, int], ...] = ()
    """The same buffer by buffer: block, elements of floating point, bytes of integers, bytes in its own type."""
    enclosing: int | None = None
    """The block that calls all others (`dlojz.models.blocks.NestedBlocks`); None where they form a chain."""
    paths: tuple[str, ...] = ()
    """Names of the blocks in a module from elsewhere; empty for a model of the catalogue."""
    settings: str = field(default="", compare=False)
    """Hash of the settings of the modules of one from elsewhere as it was built; empty for a model of the catalogue."""
    recurrent: str = ""
    """Path of its first recurrent layer of torch; empty where it has none."""

    @property
    def num_parameters(self) -> int:
        """Ψ, the number of parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers, each in its own type."""
        return sum(num_bytes for *_, num_bytes in self.buffers)

    @property
    def trained(self) -> ModelShapes:
        """The same shapes without frozen parameters."""
        if all(parameter.is_trained for parameter in self.parameters):
            return self
        return replace(self, parameters=tuple(parameter for parameter in self.parameters if parameter.is_trained))

    def trained_only(self, names: Set[str]) -> ModelShapes:
        """Return the same shapes with all parameters but these frozen."""
        if all(parameter.name in names for parameter in self.parameters if parameter.is_trained):
            return self
        parameters = (
            replace(parameter, is_trained=parameter.is_trained and parameter.name in names)
            for parameter in self.parameters
        )
        return replace(self, parameters=tuple(parameters))

    def in_dtype(self, dtype: str) -> ModelShapes:
        """Return the same shapes with parameters and buffers of floating point in one type; adapters stay in fp32."""
        element_bytes = ELEMENT_BYTES[dtype]
        return replace(
            self,
            parameters=tuple(
                replace(parameter, dtype=dtype) if parameter.is_cast else parameter for parameter in self.parameters
            ),
            buffers=tuple(
                (block, elements, num_bytes, element_bytes * elements + num_bytes)
                for block, elements, num_bytes, _ in self.buffers
            ),
        )

    def blocks(self) -> Iterator[tuple[ParameterShape, ...]]:
        """Parameters block by block, blocks without any left out."""
        for number in sorted({parameter.block for parameter in self.parameters}):
            yield tuple(parameter for parameter in self.parameters if parameter.block == number)

    def own_path(self, module: str) -> str:
        """Translate the path of a module in the list of blocks to the one in the model itself: `blocks.3.mlp` to
        `stages.1.blocks.0.mlp`; a model of the catalogue is its list of blocks.
        """
        _, _, block_path = module.partition("blocks.")
        number, _, within = block_path.partition(".")
        if not self.paths or not module.startswith("blocks.") or not number.isdecimal():
            return module
        # The block that calls the others is the model itself, below which its own modules keep their names.
        if int(number) == self.enclosing:
            return within or self.paths[-1]
        return f"{self.paths[int(number)]}.{within}".rstrip(".")

    def units(self) -> Iterator[tuple[ParameterShape, ...]]:
        """Parameters as FSDP2 shards them: block by block, but the first and the last together where they are tied."""
        blocks = list(self.blocks())
        if not any(parameter.tied for parameter in self.parameters):
            yield from blocks
            return
        yield from blocks[1:-1]
        yield (*blocks[0], *blocks[-1])


def bucket_bytes_of(config: RunConfig) -> int:
    """Return the bytes at which a bucket of gradients is closed: `bucket_mib`, or 25 MiB."""
    given_mib = config.layout.bucket_mib
    return BUCKET_BYTES if given_mib is None else int(given_mib * MEBIBYTE)


def fill_buckets(
    parameters: Iterable[ParameterShape], bucket_bytes: int, first_bytes: int | None = None
) -> list[list[ParameterShape]]:
    """Fill buckets with gradients in this order; a bucket is closed once it holds so many bytes.

    Args:
        parameters: in the order in which their gradients become ready.
        bucket_bytes: of a full bucket.
        first_bytes: of the first one, where it differs.
    """
    buckets: list[list[ParameterShape]] = []
    # Full to begin with, so that the first parameter opens a bucket.
    filled_bytes = limit_bytes = bucket_bytes if first_bytes is None else first_bytes
    for parameter in parameters:
        if filled_bytes >= limit_bytes:
            limit_bytes = bucket_bytes if buckets else limit_bytes  # the first one keeps its own limit
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(parameter)
        filled_bytes += parameter.num_bytes
    return buckets


class Split(NamedTuple):
    """Tensor-parallel part of each layer that a rank holds; parts with the same shapes are equal.

    Attributes:
        size: ranks that shard each layer.
        rank: the first whose part has these shapes.
        sequence_parallel: between the parallel regions too a rank holds part of the tokens.
        pattern: the parts that are split, as for `dlojz.by_hand.tensor.split.split_model`.
    """

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    pattern: str = ""


WHOLE = Split()


class Context(NamedTuple):
    """Context-parallel part of each sequence that a rank computes.

    Attributes:
        size: ranks that share the sequences.
        rank: this one's place in the ring.
    """

    size: int = 1
    rank: int = 0


CONVOLUTIONS = "(stem|convolution)$"
"""Parts that torch's engine leaves whole on each rank."""


def split_of(config: RunConfig, tp_rank: int = 0) -> Split:
    """Return the part of a run's model that a rank of the tensor axis holds."""
    layout = config.layout
    if layout.tp == 1:
        return WHOLE
    rank = 0
    if models.spec(config.model).family == "text":  # only a vocabulary may be sharded unequally
        share = -(-config.num_classes // layout.tp)
        # Ranks with a full share have the shapes of rank 0, and so share its trace and its cached shapes.
        rank = tp_rank if (tp_rank + 1) * share > config.num_classes else 0
    pattern = layout.tensor_parts
    if layout.engine == "torch" and isinstance(models.spec(config.model).size, CoAtNetSize):
        pattern = rf"^(?!.*{CONVOLUTIONS}).*({pattern})"
    return Split(layout.tp, rank, layout.sequence_parallel, pattern)


def model_shapes(config: RunConfig) -> ModelShapes:
    """Read the shapes of the whole model of a run, a tied matrix once; their types are those of its precision."""
    sizes = (config.built_model, config.image_size, config.sequence_length, config.num_classes)
    switches = switches_hash() if is_elsewhere(config.model) else ""
    shapes = _shapes(*sizes, WHOLE, config.routing, switches=switches)
    return shapes.in_dtype("bfloat16") if config.precision == "bf16-true" else shapes


def count_parameters(config: RunConfig) -> int:
    """Count the parameters of a run's model; of quantized layers the weights that their bytes stand for."""
    return model_shapes(config.model_copy(update={"lora_base": "none"})).num_parameters


def untied_shapes(config: RunConfig, split: Split = WHOLE) -> ModelShapes:
    """Read the shapes of all blocks, or of a rank's part of them, with the matrix that a tied head computes with."""
    sizes = (config.built_model, config.image_size, config.sequence_length, config.num_classes)
    return _shapes(*sizes, split, config.routing, untied=has_tied_head(config))


def shapes_of_modules(config: RunConfig) -> ModelShapes:
    """Read the shapes of all blocks, each parameter in the module whose forward reads it.

    A tied matrix is in each module that computes with it; `nn.MultiheadAttention` reads the weights of its `out_proj`
    without calling it.
    """
    sizes = (config.built_model, config.image_size, config.sequence_length, config.num_classes)
    return _shapes(*sizes, WHOLE, config.routing, untied=has_tied_head(config) or is_elsewhere(config.model))


def share_shapes(config: RunConfig, tp_rank: int) -> ModelShapes:
    """Read the shapes of the part of all blocks that one rank of the tensor axis holds."""
    split = split_of(config, tp_rank)
    return _shapes(config.built_model, config.image_size, config.sequence_length, config.num_classes, split)


def build_on_meta(
    model: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    split: Split = WHOLE,
    checkpointing: Checkpointing = "none",
    *,
    routing: Routing | None = None,
    ep: int = 1,
) -> BlockList:
    """Build the model, or one rank's part of it, with shapes and without memory."""
    from dlojz.models.meta import on_meta

    with on_meta():
        built = models.build(
            model,
            image_size=image_size,
            sequence_length=sequence_length,
            num_classes=num_classes,
            checkpointing=checkpointing,
            routing=routing,
        )
        if ep > 1:
            from dlojz.models.experts.layer import shard_experts

            shard_experts(built, 0, ep)
        if split == WHOLE:
            return built
        from dlojz.by_hand.tensor.axis import TensorAxis
        from dlojz.by_hand.tensor.split import split_model

        axis = TensorAxis(rank=split.rank, size=split.size, sequence_parallel=split.sequence_parallel)
        if built.tensor_plan is None:
            return split_model(built, axis, split.pattern)
    return split_model(built, axis, split.pattern)  # of one from elsewhere the blocks are tried with numbers


@lru_cache(maxsize=64)
def _shapes(
    model: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    split: Split,
    routing: Routing | None = None,
    untied: bool = False,
    switches: str = "",
) -> ModelShapes:
    from dlojz.models.blocks import untie

    del switches  # read by the packages of models from elsewhere while they build
    built = build_on_meta(model, image_size, sequence_length, num_classes, split, routing=routing)
    if not untied:
        return replace(shapes_of(built), settings=_settings_hash(built) if is_elsewhere(model) else "")
    untie(built)
    shapes = shapes_of(built)
    return replace(shapes, parameters=by_reader(shapes.parameters, built))


SWITCHES = ("TIMM_", "TRANSFORMERS_", "HF_", "TORCH_", "PYTORCH_", "USE_", "DISABLE_")
"""First letters of the environment variables with which torch, timm and transformers choose their code."""
_NO_SWITCHES = ("_HOME", "_CACHE", "_TOKEN", "_PATH", "_OFFLINE", "_ENDPOINT")


def switches_hash() -> str:
    """Hash the switches of this process by which torch and the packages of models choose what they compute.

    These are their environment variables, torch's own settings, and what `timm.layers.set_fused_attn` and its like set.
    """
    import torch

    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(SWITCHES) and not name.endswith(_NO_SWITCHES)
    )
    of_timm = vars(sys.modules["timm.layers.config"]) if "timm.layers.config" in sys.modules else {}
    backends = torch.backends
    chosen = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        # Which kernels may compute attention: each keeps other tensors for backward.
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        backends.mkldnn.enabled,
        [(name, value) for name, value in sorted(of_timm.items()) if isinstance(value, bool | int)],
    )
    return hashlib.sha256(repr((variables, chosen)).encode()).hexdigest()[:16]


def _settings_hash(built: BlockList) -> str:
    """Hash the classes of a model's modules and their settings: what its packages have chosen while it was built."""
    digest = hashlib.sha256()
    for path, part in built.named_modules():
        settings = [(name, _setting(value)) for name, value in sorted(vars(part).items()) if not name.startswith("_")]
        digest.update(f"{path} {type(part).__module__}.{type(part).__qualname__} {settings}".encode())
    return digest.hexdigest()[:16]


def _setting(value: object) -> str:
    """Write a setting so that it is the same text in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_setting, value))})"
    kind = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{kind} {getattr(value, '_attn_implementation', '')}"


def by_reader(parameters: Iterable[ParameterShape], built: BlockList) -> tuple[ParameterShape, ...]:
    """Move the parameters of `out_proj` to the `nn.MultiheadAttention` that reads them without calling it."""
    from torch import nn

    reader = {
        f"{path}.out_proj": path for path, module in built.named_modules() if isinstance(module, nn.MultiheadAttention)
    }
    return tuple(replace(parameter, module=reader.get(parameter.module, parameter.module)) for parameter in parameters)


def shapes_of(built: BlockList) -> ModelShapes:
    """Read the shapes of the parameters and buffers of a model that is built, on the meta device or a real one."""
    from torch import nn

    from dlojz.by_hand.optimizers.muon import hidden_matrices
    from dlojz.models.blocks import tied_names
    from dlojz.models.experts.layer import expert_parameters

    matrices = frozenset(hidden_matrices(built))
    experts = frozenset(expert_parameters(built))
    # Two modules of one block may share a matrix without being tied across blocks.
    tied = {first_name for name, first_name in tied_names(built).items() if _number_of(name) != _number_of(first_name)}
    parameters = tuple(
        ParameterShape(
            name,
            tuple(parameter.shape),
            block=_number_of(name),
            module=name.rpartition(".")[0],
            is_expert=name in experts,
            tied=name in tied,
            dtype=str(parameter.dtype).removeprefix("torch."),
            is_trained=parameter.requires_grad,
            is_hidden_matrix=name in matrices,
        )
        for name, parameter in built.named_parameters()
    )
    buffers = tuple(
        (
            _number_of(name),
            # Counted apart: an engine that casts leaves integers as they are.
            *((buffer.numel(), 0) if buffer.is_floating_point() else (0, buffer.numel() * buffer.itemsize)),
            buffer.numel() * buffer.itemsize,
        )
        for name, buffer in built.named_buffers()
    )
    return ModelShapes(
        parameters=parameters,
        float_buffer_elements=sum(elements for _, elements, _, _ in buffers),
        integer_buffer_bytes=sum(integer_bytes for _, _, integer_bytes, _ in buffers),
        buffers=buffers,
        enclosing=None if built.is_chain else len(built.blocks) - 1,
        paths=getattr(built, "paths", ()),
        recurrent=next((name for name, part in built.named_modules() if isinstance(part, nn.RNNBase)), ""),
    )


def _number_of(name: str) -> int:
    """Number of the block that a parameter or a buffer belongs to."""
    return int(name.split(".")[1])


FORWARD_EXCHANGES = 2
"""Of a mixture: dispatch and combine; the backward pass has as many."""


def share_experts(shapes: ModelShapes, ep: int) -> ModelShapes:
    """Shard the experts over `ep` ranks, along the first dimension of their parameters; the rest stays whole."""
    parameters = tuple(
        replace(parameter, shape=(parameter.shape[0] // ep, *parameter.shape[1:])) if parameter.is_expert else parameter
        for parameter in shapes.parameters
    )
    return replace(shapes, parameters=parameters)


def mixtures_of(shapes: ModelShapes) -> int:
    """Count the mixtures of a model."""
    return len({parameter.module for parameter in shapes.parameters if parameter.is_expert})


def exchange_bytes(config: RunConfig) -> int:
    """Return the bytes of one all-to-all of a mixture for one micro-batch: the whole buffer, in the compute type."""
    routing = config.routing
    if routing is None:
        return 0
    width: int = getattr(models.spec(config.model).size, "width")  # noqa: B009 - of the models that have experts
    tokens = config.layout.micro_batch * (config.sequence_length or 1)
    element_bytes = FP32_BYTES if config.precision == "fp32" else HALF_BYTES
    return all_to_all_bytes(
        experts=routing.experts, capacity=routing.capacity(tokens), width=width, element_bytes=element_bytes
    )


def exchanges(config: RunConfig, shapes: ModelShapes) -> int:
    """Count the all-to-alls of a step: two per mixture, pass and micro-batch; recomputation sends again."""
    passes = 2 if config.layout.checkpointing == "none" else 3
    return FORWARD_EXCHANGES * passes * mixtures_of(shapes) * config.layout.micro_batches


def expert_buckets(config: RunConfig, shapes: ModelShapes) -> list[tuple[bool, list[ParameterShape]]]:
    """Fill the buckets of the engine by hand from what the rank holds; True for buckets of experts."""
    return [
        (experts, bucket)
        for experts in (False, True)
        # From the last parameter on, roughly as backward makes the gradients ready.
        for bucket in fill_buckets(
            (parameter for parameter in reversed(shapes.parameters) if parameter.is_expert == experts),
            bucket_bytes_of(config),
        )
    ]


def gradient_traffic(config: RunConfig, shapes: ModelShapes, most_elements: int | None = None) -> list[Traffic]:
    """Predict the all-reduces of gradients: over dp ranks, of experts over the dp/ep ranks that hold the same.

    Args:
        most_elements: reduced in one call; by default a bucket of the engine by hand.
    """
    layout: Layout = config.layout
    traffic: list[Traffic] = []
    buckets = expert_buckets(config, shapes)
    for experts, group, size in ((False, "dp", layout.dp), (True, "edp", layout.dp // layout.ep)):
        group_buckets = [bucket for kind, bucket in buckets if kind == experts]
        elements = sum(parameter.numel for bucket in group_buckets for parameter in bucket)
        if size > 1 and group_buckets:  # a gradient that one rank alone holds is not sent
            calls = len(group_buckets) if most_elements is None else -(-elements // most_elements)
            traffic.append(_traffic("all_reduce", group, size, calls, FP32_BYTES * elements))
    return traffic


def exchange_traffic(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    """Predict the all-to-alls of all mixtures."""
    calls = exchanges(config, shapes)
    return [_traffic("all_to_all", "ep", config.layout.ep, calls, calls * exchange_bytes(config))]


def _traffic(collective: Collective, group: str, size: int, count: int, message_bytes: int) -> Traffic:
    return Traffic(collective=collective, group=group, group_size=size, count=count, message_bytes=message_bytes)


class Keys(NamedTuple):
    """Attention of a text model: its layers, and in each heads of keys and of queries, as wide as the values."""

    layers: int
    heads: int
    queries: int
    width: int


def keys_of(config: RunConfig) -> Keys:
    """Read the attention of a run's text model, which context parallelism sends round a ring.

    Raises:
        LabError: if the model is none of text.
    """
    size = models.spec(config.model).size
    if isinstance(size, DeepSeekSize):
        # Latent attention: each head's key is a part without positions and a rotated one.
        return Keys(size.depth, size.num_heads, size.num_heads, size.head_dim + size.rotated_dim)
    if isinstance(size, QwenSize):
        return Keys(size.depth, size.num_kv_heads, size.num_heads, size.head_dim)
    if isinstance(size, GPTSize | LlamaSize):
        heads = size.num_kv_heads if isinstance(size, LlamaSize) else size.num_heads
        return Keys(size.depth, heads, size.num_heads, size.width // size.num_heads)
    raise phrase.refused("images on a ring", config=config)


def repeated_rings(config: RunConfig) -> int:
    """Count the attention layers of a text model whose forward pass backward runs again."""
    layout, layers = config.layout, keys_of(config).layers
    if layout.activation_plan:  # the first block is the embedding, the last the head
        return block_choices(layout.activation_plan)[1 : layers + 1].count("recompute")
    return 0 if layout.checkpointing == "none" else layers


def check_parameters(config: RunConfig, shapes: ModelShapes) -> None:
    """Refuse frozen parameters, and weights in other types than fp32, where they are neither predicted nor run.

    Raises:
        LabError: with what the model has, and the layouts that take it.
    """
    dtypes = Counter(parameter.dtype for parameter in shapes.parameters)
    frozen = [parameter for parameter in shapes.parameters if not parameter.is_trained]
    if not frozen and set(dtypes) <= {"float32"}:
        return
    layout = config.layout
    trained_dtypes = {parameter.dtype for parameter in shapes.parameters if parameter.is_trained}
    is_data_parallel = layout.pp == layout.tp == layout.cp == layout.ep == 1 and config.library == "none"
    engine, all_fp32 = config.engine_spec, set(dtypes) == {"float32"}
    takes = engine.takes_frozen and (engine.keeps_dtypes or all_fp32)
    takes = takes and is_data_parallel and layout.gradient_compression == "none"
    joined = layout.strategy in ("by_hand", "fsdp2")  # gradients of several types do not go into one message
    if takes and not (joined and len(trained_dtypes) > 1):
        casts = layout.strategy == "fsdp2" and config.precision in ("bf16", "fp16") and trained_dtypes != {"float32"}
        if not casts:
            return
    of_type = ", ".join(sorted(dtypes))
    path = shapes.own_path(frozen[0].name) if frozen else ""
    has = (
        phrase("frozen parameters", frozen=len(frozen), parameters=len(shapes.parameters), path=path, of_type=of_type)
        if frozen
        else say(en=f"weights in {of_type}", fr=f"des poids en {of_type}")
    )
    raise phrase.refused("untrained on many ranks", config=config, has=has, layout=layout)


def num_blocks(shapes: ModelShapes) -> int:
    """Count the blocks of a model."""
    return max(parameter.block for parameter in shapes.parameters) + 1


def check_stages_share_no_weight(config: RunConfig, shapes: ModelShapes) -> None:
    """Refuse a pipeline of a model from elsewhere whose blocks share a weight.

    Raises:
        LabError: if they do; the sentence names the first such weight.
    """
    layout = config.layout
    if is_elsewhere(config.model) and (tied := [parameter for parameter in shapes.parameters if parameter.tied]):
        raise phrase.refused("stages share a weight", layout=layout, config=config, tied_name=tied[0].name)


def bounds_of(config: RunConfig) -> tuple[int, ...]:
    """Return the first block of each stage of a layout's pipeline, and the number of blocks; one stage for pp = 1.

    Raises:
        LabError: if the schedule does not fit the layout, a stage would have no block, or blocks of a model from
            elsewhere share a weight.
    """
    layout, shapes = config.layout, model_shapes(config)
    blocks = num_blocks(shapes)
    if layout.pp == 1:
        return 0, blocks
    check_stages_share_no_weight(config, shapes)
    if layout.pp > blocks:  # refused before the schedule is built: it may be a long one
        return stage_bounds(layout, layout.pp, [""] * blocks, [1] * blocks)
    stages = layout.pp if layout.engine == "deepspeed" else schedule_of(layout).stages
    if layout.partition == "uniform":
        return stage_bounds(layout, stages, [""] * blocks, [1] * blocks)
    from dlojz.pipeline.partition import block_weights

    parameters = block_weights(config, "parameters")
    flops = [float(weight) for weight in block_weights(config, "flops").weights] if layout.partition == "flops" else []
    return stage_bounds(layout, stages, parameters.kinds, [int(weight) for weight in parameters.weights], flops)


@dataclass(frozen=True)
class RankPart:
    """Part of a run's model, data and pipeline that one rank has; each answer is computed once, when it is asked for.

    One process is a pipeline of one stage. What is computed raises a `LabError` where the model cannot be cut so.

    Attributes:
        rank: from 0 to the world size: ((pp_rank · dp + dp_rank) · cp + cp_rank) · tp + tp_rank.
    """

    config: RunConfig
    rank: int = 0

    @property
    def tp_rank(self) -> int:
        """Position along the tensor axis."""
        return self.rank % self.config.layout.tp

    @property
    def dp_rank(self) -> int:
        """Position along the data axis."""
        layout = self.config.layout
        return self.rank // (layout.cp * layout.tp) % layout.dp

    @property
    def pp_rank(self) -> int:
        """Position along the pipeline."""
        return self.rank // (self.config.layout.replicas * self.config.layout.tp)

    @property
    def split(self) -> Split:
        """Tensor-parallel part of each layer."""
        return split_of(self.config, self.tp_rank)

    @property
    def context(self) -> Context:
        """Context-parallel part of each sequence."""
        layout = self.config.layout
        return Context(layout.cp, self.rank // layout.tp % layout.cp)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """First block of each stage of the whole pipeline, and the number of blocks."""
        return bounds_of(self.config)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Stages that it holds, in order; one that it holds twice (bidirectional schedules) counts twice."""
        if self.config.layout.pp == 1:
            return (0,)
        placement = schedule_of(self.config.layout).placement
        return tuple(sorted(s for ranks in placement for s, holder in enumerate(ranks) if holder == self.pp_rank))

    @cached_property
    def stage_blocks(self) -> tuple[range, ...]:
        """Blocks of each of its stages."""
        bounds = self.bounds  # before the schedule is built: more stages than blocks are refused
        return tuple(range(*bounds[stage : stage + 2]) for stage in self.stages)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of all its stages."""
        return tuple(chain.from_iterable(self.stage_blocks))

    @property
    def reads_inputs(self) -> bool:
        """Whether it has the first stage: the embedding, and the inputs of the samples."""
        return 0 in self.stages

    @property
    def computes_loss(self) -> bool:
        """Whether it has the last stage: the head, and the targets of the samples."""
        layout = self.config.layout
        return layout.pp == 1 or schedule_of(layout).stages - 1 in self.stages

    @property
    def pipes(self) -> int:
        """Directions of the pipeline, each of which takes an equal part of the micro-batches."""
        return schedule_of(self.config.layout).pipes if self.config.layout.pp > 1 else 1

    @cached_property
    def shapes(self) -> ModelShapes:
        """Shapes of what it holds, before data parallelism shards it further.

        The last stage of a pipeline holds a copy of a tied embedding.
        """
        config, layout = self.config, self.config.layout
        if layout.pp > 1 and has_tied_head(config):
            shapes = untied_shapes(config, self.split)
        else:
            shapes = share_shapes(config, self.tp_rank) if layout.tp > 1 else model_shapes(config)
        if layout.ep > 1:
            shapes = share_experts(shapes, layout.ep)
        if layout.pp == 1:
            return shapes
        blocks = frozenset(self.blocks)
        buffers = tuple(buffer for buffer in shapes.buffers if buffer[0] in blocks)
        return ModelShapes(
            tuple(parameter for parameter in shapes.parameters if parameter.block in blocks),
            sum(elements for _, elements, _, _ in buffers),
            sum(integer_bytes for _, _, integer_bytes, _ in buffers),
            buffers,
        )


ShareStyle = Literal["colwise", "rowwise", "inner", "whole"]


class TensorShareRow(NamedTuple):
    """Layers of the same place in their blocks.

    Attributes:
        layers: path with `*` for numbers, which is a pattern of a `tp_plan`; empty for all that is whole.
        style: of their split; `inner` is whole, but its gradient is summed.
        heads: attention heads of each that the ranks share; 0 where it has none.
        parts: outputs of each fused part, which is split by itself; one number where none is fused.
        rank_bytes: fp32 weights of all of them on a rank.
    """

    layers: str
    style: ShareStyle
    number: int
    heads: int
    parts: tuple[int, ...]
    rank_bytes: int


def tensor_share_rows(config: RunConfig) -> list[TensorShareRow]:
    """List what a rank of the tensor axis holds of a model from elsewhere, in the order of the blocks; whole is last.

    Raises:
        LabError: for a model of the catalogue, or one of which nothing can be split among so many ranks.
    """
    layout = config.layout
    if not is_elsewhere(config.model):
        raise phrase.refused("uneven rows", config=config, layout=layout)
    built = build_on_meta(config.built_model, config.image_size, config.sequence_length, config.num_classes)
    assert built.tensor_plan is not None  # of every model from elsewhere
    splits: dict[str, tuple[ShareStyle, int, tuple[int, ...]]] = {}
    inner: set[str] = set()
    for region in built.tensor_plan(layout.tp, layout.tensor_parts):
        for layer in region.layers:
            splits[f"{region.block}.{layer.path}"] = (layer.style, region.heads, layer.parts)
        inner |= {f"{region.block}.{path}" for path in region.inner}
    shapes = share_shapes(config, 0)
    rows: dict[tuple[str, ShareStyle, int, tuple[int, ...]], tuple[set[str], int]] = {}
    for parameter in shapes.parameters:
        path = shapes.own_path(parameter.module)
        style, heads, parts = splits.get(path, ("whole", 0, ()))
        # Whole, but within a region: each rank has a part of its gradient's sum.
        if f"{path}.{parameter.name.rpartition('.')[2]}" in inner:
            style = "inner"
        key = ("" if style == "whole" else pattern_of(path), style, heads, parts)
        # A layer's weight and bias are one path, and count as one layer.
        layers, num_bytes = rows.get(key, (set(), 0))
        rows[key] = (layers | {path}, num_bytes + FP32_BYTES * parameter.numel)
    share_rows = [
        TensorShareRow(layers, style, len(paths), heads, parts, num_bytes)
        for (layers, style, heads, parts), (paths, num_bytes) in rows.items()
    ]
    return sorted(share_rows, key=lambda row: row.style == "whole")


def pattern_of(path: str) -> str:
    """Write a path with `*` for the numbers of blocks.

    Example:
        >>> pattern_of("stages.1.blocks.0.mlp.fc1")
        'stages.*.blocks.*.mlp.fc1'
    """
    return re.sub(r"\d+(?=\.)", "*", path)
