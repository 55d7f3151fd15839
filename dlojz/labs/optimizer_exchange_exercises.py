"""Lab 09: the compressed all-reduce on real ranks.

Layer 6 (labs). Invariant: what ranks should hold is computed in one process, call after call, from the same messages;
right values alone are not enough: nothing but bytes may travel, and each chunk to its server only.

Source: Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), algorithm 1; Tang et al. 2019, "DoubleSqueeze"
(arXiv 1905.05957), for the errors of both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.optimizer_messages import read, write
from dlojz.labs.optimizer_trials import normal
from dlojz.labs.tensor_diagnosis import CASES, Fault, by_shares
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

CHUNK, CALLS = 24, 3
_WORKER, _SERVER = "worker error", "server error"


def values_of(rank: int, size: int, seed: int, call: int) -> Tensor:
    """What a rank has to say in one call, shape (size × CHUNK,)."""
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
    dist.all_to_all_single = noted  # type: ignore[assignment] # on this rank, which ends with the trial
    for call in range(CALLS):
        result = answer(values_of(rank, size, seed, call), worker_error, server_error)
        given[f"mean of call {call}"] = result.clone() if isinstance(result, torch.Tensor) else result
    return {"exchanged": types}, given | {_WORKER: worker_error, _SERVER: server_error}


def simulated(
    size: int,
    seed: int,
    *,
    keep_worker: bool = True,
    keep_server: bool = True,
    share: float | None = None,
    last_only: bool = False,
    compress_mean: bool = True,
    alone: bool = False,
) -> list[dict[str, Tensor]]:
    """What each rank holds after all calls, computed in one process.

    Args:
        size: ranks.
        seed: of their values.
        keep_worker: whether the workers' errors are kept.
        keep_server: whether the servers' errors are kept.
        share: by which a server multiplies each message; by default 1/size.
        last_only: whether a worker keeps of its error what this call has left alone.
        compress_mean: whether servers compress what they send back.
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
            told.append([read(write(chunk)) for chunk in meant.chunk(size)])
            if keep_worker:
                workers[rank] = (values if last_only else meant) - torch.cat(told[rank])
        chunks = []
        for server in range(size):
            mean = sum(one[server] for one in told) * (1 / size if share is None else share) + servers[server]
            chunks.append(read(write(mean)) if compress_mean else mean)
            if keep_server:
                servers[server] = mean - chunks[server]
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


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """All values are right: what has travelled for them?"""
    calls = answers[0].calls
    floats = [kind for kind in answers[0].value["exchanged"] if kind != "torch.uint8"]
    if floats or any(call["dtype"] != "uint8" and int(call["numel"]) >= CHUNK for call in calls):
        raise Wrong(
            say(
                en="The values are right, but numbers of 32 bits travel: hand the messages over as write gives them, "
                "bytes, and read them where they arrive.",
                fr="Les valeurs sont justes, mais ce sont des nombres de 32 bits qui voyagent : échangez les messages "
                "tels que write les donne, en octets, et lisez-les à l’arrivée.",
            )
        )
    message = write(values_of(0, size, 0, 0)[:CHUNK]).numel()
    gathered = [int(call["numel"]) for call in calls if call["op"] in ("all_gather", "all_gather_into_tensor")]
    if any(numel > message for numel in gathered) and not any(call["op"].startswith("all_to_all") for call in calls):
        raise Wrong(
            say(
                en="The values are right, but every rank gets all chunks of all ranks: that takes as many times more "
                "bytes as there are ranks. Each chunk goes to its server only: dist.all_to_all_single.",
                fr="Les valeurs sont justes, mais chaque rang reçoit tous les morceaux de tous les rangs : autant de "
                "fois plus d’octets qu’il y a de rangs. Chaque morceau ne va qu’à son serveur : "
                "dist.all_to_all_single.",
            )
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
    judge=by_shares(
        trial=_trial,
        expected=_values(),
        labels=LABELS,
        inspect=_inspect,
        cases=CASES,
        faults=(
            Fault(
                _means(alone=True),
                Said(
                    "Every rank gets back what it has said itself: the messages are not exchanged, or their result is "
                    "thrown away.",
                    "Chaque rang retrouve ce qu’il a dit lui-même : les messages ne sont pas échangés, ou leur "
                    "résultat est perdu.",
                ),
            ),
            Fault(
                _values(keep_worker=False, keep_server=False),
                Said(
                    "The first call is right, the next ones are not: neither error is kept. Write into the tensors "
                    "you are given (worker_error += …, server_error -= …): a new tensor of the same name is lost when "
                    "your function returns.",
                    "Le premier appel est juste, pas les suivants : aucune des deux erreurs n’est gardée. Écrivez dans "
                    "les tenseurs reçus (worker_error += …, server_error -= …) : un nouveau tenseur du même nom "
                    "disparaît à la fin de votre fonction.",
                ),
            ),
            Fault(
                _values(keep_server=False),
                Said(
                    "The servers forget what they leave unsaid: their mean is compressed too, so it has an error of "
                    "its own, to be added next time (server_error).",
                    "Les serveurs oublient ce qu’ils ne disent pas : leur moyenne est compressée elle aussi, elle a "
                    "donc sa propre erreur, à ajouter la fois suivante (server_error).",
                ),
            ),
            Fault(
                _values(keep_worker=False),
                Said(
                    "The workers forget what they leave unsaid: write the values plus worker_error, and keep what the "
                    "messages do not say in worker_error.",
                    "Les travailleurs oublient ce qu’ils ne disent pas : envoyez les valeurs plus worker_error, et "
                    "gardez dans worker_error ce que les messages ne disent pas.",
                ),
            ),
            Fault(
                _values(last_only=True),
                Said(
                    "worker_error loses what had been left unsaid before: the error is (values + worker_error) less "
                    "the message, not values less the message.",
                    "worker_error perd ce qui restait à dire auparavant : l’erreur vaut (values + worker_error) moins "
                    "le message, et non values moins le message.",
                ),
            ),
            Fault(
                _values(share=1.0),
                Said(
                    "The servers add the messages up; their mean is wanted: divide by the number of ranks.",
                    "Les serveurs additionnent les messages ; c’est leur moyenne qu’il faut : divisez par le nombre de "
                    "rangs.",
                ),
            ),
            Fault(
                _means(compress_mean=False),
                Said(
                    "The servers' means come back uncompressed, at 32 bits per number: write them too, and read the "
                    "messages after the all-gather.",
                    "Les moyennes des serveurs reviennent sans compression, en 32 bits par nombre : passez-les elles "
                    "aussi par write, et lisez les messages après l’all-gather.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: bytes there, bytes back, the same mean on all ranks, and nothing lost on either side.",
        "Exact : des octets à l’aller, des octets au retour, la même moyenne partout, et rien de perdu d’aucun côté.",
    ),
    hints=(
        Said(
            "Four moments: add the error and write one message per chunk; exchange them; average what has come, with "
            "the server's error, and write one message; gather the servers' messages. At each writing, take what was "
            "said away from the error.",
            "Quatre moments : ajouter l’erreur et écrire un message par morceau ; les échanger ; moyenner ce qui est "
            "arrivé, avec l’erreur du serveur, et écrire un message ; rassembler ceux des serveurs. À chaque écriture, "
            "retranchez de l’erreur ce qui a été dit.",
        ),
        Said(
            "told = torch.stack([write(chunk) for chunk in worker_error.view(size, -1)]) after worker_error += values; "
            "dist.all_to_all_single(received, told) puts into row i what rank i has told you.",
            "told = torch.stack([write(chunk) for chunk in worker_error.view(size, -1)]), après worker_error += "
            "values ; dist.all_to_all_single(received, told) met dans la ligne i ce que le rang i vous a dit.",
        ),
    ),
)
