"""The peak of a training with Megatron-core, forecast without the library, against a closed form."""

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.models.catalogue import BYTES
from dlojz.prediction.forecast import forecast
from dlojz.prediction.shapes import model_shapes

WIDTH, HEADS, LAYERS = 128, 4, 4
"""Of gpt_tiny."""


def closed_form(samples: int, tokens: int, parameters: int, tensors: int) -> int:
    """Bytes at the peak of an fp32 training with AdamW on one process, but for masks, positions and targets.

    Everywhere: weights, the buffer of gradients, two moments and a count of steps per tensor, the buffer of scores,
    what each layer keeps (16·s·b·h + a·s²·b + 4·s·b numbers) and what the embedding gives. On top, the largest of: the
    backward of the output layer, that of the last MLP's second product, that of the last attention's softmax, whose
    layer has given back by then what its MLP kept.
    """
    stream, scores, positions = tokens * samples * WIDTH, HEADS * tokens**2 * samples, tokens * samples
    layer = 16 * stream + scores + 4 * positions
    output = 2 * stream + 2 * positions + positions * BYTES + BYTES * WIDTH
    mlp = 4 * stream + 4 * WIDTH**2
    attention = 3 * scores - 10 * stream - 2 * positions
    return 4 * (4 * parameters + tensors + scores + LAYERS * layer + stream + max(output, mlp, attention))


@pytest.mark.parametrize(
    ("samples", "tokens", "where"),
    [(8, 128, "mlp_project"), (16, 64, "mlp_project"), (4, 256, "attention_project"), (2, 512, "attention_project")],
)
def test_the_peak_is_the_closed_form(samples: int, tokens: int, where: str) -> None:
    """To 0.1 %: tokens and targets (16·s·b bytes) and the loss are in the trace and not in the form."""
    config = RunConfig.of(model="gpt_tiny", library="megatron", micro_batch=samples, sequence_length=tokens)
    found, shapes = forecast(config), model_shapes(config)
    expected = closed_form(samples, tokens, shapes.num_parameters, len(shapes.parameters))
    assert found.memory.peak_bytes == pytest.approx(expected, rel=1e-3)
    assert found.peak_module == f"blocks.{LAYERS}.{where}"


def test_forecast_of_megatron_is_not_changed_by_replicas() -> None:
    """The buffer of gradients is sent as it is: torch's DDP adds its buckets, Megatron-core's nothing."""
    one, two = (RunConfig.of(model="gpt_tiny", library="megatron", dp=dp) for dp in (1, 2))
    assert forecast(one).memory.peak_bytes == forecast(two).memory.peak_bytes
