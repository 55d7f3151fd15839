"""Declare the fields of a run and of its layout by subject, with what follows from them alone.

One class for each subject, listed in `SUBJECTS` in the order in which `--help-all` shows them; `LayoutFields` and
`RunFields` are composed of them. Each value is within the bounds of its field; whether the fields go together is
judged by the rules (`dlojz.config.compatibility`), which `Layout` and `RunConfig` apply.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field
from pydantic.fields import FieldInfo

from dlojz.base.contract import Contract
from dlojz.base.language import say
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


def _field(default: Any, en: str, fr: str, **bounds: Any) -> Any:
    """A field with its help in both languages."""
    return Field(default, description=en, json_schema_extra={"fr": fr}, **bounds)


def _count(default: int | None, en: str, fr: str, minimum: int = 1, maximum: int = MAX_COUNT) -> Any:
    """A whole number from `minimum` to `maximum`."""
    return _field(default, en, fr, ge=minimum, le=maximum)


def field_help(field: FieldInfo) -> tuple[str, str]:
    """The help of a field in English and in French."""
    extra = field.json_schema_extra
    return field.description or "", str(extra["fr"]) if isinstance(extra, dict) else ""


class VersionField(Contract):
    """Tell in which form a configuration is written."""

    schema_version: Literal[1] = 1


class ModelFields(Contract):
    """Name the model and the size of its input."""

    model: str = _field(
        "coatnet_tiny",
        "model of the catalogue (see `dlojz models`), timm:NAME, torchvision:NAME, hf:FOLDER or FILE.py:FUNCTION",
        "modèle du catalogue (voir `dlojz models`), timm:NOM, torchvision:NOM, hf:DOSSIER ou FICHIER.py:FONCTION",
    )
    image_size: int | None = _count(
        None,
        "height and width in pixels; by default the model's",
        "hauteur et largeur en pixels ; par défaut celles du modèle",
        maximum=MAX_IMAGE_SIZE,
    )
    sequence_length: int | None = _count(
        None,
        "tokens per sample; by default the model's",
        "tokens par échantillon ; par défaut ceux du modèle",
        maximum=MAX_SEQUENCE_LENGTH,
    )
    target_length: int | None = _count(
        None,
        "tokens of each target, which the decoder of an hf: model reads beside its encoder (T5, BART, Whisper); by "
        "default as many as of the source, or the model's",
        "tokens de chaque cible, que lit le décodeur d’un modèle hf: à côté de son encodeur (T5, BART, Whisper) ; par "
        "défaut autant que de la source, ou ceux du modèle",
        maximum=MAX_SEQUENCE_LENGTH,
    )


class DataFields(Contract):
    """Name the data set."""

    data: str | None = _field(
        None,
        "digits, synthetic, imagenet or text; by default what suits the model",
        "digits, synthetic, imagenet ou text ; par défaut ce qui convient au modèle",
    )
    data_root: str | None = _field(
        None,
        "folder of imagenet; by default $DSDIR/imagenet",
        "dossier d’imagenet ; par défaut $DSDIR/imagenet",
    )


class TrainingFields(Contract):
    """Set the length of a run, its seed, its device, the library whose program trains, and what is kept."""

    steps: int = _count(20, "optimizer steps", "pas de l’optimiseur")
    seed: int = _field(
        0,
        "seed of weights and of the order of the samples",
        "graine des poids et de l’ordre des échantillons",
        ge=0,
        lt=2**31,
    )
    device: Literal["auto", "cpu", "cuda"] = _field(
        "auto", "auto takes CUDA where there is one", "auto prend CUDA s’il y en a"
    )
    library: Literal["none", "torch", "deepspeed", "accelerate", "megatron", "colossalai"] = _field(
        "none",
        "none: dlojz trains with its own engine; else the training as a user of this library writes it (see `dlojz "
        "libraries`)",
        "none : dlojz entraîne avec son propre moteur ; sinon, l’entraînement comme l’écrit un utilisateur de cette "
        "bibliothèque (voir `dlojz libraries`)",
    )
    keep_weights: bool = _field(
        False,
        "keep the final weights in the run folder (safetensors)",
        "garder les poids finaux dans le dossier de l’exécution (safetensors)",
    )


class BatchFields(Contract):
    """Divide the global batch: `micro_batch × micro_batches × dp` samples per step."""

    micro_batch: int = _count(16, "samples per micro-batch", "échantillons par micro-batch")
    micro_batches: int = _count(
        1,
        "micro-batches that each replica accumulates per step",
        "micro-batches que chaque réplique accumule par pas",
    )


class ParallelismFields(Contract):
    """Give the degree of each kind of parallelism, and the engine that runs them."""

    dp: int = _count(1, "data-parallel replicas", "répliques (parallélisme de données)", maximum=MAX_DEGREE)
    tp: int = _count(
        1,
        "tensor-parallel ranks that share each layer",
        "rangs qui se partagent chaque couche (Tensor Parallelism)",
        maximum=MAX_DEGREE,
    )
    pp: int = _count(
        1,
        "pipeline ranks: the model is cut into stages, in order",
        "rangs du pipeline : le modèle est découpé en étages, dans l’ordre",
        maximum=MAX_DEGREE,
    )
    cp: int = _count(
        1,
        "context-parallel ranks: each computes its part of every sample's tokens; keys and values go round a ring",
        "rangs de Context Parallelism : chacun calcule sa part des tokens de chaque échantillon ; clés et valeurs font "
        "le tour d’un anneau",
        maximum=MAX_DEGREE,
    )
    ep: int = _count(
        1,
        "expert-parallel ranks: the experts of a mixture are divided among so many of the dp replicas",
        "rangs d’Expert Parallelism : les experts d’un mélange sont répartis sur autant des dp répliques",
        maximum=MAX_DEGREE,
    )
    zero: int = _field(
        0,
        "ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 weights too",
        "niveau ZeRO : 1 découpe les états de l’optimiseur, 2 aussi les gradients, 3 aussi les poids",
        ge=0,
        le=3,
    )
    engine: Provider = _field(
        "torch",
        "torch (DDP, or FSDP2 where zero is 2 or 3; torch.distributed.pipelining where pp > 1), by_hand (DDP, ZeRO "
        "1-3, pipelines and tensor parallelism as the lab writes them), deepspeed (ZeRO 0-3; PipelineModule), single "
        "(one process)",
        "torch (DDP, ou FSDP2 si zero vaut 2 ou 3 ; torch.distributed.pipelining si pp > 1), by_hand (DDP, ZeRO 1-3, "
        "pipelines et Tensor Parallelism écrits par le TP), deepspeed (ZeRO 0-3 ; PipelineModule), single (un seul "
        "processus)",
    )


class PrecisionFields(Contract):
    """Choose the types of numbers."""

    precision: Literal["fp32", "bf16", "fp16", "bf16-true"] = _field(
        "fp32",
        "bf16 and fp16 keep fp32 weights for the update (fp16 is predicted, not run); in bf16-true weights, gradients "
        "and optimizer states are bf16 themselves; a model whose own weights are in another type keeps it",
        "bf16 et fp16 gardent des poids fp32 pour la mise à jour (fp16 est prédit, pas exécuté) ; en bf16-true, les "
        "poids, les gradients et les états de l’optimiseur sont eux-mêmes en bf16 ; un modèle dont les poids sont d’un "
        "autre type le garde",
    )
    fp32_gradients: bool = _field(
        False,
        "DeepSpeed in bf16 or fp16: gradients are kept in fp32 (predicted, not run)",
        "DeepSpeed en bf16 ou fp16 : les gradients sont gardés en fp32 (prédit, pas exécuté)",
    )


class AdapterFields(Contract):
    """Train low-rank adapters beside frozen weights."""

    lora: int | None = _count(
        None,
        "rank of the adapters (LoRA) that are trained beside the frozen layers of an hf: model; by default all is "
        "trained",
        "rang des adaptateurs (LoRA) entraînés à côté des couches gelées d’un modèle hf: ; par défaut, tout est "
        "entraîné",
        maximum=MAX_IMAGE_SIZE,
    )
    lora_targets: str = _field(
        "",
        "layers that get adapters, as in q_proj,v_proj, or all-linear; by default the queries and values of attention",
        "couches qui reçoivent des adaptateurs, comme q_proj,v_proj, ou all-linear ; par défaut les requêtes et les "
        "valeurs de l’attention",
    )
    lora_base: Literal["none", "8bit", "4bit"] = _field(
        "none",
        "quantization of the frozen linear layers: 4bit (QLoRA: NF4 in blocks of 64, doubly quantized), 8bit (rows), "
        "or none, the type of the precision",
        "quantification des couches linéaires gelées : 4bit (QLoRA : NF4 par blocs de 64, double quantification), 8bit "
        "(par ligne), ou none, le type de la précision",
    )


class MemoryFields(Contract):
    """Save memory: recompute activations, or keep something in host memory."""

    checkpointing: Literal["none", "selective", "every_second", "full"] = _field(
        "none",
        "activation checkpointing: recompute in backward every block (full), or all but its matrix products, "
        "convolutions and attention (selective), or these and every second product (every_second, torchtitan's)",
        "points de contrôle d’activations : recalculer chaque bloc pendant la passe arrière (full), tout sauf ses "
        "produits de matrices, convolutions et attention (selective), ou cela et un produit sur deux (every_second, "
        "celui de torchtitan)",
    )
    offload: Literal["none", "optimizer", "parameters", "activations"] = _field(
        "none",
        "what is kept in host memory: optimizer (DeepSpeed ZeRO 1-3: its states and the master copy), parameters "
        "(DeepSpeed ZeRO-3: the weights too), activations (any engine)",
        "ce qui est gardé dans la mémoire de l’hôte : optimizer (DeepSpeed ZeRO 1-3 : ses états et la copie "
        "maître), parameters (DeepSpeed ZeRO-3 : aussi les poids), activations (tous les moteurs)",
    )
    activation_plan: str = _field(
        "",
        "what is done with each block's activations, in the order of the blocks, e.g. keep:3,recompute:12,offload:1 "
        "(`dlojz memory --budget` chooses one)",
        "ce que deviennent les activations de chaque bloc, dans l’ordre des blocs, par exemple "
        "keep:3,recompute:12,offload:1 (`dlojz memory --budget` en choisit un)",
    )
    loss_chunks: int = _count(
        1,
        "parts of a text's tokens whose logits and loss are computed one after the other, and in backward again, so "
        "that the logits are never whole",
        "parts des tokens d’un texte dont les logits et la perte se calculent l’une après l’autre, et de nouveau "
        "pendant la passe arrière : les logits ne sont jamais entiers",
        maximum=MAX_SEQUENCE_LENGTH,
    )
    channels_last: bool = _field(
        False,
        "images, and the weights of convolutions, with their channels last in memory (torch.channels_last)",
        "images et poids des convolutions avec leurs canaux en dernier en mémoire (torch.channels_last)",
    )
    sub_group_size: int | None = _count(
        None,
        "DeepSpeed ZeRO-3: elements of a rank's shard that are updated at once, in fp32; by default 1e9, as in "
        "DeepSpeed",
        "DeepSpeed ZeRO-3 : éléments de la part d’un rang mis à jour d’un coup, en fp32 ; par défaut 1e9, comme "
        "DeepSpeed",
        maximum=10**12,
    )


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
    ] = _field(
        "adamw",
        "update rule (one_bit_adam, one_bit_lamb and zero_one_adam send one bit per number, local_sgd and diloco "
        "average the weights every local_steps steps, all with engine by_hand; adafactor keeps means of rows and "
        "columns; muon updates hidden matrices by their orthogonalized momentum, all else as adamw; adamw_8bit and "
        "paged_adamw_8bit, bitsandbytes' on a GPU, are predicted, not run: the pages are counted on the host)",
        "règle de mise à jour (one_bit_adam, one_bit_lamb et zero_one_adam envoient un bit par nombre, local_sgd et "
        "diloco moyennent les poids tous les local_steps pas, toutes avec engine by_hand ; adafactor garde les "
        "moyennes des lignes et des colonnes ; muon met à jour les matrices cachées par leur momentum orthogonalisé, "
        "tout le reste comme adamw ; adamw_8bit et paged_adamw_8bit, ceux de bitsandbytes sur GPU, sont prédits, pas "
        "exécutés : les pages sont comptées sur l’hôte)",
    )
    update: Literal["auto", "for_loop", "foreach", "fused", "in_backward", "in_forward"] = _field(
        "auto",
        "how sgd, momentum and adamw go through the parameters: one by one (for_loop), all together (foreach), in one "
        "kernel (fused), each as soon as its gradient is there (in_backward) or as its module is used again "
        "(in_forward), both with adafactor and 8-bit states too; auto is torch's choice, fused is what DeepSpeed's own "
        "FusedAdam does",
        "comment sgd, momentum et adamw parcourent les paramètres : un par un (for_loop), tous ensemble (foreach), en "
        "un seul noyau (fused), chacun dès que son gradient est là (in_backward) ou dès que son module ressert "
        "(in_forward), ces deux aussi avec adafactor et les états de 8 bits ; auto est le choix de torch, fused ce que "
        "fait le FusedAdam de DeepSpeed",
    )
    warmup_steps: int | None = _count(
        None,
        "steps before one_bit_adam and one_bit_lamb compress, and zero_one_adam goes local steps; by default a quarter",
        "pas avant que one_bit_adam et one_bit_lamb compressent et que zero_one_adam fasse des pas locaux ; par "
        "défaut un quart",
        minimum=0,
    )
    local_steps: int | None = _count(
        None,
        "steps that each replica takes alone under local_sgd and diloco; by default 8",
        "pas que chaque réplique fait seule avec local_sgd et diloco ; par défaut 8",
    )
    learning_rate: float = _field(1e-3, "constant learning rate", "taux d’apprentissage, constant", gt=0)
    weight_decay: float = _field(0.0, "decoupled; L2 for sgd and momentum", "découplé ; L2 pour sgd et momentum", ge=0)


class GradientFields(Contract):
    """Choose how data-parallel replicas send their gradients."""

    bucket_mib: float | None = _field(
        None,
        "MiB of gradients that leave together (DDP and by_hand); by default 25, DDP's first bucket 1",
        "Mio de gradients qui partent ensemble (DDP et by_hand) ; par défaut 25, 1 pour le premier bucket de DDP",
        ge=0.001,
        le=MAX_DEGREE,
    )
    gradient_as_bucket_view: bool = _field(
        False,
        "DDP: gradients are views of the buckets, which saves a copy of them",
        "DDP : les gradients sont des vues des buckets, ce qui en économise une copie",
    )
    gradient_compression: Literal["none", "fp16", "bf16", "powersgd"] = _field(
        "none",
        "DDP: what the gradients are sent as (torch's communication hooks)",
        "DDP : sous quelle forme les gradients sont envoyés (les « hooks » de torch)",
    )
    powersgd_rank: int = _count(
        1,
        "columns of the two thin matrices that PowerSGD sends for each gradient",
        "colonnes des deux matrices minces que PowerSGD envoie pour chaque gradient",
        maximum=1024,
    )


class PipelineFields(Contract):
    """Choose the schedule of a pipeline and where the model is cut."""

    schedule: PipelineSchedule | None = _field(
        None,
        "pipeline schedule, where pp > 1; by default 1f1b (see `dlojz pipeline --list`)",
        "ordonnancement du pipeline, si pp > 1 ; par défaut 1f1b (voir `dlojz pipeline --list`)",
    )
    chunks: int | None = _count(
        None,
        "stages per pipeline rank; by default what the schedule needs",
        "étages par rang du pipeline ; par défaut ce que demande l’ordonnancement",
    )
    partition: str = _field(
        "uniform",
        "how the blocks are divided into stages: uniform, parameters, flops, type:REGEX (balances the blocks whose "
        "class name matches), or at:4,8,12 (first block of each stage but the first)",
        "comment les blocs sont répartis en étages : uniform, parameters, flops, type:REGEX (équilibre les blocs dont "
        "le nom de classe correspond), ou at:4,8,12 (premier bloc de chaque étage après le premier)",
    )


class TensorFields(Contract):
    """Choose what tensor parallelism splits."""

    sequence_parallel: bool = _field(
        False,
        "shard the sequence outside tensor-parallel regions",
        "découper la séquence hors des régions Tensor Parallel",
    )
    tensor_parts: str = _field(
        "",
        "where tp > 1, regular expression: the parts whose name it is found in are split, e.g. attention, mlp, or "
        "blocks\\.[0-3]\\.; by default all",
        "si tp > 1, expression régulière : les parties dont elle se trouve dans le nom sont découpées, par exemple "
        "attention, mlp, ou blocks\\.[0-3]\\. ; par défaut toutes",
    )


class ExpertFields(Contract):
    """Configure a mixture of experts: how many there are, and how tokens are routed to them."""

    experts: int | None = _count(
        None,
        "experts of each mixture, of a model that has some; by default its own",
        "experts de chaque mélange, pour un modèle qui en a ; par défaut les siens",
    )
    top_k: int | None = _count(
        None,
        "experts that see each token; by default the model's",
        "experts qui voient chaque token ; par défaut ceux du modèle",
    )
    capacity_factor: float | None = _field(
        None,
        "tokens that an expert takes, in units of its fair share; those beyond are dropped (experts/top_k or more: "
        "none); by default the model's",
        "tokens que prend un expert, rapportés à sa part équitable ; les suivants sont abandonnés (experts/top_k ou "
        "plus : aucun) ; par défaut celui du modèle",
    )
    balance_loss: float | None = _field(
        None,
        "weight of the loss that balances the experts; by default 0.01",
        "poids de la perte qui équilibre les experts ; par défaut 0,01",
        ge=0,
    )
    z_loss: float | None = _field(
        None,
        "weight of the loss that keeps the router's logits small; by default 0",
        "poids de la perte qui garde petits les logits du routeur ; par défaut 0",
        ge=0,
    )
    expert_groups: int | None = _count(
        None,
        "groups of experts among which a two-level gate chooses first; by default 1, a flat gate",
        "groupes d’experts entre lesquels une porte à deux niveaux choisit d’abord ; par défaut 1, une porte plate",
    )


class CurriculumFields(Contract):
    """Let the sequences of a text grow over the first steps."""

    curriculum: Literal["none", "linear", "root", "discrete"] = _field(
        "none",
        "how the sequences of a text grow over the first steps: at once, or by this pacing function (root: the square "
        "root)",
        "comment les séquences d’un texte croissent aux premiers pas : d’emblée entières, ou selon cette fonction "
        "(root : la racine carrée)",
    )
    curriculum_start: int | None = _count(
        None,
        "tokens per sample at first; by default an eighth of sequence_length",
        "tokens par échantillon au début ; par défaut un huitième de sequence_length",
    )
    curriculum_steps: int | None = _count(
        None,
        "steps after which samples are whole; by default half of the run",
        "pas après lesquels les échantillons sont entiers ; par défaut la moitié de l’exécution",
    )
    curriculum_multiple: int = _count(
        8,
        "lengths are multiples of this (tensor cores like 8 or 16)",
        "les longueurs en sont des multiples (les tensor cores préfèrent 8 ou 16)",
    )
    curriculum_lengths: str = _field(
        "",
        "the lengths of a discrete curriculum and their last steps, e.g. 16:100,32:200 (then whole)",
        "les longueurs d’un curriculum discrete et leurs derniers pas, par exemple 16:100,32:200 (puis entières)",
    )


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
