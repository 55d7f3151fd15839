"""Live ranks in an allocation of a real SLURM: they are the tasks of a step, and go with it."""

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json
import os

from dlojz.ranks import Ranks

with Ranks(2) as ranks:
    ranks.execute("x = torch.ones(1) * (rank + 1)\\ndist.all_reduce(x)")
    ranks.execute("import os\\nnode = os.environ['SLURMD_NODENAME']")
    seen = {"sum": [float(value) for value in ranks["x"]], "nodes": ranks["node"]}
    missing = ranks.execute("if rank:\\n    dist.barrier()")[1].trouble
    ended = ranks.execute("import os\\nif rank:\\n    os._exit(3)")[1].trouble
    seen |= {"missing": missing.kind, "ended": ended.kind, "job": os.environ["SLURM_JOB_ID"]}
    ranks.execute("dist.barrier()\\ny = rank")
    seen["anew"] = ranks["y"]
print(json.dumps(seen))
"""


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_tasks_of_an_allocation_are_the_ranks(slurm: Any, nodes: int) -> None:
    done = subprocess.run(
        ["salloc", "-Q", "-N", str(nodes), "-n", "2", sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(set(seen.pop("nodes"))) == nodes
    job = seen.pop("job")
    assert seen == {"sum": [3.0, 3.0], "missing": "missing", "ended": "exit", "anew": [0, 1]}
    # Of this job: other tests of the same cluster may still be ending theirs.
    asked = ["squeue", "-h", "-s", "-o", "%i"]
    steps = subprocess.run(asked, env=slurm.environment, capture_output=True, text=True, check=True).stdout.split()
    assert [one for one in steps if one.split(".")[0] == job] == [], "no step is left"
