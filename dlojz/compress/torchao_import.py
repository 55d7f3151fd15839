"""Import torchao without the lines that it prints on a machine that it has no kernels for."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say

VERSION = "0.18.0"
_NOISE = {
    "torchao": ("Failed to load ",),  # GPU kernels, built for another machine
    "torchao.kernel.intmm": ("Warning: Detected no triton",),
    "torch.utils._pytree": ("<enum 'KernelPreference'> is an Enum subclass",),  # torchao's own business with torch
}


@contextmanager
def _without_noise() -> Iterator[None]:
    def silence(beginnings: tuple[str, ...]) -> logging.Filter:
        noise = logging.Filter()
        noise.filter = lambda record: not record.getMessage().startswith(beginnings)  # type: ignore[method-assign]
        return noise

    filters = {logging.getLogger(name): silence(beginnings) for name, beginnings in _NOISE.items()}
    for logger, noise in filters.items():
        logger.addFilter(noise)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        for logger, noise in filters.items():
            logger.removeFilter(noise)


def torchao_module(name: str = "quantization") -> Any:
    """Import a module of torchao, such as `quantization`.

    Raises:
        LabError: if torchao is not installed, or is another version, without this module.
    """
    try:
        with _without_noise():
            return importlib.import_module(f"torchao.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchao":
            raise
        if error.name != "torchao":
            raise other_version() from None
        raise refusal(
            en="torchao is not installed, and this method is torchao's: pip install "
            f"torchao=={VERSION} installs it, as does pip install -r requirements.txt.",
            fr="torchao n’est pas installé, or cette méthode est la sienne : pip install "
            f"torchao=={VERSION} l’installe, comme pip install -r requirements.txt.",
        ) from None


def other_version() -> LabError:
    """Say which version of torchao is here, and which one is needed."""
    try:
        here = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        here = say(en="without a version", fr="sans version")
    return LabError(
        say(
            en=f"torchao {here} is here, {VERSION} is needed: pip install torchao=={VERSION} replaces it.",
            fr=f"torchao {here} est ici, il faut {VERSION} : pip install torchao=={VERSION} le remplace.",
        )
    )
