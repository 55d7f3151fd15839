"""Scales, zero points and integers: what they promise, and torch's own to the last bit."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.ao.quantization import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import quantizers
from dlojz.compress.quantized_model import pack
from dlojz.compress.quantizers import (
    RANGES,
    Scheme,
    channels,
    dequantize,
    fake_quantize,
    parameters_from_range,
    quantize,
    value_range,
    weight_grid,
)

from .restoring import unpack_integers

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:torch.ao.quantization")
SHAPES = ((384, 128), (97, 33))


def weights(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3 + 0.05


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_grid_per_tensor_is_torchs_to_the_last_bit(shape: tuple[int, int], symmetric: bool) -> None:
    scheme = Scheme(8, symmetric, per_channel=False)
    weight = weights(shape)
    observer = MinMaxObserver(
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine,
        quant_min=-128,
        quant_max=127,
    )
    observer(weight)
    scale, zero = weight_grid(weight, scheme)
    theirs_scale, theirs_zero = observer.calculate_qparams()
    assert torch.equal(scale.flatten(), theirs_scale)
    assert torch.equal(zero.flatten(), theirs_zero.to(torch.int32))
    theirs = torch.quantize_per_tensor(weight, float(scale), int(zero), torch.qint8)
    ours = quantize(weight, scale, zero, scheme)
    assert torch.equal(ours, theirs.int_repr())
    assert torch.equal(dequantize(ours, scale, zero), theirs.dequantize())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_grid_per_channel_is_torchs_to_the_last_bit(shape: tuple[int, int], symmetric: bool) -> None:
    scheme = Scheme(8, symmetric, per_channel=True)
    weight = weights(shape, seed=1)
    observer = PerChannelMinMaxObserver(
        ch_axis=0,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric if symmetric else torch.per_channel_affine,
        quant_min=-128,
        quant_max=127,
    )
    observer(weight)
    scale, zero = weight_grid(weight, scheme)
    theirs_scale, theirs_zero = observer.calculate_qparams()
    assert torch.equal(scale.flatten(), theirs_scale)
    assert torch.equal(zero.flatten(), theirs_zero.to(torch.int32))
    theirs = torch.quantize_per_channel(weight, theirs_scale, theirs_zero, 0, torch.qint8)
    assert torch.equal(quantize(weight, scale, zero, scheme), theirs.int_repr())


def test_exactly_between_two_integers_torchs_two_ways_differ_and_ours_is_that_of_its_fake_quantization() -> None:
    """1.5 at a zero point of 1: rounded first it is 2 + 1; the zero point added first, 2.5 is rounded to 2."""
    values, scale, zero = torch.tensor([1.5, 0.5, -0.5]), torch.tensor(1.0), torch.tensor(1, dtype=torch.int32)
    scheme = Scheme(8, False, per_channel=False)
    assert quantize(values, scale, zero, scheme).tolist() == [3, 1, 1]
    passed = torch.fake_quantize_per_tensor_affine(values, 1.0, 1, -128, 127)
    assert torch.equal(fake_quantize(values, scale, zero, scheme), passed)
    of_a_channel = torch.quantize_per_channel(
        values[None], scale[None].double(), zero[None].long(), 0, torch.qint8
    ).int_repr()
    assert of_a_channel.tolist() == [[2, 2, 0]]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_fake_quantize_gives_torchs_values_to_the_last_bit(bits: int, symmetric: bool) -> None:
    scheme = Scheme(bits, symmetric, per_channel=True)
    weight = weights((48, 40), seed=bits)
    scale, zero = weight_grid(weight, scheme)
    theirs = torch.fake_quantize_per_channel_affine(
        weight, scale.flatten(), zero.flatten(), 0, scheme.quant_min, scheme.quant_max
    )
    assert torch.equal(fake_quantize(weight, scale, zero, scheme), theirs)
    single = Scheme(bits, symmetric, per_channel=False)
    scale, zero = weight_grid(weight, single)
    theirs = torch.fake_quantize_per_tensor_affine(weight, float(scale), int(zero), single.quant_min, single.quant_max)
    assert torch.equal(fake_quantize(weight, scale, zero, single), theirs)


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
)
def test_zero_stays_zero_and_nothing_inside_moves_further_than_half_a_step(
    values: list[float], bits: int, symmetric: bool
) -> None:
    scheme = Scheme(bits, symmetric, per_channel=False)
    real = torch.tensor(values, dtype=torch.float32)
    scale, zero = parameters_from_range(real.min(), real.max(), scheme)
    assert float(fake_quantize(torch.zeros(1), scale, zero, scheme)) == 0.0
    # The zero point was rounded too, by at most half a step, and the symmetric grid ends half a step before its range.
    reach = 0.5 if symmetric else 1.0
    moved = (fake_quantize(real, scale, zero, scheme) - real).abs() / scale
    assert float(moved.max()) <= reach + 1e-2


@pytest.mark.parametrize("choice", RANGES)
def test_each_choice_of_a_range_loses_less_than_the_last_where_outliers_are(choice: str) -> None:
    values = torch.randn(1, 20000, generator=torch.Generator().manual_seed(3))
    values[0, :4] = torch.tensor([40.0, -35.0, 38.0, 42.0])
    scheme = Scheme(4, False, per_channel=False)

    def error(of: str) -> float:
        grid = parameters_from_range(*value_range(values, scheme, of), scheme)  # type: ignore[arg-type]
        return float((fake_quantize(values, *grid, scheme) - values).square().mean())

    assert error("mse") <= error(choice)
    low, high = value_range(values, scheme, "min_max")
    assert (float(low), float(high)) == (-35.0, 42.0)
    low, high = value_range(values, scheme, "percentile")
    inside = ((values >= low) & (values <= high)).float().mean()
    assert float(inside) == pytest.approx(0.999, abs=2e-4)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_percentiles_of_very_many_values_know_all_inputs(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 768 inputs lies at 50: every third value, or any step that has a divisor with 768, may never see it."""
    monkeypatch.setattr(quantizers, "_QUANTILE_VALUES", 2**15)
    values = torch.randn(3 * 2**15 // 768, 768, generator=torch.Generator().manual_seed(4))
    values[:, where] = 50.0
    low, high = value_range(values.reshape(1, -1), Scheme(8, False, False), "percentile")
    assert float(high) == 50.0 and -4.5 < float(low) < -2.5
    again = value_range(values.reshape(1, -1), Scheme(8, False, False), "percentile")
    assert torch.equal(torch.cat([low, high]), torch.cat(again))


def test_value_range_of_least_error_is_near_torchs_histogram() -> None:
    """Only near: torch narrows each end on its own, over 2,048 bins of a histogram; we narrow both by one fraction.

    So ours may lose a few per cent (0.2 dB) where one extreme lies further out than the other.
    """
    values = torch.randn(400, 128, generator=torch.Generator().manual_seed(5))
    scheme = Scheme(8, False, per_channel=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observer = HistogramObserver(dtype=torch.qint8, qscheme=torch.per_tensor_affine, reduce_range=False)
    observer(values)
    theirs, zero = observer.calculate_qparams()
    ours = parameters_from_range(*value_range(values.reshape(1, -1), scheme, "mse"), scheme)

    def error(scale: torch.Tensor, zero: torch.Tensor) -> float:
        return float((fake_quantize(values, scale, zero, scheme) - values).square().mean())

    assert error(*ours) <= error(theirs, zero) * 1.05
    assert float(ours[0]) == pytest.approx(float(theirs), rel=0.1)


def test_channels_have_grids_of_their_own() -> None:
    weight = torch.tensor([[1.0, -1.0], [100.0, -100.0]])
    together, _ = weight_grid(weight, Scheme(8, True, per_channel=False))
    apart, _ = weight_grid(weight, Scheme(8, True, per_channel=True))
    assert together.shape == (1, 1)
    assert apart.flatten().tolist() == pytest.approx([1 / 127.5, 100 / 127.5])
    assert channels(weight, Scheme()).shape == (2, 2)


@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_gives_back_what_it_got_in_as_few_bytes_as_can_be(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (7, 11), generator=generator, dtype=torch.int8)
    packed = pack(integers, bits)
    assert packed.numel() == -(-77 * bits // 8)
    assert torch.equal(unpack_integers(packed, bits, (7, 11)), integers)


@pytest.mark.parametrize("bits", [1, 9, 0, -4, 4.0, True])
def test_other_bits_are_refused_in_both_languages(bits: object) -> None:
    for language, words in (("en", "from 2 to 8"), ("fr", "de 2 à 8")):
        use_language(language)
        with pytest.raises(LabError, match=words) as refused:
            Scheme(bits)  # type: ignore[arg-type]
        assert repr(bits) in str(refused.value)


def test_another_range_is_refused() -> None:
    use_language("en")
    with pytest.raises(LabError, match="did you mean 'percentile'"):
        value_range(torch.zeros(1, 4), Scheme(), "percentil")  # type: ignore[arg-type]
