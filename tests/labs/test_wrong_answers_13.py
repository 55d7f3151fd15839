"""The bank of wrong answers of lab 13: states, a save in the background, its interval, sealed folders."""

import copy
import hashlib
import json
import math
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlojz.labs import lab13_checkpoints
from dlojz.labs.lab13_checkpoints.exercises import best_interval
from tests.labs.bank import Answer, BankTests

EXERCISES = {exercise.id: exercise for exercise in lab13_checkpoints.EXERCISES}


def pieces_to_read(e: int, old: int, new: int, rank: int) -> list[list[int]]:
    """Number by number: who has it, and where in that rank's share."""
    mine = [(n // -(-e // old), n % -(-e // old)) for n in range(e) if n // -(-e // new) == rank]
    found: list[list[int]] = []
    for other, place in mine:
        if found and found[-1][0] == other:
            found[-1][2] = place + 1
        else:
            found.append([other, place, place + 1])
    return found


def pieces_in_the_vector(e: int, old: int, new: int, rank: int) -> list[list[int]]:
    share = -(-e // old)
    return [[r, r * share + a, r * share + b] for r, a, b in pieces_to_read(e, old, new, rank)]


def pieces_rounded_down(e: int, old: int, new: int, rank: int) -> list[tuple[int, int, int]]:
    a, b = e // old, e // new
    met = [(r, max(r * a, rank * b), min(r * a + a, rank * b + b)) for r in range(old)]
    return [(r, x - r * a, y - r * a) for r, x, y in met if x < y]


def pieces_with_padding(e: int, old: int, new: int, rank: int) -> list[tuple[int, int, int]]:
    a, b = -(-e // old), -(-e // new)
    met = [(r, max(r * a, rank * b), min(r * a + a, rank * b + b)) for r in range(old)]
    return [(r, x - r * a, y - r * a) for r, x, y in met if x < y]


def pieces_of_everybody(e: int, old: int, new: int, rank: int) -> list[list[int]]:
    met = {piece[0]: piece for piece in pieces_to_read(e, old, new, rank)}
    return [met.get(r, [r, 0, 0]) for r in range(old)]


def pieces_by_intervals(e: int, old: int, new: int, rank: int) -> list[tuple[int, int, int]]:
    old_share, new_share = (e + old - 1) // old, (e + new - 1) // new
    place, end, pieces = rank * new_share, min((rank + 1) * new_share, e), []
    while place < end:
        other, start = divmod(place, old_share)
        stop = min(old_share, start + end - place)
        pieces.append((other, start, stop))
        place += stop - start
    return pieces


def saved(training: Any, *, but: str = "", parameters_only: bool = False) -> dict[str, Any]:
    """The state of a training without one of its parts."""
    state = {
        "model": dict(training.model.named_parameters()) if parameters_only else training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "schedule": training.schedule.state_dict(),
        "random": torch.get_rng_state(),
        "epoch": training.epoch,
        "place": training.place,
    }
    return {name: part for name, part in state.items() if name != but}


def loaded(training: Any, state: dict[str, Any], *, strict: bool = True) -> None:
    """Put back what there is."""
    if "model" in state:
        training.model.load_state_dict(state["model"], strict=strict)
    for name in ("optimizer", "schedule"):
        if name in state:
            getattr(training, name).load_state_dict(state[name])
    training.epoch = state.get("epoch", training.epoch)
    training.place = state.get("place", training.place)
    if "random" in state:
        torch.set_rng_state(state["random"])


def resumed(*, but: str = "", parameters_only: bool = False) -> Answer:
    def stop(training: Any, fresh: Any, path: Path) -> None:
        torch.save(saved(training, but=but, parameters_only=parameters_only), path)
        torch.manual_seed(999)
        loaded(fresh, torch.load(path, weights_only=True), strict=not parameters_only)

    return stop


def resumed_in_two_files(training: Any, fresh: Any, path: Path) -> None:
    own = saved(training)
    position = {name: own.pop(name) for name in ("epoch", "place")}
    path.with_suffix(".json").write_text(json.dumps(position))
    torch.save(own, path)
    torch.manual_seed(5)
    loaded(fresh, {**torch.load(path, weights_only=True), **json.loads(path.with_suffix(".json").read_text())})


def resumed_in_memory(training: Any, fresh: Any, path: Path) -> None:
    """Without any file."""
    state = copy.deepcopy(saved(training))
    torch.manual_seed(2)
    loaded(fresh, state)


def resumed_random_first(training: Any, fresh: Any, path: Path) -> None:
    state = saved(training)
    torch.save({"random": state.pop("random"), **state}, path)
    state = torch.load(path, weights_only=True)
    fresh.schedule.load_state_dict(state["schedule"])
    fresh.optimizer.load_state_dict(state["optimizer"])
    loaded(fresh, {name: state[name] for name in ("random", "model", "epoch", "place")})


def resumed_by_exchange(training: Any, fresh: Any, path: Path) -> None:
    """Numbers of the sampler by their attributes' names."""
    own = saved(training)
    own |= {"numbers": {name: value for name, value in vars(training).items() if type(value) is int}}
    torch.save(own, path)
    torch.manual_seed(3)
    own = torch.load(path, weights_only=True)
    vars(fresh).update(own.pop("numbers"))
    loaded(fresh, own)


def resumed_from_the_new_one(training: Any, fresh: Any, path: Path) -> None:
    """The wrong way round."""
    torch.save(saved(fresh), path)
    loaded(training, torch.load(path, weights_only=True))


def resumed_from_an_object(training: Any, fresh: Any, path: Path) -> None:
    torch.save(training, path)
    torch.load(path, weights_only=True)


def resumed_in_place_of_it(training: Any, fresh: Any, path: Path) -> None:
    """The new training gets the old one's model itself."""
    resumed()(training, fresh, path)
    fresh.model = training.model


def copied(state: Any, buffers: Any) -> None:
    for name in state:
        buffers[name].copy_(state[name])


def started(write: Any, tensors: Any) -> threading.Thread:
    thread = threading.Thread(target=write, args=(tensors,))
    thread.start()
    return thread


def saved_later(state: Any, buffers: Any, write: Any) -> Any:
    copied(state, buffers)
    return started(write, buffers)


def saved_clones(state: Any, buffers: Any, write: Any) -> Any:
    return started(write, {name: tensor.clone() for name, tensor in state.items()})


def saved_by_a_pool(state: Any, buffers: Any, write: Any) -> Any:
    copied(state, buffers)
    return ThreadPoolExecutor(1).submit(write, buffers)


def saved_by_a_function(state: Any, buffers: Any, write: Any) -> Any:
    with torch.no_grad():
        for mine, theirs in zip(buffers.values(), state.values(), strict=True):
            mine[...] = theirs
    thread = threading.Thread(target=lambda: write(buffers), daemon=True)
    thread.start()
    return thread


def saved_by_foreach(state: Any, buffers: Any, write: Any) -> Any:
    torch._foreach_copy_([buffers[name] for name in state], list(state.values()))
    return started(write, buffers)


def saved_by_a_class(state: Any, buffers: Any, write: Any) -> Any:
    class Writer(threading.Thread):
        def run(self) -> None:
            write(buffers)

    copied(state, buffers)
    writer = Writer()
    writer.start()
    return writer


def saved_by_a_timer(state: Any, buffers: Any, write: Any) -> Any:
    copied(state, buffers)
    timer = threading.Timer(0.0, write, [buffers])
    timer.start()
    return timer


def copied_by_the_thread(state: Any, buffers: Any, write: Any) -> Any:
    """Copied only when the writer has time for it."""

    def work() -> None:
        write(state)
        copied(state, buffers)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def saved_and_waited_for(state: Any, buffers: Any, write: Any) -> Any:
    thread = saved_later(state, buffers, write)
    thread.join()
    return thread


def saved_at_once(state: Any, buffers: Any, write: Any) -> Any:
    copied(state, buffers)
    write(buffers)


def thread_that_calls_at_once(state: Any, buffers: Any, write: Any) -> Any:
    copied(state, buffers)
    thread = threading.Thread(target=write(buffers))
    thread.start()
    return thread


def never_started(state: Any, buffers: Any, write: Any) -> Any:
    copied(state, buffers)
    return threading.Thread(target=write, args=(buffers,))


def saved_without_a_handle(state: Any, buffers: Any, write: Any) -> None:
    saved_later(state, buffers, write)


def one_tensor_copied(state: Any, buffers: Any, write: Any) -> Any:
    name = next(iter(state))
    buffers[name].copy_(state[name])
    return started(write, {**state, name: buffers[name]})


def one_tensor_each(state: Any, buffers: Any, write: Any) -> Any:
    copied(state, buffers)
    threads = [started(write, {name: tensor}) for name, tensor in buffers.items()]
    for thread in threads[:-1]:
        thread.join(0)
    return threads[-1]


def best(c: float, m: float) -> tuple[float, float]:
    t = (2 * c * m) ** 0.5
    return t, c / t + t / (2 * m)


def share_at(t: float, c: float, m: float) -> float:
    return c / t + t / (2 * m)


def hashed(folder: Path, *, deep: bool = True, of: Any = lambda path: path.read_bytes()) -> dict[str, str]:
    files = [path for path in (folder.rglob("*") if deep else folder.glob("*")) if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(of(path)).hexdigest()
        for path in files
        if path.name != "SEAL"
    }


def sealing(
    *, deep: bool = True, of: Any = lambda path: path.read_bytes(), same: Any = dict.__eq__, without: bool = False
) -> Answer:
    def sealed(folder: Path, harm: Any) -> bool:
        (folder / "SEAL").write_text(json.dumps(hashed(folder, deep=deep, of=of)))
        harm(folder)
        if not (folder / "SEAL").is_file():
            return without
        return bool(same(json.loads((folder / "SEAL").read_text()), hashed(folder, deep=deep, of=of)))

    return sealed


def sealed_by_names(order: Any = sorted, first: bool = False) -> Answer:
    """Without the folders: of two files with one name, one counts."""

    def sealed(folder: Path, harm: Any) -> bool:
        def named() -> dict[str, bytes]:
            files: dict[str, bytes] = {}
            for path in order(folder.rglob("*")):
                if path.is_file() and not (first and path.name in files):
                    files[path.name] = path.read_bytes()
            return files

        before = named()
        (folder / "SEAL").touch()
        harm(folder)
        after = named()
        return after.pop("SEAL", None) is not None and after == before

    return sealed


def sealed_or_broken(folder: Path, harm: Any) -> bool:
    (folder / "SEAL").write_text(repr(sorted(hashed(folder).items())))
    harm(folder)
    return (folder / "SEAL").read_text() == repr(sorted(hashed(folder).items()))


def sealed_by_lines(folder: Path, harm: Any) -> bool:
    """As sha256sum writes them, in a hidden file."""

    def listed() -> list[str]:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".sums")
        return [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}" for path in paths]

    (folder / ".sums").write_text("\n".join(listed()))
    harm(folder)
    return (folder / ".sums").exists() and (folder / ".sums").read_text().split("\n") == listed()


def sealed_by_a_copy(folder: Path, harm: Any) -> bool:
    """A second copy of everything, as the seal."""
    shutil.copytree(folder, folder / "copy" / "of")
    harm(folder)
    both = [path for path in (folder / "copy" / "of").rglob("*") if path.is_file()]
    twins = [folder / path.relative_to(folder / "copy" / "of") for path in both]
    return bool(both) and all(
        twin.is_file() and twin.read_bytes() == path.read_bytes() for path, twin in zip(both, twins, strict=True)
    )


def sealed_in_a_folder(folder: Path, harm: Any) -> bool:
    """The seal in a hidden folder, whose files do not count."""
    aside = folder / ".seal"
    aside.mkdir()

    def walked() -> list[list[str]]:
        found = []
        for root, names, files in os.walk(folder):
            names[:] = sorted(set(names) - {".seal"})
            found += [[root, one, hashlib.md5((Path(root) / one).read_bytes()).hexdigest()] for one in sorted(files)]
        return found

    (aside / "all.json").write_text(json.dumps(walked()))
    harm(folder)
    return (aside / "all.json").is_file() and json.loads((aside / "all.json").read_text()) == walked()


def sealed_with_itself(folder: Path, harm: Any) -> bool:
    seal = folder / "SEAL"
    seal.write_text("")
    every = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}
    seal.write_text(json.dumps(every))
    harm(folder)
    now = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}
    return seal.is_file() and json.loads(seal.read_text()) == now


BANK: dict[str, list[tuple[Answer, str]]] = {
    "resume-exactly": [
        (resumed(but="model"), "has other weights"),
        (resumed_from_an_object, "you have two options, do those steps only"),  # without torch's colours
        (resumed(but="optimizer"), "The optimizer begins anew"),
        (resumed(but="schedule"), "schedule of the learning rate is at another step"),
        (resumed(but="random"), "dropout would draw other masks"),
        (resumed(but="epoch"), "in another epoch"),
        (resumed(but="place"), "read samples twice"),
        (resumed(parameters_only=True), "not the buffers"),
        (resumed_from_the_new_one, "The training that is saved has changed"),
        (lambda training, fresh, path: None, "has other weights"),
        (resumed_in_place_of_it, "do they share tensors"),
    ],
    "shares-to-read": [
        (pieces_in_the_vector, "counted from the beginning of the vector"),
        (pieces_rounded_down, "a share is rounded up"),
        (pieces_with_padding, "beyond the end of the vector"),
        (pieces_of_everybody, "leave out the ranks of which there is nothing to read"),
        (
            lambda e, old, new, rank: [
                (r, 0, min(-(-e // old), e - r * -(-e // old))) for r, *_ in pieces_to_read(e, old, new, rank)
            ],
            "too much of each",
        ),
        (lambda e, old, new, rank: pieces_to_read(e, old, new, rank)[::-1], "in another order"),
        (lambda e, old, new, rank: [(rank, 0, e // new)], "is expected, but your function returns"),
        (lambda e, old, new, rank: [(r, a) for r, a, _ in pieces_to_read(e, old, new, rank)], "a list of triples"),
        (
            lambda e, old, new, rank: [(r, a / 1, b / 1) for r, a, b in pieces_to_read(e, old, new, rank)],
            "whole numbers",
        ),
        (lambda e, old, new, rank: None, "returns nothing"),
        (
            lambda e, old, new, rank: [(r, a, b - 1) for r, a, b in pieces_to_read(e, old, new, rank)],
            "Your last place is one too small",
        ),
        (
            lambda e, old, new, rank: [(r, a, b - a) for r, a, b in pieces_to_read(e, old, new, rank)],
            "The third number is a length",
        ),
        (
            lambda e, old, new, rank: [(r + 1, a, b) for r, a, b in pieces_to_read(e, old, new, rank)],
            "You number the old ranks from 1; they go from 0.",
        ),
        (lambda e, old, new, rank: pieces_to_read(e, new, old, rank), "You exchange the two cuts: the files are of"),
        (lambda e, old, new, rank: pieces_to_read(e, old, new, 0), "Every rank reads what rank 0 should"),
        (lambda e, old, new, rank: [(r, 0, -(-e // old)) for r in range(rank, old, new)], "but your function returns"),
        (lambda e, old, new, rank: pieces_to_read(e, old, new, rank)[:1], "Only the first piece is there"),
        (
            lambda e, old, new, rank: [x for piece in pieces_to_read(e, old, new, rank) for x in piece],
            "Return a list of triples of whole numbers, (old rank,",
        ),
        (lambda e, old, new, rank: pieces_to_read(e, old, new, rank) or None, "Your function returns nothing"),
    ],
    "save-in-background": [
        (saved_and_waited_for, "waits until everything is written"),
        (saved_at_once, "waits until everything is written"),
        (thread_that_calls_at_once, "waits until everything is written"),
        (lambda state, buffers, write: started(write, state), "the state of the next step"),
        (lambda state, buffers, write: started(write, dict(state)), "the state of the next step"),
        (copied_by_the_thread, "the state of the next step"),
        (lambda state, buffers, write: started(write, buffers), "Zeros were written"),
        (saved_without_a_handle, "Return the thread"),
        (never_started, "never started"),
        (one_tensor_copied, "which tensors were copied"),
        (one_tensor_each, "write was called 3 times"),
    ],
    "checkpoint-interval": [
        (lambda c, m: (math.sqrt(c * m), share_at(math.sqrt(c * m), c, m)), "A factor √2 is missing"),
        (lambda c, m: (math.sqrt(c * m), best(c, m)[1]), "A factor √2 is missing"),
        (lambda c, m: (2 * c * m, share_at(2 * c * m, c, m)), "The square root is missing"),
        (lambda c, m: (math.sqrt(c * m / 2), share_at(math.sqrt(c * m / 2), c, m)), "wrong side of the fraction"),
        (lambda c, m: (m / 2, share_at(m / 2, c, m)), "half the time between failures"),
        (lambda c, m: (best(c, m)[0], c / best(c, m)[0]), "one of the two terms is missing"),
        (lambda c, m: (best(c, m)[0], c / best(c, m)[0] + best(c, m)[0] / m), "costs a whole interval"),
        (lambda c, m: best(c, m)[::-1], "in another order"),
        (lambda c, m: best(c, m)[0], "number"),
        (lambda c, m: None, "returns nothing"),
    ],
    "sealed-folder": [
        (sealed_by_names(), "where two folders hold a file of the same name"),
        (sealed_by_names(lambda paths: sorted(paths, reverse=True)), "where two folders hold a file of the same name"),
        (sealing(of=lambda path: str(path.stat().st_size).encode()), "One flipped bit goes unnoticed"),
        (sealing(of=lambda path: b""), "cut short goes unnoticed"),
        (sealing(deep=False), "cut short in a folder of the folder goes unnoticed"),
        (sealed_or_broken, "is_intact fails where the seal is missing"),
        (sealing(same=lambda old, new: all(old.get(name) == new[name] for name in new)), "A file that is gone"),
        (sealing(without=True), "A folder without a seal"),
        (sealed_with_itself, "A folder that nobody has touched"),
        (lambda folder, harm: None, "must return True or False"),
    ],
}

REFERENCES: dict[str, Answer] = {
    "resume-exactly": resumed(),
    "shares-to-read": pieces_to_read,
    "save-in-background": saved_later,
    "checkpoint-interval": best,
    "sealed-folder": sealing(),
}
OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("resume-exactly", resumed_in_two_files),
    ("resume-exactly", resumed_in_memory),
    ("resume-exactly", resumed_random_first),
    ("resume-exactly", resumed_by_exchange),
    ("save-in-background", saved_by_foreach),
    ("save-in-background", lambda state, buffers, write: started(write, copy.deepcopy(state))),
    ("save-in-background", saved_by_a_class),
    ("save-in-background", saved_by_a_timer),
    ("checkpoint-interval", lambda c, m: [pow(2 * c * m, 0.5), pow(2 * c / m, 0.5)]),
    ("sealed-folder", sealed_in_a_folder),
    ("save-in-background", saved_clones),
    ("save-in-background", saved_by_a_pool),
    ("save-in-background", saved_by_a_function),
    ("sealed-folder", sealed_by_lines),
    ("sealed-folder", sealed_by_a_copy),
    ("shares-to-read", pieces_by_intervals),
    ("shares-to-read", lambda *case: tuple(map(tuple, pieces_to_read(*case)))),
    ("shares-to-read", lambda *case: np.array(pieces_to_read(*case))),
    ("shares-to-read", lambda *case: torch.tensor(pieces_to_read(*case))),
    ("shares-to-read", lambda *case: [tuple(map(np.int64, piece)) for piece in pieces_by_intervals(*case)]),
]


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab13_checkpoints.PREDICTIONS
    wrong, right, others = BANK, REFERENCES, OTHER_RIGHT_ANSWERS


@pytest.mark.parametrize("save_s", [1.0, 60.0])
def test_no_other_interval_loses_less(save_s: float) -> None:
    interval_s, lost = best_interval(save_s, 11_000.0)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert share_at(factor * interval_s, save_s, 11_000.0) > lost
