"""What belongs to a step of a script: optimizers that were fed, samples that were trained, losses as printed."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

import dlojz
from dlojz.cli.runs import _with_arguments
from dlojz.compare import _of_script, _script_notes
from dlojz.libraries.step_ledger import (
    GradientFeed,
    StepAccounts,
    TracingPlan,
    _tensors_held,
    loss_of,
    reads_sequences_first,
    samples_and_tokens,
)
from dlojz.results.record import RunRecord, memory_growth
from dlojz.running.run import Run

WEIGHTS = 16 * 32 + 32 + 32 * 4 + 4
"""Parameters of the model below; its step on n samples has 3 · 2 · n · (16 · 32 + 32 · 4) products less those of the
first layer's input gradient, 2 · n · 16 · 32."""
MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
def net(): return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
model = net()
"""


def flops_of_step(samples: int) -> int:
    return 3 * 2 * samples * (16 * 32 + 32 * 4) - 2 * samples * 16 * 32


def run_text(folder: Path, text: str, processes: int = 1) -> Run:
    path = folder / "written.py"
    path.write_text(MODEL + textwrap.dedent(text), encoding="utf-8")
    return dlojz.run(path, device="cpu", root=folder / "runs", progress=False, processes=processes)


def completed(run: Run) -> RunRecord:
    assert run.record is not None and run.record.status == "completed", run.logs()
    return run.record


def printed(run: Run, name: str, rank: int = 0) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name} (\S+)$", run.logs(rank), flags=re.MULTILINE)]


# ---- steps


def test_models_one_after_another_have_their_own_steps_and_are_released(tmp_path: Path) -> None:
    run = run_text(
        tmp_path,
        """
        import gc, weakref
        models = []
        for fold in (1, 2, 3):
            model = nn.Linear(16, 100 * fold)
            models.append(weakref.ref(model))
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(4):
                loss = model(torch.randn(8, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print("loss", loss.item())
        del loss
        gc.collect()
        print("alive", sum(model() is not None for model in models))
    """,
    )
    record = completed(run)
    assert record.losses == pytest.approx(printed(run, "loss")) and len(record.losses) == 12
    assert record.steps_of == {"optimizer": 4, "optimizer (2)": 4, "optimizer (3)": 4}
    assert printed(run, "alive") == [1]
    weights_bytes = 4 * (16 * 300 + 300)
    measured, predicted = record.footprints[0].memory, record.script_prediction
    assert measured.weights_bytes == measured.gradients_bytes == weights_bytes
    assert predicted is not None and predicted.footprint is not None
    assert predicted.footprint.memory.weights_bytes == weights_bytes  # of the largest, as what is measured


def test_an_update_without_a_gradient_is_no_step_and_one_with_gradients_set_by_hand_is(tmp_path: Path) -> None:
    record = completed(
        run_text(
            tmp_path,
            """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.step()
        for _ in range(5):
            gradients = torch.autograd.grad(model(torch.randn(8, 16)).square().mean(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
    """,
        )
    )
    assert len(record.step_s) == 5


def test_an_optimizer_that_steps_less_often_makes_no_step_of_its_own(tmp_path: Path) -> None:
    """Its gradients add up over three iterations, each of which has ended when it steps: 15 iterations, 15 steps."""
    run = run_text(
        tmp_path,
        """
        head = nn.Linear(4, 2)
        often, seldom = torch.optim.Adam(head.parameters()), torch.optim.Adam(model.parameters())
        for iteration in range(15):
            loss = head(model(torch.randn(8, 16))).square().mean()
            loss.backward()
            often.step()
            often.zero_grad()
            if iteration % 3 == 2:
                seldom.step()
                seldom.zero_grad()
            print("loss", loss.item())
    """,
    )
    record = completed(run)
    assert len(record.step_s) == 15 and record.losses == pytest.approx(printed(run, "loss"))
    assert record.steps_of == {"often": 15, "seldom": 5} and set(record.step_samples) == {8}
    assert record.footprints[0].step_flops == flops_of_step(8) + 3 * 2 * 8 * 4 * 2


FSDP1 = "model = FSDP(model, device_id=torch.device('cpu'))"


@pytest.mark.parametrize("sharded", ["fully_shard(model)", pytest.param(FSDP1, marks=pytest.mark.nightly)])
def test_micro_batches_that_do_not_synchronise_are_of_the_step(tmp_path: Path, sharded: str) -> None:
    """FSDP2 adds up their gradients in tensors of its own: no parameter has one until the last micro-batch."""
    run = run_text(
        tmp_path,
        f"""
        import contextlib
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
        dist.init_process_group("gloo")
        {sharded}
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(6):
            losses = []
            for micro in range(3):
                alone = contextlib.nullcontext()
                if isinstance(model, FSDP):
                    alone = alone if micro == 2 else model.no_sync()
                else:
                    model.set_requires_gradient_sync(micro == 2)
                with alone:
                    loss = model(torch.randn(8, 16)).square().mean() / 3
                    loss.backward()
                losses.append(3 * loss.item())
            optimizer.step()
            optimizer.zero_grad()
            print("loss", sum(losses) / 3)
        dist.destroy_process_group()
    """,
        processes=2,
    )
    record = completed(run)
    means = [sum(pair) / 2 for pair in zip(printed(run, "loss"), printed(run, "loss", 1), strict=True)]
    assert record.losses == pytest.approx(means) and set(record.step_samples) == {2 * 3 * 8}
    assert record.footprints[0].step_flops == 3 * flops_of_step(8)
    predicted, measured = record.script_prediction, record.footprints[0]
    assert predicted is not None
    if predicted.footprint is None:
        assert "FSDP2 accumulates whole gradients" in predicted.note
    else:  # one message of gradients for three micro-batches, which keep them whole
        assert predicted.footprint.communication == measured.communication
        assert predicted.footprint.memory.gradients_bytes == measured.memory.gradients_bytes == 4 * WEIGHTS * 3 / 2


# ---- samples, losses, the largest step


def test_samples_are_those_of_most_steps_and_only_what_is_trained_counts(tmp_path: Path) -> None:
    """A last batch of one, an evaluation with gradients between steps: neither is the batch of a step."""
    record = completed(
        run_text(
            tmp_path,
            """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(torch.randn(500, 16)).mean().backward()  # a look before, whose gradients are thrown away
        optimizer.zero_grad()
        for number in (8,) * 8 + (1,):
            model(torch.randn(number, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(torch.randn(64, 16))
    """,
        )
    )
    assert record.step_samples == (8,) * 8 + (1,)
    first = record.footprints[0]
    assert first.samples_per_s == pytest.approx(8 / (first.phases.step_s or 0))
    assert first.step_flops == flops_of_step(8)
    assert first.memory.peak_bytes is not None and first.memory.peak_bytes > 64 * 32 * 4  # the evaluation's


@pytest.mark.parametrize(
    "largest", [(0, 1), *(pytest.param(steps, marks=pytest.mark.nightly) for steps in ((5,), (1,)))]
)
def test_the_step_with_the_largest_batch_is_shown_and_predicted(tmp_path: Path, largest: tuple[int, ...]) -> None:
    """Also where it is one of the first, before a step is steady."""
    record = completed(
        run_text(
            tmp_path,
            f"""
        optimizer = torch.optim.AdamW(model.parameters())
        for number in {[200 if step in largest else 8 for step in range(8)]}:
            batch = torch.randn(number, 16)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
        )
    )
    predicted, first = record.script_prediction, record.footprints[0]
    assert predicted is not None and predicted.footprint is not None
    assert first.step_flops == predicted.footprint.step_flops == flops_of_step(200)
    assert first.memory.activations_bytes == predicted.footprint.memory.activations_bytes
    assert record.step_samples[largest[0]] == 200
    assert first.samples_per_s == pytest.approx(8 / (first.phases.step_s or 0))


def test_what_variables_hold_is_theirs_by_name(tmp_path: Path) -> None:
    record = completed(
        run_text(
            tmp_path,
            """
        import copy
        average, data = copy.deepcopy(model), torch.randn(64, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(6):
            out = model(data[8 * number:8 * number + 8].clone())
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
        )
    )
    assert record.variables["average"] == 4 * WEIGHTS and record.variables["data"] == 4 * 64 * 16
    memory, predicted = record.footprints[0].memory, record.script_prediction
    assert predicted is not None and predicted.footprint is not None
    assert memory.activations_bytes == predicted.footprint.memory.activations_bytes
    assert (memory.script_bytes or 0) >= 4 * WEIGHTS + 4 * 64 * 16


@pytest.mark.nightly
def test_step_ledger_records_layers_that_are_not_trained_as_the_scripts(tmp_path: Path) -> None:
    """As a pipeline's rank leaves them, which trains a part of `model` alone: (32 · 4 + 4) numbers are of no use."""
    record = completed(
        run_text(
            tmp_path,
            """
        part = nn.Sequential(*list(model)[:2])
        optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
        for _ in range(6):
            part(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
        )
    )
    assert record.variables["model"] == 4 * (32 * 4 + 4)
    assert record.footprints[0].memory.weights_bytes == 4 * (16 * 32 + 32)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "name"),
    [
        (
            "torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 16)), batch_size=32)",
            "TensorDataset",
        ),
        ("batches()", "table"),
    ],
)
def test_what_only_a_loop_holds_is_the_scripts_too(tmp_path: Path, source: str, name: str) -> None:
    """A data set of 256 · 16 numbers of 4 B, which no variable of a frame names."""
    record = completed(
        run_text(
            tmp_path,
            f"""
        def batches():
            table = torch.randn(256, 16)
            for part in table.split(32):
                yield (part.clone(),)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for (batch,) in {source}:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
        )
    )
    assert record.variables[name] == 4 * 256 * 16
    memory, predicted = record.footprints[0].memory, record.script_prediction
    assert predicted is not None and predicted.footprint is not None
    assert memory.workspace_bytes == predicted.footprint.memory.workspace_bytes


# ---- the watch never changes, ends or misnames a training


@pytest.mark.nightly
def test_record_of_a_script_whose_function_mode_sees_its_own_calls_alone(tmp_path: Path) -> None:
    run = run_text(
        tmp_path,
        """
        from torch.overrides import TorchFunctionMode
        class Count(TorchFunctionMode):
            calls = 0
            def __torch_function__(self, function, types, args=(), kwargs=None):
                Count.calls += 1
                return function(*args, **(kwargs or {}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            with Count():
                model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print("calls", Count.calls)
    """,
    )
    assert len(completed(run).step_s) == 6
    plain = subprocess.run([sys.executable, tmp_path / "written.py"], check=True, capture_output=True, text=True)
    assert printed(run, "calls") == [float(line.removeprefix("calls ")) for line in plain.stdout.splitlines()]


def test_a_fault_of_the_watch_ends_the_watch_alone(tmp_path: Path) -> None:
    """The watch lists the buffers of a model, which this one does not bear; training does not."""
    run = run_text(
        tmp_path,
        """
        class Hidden(nn.Linear):
            def buffers(self, recurse=True):
                raise RuntimeError("nobody may see these")
        model = Hidden(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print("trained", 1)
    """,
    )
    record = completed(run)
    assert printed(run, "trained") == [1]
    assert len(record.notes) == 1 and "nobody may see these" in record.notes[0]
    (row,) = dlojz.compare(run).rows
    assert record.watch_ended and row.steps is None  # four were made, and not seen
    assert run.logs(0).count("nobody may see these") == 1


@pytest.mark.nightly
def test_step_ledger_records_the_pipeline_of_deepspeed(tmp_path: Path) -> None:
    """Its model is a class of DeepSpeed's too, and no engine."""
    run = run_text(
        tmp_path,
        """
        import deepspeed
        from deepspeed.pipe import PipelineModule
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference alone; takes 40 s to compile
        deepspeed.init_distributed("gloo")
        layers = PipelineModule(layers=list(net()), loss_fn=nn.functional.mse_loss, num_stages=2)
        data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
        settings = {
            "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        engine, *_ = deepspeed.initialize(
            model=layers, model_parameters=list(layers.parameters()), training_data=data, config=settings
        )
        for _ in range(4):
            loss = engine.train_batch().item()
        print("trained", 1)
    """,
        processes=2,
    )
    record = completed(run)
    assert printed(run, "trained") == [1]
    assert not record.notes and len(record.step_s) == 4
    assert record.step_samples == (16,) * 4
    predicted = record.script_prediction
    assert predicted is not None and predicted.recognised["wrapper"] == "DeepSpeed (pipeline)"
    assert predicted.footprint is None and "schedule" in predicted.note  # the activations of all that are in flight


# ---- parts, by hand


def test_a_fed_optimizer_is_one_whose_gradients_are_new() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    feed = GradientFeed()
    optimizers = [torch.optim.SGD(model.parameters()) for model in (first, second)]
    feed.optimizers.update(optimizers)
    feed.before_backward()
    first(torch.ones(1, 2)).sum().backward()
    assert feed.after_backward() == [optimizers[0]]
    assert feed.is_fed(optimizers[0]) and not feed.is_fed(optimizers[1])
    feed.used(optimizers[0])
    assert not feed.is_fed(optimizers[0])  # the same gradients once more
    first.weight.grad = torch.zeros(2, 2)
    assert feed.is_fed(optimizers[0])


def test_a_gradient_that_has_moved_to_a_buffer_is_none_that_was_thrown_away() -> None:
    """As Megatron's DDP does it: `main_grad` has the sum, and autograd's own gradient is None again."""
    model = nn.Linear(2, 2)
    feed = GradientFeed()
    optimizer = torch.optim.SGD(model.parameters())
    feed.optimizers.add(optimizer)
    feed.before_backward()
    model(torch.ones(1, 2)).sum().backward()
    assert feed.after_backward() == [optimizer]
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    assert feed.drop_released()  # without a buffer it is gone
    feed.before_backward()
    assert feed.after_backward() == [optimizer]
    assert not feed.drop_released()  # it was nowhere to be seen after the pass: a library keeps it
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.main_grad = gradient  # type: ignore[attr-defined]
    assert not feed.drop_released() and feed.is_fed(optimizer)


@pytest.mark.parametrize(
    ("scale", "passes", "expected"),
    [
        (lambda loss: loss / 4, 4, 2.0),  # the mean of four
        (lambda loss: loss * 0.25, 4, 2.0),
        (lambda loss: (loss / 4).clone().view(1).squeeze(), 1, 2.0),  # one of four
        (lambda loss: 0.5 * loss, 4, 1.0),  # a factor of the loss itself
        (lambda loss: loss / torch.tensor(10.0), 4, 0.8),  # parts of a sum over all tokens
        (lambda loss: loss, 3, 2.0),
    ],
)
def test_the_loss_is_the_steps_whatever_divides_or_clones_it(scale: object, passes: int, expected: float) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    accounts = StepAccounts()
    for _ in range(passes):
        accounts.losses.append(loss_of(scale(weight.sum()), "loss"))  # type: ignore[operator]
    assert accounts.named_losses(usual_passes=4) == {"loss": pytest.approx(expected)}


def test_samples_of_sequences_tokens_and_lists_of_images() -> None:
    tokens = torch.zeros(3, 7, dtype=torch.long)
    assert samples_and_tokens([tokens], (tokens,), None) == (3, 21)
    assert samples_and_tokens([tokens], (tokens,), (3, 7)) == (7, 21)  # 3 positions of 7 samples
    images = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)]
    assert samples_and_tokens(images, (images,), None) == (2, 0)
    assert samples_and_tokens([], (), None) == (0, 0)
    assert reads_sequences_first(nn.LSTM(2, 2)) and not reads_sequences_first(nn.LSTM(2, 2, batch_first=True))


def test_buckets_of_a_librarys_optimizer_are_no_variables_of_the_script() -> None:
    class Sharded:
        param_groups = property(lambda self: [])

        def __init__(self) -> None:
            self.bucket = torch.ones(5)

    assert not list(_tensors_held({"optimizer": Sharded()}, set(), set(), depth=3))
    assert len(list(_tensors_held({"data": [torch.ones(5)]}, set(), set(), depth=3))) == 1


def test_a_plan_traces_three_steps_of_each_kind_and_larger_ones() -> None:
    plan, measured = TracingPlan(), []
    for step in range(3):
        assert plan.is_due()
        plan.wants(100)
        measured += plan.ended(step, "a", was_traced=True)
    assert measured == [2] and not plan.is_due()
    assert not plan.wants(100) and plan.wants(101)
    assert plan.ended(3, "a", was_traced=True) == [3]
    assert plan.ended(4, "b", was_traced=False) == [] and plan.is_due()  # another kind
    assert not plan.has_missed
    plan.wants(102)
    assert plan.ended(5, "a", was_traced=False) == [] and plan.has_missed


def test_script_notes_on_a_run_that_is_short_or_was_not_recorded() -> None:
    short = SimpleNamespace(
        notes=(), step_s=(0.1, 0.1), held_bytes=(), script_prediction=None, variables={}, footprint=lambda: None
    )
    assert "steps made: 2" in " ".join(_script_notes(cast(RunRecord, short)))
    footprint, why = _of_script(cast(RunRecord, short))
    assert footprint is None and "was not recorded" in why  # it has made steps
    _, why = _of_script(cast(RunRecord, SimpleNamespace(step_s=(), script_prediction=None)))
    assert "made none" in why


def test_runs_of_one_script_are_told_apart_by_its_arguments() -> None:
    assert _with_arguments({"title": "train.py ×2", "arguments": ["--name", "a b"]}) == "train.py ×2 --name 'a b'"
    assert _with_arguments({"title": "train.py", "arguments": []}) == "train.py"


def test_growth_is_named_where_it_goes_on() -> None:
    mib = 2**20
    growing = memory_growth([300 * mib] * 3 + [(300 + 8 * step) * mib for step in range(21)])
    assert growing is not None and growing.bytes_per_step == 8 * mib
    assert (growing.first_step, growing.last_step, growing.last_bytes) == (4, 24, 460 * mib)
    assert memory_growth([300 * mib] * 3 + [400 * mib] * 20) is None  # larger once
    assert memory_growth([300 * mib] * 5 + [500 * mib] * 19) is None
    assert memory_growth([(300 + step % 2 * 40) * mib for step in range(30)]) is None
    assert memory_growth([0] * 30) is None  # not known
