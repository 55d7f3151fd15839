"""Declare the fields of a run and of its layout by subject, with what follows from them alone.

One class for each subject, listed in `SUBJECTS` in the order in which `--help-all` shows them, with the fields' help
from `HELP`; `LayoutFields` and `RunFields` are composed of them. Each value is within the bounds of its field; whether
the fields go together is judged by the rules (`dlojz.config.compatibility`), which `Layout` and `RunConfig` apply.
"""

import re
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field

from dlojz.base.contract import Contract
from dlojz.base.language import Sentences, say
from dlojz.config.engines import ENGINES, EngineSpec, Provider, Strategy, strategy_of

PipelineSchedule = Literal[
    "naive",
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "looped-bfs",
    "chimera",
    "zb-h1",
    "zb-h2",
    "zb-1p",
    "zb-2p",
    "interleaved-zb",
    "zb-v",
    "dualpipe",
    "dualpipe-v",
    "hanayo",
    "terapipe",
    "bpipe",
    "pipedream",
    "pipedream-2bw",
    "pipemare",
    "ampnet",
]
"""Names of the schedules; `dlojz.pipeline.schedule_catalogue` makes them."""

ASYNCHRONOUS: Final = ("pipedream", "pipedream-2bw")
"""Asynchronous schedules that the lab's own runtime (`dlojz.pipeline.runtime`) executes."""
MAX_DEGREE = 2**20
MAX_COUNT = 2**31
MAX_IMAGE_SIZE = 2**16
MAX_SEQUENCE_LENGTH = 2**28
"""Numbers beyond these are typing errors."""
PARTITION_METHODS: Final = ("uniform", "parameters", "flops")
PATTERN: Final = "type:"
BOUNDS: Final = "at:"


def explicit_bounds(partition: str) -> tuple[int, ...] | None:
    """First blocks of the stages after the first, where `partition` lists them; None where it names a method."""
    if not partition.startswith(BOUNDS):
        return None
    parts = partition.removeprefix(BOUNDS).split(",")
    # An empty tuple for `at:` with anything but numbers, which no rule accepts.
    return tuple(int(part) for part in parts) if all(re.fullmatch(r"\s*\d{1,6}\s*", part) for part in parts) else ()


BLOCK_CHOICES: Final = ("keep", "recompute", "offload")
"""What a run can do with the activations of a block until its backward."""
_RUN_OF_BLOCKS = re.compile(rf"\s*({'|'.join(BLOCK_CHOICES)}):([1-9]\d{{0,3}})\s*")


def block_choices(plan: str) -> tuple[str, ...]:
    """Read an activation plan such as `keep:3,recompute:12`: one choice per block; none if it is malformed."""
    # One match per run of blocks: (choice, number of blocks).
    runs = [_RUN_OF_BLOCKS.fullmatch(part) for part in plan.split(",")]
    return tuple(match[1] for match in runs if match for _ in range(int(match[2]))) if all(runs) else ()


def _count(default: int | None, minimum: int = 1, maximum: int = MAX_COUNT) -> Any:
    """A whole number from `minimum` to `maximum`."""
    return Field(default, ge=minimum, le=maximum)


HELP: Final = Sentences(Path(__file__).with_name("data") / "fields.md")
"""The help of each field, by its name."""
_FILE: Final = Path(__file__).with_name("data") / "runs.md"
run_sentence = Sentences(_FILE)
run_refused = run_sentence.refused
"""A sentence about a run or its layout, by its key, and the error that says one."""


class VersionField(Contract):
    """Tell in which form a configuration is written."""

    schema_version: Literal[1] = 1


class ModelFields(Contract):
    """Name the model and the size of its input."""

    model: str = "coatnet_tiny"
    image_size: int | None = _count(None, maximum=MAX_IMAGE_SIZE)
    sequence_length: int | None = _count(None, maximum=MAX_SEQUENCE_LENGTH)
    target_length: int | None = _count(None, maximum=MAX_SEQUENCE_LENGTH)


class DataFields(Contract):
    """Name the data set."""

    data: str | None = None
    data_root: str | None = None


class TrainingFields(Contract):
    """Set the length of a run, its seed, its device, the library whose program trains, and what is kept."""

    steps: int = _count(20)
    seed: int = Field(0, ge=0, lt=2**31)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    library: Literal["none", "torch", "deepspeed", "accelerate", "megatron", "colossalai"] = "none"
    keep_weights: bool = False


class BatchFields(Contract):
    """Divide the global batch: `micro_batch × micro_batches × dp` samples per step."""

    micro_batch: int = _count(16)
    micro_batches: int = _count(1)


class ParallelismFields(Contract):
    """Give the degree of each kind of parallelism, and the engine that runs them."""

    dp: int = _count(1, maximum=MAX_DEGREE)
    tp: int = _count(1, maximum=MAX_DEGREE)
    pp: int = _count(1, maximum=MAX_DEGREE)
    cp: int = _count(1, maximum=MAX_DEGREE)
    ep: int = _count(1, maximum=MAX_DEGREE)
    zero: int = Field(0, ge=0, le=3)
    engine: Provider = "torch"


class PrecisionFields(Contract):
    """Choose the types of numbers."""

    precision: Literal["fp32", "bf16", "fp16", "bf16-true"] = "fp32"
    fp32_gradients: bool = False


class AdapterFields(Contract):
    """Train low-rank adapters beside frozen weights."""

    lora: int | None = _count(None, maximum=MAX_IMAGE_SIZE)
    lora_targets: str = ""
    lora_base: Literal["none", "8bit", "4bit"] = "none"


class MemoryFields(Contract):
    """Save memory: recompute activations, or keep something in host memory."""

    checkpointing: Literal["none", "selective", "every_second", "full"] = "none"
    offload: Literal["none", "optimizer", "parameters", "activations"] = "none"
    activation_plan: str = ""
    loss_chunks: int = _count(1, maximum=MAX_SEQUENCE_LENGTH)
    channels_last: bool = False
    sub_group_size: int | None = _count(None, maximum=10**12)


class OptimizerFields(Contract):
    """Choose the update rule, its rates, and how it communicates."""

    optimizer: Literal[
        "sgd",
        "momentum",
        "adamw",
        "lamb",
        "adafactor",
        "muon",
        "one_bit_adam",
        "one_bit_lamb",
        "zero_one_adam",
        "local_sgd",
        "diloco",
        "adamw_8bit",
        "paged_adamw_8bit",
    ] = "adamw"
    update: Literal["auto", "for_loop", "foreach", "fused", "in_backward", "in_forward"] = "auto"
    warmup_steps: int | None = _count(None, minimum=0)
    local_steps: int | None = _count(None)
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)


class GradientFields(Contract):
    """Choose how data-parallel replicas send their gradients."""

    bucket_mib: float | None = Field(None, ge=0.001, le=MAX_DEGREE)
    gradient_as_bucket_view: bool = False
    gradient_compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: int = _count(1, maximum=1024)


class PipelineFields(Contract):
    """Choose the schedule of a pipeline and where the model is cut."""

    schedule: PipelineSchedule | None = None
    chunks: int | None = _count(None)
    partition: str = "uniform"


class TensorFields(Contract):
    """Choose what tensor parallelism splits."""

    sequence_parallel: bool = False
    tensor_parts: str = ""


class ExpertFields(Contract):
    """Configure a mixture of experts: how many there are, and how tokens are routed to them."""

    experts: int | None = _count(None)
    top_k: int | None = _count(None)
    capacity_factor: float | None = None
    balance_loss: float | None = Field(None, ge=0)
    z_loss: float | None = Field(None, ge=0)
    expert_groups: int | None = _count(None)


class CurriculumFields(Contract):
    """Let the sequences of a text grow over the first steps."""

    curriculum: Literal["none", "linear", "root", "discrete"] = "none"
    curriculum_start: int | None = _count(None)
    curriculum_steps: int | None = _count(None)
    curriculum_multiple: int = _count(8)
    curriculum_lengths: str = ""


class ConfigSubject(NamedTuple):
    """Fields that belong together, under one heading of `--help`."""

    en: str
    fr: str
    fields: type[Contract]

    @property
    def title(self) -> str:
        """The heading, in the reader's language."""
        return say(en=self.en, fr=self.fr)


SUBJECTS: Final = (
    ConfigSubject("model", "modèle", ModelFields),
    ConfigSubject("data", "données", DataFields),
    ConfigSubject("training", "entraînement", TrainingFields),
    ConfigSubject("parallelism", "parallélisme", ParallelismFields),
    ConfigSubject("batch", "batch", BatchFields),
    ConfigSubject("precision", "précision", PrecisionFields),
    ConfigSubject("adapters", "adaptateurs", AdapterFields),
    ConfigSubject("memory", "mémoire", MemoryFields),
    ConfigSubject("optimizer", "optimiseur", OptimizerFields),
    ConfigSubject("gradients between replicas", "gradients entre répliques", GradientFields),
    ConfigSubject("pipeline", "pipeline", PipelineFields),
    ConfigSubject("tensor parallelism", "Tensor Parallelism", TensorFields),
    ConfigSubject("mixture of experts", "mélange d’experts", ExpertFields),
    ConfigSubject("curriculum", "curriculum", CurriculumFields),
)
"""All fields of a run and of its layout, each in one subject."""


# Pydantic lists the fields of the last base first.
class LayoutFields(TensorFields, GradientFields, MemoryFields, PipelineFields, BatchFields, ParallelismFields):
    """All fields of a layout; `Layout` checks that they go together."""

    @property
    def world_size(self) -> int:
        """Number of processes: the product of the degrees."""
        # ep is no factor: the experts are divided among the replicas.
        return self.replicas * self.tp * self.pp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, and average their gradients: of all samples, and of all their tokens."""
        return self.dp * self.cp

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all replicas."""
        # cp is no factor: its ranks share the tokens of the same samples.
        return self.micro_batch * self.micro_batches * self.dp

    @property
    def degrees(self) -> str:
        """The degrees in words, e.g. `dp=2, tp=1, pp=1`."""
        extra_degrees = "".join(
            f", {name}={degree}" for name, degree in (("cp", self.cp), ("ep", self.ep)) if degree > 1
        )
        return f"dp={self.dp}, tp={self.tp}, pp={self.pp}{extra_degrees}"

    @property
    def strategy(self) -> Strategy:
        """The name of the engine that runs this layout along its data-parallel axis."""
        return strategy_of(self.engine, self.zero, replicas=self.replicas > 1, pipeline=self.pp > 1)

    @property
    def engine_spec(self) -> EngineSpec:
        """The entry of that engine in the registry."""
        return ENGINES[self.strategy]

    @property
    def title(self) -> str:
        """The name a person gives to this layout, e.g. `DeepSpeed ZeRO-2`."""
        data_axis_title = (
            self._pipeline_title() if self.pp > 1 else self.engine_spec.title(self.zero) + self._compression_title()
        )
        data_axis_title += "".join(f", {name} × {n}" for name, n in (("CP", self.cp), ("EP", self.ep)) if n > 1)
        return self._tensor_title(data_axis_title) if self.tp > 1 else data_axis_title

    def _compression_title(self) -> str:
        """The part of the title for compressed gradients, e.g. ` + PowerSGD-4`."""
        if not self.engine_spec.torch_buckets:
            return ""
        names = {"none": "", "fp16": " + fp16", "bf16": " + bf16", "powersgd": f" + PowerSGD-{self.powersgd_rank}"}
        return names[self.gradient_compression]

    def _pipeline_title(self) -> str:
        runs = {"torch": "torch", "deepspeed": "DeepSpeed", "by_hand": say(en="by hand", fr="à la main")}[self.engine]
        chunks = f" × {self.chunks}" if self.chunks else ""
        zero = f", ZeRO-{self.zero}" if self.zero else ""
        replicas = f", dp={self.dp}" if self.dp > 1 else ""
        return f"pipeline {self.schedule or '1f1b'} × {self.pp}{chunks} ({runs}{zero}{replicas})"

    def _tensor_title(self, data_axis_title: str) -> str:
        runs = {"torch": "torch", "by_hand": say(en="by hand", fr="à la main")}.get(self.engine, self.engine)
        sequence = say(en=", sequence parallel", fr=", Sequence Parallelism") if self.sequence_parallel else ""
        # Replicas, stages and ZeRO beside the tensor axis are named too.
        only_tensor = self.pp == 1 and self.dp == 1 and not self.zero
        return f"TP × {self.tp} ({runs}{sequence})" + ("" if only_tensor else f", {data_axis_title}")


class RunFields(
    CurriculumFields,
    ExpertFields,
    OptimizerFields,
    AdapterFields,
    PrecisionFields,
    TrainingFields,
    DataFields,
    ModelFields,
    VersionField,
):
    """All fields of a training run; `RunConfig` checks that they go together."""

    layout: LayoutFields = LayoutFields()
