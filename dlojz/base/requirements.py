"""Requirements of this package: the extra that installs a library, and the sentence about one that is missing.

An extra's name works wherever this package is installed, from a wheel or from a checkout: pip reads what it asks for
in the metadata that lie beside it.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

from dlojz.base.language import say

DISTRIBUTIONS = {"sklearn": "scikit-learn", "megatron": "megatron-core", "pydantic_core": "pydantic"}
"""What installs a module that is named otherwise."""
FOR_DEVELOPERS = ("dev", "test")
"""Extras that no reader of the course needs."""


def distribution_of(module: str) -> str:
    """Name what pip installs for a module, e.g. `megatron-core` for `megatron.core`."""
    name = module.partition(".")[0]
    return DISTRIBUTIONS.get(name, name.replace("_", "-"))


def requirements_of(extra: str) -> list[tuple[str, str]]:
    """List the libraries of an extra (empty: of the core), with the versions that are accepted.

    Raises:
        PackageNotFoundError: this package is on the path, but not installed.
    """
    return [(name, bounds) for name, bounds, extra_name in _requirements() if extra_name == extra]


def extra_of(distribution: str) -> str:
    """Name the extra that installs a library; empty where none does, or this package is not installed."""
    try:
        extras = [extra for name, _, extra in _requirements() if name == distribution and extra not in FOR_DEVELOPERS]
    except PackageNotFoundError:
        return ""
    return next(iter(filter(None, extras)), "")


def install_command(requirement: str) -> str:
    """Write the command that installs a library.

    Args:
        requirement: as pip takes it, e.g. `accelerate` or `timm>=1.0.15`.
    """
    extra = extra_of(re.split(r"[=<>!~\[ ]", requirement)[0])
    return f"pip install 'dlojz[{extra}]'" if extra else f"pip install {requirement}"


def missing_library(
    requirement: str, *, title: str = "", en: str = "", fr: str = "", or_en: str = "", or_fr: str = ""
) -> str:
    """Say in one sentence that a library is not installed, what needs it, and the command that installs it.

    Args:
        requirement: as pip takes it.
        title: the library, as its authors write it.
        en, fr: what needs it, the beginning of a sentence; empty: nothing is said of it.
        or_en, or_fr: what else may be done, the end of the sentence.
    """
    name = title or re.split(r"[=<>!~\[ ]", requirement)[0]
    absent = say(
        en=f"{en} needs {name}, which is not installed" if en else f"{name} is not installed",
        fr=f"{fr} demande {name}, qui n’est pas installé" if fr else f"{name} n’est pas installé",
    )
    also = say(en=f", or {or_en}" if or_en else "", fr=f", ou {or_fr}" if or_fr else "")
    return f"{absent}{say(en=':', fr=' :')} {install_command(requirement)}{also}."


def _requirements() -> list[tuple[str, str, str]]:
    """Read the metadata: name, versions that are accepted, extra (empty: the core)."""
    requirements = []
    for line in requires("dlojz") or ():
        # `accelerate>=1.0; extra == 'libraries'`
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        parts = re.match(r"([\w.-]+)\s*\(?([^)\[]*)\)?$", requirement.strip())
        # An extra of extras names dlojz itself.
        if parts and parts[1] != "dlojz":
            requirements.append((parts[1], parts[2].strip(), extra[1] if extra else ""))
    return requirements
