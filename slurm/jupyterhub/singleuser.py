"""What starts a student's server: first the student's own folder, then the server in its place.

python singleuser.py COMMAND [ARGUMENT…]

It runs as the student, never as the administrator: nothing here can write where the student could not. Invariants: the
home folder is closed to others; a notebook that is there already is left as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path

from dlojz.base.language import language
from dlojz.labs.kit.source import copy_notebooks

# Nobody is asked whether they want to read news.
SETTINGS = {
    ".jupyter/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "checkForUpdates": False,
        "fetchNews": "false",
    },
}
# A login shell, which JupyterLab would take, sets PATH anew on many systems: `dlojz` and `torchrun` would not be found.
TERMINAL = "--ServerApp.terminado_settings=shell_command=bash"


def prepare(home: Path, chosen: str) -> Path:
    """Close the home folder, and lay the notebooks of one language in it where they are missing.

    Args:
        home: the student's folder.
        chosen: language of the notebooks, `en` or `fr`.

    Returns:
        The folder of the notebooks.
    """
    home.chmod(0o700)
    (home / "runs").mkdir(exist_ok=True)
    given = copy_notebooks(home, "fr" if chosen == "fr" else "en")
    for place, content in SETTINGS.items():
        (home / place).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(home / place, "x", encoding="utf-8") as settings:
            json.dump(content, settings)
    return given.folder


def umask_for(runs: Path) -> int:
    """Return the umask of a server: the group reads what is written only where the runs have a group folder.

    Args:
        runs: folder of the runs. Its nearest folder that exists hands its group down where it has the setgid bit, and
            is closed to all others: then that group, the instructors', reads what the student keeps there.
    """
    place = next(folder for folder in (runs, *runs.parents) if folder.is_dir())
    mode = place.stat().st_mode
    return 0o027 if mode & stat.S_ISGID and not mode & stat.S_IRWXO else 0o077


def private_folders(home: Path) -> dict[str, str]:
    """Make the folders of what is compiled in a home, and return the variables that name them.

    In the shared temporary directory their names can be guessed, and who makes one first owns the code that is loaded
    from it: torch asks for no owner.
    """
    cache = home / ".cache"
    named = {
        "TORCHINDUCTOR_CACHE_DIR": cache / "torchinductor",
        "TRITON_CACHE_DIR": cache / "triton",
        "TORCH_EXTENSIONS_DIR": cache / "torch_extensions",
    }
    for folder in (cache, *named.values()):
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    return {name: str(folder) for name, folder in named.items()}


def main(words: list[str]) -> None:
    home = Path(os.environ["HOME"])
    os.environ.setdefault("DLOJZ_RUNS", str(home / "runs"))
    os.umask(umask_for(Path(os.environ["DLOJZ_RUNS"])))
    prepare(home, os.environ.get("DLOJZ_LANG", language()))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.update(private_folders(home))
    os.chdir(home)
    program = shutil.which(words[0]) or words[0]
    os.execv(program, [program, *words[1:], TERMINAL])


if __name__ == "__main__":
    main(sys.argv[1:])
