"""A board: every method on the same teacher, and accuracy, size and latency of what each gives.

Layer 2. Invariant: the models of one seed are timed in turns with their teacher, on the same images, after all of them
were made; nobody learns from the images that judge.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dlojz.compress.board_checks import check_fit
from dlojz.compress.board_record import DEFAULT_METHODS, TEACHER, Board, LayerSnr, Trial
from dlojz.compress.fitting import Settings, accuracy
from dlojz.compress.measuring import Latency, latencies, parameters, payload_bytes, saved_bytes, stored_weights
from dlojz.compress.method import TIMED_IMAGES, Method, Shrunk, Start
from dlojz.compress.methods import method
from dlojz.compress.task import Task, digits
from dlojz.compress.teachers import trained_teacher
from dlojz.schema import LabError, one_of
from dlojz.text import say

Watch = Callable[[str, int, int], None]
"""Called with (what is under way, done, total)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a board is made of.

    Args:
        teacher: model of the catalogue.
        methods: by name, in order.
        options: of a method, by its name; what it does not name keeps its default.
        seeds: one teacher each.
        settings: of the teacher's training; its seed is not read.
        rounds: answers that are timed of each model.
        batch: images of an answer that is timed.
        folder: where teachers are kept; None: nowhere.
        strict: whether a method that is refused ends the board; otherwise it is left out, and the board says why.

    Raises:
        LabError: if a method is unknown, or an option of it, if options are given for a method that is not asked for,
            or if there is no seed, no round or no image.
    """

    teacher: str = "vit_tiny"
    methods: Sequence[str] = DEFAULT_METHODS
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    settings: Settings = field(default_factory=Settings)
    rounds: int = 20
    batch: int = TIMED_IMAGES
    folder: Path | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        for name in self.methods:
            method(name)
        for name, given in self.options.items():
            if name not in self.methods:
                raise LabError(one_of(say(en="method with options", fr="méthode à options"), name, self.methods))
            method(name).check_options(given)
        for name, value in (("rounds", self.rounds), ("batch", self.batch)):
            if value < 1:
                raise LabError(
                    say(
                        en=f"{name} must be at least 1, but {value} was received.",
                        fr=f"{name} doit être au moins égal à 1, mais {value} a été reçu.",
                    )
                )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise LabError(
                say(
                    en=f"a board needs seeds, each of them once, but {list(self.seeds)} was received.",
                    fr=f"un tableau demande des graines, chacune une fois, mais {list(self.seeds)} a été reçu.",
                )
            )


def make_board(request: Request, task: Task | None = None, watch: Watch | None = None) -> Board:
    """Train the teachers, apply every method to each, and measure what comes of it.

    Args:
        request: what is made.
        task: what is learnt and judged; by default the digits.
        watch: told what is under way.

    Raises:
        LabError: if a method is refused, unless the request is not strict; what does not fit the model is refused
            before anything is trained.
    """
    task = task or digits()
    left_out: dict[str, str] = {}
    for name in request.methods:
        try:
            check_fit(method(name), request.options.get(name, {}), request.teacher, task)
        except LabError as refusal:
            if request.strict:
                raise
            left_out[name] = str(refusal)
    trials: list[Trial] = []
    for seed in request.seeds:
        trials += _of_seed(request, task, seed, left_out, watch)
    return Board(
        task=task.name,
        image_size=task.image_size,
        teacher=request.teacher,
        epochs=request.settings.epochs,
        batch=min(request.batch, len(task.held_out_NCHW)),
        rounds=request.rounds,
        threads=torch.get_num_threads(),
        environment=_environment(),
        made_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        trials=tuple(one for one in trials if one.method not in left_out),
        left_out=left_out,
    )


def _of_seed(request: Request, task: Task, seed: int, left_out: dict[str, str], watch: Watch | None) -> list[Trial]:
    def telling(name: str) -> Callable[[int, int], None] | None:
        label = name if len(request.seeds) == 1 else say(en=f"{name}, seed {seed}", fr=f"{name}, graine {seed}")
        return None if watch is None else lambda done, total: watch(label, done, total)

    settings = Settings(request.settings.epochs, request.settings.learning_rate, request.settings.batch_size, seed)
    start_s = time.perf_counter()
    teacher = trained_teacher(
        request.teacher, task, settings, folder=request.folder, progress=telling(say(en="teacher", fr="professeur"))
    )
    stored = stored_weights(teacher)
    made = [
        _Made(
            name=TEACHER,
            family=TEACHER,
            options={},
            shrunk=Shrunk(teacher, stored, payload_bytes(stored), parameters(teacher), predicted_latency_ratio=1.0),
            seconds=time.perf_counter() - start_s,
        )
    ]
    for name in request.methods:
        if name in left_out:
            continue
        chosen = method(name)
        options = {**chosen.options, **request.options.get(name, {})}
        given = request.options.get(name, {})
        start = Start(teacher, request.teacher, task, seed, given, telling(name), request.batch)
        try:
            made.append(_make(chosen, start, options))
        except LabError as refusal:
            if request.strict:
                raise
            left_out[name] = str(refusal)
    inputs = task.held_out_NCHW[: request.batch]
    found = latencies([one.shrunk.model for one in made], inputs, rounds=request.rounds)
    return [one.measured(task, seed, latency) for one, latency in zip(made, found, strict=True)]


@dataclass(frozen=True)
class _Made:
    """A smaller model before it is measured."""

    name: str
    family: str
    options: Mapping[str, Any]
    shrunk: Shrunk
    seconds: float

    def measured(self, task: Task, seed: int, latency: Latency) -> Trial:
        shrunk = self.shrunk
        return Trial(
            method=self.name,
            family=self.family,
            seed=seed,
            options={name: value if _is_plain(value) else str(value) for name, value in self.options.items()},
            accuracy=accuracy(shrunk.model, task),
            parameters=shrunk.parameters,
            predicted_bytes=shrunk.predicted_bytes,
            payload_bytes=payload_bytes(shrunk.stored),
            file_bytes=saved_bytes(shrunk.stored),
            latency_s=latency.seconds,
            latency_ratio=latency.ratio,
            latency_ratio_low=latency.ratio_low,
            latency_ratio_high=latency.ratio_high,
            predicted_latency_ratio=shrunk.predicted_latency_ratio,
            made_in_s=self.seconds,
            layer_errors=tuple(
                LayerSnr(
                    name=one.name,
                    predicted_sqnr_db=_finite(one.predicted_sqnr_db),
                    measured_sqnr_db=_finite(one.measured_sqnr_db),
                    bits=one.bits,
                )
                for one in shrunk.layer_errors
            ),
            notes=shrunk.notes,
        )


def _make(chosen: Method, start: Start, options: Mapping[str, Any]) -> _Made:
    start_s = time.perf_counter()
    shrunk = chosen(start)
    return _Made(chosen.name, chosen.family, options, shrunk, time.perf_counter() - start_s)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "processor": _processor()}
    for package in ("torch", "torchao"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        rows = []
    named = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return named[0] if named else platform.machine()
