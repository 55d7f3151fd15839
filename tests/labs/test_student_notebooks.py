"""Notebooks of the students in a folder of theirs: complete, linked to the code, never over what is there."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.base.files import COURSE
from dlojz.base.language import LANGUAGES, Language
from dlojz.cli.main import main
from dlojz.labs.kit.source import copy_notebooks


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


def test_copy_notebooks_leaves_work_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "notebooks" / "en"
    folder.mkdir(parents=True)
    (folder / "05_pipeline.ipynb").write_text("my answers", encoding="utf-8")
    copied = copy_notebooks(tmp_path, "en")
    assert copied.kept == ("05_pipeline.ipynb",) and "05_pipeline.ipynb" not in copied.copied
    assert (folder / "05_pipeline.ipynb").read_text(encoding="utf-8") == "my answers"
    assert not copy_notebooks(tmp_path, "en").copied


def test_copy_notebooks_refuses_a_folder_that_cannot_be_written_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(LabError, match="cannot be copied to .*: Not a directory; name another folder"):
        copy_notebooks(tmp_path / "file", "en")


def test_main_labs_copy_gives_a_command_that_finds_dlojz_and_asks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its terminals have the folder of this Python first; the answer on news is that of the folder's settings."""
    folder = tmp_path / "my labs"
    assert main(["labs", "copy", str(folder), "--language", "fr"]) == 0
    command = capsys.readouterr().out.partition("Next: ")[2].replace("\n", " ").strip()
    place, path, *options = shlex.split(command.replace("&& ", "").removeprefix("cd "))
    assert (place, path) == (str(folder), f"PATH={Path(sys.executable).parent}:$PATH")
    assert "--ServerApp.terminado_settings=shell_command=bash" in options
    assert "--LabApp.app_settings_dir=$PWD/.jupyterlab" in options
    assert json.loads((folder / ".jupyterlab" / "overrides.json").read_text()) == {
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}
    }
