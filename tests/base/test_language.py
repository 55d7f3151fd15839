import ast
import re
from collections.abc import Iterable
from pathlib import Path
from string import Formatter

import pytest

import dlojz
from dlojz.base import language
from dlojz.base.errors import LabError

PACKAGE = Path(dlojz.__file__).parent


@pytest.fixture(autouse=True)
def _forget_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_chosen", None)


def test_the_language_is_chosen_else_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLOJZ_LANG", raising=False)
    assert language.say(en="rank", fr="rang") == "rank"
    monkeypatch.setenv("DLOJZ_LANG", "fr_FR.UTF-8")
    assert language.say(en="rank", fr="rang") == "rang"
    language.use_language("en")
    assert language.language() == "en"


ALPA = ("mesh", "graph", "intra_operator", "inter_operator")
SPELLED = {
    "campaign/data/board.md": ("campaign/class_board.py",),
    "campaign/data/campaign.md": ("campaign/campaign.py",),
    "campaign/data/findings.md": ("campaign/report.py",),
    "config/data/deepspeed.md": ("config/deepspeed_json.py",),
    "config/data/runs.md": ("config/layout.py", "config/schedules.py", "config/run_config.py"),
    "cost_model/data/measured.md": ("cost_model/measured_machine.py",),
    "hardware/data/evidence.md": ("hardware/evidence.py",),
    "hardware/data/files.md": ("hardware/constants.py", "hardware/gpus.py", "hardware/clusters.py"),
    "planner/alpa/data/alpa.md": tuple(f"planner/alpa/{name}.py" for name in ALPA),
    "planner/data/questions.md": tuple(
        f"planner/{name}.py" for name in ("planned_model", "question", "export", "space")
    ),
    "planner/data/verdicts.md": ("planner/explain.py", "planner/ask.py", "planner/answer.py"),
}
"""By a file of sentences, the modules that write one by its key."""
WRITERS = ("_sentence", "_refused", "_problem", "_finding")


def names_in(text: str) -> set[str]:
    """What a sentence names: fields in full."""
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def constants_of(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("file", [*SPELLED, "config/data/rules.md", "config/foreign_configs/data/sentences.md"])
def test_both_sentences_of_a_key_tell_of_the_same_values(file: str) -> None:
    """What is received is said in both; French may leave out what its grammar has twice."""
    pairs = language.Sentences(PACKAGE / file).pairs
    assert [key for key, (english, french) in pairs.items() if names_in(english) != names_in(french)] == []


@pytest.mark.parametrize("file", SPELLED)
def test_each_sentence_has_a_call_and_each_call_its_sentence(file: str) -> None:
    """Names in braces are among the call's words.

    A key that begins a formatted text stands for all that begin so, a variable for all that the modules spell.
    """
    texts = language.Sentences(PACKAGE / file).pairs
    names = {key: {re.split(r"[.\[]", name)[0] for name in names_in(said.en)} for key, said in texts.items()}
    nodes = [node for module in SPELLED[file] for node in ast.walk(ast.parse((PACKAGE / module).read_text("utf-8")))]
    called: set[str] = set()
    for call in nodes:
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(WRITERS):
            continue
        argument = call.args[0]
        branches = (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,)
        keys = constants_of(node for branch in branches for node in ast.walk(branch))
        if isinstance(argument, ast.JoinedStr):
            keys = {key for key in texts if key.startswith(tuple(keys))}
        elif isinstance(argument, ast.Name):
            called |= constants_of(nodes) & set(texts)
        called |= keys
        words = {keyword.arg for keyword in call.keywords}
        assert None in words or all(names[key] <= words for key in keys), ast.unparse(call)
    assert called == set(texts)


def test_another_language_is_refused() -> None:
    with pytest.raises(LabError, match="unknown language 'de'"):
        language.use_language("de")
