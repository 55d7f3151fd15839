"""docs/faults.md keeps its word: every fault has its row, and every test that it names is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FAULTS = 26


def test_every_fault_has_its_row_and_every_row_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| F")]
    assert [row.split("|")[1].strip() for row in rows] == [f"F{number}" for number in range(1, FAULTS + 1)]
    tables = [
        line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| |", "| situation"))
    ]
    assert all(NAMED.search(row) for row in tables)
    assert len(tables) > FAULTS


def test_every_test_that_is_named_is_there() -> None:
    named = NAMED.findall(PAGE)
    assert named
    known: dict[str, set[str]] = {}
    for file, _ in named:
        if file not in known:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            known[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing = [f"{file}::{name}" for file, name in named if name not in known[file] or not name.startswith("test_")]
    assert not missing


def test_every_file_that_is_named_is_there() -> None:
    files = re.findall(r"`((?:dlojz|tests)/[\w/]+\.py)`", PAGE)
    assert files
    assert all((ROOT / file).is_file() for file in files)
