"""Write the game of schedules as static pages: the package's engine in the browser, where no server answers.

    python docs/game/build.py FOLDER PYODIDE

PYODIDE is the folder of the npm package `pyodide`, Python for WebAssembly. FOLDER gets `en.html` and `fr.html`, and
all that they load: Pyodide, the modules that the game imports with their data as `engine.zip`, and pydantic's compiled
part, which pip fetches from PyPI. The pages ask no other server. NumPy is `arrays.py`, as no registry has one for
WebAssembly.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from dlojz.base.language import LANGUAGES, use_language
from dlojz.base.table import safe
from dlojz.display.widgets.schedule_game import DATA, LOOKS, PALETTE, SCRIPT, game_page, palette, words_of_page
from dlojz.pipeline.game.position import page_words

HERE = Path(__file__).parent
STAND_INS = ("numpy", "psutil", "pydantic_core")
"""Packages with compiled parts: replaced, left out, fetched for WebAssembly."""
STATIC_SCRIPT, WORKER = "static_game.js", "static_game_worker.js"
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
SITE_PACKAGES = "site-packages"


def engine_files() -> Iterator[tuple[str, bytes]]:
    """List the files of the engine, by their names in the archive: packages imported by now, and their data."""
    files = dict[str, Path]()
    for name, module in sorted(sys.modules.items()):
        package, path = name.partition(".")[0], Path(getattr(module, "__file__", None) or "")
        if package in STAND_INS or package.startswith("_") or path.suffix != ".py":
            continue
        root, sources = path.parents[name.count(".") + (path.name == "__init__.py")], [path]
        if package == "dlojz":
            # Modules beside it too: what is imported by name later, such as orders, is not known by now.
            sources = [
                *path.parent.glob("*.py"),
                *(file for file in (path.parent / "data").rglob("*") if file.is_file()),
            ]
        elif SITE_PACKAGES not in path.parts:
            continue
        elif path.name == "__init__.py" and name == package:
            sources = list(path.parent.rglob("*.py"))
        files |= {str(source.relative_to(root)): source for source in sources}
    yield from ((name, file.read_bytes()) for name, file in sorted(files.items()))
    yield "numpy/__init__.py", (HERE / "arrays.py").read_bytes()
    yield "numpy/typing.py", b"from numpy import ndarray as NDArray\n"
    # The game asks for no memory of the machine.
    yield "psutil.py", b""


def write_engine(path: Path) -> None:
    """Write `engine.zip`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in engine_files():
            archive.writestr(name, content)


def compiled_part(pyodide: Path) -> Path:
    """Fetch pydantic's compiled part for the Python of Pyodide, beside which it then lies, and return the file."""
    info = json.loads((pyodide / "pyodide-lock.json").read_text(encoding="utf-8"))["info"]
    python = "".join(info["python"].split(".")[:2])
    platform, version = f"pyemscripten_{info['abi_version']}_wasm32", importlib.metadata.version("pydantic_core")
    wheel = pyodide / f"pydantic_core-{version}-cp{python}-cp{python}-{platform}.whl"
    if not wheel.is_file():
        options = ["--no-deps", "--only-binary=:all:", f"--platform={platform}", f"--python-version={python}"]
        options += ["--implementation=cp", f"--abi=cp{python}", f"--dest={pyodide}", f"pydantic_core=={version}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options], check=True)
    return wheel


def write_pages(folder: Path, pyodide: Path) -> None:
    """Write both pages and all that they load."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_engine(folder / "engine.zip")
    compiled = compiled_part(pyodide)
    for file in (
        *(pyodide / name for name in PYODIDE_FILES),
        compiled,
        *(DATA / name for name in (SCRIPT, LOOKS, STATIC_SCRIPT, WORKER)),
    ):
        shutil.copy(file, folder)
    (folder / "archives.json").write_text(json.dumps(["engine.zip", compiled.name]), encoding="utf-8")
    (folder / PALETTE).write_text(palette(), encoding="utf-8")
    for name in LANGUAGES:
        use_language(name)
        (folder / f"words.{name}.json").write_text(words_of_page(), encoding="utf-8")
        frame = f'<main id="static-game"><p role="status">{safe(page_words()["loading"])}</p></main>'
        page = (
            game_page().replace('<main id="game"></main>', frame).replace(f'src="{SCRIPT}"', f'src="{STATIC_SCRIPT}"')
        )
        (folder / f"{name}.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]), Path(sys.argv[2]))
