"""`dlojz compress`: what it makes, what it teaches, and what it refuses in one sentence."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlojz.cli import main
from dlojz.cli.compress import image_size
from dlojz.compress.board_record import read_board
from dlojz.compress.methods import METHODS
from dlojz.schema import LabError
from dlojz.text import use_language

QUICK = ["--methods", "student_alone", "--epochs", "1", "--rounds", "2"]
REFUSED_EN = {
    "--temperature 0": ["temperature must be greater than 0", "but 0.0 was received"],
    "--temperature -2": ["temperature must be greater than 0", "-2.0"],
    "--temperature hot": ["--temperature takes a number, but 'hot' was received"],
    "--temperature nan": ["--temperature must be", "'nan' was received"],
    "--sparsity 1": ["sparsity", "1.0"],
    "--sparsity -0.1": ["sparsity", "-0.1"],
    "--methods int7_static": ["unknown method 'int7_static': did you mean 'int8_static'?", "distill_soft"],
    "--methods ,": ["--methods takes names such as", "see --list"],
    "--methods student_alone --sparsity 0.5": ["--sparsity was received, but none of student_alone has it", "gradual"],
    "--methods gradual --student vit_mini": ["--student was received, but none of gradual has it"],
    "--model vit_tny": ["unknown model 'vit_tny': did you mean 'vit_tiny'?"],
    "--model gpt_tiny": ["gpt_tiny reads text", "vit_tiny, coatnet_tiny or alexnet_tiny"],
    "--student llama_tiny": ["llama_tiny reads text"],
    "--model vit_l_16": ["vit_l_16 has 303 M parameters, too many to train while you wait"],
    "--seeds 0": ["--seeds must be at least 1"],
    "--seeds 51": ["--seeds must be at most 50"],
    "--epochs two": ["--epochs takes a number"],
    "--figure board.txt": ["--figure needs a name that ends in .png, .svg or .pdf, but 'board.txt' was received"],
    "--methdos x": ["did you mean '--methods'?"],
}
REFUSED_FR = {
    "--temperature 0": ["temperature doit être strictement positive", "mais 0.0 a été reçu"],
    "--sparsity 1.5": ["sparsity", "1.5", "reçu"],
    "--methods int7_static": ["méthode 'int7_static' : valeur inconnue, peut-être 'int8_static' ?"],
    "--methods student_alone --sparsity 0.5": ["aucune de student_alone n’en a : c’est pour"],
    "--model gpt_tiny": ["gpt_tiny lit du texte"],
    "--model vit_l_16": ["vit_l_16 a 303 M de paramètres, trop pour l’entraîner"],
    "--seeds 51": ["--seeds doit être au plus égal à 50"],
    "--figure board.txt": ["--figure attend un nom qui finit par"],
}


@pytest.mark.parametrize(
    ("language", "words", "expected"),
    [("en", words, expected) for words, expected in REFUSED_EN.items()]
    + [("fr", words, expected) for words, expected in REFUSED_FR.items()],
)
def test_what_is_refused_is_refused_before_anything_is_trained(
    language: str, words: str, expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_language(language)
    assert main(["compress", *words.split(), "--root", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("dlojz: ") and told.err.count("\n") == 1
    for part in expected:
        assert part in told.err
    assert not list(tmp_path.iterdir())


def test_a_library_that_is_missing_is_told_with_its_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else found(name))
    needing = next(name for name, one in METHODS.items() if "torchao" in one.needs)
    for language, sentence in (
        ("en", f"dlojz: the method {needing} needs torchao, which is not installed: pip install torchao.\n"),
        ("fr", f"dlojz: la méthode {needing} demande torchao, qui n’est pas installé : pip install torchao.\n"),
    ):
        use_language(language)
        assert main(["compress", "--methods", needing]) == 2
        assert capsys.readouterr() == ("", sentence)


def test_a_small_board_is_shown_concluded_drawn_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept, picture = tmp_path / "kept" / "board.json", tmp_path / "board.png"
    root = ["--root", str(tmp_path / "runs")]
    assert main(["compress", *QUICK, *root, "--output", str(kept), "--figure", str(picture)]) == 0
    told = capfd.readouterr()
    assert "vit_tiny on digits at 16×16, 1 seed(s)" in told.out and "student_alone" in told.out
    assert all(len(row) <= 100 for row in told.out.splitlines()[:4])
    board = read_board(kept)
    _, student = board.lines()
    assert f"{student.predicted_bytes / 1024:.0f}|{student.file_bytes / 1024:.0f}" in told.out
    assert board.epochs == 1 and board.of("student_alone")[0].options["epochs"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert told.err.count("written: ") == 2
    assert len(list((tmp_path / "runs" / "teachers").iterdir())) == 1


def test_json_is_one_document_and_a_larger_student_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*QUICK, "--model", "vit_mini", "--student", "vit_tiny", "--json", "--root", str(tmp_path)]
    assert main(["compress", *words]) == 0
    told = capfd.readouterr()
    document = json.loads(told.out)
    assert [line["method"] for line in document["lines"]] == ["teacher", "student_alone"]
    assert set(document["front"]) <= {"teacher", "student_alone"}
    warning = "warning: the student has 820,106 parameters and its teacher 423,562: it is not smaller"
    assert told.err.startswith(warning) and "UserWarning" not in told.err
    use_language("fr")
    assert main(["compress", *words]) == 0
    assert capfd.readouterr().err.startswith("attention : l’étudiant a 820\u202f106 paramètres")


def test_what_does_not_fit_the_teacher_is_left_out_of_a_default_board_and_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AlexNet's blocks cannot begin a ViT."""
    monkeypatch.setattr("dlojz.compress.board_record.DEFAULT_METHODS", ("distill_hidden",))
    words = ["compress", "--model", "vit_mini", "--student", "vit_tiny", "--epochs", "1", "--rounds", "1",
             "--root", str(tmp_path)]  # fmt: skip
    assert main(words) == 0
    told = capfd.readouterr()
    assert "distill_hidden was left out: the student cannot begin with its teacher's blocks" in told.err
    assert "No method was tried." in told.out
    assert main([*words, "--methods", "distill_hidden"]) == 2
    assert "dlojz: the student cannot begin with its teacher's blocks" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("names", "size"),
    [(["vit_tiny"], 16), (["coatnet_tiny", "vit_mini"], 32), (["alexnet_tiny", "vit_mini"], 64), (["vit_ti_16"], 16)],
)
def test_images_are_as_small_as_teacher_and_student_both_read(names: list[str], size: int) -> None:
    assert image_size(*names) == size


def test_a_student_that_nobody_named_counts_for_the_size_of_the_images(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AlexNet reads 63 pixels, and vit_mini, the default student, whole patches of 8 only."""
    sizes: list[int] = []

    def stopped(size: int) -> object:
        sizes.append(size)
        raise LabError("seen.")

    monkeypatch.setattr("dlojz.compress.task.digits", stopped)
    for name in ("student_alone", "magnitude_global"):
        main(["compress", "--model", "alexnet_tiny", "--methods", name, "--root", str(tmp_path)])
    assert sizes == [64, 63]


def test_the_list_tells_every_method_and_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in METHODS) and "temperature=4.0" in printed


def test_the_list_is_json_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", "--list", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [one["name"] for one in listed] == list(METHODS)


# A shell's background job has SIGINT ignored, and what it starts inherits that.
INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dlojz.cli import main
from dlojz.cli.compress import image_size
sys.exit(main(sys.argv[1:]))
"""


def test_an_interrupted_training_says_so_and_gives_the_cursor_back(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    words = ["compress", "--methods", "student_alone", "--epochs", "900", "--root", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "DLOJZ_LANG": "en", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *words], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = b""
    try:
        until = time.monotonic() + 200
        while b"\x1b[?25l" not in seen or b"/19800" not in seen:  # the bar is there, and has moved
            assert time.monotonic() < until and process.poll() is None, seen
            seen += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                more = os.read(terminal, 4096)
            except OSError:  # nobody writes there any more
                break
            if not more:
                break
            seen += more
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert process.returncode == 130, seen
    assert b"interrupted" in seen and b"Traceback" not in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert not list(tmp_path.glob("**/*.safetensors"))
