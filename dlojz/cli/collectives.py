"""Commands on communication: `dlojz collectives`, `dlojz calibrate`.

What is timed is timed on real processes, which are gone when the command ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, format_bytes, one_of, percent, say
from dlojz.base.machine import cores_available
from dlojz.base.table import Table, titles
from dlojz.by_hand import collectives
from dlojz.by_hand.collectives import AlphaBetaFit, fit, simulate
from dlojz.by_hand.collectives.algorithm_catalogue import algorithm, check_size, node_size
from dlojz.by_hand.collectives.running import LIBRARY, SIZES_BYTES, algorithm_of, measure
from dlojz.cli.options import Answer, Given, check_needs, console, phrase, progress_bar, tell, tell_written, verb
from dlojz.display.collective_text import format_latency, step_words

if TYPE_CHECKING:
    from dlojz.cost_model.measured_machine import Measured, MeasuredSite
    from dlojz.running.measure import Tell

RANKS_PER_CORE = 4
WALL_S = 300.0


def calibrate(args: Given, size: int, answer: Answer) -> None:
    """Time a collective on forked processes, fit α and β, answer.

    Raises:
        LabError: if there are too few ranks, more than the cores can run at once, or a file cannot be written.
    """
    collective = args["name"] or "all_reduce"
    limit = RANKS_PER_CORE * cores_available()
    if not 2 <= size <= limit:
        cores = limit // RANKS_PER_CORE
        raise phrase.refused("calibrated sizes", limit=limit, cores=cores, size=size)
    calibration = _measured(collective, size)
    from dlojz.display.figures.communication_figures import calibration_figure, dominance, summary

    if args["output"]:
        _keep(calibration, Path(args["output"]))
    if args["figure"]:
        calibration_figure(calibration, args["figure"])
    if args["json"]:
        answer(
            {
                **calibration.to_dict(),
                "bandwidth_bytes_per_s": calibration.bandwidth_bytes_per_s,
                "residual": calibration.residual,
                # In s, at the sizes of `points`: α + β · bytes.
                "fitted_s": [calibration.fitted_s(point.message_bytes) for point in calibration.points],
            }
        )
        return
    rows = tuple(
        (
            format_bytes(point.message_bytes),
            format_latency(point.time_s),
            format_latency(calibration.fitted_s(point.message_bytes)),
        )
        for point in calibration.points
    )
    head = titles(en="message; measured; fitted", fr="message; mesuré; ajusté")
    answer(Table(head, rows, align="r"))
    lines = [say(en=f"{collective}, {size} ranks: ", fr=f"{collective}, {size} rangs : ") + summary(calibration)]
    answer("\n".join([*lines, *filter(None, [dominance(calibration)])]))
    for path in (args["output"], args["figure"]):
        tell_written(path, "written", "écrit")


def _measured(collective: str, size: int) -> AlphaBetaFit:
    """Time the collective on forked processes; the first draws the progress bar."""
    from dlojz.processes.forks import first_failure, spmd

    def timed(rank: int, size: int) -> list[Any]:
        # The ranks are forks that share this terminal, so one of them alone draws.
        if rank:
            return list(measure(collective))
        with progress_bar(say(en="sizes of message", fr="tailles de message"), len(SIZES_BYTES)) as update:
            return list(measure(collective, tell=update))

    try:
        answers = spmd(timed, size, wall_s=WALL_S)
    finally:
        console().show_cursor(True)  # the bar hides it, and an interrupted process does not bring it back
    if failed := first_failure(answers):
        rank, reason = failed
        raise phrase.refused("rank not timed", rank=rank, reason=reason)
    # measure returns the same points on every rank, so rank 0's are enough.
    return fit(answers[0].value)


def _keep(calibration: AlphaBetaFit, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(calibration.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise phrase.refused("calibration not written", path=path, strerror=error.strerror) from None


@verb("collectives", collectives=", ".join(collectives.names()), library=", ".join(LIBRARY))
def collectives_command(args: Given, answer: Answer) -> None:
    """List, show or time the algorithms."""
    _check(args)
    size = check_size(args["ranks"])
    if args["calibrate"]:
        calibrate(args, size, answer)
    elif args["name"]:
        _show(args, size, answer)
    else:
        _list(args, size, answer)


def _check(args: Given) -> None:
    """Refuse flags that would do nothing.

    Raises:
        LabError: naming what they need.
    """
    name, calibrating = args["name"], args["calibrate"]
    if name is not None:
        # Timing also takes torch's own collectives; only an algorithm of the catalogue has steps to draw.
        _ = algorithm_of(name) if calibrating else algorithm(name)
    check_needs(args, "figure", "name", "calibrate")
    check_needs(args, "output", "calibrate")
    if args["per_node"] and (calibrating or (name and not algorithm(name).two_level)):
        raise phrase.refused("per-node without its algorithm")


def _list(args: Given, size: int, answer: Answer) -> None:
    per_node = args["per_node"]
    costs = {name: collectives.terms(name, size, per_node=per_node) for name in collectives.names()}
    if args["json"]:
        answer([{**_data(name, size, per_node), "chunks": collectives.num_chunks(name, size)} for name in costs])
        return
    rows = tuple(
        # moved, added: shares of the message, by the busiest rank.
        (name, algorithm(name).title(), str(cost.rounds), _times(cost.moved), _times(cost.added))
        for name, cost in costs.items()
    )
    head = titles(en="name; ; rounds; moved; added", fr="nom; ; étapes; déplacé; additionné")
    answer(Table(head, rows, align="llr", whole=1))
    nodes = node_size(size, per_node)
    answer(phrase("ranks and nodes of a list", size=size, nodes=nodes))


def _data(name: str, size: int, per_node: int | None) -> dict[str, Any]:
    """Describe an algorithm as JSON data."""
    cost = collectives.terms(name, size, per_node=per_node)
    # Fractions of a message, which JSON does not have.
    moved_messages, added_messages = float(cost.moved), float(cost.added)
    described = {"name": name, "collective": algorithm(name).collective, "ranks": size}
    return {**described, "rounds": cost.rounds, "moved": moved_messages, "added": added_messages}


def _times(share: Fraction) -> str:
    return f"{decimal(float(share), 2)} ×"


def _show(args: Given, size: int, answer: Answer) -> None:
    name, per_node = args["name"], args["per_node"]
    simulation = simulate(name, size, per_node=per_node)
    if args["figure"]:
        from dlojz.display.figures.communication_figures import collective_figure

        collective_figure(name, size, path=args["figure"], per_node=per_node)
    if args["json"]:
        answer(
            {
                **_data(name, size, per_node),
                "steps": [[transfer._asdict() for transfer in step] for step in simulation.transfers],
                "values": [simulation.values(step) for step in range(len(simulation.states))],
            }
        )
        return
    lines = [say(en=f"{name}, {size} ranks", fr=f"{name}, {size} rangs")]
    for step in range(1, len(simulation.states)):
        lines.append(say(en=f"step {step}", fr=f"étape {step}"))
        # Step s leads from states[s - 1] to states[s]; state 0 is what the ranks begin with.
        lines += [f"  {sentence}" for sentence in step_words(simulation, step)]
    if not simulation.transfers:
        lines.append(say(en="one rank alone sends nothing", fr="un rang seul n’envoie rien"))
    answer("\n".join(lines))
    tell_written(args["figure"], "written", "écrit")


DEVICES = ("auto", "cpu", "cuda")
MOST_RANKS = 16


@verb("calibrate", devices="|".join(DEVICES))
def calibrate_command(args: Given, answer: Answer) -> None:
    """Measure this machine, keep the measurements, and show the fitted parameters."""
    ranks, device = _ranks(args["ranks"]), args["device"]
    if device not in DEVICES:
        raise LabError(one_of("device", device, DEVICES))
    from dlojz.cost_model.measured_machine import default_path, read_measured, site, write_measured
    from dlojz.running.measure import measure_machine

    path = Path(args["output"]).expanduser() if args["output"] else default_path()
    if args["show"]:
        measured = read_measured(path)
    else:
        measured = measure_machine(ranks, quick=args["quick"], device=device, watch=_watch)
        write_measured(path, measured)
    sites = [site(measured, setup.ranks) for setup in measured.setups]
    if args["figure"]:
        from dlojz.display.figures.cost_model_figures import calibrate_figure

        calibrate_figure(measured, sites, args["figure"])
    answer(_document(measured, sites) if args["json"] else _table(sites))
    if not args["json"]:
        answer("\n".join(_summary(measured, sites)))
    if args["gpu_file"] or (measured.gpu_is_measured and not args["show"]):
        _write_gpu_files(measured, args["gpu_file"])
    # With --show the file was read, not written: only a figure is named then.
    for written in (None if args["show"] else path, args["figure"]):
        tell_written(written, "written", "écrit")
    _warn(measured)


def _write_gpu_files(measured: Measured, gpu_file: str | None) -> None:
    """Write the file that describes the measured GPU, and where several GPUs sent messages, that of their link.

    Raises:
        LabError: if no GPU was measured, or a file cannot be written.
    """
    from dlojz.base.files import config_folder
    from dlojz.cost_model.measured_machine import link_of
    from dlojz.hardware.gpus import write_gpu
    from dlojz.hardware.links import write_link
    from dlojz.running.measure import measured_gpu

    chip = measured_gpu(measured)
    path = Path(gpu_file).expanduser() if gpu_file else config_folder() / "gpus" / f"{chip.name}.toml"
    write_gpu(path, chip)
    tell_written(path, "written", "écrit")
    if any(setup.points for setup in measured.setups):
        link_path = path.with_name(f"{path.stem}-link.toml") if gpu_file else config_folder() / "links" / path.name
        write_link(link_path, link_of(measured), f"dlojz calibrate, {measured.processor}", measured.date[:10])
        tell_written(link_path, "written", "écrit")


def _ranks(text: str) -> tuple[int, ...]:
    """The numbers of ranks, growing from 1 on.

    Raises:
        LabError: for anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    # At most three digits: int() fails with an error of its own on a very long number.
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) < 4]
    if len(numbers) != len(parts) or numbers[:1] != [1] or numbers != sorted(set(numbers)) or numbers[-1] > MOST_RANKS:
        raise phrase.refused("numbers of ranks", most_ranks=MOST_RANKS, text=text)
    return tuple(numbers)


def _watch(ranks: int) -> AbstractContextManager[Tell]:
    return progress_bar(say(en=f"{ranks} processes" if ranks > 1 else "1 process", fr=f"{ranks} processus"))


def _document(measured: Measured, sites: list[MeasuredSite]) -> dict[str, Any]:
    return {
        **{name: value for name, value in measured.to_dict().items() if name != "setups"},
        "sites": [
            {
                "ranks": site.ranks,
                "parameters": site.calibration.values,
                "peak_flops": dict(site.cluster.gpu.peak_flops),
                "memory_bytes_per_s": site.cluster.gpu.memory_bytes_per_s,
                "update": site.update._asdict(),
                "sharded": site.sharded._asdict(),
                "median_error": site.median_error,
                "residuals": [{**row._asdict(), "error": row.error} for row in site.residuals],
            }
            for site in sites
        ],
    }


def _table(sites: list[MeasuredSite]) -> Table:
    from dlojz.display.figures.cost_model_figures import kind_title, residual_rows

    rows = tuple(
        (str(ranks), kind_title(kind), str(number), percent(median, 0), percent(largest, 0))
        for ranks, kind, number, median, largest in residual_rows(sites)
    )
    head = phrase.titles("columns of measured sites")
    return Table(head, rows, align="rlr", whole=2)


def _summary(measured: Measured, sites: list[MeasuredSite]) -> Iterator[str]:
    yield f"{measured.processor}, {measured.words(measured.setups[-1].ranks)}"
    for site in sites:
        calibration, chip = site.calibration, site.cluster.gpu
        # The site's peak times the fitted efficiency, in units of 1e9: GFLOP/s and GB/s.
        peak = max(chip.peak_flops.values()) * calibration.product_efficiency / 1e9
        memory = chip.memory_bytes_per_s * calibration.memory_efficiency / 1e9
        launch, tensor = format_latency(calibration.serial_s), format_latency(site.update.start)
        yield phrase("measured site", ranks=site.ranks, peak=peak, memory=memory, launch=launch, tensor=tensor)


def _warn(measured: Measured) -> None:
    """Say that something else was computing here."""
    if measured.load > 0.5 * cores_available():
        tell(phrase("load before the measurement", measured=measured))
