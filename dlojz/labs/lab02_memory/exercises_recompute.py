"""Exercises of lab 02 that trade time for memory: checkpointing, offloading, and both under a budget.

A checkpointed answer is held to the outputs and gradients of the plain loop, and to what is still in memory after
forward: every block knows its own activations and counts how often it runs. Offloading hooks are entered around a real
forward pass, and what they send to the host and fetch back is counted. A plan is held to its peak, and to the seconds
of the best of all plans.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), §4; Jain et al. 2020,
"Checkmate" (arXiv 1910.02653), §4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import inf
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import format_bytes, format_seconds, integer, say, shortest
from dlojz.base.table import Table, titles
from dlojz.config.fields import BLOCK_CHOICES
from dlojz.labs.kit.exercise import Said, kind_of, or_to_do
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import reader, refuse_nothing
from dlojz.planner.activation_budget import BlockTables, BudgetPlan, planned
from dlojz.prediction.forecast import forecast

TEXTS = Texts(__file__)


_CHECKPOINT_SAMPLES, _CHECKPOINT_WIDTH = 4, 6
_CASES = ((6, 2), (7, 3), (5, 1), (8, 4))  # blocks, blocks per segment
_TOLERANCE = 1e-5


@dataclass
class _Trial:
    """What a forward pass leaves in memory, and what backward gives."""

    output: Tensor
    gradients: list[Tensor | None]
    hidden_alive: int
    outputs_alive: int
    runs: list[int]


def _probed_blocks(count: int, seed: int) -> tuple[list[nn.Module], list[Any], list[Any], list[int]]:
    """Blocks that note their hidden activations and outputs, without keeping them alive, and how often they run."""
    hidden: list[Any] = []
    outputs: list[Any] = []
    runs = [0] * count

    class Probed(nn.Module):
        """A small MLP with dropout, added to its input."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.expand, self.shrink = (
                nn.Linear(_CHECKPOINT_WIDTH, 2 * _CHECKPOINT_WIDTH),
                nn.Linear(2 * _CHECKPOINT_WIDTH, _CHECKPOINT_WIDTH),
            )
            self.dropout = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            runs[self.number] += 1
            inner = torch.tanh(self.expand(x))
            output: Tensor = x + self.dropout(self.shrink(inner))
            # A weak reference does not keep the storage; it tells later whether autograd does.
            hidden.append(weakref.ref(inner.untyped_storage()))
            outputs.append(weakref.ref(output.untyped_storage()))
            return output

    torch.manual_seed(seed)
    return [Probed(number) for number in range(count)], hidden, outputs, runs


def _tried(answer: Callable[..., Any], count: int, per_segment: int) -> _Trial:
    blocks, hidden, outputs, runs = _probed_blocks(count, seed=count)
    x = torch.randn(_CHECKPOINT_SAMPLES, _CHECKPOINT_WIDTH, generator=torch.Generator().manual_seed(count))
    torch.manual_seed(100 + count)  # dropout's
    output = answer(blocks, x, per_segment)
    refuse_nothing(output)
    if not isinstance(output, torch.Tensor):
        raise TEXTS.wrong("checkpoint", "no tensor is returned", kind=kind_of(output))
    # Counted between the two passes: only what autograd keeps for backward is alive here.
    hidden_alive = sum(reference() is not None for reference in hidden)
    outputs_alive = sum(reference() is not None for reference in outputs)
    result = output.detach().clone()
    if output.requires_grad:
        output.square().sum().backward()
    gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
    return _Trial(result, gradients, hidden_alive, outputs_alive, runs)


def _plain(blocks: Sequence[nn.Module], x: Tensor, per_segment: int) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _check_checkpointed(answer: Callable[..., Any], count: int, per_segment: int) -> None:
    trial, right = _tried(answer, count, per_segment), _tried(_plain, count, per_segment)
    for refuse in (_judge_output, _judge_gradients, _judge_memory, _judge_runs):
        refuse(trial, right, count, per_segment)


def _judge_output(trial: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    if trial.output.shape != right.output.shape or not trial.output.allclose(right.output, atol=_TOLERANCE):
        unrun = [str(number) for number, runs in enumerate(trial.runs) if not runs]
        if unrun:
            raise TEXTS.wrong(
                "checkpoint", "some blocks never run", count=count, per_segment=per_segment, unrun=", ".join(unrun)
            )
        raise TEXTS.wrong("checkpoint", "the output differs")


def _judge_gradients(trial: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    missing = [gradient is None for gradient in trial.gradients]
    if all(missing):
        raise TEXTS.wrong("checkpoint", "no parameter gets a gradient")
    if any(missing):
        raise TEXTS.wrong("checkpoint", "some parameters get no gradient")
    for gradient, right_gradient in zip(trial.gradients, right.gradients, strict=True):
        assert gradient is not None and right_gradient is not None
        if not gradient.allclose(right_gradient, atol=_TOLERANCE):
            raise TEXTS.wrong("checkpoint", "other gradients")


def _judge_memory(trial: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    # Rounded up: the last segment may be shorter. Of each, the input alone is kept.
    segments = -(-count // per_segment)
    if trial.hidden_alive:
        raise TEXTS.wrong(
            "checkpoint", "hidden activations are still in memory", hidden_alive=trial.hidden_alive, count=count
        )
    if trial.outputs_alive > segments:
        raise TEXTS.wrong(
            "checkpoint",
            "outputs of too many blocks in memory",
            outputs_alive=trial.outputs_alive,
            count=count,
            per_segment=per_segment,
            segments=segments,
        )
    if trial.outputs_alive < segments:
        raise TEXTS.wrong("checkpoint", "segments too long", outputs_alive=trial.outputs_alive, segments=segments)


def _judge_runs(trial: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    max_runs = max(trial.runs)
    if max_runs > 2:
        raise TEXTS.wrong("checkpoint", "a block runs more than twice", max_runs=max_runs)


CHECKPOINT = TEXTS.exercise("checkpoint", cases=_CASES, trial=_check_checkpointed)


_OFFLOAD_SAMPLES, _OFFLOAD_WIDTH = 16, 8  # as many samples as hidden units: activations have the shape of a weight too


class Host:
    """Host memory, as the lab has it: tensors are stored under a number, and fetched by it.

    `stored_bytes` counts what has been stored, `fetches` how often something was fetched.
    """

    def __init__(self) -> None:
        self.stored_bytes = 0
        self.fetches = 0
        self._kept: dict[int, Tensor] = {}

    def store(self, tensor: Tensor) -> int:
        """Copy a tensor to the host, whole; its number."""
        self.stored_bytes += tensor.nbytes
        self._kept[len(self._kept)] = tensor.detach().clone()
        return len(self._kept) - 1

    def fetch(self, number: int) -> Tensor:
        """A copy of the tensor stored under this number, back on the device."""
        if not isinstance(number, int):
            raise TEXTS.wrong("offload", "fetch of something that is no number", kind=type(number).__name__)
        if number not in self._kept:
            raise TEXTS.wrong("offload", "fetch of an unknown number", number=number)
        self.fetches += 1
        return self._kept[number].clone()


Hooks = tuple["Callable[[Tensor], Any]", "Callable[[Any], Tensor]"]


def offload_hooks(model: nn.Module, host: Host) -> Hooks:
    """The pair (pack, unpack) that moves what autograd saves to the host, the model's own parameters excepted.

    Source: torch `autograd.graph.saved_tensors_hooks`; Rajbhandari et al. 2021, ZeRO-Infinity (arXiv 2104.07857),
    §5.1.2. The package's own version is `dlojz.by_hand.activation_offload`.
    """
    # By storage, not by tensor: autograd also saves views of a weight, which begin at the storage's address or later.
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else host.store(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else host.fetch(packed)

    return pack, unpack


def _model() -> nn.Module:
    class Parts(nn.Module):
        """Three layers in one weight, which autograd meets as views that begin at different places."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3 * _OFFLOAD_WIDTH, _OFFLOAD_WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (F.linear(x, part) for part in self.weight.chunk(3))
            return q * k.sigmoid() + v

    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(_OFFLOAD_WIDTH, 2 * _OFFLOAD_WIDTH),
        nn.GELU(),
        nn.LayerNorm(2 * _OFFLOAD_WIDTH),
        nn.Linear(2 * _OFFLOAD_WIDTH, _OFFLOAD_WIDTH),
        nn.Tanh(),
        Parts(),
    )


def _step(hooks_of: Callable[..., Any] | None) -> tuple[WatchedHost, list[Tensor]]:
    """One forward and backward pass under an answer's hooks, or without any: the host, and the gradients."""
    model = _model()
    host = WatchedHost(model)
    x = torch.randn(_OFFLOAD_SAMPLES, _OFFLOAD_WIDTH, generator=torch.Generator().manual_seed(7))
    if hooks_of is None:
        model(x).square().sum().backward()
    else:
        pack, unpack = _as_hooks(hooks_of(model, host))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: _unpacked(unpack(packed))):
            output = model(x)
        output.square().sum().backward()
    return host, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _unpacked(tensor: Any) -> Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TEXTS.wrong("offload", "unpack gives no tensor", kind=type(tensor).__name__)
    return tensor


def _pair(value: Any) -> Hooks:
    pack, unpack = value
    if not (callable(pack) and callable(unpack)):
        raise TypeError
    return pack, unpack


_as_hooks = reader(_pair, TEXTS.sentence("offload", "two functions"), names="pack, unpack")


class WatchedHost(Host):
    """A host that knows which of the tensors that it stores are of a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weight_bytes = 0
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def store(self, tensor: Tensor) -> int:
        """Store it, and count it where it is a weight."""
        self.weight_bytes += tensor.nbytes * (tensor.untyped_storage().data_ptr() in self._weights)
        return super().store(tensor)


def _judge_hooks(answer: Callable[..., Any]) -> None:
    _, right = _step(None)
    expected, _ = _step(offload_hooks)
    host, gradients = _step(answer)
    if len(gradients) != len(right) or not all(a.allclose(b) for a, b in zip(gradients, right, strict=True)):
        raise TEXTS.wrong("offload", "gradients differ under the hooks")
    if not host.stored_bytes:
        raise TEXTS.wrong("offload", "nothing has gone to the host")
    if not host.fetches:
        raise TEXTS.wrong("offload", "tensors are stored, but never fetched")
    if host.stored_bytes == host.weight_bytes:
        raise TEXTS.wrong("offload", "it is the other way round")
    if host.weight_bytes:
        weights = integer(host.weight_bytes)
        raise TEXTS.wrong("offload", "weights are moved, too", weights=weights)
    if host.stored_bytes != expected.stored_bytes:
        stored, due = integer(host.stored_bytes), integer(expected.stored_bytes)
        raise TEXTS.wrong("offload", "other bytes have gone to the host", stored=stored, due=due)


OFFLOAD = TEXTS.exercise("offload", cases=((),), trial=_judge_hooks)


def exposed_seconds(moved_bytes: float, link_bytes_per_s: float, forward_s: float) -> float:
    """Seconds that offloading adds to a step: what does not hide behind the forward, then the backward pass.

    The bytes leave during forward and come back during backward, which takes twice as long.

    Source: ZeRO-Infinity (arXiv 2104.07857), §5.1.2, for the overlap; Korthikanti et al. 2022 (arXiv 2205.05198),
    appendix A, for the factor 2.
    """
    # The same bytes go out behind forward and back behind backward; each pass hides its own transfer only.
    one_way_s = moved_bytes / link_bytes_per_s
    return max(0.0, one_way_s - forward_s) + max(0.0, one_way_s - 2 * forward_s)


EXPOSED_SECONDS = TEXTS.exercise(
    "exposed-seconds",
    exposed_seconds,
    cases=((25e9, 25e9, 0.4), (25e9, 25e9, 0.7), (5e9, 25e9, 0.5), (64e9, 16e9, 0.1), (12e9, 50e9, 0.2)),
    mistakes={
        "all the time that the bytes travel": lambda volume, link, forward: 2 * volume / link,
        "the whole time of one way": lambda volume, link, forward: volume / link,
        "the way back only": lambda volume, link, forward: max(0.0, volume / link - 2 * forward),
        "you send half of the bytes each way": lambda volume, link, forward: exposed_seconds(volume / 2, link, forward),
        "the way out only": lambda volume, link, forward: max(0.0, volume / link - forward),
        "backward as long as forward": lambda volume, link, forward: 2 * max(0.0, volume / link - forward),
    },
)


class BlockCosts(NamedTuple):
    """What each choice for a block's activations takes, by its word (`BLOCK_CHOICES`).

    Attributes:
        held_bytes: from the block's forward to its backward.
        backward_bytes: during its backward, besides what the blocks before it hold.
        seconds: that a step takes more.
    """

    held_bytes: Mapping[str, float]
    backward_bytes: Mapping[str, float]
    seconds: Mapping[str, float]


Choices = Sequence[str]


def block_costs(tables: BlockTables) -> list[BlockCosts]:
    """Bytes of the backward pass, and seconds, of every choice for every block of a run."""
    columns = zip(tables.held[1], tables.own[1], tables.seconds, strict=False)  # own: the loss too, after the blocks
    return [
        BlockCosts(*(dict(zip(BLOCK_CHOICES, costs.tolist(), strict=True)) for costs in block)) for block in columns
    ]


def plan_peak_bytes(blocks: Sequence[BlockCosts], plan: Choices) -> float:
    """Most bytes of the backward pass: of a block, with what the blocks before it hold.

    Source: Jain et al. 2020, "Checkmate" (arXiv 1910.02653), §4.3, with one moment per block.
    """
    # before[i]: bytes that blocks 0 … i - 1 hold when block i runs its backward pass; the last sum is left out below.
    before = accumulate((block.held_bytes[choice] for block, choice in zip(blocks, plan, strict=True)), initial=0.0)
    return max(
        before_bytes + block.backward_bytes[choice]
        for before_bytes, block, choice in zip(before, blocks, plan, strict=False)
    )


def _seconds(blocks: Sequence[BlockCosts], plan: Choices) -> float:
    return sum(block.seconds[choice] for block, choice in zip(blocks, plan, strict=True))


def _held(blocks: Sequence[BlockCosts], plan: Choices) -> float:
    return sum(block.held_bytes[choice] for block, choice in zip(blocks, plan, strict=True))


def cheapest_plan(blocks: Sequence[BlockCosts], budget_bytes: float) -> Choices | None:
    """The plan of fewest seconds whose peak is within a budget; None where no plan fits."""
    # 3^n plans: the cases have 6 blocks at most, so that trying all takes no time.
    plans = product(BLOCK_CHOICES, repeat=len(blocks))
    able = [plan for plan in plans if plan_peak_bytes(blocks, plan) <= budget_bytes]
    return min(able, key=lambda plan: _seconds(blocks, plan), default=None)


def _turned_round(blocks: Sequence[BlockCosts], budget_bytes: float) -> Choices | None:
    plan = cheapest_plan(blocks, budget_bytes)
    return plan and plan[::-1]


def _greedy(blocks: Sequence[BlockCosts], budget_bytes: float) -> Choices | None:
    """Change what frees most bytes per second, until the plan fits."""
    plan = [BLOCK_CHOICES[0]] * len(blocks)
    while plan_peak_bytes(blocks, plan) > budget_bytes:
        offers = [
            # Bytes freed per second added, at the block's own choice; where the peak lies is left out.
            ((block.held_bytes["keep"] - block.held_bytes[choice]) / block.seconds[choice], index, choice)
            for index, block in enumerate(blocks)
            for choice in BLOCK_CHOICES[1:]
            if plan[index] == "keep"
        ]
        if not offers:
            return None
        _, index, choice = max(offers)
        plan[index] = choice
    return plan


def _words(answer: Any) -> list[str]:
    words = list(answer)
    if isinstance(answer, str) or not all(isinstance(word, str) and word in BLOCK_CHOICES for word in words):
        raise TypeError
    return words


_as_plan = reader(_words, TEXTS.sentence("activation-plan", "a choice for each block"))


def _weighed(answer: Callable[..., Any], blocks: Sequence[BlockCosts], budget_bytes: float) -> tuple[float, float]:
    """Bytes above the budget, and seconds: what a plan is judged by. No plan takes for ever."""
    choices = answer(blocks, budget_bytes)
    if choices is None:
        return 0.0, inf
    plan = _as_plan(choices)
    if len(plan) != len(blocks):
        raise TEXTS.wrong("activation-plan", "a plan of another length", blocks_count=len(blocks), plan_count=len(plan))
    return max(0.0, plan_peak_bytes(blocks, plan) - budget_bytes), _seconds(blocks, plan)


def _made(seed: int, count: int) -> list[BlockCosts]:
    """Blocks in which recomputation keeps the input and the offloaded activations come back one by one."""
    draw = Random(seed)
    blocks = []
    for _ in range(count):
        activation_bytes, extra = draw.randint(10, 60), draw.randint(5, 25)
        input_bytes = draw.randint(1, max(1, activation_bytes // 6))
        # Bytes held between the passes, bytes during backward, seconds added: each for keep, recompute, offload.
        figures = (
            (activation_bytes, input_bytes, 0),
            (activation_bytes + extra, activation_bytes + extra, max(input_bytes, (activation_bytes + extra) * 2 // 3)),
            (0, draw.randint(3, 20), draw.randint(3, 20)),
        )
        blocks.append(BlockCosts(*(dict(zip(BLOCK_CHOICES, costs, strict=True)) for costs in figures)))
    return blocks


def _budgets() -> Iterator[tuple[list[BlockCosts], float]]:
    for seed, count, share in ((1, 4, 0.6), (2, 5, 0.5), (3, 6, 0.45), (4, 5, 0.7), (5, 4, 2.0)):
        blocks = _made(seed, count)
        yield blocks, int(share * plan_peak_bytes(blocks, ["keep"] * count))
    yield blocks, 5  # less than any backward pass takes
    blocks = _made(6, 4)
    for budget in (plan_peak_bytes(blocks, ["keep"] * 4), plan_peak_bytes(blocks, ["offload"] * 4)):
        yield blocks, budget  # full to the last byte


def _amiss(case: Any, outcome: tuple[float, float], right: tuple[float, float]) -> Said:
    blocks, budget = case
    (excess, seconds), (_, best) = outcome, right
    where = TEXTS.sentence("activation-plan", "blocks and budget", block_count=len(blocks), budget=budget)
    if seconds == inf:
        return TEXTS.sentence("activation-plan", "None where a plan fits", where=where, best=shortest(best))
    if excess:
        if best == inf:
            return TEXTS.sentence("activation-plan", "no plan fits", where=where)
        return TEXTS.sentence("activation-plan", "the plan does not fit", where=where, peak=integer(budget + excess))
    return TEXTS.sentence(
        "activation-plan", "the plan is not the fastest", where=where, seconds=shortest(seconds), best=shortest(best)
    )


ACTIVATION_PLAN = TEXTS.exercise(
    "activation-plan",
    cheapest_plan,
    cases=_budgets,
    trial=_weighed,
    tolerance=0.01,
    differs=_amiss,
    source=(cheapest_plan, plan_peak_bytes),
    mistakes={
        "your plan is in reverse order": _turned_round,
        "greedy choice of most bytes per second": _greedy,
    },
)


@or_to_do
def plans_table(choose: Callable[..., Any], plan: BudgetPlan) -> Table:
    """Tabulate the plan that the student's function chooses under a budget, and the package's, with their forecasts."""
    chosen_plan = choose(block_costs(plan.tables), plan.budget_bytes)
    rows = []
    for name, choices in (
        (
            say(en="yours", fr="vous"),
            None if chosen_plan is None else [BLOCK_CHOICES.index(choice) for choice in chosen_plan],
        ),
        (say(en="the package", fr="le paquet"), plan.choices),
    ):
        if choices is None:
            rows.append((name, "—", "—", "—"))
            continue
        run = planned(plan.config, choices)
        peak = forecast(run).memory.peak_bytes or 0
        seconds = plan.tables.costs(choices)[0]
        rows.append((name, run.layout.activation_plan, format_bytes(peak), format_seconds(seconds)))
    head = titles(en="; plan; predicted peak; added to a step", fr="; plan; pic prédit; ajouté à un pas")
    return Table(head, tuple(rows), align="llrr")
