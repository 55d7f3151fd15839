"""`make gpu` without a GPU: its records, its time, its tables; and the units that a CPU can really measure."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu, gpu_units
from benchmarks.gpu import Outcome, Record, Records, measure
from benchmarks.gpu_units import Place, Unit
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.processes.forks import ForkedError, RankAnswer, spmd

H100 = Place("NVIDIA H100 80GB HBM3", 85_017_493_504, {"torch": "2.13.0", "dlojz": "1"})


def unit(name: str, *, seconds: float = 1.0, limit_s: float = 10.0, part: str = "memory") -> Unit:
    return Unit(part, name, lambda place, rank, size: None, seconds, limit_s)


class Runs:
    """Stands in for the processes: notes what is run, answers its name, or what it is told to."""

    def __init__(self, **answers: Any) -> None:
        self.names: list[str] = []
        self.answers = answers

    def __call__(self, one: Unit, place: Place, wall_s: float) -> list[RankAnswer]:
        self.names.append(one.name)
        told = self.answers.get(one.name, {"value": one.name})
        if isinstance(told, BaseException):
            raise told
        return [RankAnswer(0, **told)]


def error(message: str, kind: str = "") -> dict[str, Any]:
    return {"error": ForkedError("" if kind else "RuntimeError", message, kind)}


def names(outcome: Outcome) -> list[list[str]]:
    return [[one.name for one in some] for some in outcome]


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "gpu-h100", H100)


FOREVER = {"deadline_s": float("inf")}


def test_interrupted_it_goes_on_where_it_was(records: Records) -> None:
    asked = [unit("a"), unit("b"), unit("c")]
    first = Runs(b=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measure(asked, records, run=first, **FOREVER)
    second = Runs()
    outcome = measure(asked, records, run=second, **FOREVER)
    assert (first.names, second.names) == (["a", "b"], ["b", "c"])
    assert names(outcome) == [["a", "b", "c"], [], []]
    third = Runs()
    measure(asked, records, run=third, **FOREVER)
    assert third.names == []


def test_a_unit_that_fails_is_recorded_and_the_rest_goes_on(records: Records) -> None:
    asked = [unit("a"), unit("b"), unit("c"), unit("d")]
    answers = {"a": error("no kernel\nfor it"), "b": error("-9", "lost"), "c": error("10", "time")}
    assert names(measure(asked, records, run=Runs(**answers), **FOREVER)) == [["d"], ["a", "b", "c"], []]
    why = [record.why for one in asked if (record := records.read(one))]
    assert why == ["RuntimeError: no kernel", "its process ended with code -9", "it was stopped after 10 s", ""]
    quiet, once_more = Runs(), Runs()
    measure(asked, records, run=quiet, **FOREVER)
    assert names(measure(asked, records, again=True, run=once_more, **FOREVER)) == [["a", "b", "c", "d"], [], []]
    assert (quiet.names, once_more.names) == ([], ["a", "b", "c"])


def test_of_two_ranks_the_one_that_raised_is_quoted(records: Records) -> None:
    def run(one: Unit, place: Place, wall_s: float) -> list[RankAnswer]:
        return [RankAnswer(0, **error("-9", "lost")), RankAnswer(1, **error("the cause"))]

    measure([unit("a")], records, run=run, **FOREVER)
    record = records.read(unit("a"))
    assert record is not None and record.why == "RuntimeError: the cause"


def truncated(text: str) -> str:
    return text[: len(text) // 2]


def altered(text: str) -> str:
    return text.replace('"result": "a"', '"result": "b"')


@pytest.mark.parametrize("damage", [truncated, altered, lambda text: "", lambda text: "[]", lambda text: "{}"])
def test_a_damaged_record_is_made_anew_and_named_once(records: Records, damage: Callable[[str], str]) -> None:
    measure([unit("a")], records, run=Runs(), **FOREVER)
    path = records.folder / "memory-a.json"
    path.write_text(damage(path.read_text()))
    runs = Runs()
    assert records.read(unit("a")) is None and records.read(unit("a")) is None
    measure([unit("a")], records, run=runs, **FOREVER)
    assert runs.names == ["a"] and records.damaged == ["memory-a.json"]
    record = records.read(unit("a"))
    assert record is not None and record.result == "a"


@pytest.mark.parametrize("other", [
    replace(H100, gpu="NVIDIA A100"), replace(H100, memory_bytes=1), replace(H100, versions={"torch": "2.14.0"}),
])  # fmt: skip
def test_another_gpu_or_version_starts_anew(records: Records, other: Place) -> None:
    measure([unit("a")], records, run=Runs(), **FOREVER)
    elsewhere, runs = Records(records.folder, other), Runs()
    measure([unit("a")], elsewhere, run=runs, **FOREVER)
    assert runs.names == ["a"] and (elsewhere.others, elsewhere.damaged) == (1, [])


def test_a_record_names_the_gpu_and_the_versions(records: Records) -> None:
    measure([unit("a")], records, run=Runs(), **FOREVER)
    content = json.loads((records.folder / "memory-a.json").read_text())
    assert content["made_on"] == {
        "gpu": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_017_493_504, "versions": {"torch": "2.13.0", "dlojz": "1"},
    }  # fmt: skip
    assert gpu.read_place(records.folder) == H100
    assert H100.slug == "gpu-nvidia-h100-80gb-hbm3"


def test_what_the_time_does_not_allow_is_left_and_shorter_units_are_done(records: Records) -> None:
    ticks = iter(range(0, 1000, 4))  # each look at the clock comes 4 s after the former
    asked = [unit("a", seconds=5), unit("b", seconds=30), unit("c", seconds=5), unit("d", seconds=5)]
    runs = Runs()
    outcome = measure(asked, records, deadline_s=21.0, run=runs, now=lambda: float(next(ticks)))
    # a begins at 0 and ends at 4; b would begin at 8 with 13 s left; c begins at 12; d would at 20.
    assert runs.names == ["a", "c"] and names(outcome) == [["a", "c"], [], ["b", "d"]]
    assert sorted(path.name for path in records.folder.glob("memory-*")) == ["memory-a.json", "memory-c.json"]


def test_a_unit_that_the_budget_stops_is_left_not_failed(records: Records) -> None:
    given = []

    def run(one: Unit, place: Place, wall_s: float) -> list[RankAnswer]:
        given.append(wall_s)
        return [RankAnswer(0, **error(f"{wall_s:.0f}", "time"))]

    outcome = measure([unit("a", limit_s=60)], records, deadline_s=20.0, run=run, now=lambda: 0.0)
    assert given == [20.0] and names(outcome) == [[], [], ["a"]] and records.read(unit("a")) is None


def test_each_unit_has_a_process_that_no_other_is_harmed_by(records: Records) -> None:
    def killed(place: Place, rank: int, size: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def raises(place: Place, rank: int, size: int) -> None:
        raise MemoryError("no room")

    asked = [Unit("memory", "killed", killed), Unit("memory", "raises", raises),
             Unit("memory", "pid", lambda place, rank, size: [os.getpid(), place.gpu, rank, size])]  # fmt: skip
    assert names(measure(asked, records, **FOREVER)) == [["pid"], ["killed", "raises"], []]
    told = [record for one in asked if (record := records.read(one))]
    assert [one.why for one in told] == ["its process ended with code -9", "MemoryError: no room", ""]
    assert told[2].result[0] != os.getpid() and told[2].result[1:] == [H100.gpu, 0, 1]


# ---- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("language", "opening"),
    [
        ("en", "make gpu: this needs an NVIDIA GPU that torch can use, but torch "),
        ("fr", "make gpu: il faut un GPU NVIDIA que torch puisse utiliser (torch "),
    ],
)
def test_without_a_gpu_it_says_so_in_one_sentence(
    language: str, opening: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_language(language)
    assert gpu.main(["--records", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith(opening) and "--stand-in" in told.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [["--only", "nothing"], ["--minutes", "0"], ["--minutes", "nan"], ["--fast"]])
def test_misuse_ends_with_2(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        gpu.main(given)
    assert end.value.code == 2 and "error: " in capsys.readouterr().err


def test_the_help_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        gpu.main(["--help"])
    told = capsys.readouterr().out
    assert end.value.code == 0 and all(f"  {part} " in told for part in gpu.PARTS)
    assert {one.part for one in gpu_units.units(stand_in=False)} == set(gpu.PARTS)


def test_a_folder_without_records_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--predict", "--records", str(tmp_path)]) == 1
    assert "holds no records" in capsys.readouterr().err


@pytest.mark.parametrize("stand_in", [False, True])
def test_the_units_are_what_is_promised(stand_in: bool) -> None:
    units = gpu_units.units(stand_in)
    ids = [one.id for one in units]
    assert len(ids) == len(set(ids))
    memory = [one for one in units if one.part == "memory"]
    assert len(memory) >= (8 if stand_in else 60)
    assert all(one.config is not None and one.config.layout.world_size == 1 for one in memory)
    assert {one.config.device for one in units if one.config} == {"cpu" if stand_in else "cuda"}
    for one in units:
        assert one.seconds <= one.limit_s and (one.config is None or one.part == "replays" or one.ranks in (1, 2))
    ranks = {one.name: one for one in units if one.part == "ranks"}
    for name, one in ranks.items():
        reference = ranks[f"{name.partition('-')[0]}-one"]
        assert one.config is not None and reference.config is not None
        assert one.config.layout.global_batch == reference.config.layout.global_batch


def test_a_gpu_is_the_one_that_is_listed_with_its_own_memory() -> None:
    found, unknown = H100.device, replace(H100, gpu="NVIDIA L4", memory_bytes=23_000_000_000).device
    assert found is not None and (found.name, found.memory_bytes) == ("h100", H100.memory_bytes)
    assert unknown is not None and (unknown.title, unknown.memory_bytes) == ("NVIDIA L4", 23_000_000_000)
    assert unknown.cublas_workspace_bytes == 8_519_680 < found.cublas_workspace_bytes
    newer = replace(H100, gpu="NVIDIA B200", versions={"capability": "10.0"}).device
    assert newer is not None and newer.cublas_workspace_bytes == found.cublas_workspace_bytes
    assert gpu_units.stand_in().device is None


def test_what_is_asked_of_torch_exists() -> None:
    """Names of the allocator's figures, of which no test without a GPU reads a value."""
    told = torch.cuda.memory_stats.__doc__ or ""
    assert all(name in told for name in ("requested_bytes", "num_alloc_retries", "peak"))
    for name in ("mem_get_info", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats",
                 "set_per_process_memory_fraction", "OutOfMemoryError"):  # fmt: skip
        assert hasattr(torch.cuda, name)
    assert "tests/prediction/test_allocator.py" in gpu_units.marked_tests()


class Cuda:
    """Stands in for `torch.cuda`: notes what is called, answers with figures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.called: list[tuple[Any, ...]] = []
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, self._noting(name, answer))

    def _noting(self, name: str, answer: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self.called.append((name, *given))
            return answer

        return call


def test_the_peaks_are_those_since_the_reset_and_the_context_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(
        monkeypatch, synchronize=None, reset_peak_memory_stats=None, max_memory_allocated=700, memory_reserved=850,
        memory_stats={"requested_bytes.all.peak": 690, "num_alloc_retries": 2}, mem_get_info=(4000, 5350),
        max_memory_reserved=900,
    )  # fmt: skip
    found = gpu_units._allocated(lambda: cuda.called.append(("train",)))
    assert cuda.called[:4] == [("synchronize",), ("reset_peak_memory_stats",), ("train",), ("synchronize",)]
    assert found == {
        "allocated_bytes": 700, "requested_bytes": 690, "reserved_bytes": 900, "retries": 2, "context_bytes": 500,
    }  # fmt: skip


def test_a_gpu_is_looked_at_with_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"name": "NVIDIA L4", "major": 8, "minor": 9})
    Cuda(monkeypatch, is_available=True, get_device_properties=properties, mem_get_info=(1, 23_000_000_000))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = Place(**gpu_units.look())
    assert (found.gpu, found.memory_bytes, found.slug) == ("NVIDIA L4", 23_000_000_000, "gpu-nvidia-l4")
    assert (found.versions["cuda"], found.versions["capability"]) == ("12.8", "8.9")
    Cuda(monkeypatch, is_available=False)
    assert gpu_units.look() == {"why": f"torch {torch.__version__} (CUDA 12.8) finds no GPU"}


def test_on_a_gpu_the_largest_batch_is_tried_under_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, set_per_process_memory_fraction=None, synchronize=None, empty_cache=None)
    full = torch.cuda.OutOfMemoryError
    trained: list[int] = []

    class Engine:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    def train(engine: Any, samples: Iterator[Any], steps: int) -> None:
        trained.append(len(next(samples)[0]))
        if trained[-1] > 5:
            raise full("CUDA out of memory")

    monkeypatch.setattr(gpu_units, "built", lambda config, device: Engine)
    monkeypatch.setattr(gpu_units, "_train", train)
    config = RunConfig.of(model="vit_tiny", data="synthetic", device="cuda")
    found = gpu_units.largest_batch(config, replace(H100, memory_bytes=2**35), 0, 1)
    assert cuda.called[0] == ("set_per_process_memory_fraction", 0.5)
    assert cuda.called.count(("empty_cache",)) == len(trained) == 6
    assert found == {
        "cap_bytes": 2**34, "batch": 5, "tried": {"1": True, "2": True, "4": True, "5": True, "6": False, "8": False},
    }  # fmt: skip


def test_a_step_that_does_not_fit_is_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: RunConfig, place: Place) -> dict[str, Any]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr(gpu_units, "_step", full)
    found = gpu_units.step(RunConfig.of(model="vit_tiny"), H100, 0, 1)
    assert found == {"out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB."}


# ---- tables


def done(records: Records, one: Unit, result: Any, predicted: dict[str, Any] | None = None) -> None:
    records.write(one, result, "", 1.0)
    if predicted is not None:
        path = records.folder / gpu.PREDICTED / f"{one.id}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"key": gpu.prediction_key(records, one), "predicted": predicted}))


def step_result(allocated: int, reserved: int, traced: int) -> dict[str, Any]:
    allocator = {"allocated_bytes": allocated, "reserved_bytes": reserved, "context_bytes": 500 * 2**20}
    return {"traced": {"peak_bytes": traced}, "allocator": allocator, "step_s": {"median": 0.1}}


def test_the_memory_table_lays_the_forecast_beside_the_allocator(records: Records) -> None:
    units = [one for one in gpu_units.units(stand_in=False) if one.part == "memory"][:4]
    predicted = {"allocated_bytes": 1010, "reserved_bytes": 2100, "peak_bytes": 990, "cublas_bytes": 90,
                 "context_bytes": 481 * 2**20}  # fmt: skip
    done(records, units[0], step_result(1000, 2000, 900), predicted)
    done(records, units[1], step_result(1010, 2100, 900), predicted)
    done(records, units[2], {"out_of_memory": "tried to allocate"}, predicted)
    done(records, units[3], step_result(1000, 2000, 900))  # predicted later
    (table,) = gpu.tables(units, records)
    assert [row[3:5] for row in table.rows] == [("+1.00 %", "+0.00 %"), ("+0.00 %", "+0.00 %"), ("—", "—"), ("—", "—")]
    assert table.rows[2][1] == "out of memory" and table.rows[0][7] == "+5.00 %"
    assert table.notes[0] == (
        "allocated: off by 0.50 % in the median, 1.00 % at worst, of 2 (aimed at: median 0.5 %, worst 2.0 %)"
    )
    assert table.notes[-1] == "CUDA's context: 500 MiB in the median, 481 MiB in the forecast"


def test_a_prediction_of_other_code_is_not_shown(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(one for one in gpu_units.units(stand_in=False) if one.part == "batch")
    done(records, one, {"cap_bytes": 2**34, "batch": 100, "tried": {}}, {"batch": 98})
    (table,) = gpu.tables([one], records)
    assert table.rows[0][1:] == ("16.0 GiB", "100", "98", "−2.00 %")
    monkeypatch.setattr(gpu, "code_version", lambda: "tomorrow's")
    (table,) = gpu.tables([one], records)
    assert table.rows[0][3:] == ("—", "—")


def test_ranks_are_compared_with_the_one_process_of_their_name(records: Records) -> None:
    units = {one.name: one for one in gpu_units.units(stand_in=False) if one.part == "ranks"}
    plain = {"losses": [2.0, 1.0], "weights_norm": 4.0, "seconds": 1.0, "allocated_bytes": 2**20}
    done(records, units["data-one"], plain)
    done(records, units["data-ddp"], {**plain, "losses": [2.0, 1.002]})
    done(records, units["tensor-torch"], plain)  # its reference has not run
    records.write(units["data-fsdp2"], None, "gloo has no such collective", 1.0)
    table, failed = gpu.tables(list(units.values()), records)
    assert [row[:3] for row in table.rows] == [("data-ddp", "2e-03", "0")]
    assert failed.rows == (("ranks-data-fsdp2", "gloo has no such collective"),)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 63, 64, 100, 130, 1000, 10**6])
def test_the_largest_batch_is_found_to_1_in_64(limit: int) -> None:
    tried: list[int] = []

    def fits(samples: int) -> bool:
        tried.append(samples)
        return samples <= limit

    found = gpu_units.largest(fits, most=4096)
    assert found <= limit and len(tried) <= 20
    assert found == 4096 if limit > 4096 else limit - found < max(1, limit // 64 + 1)


# ---- what the CPU can really measure


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    yield Records(tmp_path_factory.mktemp("real"), gpu_units.stand_in())


def by_id(*ids: str) -> list[Unit]:
    found = {one.id: one for one in gpu_units.units(stand_in=True)}
    return [found[one] for one in ids]


def test_steps_of_the_stand_in_take_the_bytes_of_the_forecast_but_for_some(real: Records) -> None:
    asked = by_id("memory-gpt_tiny-bf16", "memory-gpt_tiny-bf16-full", "memory-coatnet_tiny-fp32",
                  "batch-gpt_tiny-fp32")  # fmt: skip
    assert names(measure(asked, real, **FOREVER))[1:] == [[], []]
    gpu.predict_all(asked, real, workers=2)
    found = gpu.measurements(asked, real)
    assert len(found) == 4
    for one in found[:3]:
        assert one.predicted is not None and one.result["allocator"] is None
        assert one.result["traced"]["peak_bytes"] == pytest.approx(one.predicted["peak_bytes"], abs=16)
        assert one.result["step_s"]["least"] > 0
    assert found[3].predicted == {"batch": found[3].result["batch"]} and found[3].result["batch"] > 1


def test_ranks_of_the_stand_in_train_as_one_process(real: Records) -> None:
    asked = by_id("ranks-pipeline-one", "ranks-pipeline-torch", "ranks-data-one", "ranks-data-fsdp2")
    assert names(measure(asked, real, **FOREVER))[1:] == [[], []]
    told = {one.unit.name: one.result for one in gpu.measurements(asked, real)}
    for name, reference in (("pipeline-torch", "pipeline-one"), ("data-fsdp2", "data-one")):
        assert told[name]["losses"] == pytest.approx(told[reference]["losses"], rel=1e-5)
        assert told[name]["weights_norm"] == pytest.approx(told[reference]["weights_norm"], rel=1e-5)
        assert told[name]["losses"][0] != told[name]["losses"][-1]
    (table,) = gpu.tables(asked, real)
    assert [row[0] for row in table.rows] == ["pipeline-torch", "data-fsdp2"]


def test_what_is_left_is_predicted_without_measuring(
    real: Records, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = by_id("ranks-data-one")
    measure(one, real, **FOREVER)
    assert gpu.main(["--predict", "--records", str(real.folder), "--only", "ranks"]) == 0
    assert "units done" not in capsys.readouterr().out


def test_messages_through_the_host_arrive() -> None:
    def exchange(rank: int, size: int) -> list[float]:
        gpu_units.messages_through_host()
        other, got, later = 1 - rank, torch.zeros(3), torch.zeros(2)
        work = dist.isend(torch.full((3,), rank + 1.0), other)
        dist.recv(got, other)
        work.wait()
        both = [dist.P2POp(dist.isend, torch.full((2,), rank + 5.0), other), dist.P2POp(dist.irecv, later, other)]
        for one in dist.batch_isend_irecv(both):
            one.wait()
        return [*got.tolist(), *later.tolist()]

    first, second = spmd(exchange, 2)
    assert (first.error, second.error) == (None, None)
    assert (first.value, second.value) == ([2.0, 2.0, 2.0, 6.0, 6.0], [1.0, 1.0, 1.0, 5.0, 5.0])


def test_random_values_are_skipped_for_matrices_alone() -> None:
    with gpu_units.without_random_values():
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        before = layer.weight.detach().clone()
        torch.nn.init.normal_(layer.weight)
    torch.testing.assert_close(before, layer.weight, rtol=0, atol=0, equal_nan=True)  # whatever lay in that memory
    torch.nn.init.normal_(layer.weight)
    assert not torch.equal(before, layer.weight)


def test_a_batch_has_the_shapes_and_types_of_the_data() -> None:
    image, labels = gpu_units.batch_of(RunConfig.of(model="coatnet_0", data="synthetic"), 2)
    tokens, targets = gpu_units.batch_of(RunConfig.of(model="gpt2", data="synthetic"), 2)
    assert (image.shape, labels.dtype, tokens.shape) == ((2, 3, 224, 224), torch.int64, (2, 1024))
    assert targets.shape == tokens.shape and 1000 < int(tokens.max()) < 50257 and int(labels.max()) < 1000


def test_a_record_that_replays_is_what_is_shipped(tmp_path: Path) -> None:
    from benchmarks.make_replays import recorded

    place = gpu_units.stand_in()
    records = Records(tmp_path, place)
    (asked,) = by_id("replays-lab02-none")
    assert names(measure([asked], records, **FOREVER)) == [["lab02-none"], [], []], records.read(asked)
    (record,) = recorded(tmp_path)
    assert record.config == asked.config and record.status == "completed"
    assert isinstance(records.read(asked), Record)
