"""The schedule that a layout names, and where it cuts a model's blocks into pipeline stages.

Layer 2. Invariant: one rule for prediction and run; every stage has a block; the stages are contiguous and in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dlojz.layout import Layout
from dlojz.layout_pipeline import PATTERN, explicit_bounds
from dlojz.pipeline.catalogue import build
from dlojz.pipeline.partition import exact
from dlojz.pipeline.partition_peers import balanced_like_deepspeed, by_pattern
from dlojz.pipeline.partition_peers import uniform as uniform_like_deepspeed
from dlojz.pipeline.schedule import Schedule
from dlojz.schema import LabError
from dlojz.text import say


def schedule_of(layout: Layout) -> Schedule:
    """The schedule of a layout's pipeline ranks.

    Raises:
        LabError: if the schedule does not fit the number of ranks, micro-batches or chunks.
    """
    return build(layout.schedule or "1f1b", layout.pp, layout.micro_batches, chunks=layout.chunks)


def stage_bounds(
    layout: Layout, stages: int, names: Sequence[str], parameters: Sequence[int], flops: Sequence[float] = ()
) -> tuple[int, ...]:
    """Number of the first block of each stage, and the number of blocks at the end.

    Args:
        layout: its `partition` says how; its engine too, as DeepSpeed has rules of its own.
        stages: how many, over all chunks.
        names: class names of the blocks.
        parameters: theirs.
        flops: their FLOPs in a forward pass; needed for `partition="flops"` alone.

    Raises:
        LabError: if some stage would have no block, or no block's name matches.
    """
    blocks = len(names)
    if stages > blocks:
        raise LabError(
            say(
                en=f"pp={layout.pp} makes {stages} stages, which need a block each, but the model has {blocks}: use "
                f"{blocks} stages or less.",
                fr=f"pp={layout.pp} fait {stages} étages, qui demandent un bloc chacun, mais le modèle en a {blocks} : "
                f"prenez {blocks} étages au plus.",
            )
        )
    method, deepspeed = layout.partition, layout.engine == "deepspeed"
    given = explicit_bounds(method)
    if given is not None:
        return _explicit(given, stages, blocks)
    if method.startswith(PATTERN):
        bounds = by_pattern(names, method.removeprefix(PATTERN), stages).bounds
    elif method == "uniform":
        # Where blocks are left over, the last stages get them (DeepSpeed's first do): the first stages keep more
        # micro-batches in flight.
        bounds = (uniform_like_deepspeed(blocks, stages) if deepspeed else exact([1] * blocks, stages)).bounds
    else:
        weights = [float(one) for one in (flops if method == "flops" else parameters)]
        bounds = (balanced_like_deepspeed(weights, stages) if deepspeed else exact(weights, stages)).bounds
    return _with_blocks(tuple(bounds), layout)


def _explicit(given: tuple[int, ...], stages: int, blocks: int) -> tuple[int, ...]:
    if len(given) != stages - 1 or given[-1] >= blocks:
        raise LabError(
            say(
                en=f"partition at:{','.join(map(str, given))} was received, but {stages} stages of {blocks} blocks "
                f"need {stages - 1} increasing numbers below {blocks}.",
                fr=f"partition at:{','.join(map(str, given))} a été reçu, mais {stages} étages de {blocks} blocs "
                f"demandent {stages - 1} numéros croissants inférieurs à {blocks}.",
            )
        )
    return (0, *given, blocks)


def _with_blocks(bounds: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    for stage, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            raise LabError(
                say(
                    en=f"partition={layout.partition!r} leaves stage {stage} without a block: use partition='uniform' "
                    "or fewer stages.",
                    fr=f"partition={layout.partition!r} laisse l’étage {stage} sans bloc : prenez "
                    "partition='uniform' ou moins d’étages.",
                )
            )
    return bounds
