"""What each `--help` teaches, and that it comes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import SUBCOMMANDS, main
from dlojz.config.fields import SUBJECTS, field_help

Help = Callable[..., str]


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
    done = subprocess.run(
        [sys.executable, "-m", "dlojz"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "DLOJZ_LANG": "fr"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {name} " in done.stdout for name in SUBCOMMANDS) and "modèles" in done.stdout


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_subcommands_are_all_named_in_the_overview(words: list[str], help_of: Help) -> None:
    printed = help_of(*words)
    assert all(f"\n  {name} " in printed for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_subcommands_have_two_examples_each_in_their_help(name: str, help_of: Help) -> None:
    printed = help_of(name, "--help")
    assert "Examples:" in printed and printed.count(f"\n  dlojz {name}") >= 2
    assert "Exemples :" in help_of(name, "--help", language="fr")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("language", ["en", "fr"])
@pytest.mark.parametrize("verb", ["run", "predict", "memory", "machines"])
def test_every_field_is_shown_in_the_panel_of_its_subject(
    verb: str, language: str, columns: int, help_of: Help, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = help_of(verb, "--help", language=language)
    assert max(len(line) for line in printed.splitlines() if line.startswith(("╭", "│", "╰"))) == columns
    panels = {panel.split(" ─")[0]: " ".join(panel.replace("│", " ").split()) for panel in printed.split("╭─ ")[1:]}
    for subject in SUBJECTS:
        for name, field in subject.fields.model_fields.items():
            assert f"--{name.replace('_', '-')}" in panels[subject.title]
            told = dict(zip(("en", "fr"), field_help(field), strict=True))[language]
            assert name == "device" or " ".join(told.split()) in panels[subject.title]
    assert "--json" in panels["options"] and len(panels) == len(SUBJECTS) + 1


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["compare", "--help"]])
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
