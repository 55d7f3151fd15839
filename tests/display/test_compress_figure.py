"""The figures of a compression: what they say, in both languages, and that nothing lies on anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.distillation import ARMS, StudentTrial, distillation_figure
from dlojz.base.language import use_language
from dlojz.compress.board_record import TEACHER, Board, BoardTrial
from dlojz.display.figures.compress_figures import compress_figure, panel_front

from .legible import DRAWN_IN
from .overlap import overlapping

LINES = [  # method, family, accuracy, KiB, time: close to one another where real ones are
    (TEACHER, TEACHER, 0.981, 3208, 1.0),
    *((f"student_{number}", "distillation", 0.978 + 0.003 * number, 1657, 0.52 + 0.01 * number) for number in range(4)),
    *((f"int8_{number}", "quantization", 0.981, 902 + 7 * number, 0.45 + 0.05 * number) for number in range(4)),
    ("bits_2", "quantization", 0.403, 325, 1.1),
    *((f"pruned_{number}", "pruning", 0.97, 771, 1.0) for number in range(3)),
    ("perfect", "pruning", 1.0, 5000, 2.0),
]


def board(seeds: int = 1) -> Board:
    trials = [
        BoardTrial(
            method=method,
            family=family,
            seed=seed,
            accuracy=max(0.0, accuracy - 0.01 * seed),
            parameters=1000,
            predicted_bytes=1000 * size,
            payload_bytes=1000 * size,
            file_bytes=1024 * size,
            latency_s=0.01 * time,
            latency_ratio=time,
            latency_ratio_low=0.9 * time,
            latency_ratio_high=1.1 * time,
            predicted_latency_ratio=None if family == "pruning" else 0.8 * time,
            made_in_s=1,
        )
        for seed in range(seeds)
        for method, family, accuracy, size, time in LINES
    ]
    return Board(task="digits", image_size=16, teacher="vit_tiny", epochs=1, batch=8, rounds=3, threads=1,
                 trials=tuple(trials))  # fmt: skip


@pytest.mark.parametrize("language", DRAWN_IN)
@pytest.mark.parametrize("seeds", [1, 3])
def test_no_text_of_a_board_lies_on_another(language: str, seeds: int, tmp_path: Path) -> None:
    use_language(language)
    figure = compress_figure(board(seeds), tmp_path / "board.png")
    assert overlapping(figure) == []
    assert (tmp_path / "board.png").stat().st_size > 10_000
    told = {"en": "bits_2: 40.3%, 325 KiB, 1.10 times the", "fr": "bits_2 : 40,3 %, 325 Kio, 1,10 fois le temps"}
    assert told[language] in figure.alt or seeds > 1
    names = [text.get_text() for text in figure.axes[2].texts]
    assert all(method in names for method, *_ in LINES[1:])
    assert {"en": "teacher (vit_tiny)", "fr": "professeur (vit_tiny)"}[language] in names
    families = {"en": {"pruning", "front of the panel"}, "fr": {"élagage", "quantification", "front du panneau"}}
    assert families[language] <= set(names)
    assert figure.get_suptitle() == board(seeds).title()


def test_compress_figure_marks_measured_full_and_predicted_hollow() -> None:
    size, time, _ = compress_figure(board()).axes
    for panel, measured, predicted in ((size, 325, 1000 * 325 / 1024), (time, 1.1, 0.88)):
        marks = {
            (line.get_markerfacecolor() == "none", round(float(line.get_xdata()[0]), 3))
            for line in panel.lines
            if line.get_marker() == "s" and float(line.get_ydata()[0]) == pytest.approx(1 - 0.403)
        }
        assert marks == {(False, round(measured, 3)), (True, round(predicted, 3))}


def test_a_panel_joins_what_nothing_beats_in_both() -> None:
    assert panel_front([(3, 0.1), (1, 0.5), (2, 0.5), (2, 0.2), (4, 0.1)]) == [(1, 0.5), (2, 0.2), (3, 0.1)]


def test_compress_figure_reads_no_method_as_mathematics_and_hides_no_character() -> None:
    odd = board().trials[-1].model_copy(update={"method": "$x$\u202e"})
    figure = compress_figure(board().model_copy(update={"trials": (*board().trials, odd)}))
    assert any(text.get_text() == "$x$\\u202e" for text in figure.axes[2].texts)


def trials() -> list[StudentTrial]:
    return [
        StudentTrial(
            arm=arm.name,
            seed=seed,
            student="vit_mini",
            parameters=423_562,
            teacher_parameters=820_106,
            accuracy=0.98 * (1 - 0.012 * place - (0.01 if seed == 1 else 0)),
            teacher_accuracy=0.98,
            steps=264,
        )
        for place, arm in enumerate(ARMS)
        for seed in range(5)
    ]


@pytest.mark.parametrize(
    ("language", "words"),
    [
        (
            "en",
            ["vit_mini: 51.6% of its teacher's parameters; 5 seed(s), 264 steps each", "DistilBERT's recipe: 95.2%"],
        ),
        ("fr", ["vit_mini : 51,6 % des paramètres du professeur", "recette de DistilBERT : 95,2 %"]),
    ],
)
def test_distillation_figure_tells_the_students_by_arm(language: str, words: list[str], tmp_path: Path) -> None:
    use_language(language)
    figure = distillation_figure(trials(), tmp_path / "students.png")
    said = figure.alt + figure.axes[0].get_title(loc="left")
    assert all(one in said for one in words), said
    assert overlapping(figure) == []


def test_distillation_figure_draws_all_seeds_that_kept_the_same() -> None:
    (axes,) = distillation_figure(trials()[:5]).axes
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"}
    assert len(dots) == 5
