"""Run a training script on real processes for its judge, and read what its ranks report.

What each rank read, held and saved is noted by `libraries/scripts/rank_observer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlojz.base.language import say
from dlojz.base.requirements import distribution_of, extra_of, missing_library
from dlojz.config.run_config import Observation
from dlojz.labs.kit.exercise import Sentences, Wrong
from dlojz.labs.script.growing_script import LAYOUTS
from dlojz.libraries.scripts.rank_report import Trial, rank_reports, title_of
from dlojz.libraries.scripts.script_parity import check_steps
from dlojz.results.record import RunRecord
from dlojz.running.launch import run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

BATCH = 256
SHORT = ("--epochs", "2", "--batch", str(BATCH))
"""Options of every run: two epochs, to see whether the second has another order."""
_RATE = re.compile(r"^samples/s (\d+(?:\.\d+)?)$", re.MULTILINE)
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_LOSS = re.compile(r"^loss (\d+(?:\.\d+)?)$", re.MULTILINE)


class LibraryMissing(Exception):  # noqa: N818 - it is a verdict, not an error of the program
    """Raised by a run whose script imports a library of the course that is not installed; the sentence names both."""


class ScriptTrials:
    """Runs of one script for its judge.

    Args:
        path: the script.
        folder: for the runs.
        begin: told the title of each run before it starts.
        where: arguments of `dlojz.run`: on which processes.
    """

    def __init__(self, path: Path, folder: Path, begin: Callable[[str], object], placement: Mapping[str, Any]) -> None:
        self._path, self._folder, self._begin, self._where = path, folder, begin, placement
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
        self._begin(title := title_of(processes, words))
        ended = run(
            self._path,
            args=[*SHORT, *words],
            processes=processes,
            observation=Observation(),
            root=self._folder / "runs",
            progress=False,
            **self._where,
        )
        record, ranks = ended.record, rank_reports(ended.folder, processes)
        if record is None or record.status != "completed":
            _refuse_missing_library(title, ended.logs())
        check_steps(title, ranks)
        # A rank that left no report has not come to its end either.
        completed = record is not None and record.status == "completed" and len(ranks) == processes
        if not completed and any(report.late_shards for report in ranks):
            raise TEXTS.wrong(
                "trials", "does not come to its end, fully_shard on a running block", processes=title
            )
        if record is None or not completed:
            raise Wrong(_how_it_ended(self._path, title, ended.logs(), record))
        logs = [ended.logs(rank) for rank in range(processes)]
        rates, printed = (tuple(tuple(map(float, line.findall(log))) for log in logs) for line in (_RATE, _LOSS))
        self.done.append(Trial(words, record, ranks, ended.folder, rates, printed))
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
    reason = record.reason.strip() if record is not None else ""
    # Lines of the script itself in the tracebacks, the innermost last.
    line_numbers = re.findall(rf'File "[^"]*{re.escape(path.name)}", line (\d+)', log)
    if line_numbers and f"line {line_numbers[-1]}" not in reason:
        reason += say(en=f" (line {line_numbers[-1]} of {path.name})", fr=f" (ligne {line_numbers[-1]} de {path.name})")
    if todos := path.read_text(encoding="utf-8").count("TODO"):
        reason += say(en=f". Places still marked TODO: {todos}", fr=f". Endroits encore marqués TODO : {todos}")
    if "Connection closed by peer" in reason:
        reason += str(TEXTS.sentence("trials", "a rank waits for others that have gone"))
    return str(TEXTS.sentence("trials", "does not come to its end", title=title, reason=reason))
