"""`dlojz doctor`: what this machine has, what it lacks, and what to do about it; the same for the memory of a run.

Layer 6. Invariant: every line that is not ok says what to do.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from dlojz import cli
from dlojz.cli.answer import answering
from dlojz.cli.checks import Check, State, examine
from dlojz.cli.flags import Flag, json_flag, parse, root_flag
from dlojz.runs import find
from dlojz.runs.store import runs_root
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.markup import visible

MARKS: dict[State, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "bold red")}


def doctor_command(words: list[str]) -> int:
    """Check the machine, or explain the memory of a run."""
    given = parse(
        "doctor",
        say(
            en="""Check what the labs need on this machine: Python, libraries, cores, memory, disk, two communicating
processes, SLURM, JupyterLab. Each line is ok, a warning or a problem, with what to do.
Exit code 1 if there is a problem.

With the name of a run that ran out of memory: what filled it by category, the limit, the three cheapest levers with
their predicted effect and the command to type. The beginning of a name is enough.

Examples:
  dlojz doctor
  dlojz doctor --json
  dlojz doctor 20250101-120000""",
            fr="""Examiner ce dont les TP ont besoin sur cette machine : Python, bibliothèques, cœurs, mémoire, disque,
deux processus qui communiquent, SLURM, JupyterLab. Chaque ligne dit ok, attention ou problème, et que faire.
Code de sortie 1 s'il y a un problème.

Avec le nom d’une exécution à court de mémoire : ce qui la remplissait par catégorie, la limite, les trois leviers les
moins coûteux avec leur effet prédit et la commande à taper. Le début du nom suffit.

Exemples :
  dlojz doctor
  dlojz doctor --json
  dlojz doctor 20250101-120000""",
        ),
        [
            Flag(
                "words",
                say(
                    en="name of a run, or its beginning (see `dlojz runs`); without it, the machine is checked",
                    fr="nom d’une exécution, ou son début (voir `dlojz runs`) ; sans lui, la machine est examinée",
                ),
                metavar="[RUN]",
                kind="words",
            ),
            root_flag(),
            json_flag(),
        ],
        words,
    )
    if given.get("words"):
        return _explain(given)
    with answering(given.get("json", False)) as answer:
        checks = examine(runs_root(given.get("root")))
        if given.get("json"):
            answer(
                {"checks": [asdict(check) for check in checks], "problems": sum(c.state == "problem" for c in checks)}
            )
        else:
            answer(_table(checks))
            answer(_verdict(checks))
    return cli.FAILED if any(check.state == "problem" for check in checks) else cli.DONE


def _explain(given: dict[str, Any]) -> int:
    """What filled the memory of one run."""
    names = given["words"]
    if len(names) != 1:
        raise LabError(
            say(
                en=f"`dlojz doctor` takes the name of one run, but {len(names)} were received: `dlojz runs` lists "
                "them.",
                fr=f"`dlojz doctor` prend le nom d’une exécution, mais {len(names)} ont été reçus : `dlojz runs` les "
                "liste.",
            )
        )
    run = find(names[0], given.get("root"))
    from dlojz.cli.post_mortem import diagnose
    from dlojz.cli.post_mortem_words import told

    with answering(given.get("json", False)) as answer:
        diagnosis = diagnose(run)
        if given.get("json"):
            answer(diagnosis.to_dict())
        else:
            for line in told(diagnosis):
                answer(line)
    return cli.DONE


def _verdict(checks: list[Check]) -> str:
    problems, warnings = (sum(check.state == state for check in checks) for state in ("problem", "warning"))
    if problems:
        return say(
            en=f"{problems} problem(s) to solve before running.",
            fr=f"{problems} problème(s) à résoudre avant d'exécuter.",
        )
    if warnings:
        return say(en=f"Ready, with {warnings} warning(s).", fr=f"Prêt, avec {warnings} avertissement(s).")
    return say(en="Ready: start with `dlojz demo`.", fr="Prêt : commencez par `dlojz demo`.")


def _table(checks: list[Check]) -> Table:
    words: dict[State, str] = {
        "ok": "ok",
        "warning": say(en="warning", fr="attention"),
        "problem": say(en="problem", fr="problème"),
    }
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for check in checks:
        mark, style = MARKS[check.state]
        found = Text(visible(check.found), overflow="fold")
        if check.advice:
            found.append(f"\n→ {visible(check.advice)}", style=style)
        table.add_row(Text(f"{mark} {words[check.state]}", style=style), check.name, found)
    return table
