"""Catalogue of the libraries: their programs, versions, command lines, and the lines of code that change.

The entries are those of `data/libraries.toml`. Docstrings, comments and blank lines do not count as code. A library
that is not installed is reported with the command that installs it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import io
import os
import shlex
import sys
import tokenize
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.files import CHECKOUT
from dlojz.base.language import Sentences, one_of, refusal, say
from dlojz.base.requirements import install_command, missing_library
from dlojz.config.run_config import LIBRARY_TITLES, RunConfig

TEXTS = Sentences(Path(__file__).parent / "data" / "library_catalogue.md")


def code_lines(text: str) -> list[str]:
    """List the code lines of a program, stripped: no docstrings, no comments, no blank lines."""
    silent: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            silent.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    comments = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    lines = [
        line[: comments.get(number, len(line))].strip()  # without its comment
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in silent
    ]
    return [line for line in lines if line]


class LineChange(NamedTuple):
    """Code lines added and removed between two programs, and the code lines of each."""

    added: int
    removed: int
    reference_lines: int
    lines: int

    @property
    def changed(self) -> int:
        """Lines that a user adds or deletes."""
        return self.added + self.removed


def change(before: str, after: str) -> LineChange:
    """Compare the code lines of two programs' texts, as Python's `difflib` matches them."""
    old, new = code_lines(before), code_lines(after)
    # `autojunk` takes lines that occur often in a long text for noise.
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    matched = sum(block.size for block in blocks)
    return LineChange(len(new) - matched, len(old) - matched, len(old), len(new))


PROGRAMS = Path(__file__).parent / "programs"
READY = ".ready"
"""File that the Makefile puts into a complete environment."""
REFERENCE = "torch"
"""The library from which the lines that change are counted."""


@dataclass(frozen=True)
class Library:
    """Library of the catalogue, with its program."""

    name: str
    package: str
    """Name for pip, and for its version."""
    import_name: str
    hides: Callable[[], str]
    """In one line: the steps of plain torch's program that it does itself."""
    runs: Callable[[], str]
    """In one line: the layouts that its program runs."""
    environment: str = ""
    """Folder of a separate environment, in the repository; empty where it is installed with torch."""
    environment_variable: str = ""
    """Variable that names the Python of another environment, instead of the folder."""
    optional: bool = False
    """Whether the labs can be done without it."""

    @property
    def command(self) -> str:
        """Command that installs it: its extra, or, in a checkout, its separate environment; empty where none does."""
        if not self.environment:
            return install_command(self.package)
        return f"make {self.name}" if (CHECKOUT / "Makefile").is_file() else ""

    @property
    def title(self) -> str:
        """Its name, as its authors write it."""
        return LIBRARY_TITLES[self.name]

    @property
    def program(self) -> Path:
        """The file of its program."""
        return PROGRAMS / f"with_{self.name}.py"

    @property
    def module(self) -> str:
        """The same, as it is imported."""
        return f"dlojz.libraries.programs.with_{self.name}"

    @property
    def given(self) -> str:
        """Python that the variable names; empty without."""
        return os.environ.get(self.environment_variable, "") if self.environment_variable else ""

    @property
    def python(self) -> Path | None:
        """Interpreter of its separate environment; None without, or where it is incomplete."""
        if not self.environment:
            return None
        if self.given:
            # A Python that is named but is not there is no reason to take the folder's.
            return Path(self.given) if Path(self.given).is_file() else None
        folder = CHECKOUT / self.environment
        executable = folder / "bin" / "python"
        return executable if executable.is_file() and (folder / READY).is_file() else None

    @property
    def installed(self) -> bool:
        """Whether it can be imported, here or in its separate environment; nothing is imported."""
        if self.python is not None:
            return bool(self.version)
        # A Python that is named but is not there is not replaced by the lab's either.
        return not self.given and found(self.import_name)

    @property
    def version(self) -> str:
        """Its version, here or in its separate environment; empty where it is not installed."""
        interpreter = self.python
        # Versions are read from the metadata in its folders: its Python is not started.
        folders = (
            [str(path) for path in interpreter.parents[1].glob("lib/python*/*-packages")] if interpreter else sys.path
        )
        return next((distribution.version for distribution in distributions(name=self.package, path=folders)), "")


def _entry(row: dict[str, Any]) -> Library:
    """Read an entry; its sentences are made when they are asked for, in the language of that moment."""
    return Library(**row | {name: partial(say, **row[name]) for name in ("hides", "runs")})


_FILE = Path(__file__).parent / "data" / "libraries.toml"
LIBRARIES: dict[str, Library] = {
    row["name"]: _entry(row) for row in tomllib.loads(_FILE.read_text(encoding="utf-8"))["library"]
}
"""The libraries, the reference first."""


def found(import_name: str) -> bool:
    """Whether a module could be imported from here, without importing it."""
    try:
        return importlib.util.find_spec(import_name) is not None
    except (ImportError, ValueError):  # its parent package is not there
        return False


def library(name: str) -> Library:
    """Look up a library of the catalogue.

    Raises:
        LabError: if there is none of this name.
    """
    if name not in LIBRARIES:
        raise LabError(one_of(say(en="library", fr="bibliothèque"), name, LIBRARIES))
    return LIBRARIES[name]


def absence(name: str) -> str | None:
    """Explain in one sentence why a library's program cannot run here and how to install it; None where it can."""
    entry = library(name)
    if entry.installed:
        return None
    if not entry.environment:
        return missing_library(entry.package, title=entry.title)
    variable = entry.environment_variable
    how = TEXTS.sentence("how", "command" if entry.command else "variable", command=entry.command, variable=variable)
    names = {"title": entry.title, "package": entry.package, "variable": variable, "given": entry.given}
    return TEXTS.say("not installed", "where the variable says" if entry.given else "here", how=how, **names)


def require(name: str) -> None:
    """Refuse a library that is not installed.

    Raises:
        LabError: with the command that installs it.
    """
    if (missing := absence(name)) is not None:
        raise LabError(missing)


def check_checkpoints(config: RunConfig, every_steps: int | None) -> None:
    """Refuse checkpoints of a library's program.

    Raises:
        LabError: if checkpoints are asked for with a library.
    """
    if config.library == "none" or every_steps is None:
        return
    raise refusal(
        en=f"checkpoint_every={every_steps} was received with library={config.library!r}, whose program keeps no "
        "checkpoint: leave one of them out.",
        fr=f"checkpoint_every={every_steps} a été reçu avec library={config.library!r}, dont le programme ne garde "
        "pas de checkpoint : retirez l’un des deux.",
    )


def own_python(config: RunConfig) -> Path | None:
    """Interpreter of the separate environment of a run's library; None for the lab's own."""
    return None if config.library == "none" else library(config.library).python


def lines_changed(name: str, reference: str = REFERENCE) -> LineChange:
    """Compare the code lines of a library's program with the reference's."""
    before, after = (library(library_name).program.read_text(encoding="utf-8") for library_name in (reference, name))
    return change(before, after)


def bridge_lines(name: str) -> int:
    """Count the code lines of a library's adapter: the modules of `dlojz.libraries` that its program alone imports."""
    tree = ast.parse(library(name).program.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    adapter_modules = {
        module.removeprefix("dlojz.libraries.") for module in modules if module.startswith("dlojz.libraries.")
    }
    return sum(
        len(code_lines((PROGRAMS.parent / f"{module}.py").read_text(encoding="utf-8")))
        for module in adapter_modules
        if not module.startswith("course")  # what all programs share
    )


PLACEHOLDER = Path("ds_config.json")


def words_of(config: RunConfig, deepspeed_file: Path = PLACEHOLDER) -> list[str]:
    """List the options for this run that differ from their defaults, as a user would type them.

    Args:
        deepspeed_file: DeepSpeed's configuration, where the library reads one.
    """
    layout = config.layout
    options: list[tuple[str, object, object]] = [
        ("--model", config.model, None),
        ("--data", config.data_name, None),
        ("--data-root", config.data_root, None),
        ("--image-size", config.image_size, None),
        ("--sequence-length", config.sequence_length, None),
        ("--batch-size", layout.micro_batch, None),
        ("--accumulation", layout.micro_batches, 1),
        ("--steps", config.steps, None),
        ("--lr", config.learning_rate, 1e-3),
        ("--weight-decay", config.weight_decay, 0.0),
        ("--seed", config.seed, 0),
        ("--zero", 0 if layout.engine == "deepspeed" else layout.zero, 0),  # then it is in the JSON file
        ("--tp", layout.tp, 1),
        ("--pp", layout.pp, 1),
        ("--device", config.device, "auto"),
    ]
    words = [word for name, value, usual in options if value not in (None, usual) for word in (name, str(value))]
    if config.library == "deepspeed":
        words.append("--deepspeed")
    if layout.engine == "deepspeed":
        words += ["--deepspeed_config", str(deepspeed_file)]
    return words


def command_alone(name: str) -> str:
    """Complete the command line of a library's program (the end of its docstring) with whole paths."""
    entry = library(name)
    docstring = ast.get_docstring(ast.parse(entry.program.read_text(encoding="utf-8"))) or ""
    words = shlex.split(docstring.splitlines()[-1])  # the last line of a program's docstring
    folder = entry.program.parent
    words = [str(folder / word) if (folder / word).is_file() else word for word in words]
    # `torchrun` is that of the lab's environment; another one's is run as a module of its Python.
    launcher = [str(entry.python), "-m", "torch.distributed.run"] if entry.python else [words[0]]
    return shlex.join([*launcher, *words[1:]])
