"""JupyterHub on one machine: for the tests, and for a teacher who wants to see what students will see (`make hub`).

`start.py` starts proxy and hub with it, and says in $DLOJZ_HUB (a JSON file that only it may read) who may come in.
The proxy is a separate process, and a hub that ends leaves the servers alone: whoever works in a notebook notices
nothing when the hub is started again.
"""

import json
import os
import pwd
import sys
from pathlib import Path
from secrets import compare_digest

from jupyterhub.auth import Authenticator
from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner

HERE = Path(os.environ["DLOJZ_HUB_CONFIG"]).resolve().parent
TOLD = json.loads(Path(os.environ["DLOJZ_HUB"]).read_text(encoding="utf-8"))
IDLE_KERNEL_S, IDLE_SERVER_S = 2 * 3600, 3 * 3600
REAL_USERS = os.geteuid() == 0


class Listed(Authenticator):
    """Those on the list, each with a password of their own."""

    async def authenticate(self, handler, data):
        known = TOLD["users"].get(data["username"])
        right = compare_digest((known or {"password": ""})["password"].encode(), data["password"].encode())
        return data["username"] if known and right else None


def spawner(base):
    """A spawner whose servers start in the student's language, with the notebooks in view."""

    class Student(base):
        async def start(self):
            self.default_url = f"/lab/tree/notebooks/{TOLD['users'][self.user.name]['language']}"
            return await super().start()

        def get_env(self):
            return {**super().get_env(), "DLOJZ_LANG": TOLD["users"][self.user.name]["language"]}

    return Student


c = get_config()  # noqa: F821 - given by JupyterHub
c.JupyterHub.bind_url = TOLD["url"]
c.JupyterHub.hub_bind_url = TOLD["hub_url"]
c.JupyterHub.db_url = "sqlite:///" + TOLD["folder"] + "/hub.sqlite"
c.JupyterHub.cookie_secret_file = TOLD["folder"] + "/cookie_secret"
c.JupyterHub.cleanup_servers = False
c.JupyterHub.authenticator_class = Listed
c.Authenticator.allowed_users = set(TOLD["users"])
c.JupyterHub.log_level = "WARN"

c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = TOLD["proxy_url"]
c.ConfigurableHTTPProxy.auth_token = TOLD["proxy_token"]

# As root each student is a user of the system, who cannot read the others' files. Otherwise all servers run as the one
# who started the hub: good enough to look at, not to keep students apart.
c.JupyterHub.spawner_class = spawner(LocalProcessSpawner if REAL_USERS else SimpleLocalProcessSpawner)
if REAL_USERS:
    for name in TOLD["users"]:
        if pwd.getpwnam(name).pw_uid == 0:
            raise ValueError(f"the student {name} may not be root")
else:
    c.SimpleLocalProcessSpawner.home_dir_template = TOLD["folder"] + "/home/{username}"
c.Spawner.cmd = [sys.executable, str(HERE / "singleuser.py"), "jupyterhub-singleuser"]
c.Spawner.default_url = "/lab"
c.Spawner.args = [
    f"--MappingKernelManager.cull_idle_timeout={IDLE_KERNEL_S}",
    f"--ServerApp.shutdown_no_activity_timeout={IDLE_SERVER_S}",
    "--ServerApp.terminals_enabled=True",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.news_url=None",
]
c.Spawner.start_timeout = c.Spawner.http_timeout = 180
