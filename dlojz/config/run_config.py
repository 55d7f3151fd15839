"""Configure a training run: `RunConfig`, checked when it is made, with its `Layout`; write it as a command line.

A `RunConfig` that exists is legal and complete: what was left out is filled in with the value that will be used, so
that equal runs have equal hashes. The global batch is derived, never stored.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from dlojz import data as datasets
from dlojz import models
from dlojz.base.contract import Contract, check_at_least
from dlojz.base.errors import LabError
from dlojz.base.language import integer, one_of, say
from dlojz.config.compatibility import LEGAL, check
from dlojz.config.engines import ENGINES, EngineSpec, Form
from dlojz.config.fields import RunFields, run_refused, run_sentence
from dlojz.config.layout import Layout
from dlojz.config.optimizers import COMPRESSED, LOCAL
from dlojz.config.run_compatibility import CONTEXT, ELSEWHERE, LIBRARY, PRECISIONS
from dlojz.config.schedules import MULTIPLE, default_local_steps, default_warmup_steps
from dlojz.models.experts.routing import Routing
from dlojz.models.foreign.elsewhere import (
    CHAIN,
    Adapters,
    absolute_name,
    contents_hash,
    executes_files,
    executing_no_file,
    is_taken_as_told,
    target_ending,
)
from dlojz.models.foreign.names import is_elsewhere, shown_name

START_SHARE: Final = 8
"""By default, the samples of a curriculum begin with one part in so many of the whole length."""
STEPS_SHARE: Final = 2
"""By default, its samples are whole after one part in so many of the run."""
MAX_DIGITS: Final = 12
"""Longer numbers are refused by their own field."""
RARE: Final = ("update", "curriculum_multiple", "partition", "cp", "ep", "powersgd_rank", "loss_chunks")
"""Fields that `in_use` shows only where a run sets them."""


FIRST_STEP_S: Final = 600.0
"""By default, seconds after which a script without an optimizer's step is ended."""


class Observation(Contract):
    """What is noted of a script on each rank besides its measurements, so that processes can be compared."""

    most_steps: int = Field(0, ge=0, description="steps of its optimizers after which it ends; 0 for all of its own")
    batches_of: str = Field("", description="folder of the reports of ranks whose batches its loaders read, joined")
    is_apart: bool = Field(False, description="whether those batches follow each other, as accumulation reads them")


class Script(Contract):
    """Script of the user that is run in place of a model of the catalogue, and measured from outside.

    It is a file, a module (`python -m`), or the command of a launcher that starts one of the two.
    """

    path: str = Field(min_length=1, description="absolute path of the file; of a launcher, the script that it starts")
    written: str = Field("", description="the path as it was written, which is the first word that the script sees")
    module: str = Field("", description="name of the module, as `python -m` takes it; empty for a file")
    command: tuple[str, ...] = Field((), description="words of the launcher that starts it; empty without one")
    arguments: tuple[str, ...] = Field((), description="words after the file, which no shell reads")
    folder: str = Field("", description="working directory of its processes")
    launched: bool = Field(False, description="whether its processes are started as torchrun does, also a single one")
    first_step_s: float = Field(FIRST_STEP_S, gt=0, description="seconds until its first optimizer's step, at most")
    observation: Observation | None = Field(None, description="what each rank notes besides; nothing by default")

    @property
    def name(self) -> str:
        """Name of the file, without its folder, or of the module."""
        return self.module or Path(self.path).name


def _script_named(name: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Find a script by the way it is named: fields of `Script`.

    Raises:
        LabError: if it is none.
    """
    if name.startswith("-m "):
        module = name.removeprefix("-m ").strip()
        path = file_of_module(module)
        if path is None:
            raise run_refused("no module", module=module)
        return {"path": str(path), "module": module, "arguments": arguments}
    file = Path(name).expanduser().absolute()
    is_file = os.path.isfile(file)  # noqa: PTH113 - unlike Path's method False for a name that no file system takes
    if (is_file and file.suffix == ".py") or os.path.isfile(file / "__main__.py"):  # noqa: PTH113
        return {"path": str(file), "written": name, "arguments": arguments}
    # A command of $PATH or an executable file that is no script: it is taken for a launcher.
    if (os.sep not in name and shutil.which(name)) or (is_file and os.access(file, os.X_OK)):
        words = (name if os.sep not in name else str(file), *arguments)
        return {**_started_by(arguments, str(file)), "command": words}
    raise no_script(name)


_LAUNCHING = ("torch", "accelerate", "deepspeed", "lightning", "lightning_fabric")
"""Packages whose modules, run by `python -m`, are launchers."""


def _started_by(words: tuple[str, ...], launcher: str) -> dict[str, Any]:
    """Find the script in a launcher's words, by which tables name the run: the first file of Python, or module.

    A launcher's options are not known here, and all its words are passed on as they are.
    """
    for number, word in enumerate(words):
        if word.endswith(".py"):
            return {"path": str(Path(word).absolute()), "arguments": words[number + 1 :]}
        module = words[number + 1] if word in ("-m", "--module") and number + 1 < len(words) else ""
        # `python -m torch.distributed.run train.py`: the launcher's module is not the script.
        if re.fullmatch(r"[A-Za-z_][\w.]*", module) and module.partition(".")[0] not in _LAUNCHING:
            return {"path": launcher, "module": module, "arguments": words[number + 2 :]}
    return {"path": launcher, "arguments": words}


def no_script(name: str) -> LabError:
    """Make the error that says why a name is no script, and what is one."""
    file = Path(name).expanduser()
    if os.path.isdir(file):  # noqa: PTH112
        flaw = say(en=f"{name!r} is a folder without __main__.py", fr=f"{name!r} est un dossier sans __main__.py")
    elif os.path.isfile(file):  # noqa: PTH113
        flaw = say(en=f"{name!r} is no Python script", fr=f"{name!r} n’est pas un script Python")
    else:
        flaw = say(en=f"{name!r} is no file", fr=f"{name!r} n’est pas un fichier")
    return run_refused("no script", flaw=flaw)


def file_of_module(module: str) -> Path | None:
    """Find the file that `python -m` would run from here, without executing its packages; None where there is none."""
    searched: list[str] | None = [str(Path.cwd()), *sys.path]
    spec, before = None, ""
    for part in module.split("."):
        before = f"{before}.{part}" if before else part
        spec = PathFinder.find_spec(before, searched) if searched is not None and part else None
        if spec is None:
            break
        searched = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    # Of a package `python -m` runs __main__.py.
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(f"{module}.__main__", searched)
    return Path(spec.origin) if spec is not None and spec.origin else None


class ReadContract(Contract):
    """Contract of a file that somebody else may have written: reading it executes no model's own file."""

    @model_validator(mode="wrap")
    @classmethod
    def _execute_nothing(cls, content: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        with executing_no_file():
            return handler(content)


class RunConfig(RunFields):
    """One training run, whole: model, data, precision, optimizer, length, and its `Layout`.

    The run of a script has a `script`; of the other fields only the device and the number of processes (`layout.dp`)
    say something about it, and its model is the name of its file.

    Raises:
        LabError: if a value is illegal or unknown; the sentence names it and the legal ones.
    """

    layout: Layout = Layout()
    script: Script | None = None

    @classmethod
    def of(cls, **flat: Any) -> Self:
        """Build from fields given flat, those of the layout among them: `RunConfig.of(model="vit_tiny", dp=2)`.

        Raises:
            LabError: if a key is neither a field of `RunConfig` nor of `Layout`; the legal ones are listed.
        """
        run_fields = {key: value for key, value in flat.items() if key in cls.model_fields}
        layout_fields = {key: value for key, value in flat.items() if key not in cls.model_fields}
        # An engine that is given stays; the library's fills in where none is.
        layout_fields = _engine_of(run_fields) | layout_fields
        legal = [*cls.model_fields, *Layout.model_fields]
        for key in layout_fields:
            if key not in Layout.model_fields:
                raise LabError(one_of("key", key, sorted(set(legal) - set(HIDDEN))))
        if layout_fields:
            base = run_fields.get("layout", Layout())
            run_fields["layout"] = Layout(**{**base.to_dict(), **layout_fields})
        return cls(**run_fields)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, fields: Any) -> Any:
        """Fill in the defaults that depend on other fields."""
        if not isinstance(fields, dict):
            return fields
        fields = _without_former(fields)
        # Model, data and steps say nothing of a script.
        if fields.get("script") is not None:
            return fields
        filled = _fill_in_model(fields, fields.get("model", cls.model_fields["model"].default))
        steps = filled.get("steps", cls.model_fields["steps"].default)
        _fill_in_stages(filled, _number(steps))
        _fill_in_curriculum(filled, _number(steps))
        if engine := _engine_of(filled):
            filled["layout"] = engine
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.script is None:
            check((*PRECISIONS, *LEGAL, *ELSEWHERE, *CONTEXT, *LIBRARY), self)
        return self

    @classmethod
    def of_script(
        cls,
        path: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        *,
        processes: int | None = None,
        device: str = "auto",
        first_step_s: float = FIRST_STEP_S,
        observation: Observation | None = None,
    ) -> Self:
        """Configure the run of a user's script, in the present working directory.

        Args:
            path: of the script; of a module, its name after `-m `; or a launcher's name, whose words are `arguments`.
            arguments: words after it.
            processes: how many of it are started, at least 1, as torchrun does; None for one, as `python` starts it.
            first_step_s: seconds after which it is ended if no optimizer has made a step, > 0.
            observation: what each rank notes besides its measurements.

        Raises:
            LabError: if there is no such file, module or command, or a number is illegal.
        """
        check_at_least(1, processes=processes or 1)
        script = _script_named(str(path), tuple(arguments))
        start_fields: dict[str, Any] = {"folder": str(Path.cwd()), "launched": processes is not None}
        start_fields |= {"first_step_s": first_step_s, "observation": observation}
        # How many processes a launcher starts is known only once they have run.
        layout = Layout(dp=1 if script.get("command") else processes or 1)
        user_script = Script(**script, **start_fields)
        return cls.from_dict({"model": user_script.name, "device": device, "layout": layout, "script": user_script})

    @property
    def asked_steps(self) -> int | None:
        """Optimizer steps asked for; None for a script, which alone knows how many it makes."""
        return None if self.script else self.steps

    @property
    def data_name(self) -> str:
        """The data set that will be used (never empty once validated)."""
        return self.data or ""

    @property
    def num_classes(self) -> int:
        """Classes the model tells apart (size of the vocabulary for text)."""
        return datasets.num_classes(self.data_name) or models.spec(self.model).num_classes

    @property
    def built_model(self) -> str:
        """Name under which the model is built: one from elsewhere is cut into a chain of blocks where that is needed.

        Stages of a pipeline and checkpointing take its blocks one by one. Its adapters and the length of its targets
        end the name.
        """
        needs_blocks = self.layout.pp > 1 or self.layout.checkpointing != "none"
        targets = tuple(filter(None, self.lora_targets.split(",")))
        name = self.model + target_ending(self.target_length)
        name += Adapters(self.lora, targets, self.lora_base).ending if self.lora else ""
        return CHAIN + name if is_elsewhere(self.model) and needs_blocks else name

    @property
    def compute_precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """Type of the numbers in matrix products, where all weights are in fp32 or the precision casts them."""
        return "bf16" if self.precision == "bf16-true" else self.precision

    @property
    def routing(self) -> Routing | None:
        """How the mixtures of the model route; None for a model without experts."""
        if self.experts is None:
            return None
        return Routing(
            experts=self.experts,
            top_k=self.top_k or 1,
            capacity_factor=self.capacity_factor or 1.0,
            balance_loss=self.balance_loss or 0.0,
            z_loss=self.z_loss or 0.0,
            groups=self.expert_groups or 1,
        )

    @property
    def engine_forms(self) -> tuple[Form, ...]:
        """What makes another engine of the layout's strategy: one form at most, as the rules allow no two."""
        conditions: dict[Form, bool] = {
            "one_bit": self.optimizer in COMPRESSED,
            "local_steps": self.optimizer in LOCAL,
            "hooks": self.layout.gradient_compression != "none",
            "experts": self.layout.ep > 1,
            "in_backward": self.update == "in_backward",
            "in_forward": self.update == "in_forward",
            "megatron": self.library == "megatron",
        }
        return tuple(form for form, is_asked in conditions.items() if is_asked)

    @property
    def engine_name(self) -> str:
        """Name of the engine that runs this along its data-parallel axis, in `dlojz.config.engines.ENGINES`."""
        return "+".join((self.layout.strategy, *self.engine_forms))

    @property
    def engine_spec(self) -> EngineSpec:
        """The entry of that engine in the registry."""
        return ENGINES[self.engine_name]

    def in_use(self) -> dict[str, Any]:
        """Plain data as `to_dict` gives it, without unset fields (rare ones at their defaults, None, False, empty)."""
        content = _set_fields(self.to_dict(), type(self))
        content["layout"] = _set_fields(content["layout"], Layout)
        return content

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that name this run: equal configurations have equal hashes.

        Only fields that differ from their defaults count, so that a field that comes later leaves the names of older
        runs as they are; a default, once released, does not change. A model in one's own file counts with its contents,
        so that a run is not found again once the file has changed.
        """
        content = self.model_dump(mode="json", exclude_defaults=True)
        if is_elsewhere(self.model):
            content["contents"] = contents_hash(self.model)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """Model and layout in words, e.g. `coatnet_tiny, DDP ×2`."""
        processes = f" ×{self.layout.world_size}" if self.layout.world_size > 1 else ""
        if self.script:
            return self.script.name + processes
        library = f", library={self.library}" if self.library != "none" else ""
        return f"{self.model_name}, {self.layout.title}{processes}{library}"

    @property
    def model_name(self) -> str:
        """Name of the model as tables show it: without the folder of one's own file, which names a `config.json`."""
        return shown_name(self.model)


_FORMER: Final = ("nvme_path", "async_tensor_parallel", "curriculum_root")
"""Fields of older versions, of the layout or of the run, which records still have; nothing is read from them."""


def _without_former(fields: dict[str, Any]) -> dict[str, Any]:
    """Drop former fields from the run that a file holds, and from its layout."""
    current = {name: value for name, value in fields.items() if name not in _FORMER}
    if isinstance(layout := fields.get("layout"), dict):
        current["layout"] = {name: value for name, value in layout.items() if name not in _FORMER}
    return current


def _set_fields(content: dict[str, Any], contract: type[Contract]) -> dict[str, Any]:
    """Drop unset fields."""
    plain = {name: contract.model_fields[name].default for name in RARE if name in content}
    return {
        name: value
        for name, value in content.items()
        if value not in (None, "", "none") and value is not False and not (name in plain and value == plain[name])
    }


def _engine_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """The engine of `library='deepspeed'`, as a field of the layout, where no layout is given."""
    return {"engine": "deepspeed"} if fields.get("library") == "deepspeed" and fields.get("layout") is None else {}


def _default(filled: dict[str, Any], name: str, value: object) -> None:
    if filled.get(name) is None:
        filled[name] = value


def _fill_in_model(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fill in the data set and the size of the input; what says both of a model from elsewhere is taken as it is.

    Raises:
        LabError: no such model, or one from elsewhere would have to be looked up where a record is read.
    """
    sizes = [name for name in ("image_size", "sequence_length") if fields.get(name) is not None]
    # The data set and the one size that it has; `example`, a model's own input, has none.
    has_input = fields.get("data") and len(sizes) == (0 if fields["data"] == "example" else 1)
    if has_input and isinstance(name, str) and is_taken_as_told(name):
        return {**fields, "model": absolute_name(name) if executes_files() else name}
    if is_elsewhere(name) and not executes_files():
        raise run_refused("no whole configuration", name=name)
    spec = models.spec(name)
    filled = {**fields, "model": spec.name}
    _default(filled, "data", datasets.default_for(spec.family, spec.num_classes))
    # A model of tensors has no size: its example inputs have one.
    if spec.family != "tensors":
        size = "image_size" if spec.family == "image" else "sequence_length"
        _default(filled, size, getattr(spec, size))
    experts = getattr(spec.size, "experts", None)
    # Numbers of the mixture that are not given are the model's.
    for field, value in experts.defaults().items() if experts else ():
        _default(filled, field, value)
    return filled


def _number(value: object) -> int | None:
    """Parse a whole number, also one written as text; None for what its field will refuse."""
    written = str(value)
    return int(written) if written.isdecimal() and len(written) <= MAX_DIGITS else None


def _fill_in_stages(filled: dict[str, Any], steps: int | None) -> None:
    """Fill in how long an optimizer's first stage lasts, and how many steps replicas take alone."""
    if steps is None:
        return
    if filled.get("optimizer") in COMPRESSED:
        _default(filled, "warmup_steps", default_warmup_steps(steps))
    if filled.get("optimizer") in LOCAL:
        _default(filled, "local_steps", default_local_steps(steps))


def _fill_in_curriculum(filled: dict[str, Any], steps: int | None) -> None:
    """Fill in where a curriculum starts and ends, and normalise how its lengths are written."""
    kind, written = filled.get("curriculum", "none"), filled.get("curriculum_lengths")
    if kind == "discrete" and isinstance(written, str):
        filled["curriculum_lengths"] = written.replace(" ", "")
    if kind not in ("linear", "root"):
        return
    full_length, multiple = _number(filled.get("sequence_length")), _number(filled.get("curriculum_multiple", MULTIPLE))
    if full_length and multiple:
        # An eighth, rounded down to a multiple, at least one multiple.
        _default(filled, "curriculum_start", max(multiple, full_length // START_SHARE // multiple * multiple))
    if steps:
        _default(filled, "curriculum_steps", max(1, steps // STEPS_SHARE))


HIDDEN = ("layout", "schema_version", "script")
"""Fields of a configuration that are no options."""


def command_of(config: RunConfig, command: str = "run") -> str:
    """Write the command line that asks for a configuration: only what differs from the defaults."""
    if config.script:
        script = config.script
        if script.command:
            return shlex.join(["dlojz", "run", "--", *script.command])
        words = ["-m", script.module] if script.module else [script.path]
        processes = ["--nproc", str(config.layout.world_size)] if script.launched else []
        return shlex.join(["dlojz", "run", *words, *processes, "--", *script.arguments])
    # With the same model: what it fills in by itself need not be written.
    plain = RunConfig.of(model=config.model)
    words = ["dlojz", command, "--model", config.model]
    for contract, default in ((config, plain), (config.layout, plain.layout)):
        for name in type(contract).model_fields:
            value = getattr(contract, name)
            if name in (*HIDDEN, "model") or value == getattr(default, name):
                continue
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(str(value))
    return shlex.join(words)


def vocabulary_note(config: RunConfig) -> str:
    """Say with what vocabulary a text model is trained, in one sentence; empty for images, and for models of bytes."""
    spec = models.spec(config.model)
    if spec.family != "text" or spec.num_classes == datasets.num_classes("text"):
        return ""
    words, vocab = integer(config.num_classes), integer(spec.num_classes)
    if words == vocab:
        return run_sentence("own vocabulary", config=config, words=words, data=config.data_name)
    return run_sentence("vocabulary of the data", config=config, words=words, data=config.data_name, vocab=vocab)


LIBRARY_TITLES = {
    "torch": "PyTorch",
    "deepspeed": "DeepSpeed",
    "accelerate": "Accelerate",
    "megatron": "Megatron-core",
    "colossalai": "Colossal-AI",
}
"""Each library's name, as it writes it."""


def fallback_note(config: RunConfig, wrapped_in: str) -> str:
    """Note what a library did instead of the layout asked for, in one sentence; empty where it did that.

    Args:
        wrapped_in: class that the library has put the model in, as a record tells it.
    """
    sharded = config.layout.zero or config.layout.engine == "deepspeed"
    if not sharded or wrapped_in != "DistributedDataParallel":
        return ""
    title = LIBRARY_TITLES[config.library]
    return run_sentence("fallback", config=config, title=title)
