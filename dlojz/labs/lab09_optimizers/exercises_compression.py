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
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.base.language import refusal
from dlojz.labs.kit.exercise import Mistake, Said, Wrong
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import normal
from dlojz.labs.kit.rank_judges import TENSOR_CASES
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

Scale = Callable[[Tensor], Tensor]
Compressed = Literal["chunk by chunk", "with one scale", "not at all"]
"""How the chunks of a vector are compressed."""


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


def _scaled(scale: Scale) -> Callable[[Tensor], Tensor]:
    return lambda values: _signs(values) * scale(values)


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
    mistakes={
        "zero stays zero": lambda values: values.sign() * values.abs().mean(),
        "zero counts as negative": lambda values: -_signs(-values) * values.abs().mean(),
        "the scale is missing": _signs,
        "the scale is the mean of the numbers": _scaled(lambda values: values.mean()),
        "your scale is the root mean square": _scaled(lambda values: values.square().mean().sqrt()),
        "the scale is the largest magnitude": _scaled(lambda values: values.abs().max()),
        "the scale is the sum of the magnitudes": _scaled(lambda values: values.abs().sum()),
        "another scale than the mean magnitude": tuple(
            _scaled(scale)
            for scale in (
                lambda values: values.abs().median(),
                lambda values: values.square().mean(),
                lambda values: values.std(),
                lambda values: values.norm(),
            )
        ),
        "negative numbers become 0": lambda values: (values >= 0) * values.abs().mean(),
        "the signs are the other way round": lambda values: -_signs(values) * values.abs().mean(),
        "you divide by the scale": lambda values: _signs(values) / values.abs().mean(),
        "each number keeps its own magnitude": lambda values: _signs(values) * values.abs(),
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


def _ways(message: Callable[[int, int], float], collectives: int = 2) -> Callable[[int, int], float]:
    return lambda parameters, ranks: collectives * (ranks - 1) * message(parameters, ranks)


COMPRESSED_BYTES = TEXTS.exercise(
    "compressed-bytes",
    compressed_bytes,
    cases=((1_000_003, 4), (12_345, 3), (99_999, 8), (2_049, 2), (48_767, 3), (3_199, 4)),
    mistakes={
        "the scales are missing": _ways(lambda parameters, ranks: _chunk(parameters, ranks) / 8),
        "you count one scale per message": _ways(lambda parameters, ranks: _chunk(parameters, ranks) / 8 + 4),
        "counts one of the two exchanges": _ways(
            lambda parameters, ranks: _message(_chunk(parameters, ranks)), collectives=1
        ),
        "counts a rank's message to itself": lambda parameters, ranks: 2 * ranks * _message(_chunk(parameters, ranks)),
        "you send the whole vector to every server": _ways(
            lambda parameters, ranks: _message(8 * math.ceil(parameters / 8))
        ),
        "counts bits": _ways(
            lambda parameters, ranks: _chunk(parameters, ranks) + 32 * math.ceil(parameters / ranks / BLOCK)
        ),
        "fractions of bytes and scales": _ways(
            lambda parameters, ranks: parameters / ranks / 8 + 4 * parameters / ranks / BLOCK
        ),
        "the bytes of an all-reduce in fp32": _ways(lambda parameters, ranks: 4 * _chunk(parameters, ranks)),
        "you round the chunk down": _ways(lambda parameters, ranks: _message(parameters // ranks // 8 * 8)),
        "chunk not filled up to whole bytes": tuple(
            Mistake(
                _ways(lambda parameters, ranks, cut=cut: cut(math.ceil(parameters / ranks))),  # type: ignore[misc]
                "The chunk is not filled up to a multiple of 8 numbers: its last byte is whole.",
                "Le morceau n’est pas complété à un multiple de 8 nombres : son dernier octet est entier.",
            )
            for cut in (lambda chunk: chunk // 8 + 4 * math.ceil(chunk / BLOCK), _message)
        ),
        "no scale for a block only begun": _ways(
            lambda parameters, ranks: _chunk(parameters, ranks) / 8 + 4 * (_chunk(parameters, ranks) // BLOCK)
        ),
        "counts one byte per scale": _ways(
            lambda parameters, ranks: _chunk(parameters, ranks) / 8 + math.ceil(_chunk(parameters, ranks) / BLOCK)
        ),
        "you count a byte per number": _ways(
            lambda parameters, ranks: _chunk(parameters, ranks) + 4 * math.ceil(_chunk(parameters, ranks) / BLOCK)
        ),
        "you divide by the number of ranks once more": lambda parameters, ranks: (
            compressed_bytes(parameters, ranks) / ranks
        ),
        "you count one message per exchange": lambda parameters, ranks: (
            compressed_bytes(parameters, ranks) / (ranks - 1)
        ),
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


def _read(chunks: Sequence[Tensor], how: Compressed) -> list[Tensor]:
    """What the messages of chunks stand for."""
    if how == "not at all":
        return list(chunks)
    # one scale over all chunks first; in each chunk `write` then finds the same mean magnitude
    written = chunks if how == "chunk by chunk" else compress(torch.cat(list(chunks))).chunk(len(chunks))
    return [read(write(chunk)) for chunk in written]


def simulated(
    size: int,
    seed: int,
    *,
    forgets: Sequence[str] = (),
    share: float | None = None,
    last_only: bool = False,
    messages: Compressed = "chunk by chunk",
    means: Compressed = "chunk by chunk",
    alone: bool = False,
) -> list[dict[str, Tensor]]:
    """Compute in one process what each rank holds after all calls.

    Args:
        forgets: whose errors are not kept, the worker's, the server's, or both.
        share: by which a server multiplies each message; by default 1/size.
        last_only: whether a worker keeps of its error what this call has left alone.
        messages: how the workers' vectors are compressed.
        means: how the servers' means are compressed.
        alone: whether nothing is exchanged: each rank averages its own messages.
    """
    workers = [torch.zeros(size * CHUNK) for _ in range(size)]
    servers = [torch.zeros(CHUNK) for _ in range(size)]
    rank_tensors: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for call in range(CALLS):
        read_chunks = []
        for rank in range(size):
            values = values_of(rank, size, seed, call)
            meant = values + workers[rank]
            # chunk j is the message to server j
            read_chunks.append(_read(meant.chunk(size), messages))
            if _WORKER not in forgets:
                workers[rank] = (values if last_only else meant) - torch.cat(read_chunks[rank])
        share = 1 / size if share is None else share
        # server: mean of the messages that it reads, and what its last means have left over
        sums = [
            sum(rank_chunks[server] for rank_chunks in read_chunks) * share + servers[server] for server in range(size)
        ]
        chunks = _read(sums, means)
        if _SERVER not in forgets:
            servers = [mean - chunk for mean, chunk in zip(sums, chunks, strict=True)]
        for rank in range(size):
            rank_tensors[rank][f"mean of call {call}"] = torch.cat(read_chunks[rank] if alone else chunks)
    for rank in range(size):
        rank_tensors[rank] |= {_WORKER: workers[rank], _SERVER: servers[rank]}
    return rank_tensors


def _values(**options: Any) -> Callable[[int, int, int], dict[str, Tensor]]:
    return lambda rank, size, seed: simulated(size, seed, **options)[rank]


def _means(**options: Any) -> Callable[[int, int, int], dict[str, Tensor]]:
    """The results alone, for a fault that can leave anything in the errors."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        return {
            name: value for name, value in simulated(size, seed, **options)[rank].items() if name.startswith("mean")
        }

    return values


def _uncompressed(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The mean as an ordinary all-reduce gives it."""
    means = [
        sum(values_of(source_rank, size, seed, call) for source_rank in range(size)) / size for call in range(CALLS)
    ]
    return {f"mean of call {call}": mean for call, mean in enumerate(means)}  # type: ignore[misc]


def _own_chunks(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The first call, where each server takes its own messages for those of all ranks."""
    means = []
    for source_rank in range(size):
        chunks = [read(write(chunk)) for chunk in values_of(source_rank, size, seed, 0).chunk(size)]
        means.append(read(write(torch.stack(chunks).mean(0))))
    return {"mean of call 0": torch.cat(means)}


def _signs_added(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """Each rank's whole vector, compressed, and then an all-reduce of numbers: of the first call."""
    total = torch.stack([read(write(values_of(source_rank, size, seed, 0))) for source_rank in range(size)]).sum(0)
    return {"mean of call 0": total / size}


def _first_call(worker: float = 1.0, server: float = 1.0) -> Callable[[int, int, int], dict[str, Tensor]]:
    """Two calls: by how much what was told is taken away from the errors, 1 if all is right."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        worker_errors, server_errors = (
            [torch.zeros(size * CHUNK) for _ in range(size)],
            [torch.zeros(CHUNK) for _ in range(size)],
        )
        means_by_call = {}
        for call in range(2):
            chunks = []
            for source_rank in range(size):
                worker_errors[source_rank] = worker_errors[source_rank] + values_of(source_rank, size, seed, call)
                chunks.append([read(write(chunk)) for chunk in worker_errors[source_rank].chunk(size)])
                worker_errors[source_rank] = worker_errors[source_rank] - worker * torch.cat(chunks[source_rank])
            means = []
            for server_rank in range(size):
                server_errors[server_rank] = server_errors[server_rank] + torch.stack(
                    [rank_chunks[server_rank] for rank_chunks in chunks]
                ).mean(0)
                means.append(read(write(server_errors[server_rank])))
                server_errors[server_rank] = server_errors[server_rank] - server * means[server_rank]
            means_by_call[f"mean of call {call}"] = torch.cat(means)
        return means_by_call

    return values


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
    _values(),
    on_ranks=True,
    trial=_trial,
    labels=LABELS,
    inspect=_inspect,
    cases=TENSOR_CASES,
    faults={
        "every rank gets back what it has said itself": _means(alone=True),
        "neither error is kept": _values(forgets=(_WORKER, _SERVER)),
        "the servers forget what they leave unsaid": _values(forgets=(_SERVER,)),
        "the workers forget what they leave unsaid": _values(forgets=(_WORKER,)),
        "the worker's old error is lost": _values(last_only=True),
        "the servers add the messages up": _values(share=1.0),
        "one scale for a worker's whole vector": _values(messages="with one scale"),
        "the servers' means are compressed together": _values(means="with one scale"),
        "one scale serves all chunks": _values(messages="with one scale", means="with one scale"),
        "the servers' means come back uncompressed": _means(means="not at all"),
        "nothing is compressed": _uncompressed,
        "each rank compresses its whole vector once": _signs_added,
        "the worker's message is not taken away": tuple(_first_call(worker=factor) for factor in (0.0, -1.0)),
        "the server's answer is not taken away": tuple(_first_call(server=factor) for factor in (0.0, -1.0)),
        "the messages are not exchanged": _own_chunks,
    },
)
