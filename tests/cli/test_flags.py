"""A command line gives texts; the configuration that it asks for is the one that a notebook's numbers ask for."""

import re

import pytest

from dlojz.base.errors import LabError
from dlojz.cli.options import Given, config_flags, config_of, flags, parse
from dlojz.config.fields import SUBJECTS
from dlojz.config.layout import Layout
from dlojz.config.run_config import HIDDEN, RunConfig


def given(*words: str) -> Given:
    """What a command that takes a whole configuration is given."""
    return parse("dlojz run", config_flags(), words)


def test_parse_reads_numbers_at_the_edge_of_the_command_line() -> None:
    words = "--steps 12 --learning-rate 1e-2 --chunks=2 --bucket-mib 4 --schedule 1f1b --model 7 --keep_weights"
    assert given(*words.split()) == {
        **{"steps": 12, "learning_rate": 0.01, "chunks": 2, "bucket_mib": 4.0},
        **{"schedule": "1f1b", "model": "7", "keep_weights": True},
    }
    assert given("--steps", "many", "--dp", "2") == {"steps": "many", "dp": 2}


def test_every_field_belongs_to_one_subject() -> None:
    of_subjects = [name for subject in SUBJECTS for name in subject.fields.model_fields]
    assert len(of_subjects) == len(set(of_subjects))
    assert {*of_subjects} == {*RunConfig.model_fields, *Layout.model_fields} - set(HIDDEN)
    assert [flag.name for flag in config_flags()] == of_subjects
    assert all(flag.en and flag.fr for flag in config_flags())


def test_parse_leaves_words_after_two_hyphens_as_they_are() -> None:
    options = flags("""
    --nproc INT = 1  processes // processus
    [SCRIPT]  script // script
    -- ARGUMENTS  its words // ses mots
    """)
    assert options[2].kind == "rest"
    assert parse("dlojz run", options, ["train.py", "--nproc", "2", "--", "--nproc", "3", "--", "-h"]) == {
        **{"words": ("train.py",), "nproc": 2, "rest": ("--nproc", "3", "--", "-h")}
    }
    assert parse("dlojz run", options, ["train.py"])["rest"] == ()


def test_flags_are_declared_as_text() -> None:
    number, several, switch, words = flags("""
    -n --number-of INT>=2 = 4  how many // combien
    --set NAME=VALUE...  several // plusieurs
        choses
    --quiet  no noise // sans bruit
    [FILE…]  files // fichiers
    """)
    assert (number.name, number.spellings, number.metavar, number.default, number.least) == (
        *("number_of", ("-n", "--number-of"), "INT", 4, 2),
    )
    assert (several.metavar, several.kind, several.default) == ("NAME=VALUE", "repeated", ())
    assert several.fr == "plusieurs choses"
    assert (switch.kind, switch.default, words.kind, words.name) == ("switch", False, "words", "words")
    given = parse("dlojz x", (number, several, switch, words), ["a", "--set", "b=1", "-n", "3", "--set=c=2"])
    assert given == {"number_of": 3, "set": ("b=1", "c=2"), "words": ("a",)} and given["quiet"] is False


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-n", "1"], "--number-of must be at least 2 and finite, but '1' was received."),
        (["--number-of=x"], "--number-of takes a number, but 'x' was received."),
        (["--quiet=1"], "--quiet of `dlojz x` takes no value: write it alone."),
        (["--quite"], "did you mean '--quiet'?"),
        (["-n"], "--number-of needs a value after it (INT)"),
        (["word"], "does not know what to do with the word 'word'"),
    ],
)
def test_parse_refuses_what_it_cannot_read(words: list[str], sentence: str) -> None:
    with pytest.raises(LabError, match=re.escape(sentence)):
        parse("dlojz x", flags("-n --number-of INT>=2  how many\n--quiet  no noise"), words)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "one_bit_adam", "engine": "by_hand", "dp": 2, "steps": 40},
        {"optimizer": "diloco", "engine": "by_hand", "dp": 2, "steps": 4},
        {"model": "gpt_tiny", "curriculum": "linear", "curriculum_multiple": 16, "sequence_length": 64, "steps": 30},
    ],
)
def test_config_of_words_is_filled_in_as_one_of_numbers(fields: dict[str, str | int]) -> None:
    words = (word for name, value in fields.items() for word in (f"--{name}", str(value)))
    assert config_of(given(*words)) == RunConfig.of(**fields)


def test_config_of_words_refuses_what_is_no_number_by_its_field() -> None:
    with pytest.raises(LabError, match="dp.*integer.*'two' was received"):
        config_of(given("--dp", "two"))
