"""One table, four ways of showing it."""

from __future__ import annotations

import io

from rich.console import Console

from dlojz.base.table import Table

TABLE = Table(("name", "bytes"), (("<i>|", "1"), ("x", "100")), align="lr", whole=1)


def printed(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_as_text_words_stand_left_and_numbers_right() -> None:
    assert str(TABLE) == "name  bytes\n<i>|      1\nx       100"
    assert str(Table(("a",), (("b",),), "What it is")) == "What it is\n\na\nb"


def test_in_html_and_in_markdown_every_cell_is_shown_letter_by_letter() -> None:
    assert "<td>&lt;i&gt;|</td>" in TABLE._repr_html_() and "<i>" not in TABLE._repr_html_()
    lines = TABLE.markdown().splitlines()
    assert lines[:2] == ["| name | bytes |", "|---|--:|"]
    assert lines[2] == r"| &lt;i&gt;\| | 1 |"


def test_a_table_of_words_says_so_in_html() -> None:
    html = Table(("a",), (("b",),), "<c>", align="l")._repr_html_()
    assert html.startswith("<table><caption>&lt;c&gt;</caption>")
    assert '<th scope="col" style="text-align:left">a</th>' in html and '<td style="text-align:left">b</td>' in html


def test_a_terminal_folds_words_but_neither_numbers_nor_whole_columns() -> None:
    table = Table(("run", "why", "bytes"), (("20261122-run", "many words that do not fit", "1234567"),), "", "llr", 1)
    shown = printed(table, 36)
    assert "20261122-run" in shown and "1234567" in shown
    assert len(shown.splitlines()) > 2


def test_a_terminal_shows_no_markup_and_no_hidden_character() -> None:
    shown = printed(Table(("a",), (("[red]\u202eb[/red]",),)), 60)
    assert r"[red]\u202eb[/red]" in shown


def test_names_and_values_have_no_titles() -> None:
    table = Table(("", ""), (("machine", "<here>"),), align="l")
    assert printed(table, 40).strip() == str(table) == "machine  <here>"
    html = table._repr_html_()
    assert '<th scope="row" style="text-align:left">machine</th>' in html and "&lt;here&gt;" in html
    assert "<thead>" not in html
