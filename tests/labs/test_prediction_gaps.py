"""How far a prediction is from its figure: gap, margin and their words, with values worked out by hand."""

from pathlib import Path

import pytest

from dlojz.base.language import use_language
from dlojz.labs.kit.exercise import Kind, Prediction
from dlojz.labs.kit.lab import content_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("predicted", "state", "words"),
    [
        (1000, "right", "Exactly right."),
        (1050, "right", "5.0% apart: well predicted."),
        (1200, "note", "20.0% apart, where a prediction within 10% can be reached"),
        (2000, "note", "A factor of 2 apart"),
        (500, "note", "A factor of 2 apart"),
        (0, "note", "Far apart"),
        (-1000, "note", "Far apart"),
    ],
)
def test_a_prediction_is_laid_over_the_figure(predicted: float, state: str, words: str) -> None:
    prediction = Prediction(id="x", en="?", fr="?", kind="count", tolerance=0.1)
    verdict = prediction.compare(predicted, 1000)
    assert verdict.state == state
    assert words in verdict.message


def test_compare_calls_a_gap_written_like_its_margin_just_over_it() -> None:
    prediction = Prediction(id="x", en="?", fr="?", kind="ratio", tolerance=0.6)
    assert (
        "A factor of 1.6 apart: just over what can be reached (a factor of 1.6)."
        in prediction.compare(2.237, 1.39668).message
    )
    assert "just over" not in prediction.compare(1.63, 1.0).message


@pytest.mark.parametrize("kind", ["rate", "ratio", "seconds"])
@pytest.mark.parametrize(
    ("predicted", "value", "tolerance", "state", "words"),
    [
        # Half and double: 2.5 / 1.25 = 5 / 2.5 = 2.
        (1.25, 2.5, 0.5, "note", "A factor of 2 apart, where a prediction within a factor of 1.5 can"),
        (5.0, 2.5, 0.5, "note", "A factor of 2 apart, where a prediction within a factor of 1.5 can"),
        (1.25, 2.5, 1.0, "right", "A factor of 2 apart: within the margin (a factor of 2)."),
        (5.0, 2.5, 1.0, "right", "A factor of 2 apart: within the margin (a factor of 2)."),
        # 1.3 / 1 either way; 30% is no praise where 60% is the margin.
        (1.0, 1.3, 0.6, "right", "30.0% apart: within the margin (60%)."),
        (1.3, 1.0, 0.3, "right", "30.0% apart: within the margin (30%)."),
        (1.0, 1.09, 0.1, "right", "9.0% apart: well predicted."),
        (1.0, 1.09, 0.6, "right", "9.0% apart: well predicted."),
        (0.0, 1.0, 0.5, "note", "Far apart"),
        (1.0, 0.0, 0.5, "note", "Far apart"),
    ],
)
def test_compare_finds_a_quotient_as_far_off_when_halved_as_when_doubled(
    kind: Kind, predicted: float, value: float, tolerance: float, state: str, words: str
) -> None:
    verdict = Prediction(id="x", en="?", fr="?", kind=kind, tolerance=tolerance).compare(predicted, value)
    assert (verdict.state, verdict.message.split("\n")[2].startswith(words)) == (state, True), verdict.message


@pytest.mark.parametrize(
    ("predicted", "value", "state", "en", "fr"),
    [
        (2, 2, "right", "Exactly right.", "C’est exact."),
        (1, 2, "right", "One place apart: within the margin (one place).", "Une place d’écart : dans la marge"),
        (2, 1, "right", "One place apart: within the margin (one place).", "Une place d’écart : dans la marge"),
        (4, 6, "note", "2 places apart, where a prediction within one place", "2 places d’écart, alors qu’on peut"),
        (6, 4, "note", "2 places apart, where a prediction within one place", "2 places d’écart, alors qu’on peut"),
    ],
)
def test_compare_judges_a_place_by_places(predicted: float, value: float, state: str, en: str, fr: str) -> None:
    prediction = Prediction(id="x", en="?", fr="?", kind="place")
    for language, words in (("en", en), ("fr", fr)):
        use_language(language)
        verdict = prediction.compare(predicted, value)
        assert verdict.state == state
        assert verdict.message.split("\n")[2].startswith(words)
    assert not prediction.admits(2.5)
    assert not prediction.admits(0)


def test_kind_of_the_prediction_of_ddp_is_its_place() -> None:
    [place] = [one for one in content_of("08").PREDICTIONS if one.id == "ddp-place"]
    assert place.kind == "place"


def test_compare_names_no_margin_of_what_is_counted_exactly() -> None:
    prediction = Prediction(id="x", en="?", fr="?", kind="count", tolerance=0.0)
    assert "A factor of 2 apart, where the exact number can be predicted" in prediction.compare(4, 2).message
    use_language("fr")
    assert "Un facteur 2 d’écart, alors qu’on peut prédire le nombre exact" in prediction.compare(4, 2).message


@pytest.mark.parametrize(
    ("kind", "predicted", "value", "en", "fr"),
    [
        ("bytes", 36.4, 36.4 * 2**30, "In GiB your figure would be right", "En Gio, votre valeur serait juste"),
        ("bytes", 13, 12.9e9, "In GB your figure would be right", "En Go, votre valeur serait juste"),
        ("seconds", 12, 0.012, "In ms your figure would be right", "En ms, votre valeur serait juste"),
        ("bytes", 36.4, 99e9, "A factor of", "Un facteur"),
    ],
)
def test_a_prediction_in_another_unit_is_told_so(kind: Kind, predicted: float, value: float, en: str, fr: str) -> None:
    prediction = Prediction(id="x", en="?", fr="?", kind=kind, tolerance=0.02)
    for language, words in (("en", en), ("fr", fr)):
        use_language(language)
        verdict = prediction.compare(predicted, value)
        assert verdict.state == "note"
        assert verdict.message.split("\n")[2].startswith(words)


@pytest.mark.parametrize(
    ("lab_number", "prediction_id", "predicted", "measured", "words"),
    [
        ("06", "tensor-speed-up", 1.3, (1.0, 1.69), "differences of 30%"),
        ("10", "rate-same-computation", 0.8, (0.5, 0.85), "Expect 0.5–0.85 and 4.5–9"),
        ("10", "rate-same-weights", 6.4, (4.5, 9.0), "Expect 0.5–0.85 and 4.5–9"),
        ("10", "exchange-share", 0.5, (0.5, 0.85), "Expect 0.5–0.85:"),
        ("11", "student-time", 0.5, (0.5 / 1.3, 0.65), "a gap of 30% is not an error"),
        ("11", "masked-time", 1.0, (1 / 1.3, 1.3), "a gap of 30% is not an error"),
        ("11", "lora-time", 2 / 3, (2 / 3.9, 2.6 / 3), "a gap of 30% is not an error"),
        ("11", "prefill-rate", 1000.0, (600.0, 1000.0), "expect 60 to 100% of them"),
        ("11", "decode-rate", 100.0, (60.0, 100.0), "expect 60 to 100% of them"),
        ("13", "save-seconds", 0.03, (0.02, 0.045), "expect a gap of 50%"),
        ("13", "stall-seconds", 0.03, (0.02, 0.045), "expect a gap of 50%"),
    ],
)
def test_a_margin_holds_what_the_text_announces(
    lab_number: str, prediction_id: str, predicted: float, measured: tuple[float, float], words: str
) -> None:
    [source] = (ROOT / "solutions").glob(f"{lab_number}_*.py")
    assert words in source.read_text().replace("\n# ", " ")
    [prediction] = [one for one in content_of(lab_number).PREDICTIONS if one.id == prediction_id]
    assert [prediction.is_within(predicted, value) for value in measured] == [True, True]
