"""Machine files: what a cluster's scheduler must be told, one TOML file per cluster and kind of node.

Layer 5. Invariant: a machine that exists has been checked word by word, so that nothing in its file can become another
line of a job script; whatever is particular to a site stands in its file, and nothing of it in the code.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

import dlojz
from dlojz.hardware import DEVICES
from dlojz.schema import Contract, LabError, one_of
from dlojz.text import say

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}$"
_OPTIONAL_NAME = r"^([A-Za-z0-9_][A-Za-z0-9_.@+,&|-]{0,63})?$"
_WORD = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]{0,63}(?=/|$))?[A-Za-z0-9@._/:=+,-]{0,200}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_COMMANDS = ("module", "source", "conda", "ulimit")
TEMPLATE = "template"


class Qos(Contract):
    """A quality of service: a queue with limits of its own."""

    name: str = Field(pattern=NAME_PATTERN, description="as the scheduler knows it")
    max_hours: float = Field(gt=0, description="longest job")
    max_gpus: int | None = Field(None, ge=1, description="GPUs of one job; without it, no limit")


class Machine(Contract):
    """One kind of node of a cluster, and how jobs are sent there."""

    schema_version: Literal[1] = 1
    name: str = Field(pattern=NAME_PATTERN, description="of the file, without .toml")
    title: str = Field(max_length=200, description="what people call it")
    source: str = Field(max_length=500, description="where its figures are from")
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="when they were looked up")
    cluster: str = Field("", pattern=_OPTIONAL_NAME, description="ClusterName of slurm.conf; chosen by itself there")
    partition: str = Field("", pattern=_OPTIONAL_NAME)
    constraint: str = Field("", pattern=_OPTIONAL_NAME, description="feature that the nodes must have")
    reservation: str = Field("", pattern=_OPTIONAL_NAME, description="of a course, say")
    account_suffix: str = Field("", pattern=r"^(@[A-Za-z0-9_-]{1,30})?$", description="end of every account's name")
    account_variable: str = Field("", pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,63})?$", description="holds the account")
    qos: tuple[Qos, ...] = Field((), description="the first that fits is asked for")
    max_hours: float = Field(gt=0, description="longest job of the partition")
    default_minutes: int = Field(10, ge=1, description="time limit where none is asked for")
    max_nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1, le=64, description="ranks of a full node, where it has no GPU")
    gres: str = Field("gpu", pattern=r"^(gpu(:[A-Za-z0-9_.-]{1,40})?)?$", description="empty: the nodes have no GPU")
    cpus_per_gpu: int = Field(ge=1)
    memory_gib_per_node: int | None = Field(None, ge=1, description="without it, the scheduler's own share is taken")
    device: str = Field(description="device of the nodes (see `dlojz memory --help`), or cpu")
    nomultithread: bool = Field(False, description="one thread per physical core")
    exclusive: bool = Field(False, description="whole nodes, billed as such")
    setup: tuple[tuple[str, ...], ...] = Field((), description="commands before the ranks start, as lists of words")
    environment: dict[str, str] = Field(default_factory=dict, description="variables that the ranks find")
    python: str = Field("", description="interpreter; without it, the one that submits")
    normalised_hour_factor: float | None = Field(None, gt=0, description="hours billed per GPU-hour")
    interconnect: str = Field("", max_length=300)

    @model_validator(mode="after")
    def _words_are_words(self) -> Self:
        if self.device != "cpu" and self.device not in DEVICES:
            raise LabError(one_of("device", self.device, ["cpu", *DEVICES]))
        for line in self.setup:
            if not line or line[0] not in _COMMANDS:
                raise LabError(one_of("setup command", line[0] if line else "", _COMMANDS))
        words = [(f"setup {' '.join(line)!r}", word) for line in self.setup for word in line]
        words += [(f"environment {name}", value) for name, value in self.environment.items()]
        words += [("python", self.python)]
        for where, word in words:
            if not _WORD.fullmatch(word) or (not word and where != "python"):
                raise LabError(
                    say(
                        en=f"{where} holds {word!r}, which is no plain word: letters, digits and @ . _ / : = + , - "
                        "may be there, after $NAME at its beginning.",
                        fr=f"{where} contient {word!r}, qui n’est pas un simple mot : lettres, chiffres et "
                        "@ . _ / : = + , - sont permis, après $NOM au début.",
                    )
                )
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise LabError(
                    say(
                        en=f"environment holds the name {name!r}, but a variable's name is made of letters, digits "
                        "and _.",
                        fr=f"environment contient le nom {name!r}, or un nom de variable est fait de lettres, de "
                        "chiffres et de _.",
                    )
                )
        return self


def folders() -> list[Path]:
    """Where machine files are looked for: the folders of `$DLOJZ_MACHINES`, then those of the checkout."""
    named = [Path(part).expanduser() for part in os.environ.get("DLOJZ_MACHINES", "").split(os.pathsep) if part]
    return [*named, Path(dlojz.__file__ or "").resolve().parent.parent / "slurm" / "machines"]


def machine_files() -> dict[str, Path]:
    """All machine files by name, the template left out; of two of one name the first folder's counts."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.toml")):
            if path.stem != TEMPLATE:
                found.setdefault(path.stem, path)
    return found


def machine(name: str) -> Machine:
    """The machine of this name.

    Raises:
        LabError: if no file has this name (those there are get listed), or the file is not legal.
    """
    files = machine_files()
    if name not in files:
        raise LabError(one_of("machine", name, files) if files else _no_machine())
    return read_machine(files[name])


def read_machine(path: Path) -> Machine:
    """The machine that a file describes.

    Raises:
        LabError: if it cannot be read, is no TOML, or holds an unknown key or an illegal value.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return _from_toml(path.stem, data)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise LabError(
            say(
                en=f"the machine file {path.name} cannot be read: {why}.",
                fr=f"le fichier de machine {path.name} ne peut pas être lu : {why}.",
            )
        ) from None
    except LabError as error:
        raise LabError(
            say(
                en=f"the machine file {path.name} is refused: {error}",
                fr=f"le fichier de machine {path.name} est refusé : {error}",
            )
        ) from None


def _from_toml(name: str, data: dict[str, Any]) -> Machine:
    legal = sorted(set(Machine.model_fields) - {"name", "schema_version"})
    if "name" in data:  # a second name would be one too many
        raise LabError(one_of("key", "name", legal))
    for key in data:
        if key not in Machine.model_fields:
            raise LabError(one_of("key", key, legal))
    listed = data.get("qos", [])
    if not isinstance(listed, list):
        raise LabError(say(en="qos is a list of [[qos]] tables.", fr="qos est une liste de tables [[qos]]."))
    return Machine(**{**data, "name": name, "qos": tuple(Qos.from_dict(entry) for entry in listed)})


def here() -> list[str]:
    """Names of the machines of the cluster that this computer belongs to, by `ClusterName` of slurm.conf."""
    cluster = cluster_name()
    return [] if not cluster else [name for name in machine_files() if _cluster_of(name) == cluster]


def _cluster_of(name: str) -> str:
    try:
        return machine(name).cluster
    except LabError:  # another site's damaged file is no reason to stop here
        return ""


def cluster_name() -> str:
    """`ClusterName` of this computer's slurm.conf; empty where there is none to read."""
    for path in filter(None, [os.environ.get("SLURM_CONF"), "/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf"]):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
        if found:
            return found[1]
    return ""


def choose(name: str | None, fits: Iterable[str] | None = None) -> Machine:
    """The machine to send to: the one named, else `$DLOJZ_MACHINE`, else this cluster's, else the only one there is.

    Args:
        fits: names that the run fits on, where several are of this cluster; the first is taken.

    Raises:
        LabError: if none is named and there is more than one to choose from.
    """
    wanted = name or os.environ.get("DLOJZ_MACHINE")
    if wanted:
        return machine(wanted)
    own = here()
    candidates = own or list(machine_files())
    if len(candidates) == 1:
        return machine(candidates[0])
    fitting = [one for one in candidates if fits is not None and one in set(fits)] if own else []
    if fitting:
        return machine(fitting[0])
    if not candidates:
        raise LabError(_no_machine())
    raise LabError(
        say(
            en=f"several machines could be meant ({', '.join(candidates)}): say which, with machine='NAME' or "
            "$DLOJZ_MACHINE; `dlojz machines` describes them.",
            fr=f"plusieurs machines sont possibles ({', '.join(candidates)}) : dites laquelle, avec machine='NOM' ou "
            "$DLOJZ_MACHINE ; `dlojz machines` les décrit.",
        )
    )


def _no_machine() -> str:
    return say(
        en="there is no machine file: copy slurm/machines/template.toml, fill it in, and name its folder in "
        "$DLOJZ_MACHINES.",
        fr="il n’y a pas de fichier de machine : copiez slurm/machines/template.toml, remplissez-le, et donnez son "
        "dossier dans $DLOJZ_MACHINES.",
    )
