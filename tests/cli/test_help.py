"""What each `--help` teaches, and that it comes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import SUBCOMMANDS, main
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig

Help = Callable[..., str]


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str]) -> Help:
    """What a command line that asks for help prints, in this process."""

    def ask(*words: str, language: str = "en") -> str:
        use_language(language)
        try:
            code: object = main(words)
        except SystemExit as end:
            code = end.code
        told = capsys.readouterr()
        assert (code or 0, told.err) == (0, "")
        return told.out

    return ask


def test_the_overview_comes_from_the_command_itself() -> None:
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
def test_the_overview_names_every_command(words: list[str], help_of: Help) -> None:
    printed = help_of(*words)
    assert all(f"\n  {name} " in printed for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_help_has_two_examples(name: str, help_of: Help) -> None:
    printed = help_of(name, "--help")
    assert "Examples:" in printed and printed.count(f"\n  dlojz {name}") >= 2
    assert "Exemples :" in help_of(name, "--help", language="fr")


def test_run_offers_every_field_with_its_description(help_of: Help) -> None:
    printed = " ".join(help_of("run", "--help").replace("│", " ").split())
    for name, field in {**RunConfig.model_fields, **Layout.model_fields}.items():
        if name not in ("layout", "schema_version"):
            assert f"--{name.replace('_', '-')}" in printed
            assert " ".join((field.description or "?").split()) in printed


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
