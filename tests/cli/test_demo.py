"""The demo: its runs are one training laid out in eight ways."""

from dlojz.cli.runs import demo_configs


def test_every_run_of_the_demo_is_the_same_training() -> None:
    configs = demo_configs()
    assert [config.layout.strategy for config in configs] == [
        "single",
        "ddp",
        "fsdp2",
        "zero-0",
        "zero-1",
        "zero-2",
        "zero-3",
        "single",
    ]
    assert configs[-1].layout.pp == 2  # the model is divided, and nothing replicated
    assert len({config.layout.global_batch for config in configs}) == 1
    assert len({config.layout.micro_batch for config in configs}) == 1
    assert len({(config.model, config.data, config.seed, config.steps) for config in configs}) == 1
    assert {config.layout.world_size for config in configs[1:]} == {2}
