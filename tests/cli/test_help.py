"""What each `--help` teaches, and that it comes at once."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cli.labs import labs_command
from dlojz.cli.main import SUBCOMMANDS, main
from dlojz.cli.options import EVERYDAY, LONG_HELP, Verb, help_texts, parse, shared_flags
from dlojz.config.fields import HELP, SUBJECTS
from tests.cli.process import dlojz_process

Help = Callable[..., str]
LONG_VERBS = ("run", "predict", "memory", "machines")
"""Verbs with the options of a whole configuration."""


def verb_of(name: str) -> Verb:
    """The command `dlojz NAME`; of `labs`, also one of its actions."""
    if name.startswith("labs "):
        return next(action for action in labs_command.actions if action.name == name)
    found = getattr(importlib.import_module(f"dlojz.cli.{SUBCOMMANDS[name].module}"), f"{name}_command")
    assert isinstance(found, Verb)
    return found


VERBS = [*SUBCOMMANDS, *(action.name for action in labs_command.actions)]


def rows(printed: str) -> set[str]:
    """Options that have a row of their own in a help; the first name of each but its short one."""
    return {row.split()[-1] for row in re.findall(r"^│ (?:-\w, )?(--[\w-]+)", printed, re.MULTILINE)}


def options_in(line: str) -> list[str]:
    """Options of dlojz in a command line; what follows `--` is another program's."""
    return re.findall(r"(?<=\s)--?[a-zA-Z][\w-]*", line.partition(" -- ")[0])


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str]) -> Help:
    """What a command line that asks for help prints, in this process."""

    def ask(*words: str, language: str = "en") -> str:
        use_language(language)
        code = main(words)
        told = capsys.readouterr()
        assert (code, told.err) == (0, "")
        return told.out

    return ask


def test_subcommands_are_all_told_by_the_command_without_words() -> None:
    done = dlojz_process(DLOJZ_LANG="fr")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {name} " in done.stdout for name in SUBCOMMANDS) and "modèles" in done.stdout


def test_help_texts_are_all_those_of_a_command() -> None:
    files = (Path(labs_command.run.__code__.co_filename).parent / "data").glob("*.md")
    described = {name for file in files if file.stem != "sentences" for name in help_texts(file.stem)}
    assert described == {*VERBS, "python -m dlojz.train"}


def test_sets_of_options_are_all_named_in_a_help_text_or_by_the_package() -> None:
    folder = Path(labs_command.run.__code__.co_filename).parent / "data"
    named = {name for file in folder.glob("*.md") for name in re.findall(r"\{(\w+)\}", file.read_text("utf-8"))}
    assert {*shared_flags()} <= named | {"help", "gpu", "compiled"}


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_subcommands_are_all_named_in_the_overview(words: list[str], help_of: Help) -> None:
    printed = help_of(*words)
    assert all(f"\n  {name} " in printed for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", VERBS)
def test_subcommands_have_two_examples_each_in_their_help(name: str, help_of: Help) -> None:
    printed = help_of(*name.split(), "--help")
    assert "Examples:" in printed and printed.count(f"\n  dlojz {name}") >= 2
    assert "Exemples :" in help_of(*name.split(), "--help", language="fr")


@pytest.mark.parametrize(("language", "columns"), [("en", 80), ("fr", 120)])
@pytest.mark.parametrize("verb", LONG_VERBS)
def test_every_field_is_shown_in_the_panel_of_its_subject(
    verb: str, language: str, columns: int, help_of: Help, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = help_of(verb, "--help-all", language=language)
    assert max(len(line) for line in printed.splitlines() if line.startswith(("╭", "│", "╰"))) == columns
    panels = {panel.split(" ─")[0]: " ".join(panel.replace("│", " ").split()) for panel in printed.split("╭─ ")[1:]}
    for subject in SUBJECTS:
        for name in subject.fields.model_fields:
            assert f"--{name.replace('_', '-')}" in panels[subject.title]
            told = getattr(HELP.pairs[name], language)
            assert name == "device" or " ".join(told.split()) in panels[subject.title]
    assert "--json" in panels["options"] and len(panels) == len(SUBJECTS) + 1


def test_the_long_verbs_are_those_with_a_whole_configuration() -> None:
    assert {name for name in SUBCOMMANDS if len(verb_of(name).options) >= LONG_HELP} == {*LONG_VERBS}


@pytest.mark.parametrize("language", ["en", "fr"])
@pytest.mark.parametrize("verb", LONG_VERBS)
def test_a_long_verb_shows_its_everyday_options_and_names_the_rest(verb: str, language: str, help_of: Help) -> None:
    printed = help_of(verb, "--help", language=language)
    assert printed == help_of(verb, "-h", language=language)
    spelled = {flag.option: flag.name for flag in verb_of(verb).options if flag.spellings}
    shown = rows(printed)
    assert {spelled[option] for option in shown - {"--help"}} == EVERYDAY & {*spelled.values()}
    assert 15 <= len(shown) <= 25
    last = printed.splitlines()[-1]
    assert f"`dlojz {verb} --help-all`" in last and f" {len(spelled)}" in last
    assert {"--model", "--dp", "--zero", "--micro-batch", "--json", "--help"} <= shown


def test_every_everyday_option_is_one_of_a_long_verb() -> None:
    assert {flag.name for verb in LONG_VERBS for flag in verb_of(verb).options} >= EVERYDAY


@pytest.mark.parametrize("verb", VERBS)
def test_help_all_has_every_option(verb: str, help_of: Help) -> None:
    printed = help_of(*verb.split(), "--help-all")
    assert rows(printed) == {*(flag.option for flag in verb_of(verb).options if flag.spellings), "--help"}
    assert "--help-all`" not in printed
    assert verb in LONG_VERBS or printed == help_of(*verb.split(), "--help")


@pytest.mark.parametrize("verb", VERBS)
def test_examples_use_options_that_their_help_shows(verb: str, help_of: Help) -> None:
    lines = re.findall(rf"^  dlojz {verb}\b.*$", help_of(*verb.split(), "--help"), re.MULTILINE)
    spellings = {spelling for flag in verb_of(verb).options for spelling in flag.spellings}
    used = {option for line in lines for option in options_in(line.partition("   (")[0])}
    assert used <= spellings
    assert verb not in LONG_VERBS or used <= rows(help_of(verb, "--help"))


def test_an_option_that_the_short_help_leaves_out_is_suggested_all_the_same() -> None:
    for typed, meant in (
        ("--offlod", "--offload"),
        ("--capacity-facto", "--capacity-factor"),
        ("--help-al", "--help-all"),
    ):
        with pytest.raises(LabError, match=f"did you mean '{meant}'"):
            parse("dlojz run", verb_of("run").options, [typed, "optimizer"])


def test_the_help_of_a_script_is_left_to_the_script() -> None:
    assert parse("dlojz run", verb_of("run").options, ["train.py", "--", "--help-all"])["rest"] == ("--help-all",)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["run", "--help-all"], ["compare", "--help"]])
def test_help_loads_no_heavy_library(words: list[str]) -> None:
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nfrom dlojz.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
            "print('LOADED', *({'torch', 'matplotlib', 'deepspeed', 'IPython'} & sys.modules.keys()))",
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    assert loaded.splitlines()[-1] == "LOADED"


NEEDED = (
    ("--version", ""),
    ("--help", ""),
    ("runs --help", ""),
    ("logs --help", ""),
    ("labs copy --help", ""),
    ("labs", "display labs results"),
    ("labs glossary bubble", ""),
    ("memory --help", "config hardware"),
    ("runs", "data models running"),
)
"""Command lines, one after the other in one process, each with the rooms that it loads besides those before it."""


def test_every_verb_loads_only_the_rooms_that_it_needs(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom dlojz.cli.main import main\nfor line in sys.argv[1:]:\n    main(line.split())\n"
        "    names = (module.split('.') for module in sys.modules)\n"
        "    print('ROOMS', *sorted({name[1] for name in names if name[0] == 'dlojz' and len(name) > 1}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code, *(line for line, _ in NEEDED)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "DLOJZ_RUNS": str(tmp_path)},
    ).stdout
    loaded = [set(line.split()[1:]) for line in printed.splitlines() if line.startswith("ROOMS")]
    needed = {"base", "cli"}
    for (line, rooms), seen in zip(NEEDED, loaded, strict=True):
        needed |= {*rooms.split()}
        assert seen <= needed, f"dlojz {line} loads {sorted(seen - needed)}"
