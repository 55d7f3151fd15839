"""Bytes of the model states on one rank, by category, for every engine and ZeRO stage.

Layer 3. Invariant: closed forms over parameter shapes, padding included; equal to what the probe counts, to the byte.

With Ψ parameters over N ranks, mixed precision and Adam, the paper's forms are 2Ψ + 2Ψ + 12Ψ (stage 0),
4Ψ + 12Ψ/N (1), 2Ψ + 14Ψ/N (2), 16Ψ/N (3). What follows adds what the libraries really do: fp32 gradients where they
keep them, a master copy in fp32 even where the weights are fp32, padding, whole parameters at the edges of a partition.

fp16 takes the same bytes as bf16. Which optimizers and precisions an engine really runs, `train.check_runnable` says.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5; DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py` and `stage3.py`;
torch 2.13 `distributed/fsdp/_fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from dlojz.config import RunConfig
from dlojz.footprint import Memory
from dlojz.optim.messages import chunk_elements
from dlojz.optimizer_stages import COMPRESSED
from dlojz.predict.shapes import ModelShapes
from dlojz.units import MEBIBYTE

FP32_BYTES = 4
HALF_BYTES = 2
MOMENTS = {
    **{"sgd": 0, "momentum": 1, "adamw": 2, "lamb": 2, "adamw_8bit": 2},
    **{"one_bit_adam": 2, "one_bit_lamb": 3, "zero_one_adam": 2},
    **{"local_sgd": 0, "diloco": 4},
}
"""Tensors of the parameter's size that an optimizer keeps."""
NUMBERS = {"adamw": 1, "lamb": 1, "one_bit_adam": 1, "one_bit_lamb": 3, "zero_one_adam": 1, "diloco": 1}
"""Tensors of one number that it keeps for each parameter: the count of steps; in 1-bit LAMB c_avg and r too."""
QUANTISED_ELEMENTS = 256
"""Elements of an 8-bit moment that share one fp32 scale (bitsandbytes `F.quantize_blockwise`)."""
ZERO_BUCKET_BYTES = 1 * MEBIBYTE
"""The lab's own stage 2 closes a bucket once it holds so much (`dlojz.zero.stage2`)."""
DEEPSPEED_ALIGNMENT = 2
"""Stages 1 and 2 pad the flat weights to a multiple of N times this (`nccl_start_alignment_factor`)."""
SUB_GROUP_ELEMENTS = 10**9
"""Stage 3 updates the shards in groups of at most so many elements (`sub_group_size`)."""


def compute_bytes(config: RunConfig) -> int:
    """Bytes of one weight as DeepSpeed, FSDP2 and the lab's stage 3 compute with it."""
    return FP32_BYTES if config.precision == "fp32" else HALF_BYTES


def gradient_bytes(config: RunConfig) -> int:
    """Bytes of one gradient as DeepSpeed keeps it: as a weight, or 4 where `fp32_gradients` says so."""
    return FP32_BYTES if config.fp32_gradients else compute_bytes(config)


def optimizer_bytes(config: RunConfig, sizes: Iterable[int]) -> int:
    """States of the optimizer over tensors of so many elements.

    Adam and LAMB: two moments in fp32; torch's AdamW adds an fp32 step count per tensor, and so do the lab's own; what
    DeepSpeed brings keeps it as a number. 1-bit LAMB has a third moment, the fresh variance, in its second stage.
    8-bit Adam: the moments in one byte each, with one fp32 scale for every 256 elements of a tensor; of small tensors
    too, though bitsandbytes keeps those under 4096 elements in fp32.

    Source: Kingma & Ba 2015 (arXiv 1412.6980), algorithm 1; You et al. 2020, LAMB (arXiv 1904.00962), algorithm 2;
    Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), §2, whose blocks of 2048
    elements bitsandbytes has since made 256.
    """
    sizes = list(sizes)
    moments = MOMENTS[config.optimizer]
    if config.optimizer == "adamw_8bit":
        scales = sum(-(-size // QUANTISED_ELEMENTS) for size in sizes)
        return moments * (sum(sizes) + FP32_BYTES * scales)
    in_lab = config.optimizer == "adamw" or config.layout.engine != "deepspeed"
    numbers = NUMBERS.get(config.optimizer, 0) * len(sizes) if in_lab else 0
    return FP32_BYTES * (moments * sum(sizes) + numbers) + error_bytes(config, sum(sizes))


def error_bytes(config: RunConfig, num_parameters: int) -> int:
    """What a rank holds back in the second stage of an optimizer that compresses: 4Ψ as a worker, 4Ψ/N as a server.

    Source: Tang et al. 2021 (arXiv 2102.02888), algorithm 1, lines 6 and 9; padding: `dlojz.optim.messages`.
    """
    dp = config.layout.dp
    if config.optimizer not in COMPRESSED or dp == 1:
        return 0
    return FP32_BYTES * (dp + 1) * chunk_elements(num_parameters, dp)


def padded_parameters(num_parameters: int, dp: int) -> int:
    """Elements of DeepSpeed's flat weights (stages 1 and 2), padded so that all ranks get the same share."""
    multiple = dp * DEEPSPEED_ALIGNMENT
    return -(-num_parameters // multiple) * multiple


def touching_names(shapes: ModelShapes, dp: int, rank: int) -> frozenset[str]:
    """Names of all parameters that reach into one rank's share of DeepSpeed's flat weights (stages 1 and 2)."""
    share = padded_parameters(shapes.num_parameters, dp) // dp
    start, end = rank * share, (rank + 1) * share
    ends = accumulate(parameter.numel for parameter in shapes.parameters)
    return frozenset(
        parameter.name
        for parameter, last in zip(shapes.parameters, ends, strict=True)
        if last - parameter.numel < end and last > start
    )


def touching_elements(shapes: ModelShapes, dp: int, rank: int) -> int:
    """Elements of all parameters that reach into one rank's share of the flat weights, and the padding in it.

    Stages 1 and 2 keep the gradient of a parameter whole on each rank whose share it touches.
    """
    share = padded_parameters(shapes.num_parameters, dp) // dp
    names = touching_names(shapes, dp, rank)
    padding = max(0, (rank + 1) * share - max(rank * share, shapes.num_parameters))
    return sum(parameter.numel for parameter in shapes.parameters if parameter.name in names) + padding


def _replicated(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    """One process, or DDP, also by hand: everything whole on every rank; bf16 is autocast over fp32 weights.

    Where backward updates, a gradient is a temporary; PowerSGD's errors count with the optimizer's states, as those of
    the optimizers that compress do.
    """
    from dlojz.predict import gradient_hooks

    whole_bytes = FP32_BYTES * shapes.num_parameters
    return Memory(
        weights_bytes=whole_bytes,
        gradients_bytes=0 if config.update == "in_backward" else whole_bytes,
        optimizer_bytes=optimizer_bytes(config, (parameter.numel for parameter in shapes.parameters))
        + gradient_hooks.kept_bytes(config, shapes)
        + gradient_hooks.renewed_bytes(config, shapes),
        master_bytes=0,
    )


def _fsdp2(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    """FSDP2: fp32 shards of rows; with ZeRO-2 the weights gathered in forward stay until backward has used them."""
    dp = config.layout.dp
    padded = sum(parameter.padded_rows_numel(dp) for parameter in shapes.parameters)
    own = [parameter.rows_numel(dp, rank) for parameter in shapes.parameters]
    gathered_bytes = compute_bytes(config) * dp * padded if config.layout.zero == 2 else 0
    return Memory(
        weights_bytes=FP32_BYTES * padded + gathered_bytes,
        gradients_bytes=FP32_BYTES * padded,
        optimizer_bytes=optimizer_bytes(config, own),
        master_bytes=0,
    )


def deepspeed_sizes(config: RunConfig, shapes: ModelShapes) -> list[int]:
    """Elements of the tensors that DeepSpeed's stage 0 updates: its own experts are not stacked but one by one."""
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
    dp, each = config.layout.dp, compute_bytes(config)
    padded = padded_parameters(shapes.num_parameters, dp)
    # Stage 1 accumulates whole gradients over micro-batches; with a single one it reduces them on the way, as stage 2.
    accumulates = config.layout.zero == 1 and config.layout.micro_batches > 1
    gradient_elements = shapes.num_parameters if accumulates else touching_elements(shapes, dp, rank)
    return Memory(
        weights_bytes=each * padded,
        gradients_bytes=gradient_bytes(config) * gradient_elements,
        optimizer_bytes=optimizer_bytes(config, [padded // dp]),
        master_bytes=FP32_BYTES * (padded // dp),
    )


def _sub_groups(num_elements: int) -> list[int]:
    """Elements of the groups in which DeepSpeed's stage 3 updates so many."""
    whole, rest = divmod(num_elements, SUB_GROUP_ELEMENTS)
    return [SUB_GROUP_ELEMENTS] * whole + ([rest] if rest else [])


def _zero_3(config: RunConfig, shapes: ModelShapes, rank: int) -> Memory:
    each = compute_bytes(config)
    own = sum(parameter.padded_numel(config.layout.dp) for parameter in shapes.parameters)
    return Memory(
        weights_bytes=each * own,
        gradients_bytes=gradient_bytes(config) * own,
        optimizer_bytes=optimizer_bytes(config, _sub_groups(own)),
        master_bytes=FP32_BYTES * own,
    )


def zero_by_hand_shares(config: RunConfig, shapes: ModelShapes) -> list[int]:
    """Elements of one rank's share of each flat tensor of the lab's own ZeRO (`dlojz.zero`), padding included.

    Stage 1 lays all parameters into one flat tensor, stage 2 into one per bucket, from the last parameter on, stage 3
    into one per block; each is padded to a multiple of the ranks. In the order in which gradients are reduced.
    """
    stage, dp = config.layout.zero, config.layout.dp
    if stage == 1:
        flats = [shapes.num_parameters]
    elif stage == 2:
        flats = [0]
        for parameter in reversed(shapes.parameters):
            if FP32_BYTES * flats[-1] >= ZERO_BUCKET_BYTES:
                flats.append(0)
            flats[-1] += parameter.numel
    else:
        flats = [sum(parameter.numel for parameter in block) for block in shapes.blocks()][::-1]
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


_RULES: dict[str, Callable[[RunConfig, ModelShapes, int], Memory]] = {
    "single": _replicated,
    "ddp": _replicated,
    "by_hand": _replicated,
    "by_hand-1": _zero_by_hand,
    "by_hand-2": _zero_by_hand,
    "by_hand-3": _zero_by_hand,
    "fsdp2": _fsdp2,
    "zero-0": _zero_0,
    "zero-1": _zero_1_or_2,
    "zero-2": _zero_1_or_2,
    "zero-3": _zero_3,
}


AUTOCAST = ("single", "ddp", "by_hand", "by_hand-1", "by_hand-2")
"""Engines that keep fp32 weights and buffers in every precision, and compute in another by autocast."""


def predict_states(config: RunConfig, shapes: ModelShapes, rank: int = 0) -> Memory:
    """Weights, gradients, optimizer states, master copies and buffers of one rank; the rest is None."""
    strategy = config.layout.strategy
    held = _RULES[strategy](config, shapes, rank)
    if strategy == "fsdp2" and config.layout.pp > 1:
        # torch's pipeline reduces after the last micro-batch: until then the gradients are whole on each rank.
        held = held.model_copy(update={"gradients_bytes": config.layout.dp * (held.gradients_bytes or 0)})
    # Under autocast BatchNorm's statistics stay fp32; engines that cast the weights cast them too.
    buffer_bytes = FP32_BYTES if strategy in AUTOCAST else compute_bytes(config)
    return held.model_copy(
        update={"buffers_bytes": buffer_bytes * shapes.float_buffer_elements + shapes.integer_buffer_bytes}
    )
