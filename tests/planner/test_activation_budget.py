"""Activation budgets: the programme is optimal, its peaks are the forecast's, a budget too small says what works."""

import re
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from dlojz import hardware
from dlojz.base.errors import LabError
from dlojz.base.language import MEBIBYTE, use_language
from dlojz.config.fields import BLOCK_CHOICES, block_choices
from dlojz.config.run_config import RunConfig
from dlojz.planner.activation_budget import (
    KEEP,
    BlockTables,
    Speeds,
    activation_curve,
    block_tables,
    cheapest,
    plan_activations,
    planned,
)
from dlojz.prediction.compute import step_flops
from dlojz.prediction.forecast import forecast

RUNS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt_tiny", "micro_batch": 8},
    "coatnet": {"model": "coatnet_tiny", "micro_batch": 8, "micro_batches": 2},
    "vit-bf16": {"model": "vit_tiny", "micro_batch": 8, "precision": "bf16"},
    "llama-fsdp2": {"model": "llama_tiny", "micro_batch": 8, "dp": 2, "zero": 3, "precision": "bf16"},
}


def made_up(seed: int, count: int, choices: int = 3) -> BlockTables:
    """Tables of a model with blocks of unlike sizes; with two choices the third is the first, dearer."""
    draw = np.random.default_rng(seed)
    kept = draw.uniform(1, 10, count)
    held = np.stack([kept, kept * draw.uniform(0.05, 0.3, count), kept * draw.uniform(0, 0.1, count)], axis=-1)
    own = np.stack([kept * draw.uniform(1, 2, count) for _ in range(3)], axis=-1)
    seconds = np.stack([np.zeros(count), draw.uniform(1, 5, count), draw.uniform(1, 5, count)], axis=-1)
    if choices == 2:
        held[:, 2], own[:, 2], seconds[:, 2] = held[:, 0], own[:, 0], 1.0
    loss = np.full((1, 3), draw.uniform(0, 5))
    both = np.stack([np.concatenate([own, 0 * loss]), np.concatenate([2 * own, loss])])
    return BlockTables(both, np.stack([held, held]), 1.0, seconds, seconds, seconds, Speeds(1, 1, 1, 1))


@pytest.mark.parametrize(("count", "choices"), [(2, 3), (6, 3), (10, 3), (16, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_cheapest_is_within_one_percent_of_brute_force(seed: int, count: int, choices: int) -> None:
    tables = made_up(seed, count, choices)
    every = np.array(list(product(range(choices), repeat=count)))
    peaks = tables.peak_bytes(every)
    seconds = tables.seconds[np.arange(count), every].sum(axis=1)
    for budget in np.linspace(peaks.min(), peaks.max(), 5):
        best = seconds[peaks <= budget * (1 + 1e-9)].min()
        found = cheapest(tables, budget * (1 + 1e-6))
        assert found is not None and tables.peak_bytes(found)[0] <= budget * (1 + 1e-5)
        assert tables.costs(found)[0] <= 1.01 * best + 1e-9
    assert cheapest(tables, 0.99 * peaks.min()) is None


@pytest.mark.parametrize("device", [None, "h100"])
@pytest.mark.parametrize("name", RUNS)
def test_the_tables_tell_the_forecast_s_peak(name: str, device: str | None) -> None:
    """Of choices drawn at random, and of the three plain ones, which are exact."""
    gpu = None if device is None else hardware.device(device)
    config = RunConfig.of(**RUNS[name])
    tables = block_tables(config, 0, gpu)
    draw = np.random.default_rng(0)
    for number in range(8):
        plain = number < len(BLOCK_CHOICES)
        choices = np.full(tables.num_blocks, number) if plain else draw.integers(0, 3, tables.num_blocks)
        told = forecast(planned(config, choices.tolist()), 0, gpu).memory.peak_bytes
        assert tables.peak_bytes(choices)[0] == pytest.approx(told, rel=1e-6 if plain else 0.01)


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_stays_within_its_budget_and_pays_what_it_says(name: str) -> None:
    config = RunConfig.of(**RUNS[name])
    kept = forecast(config).memory.peak_bytes or 0
    whole = plan_activations(config, kept)
    assert set(whole.choices) == {KEEP} and whole.peak_bytes == whole.kept_peak_bytes == kept
    plan = plan_activations(config, int(0.8 * kept))
    assert plan.peak_bytes <= 0.8 * kept and set(plan.choices) != {KEEP}
    assert plan.peak_bytes == forecast(plan.config).memory.peak_bytes
    assert [BLOCK_CHOICES[one] for one in plan.choices] == [*block_choices(plan.config.layout.activation_plan)]
    seconds, flops, moved = plan.tables.costs(plan.choices)
    assert seconds > 0 and flops == pytest.approx(step_flops(plan.config) - step_flops(config))
    assert (moved > 0) == (2 in plan.choices)


def test_plan_activations_says_the_smallest_budget_that_works() -> None:
    config = RunConfig.of(**RUNS["gpt"])
    states = forecast(config).memory.states_bytes
    sentences = []
    for language, words in (("en", "of it states"), ("fr", "d’états")):
        use_language(language)
        with pytest.raises(LabError, match=words) as refused:
            plan_activations(config, states // 2)
        sentences.append(str(refused.value))
    smallest = {int(found) for one in sentences for found in re.findall(r"(\d+)MiB", one)}
    assert len(smallest) == 1
    works = smallest.pop() * MEBIBYTE
    assert works > states
    assert plan_activations(config, works).peak_bytes <= works
    with pytest.raises(LabError):
        plan_activations(config, works - 2 * MEBIBYTE)


def test_activation_curve_never_costs_more_time_with_more_memory() -> None:
    curve = activation_curve(block_tables(RunConfig.of(**RUNS["coatnet"])))
    assert curve[-1].seconds == 0 and set(curve[-1].choices) == {KEEP}
    for less, more in pairwise(curve):
        assert less.seconds >= 0.99 * more.seconds and less.peak_bytes <= more.peak_bytes * (1 + 1e-3)


@pytest.mark.parametrize(
    ("plan", "words"), [("keep:3", "6 blocks, but 3"), ("keep:3,burn:3", "no list of choices"), ("keep:7", "but 7")]
)
def test_activation_plan_that_does_not_fit_the_model_is_refused(plan: str, words: str) -> None:
    from dlojz.runnable import check_runnable

    with pytest.raises(LabError, match=words):
        check_runnable(RunConfig.of(**RUNS["gpt"], activation_plan=plan))
    with pytest.raises(LabError, match=words):
        forecast(RunConfig.of(**RUNS["gpt"], activation_plan=plan))
