"""`dlojz queue` and `dlojz watch`: what waits and runs, and how it goes.

Layer 6. Invariant: looking changes nothing: the scheduler is asked at most every 10 s however many look, and Ctrl-C
leaves the runs alone.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from dlojz import cli
from dlojz.cli.answer import answering, console, show, tell
from dlojz.cli.flags import Flag, json_flag, number, parse, root_flag
from dlojz.cli.records import readable, run_words
from dlojz.runs import Run, find
from dlojz.runs.scheduler import Queue, View, views
from dlojz.runs.snapshot import Tracker, explained, local_time, time_words
from dlojz.runs.state import is_final
from dlojz.runs.store import run_ids, runs_root
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_seconds
from dlojz.viz.grid import DASH, status_label
from dlojz.viz.markup import visible
from dlojz.viz.run_panel import RunView, run_text

EVERY_S, LEAST_S = 2.0, 0.2
MOST_REFUSALS = 3
"""Looks in a row at which a run's own files are refused, until nothing more is waited for."""


def queue_command(words: list[str]) -> int:
    """List the jobs of the scheduler."""
    given = parse(
        "queue",
        say(
            en="""List your jobs in the scheduler's queue: job, run, state, why it waits, time left, nodes.

The scheduler is asked at most every 10 s, for all notebooks and terminals together; where it does not answer, what it
last said is shown with its age. Jobs that ended within the last minutes are listed too.

Examples:
  dlojz queue
  dlojz queue --json""",
            fr="""Lister vos travaux dans la file de l’ordonnanceur : numéro, exécution, état, raison de l’attente,
temps restant, nœuds.

L’ordonnanceur est interrogé toutes les 10 s au plus, pour tous les notebooks et terminaux ensemble ; s’il ne répond
pas, son dernier état connu est montré avec son âge. Les travaux finis depuis quelques minutes sont listés aussi.

Exemples :
  dlojz queue
  dlojz queue --json""",
        ),
        [root_flag(), json_flag()],
        words,
    )
    with answering(given.get("json", False)) as answer:
        queue = views()
        known = set(run_ids(runs_root(given.get("root"))))
        if given.get("json"):
            jobs = [
                {**vars(job), "run_id": job.name if job.name in known else None, "words": _why(job)}
                for job in queue.jobs
            ]
            answer({"age_s": queue.age_s, "problem": queue.problem, "jobs": jobs})
            return cli.DONE
        if queue.jobs:
            answer(_table(queue.jobs, known))
        elif queue.age_s is not None:
            answer(
                say(
                    en="you have no job in the queue: send one with `dlojz run --on slurm`.",
                    fr="vous n’avez aucun travail dans la file : envoyez-en un par `dlojz run --on slurm`.",
                )
            )
        for line in _age(queue):
            answer(line)
    return cli.DONE


def watch_command(words: list[str]) -> int:
    """Follow runs."""
    given = parse(
        "watch",
        say(
            en="""Follow runs: state, why they wait, progress, loss, memory, step time, estimated end.

Without names: all runs that wait or run. It ends with the last of them; Ctrl-C ends the watching, not the runs.

Examples:
  dlojz watch
  dlojz watch 20250101-120000 --once""",
            fr="""Suivre des exécutions : état, raison de l’attente, avancement, perte, mémoire, pas, fin estimée.

Sans nom : toutes celles qui attendent ou qui tournent. Le suivi finit avec la dernière ; Ctrl-C arrête le suivi, pas
les exécutions.

Exemples :
  dlojz watch
  dlojz watch 20250101-120000 --once""",
        ),
        [
            run_words("[RUN…]"),
            Flag("once", say(en="show them once and stop", fr="les montrer une fois et s’arrêter"), kind="switch"),
            Flag(
                "every_s",
                say(en="seconds between two looks", fr="secondes entre deux regards"),
                metavar="FLOAT",
                default=f"{EVERY_S:g}",
            ),
            root_flag(),
        ],
        words,
    )
    every_s = number(given, "every_s", float, LEAST_S) or EVERY_S
    names = given.get("words", ())
    chosen = [find(name, given.get("root")) for name in names] if names else _going_on(given)
    if not chosen:
        show(
            say(
                en="no run waits or runs: `dlojz runs` lists those that have ended.",
                fr="aucune exécution n’attend ni ne tourne : `dlojz runs` liste celles qui sont finies.",
            )
        )
        return cli.DONE
    try:
        _watch([Tracker(run) for run in chosen], every_s, once=given.get("once", False))
    except KeyboardInterrupt:
        tell(
            say(
                en="no longer watching; the runs go on (`dlojz cancel RUN` stops one).",
                fr="fin du suivi ; les exécutions continuent (`dlojz cancel RUN` en arrête une).",
            )
        )
    return cli.DONE


def _going_on(given: dict[str, Any]) -> list[Run]:
    return [run for run in readable(given) if not is_final(run.state)]


def _watch(trackers: list[Tracker], every_s: float, *, once: bool) -> None:
    """Show the runs until all have ended: redrawn in a terminal, a line per change elsewhere."""
    last: dict[str, str] = {}
    refused: Counter[str] = Counter()
    if once:
        _all(trackers, last, refused, out=True)
    elif sys.stdout.isatty():
        with Live(console=console(stderr=False), auto_refresh=False, transient=False) as live:
            while True:
                texts, over = _all(trackers, last, refused)
                live.update(Text("\n\n".join(texts)), refresh=True)
                if over:
                    return
                time.sleep(every_s)
    else:
        while not _all(trackers, last, refused, out=True)[1]:
            time.sleep(every_s)


def _all(
    trackers: list[Tracker], last: dict[str, str], refused: Counter[str], *, out: bool = False
) -> tuple[list[str], bool]:
    """What every run looks like, and whether all have ended; with `out`, what has changed is printed.

    A file system may be away for a moment and is waited for; a record that is refused (of a newer version, say) does
    not mend by looking at it.
    """
    texts, over = [], True
    for tracker in trackers:
        name = str(id(tracker))
        try:
            view: RunView = tracker.look()
            text, final = run_text(view), is_final(view.state)
            refused.pop(name, None)
        except (LabError, OSError) as error:
            refused[name] = refused[name] + 1 if isinstance(error, LabError) else 0
            text, final = visible(str(error)), refused[name] >= MOST_REFUSALS
        over = over and final
        texts.append(text)
        if out and last.get(name) != text:
            show(Text(text))
        last[name] = text
    return texts, over


def _table(jobs: list[View], known: set[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in (
        say(en="job", fr="travail"),
        say(en="run", fr="exécution"),
        say(en="state", fr="état"),
        say(en="why", fr="raison"),
        say(en="time left", fr="temps restant"),
        say(en="nodes", fr="nœuds"),
    ):
        table.add_column(title, overflow="fold", no_wrap=len(table.columns) < 1)
    for job in sorted(jobs, key=lambda one: one.standing == "ended"):
        name = job.name if job.name in known else f"({job.name})"  # not one of these runs
        cells = (job.number, name, _state(job), _why(job), time_words(job.left) or DASH, job.nodes or DASH)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def _state(job: View) -> str:
    if job.standing == "unknown":
        return say(en=f"unknown, last {job.state}", fr=f"inconnu, dernier : {job.state}")
    words = {"pending": status_label("queued"), "running": status_label("running")}
    return words.get(job.standing, job.state)


def _why(job: View) -> str:
    """Why a job waits, in words; the scheduler's own word for one that has ended."""
    if job.standing == "ended":
        return job.reason
    if job.standing == "running" or not job.reason:
        return ""
    starts = local_time(job.start_utc)
    expected = say(en=f" Expected start: {starts}.", fr=f" Début estimé : {starts}.") if starts else ""
    return explained(job.reason) + expected


def _age(queue: Queue) -> list[str]:
    """How old the answer is, where that matters."""
    if not queue.problem:
        return []
    if queue.age_s is None and shutil.which("squeue") is None:
        return [
            say(
                en="there is no scheduler here (no `squeue`): runs of this machine are listed by `dlojz runs`.",
                fr="il n’y a pas d’ordonnanceur ici (pas de `squeue`) : `dlojz runs` liste les exécutions locales.",
            )
        ]
    known = (
        say(en="nothing is known yet", fr="rien n’est encore connu")
        if queue.age_s is None
        else say(en=f"last known, {format_seconds(queue.age_s)} ago", fr=f"connu il y a {format_seconds(queue.age_s)}")
    )
    return [
        say(
            en=f"The scheduler does not answer ({visible(queue.problem)}); {known}. Jobs that run go on running.",
            fr=f"L’ordonnanceur ne répond pas ({visible(queue.problem)}) ; {known}. Les travaux en cours continuent.",
        )
    ]
