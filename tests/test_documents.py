"""README and CONTRIBUTING: links lead somewhere, and what they name exists; examples in docstrings are right."""

import doctest
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

import dlojz
from dlojz.cli.main import DONE, main
from dlojz.cli.runs import PICTURE_CALIBRATION, PICTURE_RECORDS, demo_configs
from dlojz.compare import compare
from dlojz.cost_model.measured_machine import Measured
from dlojz.results.record import RunRecord

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("slurm/*.md"), *ROOT.glob("docs/*.md")])
FOLDERS_OF_USERS = {"runs/", "quarantine/", "train.py"}
SAME_PICTURE = 0.2
"""Mean difference of two pictures, of 255; a bar that moves makes more."""
COMMANDS = ("AGENTS.md", "README.md", "README.fr.md", "docs/commands.md")
MODULES = sorted([*ROOT.glob("dlojz/**/*.py"), *ROOT.glob("tests/models/*.py")])
EXAMPLES = [path for path in MODULES if ">>> " in path.read_text(encoding="utf-8")]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def slug(heading: str) -> str:
    """The anchor a forge gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        destination = (path.parent / target).resolve() if target else path
        assert destination.exists(), f"{path.name} links to {link}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+\s+(.*)$", destination.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{path.name}: no heading for #{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_rooms_that_a_document_names_exist(path: Path) -> None:
    """Written as `file.py` or `room/`, from any folder on."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    known = "".join(f"\0/{name}" for name in tracked.split("\0"))
    named = set(re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", path.read_text(encoding="utf-8"))) - FOLDERS_OF_USERS
    assert [name for name in sorted(named) if f"/{name}" not in known] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_a_document_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each `dlojz …` line is accepted by the command line as far as its flags go."""
    text = (ROOT / name).read_text(encoding="utf-8").replace(".venv/bin/dlojz", "dlojz")
    # Each action of `dlojz labs` has options of its own.
    written = re.findall(r"^\s*(?:\$ )?dlojz ((?:labs )?\w+)(.*)$", text, re.MULTILINE)
    assert written
    for subcommand in sorted({subcommand for subcommand, _ in written}):
        # The everyday help names --help-all, which has the other options.
        codes = {main([*subcommand.split(), word]) for word in ("--help", "--help-all")}
        assert codes == {DONE}, f"{name} names `dlojz {subcommand}`, which is unknown"
        told = capsys.readouterr().out
        for flag in {flag for one, line in written if one == subcommand for flag in re.findall(r"--[a-z-]+", line)}:
            assert flag in told, f"{name} gives {flag} to `dlojz {subcommand}`, which has no such flag"


@pytest.mark.parametrize("name", ["AGENTS.md", "README.md", "README.fr.md"])
def test_every_make_target_of_the_readme_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)`?", (ROOT / name).read_text(encoding="utf-8")))
    assert named <= targets


def test_the_picture_of_the_readme_is_what_the_demo_draws_today(tmp_path: Path) -> None:
    """Drawn again from the records that it holds, with the predictions of today, it is the same picture."""
    again = "docs/demo.png is out of date: make demo PICTURE=docs/demo.png, on a quiet machine"
    with Image.open(ROOT / "docs" / "demo.png") as shown:
        shown.load()
    records = [RunRecord.model_validate(one) for one in json.loads(shown.info.get(PICTURE_RECORDS, "[]"))]
    assert [record.config.hash for record in records] == [config.hash for config in demo_configs()], again
    machine = Measured.model_validate_json(shown.info[PICTURE_CALIBRATION])
    compare(records, machine).figure(tmp_path / "demo.png")
    with Image.open(tmp_path / "demo.png") as drawn:
        assert drawn.size == shown.size and drawn.info["Title"] == shown.info["Title"], again
        difference = ImageStat.Stat(ImageChops.difference(drawn.convert("RGB"), shown.convert("RGB")))
    assert max(difference.mean) < SAME_PICTURE, again


def test_no_file_names_a_path_of_one_machine() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    home = re.compile(rf"(/home/\w+|/root/|/Users/\w+|{re.escape(str(ROOT))}\b)")
    for name in tracked.split("\0"):
        path = ROOT / name
        if not name or path.suffix in (".png", ".jpg") or name == "tests/test_documents.py" or not path.is_file():
            continue
        found = home.search(path.read_text(encoding="utf-8", errors="replace"))
        assert not found, f"{name} names {found.group(0)}" if found else ""


def test_the_notice_names_the_origin_of_every_table() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    named = set(re.findall(r"^(table-\S+\.csv)", notice, re.MULTILINE))
    tables = sorted((ROOT / "dlojz" / "hardware" / "data" / "evidence").glob("*/*.csv"))
    assert named == {path.name for path in tables}
    for path in tables:
        origin = re.search(r"^#: source = ([^,]+?)(?: et al\.)?,", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert origin is not None, path.name
        line = notice.split(path.name)[1].split("table-")[0]
        assert origin[1] in line or "the same" in line, path.name


def test_one_version() -> None:
    assert f"version: {dlojz.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == dlojz.__version__


@pytest.mark.parametrize("name", ["README.md", "README.fr.md"])
def test_the_readme_names_the_torch_of_the_lock(name: str) -> None:
    lock = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    named = re.findall(r"\btorch(?:vision)?==[\d.]+", (ROOT / name).read_text(encoding="utf-8"))
    assert len(named) == 2 and all(f"\n{one}\n" in lock for one in named)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_the_docstrings_of_a_module_are_right(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    tried = doctest.testmod(module)
    assert tried.attempted > 0 and tried.failed == 0
