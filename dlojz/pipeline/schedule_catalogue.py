"""Catalogue of the schedules: title, source, limits and options of each, and `build` by name.

The entries are those of `data/schedules.toml`. The function that an entry names is loaded when the schedule is built.
An option that would change nothing is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, say
from dlojz.config.layout import Layout
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS
from dlojz.pipeline.validity import check

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Family = Literal["synchronous", "asynchronous"]


@dataclass(frozen=True)
class ScheduleEntry:
    """Entry of the catalogue of schedules.

    Attributes:
        name: key in the catalogue.
        function: function of `dlojz.pipeline.orders` that writes it, as "module.function".
        family: whether the optimizer waits for the whole batch, or stages update while micro-batches are in flight.
        chunks: default stages of a rank.
        options: parameters of the function besides ranks and micro-batches.
        even_ranks: whether an odd number of ranks is refused.
        torch_class: class of `torch.distributed.pipelining` that runs it; None where torch has none.
    """

    name: str
    title: Callable[[], str]
    source: str
    limits: Callable[[], str]
    function: str
    family: Family = "synchronous"
    chunks: int = 1
    options: tuple[str, ...] = ()
    even_ranks: bool = False
    torch_class: str | None = None


def _entry(row: dict[str, Any]) -> ScheduleEntry:
    """Read an entry; its sentences are made when they are asked for, in the language of that moment."""
    sentences = {name: partial(say, **row[name]) for name in ("title", "limits")}
    return ScheduleEntry(**row | sentences | {"options": tuple(row.get("options", ()))})


_FILE = Path(__file__).parent / "data" / "schedules.toml"
ENTRIES = tuple(_entry(row) for row in tomllib.loads(_FILE.read_text(encoding="utf-8"))["schedule"])
SCHEDULES: dict[str, ScheduleEntry] = {schedule_entry.name: schedule_entry for schedule_entry in ENTRIES}

ALIASES: dict[str, str] = {
    "dapple": "1f1b",
    "pipedream-flush": "1f1b",
    "deepspeed": "1f1b",
    "interleaved-1f1b": "interleaved",
    "bfs": "looped-bfs",
    "breadth-first": "looped-bfs",
    "interleaved-zero-bubble": "interleaved-zb",
    "zb-v-zero-bubble": "zb-v",
    "2bw": "pipedream-2bw",
}
"""Other names in use; case, hyphens, underscores and spaces do not matter."""

TOKEN_SLICES = 4
"""Default slices of a sequence."""

_LIMITS = {"zb-1p": 1, "zb-2p": 2}
"""Micro-batches per rank that the automatic zero-bubble schedules may keep."""


def entry(name: str) -> ScheduleEntry:
    """Look up the entry of a schedule, by its name or an alias.

    Raises:
        LabError: if there is none; the message lists all names.
    """
    names = {_plain(key): key for key in SCHEDULES} | {_plain(alias): key for alias, key in ALIASES.items()}
    key = names.get(_plain(str(name)))
    if key is None:
        raise LabError(one_of("schedule", name, SCHEDULES))
    return SCHEDULES[key]


def build(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    token_slices: int | None = None,
    memory_limit: float | None = None,
    waves: int | None = None,
    costs: Costs | None = None,
    **extra_options: object,
) -> Schedule:
    """Build the schedule of that name.

    Args:
        name: a name of `SCHEDULES`, or an alias.
        micro_batches: micro-batches of a step, over all pipes.
        chunks: stages per rank, where the schedule leaves the choice.
        token_slices: slices of each sequence (TeraPipe); 4 by default.
        memory_limit: activations that a rank may keep, in stage-micro-batches; ZB-1p and ZB-2p plan under it (by
            default p and 2p micro-batches), any other schedule is refused if it keeps more.
        waves: Hanayo's waves, two chunks each.
        costs: used by schedules that search for an order (ZB-1p, ZB-2p, Hanayo, AMPNet), and to count memory; F = I
            = W = 1 by default.
        **extra_options: of single schedules (`ScheduleEntry.options`): lifo, group, stashing, batch, in_flight,
            update_every.

    Raises:
        LabError: for an unknown name, an option that the schedule has not, or numbers that do not fit it.
    """
    schedule = entry(name)
    all_options = {"waves": waves, "token_slices": token_slices, **extra_options}
    # None: not given, the schedule has its own default.
    options = {key: value for key, value in all_options.items() if value is not None}
    if chunks is not None:
        options |= _chunks(schedule, chunks, options)
    for option in options:
        if option not in schedule.options:
            raise LabError(_not_an_option(schedule, option))
    reckoned = costs or UNIT_COSTS
    if "costs" in schedule.options:
        options["costs"] = reckoned
    if "token_slices" in schedule.options:
        options.setdefault("token_slices", TOKEN_SLICES)
    planned = "memory_limit" in schedule.options
    if planned:
        units = reckoned.kept_for_input
        # Of unequal stages the largest, so that as many micro-batches fit everywhere.
        default_limit = _LIMITS[schedule.name] * ranks * (max(units) if isinstance(units, tuple) else units)
        options["memory_limit"] = default_limit if memory_limit is None else memory_limit
    module, function = schedule.function.split(".")
    built: Schedule = getattr(import_module(f"dlojz.pipeline.orders.{module}"), function)(
        ranks, micro_batches, **options
    )
    if not built.name.startswith(schedule.name):  # pipedream-vertical says which weights it uses
        built = replace(built, name=schedule.name)
    # `zb-1p` and `zb-2p` have planned under it.
    if memory_limit is not None and not planned:
        check(built, memory_limit, reckoned)
    return built


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_ ")


def _chunks(schedule: ScheduleEntry, chunks: int, options: dict[str, object]) -> dict[str, object]:
    """Translate the number of chunks into an option; none, where the schedule has no other number."""
    if "chunks" in schedule.options:
        return {"chunks": chunks}
    if "waves" in schedule.options:
        # Waves that are given as well must agree.
        if chunks >= 2 and chunks % 2 == 0 and options.get("waves", chunks // 2) == chunks // 2:
            return {"waves": chunks // 2}
        raise phrase.refused("two chunks per wave", schedule=schedule, chunks=chunks)
    if chunks == schedule.chunks:
        return {}
    free = ", ".join(schedule_entry.name for schedule_entry in ENTRIES if "chunks" in schedule_entry.options)
    raise phrase.refused("other number of chunks", schedule=schedule, chunks=chunks, free=free)


def _not_an_option(schedule: ScheduleEntry, option: str) -> str:
    takers = ", ".join(schedule_entry.name for schedule_entry in ENTRIES if option in schedule_entry.options)
    if not takers:
        return one_of("option", option, sorted({key for schedule_entry in ENTRIES for key in schedule_entry.options}))
    return phrase("no such option", schedule=schedule, option=option, takers=takers)


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
