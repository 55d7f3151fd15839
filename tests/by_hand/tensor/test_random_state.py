"""The two random states: equal and different masks on real ranks, streams that go on, checkpoints that draw again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dlojz.base.errors import LabError
from dlojz.by_hand.tensor.random_state import STREAMS, RandomStates, Where
from dlojz.processes.forks import spmd


def mask(states: RandomStates, where: Where, length: int = 1000) -> Tensor:
    return states.dropout(torch.ones(length), 0.25, where) != 0


def test_masks_are_equal_outside_of_the_regions_and_different_inside() -> None:
    """Each rank has drawn differently before, and draws differently between; only the streams decide."""

    def ranks(rank: int, size: int) -> tuple[None, dict[str, Tensor]]:
        torch.manual_seed(rank)
        states = RandomStates(7, rank)
        found = {}
        for turn in range(2):
            for where in STREAMS:
                found[f"{where} {turn}"] = mask(states, where)
            torch.rand(rank + 1)
            if rank:  # one rank has drawn more from its own stream: the common one must not move
                mask(states, "split")
        return None, found

    answers = spmd(ranks, 2)
    assert [answer.error for answer in answers] == [None] * 2
    first, second = (answer.tensors for answer in answers)
    for turn in range(2):
        assert torch.equal(first[f"replicated {turn}"], second[f"replicated {turn}"])
        # Of two independent masks of 1000 places that keep 3 in 4, 375 differ, give or take 15.
        assert 300 < (first[f"split {turn}"] ^ second[f"split {turn}"]).sum() < 450
        assert 300 < (first[f"split {turn}"] ^ first[f"replicated {turn}"]).sum() < 450
    assert not torch.equal(first["replicated 0"], first["replicated 1"])
    assert not torch.equal(first["split 0"], first["split 1"])


def drawn(states: RandomStates, where: Where, length: int) -> Tensor:
    with states.split() if where == "split" else states.replicated():
        return torch.rand(length)


@pytest.mark.parametrize("where", STREAMS)
def test_a_stream_goes_on_where_it_was_left(where: Where) -> None:
    """In two parts, with the other stream and torch's own generator between, it gives the numbers of one go."""
    whole = drawn(RandomStates(3, 1), where, 64)
    states = RandomStates(3, 1)
    first = drawn(states, where, 32)
    drawn(states, "split" if where == "replicated" else "replicated", 7)
    torch.manual_seed(0)
    torch.rand(5)
    assert torch.equal(torch.cat([first, drawn(states, where, 32)]), whole)


def test_random_states_leave_torchs_own_generator_even_after_an_error() -> None:
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    states = RandomStates(3, 0)
    mask(states, "split")
    with pytest.raises(ZeroDivisionError), states.split():
        torch.rand(3)
        raise ZeroDivisionError
    mask(states, "replicated")
    assert torch.equal(torch.rand(4), expected)
    mask(states, "split")  # the stream was left properly


def test_the_streams_are_those_of_megatrons_seeds() -> None:
    seeds: dict[Where, int] = {"replicated": 5, "split": 5 + 2718 + 3}
    for where, seed in seeds.items():
        torch.manual_seed(seed)
        assert torch.equal(drawn(RandomStates(5, 3), where, 8), torch.rand(8))


def region(states: RandomStates, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A region as tensor parallelism has it: dropout inside, dropout on its output, one by torch's own generator."""

    def run(x: Tensor) -> Tensor:
        inside = states.dropout(torch.tanh(x @ weight), 0.5, "split")
        return torch.dropout(states.dropout(inside @ weight, 0.5, "replicated"), 0.5, True)

    return run


def gradients(call: Callable[[RandomStates, Callable[[Tensor], Tensor], Tensor], Tensor]) -> list[Tensor]:
    """Output, gradients, and what each stream gives afterwards, of two regions one after the other."""
    torch.manual_seed(1)
    weight = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(8, 16, requires_grad=True)
    states = RandomStates(2, 1)
    output = x
    for _ in range(2):
        output = call(states, region(states, weight), output)
    output.square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [output.detach(), x.grad, weight.grad, *(mask(states, where) for where in STREAMS)]


def test_checkpointed_draws_again_what_it_has_drawn() -> None:
    plain = gradients(lambda states, run, x: run(x))
    again = gradients(lambda states, run, x: states.checkpointed(run, x))
    for found, expected in zip(again, plain, strict=True):
        assert torch.equal(found, expected)


def test_random_states_in_torchs_checkpoint_alone_draw_other_masks() -> None:
    """What `checkpointed` is for: the output is right, the gradient is another network's."""
    plain = gradients(lambda states, run, x: run(x))
    wrong: list[Any] = gradients(
        lambda states, run, x: checkpoint(run, x, use_reentrant=False, preserve_rng_state=True)
    )
    assert torch.equal(wrong[0], plain[0])
    assert not torch.allclose(wrong[2], plain[2])


def test_random_states_draw_nothing_outside_of_training() -> None:
    states, x = RandomStates(0, 0), torch.ones(5)
    assert states.dropout(x, 0.5, "split", training=False) is x
    assert torch.equal(mask(states, "split"), mask(RandomStates(0, 0), "split"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_states_hold_the_generator_of_a_gpu_too() -> None:
    torch.cuda.manual_seed(4)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(4)
    x = torch.ones(1000, device="cuda")
    one, other = RandomStates(9, 0), RandomStates(9, 1)
    assert torch.equal(one.dropout(x, 0.5, "replicated"), other.dropout(x, 0.5, "replicated"))
    assert not torch.equal(one.dropout(x, 0.5, "split"), other.dropout(x, 0.5, "split"))
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_random_states_refuse_what_makes_no_sense() -> None:
    states = RandomStates(0, 0)
    with pytest.raises(LabError, match="split stream was asked for within the replicated one"), states.replicated():
        mask(states, "split")
    with pytest.raises(LabError, match="unknown stream 'inside'"):
        states.dropout(torch.ones(1), 0.5, "inside")  # type: ignore[arg-type]
    with pytest.raises(LabError, match=r"probability from 0 to 1, but 1\.5"):
        states.dropout(torch.ones(1), 1.5, "split")
    for seed, rank in ((-1, 0), (0, -1), (0.5, 0), (0, True)):
        with pytest.raises(LabError, match="must be a whole number from 0"):
            RandomStates(seed, rank)  # type: ignore[arg-type]
