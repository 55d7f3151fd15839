"""Notebooks of the students in a folder of theirs: complete, linked to the code, never over what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.base.files import COURSE
from dlojz.base.language import LANGUAGES, Language
from dlojz.labs.kit.student_notebooks import copy_notebooks


@pytest.mark.parametrize("language", LANGUAGES)
def test_all_notebooks_are_copied_and_their_links_lead_somewhere(tmp_path: Path, language: Language) -> None:
    copied = copy_notebooks(tmp_path / "my labs", language)
    names = sorted(path.name for path in (COURSE / "notebooks" / language).glob("*.ipynb"))
    assert list(copied.copied) == names == sorted(path.name for path in copied.folder.iterdir())
    assert not copied.kept
    links = {
        link
        for path in copied.folder.glob("*.ipynb")
        for link in re.findall(r"\]\((\.\./\.\./[^)#]+)\)", path.read_text(encoding="utf-8"))
    }
    assert len(links) > 10
    assert not [link for link in links if not (copied.folder / link).exists()]


def test_work_that_is_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "notebooks" / "en"
    folder.mkdir(parents=True)
    (folder / "05_pipeline.ipynb").write_text("my answers", encoding="utf-8")
    copied = copy_notebooks(tmp_path, "en")
    assert copied.kept == ("05_pipeline.ipynb",) and "05_pipeline.ipynb" not in copied.copied
    assert (folder / "05_pipeline.ipynb").read_text(encoding="utf-8") == "my answers"
    assert not copy_notebooks(tmp_path, "en").copied


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(LabError, match="cannot be copied to .*: Not a directory; name another folder"):
        copy_notebooks(tmp_path / "file", "en")
