"""Files that commands write: where one cannot be, the sentence names it, and nothing of it is left."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlojz.cli.main import main


@contextmanager
def full_disk() -> Iterator[None]:
    """Let the system refuse each byte that is written to a file, as a full disk does: the error names no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("board class --html board.html", "board.html"),
        ("labs progress --root class/ada/runs --html progress.html", "progress.html"),
        ("labs script 00 training", "training/train.py"),
        ("labs copy copied --language en", "copied"),
        ("pipeline --schedule 1f1b --stages 2 --micro-batches 2 --csv order.csv", "order.csv"),
        ("pipeline --schedule 1f1b --stages 2 --micro-batches 2 --trace trace.json", "trace.json"),
        ("pipeline --schedule 1f1b --stages 2 --micro-batches 2 --png figure.png", "figure.png"),
        ("grid --dp 2 --png grid.png", "grid.png"),
        ("memory gpt_tiny --snapshot snapshot.html", "snapshot.html"),
    ],
)
def test_commands_name_the_file_that_a_full_disk_refuses(
    words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = tmp_path / "class" / "ada" / "runs"
    runs.mkdir(parents=True)
    (runs / "progress-00.json").write_text(json.dumps({"schema_version": 1, "done": {}}))
    with full_disk():
        code = main(words.split())
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert code and told.startswith("dlojz: ") and name in told and "File too large" in told, told
    assert not [path for path in tmp_path.rglob("*.tmp") if path.is_file()]
