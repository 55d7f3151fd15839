"""Hostile names, logs and records in a real Chromium: every producer of HTML shows them, and nothing of them runs."""

import html
from pathlib import Path
from typing import Any

import pytest

from .hostile import ATTACKS, HIDDEN, pieces

pytestmark = pytest.mark.timeout(300)
HEAD = '<!doctype html><meta charset="utf-8"><title>hostile</title>'


@pytest.fixture(scope="module")
def page(browser: Any) -> Any:
    return browser.new_page()


@pytest.fixture(scope="module")
def shown() -> list[tuple[str, str, str]]:
    return [(name, attack, markup) for attack in ATTACKS for name, markup in pieces(attack).items()]


def opened(page: Any, path: Path, body: str) -> Any:
    """What the page's scripts have left behind, after everything on it was loaded and its links were pressed."""
    path.write_text(f"{HEAD}{body}", encoding="utf-8")
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    for link in page.query_selector_all("a"):
        link.click(force=True)
    page.wait_for_timeout(200)
    return page.evaluate("window.__x")


@pytest.mark.parametrize("attack", [ATTACKS[0], ATTACKS[1], ATTACKS[2], ATTACKS[3]])
def test_the_attacks_do_run_where_nothing_is_escaped(page: Any, tmp_path: Path, attack: str) -> None:
    assert opened(page, tmp_path / "raw.html", f'<p title="">{attack}</p>') == 1


def test_nothing_runs_and_every_text_can_be_read(page: Any, tmp_path: Path, shown: list[tuple[str, str, str]]) -> None:
    body = "".join(f"<section>{markup}</section>" for _, _, markup in shown)
    assert opened(page, tmp_path / "all.html", body) is None
    assert page.locator("script, iframe, a, [onerror], [onload]").count() == 0
    sections = page.locator("section")
    assert sections.count() == len(shown)
    for (name, attack, _), text in zip(shown, sections.all_text_contents(), strict=True):
        if set(attack) & set(HIDDEN):
            assert not set(text) & set(HIDDEN), name
            assert "\\u202e" in text or name.endswith("refused"), name
        else:
            words = attack.split("window")[0].strip()[:12]
            assert words in text or words in html.unescape(text), f"{name}: {text[:300]}"


def test_no_producer_writes_a_hidden_sign(shown: list[tuple[str, str, str]]) -> None:
    assert [name for name, _, markup in shown if set(markup) & set(HIDDEN)] == []
