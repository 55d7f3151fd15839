"""What zeros do not gain: the forms that are timed compute the same, and the crossing is where it is."""

from __future__ import annotations

import pytest
import torch

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import two_to_four
from dlojz.compress.masks import magnitude_mask
from dlojz.compress.two_to_four import (
    SparseSpeed,
    crossing,
    has_semi_structured,
    mask_2_of_4,
    semi_structured,
    sparse_speed,
)
from dlojz.compress.two_to_four import _csr as csr
from dlojz.compress.two_to_four import _csr_bytes as csr_bytes
from dlojz.compress.two_to_four import _Product as Product


def speed(form: str, sparsity: float, ratio: float) -> SparseSpeed:
    return SparseSpeed(form, sparsity, 1 - sparsity, 1.0, ratio, ratio, ratio, 1e-3)  # type: ignore[arg-type]


def test_both_forms_compute_the_masked_product() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 16), torch.randn(5, 16)
    masked = weight * magnitude_mask(weight, 0.8)
    expected = torch.einsum("oi,bi->bo", masked, x)
    for form in (masked, csr(masked)):
        torch.testing.assert_close(Product(form)(x), expected)


def test_csr_bytes_count_a_value_and_an_index_for_each_weight_that_stays() -> None:
    rows = csr(torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]]))
    assert csr_bytes(rows) == 3 * (4 + 8) + 3 * 8


def test_every_form_is_timed_at_every_sparsity_beside_what_is_expected() -> None:
    found = sparse_speed(16, 8, 3, (0.0, 0.5, 0.75), rounds=2)
    assert [(one.form, one.sparsity) for one in found] == [
        (form, sparsity) for sparsity in (0.0, 0.5, 0.75) for form in ("masked", "csr")
    ]
    assert [one.predicted_ratio for one in found] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert [one.bytes_ratio for one in found if one.form == "masked"] == [1.0] * 3
    assert [one.bytes_ratio for one in found if one.form == "csr"] == [
        (kept * 12 + 17 * 8) / (16 * 8 * 4) for kept in (128, 64, 32)
    ]
    assert all(0 < one.ratio_low <= one.ratio <= one.ratio_high and one.seconds > 0 for one in found)


@pytest.mark.parametrize(
    ("ratios", "where"),
    [
        ({0.0: 3.0, 0.5: 2.0, 0.9: 0.5}, 0.5 + 0.4 * (1 / 1.5)),
        ({0.0: 3.0, 0.5: 0.9, 0.75: 1.1, 0.9: 0.6}, 0.75 + 0.15 * 0.2),
        ({0.0: 3.0, 0.5: 2.0, 0.9: 1.2}, None),
        ({0.0: 0.8, 0.5: 0.5}, 0.0),
        ({}, None),
    ],
)
def test_the_crossing_is_the_last_time_that_rows_were_slower(ratios: dict[float, float], where: float | None) -> None:
    speeds = [speed("csr", sparsity, ratio) for sparsity, ratio in ratios.items()] + [speed("masked", 0.5, 1.0)]
    assert crossing(speeds) == (None if where is None else pytest.approx(where))


def test_semi_structured_says_that_the_processor_has_no_units_for_2_of_4() -> None:
    assert not has_semi_structured("cpu")
    for language, words in (("en", "on NVIDIA GPUs since Ampere only"), ("fr", "que sur les GPU NVIDIA depuis Ampere")):
        use_language(language)
        with pytest.raises(LabError, match=words):
            semi_structured(torch.zeros(64, 64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_sparse_speed_tells_in_one_sentence_that_there_is_no_gpu() -> None:
    assert not has_semi_structured("cuda")
    for language, words in (("en", "needs an NVIDIA GPU that torch can use"), ("fr", "demande un GPU NVIDIA")):
        use_language(language)
        with pytest.raises(LabError, match=words):
            sparse_speed(16, 16, 2, device="cuda")


def test_a_form_that_torch_refuses_is_left_out_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is said to have the units: torch's own packing refuses it."""
    monkeypatch.setattr(two_to_four, "has_semi_structured", lambda device: True)
    with pytest.raises(LabError, match="torch cannot pack this 2:4 weight, 16 × 16 in torch.float32: "):
        semi_structured(torch.zeros(16, 16))
    with pytest.warns(UserWarning, match="semi_structured with 50% of zeros was left out: torch cannot pack"):
        found = sparse_speed(16, 16, 2, (0.5,), rounds=1)
    assert [one.form for one in found] == ["masked", "csr"]


def test_the_bytes_of_2_of_4_are_those_of_its_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_to_four, "has_semi_structured", lambda device: True)
    monkeypatch.setattr(two_to_four, "semi_structured", lambda weight: weight)
    (found,) = (one for one in sparse_speed(16, 16, 2, (), rounds=1))
    assert (found.form, found.sparsity, found.bytes_ratio) == ("semi_structured", 0.5, 17 / 32)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_semi_structured("cuda")), reason="needs an NVIDIA GPU since Ampere"
)
def test_on_a_gpu_that_has_them_the_product_is_that_of_the_masked_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 128)
    masked = (weight * mask_2_of_4(weight)).to("cuda", torch.float16)
    x = torch.randn(64, 128, device="cuda", dtype=torch.float16)
    torch.testing.assert_close(Product(semi_structured(masked))(x), x @ masked.T, rtol=1e-2, atol=1e-2)
    found = sparse_speed(128, 128, 64, (0.5,), rounds=2, device="cuda")
    assert {one.form for one in found} == {"masked", "csr", "semi_structured"}


def test_sparse_speed_refuses_a_sparsity_of_1() -> None:
    with pytest.raises(LabError, match="sparsity"):
        sparse_speed(4, 4, 1, (1.0,), rounds=1)
