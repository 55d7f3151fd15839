"""The training script that grows from lab to lab; `test_script_judge.py` runs it at every stage."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.language import LANGUAGES, Language
from dlojz.cli.main import main
from dlojz.labs.kit.source import ProseCells, in_language, read_source
from dlojz.labs.script.growing_script import LAST, parts_of_script, script_of, write_script

LABS = range(LAST + 1)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("lab", LABS)
def test_every_script_can_be_read_and_leaves_to_do_what_its_lab_adds(lab: int, language: Language) -> None:
    solved, begun = (script_of(lab, language, solved=one) for one in (True, False))
    for text in (solved, begun):
        compile(text, "train.py", "exec")
        assert "#@" not in text and "dlojz" not in text
        assert not [line for line in text.splitlines() if re.search(r"# .* // ", line)]
    if lab == 0:
        assert begun == solved and len(solved.splitlines()) == 41
        return
    before = {line.strip() for line in script_of(lab - 1, language).splitlines()}
    parts = [part for part in parts_of_script() if part.first == lab]
    lines = [(part.given, in_language(line, language)) for part in parts for line in part.lines]
    given = {line.partition("  #")[0].strip() for is_given, line in lines if is_given}
    typed = [line for is_given, line in lines if not is_given and line.strip()]
    there = {line.partition("  #")[0].strip() for line in begun.splitlines()}
    assert given <= there and 1 <= len(typed) <= 15
    assert not ({line.strip() for line in typed} - before - given) & there, lab
    asked = [part for part in parts if part.task]
    assert begun.count("# TODO") == len(asked) > 0 and "TODO" not in solved


@pytest.mark.nightly
def test_write_script_gives_a_transformer_that_learns_in_a_student_s_epochs(tmp_path: Path) -> None:
    """From guessing, ln 10 or a little more, to less than half; with positions that begin at zero it stayed there."""
    script = write_script("01", tmp_path, "en", solved=True)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    losses = [float(line.removeprefix("loss ")) for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert losses[0] > 2 and sum(losses[-5:]) / 5 < losses[0] / 2


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_shows_the_lines_of_its_script(lab: int) -> None:
    heads = {"en": "## In your project: your own script", "fr": "## Dans votre projet : votre script"}
    source = next((Path(__file__).resolve().parents[2] / "solutions").glob(f"{lab:02}_*.py"))
    solved = {line.strip() for line in script_of(lab, "en").splitlines()}
    cells = [cell.text for cell in read_source(source).cells if isinstance(cell, ProseCells)]
    is_judged = 'labs.judge_script(lab, "my_training/train.py")' in source.read_text(encoding="utf-8")
    for language, head in heads.items():
        (shown,) = [text[language] for text in cells if text[language].startswith(head)]
        assert is_judged or f"dlojz labs judge {lab:02} my_training/train.py" in shown
        lines = [
            line.strip() for block in re.findall(r"```python\n(.*?)```", shown, re.S) for line in block.splitlines()
        ]
        assert bool(lines) == (lab > 0) and set(lines) <= solved, set(lines) - solved


@pytest.mark.parametrize(
    ("processes", "words", "said"),
    [
        (2, "--parallel 1f1b", "--accumulation must be at least the number of ranks"),
        (1, "--parallel 1f1b", "ranks must be at least 2 and divide the blocks"),
        pytest.param(
            3, "--parallel 1f1b --accumulation 4", "must be at least 2 and divide the blocks", marks=pytest.mark.nightly
        ),
        pytest.param(3, "--parallel ddp", "--batch must be a multiple of replicas", marks=pytest.mark.nightly),
    ],
)
def test_write_script_gives_a_script_that_refuses_what_does_not_come_out_even(
    processes: int, words: str, said: str, tmp_path: Path
) -> None:
    path = write_script("07", tmp_path / "mine", "en", solved=True)
    run = dlojz.run(path, processes=processes, args=words.split(), device="cpu", root=tmp_path / "runs", progress=False)
    assert run.record is not None and run.record.status == "failed" and said in run.record.reason, run.logs()


def test_the_command_writes_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert main(["labs", "script", "03", str(folder), "--language", "fr"]) == 0
    told = capsys.readouterr().out
    assert f"dlojz run {folder / 'train.py'} --nproc 2" in told and f"dlojz labs judge 03 {folder}" in told
    assert (folder / "train.py").read_text(encoding="utf-8") == script_of(3, "fr", solved=False)
    assert main(["labs", "script", "03", str(folder)]) == 2
    assert "is there already, and perhaps your work" in capsys.readouterr().err
    with pytest.raises(LabError, match="unknown lab '14'"):
        write_script("14", tmp_path, "en")
    with pytest.raises(LabError, match="lab 13 adds nothing to the script: go on with that of lab 04"):
        write_script("13", tmp_path, "en")
