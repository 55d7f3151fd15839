"""The game of schedules as static pages: its engine is the package in the browser, and nothing else is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dlojz.pipeline.exchange_formats import to_csv
from dlojz.pipeline.game.position import level_of
from tests.browser.test_schedule_game import PATIENCE_MS, moves_of, wait_for_message
from tests.hubs import need

ROOT = Path(__file__).resolve().parents[2]
PYODIDE = Path(sys.prefix) / "node" / "node_modules" / "pyodide"


class Files(SimpleHTTPRequestHandler):
    """Files of a folder, as any server of static pages has them."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder of the game, as `make site` makes it, on a server that answers no question."""
    need(PYODIDE.is_dir(), "pyodide, from the npm registry")
    folder = tmp_path_factory.mktemp("site") / "game"
    subprocess.run([sys.executable, "docs/game/build.py", str(folder), str(PYODIDE)], cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that is empty so far; it may ask this server only, and write nothing to the browser's console."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    yield opened
    assert complaints == []
    assert [url for url in asked if not url.startswith(address)] == []
    assert any(url.endswith("/engine.zip") for url in asked), "what the worker asks for is seen too"
    context.close()


def test_level_1_is_played_by_keyboard_and_level_2_by_clicking(page: Any, address: str) -> None:
    page.goto(f"{address}en.html")
    page.wait_for_selector('.ranks button[data-move="0F0"]:focus')
    assert page.text_content("h1") == "Level 1: Naive model parallelism"
    for keys, message in (
        ("ArrowRight Enter", "place 0F0 before it"),
        ("ArrowLeft c", "the best that can still be reached is 9 (proven), by 0F0 only."),
        ("Enter", "0F0 runs on rank 0 from 0 to 1."),
        ("u", "0F0 is taken back."),
        ("Enter", "0F0 runs on rank 0 from 0 to 1."),
        # R has no meaning here: the message stays.
        ("r ArrowDown Enter", "1F0 runs on rank 1 from 1 to 2."),
        ("ArrowDown Enter", "2F0 runs on rank 2 from 2 to 3."),
        ("ArrowRight Enter", "2B0 runs on rank 2 from 3 to 5."),
        ("ArrowUp Enter", "1B0 runs on rank 1 from 5 to 7."),
        ("ArrowUp Enter", "Goal reached: 9. You built: naive model parallelism"),
    ):
        for key in keys.split():
            page.keyboard.press(key)
        wait_for_message(page, message)
    assert re.fullmatch(r"#1\.1\.0F1F2F2B1B0B\.[0-9a-f]{8}", page.evaluate("location.hash"))
    assert page.locator('[data-name="run"]').count() == 0
    assert "`dlojz pipeline --play` does, on a machine with the package" in page.text_content(".tools")

    page.select_option("#levels", "2")
    page.wait_for_selector('h1:has-text("Level 2:")')
    for placed, move in enumerate(moves_of(level_of(2)), start=1):
        page.click(f'.ranks button[data-move="{move}"][aria-disabled="false"]')
        page.wait_for_selector(f'.figures dd:has-text("{placed} of 18")')
    assert wait_for_message(page, "Goal reached").startswith("Goal reached: 15.")
    # The address is the position, here too.
    page.reload()
    wait_for_message(page, "Goal reached: 15.")
    # A row of actions per rank, one that deadlocks.
    page.fill("#position", "0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1F1,1B0,1B1,1F2,1B2\n2F0,2B0,2F1,2B1,2F2,2B2")
    page.click('[data-name="take"]')
    wait_for_message(page, "deadlock")


def test_the_page_speaks_french_and_says_what_it_waits_for(page: Any, address: str) -> None:
    page.route("**/engine.zip", lambda route: (page.wait_for_timeout(300), route.continue_()))
    page.goto(f"{address}fr.html", wait_until="domcontentloaded")
    assert "Le moteur se charge" in page.text_content("main")
    page.wait_for_selector('.ranks button[data-move="0F0"]:focus')
    page.keyboard.press("Enter")
    wait_for_message(page, "0F0")
    assert "`dlojz pipeline --play` le fait" in page.text_content(".tools")


def test_an_engine_that_does_not_start_is_said_and_what_would_work(browser: Any, address: str) -> None:
    with browser.new_context() as context:
        opened = context.new_page()
        for name in ("pyodide.mjs", "engine.zip"):
            opened.route(f"**/{name}", lambda route: route.abort())
            opened.goto(f"{address}en.html")
            opened.wait_for_selector('[role="alert"]:has-text("could not be started in this browser")')
            assert "or play with `dlojz pipeline --play`" in opened.text_content("main")
            opened.unroute(f"**/{name}")


PLAY = """
import json, sys
import numpy
from dlojz.display.widgets.schedule_game import ScheduleGame

game, answers = ScheduleGame(), []
for level, moves, orders in json.load(sys.stdin):
    position = ""

    def ask(**request):
        answers.append(game.answer({"level": level, "position": position} | request))
        return answers[-1].get("position", position)

    for number, move in enumerate(moves):
        if number % 12 == 0:
            ask(do="coach")
        position = ask(do="place", action=move)
    for request in ({"do": "undo"}, {"do": "place", "action": "9F9"}):
        ask(**request)
    for pasted in (orders, orders[:-8]):
        ask(do="paste", position=pasted)
print(json.dumps([numpy.__file__, answers]))
"""


def test_answers_with_arrays_in_pure_python_equal_those_with_numpy(tmp_path: Path) -> None:
    """All levels, which have times of their own, latency, two pipes, split backwards and memory limits."""
    build = "import sys, pathlib; sys.path.insert(0, 'docs/game'); import build; build.write_engine(pathlib.Path({!r}))"
    archive = tmp_path / "engine.zip"
    subprocess.run([sys.executable, "-c", build.format(str(archive))], cwd=ROOT, check=True)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path / "engine")
        assert not any(name.endswith(".so") for name in packed.namelist())
    played = [(number, moves_of(level_of(number)), to_csv(level_of(number).reference)) for number in range(1, 11)]
    results = []
    for first in (tmp_path / "engine", ROOT):
        done = subprocess.run(
            [sys.executable, "-c", PLAY],
            input=json.dumps(played),
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(first), "DLOJZ_LANG": "en"},
        )
        results.append(json.loads(done.stdout))
    (stand_in, answers), (numpy, expected) = results
    assert stand_in == str(tmp_path / "engine" / "numpy" / "__init__.py") != numpy
    assert answers == expected
    solved = [answer for answer in answers if answer.get("solved")]
    assert {answer["level"] for answer in solved} == set(range(1, 11))
