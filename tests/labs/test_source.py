"""The source of a lab: both languages, one code, nothing of the solutions in the student notebooks."""

import json
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.labs.kit.source import compose, in_language, read_source

GOOD = """\
# %% [markdown] lang="fr"
# # Titre

# %% [markdown] lang="en"
# # Title

# %% name="half" tags=["nbval-ignore-output"]
def half(number):
    ### BEGIN SOLUTION
    return number / 2
    ### END SOLUTION

# %% [markdown] lang="en"
# After

# %% [markdown] lang="fr"
# Après

# %% name="guess" stub="value"
print(
    ### BEGIN SOLUTION
    42,
    ### END SOLUTION
)
"""


def write(folder: Path, text: str, name: str = "05_test.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_compose_gives_each_language_its_prose_and_the_same_code(tmp_path: Path) -> None:
    source = read_source(write(tmp_path, GOOD))
    english, french = (compose(source, language, student=False) for language in ("en", "fr"))
    assert [cell.source for cell in english.cells if cell.cell_type == "markdown"] == ["# Title", "After"]
    assert [cell.source for cell in french.cells if cell.cell_type == "markdown"] == ["# Titre", "Après"]
    code = [
        [(cell.id, cell.source) for cell in notebook.cells if cell.cell_type == "code"]
        for notebook in (english, french)
    ]
    assert code[0] == code[1]


def test_compose_gives_the_student_a_stub_and_all_else_as_it_is(tmp_path: Path) -> None:
    source = read_source(write(tmp_path, GOOD))
    solution, student = (compose(source, "en", student=student) for student in (False, True))
    assert [cell.id for cell in solution.cells] == [cell.id for cell in student.cells]
    assert 'raise labs.NotDone("half")' in student.cells[1].source
    assert 'raise labs.NotDone("half")' in student.cells[1].source
    assert "return number" not in student.cells[1].source
    assert student.cells[3].source == "print(\n    ...,  # TODO: your figure in place of the dots\n)"
    assert student.cells[1].metadata == {"tags": ["nbval-ignore-output"]}


def test_compose_leaves_no_figure_to_fill_in_where_the_text_leads_to_one(tmp_path: Path) -> None:
    """One figure is asked for, so there is one place for it."""
    before = "### BEGIN SOLUTION\nhalf_s = 21\n### END SOLUTION\nprint(\n    ### BEGIN SOLUTION\n    42,"
    text = GOOD.replace("print(\n    ### BEGIN SOLUTION\n    42,", before)
    student = compose(read_source(write(tmp_path, text)), "fr", student=True)
    assert student.cells[3].source == (
        "# De la place pour ce qui mène à votre nombre.\n"
        "print(\n    ...,  # TODO : votre nombre à la place des points\n)"
    )


def test_compose_gives_the_same_bytes_twice_and_ids_survive_an_insertion(tmp_path: Path) -> None:
    source = read_source(write(tmp_path, GOOD))
    first, second = (compose(source, "fr", student=True) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    longer = read_source(write(tmp_path, GOOD.replace('# %% name="half"', '# %%\n1 + 1\n\n# %% name="half"')))
    kept = {cell.id for cell in compose(longer, "fr", student=True).cells}
    assert {cell.id for cell in first.cells} <= kept


def test_compose_gives_ids_that_are_unique_and_legal(tmp_path: Path) -> None:
    import nbformat

    notebook = compose(read_source(write(tmp_path, GOOD)), "en", student=True)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('# %% [markdown] lang="fr"\n# # Titre\n\n', ""), "is in 'en' only"),
        (('# %% [markdown] lang="en"\n# After\n\n', ""), "is in 'fr' only"),
        (('lang="en"\n# # Title', 'lang="fr"\n# # Title'), "is in 'fr' only"),
        (('lang="en"\n# # Title', 'lang="de"\n# # Title'), "unknown lang"),
        ((' lang="en"\n# # Title', "\n# # Title"), "unknown lang"),
        (("    ### END SOLUTION\n\n", "\n"), "is not closed"),
        (("    return number / 2\n", "    ### BEGIN SOLUTION\n"), "opened and closed in turn"),
        (("    ### BEGIN SOLUTION\n    return", "    return"), "opened and closed in turn"),
        (("    ### BEGIN SOLUTION\n    return", "    # BEGIN SOLUTION\n    return"), "stands alone"),
        (('name="half" ', ""), "needs name="),
        (('name="guess"', 'name="half"'), "is taken"),
        (('name="half"', 'name="Half!"'), "in lower case"),
        (('stub="value"', 'stub="raise"'), "unknown stub"),
        (("nbval-ignore-output", "nbval-ignore"), "unknown tag"),
        (('stub="value"', 'editable="no"'), "unknown cell metadata"),
    ],
)
def test_a_faulty_source_is_refused_in_one_sentence(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    assert change[0] in GOOD
    path = write(tmp_path, GOOD.replace(*change, 1))
    with pytest.raises(LabError, match=words) as refusal:
        compose(read_source(path), "en", student=True)
    assert "05_test.py" in str(refusal.value)


def test_read_source_refuses_a_file_with_another_name(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="named like"):
        read_source(write(tmp_path, GOOD, "Test.py"))


def test_french_spaces_do_not_break_and_code_stays() -> None:
    from dlojz.labs.kit.source import french_spaces

    given = "Deux rangs : « prêts » ; alors ? `a : b ; c` et $x : y$ !"
    expected = "Deux rangs\u00a0: «\u00a0prêts\u00a0»\u202f; alors\u202f? `a : b ; c` et $x : y$\u202f!"
    assert french_spaces(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("1 797 chiffres, 16 384 Gio/s", "1_797 chiffres, 16_384_Gio/s"),
        ("25 % en 8 ms, 400 TFLOP/s", "25_% en 8_ms, 400_TFLOP/s"),
        ("12 500 000 octets", "12_500_000 octets"),
        ("le TP 06 100 fois, 3,5 200 et 8 sont", "le TP 06 100 fois, 3,5 200 et 8 sont"),
        ("`4 096` et $1 000$", "`4 096` et $1 000$"),
    ],
)
def test_french_numbers_keep_their_thousands_and_units(given: str, expected: str) -> None:
    from dlojz.labs.kit.source import french_spaces

    assert french_spaces(given).replace("\u202f", "_") == expected


@pytest.mark.parametrize(
    ("code", "english", "french"),
    [
        ('print("the same: // égal :", same)', 'print("the same:", same)', 'print("égal :", same)'),
        ('f"{a // b} of it // {a // b} de cela"', 'f"{a // b} of it"', 'f"{a // b} de cela"'),
        ('f"{a // b} MB"; c = "." ; d // e ; "f"', 'f"{a // b} MB"; c = "." ; d // e ; "f"', None),
        ('print("one // un ", end="")', 'print("one ", end="")', 'print("un ", end="")'),
        ('size + " GB // Go"', 'size + " GB"', 'size + " Go"'),
        ("x = 1  # why // pourquoi", "x = 1  # why", "x = 1  # pourquoi"),
    ],
)
def test_a_text_that_a_cell_shows_is_in_the_reader_s_language(code: str, english: str, french: str | None) -> None:
    assert in_language(code, "en") == english
    assert in_language(code, "fr") == (french or english)


def test_compose_writes_a_comment_in_code_in_the_reader_s_language(tmp_path: Path) -> None:
    text = GOOD.replace("def half(number):", "rest = 7 // 2  # seven halves // sept demis\ndef half(number):  # (N, D)")
    source = read_source(write(tmp_path, text))
    english, french = (compose(source, language, student=True).cells for language in ("en", "fr"))
    assert english[1].source.startswith("rest = 7 // 2  # seven halves\ndef half(number):  # (N, D)\n    # TODO: write")
    assert french[1].source.startswith("rest = 7 // 2  # sept demis\ndef half(number):  # (N, D)\n    # TODO : écrivez")
    assert french[3].source == "print(\n    ...,  # TODO : votre nombre à la place des points\n)"
