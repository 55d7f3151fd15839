"""Workload of a model: its operators with their shapes on one rank, and how long each takes on one GPU.

A workload is a list of layer kinds in order; embedding and logits are layers of their own, because a pipeline's first
and last stages carry them. A decoder's operators follow from its size; those of an image model, and of one from
elsewhere, are read off its forward pass on the meta device, where a convolution is the product that it comes to.

Times come from shapes and from the `Calibration`, never from the name of a model. A product [m, k] × [k, n], `batch`
times, is computed in tiles, one per multiprocessor at a time, so its time is a whole number of waves; any other
operator takes the time to move its bytes. Passes over a tensor are written as bytes per element (read 2, written 2):
16-bit activations, dropout masks of 1 byte, reductions in fp32.

Symbols: T tokens of one rank's micro-batch (b·s/cp), h hidden, a heads, d head size, w width of the MLP, V vocabulary,
t tensor-parallel ranks.

Source: the operators are those of Megatron-LM's layer (Narayanan et al. 2021, arXiv 2104.04473, §4.2; Korthikanti et
al. 2022, arXiv 2205.05198, §4.1, figure 2), fused as §4.2 there says; bytes counted by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlojz import models
from dlojz.base.language import refusal
from dlojz.cost_model.calibration import Calibration, Product, measured_reach, shape_efficiency
from dlojz.cost_model.layouts import LOSSES, element_bytes
from dlojz.hardware import Device, Precision
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.hardware.gpus import ATTENTION_KERNELS, HALF_SPEED_ROWS, HEAD_SIZES, AttentionKernel
from dlojz.models.sizes import DeepSeekSize, GPTSize, LlamaSize, QwenSize

if TYPE_CHECKING:
    from dlojz.cost_model.launched_operators import BlockWork, Traced

CAST_BYTES: Final = 2.0
"""Per element of a factor in fp8: written as it is and transposed; it is read by the operator before it, which casts.

Source: NVIDIA Transformer Engine, "Using FP8": fused casts of norms and activations, and the transposed copy on Hopper.
"""


class FusedAttention(NamedTuple):
    """Attention in one kernel, which never writes the scores.

    Attributes:
        rows, columns: of the scores of one head: queries, and keys that they meet.
        width: of a head.
        heads, kv_heads: of queries, and of keys and values, times the samples.
        kernel: generation, one of `ATTENTION_KERNELS`.
        causal: whether what the mask hides is skipped: half of the scores.
        steps: kernels that compute it one after another, each for a part of the keys: those of a ring.
    """

    rows: int
    columns: int
    width: int
    heads: int
    kv_heads: int
    kernel: AttentionKernel = "flash2"
    causal: bool = True
    steps: int = 1

    def flops(self, backward: bool = False) -> float:
        """Operations of one pass: two products forward, five backward, where scores are computed again.

        Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691), §3.1 and §4.1.
        """
        forward = 4.0 * self.heads * self.rows * self.columns * self.width * (0.5 if self.causal else 1.0)
        return forward * FUSED_BACKWARD if backward else forward

    def moved_bytes(self, backward: bool = False) -> float:
        """Bytes read and written in 16 bit: queries, keys, values, output, and 4 of statistics per row.

        Backward reads the output and its gradient besides, writes the three gradients, and adds up that of the queries
        in fp32. All but keys and values move at each step.

        Source: Dao 2023, algorithms 1 and 2.
        """
        rows = self.heads * self.rows * self.steps
        of_queries, of_keys = rows * self.width, 2 * self.kv_heads * self.columns * self.width
        statistics = 4.0 * rows
        if backward:
            return (2 * 3 + 4 + 4 + 2) * of_queries + 2 * 2 * of_keys + 3 * statistics
        return 2 * 2 * of_queries + 2 * of_keys + statistics


@dataclass(frozen=True)
class LayerOperator:
    """Operator of a layer, forward and backward.

    Attributes:
        name: as a table shows it.
        forward, backward: products.
        forward_bytes, backward_bytes: moved to and from memory beside the products.
        kernels: launched forward; backward about twice as many.
        core: part of attention's core, which selective recomputation runs again.
        fused: attention in one kernel.
    """

    name: str
    forward: tuple[Product, ...] = ()
    backward: tuple[Product, ...] = ()
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    kernels: int = 1
    core: bool = False
    fused: FusedAttention | None = None

    @property
    def flops(self) -> float:
        """Operations of the forward."""
        return sum(product.flops for product in self.forward) + (self.fused.flops() if self.fused else 0.0)


def product_operator(name: str, product: Product, *, kernels: int = 1, core: bool = False) -> LayerOperator:
    """An operator that is one product, with the two of its backward."""
    return LayerOperator(name, (product,), product.backward(), kernels=kernels, core=core)


def fused_attention_s(
    attention: FusedAttention, gpu: Device, calibration: Calibration, precision: Precision, backward: bool = False
) -> float:
    """Seconds of fused attention: the slower of computing at its kernel's published rate and of moving its bytes.

    Between heads of 64 and 128 the rate is interpolated, beyond it is that of the nearer. Where nobody has published a
    rate for the GPU it is `attention_efficiency` of the peak.
    """
    direction = "backward" if backward else "forward"
    small, large = gpu.attention_rates(f"{attention.kernel}_{direction}")
    if small is None or large is None:
        reached = gpu.peak_flops["bf16" if precision == "fp8" else precision] * calibration.attention_efficiency
    else:
        share = min(max((attention.width - HEAD_SIZES[0]) / (HEAD_SIZES[1] - HEAD_SIZES[0]), 0.0), 1.0)
        reached = small + share * (large - small)
    blocks = math.sqrt(attention.rows * attention.columns / attention.steps)  # side of a square of scores, a step's
    computing = attention.flops(backward) / (reached * blocks / (blocks + HALF_SPEED_ROWS))  # half at HALF_SPEED_ROWS
    memory = gpu.memory_bytes_per_s * calibration.memory_efficiency * 2 / element_bytes(precision)  # counted in 16 bit
    return max(computing, attention.moved_bytes(backward) / memory)


def product_s(
    product: Product, gpu: Device, calibration: Calibration, precision: Precision, cast_bytes: float = CAST_BYTES
) -> float:
    """Seconds of a product: the slower of computing and of moving its matrices once (roofline).

    With fp8 the products of attention stay in bf16 (Transformer Engine's default), and both factors are cast first.

    Args:
        cast_bytes: per element of a factor, beside what the operators around it read and write.

    Source: Williams, Waterman, Patterson 2009, "Roofline" (CACM 52), with the peak multiplied by the efficiencies.
    """
    reach = calibration.attention_efficiency if product.attention else calibration.product_efficiency
    if gpu.product_flops and not product.attention:
        reach = measured_reach(product, gpu, calibration, precision) or reach
    peak = gpu.peak_flops["bf16" if product.attention and precision == "fp8" else precision]
    # A tile's beginning and end take as long at any speed: in fp8 as long as twice as many elements.
    start = calibration.product_start * (peak / gpu.peak_flops["bf16"] if precision == "fp8" else 1.0)
    efficiency = reach * shape_efficiency(product, gpu, calibration, start)
    memory = gpu.memory_bytes_per_s * calibration.memory_efficiency
    factors = product.batch * (product.m + product.n) * product.k  # elements of both
    cast = cast_bytes * factors if precision == "fp8" and not product.attention else 0.0
    moved_bytes = product.moved_bytes * element_bytes(precision) / 2
    return max(product.flops / (peak * efficiency), moved_bytes / memory) + cast / memory


def operators_s(
    operators: Sequence[LayerOperator],
    gpu: Device,
    calibration: Calibration,
    precision: Precision,
    *,
    blocking: bool = False,
    cast_bytes: float = CAST_BYTES,
    times: Sequence[OperatorTimes] | None = None,
) -> tuple[float, float]:
    """Seconds of operators, forward and backward, each at least as long as the host takes to launch its kernels.

    Args:
        blocking: whether the host waits for each kernel before it launches the next (`CUDA_LAUNCH_BLOCKING=1`).
        times: of the operators, where they are known.
    """
    if times is None:
        times = operator_times(operators, gpu, calibration, precision, cast_bytes)
    forward, backward = summed_s(times, gpu.kernel_s + (calibration.serial_s if blocking else 0.0))
    launching = 0.0 if blocking else launching_s(operators, calibration)
    return max(forward, launching), max(backward, 2 * launching)


def launching_s(operators: Sequence[LayerOperator], calibration: Calibration) -> float:
    """Seconds in which the host launches a forward; its backward takes twice as long."""
    return calibration.launch_s * sum(operator.kernels for operator in operators)


class OperatorTimes(NamedTuple):
    """Seconds of an operator without its kernels' own.

    Attributes:
        forward, backward: of its products, of fused attention, and of the bytes moved beside them.
        kernels: launched forward.
    """

    forward: tuple[float, float, float]
    backward: tuple[float, float, float]
    kernels: int


@lru_cache(maxsize=16)
def _product_times(
    gpu: Device, calibration: Calibration, precision: Precision, cast_bytes: float
) -> dict[Product, float]:
    """Cache the seconds of products; many layouts share them."""
    return {}


def operator_times(
    operators: Sequence[LayerOperator], gpu: Device, calibration: Calibration, precision: Precision, cast_bytes: float
) -> list[OperatorTimes]:
    """Seconds of each operator."""
    # Passes are counted in 16 bit.
    memory = gpu.memory_bytes_per_s * calibration.memory_efficiency * 2 / element_bytes(precision)
    timed = _product_times(gpu, calibration, precision, cast_bytes)

    def products_s(products: tuple[Product, ...]) -> float:
        for product in products:
            if product not in timed:
                timed[product] = product_s(product, gpu, calibration, precision, cast_bytes)
        return sum(timed[product] for product in products)

    times = []
    for operator in operators:
        fused = [
            fused_attention_s(operator.fused, gpu, calibration, precision, backward) if operator.fused else 0.0
            for backward in (False, True)
        ]
        forward = products_s(operator.forward), fused[0], operator.forward_bytes / memory
        backward = products_s(operator.backward), fused[1], operator.backward_bytes / memory
        times.append(OperatorTimes(forward, backward, operator.kernels))
    return times


def summed_s(times: Sequence[OperatorTimes], each_s: float) -> tuple[float, float]:
    """Seconds of operators one after another, forward and backward.

    Each kernel takes `kernel_s` of the GPU beside what its products and its bytes come to: it starts, its first tiles
    are read, and its last multiprocessors end.

    Args:
        each_s: of each kernel.
    """
    forward = backward = 0.0
    kernels = 0
    for operator in times:
        for forward_s, backward_s in zip(operator.forward, operator.backward, strict=True):
            forward += forward_s
            backward += backward_s
        kernels += operator.kernels
    return forward + kernels * each_s, backward + 2 * kernels * each_s


NORM_BYTES: Final = (4, 8)
"""Forward reads and writes; backward reads gradient and input, writes, and reads twice more for its weights."""
EAGER_NORM_BYTES: Final = (30, 54)
"""An RMS norm in eager PyTorch: into fp32 (6), mean of squares (8), scaled (8), back and weighted (8); backward too."""
ROTATION_BYTES: Final = (4, 4)
EAGER_ROTATION_BYTES: Final = (20, 20)
"""Rotary positions as complex products in fp32: into fp32, product, back."""
RESIDUAL_BYTES: Final = (7, 11)
"""Bias, dropout and residual in one kernel: two reads, one write, a mask; backward also adds two gradients."""
GELU_BYTES: Final = (4, 8)
BIAS_BYTES: Final = 2
"""Backward, of each result of a product with a bias whose gradient is summed up in a kernel by itself."""
EAGER_RESIDUAL_BYTES: Final = (6, 6)
"""Without dropout: two reads, one write; backward adds two gradients."""
EAGER_LAYER_NORM_BYTES: Final = (4, 10)
"""In one kernel of torch forward, which rereads a row from the cache; backward reads gradient and input in two kernels,
one for its result, one for its weights.

Source: PyTorch, `aten/src/ATen/native/cuda/layer_norm_kernel.cu`; counted."""
GATE_BYTES: Final = (6, 12)
EAGER_GATE_BYTES: Final = (10, 18)
"""Per element of one of the two halves: both read, one written."""
SOFTMAX_BYTES: Final = (4, 6)
DROPOUT_BYTES: Final = (5, 5)
"""Of the scores, in a separate kernel."""
TRANSPOSE_BYTES: Final = (4, 4)
ROW_BYTES: Final = (4, 4)
"""Of an element of a row that is moved to another place: read, written."""
ROUTER_BYTES: Final = (20, 20)
"""Per token and expert: scores read and written, chosen and summed in fp32, and a mask of bytes; backward as much."""
GATHERED_CAST_BYTES: Final = (2, 2)
"""Of an element of an expert's rows, or of their gradients, in fp8: read once more, because the greatest value is
searched by a kernel of its own; the cast counts with the two products that the rows are in (`CAST_BYTES`)."""
ROUTER_KERNELS: Final = 20
"""Beside its product: scores and choice (1), the loss that balances experts (4), rows per expert and per rank counted,
summed and gathered over the expert-parallel ranks (8), copied to the host (3), and the map of the rows (4).

Source: Megatron-core, `transformer/moe/router.py`, `moe_utils.py` and `token_dispatcher.py`, `preprocess`, with fused
kernels (`--moe-router-fusion`, `--moe-permute-fusion`); counted."""
LOSS_BYTES: Final = {"megatron": (38, 14), "torch": (22, 26), "fused": (4, 4), "fused, two metrics": (48, 4)}
"""Per logit, whose 16 bits the product writes; every pass reads or writes all of them.

`megatron`: into fp32 (6), maximum (4), less it (8), exponential (8), sum (4), divided (8); backward scales in place (8)
and rounds (6). `torch`: into fp32 (6), log-softmax reads three times and writes (16); backward fills the gradient with
zeros (4), log-softmax reads gradient twice and result once and writes (16), rounds (6). `fused`: read twice; backward
reads and writes. Two metrics: twice the forward of `torch` more.

Source: Megatron-LM, `core/tensor_parallel/cross_entropy.py`; PyTorch, `aten/src/ATen/native/cuda/SoftMax.cu`;
FlashAttention, `csrc/xentropy`; mosaicml/composer, `_eval_train_metrics`. Passes over rows that no cache holds,
counted.
"""
COLLECTIVE_KERNELS: Final = 2
"""Launches for a layer's two collectives forward; backward as many again."""
FUSED_BACKWARD: Final = 2.5
"""Products of a fused attention's backward over those of its forward: scores are computed again.

Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691), §3.1 and §4.1.
"""


def tokens(size: DecoderSize, cut: Cut) -> int:
    """Tokens that one rank computes at once."""
    return cut.micro_batch * math.ceil(size.sequence_length / cut.cp)


def _pass(
    name: str, elements: float, of_element: tuple[int, int], kernels: int = 1, core: bool = False
) -> LayerOperator:
    forward, backward = of_element
    return LayerOperator(
        name, forward_bytes=forward * elements, backward_bytes=backward * elements, kernels=kernels, core=core
    )


def accumulation(parameters: float, cut: Cut) -> LayerOperator:
    """Gradient accumulation in 16 bit: both read, one written; nothing where it is fused."""
    moved_bytes = 0.0 if cut.fused_accumulation else parameters * (2 + 2 * cut.gradient_bytes)  # read, then added to
    return LayerOperator("gradient accumulation", backward_bytes=moved_bytes, kernels=0)


def ring_merge(queries: float, keys: float, cp: int, packed: bool = False) -> LayerOperator:
    """Partial results of a ring added up in fp32 after each of its cp steps: outputs, and backward all gradients.

    Each is read in 16 bit, its sum read and written in fp32, and the statistics' weights applied in a pass more.

    Args:
        queries, keys: elements of one rank.
        cp: steps.
        packed: whether keys and values (16 bit), and backward their gradients too (fp32), are copied into one buffer
            before each message, as torch does.

    Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889), algorithm 1; PyTorch,
    `distributed/tensor/experimental/_context_parallel/_attention.py`; bytes counted.
    """
    copied = 2 * keys * packed
    return LayerOperator(
        "sums of the ring",
        forward_bytes=cp * (18 * queries + 4 * copied),  # sum 2 + 4 + 4, weights 4 + 4
        backward_bytes=cp * (10 * (queries + 2 * keys) + (4 + 8) * copied),
        kernels=2 * cp,
        core=True,
    )


def attention_core(size: DecoderSize, cut: Cut) -> tuple[LayerOperator, ...]:
    """Scores, softmax, dropout and context of one layer; or one fused kernel that skips what the mask hides."""
    # With heads exchanged, all tokens of 1/cp of the heads; else 1/cp of the tokens of all.
    head_ranks, token_ranks = (cut.tp * cut.cp, 1) if cut.exchanges_heads else (cut.tp, cut.cp)
    heads, width = math.ceil(size.heads / head_ranks), size.core_width
    rows, columns, batch = math.ceil(size.sequence_length / token_ranks), size.sequence_length, cut.micro_batch * heads
    if cut.fused_attention:
        keys = (
            batch if cut.expands_keys else cut.micro_batch * math.ceil(size.kv_heads / head_ranks)
        )  # torch repeats keys
        steps = token_ranks if cut.rings else 1
        kernel = ATTENTION_KERNELS[cut.attention_kernel]
        fused = FusedAttention(rows, columns, width, batch, keys, kernel, steps=steps)
        operators = (LayerOperator("fused attention", kernels=steps, fused=fused, core=True),)  # a kernel for each step
        if steps == 1:
            return operators
        return *operators, ring_merge(rows * width * batch, rows * width * keys, cut.cp, cut.expands_keys)
    scores, values = batch * rows * columns, size.head_size
    keys = values + size.rotated_width
    return (
        product_operator("scores", Product(rows, columns, keys, batch, attention=True), core=True),
        _pass("softmax", scores, SOFTMAX_BYTES, core=True),
        _pass("dropout of scores", scores, DROPOUT_BYTES, core=True),
        product_operator("context", Product(rows, values, columns, batch, attention=True), core=True),
    )


def latent_operators(size: DecoderSize, cut: Cut) -> tuple[LayerOperator, ...]:
    """Operators of latent attention before its core: latents, and queries, keys and values of the rank's heads.

    The latents are made whole on every tensor-parallel rank, with sequence parallelism of its tokens alone.

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1; Megatron-LM, `core/transformer/multi_latent_attention.py`
    (down-projections `duplicated`).
    """
    n, heads, keys = tokens(size, cut), math.ceil(size.heads / cut.tp), size.head_size + size.rotated_width
    rows = math.ceil(n / cut.tp) if cut.sequence_parallel else n
    down = size.query_latent + size.latent + size.rotated_width
    turned = EAGER_ROTATION_BYTES if cut.eager else ROTATION_BYTES
    return (
        product_operator("latents", Product(rows, down, size.hidden), kernels=2),  # (n, h) @ (h, L' + L + R)
        _pass("norm of latents", rows * (size.query_latent + size.latent), NORM_BYTES, kernels=2),
        # (n, L') @ (L', heads · (d + R)), then (n, L) @ (L, heads · 2d).
        product_operator("queries", Product(n, heads * keys, size.query_latent or size.hidden)),
        product_operator("keys, values", Product(n, 2 * heads * size.head_size, size.latent)),
        _pass("concatenations", n * heads * (2 * keys + size.head_size), TRANSPOSE_BYTES, kernels=5),
        _pass("rotation", n * (heads + 1) * size.rotated_width, turned),
    )


def routed_rows(size: DecoderSize) -> float:
    """Rows that the experts of a layer compute for each token: f·k in a mixture, the mean over the layers.

    Source: Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), "expert capacity": f·k·N/E rows of each expert.
    """
    return size.capacity_factor * size.top_k / size.period


def mixture_operators(size: DecoderSize, cut: Cut) -> tuple[LayerOperator, ...]:
    """Operators of a mixture of experts: router, rows moved to their experts, the experts' products, rows moved back.

    A rank holds E/ep experts, each with the rows of ep ranks. Tensor-parallel ranks do not cut experts: each hands over
    its part of the tokens, as with sequence parallelism. Rows are moved twice each way: sorted by expert, so that each
    rank's are together, and after the all-to-all by expert again; in fp8 they are filled up to whole tiles besides,
    and cast by themselves. Each expert is a kernel of its own. Where not each layer has a mixture, the MLP of the
    others is here too, each with its share of the layers.

    Source: Megatron-core, `transformer/moe/token_dispatcher.py`, `MoEAlltoAllTokenDispatcher` (permutations 1 and 2,
    unpermutations 2 and 1); Transformer Engine, `GroupedLinear` and `Fp8Padding`; bytes counted.
    """
    n, h, w, period = tokens(size, cut) / cut.tp, size.hidden, size.expert_width, size.period
    rows = math.ceil(size.capacity_factor * size.top_k * n * cut.ep / size.experts)  # of one expert, from all ep ranks
    rank_experts, mlp_in, share = size.experts // cut.ep, 2 * w if size.gated else w, 1 / period  # gate and up at once
    routed = routed_rows(size) * n  # rows of the mixture's layers
    of_element = (EAGER_GATE_BYTES if cut.eager else GATE_BYTES) if size.gated else GELU_BYTES
    # (n, h) → (k · n, h), and back: read or written once for each token, and once for each of its rows.
    spread = (routed + n / period) * h / 2
    moves = int(rank_experts > 1)  # sorted again, of several experts
    fills = int(cut.narrow)  # rows of each expert up to a multiple of 16, and back
    casts = GATHERED_CAST_BYTES if cut.narrow else (0, 0)
    kernels = rank_experts * (3 if cut.narrow else 1)  # a product; in fp8 the greatest value, and the cast

    def moved(name: str) -> tuple[LayerOperator, ...]:
        passes = [_pass(name, spread, ROW_BYTES)]
        passes += [_pass(f"{name}, by expert", routed * h, ROW_BYTES, kernels=2)] * moves
        return *passes, *([_pass(f"{name}, padding", routed * h, ROW_BYTES)] * fills)

    operators = [
        product_operator("router", Product(round(n), size.experts, h, work=share), kernels=2),  # (n, h) @ (h, experts)
        _pass("choice of experts", n * size.experts / period, ROUTER_BYTES, kernels=ROUTER_KERNELS),
        *moved("dispatch"),
        _pass("cast of rows", routed * h, casts, kernels=0),
        product_operator("experts, up", Product(rows, mlp_in, h, rank_experts, work=share), kernels=kernels),
        _pass("gate of experts" if size.gated else "GeLU of experts", routed * w, of_element),
        _pass("cast of rows", routed * w, casts, kernels=0),
        product_operator("experts, down", Product(rows, h, w, rank_experts, work=share), kernels=kernels),
        *moved("combine"),
    ]
    # Layers without a mixture have an MLP, those with one what every token meets.
    plain_mlp = mean_mlp(size, cut, size.mlp_width, 1 - share) if period > 1 else ()
    return *operators, *plain_mlp, *mean_mlp(size, cut, size.shared_experts * size.expert_width, share)


def mean_mlp(size: DecoderSize, cut: Cut, mlp_width: int, share: float) -> tuple[LayerOperator, ...]:
    """An MLP of a width, cut by tensor parallelism, that a share of the layers has; none of width 0."""
    n, h, w = tokens(size, cut), size.hidden, math.ceil(mlp_width / cut.tp)
    of_element = (EAGER_GATE_BYTES if cut.eager else GATE_BYTES) if size.gated else GELU_BYTES
    if not w:
        return ()
    return (
        product_operator("MLP, up", Product(n, 2 * w if size.gated else w, h, work=share)),
        _pass("gate" if size.gated else "GeLU", share * n * w, of_element),
        product_operator("MLP, down", Product(n, h, w, work=share), kernels=2),
    )


def layer_operators(size: DecoderSize, cut: Cut) -> tuple[LayerOperator, ...]:
    """Operators of one layer: norm, attention, residual, norm, MLP, residual."""
    n, h, w = tokens(size, cut), size.hidden, math.ceil(size.mlp_width / cut.tp)
    keys = math.ceil(size.kv_heads / cut.tp) * size.head_size
    queries = math.ceil(size.heads / cut.tp) * size.head_size
    boundary = n * h / (cut.tp if cut.sequence_parallel else 1)  # norms and residuals: split with SP alone
    mlp_in = 2 * w if size.gated else w
    weights = h * (queries + 2 * keys) + queries * h + h * mlp_in + w * h  # accumulated once per micro-batch
    if size.experts or size.latent:
        weights = (size.layer_parameters - size.expert_parameters) // cut.tp + size.expert_parameters // cut.ep
    if cut.eager:
        layer_norm = size.biased
        norm = _pass(
            "norm", boundary, EAGER_LAYER_NORM_BYTES if layer_norm else EAGER_NORM_BYTES, 1 if layer_norm else 8
        )
        residual = _pass("residual", boundary, EAGER_RESIDUAL_BYTES)
    else:
        norm, residual = _pass("norm", boundary, NORM_BYTES), _pass("residual", boundary, RESIDUAL_BYTES)
    biased = n * (queries + 2 * keys + mlp_in + 2 * h) if cut.eager and size.biased else 0.0
    gate = EAGER_GATE_BYTES if cut.eager else GATE_BYTES
    activation = _pass("gate", n * w, gate) if size.gated else _pass("GeLU", n * w, GELU_BYTES)
    rotation = EAGER_ROTATION_BYTES if cut.eager else ROTATION_BYTES
    rotated = 0 if size.positions == "learned" else n * (queries + keys)
    normed = n * (queries + keys) if size.head_width and not size.biased else 0  # Qwen's, whose weights are counted too
    mlp: tuple[LayerOperator, ...] = (
        product_operator("MLP, up", Product(n, mlp_in, h)),
        activation,
        product_operator("MLP, down", Product(n, h, w), kernels=2),
    )
    before_core: tuple[LayerOperator, ...] = (
        product_operator("queries, keys, values", Product(n, queries + 2 * keys, h), kernels=2),
        _pass("transposes", n * (queries + 2 * keys), TRANSPOSE_BYTES, kernels=5),
        _pass("norms of queries and keys", normed, NORM_BYTES, kernels=2 if normed else 0),
        _pass("rotation", rotated, rotation, kernels=1 if rotated else 0),
    )
    return (
        norm,
        *(latent_operators(size, cut) if size.latent else before_core),
        *attention_core(size, cut),
        product_operator("projection", Product(n, h, queries), kernels=2),
        residual,  # behind attention
        norm,
        *(mixture_operators(size, cut) if size.experts else mlp),
        residual,
        _pass("gradients of biases", biased, (0, BIAS_BYTES), kernels=0),
        accumulation(weights, cut),
        LayerOperator("collectives", kernels=COLLECTIVE_KERNELS if cut.tp > 1 else 0),
    )


def embedding_operators(size: DecoderSize, cut: Cut) -> tuple[LayerOperator, ...]:
    """Operators of the embedding; backward adds into a whole gradient matrix, which is then accumulated."""
    elements = tokens(size, cut) * size.hidden  # (T, h)
    matrix = size.vocabulary * size.hidden / cut.tp  # (V/t, h): its gradient is whole
    return (
        _pass("lookup", elements, (4, 8), kernels=4),
        _pass("dropout", elements / (cut.tp if cut.sequence_parallel else 1), DROPOUT_BYTES),
        LayerOperator("gradient matrix", backward_bytes=2 * matrix + matrix * (2 + 2 * cut.gradient_bytes)),
    )


def padded_vocabulary(size: DecoderSize, tp: int) -> int:
    """Entries that one rank holds: the vocabulary is padded to a multiple of 128 for every rank.

    Source: Megatron-LM, `--make-vocab-size-divisible-by 128`.
    """
    return 128 * math.ceil(size.vocabulary / (128 * tp))


def logit_operators(size: DecoderSize, cut: Cut) -> tuple[LayerOperator, ...]:
    """Operators of the last norm, the logits and the cross-entropy over the rank's part of the vocabulary."""
    n, v = tokens(size, cut), padded_vocabulary(size, cut.tp)
    boundary = n * size.hidden / (cut.tp if cut.sequence_parallel else 1)
    return (
        _pass("norm", boundary, NORM_BYTES),
        product_operator("logits", Product(n, v, size.hidden)),
        _pass("cross-entropy", n * v, LOSS_BYTES[LOSSES[cut.loss]], kernels=6),
        accumulation(v * size.hidden, cut),
    )


class Cut(NamedTuple):
    """Part of a layer that one rank computes at a time.

    Attributes:
        micro_batch: samples.
        tp, cp: tensor- and context-parallel ranks.
        sequence_parallel: norms and dropouts split over the tensor-parallel ranks too.
        fused_attention: attention is one kernel that never writes the scores.
        gradient_bytes: of an element of the accumulated gradients, 2 or 4.
        fused_accumulation: the product of the weights' gradient adds to what is there, without a separate pass.
        blocking: the host waits for each kernel (`CUDA_LAUNCH_BLOCKING=1`).
        eager: norms, rotations and gates are many kernels, in fp32.
        ep: ranks that share the experts of a mixture.
        attention_kernel: place in `ATTENTION_KERNELS`.
        loss: place in `LOSSES`.
        cast_bytes: per element of a factor of a product in fp8.
        exchanges_heads: context-parallel ranks give each other heads, in all-to-alls, and each attends to all tokens.
        narrow: products are in fp8.
        dispatcher: place in `DISPATCHERS`.
        gathers_fp8, copies_messages, rings, expands_keys: as `LibraryHabits` says.
    """

    micro_batch: int
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    fused_attention: bool = False
    gradient_bytes: int = 2
    fused_accumulation: bool = True
    blocking: bool = False
    eager: bool = False
    ep: int = 1
    attention_kernel: int = 0
    exchanges_heads: bool = False
    loss: int = 0
    cast_bytes: float = CAST_BYTES
    narrow: bool = False
    dispatcher: int = 0
    gathers_fp8: bool = False
    copies_messages: bool = False
    rings: bool = True
    expands_keys: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        name: `embedding`, `layer`, `logits`, or of a block of an image model.
        count: how many follow each other.
        parameters: of one, before tensor parallelism.
        operators: of one, for a cut.
        elements: of the tensor that one sample hands to the next layer: what tensor-parallel ranks sum and pipeline
            ranks send.
        ring_elements: keys and values of one sample, which context-parallel ranks hand on.
        repeats: heads of queries that share one of keys.
        sums: all-reduces of such a tensor per forward and per backward, with tensor parallelism.
        recomputed: whether full checkpointing computes it again.
        expert_parameters: those of its parameters that expert parallelism splits.
        exchange_elements: of the buffer of rows that one sample hands to each all-to-all of its experts.
        top_k: rows of such a buffer that are of one token.
        trained: those of its parameters that have gradients; None: all.
        quantized: weights that are kept as codes, and the bytes of these.
    """

    name: str
    count: int
    parameters: int
    operators: Callable[[Cut], tuple[LayerOperator, ...]]
    elements: int
    sums: tuple[int, int] = (2, 2)
    ring_elements: int = 0
    repeats: int = 1
    recomputed: bool = True
    expert_parameters: int = 0
    exchange_elements: float = 0.0
    top_k: int = 1
    trained: int | None = None
    quantized: tuple[int, int] = (0, 0)

    def gathered(self, element_bytes: int) -> float:
        """Elements that sharding gathers of one layer; codes count by their bytes, which no cast changes."""
        weights, code_bytes = self.quantized
        return self.parameters - weights + code_bytes / element_bytes


@dataclass(frozen=True)
class Workload:
    """A model as the cost model sees it.

    Attributes:
        name: of the model.
        kinds: in order; the first one's input is the sample.
        size: of the decoder; None for an image model, and for one from elsewhere.
    """

    name: str
    kinds: tuple[Kind, ...]
    size: DecoderSize | None = None

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied matrix once."""
        return sum(kind.count * kind.parameters for kind in self.kinds)

    def flops(self, cut: Cut | None = None) -> float:
        """Operations of one forward of one rank, attention whole."""
        cut = cut or Cut(1)
        return sum(kind.count * operator.flops for kind in self.kinds for operator in kind.operators(cut))


@cache
def decoder_workload(size: DecoderSize) -> Workload:
    """The workload of a decoder: embedding, layers, logits.

    The matrix of the logits is a separate parameter only if it is not tied; with a pipeline, the last stage holds a
    copy of a tied one (`dlojz.cost_model.layout_memory` counts it).
    """
    elements = size.sequence_length * size.hidden
    logits = 0 if size.tied else size.vocabulary * size.hidden
    return Workload(
        f"decoder-{size.num_parameters / 1e9:.1f}B",
        (
            Kind(
                "embedding", 1, size.embedding_parameters, lambda cut: embedding_operators(size, cut), elements, (1, 0)
            ),
            Kind(
                "layer",
                size.layers,
                size.layer_parameters,
                lambda cut: layer_operators(size, cut),
                elements,
                ring_elements=2 * size.sequence_length * size.kv_heads * size.core_width,
                repeats=size.heads // size.kv_heads,
                expert_parameters=size.expert_parameters,
                exchange_elements=routed_rows(size) * elements if size.experts else 0.0,
                top_k=size.top_k,
            ),
            Kind("logits", 1, logits, lambda cut: logit_operators(size, cut), elements, (0, 1), recomputed=False),
        ),
        size,
    )


def workload(model: DecoderSize | str, image_size: int | None = None, sequence_length: int | None = None) -> Workload:
    """Build the workload of a model.

    Args:
        model: a decoder's size, or a name of the catalogue (`dlojz models`).
        image_size: pixels of a side, of an image model; by default the catalogue's.
        sequence_length: tokens, of a text model; by default the catalogue's.

    Raises:
        LabError: if there is no such model, or the size does not fit it.
    """
    if isinstance(model, DecoderSize):
        return decoder_workload(model)
    if not isinstance(model, str):
        raise refusal(
            en=f"model must be a DecoderSize or a name of the catalogue, but {model!r} was received.",
            fr=f"model doit être un DecoderSize ou un nom du catalogue, mais {model!r} a été reçu.",
        )
    spec = models.spec(model)
    models.check_input(model, image_size=image_size, sequence_length=sequence_length)
    size = spec.size
    if isinstance(size, GPTSize | LlamaSize | QwenSize | DeepSeekSize):
        return decoder_workload(_decoder_size(size, spec.num_classes, sequence_length or spec.sequence_length or 1))
    return _traced_workload(
        model, image_size or spec.image_size, sequence_length or spec.sequence_length, spec.num_classes
    )


PASS_BACKWARD: Final = 2.0
"""Bytes of the backward of what is no product, over those of its forward: it reads gradient and input, and writes."""


def _decoder_size(size: GPTSize | LlamaSize | QwenSize | DeepSeekSize, vocabulary: int, tokens: int) -> DecoderSize:
    fields: dict[str, Any] = {"layers": size.depth, "hidden": size.width, "heads": size.num_heads}
    fields["tied"] = not isinstance(size, DeepSeekSize) and size.tied_head
    if size.experts is not None:
        fields |= {"experts": size.experts.num_experts, "top_k": size.experts.top_k, "every": size.experts.every}
        fields |= {"capacity_factor": size.experts.capacity_factor, "expert_width": size.experts.mlp_width}
        fields |= {"shared_experts": size.experts.shared, "dense_layers": size.experts.dense}
    if isinstance(size, QwenSize):
        fields["head_width"] = size.head_dim
    if isinstance(size, LlamaSize | QwenSize):
        fields["kv_heads"] = size.num_kv_heads
    if isinstance(size, DeepSeekSize):
        fields |= {"head_width": size.head_dim, "rotated_width": size.rotated_dim}
        fields |= {"latent": size.latent, "query_latent": size.query_latent}
    if not isinstance(size, GPTSize):
        fields |= {"mlp_width": size.mlp_width, "gated": True, "biased": False, "positions": "none"}
    return DecoderSize(**fields, vocabulary=vocabulary, sequence_length=tokens)


@lru_cache(maxsize=32)
def _traced_workload(model: str, image_size: int | None, sequence_length: int | None, num_classes: int) -> Workload:
    """The workload of a model whose operators are read off its forward pass: of images, or from elsewhere."""
    from dlojz.cost_model.launched_operators import traced_blocks  # loads torch

    kinds: list[Kind] = []
    previous: BlockWork | None = None
    for block in traced_blocks(model, image_size, sequence_length, num_classes, LOSS_BYTES["torch"][0]):
        if previous is not None and previous == block:  # equal neighbours share their seconds
            kinds[-1] = replace(kinds[-1], count=kinds[-1].count + 1)
            continue
        previous = block
        has_attention = any(operation.per_sample for operation in block.traced)
        name = f"{len(kinds)} {block.name}"
        sums = (2, 2) if has_attention else (1, 1)  # reductions per pass: attention's and the MLP's, or one
        kind = Kind(name, 1, block.parameters, _operators(block), block.elements, sums)
        kinds.append(replace(kind, trained=block.trained, quantized=block.quantized))
    return Workload(f"{model}-{image_size or sequence_length}", tuple(kinds))


def _operators(block: BlockWork) -> Callable[[Cut], tuple[LayerOperator, ...]]:
    @lru_cache(maxsize=256)
    def of(cut: Cut) -> tuple[LayerOperator, ...]:
        return tuple(_operator(operation, cut) for operation in block.traced)

    return of


def _operator(operation: Traced, cut: Cut) -> LayerOperator:
    """Scale an operation to a micro-batch; tensor-parallel ranks split heads, columns and elements."""
    if operation.product is None:
        # Passes are split like the products around them.
        moved_bytes = operation.num_bytes * (1 if operation.of_weights else cut.micro_batch) / cut.tp
        backward = 1.0 if operation.of_weights else PASS_BACKWARD * any(operation.gradients)
        return LayerOperator("pass", forward_bytes=moved_bytes, backward_bytes=backward * moved_bytes)
    product = operation.product
    if operation.per_sample:
        batch = math.ceil(product.batch / cut.tp) * cut.micro_batch  # heads are split, samples are not
        operator = product_operator("attention", product._replace(batch=batch), core=True)
    else:  # rows × batch, columns ÷ t
        shared = product._replace(m=product.m * cut.micro_batch, n=math.ceil(product.n / cut.tp))
        operator = product_operator("product", shared)
    return replace(operator, backward=tuple(compress(operator.backward, operation.gradients)))
