"""The figures and questions of lab 02: of the student's own functions, drawn or still to do."""

from typing import Any

import torch
from torch import nn

from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure
from dlojz.hardware import DEVICES
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.lab02_memory import figures
from dlojz.labs.lab02_memory import figures as time_figures
from dlojz.labs.lab02_memory.exercises import asked, bytes_per_parameter, data_parallel_bytes, states_table
from dlojz.labs.lab02_memory.exercises_recompute import cheapest_plan, plans_table
from dlojz.planner.activation_budget import plan_activations
from dlojz.prediction.rules_of_thumb import RULES
from tests.labs.answers import checkpointed

DEVICE_LIST = [DEVICES[name] for name in ("v100-32", "h100")]


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("some-exercise")


def blocks_on_meta() -> tuple[list[nn.Module], torch.Tensor]:
    with torch.device("meta"):
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9)], torch.empty(64, 8)


def test_figures_of_memory_say_what_is_still_to_do(language: str) -> None:
    blocks, x = blocks_on_meta()
    for said in (
        asked(undone),
        states_table(undone),
        figures.limit_of_data_parallelism(undone, 1000, 10, 8, DEVICE_LIST),
        time_figures.segments(undone, blocks, x, (1, 3)),
    ):
        assert isinstance(said, Verdict)
        assert said.state == "todo"
        assert "some-exercise" in said.message


def test_the_table_of_states_shows_what_the_function_gives() -> None:
    table = states_table(bytes_per_parameter)
    assert [line.split() for line in repr(table).splitlines()[1:]] == [
        ["fp32", "8", "12", "16"],
        ["autocast", "8", "12", "16"],
        ["bf16", "8", "12", "16"],
        ["bf16_fp32_gradients", "10", "14", "18"],
    ]


def test_the_rules_are_drawn_with_all_their_parts(language: str) -> None:
    figure = figures.rules_of_thumb()
    widths = sum(bar.get_width() for bar in figure.axes[0].patches)
    assert widths == sum(rule.bytes_per_parameter for rule in RULES.values())


def test_limit_of_data_parallelism_draws_a_replica_as_the_function_gives_it(language: str) -> None:
    parameters, sample_bytes, global_batch = 2**30, 2**30, 8
    figure = figures.limit_of_data_parallelism(data_parallel_bytes, parameters, sample_bytes, global_batch, DEVICE_LIST)
    assert isinstance(figure, LabFigure)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == [16, 20, 20, 20, 8, 4, 2, 1]
    titles = [text.get_text() for text in figure.axes[0].texts]
    assert ("V100 32 Go" if language == "fr" else "V100 32 GB") in titles


def test_segments_are_traced_with_the_function_and_the_best_is_told(language: str) -> None:
    blocks, x = blocks_on_meta()
    figure = time_figures.segments(checkpointed, blocks, x, (1, 3, 9))
    assert isinstance(figure, LabFigure)
    kept = next(line for line in figure.axes[0].lines if line.get_linestyle() == "--").get_ydata()
    tensor_mib = x.numel() * 4 / 2**20
    assert [round(float(value) / tensor_mib) for value in kept] == [9, 3, 1]  # the input of each segment
    assert figure.alt.endswith("3.")


def test_every_block_of_a_model_has_its_states_and_activations(language: str) -> None:
    figure = figures.along_the_model(RunConfig.of(model="vit_tiny", micro_batch=2))
    states, activations = ([bar.get_height() for bar in axes.patches] for axes in figure.axes)
    assert len(states) == len(activations)
    assert all(height > 0 for height in states)
    assert sum(height > 0 for height in activations) >= len(states) - 1


def test_the_peak_is_drawn_beside_the_sum_of_the_maxima(language: str) -> None:
    samples = [{"weights": 2**20, "activations": 3 * 2**20}, {"weights": 2**20, "gradients": 2**20}]
    figure = time_figures.peak_and_maxima(samples)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sorted(widths) == sorted([1, 0, 3, 1, 1, 3])
    assert ("5.00 MiB" if language == "en" else "5,00 Mio") in figure.alt


def test_a_plan_stands_beside_the_package_s(language: str) -> None:
    plan = plan_activations(RunConfig.of(model="coatnet_tiny", micro_batch=8), 16 * 2**20)
    table = plans_table(cheapest_plan, plan)
    yours, theirs = table.rows
    assert yours[1:] == theirs[1:] and theirs[1] == plan.config.layout.activation_plan
    assert plans_table(lambda blocks, budget: None, plan).rows[0][1] == "—"
    said = plans_table(undone, plan)
    assert isinstance(said, Verdict) and said.state == "todo"
