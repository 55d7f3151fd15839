"""Commands on clusters: `dlojz machines`, `dlojz queue`, `dlojz watch`.

`dlojz machines` sends nothing and asks no scheduler. `queue` and `watch` change nothing: the scheduler is asked at most
every 10 s however many look, and Ctrl-C leaves the runs alone.
"""

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
from dlojz.base.table import Table, titles, visible
from dlojz.cli.options import (
    WORDS,
    Answer,
    Given,
    config_of,
    console,
    fields_of,
    option_of,
    phrase,
    scheduler_of,
    show,
    tell,
    verb,
)
from dlojz.display.tables import DASH, status_label
from dlojz.hardware.clusters import Machine, here, machine, machine_files
from dlojz.running.folder import DEFAULT_WORKER
from dlojz.running.limits import JobRequest, admit, preview_of
from dlojz.running.run import find, runs
from dlojz.running.run_view import RunView, Tracker, explained, local_time, run_text, time_words
from dlojz.running.slurm.slurm_job import job_script
from dlojz.running.slurm.slurm_queue import JobView, QueueView, views
from dlojz.running.state import is_final
from dlojz.running.store import run_ids, runs_root


@verb("machines")
def machines_command(args: Given, answer: Answer) -> None:
    """List the machines, or preview a run on one."""
    names = args.pop(WORDS, ())
    if names:
        answer(_about(machine(names[0]), args))
        return
    if options := sorted(set(args) - {"json"}):
        option = option_of(options[0])
        raise phrase.refused("option of one machine", option=option)
    sites = _readable()
    answer([_summary(site) for site in sites] if args["json"] else _machines_table(sites))


def _about(site: Machine, args: Given) -> Any:
    config, hours = config_of(args), args["hours"]
    request = JobRequest(**scheduler_of(args), time_limit_s=None if hours is None else hours * 3600)
    if args["script"]:
        # RUN stands in the place of a run's name: nothing is sent, so there is none.
        folder = Path(runs_root()) / "RUN"
        allocation = admit(site, config, request)
        text = job_script(site, config, allocation, folder, worker_module=DEFAULT_WORKER, requeues=request.requeues)
        return {"script": text} if args["json"] else text.rstrip("\n")
    preview = preview_of(site, config, request)
    if args["json"]:
        return preview.to_dict()
    return preview.table(
        (say(en="partition", fr="partition"), site.partition or "-"),
        (say(en="interconnect", fr="réseau"), site.interconnect),
        (say(en="source", fr="source"), f"{site.source} ({site.date})"),
    )


def _readable() -> list[Machine]:
    """Read the machine files; those that cannot be read are named on stderr."""
    sites = []
    for name in machine_files():
        try:
            sites.append(machine(name))
        except LabError as error:
            tell(visible(error))
    return sites


def _summary(site: Machine) -> dict[str, Any]:
    return {
        **fields_of(site, "name", "title", "device", "gpus_per_node", "max_nodes", "max_hours", "account_suffix"),
        "qos": [service.to_dict() for service in site.qos],
        "here": site.name in here(),
        **fields_of(site, "source", "date"),
    }


def _machines_table(sites: list[Machine]) -> Table:
    local_names, rows = here(), []
    for site in sites:
        mark = say(en=" (here)", fr=" (ici)") if site.name in local_names else ""
        unit = "GPU" if site.device != "cpu" else say(en="ranks", fr="rangs")
        limits = say(en=f"{site.max_nodes} nodes, ", fr=f"{site.max_nodes} nœuds, ") + f"{shortest(site.max_hours)} h"
        rows.append((site.name + mark, site.title, site.device, f"{site.gpus_per_node} {unit}", limits))
    head = titles(en="machine; what it is; device; node; at most", fr="machine; description; appareil; nœud; au plus")
    return Table(head, tuple(rows), align="l", whole=1)


MOST_REFUSALS = 3
"""Looks in a row at which a run's own files are refused, until nothing more is waited for."""


@verb("queue")
def queue_command(args: Given, answer: Answer) -> None:
    """List the jobs of the scheduler."""
    queue = views()
    ids = set(run_ids(runs_root(args["root"])))
    if args["json"]:
        # One for each job; a job that belongs to no run of this root has no run_id.
        extras = ({"run_id": job.name if job.name in ids else None, "words": _why(job)} for job in queue.jobs)
        jobs = [{**vars(job), **extra} for job, extra in zip(queue.jobs, extras, strict=True)]
        answer({"age_s": queue.age_s, "problem": queue.problem, "jobs": jobs})
        return
    if queue.jobs:
        answer(_queue_table(queue.jobs, ids))
    elif queue.age_s is not None:
        answer(phrase("no job in the queue"))
    if queue.problem:
        answer(_age(queue))


@verb("watch")
def watch_command(args: Given, answer: Answer) -> None:
    """Follow runs."""
    named_runs = [find(name, args["root"]) for name in args[WORDS]]
    chosen = named_runs or [run for run in runs(args["root"]) if not is_final(run.state)]
    if not chosen:
        answer(phrase("no run to watch"))
        return
    try:
        _watch([Tracker(run) for run in chosen], args["every_s"], once=args["once"])
    except KeyboardInterrupt:
        tell(phrase("no longer watching"))


def _watch(trackers: list[Tracker], every_s: float, *, once: bool) -> None:
    """Show the runs until all have ended: redrawn in a terminal, a line per change elsewhere."""
    last_texts: dict[str, str] = {}
    # By tracker: how many times in a row its run's files were refused.
    refused: Counter[str] = Counter()
    if once:
        _all(trackers, last_texts, refused, echo=True)
    elif sys.stdout.isatty():
        with Live(console=console(stderr=False), auto_refresh=False, transient=False) as live:
            while True:
                texts, over = _all(trackers, last_texts, refused)
                live.update(Text("\n\n".join(texts)), refresh=True)
                if over:
                    return
                time.sleep(every_s)
    else:
        while not _all(trackers, last_texts, refused, echo=True)[1]:
            time.sleep(every_s)


def _all(
    trackers: list[Tracker], last_texts: dict[str, str], refused: Counter[str], *, echo: bool = False
) -> tuple[list[str], bool]:
    """Describe every run, and whether all have ended; with `echo`, what has changed is printed.

    A file system may be away for a moment, so an `OSError` is waited out; a record that is refused (of a newer version,
    say) stays refused, and counts.
    """
    texts, over = [], True
    for tracker in trackers:
        # By identity: two trackers may follow the same run.
        name = str(id(tracker))
        try:
            view: RunView = tracker.look()
            text, final = run_text(view), is_final(view.state)
            refused.pop(name, None)
        except (LabError, OSError) as error:
            # An OSError may pass, so it sets the count back to 0.
            refused[name] = refused[name] + 1 if isinstance(error, LabError) else 0
            text, final = visible(str(error)), refused[name] >= MOST_REFUSALS
        over = over and final
        texts.append(text)
        # Printed only where the text has changed since the last look.
        if echo and last_texts.get(name) != text:
            show(Text(text))
        last_texts[name] = text
    return texts, over


def _left(job: JobView) -> str:
    """Write the time that a job has left; one that has ended has none."""
    return DASH if job.standing == "ended" else time_words(job.left) or DASH


def _queue_table(jobs: list[JobView], ids: set[str]) -> Table:
    rows = []
    # False sorts before True: jobs that have ended stand last, all others stay in the scheduler's order.
    for job in sorted(jobs, key=lambda job: job.standing == "ended"):
        name = job.name if job.name in ids else f"({job.name})"  # not one of these runs
        rows.append((job.number, name, _state(job), _why(job), _left(job), job.nodes or DASH))
    head = phrase.titles("columns of jobs")
    return Table(head, tuple(rows), align="l", whole=1)


def _state(job: JobView) -> str:
    if job.standing == "unknown":
        return say(en=f"unknown, last {job.state}", fr=f"inconnu, dernier : {job.state}")
    words = {"pending": status_label("queued"), "running": status_label("running")}
    return words.get(job.standing, job.state)


def _why(job: JobView) -> str:
    """Explain why a job waits; for one that has ended, the scheduler's own word."""
    if job.standing == "ended":
        return job.reason
    if job.standing == "running" or not job.reason:
        return ""
    starts = local_time(job.start_utc)
    expected = say(en=f" Expected start: {starts}.", fr=f" Début estimé : {starts}.") if starts else ""
    return explained(job.reason) + expected


def _age(queue: QueueView) -> str:
    """Explain why the scheduler gave no answer, and how old its last one is."""
    if queue.age_s is None and shutil.which("squeue") is None:
        return phrase("no scheduler")
    ago = format_seconds(queue.age_s)
    age_text = say(en=f"last known, {ago} ago", fr=f"connu il y a {ago}")
    if queue.age_s is None:
        age_text = say(en="nothing is known yet", fr="rien n’est encore connu")
    return phrase("scheduler does not answer", queue=queue, age=age_text)
