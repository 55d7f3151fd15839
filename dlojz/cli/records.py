"""`dlojz runs`, `logs`, `cancel` and `compare`: what has been run.

Layer 6. Invariant: one damaged run never hides the others; it is named on stderr.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

MOST_COMPARED = 12


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
        found = [_summary(run) for run in _readable(given)]
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
            en="""Show the end of what the launcher and every rank of a run printed.

The beginning of a name is enough, where only one run begins so.

Examples:
  dlojz logs 20250101-120000
  dlojz logs 20250101-120000 --rank 1""",
            fr="""Montrer la fin de ce que le lanceur et chaque rang d'une exécution ont affiché.

Le début du nom suffit, si une seule exécution commence ainsi.

Exemples :
  dlojz logs 20250101-120000
  dlojz logs 20250101-120000 --rank 1""",
        ),
        [_run_words(), Flag("rank", say(en="one rank only", fr="un seul rang"), metavar="INT"), root_flag()],
        words,
    )
    show(_the_run("logs", given).logs(number(given, "rank")))
    return cli.DONE


def cancel_command(words: list[str]) -> int:
    """Ask a run to stop."""
    given = parse(
        "cancel",
        say(
            en="""Ask a run to stop at its next step; what it measured is kept. A run that has ended stays as it is.

Examples:
  dlojz cancel 20250101-120000
  dlojz cancel 20250101-120000-0123456789ab-cdef""",
            fr="""Demander l'arrêt d'une exécution dès son prochain pas ; ses mesures sont gardées.

Exemples :
  dlojz cancel 20250101-120000
  dlojz cancel 20250101-120000-0123456789ab-cdef""",
        ),
        [_run_words(), root_flag()],
        words,
    )
    show(_the_run("cancel", given).cancel())
    return cli.DONE


def compare_command(words: list[str]) -> int:
    """Lay measurements over predictions."""
    given = parse(
        "compare",
        say(
            en="""Lay the measurements of runs over their predictions: losses, throughput, memory, communication.

Without names: the newest run of each layout, of the same training as the newest run of all. A run on one process
among them (--engine single) gives the losses and the throughput that the parallel ones are judged by.

Examples:
  dlojz compare
  dlojz compare 20250101-1200 20250101-1201 --figure compare.png""",
            fr="""Superposer les mesures aux prédictions : pertes, débit, mémoire, communication.

Sans nom : l'exécution la plus récente de chaque découpage, pour l'entraînement le plus récent. Une exécution sur un
seul processus parmi elles (--engine single) donne les pertes et le débit auxquels comparer les autres.

Exemples :
  dlojz compare
  dlojz compare 20250101-1200 20250101-1201 --figure comparaison.png""",
        ),
        [
            _run_words("[RUN…]"),
            Flag(
                "figure",
                say(en="picture to write (.png, .svg, .pdf)", fr="image à écrire (.png, .svg, .pdf)"),
                metavar="FILE",
            ),
            root_flag(),
            json_flag(),
        ],
        words,
    )
    from dlojz.compare import compare

    with answering(given.get("json", False)) as answer:
        names = given.get("words", ())
        chosen = [find(name, given.get("root")) for name in names] if names else _together(_readable(given))
        comparison = compare(chosen)
        if "figure" in given:  # before the table: a path that cannot be written is refused at once
            comparison.figure(given["figure"])
        answer(comparison.to_dict() if given.get("json") else comparison)
        if not given.get("json"):
            answer("\n".join(comparison.findings()))
        if "figure" in given:
            tell(say(en=f"figure: {given['figure']}", fr=f"figure : {given['figure']}"))
    return cli.DONE


def _run_words(metavar: str = "RUN") -> Flag:
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


def _readable(given: dict[str, Any]) -> list[Run]:
    """The runs that can be read, newest first; the others are named on stderr."""
    found = survey(given.get("root"))
    for run_id, reason in found.bad.items():
        tell(say(en=f"{run_id} is left out: {reason}", fr=f"{run_id} est laissée de côté : {reason}"))
    return found.good


def _together(newest_first: Sequence[Run]) -> list[Run]:
    """The newest run of each layout, of the same training as the newest run that measured something; oldest first."""
    reference = next((run for run in newest_first if _has_measured(run)), None) or next(iter(newest_first), None)
    chosen: dict[str, Run] = {}
    for run in newest_first:
        if reference is not None and _training(run) == _training(reference):
            kept_so_far = chosen.setdefault(run.config.hash, run)
            if not _has_measured(kept_so_far) and _has_measured(run):
                chosen[run.config.hash] = run
    kept = list(chosen.values())[:MOST_COMPARED]
    if len(kept) < len(newest_first):
        tell(
            say(
                en=f"{len(kept)} of {len(newest_first)} runs are compared: the newest of each layout, same training, "
                f"at most {MOST_COMPARED}; name others to compare them.",
                fr=f"Exécutions comparées : {len(kept)} sur {len(newest_first)}, la plus récente de chaque "
                f"découpage, même entraînement, au plus {MOST_COMPARED} ; nommez-en d'autres pour les comparer.",
            )
        )
    return kept[::-1]


def _has_measured(run: Run) -> bool:
    return bool(run.record and run.record.footprints)


def _training(run: Run) -> tuple[Any, ...]:
    config = run.config
    return (
        config.model,
        config.data_name,
        config.image_size,
        config.sequence_length,
        config.precision,
        config.optimizer,
        config.learning_rate,
        config.weight_decay,
        config.seed,
        config.steps,
        config.layout.global_batch,
    )


def _summary(run: Run) -> dict[str, Any]:
    losses = run.losses
    return {
        "run_id": run.run_id,
        "title": run.config.title,
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
