"""Forecast the memory of a rank over a training step, without a process or an allocation.

The trace of one micro-batch in one process is replayed once per micro-batch into a ledger, together with the states and
the engine's memory: peak of a rank = largest, over the step, of its states + activations of the micro-batches in flight
+ temporaries of the running pass + the engine's buffers. On the CPU this is what the probe measures, to the byte
(tests/prediction/test_forecast.py); for a GPU, corrections of the trace and the allocator's model are added. A
pipeline's rank is replayed action by action, each on top of what the rank keeps then (`dlojz.pipeline.messages`).

Rules of thumb and the papers' closed forms are compared with the categories that they count, or with one traced layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

from dlojz import hardware, models
from dlojz.base.language import Sentences, format_bytes, format_count, percent, refusal, say
from dlojz.base.table import visible
from dlojz.config.optimizers import OPTIMIZERS
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import IN_PASSES
from dlojz.hardware import Device
from dlojz.models.sizes import GPTSize, LlamaSize, ViTSize
from dlojz.pipeline.messages import ENDS_BACKWARD, Item, Moment, RankOrder, runner_of, splits_backward
from dlojz.pipeline.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.prediction.allocator import CachingAllocator, replay
from dlojz.prediction.communication import boundary_bytes, receive_buffers_bytes, samples_bytes
from dlojz.prediction.engine_memory import (
    DDP,
    ByHand,
    ByHandInForward,
    Compressed,
    DDPInForward,
    EngineMemory,
    HookedDDP,
    InBackwardMemory,
    InForward,
    Ledger,
    LocalStepsMemory,
    Megatron,
    Movement,
    StepReplay,
    by_hand_in_backward,
)
from dlojz.prediction.engine_memory_sharded import (
    FSDP2,
    DeepSpeed,
    DeepSpeed3,
    DeepSpeed12,
    DeepSpeedExperts,
    ExpertsMemory,
    ZeroStage1Memory,
    ZeroStage2Memory,
    ZeroStage3Memory,
)
from dlojz.prediction.model_trace import (
    RankPasses,
    StagePasses,
    block_of,
    compute_of,
    micro_batches_in_flight,
    passes_of,
    reached_names,
    trace_of,
    trace_of_rank,
)
from dlojz.prediction.rules_of_thumb import (
    RULES,
    Shape,
    infinity_activation_bytes,
    infinity_checkpoint_bytes,
    layer_bytes,
)
from dlojz.prediction.shapes import (
    ModelShapes,
    RankPart,
    check_parameters,
    count_parameters,
    model_shapes,
    switches_hash,
)
from dlojz.prediction.states import compute_bytes, offload_states, predict_states
from dlojz.prediction.trace import MemoryTrace, TraceMark
from dlojz.results.footprint import STATES, Category, Memory
from dlojz.results.record import MemorySample

TEXTS = Sentences(Path(__file__).parent / "data" / "forecast.md")

OVERLAYS: dict[str, Callable[[RunConfig, ModelShapes], EngineMemory]] = {
    "one_process": EngineMemory,
    "ddp": DDP,
    "hooked_ddp": HookedDDP,
    "by_hand": ByHand,
    "zero_1_by_hand": ZeroStage1Memory,
    "zero_2_by_hand": ZeroStage2Memory,
    "zero_3_by_hand": ZeroStage3Memory,
    "fsdp2": FSDP2,
    "deepspeed_0": DeepSpeed,
    "deepspeed_1_or_2": DeepSpeed12,
    "deepspeed_3": DeepSpeed3,
    "one_bit": Compressed,
    "local_steps": LocalStepsMemory,
    "experts": ExpertsMemory,
    "deepspeed_experts": DeepSpeedExperts,
    "in_backward": InBackwardMemory,
    "by_hand_in_backward": by_hand_in_backward,
    "in_forward": InForward,
    "ddp_in_forward": DDPInForward,
    "by_hand_in_forward": ByHandInForward,
    "megatron": Megatron,
}
"""Engine memories, by the names in `dlojz.config.engines`."""


def states_and_overlay(part: RankPart, trace: MemoryTrace, *, on_gpu: bool = False) -> tuple[Memory, EngineMemory]:
    """Predict a rank's states, and build the memory of the engine that runs it, from its part and its trace.

    Frozen parameters are none of the engine's business, but where it gathers them; nor are those without a gradient,
    but where it flattens them with the others. DeepSpeed's optimizer is given the others alone.
    """
    config, shapes, engine = part.config, part.shapes, part.config.engine_spec
    frozen = [parameter for parameter in shapes.parameters if engine.flattens_unreached and not parameter.is_trained]
    shapes = shapes.trained if frozen else shapes
    if engine.skips_unreached or engine.flattens_unreached:
        shapes = shapes.trained_only(reached_names(trace.events))
    states = offload_states(config, shapes, predict_states(config, shapes, part.dp_rank), part.dp_rank)
    if frozen:
        # They stay whole but in stage 3, which divides the weights of every module.
        ranks = config.layout.dp if engine.gathers_frozen else 1
        frozen_bytes = compute_bytes(config) * sum(parameter.padded_numel(ranks) for parameter in frozen)
        states = states.model_copy(update={"weights_bytes": (states.weights_bytes or 0) + frozen_bytes})
    has_all = engine.gathers_frozen or engine.flattens_unreached
    overlay = OVERLAYS[engine.overlay](config, shapes if has_all else shapes.trained)
    overlay.on_gpu, overlay.dp_rank = on_gpu, part.dp_rank
    return states, overlay


class PipelineReplay(StepReplay):
    """Replay of a pipeline rank's step, action by action.

    Of actions alike (the same pass of the same stage, as many gradients there already) only the first, the fullest and
    the last are replayed: the others allocate the same on top of less.

    Args:
        config, trace, states, overlay, samples_bytes, ledger: as for `StepReplay`.
        passes: of the rank's stages.
        moments: the rank's actions, with what it keeps at each.
    """

    def __init__(
        self,
        config: RunConfig,
        trace: MemoryTrace,
        states: Memory,
        overlay: EngineMemory,
        passes: RankPasses,
        moments: list[Moment],
        *,
        samples_bytes: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(config, trace, states, overlay, samples_bytes=samples_bytes, ledger=ledger)
        self._passes = passes
        self._moments = moments
        self._chosen = self._fullest()
        self._counts: dict[Item, int] = {}
        self._is_last = False
        self._former: list[Hashable] = []
        """Gradients of the weights that were computed last in a second half: `stage_backward_weight` names them still,
        while it computes the next ones."""
        self._in_turn: list[Hashable] | None = None

    @property
    def last(self) -> bool:
        """Whether no other backward of this stage follows in this step."""
        return self._is_last

    def _fullest(self) -> list[tuple[Moment, bool]]:
        """The actions to replay, in order, each with whether it ends the last backward of its stage."""
        begun: set[tuple[int, int]] = set()
        final = {
            (moment.action.pipe, moment.action.stage): number
            for number, moment in enumerate(self._moments)
            if moment.action.kind in ENDS_BACKWARD
        }
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, (action, _, item) in enumerate(self._moments):
            stage_key = (action.pipe, action.stage)
            is_last = final.get(stage_key) == number
            groups[action.kind, stage_key, item, len(begun), stage_key in begun, is_last].append(number)
            if action.kind in ENDS_BACKWARD:
                begun.add(stage_key)
        chosen: dict[int, bool] = {}
        for group, numbers in groups.items():
            is_last = bool(group[-1])  # type: ignore[index]
            fullest = max(numbers, key=lambda number: self._kept_bytes(self._moments[number].others))
            chosen |= dict.fromkeys((numbers[0], fullest, numbers[-1]), is_last)
        return [(self._moments[number], chosen[number]) for number in sorted(chosen)]

    def _kept_bytes(self, item_counts: Mapping[Item, int]) -> int:
        return sum(count * self._passes.item_bytes[item] for item, count in item_counts.items())

    def _micro_batches(self) -> None:
        of_rank = self.trace, self._is_gradient
        for moment, is_last in self._chosen:
            self._is_last = is_last
            self.micro_batch = moment.action.micro_batch
            self._act(moment)
        self._keep({})
        self.trace, self._is_gradient = of_rank

    def _keep(self, item_counts: Mapping[Item, int]) -> None:
        """Hold what is kept of other micro-batches, piece by piece; of what was held before, the rest is dropped."""
        for item in {*self._counts, *item_counts}:
            before, new_count = self._counts.get(item, 0), item_counts.get(item, 0)
            for number in range(new_count, before):
                self.ledger.drop(("in flight", item, number))
            for number in range(before, new_count):
                self.ledger.hold(("in flight", item, number), "activations", self._passes.item_bytes[item])
        self._counts = dict(item_counts)

    def _act(self, moment: Moment) -> None:
        action, item_counts, batch_item = moment
        self._at("forward" if action.kind == FORWARD else "backward")
        self._keep(item_counts)
        in_halves = batch_item is not None and batch_item.kind != "activations"
        if action.kind == BACKWARD_INPUT and not in_halves:
            return  # a first stage leaves all to the second half
        if batch_item is None:
            passes = self._passes.whole[action.stage]
            kept_storages: tuple[int, ...] = ()
            part = "forward"
        else:
            passes, kept_storages = self._passes.of(batch_item)
            part = "weights" if action.kind == BACKWARD_WEIGHT and in_halves else "backward"
        self.trace = passes.trace
        self._is_gradient = _gradients_of(passes)
        number = self.micro_batch
        for storage in kept_storages:
            self._hold_kept(storage)
        self._in_turn = [] if part == "weights" else None
        for event in passes.events[part]:
            if isinstance(event, TraceMark):
                self._mark(event)
                continue
            self._at("forward" if part == "forward" else "backward", event.module)
            if self._in_turn and event.delta_bytes > 0:
                self._former, self._in_turn = self._in_turn, []
            self._allocate(event, number)
        for key in (*self._former, *(self._in_turn or ())):
            self.ledger.drop(key)
        self._former, self._in_turn = [], None
        for storage in passes.trace.bytes_of:
            self.ledger.drop(("storage", number, storage))
        if action.kind in ENDS_BACKWARD:
            self.end_backward()

    def _mark(self, event: TraceMark) -> None:
        is_accumulated = event.what == "ready" and event.name in self._accumulated and self.overlay.keeps_gradients
        if is_accumulated and self._in_turn is not None:
            for key in self._former:
                self.ledger.drop(key)
            self._former = []
            gradient_key = ("gradient", event.name, "former")
            self.ledger.rename(("gradient", event.name, "new"), gradient_key)
            self._in_turn.append(gradient_key)
        super()._mark(event)

    def _hold_kept(self, storage: int) -> None:
        """Hold again what the forward of this micro-batch has kept."""
        trace, key = self.trace, ("storage", self.micro_batch, storage)
        if storage in trace.on_host:
            self.ledger.hold_on_host(key, trace.bytes_of[storage])
        else:
            category: Category = "activations"
            self.ledger.hold(key, category, trace.bytes_of[storage], block_of(trace.module_of[storage]))


def _gradients_of(passes: StagePasses) -> dict[int, str]:
    return {
        event.storage: event.name
        for events in passes.events.values()
        for event in events
        if isinstance(event, TraceMark) and event.what == "ready"
    }


def pipeline_replay(
    part: RankPart,
    trace: MemoryTrace,
    states: Memory,
    overlay: EngineMemory,
    *,
    retold: Callable[[MemoryTrace], MemoryTrace] = lambda trace: trace,
    on_gpu: bool = False,
    ledger: Ledger | None = None,
) -> PipelineReplay:
    """Prepare the replay of a pipeline rank's step, to be run.

    Args:
        retold: changes the traces of all blocks beforehand.
        on_gpu: with the corrections for a GPU.
        ledger: to write in; by default a new one.
    """
    config = part.config
    halves = splits_backward(config)
    passes = passes_of(
        retold(trace_of(part, on_gpu=on_gpu)),
        retold(trace_of(part, on_gpu=on_gpu, in_halves=True)) if halves else None,
        part.bounds,
        part.stages,
        boundary_bytes(config),
    )
    order = RankOrder(schedule_of(config.layout), part.pp_rank, runner_of(config), passes.retaining, halves=halves)
    return PipelineReplay(
        config, trace, states, overlay, passes, list(order.moments()), samples_bytes=samples_bytes(part), ledger=ledger
    )


KEPT_MORE = 0.005
"""Share of the activations by which a compiled forward may keep more than eager: measured up to 0.004."""


class CompiledRange(NamedTuple):
    """Range of the peak of a compiled step, in bytes.

    Attributes:
        low_bytes: what is kept at least.
        high_bytes: the peak of eager, and what compiling adds at most.
        beside_bytes: taken of the GPU beside the peak: context and NCCL.
        limit_bytes: of the GPU; None for the CPU.
    """

    low_bytes: int
    high_bytes: int
    beside_bytes: int
    limit_bytes: int | None

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the GPU; None where the range leaves it open, or there is none."""
        if self.limit_bytes is None:
            return None
        ends = {end + self.beside_bytes <= self.limit_bytes for end in (self.low_bytes, self.high_bytes)}
        return ends.pop() if len(ends) == 1 else None


CUBLAS_HANDLES = 2
"""cuBLAS handles: one of the thread that runs forward, one of autograd's."""


@dataclass(frozen=True)
class Forecast:
    """Memory of one rank through one training step.

    Attributes:
        memory: by category, with the peak, its moment, and the categories then.
        peak_micro_batch: number of the micro-batch in which the peak occurs, from 1.
        peak_module: path of the module that computes then; empty in the loss.
        at_peak_by_block: bytes of each block at the peak, by category; under an empty name what belongs to none.
        activations_by_module: bytes that each module's forward keeps for backward, for one micro-batch.
        in_flight: micro-batches whose activations are held at once.
        samples: the step as a timeline, in the order of the movements.
        movements: each allocation and release, for the allocator's model and the memory viewer.
        without_gradient: names of parameters that backward does not reach though they are not frozen.
        kept_products_bytes: what forward keeps of products' results for one micro-batch, or a loss needs of them.
    """

    config: RunConfig
    rank: int
    device: Device | None
    memory: Memory
    peak_micro_batch: int
    peak_module: str
    at_peak_by_block: tuple[tuple[str, dict[Category, int]], ...]
    activations_by_module: Mapping[str, int]
    in_flight: int
    samples: tuple[MemorySample, ...]
    movements: tuple[Movement, ...]
    without_gradient: tuple[str, ...] = ()
    kept_products_bytes: int = 0

    @property
    def compiled(self) -> CompiledRange:
        """Bound the peak of the same step where `torch.compile` has compiled the model, its loss too or not.

        Its partitioner chooses what forward keeps: it computes no product again, so that those results stay which
        backward reads; in the models measured it kept up to 0.4 % more than eager. A compiled backward gives all
        gradients at its end, where eager adds each to those of earlier micro-batches at once, or updates by it.

        Source: torch 2.13, `_functorch/partitioners.py`, `min_cut_rematerialization_partition`, `get_default_op_list`.
        """
        memory, layout = self.memory, self.config.layout
        gradients_bytes, in_passes = memory.gradients_bytes or 0, self.config.update in IN_PASSES
        accumulates = layout.micro_batches > 1
        states_bytes = memory.states_bytes - gradients_bytes
        in_forward_bytes = states_bytes + self.in_flight * self.kept_products_bytes + accumulates * gradients_bytes
        low_bytes = max(in_forward_bytes, states_bytes if in_passes else memory.states_bytes)
        high_bytes = (memory.peak_bytes or 0) + ceil(KEPT_MORE * (memory.activations_bytes or 0))
        high_bytes += gradients_bytes if accumulates or in_passes else 0
        beside_bytes = (memory.needed_bytes or 0) - (memory.peak_bytes or 0)
        limit_bytes = self.device.memory_bytes if self.device else None
        return CompiledRange(min(low_bytes, memory.peak_bytes or 0), high_bytes, beside_bytes, limit_bytes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what of the model is not as usual, or not predicted."""
        notes = (self._without_gradient_note(), self._recurrent_note(), self._pipeline_note())
        return tuple(filter(None, (*notes, self._frozen_note(), self._paged_note())))

    def _frozen_note(self) -> str:
        trained, total = model_shapes(self.config).trained.num_parameters, count_parameters(self.config)
        if trained == total:
            return ""
        share = percent(trained / total, 2)
        counts = {"trained": format_count(trained), "total": format_count(total)}
        notes = [TEXTS.say("notes", "trained in part", share=share, **counts)]
        if self.config.engine_spec.flattens_unreached and self.config.engine_spec.gathers_frozen:
            notes.append(TEXTS.say("notes", "gathers frozen weights"))
        if self.config.lora_base != "none":
            notes.append(TEXTS.say("notes", "quantized base", bits=self.config.lora_base.removesuffix("bit")))
        return " ".join(notes)

    def _paged_note(self) -> str:
        if not OPTIMIZERS[self.config.optimizer].is_paged:
            return ""
        return TEXTS.say("notes", "paged states", pages=format_bytes(self.memory.host_bytes or 0))

    def _without_gradient_note(self) -> str:
        if not self.without_gradient:
            return ""
        number, shapes = len(self.without_gradient), model_shapes(self.config)
        first_name, total = visible(shapes.own_path(self.without_gradient[0])), len(shapes.parameters)
        note = TEXTS.say("without gradient", "parameters", total=total, number=number, first_name=first_name)
        spec, layout = self.config.engine_spec, self.config.layout
        keys = ["no state", "ddp waits"] if layout.strategy == "ddp" else ["no state"]
        if spec.flattens_unreached and layout.offload not in ("optimizer", "parameters"):
            keys = ["kept by the engine"]
        elif not spec.skips_unreached:
            keys = ["filled in"]
        return " ".join([note, *(TEXTS.say("without gradient", key, engine=spec.title(layout.zero)) for key in keys)])

    def _recurrent_note(self) -> str:
        shapes = model_shapes(self.config)
        if not shapes.recurrent:
            return ""
        return TEXTS.say("notes", "recurrent layers", layer=visible(shapes.own_path(shapes.recurrent)))

    def _pipeline_note(self) -> str:
        layout = self.config.layout
        if layout.pp == 1:
            return ""
        if layout.engine == "deepspeed":
            return TEXTS.say("notes", "deepspeed pipeline")
        if layout.checkpointing != "none" and schedule_of(layout).splits_backward:
            return TEXTS.say("notes", "split backward")
        if layout.engine_spec.gathers_per_step:
            return TEXTS.say("notes", "fsdp2 in a pipeline")
        return ""

    @property
    def events(self) -> tuple[tuple[int, int], ...]:
        """Number of each storage and the bytes by which it grows, for the allocator's model."""
        return tuple((movement.key, movement.delta_bytes) for movement in self.movements)

    @property
    def streams(self) -> dict[int, int]:
        """Streams of the storages that another one than the first allocates."""
        return _streams(self.movements)

    @cached_property
    def expandable_reserved_bytes(self) -> int | None:
        """Bytes reserved where segments grow (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`); None on a CPU."""
        if self.device is None:
            return None
        return replay(self.events, CachingAllocator(expandable=True), self.streams).reserved_peak_bytes

    @property
    def moment(self) -> str:
        """Describe the moment of the peak, e.g. `backward of micro-batch 3, in blocks.2`."""
        phase = self.memory.peak_moment or ""
        number = self.peak_micro_batch
        suffix = TEXTS.say("moment", "module", module=self.peak_module) if self.peak_module else ""
        key = phase if phase in ("optimizer", "forward", "backward") else "between"
        if phase == "backward" and not suffix:
            key = "loss"
        return TEXTS.say("moment", key, number=number, suffix=suffix)


def forecast(config: RunConfig, rank: int = 0, device: Device | str | None = None) -> Forecast:
    """Predict one rank's memory through a steady training step.

    Args:
        config: the run; every legal layout, also those that no engine runs yet.
        rank: from 0 to the world size; tensor parallelism innermost, then context
            parallelism, pipeline outermost.
        device: a GPU or its name (see `dlojz.hardware`); by default the CPU, where the engines run in the labs.

    Raises:
        LabError: if the rank or the device does not exist, or the model cannot be cut so.
    """
    check_rank(config, rank)
    gpu = hardware.device(device) if isinstance(device, str) else device
    return _forecast(config, rank, gpu, switches_hash())


def check_rank(config: RunConfig, rank: int) -> None:
    """Refuse a rank that a layout does not have.

    Raises:
        LabError: naming those it has.
    """
    layout = config.layout
    if not isinstance(rank, int) or not 0 <= rank < layout.world_size:
        raise refusal(
            en=f"rank {rank} does not exist: {layout.degrees} has ranks 0 to {layout.world_size - 1}.",
            fr=f"le rang {rank} n’existe pas : {layout.degrees} a les rangs 0 à {layout.world_size - 1}.",
        )


def heaviest(config: RunConfig, device: Device | str | None = None) -> Forecast:
    """Forecast the rank that takes most memory, among the first of each pipeline stage.

    Raises:
        LabError: as `forecast`.
    """
    layout = config.layout
    first_of_stage = range(0, layout.world_size, layout.replicas * layout.tp)
    forecasts = [forecast(config, rank, device) for rank in first_of_stage]
    return max(forecasts, key=lambda rank_forecast: rank_forecast.memory.needed_bytes or 0)


def replay_of(
    part: RankPart,
    device: Device | None,
    ledger: Ledger | None = None,
    retold: Callable[[MemoryTrace], MemoryTrace] = lambda trace: trace,
) -> StepReplay:
    """Prepare the replay of a rank's step, to be run.

    Args:
        ledger: to write in; by default a new one.
        retold: changes the rank's trace beforehand.
    """
    config, on_gpu = part.config, device is not None
    check_parameters(config, model_shapes(config))
    trained = part.shapes.trained.parameters  # a model that cannot be cut so is refused before it is traced
    trace = trace_of_rank(part, trace_of(part, on_gpu=on_gpu))
    states, overlay = states_and_overlay(part, trace, on_gpu=on_gpu)
    step: StepReplay
    if config.layout.pp > 1:
        step = pipeline_replay(part, retold(trace), states, overlay, retold=retold, on_gpu=on_gpu, ledger=ledger)
    else:
        step = StepReplay(config, retold(trace), states, overlay, ledger=ledger)
    reached = reached_names(trace.events)
    step.without_gradient = tuple(parameter.name for parameter in trained if parameter.name not in reached)
    if buffers_bytes := receive_buffers_bytes(part):
        step.ledger.hold(("receive buffers",), "workspace", buffers_bytes)
    if device is not None:
        for handle in range(CUBLAS_HANDLES):
            step.ledger.hold(("cublas", handle), "workspace", device.cublas_workspace_bytes)
    return step


@lru_cache(maxsize=256)
def _forecast(config: RunConfig, rank: int, device: Device | None, switches: str) -> Forecast:
    del switches  # another forecast where they differ
    part, path_of = RankPart(config, rank), model_shapes(config).own_path
    return forecast_of(replay_of(part, device), rank, device, micro_batches_in_flight(part), path_of)


def forecast_of(
    step: StepReplay, rank: int, device: Device | None, in_flight: int = 1, path_of: Callable[[str], str] = str
) -> Forecast:
    """Run a prepared replay, which has not been run yet, and sum it up.

    Args:
        step: of this rank.
        in_flight: micro-batches whose activations are held at once, at least 1.
        path_of: makes a module's path, as the model's author wrote it, of that in the list of blocks.
    """
    ledger = step.run()
    samples = ledger.samples()  # of one step: for a GPU another is run below
    return Forecast(
        config=step.config,
        rank=rank,
        device=device,
        memory=_memory(step.config, ledger, step, device),
        peak_micro_batch=ledger.peak_detail[0] + 1,
        peak_module=path_of(ledger.peak_detail[1]),
        at_peak_by_block=tuple((path_of(block), category_bytes) for block, category_bytes in ledger.peak_by_block()),
        activations_by_module={path_of(module): num_bytes for module, num_bytes in step.trace.by_module.items()},
        in_flight=in_flight,
        samples=samples,
        movements=tuple(ledger.movements),
        without_gradient=step.without_gradient,
        kept_products_bytes=_kept_products_bytes(step.trace),
    )


def _kept_products_bytes(trace: MemoryTrace) -> int:
    """Sum what a micro-batch keeps of products' results on the device, and the logits that a loss reads."""
    blocks = [name for name in trace.output_of if name.count(".") == 1]
    # The loss keeps the logits, or their softmax, which is as large or larger.
    logits = trace.output_of[blocks[-1]] if blocks else -1
    storages = {storage for storage in trace.kept if storage in trace.products} | ({logits} & trace.products)
    # A pipeline's rank has a part of the storages.
    return sum(trace.bytes_of.get(storage, 0) for storage in storages - trace.on_host)


def _streams(movements: Iterable[Movement]) -> dict[int, int]:
    """Streams of the storages that another one than the first has allocated."""
    return {movement.key: movement.stream for movement in movements if movement.stream}


def _memory(config: RunConfig, ledger: Ledger, step: StepReplay, device: Device | None) -> Memory:
    """The ledger's figures; the states from their closed forms, which the ledger sees only in part."""
    states = step.states
    updates: dict[str, object] = {f"{category}_bytes": states.category(category) for category in STATES}
    updates["gradients_bytes"] = max(states.gradients_bytes or 0, step.gradient_bytes)
    updates["host_bytes"] = (states.host_bytes or 0) + ledger.most_host_bytes
    if device is not None:
        step.run()  # a second step finds what the first has left cached
        processes = config.layout.world_size
        events = [(movement.key, movement.delta_bytes) for movement in ledger.movements]
        replayed = replay(events, streams=_streams(ledger.movements))
        updates["reserved_bytes"] = replayed.reserved_peak_bytes
        updates["device_bytes"] = (
            replayed.reserved_peak_bytes + device.memory_bytes - device.allocatable_bytes(processes)
        )
    return ledger.memory().model_copy(update=updates)


MASKS_PER_SBH = 2
"""Of Korthikanti's 34·s·b·h bytes, the masks of the two dropouts, 1 byte each (§4.1); our models have no dropout."""


@dataclass(frozen=True)
class Beside:
    """Figure of a formula compared with the forecast.

    Attributes:
        name: of the rule or of the form.
        formula: e.g. `16 Ψ` (Ψ: parameters of the model) or `34·sbh`.
        about: where it holds, in the reader's language.
        source: its publication.
        formula_bytes: for this run on one process.
        forecast_bytes: of the rank, or of the layer, in the forecast.
    """

    name: str
    formula: str
    about: str
    source: str
    formula_bytes: int
    forecast_bytes: int

    @property
    def difference(self) -> float:
        """Relative difference: forecast ÷ formula − 1."""
        return self.forecast_bytes / self.formula_bytes - 1 if self.formula_bytes else 0.0


def rules_beside(forecast: Forecast) -> tuple[Beside, ...]:
    """Compare each rule of thumb for the whole model with the categories that it counts on this rank.

    The master copy belongs to the weights; a rule that counts activations is compared with the peak. None where
    parameters are frozen, as every rule trains all of them.
    """
    shapes, memory = model_shapes(forecast.config), forecast.memory
    if shapes.trained is not shapes:
        return ()
    parameters = shapes.num_parameters
    comparisons = []
    for rule in RULES.values():
        counted: set[Category] = {part.category for part in rule.parts}
        if "activations" in counted:
            counted_bytes = memory.peak_bytes or 0
        else:
            if "weights" in counted:
                counted.add("master")
            counted_bytes = sum(memory.category(name) or 0 for name in counted)
        comparisons.append(
            Beside(
                rule.name,
                f"{rule.bytes_per_parameter} Ψ",
                rule.about(),
                rule.sources[0],
                rule.total_bytes(parameters),
                counted_bytes,
            )
        )
    return tuple(comparisons)


def states_per_parameter(forecast: Forecast) -> float:
    """Compute the bytes of weights, gradients, optimizer states and master copy per parameter of the model."""
    memory = forecast.memory
    states = memory.states_bytes - (memory.buffers_bytes or 0)
    return states / count_parameters(forecast.config)


def _transformer_shape(config: RunConfig) -> tuple[Shape, int] | None:
    """Shape and number of layers of a plain transformer; a ViT's sequence is its patches and the class token."""
    size = models.spec(config.model).size
    if isinstance(size, ViTSize):
        tokens = ((config.image_size or 0) // size.patch) ** 2 + 1
    elif isinstance(size, GPTSize | LlamaSize):
        tokens = (config.sequence_length or 0) // config.layout.cp
    else:
        return None
    return Shape(tokens, config.layout.micro_batch, size.width, size.num_heads), size.depth


def layer_trace_bytes(forecast: Forecast, layers: int) -> int:
    """Return the bytes that a transformer layer keeps for a micro-batch: the median of the rank's layers, or 0."""
    block_bytes: dict[str, int] = {}
    for path, num_bytes in forecast.activations_by_module.items():
        block = ".".join(path.split(".")[:2])
        block_bytes[block] = block_bytes.get(block, 0) + num_bytes
    layer_sizes = [block_bytes[name] for number in range(1, layers + 1) if (name := f"blocks.{number}") in block_bytes]
    return median_low(layer_sizes) if layer_sizes else 0


def forms_beside(forecast: Forecast) -> tuple[Beside, ...]:
    """Compare the papers' closed forms of a layer's activations with the trace; none for other models.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), table 2; Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv
    2104.07857), §3.
    """
    shape_and_depth = _transformer_shape(forecast.config)
    if shape_and_depth is None or not layer_trace_bytes(forecast, shape_and_depth[1]):
        return ()
    shape, layers = shape_and_depth
    traced = layer_trace_bytes(forecast, layers)
    forms = [_korthikanti(forecast.config, shape), _as_run(forecast.config, shape)]
    if forecast.config.layout.tp == 1 and forecast.config.layout.checkpointing != "every_second":
        forms.append(_infinity(forecast.config, shape))
    return tuple(
        Beside(name, formula, about, source, round(num_bytes), traced)
        for name, formula, num_bytes, about, source in filter(None, forms)
    )


Form = tuple[str, str, Fraction, str, str]


def _korthikanti(config: RunConfig, shape: Shape) -> Form | None:
    layout = config.layout
    if layout.checkpointing == "every_second":
        return None
    split = layout.tp > 1
    formula = {
        "none": "sbh(10 + 24/t) + 5·as²b/t" if split else "34·sbh + 5·as²b",
        "selective": "sbh(10 + 24/t)" if split else "34·sbh",
        "full": "2·sbh",
    }[layout.checkpointing]
    if split and layout.sequence_parallel:
        formula = {"none": "34·sbh/t + 5·as²b/t", "selective": "34·sbh/t", "full": "2·sbh/t"}[layout.checkpointing]
    keeps_scores = layout.checkpointing == "none"
    return (
        "Korthikanti",
        formula,
        layer_bytes(
            shape, tp=layout.tp, sequence_parallel=layout.sequence_parallel, checkpointing=layout.checkpointing
        ),
        say(en="16 bit, dropout, scores kept", fr="16 bits, dropout, scores gardés")
        if keeps_scores
        else say(en="16 bit, dropout", fr="16 bits, dropout"),
        "Korthikanti et al. 2022, arXiv 2205.05198, table 2",
    )


def _as_run(config: RunConfig, shape: Shape) -> Form | None:
    """The same with what our transformers are: no dropout, attention that keeps no scores, the run's precision."""
    layout = config.layout
    is_llama = isinstance(models.spec(config.model).size, LlamaSize)
    if layout.checkpointing in ("selective", "every_second") or layout.tp > 1 or is_llama:
        return None  # other tensors are kept: those of matrix products, whole inputs, a gated MLP
    words = 2 if config.precision == "fp32" else 1
    per_sbh = words * (2 if layout.checkpointing == "full" else 34 - MASKS_PER_SBH)
    return (
        say(en="the same as run here", fr="la même, comme ici"),
        f"{per_sbh}·sbh",
        Fraction(per_sbh * shape.sbh),
        say(
            en=f"{16 * words} bit, no dropout, fused attention",
            fr=f"{16 * words} bits, sans dropout, attention fusionnée",
        )
        + (
            say(en="; autocast keeps norms in fp32", fr=" ; autocast garde les normalisations en fp32")
            if compute_of(config) == "autocast"
            else ""
        ),
        "Korthikanti et al. 2022, arXiv 2205.05198, §4.1",
    )


def _infinity(config: RunConfig, shape: Shape) -> Form:
    full = config.layout.checkpointing == "full"
    return (
        "ZeRO-Infinity",
        "2·sbh" if full else "32·sbh + 4·as²b",
        infinity_checkpoint_bytes(shape, 1) if full else Fraction(infinity_activation_bytes(shape, 1)),
        say(en="16 bit", fr="16 bits"),
        "Rajbhandari et al. 2021, arXiv 2104.07857, §3",
    )
