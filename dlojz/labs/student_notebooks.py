"""Copy the student's notebooks into a folder: from a checkout, or from an installed package."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dlojz.base.files import COURSE
from dlojz.base.language import Language, refusal

PACKAGE = Path(sys.modules["dlojz"].__file__ or "").resolve().parent


class Copied(NamedTuple):
    """Notebooks that were copied into a folder, and those that were there already and are as they were."""

    folder: Path
    copied: tuple[str, ...]
    kept: tuple[str, ...]


def copy_notebooks(target: Path, chosen: Language) -> Copied:
    """Copy the notebooks of one language to `target/notebooks/LANGUAGE`, where they are missing.

    The notebooks link to code that they explain, as `../../dlojz/…`: `target/dlojz` is a link to the package.

    Raises:
        LabError: if the folder cannot be written.
    """
    folder = target / "notebooks" / chosen
    copied, existing = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted((COURSE / "notebooks" / chosen).glob("*.ipynb")):
            try:
                # x: fails where the file is there, so that no answer is overwritten.
                with open(folder / source.name, "xb") as file:
                    file.write(source.read_bytes())
                copied.append(source.name)
            except FileExistsError:
                existing.append(source.name)
        # Notebooks link to code and to tests as `../../dlojz` and `../../tests`; an installed package has no tests.
        for linked in (PACKAGE, COURSE / "tests"):
            if linked.is_dir():
                with suppress(FileExistsError):
                    (target / linked.name).symlink_to(linked)
    except OSError as error:
        raise refusal(
            en=f"the notebooks cannot be copied to {target}: {error.strerror}; name another folder: "
            "dlojz labs copy FOLDER.",
            fr=f"les notebooks ne peuvent pas être copiés dans {target} : {error.strerror} ; nommez un autre "
            "dossier : dlojz labs copy DOSSIER.",
        ) from None
    return Copied(folder, tuple(copied), tuple(existing))
