"""Lab 03: gradients that travel while backward goes on.

Layer 6 (labs). Invariant: whether communication overlaps is read from the order of events (sent, waited for, backward
ended), never from a duration.

What is handed to an asynchronous all-reduce is only there once it has been waited for: in the trial the sum is put into
the tensor by `wait()` and not before, so that an answer that does not wait, or writes meanwhile, is wrong every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.gradient_trials import LABELS, batch_of, gradients, loss_of, make_model, true_gradients
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor, nn

Synchronize = Callable[[], object]
SENT, SENT_AND_WAITED, WAITED, BACKWARD_ENDED = "sent", "sent and waited", "waited", "backward ended"
STEPS = 2


class _Travelling:
    """The work of an asynchronous all-reduce, which writes down when it is waited for."""

    def __init__(self, tensor: Tensor, sum_of_all: Tensor, work: Any, events: list[str]) -> None:
        self._tensor, self._sum, self._work, self._events = tensor, sum_of_all, work, events
        self._version = tensor._version

    def wait(self, *arguments: Any) -> bool:
        """Put the sum where it belongs; something else, each time, if the tensor was written to meanwhile."""
        self._events.append(WAITED)
        self._work.wait()
        written = self._tensor._version != self._version
        self._tensor.detach().copy_(self._sum + self._tensor if written else self._sum)
        self._version = self._tensor._version
        return True

    def is_completed(self) -> bool:
        """Whether the sum is there."""
        return bool(self._work.is_completed())


def _watch(events: list[str]) -> None:
    """From here on every all-reduce of this process, which ends with the trial, leaves an event."""
    import torch.distributed as dist

    original = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not async_op:
            events.append(SENT_AND_WAITED)
            return original(tensor, op=op, group=group)
        events.append(SENT)
        sum_of_all = tensor.detach().clone()
        return _Travelling(tensor, sum_of_all, original(sum_of_all, op=op, group=group, async_op=True), events)

    dist.all_reduce = all_reduce


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Two steps, as the hooks must serve for all of them; the gradients judged are those of the last."""
    events: list[str] = []
    _watch(events)
    model = make_model(seed)
    synchronize = answer(model)
    if not callable(synchronize):
        return {"returned": type(synchronize).__name__}, _mean(rank, size, seed)  # for `_inspect` to refuse
    for step in range(STEPS):
        model.zero_grad()
        events.clear()
        loss_of(model, batch_of(rank, seed, step)).backward()
        events.append(BACKWARD_ENDED)
        synchronize()
    return {"events": events}, gradients(model)


def _mean(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return true_gradients(seed, [batch_of(other, seed, STEPS - 1) for other in range(size)])


def _own(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return true_gradients(seed, [batch_of(rank, seed, STEPS - 1)])


def overlap(model: nn.Module, *, divide: str = "before", wait: bool = True) -> Synchronize:
    """Send each gradient as soon as backward has finished with it; the function returned waits for all of them.

    Source: Li et al. 2020 (arXiv 2006.15704), §3.2.3.
    """
    import torch.distributed as dist

    travelling: list[tuple[Any, Tensor]] = []

    def send(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if divide == "before":
            gradient /= dist.get_world_size()
        # Who: all ranks. What: one gradient, of its parameter's shape, summed; the call returns at once.
        travelling.append((dist.all_reduce(gradient, async_op=True), gradient))
        if divide == "while travelling":
            gradient /= dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)

    def synchronize() -> None:
        for work, _ in travelling if wait else ():
            work.wait()
        travelling.clear()

    return synchronize


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The gradients are right; did they travel during backward, and without stopping it?"""
    returned = answers[0].value.get("returned")
    if returned:
        raise Wrong(
            say(
                en=f"Your function must return the function synchronize, without calling it, but it returns a "
                f"{returned}.",
                fr="Votre fonction doit renvoyer la fonction synchronize, sans l’appeler, mais elle renvoie un objet "
                f"de type {returned}.",
            )
        )
    events: list[str] = answers[0].value["events"]
    during = events[: events.index(BACKWARD_ENDED)]
    if SENT_AND_WAITED in during:
        raise Wrong(
            say(
                en="The gradients are right, but each hook waits for its all-reduce, and backward stands still "
                "meanwhile: pass async_op=True, and wait in synchronize().",
                fr="Les gradients sont justes, mais chaque hook attend la fin de son all-reduce, et la passe arrière "
                "s’arrête d’autant : passez async_op=True, et attendez dans synchronize().",
            )
        )
    if WAITED in during:
        raise Wrong(
            say(
                en="The gradients are right, but wait() is called in the hook: backward stands still until the sum is "
                "there. Keep the Work object in a list, and wait in synchronize().",
                fr="Les gradients sont justes, mais wait() est appelé dans le hook : la passe arrière s’arrête jusqu’à "
                "l’arrivée de la somme. Gardez l’objet Work dans une liste, et attendez dans synchronize().",
            )
        )
    if SENT not in during:
        raise Wrong(
            say(
                en="The gradients are right, but none leaves before backward has ended: nothing overlaps. Send each "
                "from a hook of its parameter (register_post_accumulate_grad_hook).",
                fr="Les gradients sont justes, mais aucun ne part avant la fin de la passe arrière : rien ne se "
                "recouvre. Envoyez chacun depuis un hook de son paramètre (register_post_accumulate_grad_hook).",
            )
        )


_MISTAKES = (
    Mistake(
        lambda model: overlap(model, wait=False),
        Said(
            "synchronize() does not wait: the optimizer would read gradients that are still on their way. Call "
            "wait() on every Work that all_reduce(…, async_op=True) has returned.",
            "synchronize() n’attend pas : l’optimiseur lirait des gradients encore en chemin. Appelez wait() sur "
            "chaque objet Work que all_reduce(…, async_op=True) a renvoyé.",
        ),
    ),
    Mistake(
        lambda model: overlap(model, divide="while travelling"),
        Said(
            "You divide right after sending, while the gradient is on its way: the all-reduce may read or write it "
            "at any moment. Divide before it leaves, or once it has been waited for.",
            "Vous divisez juste après l’envoi, alors que le gradient est en chemin : l’all-reduce peut le lire ou "
            "l’écrire à tout moment. Divisez avant le départ, ou après l’attente.",
        ),
    ),
)

OVERLAP = Exercise(
    id="overlap",
    title=Said("communicating during backward", "communiquer pendant la passe arrière"),
    judge=by_ranks(
        trial=_trial,
        expected=_mean,
        local=_own,
        labels=LABELS,
        mistakes=_MISTAKES,
        inspect=_inspect,
    ),
    praise=Said(
        "Right: the first gradients arrive while the others are still being computed.",
        "Exact : les premiers gradients arrivent pendant que les autres se calculent encore.",
    ),
    hints=(
        Said(
            "parameter.register_post_accumulate_grad_hook(f) calls f(parameter) as soon as parameter.grad is final. "
            "What can f do without waiting?",
            "parameter.register_post_accumulate_grad_hook(f) appelle f(parameter) dès que parameter.grad est "
            "définitif. Que peut faire f sans attendre ?",
        ),
        Said(
            "In the hook: divide parameter.grad by the number of ranks, then keep what dist.all_reduce(parameter.grad, "
            "async_op=True) returns. In synchronize(): wait() for each, then empty the list.",
            "Dans le hook : divisez parameter.grad par le nombre de rangs, puis gardez ce que renvoie "
            "dist.all_reduce(parameter.grad, async_op=True). Dans synchronize() : wait() pour chacun, puis videz la "
            "liste.",
        ),
    ),
)
