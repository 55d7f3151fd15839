"""`dlojz runs`, `logs` and `cancel`: what has been run.

Layer 6. Invariant: one damaged run never hides the others; it is named on stderr.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from dlojz import cli
from dlojz.cli.answer import answering, show, tell
from dlojz.cli.flags import Flag, json_flag, number, parse, root_flag
from dlojz.runs import Run, find, survey
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_seconds
from dlojz.viz.grid import DASH, status_label
from dlojz.viz.markup import visible


def runs_command(words: list[str]) -> int:
    """List the runs."""
    given = parse(
        "runs",
        say(
            en="""List the runs, newest first: id, title, state, steps, last loss, age.

Examples:
  dlojz runs
  dlojz runs --json""",
            fr="""Lister les exécutions, la plus récente d'abord : nom, titre, état, pas, dernière perte, âge.

Exemples :
  dlojz runs
  dlojz runs --json""",
        ),
        [root_flag(), json_flag()],
        words,
    )
    with answering(given.get("json", False)) as answer:
        found = [_summary(run) for run in readable(given)]
        if given.get("json"):
            answer(found)
        elif not found:
            answer(
                say(
                    en="there is no run yet: start one with `dlojz run --dp 2`.",
                    fr="il n'y a pas encore d'exécution : commencez par `dlojz run --dp 2`.",
                )
            )
        else:
            answer(_table(found))
    return cli.DONE


def logs_command(words: list[str]) -> int:
    """Print the logs of a run."""
    given = parse(
        "logs",
        say(
            en="""Show the end of what the launcher and every rank of a run printed; of a run that went wrong,
first the cause, the first error of each rank, and what to do.

The beginning of a name is enough, where only one run begins so.

Examples:
  dlojz logs 20250101-120000
  dlojz logs 20250101-120000 --rank 1""",
            fr="""Montrer la fin de ce que le lanceur et chaque rang d'une exécution ont affiché ;
si elle a échoué, d’abord la cause, la première erreur de chaque rang, et que faire.

Le début du nom suffit, si une seule exécution commence ainsi.

Exemples :
  dlojz logs 20250101-120000
  dlojz logs 20250101-120000 --rank 1""",
        ),
        [run_words(), Flag("rank", say(en="one rank only", fr="un seul rang"), metavar="INT"), root_flag()],
        words,
    )
    run = _the_run("logs", given)
    rank = number(given, "rank")
    printed = run.logs(rank)
    if rank is None and run.state not in ("completed", "running", "queued"):
        show(repr(run.diagnosis()))
        show("")
    show(printed)
    return cli.DONE


def cancel_command(words: list[str]) -> int:
    """Ask a run to stop."""
    given = parse(
        "cancel",
        say(
            en="""Ask a run to stop; what it measured is kept. A job leaves the queue; a run that has ended stays.

Examples:
  dlojz cancel 20250101-120000
  dlojz cancel 20250101-120000-0123456789ab-cdef""",
            fr="""Demander l'arrêt d'une exécution ; ses mesures sont gardées. Un travail quitte la file d’attente.

Exemples :
  dlojz cancel 20250101-120000
  dlojz cancel 20250101-120000-0123456789ab-cdef""",
        ),
        [run_words(), root_flag()],
        words,
    )
    show(_the_run("cancel", given).cancel())
    return cli.DONE


def run_words(metavar: str = "RUN") -> Flag:
    """The flag that takes names of runs."""
    return Flag(
        "words",
        say(
            en="name of a run, or its beginning (see `dlojz runs`)",
            fr="nom d'une exécution, ou son début (voir `dlojz runs`)",
        ),
        metavar=metavar,
        kind="words",
    )


def _the_run(command: str, given: dict[str, Any]) -> Run:
    names = given.get("words", ())
    if len(names) != 1:
        raise LabError(
            f"`dlojz {command}` takes the name of one run, but {len(names)} were received: `dlojz runs` lists them."
        )
    return find(names[0], given.get("root"))


def readable(given: dict[str, Any]) -> list[Run]:
    """The runs that can be read, newest first; the others are named on stderr."""
    found = survey(given.get("root"))
    for run_id, reason in found.bad.items():
        tell(say(en=f"{run_id} is left out: {reason}", fr=f"{run_id} est laissée de côté : {reason}"))
    return found.good


def _summary(run: Run) -> dict[str, Any]:
    losses = run.losses
    return {
        "run_id": run.run_id,
        "title": run.title,
        "state": run.state,
        "steps": len(losses),
        "asked_steps": run.config.steps,
        "last_loss": losses[-1] if losses else None,
        "age_s": _age_s(run.run_id),
    }


def _age_s(run_id: str) -> float | None:
    """Seconds since the time that the name of a run begins with."""
    try:
        born = datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return max(0.0, round((datetime.now(UTC) - born).total_seconds(), 1))


def _table(found: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in (
        say(en="run", fr="exécution"),
        say(en="title", fr="titre"),
        say(en="state", fr="état"),
        say(en="steps", fr="pas"),
        say(en="last loss", fr="perte"),
        say(en="age", fr="âge"),
    ):
        table.add_column(title, overflow="fold", no_wrap=not table.columns)  # a name is copied whole
    for run in found:
        loss = DASH if run["last_loss"] is None else f"{run['last_loss']:.4f}"
        cells = (
            run["run_id"],
            run["title"],
            status_label(run["state"]),
            f"{run['steps']}/{run['asked_steps']}",
            loss,
            _age(run["age_s"]),
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def _age(age_s: float | None) -> str:
    if age_s is None or age_s < 7200:
        return format_seconds(age_s)
    return (
        f"{age_s / 3600:.0f} h"
        if age_s < 172_800
        else say(en=f"{age_s / 86_400:.0f} days", fr=f"{age_s / 86_400:.0f} jours")
    )
