"""Commands of an instructor: `dlojz bench`, `dlojz board`.

`dlojz bench` starts nothing before every point of the campaign is known to be legal and possible. `dlojz board` only
reads the students' folders, and shows every text from them letter by letter.
"""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.live import Live

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import colon, format_count, language, one_of, say, shortest
from dlojz.base.table import Lines, Table, safe, titles, visible
from dlojz.campaign.campaign import Campaign, CampaignPlan, campaigns_folder, expand, find_campaign, read_campaign
from dlojz.campaign.class_board import Student, pseudonyms, read_class, told_problems
from dlojz.campaign.report import brief, foreseen, hours, report_folder, row_of, state_label, write_report
from dlojz.campaign.results import (
    Asked,
    Backend,
    Outlook,
    Result,
    cancel_all,
    drive,
    find_run,
    judged,
    outlook,
    result_of,
    unfit_backend,
)
from dlojz.cli import main
from dlojz.cli.options import (
    WORDS,
    Answer,
    Given,
    check_needs,
    console,
    fields_of,
    option_of,
    phrase,
    scheduler_of,
    tell,
    tell_written,
    verb,
)
from dlojz.display.style import FRAME, INK
from dlojz.display.tables import DASH
from dlojz.labs.kit.exercise import Challenge
from dlojz.labs.kit.lab import NUMBERS, content_of
from dlojz.running.store import runs_root

BACKENDS = ("local", "slurm")


@verb("bench", backends="|".join(BACKENDS))
def bench_command(args: Given, answer: Answer) -> int:
    """Run a campaign, or predict its cost."""
    names = args[WORDS]
    if not names:
        _list(args, answer)
        return main.DONE
    path = find_campaign(names[0])
    campaign = read_campaign(path)
    plan = expand(campaign, args["machine"])
    on = _backend(args, plan)
    # None of these starts a run, so the backend need not fit.
    only_looks = any(args[name] for name in ("dry_run", "report", "cancel"))
    if not only_looks and (reason := unfit_backend(plan, on)):
        raise LabError(reason)
    root = runs_root(args["root"])
    together = [option_of(name) for name in ("cancel", "report", "dry_run", "again") if args.get(name)]
    if len(together) > 1:
        options = " ".join(together)
        raise phrase.refused("options received together", options=options)
    if args["cancel"]:
        return _cancel(plan, root, answer if args["json"] else None)
    scheduler_options = scheduler_of(args)
    outlooks = _predict(plan, campaign, scheduler_options)
    if only_looks:
        results = [result_of(p, o, find_run(p, root)) for p, o in zip(plan.points, outlooks, strict=True)]
    else:
        _refuse_what_machines_refuse(plan, outlooks)
        results = _drive(campaign, plan, outlooks, root, on, args["again"], scheduler_options)
    if not args["dry_run"]:
        results = judged(results)
    if args["json"]:
        answer([row_of(result) for result in results])
    else:
        answer(foreseen(results) if args["dry_run"] else brief(results))
    _tell_more(plan, results, args["dry_run"])
    # Written beside the runs, again at each call, so that it follows a campaign that is resumed.
    if not args["dry_run"]:
        tell_written(write_report(campaign, plan, results, report_folder(root, path.stem))[0], "report", "rapport")
    good = only_looks or all(result.state in ("completed", "oom") for result in results)
    return main.DONE if good else main.FAILED


def _list(args: Given, answer: Answer) -> None:
    """List the campaigns of the course."""
    campaigns = []
    for file in sorted(campaigns_folder().glob("*.toml")):
        try:
            campaigns.append((file.stem, read_campaign(file).title))
        except LabError as error:
            tell(str(error))
    if args["json"]:
        answer([{"name": name, "title": title} for name, title in campaigns])
    else:
        answer(Table(titles(en="campaign; title", fr="campagne; titre"), tuple(campaigns), align="l", whole=1))


def _backend(args: Given, plan: CampaignPlan) -> Backend:
    on = args["on"] or ("slurm" if any(point.machine for point in plan.points) else "local")
    if on not in BACKENDS:
        raise LabError(one_of("--on", on, BACKENDS))
    return cast(Backend, on)


def _cancel(plan: CampaignPlan, root: Path, answer: Answer | None) -> int:
    """Cancel the runs of a campaign that are queued or running; their names are the answer, where one is wanted."""
    ended = cancel_all(plan, root)
    if answer is not None:
        answer({"asked_to_stop": [run.run_id for run in ended], "points": len(plan.points)})
    for run in ended:
        tell(en=f"asked to stop: {run.run_id}", fr=f"arrêt demandé : {run.run_id}")
    tell(phrase("points cancelled", ended=len(ended), points=len(plan.points)))
    return main.DONE


def _predict(plan: CampaignPlan, campaign: Campaign, scheduler_options: Asked) -> list[Outlook]:
    """Predict every point, with a counter: a large model takes seconds."""
    terminal = console()
    with terminal.status("") as status:
        outlooks = []
        for point in plan.points:
            status.update(say(en="predicting ", fr="prédiction ") + f"{point.number}/{len(plan.points)}")
            outlooks.append(outlook(point, campaign.time_limit_s, scheduler_options))
            if len(outlooks) == 1:
                gc.freeze()  # else every collection goes through all of torch again: a third of the time
    return outlooks


def _refuse_what_machines_refuse(plan: CampaignPlan, outlooks: Sequence[Outlook]) -> None:
    refused = [
        f"  - {point.number} ({point.label}){colon()}{' '.join(predicted.refusals)}"
        for point, predicted in zip(plan.points, outlooks, strict=True)
        if predicted.refusals
    ]
    if refused:
        lines = "\n".join(refused)
        raise phrase.refused("nothing was submitted", count=len(refused), lines=lines)


def _drive(
    campaign: Campaign,
    plan: CampaignPlan,
    outlooks: list[Outlook],
    root: Path,
    on: Backend,
    again: bool,
    scheduler_options: Asked,
) -> list[Result]:
    """Run a campaign under a live table, or with a line for each change where stderr is no terminal."""
    terminal = console()
    options: dict[str, Any] = {
        "on": on,
        "again": again,
        "time_limit_s": campaign.time_limit_s,
        "asked": scheduler_options,
    }
    samples = say(en="samples/s", fr="échantillons/s")
    # By point: its last state, and whether it was told what the point waits for.
    before: dict[int, tuple[str, bool]] = {}

    def lines(results: Sequence[Result]) -> None:
        for result in results:
            state, explained = before.get(result.point.number, ("waiting", False))
            if state != result.state or (result.waits_for and not explained):
                # Told are a change of state and, once, what a point waits for.
                figure = f", {format_count(result.samples_per_s)} {samples}" if result.samples_per_s else ""
                tell(
                    f"{result.point.number}/{len(results)} {visible(result.point.label)}{colon()}"
                    f"{visible(state_label(result))}{figure}"
                    + (f" — {visible(result.reason)}" if result.reason else "")
                )
            before[result.point.number] = (result.state, bool(result.waits_for))

    try:
        if not terminal.is_terminal:
            return drive(plan, outlooks, root, on_change=lines, **options)
        with Live(console=terminal, refresh_per_second=4) as live:
            return drive(plan, outlooks, root, on_change=lambda results: live.update(_following(results)), **options)
    except KeyboardInterrupt:
        if on == "slurm":
            tell(phrase("jobs stay in the queue"))
        raise


def _following(results: Sequence[Result], row_limit: int = 30) -> Table:
    """Show the window of points around the first unfinished one."""
    pending = [i for i, result in enumerate(results) if result.state in ("waiting", "queued", "running")]
    # Up to three points that are done stay above the first unfinished one.
    start = max(0, min(pending[0] if pending else 0, len(results) - row_limit) - 3)
    return brief(results[start : start + row_limit])


MOST_NAMED = 3
"""Points that are named where many have the same remark."""


def _tell_more(plan: CampaignPlan, results: Sequence[Result], dry: bool) -> None:
    """Report exclusions, refusals, notes and totals, which the table does not show."""
    for label, reason in plan.excluded:
        tell(say(en="left out: ", fr="écarté : ") + visible(f"{label} — {reason}"))
    points: dict[str, list[str]] = {}
    for result in results:
        for sentence in (*result.outlook.refusals, result.outlook.note, "" if dry else result.reason):
            if sentence:
                points.setdefault(sentence, []).append(f"{result.point.number} ({result.point.label})")
    for sentence, sharing in points.items():
        remaining_points = len(sharing) - MOST_NAMED
        suffix = (
            say(en=f" and {remaining_points} more points", fr=f" et {remaining_points} autres points")
            if remaining_points > 0
            else ""
        )
        tell(visible(f"{', '.join(sharing[:MOST_NAMED])}{suffix}{colon()}{sentence}"))
    if dry:
        costs = [result.outlook.most_hours for result in results if result.outlook.most_hours is not None]
        normalised = [r.outlook.normalised_hours for r in results if r.outlook.normalised_hours is not None]
        no = sum(result.outlook.fits is False for result in results)
        site = phrase("normalised hours", hours=hours(sum(normalised)))
        tell(
            en=f"{len(results)} points; {no} are predicted not to fit; at most {hours(sum(costs))} "
            f"GPU-hours{site if normalised else ''}. Nothing was started.",
            fr=f"{len(results)} points ; {no} ne tiendraient pas, d’après la prédiction ; au plus {hours(sum(costs))} "
            f"heures GPU{site if normalised else ''}. Rien n’a été lancé.",
        )


STYLE = (
    f"body{{font-family:sans-serif;margin:2em;color:{INK}}}table{{border-collapse:collapse}}"
    f"th,td{{padding:.3em .8em;border-bottom:1px solid {FRAME};text-align:left;vertical-align:top}}"
)


@verb("board")
def board_command(args: Given, answer: Answer) -> None:
    """Show the class."""
    check_needs(args, "key", "pseudonyms")
    key = Path(args["key"]).expanduser() if "key" in args else None
    call = pseudonyms(key) if args["pseudonyms"] else str
    students = read_class(Path(args[WORDS][0]).expanduser(), call)
    board = board_table(students)
    if "html" in args:
        path = Path(args["html"]).expanduser()
        write_atomic(path, board_html(board))
        tell_written(path, "page", "page")
    answer([_data(student) for student in students] if args["json"] else board)


def board_table(students: Sequence[Student]) -> Table:
    """Lay out the board, one row per student."""
    head = phrase.titles("columns of the board")
    note = phrase("board is for helping")
    return Table(head, tuple(map(_row, students)), align="l", notes=(note,))


def _row(student: Student) -> tuple[str, ...]:
    replays = say(en=f" (+ {student.replays} replayed)", fr=f" (+ {student.replays} rejouées)")
    best = (
        f"{run.title}, batch {run.global_batch}{colon()}"
        + format_count(run.samples_per_s)
        + say(en=" samples/s", fr=" échantillons/s")
        for run in student.best[:3]
    )
    return (
        student.name,
        f"{student.lab} {student.exercise}" if student.lab else DASH,
        ", ".join(f"{lab}{colon()}{count}" for lab, count in sorted(student.done.items())) or DASH,
        ", ".join(f"{lab}{colon()}{_told_score(lab, *best)}" for lab, best in sorted(student.scores.items())) or DASH,
        ", ".join(sorted(student.scripts)) or DASH,
        Lines("\n".join(best)) or DASH,
        str(student.runs) + (replays if student.replays else ""),
        DASH if student.runs == student.untimed > 0 else hours(student.rank_hours),
        f"{student.last_utc:%Y-%m-%d %H:%M}" if student.last_utc else DASH,
        Lines("\n".join(told_problems(student))),
    )


def _told_score(lab: str, challenge: str, score: float) -> str:
    """Say a score with its unit, where the lab has such a challenge."""
    exercises = content_of(lab).EXERCISES if lab in NUMBERS else ()
    exercise = next((entry for entry in exercises if isinstance(entry, Challenge) and entry.id == challenge), None)
    return shortest(score) if exercise is None else exercise.told(score)


def board_html(board: Table) -> str:
    """Write the board as one self-contained HTML page."""
    heading = say(en="The class at a glance", fr="La classe en un coup d’œil")
    return (
        f'<!DOCTYPE html><html lang="{language()}"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{safe(heading)}</title><style>{STYLE}</style></head><body><h1>{safe(heading)}</h1>"
        + board._repr_html_()
        + "</body></html>\n"
    )


def _data(student: Student) -> dict[str, Any]:
    """Write a student's line as plain JSON data."""
    return {
        "name": visible(student.name),
        "last_lab": student.lab,
        "last_exercise": student.exercise,
        "done_by_lab": dict(sorted(student.done.items())),
        "scores_by_lab": {lab: score for lab, (_, score) in sorted(student.scores.items())},
        "scripts": sorted(student.scripts),
        "best": [vars(run) for run in student.best],
        **fields_of(student, "runs", "replays"),
        "gpu_hours": None if student.runs == student.untimed > 0 else student.rank_hours,
        "last_utc": student.last_utc.isoformat(timespec="seconds") if student.last_utc else None,
        "problems": told_problems(student),
    }
