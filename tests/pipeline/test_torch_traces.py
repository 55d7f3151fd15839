"""Real traces of torch.profiler: DDP with a late rank, and torch's own pipeline schedules, on gloo processes."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from dlojz.cli.main import main
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.traced_pipeline import TracedPipeline, aligned_pipelines, message_waits
from dlojz.processes.forks import spmd
from dlojz.results.profiler_trace import trace_files
from dlojz.results.rank_activities import AlignedRanks, activities_of, shares_of, stragglers_of

RANKS, MICRO_BATCHES, WIDTH, SAMPLES, STEPS = 2, 4, 256, 64, 2
LATE_S = 0.2
NAMES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v")


def stages_of(name: str) -> list[list[int]]:
    """The stages that each rank holds."""
    placement = build(name, RANKS, MICRO_BATCHES).placement[0]
    return [[stage for stage, rank in enumerate(placement) if rank == one] for one in range(RANKS)]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def profiled_steps(name: str, rank: int, path: Path) -> None:
    """Train some steps with torch's schedule, and trace all but the first."""
    held = stages_of(name)
    count = sum(map(len, held))
    torch.manual_seed(0)
    stages = [
        PipelineStage(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), stage, count, torch.device("cpu"))
        for stage in held[rank]
    ]
    made = getattr(schedules, str(SCHEDULES[name].torch_class))
    single = issubclass(made, schedules.PipelineScheduleSingle)
    schedule: Any = made(stages[0] if single else stages, MICRO_BATCHES, loss_fn=loss_of)
    inputs, targets = torch.randn(MICRO_BATCHES * SAMPLES, WIDTH), torch.randn(MICRO_BATCHES * SAMPLES, WIDTH)

    def step() -> None:
        more = {"target": targets, "losses": []} if count - 1 in held[rank] else {}
        schedule.step(*((inputs,) if 0 in held[rank] else ()), **more)

    step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        for _ in range(STEPS):
            step()
    traced.export_chrome_trace(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of all schedules, one folder each, and of DDP."""
    root = tmp_path_factory.mktemp("traces")
    for name in (*NAMES, "ddp"):
        (root / name).mkdir()

    def work(rank: int, size: int) -> None:
        torch.set_num_threads(1)
        for name in NAMES:
            profiled_steps(name, rank, root / name / f"rank{rank}.json.gz")
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        batch = torch.randn(SAMPLES, WIDTH)
        with profile(activities=[ProfilerActivity.CPU]) as traced:
            for _ in range(4):
                if rank == 1:
                    time.sleep(LATE_S)
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        traced.export_chrome_trace(str(root / "ddp" / f"trace_{rank}.json"))

    assert [answer.error for answer in spmd(work, RANKS, wall_s=170, limit_s=120)] == [None] * RANKS
    return root


def read(folder: Path) -> tuple[AlignedRanks, tuple[TracedPipeline, ...]]:
    return aligned_pipelines([activities_of(one) for one in trace_files([folder])])


@pytest.mark.parametrize("name", NAMES)
def test_the_schedules_of_torch_are_recognised(name: str, folder: Path) -> None:
    _, pipelines = read(folder / name)
    (found,) = pipelines
    assert name in found.match.names, (found.match, found.overlay.measured.schedule.orders)
    assert found.steps == STEPS and found.ranks == (0, 1)
    measured = found.overlay.measured
    graph = measured.schedule.graph
    for producer, consumer in graph.edges():
        assert measured.ends[consumer] > measured.starts[producer], "what is needed was made"
    assert all(one.waited_s > 0 for one in message_waits(found))


def test_the_late_rank_of_ddp_is_named(folder: Path) -> None:
    together, pipelines = read(folder / "ddp")
    assert pipelines == ()
    worst = stragglers_of(together)[0]
    assert worst.rank == 1 and worst.waited_s > 2 * LATE_S
    first, second = shares_of(together)
    assert first.waited_s > 2 * LATE_S > second.waited_s and first.exposed_s > first.waited_s * 0.99
    assert all(len(one.optimizing) for one in together.ranks)


def test_main_trace_tells_the_straggler_and_the_schedule(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(folder / "ddp"), "--png", str(tmp_path / "ddp.png")]) == 0
    assert "Straggler: rank 1" in capsys.readouterr().out
    assert main(["trace", str(folder / "interleaved"), "--png", str(tmp_path / "pp.png")]) == 0
    assert "Schedule: interleaved 1F1B" in capsys.readouterr().out
