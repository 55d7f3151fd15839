"""`dlojz libraries`: the same training as a user of each library writes it.

A library that is not installed has a row that says what installs it, and stops nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.cli import main
from dlojz.cli.options import Flag, answering, console, json_flag, number, parse, tell
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

HELP = {
    "en": """The same training as a user of each library writes it: plain torch, DeepSpeed, Accelerate, Megatron-core,
Colossal-AI.

Without --run: a table of the libraries: which are here, what installs the others, how many lines of their program
differ from plain torch's, and what their user no longer writes. --show prints a program, and on stderr the command by
which it runs alone, with no lab around it.

With --run: each program that can be run is run on real processes, one after the other, --rounds times, with the lab's
probes attached from outside; then one table: lines, losses, memory, bytes predicted and counted, time of a step over
plain torch's of the same round (one round alone is mostly noise). One such run alone: dlojz run --library accelerate
--model gpt_tiny --dp 2.

Examples:
  dlojz libraries
  dlojz libraries --show deepspeed
  dlojz libraries --run --model gpt_tiny --dp 2 --steps 20
  dlojz libraries --run --model coatnet_tiny --dp 2 --rounds 5 --figure libraries.png
  dlojz libraries --run --only torch,deepspeed,accelerate --zero 3 --json""",
    "fr": """Le même entraînement, écrit comme l’écrit l’utilisateur de chaque bibliothèque : torch seul, DeepSpeed,
Accelerate, Megatron-core, Colossal-AI.

Sans --run : un tableau des bibliothèques : lesquelles sont ici, ce qui installe les autres, combien de lignes de leur
programme diffèrent de celui de torch seul, et ce que l’on n’écrit plus. --show affiche un programme et, sur stderr, la
commande par laquelle il s’exécute seul, sans le TP autour.

Avec --run : chaque programme exécutable l’est sur de vrais processus, l’un après l’autre, --rounds fois, avec les
sondes du TP posées de l’extérieur ; puis un tableau : lignes, pertes, mémoire, octets prédits et comptés, durée d’un
pas rapportée à celle de torch seul au même tour (un tour seul n’est guère que du bruit). Une seule de ces
exécutions : dlojz run --library accelerate --model gpt_tiny --dp 2.

Exemples :
  dlojz libraries
  dlojz libraries --show deepspeed
  dlojz libraries --run --model gpt_tiny --dp 2 --steps 20
  dlojz libraries --run --model coatnet_tiny --dp 2 --rounds 5 --figure bibliotheques.png
  dlojz libraries --run --only torch,deepspeed,accelerate --zero 3 --json""",
}
DEFAULTS = {
    "model": "gpt_tiny",
    "dp": 2,
    "tp": 1,
    "pp": 1,
    "zero": 0,
    "steps": 20,
    "micro_batch": 16,
    "micro_batches": 1,
}
DEFAULT_ROUNDS = 3
WIDE = 100
"""Columns below which the catalogue's last column stands under the table."""
_RUNNING = (*DEFAULTS, "rounds", "only", "figure", "root")


def libraries_command(words: list[str]) -> int:
    """List the libraries, show a program, or run them side by side."""
    given = parse("libraries", say(**HELP), _flags(), words)
    _check(given)
    with answering(given.get("json", False)) as answer:
        if given.get("show"):
            answer(library(given["show"]).program.read_text(encoding="utf-8").rstrip())
            tell(say(en="\nIt runs alone, by:\n", fr="\nIl s’exécute seul, par :\n") + command_alone(given["show"]))
            return main.DONE
        return _run(given, answer) if given.get("run") else _list(given, answer)


def _flags() -> list[Flag]:
    counts = {
        "dp": say(en="data-parallel replicas", fr="répliques (parallélisme de données)"),
        "tp": say(
            en="ranks that share each layer (Megatron-core)", fr="rangs qui se partagent chaque couche (Megatron-core)"
        ),
        "pp": say(en="pipeline stages (Megatron-core)", fr="étages de pipeline (Megatron-core)"),
        "zero": say(en="ZeRO stage: what is sharded, 0 to 3", fr="étage de ZeRO : ce qui est partagé, de 0 à 3"),
        "steps": say(en="optimizer steps", fr="pas de l’optimiseur"),
        "micro_batch": say(en="samples per micro-batch", fr="échantillons par micro-batch"),
        "micro_batches": say(en="micro-batches per step and replica", fr="micro-batches par pas et par réplique"),
    }
    return [
        Flag("run", say(en="run them side by side", fr="les exécuter côte à côte"), kind="switch"),
        Flag(
            "show",
            say(en="print the program of this library", fr="afficher le programme de cette bibliothèque"),
            metavar="|".join(LIBRARIES),
        ),
        Flag(
            "only",
            say(en="these libraries only, with commas", fr="ces bibliothèques seulement, entre virgules"),
            metavar="NAMES",
            default=say(en="all", fr="toutes"),
        ),
        Flag("model", say(en="model of the catalogue", fr="modèle du catalogue"), default=str(DEFAULTS["model"])),
        *(Flag(name, text, metavar="INT", default=str(DEFAULTS[name])) for name, text in counts.items()),
        Flag(
            "rounds",
            say(en="how often each is run, in turns", fr="combien de fois chacun, à tour de rôle"),
            metavar="INT",
            default=str(DEFAULT_ROUNDS),
        ),
        Flag("figure", say(en="picture to write (.png, .svg)", fr="image à écrire (.png, .svg)"), metavar="FILE"),
        Flag("root", say(en="folder of the runs", fr="dossier des exécutions"), metavar="FOLDER"),
        json_flag(),
    ]


def _check(given: dict[str, Any]) -> None:
    """Refuse flags that would do nothing, and names that are none.

    Raises:
        LabError: naming what they need.
    """
    if given.get("show"):
        library(given["show"])
    for name in _names(given) or ():
        library(name)
    idle = next((name for name in _RUNNING if name in given), None)
    if idle and not given.get("run"):
        raise LabError(
            say(
                en=f"--{idle.replace('_', '-')} is for runs side by side: add --run.",
                fr=f"--{idle.replace('_', '-')} sert aux exécutions côte à côte : ajoutez --run.",
            )
        )
    if given.get("show") and (given.get("run") or given.get("json")):
        raise LabError(
            say(
                en="--show prints a program alone: leave --run and --json out.",
                fr="--show affiche un programme, seul : retirez --run et --json.",
            )
        )


def _names(given: dict[str, Any]) -> list[str] | None:
    text = given.get("only")
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise LabError(
            say(
                en=f"--only {text!r} names no library: use some of {', '.join(LIBRARIES)}, or leave it out.",
                fr=f"--only {text!r} ne nomme aucune bibliothèque : prenez-en parmi {', '.join(LIBRARIES)}, "
                "ou retirez-le.",
            )
        )
    return names


def _list(given: dict[str, Any], answer: Any) -> int:
    from dlojz.display.figures.library_figures import catalogue_sentences, catalogue_table

    if given.get("json"):
        answer([_entry(name) for name in LIBRARIES])
        return main.DONE
    wide = console(stderr=False).width >= WIDE
    answer(catalogue_table(hides=wide))
    if not wide:
        answer("")
        for sentence in catalogue_sentences():
            answer(sentence)
    answer(
        say(
            en="\nlines: of code, without comments; (+ new, − gone) compared with plain torch; of bridge: modules "
            f"beside the program.\nprograms: {PROGRAMS}",
            fr="\nlignes : de code, sans commentaires ; (+ nouvelles, − disparues) par rapport à torch seul ; "
            f"d’adaptation : modules à côté du programme.\nprogrammes : {PROGRAMS}",
        )
    )
    for name in LIBRARIES:
        if (missing := absence(name)) is not None:
            answer(missing)
    return main.DONE


def _entry(name: str) -> dict[str, Any]:
    one, change = LIBRARIES[name], lines_changed(name)
    return {
        "library": name,
        "title": one.title,
        "package": one.package,
        "installed": one.installed,
        "version": one.version,
        "command": one.command,
        "program": str(one.program),
        "runs": one.runs(),
        "hides": one.hides(),
        "lines": change.lines,
        "lines_added": change.added,
        "lines_removed": change.removed,
        "bridge_lines": bridge_lines(name),
    }


def _run(given: dict[str, Any], answer: Any) -> int:
    from dlojz.running.measure import configurations, run_libraries

    rounds = number(given, "rounds", least=1) or DEFAULT_ROUNDS
    asked = {name: given.get(name, usual) for name, usual in DEFAULTS.items()}
    fields: dict[str, Any] = {name: value if name == "model" else number(asked, name) for name, value in asked.items()}
    names = _names(given)
    _check_figure(given)
    runnable, _ = configurations(names, **fields)
    shown = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=rounds * len(runnable))
        begun = False

        def on_run(name: str, _: int) -> None:
            nonlocal begun
            progress.update(task, description=LIBRARIES[name].title, advance=int(begun))
            begun = True

        found = run_libraries(names, rounds=rounds, again=rounds > 1, root=given.get("root"), on_run=on_run, **fields)
    if given.get("json"):
        answer([row.to_dict() for row in found])
    else:
        _print(found, answer)
    if given.get("figure") and any(row.ran for row in found):
        from dlojz.display.figures.library_figures import libraries_figure

        libraries_figure(found, given["figure"])
        if not given.get("json"):
            answer(say(en=f"figure: {given['figure']}", fr=f"figure : {given['figure']}"))
    return main.DONE if all(row.ran for row in found if row.name in runnable) else main.FAILED


def _check_figure(given: dict[str, Any]) -> None:
    """Refuse a figure that could not be written, before minutes are spent.

    Raises:
        LabError: if its ending names no format, or its folder takes no file.
    """
    if not (path := given.get("figure")):
        return
    folder = Path(path).resolve().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise LabError(
            say(
                en=f"--figure {path} cannot be written: {folder} is no folder that takes files; name one that does.",
                fr=f"--figure {path} ne peut pas être écrit : {folder} n’est pas un dossier où écrire ; nommez-en "
                "un autre.",
            )
        )
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise LabError(
            say(
                en=f"--figure {path} needs an ending that names its format: .png, .svg or .pdf.",
                fr=f"--figure {path} doit se terminer par son format : .png, .svg ou .pdf.",
            )
        )


def _print(found: list[LibraryRow], answer: Any) -> None:
    from dlojz.display.figures import library_figures as tables

    first = next((row for row in found if row.config is not None), None)
    if first is None or first.config is None:
        for sentence in tables.notes(found):
            answer(sentence)
        return
    layout = first.config.layout
    answer(
        say(
            en=f"{first.config.model}, {first.config.steps} steps, {layout.world_size} processes, global batch "
            f"{layout.global_batch}; rank 0; bytes: predicted | measured",
            fr=f"{first.config.model}, {first.config.steps} pas, {layout.world_size} processus, batch global "
            f"{layout.global_batch} ; rang 0 ; octets : prédits | mesurés",
        )
    )
    answer(tables.measured_table(found))
    answer("")
    for sentence in (*tables.hides_sentences(found), *tables.notes(found)):
        answer(sentence)
