"""`dlojz collectives --calibrate`: α and β of the links of this machine, timed on real processes.

Layer 6. Invariant: the processes are gone when the command ends; with `--json`, what they draw goes to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dlojz import cli
from dlojz.cli.answer import console, tell
from dlojz.collectives import Calibration, fit
from dlojz.collectives.measuring import SIZES_BYTES, measure
from dlojz.collectives.words import format_latency
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes

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
    from dlojz.viz.calibration_figure import calibration_figure, dominance, summary

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
        return cli.DONE
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in (
        say(en="message", fr="message"),
        say(en="measured", fr="mesuré"),
        say(en="fitted", fr="ajusté"),
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for point in calibration.points:
        fitted = calibration.fitted_s(point.message_bytes)
        table.add_row(format_bytes(point.message_bytes), format_latency(point.time_s), format_latency(fitted))
    answer(table)
    lines = [say(en=f"{collective}, {size} ranks: ", fr=f"{collective}, {size} rangs : ") + summary(calibration)]
    answer("\n".join([*lines, *filter(None, [dominance(calibration)])]))
    tell_written(given.get("output"))
    tell_written(given.get("figure"))
    return cli.DONE


def _measured(collective: str, size: int) -> Calibration:
    """Time the collective on forked processes; the first draws the progress bar."""
    from dlojz.ranks.forks import spmd

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


def _keep(calibration: Calibration, path: Path) -> None:
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
