"""Sentences that stand in files: each is written by a module, with values for all of its places, in both languages."""

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from dlojz.base.language import Sentences, format_bytes, use_language

ROOT = Path(__file__).resolve().parents[2] / "dlojz"
BY_FACTS = ("fields.md", "rules.md", "words.md")
"""Files whose keys are names of fields, rules and options: tests of these hold both lists against each other."""


def writer_of(value: Any) -> Sentences | None:
    """The file that a name of a module writes from by key alone: it is one, or one of its methods."""
    value = getattr(value, "__self__", value)
    return value if type(value) is Sentences and not value.requested else None


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules_by_file() -> dict[Path, dict[Path, set[str]]]:
    """Of each file of sentences the modules that write from it, and the names that they call to do so."""
    modules: dict[Path, dict[Path, set[str]]] = defaultdict(lambda: defaultdict(set))
    made: dict[tuple[str, str], Path] = {}
    for path in sorted(ROOT.rglob("*.py")):
        if "Sentences(" in path.read_text("utf-8"):
            name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
            for variable, value in vars(importlib.import_module(name)).items():
                if variable != "TEXTS" and (writer := writer_of(value)):
                    made[name, variable] = writer.path.resolve()
                    modules[writer.path.resolve()][path].add(variable)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if file := made.get((node.module or "", alias.name)):
                    modules[file][path].add(alias.asname or alias.name)
    return modules


MODULES = modules_by_file()


def keys_of(argument: ast.expr, pairs: set[str]) -> set[str]:
    """Keys that the first argument of a call may be; none where a variable holds it."""
    branches = (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,)
    keys = {branch.value for branch in branches if isinstance(branch, ast.Constant)}
    starts = tuple(
        branch.values[0].value
        for branch in branches
        if isinstance(branch, ast.JoinedStr) and isinstance(branch.values[0], ast.Constant)
    )
    return keys | ({key for key in pairs if key.startswith(starts)} if starts else set())


def values_of(sentence: str) -> set[str]:
    """Names of the values that a sentence needs."""
    return {re.split(r"[.[]", name)[0] for _, name, _, _ in Formatter().parse(sentence) if name}


def test_modules_of_sentences_are_found() -> None:
    assert len(MODULES) > 30
    assert {"figures.md", "traces.md", "verdicts.md", "sentences.md", *BY_FACTS} <= {file.name for file in MODULES}


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_sentences_and_the_calls_that_write_them_agree(file: Path) -> None:
    """A key that begins a formatted text stands for all that begin so; one in a variable is spelled in a module, in a
    table beside the sentences, or in the page's script."""
    pairs = Sentences(file).pairs
    others = [*file.parent.glob("*.toml"), *ROOT.glob("display/widgets/data/*.js")]
    spelled = {word for path in others for word in re.findall(r"\w+", path.read_text("utf-8"))}
    for module, names in MODULES[file].items():
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                spelled.add(node.value)
            if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[0] not in names or not node.args:
                continue
            keys = keys_of(node.args[0], {*pairs})
            assert keys <= {*pairs}, keys
            spelled |= keys
            if ast.unparse(node.func).endswith(".titles"):
                assert all(pairs[key].en.count(";") == pairs[key].fr.count(";") for key in keys), keys
            needed = {name for key in keys for name in values_of(pairs[key].en)}
            words = {keyword.arg for keyword in node.keywords}
            assert None in words or needed <= words, ast.unparse(node)
    assert file.name in BY_FACTS or {*pairs} <= spelled, {*pairs} - spelled


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_both_sentences_of_a_key_tell_of_the_same_values(file: Path) -> None:
    """`who_en` and `who_fr` are one value; a plural's mark (`s_3`) is not for both, and French may name more."""
    same = lambda text, language: {re.sub(rf"(^|_){language}$", "", name) for name in values_of(text)}  # noqa: E731
    lacking = {key: same(said.en, "en") - same(said.fr, "fr") for key, said in Sentences(file).pairs.items()}
    assert {key: names for key, names in lacking.items() if any(not name.startswith("s_") for name in names)} == {}


def test_sentences_write_values_as_their_places_say(tmp_path: Path) -> None:
    path = tmp_path / "words.md"
    path.write_text(
        "What it is for.\n\n## peak\n\n- {peak:bytes}, {share:percent 0}, {name!r}\n- {peak:bytes}, {share:spaced 0}\n"
        "\n## columns\n\n- layout; ; step ({unit})\n- layout\n"
    )
    phrase = Sentences(path, bytes=lambda size: f"<{format_bytes(size)}>")
    assert phrase("peak", peak=2048, share=0.25, name="a") == "<2.00 KiB>, 25%, 'a'"
    assert phrase.titles("columns", unit="s") == ("layout", "", "step (s)")
    use_language("fr")
    assert phrase("peak", peak=2048, share=0.25) == "<2,00 Kio>, 25 %"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("## key\n\n- only English\n", "1 sentences"),
        ("## key\n\n- a\n- b\n- c\n", "3 sentences"),
        ("## key\n\n- a\n- b\n\n## key\n\n- a\n- b\n", "stands twice"),
        ("# one\n\n## key\n\n- a\n- b\n\n# two\n\n## key\n\n- a\n- b\n", "in two sections"),
        ("## key\n\n- a\n- b\n\nstray\n", "stray"),
    ],
)
def test_damaged_files_of_sentences_are_refused(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "words.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=word):
        _ = Sentences(path).pairs
