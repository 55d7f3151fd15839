"""Cells of a lab that need an exercise still to do say so in one sentence; every other error is shown as ever."""

from typing import Any

import nbformat
import pytest

from dlojz.labs.kit.build import execute
from dlojz.labs.kit.exercise import not_done

TO_DO = f"… {not_done('ring-all-reduce')}"
MISSING = "… {} is not there yet. " + not_done("ring-all-reduce")
STUB = "def mean(x):\n    raise labs.NotDone('ring-all-reduce')"
CELLS: dict[str, list[str]] = {
    "from dlojz import labs\nlab = labs.start('03')": [],
    STUB: [],
    "losses = mean(3)\ndef after():\n    inner = 1": [TO_DO],
    "print(losses)": [MISSING.format("losses")],
    "after()": [MISSING.format("after")],
    "print([inner])": ["NameError"],
    "print(1 +": ["SyntaxError"],
    "1 / 0": ["ZeroDivisionError"],
    "%%ranks 2 --with mean\nshare = rank\npiece = mean(rank)": [TO_DO],
    "%%ranks\nprint(share + len(piece))": [MISSING.format("piece")],
    "%%ranks\nprint(unknown)": ["RanksError"],
    "ranks['piece']": [MISSING.format("piece")],
    "%%ranks --with losses\nprint(losses)": [MISSING.format("losses")],
    "filled = {}\nfilled['a'] = mean(2)": [TO_DO],
    "filled['a']": [TO_DO],
    "losses = 1": [],
    "losses": ["1"],
    "%%ranks --with mean\npieces = []\npieces.append(mean(2))": [TO_DO],
    "ranks['pieces'][0][0]": [TO_DO],
    "%%ranks\npiece = 1": [],
    "ranks['piece']  # again": ["[1, 1]"],
    "lab.reveal('ring-seconds', mean(2))": [TO_DO],
    "def alpha_beta(latency_s, bandwidth):\n    return None\nlab.check('alpha-beta', alpha_beta)": ["✗"],
    "alpha_beta(1, 2) + 1": ["TypeError", "✗ lab.check has not found your function alpha_beta right"],
    "[alpha_beta(1, 2)]": ["[None]", "→ What this cell shows is computed by alpha_beta"],
    "def drawn():\n    return [alpha_beta(1, 2)]": [],
    "drawn()": ["[None]", "→ What this cell shows is computed by alpha_beta"],
    "import types\ndef of_run(run):\n    return run.alpha_beta\nof_run(types.SimpleNamespace(alpha_beta=2))": ["2"],
}


def told(output: Any) -> str:
    """The class of an error, else the text."""
    return str(output["ename"] if output.output_type == "error" else output["data"]["text/plain"])


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("unfinished")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    notebook.metadata["dlojz"] = {"language": "en"}
    return execute(notebook, folder / "lab.ipynb", runs_root=folder / "runs", allow_errors=True).cells


def test_a_cell_says_what_it_waits_for(cells: Any) -> None:
    for cell, (source, expected) in zip(cells, CELLS.items(), strict=True):
        texts = [told(output) for output in cell.outputs]
        assert len(texts) == len(expected), (source, texts)
        for text, one in zip(texts, expected, strict=True):
            assert text == one if one.startswith("…") else text.startswith(one), source
