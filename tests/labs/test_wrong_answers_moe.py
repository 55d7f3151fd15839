"""The bank of wrong answers of lab 10.

The answers are written the way a student would write them, not as the faults that the judges compare with.
"""

import math
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlojz.labs import lab10_experts as lab
from dlojz.labs.kit.exercise import Challenge, judge
from dlojz.labs.lab10_experts.exercises_ranks import PLACEMENT, average_gradients, busiest_rank, exchange_bytes, mixture
from dlojz.labs.lab10_experts.exercises_routing import (
    SETTINGS,
    balance_loss,
    capacity,
    gate,
    pacing,
    places,
    two_level_gate,
)
from tests.labs import student_answers_moe as student
from tests.labs.bank import Answer, BankTests, detached

EXERCISES = {exercise.id: exercise for exercise in lab.EXERCISES if not isinstance(exercise, Challenge)}


def divided_by_all(logits: Any, k: int) -> Any:
    """Weights divided by the sum over all tokens."""
    weights, chosen = logits.softmax(-1).topk(k)
    return (weights if k == 1 else weights / weights.sum()), chosen


def choosing(way: str = "right") -> Answer:
    def answer(logits: Any, k: int) -> Any:
        if way == "over tokens":
            probabilities = F.softmax(logits, dim=0)
        else:
            probabilities = logits if way == "logits" else F.softmax(logits, dim=1)
        order = torch.argsort(probabilities, dim=1, descending=way != "lowest")
        chosen = order[:, :k]
        weights = torch.gather(probabilities, 1, chosen)
        if way == "of the chosen":
            weights = F.softmax(torch.gather(logits, 1, chosen), dim=1)
        elif way not in ("never", "logits") and (k > 1 or way == "always"):
            total = weights.sum(1, keepdim=True)
            weights = weights / (total.detach() if way == "sum detached" else total)
        if way == "swapped":
            return chosen, weights
        if way == "best only":
            return weights[:, 0], chosen[:, 0]
        return weights if way == "alone" else (weights, chosen)

    return answer


def two_levels(way: str = "right") -> Answer:
    def answer(group_logits: Any, expert_logits: Any, k: int) -> Any:
        tokens, groups = group_logits.shape
        each = expert_logits.shape[1] // groups
        if way == "flat":
            return choosing()(expert_logits, k)
        weights, chosen = torch.zeros(tokens, k), torch.zeros(tokens, k, dtype=torch.long)
        for token in range(tokens):
            by_group = group_logits[token].softmax(0)
            group = int(by_group.argmax())
            own = expert_logits[token, group * each : (group + 1) * each].softmax(0)
            if way == "over all":
                own = expert_logits[token].softmax(0)[group * each : (group + 1) * each]
            if way == "products":
                own = (by_group.repeat_interleave(each)) * expert_logits[token].view(groups, each).softmax(1).flatten()
                best = own.topk(k)
                weights[token], chosen[token] = best.values, best.indices
                continue
            best = own.topk(k)
            value = best.values / best.values.sum() if k > 1 and way not in ("undivided", "over all") else best.values
            value = torch.ones(k) if way == "group alone" else value
            weights[token] = value if way == "expert alone" else by_group[group] * value
            chosen[token] = best.indices if way == "local" else best.indices + group * each
        return weights, chosen

    return answer


def placing(way: str = "right") -> Answer:
    def answer(chosen: Any, experts: int, factor: float) -> Any:
        tokens, k = chosen.shape
        room = factor * k * tokens / experts
        room = math.floor(room) if way == "floor" else math.ceil(room)
        if way == "without k":
            room = math.ceil(factor * tokens / experts)
        if way == "without factor":
            room = math.ceil(k * tokens / experts)
        found, counts = torch.full((tokens, k), -1), [0] * experts
        order = [(token, choice) for choice in range(k) for token in range(tokens)]
        for token, choice in sorted(order) if way == "by tokens" else order:
            if way == "each apart" and token == 0:
                counts = [0] * experts
            expert = int(chosen[token, choice])
            counts[expert] += 1
            place = counts[expert] - (way != "from 1")
            if way == "last place":
                found[token, choice] = min(place, room - 1)
            elif place < room + (way == "from 1") or way == "unlimited":
                found[token, choice] = place
        return found.tolist() if way == "list" else found

    return answer


def mixing(way: str = "right") -> Answer:
    def answer(x: Any, weights: Any, chosen: Any, kept: Any, experts: Any, shape: Any) -> Any:
        buffer, y = torch.zeros(*shape, x.shape[1]), torch.zeros_like(x)
        pairs = [(t, c) for c in range(chosen.shape[1]) for t in range(len(x))]
        for t, c in pairs:
            if kept[t, c] >= 0 or way == "writes -1":
                buffer[chosen[t, c], kept[t, c]] = x[t] * (weights[t, c] if way == "weighted before" else 1)
        if way == "by places":
            buffer = buffer.transpose(0, 1)
        out = experts(buffer)
        for t, c in pairs:
            if kept[t, c] >= 0 or way in ("writes -1", "reads -1"):
                weight = 1 if way in ("unweighted", "weighted before") else weights[t, c]
                row = weight * out[chosen[t, c], kept[t, c]]
                y[t] = row if way == "overwrites" else y[t] + row
            if way == "passes through" and (kept[t] < 0).all() and c == 0:
                y[t] = x[t]
        return y

    return answer


def balancing(way: str = "right") -> Answer:
    def answer(logits: Any, chosen: Any) -> Any:
        tokens, experts = logits.shape
        probabilities = logits if way == "logits" else torch.softmax(logits, -1)
        probabilities = probabilities.detach() if way == "detached" else probabilities
        if way == "first only":
            chosen = chosen[:, :1]
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        f = counts / {"per token": tokens, "counts": 1}.get(way, chosen.numel())
        p = probabilities.mean(0)
        if way == "soft counts":
            f = f + p - p.detach()
        if way == "f squared":
            return experts * (f * f).sum()
        if way == "p squared":
            return experts * (p * p).sum()
        if way == "mean":
            return (f * p).mean()
        return (f * p).sum() if way == "without experts" else experts * (f @ p)

    return answer


def travelling(way: str = "right") -> Answer:
    def answer(buffer: Any, own_experts: Any) -> Any:
        size, rank = dist.get_world_size(), dist.get_rank()
        (experts, room, width), own = buffer.shape, buffer.shape[0] // size
        if way == "gathers":
            parts = [torch.empty_like(buffer) for _ in range(size)]
            dist.all_gather(parts, buffer)
            mine = torch.cat([part[rank * own : (rank + 1) * own] for part in parts], dim=1)
            made = own_experts(mine).view(own, size, room, width).transpose(0, 1).contiguous()
            back = torch.empty_like(buffer)
            dist.all_to_all_single(back, made.view_as(buffer))
            return back
        arrived = torch.empty_like(buffer)
        dist.all_to_all_single(arrived, buffer)
        if way == "nothing more":
            return own_experts(arrived)
        rows = arrived.view(size, own, room, width)
        rows = rows if way in ("arrives as it came", "neither") else rows.transpose(0, 1)
        rows = rows.reshape(own, size * room, width)
        if way == "in pieces":
            whole = torch.zeros_like(rows)
            made = torch.zeros_like(rows)
            for source in range(size):
                piece = slice(source * room, (source + 1) * room)
                whole.zero_()[:, piece] = rows[:, piece]
                made[:, piece] = own_experts(whole)[:, piece]
        else:
            made = own_experts(rows)
        if way in ("leaves as it is", "neither"):
            made = made.reshape(size, own, room, width)
        else:
            made = made.view(own, size, room, width).transpose(0, 1)
        if way == "no return":
            return made.reshape(experts, room, width)
        back = torch.empty_like(buffer)
        dist.all_to_all_single(back, made.contiguous().view_as(buffer))
        return back

    return answer


def averaging(way: str = "right") -> Answer:
    def answer(shared: Any, own: Any, replicas: Any) -> None:
        world, copies = dist.get_world_size(), dist.get_world_size(replicas)
        for gradient in shared:
            if way == "shared alone":
                continue
            dist.all_reduce(gradient, group=replicas if way == "shared over replicas" else None)
            gradient.div_(
                {"shared over replicas": copies, "shared by replicas": copies, "shared summed": 1}.get(way, world)
            )
        for gradient in own:
            if way == "own alone":
                continue
            if way != "own divided":
                dist.all_reduce(gradient, group=None if way == "own over all" else replicas)
            gradient.div_({"own by replicas": copies, "own summed": 1}.get(way, world))

    return answer


def counting(way: str = "right") -> Answer:
    def answer(tokens: int, width: int, experts: int, k: int, factor: float, ranks: int, number_bytes: int) -> float:
        k = 1 if way == "without k" else k
        factor = 1 if way == "without factor" else factor
        room: float = factor * k * tokens / experts
        room = room if way == "not rounded" else math.ceil(room)
        one = experts * room * width * (1 if way == "elements" else number_bytes)
        one /= ranks if way == "again" else 1
        share = {"whole": 1.0, "all-gather": ranks - 1}.get(way, (ranks - 1) / ranks)
        return {"forward": 2, "one": 1}.get(way, 4) * one * share

    return answer


def growing(way: str = "right") -> Answer:
    def answer(t: int, start: int, end: int, steps: int, degree: int, multiple: int) -> Any:
        t = t - 1 if way == "late" else t
        share = t / steps if way == "uncapped" else min(1.0, t / steps)
        share = {"power": share**degree, "linear": share}.get(way, share ** (1 / degree))
        length = {"from zero": end * share, "too far": start + end * share}.get(way, start + (end - start) * share)
        if way == "up":
            length = -(-length // multiple) * multiple
        elif way == "nearest":
            length = round(length / multiple) * multiple
        elif way == "whole":
            length = int(length)
        elif way != "not whole":
            length = int(length) // multiple * multiple
        return length if way == "uncapped" else min(length, end)

    return answer


REFERENCES: dict[str, Answer] = {
    "gate": gate,
    "places": places,
    "mixture": mixture,
    "balance-loss": balance_loss,
    "two-level-gate": two_level_gate,
    "exchange": travelling(),
    "expert-gradients": average_gradients,
    "exchange-bytes": exchange_bytes,
    "pacing": pacing,
}

BANK: dict[str, list[tuple[Answer, str]]] = {
    "gate": [
        (choosing("always"), "no gradient reaches the router"),
        (choosing("never"), "divide the weights of a token by their sum"),
        (choosing("over tokens"), "runs over the tokens"),
        (choosing("logits"), "The weights are logits"),
        (choosing("lowest"), "lowest probability"),
        (choosing("swapped"), "the numbers of experts, whole numbers from 0 to 3"),
        (choosing("best only"), "is expected of both"),
        (choosing("alone"), "A pair of tensors is expected"),
        (detached(choosing()), "no gradient reaches the router's logits"),
        (choosing("sum detached"), "not the gradient of the router's logits"),
        (lambda logits, k: None, "returns nothing"),
        (divided_by_all, "its own experts"),
    ],
    "places": [
        (placing("by tokens"), "place all first choices, then all second ones"),
        (placing("each apart"), "counted from 0 again"),
        (placing("floor"), "rounded down"),
        (placing("without k"), "The capacity forgets k"),
        (placing("without factor"), "The capacity factor is left out"),
        (placing("unlimited"), "none is refused"),
        (placing("last place"), "one upon the other"),
        (placing("from 1"), "begin at 1"),
        (placing("list"), "a torch tensor is expected"),
        (
            lambda t, e, f: places(t, e, f).where(places(t, e, f) >= 0, math.ceil(f * t.numel() / e)),
            "gets the number C",
        ),
        (lambda chosen, *case: places(chosen, *case).flip(0), "of the values differ from the reference"),
    ],
    "mixture": [
        (mixing("unweighted"), "without their weights"),
        (mixing("weighted before"), "multiply what comes out"),
        (mixing("passes through"), "would do so twice"),
        (mixing("reads -1"), "read the last place of their expert"),
        (mixing("writes -1"), "written over the last place"),
        (mixing("overwrites"), "overwrites the one before"),
        (mixing("by places"), "row e is for expert e"),
        (detached(mixing()), "no gradient reaches x"),
        (lambda x, weights, *rest: mixture(x, weights.detach(), *rest), "no gradient reaches the weights"),
    ],
    "balance-loss": [
        (balancing("without experts"), "The number of experts is missing"),
        (balancing("mean"), "You take the mean over the experts"),
        (balancing("f squared"), "no gradient passes"),
        (balancing("p squared"), "where the tokens really go"),
        (balancing("counts"), "f is a number of choices"),
        (balancing("per token"), "f adds up to k"),
        (balancing("first only"), "first choices only"),
        (balancing("logits"), "P is a mean of logits"),
        (balancing("detached"), "no gradient: the probabilities must stay linked"),
        (balancing("soft counts"), "The value is right, but not its gradient"),
    ],
    "two-level-gate": [
        (detached(two_levels()), "no gradient reaches the logits of the groups"),
        (lambda groups, experts, k: two_level_gate(groups, experts.detach(), k), "reaches the logits of the experts"),
        (two_levels("flat"), "The groups are left out"),
        (two_levels("expert alone"), "the probability of the group is missing"),
        (two_levels("group alone"), "the weight is that of the group alone"),
        (two_levels("over all"), "The second softmax runs over all experts"),
        (two_levels("undivided"), "must add up to 1"),
        (two_levels("products"), "the group is chosen first"),
        (two_levels("local"), "counted within their group"),
    ],
    "exchange": [
        (travelling("neither"), "tokens meet the wrong experts"),
        (travelling("arrives as it came"), "Tokens meet the wrong experts"),
        (travelling("leaves as it is"), "return to the wrong places"),
        (travelling("no return"), "The results stay with the experts"),
        (travelling("gathers"), "every token goes to every rank"),
        (travelling("in pieces"), "is called 2 times"),
        (travelling("nothing more"), "own_experts takes (own experts, ranks × capacity, width)"),
        (lambda buffer, own_experts: own_experts(buffer), "own_experts takes"),
    ],
    "expert-gradients": [
        (averaging("own by replicas"), "ep times too large"),
        (averaging("own over all"), "mixes different experts"),
        (averaging("own alone"), "The gradients of the experts are left as they are"),
        (averaging("own divided"), "are divided, but not added up"),
        (averaging("own summed"), "are added up, but not divided"),
        (averaging("shared alone"), "have are left as they are"),
        (averaging("shared over replicas"), "averaged over the replicas of an expert only"),
        (averaging("shared by replicas"), "divided by the number of replicas of an expert"),
        (averaging("shared summed"), "not divided by the number of ranks"),
    ],
    "exchange-bytes": [
        (counting("forward"), "Half is missing"),
        (counting("one"), "That is one all-to-all"),
        (counting("whole"), "do not leave"),
        (counting("all-gather"), "That is an all-gather"),
        (counting("not rounded"), "rounded up to a whole number of places"),
        (counting("without factor"), "The capacity factor is left out"),
        (counting("without k"), "k is left out"),
        (counting("elements"), "a number of elements"),
        (counting("again"), "once more"),
        (lambda *case: None, "returns nothing"),
    ],
    "pacing": [
        (growing("uncapped"), "never exceeds end"),
        (growing("whole"), "tensor cores compute by 8 or 16"),
        (growing("not whole"), "must be a whole number"),
        (growing("up"), "You round up"),
        (growing("nearest"), "to the nearest multiple"),
        (growing("power"), "a power where a root is due"),
        (growing("linear"), "The degree is left out"),
        (growing("from zero"), "The growth begins at 0"),
        (growing("too far"), "a share of end - start"),
        (growing("late"), "one step late"),
    ],
}


WRONG = {name: [*answers, *student.WRONG[name]] for name, answers in BANK.items()}


# The challenge: valid answers that miss its target, others that reach it, and what is refused.

Held = list[list[int]]


def in_order(loads: Any, ranks: int, places: int) -> Held:
    each = len(loads) // ranks
    return [list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]


def filled(order: list[int], share: list[float], ranks: int, places: int) -> Held:
    held: Held = [[] for _ in range(ranks)]
    for expert in order:
        free = [one for one in held if len(one) < places]
        min(free, key=lambda one: sum(share[other] for other in one)).append(expert)
    return held


def heaviest_first(loads: Any, ranks: int, places: int) -> Held:
    return filled(sorted(range(len(loads)), key=lambda expert: -loads[expert]), loads, ranks, places)


def copied(loads: Any, ranks: int, places: int) -> tuple[list[int], list[float]]:
    copies = [1] * len(loads)
    for _ in range(ranks * places - len(loads)):
        copies[max(range(len(loads)), key=lambda expert: loads[expert] / copies[expert])] += 1
    share = [load / many for load, many in zip(loads, copies, strict=True)]
    return [expert for expert, many in enumerate(copies) for _ in range(many)], share


def copies_heaviest_first(loads: Any, ranks: int, places: int) -> Held:
    slots, share = copied(loads, ranks, places)
    return filled(sorted(slots, key=lambda expert: -share[expert]), share, ranks, places)


def best_of_many_orders(loads: Any, ranks: int, places: int) -> Held:
    slots, share = copied(loads, ranks, places)
    draws = Random(0)
    orders = [sorted(slots, key=lambda expert: -share[expert] * draws.uniform(0.7, 1)) for _ in range(400)]
    return min((filled(order, share, ranks, places) for order in orders), key=lambda held: busiest_rank(loads, held))


@pytest.mark.parametrize(
    ("answer", "score"), [(in_order, 183.5), (heaviest_first, 123.0), (copies_heaviest_first, 107.5)]
)
def test_judge_of_placement_finds_first_ideas_valid_and_short_of_the_target(answer: Answer, score: float) -> None:
    verdict = judge(PLACEMENT, answer)
    assert (verdict.state, verdict.score) == ("note", score)
    assert "(target: 103)" in verdict.message


def test_judge_of_placement_sees_its_target_reached_by_another_way() -> None:
    verdict = judge(PLACEMENT, best_of_many_orders)
    assert verdict.state == "right", verdict.message


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda loads, ranks, places: [list(range(len(loads)))] + [[]] * (ranks - 1), "has room for 3 experts"),
        (lambda loads, ranks, places: in_order(loads, ranks, places)[1:], "4 ranks, but 3 lists"),
        (lambda loads, ranks, places: [[*one[:-1], 99] for one in in_order(loads, ranks, places)], "99 does not exist"),
        (lambda loads, ranks, places: [one[1:] for one in in_order(loads, ranks, places)], "Expert 0 is on no rank"),
        (lambda loads, ranks, places: ranks, "one per rank, but int"),
        (lambda loads, ranks, places: list(range(ranks)), "one per rank, but list"),
    ],
)
def test_judge_of_placement_refuses_what_breaks_the_rules(answer: Answer, words: str) -> None:
    verdict = judge(PLACEMENT, answer)
    assert verdict.state == "wrong"
    assert words in verdict.message


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right = WRONG, REFERENCES
    others = (
        ("balance-loss", balancing()),
        ("mixture", mixing()),
        ("expert-gradients", averaging()),
        *student.RIGHT,
    )


@pytest.mark.parametrize(("k", "groups"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_the_gate_of_the_exercises_is_that_of_the_package(k: int, groups: int) -> None:
    from dlojz.models.experts import gate as package

    logits_NE, group_logits_NG = torch.randn(13, 8), torch.randn(13, groups)
    if groups == 1:
        ours, (experts_KN, weights_KN) = gate(logits_NE, k), package.choose(logits_NE.softmax(-1), k)
    else:
        ours = two_level_gate(group_logits_NG, logits_NE, k)
        _, experts_KN, weights_KN = package.choose_in_group(group_logits_NG, logits_NE, k)
    assert torch.equal(ours[1].T, experts_KN)
    torch.testing.assert_close(ours[0].T, weights_KN)


@pytest.mark.parametrize(("k", "factor"), [(1, 1.0), (2, 1.25), (2, 0.5)])
def test_mixture_of_experts_is_the_layer_of_the_exercises(k: int, factor: float) -> None:
    from dlojz.models.experts import Routing
    from dlojz.models.experts.layer import MixtureOfExperts

    torch.manual_seed(0)
    routing = Routing(experts=4, top_k=k, capacity_factor=factor)
    layer = MixtureOfExperts(6, 12, routing)
    x_TD = torch.randn(20, 6)
    logits_TE = x_TD @ layer.gate.weight.T * 50  # far apart, so that rounding changes no choice
    layer.gate.weight.data *= 50
    weights_TK, chosen_TK = gate(logits_TE, k)
    places_TK = places(chosen_TK, 4, factor)
    shape = 4, capacity(20, 4, k, factor)
    assert shape[1] == routing.capacity(20)
    torch.testing.assert_close(
        mixture(x_TD, weights_TK, chosen_TK, places_TK, layer.experts, shape), layer(x_TD.unsqueeze(0))[0]
    )
    assert layer.last is not None
    torch.testing.assert_close(balance_loss(logits_TE, chosen_TK), layer.last.balance)
    assert float(layer.last.dropped_share) == pytest.approx(float((places_TK < 0).float().mean()))


@pytest.mark.parametrize(("start", "end", "steps", "degree", "multiple"), SETTINGS)
def test_the_lengths_of_the_exercise_are_those_of_the_package(
    start: int, end: int, steps: int, degree: int, multiple: int
) -> None:
    from dlojz.config.schedules import root_length

    for t in range(1, steps + 5):
        ours = pacing(t, start, end, steps, degree, multiple)
        assert ours == root_length(t, start=start, end=end, steps=steps, degree=degree, multiple=multiple)


def test_the_bytes_of_the_exercise_are_those_of_the_package() -> None:
    from dlojz.models.experts import Routing, all_to_all_bytes

    room = Routing(experts=8, top_k=2, capacity_factor=1.25).capacity(100)
    one = all_to_all_bytes(experts=8, capacity=room, width=64, element_bytes=2)
    assert exchange_bytes(100, 64, 8, 2, 1.25, 4, 2) == 4 * one * 3 / 4
