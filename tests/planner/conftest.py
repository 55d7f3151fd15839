"""Questions small enough to be answered by hand, and the plans that several tests look at."""

import pytest

from dlojz.hardware.decoder_size import DecoderSize
from dlojz.planner.answer import Plan
from dlojz.planner.ask import plan

TINY = DecoderSize(layers=6, hidden=512, heads=6 * 2 + 4, vocabulary=1000, sequence_length=128)


@pytest.fixture(scope="session")
def tiny() -> Plan:
    """A decoder of six layers on the four GPUs of half a node: every kind of layout, nothing out of memory."""
    return plan(TINY, "jean_zay_a100", gpus=4, batch=12)


@pytest.fixture(scope="session")
def bloom() -> Plan:
    """BLOOM on the GPUs that it was trained on, by the library that trained it."""
    return plan("bloom-176b", "jean_zay_a100", gpus=384, batch=2048, engines="megatron-deepspeed")


@pytest.fixture(scope="session")
def gpt2() -> Plan:
    """A model of the catalogue on small GPUs, so that layouts run out of memory."""
    return plan("gpt2_xl", "jean_zay_v100_16", gpus=(4, 8), batch=64)
