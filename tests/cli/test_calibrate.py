"""`dlojz calibrate`: measures on real processes, keeps a file, shows it, and refuses in one sentence."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlojz.base.errors import LabError
from dlojz.cli import collectives
from dlojz.cli.collectives import calibrate_command
from dlojz.cost_model.measured_machine import Measured, read_measured, write_measured
from dlojz.cost_model.measuring import ATTENTION, CONVOLUTIONS, HALF, MESSAGES, PASSES, PRODUCTS, UPDATES, count_engines
from dlojz.hardware import gpu
from tests.planner.test_here import setup_of as of_a_cpu

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_are_measured_kept_and_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept, picture = tmp_path / "own.json", tmp_path / "own.png"
    words = ["--quick", "--ranks", "1,2", "--device", "cpu", "--output", str(kept)]
    assert calibrate_command([*words, "--figure", str(picture), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [one["ranks"] for one in told["sites"]] == [1, 2]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    alone, two = read_measured(kept).setups
    computed = sum(map(len, (PRODUCTS, HALF, ATTENTION, CONVOLUTIONS, UPDATES))) + 3 * len(PASSES) + 2
    engines = [count_engines(ranks) for ranks in (1, 2)]
    assert (len(alone.timings), len(two.timings)) == (computed + engines[0], computed + 2 + engines[1])
    assert not alone.points and len(two.points) == 6 * len(MESSAGES)
    assert calibrate_command(["--show", "--output", str(kept)]) == 0
    shown = capfd.readouterr().out
    assert "all-reduce" in shown and "2 rank(s): large product" in shown


@pytest.mark.parametrize("ranks", ["2,4", "1,4,2", "one", "1,1", "1,99", ""])
def test_calibrate_command_refuses_illegal_numbers_of_ranks(ranks: str) -> None:
    with pytest.raises(LabError, match="--ranks takes numbers that grow from 1"):
        calibrate_command(["--ranks", ranks])


def test_calibrate_command_refuses_an_unknown_device_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="unknown device 'tpu'"):
        calibrate_command(["--device", "tpu"])
    with pytest.raises(LabError, match="run `dlojz calibrate` first"):
        calibrate_command(["--show", "--output", str(tmp_path / "none.json")])


def test_calibrate_command_writes_the_file_of_a_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = ROOT / "benchmarks/records/gpu-nvidia-h100-80gb-hbm3/time-calibration.json"
    measured = Measured.from_dict(json.loads(record.read_text(encoding="utf-8"))["result"])
    kept, gpu_file = tmp_path / "record.json", tmp_path / "card.toml"
    write_measured(kept, measured)
    assert calibrate_command(["--show", "--output", str(kept), "--gpu-file", str(gpu_file)]) == 0
    assert "residual" in capfd.readouterr().out
    card = gpu(str(gpu_file))
    assert card.kernel_s == pytest.approx(3.148e-6) and len(card.product_flops["bf16"]) > 100
    write_measured(kept, measured.model_copy(update={"setups": (of_a_cpu(1),)}))
    with pytest.raises(LabError, match="no GPU: run `dlojz calibrate --device cuda`"):
        calibrate_command(["--show", "--output", str(kept), "--gpu-file", str(gpu_file)])


def test_calibrate_summary_tells_the_highest_peak_that_products_reach() -> None:
    """Half of 400 GFLOP/s of fp32, not of the 30 that bf16 has on a CPU; and 80 % of 20 GB/s."""
    chip = SimpleNamespace(peak_flops={"fp32": 4e11, "bf16": 3e10}, memory_bytes_per_s=2e10)
    fitted = SimpleNamespace(product_efficiency=0.5, memory_efficiency=0.8, serial_s=2e-6)
    fitted_site = SimpleNamespace(
        ranks=1, calibration=fitted, cluster=SimpleNamespace(gpu=chip), update=SimpleNamespace(start=3e-6)
    )
    measured = SimpleNamespace(processor="CPU", words=lambda ranks: "today", setups=[SimpleNamespace(ranks=1)])
    first, second = collectives._summary(measured, [fitted_site])  # type: ignore[arg-type,list-item]
    assert first == "CPU, today" and "200 GFLOP/s" in second and "16" in second
