"""The program of Megatron-core, really run: replicas, shared layers and stages, in losses, states and bytes."""

from collections import Counter

import pytest

from dlojz import predict
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.libraries.library_catalogue import found
from dlojz.prediction.communication import boundary_bytes
from dlojz.results.footprint import STATES, Footprint
from tests.train.counted import GLOO_THREADS, Fields, Runs, footprint, prepare_runs

TEXT: Fields = {"model": "gpt_tiny", "sequence_length": 32, "micro_batch": 4, "micro_batches": 2, "steps": 4}
LAYOUTS: dict[str, Fields] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2, "engine": "by_hand"},
    "pp": {"pp": 2, "engine": "by_hand"},
    "tp-pp": {"tp": 2, "pp": 2, "engine": "by_hand"},
    "dp-tp": {"dp": 2, "tp": 2, "engine": "by_hand"},
    "tied-dp": {"dp": 2, "model": "gpt2_tiny"},
    "tied-tp-pp": {"tp": 2, "pp": 2, "engine": "by_hand", "model": "gpt2_tiny"},
}
UNMOVED: Fields = {"learning_rate": 1e-60, "steps": 1}
"""An update that is less than any number: the weights at the end are those of the beginning, to the bit."""
FIELDS: dict[str, Fields] = {
    "alone": TEXT,
    "two": {**TEXT, "dp": 2},
    "tied-alone": {**TEXT, "model": "gpt2_tiny"},
    "tied-two": {**TEXT, "dp": 2, "model": "gpt2_tiny"},
    "unmoved": {**TEXT, **UNMOVED},
    **{name: {**TEXT, **layout, "library": "megatron"} for name, layout in LAYOUTS.items()},
    "long": {**TEXT, "sequence_length": 256, "micro_batch": 2, "library": "megatron"},
    "diverging": {**TEXT, **LAYOUTS["pp"], "learning_rate": 1e30, "library": "megatron"},
    "unmoved-tp-pp": {**TEXT, **LAYOUTS["tp-pp"], **UNMOVED, "library": "megatron"},
}
pytestmark = pytest.mark.timeout(1200)  # the first test waits for the runs of all
TOLERANCE = 1e-5
"""On losses near 5: the sums of attention and of the ranks' parts are in another order."""
PEAK = 0.02
"""Of the peak: the mask, the positions and the schedule's losses are in no forecast."""
ABSENT = "megatron-core is not installed here: `make libraries` installs it"

needs_megatron = pytest.mark.skipif(not found("megatron.core"), reason=ABSENT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return prepare_runs(tmp_path_factory.mktemp("megatron"), FIELDS, {})


def sent(footprint: Footprint) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """How many calls, and how many bytes, by collective and group."""
    calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in footprint.communication:
        calls[one.collective, one.group] += one.count
        sizes[one.collective, one.group] += one.message_bytes or 0
    return calls, sizes


@pytest.mark.nightly
@needs_megatron
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_gives_the_losses_of_the_labs_own_engine(runs: Runs, name: str) -> None:
    """However the model is split: those of one process on the same samples, or of two replicas."""
    like = ("tied-" if "tied" in name else "") + ("two" if "dp" in name else "alone")
    own = runs.told(f"whole/{like}", "step", "loss")
    written = runs.told(f"whole/{name}", "step", "loss")
    assert len(written) == 4 and written == pytest.approx(own, abs=TOLERANCE)
    assert written[0] - written[-1] > 0.1


@pytest.mark.nightly
@needs_megatron
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_holds_the_states_that_were_predicted(runs: Runs, name: str) -> None:
    """Weights, gradients (in one buffer of Megatron's) and optimizer states of a slice of a stage, to the byte."""
    config = RunConfig.of(**FIELDS[name])
    for rank in range(config.layout.world_size):
        counted, predicted = footprint(runs, name, rank), predict(config, rank)
        for category in STATES:
            assert counted.memory.category(category) == predicted.memory.category(category), (rank, category)


@pytest.mark.nightly
@needs_megatron
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_sends_the_bytes_that_were_predicted(runs: Runs, name: str) -> None:
    """Beside them, Megatron-core tells all ranks of a replica the norm of the gradient, which it computes unasked: 4
    bytes; and its user tells the stages the losses, 4 bytes per micro-batch. The loss of a split vocabulary leaves in
    three messages, where the lab sends two; the gradients in one, where DDP makes buckets."""
    config = RunConfig.of(**FIELDS[name])
    layout = config.layout
    for rank in range(layout.world_size):
        (calls, sizes), (expected_calls, expected_sizes) = (
            sent(footprint(runs, name, rank)),
            sent(predict(config, rank)),
        )
        if layout.tp * layout.pp > 1:
            norm = ("all_reduce", "pp" if layout.pp > 1 else "tp")
            expected_sizes[norm] += 4
            expected_calls[norm] += 1
        if layout.pp > 1:
            expected_sizes["broadcast", "pp"] += 4 * layout.micro_batches
            expected_calls["broadcast", "pp"] += 1
        assert sizes == expected_sizes, rank
        if layout.tp > 1 and rank // (layout.dp * layout.tp) == layout.pp - 1:
            expected_calls["all_reduce", "tp"] += layout.micro_batches
        if layout.dp > 1:
            expected_calls["all_reduce", "dp"] = 1
        assert calls == expected_calls, rank


@pytest.mark.nightly
@needs_megatron
@pytest.mark.parametrize("name", [*LAYOUTS, "long"])
def test_the_peak_is_the_one_that_was_predicted(runs: Runs, name: str) -> None:
    """With its one buffer of gradients, its one of attention scores, and an attention that is written out: of short
    sequences the peak is in the backward of an MLP, of long ones in that of attention.

    Of its pipeline the forecast lacks what its schedule keeps besides (megatron-core 0.16.1, `schedules.py`): on the
    first stage the outputs of the micro-batches in flight, which are sent but not freed (`deallocate_pipeline_outputs`
    is off), on the last the gradient that it has sent of the micro-batch before. And each of gloo's threads may hold
    one more of the messages that the ranks of a layer sum (`GLOO_THREADS`). All are as large as what leaves a block.
    """
    config = RunConfig.of(**FIELDS[name])
    layout, message_bytes = config.layout, boundary_bytes(config)[1]
    late_bytes = GLOO_THREADS * message_bytes if layout.tp > 1 else 0
    for rank in range(layout.world_size):
        counted, predicted = footprint(runs, name, rank).memory, predict(config, rank).memory
        assert counted.peak_bytes and predicted.peak_bytes
        first = layout.pp > 1 and rank < layout.world_size // layout.pp
        kept_bytes = message_bytes * (layout.pp if first else 1) if layout.pp > 1 else 0
        more_bytes, exact_bytes = counted.peak_bytes - predicted.peak_bytes - kept_bytes, PEAK * counted.peak_bytes
        assert -exact_bytes <= more_bytes <= exact_bytes + late_bytes, rank
        assert predicted.peak_moment == counted.peak_moment == "backward", rank


@pytest.mark.nightly
@needs_megatron
def test_megatron_slices_and_stages_are_the_labs_model_again(runs: Runs) -> None:
    """Every parameter is found again under its own name, in its own place, to the bit."""
    weights = [runs.told(f"whole/{name}", "weights", "sha256") for name in ("unmoved", "unmoved-tp-pp")]
    assert weights[0] == weights[1] and len(weights[0]) == 1


@pytest.mark.nightly
@needs_megatron
def test_megatron_stage_without_the_loss_knows_that_it_is_no_number(runs: Runs) -> None:
    for rank in range(2):
        assert len(runs.told("whole/diverging", "step", "loss", rank)) == 1
        assert runs.told("whole/diverging", "end", "reason", rank)[0].startswith("the loss became nan at step 1")


REFUSED = [
    ({"model": "coatnet_tiny"}, "model='coatnet_tiny' was received", "un modèle de la famille gpt"),
    ({"model": "llama_tiny"}, "trains Megatron-core's own GPT", "un modèle de la famille gpt"),
    ({"model": "moe_tiny"}, "use a dense model such as gpt_tiny", "prenez un modèle dense comme gpt_tiny"),
    ({"tp": 2, "engine": "by_hand", "sequence_parallel": True}, "torch's layer norm", "la layer norm de torch"),
    ({"pp": 2, "micro_batches": 2, "schedule": "gpipe"}, "use schedule='1f1b'", "prenez schedule='1f1b'"),
    ({"pp": 3, "micro_batches": 3}, "gpt_tiny has 4: use a pp that divides 4", "un pp qui divise 4"),
    ({"dp": 2, "zero": 1, "engine": "by_hand"}, "has no such layout", "n’a pas cette répartition"),
]


@pytest.mark.parametrize(("fields", "english", "french"), REFUSED)
def test_run_config_refuses_in_one_sentence_what_megatron_cannot_do(fields: Fields, english: str, french: str) -> None:
    for language, words in (("en", english), ("fr", french)):
        use_language(language)
        with pytest.raises(LabError) as refused:
            RunConfig.of(**{"model": "gpt_tiny", "library": "megatron", **fields})
        assert words in str(refused.value) and str(refused.value).count(". ") == 0
