"""Hook of Python processes that a launcher or a script starts: those that run a script are started under the watch.

Python imports `sitecustomize` when it starts. The folder of this file stands first in `PYTHONPATH` of the processes of
a watched run. A process that runs a script or a module begins anew as `python -m dlojz.watch SCRIPT`, under the same
process number; launchers, which start others, and tools are left alone. Nothing of dlojz is imported here.

Source: https://docs.python.org/3/library/site.html (`sitecustomize`); `Python/initconfig.c` (options with a value).
"""

from __future__ import annotations

import os
import sys

# ruff: noqa: PTH100, PTH112, PTH118, PTH119, PTH120
# Every Python process of a run imports this, and pathlib takes milliseconds
VARIABLE = "DLOJZ_WATCHED"
FOLDER = os.path.dirname(os.path.abspath(__file__))
CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))
LAUNCHERS = (
    *("accelerate", "composer", "deepspeed", "dlojz", "ds", "dsr", "fabric", "horovodrun", "lightning", "mpiexec"),
    *("mpirun", "pytest", "ray", "torchrun", "torchx"),
)
"""Commands that start trainings in other processes, or none."""
TOOLS = (
    *("IPython", "accelerate", "debugpy", "deepspeed", "dlojz", "horovod", "idr_torch", "ipykernel", "joblib"),
    *("jupyter", "lightning", "lightning_fabric", "mypy", "ninja", "pip", "pytest", "pytorch_lightning", "ray"),
    *("setuptools", "tensorboard", "torch", "torchx", "triton", "wandb"),
)
"""Packages whose modules, run by `python -m`, are no training."""


def _script_of(words: list[str]) -> tuple[list[str], list[str]] | None:
    """Split a command line of Python into its options and the words from the script or `-m` on; None without one."""
    number = 1
    while number < len(words):
        word = words[number]
        if not word.startswith("-"):
            return words[1:number], ["", *words[number:]]
        if word.startswith("--"):
            # The only long option whose value is the next word.
            number += 2 if word == "--check-hash-based-pycs" else 1
            continue
        if word == "-":
            return None
        # Short options may stand together, as in `-um`.
        for position, letter in enumerate(word[1:], start=1):
            if letter == "c":
                return None
            if letter == "m":
                module = [word[position + 1 :]] if word[position + 1 :] else []
                options = words[1:number] + (["-" + word[1:position]] if position > 1 else [])
                return options, ["-m", *module, *words[number + 1 :]]
            # Their value is what remains of the word, else the next word.
            if letter in "WX":
                number += not word[position + 1 :]
                break
        number += 1
    return None


def _is_watched(words: list[str], command: str) -> bool:
    """Whether these words are a script, or a module, that may train."""
    if words[0] == "-m":
        package = words[1].partition(".")[0] if len(words) > 1 else ""
        return bool(package) and package not in TOOLS and package not in sys.stdlib_module_names
    path = os.path.abspath(words[1])
    if path.endswith(".py") or os.path.isdir(path):
        # A program installed with Python is a tool.
        libraries = tuple({os.path.join(prefix, "lib") + os.sep for prefix in (sys.prefix, sys.base_prefix)})
        return not os.path.realpath(path).startswith(libraries)
    name = os.path.basename(path)
    # One without .py is watched only where the run was asked for by its name.
    return name == os.path.basename(command) and name not in LAUNCHERS


def _begin() -> None:
    """Begin anew under the watch, if this process runs a script, and the watch can be imported here."""
    import json
    from importlib.util import find_spec

    identity = json.loads(os.environ[VARIABLE])
    split_words = _script_of(sys.orig_argv)
    # The watch was installed for that version.
    if split_words is None or list(sys.version_info[:2]) != identity["python"]:
        return
    options, words = split_words
    if not _is_watched(words, identity["command"]) or not all(map(find_spec, ("torch", "pydantic", "psutil"))):
        return
    script = words if words[0] == "-m" else words[1:]
    os.execv(sys.executable, [sys.executable, *options, "-P", "-m", "dlojz.watch", *script])


def _leave() -> None:
    """Take this hook out of the process, and import the `sitecustomize` that it hides."""
    hidden = [FOLDER]
    is_dlojz = any(word.partition(".")[0] == "dlojz" for word in sys.orig_argv)
    if not is_dlojz and os.path.basename(CHECKOUT) not in ("site-packages", "dist-packages"):
        hidden.append(CHECKOUT)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) not in hidden]
    hook = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        if hook is not None:
            sys.modules["sitecustomize"] = hook


if VARIABLE in os.environ:
    _begin()
    _leave()
