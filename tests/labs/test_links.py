"""Links of the notebooks: each leads to a file that `make lab` serves."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

from dlojz.base.language import LANGUAGES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [f"{kind}/{language}" for kind in ("notebooks", "solutions") for language in LANGUAGES]
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^\[[^\]]+\]:\s*(\S+)|\b(?:href|src)=[\"']([^\"']+)", re.MULTILINE)
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`(?!\])", re.DOTALL | re.MULTILINE)
SCHEME = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


@cache
def lab_command(language: str = "") -> list[str]:
    """The words that `make lab` would run, taken from the shell that makes them."""
    recipes = ["make", "--no-print-directory", "-n", "lab"]  # also where `make test` runs this
    said = subprocess.run(recipes, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    recipe = said[said.index('case "$DLOJZ_LANG"') :].replace(".venv/bin/jupyter", "echo jupyter")
    environment = {"PATH": "/usr/bin:/bin", "DLOJZ_LANG": language}
    told = subprocess.run(["sh", "-c", recipe], env=environment, capture_output=True, text=True, check=True).stdout
    return shlex.split(told)


def option(name: str, language: str = "") -> str:
    found = [word.partition("=")[2] for word in lab_command(language) if word.startswith(f"--{name}=")]
    assert len(found) == 1, lab_command(language)
    return found[0]


def relative_links(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    prose = "\n\n".join(CODE.sub("", cell.source) for cell in cells if cell.cell_type == "markdown")
    links = ["".join(found) for found in LINK.findall(prose)]
    return [link for link in links if not SCHEME.match(link) and not link.startswith("#")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_relative_link_is_served(folder: str) -> None:
    served = (ROOT / option("ServerApp.root_dir")).resolve()
    code = set()
    for path in sorted((ROOT / folder).glob("*.ipynb")):
        for link in relative_links(path):
            target = (path.parent / unquote(link.partition("#")[0])).resolve()
            assert target.is_file(), f"{path.name} links to {link}, which is no file"
            assert target.is_relative_to(served), f"{path.name} links to {link}, above what is served"
            hidden = [part for part in target.relative_to(served).parts if part.startswith(".")]
            assert not hidden, f"{path.name} links to {link}, which JupyterLab hides"
            code |= {target} if target.suffix == ".py" else set()
    assert len(code) >= 10, "the labs link to the code that they are about"


@pytest.mark.parametrize(("said", "language"), [("", "en"), ("en", "en"), ("fr", "fr"), ("FR_fr.UTF-8", "fr")])
def test_the_page_that_opens_is_the_contents_in_the_language_of_the_reader(said: str, language: str) -> None:
    opened = option("LabApp.default_url", said)
    assert opened == f"/lab/tree/notebooks/{language}/contents.ipynb"
    assert (ROOT / option("ServerApp.root_dir", said) / opened.removeprefix("/lab/tree/")).is_file()
