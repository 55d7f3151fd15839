"""The prediction of a user's script, made in its first step, beside what its processes then measure."""

import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compare import overlay_of
from dlojz.config.run_config import RunConfig
from dlojz.libraries.scripts.fake_steps import FakeCopier, FakeSteps, run_fake_steps
from dlojz.libraries.scripts.first_step import FirstStep, plain_copy
from dlojz.libraries.scripts.script_prediction import predict_training
from dlojz.libraries.scripts.script_training import recognise, use_of
from dlojz.results.footprint import STATES
from dlojz.results.record import RunRecord, ScriptPrediction
from dlojz.running.failures.out_of_memory import memory_lines, post_mortem
from tests.libraries.forked_scripts import run_on_forks

SCRIPT = Path(__file__).with_name("wrapped_script.py")
PEAK = 0.05
"""Relative error of the predicted peak, at most."""

TEXTBOOK = '{"stage3_param_persistence_threshold":0,"stage3_max_reuse_distance":0,"stage3_prefetch_bucket_size":0}'
"""Options with which stage 3 gathers each module's weights for it alone, and frees them after it."""

Recorded = Callable[..., RunRecord]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Run the script with these words, once, and return its record."""
    root = tmp_path_factory.mktemp("runs")

    @cache
    def run(words: str, processes: int = 2) -> RunRecord:
        made = run_on_forks(SCRIPT, processes=processes, args=words.split(), root=root)
        assert made.record is not None
        assert made.record.status == "completed", made.logs()
        return made.record

    return run


def predicted(record: RunRecord) -> ScriptPrediction:
    assert record.script_prediction is not None
    return record.script_prediction


DAILY = (
    "--wrap none",
    "--wrap ddp --late --accumulation 2 --autocast",
    "--wrap fsdp2",
    "--wrap deepspeed --zero 2 --bf16 --accumulation 2 --groups",
)
NIGHTLY = (
    "--wrap none --recompute",
    "--wrap 2d",
    "--wrap hsdp --keep --accumulation 2",
    "--wrap fsdp2 --recompute",
    "--wrap fsdp2 --freeze --keep --optimizer Adagrad --late",
    "--wrap deepspeed --zero 0 --bf16",
    "--wrap deepspeed --zero 0 --spare --freeze",
    "--wrap deepspeed --zero 1 --accumulation 2",
    "--wrap deepspeed --zero 1 --spare --groups",
    "--wrap deepspeed --zero 2 --spare --freeze",
    f"--wrap deepspeed --zero 3 --zero-options {TEXTBOOK}",
    "--wrap sp --accumulation 2 --autocast --late",
    "--wrap nested",
    "--wrap fsdp1 --units --keep --accumulation 2 --late",
    "--wrap fsdp1 --units --groups --freeze",
    "--wrap fsdp1 --keep --groups",
)


@pytest.mark.parametrize("words", [*DAILY, *(pytest.param(words, marks=pytest.mark.nightly) for words in NIGHTLY)])
def test_states_and_messages_are_exact_and_the_peak_is_near(words: str, recorded: Recorded) -> None:
    record = recorded(words, 1 if "none" in words else 4 if "hsdp" in words or "2d" in words else 2)
    found, measured = predicted(record).footprint, record.footprint()
    assert predicted(record).note == ""
    assert found is not None and measured is not None
    assert found.parameters == measured.parameters
    for category in STATES:
        assert (category, found.memory.category(category)) == (category, measured.memory.category(category))
    assert found.memory.peak_bytes == pytest.approx(measured.memory.peak_bytes, rel=PEAK)
    assert found.communication == measured.communication
    assert found.step_flops == measured.step_flops
    exposed_s, hidden_s = measured.phases.communication_exposed_s, measured.phases.communication_hidden_s
    if told_of_messages := not {"none", "sp", "2d"} & set(words.split()):  # DTensors send without Python
        assert 0 < exposed_s < measured.phases.step_s and 0 <= hidden_s < measured.phases.step_s
    assert (exposed_s is not None) == told_of_messages


@pytest.mark.parametrize(
    "schedule", ["1F1B", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("GPipe", "Interleaved1F1B"))]
)
def test_each_rank_of_a_pipeline_is_predicted(schedule: str, recorded: Recorded) -> None:
    record = recorded(f"--wrap pipeline --accumulation 4 --schedule {schedule}")
    told = predicted(record)
    assert told.recognised["wrapper"] == f"pipelining (Schedule{schedule})"
    assert told.recognised["micro-batches"] == "4"
    assert [one.rank for one in record.footprints] == [0, 1]
    for measured in record.footprints:
        found = told.of_rank(measured.rank)
        assert found is not None and found.rank == measured.rank
        for category in STATES:
            assert found.memory.category(category) == measured.memory.category(category)
        assert found.communication == measured.communication and found.step_flops == measured.step_flops
        assert found.memory.peak_bytes == pytest.approx(measured.memory.peak_bytes, rel=PEAK)
    both = overlay_of(record)
    stages = 4 if schedule == "Interleaved1F1B" else 2
    assert (both.simulated.schedule.stages, both.simulated.schedule.micro_batches) == (stages, 4)
    assert both.simulated.schedule.name == {"GPipe": "gpipe", "1F1B": "1f1b"}.get(schedule, "interleaved")
    row = dlojz.compare(record).rows[0]
    assert row.exact is True and row.unequal_ranks == () and row.bubble_fraction.measured is not None


def test_dlojz_run_trains_the_script_the_same_though_it_is_predicted(tmp_path: Path) -> None:
    run = dlojz.run(SCRIPT, processes=1, device="cpu", root=tmp_path, progress=False)
    alone = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=120)
    shown = re.compile(r"step \d: \d\.\d{4}|random \S+|forward passes: \d+")
    assert shown.findall(run.logs(0)) == shown.findall(alone.stdout)


def test_the_modules_at_the_peak_are_the_scripts(recorded: Recorded) -> None:
    told = predicted(recorded("--wrap fsdp2"))
    assert told.recognised["wrapper"] == "FSDP2"
    assert told.recognised["units"] == "(root), layers.0, layers.1, layers.2, layers.3"
    assert told.recognised["kept after forward"] == "(root)"
    assert told.recognised["batch"] == "8×32 int64"
    assert {"layers.0", "layers.1", "layers.2", "layers.3"} <= {one.module for one in told.at_peak}
    assert told.footprint is not None and told.footprint.memory.peak_bytes == pytest.approx(
        sum(sum(one.bytes_by_category.values()) for one in told.at_peak), rel=1e-5
    )


def test_tokens_and_the_timeline_of_memory_are_in_the_record(recorded: Recorded) -> None:
    record = recorded("--wrap ddp")
    assert record.step_tokens == (2 * 8 * 32,) * 5
    most = max(sum(one.bytes_by_category.values()) for one in record.memory_timeline)
    measured = record.footprint()
    assert measured is not None and most == measured.memory.peak_bytes
    row = dlojz.compare(record).rows[0]
    assert row.tokens_per_s == pytest.approx(32 * (row.samples_per_s.measured or 0))
    assert "| tokens/s |" in dlojz.compare(record).markdown()


@pytest.mark.nightly
def test_script_prediction_says_what_is_not_predicted(recorded: Recorded) -> None:
    record = recorded("--wrap deepspeed --zero 3")
    told = predicted(record)
    assert told.footprint is None and "`stage3_param_persistence_threshold` = 100000" in told.note
    assert (told.recognised["wrapper"], told.recognised["ZeRO"]) == ("DeepSpeed", "3")
    whole = dlojz.compare([recorded("--wrap ddp"), record])
    assert whole.rows[1].memory_bytes["peak"].predicted is None and "DeepSpeed" in whole.markdown()


@pytest.mark.parametrize("hook", [pytest.param("fp16", marks=pytest.mark.nightly), "own"])
def test_script_prediction_of_messages_of_a_communication_hook(hook: str, recorded: Recorded) -> None:
    """One of torch's is predicted to the byte; what a custom one sends is only counted."""
    record = recorded(f"--wrap ddp --hook {hook}")
    row, told, measured = dlojz.compare(record).rows[0], predicted(record), record.footprint()
    assert measured is not None
    each_bytes = {"fp16": 2, "own": 8}[hook]
    assert measured.traffic("all_reduce") == each_bytes * measured.parameters
    assert told.recognised["communication hook"] == {"fp16": "fp16_compress_hook", "own": "in_fp64"}[hook]
    assert (row.exact, row.unequal_ranks) == ({"fp16": True, "own": None}[hook], ())
    assert ("a custom communication hook" in row.prediction_note) == (hook == "own")


def test_compare_says_what_differs_between_two_scripts(recorded: Recorded, tmp_path: Path) -> None:
    both = dlojz.compare([recorded("--wrap ddp"), recorded("--wrap fsdp2")])
    assert [row.title for row in both.rows] == ["wrapped_script.py (--wrap ddp)", "wrapped_script.py (--wrap fsdp2)"]
    assert both.exact is True
    table = both.markdown()
    assert "| wrapped in | DDP | FSDP2 |" in table
    assert "— \\|" not in table and "predicted: the same training" not in table
    assert re.search(r"- peak: .* with wrapped.*; largest of each category: .*optimizer −\d", table)
    assert re.search(r"- step: .* ms with .*: data .* ms, forward .* ms, backward .* ms, optimizer .* ms\.", table)
    use_language("fr")
    assert "| enveloppé dans | DDP | FSDP2 |" in both.markdown()
    assert "maximum de chaque catégorie" in both.markdown()
    both.figure(tmp_path / "both.png")


def test_a_script_out_of_memory_names_modules_and_levers(tmp_path: Path) -> None:
    words = ["--wrap", "ddp", "--limit-mib", "600"]
    run = dlojz.run(SCRIPT, processes=2, args=words, device="cpu", root=tmp_path, progress=False)
    found = post_mortem(run)
    assert run.state == "oom" and found.out_of_memory and not found.measured
    assert {one.module for one in found.modules} >= {"layers.0", "layers.3"}
    assert found.memory.peak_bytes is not None and found.memory.peak_bytes > 600 * 2**20
    assert [lever.name for lever in found.levers] == ["micro-batch", "precision", "checkpointing"]
    assert all(lever.saved_bytes > 2**29 for lever in found.levers)
    for language, words_of in (("en", "By module at the peak"), ("fr", "Par module au pic")):
        use_language(language)
        told = "\n".join(memory_lines(found))
        assert words_of in told and "layers.0" in told and "use_reentrant=False" in told
    row = dlojz.compare(run).rows[0]
    assert row.status == "oom" and row.memory_bytes["peak"].predicted == found.memory.peak_bytes


def first_step(batch: int) -> tuple[FirstStep, list[torch.optim.Optimizer]]:
    """A first step whose targets are flat, and whose accuracy leads nowhere."""
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = FirstStep("cpu")
    words, targets = torch.randint(64, (batch, 16)), torch.randint(64, (batch, 16))
    logits = step.model_call(nn.Module.__call__)(model, words)
    (logits.argmax(-1) == targets).float().mean()
    loss = F.cross_entropy(logits.view(-1, 64), targets.view(-1))
    step.before_backward(loss)
    loss.backward()
    step.before_update()
    step.end()
    return step, [optimizer]


def predicted_of(
    model: nn.Module,
    inputs: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    forward: Callable[..., object] | None = None,
) -> ScriptPrediction:
    """Predict a training of this model from its first step, whose loss is a mean of squares."""
    step = FirstStep("cpu")
    step.watch()
    try:
        if forward is not None:
            model.forward = forward
        loss = model(inputs).square().mean()
        step.before_backward(loss)
        loss.backward()
        step.before_update()
    finally:
        step.end()
    return predict_training(RunConfig.of_script(SCRIPT), step, [optimizer], None)


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(64, 32), nn.Linear(1000, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward")
        warnings.warn("of forward", stacklevel=1)
        logging.getLogger("of a script").warning("in forward")
        return torch.as_tensor(self.used(x))


def test_parameters_that_forward_does_not_use_have_neither_gradient_nor_state() -> None:
    model = PartlyUsed()
    found = predicted_of(model, torch.randn(8, 64), torch.optim.AdamW(model.parameters())).footprint
    used, spare = 64 * 32 + 32, 1000 * 1000 + 1000
    assert found is not None and found.memory.weights_bytes == 4 * (used + spare)
    assert found.memory.gradients_bytes == 4 * used
    assert found.memory.optimizer_bytes == 2 * 4 * used + 2 * 4  # two moments, and a counter for each parameter


def test_what_the_prediction_prints_and_warns_of_reaches_nobody(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = PartlyUsed()
    with pytest.warns(UserWarning, match="of forward") as warned:
        assert predicted_of(model, torch.randn(8, 64), torch.optim.SGD(model.parameters())).note == ""
    shown = capfd.readouterr()
    assert shown.out == "forward\n" and len(warned) == len(caplog.records) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_types_than_fp32(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    found = predicted_of(model, torch.randn(8, 64, dtype=dtype), torch.optim.AdamW(model.parameters())).footprint
    expected = dtype.itemsize * (64 * 32 + 32 + 32 * 8 + 8)
    assert found is not None and found.memory.weights_bytes == found.memory.gradients_bytes == expected
    assert found.memory.optimizer_bytes == 2 * expected + 4 * 4


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.mask = nn.Transformer.generate_square_subsequent_mask(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layers(x, mask=self.mask))


def test_predict_training_repeats_a_mask_of_torchs_transformer_as_it_was_seen() -> None:
    model = Masked()
    told = predicted_of(model, torch.randn(8, 12, 32), torch.optim.Adafactor(model.parameters()))
    assert told.note == "" and told.footprint is not None
    tokens, layers = 8 * 12, 2
    # Query, key, value and output, then the two of the MLP; backward twice that, but for the gradient of the batch.
    weights = layers * (4 * 32 * 32 + 2 * 32 * 64)
    products = 3 * 2 * tokens * weights - 2 * tokens * 3 * 32 * 32
    attention = layers * 2 * 2 * 8 * 12 * 12 * 32  # backward computes the scores again
    update = 2 * weights  # Adafactor: a row times a column
    assert told.footprint.step_flops == products + round(3.5 * attention) + update


class Redirected(nn.Module):
    """A module that trains by another method than its forward, as Lightning's do under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.net(x))

    def log(self, value: torch.Tensor) -> None:
        value.item()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self(x).square()
        self.log(loss.mean())
        return torch.as_tensor(loss)


def test_predict_training_repeats_a_call_that_leads_to_another_method() -> None:
    model = Redirected()
    method_name, forward = "training_step", model.forward

    def redirected(x: torch.Tensor) -> object:
        model.forward = forward
        return getattr(model, method_name)(x)

    told = predicted_of(model, torch.randn(8, 64), torch.optim.SGD(model.parameters()), redirected)
    assert told.note == "" and told.footprint is not None
    assert told.footprint.step_flops == 2 * 2 * 8 * 64 * 32  # forward, and the gradient of the weight
    assert told.footprint.memory.gradients_bytes == 4 * (64 * 32 + 32)


def test_predict_training_of_half_a_batch_is_half_the_batch() -> None:
    config = RunConfig.of_script(SCRIPT)
    whole = predict_training(config, *first_step(8), None, limit_bytes=0)
    half = predict_training(config, *first_step(4), None)
    assert whole.footprint is not None and half.footprint is not None
    taken = {lever.name: lever.taken_bytes for lever in whole.levers}
    gradients = half.footprint.memory.gradients_bytes or 0  # of the first half, while the second computes
    assert 0 <= taken["micro-batch"] - (half.footprint.memory.peak_bytes or 0) <= gradients
    assert all(lever.taken_bytes + lever.saved_bytes == whole.footprint.memory.peak_bytes for lever in whole.levers)
    assert half.levers == ()


def test_steps_on_fakes_find_what_the_replay_of_one_process_finds() -> None:
    config = RunConfig.of_script(SCRIPT)
    step, optimizers = first_step(8)
    replayed = predict_training(config, step, optimizers, None).footprint

    def on_fakes(step: FirstStep, optimizers: list[torch.optim.Optimizer]) -> FakeSteps:
        training = recognise(step, optimizers, None, False, {}, 1)
        return run_fake_steps(config, replace(training, wrapper="fakes", optimizers=tuple(optimizers)), {})

    ran, half = on_fakes(step, optimizers), on_fakes(*first_step(4))
    assert replayed is not None and ran.footprint.parameters == replayed.parameters
    for category in STATES:
        assert ran.footprint.memory.category(category) == replayed.memory.category(category)
    assert ran.footprint.step_flops == replayed.step_flops == 2 * (half.footprint.step_flops or 0)
    assert ran.footprint.memory.peak_bytes == pytest.approx(replayed.memory.peak_bytes, rel=PEAK)
    assert (half.footprint.memory.peak_bytes or 0) < (ran.footprint.memory.peak_bytes or 0)
    assert ran.footprint.memory.peak_bytes == sum(sum(held.values()) for held in ran.at_peak.values())
    assert {"1", "2"} <= set(ran.at_peak)


def test_fake_copier_copies_a_view_whose_base_has_changed() -> None:
    """FSDP1 leaves such views as the attributes of its modules: autograd refuses to tell how they were made."""
    whole = nn.Parameter(torch.ones(4))
    view, _ = whole.split(2)
    with torch.no_grad():
        whole.add_(1)
    with pytest.raises(RuntimeError, match="multiple views"):
        _ = view.is_leaf
    made = FakeCopier(FakeTensorMode(allow_non_fake_inputs=True), lambda _: None)(view)
    assert made.shape == (2,) and not made.requires_grad


def test_a_copy_shares_what_the_model_shares_and_changes_nothing_of_it() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["words"].weight
    model.seen = [1]
    model.others = [model["head"]]
    made = plain_copy(model)
    assert made["head"].weight is made["words"].weight and made["head"].weight.is_meta
    made.seen.append(2)
    assert model.seen == [1] and made.others[0] is made["head"] and not model["head"].weight.is_meta


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor"])
def test_use_of_an_optimizer_has_the_states_that_it_keeps(kind: str) -> None:
    model = nn.Linear(64, 32)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    found = use_of([optimizer], on_gpu=False)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    held = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    assert found.states_bytes == sum(one.numel() * one.element_size() for one in held)


def test_products_of_muons_update_are_counted() -> None:
    rows, columns = 32, 64
    optimizer = torch.optim.Muon([nn.Parameter(torch.randn(rows, columns))], lr=0.1, ns_steps=5)
    # Newton–Schulz, each of 5 times: X·Xᵀ, its square, and their sum times X.
    expected = 5 * (2 * rows * rows * columns + 2 * rows**3 + 2 * rows * rows * columns)
    assert use_of([optimizer], on_gpu=False).flops == expected


def test_an_optimizer_that_wraps_another_is_refused() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)

    class Wrapping(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([nn.Parameter(torch.ones(4))], {})
            self.inner = inner

    with pytest.raises(LabError, match="Wrapping wraps another optimizer"):
        use_of([Wrapping()], on_gpu=False)
