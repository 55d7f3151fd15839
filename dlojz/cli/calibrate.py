"""`dlojz calibrate`: what this machine does in a second, measured in a minute, for the predictions made on it.

Layer 6. Invariant: the file keeps the measurements; the processes that measured are gone when the command ends; with
`--json`, what they draw goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dlojz import cli
from dlojz.cli.answer import answering, console, tell
from dlojz.cli.flags import Flag, json_flag, parse
from dlojz.collectives.words import format_latency
from dlojz.schema import LabError, one_of
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.launch.calibrating import Tell
    from dlojz.predict.time.measured import Measured
    from dlojz.predict.time.measured_site import Site

HELP = {
    "en": """Measure this machine, in about a minute: matrix products by size and precision, convolutions by shape,
passes over memory, launches, AdamW, and messages by size, each with 1, 2 and 4 processes at work, as processes that
share cores are each slower. The parameters of the cost model come from that; nothing is fitted to the time of a model.

The measurements are kept in the user's folder (--output: elsewhere) with the date, the libraries' versions and a
checksum. Close what else computes here first: the load before the measurement is kept too, and warned of.

Examples:
  dlojz calibrate --figure calibration.png
  dlojz calibrate --quick                      (a few seconds; less exact)
  dlojz calibrate --show                       (what was measured before; measures nothing)""",
    "fr": """Mesurer cette machine, en une minute environ : produits de matrices selon la taille et la précision,
convolutions selon la forme, passages sur la mémoire, lancements, AdamW, et messages selon la taille, chaque fois avec
1, 2 et 4 processus au travail, car des processus qui partagent des cœurs sont chacun plus lents. Les paramètres du
modèle de coût en viennent ; rien n’est ajusté sur la durée d’un modèle.

Les mesures sont gardées dans le dossier de l’utilisateur (--output : ailleurs) avec la date, les versions des
bibliothèques et une somme de contrôle. Fermez d’abord ce qui calcule par ailleurs : la charge avant la mesure est
gardée aussi, et signalée.

Exemples :
  dlojz calibrate --figure calibrage.png
  dlojz calibrate --quick                      (quelques secondes ; moins exact)
  dlojz calibrate --show                       (ce qui a été mesuré auparavant ; ne mesure rien)""",
}
DEFAULT_RANKS = "1,2,4"
DEVICES = ("auto", "cpu", "cuda")
MOST_RANKS = 16


def calibrate_command(words: list[str]) -> int:
    """Measure, keep, and show what the measurements come to."""
    given = parse("calibrate", say(**HELP), _flags(), words)
    ranks = _ranks(given.get("ranks", DEFAULT_RANKS))
    device = given.get("device", "auto")
    if device not in DEVICES:
        raise LabError(one_of("device", device, DEVICES))
    from dlojz.launch.calibrating import measure_machine
    from dlojz.predict.time.measured import default_path, read_measured, write_measured
    from dlojz.predict.time.measured_site import site

    path = Path(given["output"]).expanduser() if given.get("output") else default_path()
    with answering(given.get("json", False)) as answer:
        if given.get("show"):
            measured = read_measured(path)
        else:
            try:
                measured = measure_machine(ranks, quick=given.get("quick", False), device=device, watch=_watch)
            finally:
                console().show_cursor(True)  # the bar hides it, and an interrupted process does not bring it back
            write_measured(path, measured)
        sites = [site(measured, setup.ranks) for setup in measured.setups]
        if given.get("figure"):
            from dlojz.viz.calibrate_figure import calibrate_figure

            calibrate_figure(measured, sites, given["figure"])
        answer(_document(measured, sites) if given.get("json") else _table(sites))
        if not given.get("json"):
            answer(_summary(measured, sites))
    for written in (None if given.get("show") else str(path), given.get("figure")):
        if written:
            tell(say(en=f"written: {written}", fr=f"écrit : {written}"))
    _warn(measured)
    return cli.DONE


def _flags() -> list[Flag]:
    return [
        Flag(
            "ranks",
            say(en="numbers of processes to measure, from 1 on", fr="nombres de processus à mesurer, à partir de 1"),
            metavar="INT,INT",
            default=DEFAULT_RANKS,
        ),
        Flag("quick", say(en="a few seconds; less exact", fr="quelques secondes ; moins exact"), kind="switch"),
        Flag("show", say(en="show the file; measure nothing", fr="montrer le fichier, sans mesurer"), kind="switch"),
        Flag(
            "device",
            say(en="where: auto takes the GPUs if there are any", fr="où : auto prend les GPU s’il y en a"),
            metavar="|".join(DEVICES),
            default="auto",
        ),
        Flag("figure", say(en="picture to write (.png, .svg)", fr="image à écrire (.png, .svg)"), metavar="FILE"),
        Flag(
            "output",
            say(
                en="file of the measurements (default: ~/.config/dlojz/calibration.json)",
                fr="fichier des mesures (par défaut : ~/.config/dlojz/calibration.json)",
            ),
            metavar="FILE",
        ),
        json_flag(),
    ]


def _ranks(text: str) -> tuple[int, ...]:
    """The numbers of ranks, growing from 1 on.

    Raises:
        LabError: for anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) < 4]
    if len(numbers) != len(parts) or numbers[:1] != [1] or numbers != sorted(set(numbers)) or numbers[-1] > MOST_RANKS:
        raise LabError(
            say(
                en=f"--ranks takes numbers that grow from 1 to {MOST_RANKS} at most, such as {DEFAULT_RANKS}, but "
                f"{text!r} was received.",
                fr=f"--ranks attend des nombres croissants de 1 à {MOST_RANKS} au plus, comme {DEFAULT_RANKS}, mais "
                f"{text!r} a été reçu.",
            )
        )
    return tuple(numbers)


@contextlib.contextmanager
def _watch(ranks: int) -> Iterator[Tell]:
    shown = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        task = progress.add_task(say(en=f"{ranks} process(es)", fr=f"{ranks} processus"), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _document(measured: Measured, sites: list[Site]) -> dict[str, Any]:
    return {
        **{name: value for name, value in measured.to_dict().items() if name != "setups"},
        "sites": [
            {
                "ranks": one.ranks,
                "parameters": one.calibration.values,
                "peak_flops": dict(one.cluster.gpu.peak_flops),
                "memory_bytes_per_s": one.cluster.gpu.memory_bytes_per_s,
                "update": one.update._asdict(),
                "sharded": one.sharded._asdict(),
                "median_error": one.median_error,
                "residuals": [{**row._asdict(), "error": row.error} for row in one.residuals],
            }
            for one in sites
        ],
    }


def _table(sites: list[Site]) -> Table:
    from dlojz.viz.calibrate_figure import kind_title, residual_rows

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    titles = (
        say(en="ranks", fr="rangs"),
        say(en="measured", fr="mesuré"),
        say(en="points", fr="points"),
        say(en="median residual", fr="résidu médian"),
        say(en="largest", fr="le plus grand"),
    )
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place == 1 else "right", no_wrap=True)
    for ranks, kind, number, median, largest in residual_rows(sites):
        table.add_row(str(ranks), kind_title(kind), str(number), _percent(median), _percent(largest))
    return table


def _percent(share: float) -> str:
    return say(en=f"{100 * share:.0f}%", fr=f"{100 * share:.0f} %")


def _summary(measured: Measured, sites: list[Site]) -> str:
    lines = [f"{measured.processor}, {measured.date}"]
    for one in sites:
        found, chip = one.calibration, one.cluster.gpu
        peak = max(chip.peak_flops.values()) * found.product_efficiency / 1e9
        memory = chip.memory_bytes_per_s * found.memory_efficiency / 1e9
        launch, tensor = format_latency(found.serial_s), format_latency(one.update.start)
        lines.append(
            say(
                en=f"{one.ranks} rank(s): large product {peak:.0f} GFLOP/s, pass {memory:.1f} GB/s, launch {launch}, "
                f"AdamW {tensor} per tensor",
                fr=f"{one.ranks} rang(s) : grand produit {peak:.0f} GFLOP/s, passage {memory:.1f} Go/s, lancement "
                f"{launch}, AdamW {tensor} par tenseur",
            )
        )
    return "\n".join(lines)


def _warn(measured: Measured) -> None:
    """Say that something else was computing here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else measured.cores
    if measured.load > 0.5 * cores:
        tell(
            say(
                en=f"the load was {measured.load:.1f} on {measured.cores} core(s) before the measurement: what else "
                "computed here made it slower.",
                fr=f"la charge était de {measured.load:.1f} sur {measured.cores} cœur(s) avant la mesure : ce qui "
                "calculait ici par ailleurs l’a ralentie.",
            )
        )
