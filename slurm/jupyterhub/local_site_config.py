"""site_config.py tried on one machine: a hub whose servers are jobs of the test cluster (`start.py --slurm`).

What a site adds to site_config.py is here what local_config.py says: who may come in, addresses, the proxy's address.
"""

from pathlib import Path

c = get_config()  # noqa: F821 - given by JupyterHub
for name in ("local_config.py", "site_config.py"):
    load_subconfig(str(Path(__file__).with_name(name)))  # noqa: F821 - given by JupyterHub
del c.JupyterHub.hub_ip  # the nodes are this machine
c.MultiSlurmSpawner.daemon_resolver = {f"n{node}": "127.0.0.1" for node in range(2)}  # and have no names of their own
c.BatchSpawnerBase.startup_poll_interval = 0.5
