"""What a step of a script is: one step of its optimizer, in whatever form, and under whatever loop."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import dlojz
from dlojz.results.footprint import NO_GRAD
from dlojz.results.record import RunRecord
from dlojz.running.run import Run
from tests.libraries.forked_scripts import run_on_forks

MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
def loss_of(model, scale=1):
    loss = model(torch.randn(8, 16)).square().mean() / scale
    print("loss", loss.item(), flush=True)
    return loss
"""
WEIGHTS = 16 * 32 + 32 + 32 * 4 + 4
"""Parameters of that model."""


def run_steps(folder: Path, text: str, **options: Any) -> Run:
    """Run a script that goes on from the model above."""
    path = folder / "written.py"
    path.write_text(MODEL + textwrap.dedent(text), encoding="utf-8")
    return run_on_forks(path, root=folder / "runs", **options)


def printed(run: Run, rank: int = 0) -> list[float]:
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", run.logs(rank), flags=re.MULTILINE)]


def measured(run: Run) -> RunRecord:
    assert run.record is not None
    assert run.record.status == "completed", run.logs()
    return run.record


def samples_of_step(record: RunRecord) -> float:
    first = record.footprints[0]
    assert first.samples_per_s is not None and first.phases.step_s is not None
    return first.samples_per_s * first.phases.step_s


def test_step_ledger_records_updates_within_backward(tmp_path: Path) -> None:
    """More optimizers than `MOST_UPDATES`, one of them stepped after backward, one never."""
    run = run_steps(
        tmp_path,
        """
        body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(10)))
        of = {one: torch.optim.SGD([one], lr=0.01) for one in body.parameters()}
        def update(parameter):
            of[parameter].step()
            of[parameter].zero_grad()
        for one in body.parameters():
            one.register_post_accumulate_grad_hook(update)
        last = torch.optim.SGD(model.parameters(), lr=0.01)
        unused = torch.optim.SGD([*body.parameters(), *model.parameters()], lr=0.01)
        for _ in range(6):
            loss_of(nn.Sequential(body, model)).backward()
            last.step()
            last.zero_grad()
    """,
    )
    record = measured(run)
    assert record.losses == pytest.approx(printed(run)) and len(record.losses) == 6
    first = record.footprints[0]
    assert first.memory.gradients_bytes == 4 * WEIGHTS  # those of the others are gone as soon as they are used
    assert first.memory.weights_bytes == 4 * (WEIGHTS + 10 * (16 * 16 + 16))


@pytest.mark.nightly
def test_step_ledger_records_one_backward_as_a_step_where_all_updates_are_within_it(tmp_path: Path) -> None:
    run = run_steps(
        tmp_path,
        """
        of = {one: torch.optim.SGD([one], lr=0.01) for one in model.parameters()}
        def update(parameter):
            of[parameter].step()
            of[parameter].zero_grad()
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(update)
        for _ in range(6):
            loss_of(model).backward()
    """,
    )
    assert measured(run).losses == pytest.approx(printed(run)) and len(printed(run)) == 6
    assert measured(run).footprints[0].memory.gradients_bytes == 0


def test_a_closure_that_is_evaluated_again_is_one_step(tmp_path: Path) -> None:
    run = run_steps(
        tmp_path,
        """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(8, 16)).square().mean()
            loss.backward()
            return loss
        for _ in range(5):
            print("loss", optimizer.step(closure).item(), flush=True)
    """,
    )
    record = measured(run)
    assert record.losses == pytest.approx(printed(run)) and len(record.losses) == 5
    assert record.footprints[0].parameters == WEIGHTS
    assert record.step_samples == (8,) * 5  # each evaluation sees the same ones
    # The direction, the last gradient, and a direction and a step of each of the (at most 14) iterations before.
    vectors, left = divmod(record.footprints[0].memory.optimizer_bytes or 0, 4 * WEIGHTS)
    assert vectors >= 2 + 2 * 3 and left < 200


@pytest.mark.nightly
def test_step_ledger_records_a_closure_that_computes_the_last_micro_batch_alone(tmp_path: Path) -> None:
    """So Lightning accumulates: all micro-batches but the last go through backward before the optimizer steps."""
    run = run_steps(
        tmp_path,
        """
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        def closure():
            loss = model(torch.randn(8, 16)).square().mean()
            losses.append(loss.item())
            (loss / 3).clone().backward()
            return loss
        for _ in range(6):
            optimizer.zero_grad()
            closure()
            closure()
            optimizer.step(closure)
            print("loss", sum(losses[-3:]) / 3, flush=True)
    """,
    )
    record = measured(run)
    assert record.losses == pytest.approx(printed(run)) and len(record.losses) == 6
    assert samples_of_step(record) == pytest.approx(24)


@pytest.mark.nightly
def test_step_ledger_records_what_is_compiled_and_it_stays_compiled(tmp_path: Path) -> None:
    run = run_steps(
        tmp_path,
        """
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        model.compile(backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters())
        @torch.compile(backend="eager")
        def update():
            optimizer.step()
        for number in range(7):
            loss_of(compiled if number % 2 else model).backward()
            update()
            optimizer.zero_grad()
        from torch._dynamo.utils import counters
        print("graphs", counters["stats"]["unique_graphs"], counters["graph_break"], flush=True)
    """,
    )
    record = measured(run)
    assert record.losses == pytest.approx(printed(run)) and len(record.losses) == 7
    assert record.environment["wrapped_in"] == "Sequential"
    assert samples_of_step(record) == pytest.approx(8)
    assert record.footprints[0].phases.forward_s
    graphs, breaks = re.findall(r"graphs (\d+) (.*)", run.logs(0))[0]
    assert int(graphs) >= 2 and "forward" not in breaks


def test_step_ledger_records_accumulation_with_a_scaler_and_a_replaced_optimizer(tmp_path: Path) -> None:
    run = run_steps(
        tmp_path,
        """
        replaced = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(6):
            for _ in range(3):
                scaler.scale(loss_of(model, scale=3)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """,
    )
    record = measured(run)
    assert len(record.losses) == 6
    assert sum(record.losses) == pytest.approx(sum(printed(run)))  # each is a third of its micro-batch's
    assert samples_of_step(record) == pytest.approx(24)


def test_step_ledger_records_tensor_parallel_over_all_ranks(tmp_path: Path) -> None:
    run = run_steps(
        tmp_path,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.distributed.destroy_process_group()
    """,
        processes=2,
    )
    record = measured(run)
    assert {(one.collective, one.group) for one in record.footprints[0].communication} == {("all_reduce", "tp")}
    assert samples_of_step(record) == pytest.approx(8)  # both ranks read the same


@pytest.mark.parametrize(
    ("evaluated", "begins"),
    [(2048, 5), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((2048, 0), (4, 0)))],
)
def test_a_peak_in_an_evaluation_is_said_to_lie_there(tmp_path: Path, evaluated: int, begins: int) -> None:
    """The hidden layer alone takes 4 B × 32 features per sample that is evaluated."""
    run = run_steps(
        tmp_path,
        f"""
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(8):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if number >= {begins}:  # from 5 on its step is traced because of it alone
                with torch.no_grad():
                    model(torch.randn({evaluated}, 16))
    """,
    )
    (row,) = dlojz.compare(run).rows
    memory, prediction = measured(run).footprints[0].memory, measured(run).script_prediction
    assert prediction is not None and prediction.footprint is not None
    in_evaluation = evaluated == 2048
    assert (memory.peak_moment == NO_GRAD) is in_evaluation
    assert any("without gradients" in note for note in row.script_notes) is in_evaluation
    excess_bytes = (memory.peak_bytes or 0) - (prediction.footprint.memory.peak_bytes or 0)
    assert excess_bytes > 4 * 32 * evaluated if in_evaluation else abs(excess_bytes) < 1024
