"""Sentences that stand in files: each is written by a module, with values for all of its places."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from string import Formatter

import pytest

from dlojz.base.language import Sentences, format_bytes, use_language

ROOT = Path(__file__).resolve().parents[2] / "dlojz"
_MADE = re.compile(r"^phrase = Sentences\((Path\(__file__\)\.parent(?: / \"[\w.]+\")+)", re.MULTILINE)
_IMPORTED = re.compile(r"^from dlojz\.([\w.]+) import (?:\([^()]*|[^()\n]*)\bphrase\b", re.MULTILINE)


def modules_by_file() -> dict[Path, list[Path]]:
    """Modules that write the sentences of each file: the one that reads it, and those that import `phrase` from it."""
    modules = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        imported = _IMPORTED.search(text)
        source = ROOT / (imported[1].replace(".", "/") + ".py") if imported else path
        if made := _MADE.search(source.read_text(encoding="utf-8")):
            modules[source.parent.joinpath(*re.findall(r'"([\w.]+)"', made[1]))].append(path)
    return modules


MODULES = modules_by_file()


def keys_of(expression: ast.expr) -> set[str]:
    """Keys that the first argument of a call may be; none where a variable holds it."""
    nodes = (expression.body, expression.orelse) if isinstance(expression, ast.IfExp) else (expression,)
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def values_of(sentence: str) -> set[str]:
    """Names of the values that a sentence needs."""
    return {re.split(r"[.[]", name)[0] for _, name, _, _ in Formatter().parse(sentence) if name}


def test_sentences_of_figures_and_tables_are_found() -> None:
    assert {"figures.md", "trace_tables.md", "compare.md"} <= {file.name for file in MODULES}


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_sentences_and_the_calls_that_write_them_agree(file: Path) -> None:
    pairs = Sentences(file).pairs
    nodes = [node for module in MODULES[file] for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))]
    assert {node.value for node in nodes if isinstance(node, ast.Constant)} >= {*pairs}
    for call in nodes:
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("phrase", "phrase.titles"):
            continue
        keys = keys_of(call.args[0])
        assert keys <= {*pairs}, keys
        if ast.unparse(call.func) == "phrase.titles":
            assert all(pairs[key].en.count(";") == pairs[key].fr.count(";") for key in keys), keys
        needed = {name for key in keys for sentence in pairs[key] for name in values_of(sentence)}
        values = {keyword.arg for keyword in call.keywords}
        assert not keys or None in values or needed == values, keys


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
