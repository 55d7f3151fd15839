"""Figures and tables of lab 11: what is shown is what was given or really trained; what is still to do is said."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlojz.base.language import use_language
from dlojz.base.table import Table
from dlojz.compress import masks, two_to_four
from dlojz.compress.board_record import TEACHER, Board, BoardTrial
from dlojz.compress.task import Settings, Task, digits, fit, new_model
from dlojz.display.figures.compress_figures import compress_figure
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Picture
from dlojz.labs.kit.judges import normal
from dlojz.labs.lab11_compression import figures, figures_prune
from dlojz.labs.lab11_compression import figures_prune as patterns
from dlojz.labs.lab11_compression.exercises_distill import mixed_loss
from dlojz.labs.lab11_compression.exercises_prune import global_masks, next_ticket, reorder, sr_ste, two_of_four
from dlojz.labs.lab11_compression.exercises_quantize import fake_quantize, quantize_affine, quantize_rows
from dlojz.labs.lab11_compression.figures import Accuracies, Students
from dlojz.labs.lab11_compression.figures_prune import Pruned


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def task() -> Task:
    return digits()


@pytest.fixture(scope="module")
def small(task: Task) -> Task:
    return replace(task.few(128), held_out_NCHW=task.held_out_NCHW[:64], held_out_labels_N=task.held_out_labels_N[:64])


@pytest.fixture(scope="module")
def teacher(task: Task) -> nn.Module:
    torch.set_num_threads(1)
    model = new_model("vit_tiny", task, 0)
    fit(model, task, Settings(epochs=1))
    return model


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("rows")


def drawn(picture: Any) -> Any:
    assert isinstance(picture, Picture)
    assert picture.figure.alt
    return picture.figure


def answers(sheet: Any) -> list[str]:
    assert isinstance(sheet, Table)
    return [row[1] for row in sheet.rows]


def test_what_is_to_do_is_said_at_once(teacher: nn.Module, small: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlojz.compress.task.fit", lambda *_, **__: pytest.fail("it trains for nothing"))
    seen = normal(1, 20, 8)
    for said in (
        figures.students(teacher, small, undone),
        figures.noise(undone, seen),
        figures.calibrated(undone, seen, 8),
        figures.post_training(undone, teacher, small),
        figures.aware_training(undone, fake_quantize, teacher, small),
        figures.aware_training(quantize_rows, undone, teacher, small),
        figures_prune.pruned(undone, teacher, small),
        figures_prune.who_keeps(undone, teacher),
        figures_prune.spared(undone, teacher, small),
        figures_prune.tickets(undone, small),
        patterns.refined(undone, sr_ste, teacher, small),
        patterns.refined(two_of_four, undone, teacher, small),
        patterns.in_order(undone, reorder, teacher, small.held_out_NCHW),
        patterns.in_order(two_of_four, undone, teacher, small.held_out_NCHW),
    ):
        assert isinstance(said, Verdict)
        assert said.state == "todo"
        for shown in (
            figures.helps,
            figures.post_training_seen,
            figures.aware_training_table,
            figures.aware_training_seen,
            figures_prune.pruned_seen,
        ):
            assert shown(said) is said


def test_probabilities_are_softened(teacher: nn.Module, task: Task) -> None:
    _, *panels = drawn(figures.softened(teacher, task, (1, 4))).axes
    heights = [[patch.get_height() for patch in axes.patches] for axes in panels]
    for found in heights:
        assert sum(found) == pytest.approx(100, rel=1e-4)
    assert max(heights[0]) > max(heights[1])
    assert all("the true one" in axes.get_xlabel() for axes in panels)


def test_a_teacher_is_judged_by_its_threshold(teacher: nn.Module, task: Task) -> None:
    with torch.no_grad():
        taught = replace(task, held_out_labels_N=teacher(task.held_out_NCHW).argmax(1))
    assert answers(figures.teacher_seen(teacher, taught)) == ["yes"]
    other = replace(taught, held_out_labels_N=(taught.held_out_labels_N + 1) % 10)
    assert answers(figures.teacher_seen(teacher, other)) == ["no"]


def test_a_student_that_is_given_no_label_learns_from_none(
    teacher: nn.Module, small: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "DISTILL_EPOCHS", 1)
    before = weights(teacher)
    one = figures.students(teacher, small, mixed_loss, seeds=(0,), labels=16)
    other = figures.students(
        teacher, replace(small, labels_N=(small.labels_N + 3) % 10), mixed_loss, seeds=(0,), labels=16
    )
    assert isinstance(one, Students) and isinstance(other, Students)
    assert one.kept["unlabelled"] == other.kept["unlabelled"]
    assert one.kept["labels"] != other.kept["labels"]
    assert one.kept["both"] != other.kept["both"]
    assert one.share == pytest.approx(0.516, abs=1e-3)
    assert torch.equal(weights(teacher), before)


def _students(**kept: float) -> Students:
    return Students(share=0.5, labels=60, kept={arm: (value, value) for arm, value in kept.items()})


def test_students_are_summed_up_beside_distilbert() -> None:
    good = _students(labels=0.99, both=1.0, few=0.85, taught=0.98, unlabelled=0.97)
    assert answers(figures.helps(good)) == ["yes", "no", "yes"]
    other = _students(labels=0.9, both=0.96, few=0.95, taught=0.96)
    assert answers(figures.helps(other)) == ["no", "yes", "no"]
    assert good.sheet.rows[2] == ("student alone, 60 labels", "50.0%", "85.0%", "85.0% – 85.0%")
    assert good.sheet.rows[-1][1:3] == ("60.0%", "97.0%")
    use_language("fr")
    assert good.sheet.rows[-1][0] == "DistilBERT (publié)"
    assert answers(figures.helps(good)) == ["oui", "non", "oui"]


def test_noise_is_what_a_uniform_error_foresees() -> None:
    weight_OI = normal(2, 64, 64)
    (axes,) = drawn(figures.noise(quantize_rows, weight_OI, (8, 6))).axes
    predicted, measured, whole_predicted, whole_measured = (list(line.get_ydata()) for line in axes.lines)
    assert predicted == pytest.approx(measured, abs=0.3)
    assert whole_predicted == pytest.approx(whole_measured, abs=0.3)
    assert all(row > whole for row, whole in zip(measured, whole_measured, strict=True))
    assert figures.noise_ratio(weight_OI, 8, 7) == pytest.approx((127 / 63) ** 2, rel=0.05)


def test_inputs_are_counted_by_image() -> None:
    sheet = figures.observed(normal(4, 10, 3).abs(), images=5)
    assert sheet.rows == (("5 × 2", "3", "no", "yes"),)


def test_the_least_error_is_the_least() -> None:
    seen = normal(3, 100, 100).exp() - 0.2
    sheet = figures.calibrated(quantize_affine, seen, 4)
    assert isinstance(sheet, Table)
    minimum, percentile, least = (float(row[-1].removesuffix(" dB")) for row in sheet.rows)
    assert least >= max(minimum, percentile)
    assert sheet.rows[0][2] == "0.00%"


def test_few_bits_leave_the_teacher_as_it_is(teacher: nn.Module, small: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "QUANTIZE_EPOCHS", 1)
    before = weights(teacher)
    found = figures.post_training(quantize_rows, teacher, small, bits=(8, 2))
    assert isinstance(found, Accuracies)
    assert list(found) == [32, 8, 2]
    trained = figures.aware_training(quantize_rows, fake_quantize, teacher, small)
    assert isinstance(trained, tuple)
    assert trained[:2] == (found[32], found[2])
    assert trained[2] != trained[1]
    assert torch.equal(weights(teacher), before)


def test_accuracies_are_judged_by_their_thresholds() -> None:
    found = Accuracies({32: 0.98, 8: 0.98, 4: 0.97, 2: 0.6})
    assert answers(figures.post_training_seen(found)) == ["yes", "yes", "no"]
    assert found.sheet().rows == (("accuracy", "98.0%", "98.0%", "97.0%", "60.0%"),)
    assert answers(figures.aware_training_seen((0.98, 0.6, 0.96))) == ["no", "yes"]
    table = figures.aware_training_table((0.98, 0.6, 0.96))
    assert isinstance(table, Table)
    assert table.rows == (("98.0%", "60.0%", "96.0%"),)


def test_pruned_models_stand_by_their_sparsity(
    teacher: nn.Module, small: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_prune, "SPARSITIES", (0.0, 0.8))
    monkeypatch.setattr(figures_prune, "TUNED", (0.8,))
    monkeypatch.setattr(figures_prune, "TUNING_EPOCHS", 1)
    before = weights(teacher)
    found = figures_prune.pruned(lambda *case: [mask > 0 for mask in global_masks(*case)], teacher, small)
    assert isinstance(found, Pruned)
    assert torch.equal(weights(teacher), before)
    lines = found.figure().axes[0].lines
    assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [[0, 80], [80], [80]]
    assert "text/plain" in found._repr_mimebundle_()


def test_pruned_models_are_judged_by_their_thresholds() -> None:
    found = Pruned(
        at_once={0.0: 0.98, 0.3: 0.97, 0.8: 0.3}, tuned={0.7: 0.95, 0.8: 0.4}, by_layer={0.7: 0.96, 0.8: 0.9}
    )
    assert answers(figures_prune.pruned_seen(found)) == ["yes", "no", "yes", "no"]


def test_shares_that_layers_keep_are_those_of_the_masks(teacher: nn.Module) -> None:
    sheet = figures_prune.who_keeps(global_masks, teacher, (0.5,))
    assert isinstance(sheet, Table)
    by_name = {row[0]: row[1] for row in sheet.rows}
    assert set(by_name) == {"project", "qkv", "attention_project", "mlp_expand", "mlp_project", "classifier"}
    assert float(by_name["classifier"].removesuffix("%")) < 50


def test_a_layer_that_is_spared_keeps_its_weights(
    teacher: nn.Module, small: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, given, before = masks.weights(teacher), [], weights(teacher)
    (classifier,) = (name for name in own if name.endswith("classifier"))

    def noted(model: nn.Module, found: masks.Masks, *_: Any) -> None:
        given.append(set(found))
        for parameter in model.parameters() if classifier in found else ():
            parameter.data.zero_()

    monkeypatch.setattr(masks, "fine_tune", noted)
    right = replace(small, held_out_labels_N=teacher(small.held_out_NCHW).argmax(1))
    assert answers(figures_prune.spared(global_masks, teacher, right)) == ["no", "yes"]
    assert given == [set(own), set(own) - {classifier}]
    assert torch.equal(weights(teacher), before)


def test_tickets_and_their_controls_are_as_sparse(small: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_prune, "TICKET_EPOCHS", 1)
    sheet = figures_prune.tickets(next_ticket, small, rounds=2, rate=0.5)
    assert isinstance(sheet, Table)
    assert [row[1] for row in sheet.rows] == ["0.0%", "50.0%", "75.0%", "75.0%", "75.0%"]


def test_gradual_pruning_is_laid_beside_that_at_once(
    teacher: nn.Module, small: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights(teacher)
    found = patterns.gradual(teacher, small, (1, 2))
    assert torch.equal(weights(teacher), before)
    assert drawn(found.picture).axes
    assert [row[0] for row in found.table().rows] == ["none (the teacher, without zeros)", "1 epochs", "2 epochs"]
    other = patterns.Gradual(found.picture, 0.9, {3: (0.8, 0.85), 9: (0.84, 0.85), 12: (0.9, 0.85)})
    assert answers(other.seen()) == ["yes", "no", "no"]
    assert other.table().rows[1] == ("3 epochs", "80.0%", "85.0%")


def test_a_mask_that_stays_keeps_its_places(teacher: nn.Module, small: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "REFINING_EPOCHS", 1)
    # A mask of booleans is right too.
    sheet = patterns.refined(lambda weight: two_of_four(weight) > 0, sr_ste, teacher, small)
    assert isinstance(sheet, Table)
    assert [row[2] for row in sheet.rows[:3]] == ["–", "0.0%", "0.0%"]
    assert float(sheet.rows[3][2].removesuffix("%")) > 0


def test_a_better_order_keeps_more_and_changes_no_output(teacher: nn.Module, small: Task) -> None:
    images = small.held_out_NCHW[:8]
    sheet = patterns.in_order(two_of_four, reorder, teacher, images)
    assert isinstance(sheet, Table)
    for _, before, after, same in sheet.rows:
        assert float(before.removesuffix("%")) < float(after.removesuffix("%"))
        assert same == "yes"
    forgets_bias = patterns.in_order(
        two_of_four, lambda expand, bias, project, order: (expand[order], bias, project[:, order]), teacher, images
    )
    assert isinstance(forgets_bias, Table)
    assert {row[3] for row in forgets_bias.rows} == {"no"}


def test_zeros_are_timed_in_both_languages() -> None:
    picture, ratio = patterns.masked_ratio(outputs=32, inputs=32, rows=4, rounds=2)
    assert ratio > 0
    use_language("fr")
    assert drawn(picture).axes


def test_sparse_rows_are_timed_for_one_row_and_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def timed(outputs: int, inputs: int, batch: int, sparsities: Any, **_: Any) -> list[Any]:
        asked.append((outputs, inputs, batch))
        ratios = (2.0, 0.5) if batch > 1 else (2.0, 1.5)
        return [
            two_to_four.SparseSpeed("csr", zeros, 1 - zeros, 1.0, ratio, ratio, ratio, 1.0)
            for zeros, ratio in zip((0.5, 0.8), ratios, strict=True)
        ]

    monkeypatch.setattr(two_to_four, "sparse_speed", timed)
    sheet = patterns.break_even((64, 1), size=32)
    assert asked == [(32, 32, 64), (32, 32, 1)]
    assert sheet.rows[0][1:] == ("70%", "never")
    use_language("fr")
    assert patterns.break_even((64,), size=32).head == ("lignes multipliées à la fois", "64")


def test_queries_moved_with_keys_change_nothing(teacher: nn.Module, small: Task) -> None:
    images, other = small.held_out_NCHW[:4], copy.deepcopy(teacher)
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    assert answers(patterns.same_outputs(teacher, copy.deepcopy(teacher), other, images)) == ["yes", "no"]


def _trial(method: str, accuracy: float, payload_bytes: int, latency: float) -> BoardTrial:
    return BoardTrial(
        method=method, family="pruning", seed=0, accuracy=accuracy, parameters=1, predicted_bytes=1000,
        payload_bytes=payload_bytes, file_bytes=payload_bytes + 24, latency_s=latency, latency_ratio=latency,
        latency_ratio_low=latency, latency_ratio_high=latency, made_in_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("least", "ticks"),
    [(0.964, ["96%", "96.5%", "97%", "97.5%", "98%", "98.5%"]), (0.4, ["50%", "80%", "90%", "95%", "97%", "98%"])],
)
def test_accuracies_that_are_close_get_finer_ticks(least: float, ticks: list[str]) -> None:
    board = Board(
        task="digits", image_size=16, teacher="vit_tiny", epochs=1, batch=1, rounds=1, threads=1,
        trials=(_trial(TEACHER, 0.986, 1000, 1.0), _trial("worse", least, 1000, 1.5)),
    )  # fmt: skip
    axes = compress_figure(board).axes[0]
    shown = [axes.yaxis.get_major_formatter()(at, 0) for at in axes.get_yticks()]
    assert shown == ticks


def test_the_board_tells_the_front_and_the_bytes() -> None:
    board = Board(
        task="digits", image_size=16, teacher="vit_tiny", epochs=1, batch=1, rounds=1, threads=1,
        trials=(_trial(TEACHER, 0.9, 1000, 1.0), _trial("worse", 0.8, 1000, 1.5)),
    )  # fmt: skip
    sheet = figures.board_table(board)
    assert [row[-1] for row in sheet.rows] == ["●", ""]
    assert answers(figures.files_as_predicted(board)) == ["yes"]
    other = board.model_copy(update={"trials": (*board.trials, _trial("odd", 0.8, 999, 1.0))})
    assert answers(figures.files_as_predicted(other)) == ["no"]
    assert copy.copy(sheet).head[0] == "method"
