"""The schedule and the costs that the options of `dlojz pipeline` describe.

Layer 6. Invariant: numbers are read here, and judged by `Costs`.
"""

from __future__ import annotations

from typing import Any

from dlojz.cli.flags import number
from dlojz.pipeline.catalogue import build, entry
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.schedule import Schedule
from dlojz.schema import LabError
from dlojz.text import say

DEFAULT_SCHEDULE, DEFAULT_STAGES, DEFAULT_MICRO_BATCHES = "1f1b", 4, 8
MOST_UNITS = 200_000
"""Stages times micro-batches that are simulated here: some seconds."""
_TIMES = ("forward", "backward_input", "backward_weight")


def size_of(given: dict[str, Any]) -> tuple[int, int]:
    """Ranks and micro-batches."""
    stages, micro_batches = number(given, "stages", least=1), number(given, "micro_batches", least=1)
    size = (stages or DEFAULT_STAGES, micro_batches or DEFAULT_MICRO_BATCHES)
    chunks = number(given, "chunks", least=1) or 1
    if size[0] * size[1] * chunks > MOST_UNITS:
        raise LabError(
            say(
                en=f"{size[0]} stages with {size[1]} micro-batches are more than is simulated here: give at most "
                f"{MOST_UNITS} stages times micro-batches, such as 64 and 512.",
                fr=f"{size[0]} étages avec {size[1]} micro-batches dépassent ce qui est simulé ici : donnez au plus "
                f"{MOST_UNITS} étages fois micro-batches, par exemple 64 et 512.",
            )
        )
    return size


def schedule_of(given: dict[str, Any]) -> tuple[Schedule, Costs]:
    """The schedule that was asked for, and its costs.

    Raises:
        LabError: if there is no such schedule, or the costs do not fit it.
    """
    limit = number(given, "memory_limit", float)
    if "from_csv" in given:
        from dlojz.pipeline.torch_csv import load_csv
        from dlojz.pipeline.validity import check

        schedule = load_csv(given["from_csv"])
        costs = costs_of(given, schedule.stages)
        check(schedule, limit, costs)
        return schedule, costs
    name = given.get("schedule", DEFAULT_SCHEDULE)
    entry(name)
    chunks = number(given, "chunks", least=1)
    schedule = build(name, *size_of(given), chunks=chunks, memory_limit=limit, costs=times_of(given))
    costs = costs_of(given, schedule.stages)
    if given.get("stage_times"):  # some schedules search for their order, and then reckon with these times
        schedule = build(name, *size_of(given), chunks=chunks, memory_limit=limit, costs=costs)
    return schedule, costs


def times_of(given: dict[str, Any]) -> Costs:
    """Times of `--times`, `--latency` and `--sends`, the same for every stage.

    Raises:
        LabError: for anything but two or three numbers that are 0 or more, or another way to send.
    """
    values = numbers(given, "times") or [1.0, 1.0, 1.0]
    if len(values) not in (2, 3):
        raise LabError(
            say(
                en=f"--times takes F,I,W or F,B, but the number of values received is {len(values)}: write "
                "--times 1,1,1 or --times 1,2.",
                fr=f"--times prend F,I,W ou F,B, mais le nombre de valeurs reçues est {len(values)} : écrivez "
                "--times 1,1,1 ou --times 1,2.",
            )
        )
    if len(values) == 2:  # a whole backward, of which a split one would take half each
        values = [values[0], values[1] / 2, values[1] / 2]
    latency = number(given, "latency", float) or 0.0
    forward, for_input, for_weight = values
    return Costs(forward, for_input, for_weight, latency=latency, sends=given.get("sends", "buffered"))


def costs_of(given: dict[str, Any], stages: int) -> Costs:
    """The same, with the factors of `--stage-times` for each of the stages.

    Raises:
        LabError: as `times_of`, and if there are not as many factors as stages.
    """
    costs, factors = times_of(given), numbers(given, "stage_times")
    if not factors:
        return costs
    if len(factors) != stages:
        raise LabError(
            say(
                en=f"--stage-times holds {len(factors)} numbers, but the schedule has {stages} stages: give one "
                "number per stage.",
                fr=f"--stage-times contient {len(factors)} nombres, mais l’ordonnancement a {stages} étages : donnez "
                "un nombre par étage.",
            )
        )
    each = {name: tuple(getattr(costs, name) * factor for factor in factors) for name in _TIMES}
    return costs.with_(**each)


def numbers(given: dict[str, Any], name: str) -> list[float]:
    """The numbers of an option such as 1,2.5,1; empty if it was not given.

    Raises:
        LabError: if something between the commas is no number that is 0 or more.
    """
    words = [word for word in str(given.get(name, "")).replace(";", ",").split(",") if word.strip()]
    return [number({name: word.strip()}, name, float) for word in words]
