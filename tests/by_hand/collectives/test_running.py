"""The programs on real processes give what torch.distributed gives, and are timed by the same points on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.base.errors import LabError
from dlojz.by_hand import collectives
from dlojz.by_hand.collectives import fit, measure, run
from dlojz.by_hand.collectives.algorithm_catalogue import ALGORITHMS
from dlojz.by_hand.collectives.running import SIZES_BYTES
from dlojz.processes.forks import RankAnswer, spmd

from .counting import sent_share

ALL_REDUCES = [name for name, algorithm in ALGORITHMS.items() if algorithm.collective == "all_reduce"]
SHAPES = ((12,), (7,), (1,), (0,), (), (3, 5), (2, 2, 3))


def _answers(function: Callable[[int, int], Any], size: int) -> list[RankAnswer]:
    answers = spmd(function, size)
    assert [answer.error for answer in answers] == [None] * size
    return answers


def _whole_numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _differences(size: int, cases: Callable[[int, int], dict[str, tuple[Tensor, Tensor]]]) -> list[str]:
    """The cases in which what was given and what was expected differ, over all ranks."""

    def compared(rank: int, size: int) -> list[str]:
        return [
            f"rank {rank}: {name}: {given.tolist()} for {expected.tolist()}"
            for name, (given, expected) in cases(rank, size).items()
            if given.shape != expected.shape or given.dtype != expected.dtype or not torch.equal(given, expected)
        ]

    return [line for answer in _answers(compared, size) for line in answer.value]


@pytest.mark.parametrize("size", [3, 4, *(pytest.param(size, marks=pytest.mark.nightly) for size in (2, 5))])
def test_every_all_reduce_is_the_librarys(size: int) -> None:
    """Exact: the sums are of whole numbers, also in bf16, where those below 256 are exact."""

    def cases(rank: int, size: int) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for name in ALL_REDUCES:
            for shape in SHAPES:
                given = _whole_numbers(rank, shape)
                expected = given.clone()
                dist.all_reduce(expected)
                found[f"{name} {shape}"] = (run(name, given), expected)
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                given = _whole_numbers(rank, (11,), dtype)
                expected = given.clone()
                dist.all_reduce(expected)
                found[f"{name} {dtype}"] = (run(name, given), expected)
        return found

    assert _differences(size, cases) == []


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.nightly) for size in (2, 4))])
def test_run_of_the_other_collectives_gives_what_torch_distributed_does(size: int) -> None:
    def cases(rank: int, size: int) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for columns in (1, 3):
            part = _whole_numbers(rank, (2, columns))
            expected = torch.empty((2 * size, columns), dtype=part.dtype)
            dist.all_gather_into_tensor(expected, part)
            found[f"all-gather {columns}"] = (run("ring_all_gather", part), expected)
            whole = _whole_numbers(rank, (size * columns,))
            expected = torch.empty(columns, dtype=whole.dtype)
            dist.reduce_scatter_tensor(expected, whole)
            found[f"reduce-scatter {columns}"] = (run("ring_reduce_scatter", whole), expected)
            expected = torch.empty_like(whole)
            dist.all_to_all_single(expected, whole)
            found[f"all-to-all {columns}"] = (run("pairwise_all_to_all", whole), expected)
        uneven = _whole_numbers(rank, (2 * size + 1,))
        lengths = [len(part) for part in uneven.tensor_split(size)]
        expected = torch.empty(lengths[rank] * size, dtype=uneven.dtype)
        dist.all_to_all_single(expected, uneven, [lengths[rank]] * size, lengths)
        found["all-to-all uneven"] = (run("pairwise_all_to_all", uneven), expected)
        for name, root in (("tree_broadcast", dist.broadcast), ("tree_reduce", dist.reduce)):
            expected = uneven.clone()
            root(expected, 0)
            if rank == 0 or name == "tree_broadcast":
                found[name] = (run(name, uneven), expected)
            else:
                run(name, uneven)
        scalar = torch.tensor(rank)
        found["all-gather of scalars"] = (run("ring_all_gather", scalar), torch.arange(size))
        return found

    assert _differences(size, cases) == []


def test_floats_differ_from_the_exact_sum_by_rounding_only_and_are_alike_on_all_ranks() -> None:
    """A sum of p terms, in any order, is off by at most (p − 1)·ε·Σ|x| (Higham 2002, §4.2)."""

    def summed(rank: int, size: int) -> tuple[None, dict[str, Tensor]]:
        given = torch.randn(1001, generator=torch.Generator().manual_seed(rank))
        return None, {"given": given, **{name: run(name, given) for name in ALL_REDUCES}}

    answers = _answers(summed, 4)
    parts = torch.stack([answer.tensors["given"].double() for answer in answers])
    bound = 3 * torch.finfo(torch.float32).eps * parts.abs().sum(0)
    for name in ALL_REDUCES:
        results = [answer.tensors[name] for answer in answers]
        assert all(torch.equal(result, results[0]) for result in results), name
        assert torch.all((results[0].double() - parts.sum(0)).abs() <= bound), name


def test_the_input_is_only_read_and_needs_not_be_contiguous() -> None:
    def cases(rank: int, size: int) -> dict[str, tuple[Tensor, Tensor]]:
        given = _whole_numbers(rank, (4, 6)).t()
        before, expected = given.clone(), given.contiguous()
        dist.all_reduce(expected)
        return {"result": (run("ring_all_reduce", given), expected), "input": (given, before)}

    assert _differences(3, cases) == []


def test_in_a_group_ranks_are_those_of_the_group() -> None:
    def cases(rank: int, size: int) -> dict[str, tuple[Tensor, Tensor]]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        given, group = torch.tensor([rank, 10 * rank, 5]), groups[rank % 2]
        pair = torch.tensor([rank, 10 * rank, 5]) + torch.tensor([(rank + 2) % 4, 10 * ((rank + 2) % 4), 5])
        return {name: (run(name, given, group), pair) for name in ALL_REDUCES}

    assert _differences(4, cases) == []


def test_run_of_hierarchical_all_reduce_on_nodes_of_two_and_of_four() -> None:
    def cases(rank: int, size: int) -> dict[str, tuple[Tensor, Tensor]]:
        given = _whole_numbers(rank, (9,))
        expected = given.clone()
        dist.all_reduce(expected)
        return {str(nodes): (run("hierarchical_all_reduce", given, per_node=nodes), expected) for nodes in (1, 2, 4)}

    assert _differences(4, cases) == []


def test_the_messages_are_those_of_the_program() -> None:
    """What leaves each rank, counted at `isend`: one message per step, with the bytes of the closed form."""

    def sent(rank: int, size: int) -> dict[str, list[int]]:
        lengths: dict[str, list[int]] = {}
        original = dist.isend
        for name in collectives.names():

            def counting(tensor: Tensor, *args: Any, name: str = name, **kwargs: Any) -> Any:
                lengths.setdefault(name, []).append(tensor.numel())
                return original(tensor, *args, **kwargs)

            dist.isend = counting
            run(name, torch.zeros(3 if name == "ring_all_gather" else 12))
        dist.isend = original
        return lengths

    for rank, answer in enumerate(_answers(sent, 4)):
        for name in collectives.names():
            steps = [step for step in collectives.program(name, rank, 4) if step.send]
            lengths = answer.value.get(name, [])
            assert (len(lengths), sum(lengths)) == (len(steps), 12 * sent_share(name, rank, 4)), name


@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"]
)
def test_every_rank_measures_the_same_points(collective: str) -> None:
    def measured(rank: int, size: int) -> list[Any]:
        return list(measure(collective, (4, 1000, 40000), repeats=3, warmup=1))

    assert tuple(2**power for power in range(10, 25, 2)) == SIZES_BYTES  # 1 KiB to 16 MiB, by default

    answers = _answers(measured, 2)
    assert answers[0].value == answers[1].value
    points = answers[0].value
    assert [point[0] for point in points] == [8, 1000, 40000]
    assert all(point[1] > 0 and point[2:] == [2, collective] for point in points)
    assert fit(points).size == 2


def test_a_repeat_takes_as_long_as_its_slowest_rank_and_the_median_repeat_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank's clock is made up, what they tell each other is real. Maxima of the repeats: 4, 2, 8; median 4."""
    read_s = {0: (64.0, 4.0, 1.0, 1.0), 1: (64.0, 1.0, 2.0, 8.0), 2: (64.0, 0.5, 0.5, 0.5)}  # the first is warm-up

    def measured(rank: int, size: int) -> list[Any]:
        told = iter(read_s[rank])
        monkeypatch.setattr("dlojz.by_hand.collectives.running._timed_s", lambda *call: next(told))
        return list(measure("all_reduce", (12,), repeats=3, warmup=1))

    assert [answer.value for answer in _answers(measured, 3)] == [[[12, 4.0, 3, "all_reduce"]]] * 3


def test_measure_times_a_program_of_ours_and_tells_progress() -> None:
    def measured(rank: int, size: int) -> list[Any]:
        told: list[tuple[int, int]] = []
        points = measure("ring_all_reduce", (12, 1200), repeats=2, warmup=0, tell=lambda *done: told.append(done))
        return [points, told]

    points, told = _answers(measured, 3)[1].value
    assert told == [[0, 2], [1, 2], [2, 2]] and [point[3] for point in points] == ["ring_all_reduce"] * 2


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: run("ring_all_reduce", torch.zeros(2)), "there is none here"),
        (lambda: run("ring", torch.zeros(2)), "unknown algorithm 'ring'"),
        (measure, "at least 2 ranks"),
        (lambda: measure("all_redce"), "did you mean 'all_reduce'"),
        (lambda: measure(sizes_bytes=()), "none was received"),
        (lambda: measure(sizes_bytes=(1024, 2)), "at least 4 bytes, but 2"),
        (lambda: measure(repeats=0), "repeats is a whole number of at least 1, but 0"),
        (lambda: measure(warmup=-1), "warmup is a whole number of at least 0, but -1"),
    ],
)
def test_run_and_measure_of_collectives_refusals(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        call()
