"""Lab 12: the student's loops on the libraries themselves, and how many updates each really makes.

Layer 6 (labs). Invariant: an update is counted where torch's own optimizer makes it. DeepSpeed and Accelerate run in a
process of their own, so that nothing of them stays in the notebook's; where Accelerate is not installed, a stand-in
takes its place and is called one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlojz.labs.library_accelerator_exercises import accelerate_loop as its_own_recipe
from dlojz.labs.library_stand_ins import SAMPLES, AcceleratorStandIn, make_batches, make_model, make_optimizer
from dlojz.labs.pipeline_figures import Sheet, or_to_do
from dlojz.labs.rank_judging import Undone
from dlojz.labs.verdict import NotDone, Verdict, show
from dlojz.libraries import LIBRARIES, absence
from dlojz.patience import patience
from dlojz.ranks.forks import RankError, spmd
from dlojz.schema import LabError
from dlojz.text import say

Loop = Callable[..., Any]
WALL_S = 90.0
"""Seconds for one library, which is imported first."""


def _counted(optimizer: Any) -> list[int]:
    made = [0]

    def count(*_: Any) -> None:
        made[0] += 1

    optimizer.register_step_post_hook(count)
    return made


def plain_updates(loop: Loop, micro_batches: int, accumulation: int) -> int:
    """Updates of the plain loop."""
    model = make_model(1)
    optimizer = make_optimizer(model)
    made = _counted(optimizer)
    loop(model, optimizer, make_batches(micro_batches, seed=1), accumulation)
    return made[0]


def deepspeed_updates(loop: Loop, micro_batches: int, accumulation: int) -> int:
    """Updates of a loop for DeepSpeed, with a real engine of stage 0.

    Raises:
        LabError: if the loop does not come to its end.
    """

    def count() -> int:
        from dlojz.labs.foreign_formats_ranks import load_deepspeed

        deepspeed = load_deepspeed()
        deepspeed.utils.logger.setLevel("ERROR")
        settings = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
        }
        model = make_model(1)
        optimizer = make_optimizer(model)
        made = _counted(optimizer)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
        loop(engine, make_batches(micro_batches, seed=1))
        return made[0]

    return _apart("DeepSpeed", count)


def accelerate_updates(loop: Loop, micro_batches: int, accumulation: int) -> int:
    """Updates of a loop for Accelerate, with a real accelerator; with the stand-in where it is not installed.

    Raises:
        LabError: if the loop does not come to its end.
    """

    def count() -> int:
        from accelerate import Accelerator
        from torch.utils.data import DataLoader

        samples: Any = [pair for batch in make_batches(micro_batches, seed=1) for pair in zip(*batch, strict=True)]
        model = make_model(1)
        optimizer = make_optimizer(model)
        made = _counted(optimizer)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        loop(accelerator, model, optimizer, DataLoader(samples, batch_size=SAMPLES))
        return made[0]

    if absence("accelerate") is None:
        return _apart("Accelerate", count)
    model = make_model(1)
    optimizer = make_optimizer(model)
    made = _counted(optimizer)
    loop(AcceleratorStandIn(accumulation), model, optimizer, make_batches(micro_batches, seed=1))
    return made[0]


def _apart(title: str, count: Callable[[], int]) -> int:
    """What is counted in a forked process, which is the only one of its group."""
    factor = patience()
    (answer,) = spmd(lambda rank, size: count(), 1, wall_s=WALL_S * factor, limit_s=10.0 * factor)
    if answer.error is None:
        return int(answer.value)
    if answer.error.name == NotDone.__name__:
        raise Undone(answer.error.message)
    raise LabError(_unfinished(title, answer.error))


def _unfinished(title: str, error: RankError) -> str:
    if error.kind == "time":
        return say(
            en=f"the loop for {title} was stopped after {error.message} s: run the cell again when the machine is less "
            "busy.",
            fr=f"la boucle pour {title} a été arrêtée au bout de {error.message} s : relancez la cellule quand la "
            "machine sera moins chargée.",
        )
    why = ": ".join(part for part in (error.name, error.message) if part)
    return say(
        en=f"the loop for {title} did not come to its end: {why}.",
        fr=f"la boucle pour {title} n’est pas allée jusqu’au bout : {why}.",
    )


def stand_in_note() -> str | None:
    """That a stand-in counts, and why; None where the library itself does."""
    missing = absence("accelerate")
    if missing is None:
        return None
    return missing + say(
        en=" A stand-in counts here, which the tests compare with the library itself.",
        fr=" C’est une maquette qui compte ici ; les tests la comparent à la vraie bibliothèque.",
    )


def updates_made(micro_batches: int, accumulation: int) -> int:
    """Updates that Accelerate really makes of one pass over a loader, by the recipe of its own guide."""
    note = stand_in_note()
    if note is not None:
        show(Verdict("note", note))
    return accelerate_updates(its_own_recipe, micro_batches, accumulation)


@or_to_do
def loops(
    plain_loop: Loop, deepspeed_loop: Loop, accelerate_loop: Loop, micro_batches: int, accumulation: int
) -> Sheet | Verdict:
    """Updates that each loop makes of so many micro-batches, and how many of these wait for a next step.

    Args:
        plain_loop: `plain_loop(model, optimizer, batches, accumulation)`.
        deepspeed_loop: `deepspeed_loop(engine, batches)`.
        accelerate_loop: `accelerate_loop(accelerator, model, optimizer, loader)`.
        micro_batches: of one pass over the data.
        accumulation: micro-batches of a step.
    """
    accelerate = LIBRARIES["accelerate"].title
    if stand_in_note() is not None:
        accelerate += say(en=" (stand-in)", fr=" (maquette)")
    try:
        made = (
            (say(en="plain", fr="simple"), plain_updates(plain_loop, micro_batches, accumulation)),
            (LIBRARIES["deepspeed"].title, deepspeed_updates(deepspeed_loop, micro_batches, accumulation)),
            (accelerate, accelerate_updates(accelerate_loop, micro_batches, accumulation)),
        )
    except LabError as error:
        return Verdict("wrong", str(error))
    counts = tuple((name, str(updates), str(max(0, micro_batches - updates * accumulation))) for name, updates in made)
    head = (
        say(en="loop", fr="boucle"),
        say(en="updates", fr="mises à jour"),
        say(en="micro-batches that wait", fr="micro-batches en attente"),
    )
    return Sheet(head, counts)
