"""The teaching runtimes on real ranks: the gradients of one process, and the documented updates."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.models.blocks import BlockList
from dlojz.pipeline.orders.asynchronous import version_audit
from dlojz.pipeline.runtime import AsynchronousRuntime, PipelineRuntime, boundaries_of, stage_modules
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.schedule_catalogue import build
from dlojz.processes.forks import spmd

WIDTH, BLOCKS, SAMPLES = 6, 16, 3
SYNCHRONOUS = (
    ("naive", {}),
    ("gpipe", {}),
    ("1f1b", {}),
    ("eager-1f1b", {}),
    ("interleaved", {"chunks": 2}),
    ("looped-bfs", {"chunks": 2}),
    ("chimera", {}),
    ("zb-h1", {}),
    ("zb-h2", {}),
    ("zb-1p", {}),
    ("zb-2p", {}),
    ("interleaved-zb", {"chunks": 2}),
    ("zb-v", {}),
    ("dualpipe", {}),
    ("dualpipe-v", {}),
    ("hanayo", {"waves": 1}),
)


def make_model() -> BlockList:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)]
    return BlockList(blocks).double()


def make_batches(micro_batches: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def drawn() -> Tensor:
        return torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)

    return [drawn() for _ in range(micro_batches)], [drawn() for _ in range(micro_batches)]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def even_bounds(stages: int) -> list[int]:
    return [BLOCKS * stage // stages for stage in range(stages + 1)]


def modules_of(schedule: Schedule, stages: Sequence[BlockList], rank: int) -> dict[tuple[int, int], BlockList]:
    return {
        (pipe, stage): stages[stage]
        for pipe, ranks in enumerate(schedule.placement)
        for stage, holder in enumerate(ranks)
        if holder == rank
    }


def gradients_and_losses(schedule: Schedule, rank: int) -> tuple[dict[str, Tensor], list[float]]:
    model = make_model()
    inputs, targets = make_batches(schedule.micro_batches)
    bounds = even_bounds(schedule.stages)
    stages = stage_modules(model, bounds)
    modules = modules_of(schedule, stages, rank)
    executed: list[str] = []

    def perform(action: object, compute: Callable[[], None]) -> None:
        executed.append(str(action))
        compute()

    runtime = PipelineRuntime(schedule, modules, boundaries_of(stages, inputs[0]), loss_of, perform=perform)
    losses = runtime.step(inputs, targets)
    wanted = [str(element) for action in schedule.orders[rank] for element in action.elements]
    assert executed == wanted, "what is executed is the schedule's list"
    # A model is one set of parameters here: the two copies of a bidirectional rank add up by themselves.
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, [loss.item() for loss in losses]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_synchronous_schedule_gives_the_gradients_of_one_process(ranks: int) -> None:
    micro_batches = 2 * ranks
    schedules = [build(name, ranks, micro_batches, **options) for name, options in SYNCHRONOUS]  # type: ignore[arg-type]

    def work(rank: int, size: int) -> tuple[list[list[float]], dict[str, Tensor]]:
        torch.set_num_threads(1)
        gradients: dict[str, Tensor] = {}
        losses = []
        for schedule in schedules:
            found, told = gradients_and_losses(schedule, rank)
            losses.append(told)
            gradients |= {f"{schedule.name}/{name}": gradient for name, gradient in found.items()}
        return losses, gradients

    answers = spmd(work, ranks, wall_s=120, limit_s=60)
    model = make_model()
    inputs, targets = make_batches(micro_batches)
    expected = [loss_of(model(x), y) for x, y in zip(inputs, targets, strict=True)]
    torch.stack(expected).mean().backward()
    for number, schedule in enumerate(schedules):
        told = [loss for answer in answers for loss in answer.value[number]]
        assert sorted(told) == pytest.approx(sorted(loss.item() for loss in expected), abs=1e-12), schedule.name
        for name, parameter in model.named_parameters():
            parts = [a.tensors[f"{schedule.name}/{name}"] for a in answers if f"{schedule.name}/{name}" in a.tensors]
            assert parts, (schedule.name, name)
            assert parameter.grad is not None
            # float64, and a sum of a few micro-batches in another order: some units of the last place.
            torch.testing.assert_close(sum(parts), parameter.grad, rtol=0, atol=1e-12, msg=f"{schedule.name} {name}")


@pytest.mark.parametrize("name", ["terapipe", "bpipe", "pipedream", "pipemare"])
def test_pipeline_runtime_refuses_what_is_not_executed(name: str) -> None:
    with pytest.raises(LabError, match="simulated"):
        PipelineRuntime(build(name, 4, 8), {}, [], loss_of)


def serial_asynchronous(schedule: Schedule, rate: float) -> list[list[dict[str, Tensor]]]:
    """The documented rule in one process: micro-batch k is passed through the versions that the audit counts, and each
    stage's update takes the gradients with respect to those. Returns all versions of all stages."""
    stages = stage_modules(make_model(), even_bounds(schedule.stages))
    inputs, targets = make_batches(schedule.micro_batches)
    audit = version_audit(schedule)
    forward_version = {
        (a.stage, a.micro_batch): v for a, v in zip(schedule.actions, audit.versions, strict=True) if a.kind == "F"
    }
    versions = [[{n: p.detach().clone() for n, p in stage.named_parameters()}] for stage in stages]
    sums: list[dict[int, list[dict[str, Tensor]]]] = [{} for _ in stages]
    for micro_batch in range(schedule.micro_batches):
        used = []
        x = inputs[micro_batch]
        for number, stage in enumerate(stages):
            weights = versions[number][forward_version[number, micro_batch] or 0]
            leaf = {n: w.clone().requires_grad_() for n, w in weights.items()}
            used.append(leaf)
            x = torch.func.functional_call(stage, leaf, (x,))
        loss_of(x, targets[micro_batch]).backward()
        for number, leaf in enumerate(used):
            update = audit.update_of[number][micro_batch]
            if update is None:
                continue
            gathered = sums[number].setdefault(update, [])
            gathered.append({n: w.grad for n, w in leaf.items() if w.grad is not None})
            of_update = sum(row == update for row in audit.update_of[number])
            if len(gathered) == of_update:
                newest = versions[number][-1]
                mean = {n: torch.stack([g[n] for g in gathered]).sum(0) / of_update for n in newest}
                versions[number].append({n: newest[n] - rate * mean[n] for n in newest})
    return versions


@pytest.mark.parametrize(("name", "ranks"), [("pipedream", 2), ("pipedream-2bw", 2), ("pipedream", 4)])
def test_asynchronous_weights_follow_the_documented_rule(name: str, ranks: int) -> None:
    schedule, rate = build(name, ranks, 3 * ranks), 0.1

    def work(rank: int, size: int) -> tuple[list[int], dict[str, Tensor]]:
        torch.set_num_threads(1)
        stages = stage_modules(make_model(), even_bounds(ranks))
        inputs, targets = make_batches(schedule.micro_batches)
        boundaries = boundaries_of(stages, inputs[0])
        runtime = AsynchronousRuntime(schedule, {(0, rank): stages[rank]}, boundaries, loss_of, learning_rate=rate)
        runtime.step(inputs, targets)
        return [runtime.versions_kept], {n: p.detach().clone() for n, p in stages[rank].named_parameters()}

    answers = spmd(work, ranks, wall_s=60, limit_s=30)
    versions = serial_asynchronous(schedule, rate)
    initial = stage_modules(make_model(), even_bounds(ranks))
    audit = version_audit(schedule)
    for rank, answer in enumerate(answers):
        assert answer.value == [audit.versions_kept[rank]]
        for key, weight in versions[rank][-1].items():
            torch.testing.assert_close(answer.tensors[key], weight, rtol=0, atol=1e-12)
            assert not torch.equal(answer.tensors[key], dict(initial[rank].named_parameters())[key])


def test_pipedream_with_stashing_is_the_papers_update() -> None:
    """w_i(t+1) = w_i(t) − ν ∂f/∂w_i (w_1(t−n+1), w_2(t−n+2), …, w_n(t)): by hand, two stages, after the fill."""
    schedule = build("pipedream", 2, 6)
    versions = serial_asynchronous(schedule, 0.1)
    stages = stage_modules(make_model(), even_bounds(2))
    inputs, targets = make_batches(6)
    for t in range(1, 6):
        first = {n: w.clone().requires_grad_() for n, w in versions[0][t - 1].items()}
        second = {n: w.clone().requires_grad_() for n, w in versions[1][t].items()}
        middle = torch.func.functional_call(stages[0], first, (copy.deepcopy(inputs[t]),))
        loss_of(torch.func.functional_call(stages[1], second, (middle,)), targets[t]).backward()
        for number, (used, newest) in enumerate(((first, versions[0][t]), (second, versions[1][t]))):
            for name, weight in used.items():
                assert weight.grad is not None
                torch.testing.assert_close(
                    versions[number][t + 1][name], newest[name] - 0.1 * weight.grad, rtol=0, atol=1e-14
                )
