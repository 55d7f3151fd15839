"""Numbers of ranks that are refused, and the words."""

import pytest

from dlojz.base.language import use_language
from dlojz.ranks.rank_setup import RanksRefused, number_of_ranks, refuse_too_many


@pytest.mark.parametrize("text", ["four", "0", "-1", "2.5", "", "257", "1e3", True, None])
def test_what_is_no_number_of_ranks_is_refused(text: object) -> None:
    with pytest.raises(RanksRefused, match="a number of ranks is a whole number from 1 to 256, e.g. %%ranks 4, but "):
        number_of_ranks(text)


@pytest.mark.parametrize(("text", "number"), [("1", 1), (4, 4), ("256", 256)])
def test_numbers_are_understood(text: object, number: int) -> None:
    assert number_of_ranks(text) == number


def test_more_than_the_machine_bears_is_refused_with_the_figures() -> None:
    refuse_too_many(16, cores=2, available_bytes=2**34)
    with pytest.raises(
        RanksRefused, match=r"64 ranks would take about 4.00 GiB of memory \(16.0 GiB free\) and share 2 cores"
    ):
        refuse_too_many(64, cores=2, available_bytes=2**34)
    with pytest.raises(RanksRefused, match=r"8 ranks would take about 512 MiB of memory \(100 MiB free\)"):
        refuse_too_many(8, cores=2, available_bytes=100 * 2**20)
    use_language("fr")
    with pytest.raises(RanksRefused, match="64 rangs prendraient environ .* et se partageraient 1 cœur : .*--force"):
        refuse_too_many(64, cores=1, available_bytes=2**34)


def test_a_notebook_shows_the_sentence_without_a_stack() -> None:
    assert RanksRefused("no.")._render_traceback_() == ["no."]
