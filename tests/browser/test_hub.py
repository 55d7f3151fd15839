"""Two students on a real hub, in a real browser: they log in, work, and keep out of each other's folders.

One after the other on purpose: the first student's lab trains while the second one works.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dlojz.base.language import use_language
from dlojz.base.machine import PARENT_VARIABLE
from dlojz.labs.kit.exercise import not_done
from tests.hubs import START

if TYPE_CHECKING:
    from .conftest import Hub, Student

LAB = "00_getting_started.ipynb"
FRENCH, ENGLISH = f"notebooks/fr/{LAB}", f"notebooks/en/{LAB}"
PANEL = "from dlojz.display.widgets.grid_panel import grid_panel\n\ngrid_panel(dp=2, pp=4, tp=2, gpus_per_node=8)"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shots")


@pytest.fixture(scope="module")
def ada(log_in: Callable[[str], Student]) -> Student:
    """Logged in; her lab 00, in French, is being run from its first cell to its last."""
    student = log_in("dlojz-a")
    student.open(FRENCH)
    student.page.click("li.lm-MenuBar-item:has-text('Run')")
    student.page.click("li.lm-Menu-item:has-text('Run All Cells')")
    return student


@pytest.fixture(scope="module")
def bob(ada: Student, log_in: Callable[[str], Student]) -> Student:
    return log_in("dlojz-b")


def names(student: Student, folder: str) -> set[str]:
    return {entry["name"] for entry in student.get(f"api/contents/{folder}")["content"]}


def test_each_finds_the_notebooks_of_the_language_chosen(ada: Student, bob: Student) -> None:
    assert names(ada, "notebooks") == {"fr"}
    assert names(bob, "notebooks") == {"en"}
    assert LAB in names(ada, "notebooks/fr") & names(bob, "notebooks/en")
    assert bob.get(f"api/contents/{ENGLISH}")["content"]["metadata"]["dlojz"]["language"] == "en"


def test_nobody_reads_the_folder_of_another(hub: Hub, ada: Student, bob: Student) -> None:
    hers = hub.home("dlojz-a")
    assert hers.stat().st_mode & 0o777 == 0o700
    assert (hers / FRENCH).is_file()
    kernel = bob.kernel()
    tried = f"import os\nprint(os.getuid())\nopen({str(hers / FRENCH)!r})"
    own, _, refused = bob.execute(kernel, tried).partition("\n")
    assert int(own) == hub.home("dlojz-b").stat().st_uid != hers.stat().st_uid
    assert refused.startswith("PermissionError")
    assert bob.execute(kernel, f"import os\nos.listdir({str(hers)!r})").startswith("PermissionError")
    for theirs in ("hub.json", "hub.sqlite", "cookie_secret"):
        assert bob.execute(kernel, f"open({str(hub.folder / theirs)!r})").startswith("PermissionError")
    for path in (f"api/contents/{FRENCH}", f"files/{FRENCH}", "api/kernels", "api/sessions"):
        status, text = bob.ask(ada.base + path)
        assert status in (403, 404), path
        assert "Prise en main" not in text
    assert ada.ask(ada.base + f"api/contents/{FRENCH}")[0] == 200


def test_a_stranger_and_a_wrong_password_stay_outside(hub: Hub, browser: Any) -> None:
    login = f"{hub.url}/hub/login"
    tried = [("dlojz-a", hub.passwords["dlojz-b"]), ("dlojz-a", ""), ("root", ""), ("dlojz-c", ""), ("<b>", "x")]
    for name, password in [*tried, ("dlojz-a", hub.passwords["dlojz-a"])]:
        context = browser.new_context()
        context.request.get(login)
        token = next(cookie["value"] for cookie in context.cookies() if cookie["name"] == "_xsrf")
        form = {"_xsrf": token, "username": name, "password": password}
        answer = context.request.post(login, form=form, max_redirects=0)
        inside = password == hub.passwords.get(name)
        assert answer.status == (302 if inside else 403)
        assert any("hub-login" in cookie["name"] for cookie in context.cookies()) == inside
        context.close()


def test_a_hub_that_is_killed_comes_back_and_nobody_notices(hub: Hub, bob: Student) -> None:
    kernel = bob.kernel()
    assert bob.execute(kernel, "kept = 41") == ""
    hub.part("-m jupyterhub").kill()
    assert bob.execute(kernel, "print(kept + 1)") == "42\n"
    hub.wait_until_up()
    assert bob.execute(kernel, "print(kept + 2)") == "43\n"
    assert LAB in names(bob, "notebooks/en")


def test_the_first_cells_in_english(bob: Student, shots: Path) -> None:
    kernel = bob.open(ENGLISH)
    bob.page.click(".jp-CodeCell .cm-content")
    for key in ("Shift+Enter", *["ArrowDown"] * 3, *["Shift+Enter"] * 5):  # past the look at the machine: it takes long
        bob.page.keyboard.press(key)
    bob.until(lambda: bob.page.locator(".jp-OutputArea-output", has_text=not_done("global-batch")).count())
    bob.page.screenshot(path=shots / "english.png")
    assert bob.state(kernel) == "idle"
    ran = [cell for cell in bob.cells(ENGLISH) if cell["execution_count"]]
    assert len(ran) == 4
    assert [output for cell in ran for output in cell["outputs"] if output["output_type"] == "error"] == []
    assert "ddp" in json.dumps(ran[2]["outputs"]).lower()  # the refusal, in one sentence


def test_lab_00_runs_from_its_first_cell_to_its_last(ada: Student, shots: Path) -> None:
    kernel = ada.kernel(FRENCH)
    asked = "import sys\nprint(getattr(sys, 'last_value', get_ipython().execution_count - 1))"
    count = len([cell for cell in ada.cells(FRENCH) if cell["source"]])
    # The answer comes between two cells: what they were asked for is done one by one.
    ada.until(lambda: (told := ada.execute(kernel, asked).strip()) == str(count) or not told.isdecimal(), 540)

    def whole() -> list[dict[str, Any]]:
        """The notebook, once what is saved holds all answers: a loaded page hears of the last ones late."""
        saved = ada.cells(FRENCH)
        failed = any(output["output_type"] == "error" for cell in saved for output in cell["outputs"])
        return saved if failed or all(cell["execution_count"] for cell in saved if cell["source"]) else []

    cells = ada.until(whole)
    ada.page.screenshot(path=shots / "french.png")
    assert [output["evalue"] for cell in cells for output in cell["outputs"] if output["output_type"] == "error"] == []
    assert [cell["source"] for cell in cells if not cell["execution_count"]] == []
    use_language("fr")
    said = json.dumps([cell["outputs"] for cell in cells], ensure_ascii=False)
    assert not_done("global-batch") in said
    assert "completed" in said  # the trainings have trained
    assert said.count("image/png") >= 2
    assert len([path for path in (ada.hub.home("dlojz-a") / "runs").iterdir() if (path / "record.json").exists()]) >= 5


def test_a_slider_moved_by_keyboard_changes_the_figure(ada: Student, shots: Path) -> None:
    page = ada.page
    page.locator(".jp-CodeCell").last.click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(PANEL)
    page.keyboard.press("Shift+Enter")
    picture = page.locator(".widget-html svg[role=img]")
    picture.wait_for()
    before, ranks = picture.get_attribute("aria-label"), picture.locator("rect > title").count()
    assert ranks == 2 * 4 * 2
    slider = page.locator(".widget-hslider .noUi-handle").first
    slider.focus()
    slider.press("ArrowRight")  # dp: from 2 to 3
    page.wait_for_function(
        "before => document.querySelector('.widget-html svg[role=img]').getAttribute('aria-label') !== before",
        arg=before,
    )
    assert picture.locator("rect > title").count() == 3 * 4 * 2
    assert re.search(r"\b24\b", page.locator(".widget-html", has=page.locator("svg[role=img]")).inner_text())
    page.screenshot(path=shots / "slider.png")


def test_a_terminal_finds_the_commands_of_the_course(bob: Student) -> None:
    told = bob.type("dlojz --version; type torchrun; echo en''d", "end")
    assert re.search(r"dlojz \d+\.\d+", told) and "torchrun is " in told, told


def test_a_kernel_that_restarts_finds_the_run_that_goes_on(ada: Student) -> None:
    kernel = ada.kernel(FRENCH)
    begin = (
        "import dlojz, os\nlong = dlojz.run(model='gpt_tiny', dp=1, micro_batch=1, steps=100_000, wait=False)\n"
        "print(long.run_id, os.getpid())"
    )
    run_id, pid = ada.execute(kernel, begin).split()
    status, text = ada.ask(f"{ada.base}api/kernels/{kernel}/restart", "POST")
    assert status == 200, text
    found = f"import dlojz, os\nlong = [each for each in dlojz.runs() if each.run_id == {run_id!r}][0]\n"
    told = ada.until(lambda: ada.execute(kernel, found + "print(long.state, os.getpid())").split())
    assert told[0] in ("queued", "running")
    assert told[1] != pid
    assert ada.execute(kernel, found + "long.cancel()\nprint(long.wait(timeout_s=60).state)") == "cancelled\n"


def test_nothing_of_the_students_runs_outside_the_hub(hub: Hub, ada: Student, bob: Student) -> None:
    """What the hub has started is below it: its end, checked by the fixture, is theirs."""
    homes = {hub.home(name).stat().st_uid: str(hub.home(name)) for name in hub.passwords}
    theirs = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # whatever else runs here may end while it is looked at
            home = homes.get(process.uids().real)  # another hub gives its students the same numbers
            if home is not None and process.environ().get("HOME") == home:
                theirs.add(process)
    below = set(psutil.Process(hub.process.pid).children(recursive=True))
    assert theirs
    assert {process for process in theirs if process.is_running()} <= below


def test_a_hub_ends_with_the_process_that_it_is_told(tmp_path: Path) -> None:
    """Which is not its parent here: it may be that this one has ended, and so it begins nothing."""
    environment = {**os.environ, PARENT_VARIABLE: "1"}
    done = subprocess.run([sys.executable, str(START), f"--folder={tmp_path}"], env=environment, check=False)
    assert done.returncode == 1 and list(tmp_path.iterdir()) == []
