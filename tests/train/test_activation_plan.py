"""Plans under a budget, run for real: the peak that was counted is the predicted one, and the training is the same."""

from pathlib import Path
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.planner.activation_budget import BudgetPlan, least_memory, plan_activations
from dlojz.prediction.forecast import forecast
from dlojz.results.footprint import Footprint
from dlojz.results.record import read_events
from tests.train.matrix import train

SMALL = {"learning_rate": 0.01, "optimizer": "sgd", "steps": 2}
MODELS: dict[str, dict[str, Any]] = {
    "coatnet": {**SMALL, "image_size": 32, "micro_batch": 16},
    "gpt": {**SMALL, "model": "gpt_tiny", "micro_batch": 8, "sequence_length": 64, "micro_batches": 2},
    "llama": {**SMALL, "model": "llama_tiny", "micro_batch": 8, "sequence_length": 64, "precision": "bf16"},
}
SHARES = (0.85, 0.5)
"""Of the way from the least peak to that of everything kept."""


def budgets() -> dict[str, BudgetPlan]:
    found = {}
    for name, flat in MODELS.items():
        config = RunConfig.of(**flat)
        kept = forecast(config).memory.peak_bytes or 0
        tables = plan_activations(config, kept).tables
        least = float(tables.peak_bytes(least_memory(tables))[0])
        for share in SHARES:
            found[f"{name}-{share}"] = plan_activations(config, int(least + share * (kept - least)))
    return found


def prepare(folder: Path) -> None:
    configs = {name: plan.config for name, plan in budgets().items()}
    configs |= {f"{name}-kept": RunConfig.of(**flat) for name, flat in MODELS.items()}
    train(folder / "1", configs, 1)


def events(prepared: Path, name: str, event: str) -> list[dict[str, Any]]:
    found = read_events(prepared / "1" / name / "events" / "rank-0.jsonl")
    return [one for one in found if one["event"] == event]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("model", MODELS)
def test_the_predicted_peak_is_met_and_within_the_budget(prepared: Path, model: str, share: float) -> None:
    name = f"{model}-{share}"
    plan = budgets()[name]
    counted = Footprint.from_dict(events(prepared, name, "footprint")[-1]["footprint"])
    assert counted.memory.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    assert plan.peak_bytes <= plan.budget_bytes < plan.kept_peak_bytes
    losses = [[one["loss"] for one in events(prepared, run, "step")] for run in (name, f"{model}-kept")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_plan_activations_recomputes_and_offloads_blocks() -> None:
    assert {choice for plan in budgets().values() for choice in plan.choices} == {0, 1, 2}
