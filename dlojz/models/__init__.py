"""Models of the lab, each a flat list of blocks, and their catalogue; torch is loaded by ``build`` and ``describe``."""

from dlojz.models.catalogue import ModelSpec, build, check_input, names, spec
from dlojz.models.summary import ModelSummary, about, describe

__all__ = ["ModelSpec", "ModelSummary", "about", "build", "check_input", "describe", "names", "spec"]
