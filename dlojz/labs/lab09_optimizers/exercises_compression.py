"""Exercises of lab 09 on compression: signs, their bias, error feedback, bytes, the all-reduce on ranks, freezing.

A message is what `dlojz.by_hand.optimizers.one_bit` sends of a chunk: eight signs to a byte, then 4 bytes of scale for
every 2048 numbers begun. Ranks are compared with one process, call after call; besides, nothing but bytes may be sent,
and each chunk only to its server.

Source: Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), algorithm 1; Tang et al. 2019, "DoubleSqueeze" (arXiv
1905.05957), for the errors of both sides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import significant
from dlojz.labs.kit.exercise import Said, Wrong
from dlojz.labs.kit.exercise_texts import Texts, edited
from dlojz.labs.kit.judges import expect_several, normal
from dlojz.labs.kit.rank_judges import OUTPUT, TENSOR_CASES, refuse_errors, run_on_ranks
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
        raise TEXTS.refusal("shared", "length of a vector", signs_per_byte=SIGNS_PER_BYTE, shape=shape)
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


Compress = Callable[[Tensor], Tensor]
STEPS = 6


def feed_back(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    """Compress the values plus the error; return the message, and the new error.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD" (arXiv 1901.09847), algorithm EF-SGD.
    """
    message = compress(values + error)
    return message, values + error - message


def largest(values: Tensor) -> Tensor:
    """Keep the number of largest magnitude and set all others to zero."""
    sparse = torch.zeros_like(values)
    index = int(values.abs().argmax())
    sparse[index] = values[index]
    return sparse


def _use(answer: Callable[..., Any], seed: int, numel: int, compress: Compress) -> Tensor:
    """Everything told in some steps, and everything kept, end to end."""
    error, history = torch.zeros(numel), []
    for step in range(STEPS):
        result = answer(normal(100 * seed + step, numel) + 0.5, error.clone(), compress)
        message, error = expect_several(result, "(told, error)", 2)
        for tensor in (message, error):
            if not isinstance(tensor, torch.Tensor) or tensor.shape != (numel,):
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise TEXTS.wrong("error-feedback", "another shape of a result", numel=numel, shape=shape)
        history += [message, error]
    return torch.cat(history)


ERROR_FEEDBACK = TEXTS.exercise(
    "error-feedback",
    feed_back,
    trial=_use,
    cases=((1, 7, compress), (2, 40, compress), (3, 9, largest)),
)


SENDING_STEPS, SENDING_SEED, MARGIN = 200, 5, 1.03
"""Steps of the challenge's training, its seed, and how far above DDP's its last loss may be."""
_SENT = {"reduce_scatter_tensor": 0.5, "recv": 0.0, "irecv": 0.0, "barrier": 0.0}
"""What one of two ranks sends in a collective, as a share of the tensor that is recorded; else all of it."""


def _noisy_classes() -> tuple[Tensor, Tensor]:
    """Samples of 4 classes and their labels, one in five drawn at random, so that gradients stay noisy."""
    draws = torch.Generator().manual_seed(SENDING_SEED)
    labels = torch.randint(4, (1024,), generator=draws)
    inputs = torch.randn(4, 16, generator=draws)[labels] + torch.randn(1024, 16, generator=draws)
    wrong = torch.rand(1024, generator=draws) < 0.2
    return inputs, torch.where(wrong, torch.randint(4, (1024,), generator=draws), labels)


def _sending_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Train a small network on this rank, whose gradients the answer averages; its loss on all samples at the end."""
    exchange, exchanged = dist.all_to_all_single, [0.0]

    def noted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        # torch's names: an answer may call it by them.
        # the row for this rank itself does not leave it
        exchanged[0] += input.nbytes * (size - 1) / size
        return exchange(output, input, *args, **kwargs)

    dist.all_to_all_single = noted  # on this rank, which ends with the trial
    inputs, labels = _noisy_classes()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    parameters = list(model.parameters())
    memory: dict[str, Any] = {}
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    order = torch.Generator().manual_seed(seed)
    mean = torch.zeros(0)
    for _ in range(SENDING_STEPS):
        # all ranks draw the same 128 samples; each takes every size-th
        batch = torch.randint(len(inputs), (128,), generator=order)[rank::size]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        mean = answer(gradient.clone(), memory)
        if not isinstance(mean, torch.Tensor) or mean.shape != gradient.shape:
            return {"shape": list(getattr(mean, "shape", [])), "numel": len(gradient)}, {OUTPUT: mean}
        for parameter, share in zip(
            parameters, mean.split([parameter.numel() for parameter in parameters]), strict=True
        ):
            parameter.grad = share.view_as(parameter).clone()
        optimizer.step()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(inputs), labels))
    record = {"loss": loss, "numel": len(mean), "exchanged": exchanged[0]}
    return record, {OUTPUT: torch.cat([parameter.detach().flatten() for parameter in parameters])}


def _mean(gradient: Tensor, memory: dict[str, Any]) -> Tensor:
    """As DDP does."""
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


class _SendingJudge:
    """Train with the answer on two ranks; its score is what it sends, in per cent of what DDP sends."""

    on_ranks = True
    cases = ((2, SENDING_SEED),)

    def __call__(self, answer: Callable[..., Any]) -> float:
        plain, answers = (run_on_ranks(_sending_trial, average, *self.cases[0]) for average in (_mean, answer))
        refuse_errors(answers)
        records, numel = [rank_answer.value for rank_answer in answers], plain[0].value["numel"]
        if (shape := next((record["shape"] for record in records if "shape" in record), None)) is not None:
            raise TEXTS.wrong("fewer-bytes", "a vector of another length", numel=numel, shape=tuple(shape))
        if not bool((answers[0].tensors[OUTPUT] == answers[1].tensors[OUTPUT]).all()):
            raise TEXTS.wrong("fewer-bytes", "different weights on two ranks")
        loss, ddp_loss = records[0]["loss"], plain[0].value["loss"]
        # not <=: a loss of NaN is refused too
        if not loss <= MARGIN * ddp_loss:
            raise TEXTS.wrong(
                "fewer-bytes", "too high a loss at the end", loss=significant(loss), ddp_loss=significant(ddp_loss)
            )
        # the busiest rank counts
        return round(100 * max(map(_sent_bytes, answers)) / max(map(_sent_bytes, plain)), 1)


def _sent_bytes(rank_answer: RankAnswer) -> float:
    """What a rank has sent: what its calls tell, and its all-to-all, whose tensors they do not tell."""
    calls = [call for call in rank_answer.calls if call["dtype"]]
    bytes_of = (_SENT.get(call["op"], 1.0) * call["numel"] * getattr(torch, call["dtype"]).itemsize for call in calls)
    return float(rank_answer.value["exchanged"] + sum(bytes_of))


FEWER_BYTES = TEXTS.challenge("fewer-bytes", _SendingJudge(), target=10)

Norms = Sequence[float]


def freeze_step(norms: Norms, beta2: float, threshold: float) -> int:
    """Find the first step whose norm of the variance is that of Δ = 1/(1 − β2) steps before, up to a threshold.

    Args:
        norms: of the variance after each step, counted from 0.
        beta2: its decay.
        threshold: least ratio of the smaller of the two norms to the larger, from 0 to 1.

    Returns:
        a step; the number of steps where there is none.

    Source: after Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), where the variance is frozen once its norm has
    become stable; that both directions count is ours.
    """
    # round, not int: 1 / (1 − 0.95) is 19.99… in floating point
    delta = round(1 / (1 - beta2))
    # from step Δ on: before it there is no norm to compare with
    for t in range(delta, len(norms)):
        before, after = norms[t - delta], norms[t]
        if min(before, after) / max(before, after) >= threshold:
            return t
    return len(norms)


def _freeze_cases() -> Iterator[tuple[list[float], float, float]]:
    rising = [1 - math.exp(-step / 20) + 0.01 for step in range(200)]
    falling = [1 + 6 * math.exp(-step / 25) for step in range(200)]
    hill = [(step + 1) * math.exp(-step / 15) + 0.5 for step in range(200)]
    yield from ((rising, 0.9, 0.9), (falling, 0.95, 0.96), (hill, 0.9, 0.95), (falling[:40], 0.95, 0.96))
    # At rest from the beginning: the first step that can be compared is the one, and the ratio equals the threshold.
    yield [2.0] * 30, 0.9, 1.0
    # Equal to the threshold later, once.
    yield [1.0] + [8.0 * (1 + step % 2) for step in range(14)] + [16.0] * 9, 0.8, 0.5
    # At rest from the beginning, then moving.
    yield [1.0] * 8 + [1.3**step for step in range(1, 30)] + [1.3**29] * 12, 0.8, 0.9
    # Never: the norm doubles with every step, and with beta2 = 0.95 floor and rounding of Δ differ.
    yield [2.0**step for step in range(40)], 0.95, 0.9


def _freeze_told(case: tuple[list[float], float, float]) -> Said:
    norms, beta2, threshold = case
    return TEXTS.sentence(
        "freeze-step",
        "the case",
        norms_count=len(norms),
        first_norm=significant(norms[0], 3),
        last_norm=significant(norms[-1], 3),
        beta2=beta2,
        threshold=threshold,
    )


_RATIO = "min(before, after) / max(before, after)"

FREEZE_STEP = TEXTS.exercise(
    "freeze-step",
    freeze_step,
    cases=_freeze_cases,
    told=_freeze_told,
    mistakes={
        "ratio before / now, above 1 where the norm falls": f"{_RATIO} → before / after",
        "ratio now / before, above 1 where the norm rises": f"{_RATIO} → after / before",
        "you compare the difference of the norms": f"{_RATIO} → 1 - abs(before - after)",
        "you divide the larger by the smaller": f"{_RATIO} → max(before, after) / min(before, after)",
    },
)
