"""Which labs exist, and how one is opened.

Layer 6 (labs). Invariant: opening a lab chooses the language of everything the package says from then on.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from dlojz.labs.difference import diff_of_run
from dlojz.labs.lab import Lab
from dlojz.labs.notebook import notebook_language
from dlojz.runs.student_code import answer_with
from dlojz.schema import LabError, one_of
from dlojz.text import use_language

_MODULES = {
    "00": "getting_started",
    "01": "big_models",
    "02": "memory_footprint",
    "03": "data_parallelism",
    "04": "zero",
    "05": "pipeline_parallelism",
    "06": "tensor_parallelism",
    "07": "hybrid",
    "08": "best_compromise",
    "09": "distributed_optimizers",
    "10": "moe_and_curriculum",
    "11": "inference_fine_tuning",
    "12": "the_libraries",
}
NUMBERS = tuple(_MODULES)


def start(number: str, *, root: Path | None = None) -> Lab:
    """Open a lab in the language of the notebook that calls.

    Args:
        number: Two digits, e.g. `01`.
        root: Folder of the runs, where the progress is kept; by default that of `dlojz.runs()`.

    Raises:
        LabError: if there is no such lab; the sentence lists those that exist.
    """
    if number not in _MODULES:
        raise LabError(one_of("lab", number, _MODULES))
    use_language(notebook_language())
    _give_ranks()
    content = content_of(number)
    lab = Lab(
        number, content.TITLE, exercises=content.EXERCISES, predictions=content.PREDICTIONS, root=root or _runs_root()
    )
    answer_with(lambda run, exercise: diff_of_run(lab, run, exercise))
    return lab


def content_of(number: str) -> Any:
    """The module of a lab: its `TITLE`, its `EXERCISES` and its `PREDICTIONS`, in the order of the notebook.

    Raises:
        LabError: if there is no such lab; the sentence lists those that exist.
    """
    if number not in _MODULES:
        raise LabError(one_of("lab", number, _MODULES))
    return importlib.import_module(f"dlojz.labs.{_MODULES[number]}")


def _give_ranks() -> None:
    """`%%ranks` and `ranks`, where there is a notebook to have them; no rank is started yet."""
    from IPython.core.getipython import get_ipython

    from dlojz.ranks import load_ipython_extension

    shell = get_ipython()
    if shell is not None:
        load_ipython_extension(shell)


def _runs_root() -> Path:
    from dlojz.runs.store import runs_root

    return runs_root()
