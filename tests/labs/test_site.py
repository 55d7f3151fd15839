"""The site: a page of each module from its docstrings, beside the book that links to it."""

import os
import re
import shlex
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dlojz.base.files import CHECKOUT
from dlojz.labs.kit.book import API, GAME, make_book

BY_ITSELF = re.compile(r"^(?:https?://|mailto:|#|data:)")


class Links(HTMLParser):
    """The links of a page to other files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target and not BY_ITSELF.match(target):
            self.targets.add(target.partition("#")[0])


def test_the_book_links_to_the_modules_where_they_are(tmp_path: Path) -> None:
    (tmp_path / API).mkdir()
    (tmp_path / API / "index.html").write_text("modules", encoding="utf-8")
    make_book(tmp_path, ["00"], "en")
    contents = tmp_path / "en" / "index.html"
    assert f'href="../{API}/index.html"' in contents.read_text(encoding="utf-8")
    make_book(tmp_path / "alone", ["00"], "en")
    assert f"../{API}/" not in (tmp_path / "alone" / "en" / "index.html").read_text(encoding="utf-8")


def test_the_book_links_to_the_game_in_its_language(tmp_path: Path) -> None:
    (tmp_path / GAME).mkdir()
    (tmp_path / GAME / "fr.html").write_text("jeu", encoding="utf-8")
    make_book(tmp_path, ["00"])
    assert f'href="../{GAME}/fr.html"' in (tmp_path / "fr" / "index.html").read_text(encoding="utf-8")
    assert f"../{GAME}/" not in (tmp_path / "en" / "index.html").read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_each_module_has_a_page_and_no_link_of_the_site_is_broken(tmp_path: Path) -> None:
    """As `make site` makes it, in a copy's place: the recipe is that of the Makefile."""
    recipe = subprocess.run(["make", "-n", "site"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    line = next(one for one in recipe.replace("\\\n", " ").splitlines() if " -m pdoc " in one)
    words = shlex.split(line)
    left_out = tuple(word[1:] for word in words if word.startswith("!"))
    modules = [word for word in words if word.startswith("dlojz") and not word.startswith(left_out)]
    assert left_out and len(modules) > 300
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [str(tmp_path / API) if word == "site/api" else word for word in words]
    subprocess.run(command, cwd=CHECKOUT, env=environment, check=True, capture_output=True)
    pages = list((tmp_path / API).rglob("*.html"))
    assert {page.relative_to(tmp_path / API).with_suffix("").as_posix() for page in pages} >= {
        name.replace(".", "/") for name in modules
    }
    for page in pages:
        broken = [
            target for target in Links(page.read_text(encoding="utf-8")).targets if not (page.parent / target).is_file()
        ]
        assert broken == [], page
