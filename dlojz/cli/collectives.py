"""Commands on communication: `dlojz collectives`, `dlojz calibrate`.

`dlojz collectives --calibrate`: α and β of the links of this machine, timed on real processes.

The processes are gone when the command ends; with `--json`, what they draw goes to stderr.

`dlojz collectives`: the algorithms of collective communication, drawn, counted and timed.

Every figure comes from the programs that also run; what is timed is timed on real processes.

`dlojz calibrate`: what this machine does in a second, measured in a minute, for the predictions made on it.

The file keeps the measurements; the processes that measured are gone when the command ends; with `--json`, what they
draw goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, format_bytes, one_of, percent, say
from dlojz.base.table import Table
from dlojz.by_hand import collectives
from dlojz.by_hand.collectives import AlphaBetaFit, fit, simulate
from dlojz.by_hand.collectives.algorithm_catalogue import algorithm, check_size, node_size
from dlojz.by_hand.collectives.running import LIBRARY, SIZES_BYTES, algorithm_of, measure
from dlojz.cli import main
from dlojz.cli.options import Flag, answering, console, json_flag, number, parse, tell
from dlojz.display.collective_text import format_latency, step_words

if TYPE_CHECKING:
    from dlojz.cost_model.measured_machine import Measured, MeasuredSite
    from dlojz.running.measure import Tell

RANKS_PER_CORE = 4
WALL_S = 300.0


def calibrate(given: dict[str, Any], size: int, answer: Callable[[Any], None]) -> int:
    """Time a collective on forked processes, fit α and β, answer.

    Args:
        given: the flags.
        size: number of ranks.
        answer: what shows the result.

    Raises:
        LabError: if there are too few ranks, more than the cores can run at once, or a file cannot be written.
    """
    collective = given.get("name", "all_reduce")
    most = RANKS_PER_CORE * len(os.sched_getaffinity(0))
    if not 2 <= size <= most:
        cores = most // RANKS_PER_CORE
        raise LabError(
            say(
                en=f"--calibrate times 2 to {most} ranks on the {cores} core(s) of this machine (more would "
                f"measure how they take turns), but {size} was received.",
                fr=f"--calibrate chronomètre de 2 à {most} rangs sur les {cores} cœur(s) de cette machine (au-delà, on "
                f"mesurerait comment ils se relaient), mais {size} a été reçu.",
            )
        )
    calibration = _measured(collective, size)
    from dlojz.display.figures.communication_figures import calibration_figure, dominance, summary

    if given.get("output"):
        _keep(calibration, Path(given["output"]))
    if given.get("figure"):
        calibration_figure(calibration, given["figure"])
    if given.get("json"):
        answer(
            {
                **calibration.to_dict(),
                "bandwidth_bytes_per_s": calibration.bandwidth_bytes_per_s,
                "residual": calibration.residual,
                "fitted_s": [calibration.fitted_s(point.message_bytes) for point in calibration.points],
            }
        )
        return main.DONE
    titles = (
        say(en="message", fr="message"),
        say(en="measured", fr="mesuré"),
        say(en="fitted", fr="ajusté"),
    )
    rows = tuple(
        (
            format_bytes(point.message_bytes),
            format_latency(point.time_s),
            format_latency(calibration.fitted_s(point.message_bytes)),
        )
        for point in calibration.points
    )
    answer(Table(titles, rows, align="r"))
    lines = [say(en=f"{collective}, {size} ranks: ", fr=f"{collective}, {size} rangs : ") + summary(calibration)]
    answer("\n".join([*lines, *filter(None, [dominance(calibration)])]))
    tell_written(given.get("output"))
    tell_written(given.get("figure"))
    return main.DONE


def _measured(collective: str, size: int) -> AlphaBetaFit:
    """Time the collective on forked processes; the first draws the progress bar."""
    from dlojz.processes.forks import spmd

    def timed(rank: int, size: int) -> list[Any]:
        if rank:
            return list(measure(collective))
        shown = console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
            task = progress.add_task(say(en="sizes of message", fr="tailles de message"), total=len(SIZES_BYTES))
            return list(measure(collective, tell=lambda done, total: progress.update(task, completed=done)))

    try:
        answers = spmd(timed, size, wall_s=WALL_S)
    finally:
        console().show_cursor(True)  # the bar hides it, and an interrupted process does not bring it back
    failed = next((answer for answer in answers if answer.error is not None), None)
    if failed is not None and failed.error is not None:
        why = failed.error.message or failed.error.name or failed.error.kind
        raise LabError(
            say(
                en=f"rank {failed.rank} could not be timed: {why} (`dlojz doctor` checks that processes can "
                "communicate).",
                fr=f"le rang {failed.rank} n’a pas pu être chronométré : {why} (`dlojz doctor` vérifie que les "
                "processus communiquent).",
            )
        )
    return fit(answers[0].value)


def _keep(calibration: AlphaBetaFit, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(calibration.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise LabError(
            say(
                en=f"the calibration cannot be written to {path}: {error.strerror}; give another path.",
                fr=f"la calibration ne peut pas être écrite dans {path} : {error.strerror} ; donnez un autre chemin.",
            )
        ) from None


def tell_written(path: str | None) -> None:
    """Say on stderr which file was written, if one was."""
    if path:
        tell(say(en=f"written: {path}", fr=f"écrit : {path}"))


COLLECTIVES_HELP = {
    "en": """The algorithms of collective communication: what each rank sends to whom, how often, how much.

Without --name: a table of all, for --ranks ranks. Rounds are messages that wait for each other (each costs α); "moved"
is what the busiest rank sends or receives, in messages (each byte costs β); "added" what it sums.
Time = rounds·α + moved·n·β.

With --name: one algorithm, step by step in words; --figure draws it.

With --calibrate: all-reduce (or --name) is timed on real processes of this machine, from 1 KiB to 16 MiB, and α and
the bandwidth 1/β are fitted; --figure draws points, line and what it says of 2, 8 and 512 ranks; --output keeps them.

Examples:
  dlojz collectives --ranks 8
  dlojz collectives --name ring_all_reduce --ranks 4 --figure ring.png
  dlojz collectives --calibrate --ranks 4 --figure calibration.png --output calibration.json
  dlojz collectives --calibrate --name tree_all_reduce --json""",
    "fr": """Les algorithmes de communication collective : ce que chaque rang envoie, à qui, combien de fois, combien.

Sans --name : un tableau de tous, pour --ranks rangs. Les étapes sont des messages qui s’attendent (chacune coûte α) ;
« déplacé » est ce qu’envoie ou reçoit le rang le plus chargé, en messages (chaque octet coûte β) ; « additionné », ce
qu’il somme. Durée = étapes·α + déplacé·n·β.

Avec --name : un algorithme, étape par étape, en phrases ; --figure le dessine.

Avec --calibrate : l’all-reduce (ou --name) est chronométré sur de vrais processus de cette machine, de 1 Kio à 16 Mio,
puis α et le débit 1/β sont ajustés ; --figure dessine les points, la droite et ce qu’elle dit de 2, 8 et 512 rangs ;
--output les garde.

Exemples :
  dlojz collectives --ranks 8
  dlojz collectives --name ring_all_reduce --ranks 4 --figure anneau.png
  dlojz collectives --calibrate --ranks 4 --figure calibration.png --output calibration.json
  dlojz collectives --calibrate --name tree_all_reduce --json""",
}
COLLECTIVES_DEFAULT_RANKS = 4


def collectives_command(words: list[str]) -> int:
    """List, show or time the algorithms."""
    given = parse("collectives", say(**COLLECTIVES_HELP), _collectives_flags(), words)
    _check(given)
    ranks = number(given, "ranks")
    size = check_size(COLLECTIVES_DEFAULT_RANKS if ranks is None else ranks)
    per_node = number(given, "per_node")
    with answering(given.get("json", False)) as answer:
        if given.get("calibrate"):
            return calibrate(given, size, answer)
        if given.get("name"):
            return _show(given, size, per_node, answer)
        return _list(given, size, per_node, answer)


def _collectives_flags() -> list[Flag]:
    return [
        Flag(
            "name",
            say(en="algorithm: ", fr="algorithme : ")
            + ", ".join(collectives.names())
            + say(en="; with --calibrate also ", fr=" ; avec --calibrate aussi ")
            + ", ".join(LIBRARY),
            metavar="NAME",
        ),
        Flag(
            "ranks",
            say(en="number of ranks", fr="nombre de rangs"),
            metavar="INT",
            default=str(COLLECTIVES_DEFAULT_RANKS),
        ),
        Flag(
            "per_node",
            say(
                en="ranks of one node, for hierarchical_all_reduce (default: at most 4)",
                fr="rangs d’un nœud, pour hierarchical_all_reduce (par défaut : 4 au plus)",
            ),
            metavar="INT",
        ),
        Flag(
            "calibrate",
            say(
                en="time it on real processes and fit α and β", fr="chronométrer sur de vrais processus, ajuster α et β"
            ),
            kind="switch",
        ),
        Flag("figure", say(en="picture to write (.png, .svg)", fr="image à écrire (.png, .svg)"), metavar="FILE"),
        Flag(
            "output",
            say(en="file that keeps the calibration as JSON", fr="fichier qui garde la calibration en JSON"),
            metavar="FILE",
        ),
        json_flag(),
    ]


def _check(given: dict[str, Any]) -> None:
    """Refuse flags that would do nothing.

    Raises:
        LabError: naming what they need.
    """
    name, calibrating = given.get("name"), given.get("calibrate", False)
    if name is not None:
        _ = algorithm_of(name) if calibrating else algorithm(name)
    if given.get("figure") and not (name or calibrating):
        raise LabError(
            say(
                en="--figure draws one algorithm or a calibration: add --name ring_all_reduce, or --calibrate.",
                fr="--figure dessine un algorithme ou une calibration : "
                "ajoutez --name ring_all_reduce, ou --calibrate.",
            )
        )
    if given.get("output") and not calibrating:
        raise LabError(
            say(
                en="--output keeps a calibration: add --calibrate.",
                fr="--output garde une calibration : ajoutez --calibrate.",
            )
        )
    if given.get("per_node") and (calibrating or (name and not algorithm(name).two_level)):
        raise LabError(
            say(
                en="--per-node is for --name hierarchical_all_reduce, without --calibrate: leave it out here.",
                fr="--per-node ne sert qu’avec --name hierarchical_all_reduce, sans --calibrate : retirez-le.",
            )
        )


def _list(given: dict[str, Any], size: int, per_node: int | None, answer: Any) -> int:
    costs = {name: collectives.terms(name, size, per_node=per_node) for name in collectives.names()}
    if given.get("json"):
        answer(
            [
                {
                    "name": name,
                    "collective": algorithm(name).collective,
                    "ranks": size,
                    "chunks": collectives.num_chunks(name, size),
                    "rounds": cost.rounds,
                    "moved": float(cost.moved),
                    "added": float(cost.added),
                }
                for name, cost in costs.items()
            ]
        )
        return main.DONE
    titles = (
        say(en="name", fr="nom"),
        "",
        say(en="rounds", fr="étapes"),
        say(en="moved", fr="déplacé"),
        say(en="added", fr="additionné"),
    )
    rows = tuple(
        (name, algorithm(name).title(), str(cost.rounds), _times(cost.moved), _times(cost.added))
        for name, cost in costs.items()
    )
    answer(Table(titles, rows, align="llr", whole=1))
    nodes = node_size(size, per_node)
    answer(
        say(
            en=f"for {size} ranks (nodes of {nodes}); moved and added: by the busiest rank, in messages",
            fr=f"pour {size} rangs (nœuds de {nodes}) ; déplacé, additionné : par le rang le plus chargé, en messages",
        )
    )
    return main.DONE


def _times(share: Fraction) -> str:
    return f"{decimal(float(share), 2)} ×"


def _show(given: dict[str, Any], size: int, per_node: int | None, answer: Any) -> int:
    name = given["name"]
    simulation = simulate(name, size, per_node=per_node)
    if given.get("figure"):
        from dlojz.display.figures.communication_figures import collective_figure

        collective_figure(name, size, path=given["figure"], per_node=per_node)
    if given.get("json"):
        cost = collectives.terms(name, size, per_node=per_node)
        answer(
            {
                "name": name,
                "collective": algorithm(name).collective,
                "ranks": size,
                "rounds": cost.rounds,
                "moved": float(cost.moved),
                "added": float(cost.added),
                "steps": [[transfer._asdict() for transfer in step] for step in simulation.transfers],
                "values": [simulation.values(step) for step in range(len(simulation.states))],
            }
        )
        return main.DONE
    lines = [say(en=f"{name}, {size} ranks", fr=f"{name}, {size} rangs")]
    for step in range(1, len(simulation.states)):
        lines.append(say(en=f"step {step}", fr=f"étape {step}"))
        lines += [f"  {sentence}" for sentence in step_words(simulation, step)]
    if not simulation.transfers:
        lines.append(say(en="one rank alone sends nothing", fr="un rang seul n’envoie rien"))
    answer("\n".join(lines))
    tell_written(given.get("figure"))
    return main.DONE


CALIBRATE_HELP = {
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
CALIBRATE_DEFAULT_RANKS = "1,2,4"
DEVICES = ("auto", "cpu", "cuda")
MOST_RANKS = 16


def calibrate_command(words: list[str]) -> int:
    """Measure, keep, and show what the measurements come to."""
    given = parse("calibrate", say(**CALIBRATE_HELP), _calibrate_flags(), words)
    ranks = _ranks(given.get("ranks", CALIBRATE_DEFAULT_RANKS))
    device = given.get("device", "auto")
    if device not in DEVICES:
        raise LabError(one_of("device", device, DEVICES))
    from dlojz.cost_model.measured_machine import default_path, read_measured, site, write_measured
    from dlojz.running.measure import measure_machine

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
            from dlojz.display.figures.cost_model_figures import calibrate_figure

            calibrate_figure(measured, sites, given["figure"])
        answer(_document(measured, sites) if given.get("json") else _table(sites))
        if not given.get("json"):
            answer(_summary(measured, sites))
    for written in (None if given.get("show") else str(path), given.get("figure")):
        if written:
            tell(say(en=f"written: {written}", fr=f"écrit : {written}"))
    _warn(measured)
    return main.DONE


def _calibrate_flags() -> list[Flag]:
    return [
        Flag(
            "ranks",
            say(en="numbers of processes to measure, from 1 on", fr="nombres de processus à mesurer, à partir de 1"),
            metavar="INT,INT",
            default=CALIBRATE_DEFAULT_RANKS,
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
                en=f"--ranks takes numbers that grow from 1 to {MOST_RANKS} at most, such as "
                f"{CALIBRATE_DEFAULT_RANKS}, but {text!r} was received.",
                fr=f"--ranks attend des nombres croissants de 1 à {MOST_RANKS} au plus, comme "
                f"{CALIBRATE_DEFAULT_RANKS}, mais {text!r} a été reçu.",
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


def _document(measured: Measured, sites: list[MeasuredSite]) -> dict[str, Any]:
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


def _table(sites: list[MeasuredSite]) -> Table:
    from dlojz.display.figures.cost_model_figures import kind_title, residual_rows

    titles = (
        say(en="ranks", fr="rangs"),
        say(en="measured", fr="mesuré"),
        say(en="points", fr="points"),
        say(en="median residual", fr="résidu médian"),
        say(en="largest", fr="le plus grand"),
    )
    rows = tuple(
        (str(ranks), kind_title(kind), str(number), percent(median, 0), percent(largest, 0))
        for ranks, kind, number, median, largest in residual_rows(sites)
    )
    return Table(titles, rows, align="rlr", whole=2)


def _summary(measured: Measured, sites: list[MeasuredSite]) -> str:
    lines = [f"{measured.processor}, {measured.date}"]
    for one in sites:
        found, chip = one.calibration, one.cluster.gpu
        peak = max(chip.peak_flops.values()) * found.product_efficiency / 1e9
        memory = chip.memory_bytes_per_s * found.memory_efficiency / 1e9
        launch, tensor = format_latency(found.serial_s), format_latency(one.update.start)
        lines.append(
            say(
                en=f"{one.ranks} rank(s): large product {peak:.0f} GFLOP/s, pass {decimal(memory)} GB/s, launch "
                f"{launch}, AdamW {tensor} per tensor",
                fr=f"{one.ranks} rang(s) : grand produit {peak:.0f} GFLOP/s, passage {decimal(memory)} Go/s, lancement "
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
                en=f"the load was {decimal(measured.load)} on {measured.cores} core(s) before the measurement: what "
                "else computed here made it slower.",
                fr=f"la charge était de {decimal(measured.load)} sur {measured.cores} cœur(s) avant la mesure : ce qui "
                "calculait ici par ailleurs l’a ralentie.",
            )
        )
