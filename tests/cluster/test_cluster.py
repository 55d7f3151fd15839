"""The test cluster itself: what all other tests here rely on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def test_tasks_run_on_two_nodes_and_know_their_rank(slurm: Any) -> None:
    code = "import idr_torch as i; print(i.rank, i.world_size, i.local_rank)"
    done = subprocess.run(
        ["srun", "-N", "2", "-n", "4", "--ntasks-per-node=2", "-l", sys.executable, "-W", "ignore", "-c", code],
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0: 0 4 0", "1: 1 4 1", "2: 2 4 0", "3: 3 4 1"]
