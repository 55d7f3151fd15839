"""The proven optimum: published and known values, from the table, from the bound, and from the solver."""

import pytest

from benchmarks.pipeline_optimum import search
from dlojz.base.errors import LabError
from dlojz.pipeline.analysis import lower_bound
from dlojz.pipeline.orders.synchronous import one_f_one_b, zigzag
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.shortest_schedule import Optimum, Problem, _table, first_guess, optimum
from dlojz.pipeline.simulator import UNIT_COSTS, peak_activations, simulate
from dlojz.pipeline.validity import problems


def unbalanced(stages: tuple[int, ...], latency: float = 0.0) -> Costs:
    """F = I = W = 2 times the stage's share."""
    times = tuple(2.0 * share for share in stages)
    return Costs(forward=times, backward_input=times, backward_weight=times, latency=latency)


def check(found: Optimum, costs: Costs, limit: float | None, objective: str) -> None:
    """An optimum holds a schedule that runs, keeps to the limit and takes as long as it says."""
    assert found.proven
    assert problems(found.schedule, limit, costs) == []
    timeline = simulate(found.schedule, costs)
    assert (timeline.makespan if objective == "makespan" else timeline.span) == found.value == found.bound
    assert found.schedule.barrier == (objective == "makespan")
    assert lower_bound(found.schedule, costs) <= timeline.makespan


@pytest.mark.parametrize(
    ("size", "split", "limit", "objective", "expected"),
    [
        ((4, 8), False, 4, "makespan", 33),
        ((4, 8), False, 3, "makespan", 39),
        ((4, 8), False, 1, "makespan", 96),
        ((4, 8), True, 4, "makespan", 27),
        ((4, 8), True, None, "makespan", 27),
        ((4, 8), True, None, "span", 24),
        ((4, 8), True, 4, "span", 27),
        ((4, 4), True, None, "makespan", 15),
        ((3, 6), True, None, "makespan", 20),
        ((3, 6), True, None, "span", 18),
        ((8, 16), False, 8, "makespan", 69),
        ((8, 16), True, 8, "makespan", 55),
    ],
)
def test_optimum_of_equal_stages(
    size: tuple[int, int], split: bool, limit: float | None, objective: str, expected: float
) -> None:
    found = optimum(*size, split=split, memory_limit=limit, objective=objective)  # type: ignore[arg-type]
    assert found.value == expected
    check(found, UNIT_COSTS, limit, objective)


@pytest.mark.parametrize(
    ("stages", "latency", "limit", "whole", "split"),
    [
        ((1, 2, 1, 1), 0, 4, 102, 98),
        ((1, 2, 1, 1), 1, 4, 108, 99),
        ((1, 3, 1, 2), 0, 4, 150, 146),
        ((1, 3, 1, 2), 1, 4, 156, 147),
        ((2, 1, 1, 1), 0, 4, 102, 96),
        ((2, 1, 1, 1), 0, 6, 96, 96),
        ((3, 1, 2, 1), 0, 4, 150, 144),
    ],
)
def test_optimum_of_unbalanced_stages(
    stages: tuple[int, ...], latency: float, limit: int, whole: float, split: float
) -> None:
    costs = unbalanced(stages, latency)
    for splits, expected in ((False, whole), (True, split)):
        found = optimum(4, 8, costs=costs, memory_limit=limit, split=splits)
        assert found.value == expected
        check(found, costs, limit, "makespan")


def test_1f1b_is_optimal_for_its_memory_and_one_slot_less_costs_18_per_cent() -> None:
    assert simulate(one_f_one_b(4, 8)).makespan == optimum(4, 8, memory_limit=4).value
    assert optimum(4, 8, memory_limit=3).value / optimum(4, 8, memory_limit=4).value == pytest.approx(39 / 33)
    assert simulate(one_f_one_b(4, 8), unbalanced((1, 2, 1, 1))).makespan == 106  # 4 more than the optimum


@pytest.mark.parametrize(
    ("size", "split", "objective", "expected"),
    [
        ((4, 8), True, "makespan", 51),
        ((4, 8), True, "span", 48),
        ((4, 8), False, "makespan", 57),
        ((4, 4), False, "makespan", 36),  # Hanayo's backward-first order is optimal for m = p = 4, one wave
    ],
)
def test_optimum_of_two_chunks_in_a_v(size: tuple[int, int], split: bool, objective: str, expected: float) -> None:
    problem = Problem(*size, UNIT_COSTS, zigzag(size[0], 2), split, None, objective)  # type: ignore[arg-type]
    found = search(problem, first_guess(problem), workers=2)
    assert found.value == expected
    check(found, UNIT_COSTS, None, objective)


def test_every_entry_of_the_table_is_a_schedule_of_that_length_within_its_limit() -> None:
    assert len(_table()) > 150
    for number, key in enumerate(_table()):
        size, objective, *rest = key.split()
        ranks, micro_batches = map(int, size.split("x"))
        limit = float(rest[rest.index("limit") + 1]) if "limit" in rest else None
        times = {word[0]: tuple(map(float, word[1:].split(","))) for word in rest if word[0] in "FBIWc"}
        per_stage = {kind: values * (ranks // len(values)) for kind, values in times.items() if kind != "c"}
        names = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
        costs = Costs(**{names[kind]: values for kind, values in per_stage.items()}, latency=times.get("c", (0.0,))[0])
        split = "W" in times
        problem = Problem(ranks, micro_batches, costs, tuple(range(ranks)), split, limit, objective)  # type: ignore[arg-type]
        found = optimum(ranks, micro_batches, costs=costs, split=split, memory_limit=limit, objective=objective)  # type: ignore[arg-type]
        assert problem.key(limit) == key
        assert (found.source, found.value) == ("table", _table()[key]["value"])
        check(found, costs, limit, objective)
        assert problem.bound <= found.value
        if number % 10 == 0:
            assert found.value <= problem.value_of(first_guess(problem))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_optimum_needs_no_solver_for_unit_costs_up_to_4_ranks_and_8_micro_batches(ranks: int) -> None:
    for micro_batches in (1, 3, 6, 8):
        for split in (False, True):
            for objective in ("makespan", "span"):
                values = [
                    optimum(ranks, micro_batches, split=split, memory_limit=limit, objective=objective).value  # type: ignore[arg-type]
                    for limit in (*range(1, micro_batches + 1), None)
                ]
                assert values == sorted(values, reverse=True)  # more memory is never worse


@pytest.mark.parametrize(
    ("size", "split", "limit", "objective"),
    [
        ((2, 4), False, 1, "makespan"),
        ((2, 3), True, 1, "span"),
        ((2, 5), True, 2, "span"),
        ((3, 3), False, 2, "makespan"),
        ((3, 4), True, 2, "makespan"),
        ((3, 4), True, 2, "span"),
        ((4, 3), False, 2, "span"),
        ((4, 4), True, 3, "makespan"),
        ((4, 8), False, 1, "makespan"),
    ],
)
def test_entries_are_proven_again(size: tuple[int, int], split: bool, limit: int, objective: str) -> None:
    problem = Problem(*size, UNIT_COSTS, tuple(range(size[0])), split, limit, objective)  # type: ignore[arg-type]
    found = search(problem, first_guess(problem), workers=2)
    check(found, UNIT_COSTS, limit, objective)
    assert found.source == "solver"
    stored = optimum(*size, split=split, memory_limit=limit, objective=objective)  # type: ignore[arg-type]
    assert found.value == stored.value


def solved(ranks: int, micro_batches: int, costs: Costs, limit: float, split: bool = False) -> Optimum:
    problem = Problem(ranks, micro_batches, costs, tuple(range(ranks)), split, limit, "makespan")
    return search(problem, first_guess(problem), workers=2)


def test_search_proves_what_is_not_in_the_table() -> None:
    costs = Costs(forward=(1.0, 1.5, 0.5), backward=(2.0, 3.0, 1.0), latency=0.25)
    check(solved(3, 5, costs, 2), costs, 2, "makespan")


def test_the_memory_counted_is_that_of_the_costs() -> None:
    """What waits for the weights is a quarter: under the same limit, more fits than if it were all."""
    light = Costs(kept_for_weight=0.25)
    lighter = solved(2, 6, light, 1.5, split=True)
    check(lighter, light, 1.5, "makespan")
    assert max(peak_activations(lighter.schedule, light)) <= 1.5
    assert lighter.value < optimum(2, 6, split=True, memory_limit=1.5).value


def test_problem_has_no_key_for_links_that_are_slower_in_one_direction() -> None:
    def key(latency: float | tuple[tuple[float, ...], ...]) -> str | None:
        return Problem(3, 8, Costs(latency=latency), (0, 1, 2), False, None, "makespan").key(None)

    assert key(((0.0, 1.0, 9.0), (1.0, 0.0, 1.0), (9.0, 1.0, 0.0))) == key(1.0) is not None
    assert key(((0.0, 1.0, 9.0), (2.0, 0.0, 1.0), (9.0, 2.0, 0.0))) is None


def test_optimum_refuses_what_cannot_be_answered() -> None:
    with pytest.raises(LabError, match=r"no schedule keeps within 0.5 stage-micro-batches"):
        optimum(2, 4, memory_limit=0.5)
    with pytest.raises(LabError, match="objective"):
        optimum(2, 4, objective="beauty")  # type: ignore[arg-type]
    with pytest.raises(LabError, match="multiples of a common fraction"):
        solved(2, 4, Costs(forward=2**0.5), 1)
    with pytest.raises(LabError, match=r"this case \(5 × 9\) is not in the table: ask for unit costs, at most 4 ranks"):
        optimum(5, 9, memory_limit=2)
