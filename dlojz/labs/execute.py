"""Run a solution notebook where it lies and keep what it showed.

Layer 6 (labs). Invariant: stored outputs carry the checksum of the code they came from, so that outputs of an older
source are never taken for those of the present one.
"""

from __future__ import annotations

import copy
import hashlib
import os
from pathlib import Path
from typing import Any

from dlojz.runs.progress import QUIET
from dlojz.schema import LabError

CELL_TIMEOUT_S = 300
_WIDGET = "application/vnd.jupyter.widget-view+json"


def code_sha256(notebook: Any) -> str:
    """Checksum of the code cells of a notebook, in order."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def execute(notebook: Any, path: Path, *, runs_root: Path, allow_errors: bool = False) -> Any:
    """A copy of the notebook with its outputs.

    Args:
        path: Where the notebook lies or will lie: its folder becomes the working folder, its name gives the language.
        runs_root: Folder of the runs it makes or finds.
        allow_errors: Go on after a cell that raises.

    Raises:
        LabError: naming the notebook and the cell that failed.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    done = copy.deepcopy(notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    client = NotebookClient(
        done,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        allow_errors=allow_errors,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        own = {"JPY_SESSION_NAME": str(path.resolve()), **own_folders(runs_root), QUIET: "off"}
        client.execute(env={**os.environ, **own})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise LabError(f"{path.parent.name}/{path.name} does not run to its end:\n{error}") from None
    done.metadata = copy.deepcopy(notebook.metadata)
    for cell in done.cells:
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _without_widget(output))]
    done.metadata["dlojz"]["executed_sha256"] = code_sha256(notebook)
    return done


def own_folders(runs_root: Path) -> dict[str, str]:
    """Environment variables by which a notebook keeps its runs and its calibration apart from the user's."""
    return {"DLOJZ_RUNS": str(runs_root), "XDG_CONFIG_HOME": str(runs_root.with_name(runs_root.name + "-config"))}


def _without_widget(output: Any) -> Any | None:
    """An output that a reader without a kernel can see: the static twin of a widget, nothing where it has none."""
    if _WIDGET in output.get("data", {}):
        del output["data"][_WIDGET]
        return output if "text/html" in output["data"] else None
    return output


def with_stored_outputs(notebook: Any, stored: Any) -> Any | None:
    """A copy of the notebook with the outputs of an earlier execution; None where its code has changed since."""
    if stored.metadata.get("dlojz", {}).get("executed_sha256") != code_sha256(notebook):
        return None
    outputs = [(cell.outputs, cell.execution_count) for cell in stored.cells if cell.cell_type == "code"]
    kept = copy.deepcopy(notebook)
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    if len(cells) != len(outputs) or any(count is None for _, count in outputs):
        return None
    for cell, (shown, count) in zip(cells, outputs, strict=True):
        cell.outputs, cell.execution_count = copy.deepcopy(shown), count
    kept.metadata["dlojz"]["executed_sha256"] = code_sha256(notebook)
    return kept


def without_outputs(notebook: Any) -> Any:
    """A copy without outputs, execution counts and the checksum that vouches for them."""
    bare = copy.deepcopy(notebook)
    bare.metadata.get("dlojz", {}).pop("executed_sha256", None)
    for cell in bare.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return bare
