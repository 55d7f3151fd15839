"""Sends the trainings of test_trainings.py to a cluster of their own, and runs the same on forked ranks here.

python trainings.py FOLDER NAME …    (FOLDER/runs: those of the cluster; FOLDER/sent.json: their names;
                                      FOLDER/here/RANKS/NAME; FOLDER/obstacle: why there can be no cluster)

A cluster of their own, since each takes whole nodes, which other tests would wait for.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
cluster_tests: Any = importlib.import_module("cluster.conftest")
cluster_tests.PATIENCE_S = 1000  # four trainings take both nodes before the long one

from dlojz.base.machine import die_with_parent  # noqa: E402
from dlojz.config.run_config import RunConfig  # noqa: E402
from dlojz.running.folder import read_job  # noqa: E402
from dlojz.running.launch import run, submit_many  # noqa: E402

CONFIGS: dict[str, RunConfig] = {
    "DDP": cluster_tests.config(dp=4),
    "ZeRO-2": cluster_tests.config(dp=4, zero=2, engine="deepspeed"),
    "pipeline": cluster_tests.config(pp=4, micro_batches=4),
    "1-bit Adam": cluster_tests.config(dp=4, engine="by_hand", optimizer="one_bit_adam", warmup_steps=1, steps=4),
}
LONG: RunConfig = cluster_tests.config(dp=2, steps=120)
FIRST_JOB = 501
"""The ranks of a job meet at ports that follow from its number: those of the other cluster are below."""


def another_cluster(folder: Path) -> Any:
    """A cluster that runs beside the one of the other tests."""
    module = cluster_tests.cluster_module()

    class Another(module.Cluster):  # type: ignore[misc, name-defined]
        def _prepare(self) -> None:
            super()._prepare()
            with open(self.folder / "slurm.conf", "a", encoding="utf-8") as configuration:
                configuration.write(f"FirstJobId={FIRST_JOB}\n")

    return Another(folder)


def here(folder: Path, configs: dict[str, RunConfig]) -> subprocess.Popen[bytes]:
    """The same ranks on this machine, forked by one process that has imported torch once."""
    for name, config in configs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(config.to_json())
    [processes] = {config.layout.world_size for config in configs.values()}
    matrix = Path(__file__).resolve().parents[1] / "train" / "matrix.py"
    command = [sys.executable, str(matrix), str(folder), str(processes)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def main(folder: Path, names: list[str]) -> None:
    """The long training and those of these names, in `folder`."""
    die_with_parent()
    configs = {name: CONFIGS[name] for name in names}
    if obstacle := cluster_tests.cluster_module().obstacle():
        (folder / "obstacle").write_text(obstacle)
        return
    runs = folder / "runs"
    local = [here(folder / "here" / "4", configs), here(folder / "here" / "2", {"long": LONG})]
    with tempfile.TemporaryDirectory(prefix="dlojz-slurm-") as name:  # munge wants a folder that others can reach
        Path(name).chmod(0o755)
        cluster = another_cluster(Path(name))
        watcher = cluster.ends_with_this_process()
        try:
            cluster.start()
            os.environ.update(SLURM_CONF=cluster.environment["SLURM_CONF"], DLOJZ_LANG="en")
            sent = submit_many(list(configs.values()), on="slurm", machine="local", root=runs)
            long = run(LONG, on="slurm", machine="local", wait=False, root=runs)
            (folder / "sent.json").write_text(
                json.dumps({**dict(zip(configs, [one.run_id for one in sent], strict=True)), "long": long.run_id})
            )
            cluster_tests.until(lambda: cluster_tests.steps(long) >= 3)
            job = read_job(long.folder)
            assert job is not None
            # What the scheduler does before the time limit.
            cluster_tests.ask(cluster, "scancel", "--signal=USR2", job.job_id)
            for one in (*sent, long):
                cluster_tests.ended(one)
        finally:
            cluster.stop()
            watcher.kill()
            watcher.wait()
    assert [process.wait() for process in local] == [0, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
