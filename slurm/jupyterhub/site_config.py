"""JupyterHub of a site: each student's server is a SLURM job on a kind of node that a machine file describes.

A beginning to adapt, not a whole installation: users, certificates and the address are the site's own (README.md). What
is asked of SLURM comes from `slurm/machines/*.toml`, the same files that `dlojz.run(…, on="slurm")` reads.

    DLOJZ_HUB_PROFILES=name,other   machine files that students may choose from (default: those of this cluster)
    DLOJZ_HUB_PYTHON=/path/python   interpreter on the nodes that has dlojz and batchspawner (default: the hub's own)
"""

import html
import os
import re
import sys
from pathlib import Path

from batchspawner import SlurmSpawner
from traitlets import Unicode

from dlojz.launch.machines import here, machine
from dlojz.text import LANGUAGES

SINGLEUSER = Path(os.environ.get("DLOJZ_HUB_CONFIG", __file__)).resolve().parent / "singleuser.py"
PYTHON = os.environ.get("DLOJZ_HUB_PYTHON", sys.executable)
NAMES = [name for name in os.environ.get("DLOJZ_HUB_PROFILES", "").split(",") if name] or here()
PROFILES = {name: machine(name) for name in NAMES}
MOST_HOURS = 8
IDLE_KERNEL_S, IDLE_SERVER_S = 3600, 2 * 3600  # a server that nobody uses gives its node back
ACCOUNT = re.compile(r"[A-Za-z0-9_.-]{0,40}(@[A-Za-z0-9_-]{1,30})?")


class Student(SlurmSpawner):
    """One place on a node, of the kind and for the hours that the student chooses from a form."""

    req_language = Unicode("en")
    req_constraint = Unicode("")
    req_nomultithread = Unicode("")

    def _options_form_default(self):
        kinds = "".join(
            f'<option value="{html.escape(n)}">{html.escape(m.title)}</option>' for n, m in PROFILES.items()
        )
        languages = "".join(f"<option>{name}</option>" for name in reversed(LANGUAGES))
        return (
            f'<label>Machine <select name="machine" class="form-control">{kinds}</select></label> '
            f'<label>Hours <input name="hours" type="number" value="2" min="1" max="{MOST_HOURS}" class="form-control">'
            '</label> <label>Account <input name="account" class="form-control"></label> '
            f'<label>Language <select name="language" class="form-control">{languages}</select></label>'
        )

    def options_from_form(self, formdata):
        return {name: formdata.get(name, [""])[0] for name in ("machine", "hours", "account", "language")}

    def choose(self, asked):
        """Put what was asked for into the job; whatever is not on offer is refused, from the form or from the API."""
        chosen = PROFILES.get(asked.get("machine") or next(iter(PROFILES), ""))
        hours, account = str(asked.get("hours") or 2), str(asked.get("account") or "")
        language = asked.get("language") or LANGUAGES[0]
        if chosen is None:
            raise ValueError(f"there is no such machine: choose one of {', '.join(PROFILES)}")
        if not hours.isdecimal() or not 1 <= int(hours) <= min(MOST_HOURS, chosen.max_hours):
            raise ValueError(f"hours are a whole number from 1 to {min(MOST_HOURS, chosen.max_hours):g}")
        if not ACCOUNT.fullmatch(account):
            raise ValueError("an account is made of letters, digits and . _ -")
        if language not in LANGUAGES:
            raise ValueError(f"a language is one of {', '.join(LANGUAGES)}")
        if account and chosen.account_suffix and not account.endswith(chosen.account_suffix):
            account = account.partition("@")[0] + chosen.account_suffix
        fitting = [one.name for one in chosen.qos if int(hours) <= one.max_hours]
        self.req_partition, self.req_constraint = chosen.partition, chosen.constraint
        self.req_reservation, self.req_account = chosen.reservation, account
        self.req_qos = fitting[0] if fitting else ""
        self.req_gres = f"{chosen.gres}:1" if chosen.gres else ""
        self.req_nprocs, self.req_runtime = str(chosen.cpus_per_gpu), f"{int(hours)}:00:00"
        self.req_memory = ""
        if chosen.memory_gib_per_node:
            self.req_memory = f"{max(1, chosen.memory_gib_per_node * 1024 // chosen.gpus_per_node)}M"
        self.req_nomultithread = "yes" if chosen.nomultithread else ""
        self.req_prologue = "\n".join(" ".join(f'"{word}"' for word in line) for line in chosen.setup)
        self.req_language = language

    async def start(self):
        self.choose(self.user_options)
        return await super().start()

    def get_env(self):
        return {**super().get_env(), "DLOJZ_LANG": self.req_language}


c = get_config()  # noqa: F821 - given by JupyterHub
c.JupyterHub.spawner_class = Student
c.JupyterHub.cleanup_servers = False  # a hub that is started again finds the servers it had
c.ConfigurableHTTPProxy.should_start = False  # and the proxy is a service of its own: see README.md
c.JupyterHub.hub_ip = "0.0.0.0"  # the nodes must reach it
c.Spawner.cmd = ["jupyterhub-singleuser"]
c.BatchSpawnerBase.batchspawner_singleuser_cmd = f"{PYTHON} {SINGLEUSER} batchspawner-singleuser"
c.Spawner.default_url = "/lab"
c.Spawner.args = [
    f"--MappingKernelManager.cull_idle_timeout={IDLE_KERNEL_S}",
    f"--ServerApp.shutdown_no_activity_timeout={IDLE_SERVER_S}",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.news_url=None",
]
c.Spawner.start_timeout = 15 * 60  # a job may wait in the queue
c.Spawner.http_timeout = 120
c.Student.batch_script = """#!/bin/bash
#SBATCH --job-name=jupyterhub-{{username}}
#SBATCH --output={{homedir}}/jupyterhub-%j.log
#SBATCH --chdir={{homedir}}
#SBATCH --export={{keepvars}}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={{nprocs}}
#SBATCH --time={{runtime}}
{% if partition %}#SBATCH --partition={{partition}}
{% endif %}{% if constraint %}#SBATCH --constraint={{constraint}}
{% endif %}{% if account %}#SBATCH --account={{account}}
{% endif %}{% if qos %}#SBATCH --qos={{qos}}
{% endif %}{% if reservation %}#SBATCH --reservation={{reservation}}
{% endif %}{% if gres %}#SBATCH --gres={{gres}}
{% endif %}{% if memory %}#SBATCH --mem={{memory}}
{% endif %}{% if nomultithread %}#SBATCH --hint=nomultithread
{% endif %}
set -euo pipefail
{{prologue}}
{{cmd}}
"""
