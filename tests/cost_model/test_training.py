"""Whole trainings: the course's table, two published estimates, BLOOM's energy; models of the catalogue."""

from dataclasses import replace

import pytest

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.cost_model import Layouts, bill, calibration, estimate, training_s, workload
from dlojz.cost_model.step import SECONDS_PER_DAY
from dlojz.hardware import cluster

WEEK, YEAR = 7 * SECONDS_PER_DAY, 365.25 * SECONDS_PER_DAY


@pytest.mark.parametrize(
    ("parameters", "one_node", "four_nodes", "unit"),
    [(1.7e9, 6, 2, WEEK), (18e9, 65, 16, WEEK), (76e9, 5, 1, YEAR), (1e12, 65, 17, YEAR)],
)
def test_the_courses_table_of_training_times(
    parameters: float, one_node: float, four_nodes: float, unit: float
) -> None:
    """300 billion tokens on 1 and 4 DGX A100 at 140 TFLOP/s per GPU; the table is printed to one or two digits."""
    for nodes, printed in ((1, one_node), (4, four_nodes)):
        seconds = training_s(8 * parameters, 300e9, 8 * nodes, 140e12)
        assert abs(seconds / unit - printed) <= max(0.5, 0.06 * printed)


def test_two_published_trainings() -> None:
    """Narayanan et al. 2021, §5.1: 34 days for 175 B on 1024 GPUs, 84 for 1 T on 3072."""
    assert training_s(8 * 175e9, 300e9, 1024, 140e12) / SECONDS_PER_DAY == pytest.approx(34, abs=0.5)
    # The paper has 1008 B parameters in the second.
    assert training_s(8 * 1.008e12, 450e9, 3072, 163e12) / SECONDS_PER_DAY == pytest.approx(84, abs=0.5)


def test_blooms_energy_and_carbon() -> None:
    """Luccioni et al. 2023: 1,082,990 GPU-hours, 433,196 kWh, 24.7 t; 256,646 kWh idle."""
    made = bill(cluster("jean_zay_a100"), 384, 1_082_990 / 384 * 3600)
    assert made.gpu_hours == pytest.approx(1_082_990)
    assert made.days == pytest.approx(1_082_990 / 384 / 24)
    assert made.energy_kwh == pytest.approx(433_196, rel=1e-6)
    assert made.carbon_kg == pytest.approx(24_690, rel=1e-3)
    assert made.idle_kwh == pytest.approx(256_646, rel=1e-6)
    site = replace(cluster("jean_zay_a100"), pue=1.2, carbon_g_per_kwh=57.0)
    whole_kg = (433_196 + 256_646) * 1.2 * 0.057
    assert bill(site, 384, 1_082_990 / 384 * 3600).total_carbon_kg == pytest.approx(whole_kg, rel=1e-6)


def test_training_s_refuses_bad_numbers() -> None:
    with pytest.raises(LabError, match="tokens"):
        training_s(1e9, 0, 8, 1e12)


@pytest.mark.parametrize("name", ["coatnet_tiny", "vit_tiny", "alexnet_tiny"])
def test_an_image_model_has_the_parameters_and_operations_that_are_counted(name: str) -> None:
    """Operations within 5 % of torch's counter: convolutions of one filter per channel are passes over memory here."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    found = workload(name)
    with torch.device("meta"):
        built = models.build(name).eval()
        image = torch.empty(1, 3, models.spec(name).image_size or 1, models.spec(name).image_size or 1)
    assert found.num_parameters == sum(one.numel() for one in built.parameters())
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        built(image)
    assert found.flops() == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_estimate_takes_an_image_model_like_any_other() -> None:
    layouts = Layouts.of(
        dp=[4, 1, 2], pp=[1, 4, 2], micro_batch=8, micro_batches=[1, 8, 4], checkpointing=["none", "full", "none"]
    )
    made = estimate(workload("coatnet_tiny"), cluster("jean_zay_a100"), layouts, calibration("a100"))
    assert (made.step_s > 0).all() and made.fits.all()
    assert made.memory.activations[1] < made.memory.activations[2]


def test_workload_takes_text_models_of_the_catalogue_for_decoders() -> None:
    assert workload("llama_3_8b").num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert workload("gpt2", sequence_length=512).size is not None
    with pytest.raises(LabError):
        workload("gpt5")
    with pytest.raises(LabError):
        workload("coatnet_0", sequence_length=12)
