"""Measure what only a GPU can tell, in units that can be resumed, and lay it beside what the package predicts."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that `python benchmarks/gpu.py` finds what `python -m benchmarks.gpu` does
for needed in ("torch", "numpy", "pydantic", "rich", "psutil", "safetensors"):
    if importlib.util.find_spec(needed) is None:
        sys.exit(f"make gpu: this Python has no {needed}: install it (pip install -e .), or name one that has: "
                 "make gpu GPU_PYTHON=/path/to/python")  # fmt: skip

from benchmarks import gpu_units  # noqa: E402
from benchmarks.gpu_units import NoGpuError, Place, Unit  # noqa: E402
from dlojz.base.contract import parse_json  # noqa: E402
from dlojz.base.errors import LabError  # noqa: E402
from dlojz.base.files import write_atomic  # noqa: E402
from dlojz.base.language import (  # noqa: E402
    format_bytes,
    format_count,
    format_seconds,
    gap_text,
    say,
    spaced_percent,
)
from dlojz.base.machine import cores_available  # noqa: E402
from dlojz.base.table import Table  # noqa: E402
from dlojz.cli.options import console, progress_bar  # noqa: E402
from dlojz.cost_model.measured_machine import Measured, local_step_s  # noqa: E402
from dlojz.prediction.trace_store import code_version  # noqa: E402
from dlojz.processes.forks import RankAnswer, first_failure, spmd  # noqa: E402

RECORDS: Final = ROOT / "benchmarks" / "records"
PLACE, PREDICTED = "place.json", "predicted"
PARTS: Final = {
    "time": "calibration of the GPU by its kernels and of its host by what it launches; the seconds of the steps of\n"
    "             `memory` beside what follows from it; operators of some steps, by torch's profiler",
    "tests": "the tests that are marked `gpu`",
    "memory": "training steps of CoAtNet-0…5, ViT, GPT-2 and a Llama of 1 G: bytes allocated and reserved, beside the\n"
    "             forecast and its model of the allocator",
    "ranks": "two ranks on this one GPU over gloo (DDP, FSDP2, ZeRO, a pipeline, tensor parallelism): losses\n"
    "             and weights beside those of one process",
    "batch": "the largest batch under 16 GiB, by trying, beside the predicted one",
    "forms": "INT8, 2:4, fp8, torch.compile and the forms of the update, each beside the plain one",
    "replays": 'runs of labs 02, 04, 06 and 11 at full size, kept for on="replay"',
}
HELP: Final = f"""Measure what only a GPU can tell, and lay it beside what the package predicts.

Each unit runs in a separate process and leaves one record (JSON) in benchmarks/records/gpu-NAME/, a folder to commit.
Called again, it goes on where it was: what is recorded for this GPU and these versions is not measured again; a failed
unit is, with --again. A record holds measurements only: predictions are made by today's code whenever the table is
printed, so that a corrected forecast is seen against the same measurements, without a GPU (--predict).

parts, in this order:
{chr(10).join(f"  {name:<10} {what}" for name, what in PARTS.items())}

examples:
  make gpu                                        all parts, 9 minutes at most
  python benchmarks/gpu.py --only memory batch    two parts of them
  python benchmarks/gpu.py --records benchmarks/records/gpu-NAME --predict    the table again, on any machine
  python benchmarks/gpu.py --stand-in             tiny models on this CPU: tries the command, tells nothing of a GPU

exit codes: 0 measured (what failed is listed), 1 no GPU or no records, 2 wrong options, 130 interrupted"""
FORMAT: Final = 1
RESERVED_S: Final = 15.0
"""Of the time given, kept for the table."""
COLLECTIVE_S: Final = 60.0
MOST_MINUTES: Final = 24 * 60
LEAST_BYTES: Final = 22e9
"""What a GPU that is sold as one of 24 GB has at least."""
MOST_WORKERS: Final = 12
GOALS: Final = {"allocated": (0.005, 0.02), "reserved": None, "time": (0.05, None)}
"""Median and worst relative error that are aimed at."""


class DamagedError(Exception):
    """A record that cannot be read, or was altered."""


@dataclass(frozen=True)
class Record:
    """Record of one unit.

    Args:
        unit: its id.
        state: `done`, or `failed`.
        result: what it returned; None where it failed.
        why: it failed, in a sentence; else empty.
        wall_s: seconds that it took.
        date: when, in UTC.
        made_on: GPU, its memory and the versions.
    """

    unit: str
    state: str
    result: Any
    why: str
    wall_s: float
    date: str
    made_on: dict[str, Any]


def _checksum(content: dict[str, Any]) -> str:
    written = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(written.encode()).hexdigest()


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        DamagedError: if it is no record, or its checksum does not match.
    """
    try:
        content = parse_json(path.read_bytes())
        stored, form = content.pop("sha256"), content.pop("format")
        if form != FORMAT or stored != _checksum(content):
            raise DamagedError(path.name)
        record = Record(**content)
    except (OSError, LabError, AttributeError, KeyError, TypeError, ValueError):
        raise DamagedError(path.name) from None
    return record


@dataclass
class Records:
    """Folder of records of one place.

    Attributes:
        damaged: names of the files that could not be read, each once.
        others: number of records of another GPU or other versions.
    """

    folder: Path
    place: Place
    damaged: list[str] = field(default_factory=list)
    others: int = 0

    @property
    def made_on(self) -> dict[str, Any]:
        """What a record must have been made on to count."""
        place = self.place
        return {"gpu": place.gpu, "memory_bytes": place.memory_bytes, "versions": place.versions}

    def read(self, unit: Unit) -> Record | None:
        """Read a unit's record; None where there is none that counts."""
        path = self.folder / f"{unit.id}.json"
        if not path.exists():
            return None
        try:
            record = read_record(path)
        except DamagedError:
            if path.name not in self.damaged:
                self.damaged.append(path.name)
            return None
        if record.made_on != self.made_on or record.unit != unit.id:
            self.others += 1
            return None
        return record

    def write(self, unit: Unit, result: Any, why: str, wall_s: float) -> None:
        """Write a unit's record atomically: a crash leaves the former one.

        Raises:
            OSError: if the folder cannot be written.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        state = "failed" if why else "done"
        content = vars(Record(unit.id, state, None if why else result, why, round(wall_s, 3), now, self.made_on))
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_json(self.folder / PLACE, {**self.made_on, "stand_in": self.place.stand_in})
        _write_json(self.folder / f"{unit.id}.json", {**content, "format": FORMAT, "sha256": _checksum(content)})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_place(folder: Path) -> Place:
    """Read where a folder's records were made.

    Raises:
        DamagedError: if there are none.
    """
    try:
        return Place(**parse_json((folder / PLACE).read_bytes()))
    except (OSError, LabError, TypeError):
        raise DamagedError(f"{folder} holds no records (no readable {PLACE})") from None


def find_place(stand_in: bool) -> Place:
    """Find the GPU, in a process that is gone afterwards: no other may initialise CUDA before it forks.

    Raises:
        NoGpuError: in one sentence, where there is none.
    """
    if stand_in:
        return gpu_units.stand_in()
    answer = spmd(lambda rank, size: gpu_units.look(), 1, wall_s=COLLECTIVE_S, limit_s=COLLECTIVE_S)[0]
    found = answer.value or {"why": failure(answer, COLLECTIVE_S)}
    if "why" in found:
        raise NoGpuError(
            say(
                en=f"this needs an NVIDIA GPU that torch can use, but {found['why']}: run it on a machine with one, or "
                "try the command itself with --stand-in.",
                fr=f"il faut un GPU NVIDIA que torch puisse utiliser ({found['why']}) : lancez la commande sur une "
                "machine qui en a un, ou essayez-la avec --stand-in.",
            )
        )
    return Place(**found)


def failure(answer: RankAnswer, wall_s: float) -> str:
    """Why a rank has no answer, in words; empty where it has one."""
    error = answer.error
    if error is None:
        return ""
    if error.kind == "time":
        return f"it was stopped after {wall_s:.0f} s"
    if error.kind == "lost":
        return f"its process ended with code {error.message}"
    return f"{error.name}: {(error.message.splitlines() or [''])[0][:400]}"


class Outcome(NamedTuple):
    """Units by what became of them, in this call or before."""

    done: list[Unit]
    failed: list[Unit]
    left: list[Unit]


Tell = Callable[[int, Unit, str], None]
Run = Callable[[Unit, Place, float], list[RankAnswer]]


def run_unit(unit: Unit, place: Place, wall_s: float) -> list[RankAnswer]:
    """Run a unit on separate processes; none of them outlives the call."""
    return spmd(partial(unit.work, place), unit.ranks, wall_s=wall_s, limit_s=COLLECTIVE_S)


def measure(
    units: Iterable[Unit],
    records: Records,
    *,
    deadline_s: float,
    again: bool = False,
    tell: Tell = lambda number, unit, what: None,
    run: Run = run_unit,
    now: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the units that have no record yet, until the time is over; record each as it ends.

    Args:
        units: in the order in which they are begun; one that would take too long is left, shorter ones are not.
        records: what is there, and where more is written.
        deadline_s: on the clock `now`; a unit that is stopped by it is left for the next call.
        again: run failed units again.
        tell: called when a unit begins and when it ends, with its number and what is to be said of it.
        run: runs one unit.
        now: monotonic clock.
    """
    outcome = Outcome([], [], [])
    for number, unit in enumerate(units):
        record = records.read(unit)
        if record is not None and not (again and record.state == "failed"):
            (outcome.done if record.state == "done" else outcome.failed).append(unit)
            continue
        start_s = now()
        left_s = deadline_s - start_s
        if left_s < unit.seconds:
            outcome.left.append(unit)
            continue
        tell(number, unit, "")
        wall_s = min(unit.limit_s, left_s)
        answers = run(unit, records.place, wall_s)
        failed = [answer for answer in answers if answer.error is not None]
        if any(answer.error and answer.error.kind == "time" for answer in failed) and wall_s < unit.limit_s:
            outcome.left.append(unit)
            continue
        # A rank that is lost, or only waited, says less than the one that raised.
        failed.sort(key=lambda answer: bool(answer.error and answer.error.kind))
        why = failure(failed[0], wall_s) if failed else ""
        took_s = now() - start_s
        records.write(unit, answers[0].value, why, took_s)
        (outcome.failed if why else outcome.done).append(unit)
        tell(number, unit, f"failed: {why}" if why else format_seconds(took_s))
    return outcome


# ---- predictions, by today's code


def _prediction_path(records: Records, unit: Unit) -> Path:
    return records.folder / PREDICTED / f"{unit.id}.json"


def prediction_key(records: Records, unit: Unit) -> str:
    """What a kept prediction depends on: the code that forecasts, the run, the device."""
    config = unit.config.to_json() if unit.config is not None else ""
    text = f"{code_version()} {config} {records.place.device!r} {gpu_units.CAP_BYTES[records.place.stand_in]}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_prediction(records: Records, unit: Unit) -> dict[str, Any] | None:
    """Read what today's code predicts of a unit; None where it is not computed yet."""
    try:
        content = parse_json(_prediction_path(records, unit).read_bytes())
        found: dict[str, Any] = content["predicted"]
        return found if content["key"] == prediction_key(records, unit) else None
    except (OSError, LabError, KeyError, TypeError):
        return None


def predict_all(units: Sequence[Unit], records: Records, workers: int) -> None:
    """Predict what is not predicted yet, on several processes, and keep it beside the records."""
    missing = [one for one in units if one.part in ("memory", "batch") and read_prediction(records, one) is None]
    if not missing:
        return
    (records.folder / PREDICTED).mkdir(parents=True, exist_ok=True)

    def share(rank: int, size: int) -> None:
        for unit in missing[rank::size]:
            try:
                found = gpu_units.predict(unit, records.place)
            except LabError as error:
                found = {"why": str(error)}
            if found is not None:
                content = {"key": prediction_key(records, unit), "predicted": found}
                _write_json(_prediction_path(records, unit), content)

    answers = spmd(share, min(workers, len(missing)), wall_s=3600.0, limit_s=3600.0)
    if (failed := first_failure(answers)) is not None:
        print(f"not everything could be predicted: {failed[1]}", file=sys.stderr)


def predicting(options: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that predicts, once all is measured: beside the measurements it would slow their host down."""
    command = [sys.executable, __file__, "--records", str(folder), "--predict", *(["--only", *options.only])]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)


# ---- tables


def error_of(predicted: float | None, measured: float | None) -> float | None:
    """Relative error: 0.1 means that 10 % more was predicted than measured."""
    return None if predicted is None or not measured else predicted / measured - 1


def _gap(error: float | None) -> str:
    return "—" if error is None else spaced_percent(error, 2, signed=True)


def _summary(what: str, errors: Iterable[float | None], goal: tuple[float | None, float | None] | None = None) -> str:
    """Median and worst error in a sentence, with what is aimed at."""
    found = [abs(error) for error in errors if error is not None]
    if not found:
        return ""
    told = f"{what}: off by {spaced_percent(statistics.median(found), 2)} in the median, "
    told += f"{spaced_percent(max(found), 2)} at worst, of {len(found)}"
    aims = [f"{word} {spaced_percent(aim)}" for word, aim in zip(("median", "worst"), goal or (), strict=False) if aim]
    return told + (f" (aimed at: {', '.join(aims)})" if aims else "")


class Measurement(NamedTuple):
    """A unit that is done, what it measured, and what is predicted of it (None: not yet)."""

    unit: Unit
    result: Any
    predicted: dict[str, Any] | None


def measurements(units: Iterable[Unit], records: Records) -> list[Measurement]:
    """Read all that is measured, with its predictions."""
    found = []
    for unit in units:
        record = records.read(unit)
        if record is not None and record.state == "done":
            found.append(Measurement(unit, record.result, read_prediction(records, unit)))
    return found


def memory_table(found: Sequence[Measurement]) -> Table | None:
    """Bytes of steps: allocated and reserved as the allocator tells, tensors as the probe does, beside the forecast."""
    rows, errors = [], {"allocated": [], "tensors": [], "reserved": []}  # type: ignore[var-annotated]
    for unit, result, predicted in (one for one in found if one.unit.part == "memory"):
        told = predicted or {}
        if "out_of_memory" in result:
            rows.append((unit.name, "out of memory", *(format_bytes(told.get("allocated_bytes")), "—", "—"),
                         "—", format_bytes(told.get("reserved_bytes")), "—"))  # fmt: skip
            continue
        real = result["allocator"] or {}
        tensors = told["peak_bytes"] - told["cublas_bytes"] if "peak_bytes" in told else None
        gaps = {
            "allocated": error_of(told.get("allocated_bytes"), real.get("allocated_bytes")),
            "tensors": error_of(tensors, result["traced"]["peak_bytes"]),
            "reserved": error_of(told.get("reserved_bytes"), real.get("reserved_bytes")),
        }
        for name, gap in gaps.items():
            errors[name].append(gap)
        rows.append((
            unit.name, format_bytes(real.get("allocated_bytes")), format_bytes(told.get("allocated_bytes")),
            _gap(gaps["allocated"]), _gap(gaps["tensors"]), format_bytes(real.get("reserved_bytes")),
            format_bytes(told.get("reserved_bytes")), _gap(gaps["reserved"]),
        ))  # fmt: skip
    if not rows:
        return None
    head = ("step", "allocated", "forecast", "error", "tensors", "reserved", "forecast", "error")
    notes = tuple(filter(None, (_summary(name, gaps, GOALS.get(name)) for name, gaps in errors.items())))
    return Table(head, tuple(rows), "memory: peaks of a step", notes=(*notes, *_contexts(found)))


def _contexts(found: Sequence[Measurement]) -> Iterator[str]:
    """What CUDA itself takes, measured beside what the forecast adds."""
    both = [
        (result["allocator"]["context_bytes"], predicted["context_bytes"])
        for unit, result, predicted in found
        if unit.part == "memory" and result.get("allocator") and predicted and "context_bytes" in predicted
    ]
    if both:
        measured = statistics.median(one for one, _ in both)
        yield f"CUDA's context: {format_bytes(measured)} in the median, {format_bytes(both[0][1])} in the forecast"


def batch_table(found: Sequence[Measurement]) -> Table | None:
    """Largest batches under the limit of memory, tried and predicted, each to 1 in 64."""
    rows = [
        (unit.name, format_bytes(result["cap_bytes"]), str(result["batch"]), str((predicted or {}).get("batch", "—")),
         _gap(error_of((predicted or {}).get("batch"), result["batch"])))
        for unit, result, predicted in found
        if unit.part == "batch"
    ]  # fmt: skip
    head = ("run", "limit", "largest batch", "predicted", "error")
    return Table(head, tuple(rows), "largest micro-batch, to 1 in 64") if rows else None


def time_table(found: Sequence[Measurement]) -> Table | None:
    """Seconds of steps beside those that follow from the calibration."""
    calibrated = next((one.result for one in found if one.unit.id == "time-calibration"), None)
    steps = [one for one in found if one.unit.part == "memory" and "step_s" in one.result]
    if calibrated is None or not steps:
        return None
    machine = Measured.from_dict(calibrated)
    rows, errors, refused = [], [], []
    for unit, result, _ in steps:
        assert unit.config is not None
        measured_s = result["step_s"]["median"]
        try:
            predicted_s = local_step_s(machine, unit.config)
        except (LabError, KeyError) as error:
            refused.append(f"{unit.name}: {error}")
            continue
        errors.append(error_of(predicted_s, measured_s))
        rows.append((unit.name, format_seconds(measured_s), format_seconds(predicted_s), _gap(errors[-1])))
    notes = (_summary("seconds", errors, GOALS["time"]), *([f"not predicted: {refused[0]}"] if refused else []))
    return Table(("step", "measured", "predicted", "error"), tuple(rows), "time: seconds of a step",
                 notes=tuple(filter(None, notes)))  # fmt: skip


def kernel_table(found: Sequence[Measurement]) -> Table | None:
    """Rates of kernels: the calibration's products and passes, fused attention."""
    rows = []
    for unit, result, _ in found:
        if unit.id == "time-calibration":
            for timed in Measured.from_dict(result).setups[0].timings:
                if timed.what in ("product", "attention", "convolution"):
                    m, n, k, times = timed.size
                    rate = format_count(2 * m * n * k * times / timed.seconds, "FLOP/s")
                elif timed.what == "pass":
                    rate = format_count(timed.size[0] / timed.seconds, "B/s")
                elif timed.what in ("kernel", "host", "level"):  # hundreds
                    continue
                else:
                    rate = "—"
                rows.append((f"{timed.what} {timed.label}, {timed.precision}", format_seconds(timed.seconds), rate))
        if unit.id == "time-attention":
            for row in result:
                mask = ", causal" if row["causal"] else ""
                name = f"{row['kernel'].lower()}, {row['tokens']} tokens, heads of {row['head']}{mask}"
                if "why" in row:
                    rows.append((name, "—", "not here"))
                    continue
                rates = (format_count(row[f"{way}_flops"], "FLOP/s") for way in ("forward", "backward"))
                rows.append((name, "—", " / ".join(rates)))
    return Table(("kernel", "time", "rate (forward / backward)"), tuple(rows), "kernels") if rows else None


def forms_table(found: Sequence[Measurement]) -> Table | None:
    """fp8, torch.compile and the forms of the update: each beside the plain one."""
    rows: list[tuple[str, ...]] = []
    for unit, result, _ in (one for one in found if one.unit.part == "forms"):
        if unit.name == "fp8":
            plain = {row["width"]: row["seconds"] for row in result if row["form"] == "bf16"}
            rows += [
                (f"product of {row['width']}³: {row['form']}", format_seconds(row["seconds"]),
                 f"{row['seconds'] / plain[row['width']]:.2f}") for row in result
            ]  # fmt: skip
        elif unit.name.startswith("compile-"):
            plain_s = result["eager"]["step_s"]
            rows += [
                (f"{unit.name.removeprefix('compile-')}, bf16: {form}", format_seconds(told["step_s"]),
                 f"{told['step_s'] / plain_s:.2f}") for form, told in result.items()
            ]  # fmt: skip
        else:
            rows += [
                (f"{row['model']}: update {row['form']}", format_seconds(row["step_s"]), f"{row['step_ratio']:.2f}")
                for row in result
            ]
    head = ("form", "time", "in the plain one's")
    return Table(head, tuple(rows), "forms: below 1 is faster than the plain form") if rows else None


def ranks_table(found: Sequence[Measurement]) -> Table | None:
    """Losses and weights of two ranks on one GPU, beside those of one process."""
    given = {one.unit.name: one.result for one in found if one.unit.part == "ranks"}
    rows = []
    for name, result in given.items():
        plain = given.get(f"{name.partition('-')[0]}-one")
        if name.endswith("-one") or plain is None:
            continue
        pairs = zip(result["losses"], plain["losses"], strict=True)
        losses = max(abs(own / its - 1) for own, its in pairs)
        weights = abs(result["weights_norm"] / plain["weights_norm"] - 1)
        rows.append((name, gap_text(losses), gap_text(weights), format_seconds(result["seconds"]),
                     format_bytes(result["allocated_bytes"])))  # fmt: skip
    head = ("layout", "losses differ by", "norm of the weights by", "steps", "allocated")
    return Table(head, tuple(rows), "two ranks on one GPU over gloo, beside one process") if rows else None


def others_table(found: Sequence[Measurement]) -> Table | None:
    """Tests, and runs that can be replayed."""
    rows = []
    for unit, result, _ in found:
        if unit.part == "tests":
            rows.append(("tests marked gpu", f"{result.get('passed', 0)} passed, {result.get('skipped', 0)} skipped"))
        if unit.part == "replays" and unit.config is not None:
            steps = [footprint["phases"].get("step_s") for footprint in result.get("footprints", ())]
            rows.append((f"replay {unit.name}: {unit.config.title}",
                         format_seconds(max((one for one in steps if one), default=None)) + " a step"))  # fmt: skip
    return Table(("", ""), tuple(rows), "tests and replays", align="l") if rows else None


def tables(units: Sequence[Unit], records: Records) -> list[Table]:
    """All tables that there are measurements for, and last what failed."""
    found = measurements(units, records)
    makers = (kernel_table, time_table, memory_table, batch_table, forms_table, ranks_table, others_table)
    made = [table for make in makers if (table := make(found)) is not None]
    failed = [(one.id, record.why) for one in units if (record := records.read(one)) and record.state == "failed"]
    return made + ([Table(("failed", "why"), tuple(failed), align="l")] if failed else [])


# ---- the command


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes <= MOST_MINUTES:
        raise ValueError
    return minutes


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    made = argparse.ArgumentParser(
        "gpu.py", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help="these parts")
    made.add_argument("--minutes", type=_minutes, default=9.0, help="time in all; what is left waits (default: 9)")
    made.add_argument("--records", type=Path, help="folder of the records (default: benchmarks/records/gpu-NAME)")
    made.add_argument("--again", action="store_true", help="run what failed again")
    made.add_argument("--predict", action="store_true", help="measure nothing: predict, and print the table")
    made.add_argument("--stand-in", action="store_true", help="tiny models on the CPU in the place of a GPU")
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    start_s = time.monotonic()
    options = parser().parse_args(given)
    try:
        if options.predict and options.records is not None:
            place = read_place(options.records)
        else:
            place = find_place(options.stand_in)
    except (NoGpuError, DamagedError) as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 1
    folder = options.records or RECORDS / place.slug
    records = Records(folder, place)
    asked = [unit for unit in gpu_units.units(place.stand_in) if unit.part in options.only]
    try:
        if options.predict:
            predict_all(asked, records, max(1, min(MOST_WORKERS, cores_available() - 3)))
            outcome = None
        else:
            outcome = _measure(asked, records, options, start_s)
    except OSError as error:
        print(f"make gpu: {folder} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmake gpu: interrupted; called again, it goes on where it was.", file=sys.stderr)
        return 130
    _print(asked, records, outcome)
    return 0


def _measure(asked: Sequence[Unit], records: Records, options: argparse.Namespace, start_s: float) -> Outcome:
    """Measure, then predict in the time that is left; tell how it goes on stderr."""
    place, deadline_s = records.place, start_s + 60 * options.minutes
    print(f"{place.gpu}, {format_bytes(place.memory_bytes)}; records: {records.folder}", file=sys.stderr)
    if not place.stand_in and place.memory_bytes < LEAST_BYTES:
        print("This GPU has less than 24 GB: some steps will be recorded as out of memory.", file=sys.stderr)
    records.folder.mkdir(parents=True, exist_ok=True)
    _write_json(records.folder / PLACE, {**records.made_on, "stand_in": place.stand_in})
    told = set[str]()
    with progress_bar("make gpu", len(asked)) as update:

        def tell(number: int, unit: Unit, what: str) -> None:
            update(number, description=unit.id)
            for name in set(records.damaged) - told:
                print(f"{name} was damaged: its unit is measured again.", file=sys.stderr)
                told.add(name)
            if what and not sys.stderr.isatty():
                print(f"{number + 1}/{len(asked)} {unit.id}: {what}", file=sys.stderr, flush=True)

        outcome = measure(asked, records, deadline_s=deadline_s - RESERVED_S, again=options.again, tell=tell)
    after = predicting(options, records.folder)
    try:
        after.wait(max(0.0, deadline_s - RESERVED_S / 2 - time.monotonic()))
    except subprocess.TimeoutExpired:
        print("Some forecasts are not computed yet: `--predict` goes on with them.", file=sys.stderr)
    finally:
        after.terminate()
        after.wait()
    if records.others:
        print(f"{records.others} records of another GPU or other versions were there: measured anew.", file=sys.stderr)
    return outcome


def _print(asked: Sequence[Unit], records: Records, outcome: Outcome | None) -> None:
    shown = console(stderr=False)
    for table in tables(asked, records):
        shown.print(table)
        shown.print()
    if outcome is not None:
        done, failed, left = map(len, outcome)
        rest = f"; {left} left for want of time: call it again" if left else ""
        shown.print(f"{done} units done, {failed} failed{rest}. Records: {os.path.relpath(records.folder)}")


if __name__ == "__main__":
    sys.exit(main())
