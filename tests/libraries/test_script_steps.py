"""What a step of a script is: one step of its optimizer, in whatever form, and under whatever loop."""

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import dlojz
from dlojz.results.footprint import NO_GRAD
from dlojz.results.record import RunRecord
from dlojz.running.run import Run

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
    return dlojz.run(path, device="cpu", root=folder / "runs", progress=False, **options)


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


@pytest.mark.nightly
def test_step_ledger_records_deepspeed(tmp_path: Path) -> None:
    run = run_steps(
        tmp_path,
        """
        import deepspeed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference alone, and takes 40 s to compile
        settings = {
            "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000},
        }
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        for _ in range(10):
            engine.backward(loss_of(engine))
            engine.step()
    """,
        processes=2,
    )
    record = measured(run)
    assert len(record.losses) == 5
    assert samples_of_step(record) == pytest.approx(32)
    assert record.footprints[0].parameters == WEIGHTS
    assert record.footprints[0].memory.weights_bytes == 2 * WEIGHTS  # a half of it


@pytest.mark.nightly
def test_step_ledger_records_a_pipeline(tmp_path: Path) -> None:
    run = run_steps(
        tmp_path,
        """
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = nn.Linear(16, 16)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            if rank == 0:
                schedule.step(torch.randn(16, 16))
            else:
                losses = []
                schedule.step(target=torch.zeros(16, 16), losses=losses)
                print("loss", torch.stack(losses).mean().item(), flush=True)
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
    """,
        processes=2,
    )
    record = measured(run)
    assert record.losses == pytest.approx(printed(run, rank=1)) and len(record.losses) == 5
    assert [footprint.traffic("send", "pp") for footprint in record.footprints] == [4 * 16 * 16] * 2
    for footprint in record.footprints:
        assert footprint.samples_per_s == pytest.approx(16 / (footprint.phases.step_s or 0))
    assert sum(span.phase == "forward" for span in record.spans if (span.rank, span.step) == (0, 3)) == 4


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


OPERATORS = """
        from dlojz.models.foreign.vision_packages import ensure_torchvision_imports
        ensure_torchvision_imports()
"""
"""Beginning of a script whose library imports torchvision, where torchvision is of another build than torch."""


def requires(name: str, statement: str) -> None:
    """Skip where a library is not installed, or does not work here."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{statement}: {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.nightly
def test_step_ledger_records_accelerate(tmp_path: Path) -> None:
    requires("accelerate", "from accelerate import Accelerator")
    run = run_steps(
        tmp_path,
        """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(10):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.end_training()
    """,
        processes=2,
    )
    assert len(measured(run).losses) == 5
    assert sum(run.record.losses) == pytest.approx((sum(printed(run)) + sum(printed(run, 1))) / 4)
    assert samples_of_step(run.record) == pytest.approx(32)


@pytest.mark.nightly
def test_step_ledger_records_the_trainer_of_transformers(tmp_path: Path) -> None:
    requires("transformers", f"{textwrap.dedent(OPERATORS)}from transformers import Trainer")
    run = run_steps(
        tmp_path,
        OPERATORS
        + """
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8))
        samples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(32, (256, 8))]
        arguments = TrainingArguments(
            output_dir=__file__ + ".out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6,
            report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        )
        Trainer(model=model, args=arguments, train_dataset=samples).train()
    """,
        processes=2,
    )
    assert len(measured(run).losses) == 6
    assert samples_of_step(run.record) == pytest.approx(16)  # its inputs are keyword arguments


@pytest.mark.nightly
def test_step_ledger_records_lightning(tmp_path: Path) -> None:
    requires("lightning", f"{textwrap.dedent(OPERATORS)}import lightning")
    run = run_steps(
        tmp_path,
        OPERATORS
        + """
        import lightning
        class Trained(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.network = model
            def training_step(self, batch, number):
                return loss_of(self.network)
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, accumulate_grad_batches=2, max_steps=6, logger=False,
            enable_checkpointing=False, enable_progress_bar=False,
        )
        trainer.fit(Trained(), torch.utils.data.DataLoader(torch.randn(256, 16), batch_size=8))
    """,
        processes=2,
    )
    assert len(measured(run).losses) == 6
    assert run.record.environment["wrapped_in"] == "DistributedDataParallel"


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
