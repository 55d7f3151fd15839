"""The largest batch that fits, and what the levers save."""

import pytest

from dlojz import hardware
from dlojz.base.language import MEBIBYTE
from dlojz.config.run_config import RunConfig
from dlojz.planner.levers import changes, largest_batch, levers, taken_bytes, with_micro_batch
from dlojz.prediction.forecast import heaviest

V100 = hardware.device("v100-16")


@pytest.mark.parametrize(("limit_mib", "own"), [(40, 16), (64, 1), (300, 16), (64, 4096), (0, 16)])
def test_one_sample_more_than_the_largest_batch_does_not_fit(limit_mib: int, own: int) -> None:
    """Whatever the run's own micro-batch, from which the search begins."""
    config = RunConfig.of(model="vit_tiny", micro_batch=own)
    base = taken_bytes(heaviest(with_micro_batch(config, 1), V100))
    limit_bytes = base + limit_mib * MEBIBYTE
    fit = largest_batch(config, V100, limit_bytes=limit_bytes)
    assert fit.micro_batch >= 1
    assert fit.taken_bytes <= limit_bytes
    assert taken_bytes(heaviest(with_micro_batch(config, fit.micro_batch + 1), V100)) > limit_bytes


def test_largest_batch_says_what_one_sample_takes_where_nothing_fits() -> None:
    fit = largest_batch(RunConfig.of(model="vit_tiny"), V100, limit_bytes=100 * MEBIBYTE)
    assert fit.micro_batch == 0
    assert fit.taken_bytes > 100 * MEBIBYTE


def test_levers_are_whole_configurations_with_their_forecasts() -> None:
    config = RunConfig.of(model="vit_tiny", micro_batch=32, dp=2)
    found = {lever.name: lever for lever in levers(config)}
    assert {"checkpointing", "selective", "micro-batch", "precision", "zero-1", "zero-2", "zero-3", "tp"} <= set(found)
    now = taken_bytes(heaviest(config))
    for lever in found.values():
        assert lever.taken_bytes == taken_bytes(heaviest(lever.config))
        assert lever.saved_bytes == now - lever.taken_bytes
    assert found["checkpointing"].saved_bytes > found["selective"].saved_bytes > 0
    assert found["checkpointing"].runnable and found["tp"].runnable
    assert found["offload-activations"].host_bytes > 0
    savings = [lever.saved_bytes for lever in levers(config)]
    assert savings == sorted(savings, reverse=True)
    assert found["micro-batch"].config.layout.global_batch == config.layout.global_batch


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"model": "vit_tiny"}, "tp=2"),
        ({"model": "vit_ti_16"}, "tp=3"),  # three heads
        ({"model": "alexnet_tiny"}, None),  # no tensor-parallel form
        ({"model": "vit_tiny", "engine": "single"}, None),
        ({"model": "vit_tiny", "tp": 2}, None),
    ],
    ids=str,
)
def test_changes_offer_a_tensor_parallelism_that_the_model_allows(
    fields: dict[str, object], change: str | None
) -> None:
    offered = [words for name, words, _ in changes(RunConfig.of(**fields)) if name == "tp"]
    assert offered == ([change] if change else [])
