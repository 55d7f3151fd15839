"""Board of compression methods: run them on one teacher, check the request, report progress.

What does not fit a model is refused before a teacher is trained, after a rehearsal on an untrained one. The models of a
seed are timed in turns with their teacher, on the same images; nobody learns from the images that judge.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dlojz import models
from dlojz.base.contract import check_at_least
from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say
from dlojz.base.machine import processor_name
from dlojz.compress.board_record import DEFAULT_METHODS, TEACHER, Board, BoardTrial, LayerSnr
from dlojz.compress.distillation import LargerStudentWarning
from dlojz.compress.method import METHODS, TIMED_IMAGES, Method, Shrunk, Start, method
from dlojz.compress.permutations import check_permutable
from dlojz.compress.task import (
    Latency,
    Settings,
    Task,
    accuracy,
    digits,
    latencies,
    new_model,
    parameters,
    payload_bytes,
    saved_bytes,
    stored_weights,
    trained_teacher,
)
from dlojz.compress.two_to_four import linear_layers

SAMPLES, MEASURED_SAMPLES = 2, 64
"""Images of a rehearsal: what fits two fits all, but the errors of quantized layers are measured on more."""
_PERMUTED = "two_to_four_permuted"


def check_fit(chosen: Method, options: Mapping[str, Any], teacher: str, task: Task) -> None:
    """Refuse a method that cannot be applied to a model, or an option that it refuses, before anything is trained.

    Distillation, and whatever was given other options, is rehearsed: one step on an untrained teacher. Of 2:4 the
    shapes are enough, and all other methods take any model.

    Raises:
        LabError: in one sentence; where it is the model that does not fit, it names the methods of the family that do.
    """
    chosen.check_options(options)
    lacking = chosen.missing()
    if lacking is not None:
        raise LabError(lacking)
    reason = misfit(chosen, options, teacher, task)
    # Other methods are named only where the model is at fault, and not an option.
    if reason is not None:
        its_options = bool(options) and misfit(chosen, {}, teacher, task) is None
        raise LabError(reason if its_options else _refusal(chosen, teacher, task, reason))
    if options and chosen.family != "distillation":
        _rehearse(chosen, options, teacher, task)


def misfit(chosen: Method, options: Mapping[str, Any], teacher: str, task: Task) -> str | None:
    """Say why a method cannot be applied to a model; None if it can."""
    try:
        if chosen.family == "distillation":
            _rehearse(chosen, options, teacher, task)
        elif chosen.function.startswith("pruning:two_to_four"):
            with torch.device("meta"):
                shapes: nn.Module = models.build(teacher, image_size=task.image_size, num_classes=task.num_classes)
            linear_layers(shapes)
            if chosen.name == _PERMUTED:
                check_permutable(shapes)
    except LabError as refusal:
        return str(refusal)
    return None


def _rehearse(chosen: Method, options: Mapping[str, Any], teacher: str, task: Task) -> None:
    samples = MEASURED_SAMPLES if chosen.family == "quantization" else SAMPLES
    short = task.few(min(samples, len(task.labels_N)))
    trial = dict(options)
    if "epochs" in chosen.options and "rewind_epochs" not in chosen.options:
        trial["epochs"] = min(int(trial.get("epochs", 1)), 1)  # 0 and less are refused as they will be
    if "samples" in chosen.options:
        calibrating = int(trial.get("samples", chosen.options["samples"]))
        if calibrating > 0:  # 0 stays, and is refused as such
            task.few(calibrating)  # refuses more than there are
            trial["samples"] = len(short.labels_N)
    if "sweeps" in trial:
        trial["sweeps"] = min(int(trial["sweeps"]), 1)
    # The rehearsal draws no number from the board's generator.
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", LargerStudentWarning)  # it is told when the student is really made
        chosen(Start(new_model(teacher, task, seed=0).eval(), teacher, short, options=trial, timed_images=1))


def _refusal(chosen: Method, teacher: str, task: Task, reason: str) -> str:
    family = (
        candidate for candidate in METHODS.values() if candidate.family == chosen.family and candidate.missing() is None
    )
    fitting = ", ".join(
        candidate.name
        for candidate in family
        if candidate.name != chosen.name and not misfit(candidate, {}, teacher, task)
    )
    english, french = f"use {fitting}", f"prenez {fitting}"
    if not fitting:
        english, french = "use another model", "prenez un autre modèle"
    return say(
        en=f"the method {chosen.name} cannot be applied to {teacher} ({reason.rstrip('.')}): {english}.",
        fr=f"la méthode {chosen.name} ne s’applique pas à {teacher} ({reason.rstrip('.')}) : {french}.",
    )


Watch = Callable[[str, int, int], None]
"""Called with (what is under way, done, total)."""


@dataclass(frozen=True, kw_only=True)
class BoardRequest:
    """Request for a board.

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
        for name, method_options in self.options.items():
            if name not in self.methods:
                raise LabError(one_of(say(en="method with options", fr="méthode à options"), name, self.methods))
            method(name).check_options(method_options)
        check_at_least(1, rounds=self.rounds, batch=self.batch)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise refusal(
                en=f"a board needs seeds, each of them once, but {list(self.seeds)} was received.",
                fr=f"un tableau demande des graines, chacune une fois, mais {list(self.seeds)} a été reçu.",
            )


def make_board(request: BoardRequest, task: Task | None = None, watch: Watch | None = None) -> Board:
    """Train the teachers, apply every method to each, and measure what comes of it.

    Args:
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
    trials: list[BoardTrial] = []
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
        # A method that was refused for one seed is left out for all.
        trials=tuple(trial for trial in trials if trial.method not in left_out),
        left_out=left_out,
    )


def _of_seed(
    request: BoardRequest, task: Task, seed: int, left_out: dict[str, str], watch: Watch | None
) -> list[BoardTrial]:
    def telling(name: str) -> Callable[[int, int], None] | None:
        label = name if len(request.seeds) == 1 else say(en=f"{name}, seed {seed}", fr=f"{name}, graine {seed}")
        return None if watch is None else lambda steps, total: watch(label, steps, total)

    settings = replace(request.settings, seed=seed)
    start_s = time.perf_counter()
    teacher = trained_teacher(
        request.teacher, task, settings, folder=request.folder, progress=telling(say(en="teacher", fr="professeur"))
    )
    stored = stored_weights(teacher)
    shrunk = Shrunk(teacher, stored, payload_bytes(stored), parameters(teacher), predicted_latency_ratio=1.0)
    # The teacher comes first: the ratios of latencies are to the first model.
    entries = [_Made(TEACHER, TEACHER, {}, shrunk, time.perf_counter() - start_s)]
    for name in request.methods:
        if name in left_out:
            continue
        chosen, method_options = method(name), request.options.get(name, {})
        start = Start(teacher, request.teacher, task, seed, method_options, telling(name), request.batch)
        start_s = time.perf_counter()
        try:
            shrunk = chosen(start)
        except LabError as refusal:
            if request.strict:
                raise
            left_out[name] = str(refusal)
            continue
        options = {**chosen.options, **method_options}
        entries.append(_Made(name, chosen.family, options, shrunk, time.perf_counter() - start_s))
    inputs = task.held_out_NCHW[: request.batch]
    model_latencies = latencies([entry.shrunk.model for entry in entries], inputs, rounds=request.rounds)
    return [entry.measured(task, seed, latency) for entry, latency in zip(entries, model_latencies, strict=True)]


class _Made(NamedTuple):
    """A smaller model before it is measured."""

    name: str
    family: str
    options: Mapping[str, Any]
    shrunk: Shrunk
    seconds: float

    def measured(self, task: Task, seed: int, latency: Latency) -> BoardTrial:
        shrunk = self.shrunk
        return BoardTrial(
            method=self.name,
            family=self.family,
            seed=seed,
            # JSON keeps plain values only.
            options={
                name: value if value is None or isinstance(value, str | int | float | bool) else str(value)
                for name, value in self.options.items()
            },
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
                    name=layer_error.name,
                    predicted_sqnr_db=_finite(layer_error.predicted_sqnr_db),
                    measured_sqnr_db=_finite(layer_error.measured_sqnr_db),
                    bits=layer_error.bits,
                )
                for layer_error in shrunk.layer_errors
            ),
            notes=shrunk.notes,
        )


def _finite(value: float | None) -> float | None:
    # JSON has no infinity: a layer without noise has no figure.
    return value if value is not None and math.isfinite(value) else None


def _environment() -> dict[str, str]:
    versions = {"python": platform.python_version(), "processor": processor_name()}
    for package in ("torch", "torchao"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
