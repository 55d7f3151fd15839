"""Meshes, specs and resharding: the paper's tables, and each move checked on the parts that devices hold."""

import itertools

import pytest

from dlojz.base.errors import LabError
from dlojz.hardware.links import Link
from dlojz.planner.alpa.mesh import (
    DeviceMesh,
    ShardingSpec,
    all_specs,
    resharding_cost,
    resharding_matrix,
    resharding_moves,
)

MESH = DeviceMesh((2, 4), (Link(1.0, 1.0), Link(3.0, 10.0)))
DEVICES = list(itertools.product(range(2), range(4)))
NINE = {"RR", "S0R", "S1R", "RS0", "RS1", "S0S1", "S1S0", "S01R", "RS01"}
MOVES = ((before, after) for before in sorted(NINE) for after in sorted(NINE))
Part = tuple[tuple[float, float], ...]


def named(name: str) -> ShardingSpec:
    return ShardingSpec.named(name)


def part_of(spec: ShardingSpec, device: tuple[int, ...]) -> Part:
    """What a device of the mesh holds: from where to where of each dimension, 0 to 1."""
    part = []
    for axes in spec.cuts:
        number, count = 0, 1
        for axis in axes:
            number, count = number * MESH.shape[axis] + device[axis], count * MESH.shape[axis]
        part.append((number / count, (number + 1) / count))
    return tuple(part)


def test_a_matrix_on_a_mesh_of_two_axes_has_nine_specs() -> None:
    assert {str(spec) for spec in all_specs((8, 8), MESH)} == NINE
    assert {str(spec) for spec in all_specs((8, 8), DeviceMesh((1, 4)))} == {"RR", "S1R", "RS1"}
    # 3 columns divide by nothing
    assert {str(spec) for spec in all_specs((8, 3), MESH)} == {"RR", "S0R", "S1R", "S01R"}


def test_sharding_spec_names_read_back_and_others_are_refused() -> None:
    assert all(str(named(name)) == name for name in NINE)
    for name in ("", "S", "S2R", "RX", "S0S0", "S01S1"):
        with pytest.raises(LabError, match=r"write R or S0, S1, S01"):
            named(name)


@pytest.mark.parametrize("name", sorted(NINE))
def test_sharding_spec_parts_of_all_devices_cover_the_tensor_evenly(name: str) -> None:
    parts = [part_of(named(name), device) for device in DEVICES]
    area = sum((right - left) * (bottom - top) for (left, right), (top, bottom) in parts)
    assert area == pytest.approx(len(DEVICES) * named(name).tile_bytes(1, MESH), rel=1e-12)
    assert len(set(parts)) == MESH.size(named(name).axes)


@pytest.mark.parametrize(
    "before, after, moves",
    [  # table 2 of the paper, M = 1,600 bytes
        ("RR", "S0S1", [("slice", 0, 0), ("slice", 1, 0)]),
        ("S0R", "RR", [("all_gather", 0, 1600)]),
        ("S0S1", "S0R", [("all_gather", 1, 800)]),
        ("S0R", "RS0", [("all_to_all", 0, 1600)]),
        ("S0S1", "S01R", [("all_to_all", 1, 800)]),
        ("S01R", "S0R", [("all_gather", 1, 800)]),
    ],
)
def test_resharding_moves_of_the_papers_examples(before: str, after: str, moves: list[tuple[str, int, float]]) -> None:
    found = resharding_moves(named(before), named(after), 1600, MESH)
    assert sorted((move.collective, move.axis, move.message_bytes) for move in found) == sorted(moves)


@pytest.mark.parametrize("before, after", list(MOVES))
def test_each_move_does_what_it_says_to_the_parts_of_the_devices(before: str, after: str) -> None:
    """A slice keeps part of what a device has; a gather gives it what its group had; an all-to-all leaves its size."""
    spec = named(before)
    for move in resharding_moves(spec, named(after), 1600, MESH):
        for device in DEVICES:
            old, new = part_of(spec, device), part_of(move.result, device)
            group = [other for other in DEVICES if other[1 - move.axis] == device[1 - move.axis]]
            had = [part_of(spec, other) for other in group]
            if move.collective == "slice":
                assert _within(new, old)
            else:
                assert _area(new) == pytest.approx(sum(_overlap(new, part) for part in had), rel=1e-12)
                assert _area(new) == pytest.approx(_area(old) * (len(group) if move.collective == "all_gather" else 1))
        spec = move.result
    assert spec == named(after)


def _within(inner: Part, outer: Part) -> bool:
    return all(a >= c and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def _area(part: Part) -> float:
    return (part[0][1] - part[0][0]) * (part[1][1] - part[1][0])


def _overlap(one: Part, other: Part) -> float:
    sides = [max(0.0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return sides[0] * sides[1]


def test_the_matrix_has_zeros_on_its_diagonal_and_for_all_that_is_replicated() -> None:
    specs = all_specs((8, 8), MESH)
    matrix = resharding_matrix(specs, specs, 1600, MESH)
    assert str(specs[0]) == "RR"
    assert not matrix.diagonal().any()
    assert not matrix[0].any()
    assert (matrix[1:, 0] > 0).all()


def test_costs_are_alpas_formulas() -> None:
    mesh = DeviceMesh((1, 4))
    assert mesh.all_reduce(32768, [1]) == 49153.01
    assert mesh.all_gather(1000, 1) == 1 + 750 + 0.1
    assert mesh.all_to_all(1000, 1) == 1 + 375 + 0.001  # (n−1)/n² · M · n/2
    assert resharding_cost(named("RS1"), named("RR"), 1000, mesh) == mesh.all_gather(1000, 1)


@pytest.mark.parametrize("shape", [(0, 4), (2, -1), (1, 2, 3), (1.5, 2)])
def test_a_mesh_without_devices_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(LabError, match=r"at least one device along each of its two axes, but .* was received"):
        DeviceMesh(shape)


def test_device_mesh_and_resharding_moves_refuse_negative_costs_and_other_dims() -> None:
    with pytest.raises(LabError, match=r"a latency of at least 0 and a bandwidth above 0"):
        DeviceMesh((2, 2), (Link(0.0, -1.0), Link(0.0, 1.0)))
    with pytest.raises(LabError, match=r"keeps its dimensions"):
        resharding_moves(named("S0R"), named("S0"), 8, MESH)
