"""The game of schedules in a real Chromium: played by keyboard, by clicking, and run on ranks of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlojz.pipeline.exchange_formats import to_csv
from dlojz.pipeline.game.position import Level, level_of

PATIENCE_MS = 240_000
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """What `dlojz pipeline --play` prints; it ends by Ctrl-C, with one sentence."""
    server = subprocess.Popen(
        [sys.executable, "-m", "dlojz", "pipeline", "--play", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "DLOJZ_LANG": "en"},
    )
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
        assert (errors, server.returncode) == (
            "the game has ended; its position stays in the address of the page.\n",
            0,
        )
    finally:
        server.kill()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page on level 1; nothing may be written to the browser's console."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(address)
    opened.wait_for_selector('.ranks button[data-move="0F0"]:focus')
    yield opened
    assert complaints == []
    context.close()


def moves_of(level: Level) -> list[str]:
    reference = level.reference
    return [str(reference.actions[number]) for number in reference.graph.order]


def wait_for_message(page: Any, words: str) -> str:
    # A selector, and no function: the page's policy lets nobody evaluate a text.
    page.wait_for_selector(f".message:has-text({json.dumps(words)})")
    return str(page.text_content(".message"))


def test_level_1_is_played_by_keyboard_to_its_end(page: Any) -> None:
    assert page.text_content("h1") == "Level 1: Naive model parallelism"
    # An action that is not ready says why, and is not placed.
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "place 0F0 before it" in wait_for_message(page, "0B0 needs the result of 0F0")
    page.keyboard.press("ArrowLeft")
    for key, placed in (
        ("Enter", "0F0 runs on rank 0 from 0 to 1."),
        ("Backspace", "0F0 is taken back."),
        ("u", "there is nothing to undo"),
        ("c", "the best that can still be reached is 9 (proven), by 0F0 only."),
        ("Enter", "0F0 runs on rank 0 from 0 to 1."),
        ("r", "5 of 6 actions are not placed"),
    ):
        page.keyboard.press(key)
        wait_for_message(page, placed)
    for keys, placed in (
        (["ArrowDown", "Enter"], "1F0 runs on rank 1 from 1 to 2."),
        (["ArrowDown", "Enter"], "2F0 runs on rank 2 from 2 to 3."),
        (["ArrowRight", "Enter"], "2B0 runs on rank 2 from 3 to 5."),
        (["ArrowUp", "Enter"], "1B0 runs on rank 1 from 5 to 7."),
        (["ArrowUp", "Enter"], "Goal reached: 9. You built: naive model parallelism"),
    ):
        for key in keys:
            page.keyboard.press(key)
        wait_for_message(page, placed)
    assert page.evaluate("document.activeElement.dataset.move") == "0B0", "the focus stays on its button"
    assert page.locator(".goal.solved").count() == 1
    assert re.fullmatch(r"#1\.1\.0F1F2F2B1B0B\.[0-9a-f]{8}", page.evaluate("location.hash"))
    # The address is the position.
    page.reload()
    wait_for_message(page, "Goal reached: 9.")


def test_a_damaged_position_and_a_deadlock_are_answered_in_one_sentence(page: Any, address: str) -> None:
    page.goto(f"{address.partition('#')[0]}#1.1.0F.00000000")
    page.reload()
    wait_for_message(page, "is no whole position")
    page.select_option("#levels", "2")
    page.wait_for_selector('.ranks button[data-move="2F0"]')
    rows = ["0F0,0B0,0F1,0B1,0F2,0B2", "1F0,1F1,1B0,1B1,1F2,1B2", "2F0,2B0,2F1,2B1,2F2,2B2"]
    for text, sentence in (
        ("\n".join(rows), "deadlock"),
        ("1.2.", "is no whole position"),
        ("<img src=x onerror=alert(1)>,", "is no action"),
    ):
        page.fill("#position", text)
        page.click('[data-name="take"]')
        wait_for_message(page, sentence)
    assert page.locator("img").count() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(1, 11))
def test_each_level_is_solved_by_clicking_its_reference(page: Any, number: int) -> None:
    level = level_of(number)
    page.select_option("#levels", str(number))
    page.wait_for_selector(f'h1:has-text("Level {number}:")')
    for placed, move in enumerate(moves_of(level), start=1):
        page.click(f'.ranks button[data-move="{move}"][aria-disabled="false"]')
        page.wait_for_selector(f'.figures dd:has-text("{placed} of {len(level.reference.actions)}")')
    assert wait_for_message(page, "Goal reached").startswith(f"Goal reached: {level.goal:g}.")


@pytest.mark.nightly
def test_an_order_of_ones_own_runs_on_ranks_and_is_drawn_over_its_simulation(page: Any) -> None:
    """Level 2 by an order that no catalogue has: rank 0 runs its third forward after a backward."""
    rows = ["0F0,0F1,0B0,0F2,0B1,0B2", "1F0,1F1,1B0,1B1,1F2,1B2", "2F0,2B0,2F1,2B1,2F2,2B2"]
    page.select_option("#levels", "2")
    page.wait_for_selector('.ranks button[data-move="2F0"]')
    page.fill("#position", "\n".join(rows))
    page.click('[data-name="take"]')
    message = wait_for_message(page, "more than the goal 15")
    assert "You built" not in message
    page.click('[data-name="run"]')
    page.wait_for_selector('.result:has-text("Running on 3 ranks")')
    # The page answers meanwhile.
    page.click('[data-name="undo"]')
    wait_for_message(page, "is taken back")
    page.wait_for_selector(".result svg, .result.refused", timeout=3 * PATIENCE_MS)
    assert "executed by the package’s runtime" in page.text_content(".result")
    assert "rank 0 measured" in page.text_content(".result svg")
    assert to_csv(level_of(2).reference) != "\n".join(rows)
