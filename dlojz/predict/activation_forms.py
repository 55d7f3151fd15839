"""Activation memory of transformers in closed form, as the papers give it, to stand beside a trace.

Layer 3. Invariant: exact fractions of bytes, for activations in 16 bit and dropout masks of 1 byte, as in the papers; a
trace of a real module differs by what they leave out (statistics of layer norms: 16·s·b bytes per layer on a GPU).

Symbols: s sequence length, b samples per micro-batch, h hidden size, a attention heads, L layers, t tensor-parallel
ranks, p pipeline stages, v vocabulary. "KOR" is Korthikanti et al. 2022 (arXiv 2205.05198), "INF" Rajbhandari et
al. 2021 (arXiv 2104.07857).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from dlojz.schema import LabError, one_of

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Shape:
    """What the forms depend on: a micro-batch in a transformer layer.

    Args:
        sequence_length: s, tokens.
        micro_batch: b, samples.
        hidden: h.
        heads: a, of attention.
    """

    sequence_length: int
    micro_batch: int
    hidden: int
    heads: int

    @property
    def sbh(self) -> int:
        """Elements of one activation tensor of the layer."""
        return self.sequence_length * self.micro_batch * self.hidden

    @property
    def scores(self) -> int:
        """Elements of the attention scores: a·s²·b, each of which is kept as 5 bytes (softmax, mask, after dropout)."""
        return self.heads * self.sequence_length**2 * self.micro_batch


def layer_parts(shape: Shape, *, tp: int = 1, sequence_parallel: bool = False) -> dict[str, Fraction]:
    """Bytes that one layer keeps for backward, by part: attention 11·sbh + 5·a·s²·b, MLP 19·sbh, two norms 4·sbh.

    With tensor parallelism each of attention and MLP keeps 3·sbh whole on every rank (its input and its last dropout
    mask) and the norms 4·sbh; sequence parallelism shares these out too.

    Source: KOR, §4.1, table 2.
    """
    whole = Fraction(1, tp) if sequence_parallel else Fraction(1)
    sbh = shape.sbh
    return {
        "attention": 3 * sbh * whole + Fraction(8 * sbh + 5 * shape.scores, tp),
        "mlp": 3 * sbh * whole + Fraction(16 * sbh, tp),
        "layer_norm": 4 * sbh * whole,
    }


def layer_bytes(
    shape: Shape, *, tp: int = 1, sequence_parallel: bool = False, checkpointing: Checkpointing = "none"
) -> Fraction:
    """Bytes that one layer keeps for backward.

    none: sbh(34 + 5as/h); with tensor parallelism sbh(10 + 24/t + 5as/(ht)); with sequence parallelism too,
    sbh/t (34 + 5as/h). Selective recomputation drops the term 5as/h. Full recomputation keeps the layer's input,
    2·sbh, shared out among the ranks with sequence parallelism.

    Source: KOR, §4 and §5, table 2.

    Raises:
        LabError: if `checkpointing` is none of these.
    """
    if checkpointing not in get_args(Checkpointing):
        raise LabError(one_of("checkpointing", checkpointing, get_args(Checkpointing)))
    if checkpointing == "full":
        return Fraction(2 * shape.sbh, tp if sequence_parallel else 1)
    total = sum(layer_parts(shape, tp=tp, sequence_parallel=sequence_parallel).values(), Fraction(0))
    return total - Fraction(5 * shape.scores, tp) if checkpointing == "selective" else total


def first_stage_layers(layers: int, *, pp: int = 1, chunks: int = 1) -> Fraction:
    """Layers' worth of activations that the first pipeline stage holds in 1F1B with at least p micro-batches.

    L without interleaving, whatever p: L/p layers of p micro-batches; L(1 + (p − 1)/(p·m)) with m chunks per stage.

    Source: KOR, §4.2.3.
    """
    return Fraction(layers) if pp == 1 or chunks == 1 else layers * (1 + Fraction(pp - 1, pp * chunks))


def input_output_bytes(shape: Shape, vocabulary: int, *, tp: int = 1, pp: int = 1) -> Fraction:
    """Bytes that the first stage keeps besides its layers: masks after the embedding; without pipeline the output too.

    sbhp/t for p micro-batches, plus, where p = 1, 4sbh/t (1 + v/h): the last norm, the input of the output layer, and
    logits in fp32. Sequence parallelism is assumed.

    Source: KOR, §4.3.
    """
    embedding = Fraction(shape.sbh * pp, tp)
    if pp > 1:
        return embedding
    return embedding + Fraction(4 * (shape.sbh + shape.sequence_length * shape.micro_batch * vocabulary), tp)


def deallocated_output_bytes(shape: Shape, in_flight_micro_batches: int) -> int:
    """Bytes that a stage saves by freeing its output once it is sent: 2·sbh for each micro-batch in flight.

    Source: KOR, appendix B (2.73 GiB on the first of 35 stages of the 530B model).
    """
    return 2 * shape.sbh * in_flight_micro_batches


def transformer_parameters(layers: int, hidden: int) -> int:
    """Parameters of the layers' matrices alone: 12·L·h². Source: INF, §3, equation 1."""
    return 12 * layers * hidden**2


def megatron_parameters(layers: int, hidden: int, vocabulary: int, sequence_length: int) -> int:
    """Parameters of a GPT with learned positions and tied embeddings: 12Lh²(1 + 13/(12h) + (V + s)/(12Lh)).

    The final norm, 2h, is not counted.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §5.1, equation 2.
    """
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence_length) * hidden


def infinity_states_bytes(layers: int, hidden: int) -> int:
    """Model states, 240·nl·hd²: 20 bytes per parameter. Source: INF, §3, equation 2."""
    return 20 * transformer_parameters(layers, hidden)


def infinity_activation_bytes(shape: Shape, layers: int) -> int:
    """All activations of a step, 2·b·s·nl·(16·hd + 2·heads·s). Source: INF, §3; the working memory's form, kept."""
    return 2 * infinity_activation_working_bytes(shape) * layers


def infinity_checkpoint_bytes(shape: Shape, layers: int, layers_per_checkpoint: int = 1) -> Fraction:
    """Activation checkpoints, 2·b·s·hd·nl/ci. Source: INF, §3, equation 3."""
    return Fraction(2 * shape.sbh * layers, layers_per_checkpoint)


def infinity_working_bytes(hidden: int) -> int:
    """Model state working memory: weights and gradients of the largest operator, hd × 4hd, 16·hd².

    Source: INF, §3, equation 4.
    """
    return 4 * hidden * 4 * hidden


def infinity_activation_working_bytes(shape: Shape, layers_per_checkpoint: int = 1) -> int:
    """Activation working memory: what is computed again between two checkpoints, b·s·ci·(16·hd + 2·heads·s).

    Source: INF, §3, equation 5.
    """
    tokens = shape.micro_batch * shape.sequence_length
    return layers_per_checkpoint * tokens * (16 * shape.hidden + 2 * shape.heads * shape.sequence_length)
