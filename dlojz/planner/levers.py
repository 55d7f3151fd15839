"""Reduce memory: the largest batch that fits, and what each single change of a run would save.

Every figure is a forecast of a whole configuration, the one that `run` would take.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.prediction.forecast import Forecast, heaviest

MAX_MICRO_BATCH = 2**20
MOST_EXTRAPOLATED = 64
MAX_TP = 8
"""Tensor-parallel ranks are on one node."""


@dataclass(frozen=True)
class Fit:
    """The largest micro-batch that fits, 0 if none does; bytes taken by it (by one sample where none fits)."""

    micro_batch: int
    taken_bytes: int
    limit_bytes: int
    forecast: Forecast


@dataclass(frozen=True)
class Lever:
    """One change of a configuration, and what it would save at the peak of the heaviest rank.

    Args:
        name: short, e.g. `checkpointing`; `change` says it in words.
        taken_bytes: with it; `saved_bytes` less than without it (negative: it takes more).
        host_bytes: what it moves to host memory.
    """

    name: str
    change: str
    config: RunConfig
    taken_bytes: int
    saved_bytes: int
    host_bytes: int
    runnable: bool


def taken_bytes(forecast: Forecast) -> int:
    """Bytes that a rank needs of its device: `Memory.needed_bytes`."""
    return forecast.memory.needed_bytes or 0


def with_micro_batch(config: RunConfig, micro_batch: int) -> RunConfig:
    """The same run with another micro-batch."""
    return RunConfig.of(**{**config.to_dict(), "layout": {**config.layout.to_dict(), "micro_batch": micro_batch}})


def largest_batch(config: RunConfig, device: Device, *, limit_bytes: int | None = None) -> Fit:
    """Find the largest micro-batch whose heaviest rank fits into a device.

    Memory is almost linear in the micro-batch: two forecasts give the line, and those around where it crosses the limit
    decide. The two are of the run's own micro-batch and of half of it, which are forecast for the levers too.

    Args:
        config: the run; its own micro-batch does not change what is found.
        device: whose memory is the limit.
        limit_bytes: another limit than the device's memory.
    """
    limit_bytes = device.memory_bytes if limit_bytes is None else limit_bytes
    forecasts: dict[int, Forecast] = {}
    fits, fails = 0, MAX_MICRO_BATCH

    def taken(micro_batch: int) -> int:
        if micro_batch not in forecasts:
            forecasts[micro_batch] = heaviest(with_micro_batch(config, micro_batch), device)
        return taken_bytes(forecasts[micro_batch])

    config_size = min(config.layout.micro_batch, MAX_MICRO_BATCH - 1)
    guesses = [max(2, config_size), max(1, config_size // 2)]  # popped from the end: half first
    while fails - fits > 1:
        guess = guesses.pop() if guesses else _crossing({size: taken(size) for size in forecasts}, limit_bytes)
        # The limit is not reached by any size: stop at the largest.
        if guess >= MAX_MICRO_BATCH - 1 and fails == MAX_MICRO_BATCH and fits:
            break
        guess = min(max(guess, fits + 1), fails - 1)  # strictly between what fits and what fails: the loop ends
        if taken(guess) <= limit_bytes:
            fits = guess
        else:
            fails = guess
    best = fits or 1
    return Fit(fits, taken(best), limit_bytes, forecasts[best])


def _crossing(bytes_by_size: dict[int, int], limit_bytes: int) -> int:
    """Return the micro-batch where the line through the smallest and the largest known one crosses the limit.

    It is at most `MOST_EXTRAPOLATED` times the largest: while activations are smaller than what the update takes, the
    line is flat.
    """
    low, high = min(bytes_by_size), max(bytes_by_size)
    # The interpolation starts at the largest that fits.
    nearest = max((size for size in bytes_by_size if bytes_by_size[size] <= limit_bytes), default=low)
    # Bytes per sample, at least 1: a flat line has no crossing.
    slope = max(1.0, (bytes_by_size[high] - bytes_by_size[low]) / max(1, high - low))
    return min(nearest + int((limit_bytes - bytes_by_size[nearest]) / slope), MOST_EXTRAPOLATED * high)


def changes(config: RunConfig) -> list[tuple[str, str, dict[str, object]]]:
    """List the levers that a configuration has left: name, in words, fields that change."""
    layout = config.layout
    options: list[tuple[str, str, dict[str, object]]] = []

    def lever(name: str, english: str, french: str, **fields: object) -> None:
        options.append((name, say(en=english, fr=french), fields))

    if layout.checkpointing != "full":
        lever("checkpointing", "checkpoint every block", "points de contrôle à chaque bloc", checkpointing="full")
    if layout.checkpointing == "none":
        lever("selective", "selective checkpointing", "points de contrôle sélectifs", checkpointing="selective")
    if layout.micro_batch % 2 == 0:
        words = "half the micro-batch, twice as many", "micro-batch deux fois plus petit, deux fois plus nombreux"
        # The global batch stays.
        lever("micro-batch", *words, micro_batch=layout.micro_batch // 2, micro_batches=layout.micro_batches * 2)
    if config.precision == "fp32":
        lever("precision", "bf16", "bf16", precision="bf16")
    for stage in range(layout.zero + 1, 4) if layout.dp > 1 and layout.pp == 1 else ():
        # Options of torch's DDP, which the compatibility rules refuse beside DeepSpeed.
        title, plain = f"ZeRO-{stage} (DeepSpeed)", {"bucket_mib": None, "gradient_as_bucket_view": False}
        lever(f"zero-{stage}", title, title, zero=stage, engine="deepspeed", **plain)
    if layout.offload == "none":
        words = "activations to host memory", "activations en mémoire hôte"
        lever("offload-activations", *words, offload="activations")
        if layout.engine == "deepspeed" and layout.zero >= 1:
            words = "optimizer states to host memory", "états de l’optimiseur en mémoire hôte"
            lever("offload-optimizer", *words, offload="optimizer")
    if layout.tp == 1 and (degree := _smallest_tp(config)):
        lever("tp", f"tp={degree}", f"tp={degree}", tp=degree)
    if layout.pp == 1 and layout.zero <= 1:
        lever("pp", "pp=2", "pp=2", pp=2)
    return options


def _smallest_tp(config: RunConfig) -> int | None:
    """The smallest tensor-parallel degree that divides the model's heads and widths; None if there is none."""
    for degree in range(2, MAX_TP + 1):
        try:
            RunConfig.of(**{**config.to_dict(), "layout": {**config.layout.to_dict(), "tp": degree}})
        except LabError:
            continue
        return degree
    return None


def levers(config: RunConfig, device: Device | None = None) -> tuple[Lever, ...]:
    """Forecast what each single change would save on the heaviest rank, the largest saving first.

    The global batch stays; `tp` and `pp` take as many more devices.
    """
    from dlojz.runnable import check_runnable

    current_bytes = taken_bytes(heaviest(config, device))
    options = []
    for name, change, fields in changes(config):
        try:
            changed = RunConfig.of(**{**config.to_dict(), "layout": config.layout, **fields})
            memory = heaviest(changed, device)
        except LabError:  # a model whose heads do not divide, a layout that does not go together: no lever
            continue
        try:  # legal as a configuration, but perhaps nothing that this machine can run
            check_runnable(changed)
            runnable = True
        except LabError:
            runnable = False
        changed_bytes = taken_bytes(memory)
        options.append(
            Lever(
                name,
                change,
                changed,
                changed_bytes,
                current_bytes - changed_bytes,
                memory.memory.host_bytes or 0,
                runnable,
            )
        )
    return tuple(sorted(options, key=lambda lever: -lever.saved_bytes))
