"""A hub on this machine, for a teacher to try and for the tests: proxy, hub, two students, in one folder.

python start.py [--folder FOLDER] [--port PORT] [--users ada:fr,grace:en] [--slurm]

As root the students are users of the system, in a namespace of their own: /etc/passwd, which is bound over there, is
not changed, no process can stay behind, and Python may lie where they could not reach it (/root). Invariant: when this
process ends, however, so does all that it has started. A hub that dies is started again; the servers do not notice.

With --slurm (root only) the servers are jobs of a test cluster that is started with the hub, as site_config.py has it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from dlojz.base.machine import PARENT_VARIABLE, adopt_orphans, die_with_parent

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROXY = Path(sys.prefix) / "node" / "node_modules" / ".bin" / "configurable-http-proxy"
FIRST_UID = 61001
INSIDE = "DLOJZ_HUB_INSIDE"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system gives to clients."""
    found: list[int] = []
    for port in range(18000 + secrets.randbelow(6000), 32000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise SystemExit("no free port was found")


def write_private(path: Path, text: str) -> None:
    """A file that only its owner may read, from its first byte on."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def told(folder: Path, users: dict[str, str], port: int | None) -> dict[str, object]:
    """What the hub is told: addresses, and who may come in; passwords stay what they were."""
    kept: dict[str, dict[str, str]] = {}
    with suppress(OSError, ValueError, KeyError):
        kept = json.loads((folder / "hub.json").read_text(encoding="utf-8"))["users"]
    public, hub, proxy = free_ports(3)
    return {
        "folder": str(folder),
        "url": f"http://127.0.0.1:{port or public}",
        "hub_url": f"http://127.0.0.1:{hub}",
        "proxy_url": f"http://127.0.0.1:{proxy}",
        "proxy_token": secrets.token_hex(16),
        "users": {
            name: {"language": language, "password": kept.get(name, {}).get("password") or secrets.token_hex(4)}
            for name, language in users.items()
        },
    }


def closed_folders(path: Path) -> Iterator[Path]:
    """The folders above a path that a student could not pass through, outermost first."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            yield folder


def open_the_way(needed: list[Path], scratch: Path) -> None:
    """Inside the namespace only: where a folder is closed, show an open one with nothing in it but what is needed."""
    for number, closed in enumerate(sorted({next(closed_folders(path), path) for path in needed} - set(needed))):
        within = [path for path in needed if path.is_relative_to(closed)]
        kept = [scratch / f"{number}-{index}" for index in range(len(within))]
        for path, place in zip(within, kept, strict=True):
            place.mkdir(parents=True, exist_ok=True)
            _mount("--bind", str(path), str(place))
        _mount("-t", "tmpfs", "-o", "mode=755", "none", str(closed))
        for path, place in zip(within, kept, strict=True):
            path.mkdir(parents=True, exist_ok=True)
            _mount("--bind", str(place), str(path))


def make_users(folder: Path, names: list[str]) -> None:
    """Inside the namespace only: users of the system, each with a home that others cannot enter."""
    lines = [f"{name}:x:{uid}:{uid}::{folder / 'home' / name}:/bin/bash\n" for uid, name in enumerate(names, FIRST_UID)]
    groups = [f"{name}:x:{uid}:\n" for uid, name in enumerate(names, FIRST_UID)]
    for original, added in (("/etc/passwd", lines), ("/etc/group", groups)):
        own = folder / Path(original).name
        own.write_text(
            Path(original).read_text(encoding="utf-8").rstrip("\n") + "\n" + "".join(added), encoding="utf-8"
        )
        own.chmod(0o644)
        _mount("--bind", str(own), original)
    for uid, name in enumerate(names, FIRST_UID):
        home = folder / "home" / name
        home.mkdir(mode=0o700, exist_ok=True)
        os.chown(home, uid, uid)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def start_cluster(folder: Path) -> None:
    """A SLURM with two nodes in the same namespace, so that it knows the students."""
    sys.path.insert(0, str(HERE.parent))
    from cluster import Cluster, obstacle

    if problem := obstacle():
        raise SystemExit(problem)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o755)
    Cluster(folder).start()
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")


def serve(folder: Path, hub: dict[str, object], config: Path) -> None:
    """Proxy and hub until a signal comes; a hub that ends is started again."""
    adopt_orphans()
    os.umask(0o077)  # the hub's data base and log are nobody else's business
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("JUPYTER", "JPY", "DLOJZ"))},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "DLOJZ_HUB": str(folder / "hub.json"),
        "DLOJZ_HUB_CONFIG": str(config),
        "CONFIGPROXY_AUTH_TOKEN": str(hub["proxy_token"]),
    }
    port, api = (str(hub[name]).rpartition(":")[2] for name in ("url", "proxy_url"))
    proxy = [str(PROXY), "--ip=127.0.0.1", f"--port={port}", "--api-ip=127.0.0.1", f"--api-port={api}"]
    proxy += [f"--default-target={hub['hub_url']}", f"--error-target={hub['hub_url']}/hub/error", "--log-level=warn"]
    commands = [proxy, [sys.executable, "-m", "jupyterhub", f"--config={config}"]]
    with open(folder / "hub.log", "ab") as log:

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread exists here
            )

        started = [start(command) for command in commands]
        while True:
            for number, process in enumerate(started):
                if process.poll() is not None:
                    started[number] = start(commands[number])
            time.sleep(1)


def end_all() -> None:
    """End every process below this one: students' servers and their trainings too."""
    for end in (psutil.Process.terminate, psutil.Process.kill):
        below = psutil.Process().children(recursive=True)
        for process in below:
            with suppress(psutil.Error):
                end(process)
        psutil.wait_procs(below, timeout=3)


def enter(words: list[str]) -> int:
    """This program again, as the first process of new namespaces: with it everything in them ends."""
    command = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    inner = subprocess.Popen(
        [*command, sys.executable, __file__, *words],
        env={**os.environ, INSIDE: "1"},
        preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread exists here
    )
    try:
        return inner.wait()
    finally:
        if inner.poll() is None:
            inner.kill()
            inner.wait()


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="a JupyterHub on this machine, to try the labs as a student")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / f"dlojz-hub-{os.geteuid()}")
    parser.add_argument("--port", type=int)
    parser.add_argument("--users", default="ada:fr,grace:en", help="name:language, …")
    parser.add_argument("--slurm", action="store_true", help="each server is a job of a test cluster (root, Debian)")
    given = parser.parse_args(words)
    if PARENT_VARIABLE in os.environ:  # whoever started it, such as a test, wants it to end with that process
        die_with_parent()
        del os.environ[PARENT_VARIABLE]
    users = {name: language or "en" for name, _, language in (one.partition(":") for one in given.users.split(","))}
    if bad := [
        name for name in users if not (name.isascii() and name.replace("-", "").isalnum() and name[0].isalpha())
    ]:
        raise SystemExit(f"a student is named in letters, digits and dashes, but {bad[0]!r} was received")
    if not PROXY.exists():
        raise SystemExit(f"{PROXY} is missing: `make hub` installs it where node and npm are there")
    if given.slurm and os.geteuid() != 0:
        raise SystemExit("--slurm starts a test cluster, which only root can: leave it out")
    signal.signal(signal.SIGTERM, _stop)
    folder: Path = given.folder.absolute()
    folder.mkdir(mode=0o755, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise SystemExit(f"{folder} belongs to somebody else: give another --folder")
    (folder / "home").mkdir(mode=0o755, exist_ok=True)
    try:
        if os.geteuid() == 0 and not os.environ.get(INSIDE):
            if shutil.which("unshare") is None:
                raise SystemExit(
                    "as root the hub needs `unshare` (Debian's util-linux): install it, or use a plain user"
                )
            return enter(words)
        if os.geteuid() == 0:
            die_with_parent()
            open_the_way([Path(sys.base_prefix).resolve(), ROOT, Path(sys.prefix).resolve()], folder / "ways")
            make_users(folder, list(users))
            if given.slurm:
                start_cluster(folder / "cluster")
        else:
            for name in users:
                (folder / "home" / name).mkdir(mode=0o700, exist_ok=True)
        hub = told(folder, users, given.port)
        write_private(folder / "hub.json", json.dumps(hub))
        print(f"hub: {hub['url']}  (log: {folder / 'hub.log'}; stop with Ctrl-C)")
        for name, one in hub["users"].items():  # type: ignore[attr-defined]
            print(f"  user {name}  password {one['password']}  notebooks in {one['language']}")
        sys.stdout.flush()
        serve(folder, hub, HERE / ("local_site_config.py" if given.slurm else "local_config.py"))
    except KeyboardInterrupt:
        return 0
    finally:
        end_all()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
