"""The board: what is beaten, what is kept on disk, and a small one made from beginning to end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlojz.base.errors import LabError
from dlojz.compress import task as teachers
from dlojz.compress.board import BoardRequest, check_fit, make_board
from dlojz.compress.board_record import TEACHER, Board, BoardTrial, pareto, write_board
from dlojz.compress.method import METHODS, Method, Shrunk, Start
from dlojz.compress.task import Settings, Task, digits, parameters, payload_bytes, saved_bytes, stored_weights

SHORT = Settings(epochs=1, batch_size=32)


def trial(method: str, accuracy: float, file_bytes: int, ratio: float, seed: int = 0, **changed: object) -> BoardTrial:
    fields = {
        "method": method,
        "family": TEACHER if method == TEACHER else "pruning",
        "seed": seed,
        "accuracy": accuracy,
        "parameters": 10,
        "predicted_bytes": file_bytes - 8,
        "payload_bytes": file_bytes - 8,
        "file_bytes": file_bytes,
        "latency_s": 0.01 * ratio,
        "latency_ratio": ratio,
        "latency_ratio_low": 0.95 * ratio,
        "latency_ratio_high": 1.05 * ratio,
        "made_in_s": 1.0,
    }
    return BoardTrial(**{**fields, **changed})  # type: ignore[arg-type]


def board(*trials: BoardTrial) -> Board:
    return Board(task="digits", image_size=16, teacher="vit_tiny", epochs=1, batch=8, rounds=3, threads=1,
                 trials=trials)  # fmt: skip


def test_the_front_is_what_nothing_beats() -> None:
    made = board(
        trial(TEACHER, 0.98, 1000, 1.0),
        trial("small", 0.97, 100, 1.0),
        trial("smaller_and_better", 0.98, 90, 1.0),
        trial("fast", 0.90, 500, 0.5),
        trial("slow_and_worse", 0.90, 500, 0.8),
    )
    assert [line.method for line in made.front()] == ["fast", "smaller_and_better"]


def test_board_front_takes_noise_for_nothing_better() -> None:
    """2% of the time, within the quartiles, keep no line on the front; nor do they push one off."""
    noisy = board(trial("a", 0.98, 100, 1.00), trial("b", 0.97, 100, 0.98), trial("c", 0.98, 100, 1.02))
    assert [line.method for line in noisy.front()] == ["a", "c"]
    clear = board(trial("a", 0.98, 100, 1.00), trial("b", 0.97, 100, 0.80))
    assert [line.method for line in clear.front()] == ["a", "b"]


def test_pareto_is_never_empty() -> None:
    same = [trial(name, 0.9, 100, 1.0) for name in "abc"]
    assert len(pareto(board(*same).lines())) == 3
    assert pareto([]) == []


def test_a_line_is_the_median_of_its_seeds_each_over_its_own_teacher() -> None:
    teachers_of = [(0.90, 1000), (0.96, 1000), (1.00, 1000)]
    made = board(
        *(trial(TEACHER, share, size, 1.0, seed) for seed, (share, size) in enumerate(teachers_of)),
        *(trial("m", share, 250, 0.5, seed, notes=("said once",)) for seed, share in enumerate((0.81, 0.96, 0.98))),
    )
    _, line = made.lines()
    assert (line.seeds, line.accuracy, line.accuracy_low, line.accuracy_high) == (3, 0.96, 0.81, 0.98)
    assert line.kept == pytest.approx(0.98) and line.ratio == 4 and line.notes == ("said once",)
    assert line.predicted_latency_ratio is None


def test_a_board_is_written_as_it_was_made(tmp_path: Path) -> None:
    made, path = board(trial(TEACHER, 0.98, 1000, 1.0)), tmp_path / "deep" / "board.json"
    write_board(path, made)
    assert Board.from_dict(json.loads(path.read_text("utf-8"))) == made
    with pytest.raises(LabError, match="cannot be written"):
        write_board(path / "board.json", made)


def test_a_number_that_means_nothing_is_no_trial() -> None:
    for accuracy, ratio in ((1.2, 1.0), (0.9, 0.0), (float("nan"), 1.0)):
        with pytest.raises(LabError):
            trial("m", accuracy, 100, ratio)


@pytest.fixture(scope="module")
def task() -> Iterator[Task]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # weights of so few samples are not learnt faster by more
    yield digits().few(64)
    torch.set_num_threads(threads)


def test_a_board_is_made_from_beginning_to_end(task: Task, tmp_path: Path) -> None:
    told: dict[str, tuple[int, int]] = {}
    request = BoardRequest(
        teacher="vit_tiny",
        methods=("student_alone", "distill_soft"),
        options={name: {"epochs": 1} for name in ("student_alone", "distill_soft")},
        seeds=(0, 1),
        settings=SHORT,
        rounds=2,
        batch=8,
        folder=tmp_path,
    )
    made = make_board(request, task, lambda label, done, total: told.update({label: (done, total)}))
    assert [line.method for line in made.lines()] == [TEACHER, "student_alone", "distill_soft"]
    teacher, student, _ = made.lines()
    assert (teacher.parameters, student.parameters, teacher.kept, teacher.latency_ratio) == (820_106, 423_562, 1, 1)
    assert student.predicted_bytes == student.payload_bytes < student.file_bytes < student.payload_bytes + 5000
    assert student.ratio == pytest.approx(teacher.file_bytes / student.file_bytes)
    assert student.predicted_latency_ratio == pytest.approx(0.512, abs=0.001)
    assert [one.seed for one in made.of("distill_soft")] == [0, 1]
    assert made.of("distill_soft")[0].options["temperature"] == 4.0
    assert set(told) >= {"teacher, seed 0", "distill_soft, seed 1"}
    assert all(done == total for done, total in told.values())
    assert len(list(tmp_path.glob("*/weights.safetensors"))) == 2
    again = make_board(request, task)
    assert [line.accuracy for line in again.lines()] == [line.accuracy for line in made.lines()]


def test_a_teacher_is_trained_once_and_again_if_it_was_damaged(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = []
    train = teachers.fit

    def counted(*arguments: object, **options: object) -> object:
        trainings.append(1)
        return train(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(teachers, "fit", counted)

    def weights() -> dict[str, torch.Tensor]:
        return stored_weights(teachers.trained_teacher("vit_mini", task, SHORT, folder=tmp_path))

    first, second = weights(), weights()
    assert len(trainings) == 1 and all(torch.equal(first[name], second[name]) for name in first)
    (kept,) = tmp_path.glob("*/weights.safetensors")
    good = kept.read_bytes()
    others = {name: tensor + 1 for name, tensor in load_file(kept).items()}
    damages = [
        lambda: kept.write_bytes(good[:-1]),
        lambda: kept.write_bytes(b""),
        lambda: save_file(others, kept),
        lambda: kept.with_name("teacher.json").write_text("{"),
        lambda: kept.with_name("teacher.json").write_text('{"asked": {}}'),
        kept.unlink,
    ]
    for number, damage in enumerate(damages):
        damage()
        found = weights()
        assert len(trainings) == 2 + number
        assert all(torch.equal(first[name], found[name]) for name in first)
        assert kept.read_bytes() == good
    teachers.trained_teacher("vit_mini", task, Settings(epochs=1, batch_size=32, seed=1), folder=tmp_path)
    assert len(trainings) == 2 + len(damages) and len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.glob("*/.*.tmp"))


def test_a_refusal_ends_a_strict_board_and_is_told_by_another(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Method):
        def __call__(self, start: Start) -> Shrunk:
            raise LabError("not here.")

    class Same(Method):
        def __call__(self, start: Start) -> Shrunk:
            stored = stored_weights(start.teacher)
            return Shrunk(start.teacher, stored, payload_bytes(stored), parameters(start.teacher))

    for kind, name in ((Refusing, "refusing"), (Same, "same")):
        monkeypatch.setitem(METHODS, name, kind(name, "pruning", "m:f", lambda: ""))
    asked = {"teacher": "vit_mini", "methods": ("refusing", "same"), "settings": SHORT, "rounds": 1, "batch": 2}
    with pytest.raises(LabError, match="not here"):
        make_board(BoardRequest(**asked), task)  # type: ignore[arg-type]
    made = make_board(BoardRequest(**asked, seeds=(0, 1), strict=False), task)  # type: ignore[arg-type]
    assert made.left_out == {"refusing": "not here."}
    teacher, same = made.lines()
    assert (same.accuracy, same.file_bytes, same.kept) == (teacher.accuracy, teacher.file_bytes, 1)


def test_what_no_board_is_made_of_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(LabError, match="unknown method 'int7'"):
        BoardRequest(methods=("int7",))
    for seeds in ((), (1, 1)):
        with pytest.raises(LabError, match="a board needs seeds, each of them once"):
            BoardRequest(seeds=seeds)
    for asked, sentence in (
        ({"options": {"gradul": {"every": 2}}}, "unknown method with options 'gradul': did you mean 'gradual'"),
        ({"options": {"lottery": {"rounds": 2}}}, "unknown method with options 'lottery'"),
        ({"options": {"gradual": {"evry": 2}}}, "unknown option of gradual 'evry': did you mean 'every'"),
        ({"rounds": 0}, "rounds must be at least 1, but 0 was received"),
        ({"batch": 0}, "batch must be at least 1, but 0 was received"),
    ):
        with pytest.raises(LabError, match=sentence):
            BoardRequest(**asked)  # type: ignore[arg-type]


def test_make_board_refuses_what_does_not_fit_the_model_before_training(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*_: object, **__: object) -> object:
        raise AssertionError("a teacher was trained")

    monkeypatch.setattr("dlojz.compress.board.trained_teacher", trained)
    wide = digits(64).few(8)
    for name, others in (
        ("two_to_four_permuted", "use magnitude_global, magnitude_layer, gradual, lottery, two_to_four, "),
        ("distill_hidden", "use student_alone, distill_soft, distill_logits."),
    ):
        with pytest.raises(LabError, match=f"{name} cannot be applied to alexnet_tiny .*{others}"):
            make_board(BoardRequest(teacher="alexnet_tiny", methods=(name,)), wide)
    for name, options, sentence in (
        ("gradual", {"epochs": 0}, "epochs must be at least 1"),
        ("lottery", {"rewind_epochs": 6}, "rewind_step must be from 0 to"),
        ("int8_dynamic", {"bits": 99}, "bits must be a whole number from 2 to 8"),
        ("int8_static", {"samples": 65}, "samples must be from 1 to 64"),
        ("distill_soft", {"temperature": float("nan")}, "temperature must be greater than 0"),
    ):
        with pytest.raises(LabError, match=sentence):
            make_board(BoardRequest(methods=(name,), options={name: options}), task)


def test_a_rehearsal_refuses_no_method_that_works(task: Task) -> None:
    """Each with options of its own: the defaults, said again."""
    before = torch.random.get_rng_state()
    for one in METHODS.values():
        if one.missing() is None:
            options = {**one.options, **({"samples": 64} if "samples" in one.options else {})}
            check_fit(one, options, "vit_mini", task)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_saved_bytes_are_payload_bytes_and_a_header() -> None:
    tensors = {"a": torch.zeros(100), "b": torch.zeros(3, dtype=torch.int8)}
    assert payload_bytes(tensors) == 403
    header = saved_bytes(tensors) - 403
    assert 8 < header < 250  # eight bytes of length, then a line of JSON with names, types, shapes and offsets
