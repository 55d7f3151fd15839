"""Path of the checkout: the folder that holds the package, its notebooks and its SLURM files."""

from __future__ import annotations

import sys
from pathlib import Path

CHECKOUT = Path(sys.modules["dlojz"].__file__ or "").parent.parent
"""Parent folder of the package; not resolved, so that a job names the path its user knows."""
COURSE = Path(sys.modules["dlojz"].__file__ or "").resolve().parent.parent
"""The same where the package is reached through a link: the folder in which notebooks and machine files really lie."""
