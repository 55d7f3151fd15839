"""Predict the bytes and calls that a rank hands to each collective in a step, along every axis.

Every figure equals, byte for byte, what the probe counts at c10d. In fp16 the messages are those of bf16.

**Data axis.** With Ψ parameters, a rank sends 2Ψ in a ring for ZeRO stages 0 to 2, 3Ψ for stage 3; the messages below
are the tensors behind them. Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7; the libraries'
sources named in `states`.

**Tensor axis.** One line per message of a block, with its shape; torch's `parallelize_module` has the same regions as
`dlojz.by_hand.tensor`. A region is what lies between `enter` and `leave` (see `dlojz.by_hand.tensor.axis`):

                               forward                         backward
    enter                      -                               all-reduce (what entered)
    leave                      all-reduce (what leaves)        -
    with sequence parallelism:
    enter                      all-gather (what entered)       reduce-scatter (its gradient)
    leave                      reduce-scatter (what leaves)    all-gather (its gradient)

A transformer block has two regions: per micro-batch 4 all-reduces of B·T·D in all, or 4 pairs of the other two, which
send as much. What leaves is a product, and has its type; what enters is normalised, and has the stream's (on the CPU:
CUDA's autocast normalises in fp32, so that CoAtNet's attention then enters fp32). Source: Shoeybi et al. 2019,
"Megatron-LM" (arXiv 1909.08053), §3; Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.2.

Shape suffixes: B batch, T tokens, D width, C channels, H and W of the feature map, Q squeezed channels, K classes.

**Context axis.** In each attention layer keys and values of T / n tokens go round a ring of n ranks, n − 1 messages
forward, and backward as many with their gradients behind them, in fp32 (`dlojz.by_hand.context_parallel.ring_bytes`).
Gradients of weights are averaged along the data and the context axis together. Source: Liu et al. 2023, "Ring
Attention" (arXiv 2310.01889), §3; Llama Team 2024 (arXiv 2407.21783), §3.3.2.

**Pipeline.** Counted from the schedule and the shapes of the boundaries, which the blocks give on fake tensors. A
micro-batch crosses a boundary between two ranks twice: its activation there, its gradient back. Source: Huang et al.
2019, "GPipe" (arXiv 1811.06965), §2.2; Li & Hoefler 2021, "Chimera" (arXiv 2107.06925), §3.2, for the two copies of
each stage of a bidirectional pipeline, whose gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dlojz import models
from dlojz.base.language import refusal, refusing_overflow
from dlojz.by_hand.optimizers.sent_bytes import message_bytes
from dlojz.config.compatibility import has_tied_head
from dlojz.config.engines import DEEPSPEED_BUCKET_ELEMENTS
from dlojz.config.optimizers import OPTIMIZERS
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import sending_interval
from dlojz.models.foreign.names import is_elsewhere
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.prediction.shapes import (
    AUTOCAST,
    FP32_BYTES,
    HALF_BYTES,
    WHOLE,
    ModelShapes,
    ParameterShape,
    RankPart,
    Split,
    bucket_bytes_of,
    build_on_meta,
    exchange_traffic,
    fill_buckets,
    gradient_traffic,
    keys_of,
    repeated_rings,
    shapes_of_modules,
    split_of,
    untied_shapes,
)
from dlojz.prediction.states import (
    compute_bytes,
    ddp_buckets,
    deepspeed_messages,
    hook_traffic,
    padded_of_modules,
    padded_parameters,
    zero_3_sub_groups,
    zero_3_units,
    zero_by_hand_shares,
)
from dlojz.results.footprint import Collective, Traffic

if TYPE_CHECKING:
    from torch import nn

    from dlojz.pipeline.runtime import Boundary

DEEPSPEED_REDUCED_ELEMENTS = 500_000_000
"""Gradients that DeepSpeed's stage 0 reduces in one call (`buffered_allreduce_fallback`)."""
LOSS_BYTES = 8
"""The lab's own message: one fp64 loss per step, in its control group."""


def deepspeed_buckets(sizes: Iterable[int], bucket_elements: int = DEEPSPEED_BUCKET_ELEMENTS) -> list[int]:
    """Fill DeepSpeed's reduce buckets with gradients (in elements), in this order; returns how many each one has."""
    counts: list[int] = []
    filled = 0
    for size in sizes:
        # A gradient that is larger than a bucket is alone in one.
        if not counts or filled + size > bucket_elements:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts


MessageBytes = dict[Collective, list[int]]
"""Bytes of each message of a rank, by collective."""


def traffic_of(messages: MessageBytes, group: str, group_size: int) -> list[Traffic]:
    """Sum the messages of each collective in a group."""
    return [_of(collective, group, group_size, each_bytes) for collective, each_bytes in messages.items()]


def fsdp2_messages(
    units: Mapping[str, Sequence[ParameterShape]],
    ranks: int,
    *,
    unsharded: Container[str],
    in_backward: Container[str],
    gathered_bytes: int | None,
    reduced_bytes: int | None,
) -> MessageBytes:
    """List FSDP2's messages in a micro-batch.

    Args:
        units: parameters of each, in the order of forward.
        ranks: that divide them.
        unsharded: units whose weights stay whole from forward to backward.
        in_backward: units that backward enters; the one below the last of them is prefetched all the same.
        gathered_bytes: of a number of a weight as it is gathered; None for its own type.
        reduced_bytes: of a number of a gradient as it is reduced; None for the weight's type.
    """
    backward_units = [number for number, name in enumerate(units) if name in in_backward]
    gathered_twice = {*backward_units, min(backward_units, default=0) - 1}
    messages: MessageBytes = {"all_gather": [], "reduce_scatter": []}
    for number, (name, unit) in enumerate(units.items()):
        # Dimension 0 is cut into equal shards, so that padding is sent too.
        padded = [(parameter, ranks * parameter.padded_rows_numel(ranks)) for parameter in unit]
        unit_bytes = sum(parameter.cast_bytes(gathered_bytes) * elements for parameter, elements in padded)
        messages["all_gather"] += [unit_bytes] * (2 if number in gathered_twice and name not in unsharded else 1)
        trained = [(parameter, elements) for parameter, elements in padded if parameter.is_trained]
        if trained:
            each_bytes = ((reduced_bytes or parameter.element_bytes) * elements for parameter, elements in trained)
            messages["reduce_scatter"].append(sum(each_bytes))
    return messages


class DeepSpeedSizes(NamedTuple):
    """Sizes that DeepSpeed's messages depend on besides the parameters."""

    ranks: int
    micro_batches: int
    element_bytes: int
    """Of a weight, and of a gradient."""
    checks_bytes: tuple[int, ...] = ()
    """Of each message of an update that asks for the gradients' norm, or for infinite ones."""
    bucket_elements: int = DEEPSPEED_BUCKET_ELEMENTS


def zero_0_messages(sizes: DeepSpeedSizes, num_parameters: int) -> MessageBytes:
    """List the messages of DeepSpeed's stage 0: all gradients of a step in one call, unless there are too many.

    Zeros are sent for parameters that backward does not reach. Source: DeepSpeed 0.19 `runtime/engine.py`,
    `_get_gradients_for_reduction`.
    """
    starts = range(0, num_parameters, DEEPSPEED_REDUCED_ELEMENTS)
    calls = [sizes.element_bytes * min(DEEPSPEED_REDUCED_ELEMENTS, num_parameters - start) for start in starts]
    return {"all_reduce": [*calls, *sizes.checks_bytes]}


def zero_1_or_2_messages(
    sizes: DeepSpeedSizes, stage: int, groups: Sequence[ModelShapes], ready: Sequence[ParameterShape]
) -> MessageBytes:
    """List the messages of DeepSpeed's stages 1 and 2.

    Args:
        stage: 1 reduces once per step, 2 with every micro-batch, as it keeps no whole gradient in between. Both
            all-reduce the bucket where the paper's scheme would reduce-scatter it, then each rank keeps its share.
        groups: parameters that are flattened together, and gathered at once whatever `allgather_bucket_size` is.
        ready: parameters that backward reaches, in the order of their gradients.

    Source: DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py`, `reduce_gradients`; `runtime/utils.py`,
    `all_gather_into_tensor_dp_groups`.
    """
    names = {parameter.name for parameter in ready}
    in_groups = [parameter for group in groups for parameter in group.parameters if parameter.name in names]
    # Stage 1 fills its buckets after backward, in the parameters' order.
    order = in_groups if stage == 1 else ready
    waiting = iter(order)
    counts = deepspeed_buckets((parameter.numel for parameter in order), sizes.bucket_elements)
    reduced = [
        sizes.element_bytes * sum(pieces)
        for count in counts
        for pieces in deepspeed_messages(groups, sizes.ranks, islice(waiting, count), sizes.bucket_elements)
    ]
    flats = [padded_parameters(group.num_parameters, sizes.ranks) for group in groups]
    return {
        "all_reduce": reduced * (sizes.micro_batches if stage == 2 else 1) + [*sizes.checks_bytes],
        "all_gather": [sizes.element_bytes * elements for elements in flats],
    }


def zero_3_messages(
    sizes: DeepSpeedSizes, gathered_elements: Iterable[int], ready: Iterable[ParameterShape]
) -> MessageBytes:
    """List the messages of DeepSpeed's stage 3.

    Args:
        gathered_elements: of each all-gather of a micro-batch, padding included.
        ready: parameters that backward reaches, in the order of their gradients.
    """
    padded = [sizes.ranks * parameter.padded_numel(sizes.ranks) for parameter in ready]
    waiting = iter(padded)
    buckets = [sum(islice(waiting, count)) for count in deepspeed_buckets(padded, sizes.bucket_elements)]
    return {
        "all_gather": [sizes.element_bytes * elements for elements in gathered_elements] * sizes.micro_batches,
        "reduce_scatter": [sizes.element_bytes * elements for elements in buckets] * sizes.micro_batches,
        "all_reduce": [*sizes.checks_bytes],
    }


def _ddp(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    if config.layout.gradient_compression != "none":
        return hook_traffic(config, shapes)
    return [_dp(config, "all_reduce", len(ddp_buckets(config, shapes)), _trained_bytes(shapes))]


def _by_hand(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    buckets = fill_buckets(reversed(shapes.trained.parameters), bucket_bytes_of(config))
    return [_dp(config, "all_reduce", len(buckets), _trained_bytes(shapes))]


def _trained_bytes(shapes: ModelShapes) -> int:
    return sum(parameter.num_bytes for parameter in shapes.trained.parameters)


def _experts(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    # DeepSpeed reduces at most so many elements at once, the engine by hand a bucket.
    elements = DEEPSPEED_REDUCED_ELEMENTS if config.layout.engine == "deepspeed" else None
    return [*gradient_traffic(config, shapes, elements), *exchange_traffic(config, shapes)]


def _compressed(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    """In the second stage, in a step that synchronises; in the first it is one all-reduce of all gradients in fp32."""
    # One bit per element, and scales: the all-to-all and the all-gather have the same bytes.
    compressed_bytes = message_bytes(shapes.num_parameters, config.layout.dp)
    return [_dp(config, "all_to_all", 1, compressed_bytes), _dp(config, "all_gather", 1, compressed_bytes)]


def _local_steps(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    """In a step after which the replicas meet: all weights, or their changes; in all others nothing."""
    traffic = _dp(config, "all_reduce", 1, FP32_BYTES * shapes.num_parameters)
    return [traffic.model_copy(update={"every_steps": sending_interval(config)})]


def _zero_by_hand(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    layout = config.layout
    shares = zero_by_hand_shares(config, shapes)
    flats, flat_elements = len(shares), layout.dp * sum(shares)
    # Gradients: stage 1 accumulates whole ones and reduces them once per step, 2 and 3 with every micro-batch, in fp32.
    reductions = 1 if layout.zero == 1 else layout.micro_batches
    # Weights: after the update once, in fp32; in stage 3 for every forward and every backward, in the type computed in.
    # A checkpointed block is computed again while its weights are gathered for its backward: no third time.
    gathers, weight_bytes = (2 * layout.micro_batches, compute_bytes(config)) if layout.zero == 3 else (1, FP32_BYTES)
    # A tied matrix stays whole from the beginning of forward to the end of backward.
    keeps_tied = layout.zero == 3 and bool(zero_3_units(shapes)[1])
    spared = layout.micro_batches * keeps_tied
    return [
        _dp(config, "reduce_scatter", reductions * flats, reductions * FP32_BYTES * flat_elements),
        _dp(
            config,
            "all_gather",
            gathers * flats - spared,
            weight_bytes * (gathers * flat_elements - spared * layout.dp * shares[-1]),
        ),
    ]


def _reached(config: RunConfig, shapes: ModelShapes) -> ModelShapes:
    """Return the shapes with what backward does not reach as frozen; in the catalogue and in a chain it reaches all."""
    if not is_elsewhere(config.model) or config.layout.pp > 1:
        return shapes
    from dlojz.prediction.model_trace import reached_in_few  # loads torch

    return shapes.trained_only(reached_in_few(config))


def _fsdp2(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    layout = config.layout
    shapes = _reached(config, shapes)
    units = {f"blocks.{unit[-1].block}": unit for unit in shapes.units()}
    in_backward: Container[str] = units
    if shapes.trained is not shapes:
        from dlojz.prediction.model_trace import units_in_backward  # loads torch

        in_backward = units_in_backward(config)
    casts = config.precision in ("bf16", "fp16")  # their gradients are reduced in fp32
    messages = fsdp2_messages(
        units,
        layout.dp,
        # ZeRO-3 frees the weights after forward and gathers them again for backward; ZeRO-2 keeps them.
        unsharded=() if layout.zero == 3 else units,
        in_backward=in_backward,
        gathered_bytes=HALF_BYTES if casts else None,
        reduced_bytes=FP32_BYTES if casts else None,
    )
    # Below torch's pipeline each unit is gathered and reduced once per step, else once per micro-batch.
    times = 1 if layout.pp > 1 else layout.micro_batches
    message_bytes = {name: times * each_bytes for name, each_bytes in messages.items()}
    if OPTIMIZERS[config.optimizer].orthogonal:
        # Who: the ranks that have rows of a hidden matrix. What: all-gather of its update, in bf16. Once per step.
        message_bytes["all_gather"] += [
            HALF_BYTES * layout.dp * parameter.padded_rows_numel(layout.dp)
            for parameter in shapes.trained.parameters
            if parameter.is_hidden_matrix
        ]
    return traffic_of(message_bytes, "dp", layout.replicas)


def _deepspeed_sizes(config: RunConfig, checks_bytes: tuple[int, ...] = ()) -> DeepSpeedSizes:
    return DeepSpeedSizes(config.layout.dp, config.layout.micro_batches, compute_bytes(config), checks_bytes)


def _zero_0(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    messages = zero_0_messages(_deepspeed_sizes(config), shapes.trained.num_parameters)
    return traffic_of(messages, "dp", config.layout.replicas)


def _zero_1_or_2(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    # With every update: the gradient's norm (4 bytes) and, in bf16 and fp16, a flag for overflow (1 byte).
    sizes = _deepspeed_sizes(config, (4,) if config.precision == "fp32" else (4, 1))
    ready = _reached(config, shapes).trained.parameters[::-1]
    messages = zero_1_or_2_messages(sizes, config.layout.zero, (shapes.trained,), ready)
    return traffic_of(messages, "dp", config.layout.replicas)


def _zero_3(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    layout = config.layout
    reached = _reached(config, shapes).trained
    of_modules = shapes_of_modules(config)  # a tied matrix is gathered for each of its modules
    elements = padded_of_modules(of_modules.parameters, layout.dp)
    # Every module gathers its weights for its forward and again for its backward.
    modules = 2 * list(elements)
    if is_elsewhere(config.model) and (layout.checkpointing != "none" or reached is not shapes):
        from dlojz.prediction.model_trace import gathered_modules, trace_of  # loads torch

        modules = gathered_modules(trace_of(RankPart(config)).events, elements)
    elif layout.checkpointing != "none":
        # Once more to recompute; but torch ends the recomputation of a block inside its last module, whose weights are
        # then still there for its backward.
        last_modules = {block[-1].module for block in of_modules.blocks()}
        modules += [module for module in elements if module not in last_modules]
    norm_bytes = 4 if layout.offload in ("optimizer", "parameters") else 8  # on the host it is summed in fp32
    # One norm of the gradients of each sub-group.
    sizes = _deepspeed_sizes(config, (norm_bytes,) * len(zero_3_sub_groups(config, shapes.trained)))
    messages = zero_3_messages(sizes, (elements[module] for module in modules), reversed(reached.parameters))
    return traffic_of(messages, "dp", layout.replicas)


def _dp(config: RunConfig, collective: Collective, count: int, message_bytes: int) -> Traffic:
    return Traffic(
        collective=collective, group="dp", group_size=config.layout.replicas, count=count, message_bytes=message_bytes
    )


TRAFFIC: dict[str, Callable[[RunConfig, ModelShapes], list[Traffic]]] = {
    "none": lambda config, shapes: [],
    "ddp": _ddp,
    "by_hand": _by_hand,
    "zero_by_hand": _zero_by_hand,
    "fsdp2": _fsdp2,
    "deepspeed_0": _zero_0,
    "deepspeed_1_or_2": _zero_1_or_2,
    "deepspeed_3": _zero_3,
    "one_bit": _compressed,
    "local_steps": _local_steps,
    "experts": _experts,
}
"""Rules of the data axis, by the names in `dlojz.config.engines`."""


def predict_communication(part: RankPart) -> tuple[Traffic, ...]:
    """Predict one rank's traffic in a steady step, sorted by collective and group; empty for one process.

    Raises:
        LabError: if it is not known what an engine sends along the tensor axis.
    """
    config, layout = part.config, part.config.layout
    if layout.world_size == 1:
        return ()
    control = Traffic(
        collective="all_reduce", group="control", group_size=layout.world_size, count=1, message_bytes=LOSS_BYTES
    )
    rule: list[Traffic] = []
    if layout.pp > 1:
        rule += pipeline_traffic(part)
    if layout.replicas > 1 and (layout.pp == 1 or layout.engine == "deepspeed"):
        rule += TRAFFIC[config.engine_spec.traffic](config, part.shapes)
    rule += tensor_traffic(part)
    rule += context_traffic(config)
    return tuple(sorted([control, *rule], key=lambda t: (t.collective, t.group)))


def communication_by_place(config: RunConfig) -> dict[tuple[int, int], tuple[Traffic, ...]]:
    """Predict the traffic of all ranks: by position along (pp, tp), as those of data and context axes send the same.

    Raises:
        LabError: as `predict_communication`.
    """
    layout = config.layout
    return {
        # The first replica's rank there: tp is the innermost axis, pp the outermost (`RankPart`).
        (pp, tp): predict_communication(RankPart(config, pp * layout.replicas * layout.tp + tp))
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    }


OF_WEIGHTS = "gradient of a whole"
"""Beginning of the names of messages that belong to a parameter, not to a region."""


class BlockMessage(NamedTuple):
    """Message of a block, for one micro-batch.

    Attributes:
        what: the part it belongs to, e.g. `attention: leave`.
        phase: the pass that sends it.
        collective: called by each rank of the axis.
        message_bytes: of the whole tensor that is reduced or gathered.
        again: whether a recomputed block sends it again.
    """

    what: str
    phase: Literal["forward", "backward"]
    collective: Collective
    message_bytes: int
    again: bool = False


class BlockSizes(NamedTuple):
    """Sizes of a block: (B, T, D) or (B, C, H, W) that enters and leaves, tokens of all ranks; bytes per element."""

    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    sequence_parallel: bool
    stream_bytes: int
    product_bytes: int
    weight_bytes: int
    by_torch: bool

    def region(
        self, part: str, entering_elements: int, leaving_elements: int, *, ends_block: bool = False
    ) -> Iterator[BlockMessage]:
        """Messages at the two ends of a region, of so many elements.

        torch stops recomputing a block as soon as it has all that backward needs: within its last product, so the sum
        that ends the block is not repeated.
        """
        entered_bytes, left_bytes = entering_elements * self.stream_bytes, leaving_elements * self.product_bytes
        if not self.sequence_parallel:
            yield BlockMessage(f"{part}: leave", "forward", "all_reduce", left_bytes, again=not ends_block)
            yield BlockMessage(f"{part}: enter", "backward", "all_reduce", entered_bytes)
            return
        yield BlockMessage(f"{part}: enter", "forward", "all_gather", entered_bytes, again=True)
        yield BlockMessage(f"{part}: leave", "forward", "reduce_scatter", left_bytes, again=not ends_block)
        yield BlockMessage(f"{part}: leave", "backward", "all_gather", left_bytes)
        yield BlockMessage(f"{part}: enter", "backward", "reduce_scatter", entered_bytes)

    def whole_on_each(self, *modules: Any) -> Iterator[BlockMessage]:
        """Gradients of norms and biases that are whole on all ranks, summed where each sees its own tokens only."""
        from dlojz.by_hand.tensor.layers import RowParallelLinear

        if not self.sequence_parallel:
            return
        for module in modules:
            if self.by_torch and isinstance(module, RowParallelLinear):
                continue  # torch adds this bias before the tokens are scattered: its gradient is whole already
            kinds = ("bias",) if isinstance(module, RowParallelLinear) else ("weight", "bias")
            for kind in kinds:
                parameter = getattr(module, kind, None)
                if parameter is not None:
                    num_bytes = parameter.numel() * self.weight_bytes
                    yield BlockMessage(f"{OF_WEIGHTS} {kind}", "backward", "all_reduce", num_bytes)


def _transformer(block: Any, sizes: BlockSizes) -> Iterator[BlockMessage]:
    """Attention, then MLP: each enters and leaves (B, T, D)."""
    numel = prod(sizes.entering)
    attention, mlp = block.heads_axis.size > 1, block.mlp_axis.size > 1
    if attention:
        yield from sizes.region("attention", numel, numel)
    if mlp:
        yield from sizes.region("mlp", numel, numel, ends_block=True)
    yield from sizes.whole_on_each(block.norm1, block.attention_project, block.norm2, block.mlp_project)


def _coatnet_attention(block: Any, sizes: BlockSizes) -> Iterator[BlockMessage]:
    """What is pooled enters with the former width; all else has the block's own."""
    batch, _, height, width = sizes.leaving
    numel = prod(sizes.leaving)
    if block.attention.axis.size > 1:
        # Pooled before the product: height and width are those of the output, channels those of the input.
        entering_elements = batch * height * width * block.attention.qkv.weight.shape[1]
        yield from sizes.region("attention", entering_elements, numel)
    if block.mlp_axis.size > 1:
        yield from sizes.region("mlp", numel, numel, ends_block=True)


def _convolution(block: Any, sizes: BlockSizes) -> Iterator[BlockMessage]:
    """MBConv: all channels enter (B, C, H, W), squeeze-and-excitation is a region turned round: (B, Q) twice."""
    squeezed_bytes = sizes.leaving[0] * block.squeeze_excitation.squeeze.weight.shape[0] * sizes.product_bytes
    yield BlockMessage("squeeze: leave", "forward", "all_reduce", squeezed_bytes, again=True)
    yield BlockMessage("excite: enter", "backward", "all_reduce", squeezed_bytes)
    yield from sizes.region("convolution", prod(sizes.entering), prod(sizes.leaving), ends_block=True)


def _stem(block: Any, sizes: BlockSizes) -> Iterator[BlockMessage]:
    """Images need no gradient: its region has an end only."""
    yield BlockMessage("stem: leave", "forward", "all_reduce", prod(sizes.leaving) * sizes.product_bytes)


def _coatnet_head(block: Any, sizes: BlockSizes) -> Iterator[BlockMessage]:
    """(B, D) enters, all logits (B, K) leave."""
    yield from sizes.region("head", sizes.entering[0] * sizes.entering[1], prod(sizes.leaving), ends_block=True)


def _embedding(block: Any, sizes: BlockSizes) -> Iterator[BlockMessage]:
    """The tokens' vectors (B, T, D), of which each rank knows some; tokens need no gradient."""
    num_bytes = prod(sizes.leaving) * sizes.weight_bytes
    is_repeated = sizes.by_torch and hasattr(block, "position")  # torch looks positions up last, and so repeats the sum
    if not sizes.sequence_parallel:
        yield BlockMessage("embedding: leave", "forward", "all_reduce", num_bytes, is_repeated)
        return
    yield BlockMessage("embedding: leave", "forward", "reduce_scatter", num_bytes, is_repeated)
    yield BlockMessage("embedding: leave", "backward", "all_gather", num_bytes)
    if hasattr(block, "position"):  # each rank has gone on with its own tokens' rows of a table that all have
        table_bytes = prod(sizes.leaving[1:]) * sizes.weight_bytes
        yield BlockMessage("positions: own part", "backward", "all_gather", table_bytes)


def _text_head(block: Any, sizes: BlockSizes) -> Iterator[BlockMessage]:
    """(B, T, D) enters; the logits stay where they are, and the loss sends three numbers per token, in fp32."""
    enter = [message for message in sizes.region("head", prod(sizes.entering), 0) if message.message_bytes]
    yield from enter
    yield from sizes.whole_on_each(block.norm)
    tokens = prod(sizes.entering[:2])
    # (B, T) maxima; then two numbers per token in one message.
    yield BlockMessage("loss: largest logit", "forward", "all_reduce", FP32_BYTES * tokens)
    yield BlockMessage("loss: sum of exponentials, target", "forward", "all_reduce", 2 * FP32_BYTES * tokens)


BLOCKS: dict[str, Callable[[Any, BlockSizes], Iterator[BlockMessage]]] = {
    "ParallelTransformerBlock": _transformer,
    "ParallelLlamaBlock": _transformer,
    "ParallelAttentionBlock": _coatnet_attention,
    "ParallelMBConvBlock": _convolution,
    "ParallelStem": _stem,
    "ParallelCoAtNetHead": _coatnet_head,
    "VocabularyParallelEmbedding": _embedding,
    "ParallelEmbedding": _embedding,
    "ParallelHead": _text_head,
}
"""Messages by class of the block; other blocks are whole on each rank and send nothing."""


def boundaries_of_run(config: RunConfig) -> tuple[Boundary, ...]:
    """Find shape and type of what enters each block, and leaves the model; per rank if the sequence is split."""
    split = split_of(config)
    # Without sequence parallelism every rank has all of what passes between two blocks.
    return _boundaries(
        config.built_model,
        config.image_size,
        config.sequence_length,
        config.num_classes,
        config.layout.micro_batch,
        config.precision == "bf16",
        config.layout.strategy in AUTOCAST,
        split if split.sequence_parallel else WHOLE,
    )


@lru_cache(maxsize=64)
@refusing_overflow()
def _boundaries(
    model: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    micro_batch: int,
    bf16: bool,
    autocast: bool,
    split: Split,
) -> tuple[Boundary, ...]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dlojz.models.meta import sample_inputs
    from dlojz.pipeline.runtime import boundaries_of

    built = build_on_meta(model, image_size, sequence_length, num_classes, split)
    sample = sample_inputs(model, micro_batch, image_size=image_size, sequence_length=sequence_length)
    if bf16 and not autocast:
        built = built.bfloat16()
        sample = sample.bfloat16() if sample.is_floating_point() else sample
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Within the mode these are fake tensors: shapes and types, no memory.
        built.to_empty(device="cpu")
        sample = torch.empty(sample.shape, dtype=sample.dtype, device="cpu")
        return tuple(boundaries_of(list(built.blocks), sample, compute=torch.bfloat16 if bf16 and autocast else None))


def block_messages(config: RunConfig) -> tuple[tuple[BlockMessage, ...], ...]:
    """List what each block sends along the tensor axis for one micro-batch, the loss with the last; for tp > 1."""
    layout, split = config.layout, split_of(config)
    blocks = _blocks(config.built_model, config.image_size, config.sequence_length, config.num_classes, split)
    boundaries = boundaries_of_run(config)
    half = HALF_BYTES if config.precision != "fp32" else FP32_BYTES
    weight_bytes = FP32_BYTES if layout.strategy in AUTOCAST else half
    messages_by_block = []
    for number, block in enumerate(blocks):
        entering, leaving = boundaries[number : number + 2]
        sizes = BlockSizes(
            _all_tokens(entering, split),
            _all_tokens(leaving, split),
            split.sequence_parallel,
            entering.dtype.itemsize,
            half,
            weight_bytes,
            layout.engine == "torch",
        )
        messages = BLOCKS.get(type(block).__name__)
        messages_by_block.append(tuple(messages(block, sizes)) if messages else ())
    return tuple(messages_by_block)


def tensor_traffic(part: RankPart) -> list[Traffic]:
    """Predict one rank's traffic along the tensor axis in a steady step; only its pipeline stages matter.

    Raises:
        LabError: for engine deepspeed, which splits no layers itself.
    """
    from dlojz.prediction.model_trace import pretended_sums  # loads torch

    config, layout = part.config, part.config.layout
    if layout.tp == 1:
        return []
    if layout.engine == "deepspeed":
        raise refusal(
            en=f"what engine={layout.engine!r} sends along tp={layout.tp} is not predicted: use engine='by_hand' "
            "to predict it; `dlojz memory` predicts the memory of every engine.",
            fr=f"ce que engine={layout.engine!r} envoie selon tp={layout.tp} n’est pas prédit : prenez "
            "engine='by_hand' pour le prédire ; `dlojz memory` prédit la mémoire de tous les moteurs.",
        )
    if is_elsewhere(config.model):
        # A model from elsewhere has no classes of blocks to look up: its sums were seen as its shapes were traced.
        message_sizes = pretended_sums(config)
        times = layout.micro_batches
        traffic = Traffic(
            collective="all_reduce",
            group="tp",
            group_size=layout.tp,
            count=times * len(message_sizes),
            message_bytes=times * sum(message_sizes),
        )
        return [traffic]
    # torch leaves such a gradient as the ranks' parts of a sum, which is settled once, before the update; DDP and FSDP2
    # want it whole after each micro-batch (FSDP2 in a pipeline after the last), and so does the lab's own operator.
    settled = layout.engine == "torch" and (layout.pp > 1 or not layout.engine_spec.averages_each_micro_batch)
    recomputes = layout.checkpointing != "none"
    count: dict[Collective, int] = {}
    num_bytes: dict[Collective, int] = {}
    for messages, passes in zip(block_messages(config), _passes(part), strict=True):
        for message in messages:
            forward = message.phase == "forward"
            times = passes.forward if forward else passes.backward
            # Recomputation sends again what forward has sent, once per backward.
            if forward and recomputes and message.again:
                times += passes.backward
            if settled and times and message.what.startswith(OF_WEIGHTS):
                times = 1
            count[message.collective] = count.get(message.collective, 0) + times
            num_bytes[message.collective] = num_bytes.get(message.collective, 0) + times * message.message_bytes
    return [
        Traffic(collective=name, group="tp", group_size=layout.tp, count=number, message_bytes=num_bytes[name])
        for name, number in count.items()
        if number
    ]


def context_traffic(config: RunConfig) -> list[Traffic]:
    """Predict one rank's traffic along the context axis in a steady step: the rings of all attention layers."""
    import torch

    from dlojz.by_hand.context_parallel import ring_bytes

    layout = config.layout
    if layout.cp == 1:
        return []
    keys = keys_of(config)
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    tokens = (config.sequence_length or 0) // layout.cp
    ring = ring_bytes(layout.cp, layout.micro_batch, keys.heads, tokens, keys.width, dtype)
    forwards = keys.layers + repeated_rings(config)
    # Backward sends two messages where forward sends one: keys and values, then their gradients.
    messages = layout.micro_batches * (layout.cp - 1) * (forwards + 2 * keys.layers)
    num_bytes = layout.micro_batches * (forwards * ring.forward + keys.layers * ring.backward)
    return [
        Traffic(collective=name, group="cp", group_size=layout.cp, count=messages, message_bytes=num_bytes)
        for name in _BOTH_WAYS
    ]


_BOTH_WAYS: tuple[Collective, ...] = ("send", "recv")


class _Passes(NamedTuple):
    forward: int
    backward: int


def _passes(part: RankPart) -> list[_Passes]:
    """How often a rank runs each block's forward and backward in one step."""
    layout, bounds = part.config.layout, part.bounds
    if layout.pp == 1:
        return [_Passes(layout.micro_batches, layout.micro_batches)] * bounds[-1]
    forward, backward = [0] * bounds[-1], [0] * bounds[-1]
    for action in schedule_of(layout).orders[part.pp_rank]:
        for element in action.elements:
            # The gradient of a stage's input is what goes through its regions; the weights' half sends the rest.
            passes = {FORWARD: forward, BACKWARD: backward, BACKWARD_INPUT: backward}.get(element.kind)
            if passes is not None:
                for block in range(*bounds[element.stage : element.stage + 2]):
                    passes[block] += 1
    return [_Passes(*counts) for counts in zip(forward, backward, strict=True)]


def _all_tokens(boundary: Boundary, split: Split) -> tuple[int, ...]:
    """Shape of the whole stream, of which a rank has its own tokens only where the sequence is split."""
    if split.sequence_parallel and len(boundary.shape) == 3 and boundary.dtype.is_floating_point:
        batch, tokens, width = boundary.shape
        return batch, tokens * split.size, width
    return boundary.shape


@lru_cache(maxsize=16)
def _blocks(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int, split: Split
) -> list[nn.Module]:
    return list(build_on_meta(model, image_size, sequence_length, num_classes, split).blocks)


def pipeline_traffic(part: RankPart) -> list[Traffic]:
    """Predict one rank's traffic in a steady step of a pipeline (pp > 1), without the lab's own control group."""
    config, layout = part.config, part.config.layout
    sent_messages, received = _messages(part)
    traffic = [_of("send", "pp", layout.pp, sent_messages), _of("recv", "pp", layout.pp, received)]
    # Gradients of each stage that this rank holds, in all its pipes.
    stage_bytes = [FP32_BYTES * _numel(part.shapes, blocks) for blocks in part.stage_blocks]
    if part.pipes > 1:
        # Each stage is on two ranks, which add up its gradients before replicas average them.
        traffic.append(_of("all_reduce", "twins", 2, stage_bytes))
    elif has_tied_head(config) and part.reads_inputs != part.computes_loss:  # embedding and head on two ranks
        traffic.append(_of("all_reduce", "tied", 2, [_tied_bytes(part)]))
    if layout.engine_spec.gathers_per_step:
        traffic += _fsdp2(config, part.shapes)
    elif layout.dp > 1 and layout.engine != "deepspeed":
        traffic.append(_of("all_reduce", "dp", layout.dp, stage_bytes))
    if layout.engine == "deepspeed" and (layout.zero or config.precision != "fp32"):
        traffic.append(_of("all_reduce", "pp", layout.pp, [FP32_BYTES]))  # the gradient's norm, over the stages too
    return [entry for entry in traffic if entry.count]


def _tied_bytes(part: RankPart) -> int:
    """Bytes of the gradient of a tied embedding on a pipeline's first or last stage; with FSDP2, of its shard."""
    output, layout = untied_shapes(part.config, part.split).parameters[-1], part.config.layout
    shards = layout.engine_spec.gathers_per_step
    return FP32_BYTES * (output.rows_numel(layout.dp, part.dp_rank) if shards else output.numel)


def _messages(part: RankPart) -> tuple[list[int], list[int]]:
    """Bytes of each message that a pipeline rank sends, and of each that it receives."""
    at_block, bounds, schedule = boundary_bytes(part.config), part.bounds, schedule_of(part.config.layout)
    sent_bytes, received = [], []
    for action in schedule.orders[part.pp_rank]:
        for element in action.elements:
            if element.kind not in (FORWARD, BACKWARD, BACKWARD_INPUT):
                continue
            placement, stage = schedule.placement[element.pipe], element.stage
            forward = element.kind == FORWARD
            # A gradient crosses the same boundaries as its activation, the other way.
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            entering, leaving = (stage, stage + 1) if forward else (stage + 1, stage)
            if 0 <= before < schedule.stages and placement[before] != part.pp_rank:
                received.append(at_block[bounds[entering]])
            if 0 <= after < schedule.stages and placement[after] != part.pp_rank:
                sent_bytes.append(at_block[bounds[leaving]])
    return sent_bytes, received


def boundary_bytes(config: RunConfig) -> tuple[int, ...]:
    """Return the bytes of what enters each block for one micro-batch, and last of what leaves the model."""
    return tuple(boundary.message_bytes for boundary in boundaries_of_run(config))


def sample_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes of one micro-batch's inputs and of its targets."""
    layout, integer = config.layout, 8  # bytes of an int64
    spec = models.spec(config.model)
    if spec.family == "text":
        tokens = layout.micro_batch * (config.sequence_length or 1) * integer
        return tokens, tokens
    if spec.example is not None:
        inputs = spec.example.inputs(layout.micro_batch, "meta")  # one tensor, where stages share the model
        return inputs.nbytes, layout.micro_batch * prod(spec.example.targets) * integer
    # (B, 3, S, S) in fp32, and one class per image.
    side = config.image_size or 1
    return layout.micro_batch * 3 * side * side * FP32_BYTES, layout.micro_batch * integer


def samples_bytes(part: RankPart) -> int:
    """Return the bytes of a step's samples on a pipeline rank: inputs on the first stage, targets on the last."""
    layout = part.config.layout
    if layout.pp == 1:
        return 0
    inputs_bytes, targets_bytes = sample_bytes(part.config)
    of_one = inputs_bytes * part.reads_inputs + targets_bytes * part.computes_loss
    # torch takes a step's micro-batches as one batch, and cuts it again.
    copies = 2 if layout.engine == "torch" else 1
    return copies * layout.micro_batches * of_one


def receive_buffers_bytes(part: RankPart) -> int:
    """Compute the bytes that torch's pipeline keeps from its first step on for what a rank receives.

    Each stage but the first has a buffer for its input, each but the last one for the gradient of its output, of every
    micro-batch of a step: the more micro-batches, the more memory, which 1F1B's activations do not take.

    Source: torch 2.13, `torch/distributed/pipelining/stage.py`, `_setup_forward_recv_info` and
    `_create_grad_recv_info`.
    """
    layout = part.config.layout
    if layout.pp == 1 or layout.engine != "torch" or part.config.library not in ("none", "torch"):
        return 0
    at_block = boundary_bytes(part.config)
    # What enters the model, or leaves it, comes from no other stage.
    ends = (end for blocks in part.stage_blocks for end in (blocks.start, blocks.stop) if 0 < end < part.bounds[-1])
    return layout.micro_batches * sum(at_block[end] for end in ends)


def _numel(shapes: ModelShapes, blocks: range) -> int:
    return sum(parameter.numel for parameter in shapes.parameters if parameter.block in blocks)


def _of(collective: Collective, group: str, size: int, messages: list[int]) -> Traffic:
    return Traffic(
        collective=collective, group=group, group_size=size, count=len(messages), message_bytes=sum(messages)
    )
