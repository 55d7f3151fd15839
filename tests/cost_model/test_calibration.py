"""Profiles: bounds, provenance, halves, files that are none; a calibration from measurements finds what made them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fit_cost_model import RECIPES, fitted, rows_of, write_profile
from dlojz.base.errors import LabError
from dlojz.cost_model.calibration import BOUNDS, Calibration, Product, calibration, profile
from dlojz.cost_model.fit import FITTED_TABLES, fitted_half, is_fitted, predicted_s, usable
from dlojz.cost_model.measured_machine import from_measurements
from dlojz.cost_model.validation import LEFT_OUT
from dlojz.cost_model.workload import product_s
from dlojz.hardware import gpu
from dlojz.hardware.evidence import TABLES, table


def test_calibration_has_at_most_a_dozen_parameters() -> None:
    assert len(BOUNDS) <= 12
    assert tuple(Calibration("x").values) == tuple(BOUNDS)


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
