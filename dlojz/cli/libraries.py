"""Command `dlojz libraries`: the same training as a user of each library writes it.

A library that is not installed has a row that says what installs it, and stops nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlojz.base.language import say
from dlojz.cli import main
from dlojz.cli.options import Answer, Given, check_needs, console, fields_of, phrase, progress_bar, tell, verb
from dlojz.libraries.library_catalogue import (
    LIBRARIES,
    PROGRAMS,
    absence,
    bridge_lines,
    command_alone,
    library,
    lines_changed,
)

if TYPE_CHECKING:
    from dlojz.libraries.side_by_side import LibraryRow

WIDE = 100
"""Columns below which the catalogue's last column stands under the table."""
FIELDS = ("model", "dp", "tp", "pp", "zero", "steps", "micro_batch", "micro_batches")
_RUNNING = (*FIELDS, "rounds", "only", "figure", "root")


@verb("libraries", libraries="|".join(LIBRARIES))
def libraries_command(args: Given, answer: Answer) -> int:
    """List the libraries, show a program, or run them side by side."""
    _check(args)
    if args["show"]:
        answer(library(args["show"]).program.read_text(encoding="utf-8").rstrip())
        tell(say(en="\nIt runs alone, by:\n", fr="\nIl s’exécute seul, par :\n") + command_alone(args["show"]))
        return main.DONE
    return _run(args, answer) if args["run"] else _list(args, answer)


def _check(args: Given) -> None:
    """Refuse flags that would do nothing, and names that are none.

    Raises:
        LabError: naming what they need.
    """
    if args["show"]:
        library(args["show"])
    for name in _names(args) or ():
        # None, without --only, stands for all libraries.
        library(name)
    for name in _RUNNING:
        check_needs(args, name, "run")
    if args["show"] and (args["run"] or args["json"]):
        raise phrase.refused("a program is printed alone")


def _names(args: Given) -> list[str] | None:
    text = args["only"]
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise phrase.refused("no library of this name", text=text, libraries=", ".join(LIBRARIES))
    return names


def _list(args: Given, answer: Answer) -> int:
    from dlojz.display.figures.library_figures import catalogue_sentences, catalogue_table

    if args["json"]:
        answer([_entry(name) for name in LIBRARIES])
        return main.DONE
    wide = console(stderr=False).width >= WIDE
    answer(catalogue_table(hides=wide))
    if not wide:
        answer("")
        for sentence in catalogue_sentences():
            answer(sentence)
    answer(phrase("legend of libraries", folder=PROGRAMS))
    for name in LIBRARIES:
        if (missing := absence(name)) is not None:
            answer(missing)
    return main.DONE


def _entry(name: str) -> dict[str, Any]:
    entry, change = LIBRARIES[name], lines_changed(name)
    return {
        "library": name,
        **fields_of(entry, "title", "package", "installed", "version", "command"),
        "program": str(entry.program),
        "runs": entry.runs(),
        "hides": entry.hides(),
        "lines": change.lines,
        "lines_added": change.added,
        "lines_removed": change.removed,
        "bridge_lines": bridge_lines(name),
    }


def _run(args: Given, answer: Answer) -> int:
    from dlojz.running.measure import configurations, run_libraries

    rounds, fields = args["rounds"], {name: args[name] for name in FIELDS}
    names = _names(args)
    # The length of the bar: only libraries that have this layout and are installed are run.
    runnable, _ = configurations(names, **fields)
    with progress_bar(total=rounds * len(runnable)) as update:
        begun = 0

        def on_run(name: str, _: int) -> None:
            nonlocal begun
            update(begun, description=LIBRARIES[name].title)
            begun += 1

        # With one round a run that was made before is shown; several rounds compare new runs only.
        rows = run_libraries(names, rounds=rounds, again=rounds > 1, root=args["root"], on_run=on_run, **fields)
    if args["json"]:
        answer([row.to_dict() for row in rows])
    else:
        _print(rows, answer)
    if args["figure"] and any(row.ran for row in rows):
        from dlojz.display.figures.library_figures import libraries_figure

        libraries_figure(rows, args["figure"])
        if not args["json"]:
            answer(en=f"figure: {args['figure']}", fr=f"figure : {args['figure']}")
    # A library that cannot run here is no failure; one that could and did not come to its end is.
    return main.DONE if all(row.ran for row in rows if row.name in runnable) else main.FAILED


def _print(rows: list[LibraryRow], answer: Answer) -> None:
    from dlojz.display.figures import library_figures as tables

    row = next((row for row in rows if row.config is not None), None)
    if row is None or row.config is None:
        for sentence in tables.notes(rows):
            answer(sentence)
        return
    layout = row.config.layout
    answer(phrase("head of libraries", row=row, layout=layout))
    answer(tables.measured_table(rows))
    answer("")
    for sentence in (*tables.hides_sentences(rows), *tables.notes(rows)):
        answer(sentence)
