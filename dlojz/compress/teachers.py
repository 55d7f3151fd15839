"""The teacher of a board: trained once for each model, task, settings and seed, and kept.

Layer 2. Invariant: what is kept is used only if its checksum, its settings and its shapes are those that were asked
for; anything else is trained again, and replaced whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from dlojz.compress.fitting import Progress, Settings, accuracy, fit, new_model
from dlojz.compress.measuring import stored_weights
from dlojz.compress.task import Task
from dlojz.record import write_atomic
from dlojz.schema import LabError, parse_json

RECIPE = 1
"""Counted up when a training of the same settings no longer gives the same weights."""
MAX_WEIGHTS_BYTES = 2**32


def trained_teacher(
    name: str, task: Task, settings: Settings, *, folder: Path | None = None, progress: Progress | None = None
) -> nn.Module:
    """A model of the catalogue that has learnt a task, in evaluation mode.

    Args:
        name: of the model.
        task: what it learns.
        settings: how long, how fast, and the seed of its weights.
        folder: where it is kept and looked for; None: it is trained, and kept nowhere.
        progress: told after each step of a training; never, if one was kept.

    Raises:
        OSError: if the folder cannot be written.
    """
    model = new_model(name, task, settings.seed)
    asked = _asked(name, task, settings)
    kept = None if folder is None else folder / teacher_key(asked)
    if kept is not None and _read_into(model, kept, asked):
        return model.eval()
    fit(model, task, settings, progress=progress)
    if kept is not None:
        _write(model, kept, asked, accuracy(model, task))
    return model


def teacher_key(asked: Mapping[str, Any]) -> str:
    """The name of a teacher's folder: a hash of all that its weights depend on."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _asked(name: str, task: Task, settings: Settings) -> dict[str, Any]:
    return {
        "recipe": RECIPE,
        "model": name,
        "task": task.name,
        "image_size": task.image_size,
        "images": _checksum(task.inputs_NCHW),
        "labels": _checksum(task.labels_N),
        "settings": asdict(settings),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),  # sums are taken in another order: other weights
    }


def _checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _read_into(model: nn.Module, folder: Path, asked: Mapping[str, Any]) -> bool:
    """Whether what is kept could be used."""
    try:
        told = parse_json((folder / "teacher.json").read_bytes())
        weights = folder / "weights.safetensors"
        if not isinstance(told, dict) or told.get("asked") != asked or weights.stat().st_size > MAX_WEIGHTS_BYTES:
            return False
        content = weights.read_bytes()
        if hashlib.sha256(content).hexdigest() != told.get("sha256"):
            return False
        model.load_state_dict(load(content))
    except (OSError, LabError, RuntimeError, ValueError):
        return False
    return True


def _write(model: nn.Module, folder: Path, asked: Mapping[str, Any], found: float) -> None:
    """The weights first, then what vouches for them: a crash between the two leaves a teacher that is not used."""
    folder.mkdir(parents=True, exist_ok=True)
    content = save(stored_weights(model))
    temporary = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        temporary.write_bytes(content)
        os.replace(temporary, folder / "weights.safetensors")
    finally:
        temporary.unlink(missing_ok=True)
    told = {"asked": asked, "accuracy": found, "sha256": hashlib.sha256(content).hexdigest()}
    write_atomic(folder / "teacher.json", json.dumps(told, indent=1))
