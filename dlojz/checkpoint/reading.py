"""Read a checkpoint's tensors, one at a time.

Layer 3, loads torch. Invariant: only files that the manifest names are opened, as safetensors, and a tensor that is not
what the manifest says is refused. Verify the checkpoint first (`folders.verify`): here no checksum is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlojz.checkpoint.manifest import Manifest
from dlojz.schema import LabError

COUNT = "count/updates"
"""Name of the count of updates, by which Adam corrects the bias of its moments."""


class Source:
    """The tensors of a verified checkpoint, by name; a context that closes the files.

    Args:
        folder: of the checkpoint.
        manifest: as it was verified.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest, self._folder = manifest, folder
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def step(self) -> int:
        """Steps that are finished."""
        return self.manifest.step

    @property
    def updates(self) -> int:
        """Updates that the optimizer has counted; the steps, where it counts none."""
        return int(self.tensor(COUNT)) if self.has(COUNT) else self.step

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.manifest.tensors

    def names(self, kind: str) -> list[str]:
        """Names of all tensors of a kind, without the kind."""
        return [name.partition("/")[2] for name in self.manifest.tensors if name.partition("/")[0] == kind]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU.

        Raises:
            LabError: if there is none of this name, or it is not what the manifest says.
        """
        found: Tensor = self._look(name, lambda file: file.get_tensor(name))
        kept = self.manifest.tensors[name]
        if tuple(found.shape) != kept.shape or str(found.dtype) != f"torch.{kept.dtype}":
            raise LabError(f"the tensor {name} of {self._folder.name} is not what its manifest says.")
        return found

    def replicas(self) -> int:
        """How many replicas' buffers there are."""
        kinds = {name.partition("/")[0] for name in self.manifest.tensors}
        return sum(kind.startswith("buffers.") for kind in kinds)

    def _look(self, name: str, look: Callable[[Any], Any]) -> Any:
        kept = self.manifest.tensors.get(name)
        if kept is None:
            raise LabError(f"the checkpoint {self._folder.name} has no tensor {name}: it is of another model.")
        try:
            if kept.file not in self._files:
                self._files[kept.file] = self._open.enter_context(
                    safe_open(self._folder / kept.file, framework="pt", device="cpu")
                )
            return look(self._files[kept.file])
        except (OSError, SafetensorError) as error:
            raise LabError(f"{kept.file} of {self._folder.name} cannot be read: {error}.") from None
