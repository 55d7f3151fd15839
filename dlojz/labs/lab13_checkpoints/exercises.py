"""Exercises of lab 13: a training that resumes exactly, a save in the background, its interval, a sealed folder.

The judges look at what is on disk and in memory after an answer has run, never at its text: the state of a resumed
training part by part, what a slow writer was given, and what is said of folders that were damaged in between.
"""

import copy
import math
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.labs.kit.exercise import Said, Wrong
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts
from dlojz.labs.kit.judges import shown

TEXTS = Texts(__file__)

SAMPLES, BATCH = 40, 8


class Resumable:
    """A small training with the attributes of the notebook's: model, optimizer, schedule, epoch and place.

    Args:
        seed: of its weights.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=30)
        self.epoch = self.place = 0

    def run(self, steps: int) -> list[float]:
        """Train, and return the losses."""
        x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(3))
        losses = []
        for _ in range(steps):
            # The order depends on the epoch alone; dropout draws from the global generator, which is part of the state.
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
            batch = x[order[self.place : self.place + BATCH]]
            loss = F.mse_loss(self.model(batch), batch.sum(1, keepdim=True))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.place += BATCH
            if self.place == SAMPLES:
                self.epoch, self.place = self.epoch + 1, 0
            losses.append(loss.item())
        return losses


def _same(left: Any, right: Any) -> bool:
    """The same bits, in nested dictionaries and lists."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def _parts(training: Any) -> dict[str, Any]:
    """List what is compared, in the order of the messages."""
    model_state = training.model.state_dict()
    parameters = {name for name, _ in training.model.named_parameters()}
    adam, schedule_state = training.optimizer.state_dict(), training.schedule.state_dict()
    return {
        "weights": {name: model_state[name] for name in model_state if name in parameters},
        "buffers": {name: model_state[name] for name in model_state if name not in parameters},
        "moments": adam["state"],
        "schedule": [schedule_state["last_epoch"], [group["lr"] for group in adam["param_groups"]]],
        "epoch": training.epoch,
        "place": training.place,
        "random": torch.get_rng_state(),
    }


_FORGOTTEN = {
    "weights": TEXTS.sentence("resume-exactly", "the resumed training has other weights"),
    "buffers": TEXTS.sentence("resume-exactly", "the weights are there, but not the buffers"),
    "moments": TEXTS.sentence("resume-exactly", "the optimizer begins anew"),
    "schedule": TEXTS.sentence("resume-exactly", "the schedule of the learning rate is at another step"),
    "epoch": TEXTS.sentence("resume-exactly", "the sampler is in another epoch"),
    "place": TEXTS.sentence("resume-exactly", "the sampler is at the right epoch but at another place"),
    "random": TEXTS.sentence("resume-exactly", "the state of the random generator is missing"),
}


def _stop(answer: Callable[..., Any], steps: int, seed: int) -> None:
    """Refuse an answer after which something of the training is not as it was."""
    old = Resumable(seed)
    old.run(steps)
    fresh = Resumable(seed + 1)
    # Resumable() seeds the global generator: the state to be saved is one that no constructor leaves.
    torch.manual_seed(seed + 2)
    # A copy: state_dict() hands out the tensors themselves, which an answer may change.
    saved_parts = copy.deepcopy(_parts(old))
    with tempfile.TemporaryDirectory() as folder:
        answer(old, fresh, Path(folder) / "state.pt")
    resumed_parts = _parts(fresh)
    parts_after = _parts(old)
    # There is one generator for both trainings: that `resume` sets it is no change of the old one.
    if any(not _same(saved_parts[name], parts_after[name]) for name in saved_parts if name != "random"):
        raise TEXTS.wrong("resume-exactly", "the training that is saved has changed")
    for name, refusal in _FORGOTTEN.items():
        if not _same(saved_parts[name], resumed_parts[name]):
            raise Wrong(*refusal)
    expected = old.run(steps)
    # Both run on from the same state of the generator, one after the other.
    torch.set_rng_state(saved_parts["random"])
    if fresh.run(steps) != expected:
        raise TEXTS.wrong("resume-exactly", "every part is there, but the two trainings go on otherwise")


RESUME_EXACTLY = TEXTS.exercise("resume-exactly", None, trial=_stop, cases=((7, 11), (5, 12), (12, 13)))


WAIT_S = 4.0
"""How long the judge's writer waits for the answer to return."""


class _SlowWriter:
    """Writes only once the answer has returned, and keeps what it was given.

    Attributes:
        early: whether the answer was still waiting after `WAIT_S`.
        written: copies of the tensors, by name.
    """

    def __init__(self) -> None:
        self.returned = threading.Event()
        self.begun = self.early = False
        self.calls = 0
        self.written: dict[str, Tensor] = {}

    def __call__(self, tensors: dict[str, Tensor]) -> None:
        self.begun = True
        self.calls += 1
        # An answer that calls `write` itself, or joins its thread, waits here: `returned` is set after it.
        self.early = not self.returned.wait(WAIT_S)
        self.written = {name: tensor.detach().clone() for name, tensor in dict(tensors).items()}


def _save(answer: Callable[..., Any], seed: int) -> None:
    """Refuse an answer that waits for the writer, or that lets the training change what is written."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(3, size, generator=generator) for size, name in enumerate(("a", "b.weight", "c"), 2)}
    buffers = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    original_state = copy.deepcopy(state)
    slow = _SlowWriter()
    handle = answer(state, buffers, slow)
    if slow.early:
        raise TEXTS.wrong("save-in-background", "your function waits until everything is written")
    for tensor in state.values():
        tensor.add_(1.0)  # the next step of the training
    slow.returned.set()
    _wait(handle)
    if slow.calls != 1:
        raise TEXTS.wrong("save-in-background", "write is called several times", calls=slow.calls)
    if any(not torch.equal(state[name], original_state[name] + 1.0) for name in state):
        raise TEXTS.wrong("save-in-background", "the state of the training has changed")
    if slow.written.keys() != original_state.keys():
        raise TEXTS.wrong(
            "save-in-background",
            "other names are written",
            written=shown(sorted(slow.written)),
            original_state=sorted(original_state),
        )
    if _same(slow.written, {name: tensor + 1.0 for name, tensor in original_state.items()}):
        raise TEXTS.wrong("save-in-background", "what was written is the state of the next step")
    if not any(bool(tensor.any()) for tensor in slow.written.values()):
        raise TEXTS.wrong("save-in-background", "zeros were written")
    if not _same(slow.written, original_state):
        raise TEXTS.wrong("save-in-background", "not the state at the moment of the call")


def _wait(handle: Any) -> None:
    """Wait for a thread, or for a future."""
    wait = getattr(handle, "join", None) or getattr(handle, "result", None)
    if not callable(wait):
        raise TEXTS.wrong("save-in-background", "no thread is returned", handle=shown(handle))
    try:
        wait()
    except RuntimeError:
        raise TEXTS.wrong("save-in-background", "the thread was never started") from None


SAVE_IN_BACKGROUND = TEXTS.exercise("save-in-background", None, trial=_save, cases=((1,), (2,)))


def best_interval(save_s: float, failure_s: float) -> tuple[float, float]:
    """Seconds between two checkpoints that lose least, and the share of the time that is then lost.

    In each interval T the save costs C; a failure, every M seconds on average, costs half an interval. The share
    C / T + T / (2 M) is least at T = √(2 C M), where both terms are the same.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006.
    """
    interval_s = math.sqrt(2 * save_s * failure_s)
    return interval_s, save_s / interval_s + interval_s / (2 * failure_s)


def _interval(edits: str) -> tuple[str, MistakeWay]:
    """A mistake about the interval: with the share that goes with it, or alone."""
    return edits, MistakeWay(edits, part=0)


CHECKPOINT_INTERVAL = TEXTS.exercise(
    "checkpoint-interval",
    best_interval,
    cases=((60.0, 11_000.0), (5.0, 86_400.0), (300.0, 40_000.0), (0.5, 3_600.0)),
    parts=(Said("the interval", "l’intervalle"), Said("the share lost", "la part perdue")),
    told=TEXTS.sentence("checkpoint-interval", "the case"),
    mistakes={
        "an interval without the factor √2": _interval("sqrt(2 * → sqrt("),
        "an interval without the square root": _interval("math.sqrt →"),
        "an interval with the 2 below the line": _interval("2 * save_s * failure_s → save_s * failure_s / 2"),
        "half the time between failures": _interval("math.sqrt(2 * save_s * failure_s) → failure_s / 2"),
    },
)


_FILES = {
    "ranks/0.bin": 4096,
    "ranks/1.bin": 4096,
    "settings.json": 64,
    "ranks/settings.json": 64,
    "vocabulary.json": 64,
}


def _folder(folder: Path) -> None:
    """A checkpoint of two ranks, in two levels of folders, with one name in both."""
    (folder / "ranks").mkdir()
    for number, (name, size) in enumerate(_FILES.items()):
        # Files of the same size differ in their contents, else no exchange could be noticed.
        (folder / name).write_bytes(bytes((7 * offset + size + number) % 251 for offset in range(size)))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # one bit of the middle byte; the size stays
    content[len(content) // 2] ^= 0b0100_0000
    path.write_bytes(content)


def _swap(first_path: Path, second_path: Path) -> None:
    first_bytes, second_bytes = first_path.read_bytes(), second_path.read_bytes()
    first_path.write_bytes(second_bytes)
    second_path.write_bytes(first_bytes)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# In this order: the sentence of a harm supposes that those before it were noticed.
_HARMS: tuple[tuple[Callable[..., object], str], ...] = (
    (lambda folder: _cut(folder / "vocabulary.json"), "a file that was cut short goes unnoticed"),
    (lambda folder: _cut(folder / "ranks" / "1.bin"), "a short file in an inner folder"),
    (lambda folder: _flip(folder / "vocabulary.json"), "a flipped bit goes unnoticed"),
    (lambda folder: _flip(folder / "ranks" / "0.bin"), "a flipped bit in an inner folder"),
    (lambda folder: (folder / "ranks" / "0.bin").unlink(), "a file that is gone goes unnoticed"),
    (
        lambda folder: _swap(folder / "ranks" / "0.bin", folder / "ranks" / "1.bin"),
        "two files that have changed places go unnoticed",
    ),
    *(
        (lambda folder, name=name: _flip(folder / name), "a flipped bit among files of the same name")
        for name in ("settings.json", "ranks/settings.json")  # a bit of a file with a name of its own was noticed
    ),
)


def _sealed(answer: Callable[..., Any]) -> None:
    """Refuse an answer that finds a damaged folder intact, or an intact one damaged."""
    if not _said(answer, lambda folder: None):
        raise TEXTS.wrong("sealed-folder", "an untouched folder is said to be damaged")
    for harm, key in _HARMS:
        if _said(answer, harm):
            raise TEXTS.wrong("sealed-folder", key)
    try:
        finished = _said(answer, _without_seal)
    except FileNotFoundError:
        raise TEXTS.wrong("sealed-folder", "is_intact fails without a seal") from None
    if finished:
        raise TEXTS.wrong("sealed-folder", "a folder without a seal is said to be intact")


def _without_seal(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in _FILES:
            path.unlink()


def _said(answer: Callable[..., Any], harm: Callable[[Path], object]) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _folder(folder)
        verdict = answer(folder, harm)
    if verdict is None or not isinstance(verdict, int):
        raise TEXTS.wrong("sealed-folder", "no truth value", verdict=shown(verdict))
    return bool(verdict)


SEALED_FOLDER = TEXTS.exercise("sealed-folder", None, trial=_sealed, cases=((),))
