"""The prose of the labs: questions with answers out of sight, hints, words that stay away, sources of figures."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlojz.base.language import LANGUAGES, read_sentences
from dlojz.cli.options import help_texts
from dlojz.hardware.evidence import measurements
from dlojz.labs.kit.source import Code, ProseCells, in_language, read_source

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))
EXPLAIN = {"en": "**Explain", "fr": "**Expliquez"}
ANSWER = {"en": "<details><summary>Answer</summary>\n\n", "fr": "<details><summary>Réponse</summary>\n\n"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_exercise_has_its_hint_cell(path: Path) -> None:
    codes = [cell.text for cell in read_source(path).cells if isinstance(cell, Code)]
    checked = {name for text in codes for name in re.findall(r'^lab\.check\("([a-z0-9-]+)"', text, re.MULTILINE)}
    hinted = [text.removeprefix('# lab.hint("').removesuffix('")') for text in codes if text.startswith("# lab.hint(")]
    assert checked
    assert sorted(hinted) == sorted(checked)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("language", ["en", "fr"])
def test_prose_cells_have_no_answer_in_a_question_and_one_below(path: Path, language: str) -> None:
    """The answer opens on a click, or follows the cells that compute it."""
    cells = read_source(path).cells
    for number, cell in enumerate(cells):
        if not isinstance(cell, ProseCells) or EXPLAIN[language] not in (text := cell.text[language]):
            continue
        question, _, _ = text.partition(EXPLAIN[language])[2].partition("<details>")
        asked = question.split("\n\n")[0].replace("\n", " ")
        assert not re.search(r"\?\*{0,2} \((?:[A-ZÉÀ][^()]*\.\))", asked), f"answered where it is asked: {asked}"
        if "<details>" not in text:
            below = next((one for one in cells[number + 1 :] if isinstance(one, ProseCells)), None)
            assert below is not None and not below.text[language].startswith("#"), f"no answer: {asked}"
        assert text.count("<details>") == text.count(ANSWER[language]) == text.count("\n\n</details>")


# Words that only this course would use, calques, and English in French prose: each has a plain word of the field.
PRIVATE = {
    "en": (
        r"shared out",
        r"\blies? beside\b",
        r"\blaid (?:beside|over)\b",
        r"\b(?:is|are|was|were|be) told\b(?! apart)",
        r"\bof (?:its|their|his|her) own\b",
        r"\bat a stroke\b",
        r"\bdearer\b",
        r"\bforetells?\b",
        r"\bamid\b",
        r"\bsome twenty\b",
        r"\bone slot less\b",
        r"\bon one another's top\b",
        r"\bTflop\b",
    ),
    "fr": (
        r"\ben pâle\b",
        r"\bau vol\b",
        r"\bjustes? parts?\b",
        r"\bbatchs\b",
        r"\bmoitié plus\b",
        r"\bse date\b",
        r"\bmaîtresse\b",
        r"\b[Ss]tages? (?:[0-3]\b|de ZeRO)",
        r"\b(?:les|des|aux|du|chaque) stages?\b",
        r"\bTflop\b",
        r"\ben vol\b",
        r"\bpaie-t-(?:il|elle)\b",
        r"\bpart(?:i|ie)? en bulle\b",
        r"\bordonnanceurs? à liste\b",
        r"\bdeux boutons\b",
        r"\bplus bête\b",
        r"\b(?:board|runs?)\b(?! \(|\.)",
    ),
}
IN_CODE = re.compile(r"```.*?```|`[^`]*`|\{[\w.:!]*\}|--[a-z-]+|\bdlojz(?:\.| )\w+|\w*[/_][\w./]*", re.DOTALL)


def of_the_labs() -> Iterator[tuple[str, str, str]]:
    """Where a text stands, its language, the text: prose, and the comments of code."""
    for path in SOURCES:
        for cell in read_source(path).cells:
            for language in LANGUAGES:
                if isinstance(cell, ProseCells):
                    yield path.name, language, cell.text[language]
                elif language == "fr":
                    yield from ((path.name, "fr", french) for french in re.findall(r"# .+? // (.+)$", cell.text, re.M))
                else:
                    yield path.name, "en", "\n".join(re.findall(r"# .+$", in_language(cell.text, "en"), re.M))


def is_french(value: ast.expr) -> bool:
    """Whether a constant is a text with a sign that English does not have."""
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and bool(re.search("[éèàêç’]", value.value))


def of_catalogues() -> Iterator[tuple[str, str, str]]:
    """Sentences of the catalogues that are TOML, both languages under a key."""
    for room, name in (("pipeline", "schedules"), ("libraries", "libraries"), ("prediction", "rules_of_thumb")):
        content = tomllib.loads((ROOT / "dlojz" / room / "data" / f"{name}.toml").read_text(encoding="utf-8"))
        for pair in (value for rows in content.values() for row in rows for value in row.values()):
            if isinstance(pair, dict):
                yield from ((f"{name}.toml", language, text) for language, text in pair.items())


def of_the_package() -> Iterator[tuple[str, str, str]]:
    """The same for messages, help, titles and hints: side by side as `en=` and `fr=`, or one after the other."""
    for path in sorted((ROOT / "dlojz").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            given: list[tuple[str, ast.expr]] = []
            if isinstance(node, ast.keyword) and node.arg:
                given = [(node.arg[-2:], node.value)] if re.fullmatch(r"(?:\w+_)?(?:en|fr)", node.arg) else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Said", "Mistake") and len(node.args) >= 2:
                given = list(zip(("en", "fr"), node.args[-2:], strict=True))
            elif isinstance(node, ast.Tuple) and len(node.elts) >= 2 and is_french(node.elts[-1]):
                given = list(zip(("en", "fr"), node.elts[-2:], strict=True))
            for language, value in given:
                parts = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant)]
                yield f"{path.name}:{value.lineno}", language, "".join(one for one in parts if isinstance(one, str))
    labs = ROOT / "dlojz" / "labs"
    for path in (page for page in labs.glob("kit/data/*.md") if not page.stem.isidentifier()):
        yield path.name, path.stem.rpartition(".")[2], path.read_text(encoding="utf-8")
    of_commands = ROOT / "dlojz" / "cli"
    pages = [page for page in sorted((ROOT / "dlojz").glob("**/*.md")) if of_commands not in page.parents]
    pages.append(of_commands / "data" / "sentences.md")
    for path in (page for page in pages if page.stem.isidentifier()):
        for exercise, sentences in read_sentences(path.read_text(encoding="utf-8")).items():
            for key, sentence in sentences.items():
                yield f"{path.parent.name}, {exercise}, {key}", "en", sentence.en
                yield f"{path.parent.name}, {exercise}, {key}", "fr", sentence.fr
    yield from of_catalogues()
    for path in (page for page in sorted((of_commands / "data").glob("*.md")) if page != pages[-1]):
        for name, text in help_texts(path.stem).items():
            yield from ((f"dlojz {name} --help", language, getattr(text, language)) for language in ("en", "fr"))
    for path in sorted((ROOT / "dlojz" / "cli" / "data" / "skills").glob("*.md")):
        yield path.name, "fr" if path.stem.endswith(".fr") else "en", path.read_text(encoding="utf-8")


def of_documents() -> Iterator[tuple[str, str, str]]:
    """The same for README, CONTRIBUTING and the pages, which are in English, and for the glossary."""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("slurm/*.md")]:
        yield path.name, "en", path.read_text(encoding="utf-8")
    labs = ROOT / "dlojz" / "labs"
    for path in sorted([*(labs / "kit" / "data").glob("*.toml"), *labs.glob("lab*/*.toml")]):
        written = re.findall(r'^(?:\w+_)?(en|fr)(?:_\w+)? = "(.*)"$', path.read_text("utf-8"), re.MULTILINE)
        yield from ((path.name, language, text) for language, text in written)


@pytest.mark.parametrize("texts", [of_the_labs, of_the_package, of_documents], ids=lambda texts: texts.__name__)
def test_words_that_only_this_course_would_use_stay_away(texts: type[Iterator[tuple[str, str, str]]]) -> None:
    found = []
    count = 0
    for where, language, text in texts():
        count += 1
        plain = IN_CODE.sub("`", text)
        for one in re.finditer("|".join(PRIVATE[language]), plain):
            found.append(f"{where}: {plain[max(0, one.start() - 40) : one.end() + 20]}")
    assert count > 50
    assert found == []


# What somebody has published: a name, and a figure of theirs beside it.
PUBLISHED = re.compile(
    r"GPT-?[23]\b|BLOOM|MT-NLG|LLaMA|Llama|Mixtral|DeepSeek|PaLM|CoAtNet-[0-7]|BERT|Selene|DeepSpeed|Megatron|SageMaker"
    r"|[AHV]100|GH200|DGX|ResNet|AlexNet|NVLink|PCIe|InfiniBand"
)
FIGURE = re.compile(r"\d(?:%| ?(?:TFLOP/s|[GT]B/s|days|weeks|years|points|times (?:less|more|fewer|longer))\b)")
SOURCE = re.compile(r"et al\.|\b(?:19|20)\d\d\b|\]\(http|\bpapers?\b|\bpublished\b")
ASSUMED = re.compile(r"\b(?:suppos|assum|sustain|let us take|reaches more than)", re.IGNORECASE)


def paragraphs(path: Path) -> Iterator[str]:
    """The English paragraphs of a lab, each on one line, without code."""
    for cell in read_source(path).cells:
        if isinstance(cell, ProseCells):
            yield from (" ".join(IN_CODE.sub("`", one).split()) for one in re.split(r"\n\n|\n(?=- )", cell.text["en"]))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_published_figure_in_prose_has_its_source(path: Path) -> None:
    claims = [one for one in paragraphs(path) if PUBLISHED.search(one) and FIGURE.search(one)]
    assert [one for one in claims if not SOURCE.search(one) and not ASSUMED.search(one)] == []


def test_a_naked_figure_is_found() -> None:
    naked = "A step of BLOOM reaches 150 TFLOP/s on 384 GPUs."
    assert PUBLISHED.search(naked) and FIGURE.search(naked) and not SOURCE.search(naked) and not ASSUMED.search(naked)


def test_a_large_constant_of_a_lab_says_where_it_comes_from() -> None:
    """Numbers above 10⁹ are parameters, tokens, rates: above or below stands a source, or that they are assumed."""
    silent, found = [], 0
    for path in sorted((ROOT / "dlojz" / "labs").glob("lab*/*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        for node in ast.parse(text).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith("TEXTS."):
                continue  # its cases are made up
            numbers = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            if not any(type(one) in (int, float) and one > 1e9 for one in numbers):
                continue
            found += 1
            around = "\n".join([*lines[max(0, node.lineno - 4) : node.lineno], *lines[(node.end_lineno or 0) :][:3]])
            if not re.search(rf"{SOURCE.pattern}|lab \d\d|data sheet", around):
                silent.append(f"{path.name}:{node.lineno}: {lines[node.lineno - 1]}")
    assert found
    assert silent == []


def test_measured_steps_are_read_from_the_evidence() -> None:
    """A step of a published table, four digits long, is typed in no lab."""
    steps = {f"{one.step_s:g}" for one in measurements() if one.step_s}
    typed = {one for one in steps if len(one.replace(".", "").lstrip("0")) >= 4}
    assert len(typed) > 50
    files = [*SOURCES, *sorted((ROOT / "dlojz" / "labs").glob("lab08*/*.py"))]
    found = [
        f"{path.name}: {number}"
        for path in files
        for number in set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", path.read_text(encoding="utf-8"))) & typed
    ]
    assert found == []
