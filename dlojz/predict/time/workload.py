"""What a model computes, layer by layer, as operators with their shapes on one rank.

Layer 3. Invariant: a workload is a list of layer kinds in order; embedding and logits are layers of their own, because
a pipeline's first and last stages carry them. Shapes are those of one rank after tensor and context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from dlojz.evidence import DecoderSize
from dlojz.predict.time.decoder import embedding_operators, layer_operators, logit_operators, routed_rows
from dlojz.predict.time.operators import Operator
from dlojz.schema import LabError
from dlojz.text import say


class Cut(NamedTuple):
    """What of a layer one rank computes at a time.

    Attributes:
        micro_batch: samples.
        tp, cp: tensor- and context-parallel ranks.
        sequence_parallel: norms and dropouts split over the tensor-parallel ranks too.
        fused_attention: attention is one kernel that never writes the scores.
        gradient_bytes: of an element of the accumulated gradients, 2 or 4.
        fused_accumulation: the product of the weights' gradient adds to what is there, without a pass of its own.
        blocking: the host waits for each kernel (`CUDA_LAUNCH_BLOCKING=1`).
        eager: norms, rotations and gates are many kernels, in fp32.
        ep: ranks that share the experts of a mixture out.
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
        sums: all-reduces of such a tensor per forward and per backward, with tensor parallelism.
        recomputed: whether full checkpointing computes it again.
        expert_parameters: those of its parameters that expert parallelism shares out.
        exchange_elements: of the buffer of rows that one sample hands to each all-to-all of its experts.
    """

    name: str
    count: int
    parameters: int
    operators: Callable[[Cut], tuple[Operator, ...]]
    elements: int
    sums: tuple[int, int] = (2, 2)
    ring_elements: int = 0
    recomputed: bool = True
    expert_parameters: int = 0
    exchange_elements: float = 0.0

    def repeated(self) -> Kind:
        """The same with one more."""
        return replace(self, count=self.count + 1)


@dataclass(frozen=True)
class Workload:
    """A model as the cost model sees it.

    Attributes:
        name: of the model.
        kinds: in order; the first one's input is the sample.
        size: of the decoder; None for an image model.
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
        return sum(
            kind.count * product.flops for kind in self.kinds for one in kind.operators(cut) for product in one.forward
        )


@cache
def decoder_workload(size: DecoderSize) -> Workload:
    """The workload of a decoder: embedding, layers, logits.

    The matrix of the logits is a parameter of its own only if it is not tied; with a pipeline, the last stage holds a
    copy of a tied one (`dlojz.predict.time.memory` counts it).
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
                ring_elements=2 * size.sequence_length * size.kv_heads * size.head_size,
                expert_parameters=size.expert_parameters,
                exchange_elements=routed_rows(size) * elements if size.experts else 0.0,
            ),
            Kind("logits", 1, logits, lambda cut: logit_operators(size, cut), elements, (0, 1), recomputed=False),
        ),
        size,
    )


def workload(model: DecoderSize | str, image_size: int | None = None, sequence_length: int | None = None) -> Workload:
    """What a model computes.

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
        raise LabError(
            say(
                en=f"model must be a DecoderSize or a name of the catalogue, but {model!r} was received.",
                fr=f"model doit être un DecoderSize ou un nom du catalogue, mais {model!r} a été reçu.",
            )
        )
    from dlojz.predict.time.catalogue import catalogue_workload

    return catalogue_workload(model, image_size, sequence_length)
