"""Missing libraries: the extra of pyproject.toml that installs each, and no sentence beside the one function."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from dlojz.base import requirements
from dlojz.base.language import use_language
from dlojz.base.requirements import distribution_of, extra_of, install_command, missing_library

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
OPTIONAL = {
    re.split(r"[=<>\[]", line)[0]: extra
    for extra, lines in EXTRAS.items()
    if extra not in ("dev", "test")
    for line in lines
    if not line.startswith("dlojz")
}


def test_extra_of_is_that_of_pyproject() -> None:
    assert len(OPTIONAL) >= 12 and OPTIONAL["megatron-core"] == "libraries"
    assert {name: extra_of(name) for name in OPTIONAL} == OPTIONAL
    assert [extra_of(name) for name in ("torch", "lightning", "pytest", "acelerate", "")] == [""] * 5


def test_missing_library_says_what_needs_it_and_what_installs_it() -> None:
    assert missing_library("accelerate", title="Accelerate") == (
        "Accelerate is not installed: pip install 'dlojz[libraries]'."
    )
    assert missing_library("timm>=1.0.15", en="the model x", fr="le modèle x", or_en="do y", or_fr="faites y") == (
        "the model x needs timm, which is not installed: pip install 'dlojz[compress]', or do y."
    )
    use_language("fr")
    assert missing_library(distribution_of("megatron.core"), en="it", fr="le programme", or_fr="faites y") == (
        "le programme demande megatron-core, qui n’est pas installé : pip install 'dlojz[libraries]', ou faites y."
    )


def test_install_command_names_no_extra_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the path alone, `dlojz` would be looked for elsewhere."""

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "requires", missing)
    assert install_command("megatron-core==0.16.1") == "pip install megatron-core==0.16.1"
    assert extra_of("accelerate") == ""


def test_no_text_tells_to_install_an_optional_library_by_another_way() -> None:
    by_name = re.compile(rf"pip install ['\"`]?(?:{'|'.join(OPTIONAL)})\b|make libraries")
    paths = [*(ROOT / "dlojz").rglob("*.py"), *(ROOT / "solutions").glob("*.py")]
    assert len(paths) > 300
    assert [path.name for path in paths if by_name.search(path.read_text(encoding="utf-8"))] == []
