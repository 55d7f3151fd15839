"""Predict weights, gradients and optimizer states of a rank, offloaded and compressed ones included.

Closed forms over parameter shapes, padding included; equal to what the probe counts, to the byte. Which optimizers and
precisions an engine really runs, `runnable` says.

**States.** With Ψ parameters over N ranks, mixed precision and Adam, the paper's forms are 2Ψ + 2Ψ + 12Ψ (stage 0),
4Ψ + 12Ψ/N (1), 2Ψ + 14Ψ/N (2), 16Ψ/N (3). The libraries add fp32 gradients where they keep them, a master copy in fp32
even of fp32 weights, padding, whole parameters at the edges of a partition. fp16 takes the same bytes as bf16. Source:
Rajbhandari et al. 2020 (arXiv 1910.02054), §5; DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py` and `stage3.py`; torch
2.13 `distributed/fsdp/_fully_shard`.

**DeepSpeed's offloading.** With Ψ/N = s parameters per rank, b bytes each to compute with, and Adam, the host holds the
master copy 4s, its gradient 4s and the moments 8s, and buffers of bs for weights or gradients in transit. Source:
Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), section 4; Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv
2104.07857), section 5; DeepSpeed 0.19, `offload_config.py`.

**Hooks of DDP.** With r the rank of PowerSGD, a gradient of n rows and m columns (all dimensions but the first) is sent
as P (n × r) and Q (m × r), if that is less than half of it; else as it is, in fp32, with the others of its bucket.
Source: torch 2.13, `distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py`, `_should_compress` and `powerSGD_hook`;
Vogels et al. 2019 (arXiv 1905.13727), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dlojz.base.language import MEBIBYTE
from dlojz.by_hand.optimizers.sent_bytes import chunk_elements
from dlojz.config.engines import DEEPSPEED_BUCKET_ELEMENTS, SUB_GROUP_ELEMENTS
from dlojz.config.optimizers import COMPRESSED, OPTIMIZERS, OptimizerSpec
from dlojz.config.run_config import RunConfig
from dlojz.prediction.shapes import (
    DDP_FIRST_BUCKET_BYTES,
    FP32_BYTES,
    HALF_BYTES,
    ModelShapes,
    ParameterShape,
    bucket_bytes_of,
    fill_buckets,
)
from dlojz.results.footprint import Memory, Traffic

ZERO_BUCKET_BYTES = 1 * MEBIBYTE
"""The lab's ZeRO stage 2 closes a bucket once it holds so much (`dlojz.by_hand.zero.stage2`)."""
DEEPSPEED_ALIGNMENT = 2
"""Stages 1 and 2 pad the flat weights to a multiple of N times this (`nccl_start_alignment_factor`)."""


def compute_bytes(config: RunConfig) -> int:
    """Return the bytes of one fp32 weight as DeepSpeed, FSDP2 and the lab's stage 3 compute with it."""
    return FP32_BYTES if config.precision == "fp32" else HALF_BYTES


def gradient_bytes(config: RunConfig) -> int:
    """Return the bytes of one gradient as DeepSpeed keeps it: as a weight, or 4 with `fp32_gradients`."""
    return FP32_BYTES if config.fp32_gradients else compute_bytes(config)


def gathered_element_bytes(config: RunConfig, parameter: ParameterShape) -> int:
    """Return the bytes of one number of a parameter as FSDP2 gathers it: cast, or in its own type."""
    return parameter.cast_bytes(HALF_BYTES if config.precision in ("bf16", "fp16") else None)


def optimizer_bytes_of(config: RunConfig, tensors: Iterable[tuple[ParameterShape, int]]) -> int:
    """Compute the bytes of the optimizer's states over so many elements of each parameter; frozen ones have none."""
    spec, sizes, matrices_bytes = OPTIMIZERS[config.optimizer], dict[int, list[int]](), 0
    for parameter, elements in tensors:
        if not parameter.is_trained:
            continue
        if spec.matrix_states:
            numbers = FP32_BYTES * spec.numbers
            matrices_bytes += parameter.element_bytes * state_elements(spec, parameter, elements) + numbers
            matrices_bytes -= numbers if is_orthogonalized(spec, parameter) else 0
        else:
            sizes.setdefault(parameter.element_bytes, []).append(elements)
    return matrices_bytes + sum(
        optimizer_bytes(config, of_type, element_bytes) for element_bytes, of_type in sizes.items()
    )


def is_orthogonalized(spec: OptimizerSpec, parameter: ParameterShape) -> bool:
    """Tell whether a parameter is one of Muon's hidden matrices, of which updates are not counted."""
    return spec.orthogonal and parameter.is_hidden_matrix


def state_elements(spec: OptimizerSpec, parameter: ParameterShape, elements: int) -> int:
    """Count the elements of the states of so many elements of a parameter, of a few rows of it or of all.

    Muon: one momentum of a hidden matrix, AdamW's two moments of all else. Adafactor: of a tensor (…, n, m) the means
    of its rows, (…, n, 1), and of its columns, (…, 1, m); of a vector all. Source: torch 2.13, `optim/_muon.py` and
    `optim/_adafactor.py`, `_init_group`; Shazeer & Stern 2018 (arXiv 1804.04235), algorithm 4.
    """
    if is_orthogonalized(spec, parameter):
        return elements
    if spec.matrix_states and not spec.orthogonal and len(parameter.shape) > 1:
        return elements // parameter.shape[-1] + elements // parameter.shape[-2]
    return len(spec.state_tensors) * elements


def optimizer_bytes(config: RunConfig, sizes: Iterable[int], element_bytes: int = FP32_BYTES) -> int:
    """Compute the bytes of the optimizer's states over tensors of so many elements.

    `element_bytes` are those of the weights: torch's moments have their type, and its count of steps is in fp32.

    Adam and LAMB: two moments in fp32; torch's AdamW adds an fp32 step count per tensor, and so do the lab's own;
    DeepSpeed's keep it as a number. 1-bit LAMB has a third moment, the fresh variance, in its second stage. 8-bit Adam:
    the moments in one byte each, with one fp32 scale for every 256 elements of a tensor; tensors under 4096 elements
    keep them in fp32. Of the paged one this is all: what lies on the device is the driver's affair.

    Source: Kingma & Ba 2015 (arXiv 1412.6980), algorithm 1; You et al. 2020, LAMB (arXiv 1904.00962), algorithm 2;
    Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), §2; bitsandbytes,
    `optim/optimizer.py`, `Optimizer2State.init_state`.
    """
    sizes = list(sizes)
    optimizer = OPTIMIZERS[config.optimizer]
    moments = len(optimizer.state_tensors)
    if block := optimizer.block_elements:
        return moments * sum(eight_bit_bytes(size, block) for size in sizes)
    in_lab = config.optimizer == "adamw" or config.layout.engine != "deepspeed"
    numbers = optimizer.numbers * len(sizes) if in_lab else 0
    return element_bytes * moments * sum(sizes) + FP32_BYTES * numbers + error_bytes(config, sum(sizes))


EIGHT_BIT_ELEMENTS = 4096
"""A tensor of fewer elements keeps its moments in fp32 beside 8-bit ones (`min_8bit_size`)."""
PAGED_ELEMENTS = 100_000
"""A tensor of fewer elements has no paged states (bitsandbytes, `optim/optimizer.py`, `get_state_buffer`)."""


def eight_bit_bytes(size: int, block: int) -> int:
    """Compute the bytes of one 8-bit moment of a tensor: a byte for each element, a scale in fp32 for each block."""
    return FP32_BYTES * size if size < EIGHT_BIT_ELEMENTS else size + FP32_BYTES * -(-size // block)


def paged_bytes(config: RunConfig, sizes: Iterable[int]) -> int:
    """Compute the bytes of the optimizer's states that lie in pages, which the host holds: the moments of one byte."""
    spec = OPTIMIZERS[config.optimizer]
    return len(spec.state_tensors) * sum(size for size in sizes if size >= PAGED_ELEMENTS) if spec.is_paged else 0


def error_bytes(config: RunConfig, num_parameters: int) -> int:
    """Compute the errors that a compressing optimizer keeps in its second stage: 4Ψ as a worker, 4Ψ/N as a server.

    Source: Tang et al. 2021 (arXiv 2102.02888), algorithm 1, lines 6 and 9; padding:
    `dlojz.by_hand.optimizers.sent_bytes`.
    """
    dp = config.layout.dp
    if config.optimizer not in COMPRESSED or dp == 1:
        return 0
    # dp chunks of the worker's errors, one of the server's.
    return FP32_BYTES * (dp + 1) * chunk_elements(num_parameters, dp)


def padded_parameters(num_parameters: int, dp: int) -> int:
    """Count the elements of DeepSpeed's flat weights (stages 1 and 2), padded to equal shares."""
    multiple = dp * DEEPSPEED_ALIGNMENT
    return -(-num_parameters // multiple) * multiple


def touching_names(shapes: ModelShapes, dp: int, rank: int) -> frozenset[str]:
    """Name the parameters that reach into one rank's share of DeepSpeed's flat weights (stages 1 and 2)."""
    share = padded_parameters(shapes.num_parameters, dp) // dp
    start, end = rank * share, (rank + 1) * share
    ends = accumulate(parameter.numel for parameter in shapes.parameters)
    return frozenset(
        parameter.name
        for parameter, parameter_end in zip(shapes.parameters, ends, strict=True)
        # [last − numel, last) is the parameter's place in the flat weights, [start, end) this rank's share.
        if parameter_end - parameter.numel < end and parameter_end > start
    )


def zeros_elements(shapes: ModelShapes, dp: int, rank: int) -> int:
    """Count the elements of zeros that stages 1 and 2 keep as gradients of parameters that backward does not reach.

    They are those that reach into one rank's share of the flat weights, whole, beside the copy that has room for them.
    Source: DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py`, `get_all_grad_tensors`.
    """
    names = touching_names(shapes, dp, rank)
    return sum(
        parameter.numel for parameter in shapes.parameters if not parameter.is_trained and parameter.name in names
    )


def touching_elements(shapes: ModelShapes, dp: int, rank: int) -> int:
    """Count the elements of parameters that reach into one rank's share of the flat weights, and the padding in it.

    Stages 1 and 2 keep the gradient of a parameter whole on each rank whose share it touches.
    """
    share = padded_parameters(shapes.num_parameters, dp) // dp
    names = touching_names(shapes, dp, rank)
    padding = max(0, (rank + 1) * share - max(rank * share, shapes.num_parameters))
    return sum(parameter.numel for parameter in shapes.parameters if parameter.name in names) + padding


def deepspeed_messages(
    groups: Iterable[ModelShapes],
    dp: int,
    bucket: Iterable[ParameterShape],
    bucket_elements: int = DEEPSPEED_BUCKET_ELEMENTS,
) -> list[list[int]]:
    """List the all-reduces of a bucket of stages 1 and 2, each as the elements of its pieces.

    A piece is what lies end to end in the bucket and within one rank's share of the flat weights. Pieces go together in
    one message until it has more elements than a bucket; several are copied into one tensor for it. `groups` are the
    parameters that are flattened together.

    Source: DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py`, `average_tensor` and `allreduce_and_scatter`.
    """
    place_of: dict[str, tuple[int, int]] = {}
    for group in groups:
        share = padded_parameters(group.num_parameters, dp) // dp  # each group is flattened and cut by itself
        starts = accumulate((parameter.numel for parameter in group.parameters), initial=0)
        place_of |= {parameter.name: (start, share) for parameter, start in zip(group.parameters, starts, strict=False)}
    pieces: list[tuple[int, int]] = []
    for parameter in bucket:
        start, share = place_of[parameter.name]
        end = start + parameter.numel
        while start < end:
            rank = start // share
            stop = min(end, (rank + 1) * share)
            # Within the same rank's share, it is one piece with the parameter before.
            before = pieces.pop()[1] if pieces and pieces[-1][0] == rank else 0
            pieces.append((rank, before + stop - start))
            start = stop
    messages: list[list[int]] = [[]]
    for _, elements in pieces:
        messages[-1].append(elements)
        # Closed by the piece that makes it too large, which stays in it.
        if sum(messages[-1]) > bucket_elements:
            messages.append([])
    return [message for message in messages if message]


def _replicated(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    """One process, or DDP, also by hand: everything whole on every rank; bf16 is autocast over the weights.

    Where backward updates, a gradient is a temporary. PowerSGD's errors count with the optimizer's states.
    """
    trained_bytes = sum(parameter.num_bytes for parameter in shapes.trained.parameters)
    return Memory(
        weights_bytes=sum(parameter.num_bytes for parameter in shapes.parameters),
        gradients_bytes=0 if config.update == "in_backward" else trained_bytes,
        optimizer_bytes=optimizer_bytes_of(config, ((parameter, parameter.numel) for parameter in shapes.parameters))
        + kept_bytes(config, shapes)
        + renewed_bytes(config, shapes),
        master_bytes=0,
    )


def _fsdp2(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    """FSDP2: shards of rows; with ZeRO-2 the weights gathered in forward stay until backward has used them."""
    dp = config.layout.dp
    padded = [(parameter, parameter.padded_rows_numel(dp)) for parameter in shapes.parameters]
    gathered_bytes = dp * sum(gathered_element_bytes(config, parameter) * elements for parameter, elements in padded)
    return Memory(
        weights_bytes=sum(parameter.element_bytes * elements for parameter, elements in padded)
        + (gathered_bytes if config.layout.zero == 2 else 0),
        gradients_bytes=sum(
            parameter.element_bytes * elements for parameter, elements in padded if parameter.is_trained
        ),
        optimizer_bytes=optimizer_bytes_of(
            config, ((parameter, parameter.rows_numel(dp, rank)) for parameter, _ in padded)
        ),
        master_bytes=0,
    )


def deepspeed_sizes(config: RunConfig, shapes: ModelShapes) -> list[int]:
    """List the elements of the tensors that DeepSpeed's stage 0 updates: its experts are not stacked but one by one."""
    sizes: list[int] = []
    for parameter in shapes.parameters:
        pieces = parameter.shape[0] if parameter.is_expert and config.layout.ep > 1 else 1
        sizes += [parameter.numel // pieces] * pieces
    return sizes


def _zero_0(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    return Memory(
        weights_bytes=compute_bytes(config) * shapes.num_parameters,
        gradients_bytes=gradient_bytes(config) * shapes.num_parameters,
        optimizer_bytes=optimizer_bytes(config, deepspeed_sizes(config, shapes)),
        master_bytes=FP32_BYTES * shapes.num_parameters if config.precision != "fp32" else 0,
    )


def _zero_1_or_2(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    dp, element_bytes = config.layout.dp, compute_bytes(config)
    padded = padded_parameters(shapes.num_parameters, dp)
    # Stage 1 accumulates whole gradients over micro-batches; those of a single one are gone when its backward ends.
    accumulates = config.layout.zero == 1 and config.layout.micro_batches > 1
    gradient_elements = touching_elements(shapes, dp, rank) + zeros_elements(shapes, dp, rank)
    if accumulates:
        gradient_elements = max(gradient_elements, shapes.trained.num_parameters)
    return Memory(
        weights_bytes=element_bytes * padded,
        gradients_bytes=gradient_bytes(config) * gradient_elements,
        optimizer_bytes=optimizer_bytes(config, [padded // dp]),
        master_bytes=FP32_BYTES * (padded // dp),
    )


def _zero_3(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    element_bytes = compute_bytes(config)
    sub_groups = [sum(sizes) for sizes in zero_3_sub_groups(config, shapes)]
    shard_elements = sum(sub_groups)
    return Memory(
        weights_bytes=element_bytes * shard_elements,
        gradients_bytes=gradient_bytes(config) * shard_elements,
        optimizer_bytes=optimizer_bytes(config, sub_groups),
        master_bytes=FP32_BYTES * shard_elements,
    )


def zero_3_sub_groups(config: RunConfig, shapes: ModelShapes) -> list[list[int]]:
    """List the elements of the shards of each sub-group, which DeepSpeed's stage 3 updates one after the other.

    A sub-group is closed by the parameter that makes it reach `sub_group_size`, so it may be larger by that one.
    Source: DeepSpeed 0.19 `runtime/zero/stage3.py`, `_create_fp16_sub_groups`.
    """
    size = config.layout.sub_group_size or SUB_GROUP_ELEMENTS
    sub_groups: list[list[int]] = [[]]
    for parameter in shapes.parameters:
        if sum(sub_groups[-1]) >= size:
            sub_groups.append([])
        sub_groups[-1].append(parameter.padded_numel(config.layout.dp))
    return sub_groups


def padded_of_modules(parameters: Iterable[ParameterShape], dp: int) -> dict[str, int]:
    """Count the elements that stage 3 gathers for each module at once: all shards, with their padding.

    Args:
        parameters: each in the module that computes with it; a tied matrix in each of its modules.
    """
    elements: dict[str, int] = {}
    for parameter in parameters:
        elements[parameter.module] = elements.get(parameter.module, 0) + dp * parameter.padded_numel(dp)
    return elements


def zero_3_units(shapes: ModelShapes) -> tuple[list[list[ParameterShape]], list[ParameterShape]]:
    """Group parameters by unit of the lab's stage 3, block by block, and those in no unit.

    In no unit are those that two blocks share, and those of a block that calls the others.
    """

    def is_alone(parameter: ParameterShape) -> bool:
        return not parameter.tied and parameter.block != shapes.enclosing

    units = [[parameter for parameter in block if is_alone(parameter)] for block in shapes.blocks()]
    return [unit for unit in units if unit], [parameter for parameter in shapes.parameters if not is_alone(parameter)]


def zero_by_hand_shares(config: RunConfig, shapes: ModelShapes) -> list[int]:
    """List the elements of one rank's share of each flat tensor of the lab's ZeRO, padding included.

    Stage 1 has one flat tensor, stage 2 one per bucket, from the last parameter on, stage 3 one per unit, in the order
    in which gradients are reduced; each is padded to a multiple of the ranks.
    """
    stage, dp = config.layout.zero, config.layout.dp
    if stage == 1:
        flats = [shapes.num_parameters]
    elif stage == 2:
        buckets = fill_buckets(reversed(shapes.parameters), ZERO_BUCKET_BYTES)
        flats = [sum(parameter.numel for parameter in bucket) for bucket in buckets]
    else:
        units, loose_parameters = zero_3_units(shapes)
        flats = [sum(parameter.numel for parameter in unit) for unit in (*units[::-1], loose_parameters) if unit]
    return [-(-elements // dp) for elements in flats]


def _zero_by_hand(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    """The lab's ZeRO: fp32 throughout (bf16 is autocast, or in stage 3 a cast of what is gathered), no master copy."""
    stage = config.layout.zero
    shares = zero_by_hand_shares(config, shapes)
    share_bytes = FP32_BYTES * sum(shares)
    whole_bytes = config.layout.dp * share_bytes
    return Memory(
        weights_bytes=share_bytes if stage == 3 else whole_bytes,
        gradients_bytes=whole_bytes if stage == 1 else share_bytes,
        optimizer_bytes=optimizer_bytes(config, shares),
        master_bytes=0,
    )


STATES: dict[str, Callable[[RunConfig, ModelShapes, int], Memory]] = {
    "replicated": _replicated,
    "zero_by_hand": _zero_by_hand,
    "fsdp2": _fsdp2,
    "deepspeed_0": _zero_0,
    "deepspeed_1_or_2": _zero_1_or_2,
    "deepspeed_3": _zero_3,
}
"""States between steps, by the names in `dlojz.config.engines`."""


def predict_states(config: RunConfig, shapes: ModelShapes, rank: int = 0) -> Memory:
    """Predict weights, gradients, optimizer states, master copies and buffers of one rank; the rest is None."""
    engine = config.engine_spec
    memory = STATES[engine.states](config, shapes, rank)
    if engine.gathers_per_step and config.layout.pp > 1:
        # torch's pipeline reduces after the last micro-batch: until then the gradients are whole on each rank.
        memory = memory.model_copy(update={"gradients_bytes": config.layout.dp * (memory.gradients_bytes or 0)})
    # Under autocast BatchNorm's statistics stay as they are; engines that cast the weights cast them too.
    casts = not engine.autocast and config.precision in ("bf16", "fp16")
    cast_bytes = HALF_BYTES * shapes.float_buffer_elements + shapes.integer_buffer_bytes
    return memory.model_copy(update={"buffers_bytes": cast_bytes if casts else shapes.buffer_bytes})


def offload_states(config: RunConfig, shapes: ModelShapes, memory: Memory, rank: int = 0) -> Memory:
    """Move the states that the layout's offloading moves.

    Args:
        memory: the states without offloading, from `predict_states`.
        rank: whose states they are.

    Returns:
        The same with `host_bytes`; unchanged where optimizer and parameters stay on the device.
    """
    if pages := paged_bytes(config, (parameter.numel for parameter in shapes.trained.parameters)):
        update = {"optimizer_bytes": (memory.optimizer_bytes or 0) - pages, "host_bytes": pages}
        return memory.model_copy(update=update)
    if config.layout.offload not in ("optimizer", "parameters"):
        return memory
    offload_rule = _stage_3 if config.layout.zero == 3 else _stages_1_and_2
    return memory.model_copy(
        update={"optimizer_bytes": 0, "master_bytes": 0, **offload_rule(config, shapes, memory, rank)}
    )


def _stages_1_and_2(config: RunConfig, shapes: ModelShapes, memory: Memory, rank: int) -> dict[str, int]:
    layout, element_bytes = config.layout, compute_bytes(config)
    share = padded_parameters(shapes.num_parameters, layout.dp) // layout.dp
    largest = max(parameter.numel for parameter in shapes.parameters)
    # The last term is the gradient in fp32, with which the host updates.
    host_bytes = (memory.optimizer_bytes or 0) + (memory.master_bytes or 0) + FP32_BYTES * share
    host_bytes += element_bytes * share + element_bytes * largest  # updated weights and a gradient, each on its way
    accumulates_whole = layout.zero == 1 and layout.micro_batches > 1
    if layout.zero == 2 and layout.micro_batches > 1:
        # Each micro-batch's gradient goes to the host, whole for every parameter that reaches into the share.
        padding = max(0, (rank + 1) * share - max(rank * share, shapes.num_parameters))
        host_bytes += element_bytes * (touching_elements(shapes, layout.dp, rank) - padding)
    # Stage 1 keeps the sum over micro-batches on the device and moves it with the last one.
    return {"gradients_bytes": (memory.gradients_bytes or 0) if accumulates_whole else 0, "host_bytes": host_bytes}


def _stage_3(config: RunConfig, shapes: ModelShapes, memory: Memory, rank: int) -> dict[str, int]:
    shard_elements = sum(parameter.padded_numel(config.layout.dp) for parameter in shapes.parameters)
    weights_bytes, gradients_bytes = memory.weights_bytes or 0, memory.gradients_bytes or 0
    moved_weights_bytes = weights_bytes if config.layout.offload == "parameters" else 0
    # The gradients of the micro-batches in the type of the weights, and their sum in fp32 for the update.
    host_bytes = (memory.optimizer_bytes or 0) + (memory.master_bytes or 0) + FP32_BYTES * shard_elements
    return {
        "gradients_bytes": 0,
        "weights_bytes": weights_bytes - moved_weights_bytes,
        "host_bytes": host_bytes + gradients_bytes + moved_weights_bytes,
    }


LEAST_RATE = 2
"""A gradient is sent as two matrices if these are smaller by more than this factor (`min_compression_rate`)."""
MESSAGES = 3
"""All-reduces of one bucket, even of nothing: what is not compressed, all P, all Q."""


@dataclass(frozen=True)
class Bucket:
    """Bucket of DDP as PowerSGD sends it; in elements: in all, sent as they are, all P, all Q."""

    whole: int
    plain: int
    p: int
    q: int

    @property
    def sent(self) -> int:
        """Elements of its three messages."""
        return self.plain + self.p + self.q


def ddp_buckets(config: RunConfig, shapes: ModelShapes) -> list[list[ParameterShape]]:
    """Fill DDP's buckets in the order in which backward makes gradients ready, as after the first step."""
    from dlojz.prediction.model_trace import ready_order  # loads torch

    # A given size holds for the first bucket too, and so does that of Colossal-AI's plugin.
    is_size_set = config.layout.bucket_mib is not None or config.library == "colossalai"
    ready = (shapes.parameters[number] for number in ready_order(config))
    return fill_ddp_buckets(ready, bucket_bytes_of(config), None if is_size_set else DDP_FIRST_BUCKET_BYTES)


def fill_ddp_buckets(
    parameters: Iterable[ParameterShape], bucket_bytes: int, first_bytes: int | None
) -> list[list[ParameterShape]]:
    """Fill DDP's buckets with gradients in this order, as `fill_buckets`: a bucket holds gradients of one type.

    Source: torch 2.13, `csrc/distributed/c10d/reducer.cpp`, `compute_bucket_assignment_by_size`.
    """
    of_type: dict[str, list[ParameterShape]] = {}
    for parameter in parameters:
        # By type in the order of their first gradients.
        of_type.setdefault(parameter.dtype, []).append(parameter)
    return [bucket for ready in of_type.values() for bucket in fill_buckets(ready, bucket_bytes, first_bytes)]


def compressed(bucket: Sequence[ParameterShape], rank: int) -> Bucket:
    """Compress a bucket as PowerSGD of this rank does."""
    plain = p = q = 0
    for parameter in bucket:
        rows = parameter.shape[0]
        # A convolution is (C_out, C_in · K · K); a vector has one column, and is sent as it is.
        columns = parameter.numel // rows
        thin = min(rows, columns, rank)
        if (rows + columns) * thin * LEAST_RATE < parameter.numel:
            p, q = p + rows * thin, q + columns * thin  # P: (rows, r), Q: (columns, r)
        else:
            plain += parameter.numel
    return Bucket(sum(parameter.numel for parameter in bucket), plain, p, q)


def powersgd_buckets(config: RunConfig, shapes: ModelShapes) -> tuple[Bucket, ...]:
    """Compress all buckets as PowerSGD does."""
    return tuple(compressed(bucket, config.layout.powersgd_rank) for bucket in ddp_buckets(config, shapes))


def hook_traffic(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    """Predict what DDP sends in a step through the run's hook, after PowerSGD's first steps in full."""
    if config.layout.gradient_compression == "powersgd":
        buckets = powersgd_buckets(config, shapes)
        count, message_bytes = MESSAGES * len(buckets), FP32_BYTES * sum(bucket.sent for bucket in buckets)
    else:
        count, message_bytes = len(ddp_buckets(config, shapes)), HALF_BYTES * shapes.num_parameters
    size = config.layout.replicas
    return [Traffic(collective="all_reduce", group="dp", group_size=size, count=count, message_bytes=message_bytes)]


def kept_bytes(config: RunConfig, shapes: ModelShapes) -> int:
    """Compute what PowerSGD keeps from step to step: errors, P and Q; 0 without it."""
    if config.layout.gradient_compression != "powersgd":
        return 0
    return FP32_BYTES * sum(bucket.whole + bucket.p + bucket.q for bucket in powersgd_buckets(config, shapes))


def renewed_bytes(config: RunConfig, shapes: ModelShapes) -> int:
    """Compute the errors of the largest bucket, which exist twice for a moment; 0 without PowerSGD."""
    if config.layout.gradient_compression != "powersgd":
        return 0
    return FP32_BYTES * max(bucket.whole for bucket in powersgd_buckets(config, shapes))
