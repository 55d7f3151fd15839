"""2:4: the mask of brute force, a packed weight that is the weight, and the bytes that were predicted."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import GROUP, KEPT, check_groups
from dlojz.compress.two_to_four import Packed, mask_2_of_4, pack


def unpack_2_of_4(packed: Packed) -> Tensor:
    """The dense weight, zeros put back."""
    outputs, inputs = packed.shape
    groups = outputs * inputs // GROUP
    nibble = torch.stack((packed.indices & 15, packed.indices >> 4), dim=1).flatten()[:groups].long()
    place_G2 = torch.stack((nibble & 3, nibble >> 2), dim=1)
    weight_G4 = packed.values_OK.new_zeros(groups, GROUP)
    weight_G4.scatter_(1, place_G2, packed.values_OK.reshape(groups, KEPT))
    return weight_G4.reshape(outputs, inputs)


def brute_force(weight: Tensor) -> Tensor:
    """Try the six ways of taking two of four; the first of the best, in the order of combinations."""
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], 4):
            four = weight[row, start : start + 4].abs().tolist()
            best = max(combinations(range(4), 2), key=lambda two: four[two[0]] + four[two[1]])
            mask[row, [start + place for place in best]] = True
    return mask


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10_000), st.sampled_from([2, 5, 1000]))
def test_the_mask_is_that_of_brute_force_equal_magnitudes_included(
    rows: int, groups: int, seed: int, levels: int
) -> None:
    weight = torch.randint(-levels, levels + 1, (rows, 4 * groups), generator=torch.Generator().manual_seed(seed)) / 8
    mask = mask_2_of_4(weight)
    assert torch.equal(mask, brute_force(weight))
    assert bool((mask.unflatten(1, (-1, 4)).sum(dim=-1) == 2).all())


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10_000), st.sampled_from([1, 1000]))
def test_a_packed_weight_is_the_weight_and_has_the_bytes_that_were_predicted(
    rows: int, groups: int, seed: int, levels: int
) -> None:
    """With one level many groups have fewer than two weights that are not zero; odd numbers of groups fill a byte."""
    weight = torch.randint(-levels, levels + 1, (rows, 4 * groups), generator=torch.Generator().manual_seed(seed)) / 8
    for dtype in (torch.float32, torch.float16):
        masked = (weight * mask_2_of_4(weight)).to(dtype)
        packed = pack(masked)
        assert torch.equal(unpack_2_of_4(packed), masked)
        # Half of the values, and half a byte for each group of four, rounded up.
        assert packed.num_bytes == 2 * rows * groups * dtype.itemsize + (rows * groups + 1) // 2


def test_indices_are_two_bits_each_the_first_group_low() -> None:
    packed = pack(torch.tensor([[0.0, 5.0, 0.0, -3.0, 7.0, 0.0, 2.0, 0.0]]))
    assert packed.values_OK.tolist() == [[5.0, -3.0, 7.0, 2.0]]
    assert packed.indices.tolist() == [(1 | 3 << 2) | (0 | 2 << 2) << 4]


def test_values_and_bytes_are_those_of_the_format_of_torch() -> None:
    """CUTLASS keeps the same values, and indices of the same size in another order."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).half()
    weight = weight * mask_2_of_4(weight)
    values, indices = sparse_semi_structured_from_dense_cutlass(weight)
    packed = pack(weight)
    assert torch.equal(packed.values_OK, values)
    assert packed.indices.numel() == indices.numel() * indices.element_size()


def test_pack_takes_17_of_32_bytes_in_float32_and_9_of_16_in_half_precision() -> None:
    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    weight = weight * mask_2_of_4(weight)
    assert pack(weight).num_bytes * 32 == 17 * 128 * 512 * 4
    assert pack(weight.half()).num_bytes * 16 == 9 * 128 * 512 * 2


@pytest.mark.parametrize("shape", [(3, 6), (8,), (4, 3, 8), (2, 0), (10, 130)])
def test_check_groups_refuses_a_dimension_that_is_no_multiple_of_4(shape: tuple[int, ...]) -> None:
    said = " × ".join(str(length) for length in shape)
    for language, words in (
        ("en", f"a multiple of 4 in a matrix .* but weight is {said}"),
        ("fr", f"un multiple de 4 dans une matrice .* mais weight mesure {said}"),
    ):
        use_language(language)
        for ask in (lambda: check_groups(shape), lambda: mask_2_of_4(torch.ones(shape))):
            with pytest.raises(LabError, match=words) as refused:
                ask()
            assert "\n" not in str(refused.value)


def test_pack_refuses_more_than_two_of_four() -> None:
    for language, words in (("en", "but 2 groups have more"), ("fr", "mais 2 groupes en ont plus")):
        use_language(language)
        with pytest.raises(LabError, match=words):
            pack(torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]]))
