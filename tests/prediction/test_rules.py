"""Rules of thumb add up and meet the closed forms; the closed forms hold what they must for any argument."""

from fractions import Fraction
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.prediction.rules_of_thumb import RULES, Optimizer, Precision, bytes_per_parameter
from dlojz.results.footprint import CATEGORIES


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_what_its_name_says_and_says_what_it_counts(name: str) -> None:
    found = RULES[name]
    assert found.bytes_per_parameter == int(name.partition("-")[0])
    assert found.sources and all(found.sources)
    assert {part.category for part in found.parts} <= set(CATEGORIES)
    english = found.about()
    use_language("fr")
    assert found.about() != english


def test_rules_have_all_the_field_s_numbers() -> None:
    assert sorted({found.bytes_per_parameter for found in RULES.values()}) == [12, 16, 18, 20, 24]


@pytest.mark.parametrize(
    ("name", "precision", "optimizer"),
    [
        ("12-momentum", "fp32", "momentum"),
        ("16-fp32", "fp32", "adam"),
        ("16-fp32", "autocast", "adamw"),
        ("16-mixed", "fp16_amp", "lamb"),
        ("16-mixed", "bf16", "adamw"),
        ("18", "bf16_fp32_gradients", "adamw"),
    ],
)
def test_a_rule_is_a_closed_form_without_sharding(name: str, precision: Any, optimizer: Any) -> None:
    form = bytes_per_parameter(precision, optimizer)
    parts: dict[str, int] = {}
    for part in RULES[name].parts:
        parts[part.category] = parts.get(part.category, 0) + part.bytes_per_parameter
    assert {category: share for category, share in form.device.items() if share} == parts
    assert form.device_bytes(7_000_000_000) == RULES[name].total_bytes(7_000_000_000)


def test_what_remains_of_a_rule() -> None:
    form = bytes_per_parameter("fp16_amp", "adam")
    assert form.device["optimizer"] + form.device["master"] == RULES["12-optimizer"].bytes_per_parameter
    assert RULES["20"].bytes_per_parameter == bytes_per_parameter("bf16_fp32_gradients").device_per_parameter + 2


@pytest.mark.parametrize(
    ("billions", "without", "with_"), [(1, 16, 20), (7, 112, 140), (70, 1120, 1400), (405, 6480, 8100)]
)
def test_rules_give_the_playbook_s_table(billions: int, without: int, with_: int) -> None:
    """Ultra-Scale Playbook, memory for weights, gradients and optimizer states, in GB."""
    assert RULES["16-mixed"].total_bytes(billions * 10**9) == without * 10**9
    assert RULES["20"].total_bytes(billions * 10**9) == with_ * 10**9


def test_bytes_per_parameter_of_eight_bit_adam() -> None:
    form = bytes_per_parameter("bf16", "adamw_8bit")
    assert form.device["optimizer"] == Fraction(65, 32)


def test_bytes_per_parameter_bear_out_zero_offload_s_claim() -> None:
    """ZeRO-Offload: 13 billion parameters on one V100 of 32 GB, 10 times what fits without."""
    offloaded = bytes_per_parameter("fp16_amp", "adam", zero=2, offload="optimizer")
    assert offloaded.device_bytes(13 * 10**9) == 26 * 10**9
    assert offloaded.host_bytes(13 * 10**9) == 16 * 13 * 10**9


def test_bytes_per_parameter_are_all_moved_by_offload_in_the_end() -> None:
    forms = [
        bytes_per_parameter("bf16", "adamw", zero=3, dp=8, offload=offload)
        for offload in ("none", "optimizer", "parameters")
    ]
    assert [form.device_per_parameter * 8 for form in forms] == [16, 2, 0]
    assert [form.host * 8 for form in forms] == [0, 16, 18]


ANY = {
    "precision": st.sampled_from(get_args(Precision)),
    "optimizer": st.sampled_from(get_args(Optimizer)),
    "dp": st.integers(1, 4096),
    "tp": st.integers(1, 64),
    "pp": st.integers(1, 64),
}


@given(**ANY)
def test_bytes_per_parameter_are_no_more_in_each_stage_and_all_ranks_hold_it_all(
    precision: Any, optimizer: Any, dp: int, tp: int, pp: int
) -> None:
    stages = [
        bytes_per_parameter(precision, optimizer, zero=zero, dp=dp, tp=tp, pp=pp).device_per_parameter
        for zero in range(4)
    ]
    assert stages == sorted(stages, reverse=True)
    whole = bytes_per_parameter(precision, optimizer).device_per_parameter
    assert stages[3] * dp * tp * pp == whole == stages[0] * tp * pp


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"optimizer": "adamx"}, "did you mean 'adam"),
        ({"zero": 4}, "unknown zero '4'"),
        ({"offload": "all"}, "unknown offload 'all'"),
        ({"dp": 0}, "dp counts ranks and must be at least 1, but 0"),
        ({"offload": "optimizer"}, "with zero=0: states of the optimizer are offloaded from zero=1 on"),
        ({"offload": "parameters", "zero": 2}, "with zero=2"),
    ],
)
def test_bytes_per_parameter_refuses_bad_arguments_in_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        bytes_per_parameter(**arguments)
