"""`dlojz board`: the class at a glance.

Layer 6. Invariant: the students' folders are only read; every text from them is shown letter by letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dlojz import cli
from dlojz.campaign.class_board import Student, read_class, told_problems
from dlojz.campaign.pseudonyms import pseudonyms
from dlojz.campaign.tables import colon, hours
from dlojz.cli.answer import answering, tell
from dlojz.cli.flags import Flag, json_flag, parse
from dlojz.record import write_atomic
from dlojz.schema import LabError
from dlojz.text import language, say
from dlojz.units import format_count
from dlojz.viz.grid import DASH
from dlojz.viz.markup import safe, visible

HELP = {
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
    "body{font-family:sans-serif;margin:2em;color:#222}table{border-collapse:collapse}"
    "th,td{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:left;vertical-align:top}"
)


def board_command(words: list[str]) -> int:
    """Show the class."""
    given = parse("board", say(**HELP), _flags(), words)
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
            answer(_table(titles, rows))
    return cli.DONE


def _flags() -> list[Flag]:
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


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
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
