"""The bank of wrong answers of lab 02: each is refused for what is wrong with it; the references pass.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""
# ruff: noqa: PLC3002 - an answer that takes one more name fits on its line

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial, reduce
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # here, once: the first checkpoint in a child would import it, for seconds
from scipy.optimize import LinearConstraint, milp
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlojz.config.run_config import RunConfig
from dlojz.labs import lab02_memory
from dlojz.labs.kit.exercise import Challenge, judge
from dlojz.labs.lab02_memory.exercises import (
    FEWEST_OPERATIONS,
    bytes_per_parameter,
    challenge_peak_mib,
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
from tests.labs.bank import Answer, BankTests

EXERCISES = {one.id: one for one in lab02_memory.EXERCISES if not isinstance(one, Challenge)}


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


def rule_of_twenty(precision: str, optimizer: str) -> int:
    return from_a_table(precision, optimizer) + (2 if precision == "bf16_fp32_gradients" else 0)


def maxima_added(samples: Any) -> int:
    names = {name for sample in samples for name in sample}
    return sum(max(sample.get(name, 0) for sample in samples) for name in names)


def batch_by_trying(taken: Answer, limit: int) -> int:
    batch = 0
    while taken(batch + 1) <= limit:
        batch += 1
    return batch


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


def in_segments(run: Answer) -> Answer:
    """Each segment is run by `run(segment, what the one before gives, the input of the model)`."""

    def answer(blocks: Any, x: Any, per_segment: int) -> Any:
        y = x
        for start in range(0, len(blocks), per_segment):
            y = run(nn.Sequential(*blocks[start : start + per_segment]), y, x)
        return y

    return answer


def parameters_by_type(model: Any, host: Any) -> Any:
    def pack(tensor: Any) -> Any:
        return tensor if isinstance(tensor, nn.Parameter) else host.store(tensor)

    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else host.fetch(packed)


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


def batch_by_fractions(taken: Answer, limit: int) -> int:
    near, far = taken(8), taken(32)
    slope = Fraction(far - near, 24)
    return max(0, math.floor((limit - near) / slope) + 8)


def batch_by_polyfit(taken: Answer, limit: int) -> int:
    slope, fixed = np.polyfit([8, 16, 32], [taken(8), taken(16), taken(32)], 1)
    return max(0, int((limit - fixed) / slope + 1e-6))


def batch_along_the_line(taken: Answer, limit: int) -> int:
    near, far = taken(16), taken(24)
    batch, held = 0, near - 2 * (far - near)
    while held + (far - near) / 8 <= limit:
        batch, held = batch + 1, held + (far - near) / 8
    return batch


def batch_by_numpy(taken: Answer, limit: int) -> Any:
    fixed, slope = np.linalg.solve([[1, 10], [1, 20]], [taken(10), taken(20)])
    return np.clip(np.floor((limit - fixed) / slope + 1e-9), 0, None)


def segments_partial(blocks: Any, x: Any, per_segment: int) -> Any:
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
    return reduce(run_of(run), [blocks[i : i + per_segment] for i in range(0, len(blocks), per_segment)], x)


def run_of(run: Answer) -> Answer:
    return lambda x, segment: run(nn.Sequential(*segment), x)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any, run: Any, *parameters: Any) -> Any:
        context.run, context.seed, context.parameters = run, torch.get_rng_state(), parameters
        context.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        (x,) = context.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(context.seed)
            y = context.run(x)
        found = torch.autograd.grad(y, (x, *context.parameters), gradient)
        return found[0], None, *found[1:]


def segments_by_hand(blocks: Any, x: Any, per_segment: int) -> Any:
    for start in range(0, len(blocks), per_segment):
        segment = nn.Sequential(*blocks[start : start + per_segment])
        x = ByHand.apply(x, segment, *segment.parameters())
    return x


def address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()


def hooks_of_the_state(model: Any, host: Any) -> list[Any]:
    weights = set(map(address, model.state_dict().values()))
    return [
        lambda t: t if address(t) in weights else host.store(t),
        lambda p: p if torch.is_tensor(p) else host.fetch(p),
    ]


class Hooks:
    def __init__(self, model: Any, host: Any) -> None:
        self.host, self.weights = host, frozenset(address(parameter) for parameter in model.parameters())

    def pack(self, tensor: Any) -> Any:
        return tensor if address(tensor) in self.weights else self.host.store(tensor)

    def unpack(self, packed: Any) -> Any:
        return packed if isinstance(packed, torch.Tensor) else self.host.fetch(packed)


def hooks_of_an_object(model: Any, host: Any) -> Any:
    hooks = Hooks(model, host)
    return hooks.pack, hooks.unpack


def hooks_by_base(model: Any, host: Any) -> Any:
    known = {id(parameter) for parameter in model.parameters()}

    def pack(tensor: Any) -> Any:
        return tensor if id(tensor) in known or id(tensor._base) in known else host.store(tensor)

    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else host.fetch(packed)


def peak_accumulated(blocks: Any, plan: Any) -> Any:
    before = [0, *accumulate(block.held_bytes[choice] for block, choice in zip(blocks, plan, strict=True))]
    return max(held + block.backward_bytes[choice] for held, block, choice in zip(before, blocks, plan, strict=False))


def plan_by_loop(blocks: Any, budget: float) -> Any:
    best, least = None, math.inf
    for plan in product(("offload", "recompute", "keep"), repeat=len(blocks)):
        if peak_accumulated(blocks, plan) <= budget and seconds_of(blocks, plan) < least:
            best, least = list(plan), seconds_of(blocks, plan)
    return best


def plan_of_an_array(blocks: Any, budget: float) -> Any:
    plan = plan_by_loop(blocks, budget)
    return plan if plan is None else np.array(plan)


BANK: dict[str, list[tuple[Answer, str]]] = {
    "bytes-per-parameter": [
        (no_master, "master copy is missing"),
        (half_moments, "moments in the precision of the weights"),
        (lambda precision, optimizer: TABLE[precision] + (0 if optimizer == "sgd" else 4), "two moments per parameter"),
        (lambda precision, optimizer: TABLE[precision] + 8, "SGD keeps nothing"),
        (rule_of_twenty, "rule of 20 bytes"),
        (lambda precision, optimizer: 16, "Your function returns 16 in every case"),
        (forgot_return, "end it with return"),
        (lambda p, o: 8 * from_a_table(p, o), "In every case your result is 8 times too large"),
        (lambda p, o: from_a_table(p, o) - 2 * p.startswith("bf16"), "Your master copy takes 2 bytes"),
        (lambda p, o: from_a_table(p, o) + 4 * (p == "autocast"), "You count a master copy under autocast"),
        (lambda p, o: {"fp32": 8, "bf16": 8, "bf16_fp32_gradients": 10}[p] + MOMENTS[o], "'autocast'"),
        (lambda p, o: TABLE[p] + {"sgd": 4, "momentum": 8, "adamw": 8}[o], "One moment too many for SGD and for SGD"),
        (lambda p, o: (4 if p in ("fp32", "autocast") else 6) + MOMENTS[o], "The gradients are missing"),
        (lambda p, o: TABLE[p], "The moments of the optimizer are missing"),
        (
            lambda precision, optimizer: from_a_table(precision, optimizer) - 2 * (precision == "autocast"),
            "weights of 2 bytes",
        ),
        (
            lambda precision, optimizer: from_a_table(precision, optimizer) - 2 * (precision == "bf16_fp32_gradients"),
            "gradients of 2 bytes",
        ),
        (
            lambda precision, optimizer: from_a_table(precision, optimizer) + 4 * (optimizer == "sgd"),
            "without momentum",
        ),
    ],
    "peak": [
        (maxima_added, "do not occur at the same moment"),
        (lambda samples: max(value for sample in samples for value in sample.values()), "single category"),
        (lambda samples: sum(samples[-1].values()), "end of the step"),
        (lambda samples: sum(map(sum, (sample.values() for sample in samples))), "add the moments up"),
        (lambda samples: max(samples, key=lambda sample: sum(sample.values())), "but a number is expected"),
        (lambda samples: max(sum(sample[name] for name in samples[0]) for sample in samples), "You add the categories"),
        (lambda samples: sum(sum(s.values()) for s in samples) / len(samples), "That is the mean over the step"),
        (lambda samples: int(np.argmax([sum(s.values()) for s in samples])), "That is the moment of the peak, its"),
        (lambda samples: sum(samples[0].values()), "That is the beginning of the step"),
        (lambda samples: max(sum(s.values()) for s in samples[:-1]), "You leave out the last moment"),
        (lambda samples: max(sum(s.values()) for s in samples[1:]), "You leave out the first moment"),
        (lambda samples: max(sum(s.values()) for s in samples) / 2**20, "In every case your result is 1,048,576 times"),
        (lambda samples: [sum(s.values()) for s in samples], "Your function returns a list, but a number is expected"),
    ],
    "block-activations": [
        (lambda s, b, h, a: 34 * s * b * h, "scores are missing"),
        (lambda s, b, h, a: 34 * s * b * h + 2 * a * s * s * b, "result of the softmax alone"),
        (lambda s, b, h, a: 36 * s * b * h + 6 * a * s * s * b, "1 byte per element, not 2"),
        (lambda s, b, h, a: 32 * s * b * h + 4 * a * s * s * b, "dropout masks are missing"),
        (lambda s, b, h, a: 30 * s * b * h + 5 * a * s * s * b, "layer norms are missing"),
        (lambda s, b, h, a: 26 * s * b * h + 5 * a * s * s * b, "two tensors of width 4 h"),
        (lambda s, b, h, a: s * b * h * (17 + 2.5 * a * s / h), "takes 2 bytes"),
        (lambda s, b, h, a: s * b * (34 * h + 5 * s), "has its own scores"),
        (lambda s, b, h, a: 34 * s * b * h + 5 * s * s * b * h, "The scores do not have width h"),
        (lambda s, b, h, a: 34 * s * b * h + 5 * a * s * b, "The scores are a square"),
        (lambda s, b, h, a: 34 * s * h + 5 * a * s * s, "should be"),
        (lambda s, b, h, a: 5 * a * s * s * b, "The terms of width h are missing"),
        (lambda s, b, h, a: 33 * s * b * h + 5 * a * s * s * b, "One of the two dropout masks of width h is missing"),
        (lambda s, b, h, a: 34 * s * b * h + 4 * a * s * s * b, "The mask of the dropout on the scores is missing"),
    ],
    "largest-batch": [
        (lambda taken, limit: int(limit / taken(1)), "there once, whatever the batch"),
        (lambda taken, limit: int(limit // ((taken(16) - taken(8)) / 8)), "forget the fixed part"),
        (batch_rounded_up, "round up"),
        (batch_negative, "negative batch"),
        (batch_from_one_and_two, "Ask for 8 and 16"),
        (batch_by_trying, "Two points are enough"),
        (lambda taken, limit: largest_batch(taken, limit - 1), "Where a batch takes exactly limit_bytes, it fits (≤,"),
        (lambda taken, limit: largest_batch(taken, limit) - 1, "In every case your result is too small by 1: look at"),
        (lambda taken, limit: max(1, largest_batch(taken, limit)), "not even one sample fits, your function still"),
        (lambda taken, limit: limit // taken(8) * 8, "is expected, but your function returns"),
        (lambda taken, limit: largest_batch(taken, limit) + 1, "In every case your result is too large by 1: look at"),
        (lambda taken, limit: (limit - taken(8)) / ((taken(16) - taken(8)) / 8), "taken_bytes(8) is not the fixed"),
        (
            lambda taken, limit: max(0, (limit - (taken(8) - (taken(16) - taken(8)))) / ((taken(16) - taken(8)) / 8)),
            "A batch is a whole number of samples",
        ),
        (lambda taken, limit: 24, "Your function returns 24 in every case of this check"),
        (
            lambda taken, limit: round(max(0, (limit - (2 * taken(8) - taken(16))) / ((taken(16) - taken(8)) / 8))),
            "You round to the nearest",
        ),
    ],
    "data-parallel-bytes": [
        (lambda p, a, n, d: ((20 if d > 1 else 16) * p + a * n) // d, "what ZeRO-3 does"),
        (lambda p, a, n, d: (16 * p + a * n) // d, "what ZeRO-3 does"),
        (lambda p, a, n, d: 16 * p + a * (n // d), "buckets are missing"),
        (lambda p, a, n, d: 20 * p + a * (n // d), "on a single GPU too"),
        (lambda p, a, n, d: 16 * p + 4 * p * (d > 1) + a * n, "whole global batch"),
        (lambda p, a, n, d: 16 * p + 4 * p * (d > 1) + a, "one single image"),
        (lambda p, a, n, d: 16 * p + 4 * p * d + a * n // d, "You count one copy of the gradients per replica"),
        (lambda p, a, n, d: 12 * p + 4 * p * (d > 1) + a * n // d, "A state is missing"),
        (lambda p, a, n, d: 16 * p + 4 * p * (d > 2) + a * n // d, "The buckets are there from dp = 2 on (dp > 1, not"),
        (lambda p, a, n, d: 16 * p + 2 * p * (d > 1) + a * n // d, "The buckets are in fp32, as the gradients are"),
        (lambda p, a, n, d: d * (16 * p + 4 * p * (d > 1)) + a * n, "should be"),
        (lambda p, a, n, d: 16 * p + 4 * p * (d > 1), "The activations are missing"),
        (lambda p, a, n, d: 4 * p + 4 * p * (d > 1) + a * n // d, "You count the weights alone"),
    ],
    "checkpoint": [
        (plain_loop, "6 of the 6 hidden activations are still in memory"),
        (last_segment_plain, "2 of the 6 hidden activations are still in memory"),
        (each_block, "the outputs of 6 blocks are in memory; with 6 blocks"),
        (whole_model, "your segments are too long"),
        (nested, "runs 3 times"),
        (last_segment_lost, "these never run: 6"),
        (in_segments(lambda segment, y, x: checkpoint(segment, x, use_reentrant=False)), "must begin with what the"),
        (in_segments(lambda segment, y, x: checkpoint(segment, y, use_reentrant=True)), "use_reentrant=False"),
        (
            in_segments(lambda segment, y, x: checkpoint(segment, y.detach(), use_reentrant=False)),
            "a detach cuts all that comes before it",
        ),
        (
            in_segments(lambda s, y, x: checkpoint(s, y, use_reentrant=False, preserve_rng_state=False)),
            "same mask twice",
        ),
        (forgot_return, "end it with return"),
        (lambda blocks, x, per: checkpointed(blocks, x, max(1, len(blocks) // per)), "After forward, the outputs of 2"),
        (lambda blocks, x, per: checkpointed(blocks[:per], x, per), "2 per segment, these never run"),
        (lambda blocks, x, per: checkpointed(blocks[::-1], x, per), "The output is not that of the blocks run one"),
        (lambda blocks, x, per: checkpointed(blocks, x, 2), "After forward, the outputs of 4 blocks are in memory"),
    ],
    "offload": [
        (lambda model, host: (host.store, host.fetch), "bytes of weights"),
        (parameters_by_type, "bytes of weights"),
        (lambda model, host: ((lambda tensor: tensor), (lambda tensor: tensor)), "nothing has gone to the host"),
        (kept_beside, "never fetched"),
        (flattened, "exactly the tensor that pack was given"),
        (only_large, "all that is saved but the weights"),
        (lambda model, host: offload_hooks(model, host)[0], "Two functions are expected"),
        (forgot_return, "return pack, unpack"),
        (lambda model, host: tuple(reversed(offload_hooks(model, host))), "unpack gives back an object of type int,"),
        (
            lambda model, host: (
                lambda t: host.store(t) if address(t) in {address(p) for p in model.parameters()} else t,
                lambda p: p if torch.is_tensor(p) else host.fetch(p),
            ),
            "It is the other way round",
        ),
        (
            lambda model, host: (
                lambda t: t if t.requires_grad else host.store(t),
                lambda p: p if torch.is_tensor(p) else host.fetch(p),
            ),
            "640 bytes have gone to the host, 7,296 are expected",
        ),
        (
            lambda model, host: (
                lambda t: t if t.shape in {p.shape for p in model.parameters()} else host.store(t),
                lambda p: p if torch.is_tensor(p) else host.fetch(p),
            ),
            "Your hooks also move 768 bytes of weights, which stay",
        ),
    ],
    "exposed-seconds": [
        (lambda moved, link, forward: 2 * moved / link, "only what is longer"),
        (lambda moved, link, forward: max(0, moved / link - forward), "That is the way out"),
        (lambda moved, link, forward: max(0, 2 * moved / link - 3 * forward), "spare time"),
        (lambda moved, link, forward: 2 * max(0, moved / link - forward), "twice as long"),
        (lambda moved, link, forward: 2 * moved / link - 3 * forward, "max(0, …)"),
        (lambda m, w, f: max(0, m * w - f) + max(0, m * w - 2 * f), "You multiply bytes by bytes per second"),
        (lambda m, w, f: max(0, m / w - 2 * f), "That is the way back"),
        (lambda m, w, f: max(0, m / w - f) + max(0, m / w - f / 2), "Backward takes twice as long as forward, not"),
        (lambda m, w, f: max(0, m / 2 / w - f) + max(0, m / 2 / w - 2 * f), "You send half of the bytes each way"),
        (lambda m, w, f: m / w, "That is the time of one way"),
        (lambda m, w, f: max(m / w, f) + max(m / w, 2 * f), "That is the time of both passes with their transfers"),
        (lambda m, w, f: abs(m / w - f) + abs(m / w - 2 * f), "Where the transfer is shorter than the computation,"),
    ],
    "activation-plan": [
        (lambda b, most: tried_all(b, most, held_by), "takes its backward_bytes besides"),
        (lambda b, most: tried_all(b, most, all_held_and_the_fullest), "have given theirs back"),
        (lambda b, most: tried_all(b, most, peak_with_own), "count a block twice"),
        (lambda b, most: tried_all(b, most, peak_from_the_end), "begins with the last block"),
        (lambda b, most: tried_all(b, most, peak_walked, cost=peak_walked), "smallest peak of all"),
        (lambda b, most: tried_all(b, most, peak_walked, CHOICES[:2]), "never offload"),
        (lambda b, most: tried_all(b, most, peak_walked, CHOICES[::2]), "never recompute"),
        (one_choice_for_all, "the same choice"),
        (best_bytes_per_second, "most bytes per second"),
        (plan_or_an_error, "raised ValueError"),
        (even_where_none_fits, "no plan fits: return None"),
        (lambda b, most: ["keep"] * len(b), "your plan does not fit: its peak is"),
        (lambda b, most: ["offload"] * len(b), "another that fits adds"),
        (lambda b, most: ["keep"], "your plan has 1 choices"),
        (lambda b, most: [0] * len(b), "A choice for each block is expected"),
        (forgot_return, "your function returns None, but there is a plan"),
        (lambda b, most: tried_all(b, most - 1, peak_walked), "A plan whose peak is exactly budget_bytes fits"),
        (lambda b, most: tried_all(b, most, peak_walked) or [], "There are 4 blocks, but your plan has 0 choices"),
        (
            lambda b, most: seconds_of(b, tried_all(b, most, peak_walked) or ["keep"] * len(b)),
            'A choice for each block is expected, "keep",',
        ),
        (
            lambda b, most: max(
                (p for p in product(CHOICES, repeat=len(b)) if peak_walked(b, p) <= most),
                key=lambda p: seconds_of(b, p),
                default=None,
            ),
            "Of the plans that fit you take the one that adds most",
        ),
        (
            lambda b, most: next((p for p in product(CHOICES, repeat=len(b)) if peak_walked(b, p) <= most), None),
            "You take the first plan that fits",
        ),
        (lambda b, most: (lambda p: p and p[::-1])(tried_all(b, most, peak_walked)), "Your plan is in reverse order"),
        (
            lambda b, most: tried_all(
                b, most, lambda bs, plan: max(one.backward_bytes[c] for one, c in zip(bs, plan, strict=True))
            ),
            "You hold each backward pass by itself against the budget",
        ),
    ],
}

REFERENCES: dict[str, Answer] = {
    "bytes-per-parameter": bytes_per_parameter,
    "peak": peak_bytes,
    "block-activations": transformer_layer_bytes,
    "largest-batch": largest_batch,
    "data-parallel-bytes": data_parallel_bytes,
    "checkpoint": checkpointed,
    "offload": offload_hooks,
    "exposed-seconds": exposed_seconds,
    "activation-plan": cheapest_plan,
}
OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("block-activations", lambda s, b, h, a: s * b * h * (34 + 5 * a * s / h)),
    ("bytes-per-parameter", lambda p, o: np.add(10 if p[-1] == "s" else 8, 4 * ["sgd", "momentum", "adamw"].index(o))),
    (
        "bytes-per-parameter",
        lambda p, o: 4.0 * (2 + (p == "bf16_fp32_gradients") / 2) + {"sgd": 0, "momentum": 4}.get(o, 8),
    ),
    ("peak", lambda samples: np.max([np.sum(list(sample.values())) for sample in samples])),
    ("peak", lambda samples: torch.tensor([sum(sample.values()) for sample in samples]).max()),
    ("block-activations", lambda s, b, h, a: np.dot([34, 5], [s * b * h, a * s**2 * b])),
    ("largest-batch", batch_by_fractions),
    ("largest-batch", batch_by_polyfit),
    ("largest-batch", batch_along_the_line),
    ("largest-batch", batch_by_numpy),
    ("data-parallel-bytes", lambda p, a, n, d: (20 if d >= 2 else 16) * p + a * n / d),
    ("data-parallel-bytes", lambda p, a, n, d: np.array([16 + 4 * (d != 1), n / d]) @ np.array([p, a])),
    ("checkpoint", segments_partial),
    ("checkpoint", segments_by_hand),
    ("offload", hooks_of_the_state),
    ("offload", hooks_of_an_object),
    ("offload", hooks_by_base),
    ("exposed-seconds", lambda moved, link, forward: sum(max(0, moved / link - n * forward) for n in (1, 2))),
    ("exposed-seconds", lambda moved, link, forward: np.maximum(0, moved / link - np.array([1, 2]) * forward).sum()),
    ("exposed-seconds", lambda m, w, f: torch.relu(m / w - torch.tensor([f, 2 * f], dtype=torch.float64)).sum()),
    ("exposed-seconds", lambda m, w, f: max(m / w, f) - f + max(m / w, 2 * f) - 2 * f),
    ("activation-plan", plan_by_loop),
    ("activation-plan", plan_of_an_array),
]


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab02_memory.PREDICTIONS
    wrong, right, others = BANK, REFERENCES, OTHER_RIGHT_ANSWERS


def test_cheapest_plan_finds_what_the_integer_programme_finds() -> None:
    tables = block_tables(RunConfig.of(model="coatnet_tiny", micro_batch=8))
    blocks = block_costs(tables)
    kept, least = (tables.peak_bytes([choice] * len(blocks))[0] for choice in (0, 2))
    budget = int((kept + least) / 2)
    found, theirs = cheapest_plan(blocks, budget), cheapest(tables, budget)
    assert found is not None and theirs is not None
    assert plan_peak_bytes(blocks, found) <= budget
    assert tables.costs([CHOICES.index(one) for one in found])[0] <= 1.01 * tables.costs(theirs)[0]


def plan_greedily(layers: Sequence[Any], limit_mib: int) -> set[int]:
    chosen: set[int] = set()
    gains = [(layer.kept_mib - layer.input_mib) / layer.gflop for layer in layers]
    for index in sorted(range(len(layers)), key=gains.__getitem__, reverse=True):
        if challenge_peak_mib(layers, chosen) <= limit_mib:
            break
        chosen.add(index)
    return chosen


def plan_by_programme(layers: Sequence[Any], limit_mib: int) -> list[int]:
    before = np.tril(np.ones((len(layers), len(layers))), -1)
    saved = np.array([layer.kept_mib - layer.input_mib for layer in layers])
    kept = np.array([layer.kept_mib for layer in layers])
    held = before @ kept + kept
    found = milp(
        [layer.gflop for layer in layers],
        constraints=LinearConstraint(before * saved, held - limit_mib, np.inf),
        integrality=1,
        bounds=(0, 1),
    )
    return [int(index) for index in np.flatnonzero(found.x > 0.5)]


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (plan_by_programme, "right", "Target reached: 100"),
        (lambda layers, limit: np.array(plan_by_programme(layers, limit)), "right", "Target reached: 100"),
        (plan_greedily, "note", "A valid answer: 110"),
        (lambda layers, limit: range(len(layers)), "note", "A valid answer: 269.6%"),
        (lambda layers, limit: [], "wrong", "The plan does not fit"),
        (lambda layers, limit: None, "wrong", "numbers of the layers"),
        (lambda layers, limit: [3, *plan_by_programme(layers, limit), 3], "wrong", "named once at most"),
        (lambda layers, limit: [1 + each for each in range(len(layers))], "wrong", "named once at most"),
    ],
)
def test_the_challenge_weighs_operations_within_the_limit(answer: Any, state: str, words: str) -> None:
    verdict = judge(FEWEST_OPERATIONS, answer)
    assert (verdict.state, words in verdict.message) == (state, True), verdict.message
