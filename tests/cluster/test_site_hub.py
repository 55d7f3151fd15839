"""The configuration for a site, on a real SLURM: each student's server is a job, and the scheduler may go away.

Hub, proxy and cluster are started by `start.py --slurm`, in namespaces in which the students are users of the system.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.hubs import START, StartedHub, need, started_hub

LAB = "notebooks/fr/00_getting_started.ipynb"
PATIENCE_S = 600
pytestmark = pytest.mark.timeout(900)
AGAIN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cluster import Cluster
Cluster(Path(sys.argv[2])).start(controller_only=True)
"""


@dataclass(frozen=True)
class Hub(StartedHub):
    """A hub that is up, and the one student who is logged in to it.

    Args:
        web: the student's cookies.
    """

    web: Any

    def ask(self, method: str, path: str, **more: Any) -> Any:
        """What hub or server answer the student; a page of another origin would have no `_xsrf`."""
        where = path.split("/")[1]
        token = next((c.value for c in self.web.cookies if c.name == "_xsrf" and c.path.startswith(f"/{where}")), "")
        return self.web.request(method, self.told["url"] + path, params={"_xsrf": token}, timeout=60, **more)

    def log_in(self) -> Any:
        """The page that follows: the form."""
        self.ask("GET", "/hub/login")
        return self.ask(
            "POST", "/hub/login", data={"username": "ada", "password": self.told["users"]["ada"]["password"]}
        )

    def state(self) -> Any:
        """What the hub says of the student's server; None where it says that there is none, or nothing."""
        answer = self.ask("GET", "/hub/api/users/ada")
        return answer.json()["servers"].get("") if answer.status_code == 200 else None

    def jobs(self) -> list[str]:
        """The queue, as the scheduler tells it: user and state of each job."""
        return self.scheduler("squeue", "-h", "-o", "%U %T %C %b").splitlines()

    def scheduler(self, *words: str) -> str:
        """What a command of the scheduler answers."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "cluster" / "slurm.conf")}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout + done.stderr

    def keep_queue(self) -> None:
        """Wait until the controller has written its jobs down: killed before, it comes back with a job that waits.

        It does so within seconds of a change, so one is made.
        """
        asked_s = time.time()
        [job] = self.scheduler("squeue", "-h", "-o", "%i").split()
        assert self.scheduler("scontrol", "update", f"JobId={job}", "Comment=kept") == ""
        until(lambda: (self.folder / "cluster" / "state" / "job_state").stat().st_mtime > asked_s, self)

    def controller_again(self) -> None:
        """Start slurmctld anew, where it was."""
        inside = ["nsenter", f"--target={self.part('configurable-http-proxy').pid}", "--mount", "--pid"]
        cluster = [str(START.parents[1]), str(self.folder / "cluster")]
        subprocess.run([*inside, sys.executable, "-c", AGAIN, *cluster], check=True, timeout=120)


def until(holds: Callable[[], Any], hub: Hub) -> Any:
    """Wait for something to become true; the limit is only there to end a test that fails."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        if time.monotonic() > deadline_s:
            pytest.fail(f"still not so:\n{hub.log()}")
        time.sleep(0.2)
    return found


def up(hub: Hub) -> bool:
    """Whether the hub itself answers, not its proxy."""
    import requests

    with suppress(requests.RequestException):
        return bool(requests.get(hub.told["hub_url"] + "/hub/api/", timeout=5).ok)
    return False


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Cluster, proxy and hub, up; all of it gone afterwards."""
    if os.geteuid() != 0:
        pytest.skip("a real SLURM, and students that are users of the system, are made by root only")
    import requests

    need(shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin:/sbin"), "slurm-wlm")
    need(importlib.util.find_spec("batchspawner"), "batchspawner (extra test)")
    with started_hub("dlojz-site-", "--slurm", "--users=ada:en", patience_s=PATIENCE_S) as started:
        one = Hub(started.process, started.folder, started.told, requests.Session())
        until(lambda: up(one), one)
        yield one


def test_a_server_is_a_job_and_outlives_hub_and_scheduler(hub: Hub) -> None:
    form = hub.log_in().text
    assert 'name="machine"' in form and 'value="local"' in form and 'name="hours" type="number" value="1"' in form
    refused = hub.ask("POST", "/hub/spawn/ada", data={"machine": "local", "hours": "9"})
    assert "a whole number from 1 to 1" in refused.text
    refused = hub.ask("POST", "/hub/api/users/ada/server", json={"runtime": "99:00:00"})
    assert refused.status_code == 400 and "'runtime' is not on offer" in refused.json()["message"]
    assert hub.jobs() == []

    hub.ask("POST", "/hub/spawn/ada", data={"machine": "local", "hours": "1", "account": "", "language": "fr"})
    until(lambda: (state := hub.state()) and state["ready"], hub)
    owner = (hub.folder / "home" / "ada").stat().st_uid
    assert owner != 0 and hub.jobs() == [f"{owner} RUNNING 2 gres:gpu:1"]
    assert "TimeLimit=01:00:00" in hub.scheduler("scontrol", "show", "job")
    hub.ask("GET", "/user/ada/lab")
    opened = hub.ask("GET", f"/user/ada/api/contents/{LAB}")
    assert opened.json()["content"]["metadata"]["dlojz"]["language"] == "fr"

    hub.keep_queue()
    hub.part("slurmctld").kill()
    killed = hub.part("-m jupyterhub")
    killed.kill()  # a hub that starts looks at every server that it had
    until(lambda: not killed.is_running() and up(hub), hub)
    assert "slurm_load_jobs error" in hub.scheduler("squeue")
    assert until(hub.state, hub)["ready"]
    assert hub.ask("GET", f"/user/ada/api/contents/{LAB}").status_code == 200
    hub.controller_again()
    assert [job.split()[1] for job in hub.jobs()] == ["RUNNING"]

    assert hub.ask("DELETE", "/hub/api/users/ada/server").status_code in (202, 204)
    until(lambda: hub.state() is None and not any("RUNNING" in job for job in hub.jobs()), hub)
