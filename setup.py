"""Copy the course into the wheel: notebooks, sources of the labs and campaigns, as `dlojz/course/`.

All other metadata is in pyproject.toml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COURSE = ("notebooks/*/*.ipynb", "solutions/*.py", "slurm/campaigns/*.toml")


class BuildWithCourse(build_py):
    """Build the package, then copy the course into it; an editable installation reads the checkout instead."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if self.editable_mode:
            return
        for pattern in COURSE:
            for file in sorted(ROOT.glob(pattern)):
                target = Path(self.build_lib) / "dlojz" / "course" / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


setup(cmdclass={"build_py": BuildWithCourse})
