"""A command line gives texts; the configuration that it asks for is the one that a notebook's numbers ask for."""

from __future__ import annotations

import pytest

from dlojz.base.errors import LabError
from dlojz.cli.options import config_of, typed
from dlojz.config.run_config import RunConfig


def test_numbers_are_parsed_at_the_command_line_s_edge() -> None:
    words = {"steps": "12", "learning_rate": "1e-2", "chunks": "2", "bucket_mib": "4", "schedule": "1f1b", "model": "7"}
    assert typed(words) == {
        **{"steps": 12, "learning_rate": 0.01, "chunks": 2, "bucket_mib": 4.0},
        **{"schedule": "1f1b", "model": "7"},
    }
    assert typed({"steps": "many", "dp": 2}) == {"steps": "many", "dp": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "one_bit_adam", "engine": "by_hand", "dp": 2, "steps": 40},
        {"optimizer": "diloco", "engine": "by_hand", "dp": 2, "steps": 4},
        {"model": "gpt_tiny", "curriculum": "linear", "curriculum_multiple": 16, "sequence_length": 64, "steps": 30},
    ],
)
def test_what_is_filled_in_is_the_same_for_words_and_for_numbers(fields: dict[str, str | int]) -> None:
    config = config_of({name: str(value) for name, value in fields.items()})
    assert config == RunConfig.of(**fields)


def test_what_is_no_number_is_refused_by_its_field() -> None:
    with pytest.raises(LabError, match="dp.*integer.*'two' was received"):
        config_of({"dp": "two"})
