"""The outer level: known answers, every pipeline tried on small spaces, 1F1B memory, submeshes that tile, refusals."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.planner.alpa.inter_operator import StageOption, StageOptions, pipeline
from dlojz.planner.alpa.mesh import Submesh, submeshes, tiled

EXACT = 1e-12  # relative: sums of few floats
PERFECT = {1: 1.0, 2: 1.0, 4: 1.0}
FALLING = {1: 1.0, 2: 0.9, 4: 0.75}
TO_EIGHT = {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.6}


def work(weights: Sequence[float], efficiency: Mapping[int, float]) -> StageOptions:
    """t = Σ w ÷ (devices × their efficiency)."""

    def options(first: int, last: int, submesh: Submesh) -> list[StageOption]:
        devices = submesh.num_devices
        return [StageOption(sum(weights[first : last + 1]) / (devices * efficiency[devices]))]

    return options


@pytest.mark.parametrize(
    "weights, efficiency, gpus, micro_batches, total, stages",
    [
        ([1] * 8, PERFECT, 4, 8, 16.0, [(0, 7, 4)]),  # A: nothing beats tensor parallelism that costs nothing
        ([1] * 8, FALLING, 4, 8, 20.0, [(0, 3, 2), (4, 7, 2)]),  # B, C, D: more micro-batches, more pipeline
        ([1] * 8, FALLING, 4, 1, 8 / 3, [(0, 7, 4)]),
        ([1] * 8, FALLING, 4, 64, 134.0, [(0, 1, 1), (2, 3, 1), (4, 5, 1), (6, 7, 1)]),
        ([4, 1, 1, 1, 1], FALLING, 4, 16, 34 / 0.9, [(0, 0, 2), (1, 4, 2)]),  # E
        ([1, 1, 1, 1, 4], TO_EIGHT, 8, 32, 41.25, [(0, 3, 4), (4, 4, 4)]),  # F
    ],
)
def test_inter_operator_pipeline_known_answers(
    weights: list[float],
    efficiency: dict[int, float],
    gpus: int,
    micro_batches: int,
    total: float,
    stages: list[tuple[int, int, int]],
) -> None:
    plan = pipeline(work(weights, efficiency), len(weights), micro_batches, 1, gpus)
    assert plan.step_s == pytest.approx(total, rel=EXACT)
    assert [(stage.first, stage.last, stage.submesh.num_devices) for stage in plan.stages] == stages


def all_pipelines(
    layers: int, devices: int, shapes: Sequence[Submesh]
) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[Submesh, ...]]]:
    for count in range(1, layers + 1):
        for inner in itertools.combinations(range(1, layers), count - 1):
            spans = tuple((start, stop - 1) for start, stop in itertools.pairwise((0, *inner, layers)))
            for given in itertools.product(shapes, repeat=count):
                if sum(shape.num_devices for shape in given) == devices:
                    yield spans, given


def test_40_random_spaces_every_pipeline_tried() -> None:
    """With two ways to run each stage, one fast and large, and with and without a limit of memory."""
    generator = random.Random(0)
    infeasible = 0
    for case in range(40):
        layers, (nodes, gpus) = generator.randint(1, 4), generator.choice([(1, 2), (1, 4), (2, 2)])
        micro_batches, shapes = generator.choice([1, 2, 8]), submeshes(nodes, gpus)
        costs = {
            (first, last, shape): [
                StageOption(generator.randint(1, 30) / 4, generator.randint(1, 9), generator.randint(0, 3))
                for _ in range(2)
            ]
            for first in range(layers)
            for last in range(first, layers)
            for shape in shapes
        }
        memory = generator.choice([math.inf, 9.0, 5.0])
        best = math.inf
        for spans, given in all_pipelines(layers, nodes * gpus, shapes):
            flights = [min(len(spans) - number, micro_batches) for number in range(len(spans))]
            ways = [
                [o.time_s for o in costs[first, last, shape] if o.bytes_in_flight(flight) <= memory]
                for (first, last), shape, flight in zip(spans, given, flights, strict=True)
            ]
            if all(ways):
                times = [min(way) for way in ways]
                best = min(best, sum(times) + (micro_batches - 1) * max(times))
        asked = {"memory_bytes": memory}
        options = lambda first, last, shape, costs=costs: costs[first, last, shape]  # noqa: E731 - one line says it
        if math.isinf(best):
            infeasible += 1
            with pytest.raises(LabError, match=r"are missing"):
                pipeline(options, layers, micro_batches, nodes, gpus, **asked)
            continue
        plan = pipeline(options, layers, micro_batches, nodes, gpus, **asked)
        assert plan.step_s == pytest.approx(best, rel=EXACT), case
        assert all(stage.device_bytes <= memory for stage in plan.stages)
    assert 2 <= infeasible <= 30


def test_pruning_tries_few_of_many_candidates() -> None:
    generator = random.Random(1)
    weights = [generator.random() for _ in range(12)]
    efficiency = {devices: 1 / (1 + 0.1 * devices**0.5) for devices in range(1, 17)}
    plan = pipeline(work(weights, efficiency), 12, 32, 4, 4)
    assert plan.tried < 40 < plan.candidates


def test_early_stages_keep_more_micro_batches_and_so_get_fewer_layers() -> None:
    def options(first: int, last: int, submesh: Submesh) -> list[StageOption]:
        layers = last + 1 - first
        return [StageOption(layers, 0, layers)] if submesh.num_devices == 1 else []

    plan = pipeline(options, 6, 8, 1, 2, memory_bytes=4)
    assert [(stage.first, stage.last, stage.in_flight) for stage in plan.stages] == [(0, 1, 2), (2, 5, 1)]
    with pytest.raises(LabError, match=r"needs at least 4 B and has 3 B, so 1 B are missing"):
        pipeline(options, 6, 8, 1, 2, memory_bytes=3)


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (1, 8), (2, 4), (3, 4), (4, 2)])
def test_tiled_covers_the_cluster_by_whatever_has_the_right_number_of_gpus(nodes: int, gpus: int) -> None:
    shapes, generator = submeshes(nodes, gpus), random.Random(0)
    for _ in range(30):
        chosen, left = [], nodes * gpus
        while left:
            chosen.append(generator.choice([shape for shape in shapes if shape.num_devices <= left]))
            left -= chosen[-1].num_devices
        given = tiled(chosen)
        assert sorted(device for own in given for device in own) == list(range(nodes * gpus))
        for shape, own in zip(chosen, given, strict=True):
            assert len({device // gpus for device in own}) == shape.nodes


def test_submeshes_of_the_paper() -> None:
    assert submeshes(3, 4) == ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4))


@pytest.mark.parametrize(
    "layers, micro_batches, nodes, gpus, sentence",
    [
        (0, 8, 1, 4, r"at least one layer and one micro-batch, but layers=0"),
        (8, 0, 1, 4, r"and micro_batches=0 were received"),
        (8, 8, 0, 4, r"at least one node with one GPU, but 0 × 4"),
        (8, 8, 1, 6, r"a power of two, but 6 was received: use 4"),
    ],
)
def test_inter_operator_pipeline_refuses_bad_input(
    layers: int, micro_batches: int, nodes: int, gpus: int, sentence: str
) -> None:
    with pytest.raises(LabError, match=sentence):
        pipeline(work([1] * 8, FALLING), layers, micro_batches, nodes, gpus)


def test_a_model_that_uses_no_devices_is_refused() -> None:
    with pytest.raises(LabError, match=r"no cut of 2 layers uses all 4 devices"):
        pipeline(lambda first, last, submesh: [StageOption(1.0)] if submesh.num_devices == 1 else [], 2, 1, 1, 4)


def test_a_plan_shows_itself_in_both_languages() -> None:
    plan = pipeline(work([1] * 8, FALLING), 8, 8, 1, 4)
    assert "2 stages on 1 × 4 devices, B = 8: T = 20" in str(plan)
    assert "<table>" in plan._repr_html_()
    use_language("fr")
    assert "sous-maillage" in str(plan)
