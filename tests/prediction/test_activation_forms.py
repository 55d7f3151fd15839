"""Activation forms against each other and against schedules; published figures: test_published_memory."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import peak_activations
from dlojz.prediction.forecast import forecast, forms_beside
from dlojz.prediction.rules_of_thumb import Shape, infinity_checkpoint_bytes, layer_bytes, layer_parts

GPT_3 = Shape(2048, 1, 12288, 96)
SHAPES = st.builds(Shape, st.integers(1, 8192), st.integers(1, 64), st.integers(1, 16384), st.integers(1, 128))


def test_the_parts_of_a_layer() -> None:
    """Korthikanti et al. 2022, §4.1: 11sbh + 5as²b, 19sbh, 4sbh."""
    sbh = GPT_3.sbh
    assert layer_parts(GPT_3) == {
        "attention": 11 * sbh + 5 * 96 * 2048**2,
        "mlp": 19 * sbh,
        "layer_norm": 4 * sbh,
    }
    assert 5 * GPT_3.scores == 80 * sbh
    assert layer_parts(GPT_3, tp=2) == {
        "attention": (3 + Fraction(8, 2)) * sbh + 5 * 96 * 2048**2 // 2,
        "mlp": (3 + Fraction(16, 2)) * sbh,
        "layer_norm": 4 * sbh,
    }


@given(shape=SHAPES, tp=st.integers(1, 64))
def test_layer_bytes_are_the_forms_of_table_2(shape: Shape, tp: int) -> None:
    sbh, scores = shape.sbh, Fraction(5 * shape.heads * shape.sequence_length, shape.hidden)
    assert layer_bytes(shape) == sbh * (34 + scores)
    assert layer_bytes(shape, tp=tp) == sbh * (10 + Fraction(24, tp) + scores / tp)
    assert layer_bytes(shape, tp=tp, sequence_parallel=True) == sbh * (34 + scores) / tp
    assert layer_bytes(shape, tp=tp, checkpointing="selective") == sbh * (10 + Fraction(24, tp))
    assert layer_bytes(shape, tp=tp, sequence_parallel=True, checkpointing="selective") == Fraction(34 * sbh, tp)
    assert layer_bytes(shape, tp=tp, checkpointing="full") == 2 * sbh
    assert layer_bytes(shape, tp=tp, sequence_parallel=True, checkpointing="full") == Fraction(2 * sbh, tp)


@given(shape=SHAPES, tp=st.integers(1, 64), sequence_parallel=st.booleans())
def test_layer_bytes_are_fewer_with_every_lever(shape: Shape, tp: int, sequence_parallel: bool) -> None:
    none, selective, full = (
        layer_bytes(shape, tp=tp, sequence_parallel=sequence_parallel, checkpointing=how)
        for how in ("none", "selective", "full")
    )
    assert none > selective > full > 0
    assert none <= layer_bytes(shape)


@pytest.mark.parametrize(("shape", "saved_percent"), [(GPT_3, 70), (Shape(2048, 1, 20480, 128), 65)])
def test_layer_bytes_of_selective_recomputation_save_what_the_paper_says(shape: Shape, saved_percent: int) -> None:
    """§5: 70 % for GPT-3 and 65 % for MT-NLG."""
    saved = 1 - layer_bytes(shape, checkpointing="selective") / layer_bytes(shape)
    assert round(float(100 * saved)) == saved_percent


def test_checkpoints_of_several_layers() -> None:
    assert infinity_checkpoint_bytes(GPT_3, 96, layers_per_checkpoint=2) == GPT_3.sbh * 96


@given(stages=st.integers(2, 12), chunks=st.integers(2, 4))
@settings(max_examples=20)
def test_peak_activations_of_interleaving_are_more_on_the_first_rank(stages: int, chunks: int) -> None:
    """Korthikanti et al. 2022, §4.2.3: L(1 + (p − 1)/(p·v)) layers, of L/p each: what the schedule itself counts."""
    counted = peak_activations(build("interleaved", stages, 4 * stages, chunks=chunks))[0]
    assert Fraction(round(counted), chunks) == stages * (1 + Fraction(stages - 1, stages * chunks))


def test_layer_bytes_refuses_bad_arguments() -> None:
    with pytest.raises(LabError, match="unknown checkpointing 'half'"):
        layer_bytes(GPT_3, checkpointing="half")  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2])
def test_the_papers_forms_of_a_run_are_laid_beside_the_trace(tp: int) -> None:
    """ViT-tiny on 64 x 64: 8 x 8 patches and the class token."""
    config = RunConfig.of(model="vit_tiny", tp=tp, micro_batch=2)
    size = models.spec("vit_tiny").size
    sbh = 65 * 2 * size.width
    told = {one.name: one.formula_bytes for one in forms_beside(forecast(config))}
    scores = 5 * size.num_heads * 65**2 * 2
    if tp == 1:
        assert told["Korthikanti"] == 34 * sbh + scores
        assert told["the same as run here"] == 2 * 32 * sbh
        assert set(told) == {"Korthikanti", "the same as run here", "ZeRO-Infinity"}
    else:
        assert told == {"Korthikanti": 22 * sbh + scores // 2}
    assert forms_beside(forecast(RunConfig.of(model="coatnet_tiny"))) == ()
