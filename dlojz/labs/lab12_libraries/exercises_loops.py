"""Exercises of lab 12 on loops for DeepSpeed and Accelerate, metrics over ranks, and the updates that a loop makes.

A loop is right if it ends with the weights of the plain loop, or of Accelerate's recipe. The engine and the accelerator
of a check are stand-ins, which record what a loop does and end with the weights of the real libraries (DeepSpeed 0.19
with ZeRO stage 0, Accelerate 1.15), as the tests check. `loops` counts updates with the libraries themselves, in
another process, and names the stand-in where Accelerate is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.base.machine import patience
from dlojz.base.table import Table, titles
from dlojz.labs.kit.exercise import NotDone, Said, Verdict, Wrong, or_to_do, show
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.rank_judges import Undone, same
from dlojz.labs.kit.sandbox import load_deepspeed
from dlojz.libraries.library_catalogue import LIBRARIES, absence
from dlojz.processes.forks import ForkedError, spmd

TEXTS = Texts(__file__)

ENGINE_CASES = ((1, 3, 61), (4, 8, 62), (2, 5, 63))
"""Accumulation, micro-batches and seed; the last leaves one micro-batch for the next step."""

NO_FORWARD = TEXTS.sentence("deepspeed-loop", "the engine is never called")


def plain_loop(model: Any, optimizer: Any, batches: Sequence[Any], accumulation: int) -> None:
    """Train without a library: share of the mean, backward, and every `accumulation` micro-batches an update."""
    for number, batch in enumerate(batches, start=1):
        loss = model(batch) / accumulation
        loss.backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def deepspeed_loop(engine: Any, batches: Sequence[Any]) -> None:
    """Train with DeepSpeed's engine.

    Source: deepspeed.ai, "Getting Started": forward, `engine.backward(loss)`, `engine.step()` for each micro-batch.
    """
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()


def _check_engine_loop(answer: Callable[..., Any], accumulation: int, number: int, seed: int) -> None:
    batches = make_batches(number, seed)
    truth = make_model(seed)
    plain_loop(truth, make_optimizer(truth), batches, accumulation)
    engine = EngineStandIn(make_model(seed), accumulation)
    answer(engine, batches)
    # The weights decide; the counts name the reason, and below what a single process does not show.
    if not same(weights_of(engine.module), weights_of(truth)):
        refusal = _counts(engine, number) or _sizes(engine, accumulation, number)
        raise Wrong(str(refusal or _engine_other(accumulation, number)))
    if engine.backwards < number:
        raise TEXTS.wrong("deepspeed-loop", "right on one process")
    if engine.forwards == 0:
        raise Wrong(*NO_FORWARD)


def _counts(engine: EngineStandIn, number: int) -> Said | None:
    """What was not called as often as there are micro-batches."""
    if engine.forwards == 0:
        return NO_FORWARD
    if engine.forwards < number:
        return TEXTS.sentence("deepspeed-loop", "the loop ends early", forwards=engine.forwards, number=number)
    if engine.backwards < number:
        return TEXTS.sentence("deepspeed-loop", "backward calls are missing", backwards=engine.backwards, number=number)
    return None


def _sizes(engine: EngineStandIn, accumulation: int, number: int) -> Said | None:
    if any(abs(value - 1 / accumulation) > 1e-6 for value in engine.arrived):
        return TEXTS.sentence("deepspeed-loop", "the loss is scaled twice")
    if engine.steps == 0:
        return TEXTS.sentence("deepspeed-loop", "engine.step is never called")
    # != number: with an accumulation of 1, once per step is once per micro-batch.
    if engine.steps == number // accumulation != number:
        return TEXTS.sentence(
            "deepspeed-loop",
            "step not with every micro-batch",
            accumulation=accumulation,
            steps=engine.steps,
            number=number,
        )
    if engine.steps != number:
        return TEXTS.sentence("deepspeed-loop", "calls of step", number=number, steps=engine.steps)
    if engine.zeroed:
        return TEXTS.sentence("deepspeed-loop", "you zero the gradients with every micro-batch")
    return None


def _engine_other(accumulation: int, number: int) -> Said:
    return TEXTS.sentence("deepspeed-loop", "other weights than the engine's", number=number, accumulation=accumulation)


DEEPSPEED_LOOP = TEXTS.exercise("deepspeed-loop", cases=ENGINE_CASES, trial=_check_engine_loop)


ACCELERATOR_CASES = ((1, 3, 71), (4, 10, 72), (3, 6, 73))
"""Accumulation, micro-batches and seed; in the second, two micro-batches are left over."""


def accelerate_loop(accelerator: Any, model: Any, optimizer: Any, loader: Sequence[Any]) -> None:
    """Train as Accelerate's guide shows.

    Source: huggingface.co/docs/accelerate, "Performing gradient accumulation": `accumulate(model)` around forward,
    `accelerator.backward`, `optimizer.step` and `optimizer.zero_grad`.
    """
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()


def updates(micro_batches: int, accumulation: int) -> int:
    """Count the updates of one pass over a loader; the last, incomplete step counts.

    Source: Accelerate 1.15, `Accelerator._do_sync`: gradients are whole at the end of the loader too.
    """
    # rounded up
    return -(-micro_batches // accumulation)


def _check_accelerator_loop(answer: Callable[..., Any], accumulation: int, number: int, seed: int) -> None:
    batches, truth = make_batches(number, seed), make_model(seed)
    # Not the plain loop: Accelerate also updates with what is left at the end of the loader.
    accelerate_loop(AcceleratorStandIn(accumulation), truth, make_optimizer(truth), batches)
    accelerator, model = AcceleratorStandIn(accumulation), make_model(seed)
    answer(accelerator, model, make_optimizer(model), batches)
    weights_changed = not same(weights_of(model), weights_of(make_model(seed)))
    refusal = _unprepared(accelerator, weights_changed, number)
    if refusal is None and not same(weights_of(model), weights_of(truth)):
        refusal = _calls(accelerator, accumulation, number) or _accelerator_other(accumulation, number)
    if refusal is None and accumulation > 1 and accelerator.model and accelerator.model.forwards > accelerator.within:
        refusal = TEXTS.sentence("accelerate-loop", "right weights")
    if refusal is not None:
        raise Wrong(*refusal)


def _unprepared(accelerator: AcceleratorStandIn, weights_changed: bool, number: int) -> Said | None:
    model, optimizer, loader = accelerator.model, accelerator.optimizer, accelerator.loader
    if model is None and optimizer is None and loader is None:
        return TEXTS.sentence("accelerate-loop", "prepare is never called")
    if loader is None or not loader.passes:
        return TEXTS.sentence("accelerate-loop", "the loader as it was given")
    if model is None or not model.forwards:
        return TEXTS.sentence("accelerate-loop", "the model as it was given")
    if not weights_changed and (optimizer is None or not optimizer.steps):
        return TEXTS.sentence("accelerate-loop", "no if around step", number=number)
    if optimizer is None or not optimizer.steps:
        return TEXTS.sentence("accelerate-loop", "the optimizer as it was given")
    return None


def _calls(accelerator: AcceleratorStandIn, accumulation: int, number: int) -> Said | None:
    if accelerator.outside:
        return TEXTS.sentence("accelerate-loop", "loss.backward is called", accumulation=accumulation)
    if any(abs(value - 1 / accumulation) > 1e-6 for value in accelerator.arrived):
        return TEXTS.sentence("accelerate-loop", "the loss is scaled twice")
    return _accelerator_counted(accelerator, accumulation, number)


def _accelerator_counted(  # noqa: PLR0911 - one sentence each
    accelerator: AcceleratorStandIn, accumulation: int, number: int
) -> Said | None:
    optimizer = accelerator.optimizer
    if not accelerator.accumulated:
        return TEXTS.sentence("accelerate-loop", "without accumulate", number=number, accumulation=accumulation)
    if accelerator.accumulated < number:
        return TEXTS.sentence(
            "accelerate-loop", "accumulate is left out for some", accumulated=accelerator.accumulated, number=number
        )
    if accelerator.backwards < number:
        return TEXTS.sentence(
            "accelerate-loop", "backward calls are missing", backwards=accelerator.backwards, number=number
        )
    if optimizer is not None and optimizer.steps > number:
        return TEXTS.sentence("accelerate-loop", "calls of optimizer.step", steps=optimizer.steps, number=number)
    if optimizer is None or not optimizer.zeroed:
        return TEXTS.sentence("accelerate-loop", "gradients are never zeroed")
    if optimizer.steps == number // accumulation < updates(number, accumulation):
        return TEXTS.sentence(
            "accelerate-loop", "micro-batches counted by hand", number=number, due=updates(number, accumulation)
        )
    return None


def _accelerator_other(accumulation: int, number: int) -> Said:
    return TEXTS.sentence(
        "accelerate-loop", "other weights than Accelerate's", number=number, accumulation=accumulation
    )


ACCELERATE_LOOP = TEXTS.exercise("accelerate-loop", cases=ACCELERATOR_CASES, trial=_check_accelerator_loop)


EACH = 4
"""Samples of a rank in one batch."""
LAST, WHOLE = "last batch", "whole batch"
LABELS = {
    LAST: Said("what is gathered of the last batch", "ce qui est rassemblé du dernier batch"),
    WHOLE: Said("what is gathered of a batch that is whole", "ce qui est rassemblé d’un batch complet"),
}


def _data(size: int, seed: int) -> Tensor:
    return torch.randn(size * EACH, 3, generator=torch.Generator().manual_seed(seed))


def _real(size: int) -> int:
    """Samples of the last batch: the last rank has one, filled up with repetitions of the first."""
    return (size - 1) * EACH + 1


def _filled(size: int, seed: int) -> Tensor:
    """The last batch, as the loader fills it up: the first samples once more."""
    data, real = _data(size, seed + 1), _real(size)
    return torch.cat([data[:real], _data(size, seed)[: size * EACH - real]])


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    rows = slice(rank * EACH, (rank + 1) * EACH)
    return {WHOLE: answer(_data(size, seed)[rows], size * EACH), LAST: answer(_filled(size, seed)[rows], _real(size))}


def gather_metrics(values: Tensor, real: int) -> Tensor:
    """Bring the metrics of all ranks together, less those of samples that fill the last batch up.

    Args:
        values: of this rank's samples.
        real: samples of the batch on all ranks that are none of the repetitions.

    Source: huggingface.co/docs/accelerate, `Accelerator.gather_for_metrics`.
    """
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)[:real]


GATHER_METRICS = TEXTS.exercise(
    "gather-metrics",
    lambda rank, size, seed: {WHOLE: _data(size, seed), LAST: _filled(size, seed)[: _real(size)]},
    on_ranks=True,
    trial=_trial,
    labels=LABELS,
    source=(gather_metrics,),
    mistakes={
        "every rank returns its own values": lambda values, real: values[:real],
    },
)


Loop = Callable[..., Any]
WALL_S = 90.0
"""Seconds for one library, which is imported first."""


def _loops_counted(optimizer: Any) -> list[int]:
    # In a list, where the hook can count; a hook after the optimizer's step sees real updates only.
    counter = [0]

    def count(*_: Any) -> None:
        counter[0] += 1

    optimizer.register_step_post_hook(count)
    return counter


def plain_updates(loop: Loop, micro_batches: int, accumulation: int) -> int:
    """Count the updates of the plain loop."""
    model = make_model(1)
    optimizer = make_optimizer(model)
    counter = _loops_counted(optimizer)
    loop(model, optimizer, make_batches(micro_batches, seed=1), accumulation)
    return counter[0]


def deepspeed_updates(loop: Loop, micro_batches: int, accumulation: int) -> int:
    """Count the updates of a loop for DeepSpeed, with a real engine of stage 0.

    Raises:
        LabError: if the loop does not come to its end.
    """

    def count() -> int:
        deepspeed = load_deepspeed()
        deepspeed.utils.logger.setLevel("ERROR")
        settings = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
        }
        model = make_model(1)
        optimizer = make_optimizer(model)
        counter = _loops_counted(optimizer)
        # spmd has made the process group already: DeepSpeed must not make another.
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
        loop(engine, make_batches(micro_batches, seed=1))
        return counter[0]

    return _apart("DeepSpeed", count)


def accelerate_updates(loop: Loop, micro_batches: int, accumulation: int) -> int:
    """Count the updates of a loop for Accelerate; with the stand-in where it is not installed.

    Raises:
        LabError: if the loop does not come to its end.
    """

    def count() -> int:
        from accelerate import Accelerator
        from torch.utils.data import DataLoader

        # Sample by sample: the DataLoader puts them together to the same micro-batches.
        samples: Any = [pair for batch in make_batches(micro_batches, seed=1) for pair in zip(*batch, strict=True)]
        model = make_model(1)
        optimizer = make_optimizer(model)
        counter = _loops_counted(optimizer)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        loop(accelerator, model, optimizer, DataLoader(samples, batch_size=SAMPLES))
        return counter[0]

    if absence("accelerate") is None:
        return _apart("Accelerate", count)
    model = make_model(1)
    optimizer = make_optimizer(model)
    counter = _loops_counted(optimizer)
    loop(AcceleratorStandIn(accumulation), model, optimizer, make_batches(micro_batches, seed=1))
    return counter[0]


def _apart(title: str, count: Callable[[], int]) -> int:
    """What is counted in a forked process, which is the only one of its group."""
    factor = patience()
    # In a fork: process group and global state of a library end with it.
    (answer,) = spmd(lambda rank, size: count(), 1, wall_s=WALL_S * factor, limit_s=10.0 * factor)
    if answer.error is None:
        return int(answer.value)
    if answer.error.name == NotDone.__name__:
        raise Undone(answer.error.message)
    raise LabError(_unfinished(title, answer.error))


def _unfinished(title: str, error: ForkedError) -> str:
    if error.kind == "time":
        return TEXTS.say("shared", "the loop was stopped", title=title, message=error.message)
    reason = ": ".join(part for part in (error.name, error.message) if part)
    return TEXTS.say("shared", "the loop did not come to its end", title=title, reason=reason)


def stand_in_note() -> str | None:
    """Say that a stand-in counts, and why; None where the library itself does."""
    missing = absence("accelerate")
    if missing is None:
        return None
    return missing + say(
        en=" A stand-in counts here, which the tests compare with the library itself.",
        fr=" C’est une maquette qui compte ici ; les tests la comparent à la vraie bibliothèque.",
    )


def updates_made(micro_batches: int, accumulation: int) -> int:
    """Count the updates that Accelerate makes of one pass over a loader, by the recipe of its guide."""
    note = stand_in_note()
    if note is not None:
        show(Verdict("note", note))
    return accelerate_updates(accelerate_loop, micro_batches, accumulation)


@or_to_do
def loops(
    plain_loop: Loop, deepspeed_loop: Loop, accelerate_loop: Loop, micro_batches: int, accumulation: int
) -> Table | Verdict:
    """Tabulate the updates that each loop makes, and how many micro-batches wait for a next step.

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
        updates_by_loop = (
            (say(en="plain", fr="simple"), plain_updates(plain_loop, micro_batches, accumulation)),
            (LIBRARIES["deepspeed"].title, deepspeed_updates(deepspeed_loop, micro_batches, accumulation)),
            (accelerate, accelerate_updates(accelerate_loop, micro_batches, accumulation)),
        )
    except LabError as error:
        return Verdict("wrong", str(error))
    # Not below 0: an update of Accelerate's at the end takes fewer than `accumulation` micro-batches.
    counts = tuple(
        (name, str(updates), str(max(0, micro_batches - updates * accumulation))) for name, updates in updates_by_loop
    )
    head = titles(en="loop; updates; micro-batches that wait", fr="boucle; mises à jour; micro-batches en attente")
    return Table(head, counts)


LEARNING_RATE = 0.5
SAMPLES, WIDTH, CLASSES = 4, 6, 3

BACKWARD_OF_THE_LOSS = Said(
    "You call loss.backward(): the engine does not see it, so it neither divides by the accumulation nor reduces "
    "gradients over the ranks (without ZeRO, DeepSpeed refuses it): engine.backward(loss).",
    "Vous appelez loss.backward() : le moteur ne le voit pas, donc ne divise pas par l’accumulation et ne réduit pas "
    "les gradients entre les rangs (sans ZeRO, DeepSpeed refuse) : engine.backward(loss).",
)
OPTIMIZER_BY_HAND = Said(
    "You use engine.optimizer yourself: under ZeRO it is no longer the one you know, and the engine no longer counts "
    "its micro-batches. engine.step() updates when it is time, and zeroes the gradients.",
    "Vous utilisez engine.optimizer vous-même : avec ZeRO, ce n’est plus celui que vous connaissez, et le moteur ne "
    "compte plus ses micro-batches. engine.step() met à jour au bon moment, et remet les gradients à zéro.",
)


def make_model(seed: int) -> nn.Module:
    """Make a small network whose `forward(batch)` is the mean loss of the batch, like the course's engine."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

        def forward(self, batch: Any) -> Tensor:
            inputs, classes = batch
            return nn.functional.cross_entropy(self.network(inputs), classes)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Loss()


def make_batches(number: int, seed: int) -> list[Any]:
    """Make micro-batches of inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (3 * torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator))
        for _ in range(number)
    ]


def make_optimizer(model: nn.Module) -> Any:
    """Make plain SGD, in which, unlike in Adam, a gradient that is too large shows in the weights."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def weights_of(model: nn.Module) -> Tensor:
    """Concatenate all weights in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class PreparedModel:
    """Stand-in for a prepared model, which counts forward passes."""

    def __init__(self, model: nn.Module, on_backward: Callable[[Tensor], None]) -> None:
        self.module, self.forwards = model, 0
        self._on_backward = on_backward

    def __call__(self, batch: Any) -> Tensor:
        self.forwards += 1
        loss: Tensor = self.module(batch)
        # The hook sees what arrives at the loss: 1 after loss.backward(), 1 / accumulation after the library's own.
        loss.register_hook(self._on_backward)
        return loss

    forward = __call__

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, as on a module."""
        self.module.train(mode)
        return self

    def parameters(self) -> Iterator[Any]:
        """Parameters of the model."""
        return self.module.parameters()


class EngineStandIn(PreparedModel):
    """Stand-in for what `deepspeed.initialize` gives, on one process.

    Args:
        accumulation: `gradient_accumulation_steps` of the JSON.

    Source: DeepSpeed 0.19, `runtime/engine.py`: `backward` divides by the accumulation, `step` counts micro-batches
    and updates at every last one.
    """

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        super().__init__(model, self._on_own_backward)
        self._optimizer = make_optimizer(model)
        self._accumulation = accumulation
        self._inside = False
        self.backwards = self.steps = self.zeroed = 0
        self.arrived: list[float] = []
        """What each backward brought to its loss: 1 / accumulation, unless the loop divided once more."""

    def _on_own_backward(self, gradient: Tensor) -> None:
        # Not within `backward` below: the loop has called loss.backward().
        if not self._inside:
            raise Wrong(*BACKWARD_OF_THE_LOSS)
        self.arrived.append(float(gradient))

    def backward(self, loss: Tensor) -> Tensor:
        """Compute the gradients of this micro-batch's share of the mean."""
        self._inside = True
        self.backwards += 1
        share = loss / self._accumulation
        share.backward()
        self._inside = False
        return share

    def step(self) -> None:
        """Count a micro-batch; update and zero where it is the last of a step."""
        self.steps += 1
        if self.steps % self._accumulation == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def zero_grad(self) -> None:
        """Zero the accumulated gradients."""
        self.zeroed += 1
        self._optimizer.zero_grad()

    @property
    def optimizer(self) -> Any:
        """Refuse access to the engine's optimizer."""
        raise Wrong(*OPTIMIZER_BY_HAND)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        return (self.steps + 1) % self._accumulation == 0


class PreparedOptimizer:
    """Stand-in for a prepared optimizer, which does nothing while gradients are accumulated."""

    def __init__(self, optimizer: Any, accelerator: AcceleratorStandIn) -> None:
        self._optimizer, self._accelerator = optimizer, accelerator
        self.param_groups = optimizer.param_groups
        self.steps = self.zeroed = 0

    def step(self) -> None:
        """Update, after the last micro-batch of a step."""
        self.steps += 1
        if self._accelerator.sync_gradients:
            self._optimizer.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero, after the last micro-batch of a step."""
        self.zeroed += 1
        if self._accelerator.sync_gradients:
            self._optimizer.zero_grad()


class PreparedLoader:
    """Stand-in for a prepared loader, which knows its last micro-batch."""

    def __init__(self, batches: Sequence[Any], accelerator: AcceleratorStandIn) -> None:
        self._batches, self._accelerator = batches, accelerator
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        self._accelerator.at_the_end = False
        for number, batch in enumerate(self._batches, start=1):
            # Set before the loop gets the micro-batch, for which it then enters `accumulate`.
            self._accelerator.at_the_end = number == len(self._batches)
            yield batch

    def __len__(self) -> int:
        return len(self._batches)


class AcceleratorStandIn:
    """Stand-in for `Accelerator(gradient_accumulation_steps=…)` on one process.

    Source: Accelerate 1.15, `accelerator.py` (`_do_sync`, `accumulate`, `backward`) and `optimizer.py`.
    """

    def __init__(self, accumulation: int) -> None:
        self.gradient_accumulation_steps = accumulation
        self.sync_gradients, self.at_the_end = True, False
        self.accumulated = self.backwards = self._step = 0
        self.arrived: list[float] = []
        self.outside = self.within = 0
        """Backward passes that the accelerator has not seen; forward passes within `accumulate`."""
        self._inside = False
        self.model: PreparedModel | None = None
        self.optimizer: PreparedOptimizer | None = None
        self.loader: PreparedLoader | None = None

    def prepare(self, *components: Any) -> Any:
        """Wrap each thing, in the order given."""
        prepared = tuple(self._prepared(component) for component in components)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(self, model: Any) -> Any:
        """Wrap a model; the three methods that `prepare` calls can be called one by one."""
        return self._prepared(model)

    prepare_optimizer = prepare_data_loader = prepare_model

    def _prepared(self, component: Any) -> Any:
        if hasattr(component, "param_groups"):
            self.optimizer = PreparedOptimizer(component, self)
            return self.optimizer
        if isinstance(component, list):
            self.loader = PreparedLoader(component, self)
            return self.loader
        self.model = PreparedModel(component, self._on_backward)
        return self.model

    def _on_backward(self, gradient: Tensor) -> None:
        self.outside += not self._inside
        self.arrived.append(float(gradient))

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Enter one micro-batch; gradients synchronise at every last one and at the end of the loader."""
        self.accumulated += 1
        if self.at_the_end:
            self._step, self.sync_gradients = 0, True
        else:
            self._step += 1
            self.sync_gradients = self._step % self.gradient_accumulation_steps == 0
        # What the counter gains until the block ends are forward passes within it.
        model, before = self.model, self.model.forwards if self.model else 0
        yield
        self.within += model.forwards - before if model else 0

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of this micro-batch's share of the mean."""
        self.backwards += 1
        self._inside = True
        (loss / self.gradient_accumulation_steps).backward()
        self._inside = False
