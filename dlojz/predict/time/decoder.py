"""The operators of a decoder: its layer, its embedding, its logits.

Layer 3. Invariant: every product and every pass over memory is written once, with its bytes per element; 16-bit
activations, dropout masks of 1 byte, reductions in fp32.

Symbols: T tokens of one rank's micro-batch (b·s/cp), h hidden, a heads, d head size, w width of the MLP, V vocabulary,
t tensor-parallel ranks. Passes of a tensor of n elements are written as bytes per element: read 2, written 2.

Source: the operators are those of Megatron-LM's layer (Narayanan et al. 2021, arXiv 2104.04473, §4.2; Korthikanti et
al. 2022, arXiv 2205.05198, §4.1, figure 2), fused as §4.2 there says; bytes counted by hand.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from dlojz.evidence import DecoderSize
from dlojz.predict.time.operators import Operator, Product, product_operator

if TYPE_CHECKING:
    from dlojz.predict.time.workload import Cut

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
GATE_BYTES: Final = (6, 12)
EAGER_GATE_BYTES: Final = (10, 18)
"""Per element of one of the two halves: both read, one written."""
SOFTMAX_BYTES: Final = (4, 6)
DROPOUT_BYTES: Final = (5, 5)
"""Of the scores, in a kernel of its own."""
TRANSPOSE_BYTES: Final = (4, 4)
ROW_BYTES: Final = (8, 8)
"""Rows set to zero and filled, or read and added up with their weights: written twice, or read twice; counted."""
LOSS_BYTES: Final = (18, 10)
"""Logits are written in 16 bit, read into fp32 (6); maximum, exponential and sum pass over fp32 (12); backward writes
fp32 and rounds (10)."""
COLLECTIVE_KERNELS: Final = 2
"""Launches for a layer's two collectives forward; backward as many again."""
FUSED_BACKWARD: Final = 2.5
"""Products of a fused attention's backward over those of its forward: scores are computed again.

Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691), §3.1 and §4.1.
"""


def tokens(size: DecoderSize, cut: Cut) -> int:
    """Tokens that one rank computes at once."""
    return cut.micro_batch * math.ceil(size.sequence_length / cut.cp)


def _pass(name: str, elements: float, of_element: tuple[int, int], kernels: int = 1, core: bool = False) -> Operator:
    forward, backward = of_element
    return Operator(
        name, forward_bytes=forward * elements, backward_bytes=backward * elements, kernels=kernels, core=core
    )


def accumulation(parameters: float, cut: Cut) -> Operator:
    """Adding a micro-batch's 16-bit gradients to those that are there: both read, one written; nothing where fused."""
    moved = 0.0 if cut.fused_accumulation else parameters * (2 + 2 * cut.gradient_bytes)
    return Operator("gradient accumulation", backward_bytes=moved, kernels=0)


def attention_core(size: DecoderSize, cut: Cut) -> tuple[Operator, ...]:
    """Scores, softmax, dropout and context of one layer; or one fused kernel that skips what the mask hides."""
    heads, width = math.ceil(size.heads / cut.tp), size.head_size
    rows, columns, batch = math.ceil(size.sequence_length / cut.cp), size.sequence_length, cut.micro_batch * heads
    if cut.fused_attention:
        forward = (Product(rows, columns, width, batch, True, 0.5), Product(rows, width, columns, batch, True, 0.5))
        more = tuple(each._replace(work=each.work * FUSED_BACKWARD) for each in forward)
        return (Operator("fused attention", forward, more, core=True),)
    scores = batch * rows * columns
    return (
        product_operator("scores", Product(rows, columns, width, batch, attention=True), core=True),
        _pass("softmax", scores, SOFTMAX_BYTES, core=True),
        _pass("dropout of scores", scores, DROPOUT_BYTES, core=True),
        product_operator("context", Product(rows, width, columns, batch, attention=True), core=True),
    )


def routed_rows(size: DecoderSize) -> float:
    """Rows that the experts of a layer compute for each token: f·k in a mixture, the mean over the layers.

    Source: Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), "expert capacity": f·k·N/E rows of each expert.
    """
    return size.capacity_factor * size.top_k / size.every


def mixture_operators(size: DecoderSize, cut: Cut) -> tuple[Operator, ...]:
    """What stands in the place of an MLP: gate, rows laid out for the experts and back, and the experts' products.

    A rank holds E/ep experts, each with the rows of ep ranks. Where not each layer has a mixture, the MLP of the others
    is here too, each with its share of the layers.
    """
    n, h, w, every = tokens(size, cut), size.hidden, size.mlp_width, size.every
    rows = math.ceil(size.capacity_factor * size.top_k * n * cut.ep / size.experts)
    held, mlp_in, share = size.experts // cut.ep, 2 * w if size.gated else w, 1 / every
    routed, plain = routed_rows(size) * n, n * (every - 1) / every
    of_element = (EAGER_GATE_BYTES if cut.eager else GATE_BYTES) if size.gated else GELU_BYTES
    found = [
        product_operator("gate", Product(n, size.experts, h, work=share), kernels=4),
        _pass("dispatch", routed * h, ROW_BYTES, kernels=3),
        product_operator("experts, up", Product(rows, mlp_in, h, held, work=share)),
        _pass("gate of experts" if size.gated else "GeLU of experts", routed * w, of_element),
        product_operator("experts, down", Product(rows, h, w, held, work=share), kernels=2),
        _pass("combine", routed * h, ROW_BYTES, kernels=3),
    ]
    if every > 1:
        found += [
            product_operator("MLP, up", Product(n, mlp_in, h, work=1 - share)),
            _pass("gate" if size.gated else "GeLU", plain * w, of_element),
            product_operator("MLP, down", Product(n, h, w, work=1 - share), kernels=2),
        ]
    return tuple(found)


def layer_operators(size: DecoderSize, cut: Cut) -> tuple[Operator, ...]:
    """One layer: norm, attention, residual, norm, MLP, residual."""
    n, h, w = tokens(size, cut), size.hidden, math.ceil(size.mlp_width / cut.tp)
    keys = math.ceil(size.kv_heads / cut.tp) * size.head_size
    queries = math.ceil(size.heads / cut.tp) * size.head_size
    whole = n * h / (cut.tp if cut.sequence_parallel else 1)
    mlp_in = 2 * w if size.gated else w
    weights = h * (queries + 2 * keys) + queries * h + h * mlp_in + w * h
    if size.experts:
        weights = size.layer_parameters - size.expert_parameters * (cut.ep - 1) // cut.ep
    norm = _pass("norm", whole, EAGER_NORM_BYTES if cut.eager else NORM_BYTES, kernels=8 if cut.eager else 1)
    gate = EAGER_GATE_BYTES if cut.eager else GATE_BYTES
    activation = _pass("gate", n * w, gate) if size.gated else _pass("GeLU", n * w, GELU_BYTES)
    rotation = EAGER_ROTATION_BYTES if cut.eager else ROTATION_BYTES
    rotated = 0 if size.positions == "learned" else n * (queries + keys)
    mlp: tuple[Operator, ...] = (
        product_operator("MLP, up", Product(n, mlp_in, h)),
        activation,
        product_operator("MLP, down", Product(n, h, w), kernels=2),
    )
    return (
        norm,
        product_operator("queries, keys, values", Product(n, queries + 2 * keys, h), kernels=2),
        _pass("transposes", n * (queries + 2 * keys), TRANSPOSE_BYTES, kernels=5),
        _pass("rotation", rotated, rotation, kernels=1 if rotated else 0),
        *attention_core(size, cut),
        product_operator("projection", Product(n, h, queries), kernels=2),
        _pass("residual", whole, RESIDUAL_BYTES),
        norm,
        *(mixture_operators(size, cut) if size.experts else mlp),
        _pass("residual", whole, RESIDUAL_BYTES),
        accumulation(weights, cut),
        Operator("collectives", kernels=COLLECTIVE_KERNELS if cut.tp > 1 else 0),
    )


def embedding_operators(size: DecoderSize, cut: Cut) -> tuple[Operator, ...]:
    """Looking tokens up; backward adds into a whole gradient matrix, which is then accumulated."""
    elements = tokens(size, cut) * size.hidden
    matrix = size.vocabulary * size.hidden / cut.tp
    return (
        _pass("lookup", elements, (4, 8), kernels=4),
        _pass("dropout", elements / (cut.tp if cut.sequence_parallel else 1), DROPOUT_BYTES),
        Operator("gradient matrix", backward_bytes=2 * matrix + matrix * (2 + 2 * cut.gradient_bytes)),
    )


def padded_vocabulary(size: DecoderSize, tp: int) -> int:
    """Entries that one rank holds: the vocabulary is padded to a multiple of 128 for every rank.

    Source: Megatron-LM, `--make-vocab-size-divisible-by 128`.
    """
    return 128 * math.ceil(size.vocabulary / (128 * tp))


def logit_operators(size: DecoderSize, cut: Cut) -> tuple[Operator, ...]:
    """Last norm, logits and cross-entropy over the rank's part of the vocabulary."""
    n, v = tokens(size, cut), padded_vocabulary(size, cut.tp)
    whole = n * size.hidden / (cut.tp if cut.sequence_parallel else 1)
    return (
        _pass("norm", whole, NORM_BYTES),
        product_operator("logits", Product(n, v, size.hidden)),
        _pass("cross-entropy", n * v, LOSS_BYTES, kernels=6),
        accumulation(v * size.hidden, cut),
    )
