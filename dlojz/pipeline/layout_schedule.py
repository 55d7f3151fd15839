"""Give a layout its pipeline: the schedule of its ranks, and the blocks of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from dlojz.base.language import refusal
from dlojz.config.fields import PATTERN, explicit_bounds
from dlojz.config.layout import Layout
from dlojz.pipeline.partition import balanced_like_deepspeed, exact, pattern_weights, uniform
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.schedule_catalogue import build


def schedule_of(layout: Layout) -> Schedule:
    """Build the schedule of a layout's pipeline ranks.

    Raises:
        LabError: if the schedule does not fit the number of ranks, micro-batches or chunks.
    """
    return _built(layout.schedule or "1f1b", layout.pp, layout.micro_batches, layout.chunks)


@lru_cache(maxsize=8)
def _built(name: str, ranks: int, micro_batches: int, chunks: int | None) -> Schedule:
    """Cache: all ranks of a layout ask for the same schedule."""
    return build(name, ranks, micro_batches, chunks=chunks)


def stage_bounds(
    layout: Layout, stages: int, names: Sequence[str], parameters: Sequence[int], flops: Sequence[float] = ()
) -> tuple[int, ...]:
    """Cut a model into the stages of a layout; a bound is a stage's first block, the last one the number of blocks.

    Args:
        layout: its `partition` names the method; its engine counts too, as DeepSpeed has its own rules.
        stages: how many, over all chunks.
        names: class names of the blocks.
        parameters: their numbers of parameters.
        flops: their FLOPs in a forward pass; needed for `partition="flops"` alone.

    Raises:
        LabError: if some stage would have no block, or no block's name matches.
    """
    blocks = len(names)
    if stages > blocks:
        raise refusal(
            en=f"pp={layout.pp} makes {stages} stages, which need a block each, but the model has {blocks}: use "
            f"{blocks} stages or less.",
            fr=f"pp={layout.pp} fait {stages} étages, qui demandent un bloc chacun, mais le modèle en a {blocks} : "
            f"prenez {blocks} étages au plus.",
        )
    method, deepspeed = layout.partition, layout.engine == "deepspeed"
    given = explicit_bounds(method)
    if given is not None:
        if len(given) != stages - 1 or given[-1] >= blocks:
            raise refusal(
                en=f"partition at:{','.join(map(str, given))} was received, but {stages} stages of {blocks} blocks "
                f"need {stages - 1} increasing numbers below {blocks}.",
                fr=f"partition at:{','.join(map(str, given))} a été reçu, mais {stages} étages de {blocks} blocs "
                f"demandent {stages - 1} numéros croissants inférieurs à {blocks}.",
            )
        return (0, *given, blocks)
    if method.startswith(PATTERN):
        # As DeepSpeed's `PipelineModule._partition_layers`: equal numbers of matching blocks.
        bounds = balanced_like_deepspeed(pattern_weights(names, method.removeprefix(PATTERN)), stages).bounds
    elif method == "uniform":
        # Left-over blocks go to the last stages (DeepSpeed's: the first), as the first keep more micro-batches in
        # flight.
        bounds = (uniform(blocks, stages) if deepspeed else exact([1] * blocks, stages)).bounds
    else:
        weights = [float(one) for one in (flops if method == "flops" else parameters)]
        bounds = (balanced_like_deepspeed(weights, stages) if deepspeed else exact(weights, stages)).bounds
    for stage, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            raise refusal(
                en=f"partition={layout.partition!r} leaves stage {stage} without a block: use partition='uniform' "
                "or fewer stages.",
                fr=f"partition={layout.partition!r} laisse l’étage {stage} sans bloc : prenez "
                "partition='uniform' ou moins d’étages.",
            )
    return bounds
