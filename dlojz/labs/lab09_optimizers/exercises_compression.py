"""Exercises of lab 09 on compression: signs, their bias, error feedback, bytes, the compressed all-reduce on ranks.

A message is what `dlojz.by_hand.optimizers.one_bit` sends of a chunk: eight signs to a byte, then 4 bytes of scale for
every 2048 numbers begun. Ranks are compared with one process, call after call; besides, nothing but bytes may be sent,
and each chunk only to its server.

Source: Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), algorithm 1; Tang et al. 2019, "DoubleSqueeze" (arXiv
1905.05957), for the errors of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.base.language import refusal
from dlojz.labs.kit.exercise import Said, Wrong
from dlojz.labs.kit.exercise_texts import Texts, edited
from dlojz.labs.kit.judges import normal
from dlojz.labs.kit.rank_judges import TENSOR_CASES
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)


def compress(values: Tensor) -> Tensor:
    """Multiply every number's sign by the mean magnitude of all; zero counts as positive.

    Args:
        values: any shape.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD" (arXiv 1901.09847): the scaled sign.
    """
    return _signs(values) * values.abs().mean()


def bias(draws: Tensor) -> Tensor:
    """Compute what compression adds on average to gradients of the same weights.

    Args:
        draws: one gradient per row, shape (draws, weights).

    Returns:
        the mean of the compressed rows, less the mean of the rows, shape (weights,).
    """
    return torch.stack([compress(row) for row in draws]).mean(0) - draws.mean(0)


def _signs(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0)


def _vectors() -> Iterator[tuple[Tensor]]:
    """Unlike in length and size, not centred, each with a zero."""
    for seed, numel, size in ((1, 5, 1.0), (2, 64, 20.0), (3, 33, 7.0)):
        values = size * (normal(seed, numel) - 0.4)
        values[numel // 2] = 0.0
        yield (values,)


def _gradients() -> Iterator[tuple[Tensor]]:
    for seed, draws, weights in ((4, 6, 3), (5, 15, 8)):
        yield (3 * normal(seed, draws, weights) + normal(seed + 10, weights),)


def _unchanged(answer: Callable[..., Any], values: Tensor) -> Any:
    """What an answer returns; it may not write into what it is given, which the next exercises read again."""
    before = values.clone()
    message = answer(values)
    if not bool((values == before).all()):
        raise Wrong(*_CHANGED)
    return message


_CHANGED = TEXTS.sentence("shared", "values are written to")
COMPRESS_SIGNS = TEXTS.exercise(
    "compress-signs",
    compress,
    trial=_unchanged,
    cases=_vectors,
    source=(compress, _signs),
    mistakes={
        "zero stays zero": "_signs(values) → values.sign()",
        "zero counts as negative": ">= 0 → > 0",
        "the scale is missing": "* values.abs().mean() →",
        "the scale is the mean of the numbers": ".abs() →",
        "your scale is the root mean square": ".abs().mean() → .square().mean().sqrt()",
        "the scale is the largest magnitude": ".mean() → .max()",
        "the scale is the sum of the magnitudes": ".mean() → .sum()",
        "another scale than the mean magnitude": (
            ".mean() → .median()",
            ".abs().mean() → .square().mean()",
            ".abs().mean() → .std()",
            ".abs().mean() → .norm()",
        ),
        "negative numbers become 0": "_signs(values) → (values >= 0)",
        "the signs are the other way round": "return _signs → return -_signs",
        "you divide by the scale": "* values.abs() → / values.abs()",
        "each number keeps its own magnitude": ".mean() →",
    },
)


def _told(draws: Tensor) -> Tensor:
    """Every row compressed by itself."""
    return _signs(draws) * draws.abs().mean(1, keepdim=True)


SIGN_BIAS = TEXTS.exercise(
    "sign-bias",
    bias,
    cases=_gradients,
    mistakes={
        "the difference is the other way round": lambda draws: -bias(draws),
        "you compress the mean": lambda draws: compress(draws.mean(0)) - draws.mean(0),
        "you compress all rows together": lambda draws: compress(draws).mean(0) - draws.mean(0),
        "you give the magnitude of the bias": lambda draws: bias(draws).abs(),
        "the mean of what arrives, no difference": lambda draws: bias(draws) + draws.mean(0),
        "averages over the weights too": lambda draws: bias(draws).mean(),
        "you add the draws up": lambda draws: (_told(draws) - draws).sum(0),
        "you take medians": lambda draws: _told(draws).median(0).values - draws.median(0).values,
        "you add what should have arrived": lambda draws: _told(draws).mean(0) + draws.mean(0),
        "you divide by the mean": lambda draws: bias(draws) / draws.mean(0),
        "you square the difference": lambda draws: bias(draws).square(),
        "the scale is missing": lambda draws: draws.sign().mean(0) - draws.mean(0),
        "you take one scale per weight": lambda draws: (draws.sign() * draws.abs().mean(0)).mean(0) - draws.mean(0),
        "your bias is 0": lambda draws: 0 * draws.mean(0),
        "you look at the first gradient alone": lambda draws: compress(draws[0]) - draws[0],
        "you take the mean over the weights": lambda draws: (_told(draws) - draws).mean(1),
    },
)


BLOCK = 2048
"""Numbers that share a scale of 4 bytes."""


def compressed_bytes(parameters: int, ranks: int) -> float:
    """Count the bytes that each rank sends in one compressed all-reduce: all-to-all, then all-gather.

    Args:
        parameters: numbers that are averaged.
        ranks: that average them.

    Source: Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888); the count is ours.
    """
    # two collectives; in each, one message to every other rank
    return 2 * (ranks - 1) * _message(_chunk(parameters, ranks))


def _chunk(parameters: int, ranks: int) -> int:
    # whole bytes of 8 signs
    return 8 * math.ceil(math.ceil(parameters / ranks) / 8)


def _message(chunk: float) -> float:
    # one bit per number, 4 bytes of scale for every block begun
    return chunk / 8 + 4 * math.ceil(chunk / BLOCK)


COMPRESSED_BYTES = TEXTS.exercise(
    "compressed-bytes",
    compressed_bytes,
    cases=((1_000_003, 4), (12_345, 3), (99_999, 8), (2_049, 2), (48_767, 3), (3_199, 4)),
    source=(compressed_bytes, _chunk, _message),
    mistakes={
        "the scales are missing": "+ 4 * math.ceil(chunk / BLOCK) →",
        "you count one scale per message": "4 * math.ceil(chunk / BLOCK) → 4",
        "counts one of the two exchanges": "2 * (ranks → (ranks",
        "counts a rank's message to itself": "(ranks - 1) → ranks",
        "you send the whole vector to every server": "_chunk(parameters, ranks)) → _chunk(parameters, 1))",
        "counts bits": "chunk / 8 + 4 → chunk + 32",
        "fractions of bytes and scales": (
            "8 * math.ceil(math.ceil(parameters / ranks) / 8) → parameters / ranks; "
            "math.ceil(chunk / BLOCK) → chunk / BLOCK"
        ),
        "the bytes of an all-reduce in fp32": "chunk / 8 + 4 * math.ceil(chunk / BLOCK) → 4 * chunk",
        "you round the chunk down": "8 * math.ceil(math.ceil(parameters / ranks) / 8) → parameters // ranks // 8 * 8",
        "chunk not filled up to whole bytes": (
            "8 * math.ceil(math.ceil(parameters / ranks) / 8) → math.ceil(parameters / ranks); chunk / 8 → chunk // 8",
            "8 * math.ceil(math.ceil(parameters / ranks) / 8) → math.ceil(parameters / ranks)",
        ),
        "no scale for a block only begun": "math.ceil(chunk / BLOCK) → (chunk // BLOCK)",
        "counts one byte per scale": "4 * math.ceil(chunk → math.ceil(chunk",
        "you count a byte per number": "chunk / 8 → chunk",
        "you divide by the number of ranks once more": "return 2 * → return 2 / ranks *",
        "you count one message per exchange": "(ranks - 1) * →",
    },
)


def write(values: Tensor) -> Tensor:
    """Write signs and scales of a vector as bytes.

    Args:
        values: fp32, shape (n,), n a multiple of 8.

    Returns:
        uint8, shape (n/8 + 4 ⌈n/2048⌉,).

    Raises:
        LabError: if n is not a multiple of 8.
    """
    from dlojz.by_hand.optimizers.one_bit import pack, scales_of
    from dlojz.by_hand.optimizers.sent_bytes import SIGNS_PER_BYTE

    if values.dim() != 1 or values.numel() % SIGNS_PER_BYTE:
        shape = tuple(values.shape)
        raise refusal(
            en=f"write takes a vector whose length is a multiple of {SIGNS_PER_BYTE}, but the shape {shape} was "
            "received.",
            fr=f"write prend un vecteur dont la longueur est un multiple de {SIGNS_PER_BYTE}, mais la forme "
            f"{shape} a été reçue.",
        )
    return torch.cat([pack(values), scales_of(values, values.numel()).view(torch.uint8)])


def read(message: Tensor) -> Tensor:
    """Read a message into the vector that it stands for: every sign times its scale.

    Args:
        message: as `write` gives it.

    Returns:
        fp32, shape (n,).
    """
    from dlojz.by_hand.optimizers.one_bit import decompress
    from dlojz.by_hand.optimizers.sent_bytes import BLOCK_ELEMENTS, SCALE_BYTES, SIGNS_PER_BYTE

    # a full block takes BLOCK/8 bytes of signs and 4 of scale; the last block may have fewer signs
    blocks = -(-message.numel() // (BLOCK_ELEMENTS // SIGNS_PER_BYTE + SCALE_BYTES))
    signs = message.numel() - SCALE_BYTES * blocks
    # clone: a view as fp32 must begin at a multiple of 4 bytes
    return decompress(message[:signs], message[signs:].clone().view(torch.float32), SIGNS_PER_BYTE * signs)


CHUNK, CALLS = 24, 3
_WORKER, _SERVER = "worker error", "server error"


def values_of(rank: int, size: int, seed: int, call: int) -> Tensor:
    """Make the values of a rank in one call, shape (size × CHUNK,)."""
    return normal(1000 * seed + 10 * rank + call, size * CHUNK) + 0.3


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    exchange, types = dist.all_to_all_single, []

    # the record of calls has no type of what an all-to-all exchanges
    def noted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        # torch's names: an answer may call it by them.
        types.append(str(input.dtype))
        return exchange(output, input, *args, **kwargs)

    worker_error, server_error = torch.zeros(size * CHUNK), torch.zeros(CHUNK)
    outputs: dict[str, Any] = {}
    changed = False
    dist.all_to_all_single = noted  # on this rank, which ends with the trial
    for call in range(CALLS):
        values = values_of(rank, size, seed, call)
        result = answer(values, worker_error, server_error)
        changed |= not bool((values == values_of(rank, size, seed, call)).all())
        outputs[f"mean of call {call}"] = result.clone() if isinstance(result, torch.Tensor) else result
    return {"exchanged": types, "changed": changed}, outputs | {_WORKER: worker_error, _SERVER: server_error}


def _read(chunks: Sequence[Tensor]) -> list[Tensor]:
    """What the messages of chunks stand for."""
    return [read(write(chunk)) for chunk in chunks]


def _read_together(chunks: Sequence[Tensor]) -> list[Tensor]:
    """With one scale over all chunks: in each `write` then finds the same mean magnitude."""
    return _read(compress(torch.cat(list(chunks))).chunk(len(chunks)))


def simulated(size: int, seed: int) -> list[dict[str, Tensor]]:
    """Compute in one process what each rank holds after all calls."""
    workers = [torch.zeros(size * CHUNK) for _ in range(size)]
    servers = [torch.zeros(CHUNK) for _ in range(size)]
    rank_tensors: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for call in range(CALLS):
        read_chunks = []
        for rank in range(size):
            values = values_of(rank, size, seed, call)
            meant = values + workers[rank]
            # chunk j is the message to server j
            read_chunks.append(_read(meant.chunk(size)))
            workers[rank] = meant - torch.cat(read_chunks[rank])
        # server: mean of the messages that it reads, and what its last means have left over
        sums = [
            sum(rank_chunks[server] for rank_chunks in read_chunks) / size + servers[server] for server in range(size)
        ]
        chunks = _read(sums)
        servers = [mean - chunk for mean, chunk in zip(sums, chunks, strict=True)]
        for rank in range(size):
            rank_tensors[rank][f"mean of call {call}"] = torch.cat(chunks)
    for rank in range(size):
        rank_tensors[rank] |= {_WORKER: workers[rank], _SERVER: servers[rank]}
    return rank_tensors


def _values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return simulated(size, seed)[rank]


def _means(edits: str, calls: int = CALLS) -> Callable[[int, int, int], dict[str, Tensor]]:
    """The results of the first calls alone, for a fault that can leave anything in the errors."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        tensors = edited(_SOURCE, edits)(rank, size, seed)
        return {name: tensors[name] for name in (f"mean of call {call}" for call in range(calls))}

    return values


_SOURCE = (_values, simulated)
_FORGETFUL_WORKER = "workers[rank] = meant - torch.cat(read_chunks[rank]) → pass"
_FORGETFUL_SERVER = "servers = [mean - chunk for mean, chunk in zip(sums, chunks, strict=True)] → pass"
_ONE_SCALE_THERE, _ONE_SCALE_BACK = "_read(meant → _read_together(meant", "_read(sums → _read_together(sums"


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """All values are right: what has travelled for them, and is `values` left as it was?"""
    if answers[0].value["changed"]:
        raise Wrong(*_CHANGED)
    calls = answers[0].calls
    floats = [kind for kind in answers[0].value["exchanged"] if kind != "torch.uint8"]
    if floats or any(call["dtype"] != "uint8" and int(call["numel"]) >= CHUNK for call in calls):
        raise TEXTS.wrong("compressed-all-reduce", "32-bit numbers travel")
    message = write(values_of(0, size, 0, 0)[:CHUNK]).numel()
    gathered = [int(call["numel"]) for call in calls if call["op"] in ("all_gather", "all_gather_into_tensor")]
    if any(numel > message for numel in gathered) and not any(call["op"].startswith("all_to_all") for call in calls):
        raise TEXTS.wrong("compressed-all-reduce", "every rank gets all chunks")


LABELS = {
    f"mean of call {call}": Said(f"the mean (call {call + 1})", f"la moyenne (appel {call + 1})")
    for call in range(CALLS)
} | {
    _WORKER: Said("the worker's error", "l’erreur du travailleur (worker_error)"),
    _SERVER: Said("the server's error", "l’erreur du serveur (server_error)"),
}

COMPRESSED_ALL_REDUCE = TEXTS.exercise(
    "compressed-all-reduce",
    _values,
    on_ranks=True,
    trial=_trial,
    labels=LABELS,
    inspect=_inspect,
    cases=TENSOR_CASES,
    source=_SOURCE,
    faults={
        "every rank gets back what it has said itself": _means("torch.cat(chunks) → torch.cat(read_chunks[rank])"),
        "neither error is kept": f"{_FORGETFUL_WORKER}; {_FORGETFUL_SERVER}",
        "the servers forget what they leave unsaid": _FORGETFUL_SERVER,
        "the workers forget what they leave unsaid": _FORGETFUL_WORKER,
        "the worker's old error is lost": "= meant - torch → = values - torch",
        "the servers add the messages up": "/ size + servers → + servers",
        "one scale for a worker's whole vector": _ONE_SCALE_THERE,
        "the servers' means are compressed together": _ONE_SCALE_BACK,
        "one scale serves all chunks": f"{_ONE_SCALE_THERE}; {_ONE_SCALE_BACK}",
        "the servers' means come back uncompressed": _means("_read(sums) → sums"),
        "nothing is compressed": _means("_read(meant.chunk(size)) → meant.chunk(size); _read(sums) → sums"),
        "each rank compresses its whole vector once": _means(f"{_ONE_SCALE_THERE}; _read(sums) → sums", calls=1),
        "the worker's message is not taken away": (
            _means("= meant - torch.cat(read_chunks[rank]) → = meant", calls=2),
            _means("= meant - torch → = meant + torch", calls=2),
        ),
        "the server's answer is not taken away": (
            _means("mean - chunk → mean", calls=2),
            _means("mean - chunk → mean + chunk", calls=2),
        ),
        "the messages are not exchanged": _means(
            "rank_chunks[server] for rank_chunks in read_chunks → chunk for chunk in read_chunks[server]", calls=1
        ),
    },
)
