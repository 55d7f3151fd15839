"""From what every rank has told of its experts to the loads of the whole run. Pure.

Layer 5. Invariant: a load is the sum over all ranks that tell any; a step of which one of them tells nothing is left
out, as is what is damaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dlojz.record import ExpertLoad
from dlojz.schema import LabError

Event = Mapping[str, Any]


def loads_of(events: Mapping[int, Sequence[Event]]) -> tuple[ExpertLoad, ...]:
    """The loads step by step, and within a step mixture by mixture in the order of the model.

    Args:
        events: by rank, in the order written; a step that was done twice, before and after a checkpoint, is as it was
            done last.
    """
    told: dict[tuple[int, str], dict[int, ExpertLoad]] = defaultdict(dict)
    for rank, events_of_rank in sorted(events.items()):
        for event in events_of_rank:
            for load in _loads(event) if event["event"] == "experts" else ():
                told[load.step, load.layer][rank] = load
    ranks = {rank for of_rank in told.values() for rank in of_rank}
    whole = [_sum(list(of_rank.values())) for of_rank in told.values() if set(of_rank) == ranks]
    return tuple(sorted((load for load in whole if load is not None), key=lambda load: load.step))


def _loads(event: Event) -> list[ExpertLoad]:
    layers = event.get("layers")
    found = []
    for layer in layers if isinstance(layers, list) else ():
        try:
            found.append(ExpertLoad.from_dict({"step": event.get("step"), **layer}))
        except (LabError, TypeError):
            continue
    return found


def _sum(loads: list[ExpertLoad]) -> ExpertLoad | None:
    """Of one mixture in one step, over the ranks; None where they do not tell of the same experts."""
    first = loads[0]
    if len({len(load.tokens) for load in loads}) > 1:
        return None
    return ExpertLoad(
        step=first.step,
        layer=first.layer,
        tokens=tuple(sum(of_expert) for of_expert in zip(*(load.tokens for load in loads), strict=True)),
        capacity=sum(load.capacity for load in loads),
        dropped=sum(load.dropped for load in loads) / len(loads),
    )
