"""The figure of the libraries side by side: what it draws, and what it says in words, in both languages."""

from pathlib import Path

import pytest

from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.library_figures import libraries_figure
from dlojz.libraries.library_catalogue import LIBRARIES, lines_changed
from dlojz.libraries.side_by_side import LibraryRow

from .overlap import overlapping

MIB = 2**20 / 1e6
"""In millions of bytes, as the rows have them."""


def row(name: str, **changed: object) -> LibraryRow:
    fields: dict[str, object] = {
        **{"name": name, "title": LIBRARIES[name].title, "version": "1.2.3+cpu", "change": lines_changed(name)},
        **{"hides": "much", "config": RunConfig.of(model="gpt_tiny", dp=2), "note": "", "losses": (3.0, 2.0)},
        **{"difference": 0.0, "states_bytes": (14_000_000, 14_000_000), "peak_bytes": (90_000_000, 90_000_000)},
        **{"traffic_bytes": (("all_reduce", 3_500_000, 3_500_000),), "step_s": 0.5, "step_ratio": 1.0},
        **{"step_ratio_low": 1.0, "step_ratio_high": 1.0, "rounds": 3, **changed},
    }
    return LibraryRow(**fields)  # type: ignore[arg-type]


ROWS = [
    row("torch"),
    row("deepspeed", difference=2e-7, peak_bytes=(86_000_000, 87_500_000), step_ratio=1.2, step_ratio_low=1.1,
        step_ratio_high=1.3),
    row("accelerate", traffic_bytes=(("all_reduce", 3_500_000, 3_500_000), ("broadcast", 0, 1_000_000))),
    row("megatron", peak_bytes=(None, 80_000_000), traffic_bytes=(("all_reduce", None, 4_000_000),)),
    row("colossalai", config=None, note="absent.", difference=None, peak_bytes=(None, None), traffic_bytes=(),
        step_ratio=None, losses=(), version=""),
]  # fmt: skip


def test_libraries_figure_has_in_each_panel_only_what_was_measured() -> None:
    lines, peak, sent, times = libraries_figure(ROWS).axes
    own = [one.change for one in ROWS]
    assert [bar.get_width() for bar in lines.patches] == [
        width for one in own for width in (one.lines - one.added, one.added) if width
    ]
    assert [bar.get_width() for bar in peak.patches] == pytest.approx(
        [one / MIB for one in (90, 90, 86, 87.5, 90, 90, 80)]
    )
    assert [bar.get_width() for bar in sent.patches] == pytest.approx(
        [one / MIB for one in (3.5, 3.5, 3.5, 3.5, 3.5, 4.5, 4.0)]
    )
    dots = [line.get_xdata()[0] for line in times.lines if line.get_marker() == "o"]  # type: ignore[index]
    assert dots == pytest.approx([1.0, 1.2, 1.0, 1.0])


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["DeepSpeed: ", "losses within 2e-07 of torch's", "peak 83.45 MiB (predicted 82.02 MiB)", "not run"]),
        (
            "fr",
            ["DeepSpeed : ", "pertes à 2e-07 près de celles de torch", "(prédit : 82,02 Mio)", "pas exécuté", "×1,20"],
        ),
    ],
)
def test_libraries_figure_is_told_in_words_and_no_text_lies_on_another(
    language: str, words: list[str], tmp_path: Path
) -> None:
    use_language(language)
    figure = libraries_figure(ROWS, tmp_path / "libraries.png")
    assert overlapping(figure) == []
    use_language("en")
    for one in words:
        assert one in figure.alt
    assert (tmp_path / "libraries.png").stat().st_size > 10_000


def test_libraries_figure_draws_a_name_letter_by_letter() -> None:
    figure = libraries_figure([row("torch", version="$x$\x1b[31m")])
    label = figure.axes[0].get_yticklabels()[0].get_text()
    assert "$x$" in label and "\x1b" not in label
