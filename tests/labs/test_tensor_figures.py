"""Figures and tables of lab 06: what is drawn is what was given; what is still to do is said."""

from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.base.table import Table
from dlojz.config.run_config import RunConfig
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Picture
from dlojz.labs.lab06_tensor import figures
from dlojz.labs.lab06_tensor import figures as measures
from dlojz.labs.lab06_tensor.exercises_plan import layer_bytes
from dlojz.prediction import predict
from dlojz.results.footprint import Footprint

GPT3 = {"tokens": 2048, "width": 12288}
CONFIG = RunConfig.of(model="llama_tiny", engine="by_hand", tp=2, micro_batch=2)


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("layer-bytes")


def _run(config: RunConfig, footprint: Footprint | None) -> Any:
    record = None if footprint is None else SimpleNamespace(footprint=lambda rank=0: footprint)
    return SimpleNamespace(config=config, record=record, losses=[2.0, 1.5])


def texts(picture: Any) -> list[str]:
    assert isinstance(picture, Picture)
    return [text.get_text() for axes in picture.figure.axes for text in axes.texts]


def test_figures_of_tensor_parallelism_say_what_is_to_do() -> None:
    for said in (
        figures.over_links(undone, flops_per_s=1e12, **GPT3),
        figures.share_of_time(undone, (1,), flops_per_s=1.0, samples=1, tokens=1, ranks=8, number_bytes=2),
    ):
        assert isinstance(said, Verdict)
        assert said.state == "todo"


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_split_layer_shows_every_rank_and_leaves_nothing_out(ranks: int) -> None:
    picture = figures.split_layer(ranks)
    assert isinstance(picture, Picture)
    upper, lower = picture.figure.axes
    # By columns: X, then the ranks' parts of W (6 × 8) and of Y (3 × 8).
    areas = [patch.get_width() * patch.get_height() for patch in upper.patches]  # type: ignore[attr-defined]
    assert len(areas) == 1 + 2 * ranks
    assert sum(areas) == 3 * 6 + 6 * 8 + 3 * 8
    # By rows: the parts of X and W, as many partial products as ranks, each of the shape of Y, and Y.
    areas = [patch.get_width() * patch.get_height() for patch in lower.patches]  # type: ignore[attr-defined]
    assert len(areas) == 3 * ranks + 1
    assert sum(areas) == 3 * 6 + 6 * 8 + (ranks + 1) * 3 * 8
    assert [text for text in texts(picture) if text.startswith("rank")] == [f"rank {rank}" for rank in range(ranks)]


@pytest.mark.parametrize(
    ("sequence_parallel", "ends"),
    [
        (False, ["forward: –\nbackward: all-reduce", "forward: all-reduce\nbackward: –"]),
        (True, ["forward: all-gather\nbackward: reduce-scatter", "forward: reduce-scatter\nbackward: all-gather"]),
    ],
)
def test_a_block_tells_what_its_ends_send(sequence_parallel: bool, ends: list[str]) -> None:
    said = texts(figures.block_ends(sequence_parallel))
    assert [text for text in said if text.startswith("forward")] == ends
    assert sum("tokens of rank" in text for text in said) == (4 if sequence_parallel else 0)


def test_time_over_links_is_that_of_the_students_bytes() -> None:
    sent = layer_bytes(1, 2048, 12288, 8, 2)
    sizes = {"samples": 1, "tokens": 2048, "ranks": 8, "number_bytes": 2}
    shares = figures.share_of_time(layer_bytes, (12288,), flops_per_s=200e12, **sizes)
    assert isinstance(shares, Table)
    assert shares.rows == (("12,288", "9%", "51%"),)
    use_language("fr")
    picture = figures.over_links(layer_bytes, flops_per_s=200e12, **GPT3)
    assert isinstance(picture, Picture)
    lines = picture.figure.axes[0].lines
    assert list(lines[1].get_ydata())[2] == pytest.approx(1e3 * sent / 300e9)  # type: ignore[arg-type]


def test_side_by_side_puts_runs_beside_their_predictions() -> None:
    run = _run(CONFIG, predict(CONFIG))
    sheet = measures.counted([run])
    assert [row[1:4] for row in sheet.rows] == [("all-reduce", "20", "20")]
    picture = measures.side_by_side([run])
    assert isinstance(picture, Picture)
    memory, sent = picture.figure.axes
    predicted: list[float] = []
    measured: list[float] = []
    for patch in memory.patches:
        (measured if patch.get_alpha() == 1.0 else predicted).append(patch.get_width())  # type: ignore[attr-defined]
    assert predicted == measured
    assert len(sent.patches) == 2


def test_side_by_side_refuses_a_run_without_a_record() -> None:
    for read in (measures.counted, measures.side_by_side):
        with pytest.raises(LabError, match="run it again"):
            read([_run(CONFIG, None)])
