"""The schedules by name: what each is (`SCHEDULES`) and how it is built (`build`).

Layer 2. Invariant: whoever names a schedule gets it from `build`, which knows every name, its aliases and the options
that it takes; an option that would change nothing is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from dlojz.pipeline.costs import Costs
from dlojz.pipeline.orders.entries import ENTRIES, Entry
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import UNIT_COSTS
from dlojz.pipeline.validity import check
from dlojz.schema import LabError, one_of
from dlojz.text import say

__all__ = ["ALIASES", "SCHEDULES", "Entry", "build", "entry"]

SCHEDULES: dict[str, Entry] = {one.name: one for one in ENTRIES}

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
"""Other names in use, torch's among them; case, hyphens, underscores and spaces do not matter."""

TOKEN_SLICES = 4
"""Slices of a sequence where nobody asks for another number."""

_LIMITS = {"zb-1p": 1, "zb-2p": 2}
"""Micro-batches per rank that the automatic zero-bubble schedules may keep."""


def entry(name: str) -> Entry:
    """The entry of a schedule, by its name or an alias.

    Raises:
        LabError: if there is none; the message lists all names.
    """
    names = {_plain(known): known for known in SCHEDULES} | {_plain(other): known for other, known in ALIASES.items()}
    known = names.get(_plain(str(name)))
    if known is None:
        raise LabError(one_of("schedule", name, SCHEDULES))
    return SCHEDULES[known]


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
    **more: object,
) -> Schedule:
    """The schedule of that name.

    Args:
        name: a name of `SCHEDULES`, or an alias.
        ranks: number of ranks.
        micro_batches: micro-batches of a step, over all pipes.
        chunks: stages per rank, where the schedule leaves the choice.
        token_slices: slices of each sequence (TeraPipe); 4 by default.
        memory_limit: activations that a rank may keep, in stage-micro-batches; ZB-1p and ZB-2p plan under it (by
            default p and 2p micro-batches), any other schedule is refused if it keeps more.
        waves: Hanayo's waves, two chunks each.
        costs: what the schedules that search for an order (ZB-1p, ZB-2p, Hanayo, AMPNet) reckon with, and
            what memory is counted by; F = I = W = 1 by default.
        **more: options of single schedules (`Entry.options`): lifo, group, stashing, batch, in_flight, update_every.

    Raises:
        LabError: for an unknown name, an option that the schedule has not, or numbers that do not fit it.
    """
    schedule = entry(name)
    given = {"waves": waves, "token_slices": token_slices, **more}
    options = {key: value for key, value in given.items() if value is not None}
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
        options["memory_limit"] = _limit(schedule, ranks, reckoned) if memory_limit is None else memory_limit
    built = _function(schedule)(ranks, micro_batches, **options)
    if not built.name.startswith(schedule.name):  # pipedream-vertical says which weights it uses
        built = replace(built, name=schedule.name)
    if memory_limit is not None and not planned:
        check(built, memory_limit, reckoned)
    return built


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_ ")


def _function(schedule: Entry) -> Callable[..., Schedule]:
    module, function = schedule.function.split(".")
    found: Callable[..., Schedule] = getattr(import_module(f"dlojz.pipeline.orders.{module}"), function)
    return found


def _limit(schedule: Entry, ranks: int, costs: Costs) -> float:
    kept = costs.kept_for_input
    return _LIMITS[schedule.name] * ranks * (max(kept) if isinstance(kept, tuple) else kept)


def _chunks(schedule: Entry, chunks: int, options: dict[str, object]) -> dict[str, object]:
    """The option that says how many chunks are wanted: none, where the schedule has no other number."""
    if "chunks" in schedule.options:
        return {"chunks": chunks}
    if "waves" in schedule.options:
        if chunks >= 2 and chunks % 2 == 0 and options.get("waves", chunks // 2) == chunks // 2:
            return {"waves": chunks // 2}
        raise LabError(
            say(
                en=f"{schedule.name} has 2 chunks per wave, but chunks={chunks} was received: give waves instead.",
                fr=f"{schedule.name} a 2 étages par vague, mais chunks={chunks} a été reçu : donnez plutôt waves.",
            )
        )
    if chunks == schedule.chunks:
        return {}
    free = ", ".join(one.name for one in ENTRIES if "chunks" in one.options)
    raise LabError(
        say(
            en=f"{schedule.name} has {schedule.chunks} stage(s) per rank, but chunks={chunks} was received: leave "
            f"chunks out, or take a schedule that has the choice ({free}).",
            fr=f"{schedule.name} a {schedule.chunks} étage(s) par rang, mais chunks={chunks} a été reçu : omettez "
            f"chunks, ou prenez un ordonnancement qui laisse le choix ({free}).",
        )
    )


def _not_an_option(schedule: Entry, option: str) -> str:
    takers = ", ".join(one.name for one in ENTRIES if option in one.options)
    if not takers:
        return one_of("option", option, sorted({each for one in ENTRIES for each in one.options}))
    return say(
        en=f"{schedule.name} has no option {option}: leave it out, or take a schedule that has it ({takers}).",
        fr=f"{schedule.name} n’a pas d’option {option} : omettez-la, ou prenez un ordonnancement qui l’a ({takers}).",
    )
