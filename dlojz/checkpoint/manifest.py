"""What a checkpoint says of itself: `manifest.json`.

Layer 3, loads no torch. Invariant: a manifest that exists names each tensor once, in a file that it names too, and no
file outside of its own folder.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dlojz.config import RunConfig
from dlojz.layout import Layout
from dlojz.schema import Contract, LabError
from dlojz.text import say

MANIFEST, COMMIT = "manifest.json", "COMMIT"
FILE_PATTERN = r"^tensors-\d{4,6}\.safetensors$"
SHA_PATTERN = r"^[0-9a-f]{64}$"
MAX_MANIFEST_BYTES = 64 * 2**20
LATER = ("layout", "steps", "keep_weights", "device", "data_root")
"""Fields of a configuration in which a run may differ from the one whose checkpoint it goes on from."""


class KeptFile(Contract):
    """One file of tensors."""

    name: str = Field(pattern=FILE_PATTERN)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=SHA_PATTERN)


class KeptTensor(Contract):
    """Where a tensor is, and what it is like."""

    file: str = Field(pattern=FILE_PATTERN)
    shape: tuple[int, ...]
    dtype: str = Field(description="torch's name of it, e.g. float32")


class Manifest(Contract):
    """All that a checkpoint holds.

    Tensors are named `KIND/NAME`: `weights/blocks.0.conv.weight`, `exp_avg/…`, `exp_avg_sq/…`, `momentum_buffer/…`;
    `count/updates` is Adam's count of its updates, `buffers.1/…` are those of replica 1, `own.1/…` what the optimizer
    of replica 1 has for itself (the errors of a compression), `random.1/cpu` is rank 1's generator.
    """

    schema_version: Literal[1] = 1
    step: int = Field(ge=0, description="steps that are finished; the next one to train is the same number")
    config: RunConfig
    files: tuple[KeptFile, ...]
    tensors: dict[str, KeptTensor]
    created_utc: str = ""
    versions: dict[str, str] = Field(default_factory=dict, description="of dlojz and torch")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [file.name for file in self.files]
        if len(set(names)) < len(names):
            raise LabError(
                say(en="the manifest names a file twice.", fr="le fichier manifest.json nomme deux fois un fichier.")
            )
        strangers = {tensor.file for tensor in self.tensors.values()} - set(names)
        if strangers:
            raise LabError(
                say(
                    en=f"the manifest puts a tensor into {min(strangers)}, which is none of its files.",
                    fr=f"le fichier manifest.json place un tenseur dans {min(strangers)}, qui n’est aucun des siens.",
                )
            )
        return self

    @property
    def layout(self) -> Layout:
        """How the model was laid out when this was written; who reads may lay it out otherwise."""
        return self.config.layout

    @property
    def bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.bytes for file in self.files)

    def check_goes_on(self, config: RunConfig) -> None:
        """Refuse a run that is another training than the one this was kept of.

        The layout may be another one, as long as the global batch is the same: the data are read on from the step.

        Raises:
            LabError: naming the first field that differs, with both values.
        """
        mine, theirs = self.config.to_dict(), config.to_dict()
        pairs = {name: (mine[name], theirs[name]) for name in mine if name not in LATER}
        pairs["global_batch"] = (self.layout.global_batch, config.layout.global_batch)
        for name, (kept, asked) in pairs.items():
            if kept != asked:
                raise LabError(
                    say(
                        en=f"the checkpoint at step {self.step} was kept with {name}={kept!r}, but this run has "
                        f"{name}={asked!r}: only the layout may differ, with the same global batch.",
                        fr=f"le checkpoint du pas {self.step} a été gardé avec {name}={kept!r}, mais cette exécution a "
                        f"{name}={asked!r} : seul le layout peut différer, pour le même batch global.",
                    )
                )
