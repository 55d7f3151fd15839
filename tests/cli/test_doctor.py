"""`dlojz doctor` on libraries and GPUs: each missing library has its sentence, and no traceback is shown."""

import os
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from dlojz.base import machine
from dlojz.base.language import use_language
from dlojz.base.machine import MemoryLimit
from dlojz.base.requirements import requirements_of
from dlojz.cli import doctor
from dlojz.cli.doctor import has_kernels, uses_of_groups

CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
MODULES = {"scikit-learn": "sklearn"}
HIDDEN = """
import importlib.metadata as metadata, sys
distribution, module = sys.argv[1:]
version_of = metadata.version
def version(name):
    if name == distribution:
        raise metadata.PackageNotFoundError(name)
    return version_of(name)
metadata.version = version
sys.modules[module] = None
from dlojz.cli.main import main
try:
    from dlojz.cli import doctor
    doctor._gloo = lambda: doctor.Check("gloo", "ok", "")
except ModuleNotFoundError:
    pass
sys.exit(main(["doctor"]))
"""


def test_a_gloo_that_adds_where_a_mean_is_asked_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._gloo().state == "ok"
    monkeypatch.setattr(doctor, "GLOO_RANK", doctor.GLOO_RANK.replace("ReduceOp.AVG", "ReduceOp.SUM"))
    told = doctor._gloo()
    assert told.state == "warning" and "set_force_sum_reduction_for_comms" in told.advice


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (CUDA_13, (7, 0), False),  # V100
        (CUDA_13, (8, 0), True),
        (CUDA_13, (8, 9), True),  # sm_86 runs on 8.9
        (CUDA_13, (9, 0), True),
        (CUDA_13, (12, 1), True),
        (("sm_50", "sm_70", "sm_80"), (7, 0), True),
        (("sm_80",), (9, 0), False),  # machine code of another major version
        (("compute_80",), (9, 0), True),
        (("sm_90a",), (8, 0), False),
        ((), (8, 0), False),
    ],
)
def test_a_torch_has_kernels_for_a_gpu_or_not(built: Any, capability: tuple[int, int], runs: bool) -> None:
    assert has_kernels(built, capability) is runs


def test_each_group_of_the_metadata_is_looked_at() -> None:
    assert {name for name, _ in requirements_of("")} >= {"torch", "numpy", "pydantic", "rich", "scipy", "idr-torch"}
    assert {name for name, _ in requirements_of("labs")} >= {"jupyterlab", "ipyparallel"}
    assert all(requirements_of(group) for group in uses_of_groups())


@pytest.mark.parametrize("language", ["en", "fr"])
@pytest.mark.parametrize("group", list(uses_of_groups()))
def test_doctor_names_each_missing_library_with_what_installs_it(
    group: str, language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_language(language)
    version_of = doctor.version
    for distribution, bounds in requirements_of(group):

        def version(name: str, hidden: str = distribution) -> str:
            if name == hidden:
                raise PackageNotFoundError(name)
            return version_of(name)

        monkeypatch.setattr(doctor, "version", version)
        check = doctor._libraries(group)
        assert distribution in check.found
        assert "pip install" in check.found + check.advice and distribution + bounds in check.found + check.advice
        assert check.state == ("problem" if not group else "ok" if group in doctor.OPTIONAL else "warning")


@pytest.mark.parametrize(("here", "told"), [("2.7.1", "torch 2.7.1 (>=2.8)"), ("2.8.0+cpu", ""), ("2.13.0", "")])
def test_doctor_names_a_library_that_is_too_old(here: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: here)
    assert doctor._missing("torch", ">=2.8") == told


@pytest.mark.parametrize(
    "distribution",
    [name if name == "torch" else pytest.param(name, marks=pytest.mark.nightly) for name, _ in requirements_of("")],
)
def test_requirements_of_the_core_that_are_missing_are_told_without_a_traceback(distribution: str) -> None:
    module = MODULES.get(distribution, distribution.replace("-", "_"))
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, distribution, module], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert distribution in done.stdout + done.stderr and "pip install" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "state", "advice"),
    [("torchvision", "warning", "pip install --no-deps --force-reinstall torch=="), ("deepspeed", "problem", "")],
)
def test_doctor_names_a_library_that_is_there_and_does_not_import(
    name: str, state: str, advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a process that has not mended it: what a script of one's own would meet."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = tmp_path / f"{name}.py"
    module.write_text("__version__ = '9.8.7'\n")
    assert (doctor._imported(name).state, doctor._imported(name).found) == ("ok", "9.8.7")
    module.write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    check = doctor._imported(name)
    assert check.state == state and advice in check.advice
    assert check.found.endswith("does not import: RuntimeError: operator torchvision::nms does not exist")
    module.write_text("import nothing_of_that_name\n")
    other = doctor._imported(name)
    assert (other.state, other.advice) == ("problem", "") and "nothing_of_that_name" in other.found


@pytest.mark.parametrize("own_folder", [True, False])
def test_a_lock_that_a_killed_build_left_is_named_with_what_removes_it(
    own_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that the user names, or in torch's own, which has one folder more for each Python."""
    if own_folder:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    else:
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr(machine, "extensions_folder", lambda: tmp_path)
    folder = tmp_path if own_folder else tmp_path / "py311_cpu"
    locks = {name: folder / name / "lock" for name in ("cpu_adam left", "held", "young")}
    for name, lock in locks.items():
        lock.parent.mkdir(parents=True)
        lock.touch()
        if name != "young":
            os.utime(lock, (0, 0))
    with locks["held"].open("rb"):
        check = doctor._extensions()
    assert check.state == "problem" and check.found == str(locks["cpu_adam left"])
    command = check.advice.partition("now: ")[2]
    assert shlex.split(command) == ["rm", str(locks["cpu_adam left"])]
    subprocess.run(shlex.split(command), check=True)
    with locks["held"].open("rb"):
        assert doctor._extensions().state == "ok"


def test_doctor_names_a_home_where_extensions_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc")  # where nobody can make a file, root neither
    check = doctor._extensions()
    assert check.state == "warning" and check.found.startswith("/proc/.cache/torch_extensions: ")
    assert check.advice.endswith("export TORCH_EXTENSIONS_DIR=FOLDER")


def test_memory_check_says_the_limit_and_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "machine_limit", lambda: MemoryLimit(2**33, "job", "12"))
    monkeypatch.setattr(doctor, "memory_free_bytes", lambda: 6 * 2**30)
    assert "6.00 GiB free of 8.00 GiB, the limit of the SLURM job 12" in str(doctor._memory())
