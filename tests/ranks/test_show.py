"""CellOutput and table: the same as box and as text, every sign escaped, equal columns once."""

import pytest

from dlojz.base.language import use_language
from dlojz.ranks.show import CellAnswer, CellOutput, RankStatus, lines_of


def printed(rank: int, text: str, *, cut: bool = False) -> CellAnswer:
    return CellAnswer(rank, parts=({"kind": "printed", "text": text},), cut=cut)


def test_ranks_that_said_the_same_share_a_column() -> None:
    columns = CellOutput([printed(0, "a\n"), printed(1, "b\n"), printed(2, "a\n"), CellAnswer(3)])
    assert str(columns) == "ranks 0 and 2: a\nrank 1: b"
    assert columns._repr_html_().count("<pre") == 2


def test_several_lines_stand_below_their_heading() -> None:
    assert str(CellOutput([printed(0, "a\n\nb\n")])) == "rank 0:\n    a\n\n    b"


def test_nothing_said_is_nothing_shown() -> None:
    assert not CellOutput([CellAnswer(0), CellAnswer(1)])


def test_headings_are_in_the_readers_language() -> None:
    use_language("fr")
    assert str(CellOutput([printed(rank, "a") for rank in range(4)])) == "rangs 0–3 : a"
    assert "coupé : plus de 64 Kio" in str(CellOutput([printed(0, "a", cut=True)]))


@pytest.mark.parametrize(
    "nasty", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</pre><b>", "\u202egnp.exe", "&lt;"]
)
def test_what_is_printed_cannot_become_html(nasty: str) -> None:
    html = CellOutput([printed(0, nasty), CellAnswer(1, parts=({"kind": "value", "text": nasty},))])._repr_html_()
    assert nasty not in html
    assert "<script" not in html
    assert "<img" not in html


def test_an_image_is_shown_only_if_it_is_one() -> None:
    def column(png: str) -> str:
        return CellOutput([CellAnswer(0, parts=({"kind": "image", "png": png, "text": "<Figure>"},))])._repr_html_()

    assert '<img alt="&lt;Figure&gt;" src="data:image/png;base64,iVBORw0KGgo=">' in column("iVBORw0KGgo=")
    assert "<img" not in column('x" onerror="alert(1)')


def test_colours_and_progress_bars_become_plain_lines() -> None:
    assert lines_of("\x1b[31mred\x1b[0m\n") == ["red"]
    assert lines_of("10%\r50%\r100%\nnext") == ["100%", "next"]
    assert lines_of("a\tb\r\n") == ["a       b"]


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    lines = lines_of("\n".join(str(number) for number in range(2000)))
    assert (len(lines), lines[0], lines[250], lines[-1]) == (501, "0", "… (1500 lines left out)", "1999")


def test_the_table_of_ranks_says_the_same_twice() -> None:
    status = RankStatus([{"pid": 11, "device": "cpu", "memory_bytes": 2**20, "variables": 3}])
    assert [line.split() for line in str(status).splitlines()] == [
        ["rank", "process", "device", "own", "memory", "variables"],
        ["0", "11", "cpu", "1.00", "MiB", "3"],
    ]
    assert "<td>1.00\u00a0MiB</td>" in status._repr_html_()
    assert str(RankStatus([])) == "no ranks are running"
    assert "no ranks are running" in RankStatus([])._repr_html_()
