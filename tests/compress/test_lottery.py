"""The lottery ticket: rewinding to the bit, masks by round, and what other tickets differ in."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from benchmarks.lottery_ticket import KINDS, random_mask_like, run_race
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import masks, pruning
from dlojz.compress.pruning import Race
from dlojz.compress.task import Settings, Task, digits, fit, new_model

SETTINGS = Settings(epochs=2, batch_size=32)


@pytest.fixture(scope="module")
def task() -> Task:
    return digits().few(96)  # three steps an epoch


def race(task: Task, rewind_step: int = 2, seed: int = 0) -> Race:
    return Race("vit_mini", task, SETTINGS, rewind_step, seed, per_layer=True)


def everything(model: torch.nn.Module) -> Tensor:
    """All parameters in the order of their names: a layer that is masked names its weight `weight_orig`."""
    named = {name.removesuffix("_orig"): parameter for name, parameter in model.named_parameters()}
    return torch.cat([named[name].detach().flatten() for name in sorted(named)])


def test_sparsities_remove_the_same_share_of_what_is_left_every_round() -> None:
    levels = pruning.sparsities(0.9, 4)
    left = [1.0, *(1 - level for level in levels)]
    shares = [after / before for before, after in pairwise(left)]
    assert shares == pytest.approx([0.1**0.25] * 4) and levels[-1] == pytest.approx(0.9)


def test_a_ticket_that_removes_nothing_is_the_dense_training_to_the_bit(task: Task) -> None:
    plain = new_model("vit_mini", task, 0)
    fit(plain, task, SETTINGS)
    dense = pruning.train_ticket(race(task), None)
    whole = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in masks.weights(plain).items()}
    ticket = pruning.train_ticket(race(task), whole)
    assert torch.equal(everything(plain), everything(dense)) and torch.equal(everything(plain), everything(ticket))


@pytest.mark.parametrize("step", [0, 4])
def test_a_ticket_starts_from_the_weights_of_the_dense_training_at_the_rewound_step(
    task: Task, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, seen = new_model("vit_mini", task, 0), []
    at = [everything(dense).clone()]
    fit(dense, task, SETTINGS, after_step=lambda _: at.append(everything(dense).clone()))
    renew = masks.renew
    monkeypatch.setattr(masks, "renew", lambda model, found: (seen.append(everything(model)), renew(model, found)))
    ticket = masks.magnitude_masks(masks.weights(dense), 0.5, per_layer=True)
    model = pruning.train_ticket(race(task, step), ticket)
    assert len(seen) == 1 and torch.equal(seen[0], at[step])
    assert all(not weight[~ticket[name]].any() for name, weight in masks.weights(model).items())


def test_winning_tickets_are_pruned_by_what_the_round_before_ended_in(task: Task) -> None:
    told: list[tuple[int, int]] = []
    (first, model), (second, _) = pruning.winning_tickets(
        race(task), (0.5, 0.75), lambda *at: told.append(at), pruning.train_ticket(race(task), None)
    )
    dense = pruning.train_ticket(race(task), None)
    for name, mask in masks.magnitude_masks(masks.weights(dense), 0.5, per_layer=True).items():
        assert torch.equal(mask, first[name])
    for name, mask in masks.magnitude_masks(masks.weights(model), 0.75, per_layer=True).items():
        assert torch.equal(mask, second[name]) and not (second[name] & ~first[name]).any()
    assert told == [(step, 12) for step in range(1, 13)]


def test_random_mask_like_has_as_many_in_each_layer_but_elsewhere() -> None:
    ticket = {"a": torch.arange(1000).reshape(10, 100) < 300, "b": torch.zeros(50, dtype=torch.bool)}
    found, again, other = (random_mask_like(ticket, seed) for seed in (1, 1, 2))
    assert [int(mask.sum()) for mask in found.values()] == [300, 0] and found["a"].shape == (10, 100)
    assert torch.equal(found["a"], again["a"]) and not torch.equal(found["a"], other["a"])
    assert abs(int((found["a"] & ticket["a"]).sum()) - 90) < 40  # by chance 90, with a deviation of 6.6


def test_a_race_runs_every_ticket_at_every_sparsity(task: Task) -> None:
    told: list[tuple[int, int]] = []
    tickets = run_race(race(task, seed=3), (0.5, 0.8), progress=lambda *at: told.append(at))
    assert [(one.kind, round(one.sparsity, 2)) for one in tickets[:3]] == [
        ("iterative", 0.0), ("iterative", 0.5), ("iterative", 0.8)]  # fmt: skip
    assert sorted((one.kind, round(one.sparsity, 2)) for one in tickets[3:]) == sorted(
        (kind, level) for kind in KINDS[1:] for level in (0.5, 0.8)
    )
    assert {one.seed for one in tickets} == {3} and all(0 <= one.accuracy <= 1 for one in tickets)
    total = 6 * (1 + 2 + 3 * 2)
    assert told == [(step, total) for step in range(1, total + 1)]


def test_sparsities_and_race_refuse_what_cannot_be(task: Task) -> None:
    for language, rounds, rewind in (
        ("en", "rounds must be at least 1, but 0", "from 0 to 5, .* but 6 was"),
        ("fr", "rounds doit être au moins égal à 1", "va de 0 à 5, .* mais 6 a été"),
    ):
        use_language(language)
        with pytest.raises(LabError, match=rounds):
            pruning.sparsities(0.5, 0)
        with pytest.raises(LabError, match=rewind):
            race(task, 6)
        with pytest.raises(LabError, match="sparsity"):
            pruning.sparsities(1.0, 3)
