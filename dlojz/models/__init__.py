"""Models of the lab, each a flat list of blocks, and the catalogue that names them.

Invariant: ``import dlojz.models`` loads no torch; ``build`` and ``describe`` do when they are called.
"""

from __future__ import annotations

from dlojz.models.catalogue import build, check_input, names, spec
from dlojz.models.entries import ModelSpec
from dlojz.models.summary import ModelSummary, describe

__all__ = ["ModelSpec", "ModelSummary", "build", "check_input", "describe", "names", "spec"]
