"""What one block sends to the ranks that share it, region by region: one line per message, with its shape.

Layer 3. Invariant: one line per message, with its shape; equal, byte for byte, to what the probe counts while
`dlojz.tensor` trains, or torch's `parallelize_module`, whose regions are the same. A region is what lies between
`enter` and `leave` (see `dlojz.tensor.operators`):

                               forward                         backward
    enter                      -                               all-reduce (what entered)
    leave                      all-reduce (what leaves)        -
    with sequence parallelism:
    enter                      all-gather (what entered)       reduce-scatter (its gradient)
    leave                      reduce-scatter (what leaves)    all-gather (its gradient)

A transformer block has two regions: per micro-batch 4 all-reduces of B·T·D in all, or 4 pairs of the other two, which
send as much. What leaves is a product, and has its type; what enters is normalised, and has the stream's (on the CPU:
CUDA's autocast normalises in fp32, so that CoAtNet's attention then enters fp32).

Shape suffixes: B batch, T tokens, D width, C channels, H and W of the feature map, Q squeezed channels, K classes.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3; Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Literal, NamedTuple

from dlojz.footprint import Collective
from dlojz.predict.states import FP32_BYTES

OF_WEIGHTS = "gradient of a whole"
"""How the messages begin that belong to a parameter, not to a region."""


class Message(NamedTuple):
    """One message of a block, for one micro-batch.

    Args:
        what: the part it belongs to, e.g. `attention: leave`.
        phase: the pass that sends it.
        collective: which one; each rank of the axis calls it.
        message_bytes: of the whole tensor that is reduced or gathered.
        again: whether a block that is computed again sends it again.
    """

    what: str
    phase: Literal["forward", "backward"]
    collective: Collective
    message_bytes: int
    again: bool = False


class Sizes(NamedTuple):
    """Of one block: (B, T, D) or (B, C, H, W) that enters and leaves, tokens of all ranks; bytes of their elements."""

    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    sequence_parallel: bool
    stream_bytes: int
    product_bytes: int
    weight_bytes: int
    by_torch: bool

    def region(self, what: str, entered: int, left: int, *, ends_block: bool = False) -> Iterator[Message]:
        """The two ends of a region, of so many elements.

        torch stops computing a block again as soon as it has all that backward needs: within its last product, so that
        the sum that ends the block is not repeated.
        """
        entered_bytes, left_bytes = entered * self.stream_bytes, left * self.product_bytes
        if not self.sequence_parallel:
            yield Message(f"{what}: leave", "forward", "all_reduce", left_bytes, again=not ends_block)
            yield Message(f"{what}: enter", "backward", "all_reduce", entered_bytes)
            return
        yield Message(f"{what}: enter", "forward", "all_gather", entered_bytes, again=True)
        yield Message(f"{what}: leave", "forward", "reduce_scatter", left_bytes, again=not ends_block)
        yield Message(f"{what}: leave", "backward", "all_gather", left_bytes)
        yield Message(f"{what}: enter", "backward", "reduce_scatter", entered_bytes)

    def whole_on_each(self, *modules: Any) -> Iterator[Message]:
        """Norms and biases that all ranks have whole: where each sees its own tokens only, the gradients are summed."""
        from dlojz.tensor.linear import RowParallelLinear

        if not self.sequence_parallel:
            return
        for module in modules:
            if self.by_torch and isinstance(module, RowParallelLinear):
                continue  # torch adds this bias before the tokens are shared out: its gradient is whole already
            kinds = ("bias",) if isinstance(module, RowParallelLinear) else ("weight", "bias")
            for kind in kinds:
                parameter = getattr(module, kind, None)
                if parameter is not None:
                    num_bytes = parameter.numel() * self.weight_bytes
                    yield Message(f"{OF_WEIGHTS} {kind}", "backward", "all_reduce", num_bytes)


def _transformer(block: Any, sizes: Sizes) -> Iterator[Message]:
    """Attention, then MLP: each enters and leaves (B, T, D)."""
    numel = prod(sizes.entering)
    attention, mlp = block.heads_axis.size > 1, block.mlp_axis.size > 1
    if attention:
        yield from sizes.region("attention", numel, numel)
    if mlp:
        yield from sizes.region("mlp", numel, numel, ends_block=True)
    yield from sizes.whole_on_each(block.norm1, block.attention_project, block.norm2, block.mlp_project)


def _coatnet_attention(block: Any, sizes: Sizes) -> Iterator[Message]:
    """What is pooled enters with the former width; all else has the block's own."""
    batch, _, height, width = sizes.leaving
    numel = prod(sizes.leaving)
    if block.attention.axis.size > 1:
        entered = batch * height * width * block.attention.qkv.weight.shape[1]
        yield from sizes.region("attention", entered, numel)
    if block.mlp_axis.size > 1:
        yield from sizes.region("mlp", numel, numel, ends_block=True)


def _convolution(block: Any, sizes: Sizes) -> Iterator[Message]:
    """MBConv: all channels enter (B, C, H, W), squeeze-and-excitation is a region turned round: (B, Q) twice."""
    squeezed_bytes = sizes.leaving[0] * block.squeeze_excitation.squeeze.weight.shape[0] * sizes.product_bytes
    yield Message("squeeze: leave", "forward", "all_reduce", squeezed_bytes, again=True)
    yield Message("excite: enter", "backward", "all_reduce", squeezed_bytes)
    yield from sizes.region("convolution", prod(sizes.entering), prod(sizes.leaving), ends_block=True)


def _stem(block: Any, sizes: Sizes) -> Iterator[Message]:
    """Images need no gradient: its region has an end only."""
    yield Message("stem: leave", "forward", "all_reduce", prod(sizes.leaving) * sizes.product_bytes)


def _coatnet_head(block: Any, sizes: Sizes) -> Iterator[Message]:
    """(B, D) enters, all logits (B, K) leave."""
    yield from sizes.region("head", sizes.entering[0] * sizes.entering[1], prod(sizes.leaving), ends_block=True)


def _embedding(block: Any, sizes: Sizes) -> Iterator[Message]:
    """The tokens' vectors (B, T, D), of which each rank knows some; tokens need no gradient."""
    num_bytes = prod(sizes.leaving) * sizes.weight_bytes
    again = sizes.by_torch and hasattr(block, "position")  # torch looks positions up last, and so repeats the sum
    if not sizes.sequence_parallel:
        yield Message("embedding: leave", "forward", "all_reduce", num_bytes, again)
        return
    yield Message("embedding: leave", "forward", "reduce_scatter", num_bytes, again)
    yield Message("embedding: leave", "backward", "all_gather", num_bytes)
    if hasattr(block, "position"):  # each rank has gone on with its own tokens' rows of a table that all have
        table_bytes = prod(sizes.leaving[1:]) * sizes.weight_bytes
        yield Message("positions: own part", "backward", "all_gather", table_bytes)


def _text_head(block: Any, sizes: Sizes) -> Iterator[Message]:
    """(B, T, D) enters; the logits stay where they are, and the loss sends three numbers per token, in fp32."""
    enter = [one for one in sizes.region("head", prod(sizes.entering), 0) if one.message_bytes]
    yield from enter
    yield from sizes.whole_on_each(block.norm)
    tokens = prod(sizes.entering[:2])
    yield Message("loss: largest logit", "forward", "all_reduce", FP32_BYTES * tokens)
    yield Message("loss: sum of exponentials, target", "forward", "all_reduce", 2 * FP32_BYTES * tokens)


BLOCKS: dict[str, Callable[[Any, Sizes], Iterator[Message]]] = {
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
"""By the name of the block's class; a block of another is whole, and sends nothing."""
