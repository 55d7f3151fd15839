"""`dlojz machines`: clusters that runs can be sent to, what one would cost there, and the script that would be sent.

Layer 6. Invariant: nothing is sent and nothing is asked of a scheduler; a damaged machine file hinders no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dlojz import cli
from dlojz.cli.answer import answering, tell
from dlojz.cli.flags import Flag, config_flags, config_of, json_flag, number, parse, scheduler_flags
from dlojz.launch.cost import preview_of
from dlojz.launch.limits import Request, admit
from dlojz.launch.machines import Machine, here, machine, machine_files
from dlojz.launch.slurm_script import job_script
from dlojz.runs.owner import DEFAULT_WORKER
from dlojz.runs.store import runs_root
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.markup import visible


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
            answer([_summary(one) for one in found] if given.get("json") else _table(found))
        else:
            answer(_about(machine(names[0]), given))
    return cli.DONE


def _about(site: Machine, given: dict[str, Any]) -> Any:
    hours = number(given, "hours", float)
    config = config_of(given)
    request = Request(
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
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    facts = [
        (say(en="partition", fr="partition"), site.partition or "-"),
        (say(en="interconnect", fr="réseau"), site.interconnect),
        (say(en="source", fr="source"), f"{site.source} ({site.date})"),
    ]
    for name, value in [*shown.lines(), *((name, value) for name, value in facts if value)]:
        table.add_row(Text(visible(name)), Text(visible(value)))
    return table


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


def _table(found: list[Machine]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    titles = (
        say(en="machine", fr="machine"),
        say(en="what it is", fr="description"),
        say(en="device", fr="appareil"),
        say(en="node", fr="nœud"),
        say(en="at most", fr="au plus"),
    )
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=not table.columns)
    own = here()
    for site in found:
        mark = say(en=" (here)", fr=" (ici)") if site.name in own else ""
        places = "GPU" if site.device != "cpu" else say(en="ranks", fr="rangs")
        most = say(
            en=f"{site.max_nodes} nodes, {site.max_hours:g} h", fr=f"{site.max_nodes} nœuds, {site.max_hours:g} h"
        )
        cells = (site.name + mark, site.title, site.device, f"{site.gpus_per_node} {places}", most)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table
