"""Commands on runs: `dlojz run`, `predict`, `demo`, `runs`, `logs`, `cancel`, `compare`."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import decimal, format_seconds, say
from dlojz.base.table import Table, titles
from dlojz.cli import main
from dlojz.cli.options import (
    REST,
    WORDS,
    Answer,
    Given,
    assumed_fields,
    config_of,
    option_of,
    phrase,
    progress_bar,
    scheduler_of,
    target_device,
    tell,
    tell_written,
    verb,
)

if TYPE_CHECKING:
    from dlojz.config.run_config import Observation, RunConfig
    from dlojz.cost_model.measured_machine import Measured
    from dlojz.running.run import Run

OF_SCRIPTS = ("nproc", "first_step_s", "parity", "parity_steps", "run_module", REST)
"""Options of `dlojz run` that only a script takes."""
BESIDE_A_SCRIPT = frozenset(
    {WORDS, REST, "run_module", "nproc", "first_step_s", "device", "time_limit_s", "root", "json", "again", "on"}
    | {"parity", "parity_steps", "machine", "account", "qos", "reservation"}
)
"""Options of `dlojz run` that a script takes."""


@verb("run")
def run_command(args: Given, answer: Answer) -> int:
    """Train, then show the measurement beside the prediction."""
    if (script := _script_of(args)) is not None:
        return _run_script(*script, args, answer)
    for name in OF_SCRIPTS:
        if name in args:
            option = "--" if name == REST else option_of(name)
            raise phrase.refused("option without its script", option=option)
    from dlojz.config.optimizers import COMPRESSED
    from dlojz.config.run_config import vocabulary_note
    from dlojz.config.schedules import no_effect_note
    from dlojz.running.launch import run as launch

    config = _config(args)
    if config.optimizer in COMPRESSED and config.layout.dp == 1:
        tell(no_effect_note(config.optimizer))
    if note := vocabulary_note(config):
        tell(note)
    run = launch(
        config,
        on=args["on"],
        machine=args["machine"],
        **scheduler_of(args),
        checkpoint_every=args["checkpoint_every"],
        again=args["again"],
        wait=False,
        time_limit_s=args["time_limit_s"],
        root=args["root"],
    )
    if run.record is not None:
        tell(phrase("run before", run=run))
    return _show_run(run.follow(), args, answer)


def _script_of(args: Given) -> tuple[str, tuple[str, ...]] | None:
    """Find the script that was asked for, or the launcher's command, and its arguments; None for a model."""
    words, script_words = args[WORDS], tuple(args[REST])
    if "run_module" in args:
        return f"-m {args['run_module']}", script_words
    if not words:
        return (script_words[0], script_words[1:]) if script_words else None
    from dlojz import models
    from dlojz.config.run_config import file_of_module, no_script
    from dlojz.models.foreign.names import is_elsewhere

    name = str(words[0])
    # Unlike Path's methods these are False for a name that no file system takes.
    if name.endswith(".py") or os.path.isfile(os.path.join(name, "__main__.py")):  # noqa: PTH113, PTH118
        return name, script_words
    # A path: it has a separator, or there is such a file or folder.
    is_path = os.sep in name or os.path.exists(name)  # noqa: PTH110
    is_model = name in models.names() or is_elsewhere(name)
    if not is_model and not is_path and file_of_module(name):
        raise phrase.refused("name of a module", name=name)
    if is_model or not is_path:
        return None
    raise no_script(name)


def _show_run(run: Run, args: Given, answer: Answer) -> int:
    """Show the measurements of a run that has ended; returns the exit code."""
    from dlojz.compare import compare

    record = run.record
    if record is None:
        tell(phrase("ended without a record", run=run))
        return main.FAILED
    if args["json"]:
        answer(record.to_dict())
    else:
        answer(compare(record))
        answer(en=f"kept in {run.folder}", fr=f"gardé dans {run.folder}")
    if record.status in ("completed", "diverged"):
        return main.DONE
    tell(f"dlojz: {run.run_id}: {record.status}: {record.reason}")
    for line in run.diagnosis().cause_lines():
        tell(line)
    return main.FAILED


def _run_script(name: str, arguments: tuple[str, ...], args: Given, answer: Answer) -> int:
    """Run a script of the user's, print what it prints, then what was measured; returns its exit code."""
    from dlojz.running.launch import run as launch
    from dlojz.running.state import is_final

    for option_name in args:
        if option_name not in BESIDE_A_SCRIPT:
            option = option_of(option_name)
            raise phrase.refused("option of a training of the lab", option=option)
    of_script = next((option_of(option) for option in ("nproc", "parity", "parity_steps") if option in args), None)
    if of_script and not args[WORDS] and "run_module" not in args:
        raise phrase.refused("option of a script beside a launcher", of_script=of_script)
    begin = partial(
        launch,
        name,
        args=arguments,
        on=args["on"],
        time_limit_s=args["time_limit_s"],
        root=args["root"],
        machine=args["machine"] or None,
        **scheduler_of(args),
        **{name: args[name] for name in ("device", "first_step_s") if name in args},
    )
    if "parity" in args or "parity_steps" in args:
        return _show_parity(begin, args, answer)
    run = begin(wait=False, processes=args.get("nproc"))
    # One for each rank; rank 0's is followed, and that of a rank which the end blames is printed at the end.
    printed = [LogTail(run, rank) for rank in range(args["nproc"])]
    is_interrupted = False
    try:
        run.until_end(lambda _: printed[0].print_new())
    except KeyboardInterrupt:  # the script has had it too, and may have printed, saved, or gone wrong since
        is_interrupted = True
    printed[0].print_new(is_last=True)
    ended = run.record.reason if run.record else ""
    if blamed := re.search(r"\brank (\d+)", ended):
        printed[int(blamed[1])].print_new(is_last=True)
    untrained, has_message = _untrained(run)
    if untrained and not is_interrupted:
        if run.record is not None and not has_message:  # by the process itself
            tell(f"dlojz: {run.record.reason.partition(': ')[2]}")
        tell(en=f"dlojz: what it printed is kept in {run.folder}", fr=f"dlojz : ses sorties sont dans {run.folder}")
        return main.REFUSED
    code = _show_run(run, args, answer)
    if is_interrupted:
        return _exit_code_of(run, main.DONE) if is_final(run.state) else main.INTERRUPTED
    return _exit_code_of(run, main.FAILED) if code == main.FAILED else code


def _show_parity(begin: Callable[..., Run], args: Given, answer: Answer) -> int:
    """Compare a script on several processes with one process of it; returns 0 where both train alike, else 1."""
    from dlojz.base.language import Wrong
    from dlojz.libraries.scripts.script_parity import Trial, parity, rank_reports, title_of

    if "parity" not in args:
        raise phrase.refused("parity steps without parity")
    if args["nproc"] < 2:
        raise phrase.refused("parity without processes")

    def observed(processes: int, observation: Observation) -> Trial:
        tell(f"… {title_of(processes, ())}")
        run = begin(processes=processes, observation=observation, progress=False)
        record, ranks = run.record, rank_reports(run.folder, processes)
        if record is None or record.status not in ("completed", "diverged") or len(ranks) < processes:
            reason = (record.reason if record is not None else "") or say(en="no report", fr="aucun rapport")
            raise Wrong(
                en=f"On {title_of(processes, ())} the script does not come to its end: {reason} "
                f"(`dlojz logs {run.run_id}`)",
                fr=f"Sur {title_of(processes, ())}, le script ne va pas jusqu’au bout : {reason} "
                f"(`dlojz logs {run.run_id}`)",
            )
        return Trial((), record, ranks, run.folder)

    try:
        compared = parity(observed, args["nproc"], args["parity_steps"])
    except Wrong as wrong:
        answer({"state": "wrong", "message": str(wrong)} if args["json"] else str(wrong))
        return main.FAILED
    answer(compared.to_dict() if args["json"] else compared.table())
    return main.DONE if compared.state == "right" else main.FAILED


def _exit_code_of(run: Run, otherwise: int) -> int:
    """Return the exit code of a script that failed, as a shell shows it; `otherwise` where none has failed."""
    from dlojz.results.record import read_events
    from dlojz.running.state import EVENTS, LAUNCHER_EVENTS

    events = read_events(run.folder / EVENTS / LAUNCHER_EVENTS)
    codes = [event["code"] for event in events if event["event"] == "exit" and type(event.get("code")) is int]
    code = next(iter(codes), otherwise)
    # Python gives -n for signal n; a shell shows 128 + n.
    return int(code if code >= 0 else 128 - code)


def _untrained(run: Run) -> tuple[bool, bool]:
    """Return whether a script has ended without training anything, and whether one of its processes has said so."""
    from dlojz.results.record import UNTRAINED
    from dlojz.running.state import read_all_events

    events = [event for rank_events in read_all_events(run.folder).values() for event in rank_events]
    untrained = [event for event in events if event["event"] == UNTRAINED]
    return bool(untrained) and not run.losses, any(event.get("shown") for event in untrained)


class LogTail:
    """Output of one rank, printed on stderr as it comes."""

    def __init__(self, run: Run, rank: int) -> None:
        self._path = run.folder / "logs" / f"rank-{rank}.log"
        self._offset = 0

    def print_new(self, *, is_last: bool = False) -> None:
        """Print the whole lines that have come since the last call, control characters made visible.

        A carriage return ends a line too, one that is written over (a progress bar): the last of those is printed so.

        Args:
            is_last: whether nothing more comes, so that a line without an end is printed too.
        """
        from dlojz.running.folder import MAX_LOG_BYTES, open_regular, visible

        file = open_regular(self._path)
        if file is None:
            return
        with file:
            file.seek(self._offset)
            while data := file.read(MAX_LOG_BYTES):
                # Up to the last line end; a \r that is the last byte read does not count, as \n may follow it.
                chunk = data[: max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1]
                # No line end: all of it where nothing more comes or the piece is full, else nothing yet.
                chunk = chunk or data[: len(data) if is_last else len(data) // MAX_LOG_BYTES * MAX_LOG_BYTES]
                if not chunk:
                    return
                self._offset += len(chunk)
                file.seek(self._offset)
                *lines, over = chunk.decode("utf-8", errors="replace").split("\n")
                for line in lines:
                    tell(visible(line.rstrip("\r").rpartition("\r")[2]))
                if over:
                    end = "\r" if over.endswith("\r") else "\n"
                    print(visible(over.rstrip("\r").rpartition("\r")[2]), end=end, file=sys.stderr, flush=True)


@verb("predict")
def predict_command(args: Given, answer: Answer) -> None:
    """Show the predicted footprint."""
    from dlojz.display.memory_tables import assumed_sentence
    from dlojz.display.tables import footprint_table
    from dlojz.prediction import predict

    target = target_device(args)
    assumed = assumed_fields(args, target)
    config = _config(args, **assumed)
    footprint = predict(config, rank=args["rank"], device=target)
    if assumed:
        sentence = assumed_sentence(config, assumed)
        tell(sentence) if args["json"] else answer(sentence)
    defaults: dict[str, Any] = {}
    if target and target.default_words:
        defaults = {"class_defaults": list(target.left_out)}
        tell(target.default_words) if args["json"] else answer(target.default_words)
    if not args["compile"]:
        answer({**footprint.to_dict(), **defaults} if args["json"] else footprint_table(config, footprint))
        return
    from dlojz.cli.memory import compiled_range
    from dlojz.display.memory_tables import compiled_sentence
    from dlojz.prediction.forecast import forecast

    estimate = forecast(config, args["rank"], target)
    if args["json"]:
        answer({**footprint.to_dict(), **defaults, "compiled": compiled_range(estimate)})
    else:
        answer(footprint_table(config, footprint))
        answer(compiled_sentence(estimate))


def _config(args: Given, **otherwise: object) -> RunConfig:
    """Configure the run; its degrees are checked against `--processes` where it is given."""
    config = config_of(args, **otherwise)
    if args["processes"] is not None:
        config.layout.check_processes(args["processes"])
    return config


MICRO_BATCH, DEMO_PROCESSES = 16, 2
PICTURE_RECORDS, PICTURE_CALIBRATION = "Records", "Calibration"
"""Names of the texts of the demo's picture: the records of its runs, the calibration that predicts their throughput."""


def demo_configs(steps: int = 30, processes: int = DEMO_PROCESSES) -> list[RunConfig]:
    """Configure the runs of the demo: one process that accumulates the same global batch, every engine, a pipeline.

    Args:
        steps: optimizer steps of each run.
        processes: of each parallel run.
    """
    from dlojz.config.run_config import RunConfig

    parallel: dict[str, Any] = {"dp": processes, "micro_batch": MICRO_BATCH}
    layouts: list[dict[str, Any]] = [
        # As many micro-batches as the parallel runs have replicas: the same global batch.
        {"engine": "single", "micro_batch": MICRO_BATCH, "micro_batches": processes},
        {"engine": "torch", **parallel},
        {"engine": "torch", "zero": 3, **parallel},
        *({"engine": "deepspeed", "zero": stage, **parallel} for stage in range(4)),
        {"pp": processes, "schedule": "interleaved", "micro_batch": MICRO_BATCH, "micro_batches": processes},
    ]
    return [RunConfig.of(model="coatnet_tiny", data="digits", steps=steps, **layout) for layout in layouts]


@verb("demo")
def demo_command(args: Given, answer: Answer) -> int:
    """Run, compare, explain."""
    from dlojz.compare import compare
    from dlojz.running.store import runs_root

    configs = demo_configs(args["steps"])
    started_s = time.monotonic()
    runs = _run_all(configs, again=args["again"], root=args["root"])
    machine = _machine_of_demo()
    comparison = compare(runs, machine)
    figure = runs_root(args["root"]) / "demo.png"
    comparison.figure(figure)
    _keep_evidence(figure, runs, machine)
    if args["json"]:
        answer(comparison.to_dict())
    else:
        answer(comparison)
        answer("\n" + "\n".join(comparison.findings()))
        answer(en=f"figure: {figure}", fr=f"figure : {figure}")
    took = format_seconds(time.monotonic() - started_s)
    tell(phrase("end of the demo", count=len(runs), took=took))
    return main.DONE if all(run.state == "completed" for run in runs) else main.FAILED


def _machine_of_demo() -> Measured | None:
    """The calibration of this machine's cores by which the demo's throughput is predicted; measured if there is none.

    None on a GPU, whose processes it does not describe, and where ranks cannot measure: then one process predicts.
    """
    import torch

    from dlojz.running.measure import calibrated

    if torch.cuda.is_available():
        return None
    try:
        return calibrated((1, DEMO_PROCESSES))
    except LabError as error:
        tell(str(error))
        return None


def _keep_evidence(picture: Path, runs: Iterable[Run], machine: Measured | None) -> None:
    """Keep in a picture's own text the records and the calibration from which it can be drawn again."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    records = [run.record.model_dump(mode="json") for run in runs if run.record is not None]
    with Image.open(picture) as drawn:
        drawn.load()
    # PNG takes texts only when a picture is saved, so it is saved a second time.
    metadata = PngInfo()
    metadata.add_text("Title", str(drawn.info["Title"]))
    metadata.add_text(PICTURE_RECORDS, json.dumps(records), zip=True)
    if machine is not None:
        metadata.add_text(PICTURE_CALIBRATION, machine.model_dump_json(), zip=True)
    written = io.BytesIO()
    drawn.save(written, "png", dpi=drawn.info["dpi"], pnginfo=metadata)
    write_atomic(picture, written.getvalue())


def _run_all(configs: list[RunConfig], again: bool, root: str | Path | None) -> list[Run]:
    """Run one after the other, so that none slows another, under one bar on stderr; start none that was run before."""
    from dlojz.display.tables import status_label
    from dlojz.results.record import STATUSES
    from dlojz.running.launch import run as launch

    runs = []
    with progress_bar() as update:
        for number, config in enumerate(configs, 1):
            started_s, counter = time.monotonic(), f"{number}/{len(configs)}"
            run = launch(config, on="local", again=again, wait=False, root=root)
            reused = run.state in STATUSES
            run.until_end(partial(_draw, update, run, f"{counter} {config.layout.title}"))
            how = say(en="found again", fr="retrouvée") if reused else format_seconds(time.monotonic() - started_s)
            reason = run.record.reason if run.record else ""
            summary = f"{status_label(run.state)}, {len(run.losses)}/{config.steps} ({how}) {reason}".rstrip()
            tell(f"{counter} {config.title}: {summary}")
            runs.append(run)
    return runs


def _draw(update: Callable[..., None], run: Run, label: str, _: str) -> None:
    losses = run.losses
    figures = f"loss {decimal(losses[-1], 4)}" if losses else say(en="starting", fr="démarrage")
    update(len(losses), run.config.steps, f"{label}, {figures}")


@verb("runs")
def runs_command(args: Given, answer: Answer) -> None:
    """List the runs."""
    from dlojz.running.run import runs as listing

    summaries = [_summary(run) for run in listing(args["root"])]
    if args["json"]:
        answer(summaries)
    elif not summaries:
        answer(phrase("no run yet"))
    else:
        answer(_table(summaries))


@verb("logs")
def logs_command(args: Given, answer: Answer) -> None:
    """Print the logs of a run."""
    from dlojz.running.run import find

    run = find(args[WORDS][0], args["root"])
    printed = run.logs(args["rank"])
    if args["rank"] is None and run.state not in ("completed", "running", "queued"):
        answer(repr(run.diagnosis()))
        answer("")
    answer(printed)


@verb("cancel")
def cancel_command(args: Given, answer: Answer) -> None:
    """Ask a run to stop."""
    from dlojz.running.run import cancel_lost, find

    name = args[WORDS][0]
    try:
        run = find(name, args["root"])
    except LabError:
        message = cancel_lost(name)
        if message is None:
            raise
        answer(message)
        return
    answer(run.cancel())


def _summary(run: Run) -> dict[str, Any]:
    losses = run.losses
    return {
        "run_id": run.run_id,
        "title": run.title,
        "arguments": list(run.config.script.arguments) if run.config.script else [],
        "state": run.state,
        "steps": run.num_steps,
        "asked_steps": run.config.asked_steps,
        "last_loss": losses[-1] if losses else None,
        "age_s": _age_s(run.run_id),
    }


def _age_s(run_id: str) -> float | None:
    """Compute the age of a run from the time that its name begins with."""
    from dlojz.running.folder import launched_utc

    born = launched_utc(run_id)
    return max(0.0, round((datetime.now(UTC) - born).total_seconds(), 1)) if born else None


def _table(summaries: Iterable[dict[str, Any]]) -> Table:
    from dlojz.display.tables import DASH, status_label

    rows = []
    for run in summaries:
        loss = DASH if run["last_loss"] is None else decimal(run["last_loss"], 4)
        progress = f"{run['steps']}" + (f"/{run['asked_steps']}" if run["asked_steps"] else "")
        rows.append(
            (run["run_id"], _with_arguments(run), status_label(run["state"]), progress, loss, _age(run["age_s"]))
        )
    head = titles(en="run; title; state; steps; last loss; age", fr="exécution; titre; état; pas; perte; âge")
    return Table(head, tuple(rows), align="l", whole=1)  # a name is copied whole


def _with_arguments(run: Mapping[str, Any]) -> str:
    """Write the title of a run, and the arguments of a script, by which its runs are told apart."""
    arguments = shlex.join(run["arguments"])
    short = arguments if len(arguments) <= ARGUMENTS_SHOWN else f"{arguments[:ARGUMENTS_SHOWN]}…"
    return f"{run['title']} {short}".rstrip()


ARGUMENTS_SHOWN = 60


def _age(age_s: float | None) -> str:
    if age_s is None or age_s < 7200:
        return format_seconds(age_s)
    if age_s < 172_800:
        return f"{age_s / 3600:.0f} h"
    return say(en=f"{age_s / 86_400:.0f} days", fr=f"{age_s / 86_400:.0f} jours")


MOST_COMPARED = 12


@verb("compare")
def compare_command(args: Given, answer: Answer) -> None:
    """Show measurements beside predictions."""
    from dlojz.compare import compare
    from dlojz.running.run import find
    from dlojz.running.run import runs as listing

    named_runs = [find(name, args["root"]) for name in args[WORDS]]
    chosen = named_runs or _together(listing(args["root"]))
    comparison = compare(chosen)
    if "figure" in args:  # before the table: a path that cannot be written is refused at once
        comparison.figure(args["figure"])
    if "overlay" in args:
        _draw_overlay(chosen, args["overlay"])
    answer(comparison.to_dict() if args["json"] else comparison)
    if not args["json"]:
        answer("\n".join(comparison.findings()))
    tell_written(args["figure"])


def _draw_overlay(chosen: Sequence[Run], path: str) -> None:
    """Draw the last of the runs that is a pipeline, measured and simulated."""
    pipelines = [run for run in chosen if run.config.layout.pp > 1]
    if not pipelines:
        raise phrase.refused("no pipeline to overlay")
    pipelines[-1].overlay(path)
    tell_written(path, "overlay", "superposition")


def _together(newest_first: Sequence[Run]) -> list[Run]:
    """Choose the newest run of each layout, of the same training as the newest measured run; oldest first."""
    reference = next((run for run in newest_first if _has_measured(run)), None) or next(iter(newest_first), None)
    chosen: dict[str, Run] = {}
    for run in newest_first:
        if reference is not None and _training(run) == _training(reference):
            # Newest first: the newest run of a configuration stays, unless only an older one has a measurement.
            kept_so_far = chosen.setdefault(run.config.hash, run)
            if not _has_measured(kept_so_far) and _has_measured(run):
                chosen[run.config.hash] = run
    runs = list(chosen.values())[:MOST_COMPARED]
    if len(runs) < len(newest_first):
        tell(phrase("runs compared", compared=len(runs), runs=len(newest_first), most=MOST_COMPARED))
    return runs[::-1]


def _has_measured(run: Run) -> bool:
    return bool(run.record and run.record.footprints)


_OF_THE_TRAINING = (
    *("model", "data_name", "image_size", "sequence_length", "precision", "optimizer", "learning_rate", "weight_decay"),
    *("seed", "steps"),
)


def _training(run: Run) -> tuple[Any, ...]:
    """Key of the training: runs with equal keys have comparable losses."""
    return (*(getattr(run.config, name) for name in _OF_THE_TRAINING), run.config.layout.global_batch)
