"""One bit per number: what is packed is read again, and what is lost is kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz.by_hand.optimizers.one_bit import decompress, pack, scales_of, unpack
from dlojz.by_hand.optimizers.sent_bytes import BLOCK_ELEMENTS, chunk_bytes, chunk_elements, message_bytes, saved_share

floats = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


@given(st.lists(floats, min_size=1, max_size=70))
def test_unpack_gives_the_signs_of_pack(values: list[float]) -> None:
    """Zero, of either sign, counts as positive."""
    tensor = torch.tensor(values)
    packed = pack(tensor)
    assert (packed.dtype, packed.numel()) == (torch.uint8, -(-len(values) // 8))
    assert unpack(packed, len(values)).tolist() == [1.0 if value >= 0 else -1.0 for value in values]


def test_pack_puts_the_first_number_in_the_lowest_bit() -> None:
    assert pack(torch.tensor([1.0, -1, -1, -1, -1, -1, -1, -1])).tolist() == [1]
    assert pack(torch.tensor([-1.0, -1, 0, -1])).tolist() == [0b11110100]  # what is not there counts as positive


@given(st.integers(0, 6), st.data())
def test_decompress_plus_error_is_the_original_exactly(power: int, data: st.DataObject) -> None:
    """Of whole numbers below 2¹⁰, 2^k of them: their mean has 16 bits, so that no difference is rounded."""
    values = data.draw(st.lists(st.integers(-1023, 1023), min_size=2**power, max_size=2**power))
    original = torch.tensor(values, dtype=torch.float32)
    compressed = decompress(pack(original), scales_of(original, len(values)), len(values))
    error = original - compressed
    assert torch.equal(compressed + error, original)


@given(st.lists(floats, min_size=1, max_size=70))
def test_decompress_plus_error_is_the_original_to_one_rounding(values: list[float]) -> None:
    """Of any numbers: the error is the difference rounded to 24 bits, and the sum with it is taken in fp64."""
    original = torch.tensor(values)
    compressed = decompress(pack(original), scales_of(original, len(values)), len(values))
    error = original - compressed
    lost = (compressed.double() + error.double() - original.double()).abs()
    assert bool((lost <= 2.0**-24 * error.double().abs()).all())


@given(st.integers(1, 3 * BLOCK_ELEMENTS), st.integers(0, 2**31 - 1))
@settings(max_examples=30)
def test_the_scale_of_each_block_is_its_mean_magnitude_and_leaves_less_than_there_was(numel: int, seed: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    scales = scales_of(values, numel)
    blocks = values.split(BLOCK_ELEMENTS)
    # Sums of 2048 numbers in another order: 2048 roundings at most, and √2048 of them as a rule.
    torch.testing.assert_close(scales, torch.stack([block.abs().mean() for block in blocks]), rtol=1e-5, atol=0)
    compressed = decompress(pack(values), scales, numel).split(BLOCK_ELEMENTS)
    for block, told in zip(blocks, compressed, strict=True):
        lost = (block - told).norm() ** 2
        # ‖x‖² − ‖x‖₁² / n: Karimireddy et al. 2019.
        bound = block.norm() ** 2 - block.abs().sum() ** 2 / block.numel()
        assert float(lost) == pytest.approx(float(bound), rel=1e-3, abs=1e-6)


def test_padding_takes_no_part_in_a_scale() -> None:
    values = torch.zeros(3 * BLOCK_ELEMENTS)
    values[: BLOCK_ELEMENTS + 10] = 2.0
    assert scales_of(values, BLOCK_ELEMENTS + 10).tolist() == [2.0, 2.0, 0.0]


@given(st.integers(1, 10**7), st.integers(2, 64))
def test_a_message_holds_all_signs_and_all_scales(numel: int, ranks: int) -> None:
    chunk = chunk_elements(numel, ranks)
    assert numel <= ranks * chunk < numel + 8 * ranks and chunk % 8 == 0
    packed = pack(torch.zeros(min(chunk, 4096)))
    assert packed.numel() == min(chunk, 4096) / 8
    assert message_bytes(numel, ranks) == ranks * chunk_bytes(chunk)


def test_97_percent_are_saved() -> None:
    """31/32 less one scale of 4 bytes for 2048 numbers of 4: 96.8 %, the course's 97."""
    assert saved_share(10**8, 8) == pytest.approx(1 - 1 / 32 - 1 / 2048, abs=1e-6)
    assert message_bytes(10**6, 1) == 0
