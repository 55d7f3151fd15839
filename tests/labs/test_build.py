"""Building the notebooks: twice the same, checked without running, run again only where the code has changed."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from dlojz.base.errors import LabError
from dlojz.labs.kit.build import _how_long, build, execute
from dlojz.labs.kit.contents import Duration

SOURCE = """\
# %% [markdown] lang="fr"
# Bonjour

# %% [markdown] lang="en"
# Hello

# %% name="where"
from dlojz.labs.kit.lab import notebook_language

print(notebook_language())

# %% name="sum"
print(
    ### BEGIN SOLUTION
    20 + 22,
    ### END SOLUTION
)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    (root / "solutions").mkdir()
    (root / "solutions" / "07_sum.py").write_text(SOURCE, encoding="utf-8")
    assert build(root=root) == 0
    return root


def notebooks(root: Path) -> dict[str, Path]:
    return {"/".join(path.parts[-3:-1]): path for path in sorted(root.glob("*/*/07_sum.ipynb"))}


def outputs(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [output.text for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def test_four_notebooks_each_in_its_language_and_solutions_with_outputs(built: Path) -> None:
    paths = notebooks(built)
    assert set(paths) == {"notebooks/en", "notebooks/fr", "solutions/en", "solutions/fr"}
    assert outputs(paths["solutions/en"]) == ["en\n", "42\n"]
    assert outputs(paths["solutions/fr"]) == ["fr\n", "42\n"]
    assert outputs(paths["notebooks/en"]) == outputs(paths["notebooks/fr"]) == []
    assert all(path.read_bytes().endswith(b"}\n") for path in paths.values())


def test_execute_stores_a_figure_once_with_its_description(tmp_path: Path) -> None:
    """JupyterLab is given it twice, as a PNG and as HTML; a stored notebook would take twice the room."""
    cell = nbformat.v4.new_code_cell("from dlojz.display.canvas import new_figure\n\nnew_figure(2, 1, 'the peak')")
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"dlojz": {"language": "en"}})
    [done] = execute(notebook, tmp_path / "figure.ipynb", runs_root=tmp_path / "runs").cells
    [shown] = done.outputs
    assert set(shown.data) == {"image/png", "text/plain"}
    assert shown.metadata == {"image/png": {"alt": "the peak"}}


def test_building_again_runs_nothing_and_changes_no_byte(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (path.read_bytes(), path.stat().st_mtime_ns) for name, path in notebooks(built).items()}
    assert build(root=built) == 0
    assert {name: (path.read_bytes(), path.stat().st_mtime_ns) for name, path in notebooks(built).items()} == before
    assert capsys.readouterr().err == ""


def test_a_fresh_build_passes_its_check(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(check=True, root=built) == 0
    assert capsys.readouterr().err == ""


def changed(path: Path, change: Any) -> bytes:
    before = path.read_bytes()
    content = json.loads(before)
    change(content)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    return before


def add_output(content: Any) -> None:
    content["cells"][1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": ["en"]}]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("notebooks/fr", lambda content: content["cells"][0].update(source=["Salut"]), "differs from 07_sum.py"),
        ("notebooks/en", add_output, "differs from 07_sum.py"),
        ("notebooks/en", lambda content: content["cells"][1].update(id="random"), "differs from 07_sum.py"),
        ("solutions/en", lambda content: content["cells"].pop(), "differs from 07_sum.py"),
        (
            "solutions/en",
            lambda content: content["metadata"]["dlojz"].update(executed_sha256="0"),
            "outputs of an older",
        ),
        ("solutions/fr", lambda content: content["cells"][1].update(execution_count=None), "not executed"),
        ("solutions/fr", lambda content: content.clear(), "is missing or is no notebook"),
    ],
)
def test_build_check_names_a_file_that_differs(
    built: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, words: str
) -> None:
    path = notebooks(built)[name]
    before = changed(path, change)
    after = path.read_bytes()
    try:
        assert build(check=True, root=built) == 1
        assert path.read_bytes() == after
    finally:
        path.write_bytes(before)
    told = capsys.readouterr().err
    assert f"{name}/07_sum.ipynb" in told
    assert words in told
    assert told.endswith("run `dlojz labs build`\n")


def test_build_check_names_a_notebook_without_source(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stray = built / "notebooks" / "fr" / "99_old.ipynb"
    stray.write_bytes(notebooks(built)["notebooks/fr"].read_bytes())
    try:
        assert build(check=True, root=built) == 1
    finally:
        stray.unlink()
    assert "99_old.ipynb has no source" in capsys.readouterr().err


def test_new_prose_keeps_the_outputs_and_new_code_runs(
    tmp_path: Path, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    root = tmp_path / "checkout"
    shutil.copytree(built, root)
    source = root / "solutions" / "07_sum.py"
    source.write_text(SOURCE.replace("# Bonjour", "# Bonsoir"), encoding="utf-8")
    assert build(check=True, root=root) == 1
    assert build(root=root) == 0
    assert "executing" not in capsys.readouterr().err
    assert outputs(notebooks(root)["solutions/fr"]) == ["fr\n", "42\n"]
    source.write_text(SOURCE.replace("20 + 22", "20 + 23"), encoding="utf-8")
    assert build(root=root, language="fr") == 0
    assert "executing solutions/fr/07_sum.ipynb" in capsys.readouterr().err
    assert outputs(notebooks(root)["solutions/fr"]) == ["fr\n", "43\n"]
    assert build(check=True, root=root, language="fr") == 0
    assert build(check=True, root=root, language="en") == 1


def test_build_writes_no_solution_that_fails(tmp_path: Path) -> None:
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "07_sum.py").write_text(SOURCE.replace("20 + 22", "1 / 0"), encoding="utf-8")
    with pytest.raises(LabError, match="ZeroDivisionError"):
        build(root=tmp_path, language="en")
    assert not (tmp_path / "solutions" / "en" / "07_sum.ipynb").exists()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"labs": ["77"]}, "unknown lab '77'.*legal values: 07"),
        ({"language": "de"}, "unknown language 'de'"),
    ],
)
def test_build_refuses_an_unknown_lab_or_language(built: Path, request_: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words):
        build(root=built, **request_)


def test_build_refuses_a_folder_without_sources(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="holds no lab"):
        build(root=tmp_path)


@pytest.mark.parametrize(("load", "busy"), [(4.0, False), (4.1, True)])
def test_how_long_says_that_a_machine_had_more_than_two_programs_per_core(load: float, busy: bool) -> None:
    told = _how_long({"01": Duration(elapsed_s=9, processor_s=8, cores=2, load=load, libraries=(), date="2026-11-23")})
    assert "on 2 cores" in told and ("other work" in told) == busy
