"""One table, four ways of showing it."""

import io

from rich.console import Console

from dlojz.base.table import BAR_CHARACTERS, Lines, Table, facts, markdown_safe

TABLE = Table(("name", "bytes"), (("<i>|", "1"), ("x", "100")), align="lr", whole=1)


def printed(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_as_text_has_words_left_and_numbers_right() -> None:
    assert str(TABLE) == "name  bytes\n<i>|      1\nx       100"
    assert str(Table(("a",), (("b",),), "What it is")) == "What it is\n\na\nb"


def test_in_html_and_in_markdown_every_cell_is_shown_letter_by_letter() -> None:
    assert ">&lt;i&gt;|</th><td>1</td>" in TABLE._repr_html_() and "<i>" not in TABLE._repr_html_()
    lines = TABLE.markdown().splitlines()
    assert lines[:2] == ["| name | bytes |", "|---|--:|"]
    assert lines[2] == r"| &lt;i&gt;\| | 1 |"


def test_a_table_of_words_says_so_in_html() -> None:
    html = Table(("a",), (("b",),), "<c>", align="l")._repr_html_()
    assert ">&lt;c&gt;</caption>" in html
    assert '<th scope="col" style="text-align:left">a</th>' in html and '<td style="text-align:left">b</td>' in html


def test_in_html_words_stand_left_beside_numbers_with_their_titles() -> None:
    html = Table(("run", "bytes", "why"), (("a", "1", "b"),), align="lrl")._repr_html_()
    left = ' style="text-align:left"'
    assert f'<th scope="col"{left}>run</th><th scope="col">bytes</th><th scope="col"{left}>why</th>' in html
    assert f"<td>1</td><td{left}>b</td>" in html
    assert "<td>1</td><td>2</td>" in Table(("run", "bytes"), (("a", "1", "2"),))._repr_html_()  # longer than its titles


def test_table_in_a_terminal_folds_words_but_neither_numbers_nor_whole_columns() -> None:
    table = Table(("run", "why", "bytes"), (("20261122-run", "many words that do not fit", "1234567"),), "", "llr", 1)
    shown = printed(table, 36)
    assert "20261122-run" in shown and "1234567" in shown
    assert len(shown.splitlines()) > 2


def test_table_in_a_terminal_shows_no_markup_and_no_hidden_character() -> None:
    shown = printed(Table(("a",), (("[red]\u202eb[/red]",),)), 60)
    assert r"[red]\u202eb[/red]" in shown


def test_table_of_names_and_values_has_no_titles() -> None:
    table = Table(("", ""), (("machine", "<here>"),), align="l")
    assert printed(table, 40).strip() == str(table) == "machine  <here>"
    html = table._repr_html_()
    assert '<th scope="row" style="text-align:left">machine</th>' in html and "&lt;here&gt;" in html
    assert "<thead>" not in html


def test_table_escapes_every_part_and_bars_stand_behind_the_names() -> None:
    attack = "<script>alert(1)</script>\u202e"
    table = Table(
        ("", attack), ((attack, attack), (attack, "1")), attack, shares=(0.5, 0.0), colors=(attack, ""), notes=(attack,)
    )
    shown = table._repr_html_()
    assert "<script" not in shown and "\u202e" not in shown and "&lt;script&gt;" in shown
    assert "width:50.0%" in shown and shown.count("<td aria-hidden") == 2
    assert "█" in printed(table, 200) and "\u202e" not in printed(table, 200) and "<script" not in table.markdown()


def test_table_row_of_one_cell_is_a_heading() -> None:
    table = Table(("", "a", "b"), (("memory",), ("weights", "1", "2")), notes=("measured here",))
    assert '<th colspan="3" style="text-align:left">memory</th>' in table._repr_html_()
    assert table.markdown().splitlines()[2:] == ["| **memory** | | |", "| weights | 1 | 2 |", "", "- measured here"]
    assert str(table).splitlines()[1:] == ["memory", "weights  1  2", "measured here"]
    assert [line.split() for line in printed(table, 60).splitlines()][1:3] == [["memory"], ["weights", "1", "2"]]


def test_a_cell_has_several_lines_only_where_it_says_so() -> None:
    table = Table(("name", "what"), (("a", Lines("one\n<two>")), ("b\nc", "d")), align="l")
    assert str(table).splitlines() == ["name      what", "a         one", "          <two>", "b\\u000ac  d"]
    assert "one<br>&lt;two&gt;" in table._repr_html_() and "b\\u000ac" in table._repr_html_()
    assert "one<br>&lt;two&gt;" in table.markdown()
    assert [line.split() for line in printed(table, 60).splitlines()][1:3] == [["a", "one"], ["<two>"]]


def test_table_in_a_narrow_terminal_folds_the_titles_of_numbers_first() -> None:
    table = Table(("point", "memory per rank"), (("some words", "1.0 MiB"),))
    assert printed(table, 40).splitlines()[0].split() == ["point", "memory", "per", "rank"]
    assert [line.split() for line in printed(table, 24).splitlines()] == [
        ["memory"],
        ["per"],
        ["point", "rank"],
        ["some", "words", "1.0", "MiB"],
    ]
    assert printed(table, 16).splitlines()[-1].split() == ["words"]  # then the words, and one space is left between


def test_bars_of_a_table_are_shares_in_half_characters_and_never_nothing() -> None:
    table = Table(("", "s"), (("a", "1"), ("b", "2"), ("c", "3")), shares=(0.5, 0.001, 0.0))
    lines = [line for line in printed(table, 80).splitlines() if line.strip()][-3:]
    assert [(line.count("█"), line.count("▌")) for line in lines] == [(BAR_CHARACTERS // 2, 0), (0, 1), (0, 0)]


def test_a_table_of_three_columns_says_the_width_that_it_needs() -> None:
    """`words`, `1` and `2` are 7 characters, and two spaces stand between three columns."""
    assert Table(("point", "a", "b"), (("some words", "1", "2"),))._fitted(10)[1:] == (1, 9)


def test_facts_leave_out_what_has_no_value() -> None:
    assert str(facts(("a", "1"), ("b", ""), ("long", "2"))) == "a     1\nlong  2"


def test_markdown_safe_escapes_what_is_markup_and_nothing_else() -> None:
    assert markdown_safe('Operator\'s "eight" micro_batch_2') == 'Operator\'s "eight" micro_batch_2'
    assert markdown_safe("_all_ *x* <b> a|b") == "\\_all\\_ \\*x\\* &lt;b&gt; a\\|b"


def test_html_of_a_table_breaks_no_line_between_a_number_and_its_unit() -> None:
    cells = ("5 Go/s", "4,51 Mio | 4,51 Mio", "2 min 05 s", "12 %", "3 samples", "12 big")
    shown = Table(("what", *cells), (("x", *cells),))._repr_html_()
    assert all(f"<td>{cell}</td>" in shown for cell in ("5\u00a0Go/s", "4,51\u00a0Mio | 4,51\u00a0Mio", "12\u00a0%"))
    assert all(f"<td>{cell}</td>" in shown for cell in ("2\u00a0min 05\u00a0s", "3 samples", "12 big"))
