"""Exercises of lab 04 on costs: bytes sent by stage, ZeRO-3's time, offloading, DeepSpeed's JSON, messages.

Volumes are those of `dlojz.by_hand.zero`, its collectives run as rings; times follow the α–β model, layer by layer. A
configuration is judged by what DeepSpeed would do with it, read back by `dlojz.config.deepspeed_json`: no text is
compared, and keys that change nothing are ignored. The challenge, a plan of few messages under a limit of bytes, is
followed step by step on sizes alone; a message is one gather or one reduction, of however many layers.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dlojz.base.language import MEBIBYTE, shortest
from dlojz.config.run_config import RunConfig
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import asked_run, check_settings, expect_json, refuse_nothing, shown

TEXTS = Texts(__file__)


def sent_bytes(weight_bytes: float, ranks: int, stage: int, micro_batches: int) -> float:
    """Bytes that one rank sends per optimizer step; gradients take as many bytes as weights.

    Each reduce-scatter or all-gather of the whole model sends (N − 1) / N times its bytes. Stages 0 and 1: one of each
    per step. Stage 2: one reduce-scatter per micro-batch, one all-gather. Stage 3: per micro-batch two all-gathers
    and one reduce-scatter.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7, for one micro-batch; a ring sends (N − 1) / N per pass.
    """
    return passes(stage, micro_batches) * (ranks - 1) / ranks * weight_bytes


def passes(stage: int, micro_batches: int = 1) -> int:
    """How many times the whole model goes through a reduce-scatter or an all-gather in one step."""
    return (2, 2, micro_batches + 1, 3 * micro_batches)[stage]


def _steps() -> Iterator[tuple[int, int, int, int]]:
    for weight_bytes, ranks, micro_batches in ((8_000, 4, 1), (36_000, 6, 4), (1_000, 2, 3), (500, 1, 2)):
        for stage in (3, 1, 0, 2):
            yield weight_bytes, ranks, stage, micro_batches


ZERO_VOLUME = TEXTS.exercise(
    "zero-volume",
    sent_bytes,
    cases=_steps,
    source=(sent_bytes, passes),
)


ALPHA_S, BETA_S_PER_BYTE = 10e-6, 1 / 25e9
"""The network of lab 03: 10 µs, 25 GB/s."""
FLOPS_PER_S = 200e12
"""What a GPU sustains in bf16; about half of what its data sheet promises."""
MICRO_BATCH = 16
PASSES = 3
"""Per layer and micro-batch: gathered for forward, gathered for backward, gradients reduce-scattered."""


def zero_3_seconds(layer_bytes: Sequence[float], ranks: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Seconds that ZeRO-3 communicates for one micro-batch if nothing is hidden behind the computation.

    For each layer of n bytes three ring collectives of p − 1 steps: 3 (p − 1) (α + β n / p).

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7.2.2; Thakur, Rabenseifner & Gropp 2005, §4.1 and §4.2.
    """
    return sum(_ring(PASSES, size, ranks, alpha_s, beta_s_per_byte) for size in layer_bytes)


def all_at_once_seconds(layer_bytes: Sequence[float], ranks: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """The same for messages that hold the whole model: stages 0 to 2, where nothing has to wait for a layer."""
    return _ring(2, sum(layer_bytes), ranks, alpha_s, beta_s_per_byte)


def compare_with_compute(
    model: str, ranks: int, zero_3: Callable[[Sequence[float], int, float, float], float] = zero_3_seconds
) -> dict[str, float]:
    """Seconds of communication over seconds of computation in one step of a model, for stages 2 and 3, in bf16.

    Args:
        model: of the catalogue; its blocks are the layers.
        ranks: at least 1.
        zero_3: gives the seconds of stage 3.
    """
    from dlojz.config.run_config import RunConfig
    from dlojz.prediction.compute import step_flops
    from dlojz.prediction.shapes import model_shapes

    config = RunConfig.of(model=model, data="synthetic", precision="bf16", dp=ranks, zero=3, micro_batch=MICRO_BATCH)
    compute_s = step_flops(config) / FLOPS_PER_S
    layers = [2.0 * sum(parameter.numel for parameter in block) for block in model_shapes(config).blocks()]
    return {
        "ZeRO-2": all_at_once_seconds(layers, ranks, ALPHA_S, BETA_S_PER_BYTE) / compute_s,
        "ZeRO-3": zero_3(layers, ranks, ALPHA_S, BETA_S_PER_BYTE) / compute_s,
    }


def _ring(passes: int, message_bytes: float, p: int, a: float, b: float) -> float:
    return passes * (p - 1) * (a + b * message_bytes / p)


ZERO_TIME = TEXTS.exercise(
    "zero-time",
    zero_3_seconds,
    cases=(
        ([4_000, 8_000, 4_000], 4, 1e-3, 1e-6),
        ([1_000_000], 8, 2e-3, 5e-8),
        ([640, 1_280, 6_400, 64, 64], 2, 5e-4, 3e-7),
        ([900, 900], 1, 1e-3, 1e-6),
    ),
    source=(zero_3_seconds, _ring),
)


Pair = tuple[float, float]
FLOPS_PER_TOKEN = 6
"""Per parameter: 2 in forward, 4 in backward (Kaplan et al. 2020, arXiv 2001.08361, §2.1)."""


def offload_bytes(parameters: float, ranks: int, offload: str) -> Pair:
    """Bytes of the model states of one rank on the device and in host memory: ZeRO-3, mixed precision, Adam.

    On the host the update works in fp32: master copy, gradient and two moments, 4 + 4 + 8 bytes.

    Source: Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv 2104.07857), §5.1; DeepSpeed 0.19 `runtime/zero/stage3.py`,
    which keeps the gradient on the host in fp32.
    """
    # Bytes per parameter. Device: 16-bit weights (2), gradients (2) and 12 of the optimizer, as far as they stay there.
    device, host = {"none": (16, 0), "optimizer": (2, 16), "parameters": (0, 18)}[offload]
    return device * parameters / ranks, host * parameters / ranks


def _offload_cases() -> Iterator[tuple[int, int, str]]:
    for parameters, ranks in ((8_000, 4), (13_000_000, 1), (960, 6)):
        for offload in ("optimizer", "none", "parameters"):
            yield parameters, ranks, offload


OFFLOAD_BYTES = TEXTS.exercise(
    "offload-bytes",
    offload_bytes,
    cases=_offload_cases,
    mistakes={
        "the two numbers are right, but swapped": lambda p, n, offload: offload_bytes(p, n, offload)[::-1],
    },
    parts=(
        Said("the bytes on the device", "les octets sur le GPU"),
        Said("the bytes in host memory", "les octets dans la mémoire de l’hôte"),
    ),
)


def transfer_over_compute(ranks: int, tokens: float, flops_per_s: float, pcie_bytes_per_s: float) -> float:
    """Seconds that gradients and weights take between device and host, over those that forward and backward take.

    Each rank sends its share of the gradients, 2Ψ/N bytes, and receives its share of the weights, 2Ψ/N; it computes
    6Ψ operations per token. Ψ cancels.

    Source: Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), §4.2.2: 4 bytes per parameter and step.
    """
    return _ratio(4, ranks, tokens, flops_per_s, pcie_bytes_per_s)


def _ratio(
    bytes_per_parameter: float, n: float, tokens: float, flops: float, pcie: float, per_token: float = FLOPS_PER_TOKEN
) -> float:
    # Per parameter: each GPU has its own link and moves its N-th, but computes with all parameters.
    return (bytes_per_parameter / n / pcie) / (per_token * tokens / flops)


OFFLOAD_TIME = TEXTS.exercise(
    "offload-time",
    transfer_over_compute,
    cases=((4, 1000.0, 1e9, 1e6), (1, 200.0, 4e6, 2e4), (8, 5000.0, 6e8, 3e3)),
    mistakes={
        "computation over transfers": lambda n, tokens, flops, pcie: 1 / _ratio(4, n, tokens, flops, pcie),
        "one direction only": lambda n, tokens, flops, pcie: _ratio(2, n, tokens, flops, pcie),
        "each rank transfers everything": lambda n, tokens, flops, pcie: _ratio(4, 1, tokens, flops, pcie),
        "you multiply by the number of ranks": lambda n, tokens, flops, pcie: _ratio(4, 1 / n, tokens, flops, pcie),
        "you add both times": lambda n, tokens, flops, pcie: 4 / n / pcie + 6 * tokens / flops,
        "you count the backward pass alone": lambda n, tokens, flops, pcie: _ratio(4, n, tokens, flops, pcie, 4),
        "transfers in fp32": lambda n, tokens, flops, pcie: _ratio(8, n, tokens, flops, pcie),
        "all states travel": lambda n, tokens, flops, pcie: _ratio(16, n, tokens, flops, pcie),
        "you count the forward pass alone": lambda n, tokens, flops, pcie: _ratio(4, n, tokens, flops, pcie, 2),
    },
)


def bucket_elements(config: RunConfig, bucket_mib: float) -> int:
    """Gradients in a bucket of so many MiB: of 2 bytes each in bf16, 4 in fp32."""
    return int(bucket_mib * MEBIBYTE) // (2 if config.precision == "bf16" else 4)


def _json_cases() -> list[tuple[RunConfig, float]]:
    common = {"engine": "deepspeed", "model": "coatnet_tiny"}
    return [
        (RunConfig.of(dp=4, zero=2, micro_batch=8, **common), 50),
        (RunConfig.of(dp=2, zero=1, micro_batch=16, micro_batches=4, precision="bf16", **common), 10),
        (RunConfig.of(dp=8, zero=3, micro_batch=2, offload="parameters", precision="bf16", **common), 100),
        (RunConfig.of(dp=3, zero=2, micro_batch=5, micro_batches=2, offload="optimizer", **common), 25),
        (RunConfig.of(dp=16, zero=3, micro_batch=4, offload="optimizer", precision="bf16", **common), 200),
    ]


def _check_json(answer: Callable[..., Any], config: RunConfig, bucket_mib: float) -> None:
    document = expect_json(answer(config, bucket_mib))
    _check_batch(document, config)
    request = asked_run(config, "dp", "zero", "micro_batch", "micro_batches", "precision", "offload")
    check_settings(document, config, request)
    _check_bucket(document["zero_optimization"].get("reduce_bucket_size"), config, bucket_mib)


def _check_batch(document: Mapping[str, Any], config: RunConfig) -> None:
    layout = config.layout
    total, micro = document.get("train_batch_size"), document.get("train_micro_batch_size_per_gpu")
    if total is None and micro is None:
        raise TEXTS.wrong("deepspeed-json", "DeepSpeed refuses a file that gives no size of batch")
    if total == layout.micro_batch * layout.micro_batches != layout.global_batch:
        raise TEXTS.wrong("deepspeed-json", "train_batch_size is the batch of one rank", total=total, dp=layout.dp)
    if micro == layout.global_batch != layout.micro_batch:
        raise TEXTS.wrong(
            "deepspeed-json",
            "train_micro_batch_size_per_gpu is the global batch",
            micro=micro,
            micro_batch=layout.micro_batch,
        )


def _check_bucket(numel: Any, config: RunConfig, bucket_mib: float) -> None:
    right, size = bucket_elements(config, bucket_mib), 2 if config.precision == "bf16" else 4
    if numel == right:
        return
    if numel is None:
        raise TEXTS.wrong("deepspeed-json", "no size of a bucket")
    key = "bytes or MiB of a bucket" if numel in (right * size, bucket_mib) else "another size of a bucket"
    raise TEXTS.wrong(
        "deepspeed-json", key, numel=numel, size=size, precision=config.precision, right=right, mib=shortest(bucket_mib)
    )


DEEPSPEED_JSON = TEXTS.exercise("deepspeed-json", cases=_json_cases, trial=_check_json)


SIZES_MIB = (6, 2, 3, 5)
"""Whole weights of each layer; its gradients take as much."""
LIMIT_MIB = 12
TARGET = 7
"""The least there is, by a search over all plans (a test makes it)."""
MOST_STEPS = 200
NAMES = ("gather", "free", "forward", "backward", "reduce")


class _Ranks:
    """What a rank holds whole while a plan is followed.

    Attributes:
        weights, gradients: layers of which it has them whole.
        done: passes that are over: forward of layers 0, 1, … and then backward of …, 1, 0.
        reduced: layers whose gradients are reduced.
    """

    def __init__(self) -> None:
        self.weights: set[int] = set()
        self.gradients: set[int] = set()
        self.reduced: set[int] = set()
        self.done = self.messages = 0

    @property
    def held_mib(self) -> int:
        """Room that whole tensors take."""
        return sum(SIZES_MIB[layer] for layer in (*self.weights, *self.gradients))

    def follow(self, number: int, name: str, layers: tuple[int, ...]) -> None:
        """Do one operation of the plan.

        Raises:
            Wrong: if it breaks a rule.
        """
        step = f"{number}, {name} {list(layers)}"
        where = Said(f"operation {step}", f"opération {step}")
        if name in ("forward", "backward"):
            for layer in layers:
                self._compute(name, layer, where)
        else:
            self._move(name, set(layers), where)
        if self.held_mib > LIMIT_MIB:
            raise TEXTS.wrong(
                "fewest-messages", "above the limit", where=where, held_mib=self.held_mib, LIMIT_MIB=LIMIT_MIB
            )

    def _compute(self, name: str, layer: int, where: Said) -> None:
        num_layers = len(SIZES_MIB)
        expected = ("forward", self.done) if self.done < num_layers else ("backward", 2 * num_layers - 1 - self.done)
        if (name, layer) != expected:
            then = f"{expected[0]} {expected[1]}" if expected[1] >= 0 else ""
            key = "another pass's turn" if then else "all passes are over"
            raise TEXTS.wrong("fewest-messages", key, where=where, **({"then": then} if then else {}))
        if layer not in self.weights:
            raise TEXTS.wrong("fewest-messages", "weights that are not whole", where=where, layer=layer)
        self.done += 1
        if name == "backward":
            self.gradients.add(layer)

    def _move(self, name: str, layers: set[int], where: Said) -> None:
        whole_layers = self.gradients if name == "reduce" else self.weights
        # Gathering what is whole, and freeing or reducing what is not, would count a message or memory wrongly.
        odd = sorted(layers & whole_layers if name == "gather" else layers - whole_layers)
        if odd:
            raise TEXTS.wrong("fewest-messages", name, where=where, layer=odd[0])
        if name == "gather":
            whole_layers |= layers
        else:
            whole_layers -= layers
        # Each operation is one collective for all its layers, and so one message; freeing is local.
        self.messages += name != "free"
        self.reduced |= layers if name == "reduce" else set()


def judge_plan(answer: Callable[[], Any]) -> float:
    """Follow a plan, and return its number of messages.

    Raises:
        Wrong: for a plan that breaks a rule, or that cannot be read.
    """
    operations = answer()
    refuse_nothing(operations)
    if not isinstance(operations, list | tuple):
        raise TEXTS.wrong("fewest-messages", "no list of operations", operations=shown(operations))
    if len(operations) > MOST_STEPS:
        raise TEXTS.wrong("fewest-messages", "too many operations", operations_count=len(operations))
    ranks = _Ranks()
    for number, operation in enumerate(operations, start=1):
        ranks.follow(number, *_read(operation))
    if ranks.done < 2 * len(SIZES_MIB):
        raise TEXTS.wrong("fewest-messages", "passes are missing", done=ranks.done, passes=2 * len(SIZES_MIB))
    if ranks.gradients:
        raise TEXTS.wrong("fewest-messages", "gradients that are not reduced", gradients=sorted(ranks.gradients))
    if ranks.weights:
        raise TEXTS.wrong("fewest-messages", "weights that are still whole", weights=sorted(ranks.weights))
    return float(ranks.messages)


def _read(operation: Any) -> tuple[str, tuple[int, ...]]:
    """Name and layers of an operation."""
    name, layers = "", tuple[int, ...]()
    try:
        name, layer_numbers = operation
        layers = _numbers(layer_numbers)
    except (TypeError, ValueError):
        pass
    valid = name in NAMES and layers and all(0 <= layer < len(SIZES_MIB) for layer in layers)
    if not valid or len(set(layers)) < len(layers):
        raise TEXTS.wrong(
            "fewest-messages",
            "no such operation",
            NAMES=", ".join(NAMES),
            last=len(SIZES_MIB) - 1,
            operation=shown(operation),
        )
    return name, layers


def _numbers(layers: Any) -> tuple[int, ...]:
    """One whole number, or several."""
    try:
        return (operator.index(layers),)
    except TypeError:
        return tuple(operator.index(layer) for layer in layers)


FEWEST_MESSAGES = TEXTS.challenge("fewest-messages", judge_plan, target=TARGET)
