"""Lengths are DeepSpeed's own, rise to the whole, and what cannot be is refused in one sentence."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz import data as datasets
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import discrete_length, first_whole_step, length_at, root_length, stages_of, stretches
from dlojz.data.datasets import CutToLength
from dlojz.runnable import check_runnable

TEXT: dict[str, Any] = {"model": "gpt_tiny", "sequence_length": 128, "steps": 40, "micro_batch": 4}


def config_of(**fields: Any) -> RunConfig:
    return RunConfig.of(**{**TEXT, **fields})


def deepspeeds(kind: str, first: int, last: int, **schedule: Any) -> Any:
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    return CurriculumScheduler(
        {
            "min_difficulty": first,
            "max_difficulty": last,
            "schedule_type": f"fixed_{kind}",
            "schedule_config": schedule,
        }
    )


@pytest.mark.parametrize(("end", "multiple"), list(product((64, 128, 1000, 1024), (1, 8, 16))))
def test_linear_and_root_are_deepspeeds_own(end: int, multiple: int) -> None:
    for start, steps, degree in product((1, 8, 20, 56), (1, 7, 100, 333), (1, 2, 3, 5)):
        pacing = {"total_curriculum_step": steps, "difficulty_step": multiple}
        root = deepspeeds("root", start, end, root_degree=degree, **pacing)
        linear = deepspeeds("linear", start, end, **pacing)
        for t in range(1, steps + 20):
            given = {"start": start, "end": end, "steps": steps, "multiple": multiple}
            assert root_length(t, degree=degree, **given) == root.get_difficulty(t)
            assert root_length(t, degree=1, **given) == linear.get_difficulty(t)


@pytest.mark.parametrize("last_steps", [[1], [5, 10], [3, 4, 17]])
def test_discrete_is_deepspeeds_own(last_steps: list[int]) -> None:
    lengths = [*(16, 24, 64, 128)[: len(last_steps)], 256]
    scheduler = deepspeeds("discrete", 16, 256, difficulty=lengths, max_step=last_steps)
    for t in range(1, 25):
        assert discrete_length(t, lengths=lengths, last_steps=last_steps) == scheduler.get_difficulty(t)


@pytest.mark.parametrize(
    ("fields", "schedule"),
    [
        ({"curriculum": "linear", "curriculum_start": 16, "curriculum_steps": 30}, {"total_curriculum_step": 30}),
        (
            {"curriculum": "root", "curriculum_start": 8, "curriculum_steps": 25},
            {"total_curriculum_step": 25, "root_degree": 2},
        ),
        (
            {"curriculum": "discrete", "curriculum_lengths": "16:10,64:22"},
            {"difficulty": [16, 64, 128], "max_step": [10, 22]},
        ),
    ],
)
def test_the_lengths_of_a_run_are_those_that_deepspeed_updates_to(fields: dict[str, Any], schedule: Any) -> None:
    """Step by step, by the call that its data sampler makes, which counts steps from 1."""
    config = config_of(**fields)
    first = config.curriculum_start or 16
    scheduler = deepspeeds(config.curriculum, first, 128, **{"difficulty_step": 8, **schedule})
    found = [length_at(config, step) for step in range(config.steps)]
    assert found == [scheduler.update_difficulty(t) for t in range(1, config.steps + 1)]


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["linear", "root"]),
    eighths=st.integers(2, 64),
    start=st.integers(1, 63),
    steps=st.integers(1, 90),
)
def test_lengths_rise_in_multiples_to_the_whole(kind: str, eighths: int, start: int, steps: int) -> None:
    start = min(start, eighths - 1)
    config = config_of(
        sequence_length=8 * eighths,
        model="llama_tiny",
        steps=100,
        curriculum=kind,
        curriculum_start=8 * start,
        curriculum_steps=steps,
    )
    found = [length_at(config, step) for step in range(100)]
    assert found == sorted(found)
    assert all(length % 8 == 0 and 8 * start <= length <= 8 * eighths for length in found)
    assert found[steps - 1] == 8 * eighths  # the last step of the pacing is whole
    assert [one.length for one in stretches(config) for _ in range(one.num_steps)] == found
    assert first_whole_step(config) == found.index(8 * eighths)
    assert all(one.length < other.length for one, other in zip(stretches(config), stretches(config)[1:], strict=False))


def test_a_run_of_a_billion_steps_is_told_in_few_stretches() -> None:
    config = config_of(steps=10**9, curriculum="linear", curriculum_steps=9 * 10**8)
    assert len(stretches(config)) == 15  # 16, 24, …, 128
    assert sum(stretch.num_steps for stretch in stretches(config)) == 10**9


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"curriculum_start": 256}, "curriculum_start=256 and sequence_length=128", "finit plus long"),
    ({"curriculum_start": 128}, "use a start below 128", "inférieur à 128"),
    ({"curriculum_start": 12}, "curriculum_start=12 is none.*curriculum_multiple=4", "n’en est pas un"),
    ({"curriculum_steps": 41}, "beyond the 40 steps of the run.*at most 40", "au-delà des 40 pas"),
    ({"sequence_length": 100}, "sequence_length=100 is none.*curriculum_multiple=4", "sequence_length=100"),
    ({"curriculum_lengths": "16:4"}, "use curriculum='discrete'", "retirez-le"),
    ({"curriculum": "none", "curriculum_start": 16}, "curriculum='none' does not read it", "ne le lit pas"),
    ({"curriculum": "none", "curriculum_multiple": 16}, "curriculum_multiple=16 was received", "a été reçu"),
    ({"curriculum": "discrete"}, "needs its lengths", "demande ses longueurs"),
    ({"curriculum": "discrete", "curriculum_lengths": "16"}, "such as 16:100,32:200, but '16'", "comme 16:100"),
    ({"curriculum": "discrete", "curriculum_lengths": "9" * 500 + ":1"}, "was received", "a été reçu"),
    ({"curriculum": "discrete", "curriculum_lengths": "٣:٤"}, "such as 16:100", "comme 16:100"),
    ({"curriculum": "discrete", "curriculum_lengths": "32:4,16:9"}, "goes from 32 to 16", "va de 32 à 16"),
    ({"curriculum": "discrete", "curriculum_lengths": "16:9,32:9"}, "the steps .* from 9 to 9", "va de 9 à 9"),
    ({"curriculum": "discrete", "curriculum_lengths": "0:9,32:12"}, "goes from 0 to 0", "va de 0 à 0"),
    ({"curriculum": "discrete", "curriculum_lengths": "16:9,128:12"}, "goes from 128 to 128", "va de 128 à 128"),
    ({"curriculum": "discrete", "curriculum_lengths": "16:9,20:12"}, "length=20 is none", "longueur=20"),
    ({"curriculum": "discrete", "curriculum_lengths": "16:40"}, "at step 39 at most", "au pas 39 au plus"),
    ({"curriculum": "exponential"}, "unknown curriculum 'exponential'.*linear", "exponential"),
    ({"model": "vit_tiny", "sequence_length": None}, "vit_tiny reads images: use a gpt", "lit des images"),
    ({"tp": 2, "sequence_parallel": True, "curriculum_multiple": 1}, "use curriculum_multiple=2", "entre tp=2 rangs"),
]


@pytest.mark.parametrize(("fields", "words", "french"), REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(fields: dict[str, Any], words: str, french: str) -> None:
    given = {"curriculum": "linear", **fields}
    with pytest.raises(LabError, match=words) as caught:
        config_of(**given)
    assert "\n" not in str(caught.value)
    use_language("fr")
    with pytest.raises(LabError, match=french):
        config_of(**given)


def test_images_have_no_tokens() -> None:
    with pytest.raises(LabError, match="reads images, which have no tokens"):
        stretches(RunConfig.of(model="vit_tiny"))


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ({"curriculum": "linear"}, {"curriculum_start": 16, "curriculum_steps": 20, "curriculum_multiple": 8}),
        ({"curriculum": "root"}, {"curriculum_start": 16, "curriculum_steps": 20}),
        ({"curriculum": "discrete", "curriculum_lengths": "16:3, 32:5"}, {"curriculum_lengths": "16:3,32:5"}),
    ],
)
def test_equal_runs_have_equal_hashes(left_out: dict[str, Any], said: dict[str, Any]) -> None:
    one, other = config_of(**left_out), config_of(**{**left_out, **said})
    assert (one, one.hash) == (other, other.hash)
    assert one.hash != config_of().hash
    assert RunConfig.from_json(one.to_json()) == one


def test_a_command_line_gives_its_numbers_as_texts() -> None:
    texts = {"sequence_length": "32", "steps": "10", "curriculum_multiple": "4", "curriculum": "linear"}
    assert config_of(**texts) == config_of(sequence_length=32, steps=10, curriculum="linear", curriculum_multiple=4)
    assert (config_of(**texts).curriculum_start, config_of(**texts).curriculum_steps) == (4, 5)


def test_stages_are_read_with_spaces() -> None:
    assert stages_of(" 16:3 , 32:5") == ((16, 3), (32, 5))


def test_a_pipeline_does_not_run_one() -> None:
    with pytest.raises(LabError, match="curriculum='linear' is not run in a pipeline .*use curriculum='none'"):
        check_runnable(config_of(curriculum="linear", pp=2, micro_batches=2))
    check_runnable(config_of(curriculum="linear"))


def sampled(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    prose = datasets.load("text", family="text", num_classes=256, sequence_length=16)
    pairs = [prose[index] for index in range(2 * count)]
    return [
        (torch.stack([pairs[2 * i][0], pairs[2 * i + 1][0]]), torch.stack([pairs[2 * i][1], pairs[2 * i + 1][1]]))
        for i in range(count)
    ]


def test_the_tail_is_cut_off_and_what_is_left_is_counted() -> None:
    whole = sampled(6)
    cut = CutToLength(iter(whole), lambda step: (4, 8, 16)[step], micro_batches=2)
    for number, (inputs, targets) in enumerate(whole):
        length = (4, 8, 16)[number // 2]
        short = next(cut)
        assert torch.equal(short[0], inputs[:, :length])
        assert torch.equal(short[1], targets[:, :length])
        assert short[0].untyped_storage().nbytes() == 2 * length * 8  # not a view of the whole
        if number % 2:
            assert cut.take_tokens() == 2 * 2 * length
    assert cut.take_tokens() == 0


def test_who_goes_on_cuts_as_if_he_had_not_stopped() -> None:
    whole = sampled(6)
    later = CutToLength(iter(whole[4:]), lambda step: (4, 8, 16)[step], micro_batches=2, first_step=2)
    assert next(later)[0].shape == (2, 16)


def test_whole_samples_are_not_touched() -> None:
    whole = sampled(1)
    assert next(CutToLength(iter(whole), lambda step: 16, micro_batches=1))[0] is whole[0][0]
    assert next(CutToLength(iter(whole), None, micro_batches=1))[0] is whole[0][0]
