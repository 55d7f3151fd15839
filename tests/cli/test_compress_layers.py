"""`dlojz compress --layers`: which layers of a board are drawn, and what is refused before anything is trained."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dlojz.base.language import use_language
from dlojz.cli.compress import draw_layers, layers_of
from dlojz.cli.main import main
from dlojz.compress.board_record import TEACHER, Board, BoardTrial, LayerSnr
from dlojz.compress.method import METHODS
from dlojz.compress.quantizers import linear_layers
from dlojz.compress.task import digits, new_model
from dlojz.display.figures.compress_figures import MOST_SETTINGS


def trial(method: str, seed: int, *layers: LayerSnr) -> BoardTrial:
    return BoardTrial(
        method=method, family="quantization", seed=seed, accuracy=0.9, parameters=1, predicted_bytes=1,
        payload_bytes=1, file_bytes=9, latency_s=1.0, latency_ratio=1.0, latency_ratio_low=1.0, latency_ratio_high=1.0,
        made_in_s=1.0, layer_errors=layers,
    )  # fmt: skip


def layer(name: str, predicted_db: float | None, measured_db: float | None) -> LayerSnr:
    return LayerSnr(name=name, predicted_sqnr_db=predicted_db, measured_sqnr_db=measured_db, bits=8)


def board(*trials: BoardTrial) -> Board:
    return Board(task="digits", image_size=16, teacher="vit_tiny", epochs=1, batch=1, rounds=1, threads=1,
                 trials=trials)  # fmt: skip


def test_layers_are_medians_over_the_seeds_of_what_has_layers() -> None:
    found = layers_of(
        board(
            trial(TEACHER, 0),
            *(trial("int8_static", seed, layer("a", 30.0 + seed, 20.0 + 2 * seed), layer("b", None, None))
              for seed in range(3)),
        )
    )  # fmt: skip
    assert list(found) == ["int8_static"]
    first, second = found["int8_static"]
    assert (first.name, first.predicted_sqnr_db, first.measured_sqnr_db) == ("a", 31.0, 22.0)
    assert (second.name, second.predicted_sqnr_db, second.measured_sqnr_db) == ("b", None, math.inf)


def test_draw_layers_tells_of_more_methods_than_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use_language("en")
    draw_layers(
        board(*(trial(f"m{n}", 0, layer("a", 30.0, 30.0)) for n in range(MOST_SETTINGS + 2))), tmp_path / "a.png"
    )
    assert "at most: without m8, m9." in capsys.readouterr().err and (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("language", "words"), [("en", "quantizes none: add one of int8_weight_only"), ("fr", "n’en quantifie aucune")]
)
def test_main_compress_layers_with_nothing_to_draw_is_refused_before_training(
    language: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_language(language)
    root = ["--root", str(tmp_path / "runs")]
    assert main(["compress", "--methods", "student_alone,gradual", "--layers", str(tmp_path / "a.png"), *root]) == 2
    told = capsys.readouterr()
    assert told.out == "" and words in told.err
    for wrong, sentence in (("layers.txt", "--layers"), (str(tmp_path), "--layers")):
        assert main(["compress", "--methods", "int8_static", "--layers", wrong, *root]) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_board_is_drawn_layer_by_layer(tmp_path: Path) -> None:
    picture, kept = tmp_path / "layers.png", tmp_path / "board.json"
    chosen = "int8_static,ptq_2bit,torch_int8_dynamic"
    words = ["compress", "--methods", chosen, "--epochs", "1", "--rounds", "2", "--root", str(tmp_path / "runs")]
    assert main([*words, "--layers", str(picture), "--output", str(kept)]) == 0
    assert picture.stat().st_size > 10_000
    found = layers_of(Board.from_dict(json.loads(kept.read_text("utf-8"))))
    names = list(linear_layers(new_model("vit_tiny", digits(), 0)))
    assert list(found) == chosen.split(",") and all(METHODS[name].family == "quantization" for name in found)
    assert all([one.name for one in layers] == names for layers in found.values())
