"""The bank of wrong answers of lab 02: each is refused for what is wrong with it; the references pass.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch._dynamo  # here, once: the first checkpoint in a child would import it, for seconds
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.labs import lab02_memory
from dlojz.labs.kit.exercise import judge
from dlojz.labs.lab02_memory.exercises import (
    bytes_per_parameter,
    data_parallel_bytes,
    largest_batch,
    peak_bytes,
    transformer_layer_bytes,
)
from dlojz.labs.lab02_memory.exercises_recompute import (
    block_costs,
    cheapest_plan,
    exposed_seconds,
    offload_hooks,
    plan_peak_bytes,
)
from dlojz.planner.activation_budget import block_tables, cheapest
from tests.labs.answers import checkpointed

EXERCISES = {exercise.id: exercise for exercise in lab02_memory.EXERCISES}
Answer = Callable[..., Any]


def forgot_return(*arguments: Any) -> None:
    sum(range(3))


TABLE = {"fp32": 4 + 4, "autocast": 4 + 4, "bf16": 2 + 2 + 4, "bf16_fp32_gradients": 2 + 4 + 4}
MOMENTS = {"sgd": 0, "momentum": 4, "adamw": 8}


def from_a_table(precision: str, optimizer: str) -> int:
    return TABLE[precision] + MOMENTS[optimizer]


def no_master(precision: str, optimizer: str) -> int:
    weights = 2 if precision.startswith("bf16") else 4
    gradients = 2 if precision == "bf16" else 4
    return weights + gradients + MOMENTS[optimizer]


def half_moments(precision: str, optimizer: str) -> int:
    return TABLE[precision] + MOMENTS[optimizer] // (2 if precision.startswith("bf16") else 1)


def one_moment(precision: str, optimizer: str) -> int:
    return TABLE[precision] + (0 if optimizer == "sgd" else 4)


def always_adam(precision: str, optimizer: str) -> int:
    return TABLE[precision] + 8


def no_gradients(precision: str, optimizer: str) -> int:
    return {"fp32": 4, "autocast": 4}.get(precision, 6) + MOMENTS[optimizer]


def rule_of_twenty(precision: str, optimizer: str) -> int:
    return from_a_table(precision, optimizer) + (2 if precision == "bf16_fp32_gradients" else 0)


def always_sixteen(precision: str, optimizer: str) -> int:
    return 16


def maxima_added(samples: Any) -> int:
    names = {name for sample in samples for name in sample}
    return sum(max(sample.get(name, 0) for sample in samples) for name in names)


def all_elements(s: int, b: int, h: int, a: int) -> float:
    return s * b * h * (17 + 2.5 * a * s / h)


def by_parts(s: int, b: int, h: int, a: int) -> int:
    sbh, scores = s * b * h, a * s**2 * b
    attention = 2 * sbh + 4 * sbh + (2 * scores + scores + 2 * scores) + 2 * sbh + 2 * sbh + sbh
    mlp = 2 * sbh + 8 * sbh + 8 * sbh + sbh
    return attention + mlp + 2 * 2 * sbh


def batch_from_two_points(taken: Answer, limit: int) -> int:
    slope = (taken(16) - taken(8)) / 8
    return max(0, math.floor((limit - (taken(8) - 8 * slope)) / slope))


def batch_by_trying(taken: Answer, limit: int) -> int:
    batch = 0
    while taken(batch + 1) <= limit:
        batch += 1
    return batch


def batch_of_proportion(taken: Answer, limit: int) -> int:
    return int(limit / taken(1))


def batch_without_states(taken: Answer, limit: int) -> int:
    return int(limit // ((taken(16) - taken(8)) / 8))


def batch_rounded_up(taken: Answer, limit: int) -> int:
    slope = (taken(16) - taken(8)) / 8
    return max(0, math.ceil((limit - (taken(8) - 8 * slope)) / slope))


def batch_negative(taken: Answer, limit: int) -> int:
    slope = (taken(16) - taken(8)) // 8
    return (limit - (taken(8) - 8 * slope)) // slope


def batch_from_one_and_two(taken: Answer, limit: int) -> int:
    slope = taken(2) - taken(1)
    return max(0, (limit - (taken(1) - slope)) // slope)


def plain_loop(blocks: Any, x: Any, per_segment: int) -> Any:
    for block in blocks:
        x = block(x)
    return x


def each_block(blocks: Any, x: Any, per_segment: int) -> Any:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def whole_model(blocks: Any, x: Any, per_segment: int) -> Any:
    return checkpoint(nn.Sequential(*blocks), x, use_reentrant=False)


def nested(blocks: Any, x: Any, per_segment: int) -> Any:
    for start in range(0, len(blocks), per_segment):
        x = checkpoint(each_block, blocks[start : start + per_segment], x, 1, use_reentrant=False)
    return x


def last_segment_plain(blocks: Any, x: Any, per_segment: int) -> Any:
    last = (len(blocks) - 1) // per_segment * per_segment
    for start in range(0, last, per_segment):
        x = checkpoint(nn.Sequential(*blocks[start : start + per_segment]), x, use_reentrant=False)
    return nn.Sequential(*blocks[last:])(x)


def last_segment_lost(blocks: Any, x: Any, per_segment: int) -> Any:
    for number in range(len(blocks) // per_segment):
        segment = nn.Sequential(*blocks[number * per_segment : (number + 1) * per_segment])
        x = checkpoint(segment, x, use_reentrant=False)
    return x


def reentrant(blocks: Any, x: Any, per_segment: int) -> Any:
    for start in range(0, len(blocks), per_segment):
        x = checkpoint(nn.Sequential(*blocks[start : start + per_segment]), x, use_reentrant=True)
    return x


def without_graph(blocks: Any, x: Any, per_segment: int) -> Any:
    with torch.no_grad():
        return plain_loop(blocks, x, per_segment)


def detached(blocks: Any, x: Any, per_segment: int) -> Any:
    for start in range(0, len(blocks), per_segment):
        segment = nn.Sequential(*blocks[start : start + per_segment])
        x = checkpoint(segment, x.detach(), use_reentrant=False)
    return x


def late_binding(blocks: Any, x: Any, per_segment: int) -> Any:
    for start in range(0, len(blocks), per_segment):

        def segment(y: Any) -> Any:
            return plain_loop(blocks[start : start + per_segment], y, 1)  # noqa: B023 - the mistake itself

        x = checkpoint(segment, x, use_reentrant=False)
    return x


def other_masks(blocks: Any, x: Any, per_segment: int) -> Any:
    for start in range(0, len(blocks), per_segment):
        segment = nn.Sequential(*blocks[start : start + per_segment])
        x = checkpoint(segment, x, use_reentrant=False, preserve_rng_state=False)
    return x


def from_the_input(blocks: Any, x: Any, per_segment: int) -> Any:
    for start in range(0, len(blocks), per_segment):
        y = checkpoint(nn.Sequential(*blocks[start : start + per_segment]), x, use_reentrant=False)
    return y


def all_to_the_host(model: Any, host: Any) -> Any:
    return host.store, host.fetch


def parameters_by_type(model: Any, host: Any) -> Any:
    def pack(tensor: Any) -> Any:
        return tensor if isinstance(tensor, nn.Parameter) else host.store(tensor)

    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else host.fetch(packed)


def nothing_moved(model: Any, host: Any) -> Any:
    return (lambda tensor: tensor), (lambda tensor: tensor)


def kept_beside(model: Any, host: Any) -> Any:
    def pack(tensor: Any) -> Any:
        host.store(tensor)
        return tensor

    return pack, lambda packed: packed


def flattened(model: Any, host: Any) -> Any:
    pack, unpack = offload_hooks(model, host)
    return pack, lambda packed: unpack(packed) if isinstance(packed, torch.Tensor) else unpack(packed) * 0.5


def only_large(model: Any, host: Any) -> Any:
    pack, unpack = offload_hooks(model, host)
    return (lambda tensor: pack(tensor) if tensor.numel() > 50 else tensor), unpack


def one_hook(model: Any, host: Any) -> Any:
    return offload_hooks(model, host)[0]


CHOICES = ("keep", "recompute", "offload")


def seconds_of(blocks: Any, plan: Any) -> Any:
    return sum(block.seconds[choice] for block, choice in zip(blocks, plan, strict=True))


def tried_all(blocks: Any, budget: float, need: Answer, choices: Any = CHOICES, cost: Answer = seconds_of) -> Any:
    able = [plan for plan in product(choices, repeat=len(blocks)) if need(blocks, plan) <= budget]
    return min(able, key=lambda plan: cost(blocks, plan)) if able else None


def held_by(blocks: Any, plan: Any) -> Any:
    return sum(block.held_bytes[choice] for block, choice in zip(blocks, plan, strict=True))


def peak_walked(blocks: Any, plan: Any) -> Any:
    held = most = 0
    for block, choice in zip(blocks, plan, strict=True):
        most = max(most, held + block.backward_bytes[choice])
        held += block.held_bytes[choice]
    return most


def peak_with_own(blocks: Any, plan: Any) -> Any:
    held = most = 0
    for block, choice in zip(blocks, plan, strict=True):
        held += block.held_bytes[choice]
        most = max(most, held + block.backward_bytes[choice])
    return most


def peak_from_the_end(blocks: Any, plan: Any) -> Any:
    return peak_walked(list(reversed(blocks)), list(reversed(plan)))


def all_held_and_the_fullest(blocks: Any, plan: Any) -> Any:
    backward = [block.backward_bytes[choice] for block, choice in zip(blocks, plan, strict=True)]
    return held_by(blocks, plan) + max(backward)


def plan_by_blocks(blocks: Any, budget: float) -> Any:
    """Dynamic programming over (bytes held, seconds, plan): another way to the same plan."""
    states: list[tuple[float, float, list[str]]] = [(0, 0, [])]
    for block in blocks:
        states = [
            (held + block.held_bytes[choice], taken + block.seconds[choice], [*plan, choice])
            for held, taken, plan in states
            for choice in CHOICES
            if held + block.backward_bytes[choice] <= budget
        ]
    return min(states, key=lambda state: state[1])[2] if states else None


def one_choice_for_all(blocks: Any, budget: float) -> Any:
    able = [[choice] * len(blocks) for choice in CHOICES if peak_walked(blocks, [choice] * len(blocks)) <= budget]
    return min(able, key=lambda plan: seconds_of(blocks, plan), default=None)


def best_bytes_per_second(blocks: Any, budget: float) -> Any:
    plan = ["keep"] * len(blocks)
    while peak_walked(blocks, plan) > budget:
        left = [number for number in range(len(blocks)) if plan[number] == "keep"]
        if not left:
            return None
        _, number, choice = max(
            ((blocks[number].held_bytes["keep"] - blocks[number].held_bytes[choice]) / blocks[number].seconds[choice],
             number, choice)
            for number in left
            for choice in ("recompute", "offload")
        )  # fmt: skip
        plan[number] = choice
    return plan


def plan_or_an_error(blocks: Any, budget: float) -> Any:
    able = [plan for plan in product(CHOICES, repeat=len(blocks)) if peak_walked(blocks, plan) <= budget]
    return min(able, key=lambda plan: seconds_of(blocks, plan))


def even_where_none_fits(blocks: Any, budget: float) -> Any:
    return tried_all(blocks, budget, peak_walked) or ["offload"] * len(blocks)


RIGHT: tuple[tuple[str, Answer], ...] = (
    ("bytes-per-parameter", bytes_per_parameter),
    ("bytes-per-parameter", from_a_table),
    ("peak", peak_bytes),
    ("peak", lambda samples: max([sum(sample.values()) for sample in samples])),
    ("block-activations", transformer_layer_bytes),
    ("block-activations", by_parts),
    ("block-activations", lambda s, b, h, a: s * b * h * (34 + 5 * a * s / h)),
    ("largest-batch", largest_batch),
    ("largest-batch", batch_from_two_points),
    ("data-parallel-bytes", data_parallel_bytes),
    ("checkpoint", checkpointed),
    ("offload", offload_hooks),
    ("exposed-seconds", exposed_seconds),
    ("activation-plan", cheapest_plan),
    ("activation-plan", plan_by_blocks),
    ("activation-plan", lambda blocks, budget: tried_all(blocks, budget, peak_walked)),
)

WRONG: tuple[tuple[str, Answer, str], ...] = (
    ("bytes-per-parameter", no_master, "master copy is missing"),
    ("bytes-per-parameter", half_moments, "moments in the precision of the weights"),
    ("bytes-per-parameter", one_moment, "two moments per parameter"),
    ("bytes-per-parameter", always_adam, "SGD keeps nothing"),
    ("bytes-per-parameter", no_gradients, "gradients are missing"),
    ("bytes-per-parameter", rule_of_twenty, "rule of 20 bytes"),
    ("bytes-per-parameter", always_sixteen, "8 is expected, but your function returns 16"),
    ("bytes-per-parameter", forgot_return, "end it with return"),
    ("peak", maxima_added, "do not occur at the same moment"),
    ("peak", lambda samples: max(value for sample in samples for value in sample.values()), "single category"),
    ("peak", lambda samples: sum(samples[-1].values()), "end of the step"),
    ("peak", lambda samples: sum(map(sum, (sample.values() for sample in samples))), "add the moments up"),
    ("peak", lambda samples: max(samples, key=lambda sample: sum(sample.values())), "but a number is expected"),
    ("block-activations", lambda s, b, h, a: 34 * s * b * h, "scores are missing"),
    ("block-activations", lambda s, b, h, a: 34 * s * b * h + 2 * a * s * s * b, "result of the softmax alone"),
    ("block-activations", lambda s, b, h, a: 36 * s * b * h + 6 * a * s * s * b, "1 byte per element, not 2"),
    ("block-activations", lambda s, b, h, a: 32 * s * b * h + 4 * a * s * s * b, "dropout masks are missing"),
    ("block-activations", lambda s, b, h, a: 30 * s * b * h + 5 * a * s * s * b, "layer norms are missing"),
    ("block-activations", lambda s, b, h, a: 26 * s * b * h + 5 * a * s * s * b, "two tensors of width 4 h"),
    ("block-activations", all_elements, "takes 2 bytes"),
    ("block-activations", lambda s, b, h, a: s * b * (34 * h + 5 * s), "has its own scores"),
    ("largest-batch", batch_of_proportion, "there once, whatever the batch"),
    ("largest-batch", batch_without_states, "forget the fixed part"),
    ("largest-batch", batch_rounded_up, "round up"),
    ("largest-batch", batch_negative, "negative batch"),
    ("largest-batch", batch_from_one_and_two, "Ask for 8 and 16"),
    ("largest-batch", batch_by_trying, "Two points are enough"),
    ("data-parallel-bytes", lambda p, a, n, d: ((20 if d > 1 else 16) * p + a * n) // d, "what ZeRO-3 does"),
    ("data-parallel-bytes", lambda p, a, n, d: (16 * p + a * n) // d, "what ZeRO-3 does"),
    ("data-parallel-bytes", lambda p, a, n, d: 16 * p + a * (n // d), "buckets are missing"),
    ("data-parallel-bytes", lambda p, a, n, d: 20 * p + a * (n // d), "on a single GPU too"),
    ("data-parallel-bytes", lambda p, a, n, d: 16 * p + 4 * p * (d > 1) + a * n, "whole global batch"),
    ("data-parallel-bytes", lambda p, a, n, d: 16 * p + 4 * p * (d > 1) + a, "one single image"),
    ("checkpoint", plain_loop, "6 of the 6 hidden activations are still in memory"),
    ("checkpoint", last_segment_plain, "2 of the 6 hidden activations are still in memory"),
    ("checkpoint", each_block, "the outputs of 6 blocks are in memory; with 6 blocks"),
    ("checkpoint", whole_model, "your segments are too long"),
    ("checkpoint", nested, "runs 3 times"),
    ("checkpoint", last_segment_lost, "these never run: 6"),
    ("checkpoint", from_the_input, "must begin with what the one before gives"),
    ("checkpoint", reentrant, "use_reentrant=False"),
    ("checkpoint", detached, "a detach cuts all that comes before it"),
    ("checkpoint", without_graph, "no parameter gets a gradient"),
    ("checkpoint", late_binding, "sees the last value of the loop's variables"),
    ("checkpoint", other_masks, "same mask twice"),
    ("checkpoint", forgot_return, "end it with return"),
    ("offload", all_to_the_host, "bytes of weights"),
    ("offload", parameters_by_type, "bytes of weights"),
    ("offload", nothing_moved, "nothing has gone to the host"),
    ("offload", kept_beside, "never fetched"),
    ("offload", flattened, "exactly the tensor that pack was given"),
    ("offload", only_large, "all that is saved but the weights"),
    ("offload", one_hook, "Two functions are expected"),
    ("offload", forgot_return, "return pack, unpack"),
    ("exposed-seconds", lambda moved, link, forward: 2 * moved / link, "only what is longer"),
    ("exposed-seconds", lambda moved, link, forward: max(0, moved / link - forward), "way out"),
    ("exposed-seconds", lambda moved, link, forward: max(0, 2 * moved / link - 3 * forward), "spare time"),
    ("exposed-seconds", lambda moved, link, forward: 2 * max(0, moved / link - forward), "twice as long"),
    ("exposed-seconds", lambda moved, link, forward: 2 * moved / link - 3 * forward, "max(0, …)"),
    ("activation-plan", lambda b, most: tried_all(b, most, held_by), "takes its backward_bytes besides"),
    ("activation-plan", lambda b, most: tried_all(b, most, all_held_and_the_fullest), "have given theirs back"),
    ("activation-plan", lambda b, most: tried_all(b, most, peak_with_own), "count a block twice"),
    ("activation-plan", lambda b, most: tried_all(b, most, peak_from_the_end), "begins with the last block"),
    ("activation-plan", lambda b, most: tried_all(b, most, peak_walked, cost=peak_walked), "smallest peak of all"),
    ("activation-plan", lambda b, most: tried_all(b, most, peak_walked, CHOICES[:2]), "never offload"),
    ("activation-plan", lambda b, most: tried_all(b, most, peak_walked, CHOICES[::2]), "never recompute"),
    ("activation-plan", one_choice_for_all, "the same choice"),
    ("activation-plan", best_bytes_per_second, "most bytes per second"),
    ("activation-plan", plan_or_an_error, "raised ValueError"),
    ("activation-plan", even_where_none_fits, "no plan fits: return None"),
    ("activation-plan", lambda b, most: ["keep"] * len(b), "your plan does not fit: its peak is"),
    ("activation-plan", lambda b, most: ["offload"] * len(b), "another that fits adds"),
    ("activation-plan", lambda b, most: ["keep"], "your plan has 1 choices"),
    ("activation-plan", lambda b, most: [0] * len(b), "A choice for each block is expected"),
    ("activation-plan", forgot_return, "your function returns None, but there is a plan"),
)


@pytest.mark.parametrize(("exercise_id", "answer"), RIGHT)
def test_a_right_answer_is_praised(exercise_id: str, answer: Answer) -> None:
    verdict = judge(EXERCISES[exercise_id], answer)
    assert (verdict.state, verdict.message) == ("right", str(EXERCISES[exercise_id].praise))


@pytest.mark.parametrize(("exercise_id", "answer", "said"), WRONG)
def test_a_wrong_answer_is_told_what_is_wrong(exercise_id: str, answer: Answer, said: str) -> None:
    verdict = judge(EXERCISES[exercise_id], answer)
    assert verdict.state == "wrong"
    assert said in verdict.message


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_every_exercise_has_its_wrong_answers(exercise_id: str) -> None:
    assert sum(wrong[0] == exercise_id for wrong in WRONG) >= 3


def test_wrong_answers_are_refused_in_french_too() -> None:
    for exercise_id, answer, _ in WRONG[::5]:
        use_language("en")
        english_message = judge(EXERCISES[exercise_id], answer).message
        use_language("fr")
        verdict = judge(EXERCISES[exercise_id], answer)
        assert verdict.state == "wrong"
        assert verdict.message != english_message


def test_the_exercise_finds_what_the_integer_programme_finds() -> None:
    tables = block_tables(RunConfig.of(model="coatnet_tiny", micro_batch=8))
    blocks = block_costs(tables)
    kept, least = (tables.peak_bytes([choice] * len(blocks))[0] for choice in (0, 2))
    budget = int((kept + least) / 2)
    found, theirs = cheapest_plan(blocks, budget), cheapest(tables, budget)
    assert found is not None and theirs is not None
    assert plan_peak_bytes(blocks, found) <= budget
    assert tables.costs([CHOICES.index(one) for one in found])[0] <= 1.01 * tables.costs(theirs)[0]
