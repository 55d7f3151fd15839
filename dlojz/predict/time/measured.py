"""What this machine was measured at, as a file: raw measurements with where, when and with which libraries.

Layer 3. Invariant: the file keeps measurements, not what was made of them, so that a later version reads more out of
them; it carries a checksum of its content, and a file that was altered or cut short is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from dlojz.collectives.measuring import Point
from dlojz.predict.time.measuring import Timed
from dlojz.record import write_atomic
from dlojz.schema import Contract, LabError, parse_json
from dlojz.text import say

MOST_BYTES: Final = 4_000_000
"""A file of this kind has some tens of kilobytes."""
KINDS: Final = {"product": 4, "attention": 4, "convolution": 4, "pass": 1, "launch": 0, "update": 2, "sharded": 2,
                "checkpoint": 2, "ddp": 2, "fsdp2": 2, "fsdp3": 2, "dtensor": 1, "meeting": 0,
                "chain": 3}  # fmt: skip
"""What is timed, and how many numbers its size has; `dlojz.predict.time.measuring` and `measuring_engines` say what."""
NEEDED: Final = ("product", "pass", "launch", "update")


class Setup(Contract):
    """What so many ranks measured at once.

    Raises:
        LabError: if a measurement is missing, or not above 0 s.
    """

    ranks: int = Field(ge=1, le=1024, description="processes that worked at the same time")
    timings: tuple[Timed, ...] = Field(description="computation, on one of them")
    points: tuple[Point, ...] = Field((), description="messages between all of them")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for one in self.timings:
            fits = KINDS.get(one.what) == len(one.size) and all(part > 0 for part in one.size)
            if not (fits and 0 < one.seconds < math.inf):
                raise LabError(
                    say(
                        en=f"a timing has a kind ({', '.join(KINDS)}), its sizes and seconds above 0, but "
                        f"{tuple(one)!r} was received.",
                        fr=f"une mesure a une sorte ({', '.join(KINDS)}), ses tailles et une durée de plus de 0 s, "
                        f"mais {tuple(one)!r} a été reçu.",
                    )
                )
        for point in self.points:
            if not (point.message_bytes > 0 and 0 < point.time_s < math.inf and point.size == self.ranks):
                raise LabError(
                    say(
                        en=f"a message of {self.ranks} ranks has bytes and seconds above 0, but {tuple(point)!r} was "
                        "received.",
                        fr=f"un message de {self.ranks} rangs a une taille et une durée positives, mais "
                        f"{tuple(point)!r} a été reçu.",
                    )
                )
        absent = [what for what in NEEDED if not any(one.what == what for one in self.timings)]
        if absent or (self.ranks > 1 and not self.points):
            lacking = ", ".join(absent) or say(en="messages", fr="les messages")
            raise LabError(
                say(
                    en=f"the measurements of {self.ranks} rank(s) lack {lacking}: run `dlojz calibrate` again.",
                    fr=f"aux mesures sur {self.ranks} rang(s), il manque {lacking} : relancez `dlojz calibrate`.",
                )
            )
        return self


class Measured(Contract):
    """A machine's measurements, for one, two and more ranks.

    Raises:
        LabError: if two setups have the same number of ranks, or one rank alone was not measured.
    """

    schema_version: Literal[1] = 1
    machine: str = Field(description="its name")
    processor: str = Field(description="CPU, or the GPU's name")
    gpu: str = Field("cpu", description="name in `dlojz.hardware`, or cpu")
    cores: int = Field(ge=1, description="that the processes could use")
    memory_bytes: int = Field(ge=1, description="of the GPU, or of the machine")
    date: str = Field(description="when")
    versions: dict[str, str] = Field(description="of the libraries")
    load: float = Field(0.0, ge=0, description="processes that wanted a core before the measurement began")
    setups: tuple[Setup, ...] = Field(min_length=1, description="by number of ranks")

    def __hash__(self) -> int:
        return hash((self.machine, self.date, len(self.setups)))

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        ranks = [one.ranks for one in self.setups]
        if ranks != sorted(set(ranks)) or ranks[0] != 1:
            raise LabError(
                say(
                    en=f"setups grow in their number of ranks and begin with 1, but {ranks} was received.",
                    fr=f"les configurations vont par nombre de rangs croissant, à partir de 1 ; reçu : {ranks}.",
                )
            )
        return self

    def setup(self, ranks: int) -> Setup:
        """The measurements of so many ranks, or of the next larger number that was measured.

        Raises:
            LabError: if fewer ranks were measured.
        """
        for one in self.setups:
            if one.ranks >= ranks:
                return one
        raise LabError(
            say(
                en=f"this machine was measured on up to {self.setups[-1].ranks} ranks, but {ranks} were asked for: run "
                f"`dlojz calibrate --ranks {ranks}`.",
                fr=f"cette machine a été mesurée jusqu’à {self.setups[-1].ranks} rangs, mais {ranks} sont demandés : "
                f"lancez `dlojz calibrate --ranks {ranks}`.",
            )
        )


def default_path() -> Path:
    """Where a user's calibration lies: `$XDG_CONFIG_HOME/dlojz/calibration.json`, else under `~/.config`."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "dlojz" / "calibration.json"


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_measured(path: Path, measured: Measured) -> None:
    """Write the file at once, with the checksum of its content under the key `sha256`.

    Raises:
        LabError: if the folder cannot be written.
    """
    content = measured.to_dict()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({**content, "sha256": _checksum(content)}, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise LabError(
            say(
                en=f"the calibration cannot be written to {path}: {error.strerror}; give another path.",
                fr=f"le calibrage ne peut pas être écrit dans {path} : {error.strerror} ; donnez un autre chemin.",
            )
        ) from None


def read_measured(path: Path | None = None) -> Measured:
    """Read a machine's measurements; by default the user's own.

    Raises:
        LabError: if there is no such file, or it is damaged, altered, or written by a newer version.
    """
    path = path or default_path()

    def damaged(why: str) -> LabError:
        return LabError(
            say(
                en=f"the calibration {path.name} is damaged: {why} Run `dlojz calibrate` again.",
                fr=f"le calibrage {path.name} est abîmé : {why} Relancez `dlojz calibrate`.",
            )
        )

    try:
        if path.stat().st_size > MOST_BYTES:
            raise damaged(say(en="it is too large.", fr="il est trop gros."))
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise LabError(
            say(
                en=f"there is no calibration at {path} ({error.strerror}): run `dlojz calibrate` first.",
                fr=f"il n’y a pas de calibrage dans {path} ({error.strerror}) : lancez d’abord `dlojz calibrate`.",
            )
        ) from None
    except LabError as error:
        raise error if path.name in str(error) else damaged(str(error)) from None
    if not isinstance(content, dict):
        raise damaged(say(en="it holds no JSON object.", fr="ce n’est pas un objet JSON."))
    version = content.get("schema_version")
    if isinstance(version, int) and version > 1:
        raise LabError(
            say(
                en=f"the calibration {path.name} has schema version {version}, newer than this dlojz: update dlojz.",
                fr=f"le calibrage {path.name} a la version {version} du schéma, plus récente que ce dlojz : mettez "
                "dlojz à jour.",
            )
        )
    stored = content.pop("sha256", None)
    if stored != _checksum(content):
        raise damaged(say(en="its checksum does not match.", fr="sa somme de contrôle ne correspond pas."))
    try:
        return Measured.from_dict(content)
    except LabError as error:
        raise damaged(str(error)) from None
