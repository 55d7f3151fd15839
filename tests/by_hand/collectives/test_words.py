"""The sentences, in both languages, and short durations."""

import pytest

from dlojz.base.language import use_language
from dlojz.by_hand.collectives import simulate
from dlojz.display.collective_text import format_bandwidth, format_latency, held_words, step_words


@pytest.fixture
def french() -> None:
    use_language("fr")


def test_a_step_in_sentences() -> None:
    assert step_words(simulate("ring_all_reduce", 4), 1)[0] == "rank 0 sends chunk 0 to rank 1, which adds it"
    assert step_words(simulate("halving_doubling_all_reduce", 8), 1)[1] == (
        "rank 1 sends chunks 0 to 3 to rank 0, which adds them"
    )
    assert step_words(simulate("tree_broadcast", 2), 1) == ["rank 0 sends the whole message to rank 1, which keeps it"]
    assert "before the first step" in step_words(simulate("tree_broadcast", 2), 0)[0]


@pytest.mark.usefixtures("french")
def test_step_words_in_french() -> None:
    assert step_words(simulate("ring_all_reduce", 4), 1)[0] == (
        "le rang 0 envoie le morceau 0 au rang 1, qui l’ajoute au sien"
    )
    assert step_words(simulate("tree_broadcast", 2), 1) == ["le rang 0 envoie tout le message au rang 1, qui le garde"]
    assert format_latency(4.2e-5) == "42,0 µs" and format_bandwidth(2e9) == "2,00 Go/s"


def test_what_is_held() -> None:
    simulation = simulate("ring_all_gather", 2)
    assert held_words(simulation.states[0][0][1], False) == "nothing"
    assert held_words(simulation.states[1][0][1], True) == "11 (rank 1, final)"


@pytest.mark.parametrize(
    "duration_s, written",
    [(0, "0.00 ms"), (4.2e-7, "420 ns"), (4.2e-5, "42.0 µs"), (1e-3, "1.00 ms"), (0.25, "250 ms"), (2, "2.00 s")],
)
def test_format_latency_of_short_durations(duration_s: float, written: str) -> None:
    assert format_latency(duration_s) == written
