"""Profiles: bounds, provenance, halves, files that are none; a calibration from measurements finds what made them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fit_cost_model import RECIPES, fitted, rows_of, write_profile
from dlojz.base.errors import LabError
from dlojz.cost_model.calibration import (
    BOUNDS,
    Calibration,
    Product,
    calibration,
    class_defaults,
    default_words,
    measured_reach,
    nearest_mean,
    of_gpu,
    on_gpu,
    profile,
    typical,
)
from dlojz.cost_model.measured_machine import Measured, from_measurements
from dlojz.cost_model.validation import FITTED_TABLES, LEFT_OUT, fitted_half, is_fitted, predicted_s, usable, validate
from dlojz.cost_model.workload import product_s
from dlojz.hardware import gpu
from dlojz.hardware.clusters import FOLDER as FOLDER_OF_CLUSTERS
from dlojz.hardware.evidence import TABLES, table
from dlojz.hardware.gpus import write_gpu
from dlojz.running.measure import measured_gpu


def test_calibration_has_at_most_a_dozen_parameters() -> None:
    assert len(BOUNDS) <= 12
    assert tuple(Calibration("x").values) == tuple(BOUNDS)


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_shipped_profile_says_what_it_was_fitted_on(name: str) -> None:
    shipped = profile(name)
    fitted_on, held_out = set(shipped.fitted_on), set(shipped.held_out)
    assert not fitted_on & held_out
    assert fitted_on | held_out == {row.row for row in rows_of(name)}
    assert fitted_on == {row.row for row in rows_of(name) if is_fitted(row)}
    assert set(shipped.fixed) | set(RECIPES[name].free) == set(BOUNDS)


@pytest.mark.parametrize("name", [name for name in TABLES if len(usable(table(name))) > 1])
def test_half_of_each_table_is_held_out(name: str) -> None:
    rows = usable(table(name))
    assert len(fitted_half(name)) == len(rows) // 2


def test_the_half_of_a_row_follows_from_its_name() -> None:
    """These must never change: who reads of held-out rows relies on it."""
    assert "korthikanti-5/175B-full" in {row.row for row in table("korthikanti-5")}
    assert fitted_half("korthikanti-5") == fitted_half.__wrapped__("korthikanti-5")


@pytest.mark.parametrize(("name", "value"), [("product_efficiency", 2.9), ("launch_s", 0.0), ("overlap", float("nan"))])
def test_calibration_refuses_a_parameter_out_of_its_bounds(name: str, value: float) -> None:
    with pytest.raises(LabError, match=name):
        replace(Calibration("x"), **{name: value})  # type: ignore[arg-type]


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    write_profile(path, profile("a100"))
    assert profile(str(path)) == profile("a100")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "^broken.json is no calibration .JSONDecodeError"),
        ("[]", "^broken.json is no calibration .*it needs name, parameters, fitted_on, held_out, source and date"),
        ("{}", "^broken.json is no calibration .KeyError..parameters.."),
        ('{"name": "x", "parameters": {"lunch_s": 1}}', "^unknown parameter 'lunch_s': did you mean 'launch_s'"),
        ('{"name": "x", "parameters": {"launch_s": "fast"}}', "^broken.json is no calibration .ValueError"),
    ],
)
def test_calibration_refuses_a_file_that_is_no_profile(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(LabError, match=words):
        calibration(str(path))


def test_calibration_of_an_unknown_profile_lists_those_there_are() -> None:
    with pytest.raises(LabError, match="a100, h100, v100"):
        calibration("b300")


def test_fitted_finds_the_parameters_that_made_its_rows() -> None:
    """Rows whose times are predictions of a known calibration: the fit must come back to it."""
    truth = Calibration("truth", product_efficiency=0.7, overlap=0.5)
    rows = usable(table("sc21-1"))[:4]
    made = [replace(row, step_s=float(seconds)) for row, seconds in zip(rows, predicted_s(rows, truth), strict=True)]
    found = fitted(replace(truth, product_efficiency=0.85), made, ["product_efficiency"], evaluations=12)
    assert found.product_efficiency == pytest.approx(0.7, abs=0.005)
    # From the truth itself nothing pulls away.
    again = fitted(truth, made, ["product_efficiency"], evaluations=3)
    assert again.product_efficiency == pytest.approx(0.7, abs=1e-6)


def test_own_measurements_come_to_the_calibration_that_made_them() -> None:
    a100 = gpu("a100-80")
    truth = Calibration(
        "truth", product_efficiency=0.6, attention_efficiency=0.3, memory_efficiency=0.5, product_start=0.0
    )
    shapes = [Product(4096, 4096, size) for size in (1024, 2048, 4096)]
    heads = [Product(1024, 1024, 512, 16, attention=True)]
    found = from_measurements(
        "own",
        a100,
        products=[(one, product_s(one, a100, truth, "fp16")) for one in (*shapes, *heads)],
        passes=[(1e9, 1e9 / (0.5 * a100.memory_bytes_per_s))],
        precision="fp16",
    )
    assert found.product_efficiency == pytest.approx(0.6, rel=1e-6)
    assert found.attention_efficiency == pytest.approx(0.3, rel=1e-6)
    assert found.memory_efficiency == pytest.approx(0.5, rel=1e-6)
    with pytest.raises(LabError, match="products"):
        from_measurements("own", a100, products=[], passes=[(1.0, 1.0)])


def test_a_fit_without_each_table_is_shipped_with_nothing_on_a_bound() -> None:
    known = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
    assert set(known) == {table for tables in FITTED_TABLES.values() for table in tables}
    for name, one in RECIPES.items():
        fits = [
            calibration(name).values,
            *(known[table] for table in FITTED_TABLES[name] if len(FITTED_TABLES[name]) > 1),
        ]
        for values, key in ((values, key) for values in fits for key in one.free):
            slack = 0.01 * (BOUNDS[key].high - BOUNDS[key].low)
            assert BOUNDS[key].low + slack < values[key] < BOUNDS[key].high - slack, (name, key)


def test_typical_is_the_median_of_the_shipped_profiles() -> None:
    profiles = [calibration(name) for name in ("a100", "h100", "v100")]
    for name in BOUNDS:
        assert getattr(typical(), name) == sorted(getattr(values, name) for values in profiles)[1]
    assert of_gpu(gpu("l40s")) is typical() and of_gpu(gpu("h200")) is calibration("h100")


MEASURED = replace(
    gpu("l40s"), product_flops={"bf16": {(4096, 4096, 4096): 200e12, (512, 512, 512): 50e12}}, launch_s=9e-6,
    pass_bytes_per_s=0.9 * 864e9,
)  # fmt: skip


def test_a_measured_product_takes_what_was_measured_with_its_kernel() -> None:
    for (m, n, k), rate in MEASURED.product_flops["bf16"].items():
        product = Product(m, n, k)
        for precision in ("bf16", "fp16"):  # measured in bf16, of one peak
            seconds = product_s(product, MEASURED, typical(), precision) + MEASURED.kernel_s
            assert seconds == pytest.approx(product.flops / rate)
    # Half way between two sizes in logarithms, each counts the same: the geometric mean of their shares.
    shares = [measured_reach(Product(n, n, n), MEASURED, typical(), "bf16") for n in (512, 4096)]
    between = nearest_mean((1447, 1447, 1447), {(512, 512, 512): shares[0], (4096, 4096, 4096): shares[1]})
    assert between == pytest.approx((shares[0] * shares[1]) ** 0.5, rel=0.01)
    assert measured_reach(Product(512, 512, 512), MEASURED, typical(), "fp32") is None


def test_on_gpu_puts_what_a_file_measured_before_the_profile() -> None:
    assert on_gpu(typical(), MEASURED) == replace(typical(), memory_efficiency=0.9 * 864e9 / 864e9, launch_s=9e-6)
    assert on_gpu(typical(), gpu("l40s")) is typical()
    with pytest.raises(LabError, match="memory_efficiency is of the memory's bandwidth"):
        on_gpu(typical(), replace(MEASURED, pass_bytes_per_s=0.1 * 864e9))


def test_class_defaults_names_what_nobody_measured() -> None:
    l40s = gpu("l40s")
    names = ("products.bf16", "launch_s", "pass_bandwidth", "attention.flash2")
    assert class_defaults(typical(), l40s, "bf16", "flash2") == names
    assert class_defaults(typical(), replace(MEASURED, left_out=()), "bf16", None) == ()
    assert class_defaults(typical(), replace(MEASURED, left_out=()), "fp8", None) == ("products.fp8",)
    # A profile stands for what is measured of a generation, not for the memory of a process.
    mine = replace(gpu("h100"), left_out=("context", "kernel_s"))
    assert class_defaults(calibration("h100"), mine, "bf16", "cudnn") == ("context",)
    assert class_defaults(calibration("h100"), gpu("h100"), "bf16", "cudnn") == ()
    assert class_defaults(calibration("a100"), gpu("a100-80"), "bf16", "cudnn") == ("attention.cudnn",)
    assert "products.bf16, launch_s, pass_bandwidth, attention.flash2 of L40S 48 GB" in default_words(names, l40s)
    assert default_words((), l40s) == ""


def test_measured_gpu_describes_the_gpu_of_a_record(tmp_path: Path) -> None:
    """An H200, recorded on a GPU; its figures are worked out from the record by hand."""
    record = json.loads((ROOT / "benchmarks/records/gpu-nvidia-h200/time-calibration.json").read_text(encoding="utf-8"))
    chip = measured_gpu(Measured.from_dict(record["result"]))
    assert (chip.name, chip.generation, chip.left_out) == ("nvidia-h200", "h200", ())
    assert chip.kernel_s == pytest.approx(3.064e-6, rel=1e-3)  # a product's gradient, the sixth of eleven
    assert chip.pass_bytes_per_s == pytest.approx(805306368 / 0.0001873935014)  # the middle one of three sums
    assert chip.memory_bytes == gpu("h200").memory_bytes and chip.attention_flops == gpu("h200").attention_flops
    # 8192³ in 40 ms windows is 0.84 of what a few calls after a pause suggest: all rates are those after work.
    assert max(chip.product_flops["bf16"].values()) == pytest.approx(713.8e12, rel=1e-3)
    write_gpu(tmp_path / "nvidia-h200.toml", chip)
    assert gpu(str(tmp_path / "nvidia-h200.toml")) == chip
    with pytest.raises(LabError, match=r"is of a CPU, no GPU: run `dlojz calibrate --device cuda`"):
        kernels = [timing for timing in record["result"]["setups"][0]["timings"] if timing[0] != "kernel"]
        setups = [{"ranks": 1, "timings": kernels, "points": []}]
        measured_gpu(Measured.from_dict({**record["result"], "processor": "a CPU", "setups": setups}))


def test_validate_takes_rows_and_a_gpu_from_files_alone(tmp_path: Path) -> None:
    text = (FOLDER_OF_CLUSTERS / "template.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace('gpu = "a100-80"', 'gpu = "card.toml"'), encoding="utf-8")
    write_gpu(tmp_path / "card.toml", replace(MEASURED, constants={
        **gpu("l40s").constants, "products.bf16": gpu("b200").constants["products.bf16"]}))  # fmt: skip
    (tmp_path / "rows.csv").write_text(
        "row,cluster,engine,layers,hidden,heads,vocabulary,sequence_length,gpus,dp,micro_batch,global_batch,"
        "checkpointing,precision,step_s\na,mine.toml,megatron-core,4,1024,16,32000,1024,8,8,2,16,none,bf16,0.1\n",
        encoding="utf-8",
    )
    result = validate(str(tmp_path / "rows.csv"))
    assert result.profile == "typical" and result.held == result.rows and result.rows[0].predicted_s > 0
    slower = validate(str(tmp_path / "rows.csv"), gpu("a10g"))
    assert slower.rows[0].predicted_s > result.rows[0].predicted_s and slower.profile == "typical"
