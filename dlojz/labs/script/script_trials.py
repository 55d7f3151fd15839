"""Run a training script on real processes for its judge, and read what its ranks report.

Each rank is started by `script_observer.py`, which notes what the rank read, held and saved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dlojz.base.language import say
from dlojz.base.requirements import distribution_of, extra_of, missing_library
from dlojz.labs.kit.exercise import Sentences, Wrong
from dlojz.labs.script.growing_script import LAYOUTS
from dlojz.results.record import RunRecord
from dlojz.running.launch import run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

OBSERVER = Path(__file__).with_name("script_observer.py")
BATCH = 256
SHORT = ("--epochs", "2", "--batch", str(BATCH))
"""Options of every run: two epochs, to see whether the second has another order."""
_RATE = re.compile(r"^samples/s (\d+(?:\.\d+)?)$", re.MULTILINE)
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_LOSS = re.compile(r"^loss (\d+(?:\.\d+)?)$", re.MULTILINE)


@dataclass(frozen=True)
class RankReport:
    """What one rank did.

    Attributes:
        rank: which one.
        steps, repeated: of its optimizers, and those with gradients that a step had used already.
        kept: steps whose gradients were still there when those of the next one came.
        group_size: ranks of the process group at the first step; 0 where there is none.
        unshuffled, set_epochs: passes over a loader whose sampler does not shuffle, and calls of `set_epoch`.
        epochs: digests of the samples that each pass over a DataLoader yielded, in their order.
        saved: files that torch.save wrote.
        ddp, fsdp_units: modules that DistributedDataParallel wraps, and that `fully_shard` was called on.
        late_shards: calls of `fully_shard` on a module of one that was sharded already.
        ddp_calls, ddp_synced: forward passes of DistributedDataParallel, and those after which it averages.
        blocks: how often the block occurs that is repeated most.
        stale: parameters of its optimizer that no module has.
        schedule, micro_batches: class of torch's pipeline schedule, empty where there is none, and what it cuts.
        held, plain: elements of its parameters on this rank, and of those that are no DTensors.
        mesh_axes: axes of the largest mesh that a parameter lies on.
        mesh_row: its place along the first axis of such a mesh.
        by_columns, by_rows: matrices that are split along dim 0 of their weight, and along dim 1.
        begun_with: sum of squares of each parameter before the first step.
        gradients: sum of squares of the gradient of each parameter, at the first step.
        moments: whether its optimizer had any before that step.
        weights: digest of what is held, at the end.
        fused: whether its optimizer updates in one kernel.
        levels: different values of the matrices that the first products used.
        uses: calls of the module with parameters that the first step calls most often, recomputation included.
        matrices, zeros: elements of its matrices at the end, and how many of them are zero.
        library: class of the library that trains, empty where there is none.
    """

    rank: int
    steps: int
    repeated: int
    kept: int
    group_size: int
    unshuffled: int
    set_epochs: int
    epochs: tuple[tuple[str, ...], ...]
    saved: tuple[str, ...]
    ddp: int
    ddp_calls: int
    ddp_synced: int
    fsdp_units: int
    late_shards: int
    blocks: int
    stale: int
    schedule: str
    micro_batches: int
    held: int
    plain: int
    mesh_axes: int
    mesh_row: int
    by_columns: int
    by_rows: int
    begun_with: tuple[float, ...]
    gradients: tuple[float, ...]
    moments: int
    weights: str
    fused: int
    levels: tuple[int, ...]
    matrices: int
    zeros: int
    uses: int
    library: str


@dataclass(frozen=True)
class Trial:
    """One run of a script, with the reports of its ranks.

    Attributes:
        words: options of the script that were given besides the common ones.
        rates: by rank, the numbers that it printed after `samples/s`.
        printed: by rank, the numbers that it printed after `loss`.
    """

    words: tuple[str, ...]
    record: RunRecord
    ranks: tuple[RankReport, ...]
    rates: tuple[tuple[float, ...], ...]
    printed: tuple[tuple[float, ...], ...]

    @property
    def title(self) -> str:
        """The run in words: its processes and options."""
        return title_of(len(self.ranks), self.words)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the messages of a step, of all collectives of rank 0."""
        footprint = self.record.footprint()
        return sum(traffic.message_bytes for traffic in footprint.communication) if footprint is not None else 0

    @property
    def activations_bytes(self) -> int:
        """Bytes that forward keeps, of rank 0."""
        footprint = self.record.footprint()
        return (footprint.memory.activations_bytes or 0) if footprint is not None else 0


class LibraryMissing(Exception):  # noqa: N818 - it is a verdict, not an error of the program
    """Raised by a run whose script imports a library of the course that is not installed; the sentence names both."""


def title_of(processes: int, words: Sequence[str]) -> str:
    """Name a run by its processes and options."""
    short_words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    options = f", {' '.join(short_words)}" if words else ""
    return say(
        en=f"{processes} process{'es' if processes > 1 else ''}{options}",
        fr=f"{processes} processus{options}",
    )


def _rank_reports(folder: Path, processes: int) -> tuple[RankReport, ...]:
    """Read what the ranks wrote; what has not got so far is left out."""
    reports = []
    for rank in range(processes):
        path = folder / f"rank-{rank}.json"
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            content = {field.name: content[field.name] for field in fields(RankReport) if field.name != "rank"}
            lists = {name: tuple(content[name]) for name in ("saved", "gradients", "levels", "begun_with")}
            reports.append(RankReport(rank=rank, **content | lists | {"epochs": tuple(map(tuple, content["epochs"]))}))
    return tuple(reports)


class ScriptTrials:
    """Runs of one script for its judge.

    Args:
        path: the script.
        folder: for the runs and the reports.
        begin: told the title of each run before it starts.
        where: arguments of `dlojz.run`: on which processes.
    """

    def __init__(self, path: Path, folder: Path, begin: Callable[[str], object], placement: Mapping[str, Any]) -> None:
        self._path, self._folder, self._begin, self._where = path, folder, begin, placement
        self._number = 0
        self.done: list[Trial] = []
        self.not_judged: list[str] = []

    @property
    def checkpoint(self) -> str:
        """A folder for checkpoints of the script."""
        return str(self._folder / "checkpoint")

    def layout(self, lab: int, *words: str) -> Trial:
        """Run the script in the layout that a lab adds, with further options."""
        processes, options = LAYOUTS[lab]
        return self(processes, *options, *words)

    def __call__(self, processes: int, *words: str) -> Trial:
        """Run the script to its end.

        Raises:
            Wrong: if it does not end as it should; the sentence says how it ended.
            LibraryMissing: if it needs a library of the course that is not installed.
        """
        self._begin(title_of(processes, words))
        self._number += 1
        reports = self._folder / f"reports-{self._number}"
        reports.mkdir()
        ended = run(
            # The observer is the script that is run; the student's own is its second argument.
            OBSERVER,
            args=[str(reports), str(self._path), *SHORT, *words],
            processes=processes,
            root=self._folder / "runs",
            progress=False,
            **self._where,
        )
        record, ranks = ended.record, _rank_reports(reports, processes)
        if record is None or record.status != "completed":
            _refuse_missing_library(title_of(processes, words), ended.logs())
        idle = [report.rank for report in ranks if report.steps == 0]
        if idle and len(idle) < len(ranks):
            raise TEXTS.wrong("trials", "a rank without a step", processes=title_of(processes, words), idle=idle[0])
        if any(report.repeated for report in ranks):
            raise TEXTS.wrong("trials", "a step without new gradients", processes=title_of(processes, words))
        if any(report.kept for report in ranks):
            raise TEXTS.wrong("trials", "gradients are not zeroed", processes=title_of(processes, words))
        if any(report.stale for report in ranks):
            raise TEXTS.wrong("trials", "the optimizer holds old parameters")
        # A rank that left no report has not come to its end either.
        completed = record is not None and record.status == "completed" and len(ranks) == processes
        if not completed and any(report.late_shards for report in ranks):
            raise TEXTS.wrong(
                "trials",
                "does not come to its end, fully_shard on a running block",
                processes=title_of(processes, words),
            )
        if record is None or not completed:
            raise Wrong(_how_it_ended(self._path, title_of(processes, words), ended.logs(), record))
        logs = [ended.logs(rank) for rank in range(processes)]
        rates, printed = (tuple(tuple(map(float, line.findall(log))) for log in logs) for line in (_RATE, _LOSS))
        self.done.append(Trial(words, record, ranks, rates, printed))
        return self.done[-1]


def _refuse_missing_library(title: str, log: str) -> None:
    # The last one: a script may try one import and go on with another.
    module = (_MISSING_MODULE.findall(log) or [""])[-1]
    if extra_of(distribution_of(module)):
        absent = missing_library(distribution_of(module))
        raise LibraryMissing(say(en=f"Not judged on {title}: {absent}", fr=f"Non vérifié sur {title} : {absent}"))


def _how_it_ended(path: Path, title: str, log: str, record: RunRecord | None) -> str:
    """Say how a run failed: the script's last line of error, else the reason of the record."""
    unknown = next((line for line in log.splitlines() if "error: unrecognized arguments:" in line), None)
    invalid = next((line for line in log.splitlines() if ": error: argument " in line), None)
    if unknown or invalid:
        complaint = (unknown or invalid or "").partition("error: ")[2].strip()
        if unknown:  # by their names: a value may be a path that the judge has made
            complaint = ", ".join(re.findall(r"--[a-z0-9-]+", complaint)) or complaint
        return str(TEXTS.sentence("trials", "options of this lab not taken", complaint=complaint))
    reason = record.reason.replace(OBSERVER.name, path.name).strip() if record is not None else ""
    # Lines of the script itself in the tracebacks, the innermost last.
    line_numbers = re.findall(rf'File "[^"]*{re.escape(path.name)}", line (\d+)', log)
    if line_numbers and f"line {line_numbers[-1]}" not in reason:
        reason += say(en=f" (line {line_numbers[-1]} of {path.name})", fr=f" (ligne {line_numbers[-1]} de {path.name})")
    if todos := path.read_text(encoding="utf-8").count("TODO"):
        reason += say(en=f". Places still marked TODO: {todos}", fr=f". Endroits encore marqués TODO : {todos}")
    if "Connection closed by peer" in reason:
        reason += str(TEXTS.sentence("trials", "a rank waits for others that have gone"))
    return str(TEXTS.sentence("trials", "does not come to its end", title=title, reason=reason))
