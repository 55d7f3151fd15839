"""The same training as a user of each library writes it: the catalogue of the programs, and what each library hides.

Layer 3, loads neither torch nor a library. Invariant: a library that is not installed is said to be so, with the
command that installs it, and nothing else stops working for it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from dlojz.config import RunConfig
from dlojz.libraries.lines import Change, change
from dlojz.libraries.lines import code_lines as code_lines
from dlojz.schema import LabError, one_of
from dlojz.text import say

PROGRAMS = Path(__file__).parent / "programs"
REPOSITORY = Path(__file__).parents[2]
READY = ".ready"
"""File that the Makefile puts into an environment when all of it is installed."""
REFERENCE = "torch"
"""The library from which the lines that change are counted."""


@dataclass(frozen=True)
class Library:
    """A library, its program, and what its user no longer writes."""

    name: str
    title: str
    package: str
    """As pip calls it; also what its version is asked of."""
    import_name: str
    command: str
    """What installs it, in this repository."""
    hides: Callable[[], str]
    """In one line: what it does that plain torch's program says itself."""
    runs: Callable[[], str]
    """In one line: the layouts that its program runs."""
    backward: tuple[str, ...] = ()
    """Calls of its own that are the backward pass, `module:class:method`, besides `torch.Tensor.backward`."""
    seen: str = ""
    """Module whose class `Seen` says what the library's objects hold; by default torch's and DeepSpeed's are known."""
    environment: str = ""
    """Folder of an environment of its own, in the repository; empty where it lives beside torch."""
    environment_variable: str = ""
    """Which variable names the Python of an environment made by other means, instead of the folder."""

    @property
    def program(self) -> Path:
        """The file of its program."""
        return PROGRAMS / f"with_{self.name}.py"

    @property
    def module(self) -> str:
        """The same, as it is imported."""
        return f"{__name__}.programs.with_{self.name}"

    @property
    def given(self) -> str:
        """The Python that the variable names; empty where it names none."""
        return os.environ.get(self.environment_variable, "") if self.environment_variable else ""

    @property
    def python(self) -> Path | None:
        """The interpreter of its own environment; None without, or where `command` has not come to its end."""
        if not self.environment:
            return None
        if self.given:
            return Path(self.given) if Path(self.given).is_file() else None
        folder = REPOSITORY / self.environment
        here = folder / "bin" / "python"
        return here if here.is_file() and (folder / READY).is_file() else None

    @property
    def installed(self) -> bool:
        """Whether it can be imported, here or in its own environment; nothing is imported to know."""
        if self.python is not None:
            return bool(self.version)
        return not self.given and found(self.import_name)

    @property
    def version(self) -> str:
        """Its version, here or in its own environment; empty where it is not installed."""
        own = self.python
        where = [str(path) for path in own.parents[1].glob("lib/python*/*-packages")] if own else sys.path
        return next((one.version for one in distributions(name=self.package, path=where)), "")


LIBRARIES: dict[str, Library] = {
    one.name: one
    for one in (
        Library(
            name="torch",
            title="PyTorch",
            package="torch",
            import_name="torch",
            command="make lab",
            hides=lambda: say(
                en="when gradients leave (DDP: in buckets, during backward); all else is written out",
                fr="le départ des gradients (DDP : par paquets, pendant la passe arrière) ; tout le reste est écrit",
            ),
            runs=lambda: say(en="DDP; FSDP2 (zero=2, 3)", fr="DDP ; FSDP2 (zero=2, 3)"),
        ),
        Library(
            name="deepspeed",
            title="DeepSpeed",
            package="deepspeed",
            import_name="deepspeed",
            command="make lab",
            hides=lambda: say(
                en="device placement, gradient reduction, accumulation, zero_grad, clipping (at 1.0 unless told), "
                "mixed precision and loss scaling, sharding: all from a JSON file",
                fr="placement sur le GPU, réduction et accumulation des gradients, zero_grad, écrêtage (à 1,0 par "
                "défaut), précision mixte et mise à l’échelle de la perte, partage des états : tout vient d’un JSON",
            ),
            runs=lambda: say(en="ZeRO 0 to 3", fr="ZeRO 0 à 3"),
            backward=("deepspeed.runtime.engine:DeepSpeedEngine:backward",),
        ),
        Library(
            name="accelerate",
            title="Accelerate",
            package="accelerate",
            import_name="accelerate",
            command="make libraries",
            hides=lambda: say(
                en="process group, data sharding, device placement, DDP (which broadcasts the buffers), accumulation, "
                "mixed precision and loss scaling",
                fr="groupe de processus, partage des données, placement sur le GPU, DDP (qui diffuse les buffers), "
                "accumulation, précision mixte et mise à l’échelle de la perte",
            ),
            runs=lambda: say(
                en="DDP; on GPUs also FSDP2 (zero=2, 3) and DeepSpeed (engine=deepspeed)",
                fr="DDP ; sur GPU aussi FSDP2 (zero=2, 3) et DeepSpeed (engine=deepspeed)",
            ),
        ),
        Library(
            name="megatron",
            title="Megatron-core",
            package="megatron-core",
            import_name="megatron.core",
            command="make libraries",
            hides=lambda: say(
                en="the split of each weight and the all-reduces of its layers, the pipeline's schedule and messages, "
                "accumulation, one contiguous buffer of gradients, no weight decay on biases and norms, clipping (at "
                "1.0 unless told)",
                fr="le découpage de chaque poids et les all-reduces de ses couches, l’ordre et les messages du "
                "pipeline, l’accumulation, un seul tampon contigu de gradients, pas de weight decay sur les biais et "
                "les normes, l’écrêtage (à 1,0 par défaut)",
            ),
            runs=lambda: say(
                en="dp × tp × pp (1F1B), models of the gpt family; its distributed optimizer (ZeRO-1) takes CUDA "
                "tensors only",
                fr="dp × tp × pp (1F1B), modèles de la famille gpt ; son optimiseur distribué (ZeRO-1) n’accepte que "
                "des tenseurs CUDA",
            ),
            backward=("megatron.core.pipeline_parallel:schedules:backward_step",),
            seen="dlojz.libraries.megatron_seen",
        ),
        Library(
            name="colossalai",
            title="Colossal-AI",
            package="colossalai",
            import_name="colossalai",
            command="make colossalai",
            hides=lambda: say(
                en="process group, device placement, DDP and its buckets, BatchNorm turned into SyncBatchNorm, mixed "
                "precision, behind a Booster and a plugin",
                fr="groupe de processus, placement sur le GPU, DDP et ses paquets, BatchNorm changée en SyncBatchNorm, "
                "précision mixte, derrière un Booster et un plugin",
            ),
            runs=lambda: say(
                en="DDP, models without BatchNorm; its own ZeRO (LowLevelZeroPlugin) refuses to start on a CPU",
                fr="DDP, modèles sans BatchNorm ; son propre ZeRO (LowLevelZeroPlugin) refuse de démarrer sur un CPU",
            ),
            seen="dlojz.libraries.colossalai_seen",
            environment=".venv-colossalai",
            environment_variable="DLOJZ_COLOSSALAI",
        ),
    )
}
"""The libraries, the reference first."""


def found(import_name: str) -> bool:
    """Whether a module could be imported from here; nothing of it is."""
    try:
        return importlib.util.find_spec(import_name) is not None
    except (ImportError, ValueError):  # its parent package is not there
        return False


def library(name: str) -> Library:
    """A library of the catalogue.

    Raises:
        LabError: if there is none of this name.
    """
    if name not in LIBRARIES:
        raise LabError(one_of(say(en="library", fr="bibliothèque"), name, LIBRARIES))
    return LIBRARIES[name]


def absence(name: str) -> str | None:
    """Why a library's program cannot be run here and what installs it, in one sentence; None where it can."""
    one = library(name)
    if one.installed:
        return None
    there, first, la, puis = "", "", "", ""
    if one.given:
        there, first = f" where {one.environment_variable} says, {one.given}", "unset this variable, then "
        la, puis = f" là où le dit {one.environment_variable}, {one.given}", "retirez cette variable, puis "
    return say(
        en=f"{one.title} is not installed{there} (Python package {one.package}): {first}install it by {one.command}, "
        "in the folder of the lab.",
        fr=f"{one.title} n’est pas installé{la} (paquet Python {one.package}) : {puis}installez-le par {one.command}, "
        "dans le dossier du TP.",
    )


def require(name: str) -> None:
    """Refuse a library that is not installed.

    Raises:
        LabError: with the command that installs it.
    """
    if (missing := absence(name)) is not None:
        raise LabError(missing)


def check_checkpoints(config: RunConfig, every_steps: int | None) -> None:
    """Refuse checkpoints of a program that a user wrote, which keeps none.

    Raises:
        LabError: if checkpoints are asked for with a library.
    """
    if config.library == "none" or every_steps is None:
        return
    raise LabError(
        say(
            en=f"checkpoint_every={every_steps} was received with library={config.library!r}, whose program keeps no "
            "checkpoint: leave one of them out.",
            fr=f"checkpoint_every={every_steps} a été reçu avec library={config.library!r}, dont le programme ne garde "
            "pas de checkpoint : retirez l’un des deux.",
        )
    )


def own_python(config: RunConfig) -> Path | None:
    """The interpreter of the environment that a run's library has of its own; None where the lab's is meant."""
    return None if config.library == "none" else library(config.library).python


def laid_out_otherwise(config: RunConfig, wrapped_in: str) -> str:
    """What a library did instead of what it was asked for, in one sentence; empty where it did that.

    Args:
        config: the run.
        wrapped_in: class that the library has put the model in, as a record tells it.
    """
    sharded = config.layout.zero or config.layout.engine == "deepspeed"
    if not sharded or wrapped_in != "DistributedDataParallel":
        return ""
    title = LIBRARIES[config.library].title
    return say(
        en=f"asked for {config.layout.title}, {title} trained with DDP: it leaves its plugins aside where "
        "there is no GPU, and does not say so.",
        fr=f"au lieu de {config.layout.title}, {title} a entraîné avec DDP : sans GPU, il laisse ses plugins de "
        "côté, sans le dire.",
    )


def lines_changed(name: str, reference: str = REFERENCE) -> Change:
    """The lines of code by which a library's program differs from the reference's."""
    before, after = (library(one).program.read_text(encoding="utf-8") for one in (reference, name))
    return change(before, after)


def bridge_lines(name: str) -> int:
    """The lines of code of what stands between the lab and a library: other names of weights, its options, a CPU.

    Those of the modules beside the programs that its own imports, but for the course's, which are common to all.
    """
    tree = ast.parse(library(name).program.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = [module.removeprefix(f"{__name__}.") for module in modules if module.startswith(f"{__name__}.")]
    return sum(
        len(code_lines((PROGRAMS.parent / f"{module}.py").read_text(encoding="utf-8")))
        for module in own
        if not module.startswith("course")
    )
