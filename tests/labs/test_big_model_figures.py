"""Figures of lab 01: what the text says of the published accuracies, and who sees whom in each family."""

import numpy as np
import pytest

from dlojz.base.language import use_language
from dlojz.labs.lab01_big_models import figures
from dlojz.labs.lab01_big_models.figures import ACCURACIES, COATNET
from tests.display.legible import DRAWN_IN


def rows(model: str, pre_training: str) -> list[figures.Accuracy]:
    return [row for row in ACCURACIES if row.model.startswith(model) and row.pre_training == pre_training]


def test_accuracies_have_the_multiply_adds_of_the_table_of_sizes() -> None:
    for name in ("CoAtNet-5", "CoAtNet-6", "CoAtNet-7"):  # at the same image size there
        (row,) = [row for row in ACCURACIES if row.model == name]
        published = COATNET[name.lower().replace("-", "_")]
        assert row.multiply_adds_g * 1e9 == published.multiply_adds
        assert row.parameters_m * 1e6 == published.parameters


def test_accuracies_are_what_the_text_says_of_them() -> None:
    base, large = rows("ViT", "ImageNet-1K")
    assert base.top_1 - large.top_1 == pytest.approx(1.4, abs=0.05)
    assert large.parameters_m / base.parameters_m == pytest.approx(3.5, abs=0.05)
    of_jft = rows("ViT", "JFT-300M")
    assert of_jft[1].top_1 - of_jft[0].top_1 == pytest.approx(3.0, abs=0.05)
    assert of_jft[1].top_1 > max(row.top_1 for name in ("ImageNet-1K", "ImageNet-21K") for row in rows("ViT", name))
    smallest = rows("CoAtNet", "ImageNet-1K")[0]
    assert smallest.top_1 - base.top_1 == pytest.approx(6.0, abs=0.05)
    assert base.multiply_adds_g / smallest.multiply_adds_g == pytest.approx(4, abs=0.2)
    for name in figures.PRE_TRAININGS:
        curve = [row.top_1 for row in rows("CoAtNet", name)]
        assert curve == sorted(curve) and len(set(curve)) == len(curve)
        assert max(curve) > max(row.top_1 for row in rows("ViT", name))
    (six,), (giant,) = rows("CoAtNet-6", "JFT-3B"), rows("ViT-G", "JFT-3B")
    assert six.top_1 == giant.top_1
    assert giant.multiply_adds_g / six.multiply_adds_g == pytest.approx(3.4, abs=0.05)


@pytest.mark.parametrize("language", DRAWN_IN)
def test_accuracy_draws_and_names_every_curve(language: str) -> None:
    use_language(language)
    for axes in figures.accuracy().axes:
        assert len(axes.lines) == 8
        assert sum(len(line.get_xdata()) for line in axes.lines) == len(ACCURACIES)  # type: ignore[arg-type]


def test_the_masks_are_those_of_the_three_families() -> None:
    encoder, decoder, both = (np.asarray(axes.images[0].get_array()) for axes in figures.families(3).axes)
    assert encoder.all()
    assert (decoder == np.tril(np.ones((3, 3)))).all()
    assert (both[:3, :3] == encoder).all() and not both[:3, 3:].any(), "the source does not see the target"
    assert (both[3:, :3] == encoder).all() and (both[3:, 3:] == decoder).all()
