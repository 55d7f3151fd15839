"""`python -m dlojz.train`: the course's own command line, as one writes it after `srun`.

Layer 6. Invariant: every process reads the same words and finds the same configuration; the first one alone makes the
run folder, speaks, and writes the record, so that `dlojz runs` and `dlojz compare` find the run as any other.

    srun python -m dlojz.train -b 28 -s 200 --image-size 288 --deepspeed --deepspeed_config ds_config_zero2.json
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dlojz.cli import DONE, FAILED, REFUSED
from dlojz.cli.answer import tell
from dlojz.cli.course_flags import configure, parse
from dlojz.cli.course_meeting import Place, agree, place_of_this_process
from dlojz.config import RunConfig
from dlojz.data import check_available
from dlojz.record import RunRecord, write_record
from dlojz.runs.state import RECORD, read_all_events, rebuild
from dlojz.runs.store import claim, runs_root
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.train import check_runnable
from dlojz.units import format_bytes

_SHOWN_LOSSES = 10
_OTHERS_S = 30.0
"""Seconds for which the first process waits for the others' last words."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train in this process, which the launcher has started once for each rank.

    Args:
        argv: words of the command line; by default those of this process.

    Returns:
        The exit code: 0 completed or diverged, 1 ended otherwise, 2 refused.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    place = place_of_this_process()
    try:
        given = parse(words)
        config, notes = configure(given, place.size)
        check_runnable(config)
        check_available(config.data_name, config.data_root, global_batch=config.layout.global_batch)
        folder = agree(place, lambda: claim(config, runs_root(given.root), again=True)[0])
    except LabError as error:
        if place.rank == 0:
            tell(f"dlojz.train: {error}")
        return REFUSED
    except SystemExit as stop:  # the help has been printed
        return int(stop.code or DONE)
    if place.rank == 0:
        _announce(config, notes)
    # The ranks meet again in the run folder, which all of them see: a port that was theirs may be taken by now.
    os.environ.pop("MASTER_ADDR", None)
    from dlojz.train.worker import main as work

    code = work(folder)
    return _report(folder, place) if place.rank == 0 else code


def _announce(config: RunConfig, notes: Sequence[str]) -> None:
    layout = config.layout
    tell(
        say(
            en=f"{config.title}: {config.steps} steps of {layout.global_batch} samples "
            f"({layout.micro_batch} × {layout.micro_batches} × {layout.dp} ranks).",
            fr=f"{config.title} : {config.steps} pas de {layout.global_batch} échantillons "
            f"({layout.micro_batch} × {layout.micro_batches} × {layout.dp} rangs).",
        )
    )
    if notes:
        tell(
            say(
                en=f"Read, and set by the lab itself, as they change no result: {', '.join(notes)}.",
                fr=f"Lus, mais réglés par le TP lui-même, car ils ne changent aucun résultat : {', '.join(notes)}.",
            )
        )


def _report(folder: Path, place: Place) -> int:
    """Write the record and say how it went."""
    deadline_s = time.monotonic() + _OTHERS_S
    while time.monotonic() < deadline_s:
        ended = [rank for rank, told in read_all_events(folder).items() if any(e["event"] == "end" for e in told)]
        if len(ended) == place.size:
            break
        time.sleep(0.1)
    record = rebuild(folder)
    write_record(folder / RECORD, record)
    for line in _lines(record):
        print(line)
    print(say(en=f"kept in {folder}", fr=f"gardé dans {folder}"))
    sys.stdout.flush()
    if record.status in ("completed", "diverged"):
        return DONE
    tell(f"dlojz.train: {record.status}: {record.reason}")
    return FAILED


def _lines(record: RunRecord) -> list[str]:
    """Losses, throughput and memory of the first rank, a line each."""
    losses = record.losses
    every = max(1, len(losses) // _SHOWN_LOSSES)
    step = say(en="step", fr="pas")
    lines = [
        f"{step} {number}: loss {loss:.4f}"
        for number, loss in enumerate(losses)
        if number % every == 0 or number == len(losses) - 1
    ]
    first = record.footprints[0] if record.footprints else None
    if first is not None and first.samples_per_s:
        step_s = first.phases.step_s or 0.0
        lines.append(
            say(
                en=f"throughput: {first.samples_per_s:.1f} samples/s ({step_s:.3f} s per step)",
                fr=f"débit : {first.samples_per_s:.1f} échantillons/s ({step_s:.3f} s par pas)".replace(".", ","),
            )
        )
    else:
        lines.append(
            say(
                en="throughput: not measured, as the first 3 steps are traced for memory (take -s 5 or more)",
                fr="débit : non mesuré, car les 3 premiers pas servent à suivre la mémoire (prenez -s 5 ou plus)",
            )
        )
    if first is not None and first.memory.peak_bytes:
        peak = format_bytes(first.memory.peak_bytes)
        lines.append(say(en=f"peak memory of rank 0: {peak}", fr=f"pic mémoire du rang 0 : {peak}"))
    return lines


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a rank whose peers are gone must not wait for them in an exit handler
