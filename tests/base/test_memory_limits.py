"""The memory limit of the groups around a process, of both versions of cgroups, and whose it is."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlojz.base import machine
from dlojz.base.language import use_language
from dlojz.base.machine import MemoryLimit, exhausted, machine_limit, memory_free_bytes, oom_kills, share_words

GIB = 2**30
V1, V2 = "4:memory:{}\n0::/\n", "0::{}\n"
HYBRID = "5:cpu,memory:{}\n0::/user.slice\n"
NO_LIMIT = "9223372036854771712"
SLURM_V2 = "/system.slice/slurmstepd.scope/job_12/step_0/user/task_0"
Fill = Callable[..., None]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fill:
    """A system of 64 GiB, 40 of them free, whose /proc and /sys are a folder; files are given by their paths."""

    def fill(cgroup: str, **limits: str) -> None:
        monkeypatch.setattr(machine, "_ROOT", tmp_path)
        memory = SimpleNamespace(total=64 * GIB, available=40 * GIB)
        monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
        for path, text in {"proc/self/cgroup": cgroup, **limits}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    return fill


CASES: dict[str, tuple[str, dict[str, str], MemoryLimit]] = {
    "a container, v2": (V2.format("/"), {"memory.max": f"{8 * GIB}\n"}, MemoryLimit(8 * GIB, "container")),
    "a container, v1": (
        V1.format("/"),
        {"memory/memory.limit_in_bytes": f"{8 * GIB}\n"},
        MemoryLimit(8 * GIB, "container"),
    ),
    "no limit, v2": (V2.format("/user.slice"), {"user.slice/memory.max": "max\n"}, MemoryLimit(64 * GIB)),
    "no limit, v1": (
        V1.format("/a"),
        {"memory/a/memory.limit_in_bytes": NO_LIMIT, "memory/memory.limit_in_bytes": NO_LIMIT},
        MemoryLimit(64 * GIB),
    ),
    "a job of SLURM, whose step and task have none, v2": (
        V2.format(SLURM_V2),
        {f"{SLURM_V2[1:]}/memory.max": "max", "system.slice/slurmstepd.scope/job_12/memory.max": str(3 * GIB)},
        MemoryLimit(3 * GIB, "job", "12"),
    ),
    "a job of SLURM, v1": (
        V1.format("/slurm/uid_1000/job_345/step_batch"),
        {
            "memory/slurm/uid_1000/job_345/step_batch/memory.limit_in_bytes": NO_LIMIT,
            "memory/slurm/uid_1000/job_345/memory.limit_in_bytes": str(2 * GIB),
            "memory/slurm/memory.limit_in_bytes": str(50 * GIB),
        },
        MemoryLimit(2 * GIB, "job", "345"),
    ),
    "a user's slice, v2": (
        V2.format("/user.slice/user-1000.slice/session-3.scope"),
        {
            "user.slice/user-1000.slice/session-3.scope/memory.max": "max",
            "user.slice/user-1000.slice/memory.max": str(4 * GIB),
        },
        MemoryLimit(4 * GIB, "slice", "user-1000.slice"),
    ),
    "the server of a hub": (
        V2.format("/system.slice/jupyter-ada.service"),
        {"system.slice/jupyter-ada.service/memory.max": str(GIB), "system.slice/memory.max": str(5 * GIB)},
        MemoryLimit(GIB, "service", "jupyter-ada.service"),
    ),
    "a group of one's own, beside other controllers, in a hybrid system": (
        HYBRID.format("/lab/small"),
        {"memory/lab/small/memory.limit_in_bytes": str(GIB)},
        MemoryLimit(GIB, "cgroup", "/lab/small"),
    ),
    "the outer group has less": (
        V2.format("/a/b"),
        {"a/b/memory.max": str(9 * GIB), "a/memory.max": str(6 * GIB)},
        MemoryLimit(6 * GIB, "cgroup", "/a"),
    ),
    "a container of which the path is told from outside": (
        V2.format("/docker/0123"),
        {"memory.max": str(7 * GIB)},
        MemoryLimit(7 * GIB, "container"),
    ),
    "a path above the root of its namespace": (
        V2.format("/../../x"),
        {"memory.max": str(7 * GIB)},
        MemoryLimit(7 * GIB, "container"),
    ),
    "more than the machine has": (V2.format("/a"), {"a/memory.max": str(99 * GIB)}, MemoryLimit(64 * GIB)),
    "nothing can be read": ("nonsense\n:::\n\0", {"memory.max": "much"}, MemoryLimit(64 * GIB)),
}


@pytest.mark.parametrize("case", CASES)
def test_machine_limit_is_that_of_the_tightest_group_around_the_process(case: str, system: Fill) -> None:
    cgroup, files, limit = CASES[case]
    system(cgroup, **{f"sys/fs/cgroup/{path}": text for path, text in files.items()})
    assert machine_limit() == limit


def test_machine_limit_where_the_groups_are_mounted_elsewhere(system: Fill) -> None:
    """The mount shows the container's own group as its root: /box/1/job_7 lies at /groups/job_7."""
    mounts = "30 20 0:1 / / rw - ext4 /dev/sda rw\n32 31 0:29 /box/1 /groups rw - cgroup cgroup rw,cpu,memory\n"
    files = {"groups/job_7/memory.limit_in_bytes": str(GIB), "sys/fs/cgroup/memory/memory.limit_in_bytes": "1"}
    system(V1.format("/box/1/job_7"), **{"proc/self/mountinfo": mounts}, **files)
    assert machine_limit() == MemoryLimit(GIB, "job", "7")


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "usage", "stat"),
    [
        (V2, "a/b", "memory.max", "memory.current", "anon 1\ninactive_file {}\n"),
        (V1, "memory/a/b", "memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 7\ntotal_inactive_file {}"),
    ],
)
def test_memory_free_bytes_counts_what_the_group_may_still_take(
    cgroup: str, folder: str, limit: str, usage: str, stat: str, system: Fill
) -> None:
    """Of 8 GiB 5 are taken, 2 of which are read files that the kernel gives back: 8 - (5 - 2)."""
    place = f"sys/fs/cgroup/{folder}"
    system(
        cgroup.format("/a/b"),
        **{
            f"{place}/{limit}": str(8 * GIB),
            f"{place}/{usage}": str(5 * GIB),
            f"{place}/memory.stat": stat.format(2 * GIB),
        },
    )
    assert memory_free_bytes() == 5 * GIB


def test_memory_free_bytes_of_a_large_group_is_the_machine_s(system: Fill) -> None:
    system(V2.format("/a"), **{"sys/fs/cgroup/a/memory.max": str(60 * GIB)})
    assert memory_free_bytes() == 40 * GIB


def test_exhausted_is_the_group_only_where_it_came_near_its_limit(system: Fill) -> None:
    files = {"sys/fs/cgroup/a/memory.max": str(4 * GIB), "sys/fs/cgroup/a/memory.events": "oom 3\noom_kill 2\n"}
    system(V2.format("/a"), **files, **{"sys/fs/cgroup/a/memory.peak": str(4 * GIB - 4096)})
    assert exhausted().english == "the control group /a" and oom_kills() == 2
    system(V2.format("/a"), **{"sys/fs/cgroup/a/memory.peak": str(GIB), "proc/vmstat": "nr_free 1\noom_kill 5\n"})
    assert exhausted().english == "the machine" and oom_kills() == 7


def test_oom_kills_are_unknown_where_nothing_tells(system: Fill) -> None:
    system(V1.format("/a"))
    assert oom_kills() is None


def test_share_words_name_the_owner_in_both_languages() -> None:
    job = MemoryLimit(1, "job", "12").code
    assert share_words(job, 1) == "the SLURM job 12"
    assert share_words(job, 4) == "a rank's share of the SLURM job 12 (4 ranks)"
    assert share_words("", 1) == "the machine" and share_words("ulimit", 4) == "`ulimit -v`"
    use_language("fr")
    assert share_words(job, 4) == "le job SLURM 12, part d’un rang (4 rangs)"


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A control group of this machine with a limit of 1500 MiB, two levels below another."""
    root = Path("/sys/fs/cgroup/memory")
    name = f"dlojz-test-{os.getpid()}"
    outer, inner = root / name, root / name / "job_9"
    try:
        inner.mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(1500 * 2**20))
    except OSError:
        for made in (inner, outer):
            if made.is_dir():
                made.rmdir()
        pytest.skip("no control group can be made here (version 1, as root)")
    yield inner
    inner.rmdir()
    outer.rmdir()


def test_machine_limit_in_a_real_group(real_group: Path) -> None:
    code = (
        "import os; open(os.environ['GROUP'] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from dlojz.base.machine import machine_limit, memory_free_bytes\n"
        "print(machine_limit().num_bytes, machine_limit().owner, memory_free_bytes() < 1500 * 2**20)"
    )
    environment = {**os.environ, "GROUP": str(real_group)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(1500 * 2**20), "cgroup", "True"]
