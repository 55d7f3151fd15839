"""The mean over forked ranks by one bit per number: the same on all, nothing lost, and as many bytes as predicted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlojz.by_hand.optimizers.one_bit import (
    CompressedAllReduce,
    decompress,
    pack,
    read_message,
    scales_of,
    write_message,
)
from dlojz.by_hand.optimizers.sent_bytes import chunk_bytes, chunk_elements, message_bytes
from dlojz.processes.forks import spmd
from dlojz.train.dispatch_trace import StorageTrace

CALLS = 6
SIZES = {1: 10, 2: 5000, 3: 4999, 4: 13}
"""Elements for each number of ranks: several blocks, a block cut short, and fewer elements than signs in the chunks."""


def given_by(call: int, rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * call + rank))


def told_and_kept(values: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """What one message says of a chunk, and what is left in the chunk's place."""
    kept, message = values.clone(), torch.full((chunk_bytes(values.numel()),), 255, dtype=torch.uint8)
    write_message(kept, numel, message)
    return read_message(message, values.numel()), kept


def kinds(kind: str, numel: int, seed: int) -> Tensor:
    """Numbers of a kind that is hard for one sign and one scale."""
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return {
        "normal": normal,
        "none": torch.zeros(numel),
        "negative zeros": torch.full((numel,), -0.0),
        "one": torch.where(torch.arange(numel) == seed % max(1, numel), normal * 1e6, 0.0),
        "of all sizes": normal * 10 ** (7 * torch.rand(numel, generator=torch.Generator().manual_seed(seed + 1)) - 5),
        "equal": normal.sign() * 0.1,
    }[kind]


@settings(max_examples=150)
@given(
    st.integers(1, 5000) | st.sampled_from([1, 7, 8, 9, 2047, 2048, 2049]),
    st.integers(2, 9),
    st.sampled_from(["normal", "none", "negative zeros", "one", "of all sizes", "equal"]),
    st.integers(0, 2**31 - 1),
)
def test_read_message_plus_what_is_kept_is_what_was_there_on_both_sides(
    numel: int, ranks: int, kind: str, seed: int
) -> None:
    """Of every worker's chunks, then of every server's mean: to the rounding of the difference."""
    chunk = chunk_elements(numel, ranks)
    workers = [torch.zeros(ranks * chunk) for _ in range(ranks)]
    for rank, values in enumerate(workers):
        values[:numel] = kinds(kind, numel, seed + rank)
    for server in range(ranks):
        counted = min(max(numel - server * chunk, 0), chunk)
        mean = torch.zeros(chunk)
        for values in workers:
            mean += one_chunk(values[server * chunk : (server + 1) * chunk], counted) / ranks
        one_chunk(mean, counted)


def one_chunk(values: Tensor, counted: int) -> Tensor:
    """Check one message of either side; what it says."""
    told, kept = told_and_kept(values, counted)
    lost = (told.double() + kept.double() - values.double()).abs()[:counted]
    assert bool((lost <= 2.0**-24 * kept[:counted].double().abs()).all())
    assert not kept[counted:].any(), "something is kept of the padding"
    if not values[:counted].any():
        assert not told[:counted].any() and not kept.any(), "nothing became something"
    return told


@pytest.mark.parametrize("size", [2, 3, 4])
def test_compressed_all_reduce_of_none_one_and_few_elements(size: int) -> None:
    """Fewer than ranks, fewer than a byte, one more than fills all bytes; one number, and zeros, come back exactly."""

    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        found = {}
        for numel in (1, 2, 7, 8, 9, 8 * size - 1, 8 * size, 8 * size + 1):
            reduce = CompressedAllReduce(numel, torch.device("cpu"))
            zeros = reduce([torch.zeros(numel)])
            found[f"{numel}"] = [bool(zeros.any()), bool(reduce.worker_error.any() or reduce.server_error.any())]
            one = CompressedAllReduce(numel, torch.device("cpu"))
            equal = one([torch.full((numel,), float(rank))])
            found[f"{numel}"] += [equal.numel() == numel, float((equal - (size - 1) / 2).abs().max())]
        return found

    for answer in spmd(ranks, size):
        assert answer.error is None
        for came_back, held_back, complete, off in answer.value.values():
            assert not came_back and not held_back and complete
            # Ranks 0 … N − 1 say their number exactly; the server rounds N addends and a mean of 8 of them.
            assert off <= 16 * 2**-24 * size


@pytest.mark.parametrize(("size", "numel"), SIZES.items())
def test_compressed_all_reduce_loses_nothing_but_puts_it_off(size: int, numel: int) -> None:
    """Sum of what came out + what the workers (mean) and the servers hold back = sum of the means of what went in."""

    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        reduce = CompressedAllReduce(numel, torch.device("cpu"))
        outputs = []
        for call in range(CALLS):
            values = given_by(call, rank, numel)
            outputs.append(reduce(values.split(7)))
        return {}, {"out": torch.stack(outputs), "worker": reduce.worker_error, "server": reduce.server_error}

    answers = spmd(ranks, size)
    assert [answer.error for answer in answers] == [None] * size
    first = answers[0].tensors["out"]
    assert all(torch.equal(answer.tensors["out"], first) for answer in answers)
    came_out = first.sum(dim=0)
    went_in = torch.stack([given_by(call, rank, numel) for call in range(CALLS) for rank in range(size)]).sum(0) / size
    if size == 1:
        assert torch.equal(came_out, went_in)
        return
    workers = torch.stack([answer.tensors["worker"] for answer in answers])
    servers = torch.cat([answer.tensors["server"] for answer in answers])
    assert not workers[:, numel:].any() and not servers[numel:].any()  # nothing of the padding
    told = came_out + workers.mean(dim=0)[:numel] + servers[:numel]
    # Each call rounds some ten times, numbers of magnitude 8 at most: 6 × 10 × 8 × 2⁻²⁴.
    torch.testing.assert_close(told, went_in, rtol=0, atol=CALLS * 10 * 8 * 2**-24)
    assert float((came_out - went_in).abs().max()) > 0.1, "nothing was compressed"


def test_equal_tensors_come_back_as_one_rank_compresses_them_and_in_the_mean_as_they_were() -> None:
    numel, calls = 4096, 40
    values = given_by(0, 0, numel)

    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        reduce = CompressedAllReduce(numel, torch.device("cpu"))
        outputs = [reduce([values]) for _ in range(calls)]
        return {}, {"first": outputs[0], "mean": torch.stack(outputs).mean(dim=0)}

    answers = spmd(ranks, 2)
    alone = torch.cat([decompress(pack(half), scales_of(half, 2048), 2048) for half in values.split(2048)])
    # The servers find one magnitude in a block: compressed again it is the same, but for the rounding of its mean.
    torch.testing.assert_close(answers[0].tensors["first"], alone, rtol=1e-5, atol=0)
    off, off_at_first = answers[0].tensors["mean"] - values, alone - values
    # What is held back stays bounded, and is divided by the number of calls; without feedback nothing would change.
    assert off.norm() < off_at_first.norm() / 4


@pytest.mark.parametrize(("size", "numel"), [(2, 5000), (3, 4999), (4, 13)])
def test_the_bytes_are_those_predicted(size: int, numel: int) -> None:
    """Counted at c10d by the probe of every run."""

    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        reduce = CompressedAllReduce(numel, torch.device("cpu"))
        with StorageTrace({}) as trace:
            reduce([given_by(0, rank, numel)])
        return [[call.collective, call.group_size, call.message_bytes] for call in trace.trace.calls]

    predicted = message_bytes(numel, size)
    for answer in spmd(ranks, size):
        assert answer.error is None
        assert answer.value == [
            ["all_to_all", size, predicted],
            ["all_gather", size, predicted],
        ]


def test_within_a_group_of_the_ranks() -> None:
    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        reduce = CompressedAllReduce(64, torch.device("cpu"), groups[rank % 2])
        return {}, {"mean": reduce([torch.full((64,), float(rank))])}

    means = [answer.tensors["mean"] for answer in spmd(ranks, 3)]
    assert [float(mean.mean()) for mean in means] == [1.0, 1.0, 1.0]
