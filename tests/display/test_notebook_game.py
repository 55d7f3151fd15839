"""The game in a notebook: its buttons ask the engine, refusals stay sentences, and what is pasted is escaped."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.display import style
from dlojz.display.widgets.notebook_game import NotebookGame, schedule_game


def button_of(game: NotebookGame, label: str) -> Any:
    buttons = [button for row in game.ranks.children for button in row.children[1:-1]]
    return next(button for button in buttons if button.description.partition(" ")[0] == label)


def test_level_1_is_played_by_its_buttons() -> None:
    game = NotebookGame()
    assert "Level 1: Naive model parallelism" in game.head.value
    button_of(game, "0B0").click()
    assert "not placed yet on rank 0: place 0F0 before it" in game.message.value
    assert game.state["position"].startswith("1.1..")
    game.tools["coach"].click()
    assert "the best that can still be reached is 9 (proven), by 0F0 only" in game.message.value
    assert button_of(game, "0F0").description == "0F0 ★"
    forward = button_of(game, "1F0")
    assert forward.style.button_color == style.PALE
    for move in ("0F0", "1F0"):
        button_of(game, move).click()
    # The same button, so that the keyboard stays on it; it has no further action.
    assert forward.description == "1F ✓" and forward is game.ranks.children[1].children[1]
    assert "1F0 runs on rank 1 from 1 to 2" in game.message.value
    assert "Rank 1 waits from 0 to 1 because 1F0 needs 0F0 of rank 0, which ends at 1." in game.facts.value
    game.tools["undo"].click()
    assert button_of(game, "1F0").style.button_color == style.SCHEDULE_STYLES["F"].color
    for move in ("1F0", "2F0", "2B0", "1B0", "0B0"):
        button_of(game, move).click()
    assert "Goal reached: 9. You built: naive model parallelism" in game.message.value
    assert game.position.value == game.state["position"] and "<svg" in game.drawing.value
    game.tools["restart"].click()
    assert game.state["position"].startswith("1.1..")


def test_another_level_has_other_buttons_and_its_own_position() -> None:
    game = NotebookGame(level=1)
    button_of(game, "0F0").click()
    game.levels.value = 7
    assert "Level 7: Zero bubble" in game.head.value and game.state["position"].startswith("1.7..")
    kinds = [[button.description for button in row.children[1:-1]] for row in game.ranks.children]
    assert kinds == [[f"{rank}F0", f"{rank}I0", f"{rank}W0"] for rank in range(3)]
    button_of(game, "0F0").click()
    assert [row.children[-1].value for row in game.ranks.children] == ["keeps 1 of 5", "keeps 0 of 5", "keeps 0 of 5"]


def test_what_is_pasted_is_escaped_and_a_position_goes_on() -> None:
    game = NotebookGame(level=2)
    game.position.value = "<img src=x onerror=alert(1)>,"
    game.tools["take"].click()
    assert "is no action" in game.message.value and "<img" not in game.message.value
    game.position.value = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n2F0,2F1,2F2,2B0,2B1,2B2"
    game.tools["take"].click()
    # GPipe on 3 ranks, F = 1 and B = 2: (3 + 3 − 1) × 3.
    assert "Goal reached: 15." in game.message.value
    assert NotebookGame(2, game.state["position"]).state["solved"]


@pytest.mark.parametrize(
    ("level", "position", "words"),
    [(11, "", "levels 1 to 10"), ("<b>", "", "<b>"), (1, "<img>", "is no whole position"), (1, "1.2..", "no whole")],
)
def test_a_wrong_level_or_position_is_refused_in_one_sentence(level: Any, position: str, words: str) -> None:
    with pytest.raises(LabError) as refused:
        schedule_game(level, position)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_without_ipywidgets_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(LabError, match=r"ipywidgets.*dlojz\[labs\].*dlojz pipeline --play"):
        schedule_game()
    use_language("fr")
    with pytest.raises(LabError, match=r"le jeu dans un notebook.*dlojz\[labs\]"):
        schedule_game()


def test_running_waits_for_a_complete_schedule_and_shows_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    game = NotebookGame()
    game.tools["run"].click()
    assert "6 of 6 actions are not placed" in game.message.value
    engine = game._game
    running = {"running": True, "sentence": "step <1>"}
    answers = [running, running, {"running": False, "sentence": "done & drawn", "svg": "<svg>times</svg>"}]
    shown: list[str] = []
    game.result.observe(lambda change: shown.append(change["new"]), names="value")
    monkeypatch.setattr("dlojz.display.widgets.notebook_game.POLL_S", 0.0)
    monkeypatch.setattr(
        engine, "answer", lambda request: {"run": running if request["do"] == "run" else answers.pop(0)}
    )
    game.tools["run"].click()
    for thread in threading.enumerate():
        if thread.name == "schedule game":
            thread.join()
    assert "step &lt;1&gt;" in shown[0] and "done &amp; drawn" in shown[-1]
    assert game.measured.value == "<svg>times</svg>"
    monkeypatch.setattr(engine, "answer", lambda request: {"error": "<rank 1> failed"})
    game._follow()
    assert "&lt;rank 1&gt; failed" in game.result.value
    assert game.measured.value == "", "no picture of another run beside the error"
