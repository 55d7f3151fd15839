import pytest

from dlojz import models, predict
from dlojz.config.run_config import RunConfig
from tests.models import own_models


@pytest.mark.parametrize(("model", "data"), [("coatnet_0", "synthetic"), ("moe_tiny", None)])
def test_a_step_is_three_forward_passes_per_sample(model: str, data: str | None) -> None:
    config = RunConfig.of(model=model, data=data, micro_batch=8, micro_batches=3, dp=2)
    assert predict(config).step_flops == 3 * 24 * models.describe(model).flops


def test_step_flops_of_ranks_that_split_the_layers_are_those_of_the_model_once() -> None:
    whole = predict(RunConfig.of(model="gpt_tiny")).step_flops or 0
    assert [predict(RunConfig.of(model="gpt_tiny", tp=2), rank).step_flops for rank in (0, 1)] == [whole / 2, whole / 2]


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 3},
        {"pp": 2, "dp": 2},
        {"pp": 2, "schedule": "chimera", "engine": "by_hand"},
        {"pp": 2, "schedule": "interleaved", "chunks": 2},
    ],
)
def test_step_flops_of_the_ranks_of_a_pipeline_are_those_of_the_model_once(layout: dict[str, object]) -> None:
    fields = {"model": "vit_tiny", "micro_batch": 2, "micro_batches": 4}
    config = RunConfig.of(**fields, **layout)
    ranks = [predict(config, rank).step_flops or 0 for rank in range(config.layout.world_size)]
    assert sum(ranks) == pytest.approx(config.layout.dp * (predict(RunConfig.of(**fields)).step_flops or 0), rel=1e-12)


@pytest.mark.parametrize("model", ["coatnet_tiny", "vit_tiny", "gpt_tiny", "llama_tiny"])
def test_step_flops_with_checkpointing_have_part_of_the_forward_pass_again(model: str) -> None:
    plain = predict(RunConfig.of(model=model)).step_flops or 0
    again = predict(RunConfig.of(model=model, checkpointing="full")).step_flops or 0
    assert 1 < again / plain < 4 / 3


def test_step_flops_of_a_block_of_one_layer_have_nothing_again() -> None:
    """AlexNet's blocks: the input that is kept is all that the layer's backward needs."""
    plain = predict(RunConfig.of(model="alexnet_tiny")).step_flops
    assert predict(RunConfig.of(model="alexnet_tiny", checkpointing="full")).step_flops == plain


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_ranks_of_a_pipeline_of_ones_own_model_share_its_flops(schedule: str) -> None:
    """Per token 5 layers of 2 products of 32 × 128, and a head of 32 × 256; an embedding is no product."""
    fields = {"model": f"{own_models.__file__}:chained", "micro_batch": 2, "micro_batches": 4}
    whole = 3 * 2 * (5 * 2 * 32 * 128 + 32 * 256) * own_models.TOKENS * 2 * 4
    assert predict(RunConfig.of(**fields)).step_flops == whole
    config = RunConfig.of(**fields, pp=2, schedule=schedule)
    assert sum(predict(config, rank).step_flops or 0 for rank in range(2)) == whole
