"""What can be refused before a teacher is trained: a method that does not fit a model, or an option that it refuses.

Layer 2. Invariant: nothing is learnt here that anybody keeps; a teacher of the right shapes, untrained, is enough to
know whether a method fits it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dlojz import models
from dlojz.compress.distillation import LargerStudentWarning
from dlojz.compress.fitting import new_model
from dlojz.compress.method import Method, Start
from dlojz.compress.methods import METHODS
from dlojz.compress.permutations import check_permutable
from dlojz.compress.task import Task
from dlojz.compress.two_to_four import linear_layers
from dlojz.schema import LabError
from dlojz.text import say

SAMPLES, MEASURED_SAMPLES = 2, 64
"""Images of a rehearsal: what fits two fits all, but the errors of quantized layers are measured on more."""
_PERMUTED = "two_to_four_permuted"


def check_fit(chosen: Method, options: Mapping[str, Any], teacher: str, task: Task) -> None:
    """Refuse a method that cannot be applied to a model, or an option that it refuses, before anything is trained.

    Distillation, and whatever was given options of its own, is rehearsed: one step on an untrained teacher. Of 2:4 the
    shapes are enough, and all other methods take any model.

    Args:
        chosen: the method.
        options: of it, over its defaults.
        teacher: model of the catalogue.
        task: what it will learn.

    Raises:
        LabError: in one sentence; where it is the model that does not fit, it names the methods of the family that do.
    """
    chosen.check_options(options)
    lacking = chosen.missing()
    if lacking is not None:
        raise LabError(lacking)
    why = misfit(chosen, options, teacher, task)
    if why is not None:
        its_options = bool(options) and misfit(chosen, {}, teacher, task) is None
        raise LabError(why if its_options else _refusal(chosen, teacher, task, why))
    if options and chosen.family != "distillation":
        _rehearse(chosen, options, teacher, task)


def misfit(chosen: Method, options: Mapping[str, Any], teacher: str, task: Task) -> str | None:
    """Why a method cannot be applied to a model; None if it can.

    Args:
        chosen: the method.
        options: of it, over its defaults.
        teacher: model of the catalogue.
        task: what it will learn.
    """
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
    asked = dict(options)
    if "epochs" in chosen.options and "rewind_epochs" not in chosen.options:
        asked["epochs"] = min(int(asked.get("epochs", 1)), 1)  # 0 and less are refused as they will be
    if "samples" in chosen.options:
        calibrating = int(asked.get("samples", chosen.options["samples"]))
        if calibrating > 0:
            task.few(calibrating)  # refuses more than there are
            asked["samples"] = len(short.labels_N)
    if "sweeps" in asked:
        asked["sweeps"] = min(int(asked["sweeps"]), 1)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", LargerStudentWarning)  # it is told when the student is really made
        chosen(Start(new_model(teacher, task, seed=0).eval(), teacher, short, options=asked, timed_images=1))


def _refusal(chosen: Method, teacher: str, task: Task, why: str) -> str:
    family = (one for one in METHODS.values() if one.family == chosen.family and one.missing() is None)
    fitting = ", ".join(one.name for one in family if one.name != chosen.name and not misfit(one, {}, teacher, task))
    english, french = f"use {fitting}", f"prenez {fitting}"
    if not fitting:
        english, french = "use another model", "prenez un autre modèle"
    return say(
        en=f"the method {chosen.name} cannot be applied to {teacher} ({why.rstrip('.')}): {english}.",
        fr=f"la méthode {chosen.name} ne s’applique pas à {teacher} ({why.rstrip('.')}) : {french}.",
    )
