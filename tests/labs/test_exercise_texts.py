"""Sentences of exercises, in Markdown beside their code: each key has its sentences, each sentence its key."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from string import Formatter

import pytest

import dlojz.labs
from dlojz.base.language import Said, Sentences, read_sentences
from dlojz.labs.kit.exercise import Mistake
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts, by_part, edited
from dlojz.labs.kit.judges import Judge

PACKAGE = Path(__file__).resolve().parents[2] / "dlojz"
LABS = PACKAGE / "labs"
ELSEWHERE = (
    *("labs/kit", "libraries", "libraries/scripts", "models/foreign"),
    *("pipeline", "pipeline/orders", "prediction", "train"),
)


def module_of(path: Path) -> Path:
    """The module whose sentences a file has: it lies beside the file, or beside its folder `data`."""
    folder = path.parent.parent if path.parent.name == "data" else path.parent
    return folder / f"{path.stem}.py"


FILES = sorted(
    [
        *LABS.glob("*/*.md"),
        *(
            path
            for folder in ELSEWHERE
            for path in (PACKAGE / folder / "data").glob("*.md")
            if module_of(path).is_file()  # others are of a whole room, by key: tests/base/test_sentences.py
        ),
    ]
)
TEXT = """# doubled

- twice the number
- le double du nombre

## praise

- Right.
- Exact.

## hint

- Add.
- Additionnez.

## nearer

- n + n.
- n + n.

## leaves the factor out

- The factor 2 is missing.
- Il manque le facteur 2.
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_texts_have_a_sentence_for_each_key_and_a_key_for_each_sentence(path: Path) -> None:
    module = importlib.import_module(".".join(module_of(path).relative_to(PACKAGE.parent).with_suffix("").parts))
    texts = module.TEXTS
    keys = {(exercise, key) for exercise, sentences in texts.sentences.items() for key in sentences}
    tree = ast.parse(inspect.getsource(module))
    spelled = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    requested = texts.requested | {place for place, _ in _calls(tree)}
    assert requested - keys == set(), "keys without their sentence"
    # A judge that chooses among keys looks the sentence up when an answer is wrong, by a name for the key.
    assert {(exercise, key) for exercise, key in keys - requested if key not in spelled} == set(), "no exercise has it"


def _calls(tree: ast.Module) -> Iterator[tuple[tuple[str, str], set[str]]]:
    """Exercise and key that a call spells, and the names of the values that it hands on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.fullmatch(
            r"TEXTS\.(?:sentence|say|wrong|refusal|mistake)", ast.unparse(node.func)
        ):
            place = [str(argument.value) for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            if len(place) == 2:
                yield (place[0], place[1]), {keyword.arg or "" for keyword in node.keywords} - {"part", "seen"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_texts_have_the_values_that_the_braces_of_their_sentences_name(path: Path) -> None:
    """Where a call hands values on, each of them stands in a sentence, and no sentence names another one."""
    texts = Sentences(path)
    for place, values in _calls(ast.parse(module_of(path).read_text(encoding="utf-8"))):
        fields = [field for text in texts.sentence(*place) for _, field, _, _ in Formatter().parse(text) if field]
        names = {field.partition(".")[0] for field in fields}
        # What stands in a mapping (`**titles`) is not seen here.
        assert not values or (values - {""} <= names if "" in values else names == values), place


def test_every_lab_has_its_file_of_sentences() -> None:
    assert len({path.parent for path in FILES if path.parent.name.startswith("lab")}) == 14


def test_texts_exercise_makes_the_mistakes_of_its_keys(tmp_path: Path) -> None:
    (tmp_path / "numbers.md").write_text(TEXT, encoding="utf-8")
    texts = Texts(str(tmp_path / "numbers.py"))
    third = Mistake(lambda n: 3 * n, "three times", "trois fois")
    exercise = texts.exercise(
        "doubled",
        lambda n: 2 * n,
        cases=((1,), (5,)),
        mistakes={"leaves the factor out": MistakeWay(lambda n: n, part=None), "more": (third,), "third": third},
    )
    assert (exercise.title, exercise.praise, exercise.hints[1]) == (
        Said("twice the number", "le double du nombre"),
        Said("Right.", "Exact."),
        Said("n + n.", "n + n."),
    )
    mistakes = exercise.judge.mistakes  # type: ignore[attr-defined]
    assert [mistake.fr for mistake in mistakes] == ["Il manque le facteur 2.", "trois fois", "trois fois"]
    assert texts.requested == {("doubled", key) for key in texts.sentences["doubled"]}
    assert texts.sentence("doubled", "no such key") == Said("no such key", "no such key")  # a student sees no traceback


def _doubled(n: int) -> int:
    return _added(n, n)


def _added(a: int, b: int) -> int:
    return a + b


def test_edited_makes_a_function_of_another_text_and_leaves_the_right_one() -> None:
    assert edited((_doubled,), "(n, n) → (n, n) + n")(5) == 15
    assert edited((_doubled, _added), "a + b → a * b; (n, n) → (n, n + 1)")(5) == 30
    assert edited((_doubled,), "_added(n, n) →")(5) is None
    assert (_doubled(5), _added(2, 3)) == (10, 5)


def test_edited_refuses_to_replace_what_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"_doubled has no 'n - n' to replace"):
        edited((_doubled,), "n - n → n")


def _both(n: int) -> tuple[int, int]:
    return n + 1, n + 2


def test_texts_exercise_makes_mistakes_of_edits(tmp_path: Path) -> None:
    (tmp_path / "numbers.md").write_text(TEXT, encoding="utf-8")
    exercise = Texts(str(tmp_path / "numbers.py")).exercise(
        "doubled",
        _both,
        cases=((1,), (5,)),
        mistakes={"one edit": "+ 1 → - 1", "several": ("+ 1 → + 3", "+ 2 →"), "by part": by_part("n + → n *", 2)},
    )
    mistakes = exercise.judge.mistakes  # type: ignore[attr-defined]
    assert [mistake.way(5) for mistake in mistakes] == [(4, 7), (8, 7), (6, 5), (5, 10), 5, 10]
    assert [mistake.part for mistake in mistakes] == [None, None, None, None, 0, 1]


def test_texts_exercise_makes_mistakes_of_edits_beneath_their_sentences(tmp_path: Path) -> None:
    more = "<!-- as if there were one -->\n* + 1 → - 1\n* + 2 →\n"
    more += "\n## later\n\n- l\n- l\n\n## last\n\n- e\n- e\n* n + → n *\n"
    (tmp_path / "numbers.md").write_text(TEXT + more, encoding="utf-8")
    ways = {"elsewhere": lambda n: (0, 0), "later": "+ 1 → + 3"}
    exercise = Texts(str(tmp_path / "numbers.py")).exercise("doubled", _both, cases=((1,), (5,)), mistakes=ways)
    mistakes = exercise.judge.mistakes  # type: ignore[attr-defined]
    # In the order of the file, then those whose sentences stand elsewhere.
    assert [mistake.way(5) for mistake in mistakes] == [(4, 7), (6, 5), (8, 7), (5, 10), (0, 0)]
    assert [mistake.en for mistake in mistakes] == [*["The factor 2 is missing."] * 2, "l", "e", "elsewhere"]


def test_edits_of_all_labs_find_the_text_that_they_replace() -> None:
    count = 0
    for module in pkgutil.iter_modules(dlojz.labs.__path__):
        for exercise in getattr(importlib.import_module(f"dlojz.labs.{module.name}"), "EXERCISES", ()):
            judge = exercise.judge
            for mistake in (*judge.mistakes, *judge.faults, *judge.repairs) if isinstance(judge, Judge) else ():
                if isinstance(mistake.way, partial):
                    source, edits, _ = mistake.way.args
                    assert callable(edited(source, edits)), (exercise.id, edits)
                    count += 1
    assert count > 500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("- Il manque le facteur 2.\n", ""), "1 sentences instead of one in each language"),
        (("- Add.", "Add."), "a sentence stands on one line, after '- '"),
        (("## nearer", "## hint"), "'hint' stands twice"),
    ],
)
def test_read_sentences_refuses_what_is_no_pair(change: tuple[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_sentences(TEXT.replace(*change))
