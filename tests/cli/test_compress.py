"""`dlojz compress`: what it makes, what it teaches, and what it refuses in one sentence."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cli.compress import compress_command, conclusion, image_size, settings_of, table
from dlojz.cli.main import main
from dlojz.cli.options import parse
from dlojz.compress.board_record import TEACHER, Board, BoardTrial
from dlojz.compress.method import METHODS

QUICK = ["--methods", "student_alone", "--epochs", "1", "--rounds", "2"]
REFUSED_EN = {
    "--temperature 0": ["temperature must be greater than 0", "but 0.0 was received"],
    "--temperature -2": ["temperature must be greater than 0", "-2.0"],
    "--temperature hot": ["--temperature takes a number, but 'hot' was received"],
    "--temperature nan": ["temperature must be greater than 0 (from 0.01 to 1000)", "nan was received"],
    "--temperature inf": ["temperature must be greater than 0 (from 0.01 to 1000)", "inf was received"],
    "--sparsity nan": ["from 0 to below 1", "nan was received"],
    "--sparsity much": ["--sparsity takes a number, but 'much' was received"],
    "--figure FOLDER.png": ["--figure takes the name of a file, but", "is a folder"],
    "--output FOLDER.png": ["--output takes the name of a file, but", "is a folder"],
    "--methods gradual --set gradual": ["--set takes METHOD.OPTION=VALUE", "'gradual' was received"],
    "--methods gradual --set gradual.evry=2": ["unknown option of gradual 'evry': did you mean 'every'?"],
    "--methods gradual --set gradual.every=2.5": ["gradual.every takes a whole number such as 5, but '2.5'"],
    "--methods gradual --set gradual.sparsity=inf": ["gradual.sparsity takes a finite number", "'inf'"],
    "--methods gradual --set gradual.per_layer=1": ["unknown gradual.per_layer '1': legal values: true, false"],
    "--methods gradual --set gradual.every=2 --set gradual.every=3": ["--set gives gradual.every twice"],
    "--methods gradual --set lottery.rounds=2": ["lottery is not on the board: add it to --methods"],
    "--methods torch_int8_dynamic --set torch_int8_dynamic.bits=4": ["torch_int8_dynamic has no options, but 'bits'"],
    "--methods gradual --set gradual.epochs=0": ["epochs must be at least 1, but 0 was received"],
    "--methods int8_static --set int8_static.samples=0": ["calibration was given 0 images"],
    "--set": ["--set needs a value after it"],
    "--model alexnet_tiny --methods two_to_four_permuted": [
        "two_to_four_permuted cannot be applied to alexnet_tiny",
        "use magnitude_global",
        "two_to_four, two_to_four_sr_ste.",
    ],
    "extra": ["does not know what to do with the word 'extra'"],
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
    "--temperature inf": ["strictement positive (de 0,01 à 1000)", "inf a été reçu"],
    "--figure FOLDER.png": ["--figure attend un nom de fichier", "est un dossier"],
    "--methods gradual --set gradual": ["--set attend MÉTHODE.OPTION=VALEUR", "'gradual' a été reçu"],
    "--methods gradual --set gradual.every=2.5": ["gradual.every attend un nombre entier comme 5, mais '2.5'"],
    "--model alexnet_tiny --methods two_to_four_permuted": ["two_to_four_permuted ne s’applique pas à alexnet_tiny"],
    "extra": ["ne sait que faire du mot 'extra'", "Valeurs permises"],
    "--root_ x": ["option de `dlojz compress` '--root_' : valeur inconnue, peut-être '--root' ?"],
    "--set": ["--set demande une valeur", "aucune n’a été reçue"],
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
def test_main_compress_refuses_before_anything_is_trained(
    language: str, words: str, expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_language(language)
    runs, folder = tmp_path / "runs", tmp_path / "folder.png"
    folder.mkdir()
    words = words.replace("FOLDER.png", str(folder))
    assert main(["compress", "--root", str(runs), *words.split()]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("dlojz: ") and told.err.count("\n") == 1
    for part in expected:
        assert part in told.err
    assert not runs.exists()


def test_main_compress_answers_an_unknown_model_with_those_it_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", "--model", "vit_tny"]) == 2
    told = capsys.readouterr().err
    assert "vit_mini, vit_tiny" in told and "alexnet_tiny" in told
    assert not any(name in told for name in ("gpt_tiny", "llama_tiny", "vit_l_16"))


def test_main_compress_refuses_first_a_place_that_may_not_be_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(["compress", "--output", str(tmp_path / "b.json"), "--root", str(tmp_path / "runs")]) == 2
    assert "which is read-only: give another path" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_board_that_cannot_be_kept_after_all_is_answered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlojz.cli.compress._board", lambda given: a_board(("gradual", 0.9, 0.9, 0.9)))

    def full(path: Path, board: Board) -> None:
        raise LabError("the disk is full.")

    monkeypatch.setattr("dlojz.compress.board_record.write_board", full)
    assert main(["compress", "--output", str(tmp_path / "b.json")]) == 2
    told = capfd.readouterr()
    assert "gradual" in told.out and told.err.endswith("dlojz: the disk is full.\n")
    assert main(["compress", "--json", "--output", str(tmp_path / "b.json")]) == 2
    assert json.loads(capfd.readouterr().out)["lines"][1]["method"] == "gradual"


def a_trial(method: str, accuracy: float, ratio: float, high: float) -> BoardTrial:
    return BoardTrial(method=method, family=TEACHER if method == TEACHER else METHODS[method].family, seed=0,
                 accuracy=accuracy, parameters=820_106, predicted_bytes=3_280_424, payload_bytes=3_280_424,
                 file_bytes=3_285_000, latency_s=0.0123, latency_ratio=ratio, latency_ratio_low=0.8 * ratio,
                 latency_ratio_high=high, predicted_latency_ratio=1.23, made_in_s=1)  # fmt: skip


def a_board(*lines: tuple[str, float, float, float]) -> Board:
    trials = (a_trial(TEACHER, 1.0, 1.0, 1.0), *(a_trial(*line) for line in lines))
    return Board(task="digits", image_size=16, teacher="vit_tiny", epochs=1, batch=64, rounds=20, threads=1,
                 trials=trials)  # fmt: skip


@pytest.mark.parametrize("language", ["en", "fr"])
@pytest.mark.parametrize("width", [80, 100])
def test_board_table_in_a_narrow_terminal_cuts_nothing_and_keeps_every_star(language: str, width: int) -> None:
    use_language(language)
    board = a_board(*((name, 1.0, 1.0, 1.0) for name in METHODS))
    assert len(board.front()) == 1 + len(METHODS)
    shown = Console(width=width, file=io.StringIO())
    shown.print(table(board, width))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    rows = text.splitlines()
    assert "…" not in text and max(map(len, rows)) <= width
    assert sum(row.startswith("★ ") for row in rows) == 1 + len(METHODS)
    assert "★ torchao_int8_weight_only" in text and "1.23|1.00".replace(".", {"en": ".", "fr": ","}[language]) in text
    assert ({"en": "[half]", "fr": "[moitié]"}[language] in text) == (width == 100)


def test_conclusion_of_a_board_hides_no_method_that_is_steadily_faster() -> None:
    steady, unsteady, slow = ("gradual", 1.0, 0.6, 0.7), ("two_to_four", 1.0, 0.5, 1.2), ("lottery", 1.0, 1.1, 1.2)
    assert "Fastest of these: gradual, in 0.60 times" in conclusion(a_board(steady, unsteady))
    assert "None of these is clearly faster" in conclusion(a_board(unsteady, slow))
    use_language("fr")
    assert "La plus rapide d’entre elles : gradual" in conclusion(a_board(steady, unsteady))
    assert "Aucune d’elles n’est nettement plus rapide" in conclusion(a_board(unsteady, slow))


def test_a_setting_is_read_as_its_default_is_typed_and_may_be_repeated() -> None:
    words = ["--set", "gradual.every=2", "--json", "--set=int8_static.symmetric=False, int8_static.bits=4"]
    settings = parse("dlojz compress", compress_command.options, words)["set"]
    assert settings == ("gradual.every=2", "int8_static.symmetric=False, int8_static.bits=4")
    more = "gradual.sparsity=1e-1,int8_static.activation_range=min_max"
    found = settings_of((*settings, more), tuple(METHODS))
    assert found == {
        "gradual": {"every": 2, "sparsity": 0.1},
        "int8_static": {"symmetric": False, "bits": 4, "activation_range": "min_max"},
    }
    assert [type(value) for value in found["int8_static"].values()] == [bool, int, str]
    assert settings_of((), ()) == {}


def test_every_option_of_the_list_can_be_set_to_its_default() -> None:
    text = ",".join(f"{name}.{key}={value}" for name, one in METHODS.items() for key, value in one.options.items())
    assert settings_of([text], tuple(METHODS)) == {
        name: dict(one.options) for name, one in METHODS.items() if one.options
    }


def test_main_compress_tells_a_missing_library_with_its_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else found(name))
    needing = next(name for name, one in METHODS.items() if one.needs)
    (pinned,) = METHODS[needing].needs
    assert pinned.startswith("torchao==")
    command = "pip install 'dlojz[compress]'"
    for language, sentence in (
        ("en", f"dlojz: the method {needing} needs torchao, which is not installed: {command}.\n"),
        ("fr", f"dlojz: la méthode {needing} demande torchao, qui n’est pas installé : {command}.\n"),
    ):
        use_language(language)
        assert main(["compress", "--methods", needing]) == 2
        assert capsys.readouterr() == ("", sentence)


def test_a_small_board_is_shown_concluded_drawn_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept, picture = tmp_path / "kept" / "board.json", tmp_path / "board.png"
    root = ["--root", str(tmp_path / "runs")]
    assert main(["compress", *QUICK, *root, "--output", str(kept), "--figure", str(picture)]) == 0
    told = capfd.readouterr()
    assert "vit_tiny on digits at 16×16, 1 seed;" in told.out and "student_alone" in told.out
    assert all(len(row) <= 100 for row in told.out.splitlines()[:4])
    board = Board.from_dict(json.loads(kept.read_text("utf-8")))
    _, student = board.lines()
    assert f"{student.predicted_bytes / 1024:.0f}|{student.file_bytes / 1024:.0f}" in told.out
    assert board.epochs == 1 and board.of("student_alone")[0].options["epochs"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert told.err.count("written: ") == 2
    assert len(list((tmp_path / "runs" / "teachers").iterdir())) == 1


def test_main_compress_gives_one_json_document_and_warns_of_a_larger_student(
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


def test_main_compress_leaves_out_what_does_not_fit_the_teacher_unless_named(
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


def test_main_compress_counts_a_student_nobody_named_for_the_size_of_images(
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


def test_main_compress_lists_every_method_as_json_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", "--list", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [one["name"] for one in listed] == list(METHODS)


# A shell's background job has SIGINT ignored, and what it starts inherits that.
INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dlojz.cli.main import main
from dlojz.cli.compress import image_size
sys.exit(main(sys.argv[1:]))
"""


def test_compress_when_interrupted_says_so_and_gives_the_cursor_back(tmp_path: Path) -> None:
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
