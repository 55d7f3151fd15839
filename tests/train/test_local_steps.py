"""Local SGD and DiLoCo under the lab's engine: as predicted, when they send, and gone on with between two meetings."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlojz import predict
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import meets, settled_step
from dlojz.display.tables import footprint_table
from dlojz.prediction.compute import checkpoint_bytes
from dlojz.prediction.shapes import model_shapes
from dlojz.runnable import check_runnable
from tests.train.counted import check_as_predicted, check_goes_on, check_refused, going_on_from, kept, prepare_runs

SHORT: dict[str, Any] = {"learning_rate": 1e-3, "device": "cpu", "micro_batch": 2, "engine": "by_hand", "steps": 8}
LLAMA = {**SHORT, "model": "llama_tiny", "sequence_length": 16, "dp": 2}
COATNET = {**SHORT, "model": "coatnet_tiny", "image_size": 32, "dp": 2}
RUNS: dict[str, dict[str, Any]] = {
    "local-sgd": {**LLAMA, "optimizer": "local_sgd", "local_steps": 3, "warmup_steps": 1, "weight_decay": 0.1},
    "diloco": {**LLAMA, "optimizer": "diloco", "local_steps": 3, "weight_decay": 0.1, "micro_batch": 3},
    "diloco-3": {**COATNET, "optimizer": "diloco", "local_steps": 4, "dp": 3, "precision": "bf16", "steps": 5},
    "alone": {**LLAMA, "optimizer": "diloco", "local_steps": 4, "dp": 1, "steps": 4},
}
CUT = {"local-sgd": 4, "diloco": 4, "diloco-3": 3}
"""Cut off after a step of this number: between two meetings, but the last, which is just after one."""
AGAIN = {**RUNS["diloco"], "dp": 3, "micro_batch": 2}


def prepare(folder: Path) -> None:
    made = prepare_runs(folder, RUNS, CUT)
    made.do([going_on_from(made, "cut/diloco", "again/diloco", RunConfig.of(**AGAIN))], 3)


@pytest.mark.parametrize("name", RUNS)
def test_predicted_equals_counted_in_a_step_after_which_they_meet(runs: Any, name: str) -> None:
    """States by category, bytes and calls of every collective, on every rank: exact; the peak to 2 %."""
    config = RunConfig.of(**RUNS[name])
    assert meets(settled_step(config), config.local_steps or 0, config.warmup_steps or 0, config.steps)
    check_as_predicted(runs, name, config)


@pytest.mark.parametrize("name", CUT)
def test_local_steps_go_on_from_a_checkpoint_as_if_not_cut_off(runs: Any, name: str) -> None:
    """Bit for bit, each replica with its own weights and moments: losses, and the checksum of the final weights."""
    check_goes_on(runs, name, CUT[name] + 1)


@pytest.mark.parametrize("name", CUT)
def test_the_bytes_of_a_checkpoint_are_predicted(runs: Any, name: str) -> None:
    """Between two meetings; just after one the weights of all but the first replica are not there twice."""
    config, found = kept(runs, name)
    met = meets(CUT[name], config.local_steps or 0, config.warmup_steps or 0, config.steps)
    assert met is (name == "diloco-3")
    same = 4 * model_shapes(config).num_parameters * (config.layout.dp - 1) if met else 0
    assert found == checkpoint_bytes(config) - same


def test_diloco_goes_on_with_another_number_of_replicas_from_the_first_and_says_so(runs: Any) -> None:
    [said] = runs.told("again/diloco", "resumed", "left_out")
    assert said == "diloco: with dp=3 every replica goes on from what the first of 2 had, as if they had just met."
    assert runs.told("again/diloco", "step", "step") == [5, 6, 7]
    assert runs.told("again/diloco", "end", "status") == ["completed"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"local_steps": 30},
        "local_steps=30 is longer than the run of 20 steps: use at most 20, or more steps",
        "local_steps=30 dépasse l’entraînement de 20 pas : prenez au plus 20, ou davantage",
    ),
    ({"engine": "torch"}, "but DDP was received: use engine='by_hand'", "mais DDP a été reçu : prenez engine='by_hand"),
    ({"zero": 2}, "averages over the ranks itself", "moyenne lui-même entre les rangs"),
    ({"optimizer": "adamw", "local_steps": 3}, "replicas of adamw meet in every step", "répliques de adamw se rencont"),
    ({"warmup_steps": 3}, "diloco has no first stage", "diloco n’a pas de première phase"),
    (
        {"optimizer": "local_sgd", "warmup_steps": 20},
        "warmup_steps=20 leaves nothing",
        "warmup_steps=20 ne laisse rien",
    ),
]


@pytest.mark.parametrize(("fields", "english", "french"), REFUSED)
def test_run_config_refuses_in_one_sentence_what_local_steps_cannot(
    fields: dict[str, Any], english: str, french: str
) -> None:
    check_refused({"optimizer": "diloco", "engine": "by_hand", "dp": 2, "steps": 20, **fields}, english, french)


def test_footprint_table_says_how_often_a_message_is_sent() -> None:
    config = RunConfig.of(**RUNS["diloco"])
    shown = io.StringIO()
    Console(file=shown, width=120).print(footprint_table(config, predict(config)))
    assert [one.every_steps for one in predict(config).communication] == [1, 3]
    assert " every 3 steps" in shown.getvalue()


def test_eight_local_steps_where_nothing_is_said_and_never_more_than_the_run() -> None:
    for steps, expected in ((20, 8), (5, 5)):
        config = RunConfig.of(optimizer="diloco", engine="by_hand", dp=2, steps=steps)
        assert config.local_steps == expected
        check_runnable(config)
