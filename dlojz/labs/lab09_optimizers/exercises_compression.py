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
from typing import TYPE_CHECKING, Any, Literal

from dlojz.base.language import refusal
from dlojz.labs.kit.exercise import Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge, normal
from dlojz.labs.kit.rank_judges import TENSOR_CASES
from dlojz.processes.forks import RankAnswer

if TYPE_CHECKING:
    from torch import Tensor

Scale = Callable[["Tensor"], "Tensor"]
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
    import torch

    return torch.stack([compress(row) for row in draws]).mean(0) - draws.mean(0)


def _signs(values: Tensor) -> Tensor:
    import torch

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
    told = answer(values)
    if not bool((values == before).all()):
        raise Wrong(*_CHANGED)
    return told


_CHANGED = Said(
    "Your function writes into `values`, which others read again: leave it as it is, and return a new tensor.",
    "Votre fonction écrit dans `values`, que d’autres relisent : laissez-le tel quel, et renvoyez un nouveau tenseur.",
)
COMPRESS_SIGNS = Exercise(
    id="compress-signs",
    title=Said("one bit per number", "un bit par nombre"),
    judge=Judge(
        compress,
        trial=_unchanged,
        cases=_vectors,
        mistakes=(
            Mistake(
                lambda values: values.sign() * values.abs().mean(),
                "Where the number is zero you give zero: torch.sign has three results, and one bit has room for two. "
                "Let zero count as positive: torch.where(values >= 0, 1.0, -1.0).",
                "Là où le nombre est nul, vous renvoyez zéro : torch.sign a trois résultats, or un bit n’en distingue "
                "que deux. Comptez zéro comme positif : torch.where(values >= 0, 1.0, -1.0).",
            ),
            Mistake(
                lambda values: -_signs(-values) * values.abs().mean(),
                "All is right but for zero, which counts as positive here: >= rather than >.",
                "Tout est juste, sauf pour zéro, qui compte ici comme positif : >= plutôt que >.",
            ),
            Mistake(
                _signs,
                "The signs are right, but the scale is missing: without it a gradient of 10⁻⁶ and one of 10⁶ say the "
                "same. Multiply by the mean magnitude.",
                "Les signes sont justes, mais l’échelle manque : sans elle, un gradient de 10⁻⁶ et un autre de 10⁶ "
                "disent la même chose. Multipliez par la moyenne des valeurs absolues.",
            ),
            Mistake(
                _scaled(lambda values: values.mean()),
                "The scale is the mean of the numbers, in which positive and negative ones cancel out: take the mean "
                "of their magnitudes, values.abs().mean().",
                "L’échelle est ici la moyenne des nombres, où positifs et négatifs se compensent : prenez celle de "
                "leurs valeurs absolues, values.abs().mean().",
            ),
            Mistake(
                _scaled(lambda values: values.square().mean().sqrt()),
                "Your scale is the root mean square: it keeps the norm, as in the paper on 1-bit Adam, but is not the "
                "nearest to the numbers. Of all c, the one that makes ‖x − c sign(x)‖ smallest is the mean magnitude.",
                "Votre échelle est la moyenne quadratique : elle conserve la norme, comme dans l’article de 1-bit "
                "Adam, mais n’est pas la plus proche des nombres. Parmi tous les c, celui qui minimise ‖x − c sign(x)‖ "
                "est la moyenne des valeurs absolues.",
            ),
            Mistake(
                _scaled(lambda values: values.abs().max()),
                "The scale is the largest magnitude: almost every number comes out too large. Take the mean one.",
                "L’échelle est la plus grande valeur absolue : presque tous les nombres en ressortent trop grands. "
                "Prenez la moyenne.",
            ),
            Mistake(
                _scaled(lambda values: values.abs().sum()),
                "The scale is the sum of the magnitudes: divide it by how many there are.",
                "L’échelle est la somme des valeurs absolues : divisez-la par leur nombre.",
            ),
            *(
                Mistake(
                    _scaled(scale),
                    "Your scale is not the mean magnitude, values.abs().mean(): of all scales that one makes the "
                    "error smallest.",
                    "Votre échelle n’est pas la moyenne des valeurs absolues, values.abs().mean() : de toutes les "
                    "échelles, c’est "
                    "elle qui rend l’erreur la plus petite.",
                )
                for scale in (
                    lambda values: values.abs().median(),
                    lambda values: values.square().mean(),
                    lambda values: values.std(),
                    lambda values: values.norm(),
                )
            ),
            Mistake(
                lambda values: (values >= 0) * values.abs().mean(),
                "Negative numbers become 0: a bit tells + from −, so torch.where(values >= 0, 1.0, -1.0).",
                "Les nombres négatifs deviennent 0 : un bit distingue + de −, donc torch.where(values >= 0, 1.0, "
                "-1.0).",
            ),
            Mistake(
                lambda values: -_signs(values) * values.abs().mean(),
                "The signs are the other way round.",
                "Les signes sont inversés.",
            ),
            Mistake(
                lambda values: _signs(values) / values.abs().mean(),
                "You divide by the scale: multiply.",
                "Vous divisez par l’échelle : multipliez.",
            ),
            Mistake(
                lambda values: _signs(values) * values.abs(),
                "Each number keeps its own magnitude, so nothing is compressed: one scale serves the whole vector.",
                "Chaque nombre garde sa valeur absolue, rien n’est donc compressé : une seule échelle sert tout le "
                "vecteur.",
            ),
        ),
    ),
    praise_en="Right: one bit per number in place of 32, and one scale for all.",
    praise_fr="Exact : un bit par nombre au lieu de 32, et une échelle pour tous.",
    hint_en="Two parts: a tensor of +1 and −1, and one single number by which it is multiplied.",
    hint_fr="Deux morceaux : un tenseur de +1 et de −1, et un seul nombre qui le multiplie.",
    nearer_en="torch.where(condition, 1.0, -1.0) gives the signs, values.abs().mean() the scale.",
    nearer_fr="torch.where(condition, 1.0, -1.0) donne les signes, values.abs().mean() l’échelle.",
)


def _told(draws: Tensor) -> Tensor:
    """Every row compressed by itself."""
    return _signs(draws) * draws.abs().mean(1, keepdim=True)


SIGN_BIAS = Exercise(
    id="sign-bias",
    title=Said("the bias of the signs", "le biais des signes"),
    judge=Judge(
        bias,
        cases=_gradients,
        mistakes=(
            Mistake(
                lambda draws: -bias(draws),
                "The difference is the other way round: what arrives, less what should have arrived.",
                "La différence est prise à l’envers : ce qui arrive, moins ce qui aurait dû arriver.",
            ),
            Mistake(
                lambda draws: compress(draws.mean(0)) - draws.mean(0),
                "You compress the mean. In a training each gradient is compressed as it comes, and the mean is made of "
                "what arrives: compress row by row, then average.",
                "Vous compressez la moyenne. Dans un entraînement, chaque gradient est compressé à mesure, et c’est ce "
                "qui arrive que l’on moyenne : compressez ligne par ligne, puis moyennez.",
            ),
            Mistake(
                lambda draws: compress(draws).mean(0) - draws.mean(0),
                "You compress all rows together, with one scale: each row is a gradient, and has its own scale.",
                "Vous compressez toutes les lignes d’un coup, avec une même échelle : chaque ligne est un gradient, et "
                "a sa propre échelle.",
            ),
            Mistake(
                lambda draws: bias(draws).abs(),
                "You give the magnitude of the bias; its sign tells which way the weights are pushed: keep it.",
                "Vous donnez la valeur absolue du biais ; or son signe dit dans quel sens les poids sont poussés : "
                "gardez-le.",
            ),
            Mistake(
                lambda draws: bias(draws) + draws.mean(0),
                "That is the mean of what arrives; the bias is what it differs by: take draws.mean(0) away.",
                "C’est la moyenne de ce qui arrive ; le biais est l’écart avec ce qui devait arriver : retranchez "
                "draws.mean(0).",
            ),
            Mistake(
                lambda draws: bias(draws).mean(),
                "One number is left, averaged over the weights too, where biases cancel out: average over the draws "
                "alone, mean(0).",
                "Il ne reste qu’un nombre, moyenné aussi sur les poids, où les biais se compensent : ne moyennez que "
                "sur les tirages, mean(0).",
            ),
            Mistake(
                lambda draws: (_told(draws) - draws).sum(0),
                "You add the draws up: take their mean.",
                "Vous additionnez les tirages : prenez leur moyenne.",
            ),
            Mistake(
                lambda draws: _told(draws).median(0).values - draws.median(0).values,
                "You take medians: the bias is a difference of means.",
                "Vous prenez des médianes : le biais est une différence de moyennes.",
            ),
            Mistake(
                lambda draws: _told(draws).mean(0) + draws.mean(0),
                "You add what should have arrived: take it away.",
                "Vous ajoutez ce qui aurait dû arriver : retranchez-le.",
            ),
            Mistake(
                lambda draws: bias(draws) / draws.mean(0),
                "You divide by the mean: the difference itself is asked for.",
                "Vous divisez par la moyenne : on demande la différence elle-même.",
            ),
            Mistake(
                lambda draws: bias(draws).square(),
                "You square the difference: its sign tells which way the weights are pushed.",
                "Vous élevez la différence au carré : son signe dit de quel côté les poids sont poussés.",
            ),
            Mistake(
                lambda draws: draws.sign().mean(0) - draws.mean(0),
                "The scale is missing: each row is compressed by `compress`, signs times its mean magnitude.",
                "L’échelle manque : chaque ligne est compressée par `compress`, signes fois moyenne de ses valeurs "
                "absolues.",
            ),
            Mistake(
                lambda draws: (draws.sign() * draws.abs().mean(0)).mean(0) - draws.mean(0),
                "You take one scale per weight: a gradient, a row, has its own scale, over its weights.",
                "Vous prenez une échelle par poids : chaque gradient, une ligne, a la sienne, sur tous ses poids.",
            ),
            Mistake(
                lambda draws: 0 * draws.mean(0),
                "Your bias is 0: nothing has been compressed.",
                "Votre biais vaut 0 : rien n’a été compressé.",
            ),
            Mistake(
                lambda draws: compress(draws[0]) - draws[0],
                "You look at the first gradient alone: the mean over all rows is asked for.",
                "Vous ne regardez que le premier gradient : on demande la moyenne sur toutes les lignes.",
            ),
            Mistake(
                lambda draws: (_told(draws) - draws).mean(1),
                "You take the mean over the weights: each weight has its own bias, over the draws (dim 0).",
                "Vous prenez la moyenne sur les poids : chaque poids a son biais, sur les tirages (dim 0).",
            ),
        ),
    ),
    praise_en="Right: compression is biased, and averaging over more steps does not remove this bias.",
    praise_fr="Exact : la compression est biaisée, et moyenner sur davantage de pas ne supprime pas ce biais.",
    hint_en="Compress each row by itself, and look at two means over the rows.",
    hint_fr="Compressez chaque ligne séparément, et comparez deux moyennes sur les lignes.",
    nearer_en="torch.stack([compress(row) for row in draws]) has the shape of draws; its mean(0), less draws.mean(0).",
    nearer_fr="torch.stack([compress(row) for row in draws]) a la forme de draws ; son mean(0), moins draws.mean(0).",
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
    return 2 * (ranks - 1) * _message(_chunk(parameters, ranks))


def _chunk(parameters: int, ranks: int) -> int:
    return 8 * math.ceil(math.ceil(parameters / ranks) / 8)


def _message(chunk: float) -> float:
    return chunk / 8 + 4 * math.ceil(chunk / BLOCK)


def _ways(message: Callable[[int, int], float], collectives: int = 2) -> Callable[[int, int], float]:
    return lambda parameters, ranks: collectives * (ranks - 1) * message(parameters, ranks)


COMPRESSED_BYTES = Exercise(
    id="compressed-bytes",
    title=Said("the bytes of a compressed all-reduce", "les octets d’un all-reduce compressé"),
    judge=Judge(
        compressed_bytes,
        cases=((1_000_003, 4), (12_345, 3), (99_999, 8), (2_049, 2), (48_767, 3), (3_199, 4)),
        mistakes=(
            Mistake(
                _ways(lambda parameters, ranks: _chunk(parameters, ranks) / 8),
                "The scales are missing: 4 bytes for every 2048 numbers begun.",
                "Il manque les échelles : 4 octets pour 2048 nombres, tout bloc commencé comptant.",
            ),
            Mistake(
                _ways(lambda parameters, ranks: _chunk(parameters, ranks) / 8 + 4),
                "You count one scale per message; there is one for every 2048 numbers begun.",
                "Vous comptez une échelle par message ; il y en a une pour 2048 nombres, tout bloc commencé comptant.",
            ),
            Mistake(
                _ways(lambda parameters, ranks: _message(_chunk(parameters, ranks)), collectives=1),
                "That is one of the two exchanges: chunks go to the servers (all-to-all), then their means come back "
                "(all-gather).",
                "C’est un seul des deux échanges : les morceaux vont aux serveurs (all-to-all), puis leurs moyennes "
                "reviennent (all-gather).",
            ),
            Mistake(
                lambda parameters, ranks: 2 * ranks * _message(_chunk(parameters, ranks)),
                "A rank does not send the message that is for itself: of its messages N − 1 leave.",
                "Un rang ne s’envoie rien à lui-même : sur ses N messages, N − 1 partent.",
            ),
            Mistake(
                _ways(lambda parameters, ranks: _message(8 * math.ceil(parameters / 8))),
                "You send the whole vector to every server; each gets its chunk only, one N-th of the numbers.",
                "Vous envoyez le vecteur entier à chaque serveur ; chacun ne reçoit que son morceau, un N-ième des "
                "nombres.",
            ),
            Mistake(
                _ways(lambda parameters, ranks: _chunk(parameters, ranks) + 32 * math.ceil(parameters / ranks / BLOCK)),
                "That is in bits: eight signs make a byte.",
                "C’est en bits : huit signes font un octet.",
            ),
            Mistake(
                _ways(lambda parameters, ranks: parameters / ranks / 8 + 4 * parameters / ranks / BLOCK),
                "Bytes and scales come whole: round the chunk up to a multiple of 8 numbers (math.ceil), and the "
                "number of scales too.",
                "Octets et échelles sont entiers : arrondissez le morceau au multiple de 8 supérieur (math.ceil), et "
                "de même le nombre d’échelles.",
            ),
            Mistake(
                _ways(lambda parameters, ranks: 4 * _chunk(parameters, ranks)),
                "That is the all-reduce in fp32: 4 bytes per number. Here a number takes one bit.",
                "C’est l’all-reduce en fp32 : 4 octets par nombre. Ici, un nombre prend un bit.",
            ),
            Mistake(
                _ways(lambda parameters, ranks: _message(parameters // ranks // 8 * 8)),
                "You round the chunk down: all numbers must have a server, so up, to a multiple of 8.",
                "Vous arrondissez le morceau vers le bas : tout nombre doit avoir un serveur, donc vers le haut, à un "
                "multiple de "
                "8.",
            ),
            *(
                Mistake(
                    _ways(lambda parameters, ranks, cut=cut: cut(math.ceil(parameters / ranks))),  # type: ignore[misc]
                    "The chunk is not filled up to a multiple of 8 numbers: its last byte is whole.",
                    "Le morceau n’est pas complété à un multiple de 8 nombres : son dernier octet est entier.",
                )
                for cut in (lambda chunk: chunk // 8 + 4 * math.ceil(chunk / BLOCK), _message)
            ),
            Mistake(
                _ways(
                    lambda parameters, ranks: _chunk(parameters, ranks) / 8 + 4 * (_chunk(parameters, ranks) // BLOCK)
                ),
                "A block of 2048 numbers that is only begun has a scale too: round their number up.",
                "Un bloc de 2048 nombres seulement commencé a aussi son échelle : arrondissez leur nombre vers le "
                "haut.",
            ),
            Mistake(
                _ways(
                    lambda parameters, ranks: (
                        _chunk(parameters, ranks) / 8 + math.ceil(_chunk(parameters, ranks) / BLOCK)
                    )
                ),
                "A scale has 4 bytes: you count one.",
                "Une échelle a 4 octets : vous en comptez un.",
            ),
            Mistake(
                _ways(
                    lambda parameters, ranks: (
                        _chunk(parameters, ranks) + 4 * math.ceil(_chunk(parameters, ranks) / BLOCK)
                    )
                ),
                "You count a byte per number: eight signs make a byte.",
                "Vous comptez un octet par nombre : huit signes font un octet.",
            ),
            Mistake(
                lambda parameters, ranks: compressed_bytes(parameters, ranks) / ranks,
                "You divide by the number of ranks once more: a message is that of one chunk already.",
                "Vous divisez une fois de plus par le nombre de rangs : un message est déjà celui d’un morceau.",
            ),
            Mistake(
                lambda parameters, ranks: compressed_bytes(parameters, ranks) / (ranks - 1),
                "You count one message per exchange: a rank sends one to each of the N − 1 others.",
                "Vous comptez un message par échange : un rang en envoie un à chacun des N − 1 autres.",
            ),
        ),
    ),
    praise_en="Right: Ψ/8 bytes take the place of 4Ψ, and the scales add one part in 64.",
    praise_fr="Exact : Ψ/8 octets remplacent 4Ψ, et les échelles y ajoutent un soixante-quatrième.",
    hint_en="How many numbers does a server serve, how many bytes is its message, how many messages leave a rank, and "
    "how many times?",
    hint_fr="Combien de nombres un serveur sert-il, combien d’octets fait son message, combien de messages quittent un "
    "rang, et combien de fois ?",
    nearer_en="chunk = 8 · ⌈⌈parameters / ranks⌉ / 8⌉; message = chunk / 8 + 4 · ⌈chunk / 2048⌉; ranks − 1 messages, "
    "twice.",
    nearer_fr="chunk = 8 · ⌈⌈parameters / ranks⌉ / 8⌉ ; message = chunk / 8 + 4 · ⌈chunk / 2048⌉ ; ranks − 1 messages, "
    "deux fois.",
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
    import torch

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
    import torch

    from dlojz.by_hand.optimizers.one_bit import decompress
    from dlojz.by_hand.optimizers.sent_bytes import BLOCK_ELEMENTS, SCALE_BYTES, SIGNS_PER_BYTE

    blocks = -(-message.numel() // (BLOCK_ELEMENTS // SIGNS_PER_BYTE + SCALE_BYTES))
    signs = message.numel() - SCALE_BYTES * blocks
    return decompress(message[:signs], message[signs:].clone().view(torch.float32), SIGNS_PER_BYTE * signs)


CHUNK, CALLS = 24, 3
_WORKER, _SERVER = "worker error", "server error"


def values_of(rank: int, size: int, seed: int, call: int) -> Tensor:
    """Make the values of a rank in one call, shape (size × CHUNK,)."""
    return normal(1000 * seed + 10 * rank + call, size * CHUNK) + 0.3


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    import torch
    import torch.distributed as dist

    exchange, types = dist.all_to_all_single, []

    def noted(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        types.append(str(given.dtype))
        return exchange(output, given, *args, **kwargs)

    worker_error, server_error = torch.zeros(size * CHUNK), torch.zeros(CHUNK)
    given: dict[str, Any] = {}
    changed = False
    dist.all_to_all_single = noted  # type: ignore[assignment] # on this rank, which ends with the trial
    for call in range(CALLS):
        values = values_of(rank, size, seed, call)
        result = answer(values, worker_error, server_error)
        changed |= not bool((values == values_of(rank, size, seed, call)).all())
        given[f"mean of call {call}"] = result.clone() if isinstance(result, torch.Tensor) else result
    return {"exchanged": types, "changed": changed}, given | {_WORKER: worker_error, _SERVER: server_error}


def _read(chunks: Sequence[Tensor], how: Compressed) -> list[Tensor]:
    """What the messages of chunks stand for."""
    import torch

    if how == "not at all":
        return list(chunks)
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
    import torch

    workers = [torch.zeros(size * CHUNK) for _ in range(size)]
    servers = [torch.zeros(CHUNK) for _ in range(size)]
    held: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for call in range(CALLS):
        told = []
        for rank in range(size):
            values = values_of(rank, size, seed, call)
            meant = values + workers[rank]
            told.append(_read(meant.chunk(size), messages))
            if _WORKER not in forgets:
                workers[rank] = (values if last_only else meant) - torch.cat(told[rank])
        share = 1 / size if share is None else share
        sums = [sum(one[server] for one in told) * share + servers[server] for server in range(size)]
        chunks = _read(sums, means)
        if _SERVER not in forgets:
            servers = [mean - chunk for mean, chunk in zip(sums, chunks, strict=True)]
        for rank in range(size):
            held[rank][f"mean of call {call}"] = torch.cat(told[rank] if alone else chunks)
    for rank in range(size):
        held[rank] |= {_WORKER: workers[rank], _SERVER: servers[rank]}
    return held


def _values(**ways: Any) -> Callable[[int, int, int], dict[str, Tensor]]:
    return lambda rank, size, seed: simulated(size, seed, **ways)[rank]


def _means(**ways: Any) -> Callable[[int, int, int], dict[str, Tensor]]:
    """The results alone, for a fault that can leave anything in the errors."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        return {name: value for name, value in simulated(size, seed, **ways)[rank].items() if name.startswith("mean")}

    return values


def _uncompressed(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The mean as an ordinary all-reduce gives it."""
    means = [sum(values_of(one, size, seed, call) for one in range(size)) / size for call in range(CALLS)]
    return {f"mean of call {call}": mean for call, mean in enumerate(means)}  # type: ignore[misc]


def _own_chunks(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The first call, where each server takes its own messages for those of all ranks."""
    import torch

    means = []
    for one in range(size):
        told = [read(write(chunk)) for chunk in values_of(one, size, seed, 0).chunk(size)]
        means.append(read(write(torch.stack(told).mean(0))))
    return {"mean of call 0": torch.cat(means)}


def _signs_added(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """Each rank's whole vector, compressed, and then an all-reduce of numbers: of the first call."""
    return {"mean of call 0": sum(read(write(values_of(one, size, seed, 0))) for one in range(size)) / size}  # type: ignore[dict-item]


def _first_call(worker: float = 1.0, server: float = 1.0) -> Callable[[int, int, int], dict[str, Tensor]]:
    """Two calls: by how much what was told is taken away from the errors, 1 if all is right."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        import torch

        errors, left = [torch.zeros(size * CHUNK) for _ in range(size)], [torch.zeros(CHUNK) for _ in range(size)]
        found = {}
        for call in range(2):
            told = []
            for one in range(size):
                errors[one] = errors[one] + values_of(one, size, seed, call)
                told.append([read(write(chunk)) for chunk in errors[one].chunk(size)])
                errors[one] = errors[one] - worker * torch.cat(told[one])
            means = []
            for one in range(size):
                left[one] = left[one] + torch.stack([of[one] for of in told]).mean(0)
                means.append(read(write(left[one])))
                left[one] = left[one] - server * means[one]
            found[f"mean of call {call}"] = torch.cat(means)
        return found

    return values


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """All values are right: what has travelled for them, and is `values` left as it was?"""
    if answers[0].value["changed"]:
        raise Wrong(*_CHANGED)
    calls = answers[0].calls
    floats = [kind for kind in answers[0].value["exchanged"] if kind != "torch.uint8"]
    if floats or any(call["dtype"] != "uint8" and int(call["numel"]) >= CHUNK for call in calls):
        raise Wrong(
            en="The values are right, but numbers of 32 bits travel: hand the messages over as write gives them, "
            "bytes, and read them where they arrive.",
            fr="Les valeurs sont justes, mais ce sont des nombres de 32 bits qui voyagent : échangez les messages tels "
            "que write les donne, en octets, et lisez-les à l’arrivée.",
        )
    message = write(values_of(0, size, 0, 0)[:CHUNK]).numel()
    gathered = [int(call["numel"]) for call in calls if call["op"] in ("all_gather", "all_gather_into_tensor")]
    if any(numel > message for numel in gathered) and not any(call["op"].startswith("all_to_all") for call in calls):
        raise Wrong(
            en="The values are right, but every rank gets all chunks of all ranks: that takes as many times more bytes "
            "as there are ranks. Each chunk goes to its server only: dist.all_to_all_single.",
            fr="Les valeurs sont justes, mais chaque rang reçoit tous les morceaux de tous les rangs : autant de fois "
            "plus d’octets qu’il y a de rangs. Chaque morceau ne va qu’à son serveur : dist.all_to_all_single.",
        )


LABELS = {
    f"mean of call {call}": Said(f"the mean (call {call + 1})", f"la moyenne (appel {call + 1})")
    for call in range(CALLS)
} | {
    _WORKER: Said("the worker's error", "l’erreur du travailleur (worker_error)"),
    _SERVER: Said("the server's error", "l’erreur du serveur (server_error)"),
}

COMPRESSED_ALL_REDUCE = Exercise(
    id="compressed-all-reduce",
    title=Said("the compressed all-reduce", "l’all-reduce compressé"),
    judge=Judge(
        _values(),
        on_ranks=True,
        trial=_trial,
        labels=LABELS,
        inspect=_inspect,
        cases=TENSOR_CASES,
        faults=(
            Mistake(
                _means(alone=True),
                "Every rank gets back what it has said itself: the messages are not exchanged, or their result is "
                "thrown away.",
                "Chaque rang retrouve ce qu’il a dit lui-même : les messages ne sont pas échangés, ou leur résultat "
                "est perdu.",
            ),
            Mistake(
                _values(forgets=(_WORKER, _SERVER)),
                "The first call is right, the next ones are not: neither error is kept. Write into the tensors you are "
                "given (worker_error += …, server_error -= …): a new tensor of the same name is lost when your "
                "function returns.",
                "Le premier appel est juste, pas les suivants : aucune des deux erreurs n’est gardée. Écrivez dans les "
                "tenseurs reçus (worker_error += …, server_error -= …) : un nouveau tenseur du même nom disparaît à la "
                "fin de votre fonction.",
            ),
            Mistake(
                _values(forgets=(_SERVER,)),
                "The servers forget what they leave unsaid: their mean is compressed too, so it has its own "
                "error, to be added next time (server_error).",
                "Les serveurs oublient ce qu’ils ne disent pas : leur moyenne est compressée elle aussi, elle a donc "
                "sa propre erreur, à ajouter la fois suivante (server_error).",
            ),
            Mistake(
                _values(forgets=(_WORKER,)),
                "The workers forget what they leave unsaid: write the values plus worker_error, and keep what the "
                "messages do not say in worker_error.",
                "Les travailleurs oublient ce qu’ils ne disent pas : envoyez les valeurs plus worker_error, et gardez "
                "dans worker_error ce que les messages ne disent pas.",
            ),
            Mistake(
                _values(last_only=True),
                "worker_error loses what had been left unsaid before: the error is (values + worker_error) less the "
                "message, not values less the message.",
                "worker_error perd ce qui restait à dire auparavant : l’erreur vaut (values + worker_error) moins le "
                "message, et non values moins le message.",
            ),
            Mistake(
                _values(share=1.0),
                "The servers add the messages up; their mean is wanted: divide by the number of ranks.",
                "Les serveurs additionnent les messages ; c’est leur moyenne qu’il faut : divisez par le nombre de "
                "rangs.",
            ),
            Mistake(
                _values(messages="with one scale"),
                "A worker's messages all have the scale of its whole vector: each chunk is a separate message, scaled "
                "by the mean magnitude of the numbers in it. write(chunk) gives it.",
                "Les messages d’un travailleur ont tous l’échelle de son vecteur entier : chaque morceau est un "
                "message à part, avec la moyenne des valeurs absolues de ses propres nombres. C’est ce que donne "
                "write(morceau).",
            ),
            Mistake(
                _values(means="with one scale"),
                "The servers' means are compressed together, with one scale: each server writes its mean, with the "
                "scale of the numbers in it, before the all-gather.",
                "Les moyennes des serveurs sont compressées ensemble, avec une seule échelle : chaque serveur écrit sa "
                "propre moyenne, avec l’échelle de ses propres nombres, avant l’all-gather.",
            ),
            Mistake(
                _values(messages="with one scale", means="with one scale"),
                "One scale serves all chunks, there and back: each message has that of its chunk, write(chunk).",
                "Une même échelle sert tous les morceaux, à l’aller comme au retour : chaque message a celle de son "
                "propre morceau, write(morceau).",
            ),
            Mistake(
                _means(means="not at all"),
                "The servers' means come back uncompressed, at 32 bits per number: write them too, and read the "
                "messages after the all-gather.",
                "Les moyennes des serveurs reviennent sans compression, en 32 bits par nombre : passez-les elles aussi "
                "par write, et lisez les messages après l’all-gather.",
            ),
            Mistake(
                _uncompressed,
                "The mean is exact: nothing is compressed, and numbers of 32 bits travel. Write messages, and add the "
                "errors.",
                "La moyenne est exacte : rien n’est compressé, et des nombres de 32 bits voyagent. Écrivez des "
                "messages, et ajoutez "
                "les erreurs.",
            ),
            Mistake(
                _signs_added,
                "Each rank compresses its whole vector once, and the numbers are added up: cut it into chunks, one "
                "message per "
                "server, and let servers compress their mean in turn.",
                "Chaque rang compresse une fois son vecteur entier, et les nombres sont additionnés : coupez-le en "
                "morceaux, un "
                "message par serveur, et faites compresser à son tour la moyenne par les serveurs.",
            ),
            *(
                Mistake(
                    _first_call(worker=taken),
                    "What the worker has told is not taken away from worker_error: worker_error -= told.",
                    "Ce qu’a dit le travailleur n’est pas retranché de worker_error : worker_error -= ce qui est dit.",
                )
                for taken in (0.0, -1.0)
            ),
            *(
                Mistake(
                    _first_call(server=taken),
                    "What the server answers is not taken away from server_error: server_error -= read(answer).",
                    "Ce que répond le serveur n’est pas retranché de server_error : server_error -= read(réponse).",
                )
                for taken in (0.0, -1.0)
            ),
            Mistake(
                _own_chunks,
                "The messages stay where they are: each server averages its own rank's. "
                "dist.all_to_all_single(received, told) sends row j to rank j.",
                "Les messages restent où ils sont : chaque serveur moyenne ceux de son propre rang. "
                "dist.all_to_all_single(reçus, dits) envoie la ligne j au rang j.",
            ),
        ),
    ),
    praise_en="Right: only bytes are sent, all ranks hold the same mean, and both errors are kept.",
    praise_fr="Exact : seuls des octets sont envoyés, tous les rangs ont la même moyenne, et les deux erreurs sont "
    "gardées.",
    hint_en="Four moments: add the error and write one message per chunk; exchange them; average what has come, with "
    "the server's error, and write one message; gather the servers' messages. At each writing, take what was said away "
    "from the error.",
    hint_fr="Quatre moments : ajouter l’erreur et écrire un message par morceau ; les échanger ; moyenner ce qui est "
    "arrivé, avec l’erreur du serveur, et écrire un message ; rassembler ceux des serveurs. À chaque écriture, "
    "retranchez de l’erreur ce qui a été dit.",
    nearer_en="told = torch.stack([write(chunk) for chunk in worker_error.view(size, -1)]) after worker_error += "
    "values; dist.all_to_all_single(received, told) puts into row i what rank i has told you.",
    nearer_fr="told = torch.stack([write(chunk) for chunk in worker_error.view(size, -1)]), après worker_error += "
    "values ; dist.all_to_all_single(received, told) met dans la ligne i ce que le rang i vous a dit.",
)
