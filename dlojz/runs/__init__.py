"""Runs: the folder of each, what state it is in, and the handle a student holds.

Layer 5. Invariant: the folders are the only truth; a listing is never hindered by one that is damaged.
"""

from __future__ import annotations

import difflib
import os
import sys
from typing import NamedTuple

from dlojz.runs.handle import Run
from dlojz.runs.store import run_folder, run_ids, runs_root
from dlojz.schema import LabError
from dlojz.text import say

__all__ = ["Run", "Survey", "find", "runs", "survey"]


class Survey(NamedTuple):
    """All runs of a root: those that can be read, newest first, and by name why the others cannot."""

    good: list[Run]
    bad: dict[str, str]


def survey(root: str | os.PathLike[str] | None = None) -> Survey:
    """Read every run folder; a damaged one is named with its reason and hinders no other.

    Raises:
        LabError: if the root itself cannot be read.
    """
    base = runs_root(root)
    good, bad = [], {}
    for run_id in run_ids(base):
        try:
            run = Run(run_folder(base, run_id))
            _ = run.state  # a damaged record is found, set aside and rebuilt here
            good.append(run)
        except (LabError, OSError) as error:
            bad[run_id] = str(error)
    return Survey(good, bad)


def runs(root: str | os.PathLike[str] | None = None) -> list[Run]:
    """All runs that can be read, newest first; the others are named on stderr.

    Raises:
        LabError: if the root itself cannot be read.
    """
    good, bad = survey(root)
    for run_id, reason in bad.items():
        print(f"{run_id} is left out: {reason}", file=sys.stderr)
    return good


def find(run_id: str, root: str | os.PathLike[str] | None = None) -> Run:
    """The run of this name, or whose name alone begins so.

    Raises:
        LabError: if there is none, or more than one; the nearest names are listed.
    """
    base = runs_root(root)
    names = run_ids(base)
    matching = [run_id] if run_id in names else [name for name in names if run_id and name.startswith(run_id)]
    if len(matching) == 1:
        return Run(run_folder(base, matching[0]))
    if matching:
        some = ", ".join(matching[:5])
        raise LabError(
            say(
                en=f"{run_id!r} begins the names of {len(matching)} runs: {some}; give more of it.",
                fr=f"{len(matching)} exécutions ont un nom qui commence par {run_id!r} : {some} ; donnez-en davantage.",
            )
        )
    close = difflib.get_close_matches(run_id, names, n=3, cutoff=0.3) or names[:3]
    near = ", ".join(close)
    if close:
        raise LabError(
            say(
                en=f"no run is named {run_id[:100]!r}: the nearest are {near}.",
                fr=f"aucune exécution ne s’appelle {run_id[:100]!r} : les plus proches sont {near}.",
            )
        )
    raise LabError(
        say(
            en=f"no run is named {run_id[:100]!r}: there is no run in {base} yet.",
            fr=f"aucune exécution ne s’appelle {run_id[:100]!r} : il n’y a encore aucune exécution dans {base}.",
        )
    )
