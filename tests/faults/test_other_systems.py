"""Systems without what only Linux has: the same commands run, in another way; Windows is refused in one sentence."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cli.main import REFUSED, main

OF_LINUX = ("fcntl", "pwd", "resource", "termios")
HIDDEN = Path(__file__).parent / "other_system"
PROGRAM = """
import os, sys
from pathlib import Path
import dlojz
from dlojz.cli.main import main
assert not hasattr(os, "sched_getaffinity") and not Path("/proc/self/stat").exists() and sys.platform == "darwin"
for words in sys.argv[2:]:
    assert main(words.split()) == 0, words
fields = {"model": "vit_mini", "data": "synthetic", "micro_batch": 1, "dp": 2, "steps": 2}
print(dlojz.predict(**fields).memory.peak_bytes)
run = dlojz.run(**fields, root=sys.argv[1], progress=False)
print(run.state, len(run.losses), len(run.record.footprints), run.record.reason)
"""
SIMULATED = "pipeline --stages 2 --micro-batches 4 --json"
PLANNED = (
    "plan --layers 2 --hidden 64 --heads 2 --vocabulary 100 --sequence-length 32 --cluster jean_zay_a100 --gpus 1 "
    "--batch 1 --json"
)


def test_predicts_simulates_plans_and_trains_without_what_only_linux_has(tmp_path: Path) -> None:
    path = os.pathsep.join((str(HIDDEN), str(Path(dlojz.__file__).parents[1])))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), SIMULATED, PLANNED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "completed 2 2 "


def test_no_module_needs_what_only_linux_has_to_be_imported() -> None:
    """Nor asks for one of a system at its top: within a function it can be done without."""
    for file in Path(dlojz.__file__).parent.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not set(names) & set(OF_LINUX), file


@pytest.mark.parametrize("language", ["en", "fr"])
def test_windows_is_refused_in_one_sentence_that_names_wsl(
    language: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_language(language)
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["predict", "--model", "vit_mini"]) == REFUSED
    told = capsys.readouterr()
    assert "wsl --install" in told.err and told.err.count("\n") == 1 and not told.out
    with pytest.raises(LabError, match="WSL"):
        dlojz.run(model="vit_mini")
