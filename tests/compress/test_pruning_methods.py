"""The pruning methods of the catalogue: bytes as predicted, the teacher untouched, a file that gives the model back."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import masks
from dlojz.compress.method import PRUNING_METHODS, Shrunk, Start, method
from dlojz.compress.task import Settings, Task, accuracy, digits, fit, logits, new_model, parameters, payload_bytes

from .restoring import restore

SHORT: dict[str, dict[str, Any]] = {
    "magnitude_global": {"sparsity": 0.5},
    "magnitude_layer": {"sparsity": 0.7},
    "gradual": {"sparsity": 0.7},
    "lottery": {"sparsity": 0.6, "rounds": 1, "rewind_epochs": 0},
    "two_to_four": {},
    "two_to_four_permuted": {"sweeps": 1},
    "two_to_four_sr_ste": {},
}


@pytest.fixture(scope="module")
def task() -> Task:
    return digits()


@pytest.fixture(scope="module")
def teacher(task: Task) -> nn.Module:
    """Trained for as long as it takes to know most digits."""
    model = new_model("vit_mini", task, 0)
    fit(model, task, Settings(epochs=3))
    return model


def shrink(teacher: nn.Module, task: Task, name: str, **options: Any) -> Shrunk:
    return method(name)(Start(teacher, "vit_mini", task, 0, {"epochs": 1, **options}))


def test_pruning_methods_are_all_tried_here() -> None:
    assert set(SHORT) == {one.name for one in PRUNING_METHODS}


@pytest.mark.parametrize("name", SHORT)
def test_a_method_gives_a_model_of_the_bytes_predicted_that_a_file_gives_back(
    name: str, teacher: nn.Module, task: Task
) -> None:
    before = [parameter.clone() for parameter in teacher.parameters()]
    shrunk = shrink(teacher, task, name, **SHORT[name])
    assert payload_bytes(shrunk.stored) == shrunk.predicted_bytes < payload_bytes(teacher.state_dict())
    assert all(torch.equal(old, new) for old, new in zip(before, teacher.parameters(), strict=True))
    assert not shrunk.model.training and shrunk.predicted_latency_ratio == 1.0
    other = new_model("vit_mini", task, 9)
    restore(other, shrunk.stored)
    assert torch.equal(logits(other, task.held_out_NCHW), logits(shrunk.model, task.held_out_NCHW))
    removed, total = masks.removed_and_all(shrunk.model)
    assert parameters(shrunk.model) - shrunk.parameters == removed
    if "sparsity" in SHORT[name]:
        assert removed / total == pytest.approx(SHORT[name]["sparsity"], abs=1e-4)
    # A tenth is chance. Lottery trains from scratch for one epoch; the others start from a teacher of more than 0.95.
    assert accuracy(shrunk.model, task) > (0.5 if name == "lottery" else 0.85)


def test_sr_ste_from_scratch_does_not_count_the_teachers_weights(teacher: nn.Module, task: Task) -> None:
    few, untrained = task.few(64), new_model("vit_mini", task, 5)
    first = shrink(teacher, few, "two_to_four_sr_ste", origin="scratch")
    second = shrink(untrained, few, "two_to_four_sr_ste", origin="scratch")
    other = shrink(teacher, few, "two_to_four_sr_ste")
    assert all(torch.equal(first.stored[name], second.stored[name]) for name in first.stored)
    assert any(not torch.equal(first.stored[name], other.stored[name]) for name in first.stored)


@pytest.mark.parametrize(
    ("language", "words"),
    [("en", "keep less than 2% of their weights: blocks.3.classifier"), ("fr", "gardent moins de 2 % de leurs poids")],
)
def test_magnitude_global_tells_layers_that_are_left_with_nothing(
    language: str, words: str, teacher: nn.Module, task: Task
) -> None:
    use_language(language)
    few = task.few(64)
    assert words in " ".join(shrink(teacher, few, "magnitude_global", sparsity=0.9).notes)
    assert words not in " ".join(shrink(teacher, few, "magnitude_layer", sparsity=0.9).notes)


def test_the_permuted_method_says_what_it_gained(teacher: nn.Module, task: Task) -> None:
    for language, words in (("en", "raises what 2:4 keeps of the magnitude from 74."), ("fr", "fait passer de 74,")):
        use_language(language)
        assert words in shrink(teacher, task.few(64), "two_to_four_permuted", sweeps=0 + 1).notes[0]


@pytest.mark.parametrize("name", ["magnitude_global", "magnitude_layer", "gradual", "lottery"])
@pytest.mark.parametrize("sparsity", [-0.1, 1.0])
def test_pruning_methods_refuse_a_sparsity_outside_its_range(
    name: str, sparsity: float, teacher: nn.Module, task: Task
) -> None:
    for language, words in (("en", "the share of the weights that are removed"), ("fr", "la part des poids retirés")):
        use_language(language)
        with pytest.raises(LabError, match=words):
            shrink(teacher, task, name, sparsity=sparsity)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gradual", {"every": 0}, "every is the number of steps .* but 0 was"),
        ("lottery", {"rounds": 0}, "rounds must be at least 1"),
        ("lottery", {"rewind_epochs": 1}, "rewind_step must be from 0 to 21, .* but 22"),
        ("two_to_four_sr_ste", {"origin": "scrach"}, "did you mean 'scratch'"),
        ("two_to_four_sr_ste", {"decay": -1.0}, "decay pulls the hidden weights"),
        ("two_to_four", {"sparsity": 0.5}, "unknown option of two_to_four 'sparsity'"),
    ],
)
def test_pruning_methods_refuse_options_that_cannot_be(
    name: str, options: dict[str, Any], words: str, teacher: nn.Module, task: Task
) -> None:
    with pytest.raises(LabError, match=words):
        shrink(teacher, task, name, **options)


def test_the_catalogue_loads_no_torch_and_speaks_both_languages() -> None:
    code = "import sys, dlojz.compress.method; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    english = [one.summary() for one in PRUNING_METHODS]
    use_language("fr")
    assert not set(english) & {one.summary() for one in PRUNING_METHODS}
