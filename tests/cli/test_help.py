"""What each `--help` teaches, and that it comes at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dlojz.cli import SUBCOMMANDS
from dlojz.config import Layout, RunConfig


def _help(*words: str, language: str = "en") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dlojz", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "DLOJZ_LANG": language},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(words: list[str]) -> None:
    printed = _help(*words)
    assert all(f"\n  {name} " in printed for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_help_has_two_examples(name: str) -> None:
    printed = _help(name, "--help")
    assert "Examples:" in printed and printed.count(f"\n  dlojz {name}") >= 2
    assert "Exemples :" in _help(name, "--help", language="fr")


def test_run_offers_every_field_with_its_description() -> None:
    printed = " ".join(_help("run", "--help").replace("│", " ").split())
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
            "import sys\nfrom dlojz.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
            "print('LOADED', *({'torch', 'matplotlib', 'deepspeed', 'IPython'} & sys.modules.keys()))",
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert loaded.splitlines()[-1] == "LOADED"
