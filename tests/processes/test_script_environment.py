"""What a script's processes see of their start, and which processes that they start are watched."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dlojz.base.errors import LabError
from dlojz.base.files import CHECKOUT
from dlojz.config.run_config import RunConfig, command_of
from dlojz.processes.script_environment import HOOK, VARIABLE, ProcessIdentity, as_torchrun

ENVIRONMENTS: list[dict[str, str]] = [
    {"HOME": "/h"},
    {"PYTHONPATH": "/a:/b", "SLURM_JOB_ID": "7", "RANK": "3", "OMP_NUM_THREADS": "5"},
    {"PYTHONUNBUFFERED": "0", "MASTER_ADDR": "there"},
]


@pytest.mark.parametrize("plain", ENVIRONMENTS)
def test_taken_from_leaves_the_environment_of_the_user(plain: dict[str, str]) -> None:
    identity = ProcessIdentity("/runs/one", 1, 2)
    for put in (identity.put_into, identity.put_with_hook):
        environment = put(plain)
        assert environment["PYTHONUNBUFFERED"] == "1" and str(CHECKOUT) in environment["PYTHONPATH"]
        taken = ProcessIdentity.taken_from(environment)
        assert taken is not None and (taken.folder, taken.rank, taken.world_size) == ("/runs/one", 1, 2)
        assert environment == plain
        assert ProcessIdentity.taken_from(environment) is None


def test_taken_from_keeps_what_a_launcher_has_added() -> None:
    environment = ProcessIdentity("/runs/one").put_with_hook({"PYTHONPATH": "/a"})
    environment["PYTHONPATH"] = "/launcher:" + environment["PYTHONPATH"] + ":/last"
    environment["RANK"] = "1"
    ProcessIdentity.taken_from(environment)
    assert environment == {"PYTHONPATH": "/launcher:/a:/last", "RANK": "1"}


def test_as_torchrun_gives_the_variables_of_a_launcher() -> None:
    """A single process, too, which keeps its threads."""
    alone = as_torchrun(0, 1, 29500, "run", {})
    assert alone["WORLD_SIZE"] == "1" and "OMP_NUM_THREADS" not in alone
    given = as_torchrun(1, 2, 29500, "run", {})
    assert (given["RANK"], given["WORLD_SIZE"], given["MASTER_PORT"]) == ("1", "2", "29500")
    assert given["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in as_torchrun(1, 2, 29500, "run", {"OMP_NUM_THREADS": "4"})


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """The hook, imported in a process that it has nothing to do in."""
    spec = importlib.util.spec_from_file_location("hook_under_test", HOOK / "sitecustomize.py")
    assert spec is not None and spec.loader is not None and VARIABLE not in os.environ
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "options", "script"),
    [
        ("python train.py --lr 3 -m x", "", " train.py --lr 3 -m x"),
        ("python -u -X dev -W ignore train.py", "-u -X dev -W ignore", " train.py"),
        ("python -Werror -Xdev train.py", "-Werror -Xdev", " train.py"),
        ("python -m pkg.train --lr 3", "", "-m pkg.train --lr 3"),
        ("python -um pkg.train", "-u", "-m pkg.train"),
        ("python -mpkg.train", "", "-m pkg.train"),
        ("python --check-hash-based-pycs always train.py", "--check-hash-based-pycs always", " train.py"),
        ("python -c pass", None, ""),
        ("python -uc pass", None, ""),
        ("python -", None, ""),
        ("python -i", None, ""),
    ],
)
def test_script_of_splits_a_command_line_of_python(
    hook: ModuleType, line: str, options: str | None, script: str
) -> None:
    found = hook._script_of(line.split())
    if options is None:
        assert found is None
    else:
        assert found == (options.split(), script.split(" "))


def test_is_watched_leaves_launchers_and_tools_alone(hook: ModuleType, tmp_path: Path) -> None:
    library = str(Path(os.__file__).with_name("pdb.py"))
    assert hook._is_watched(["", str(tmp_path / "train.py")], "")
    assert hook._is_watched(["-m", "pkg.train"], "torchrun")
    assert hook._is_watched(["", "/bin/tune"], "tune")
    for words in (
        ["-m", "torch.distributed.run"],
        ["-m", "deepspeed.launcher.launch"],
        ["-m", "pdb"],
        ["-m", "dlojz.watch"],
        ["", "/bin/torchrun"],
        ["", "/bin/ninja"],
        ["", library],
    ):
        assert not hook._is_watched(words, "torchrun"), words


def test_a_process_that_runs_no_script_finds_its_environment_as_it_was(tmp_path: Path) -> None:
    """The user's own `sitecustomize` is imported, and the path holds nothing of the lab's."""
    (tmp_path / "sitecustomize.py").write_text("MINE = True\n", encoding="utf-8")
    plain = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import sys, sitecustomize; print(sitecustomize.MINE, sys.path)"
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout
        for environment in (plain, ProcessIdentity("/runs/one").put_with_hook(plain))
    ]
    assert printed[0] == printed[1]


def test_of_script_names_files_modules_and_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    for name in ("__init__.py", "train.py", "__main__.py"):
        (package / name).write_text("raise SystemExit('executed')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    module = RunConfig.of_script("-m pkg.train", ["--lr", "3"], processes=2)
    assert module.script is not None and module.script.path == str(package / "train.py")
    assert (module.title, module.script.arguments) == ("pkg.train ×2", ("--lr", "3"))
    assert command_of(module) == "dlojz run -m pkg.train --nproc 2 -- --lr 3"
    whole = RunConfig.of_script("-m pkg").script
    assert whole is not None and whole.path == str(package / "__main__.py")
    for words, title in (
        (["python", "-u", "pkg/train.py", "--lr", "3"], "train.py"),
        (["python", "-m", "pkg.train"], "pkg.train"),
        (["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "pkg/train.py"], "train.py"),
        (["python", "-m", "torch.distributed.run", "-m", "pkg.train"], "pkg.train"),
        (["env", "true"], "env"),
    ):
        config = RunConfig.of_script(words[0], words[1:])
        assert config.script is not None
        assert (config.title, list(config.script.command)) == (title, words)
        assert command_of(config).startswith("dlojz run -- ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.py", "'missing.py' is no file"),
        ("notes.txt", "'notes.txt' is no Python script"),
        ("folder", "'folder' is a folder without __main__.py"),
        ("-m nowhere.train", "there is no module 'nowhere.train' to run here"),
        ("-m folder", "there is no module 'folder' to run here"),
    ],
)
def test_of_script_says_what_a_script_is(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LabError, match=said):
        RunConfig.of_script(name)
