"""Many layouts at once against the forecast of each: schedules, offloading, micro-batches."""

import pytest

from dlojz import hardware
from dlojz.config.run_config import RunConfig
from dlojz.prediction.forecast import forecast
from dlojz.prediction.many_layouts import outside_bytes, rank_memories

A100 = hardware.device("a100-80")
LAYOUTS = {
    "one process": {},
    "1f1b": {"pp": 4, "dp": 2},
    "gpipe": {"pp": 4, "schedule": "gpipe"},
    "zb-h1": {"pp": 2, "dp": 2, "schedule": "zb-h1", "zero": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved", "chunks": 3},
    "v by hand": {"pp": 2, "schedule": "zb-v", "engine": "by_hand"},
    "breadth first": {"pp": 2, "schedule": "looped-bfs"},
    "deepspeed pipeline": {"pp": 3, "dp": 2, "engine": "deepspeed", "zero": 1},
    "offloaded optimizer": {"dp": 4, "engine": "deepspeed", "zero": 2, "offload": "optimizer"},
    "offloaded weights": {"dp": 4, "engine": "deepspeed", "zero": 3, "offload": "parameters"},
    "sequence parallelism": {"tp": 2, "dp": 2, "engine": "by_hand", "sequence_parallel": True},
}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_stage_has_the_bytes_of_its_forecast(name: str, checkpointing: str) -> None:
    if name in ("zb-h1", "v by hand") and checkpointing == "full":
        checkpointing = "selective"
    fields = {"model": "gpt2", "precision": "bf16", "device": "cuda", "checkpointing": checkpointing, **LAYOUTS[name]}
    pairs = [(4, 4), (7, 12), (16, 6)]
    config = RunConfig.of(**{**fields, "micro_batches": 12})
    for stage, found in enumerate(rank_memories(config, pairs, A100)):
        rank = stage * config.layout.dp * config.layout.tp
        for place, (size, number) in enumerate(pairs):
            run = RunConfig.of(**{**fields, "micro_batch": size, "micro_batches": number})
            told = forecast(run, rank, A100).memory
            # Both fullest moments of a slot are added: too much by a block of gradients at most, which is 6 % here.
            # FSDP2 in a pipeline of halves keeps whole gradients beside the first half, which the slots do not see.
            least = -0.03 if name == "zb-h1" else -0.01
            assert least < found.peak_bytes[place] / (told.peak_bytes or 0) - 1 < 0.08, (stage, size, number)
            assert found.host[place] == pytest.approx(told.host_bytes or 0, rel=0.02)


def test_memory_of_many_layouts_is_that_of_a_gpu_s_kernels() -> None:
    """Equal to the byte on one process. Without the GPU's fused RMS norm it would be 12.7 % more."""
    fields = {"model": "llama_tiny", "sequence_length": 128, "precision": "bf16", "device": "cuda", "micro_batches": 2}
    (found,) = rank_memories(RunConfig.of(**fields), [(32, 2)], A100)
    assert list(found.peak_bytes) == [forecast(RunConfig.of(**fields, micro_batch=32), 0, A100).memory.peak_bytes]


def test_what_lies_outside_of_the_allocator_is_the_forecasts() -> None:
    config = RunConfig.of(model="vit_tiny", dp=2, device="cuda")
    told = forecast(config, 0, A100).memory
    assert told.needed_bytes == (told.peak_bytes or 0) + outside_bytes(A100, 2)
    assert outside_bytes(A100, 2) - outside_bytes(A100, 1) == A100.nccl_bytes
