"""Commands of an instructor: `dlojz bench`, `dlojz board`.

`dlojz bench`: run a campaign of measurements, resume it, report on it.

Nothing is started before every point of the campaign is known to be legal and possible; what is told on the way goes to
stderr, so that a campaign can run without anybody looking.

`dlojz board`: the class at a glance.

The students' folders are only read; every text from them is shown letter by letter.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.live import Live
from rich.table import Table
from rich.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import format_count, language, one_of, say
from dlojz.base.table import safe, visible
from dlojz.campaign.campaign import Campaign, CampaignPlan, campaigns_folder, expand, find_campaign, read_campaign
from dlojz.campaign.class_board import Student, pseudonyms, read_class, told_problems
from dlojz.campaign.drive import Backend, cancel_all, drive, unfit_backend
from dlojz.campaign.report_tables import brief, colon, foreseen, hours, row_of, state_label
from dlojz.campaign.results import Asked, Outlook, Result, find_run, judged, outlook, result_of
from dlojz.cli import main
from dlojz.cli.options import Flag, answering, console, json_flag, parse, root_flag, scheduler_flags, tell
from dlojz.display.style import FRAME, INK
from dlojz.display.tables import DASH
from dlojz.results.record import write_atomic
from dlojz.running.store import runs_root

BACKENDS = ("local", "slurm")
BENCH_HELP = {
    "en": """Run a campaign: every combination of models, layouts, batches and machines that a TOML file names, each
predicted, run and measured; then a report (HTML, Markdown, CSV, figures) in campaigns/NAME of the runs' folder.

A campaign can be interrupted at any time. The same command goes on where it was: what was run is found again, what is
queued is waited for, and only what failed or was never started is started. Running out of memory is a result. Nothing
is submitted if one point is impossible: all of them are listed. Jobs are billed to --account, or to $DLOJZ_ACCOUNT; a
project without an ending gets that of each machine (PROJECT@v100).

Examples:
  dlojz bench                                  (the campaigns of the course)
  dlojz bench data_parallelism --dry-run       (points, memory, messages, GPU-hours; nothing is started)
  dlojz bench data_parallelism_local           (on this machine)
  dlojz bench data_parallelism --on slurm --machine NAME --account PROJECT
  dlojz bench data_parallelism --cancel        (cancel its jobs that are queued or running)
  dlojz bench data_parallelism --report        (only the report, of what has been measured so far)""",
    "fr": """Lancer une campagne : chaque combinaison de modèles, de layouts, de batchs et de machines d’un fichier
TOML est prédite, exécutée et mesurée ; puis un rapport (HTML, Markdown, CSV, figures) est écrit dans campaigns/NOM du
dossier des exécutions.

Une campagne peut être interrompue à tout moment. La même commande reprend où elle en était : ce qui a été exécuté est
retrouvé, ce qui est en file est attendu, et seul ce qui a échoué ou n’a jamais été lancé est lancé. Manquer de mémoire
est un résultat. Rien n’est soumis si un seul point est impossible : tous sont listés. Les travaux sont facturés à
--account, ou à $DLOJZ_ACCOUNT ; un projet sans terminaison reçoit celle de chaque machine (PROJET@v100).

Exemples :
  dlojz bench                                  (les campagnes du cours)
  dlojz bench data_parallelism --dry-run       (points, mémoire, messages, heures GPU ; rien n’est lancé)
  dlojz bench data_parallelism_local           (sur cette machine)
  dlojz bench data_parallelism --on slurm --machine NOM --account PROJET
  dlojz bench data_parallelism --cancel        (annuler ses travaux en file ou en cours)
  dlojz bench data_parallelism --report        (le rapport seul, de ce qui est déjà mesuré)""",
}


def bench_command(words: list[str]) -> int:
    """Run a campaign, or say what it would cost."""
    given = parse("bench", say(**BENCH_HELP), _bench_flags(), words)
    names = given.get("words", ())
    if not names:
        return _list(given)
    if len(names) > 1:
        raise LabError(
            say(
                en=f"`dlojz bench` takes one campaign, but {len(names)} were received: {', '.join(names)}.",
                fr=f"`dlojz bench` prend une campagne, mais {len(names)} ont été reçues : {', '.join(names)}.",
            )
        )
    path = find_campaign(names[0])
    campaign = read_campaign(path)
    plan = expand(campaign, given.get("machine"))
    on = _backend(given, plan)
    only_looks = any(given.get(name, False) for name in ("dry_run", "report", "cancel"))
    if not only_looks and (reason := unfit_backend(plan, on)):
        raise LabError(reason)
    root = runs_root(given.get("root"))
    if given.get("cancel", False):
        return _cancel(plan, root)
    asked = {name: given[name] for name in ("account", "qos", "reservation") if given.get(name)}
    with answering(given.get("json", False)) as answer:
        outlooks = _predict(plan, campaign, asked)
        if only_looks:
            results = [result_of(p, o, find_run(p, root)) for p, o in zip(plan.points, outlooks, strict=True)]
        else:
            _refuse_what_machines_refuse(plan, outlooks)
            results = _drive(campaign, plan, outlooks, root, on, given.get("again", False), asked)
        if not given.get("dry_run"):
            results = judged(results)
        if given.get("json"):
            answer([row_of(result) for result in results])
        else:
            answer(_bench_table(*(foreseen(results) if given.get("dry_run") else brief(results))))
        _tell_more(plan, results, given.get("dry_run", False))
        if not given.get("dry_run"):
            from dlojz.campaign.report import report_folder, write_report

            files = write_report(campaign, plan, results, report_folder(root, path.stem))
            tell(say(en=f"report: {files[0]}", fr=f"rapport : {files[0]}"))
    good = only_looks or all(result.state in ("completed", "oom") for result in results)
    return main.DONE if good else main.FAILED


def _bench_flags() -> list[Flag]:
    return [
        Flag(
            "words",
            say(
                en="a campaign of the course, or a TOML file; without one, they are listed",
                fr="une campagne du cours, ou un fichier TOML ; sans rien, elles sont listées",
            ),
            metavar="CAMPAIGN",
            kind="words",
        ),
        Flag(
            "dry_run",
            say(en="show what it would cost; start nothing", fr="montrer le coût ; ne rien lancer"),
            kind="switch",
        ),
        Flag("report", say(en="only write the report", fr="écrire seulement le rapport"), kind="switch"),
        Flag(
            "on",
            say(en="where it runs", fr="où elle s’exécute"),
            metavar="|".join(BACKENDS),
            default=say(en="slurm where the campaign names machines", fr="slurm si la campagne nomme des machines"),
        ),
        Flag(
            "machine",
            say(en="machine in place of those of the campaign", fr="machine à la place de celles de la campagne"),
            metavar="NAME",
        ),
        *scheduler_flags(),
        Flag("again", say(en="run again what was run before", fr="refaire ce qui a déjà été exécuté"), kind="switch"),
        Flag(
            "cancel",
            say(en="cancel its runs that are queued or running", fr="annuler ses exécutions en file ou en cours"),
            kind="switch",
        ),
        root_flag(),
        json_flag(),
    ]


def _list(given: dict[str, Any]) -> int:
    """The campaigns of the course."""
    found = []
    for file in sorted(campaigns_folder().glob("*.toml")):
        try:
            found.append([file.stem, read_campaign(file).title])
        except LabError as error:
            tell(str(error))
    with answering(given.get("json", False)) as answer:
        if given.get("json"):
            answer([{"name": name, "title": title} for name, title in found])
        else:
            answer(_bench_table([say(en="campaign", fr="campagne"), say(en="title", fr="titre")], found))
    return main.DONE


def _backend(given: dict[str, Any], plan: CampaignPlan) -> Backend:
    on = given.get("on") or ("slurm" if any(point.machine for point in plan.points) else "local")
    if on not in BACKENDS:
        raise LabError(one_of("--on", on, BACKENDS))
    return cast(Backend, on)


def _cancel(plan: CampaignPlan, root: Path) -> int:
    """End what is queued or running of a campaign."""
    ended = cancel_all(plan, root)
    for run in ended:
        tell(say(en=f"asked to stop: {run.run_id}", fr=f"arrêt demandé : {run.run_id}"))
    tell(
        say(
            en=f"{len(ended)} of {len(plan.points)} points were queued or running. What was measured is kept.",
            fr=f"{len(ended)} points sur {len(plan.points)} étaient en file ou en cours. Les mesures sont conservées.",
        )
    )
    return main.DONE


def _predict(plan: CampaignPlan, campaign: Campaign, asked: Asked) -> list[Outlook]:
    """Predict every point, counting aloud: a large model takes seconds each."""
    shown = console()
    with shown.status("") as status:
        found = []
        for point in plan.points:
            status.update(say(en="predicting ", fr="prédiction ") + f"{point.number}/{len(plan.points)}")
            found.append(outlook(point, campaign.time_limit_s, asked))
            if len(found) == 1:
                gc.freeze()  # else every collection goes through all of torch again: a third of the time
    return found


def _refuse_what_machines_refuse(plan: CampaignPlan, outlooks: Sequence[Outlook]) -> None:
    refused = [
        f"  - {point.number} ({point.label}){colon()}{' '.join(predicted.refusals)}"
        for point, predicted in zip(plan.points, outlooks, strict=True)
        if predicted.refusals
    ]
    if refused:
        listed = "\n".join(refused)
        raise LabError(
            say(
                en=f"nothing was submitted: the machine would refuse {len(refused)} of the points:\n{listed}",
                fr=f"rien n’a été soumis : la machine refuserait {len(refused)} des points :\n{listed}",
            )
        )


def _drive(
    campaign: Campaign, plan: CampaignPlan, outlooks: list[Outlook], root: Path, on: Backend, again: bool, asked: Asked
) -> list[Result]:
    """Run it under a table that follows, or with a line for each change where nobody sees a table."""
    shown = console()
    options: dict[str, Any] = {"on": on, "again": again, "time_limit_s": campaign.time_limit_s, "asked": asked}
    samples = say(en="samples/s", fr="échantillons/s")
    before: dict[int, tuple[str, bool]] = {}

    def lines(results: Sequence[Result]) -> None:
        for result in results:
            state, explained = before.get(result.point.number, ("waiting", False))
            if state != result.state or (result.waits_for and not explained):
                figure = f", {format_count(result.samples_per_s)} {samples}" if result.samples_per_s else ""
                tell(
                    f"{result.point.number}/{len(results)} {visible(result.point.label)}{colon()}"
                    f"{visible(state_label(result))}{figure}"
                    + (f" — {visible(result.reason)}" if result.reason else "")
                )
            before[result.point.number] = (result.state, bool(result.waits_for))

    try:
        if not shown.is_terminal:
            return drive(plan, outlooks, root, told=lines, **options)
        with Live(console=shown, refresh_per_second=4) as live:
            return drive(plan, outlooks, root, told=lambda results: live.update(_following(results)), **options)
    except KeyboardInterrupt:
        if on == "slurm":
            tell(
                say(
                    en="jobs that were sent stay in the queue: the same command finds them again, with --cancel it "
                    "cancels them.",
                    fr="les travaux soumis restent en file : la même commande les retrouve, et --cancel les annule.",
                )
            )
        raise


def _following(results: Sequence[Result], most: int = 30) -> Table:
    """The points that matter now: the window around the first that is not finished."""
    pending = [i for i, result in enumerate(results) if result.state in ("waiting", "queued", "running")]
    start = max(0, min(pending[0] if pending else 0, len(results) - most) - 3)
    return _bench_table(*brief(results[start : start + most]))


def _bench_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, overflow="fold", justify="left" if number < 3 else "right")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def _tell_more(plan: CampaignPlan, results: Sequence[Result], dry: bool) -> None:
    """What the table has no place for."""
    for named, reason in plan.excluded:
        tell(say(en="left out: ", fr="écarté : ") + visible(f"{named} — {reason}"))
    for result in results:
        for sentence in (*result.outlook.refusals, result.outlook.note, "" if dry else result.reason):
            if sentence:
                tell(visible(f"{result.point.number} ({result.point.label}){colon()}{sentence}"))
    if dry:
        known = [result.outlook.most_hours for result in results if result.outlook.most_hours is not None]
        normalised = [r.outlook.normalised_hours for r in results if r.outlook.normalised_hours is not None]
        no = sum(result.outlook.fits is False for result in results)
        site = say(
            en=f", {hours(sum(normalised))} normalised hours", fr=f", {hours(sum(normalised))} heures normalisées"
        )
        tell(
            say(
                en=f"{len(results)} points; {no} are predicted not to fit; at most {hours(sum(known))} GPU-hours"
                f"{site if normalised else ''}. Nothing was started.",
                fr=f"{len(results)} points ; {no} ne tiendraient pas, d’après la prédiction ; au plus "
                f"{hours(sum(known))} heures GPU{site if normalised else ''}. Rien n’a été lancé.",
            )
        )


BOARD_HELP = {
    "en": """The class at a glance: for each student the exercise done last, the exercises done in each lab, the best
run so far (highest throughput of the completed runs, by model), GPU-hours (ranks × elapsed time) and the last activity.

FOLDER holds one folder per student, with the runs and the progress of the notebooks in its runs/. It is only read.
Replayed runs count for nothing. What cannot be read is told and hinders nothing.

Examples:
  dlojz board /srv/class
  dlojz board /srv/class --pseudonyms --html board.html""",
    "fr": """La classe en un coup d’œil : pour chaque étudiant, le dernier exercice réussi, le nombre d’exercices
réussis dans chaque TP, la meilleure exécution (débit le plus élevé parmi les exécutions terminées, par modèle), les
heures GPU (rangs × durée) et la dernière activité.

DOSSIER contient un dossier par étudiant, avec ses exécutions et la progression de ses notebooks dans runs/. Il n’est
que lu. Les exécutions rejouées ne comptent pas. Ce qui est illisible est signalé et n’empêche rien.

Exemples :
  dlojz board /srv/classe
  dlojz board /srv/classe --pseudonyms --html tableau.html""",
}
STYLE = (
    f"body{{font-family:sans-serif;margin:2em;color:{INK}}}table{{border-collapse:collapse}}"
    f"th,td{{padding:.3em .8em;border-bottom:1px solid {FRAME};text-align:left;vertical-align:top}}"
)


def board_command(words: list[str]) -> int:
    """Show the class."""
    given = parse("board", say(**BOARD_HELP), _board_flags(), words)
    folders = given.get("words", ())
    if len(folders) != 1:
        raise LabError(
            say(
                en=f"`dlojz board` takes the folder of the class, but {len(folders)} were received.",
                fr=f"`dlojz board` prend le dossier de la classe, mais {len(folders)} ont été reçus.",
            )
        )
    hidden = given.get("pseudonyms", False)
    if "key" in given and not hidden:
        raise LabError(
            say(
                en="--key does nothing without --pseudonyms: add it.",
                fr="--key ne sert à rien sans --pseudonyms : ajoutez-le.",
            )
        )
    call = pseudonyms(Path(given["key"]).expanduser() if "key" in given else None) if hidden else str
    with answering(given.get("json", False)) as answer:
        students = read_class(Path(folders[0]).expanduser(), call)
        titles, rows = board_rows(students)
        if "html" in given:
            path = Path(given["html"]).expanduser()
            write_atomic(path, board_html(titles, rows))
            tell(say(en=f"page: {path}", fr=f"page : {path}"))
        if given.get("json"):
            answer([_data(student) for student in students])
        else:
            answer(_board_table(titles, rows))
    return main.DONE


def _board_flags() -> list[Flag]:
    return [
        Flag(
            "words",
            say(en="folder with one folder per student", fr="dossier contenant un dossier par étudiant"),
            metavar="FOLDER",
            kind="words",
        ),
        Flag(
            "pseudonyms",
            say(en="show stable pseudonyms in place of names", fr="montrer des pseudonymes stables au lieu des noms"),
            kind="switch",
        ),
        Flag(
            "key",
            say(
                en="file of the key that makes the pseudonyms (made on first use, readable by you alone)",
                fr="fichier de la clé des pseudonymes (créé au premier usage, lisible par vous seul)",
            ),
            metavar="FILE",
            default="~/.config/dlojz/board.key",
        ),
        Flag("html", say(en="page to write", fr="page à écrire"), metavar="FILE"),
        json_flag(),
    ]


def board_rows(students: Sequence[Student]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the board, as texts that may hold several lines."""
    titles = [
        say(en="student", fr="étudiant"),
        say(en="last exercise", fr="dernier exercice"),
        say(en="done, by lab", fr="réussis, par TP"),
        say(en="best runs", fr="meilleures exécutions"),
        say(en="runs", fr="exécutions"),
        say(en="GPU-hours", fr="heures GPU"),
        say(en="last activity (UTC)", fr="dernière activité (UTC)"),
        say(en="remarks", fr="remarques"),
    ]
    return titles, [_row(student) for student in students]


def _row(student: Student) -> list[str]:
    replays = say(en=f" (+ {student.replays} replayed)", fr=f" (+ {student.replays} rejouées)")
    best = (
        f"{one.title}, batch {one.global_batch}{colon()}"
        + format_count(one.samples_per_s)
        + say(en=" samples/s", fr=" échantillons/s")
        for one in student.best[:3]
    )
    return [
        visible(student.name),
        f"{student.lab} {student.exercise}" if student.lab else DASH,
        ", ".join(f"{lab}{colon()}{count}" for lab, count in sorted(student.done.items())) or DASH,
        "\n".join(best) or DASH,
        str(student.runs) + (replays if student.replays else ""),
        hours(student.rank_hours),
        f"{student.last_utc:%Y-%m-%d %H:%M}" if student.last_utc else DASH,
        "\n".join(told_problems(student)),
    ]


def board_html(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The board as one page that refers to nothing outside itself."""
    heading = say(en="The class at a glance", fr="La classe en un coup d’œil")
    head = "".join(f'<th scope="col">{safe(title)}</th>' for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{_lines(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<!DOCTYPE html><html lang="{language()}"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{safe(heading)}</title><style>{STYLE}</style></head><body><h1>{safe(heading)}</h1>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></body></html>\n"
    )


def _lines(cell: str) -> str:
    return "<br>".join(safe(line) for line in cell.split("\n"))


def _board_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text("\n".join(visible(line) for line in cell.split("\n"))) for cell in row))
    return table


def _data(student: Student) -> dict[str, Any]:
    """A line as plain JSON data."""
    return {
        "name": visible(student.name),
        "last_lab": student.lab,
        "last_exercise": student.exercise,
        "done_by_lab": dict(sorted(student.done.items())),
        "best": [vars(one) for one in student.best],
        "runs": student.runs,
        "replays": student.replays,
        "gpu_hours": student.rank_hours,
        "last_utc": student.last_utc.isoformat(timespec="seconds") if student.last_utc else None,
        "problems": told_problems(student),
    }
