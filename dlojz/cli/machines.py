"""Commands on clusters: `dlojz machines`, `dlojz queue`, `dlojz watch`.

`dlojz machines`: clusters that runs can be sent to, what one would cost there, and the script that would be sent.

Nothing is sent and nothing is asked of a scheduler; a damaged machine file hinders no other.

`dlojz queue` and `dlojz watch`: what waits and runs, and how it goes.

Looking changes nothing: the scheduler is asked at most every 10 s however many look, and Ctrl-C leaves the runs alone.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import format_seconds, say, shortest
from dlojz.base.table import Table, visible
from dlojz.cli import main
from dlojz.cli.options import (
    Flag,
    answering,
    config_flags,
    config_of,
    console,
    json_flag,
    number,
    parse,
    root_flag,
    scheduler_flags,
    show,
    tell,
)
from dlojz.cli.runs import readable, run_words
from dlojz.display.tables import DASH, status_label
from dlojz.hardware.clusters import Machine, here, machine, machine_files
from dlojz.running.folder import DEFAULT_WORKER
from dlojz.running.limits import JobRequest, admit, preview_of
from dlojz.running.run import Run, find
from dlojz.running.slurm.slurm_job import job_script
from dlojz.running.slurm.slurm_queue import JobView, QueueView, views
from dlojz.running.state import is_final
from dlojz.running.store import run_ids, runs_root
from dlojz.running.watch import RunView, Tracker, explained, local_time, run_text, time_words


def machines_command(words: list[str]) -> int:
    """List the machines, or preview a run on one."""
    given = parse(
        "machines",
        say(
            en="""List the clusters that runs can be sent to; with a name and a configuration, say what the run would
take there, what it would cost at most, and why it would be refused. Nothing is sent.

Examples:
  dlojz machines
  dlojz machines local --dp 4 --hours 0.5
  dlojz machines local --dp 4 --script""",
            fr="""Lister les calculateurs où envoyer une exécution ; avec un nom et une configuration, dire ce que
l’exécution y demanderait, son coût maximal, et pourquoi elle serait refusée. Rien n’est envoyé.

Exemples :
  dlojz machines
  dlojz machines local --dp 4 --hours 0.5
  dlojz machines local --dp 4 --script""",
        ),
        [_name_words(), *_asking_flags(), *config_flags(), json_flag()],
        words,
    )
    names = given.pop("words", ())
    if len(names) > 1:
        raise LabError(f"`dlojz machines` takes one name, but {len(names)} were received: {' '.join(names)}.")
    with answering(given.get("json", False)) as answer:
        if not names:
            _refuse_flags_without_a_name(given)
            found = list(_readable())
            answer([_summary(one) for one in found] if given.get("json") else _machines_table(found))
        else:
            answer(_about(machine(names[0]), given))
    return main.DONE


def _about(site: Machine, given: dict[str, Any]) -> Any:
    hours = number(given, "hours", float)
    config = config_of(given)
    request = JobRequest(
        account=given.get("account", ""),
        qos=given.get("qos", ""),
        reservation=given.get("reservation", ""),
        time_limit_s=None if hours is None else hours * 3600,
    )
    if given.get("script"):
        folder = Path(runs_root()) / "RUN"
        asked = admit(site, config, request)
        text = job_script(site, config, asked, folder, worker_module=DEFAULT_WORKER, requeues=request.requeues)
        return {"script": text} if given.get("json") else text.rstrip("\n")
    shown = preview_of(site, config, request)
    if given.get("json"):
        return shown.to_dict()
    facts = [
        (say(en="partition", fr="partition"), site.partition or "-"),
        (say(en="interconnect", fr="réseau"), site.interconnect),
        (say(en="source", fr="source"), f"{site.source} ({site.date})"),
    ]
    return Table(("", ""), (*shown.lines(), *((name, value) for name, value in facts if value)), align="l", whole=1)


def _name_words() -> Flag:
    return Flag(
        "words",
        say(en="name of a machine file", fr="nom d’un fichier de machine"),
        metavar="NAME",
        kind="words",
    )


def _asking_flags() -> list[Flag]:
    return [
        Flag("hours", say(en="time limit in hours", fr="limite de temps en heures"), metavar="FLOAT"),
        *scheduler_flags(),
        Flag("script", say(en="print the job script", fr="afficher le script du travail"), kind="switch"),
    ]


def _refuse_flags_without_a_name(given: dict[str, Any]) -> None:
    others = sorted(set(given) - {"json"})
    if others:
        raise LabError(
            say(
                en=f"--{others[0].replace('_', '-')} says something of a run on one machine: name it, as in "
                "`dlojz machines local --dp 4`.",
                fr=f"--{others[0].replace('_', '-')} concerne une exécution sur une machine : nommez-la, par exemple "
                "`dlojz machines local --dp 4`.",
            )
        )


def _readable() -> list[Machine]:
    """The machines whose files can be read; the others are named on stderr."""
    found = []
    for name in machine_files():
        try:
            found.append(machine(name))
        except LabError as error:
            tell(visible(error))
    return found


def _summary(site: Machine) -> dict[str, Any]:
    return {
        "name": site.name,
        "title": site.title,
        "device": site.device,
        "gpus_per_node": site.gpus_per_node,
        "max_nodes": site.max_nodes,
        "max_hours": site.max_hours,
        "account_suffix": site.account_suffix,
        "qos": [one.to_dict() for one in site.qos],
        "here": site.name in here(),
        "source": site.source,
        "date": site.date,
    }


def _machines_table(found: list[Machine]) -> Table:
    titles = (
        say(en="machine", fr="machine"),
        say(en="what it is", fr="description"),
        say(en="device", fr="appareil"),
        say(en="node", fr="nœud"),
        say(en="at most", fr="au plus"),
    )
    own, rows = here(), []
    for site in found:
        mark = say(en=" (here)", fr=" (ici)") if site.name in own else ""
        places = "GPU" if site.device != "cpu" else say(en="ranks", fr="rangs")
        most = say(en=f"{site.max_nodes} nodes, ", fr=f"{site.max_nodes} nœuds, ") + f"{shortest(site.max_hours)} h"
        rows.append((site.name + mark, site.title, site.device, f"{site.gpus_per_node} {places}", most))
    return Table(titles, tuple(rows), align="l", whole=1)


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
            return main.DONE
        if queue.jobs:
            answer(_queue_table(queue.jobs, known))
        elif queue.age_s is not None:
            answer(
                say(
                    en="you have no job in the queue: send one with `dlojz run --on slurm`.",
                    fr="vous n’avez aucun travail dans la file : envoyez-en un par `dlojz run --on slurm`.",
                )
            )
        for line in _age(queue):
            answer(line)
    return main.DONE


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
        return main.DONE
    try:
        _watch([Tracker(run) for run in chosen], every_s, once=given.get("once", False))
    except KeyboardInterrupt:
        tell(
            say(
                en="no longer watching; the runs go on (`dlojz cancel RUN` stops one).",
                fr="fin du suivi ; les exécutions continuent (`dlojz cancel RUN` en arrête une).",
            )
        )
    return main.DONE


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


def _queue_table(jobs: list[JobView], known: set[str]) -> Table:
    titles = (
        say(en="job", fr="travail"),
        say(en="run", fr="exécution"),
        say(en="state", fr="état"),
        say(en="why", fr="raison"),
        say(en="time left", fr="temps restant"),
        say(en="nodes", fr="nœuds"),
    )
    rows = []
    for job in sorted(jobs, key=lambda one: one.standing == "ended"):
        name = job.name if job.name in known else f"({job.name})"  # not one of these runs
        rows.append((job.number, name, _state(job), _why(job), time_words(job.left) or DASH, job.nodes or DASH))
    return Table(titles, tuple(rows), align="l", whole=1)


def _state(job: JobView) -> str:
    if job.standing == "unknown":
        return say(en=f"unknown, last {job.state}", fr=f"inconnu, dernier : {job.state}")
    words = {"pending": status_label("queued"), "running": status_label("running")}
    return words.get(job.standing, job.state)


def _why(job: JobView) -> str:
    """Why a job waits, in words; the scheduler's own word for one that has ended."""
    if job.standing == "ended":
        return job.reason
    if job.standing == "running" or not job.reason:
        return ""
    starts = local_time(job.start_utc)
    expected = say(en=f" Expected start: {starts}.", fr=f" Début estimé : {starts}.") if starts else ""
    return explained(job.reason) + expected


def _age(queue: QueueView) -> list[str]:
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
