"""A folder that cannot be written, and a record from a newer version: a clear sentence, in both languages, and nothing
half done."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.running.launch import run
from dlojz.running.run import Run, find, survey

MakeFolder = Callable[..., Path]


@pytest.fixture
def read_only(tmp_path: Path, config: RunConfig, make_folder: MakeFolder, told: Any) -> Iterator[Path]:
    """The folder of a run whose launcher has vanished, where nothing can be written, by root neither."""
    if os.geteuid() != 0:
        pytest.skip("a file system is mounted by root only")
    folder = make_folder(config, {0: told(3)})
    root = folder.parent
    for options in (["--bind", str(root), str(root)], ["-o", "remount,ro,bind", str(root)]):
        subprocess.run(["mount", *options], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(root)], check=True)


def test_survey_tells_what_a_read_only_folder_holds_and_writes_nothing(read_only: Path, config: RunConfig) -> None:
    before = sorted(str(path) for path in read_only.parent.rglob("*"))
    one = Run(read_only)
    assert (one.state, one.losses) == ("failed", (2.0, 1.875, 1.75))
    assert survey(read_only.parent).bad == {}
    other = RunConfig.of(model="coatnet_tiny", dp=2, steps=5)
    for language, words in (("en", "runs cannot be written in"), ("fr", "les exécutions ne peuvent pas être écrites")):
        use_language(language)  # type: ignore[arg-type]
        with pytest.raises(LabError, match=rf"^{words}.*Read-only file system.*root= .*\$DLOJZ_RUNS"):
            run(other, root=read_only.parent, wait=False)
    assert sorted(str(path) for path in read_only.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("language", "words"),
    [("en", "schema version 7, newer than this dlojz knows: update dlojz"), ("fr", "mettez dlojz à jour")],
)
def test_a_record_of_a_newer_version_is_named_and_left_alone(
    language: Any, words: str, config: RunConfig, make_folder: MakeFolder
) -> None:
    folder = make_folder(config)
    newer = json.dumps({"schema_version": 7})
    (folder / "record.json").write_text(newer)
    use_language(language)
    with pytest.raises(LabError, match=words):
        _ = Run(folder).state
    with pytest.raises(LabError, match=words):
        _ = find(folder.name, folder.parent).record
    assert words in survey(folder.parent).bad[folder.name]
    assert (folder / "record.json").read_text() == newer
