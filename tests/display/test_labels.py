"""Words of names: each table of the file has those that are shown, and no others."""

from __future__ import annotations

import pytest

from dlojz.base.language import use_language
from dlojz.config.fields import BLOCK_CHOICES
from dlojz.config.layout import GRID_AXES
from dlojz.display import style
from dlojz.display.figures.communication_figures import STYLES
from dlojz.display.style import PHASE_STYLES, SCHEDULE_STYLES, category_label, phase_label
from dlojz.display.tables import status_label
from dlojz.pipeline.partition import MEASURES, PEERS
from dlojz.results.footprint import CATEGORIES, NO_GRAD
from dlojz.results.rank_profile import KINDS, OTHER_KIND
from dlojz.results.record import STATUSES

NAMES = {
    "category": {*CATEGORIES, "peak"},
    "phase": {*PHASE_STYLES, NO_GRAD},
    "action": {*SCHEDULE_STYLES},
    "status": {*STATUSES, "running", "queued"},
    "kernel": {*KINDS, OTHER_KIND, "computing", "exposed", "hidden", "idle"},
    "choice": {*BLOCK_CHOICES},
    "axis": {*GRID_AXES, "twins", "tied", "control"},
    "chunk": {*STYLES},
}


@pytest.mark.parametrize("table", NAMES)
def test_tables_of_labels_have_the_names_that_are_shown(table: str) -> None:
    assert {*style._labels()[table]} == NAMES[table]


def test_tables_of_labels_are_those_that_a_test_knows() -> None:
    assert {*style._labels()} == {*NAMES, "cut"}
    assert {*style._labels()["cut"]} <= {*PEERS, *MEASURES, "exact"}


def test_labels_are_in_the_language_of_the_reader_and_other_names_stay() -> None:
    assert (category_label("master"), phase_label("unnamed"), status_label("oom")) == ("master copy", "unnamed", "oom")
    use_language("fr")
    assert (category_label("master"), phase_label("unnamed"), status_label("oom")) == (
        *("copie maître", "unnamed", "mémoire épuisée"),
    )
