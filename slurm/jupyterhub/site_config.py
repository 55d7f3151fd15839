"""JupyterHub of a site: each student's server is a SLURM job on a kind of node that a machine file describes.

A beginning to adapt, not a whole installation: users, certificates and the address are the site's own (README.md). What
is asked of SLURM comes from the clusters' files (`dlojz machines`), the same that `dlojz.run(…, on="slurm")` reads.

    DLOJZ_HUB_PROFILES=name,other   machine files that students may choose from (default: those of this cluster)
    DLOJZ_HUB_PYTHON=/path/python   interpreter on the nodes that has dlojz and batchspawner (default: the hub's own)

Invariants: a job holds what the form offers and nothing else, however it is asked for; a scheduler that does not answer
says nothing of a server; commands that run as a student see nothing of the hub's environment.
"""

import asyncio
import html
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from batchspawner import JobStatus, MultiSlurmSpawner
from tornado.web import HTTPError
from traitlets import Unicode

from dlojz.base.language import LANGUAGES
from dlojz.hardware.clusters import here, machine
from dlojz.running.slurm.slurm_queue import explain_refusal, standing_of

SINGLEUSER = Path(__file__).resolve().parent / "singleuser.py"
PYTHON = os.environ.get("DLOJZ_HUB_PYTHON", sys.executable)
NAMES = [name for name in os.environ.get("DLOJZ_HUB_PROFILES", "").split(",") if name] or here()
PROFILES = {name: machine(name) for name in NAMES}
MOST_HOURS, USUAL_HOURS = 8, 2
IDLE_KERNEL_S, IDLE_SERVER_S = 3600, 2 * 3600  # a server that nobody uses gives its node back
LOOK_S, ASK_AGAIN = 5, 60
ACCOUNT = re.compile(r"[A-Za-z0-9_.-]{0,40}(@[A-Za-z0-9_-]{1,30})?")
ASKED = ("machine", "hours", "account", "language")
LANGUAGE_NAMES = {"en": "English", "fr": "français"}


class Student(MultiSlurmSpawner):
    """One place on a node, of the kind and for the hours that the student chooses from a form."""

    req_language = Unicode("en")
    req_constraint = Unicode("")
    req_nomultithread = Unicode("")

    def _options_form_default(self):
        kinds = "".join(
            f'<option value="{html.escape(n)}">{html.escape(m.title)}</option>' for n, m in PROFILES.items()
        )
        languages = "".join(
            f'<option value="{name}">{LANGUAGE_NAMES.get(name, name)}</option>' for name in reversed(LANGUAGES)
        )
        most = max((hours_of(one) for one in PROFILES.values()), default=1)
        usual = min(USUAL_HOURS, *(hours_of(one) for one in PROFILES.values()), MOST_HOURS)
        row = '<div class="mb-3"><label class="form-label" for="{0}">{1}</label>{2}</div>'.format
        return (
            row("machine", "Machine", f'<select id="machine" name="machine" class="form-select">{kinds}</select>')
            + row(
                "hours",
                "Hours / heures",
                f'<input id="hours" name="hours" type="number" value="{usual}" min="1" max="{most}" '
                'class="form-control">',
            )
            + row(
                "account",
                "Account, if you have several / compte, si vous en avez plusieurs",
                '<input id="account" name="account" class="form-control">',
            )
            + row(
                "language",
                "Language / langue",
                f'<select id="language" name="language" class="form-select">{languages}</select>',
            )
        )

    def options_from_form(self, formdata):
        asked = {name: formdata.get(name, [""])[0] for name in ASKED}
        self.choose(asked)  # a refusal is then told on the form itself
        return asked

    def choose(self, asked):
        """Put what was asked for into the job; whatever is not on offer is refused, from the form or from the API."""
        if foreign := sorted(set(map(str, asked)) - set(ASKED)):
            raise ValueError(f"{foreign[0]!r} is not on offer: choose one of {', '.join(ASKED)}")
        words = {name: str(asked.get(name) or "") for name in ASKED}
        chosen = PROFILES.get(words["machine"] or next(iter(PROFILES), ""))
        account, language = words["account"], words["language"] or LANGUAGES[0]
        if chosen is None:
            raise ValueError(f"there is no such machine: choose one of {', '.join(PROFILES)}")
        most = hours_of(chosen)
        hours = words["hours"] or str(min(USUAL_HOURS, most))
        if not (hours.isascii() and hours.isdecimal()) or not 1 <= int(hours) <= most:
            raise ValueError(f"hours on {chosen.title} are a whole number from 1 to {most}")
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
        self.default_url = f"/lab/tree/notebooks/{language}"

    async def start(self):
        """Send the job and wait for its server; a job that ends before its server answers is told at once."""
        number, starting = "", asyncio.ensure_future(super().start())
        try:
            while not (await asyncio.wait([starting], timeout=LOOK_S))[0]:
                number = self.job_id or number
                if number and self.port == 0 and await self.query_job_status() == JobStatus.NOTFOUND:
                    break
            else:
                return starting.result()
        except RuntimeError as error:  # what batchspawner raises for a job that went away
            number = self.job_id or number
            self.log.warning("%s", error)
        finally:
            starting.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await starting
        self.clear_state()
        where = f"jupyterhub-{number}.log" if number else "jupyterhub-….log"
        raise HTTPError(
            500,
            f"The job {number} ended before its server answered: {where} in your home folder says why. / Le travail "
            f"s’est terminé avant que son serveur ne réponde : {where}, dans votre dossier personnel, dit pourquoi.",
        )

    async def submit_batch_script(self):
        try:
            return await super().submit_batch_script()
        except RuntimeError as error:
            raise HTTPError(503, f"{error} — {explain_refusal(str(error))}".removesuffix(" — ")) from None

    async def cancel_batch_job(self):
        """End the job; a scheduler that is away is asked again, since a hub that forgets a job leaves it to run."""
        for left in reversed(range(ASK_AGAIN)):
            try:
                await super().cancel_batch_job()
                break
            except RuntimeError as error:
                if "Invalid job id" in str(error):
                    break
                self.log.warning("job %s cannot be cancelled yet: %s", self.job_id, error)
                if not left:
                    raise
            await asyncio.sleep(LOOK_S)

    async def _get_batch_script(self, **subvars):
        """The job; what was chosen stands above what was asked for, which batchspawner has laid over it."""
        return await super()._get_batch_script(**{**subvars, **self.get_req_subvars()})

    async def run_command(self, cmd, input=None, env=None):  # noqa: A002 - its name there
        """Run a command of the scheduler as the student: with their own environment, and never without words."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "SLURM_CONF") if name in os.environ}
        try:
            return await super().run_command(cmd, input=input, env=env or kept)
        except (RuntimeError, OSError) as error:
            raise RuntimeError(str(error) or f"no answer from {cmd}") from None

    def state_ispending(self):
        return self._word() == "CONFIGURING" or standing_of(self._word()) == "pending"

    def state_isrunning(self):
        return self._word() != "CONFIGURING" and standing_of(self._word()) == "running"

    def state_isunknown(self):
        """Nothing but the end of a job, or that there is none of this number, means that a server is gone."""
        silent = standing_of(self._word()) == "unknown" and "Invalid job id" not in (self.job_status or "")
        return bool(self._word()) and silent

    def _word(self):
        return (self.job_status or "").partition(" ")[0]

    def get_env(self):
        kept = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
        return {**super().get_env(), **kept, "DLOJZ_LANG": self.req_language}


def apply(spawner, asked):
    """What was asked for, from the form or from the API, put into the job."""
    try:
        spawner.choose(asked)
    except ValueError as error:
        raise HTTPError(400, str(error)) from None


def hours_of(chosen):
    """The longest that a server may be asked for on a machine, in whole hours."""
    return max(1, int(min(MOST_HOURS, chosen.max_hours)))


c = get_config()  # noqa: F821 - given by JupyterHub
c.JupyterHub.spawner_class = Student
c.JupyterHub.cleanup_servers = False  # a hub that is started again finds the servers it had
c.ConfigurableHTTPProxy.should_start = False  # and the proxy is a separate service: see README.md
c.JupyterHub.hub_ip = "0.0.0.0"  # the nodes must reach it
c.Spawner.apply_user_options = apply
c.Spawner.cmd = ["jupyterhub-singleuser"]
c.BatchSpawnerBase.batchspawner_singleuser_cmd = f"{PYTHON} {SINGLEUSER} batchspawner-singleuser"
c.Spawner.args = [
    f"--MappingKernelManager.cull_idle_timeout={IDLE_KERNEL_S}",
    f"--ServerApp.shutdown_no_activity_timeout={IDLE_SERVER_S}",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.news_url=None",
]
c.BatchSpawnerBase.exec_prefix = "runuser -u {username} --" if os.geteuid() == 0 else "sudo -n -E -u {username}"
c.BatchSpawnerBase.startup_poll_interval = LOOK_S  # a class that waits in the queue asks the scheduler no more often
c.Spawner.poll_interval = 120
c.Spawner.start_timeout = 15 * 60  # a job may wait in the queue
c.Spawner.http_timeout = 120
c.Student.batch_script = """#!/bin/bash
#SBATCH --job-name=jupyterhub-{{username}}
#SBATCH --output={{homedir}}/jupyterhub-%j.log
#SBATCH --chdir={{homedir}}
#SBATCH --export={{keepvars}}
#SBATCH --no-requeue
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
set -eo pipefail
{{prologue}}
exec {{cmd}}
"""
