"""Record of a board: one trial per method and seed, their medians, and which of them nothing else beats.

A board is written whole or not at all; importing this loads no torch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from dlojz.base.contract import Contract
from dlojz.base.files import write_atomic
from dlojz.base.language import refusal, say

DEFAULT_METHODS: tuple[str, ...] = (
    "student_alone",
    "distill_soft",
    "distill_hidden",
    "torch_int8_dynamic",
    "int8_static",
    "int4_weight_only",
    "ptq_2bit",
    "qat_2bit",
    "magnitude_global",
    "gradual",
    "two_to_four",
)
"""One or more of each family, in about a minute: what is slower to make, or only another library's form, is left to be
asked for."""
TEACHER = "teacher"
"""Name and family of the line that all others are compared with."""
IMAGE_SIZE = 16
"""Pixels of a side of the digits, unless a model reads larger ones only: twice what they were scanned with, as small as
vit_tiny's patches allow for."""


class LayerSnr(Contract):
    """Signal to noise of one layer of a smaller model against the teacher's."""

    name: str
    predicted_sqnr_db: float | None = Field(None, description="signal to noise, foreseen; None: nothing foresees it")
    measured_sqnr_db: float | None = Field(description="the same, measured; None: there is no noise at all")
    bits: float = Field(ge=0, description="of a weight")


class BoardTrial(Contract):
    """Trial of one method on the teacher of one seed."""

    method: str
    family: str
    seed: int
    options: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    accuracy: float = Field(ge=0, le=1, description="share of the held-out samples that it gets right")
    parameters: int = Field(ge=0, description="weights that are left, zeros not counted")
    predicted_bytes: int = Field(ge=0, description="of the numbers that a file keeps, foreseen")
    payload_bytes: int = Field(ge=0, description="of the numbers that the file keeps")
    file_bytes: int = Field(gt=0, description="of the file, header and names included")
    latency_s: float = Field(gt=0, description="seconds of an answer, median over the rounds")
    latency_ratio: float = Field(gt=0, description="to the teacher's in the same round, median over the rounds")
    latency_ratio_low: float = Field(gt=0, description="a quarter of the rounds were below")
    latency_ratio_high: float = Field(gt=0, description="a quarter of the rounds were above")
    predicted_latency_ratio: float | None = Field(None, gt=0, description="foreseen; None: nothing foresees it")
    made_in_s: float = Field(ge=0, description="seconds that the method took")
    layer_errors: tuple[LayerSnr, ...] = ()
    notes: tuple[str, ...] = ()


class BoardLine(Contract):
    """Medians of a method over all seeds; of two middle trials, the mean."""

    method: str
    family: str
    seeds: int
    accuracy: float
    accuracy_low: float = Field(description="of the worst seed")
    accuracy_high: float = Field(description="of the best seed")
    kept: float = Field(description="its accuracy over that of the teacher of the same seed, median")
    parameters: float
    predicted_bytes: float
    payload_bytes: float
    file_bytes: float
    ratio: float = Field(description="bytes of the teacher's file over those of this file")
    latency_s: float
    latency_ratio: float
    latency_ratio_low: float
    latency_ratio_high: float
    predicted_latency_ratio: float | None
    made_in_s: float
    notes: tuple[str, ...] = ()

    def beats(self, rival: BoardLine) -> bool:
        """Tell whether it is at least as good in accuracy, size and latency, and better in one of them.

        Two latencies differ only where the quartiles of their ratios do not overlap: what the machine's noise decides
        makes nothing better.
        """
        slower = self.latency_ratio_low > rival.latency_ratio_high
        faster = self.latency_ratio_high < rival.latency_ratio_low
        if self.accuracy < rival.accuracy or self.file_bytes > rival.file_bytes or slower:
            return False
        return faster or self.accuracy > rival.accuracy or self.file_bytes < rival.file_bytes


class Board(Contract):
    """Board: all trials, and on what they were made."""

    schema_version: Literal[1] = 1
    task: str
    image_size: int = Field(gt=0)
    teacher: str
    epochs: int = Field(ge=0, description="of the teacher's training")
    batch: int = Field(gt=0, description="images of an answer that was timed")
    rounds: int = Field(gt=0, description="answers that were timed of each model")
    threads: int = Field(gt=0)
    environment: dict[str, str] = Field(default_factory=dict, description="versions and machine")
    made_utc: str = ""
    trials: tuple[BoardTrial, ...] = ()
    left_out: dict[str, str] = Field(default_factory=dict, description="methods that gave nothing here, and why")

    def title(self) -> str:
        """Say on what the board was made."""
        seeds = len(self.of(TEACHER))
        trained = say(en="1 seed", fr="1 graine") if seeds == 1 else say(en=f"{seeds} seeds", fr=f"{seeds} graines")
        count = self.threads
        threads = say(en="1 thread", fr="1 thread") if count == 1 else say(en=f"{count} threads", fr=f"{count} threads")
        return say(
            en=f"{self.teacher} on {self.task} at {self.image_size}×{self.image_size}, {trained}; answers of "
            f"{self.batch} images on {threads}",
            fr=f"{self.teacher} sur {self.task} en {self.image_size}×{self.image_size}, {trained} ; réponses "
            f"de {self.batch} images sur {threads}",
        )

    def lines(self) -> list[BoardLine]:
        """Summarize each method, the teacher first, then as they were asked for."""
        names = dict.fromkeys(trial.method for trial in self.trials)
        # A stable sort: the teacher (False) first, the others in their order.
        return [_line(self, name) for name in sorted(names, key=lambda name: name != TEACHER)]

    def front(self) -> list[BoardLine]:
        """Find the lines that no other one beats, from the largest file to the smallest."""
        return pareto(self.lines())

    def of(self, method: str) -> list[BoardTrial]:
        """List the trials of a method, by seed."""
        return sorted((trial for trial in self.trials if trial.method == method), key=lambda trial: trial.seed)


def family_title(family: str) -> str:
    """Translate a family, or the teacher."""
    return {
        "distillation": say(en="distillation", fr="distillation"),
        "quantization": say(en="quantization", fr="quantification"),
        "pruning": say(en="pruning", fr="élagage"),
        TEACHER: say(en="teacher", fr="professeur"),
    }.get(family, family)


def pareto(lines: Iterable[BoardLine]) -> list[BoardLine]:
    """Find the lines that no other one beats, from the largest file to the smallest."""
    lines = list(lines)
    front = [line for line in lines if not any(rival.beats(line) for rival in lines)]  # a line does not beat itself
    return sorted(front, key=lambda line: -line.file_bytes)


def _line(board: Board, name: str) -> BoardLine:
    trials = board.of(name)
    teachers = {trial.seed: trial for trial in board.of(TEACHER)}

    foreseen = [trial.predicted_latency_ratio for trial in trials if trial.predicted_latency_ratio is not None]
    pairs = [(trial, teachers[trial.seed]) for trial in trials if trial.seed in teachers]
    return BoardLine(
        method=name,
        family=trials[0].family,
        seeds=len(trials),
        accuracy_low=min(trial.accuracy for trial in trials),
        accuracy_high=max(trial.accuracy for trial in trials),
        # Each trial over the teacher of its seed; 1e-9 for a teacher that is always wrong.
        kept=statistics.median([trial.accuracy / max(teacher.accuracy, 1e-9) for trial, teacher in pairs] or [0.0]),
        ratio=statistics.median([teacher.file_bytes / trial.file_bytes for trial, teacher in pairs] or [0.0]),
        predicted_latency_ratio=statistics.median(foreseen) if foreseen else None,
        notes=tuple(dict.fromkeys(note for trial in trials for note in trial.notes)),
        **{field: statistics.median(getattr(trial, field) for trial in trials) for field in _MEDIANS},
    )


_MEDIANS = sorted(
    BoardTrial.model_fields.keys()
    & BoardLine.model_fields.keys() - {"method", "family", "predicted_latency_ratio", "notes"}
)
"""Numbers of a trial of which a line has the median."""


def write_board(path: Path, board: Board) -> None:
    """Write a board atomically.

    Raises:
        LabError: if the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(board.to_dict(), indent=1, ensure_ascii=False))
    except OSError as error:
        raise refusal(
            en=f"the board cannot be written to {path}: {error.strerror}; give another path.",
            fr=f"le tableau ne peut pas être écrit dans {path} : {error.strerror} ; donnez un autre chemin.",
        ) from None
