"""`dlojz doctor RUN`: a run that really ran out of memory, and runs that did not."""

import json
import shlex
from pathlib import Path

import pytest

from dlojz.base.language import format_bytes, use_language
from dlojz.cli.main import DONE, REFUSED, main
from dlojz.cli.options import config_flags, parse
from dlojz.config.run_config import RunConfig
from dlojz.prediction import predict
from dlojz.prediction.forecast import forecast
from dlojz.results.footprint import Footprint
from dlojz.results.record import RunRecord, write_record
from dlojz.running.failures.out_of_memory import CHEAPEST_FIRST, PostMortem, memory_lines, post_mortem
from dlojz.running.launch import run
from dlojz.running.run import Run, find

CRAMPED = {"data": "synthetic", "image_size": 64, "engine": "single", "micro_batch": 512, "steps": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def failed(root: Path) -> Run:
    """A real worker whose allocator is refused memory by the system (see cramped_worker.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return run(**CRAMPED, worker_module="cramped_worker", root=root, progress=False)


def _kept(root: Path, record: RunRecord) -> Run:
    """A run of which only the record is left."""
    folder = root / record.run_id
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(record.config.to_json())
    write_record(folder / "record.json", record)
    return find(record.run_id, root)


def test_a_real_lack_of_memory_is_explained(failed: Run, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert failed.state == "oom"
    assert main(["doctor", failed.run_id, "--root", str(root)]) == DONE
    printed = capfd.readouterr().out
    expected = forecast(failed.config).memory
    assert "ran out of memory" in printed and "predicted, as nothing was measured" in printed
    assert format_bytes(expected.peak_bytes) in printed and format_bytes(expected.activations_bytes) in printed
    assert "something else refused the memory" in printed or " fits\n" in printed
    commands = [line.strip() for line in printed.splitlines() if line.strip().startswith("dlojz run ")]
    assert len(commands) == 3
    for command in commands:  # each asks for a legal run that holds less
        config = RunConfig.of(**parse("dlojz run", config_flags(), shlex.split(command)[2:]))
        assert (forecast(config).memory.peak_bytes or 0) < (expected.peak_bytes or 0)


def test_main_doctor_of_a_run_answers_as_json_and_in_french(
    failed: Run, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", failed.run_id[:15], "--root", str(root), "--json"]) == DONE
    told = json.loads(capfd.readouterr().out)
    assert told["out_of_memory"] is True and told["source"] == "predicted" and len(told["levers"]) == 3
    use_language("fr")
    assert main(["doctor", failed.run_id, "--root", str(root)]) == DONE
    printed = " ".join(capfd.readouterr().out.split())
    assert "a épuisé la mémoire" in printed and "Les leviers les moins coûteux" in printed


def _oom(limit_bytes: int, measured: bool = False) -> RunRecord:
    config = RunConfig.of(dp=2, micro_batch=64)
    footprints = ()
    if measured:
        predicted = predict(config)
        footprints = (Footprint(source="measured", parameters=predicted.parameters, memory=predicted.memory),)
    return RunRecord(
        run_id=f"20250101-120000-{config.hash}-{int(measured):04x}",
        config=config,
        status="oom",
        reason="rank 0: MemoryError",
        footprints=footprints,
        environment={"device": "CPU", "memory_limit_bytes": str(limit_bytes)},
    )


def _diagnosis(root: Path, limit_bytes: int, measured: bool = False) -> PostMortem:
    return post_mortem(_kept(root, _oom(limit_bytes, measured)))


def test_a_lever_that_suffices_comes_before_one_that_does_not(tmp_path: Path) -> None:
    """The limit is just below the peak, or so low that only the strongest lever reaches it."""
    peak = forecast(_oom(0).config).memory.peak_bytes or 0
    near = _diagnosis(tmp_path, int(0.99 * peak))
    assert near.limit_explains and all(near.fits(lever) for lever in near.levers)
    places = [CHEAPEST_FIRST.index(lever.name) for lever in near.levers]
    assert places == sorted(places)
    assert all(lever.runnable for lever in near.levers)
    far = _diagnosis(tmp_path, int(0.45 * peak))
    verdicts = [far.fits(lever) for lever in far.levers]
    assert verdicts == sorted(verdicts, reverse=True)
    assert not any(lever.name.startswith("offload") for lever in (*near.levers, *far.levers))


def test_a_limit_far_above_the_peak_explains_nothing(tmp_path: Path) -> None:
    found = _diagnosis(tmp_path, 2**50)
    assert not found.limit_explains and all(found.fits(lever) is None for lever in found.levers)


@pytest.mark.parametrize(
    ("asked", "num_bytes", "cause"),
    [
        ("[enforce fail] you tried to allocate 4096 bytes. Error code 12", 4096, "something else refused the memory"),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 3 * 2**29, "something else refused the memory"),
        (f"you tried to allocate {2**50} bytes.", 2**50, "It then asked for 1.00 PiB at once, more than the limit"),
    ],
)
def test_post_mortem_finds_one_tensor_that_is_too_large(asked: str, num_bytes: int, cause: str, tmp_path: Path) -> None:
    record = _oom(2**40, measured=True).model_copy(update={"reason": f"rank 0: RuntimeError: {asked}"})
    found = post_mortem(_kept(tmp_path, record))
    assert found.asked_bytes == num_bytes
    assert cause in "\n".join(memory_lines(found))


def test_what_was_measured_is_told_as_such(tmp_path: Path) -> None:
    found = _diagnosis(tmp_path, 2**30, measured=True)
    assert found.measured and found.to_dict()["source"] == "measured"


def test_of_several_ranks_the_fullest_is_told(tmp_path: Path) -> None:
    record = _oom(2**30, measured=True)
    small = record.footprints[0]
    peak = small.memory.peak_bytes or 0
    large = small.model_copy(update={"rank": 1, "memory": small.memory.model_copy(update={"peak_bytes": peak + 1})})
    found = post_mortem(_kept(tmp_path, record.model_copy(update={"footprints": (small, large)})))
    assert found.rank == 1 and found.memory.peak_bytes == peak + 1


def test_a_run_that_completed_did_not_lack_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = _oom(2**34, measured=True).model_copy(update={"status": "completed", "reason": ""})
    _kept(tmp_path, record)
    assert main(["doctor", record.run_id, "--root", str(tmp_path)]) == DONE
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2 and "did not run out of memory: completed" in lines[0]
    assert format_bytes(record.footprints[0].memory.peak_bytes) in lines[1] and "measured" in lines[1]


@pytest.mark.parametrize("words, expected", [(["19990101"], "no run is named"), (["a", "b"], "takes [RUN|LOG] (name")])
def test_main_doctor_of_a_run_refuses_in_one_sentence(
    words: list[str], expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words, "--root", str(tmp_path)]) == REFUSED
    told = capfd.readouterr()
    assert expected in told.err and told.out == "" and told.err.count("\n") == 1
