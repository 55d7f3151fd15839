"""Pipelines on real processes: parallel = serial, predicted = counted, and every action timed on one clock."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlojz.base.errors import LabError
from dlojz.compare import compare, overlay_of
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.partition_figures import overlay_figure_of
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.pipeline.simulator import measured_timeline
from dlojz.prediction import predict
from dlojz.results.footprint import Footprint
from dlojz.results.record import RunRecord, Span, read_events
from dlojz.runnable import check_runnable
from dlojz.train.loop import offset_to_first
from tests.train.matrix import train

SMALL: dict[str, Any] = {
    "model": "coatnet_tiny",
    "image_size": 32,
    "micro_batch": 2,
    "micro_batches": 8,
    "learning_rate": 0.05,
    "optimizer": "sgd",
    "steps": 4,
    "keep_weights": True,
}
VIT = {"model": "vit_tiny"}
LLAMA = {"model": "llama_tiny", "image_size": None, "sequence_length": 16}
ALEXNET = {"model": "alexnet_tiny", "image_size": 64}
MANY = {"model": "gpt_tiny", "image_size": None, "micro_batch": 4, "micro_batches": 16, "schedule": "1f1b"}
"""So many micro-batches that a message of each is a seventh of the peak."""
TORCHS = ("gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v")
"""Schedules that torch ships; the others that it runs are read from a table."""

PAIRS: dict[str, dict[str, Any]] = {
    **{f"torch-{name}": {**VIT, "schedule": name} for name in (*TORCHS, "eager-1f1b", "zb-h1", "zb-h2")},
    **{
        f"hand-{name}": {**VIT, "engine": "by_hand", "schedule": name}
        for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-v", "chimera")
    },
    "deepspeed-uniform": {**VIT, "engine": "deepspeed"},
    "deepspeed-parameters": {**VIT, "engine": "deepspeed", "partition": "parameters", "zero": 1},
    "deepspeed-type": {**VIT, "engine": "deepspeed", "partition": "type:TransformerBlock", "checkpointing": "full"},
    "hand-flops": {"engine": "by_hand", "partition": "flops", "checkpointing": "full"},
    "hand-at": {"engine": "by_hand", "partition": "at:3", "schedule": "gpipe"},
    "torch-llama": {**LLAMA, "schedule": "interleaved"},
    "torch-many": MANY,
    "hand-many": {**MANY, "engine": "by_hand"},
    # Fewer micro-batches than stages, which torch's own class refuses.
    "torch-1f1b-few": {**VIT, "schedule": "1f1b", "micro_batch": 16, "micro_batches": 1},
}
FOURS: dict[str, dict[str, Any]] = {
    **{f"torch-{name}": {"schedule": name} for name in ("1f1b", "zb-h1", "zb-v", "interleaved")},
    **{f"hand-{name}": {"engine": "by_hand", "schedule": name} for name in ("chimera", "dualpipe", "hanayo", "zb-1p")},
    "deepspeed": {"engine": "deepspeed", "partition": "parameters"},
    "torch-llama": {**LLAMA, "schedule": "zb-h1"},
    # The course's case: 2 stages × 2 replicas, 8 micro-batches.
    "alexnet-deepspeed-2x2": {**ALEXNET, "engine": "deepspeed", "pp": 2, "dp": 2},
    "alexnet-deepspeed-zero1-2x2": {**ALEXNET, "engine": "deepspeed", "pp": 2, "dp": 2, "zero": 1},
    "alexnet-torch-2x2": {**ALEXNET, "pp": 2, "dp": 2},
    "alexnet-hand-2x2": {**ALEXNET, "engine": "by_hand", "pp": 2, "dp": 2, "schedule": "chimera"},
}
SERIAL: dict[str, dict[str, Any]] = {
    "coatnet_tiny": {},
    "vit_tiny": VIT,
    "llama_tiny": LLAMA,
    "alexnet_tiny": {**ALEXNET, "micro_batches": 16},
    "gpt_tiny": {name: value for name, value in MANY.items() if name != "schedule"},
}
NIGHTLY = {
    2: "torch-gpipe torch-interleaved torch-looped-bfs torch-interleaved-zb torch-dualpipe-v torch-eager-1f1b "
    "torch-zb-h2 hand-naive hand-zb-h1 hand-zb-v deepspeed-parameters hand-at hand-many",
    4: "torch-1f1b torch-zb-h1 torch-interleaved hand-chimera hand-hanayo hand-zb-1p torch-llama deepspeed "
    "alexnet-deepspeed-2x2",
}
"""By day each engine runs schedules of each kind: whole and split backwards, one stage to a rank and several, from a
class of torch's and from a table; the other orders run every day in tests/pipeline/test_runtime.py."""


def case(processes: int, name: str, *values: Any) -> Any:
    return pytest.param(*values, name, marks=pytest.mark.nightly if name in NIGHTLY[processes].split() else [])


FORECAST = [case(2, name) for name in PAIRS if not name.startswith("deepspeed")]
"""Where the peak is compared: DeepSpeed's own buffers are not predicted, and its forecast says so."""


def launch(folder: Path, configs: dict[str, dict[str, Any]], processes: int) -> None:
    stages = {"pp": processes} if processes > 1 else {}
    train(folder, {name: RunConfig.of(**{**SMALL, **stages, **fields}) for name, fields in configs.items()}, processes)


def prepare(folder: Path) -> None:
    launch(folder / "1", SERIAL, 1)
    for processes, configs in ((2, PAIRS), (4, FOURS)):
        later = () if os.environ.get("DLOJZ_NIGHTLY") else NIGHTLY[processes].split()
        launch(folder / str(processes), {name: configs[name] for name in configs if name not in later}, processes)


CASES = [(processes, name) for processes, configs in ((2, PAIRS), (4, FOURS)) for name in configs]
named = pytest.mark.parametrize(
    ("processes", "name"),
    [case(processes, name, processes) for processes, name in CASES],
    ids=[f"{name}-on-{processes}" for processes, name in CASES],
)


def events(run: Path, rank: int, event: str) -> list[dict[str, Any]]:
    return [one for one in read_events(run / "events" / f"rank-{rank}.jsonl") if one["event"] == event]


def config_of(run: Path) -> RunConfig:
    return RunConfig.from_json((run / "config.json").read_text())


def spans_of(run: Path, processes: int) -> list[Span]:
    return [Span.from_dict(span) for rank in range(processes) for span in events(run, rank, "spans")[-1]["spans"]]


@named
def test_pipeline_engines_train_a_model_as_one_process_does(prepared: Path, processes: int, name: str) -> None:
    run = prepared / str(processes) / name
    serial = prepared / "1" / config_of(run).model
    own, alone = ([one["loss"] for one in events(folder, 0, "step")] for folder in (run, serial))
    assert own == pytest.approx(alone, rel=1e-5)
    weights, expected = load_file(run / "weights.safetensors"), load_file(serial / "weights.safetensors")
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-5)


@named
def test_predict_tells_what_every_rank_of_a_pipeline_sends(prepared: Path, processes: int, name: str) -> None:
    run = prepared / str(processes) / name
    for rank in range(processes):
        measured = Footprint.from_dict(events(run, rank, "footprint")[-1]["footprint"])
        predicted = predict(config_of(run), rank)
        counted, expected = (
            {(t.collective, t.group): (t.count, t.message_bytes) for t in one.communication}
            for one in (measured, predicted)
        )
        assert counted == expected, rank
        assert predicted.memory.weights_bytes == measured.memory.weights_bytes


@pytest.mark.parametrize("name", FORECAST)
def test_the_peak_is_forecast(prepared: Path, name: str) -> None:
    """Within 5 %: of whole and of split backwards, of one stage per rank and of several, in both runtimes."""
    run = prepared / "2" / name
    for rank in range(2):
        measured = Footprint.from_dict(events(run, rank, "footprint")[-1]["footprint"])
        assert predict(config_of(run), rank).memory.peak_bytes == pytest.approx(measured.memory.peak_bytes, rel=0.05)


def test_footprint_of_gpipe_keeps_more_than_that_of_1f1b(prepared: Path) -> None:
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        footprint = events(prepared / "2" / f"hand-{schedule}", 0, "footprint")[-1]["footprint"]
        kept[schedule] = footprint["memory"]["activations_bytes"]
    assert kept["gpipe"] > 2 * kept["1f1b"]  # 8 micro-batches in flight, and 2


@named
def test_every_action_is_timed_on_one_clock(prepared: Path, processes: int, name: str) -> None:
    run = prepared / str(processes) / name
    config = config_of(run)
    layout, schedule = config.layout, schedule_of(config.layout)
    ranks = {pipeline * layout.dp: pipeline for pipeline in range(layout.pp)}
    timeline = measured_timeline(schedule, spans_of(run, processes), ranks=ranks)
    uncertainty_s = max(events(run, rank, "clock")[-1]["uncertainty_s"] for rank in range(processes))
    graph = schedule.graph
    for index in range(graph.actions):
        for needed in (graph.previous[index], graph.needs[index]):
            # No action starts before what it waits for has ended; what an overlapped one sends leaves before its end.
            if needed < graph.actions and not schedule.actions[needed].parts:
                assert timeline.starts[index] >= timeline.ends[needed] - 2 * uncertainty_s - 1e-6


def test_a_record_is_laid_over_its_simulation(prepared: Path, tmp_path: Path) -> None:
    run = prepared / "2" / "torch-1f1b"
    record = RunRecord(
        run_id="one", config=config_of(run), status="completed", spans=tuple(spans_of(run, 2)), losses=(1.0,)
    )
    both = overlay_of(record)
    assert both.measured.origin == "measured" and both.simulated.origin == "simulated"
    assert both.measured.schedule == both.simulated.schedule
    assert 0 < both.measured.bubble_fraction < 1 and 0 < both.simulated.bubble_fraction < 1
    row = compare([record]).rows[0]
    assert (row.pipeline_s.measured, row.pipeline_s.predicted) == (both.measured.makespan, both.simulated.makespan)
    assert row.bubble_fraction.measured == both.measured.bubble_fraction
    forwards = [
        d for d, a in zip(both.measured.durations, both.measured.schedule.actions, strict=True) if a.kind == "F"
    ]
    assert sum(both.costs.forward) == pytest.approx(sum(forwards) / 8)  # type: ignore[arg-type]
    overlay_figure_of(record, tmp_path / "overlay.png")
    assert (tmp_path / "overlay.png").stat().st_size > 10_000
    no_pipeline = record.model_copy(update={"config": RunConfig.of(model="vit_tiny", image_size=32)})
    with pytest.raises(LabError, match="no pipeline"):
        overlay_of(no_pipeline)
    with pytest.raises(LabError, match="no timed step"):
        overlay_of(record.model_copy(update={"spans": ()}))


def test_pipeline_engines_run_pipedream_and_time_its_updates_as_spans(tmp_path: Path) -> None:
    """Its weights are judged in tests/pipeline/test_runtime.py; here: the engine, its updates timed, its losses."""
    launch(tmp_path, {"one": {**VIT, "engine": "by_hand", "schedule": "pipedream", "learning_rate": 0.01}}, 2)
    losses = [one["loss"] for one in events(tmp_path / "one", 0, "step")]
    assert len(losses) == 4 and min(losses[1:]) < losses[0]  # each step reads other samples
    assert sum(span.action.endswith("U3") for span in spans_of(tmp_path / "one", 2)) >= 2


def test_offset_to_first_finds_a_clock_that_is_ahead() -> None:
    """Two ranks of which one's clock is 5 s ahead: found to within the uncertainty that is told."""
    from dlojz.processes.forks import spmd

    def work(rank: int, size: int) -> list[float]:
        import time

        import torch.distributed as dist

        found = offset_to_first(dist.group.WORLD, lambda: time.perf_counter() + 5.0 * rank)
        return [found.offset_s, found.uncertainty_s]

    (first, _), (offset_s, uncertainty_s) = (answer.value for answer in spmd(work, 2))
    assert first == 0 and 0 < uncertainty_s < 1
    assert offset_s == pytest.approx(-5.0, abs=uncertainty_s + 1e-4)
    assert offset_to_first(None) == (0, 0)


REFUSED = [
    ({"pp": 4, "schedule": "chimera"}, "torch"),
    ({"pp": 3, "schedule": "chimera", "engine": "by_hand", "micro_batches": 6}, "even"),
    ({"pp": 4, "schedule": "zb-h1", "micro_batches": 2}, "micro-batch"),
    ({"pp": 2, "schedule": "pipemare", "engine": "by_hand"}, "simulated"),
    ({"pp": 2, "schedule": "terapipe", "engine": "by_hand"}, "token slices"),
    ({"pp": 2, "schedule": "pipedream", "engine": "by_hand", "optimizer": "adamw"}, "optimizer='sgd'"),
    ({"pp": 2, "schedule": "zb-h1", "checkpointing": "full"}, "checkpointing='none'"),
    ({"pp": 2, "engine": "by_hand", "zero": 1}, "zero=0"),
    ({"pp": 2, "engine": "deepspeed", "offload": "activations"}, "offload='none'"),
    ({"pp": 2, "engine": "deepspeed", "schedule": "gpipe"}, "one schedule"),
    ({"pp": 2, "engine": "deepspeed", "zero": 2}, "zero=1 or zero=0"),
    ({"pp": 2, "engine": "deepspeed", "partition": "flops"}, "uniform, parameters or type"),
    ({"pp": 2, "partition": "at:0"}, "increasing"),
    ({"pp": 2, "partition": "type:("}, "regular expression"),
    ({"pp": 2, "partition": "type:Nothing"}, "Nothing"),
    ({"pp": 40}, "40"),
    ({"chunks": 2}, "pp=1"),
    ({"pp": 2, "schedule": "1f1b", "chunks": 2}, "chunks"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_check_runnable_refuses_before_it_starts_what_cannot_be_run(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words.replace("(", r"\(")) as refusal:
        check_runnable(RunConfig.of(**{**SMALL, **VIT, **fields}))
    assert "\n" not in str(refusal.value)
