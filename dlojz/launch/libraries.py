"""The same training with each library, one after the other and round after round, on real processes.

Layer 5. Invariant: within a round the libraries follow each other, so that what slows the machine down meets all of
them; a library that is not installed, or whose program has no such layout, stops none of the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dlojz.config import RunConfig
from dlojz.launch import run
from dlojz.libraries import LIBRARIES, library, require
from dlojz.libraries.side_by_side import LibraryRow, rows
from dlojz.library_misfit import or_none, stage_misfit
from dlojz.record import RunRecord
from dlojz.schema import LabError
from dlojz.text import say

Told = Callable[[str, int], object]
"""Is called with the name of the library, and the number of the round, before each run."""


def configurations(names: Sequence[str] | None = None, **fields: Any) -> tuple[dict[str, RunConfig], dict[str, str]]:
    """What each library is asked for, and why those that are not asked cannot be.

    Args:
        names: libraries of the catalogue; by default all.
        **fields: of `RunConfig` and `Layout`, given flat, but for the library.

    Raises:
        LabError: if a field is illegal whatever the library, or a name is unknown.
    """
    asked: dict[str, RunConfig] = {}
    refused: dict[str, str] = {}
    RunConfig.of(**{name: value for name, value in fields.items() if name not in ("engine", "zero")})
    for name in names or tuple(LIBRARIES):
        library(name)
        try:
            require(name)
            if (misfit := stage_misfit(name, fields.get("zero"))) is not None:
                raise LabError(misfit)
            asked[name] = RunConfig.of(**{**fields, "library": name})
        except LabError as error:
            refused[name] = str(error).removesuffix(or_none()) + "." * str(error).endswith(or_none())
    if not asked:
        raise LabError(next(iter(refused.values())))
    return asked, refused


def run_libraries(
    names: Sequence[str] | None = None,
    *,
    rounds: int = 1,
    again: bool = False,
    root: str | os.PathLike[str] | None = None,
    on_run: Told = lambda name, number: None,
    **fields: Any,
) -> list[LibraryRow]:
    """Run the same training with every library that is there; returns them side by side.

    Args:
        names: libraries of the catalogue; by default all.
        rounds: how often, at least 1; the ratios of step times are taken within a round.
        again: make new runs in the first round too; the later rounds are new in any case.
        root: folder of the runs.
        on_run: told before each run.
        **fields: of `RunConfig` and `Layout`, given flat, but for the library.

    Raises:
        LabError: if a field is illegal, a name is unknown, or no library can be asked.

    Example:
        `run_libraries(model="gpt_tiny", dp=2, steps=20)`
    """
    if rounds < 1:
        raise LabError(
            say(
                en=f"rounds={rounds} was received, but at least 1 is needed.",
                fr=f"rounds={rounds} a été reçu, mais il en faut au moins 1.",
            )
        )
    asked, refused = configurations(names, **fields)
    records: dict[str, list[RunRecord | None]] = {name: [] for name in asked}
    for number, name in _turns(asked, rounds):
        on_run(name, number)
        made = run(asked[name], on="local", again=again or number > 0, root=root, progress=False)
        records[name].append(made.record)
    return rows(records, names=names, refused=refused)


def _turns(asked: Mapping[str, RunConfig], rounds: int) -> Iterator[tuple[int, str]]:
    return ((number, name) for number in range(rounds) for name in asked)
