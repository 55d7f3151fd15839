"""Scripts of `benchmarks/strangers/`, which nobody changed: nothing that is recorded of their trainings is wrong.

Each is counted without dlojz and run with it, by `benchmarks/strangers.py`: some every day, others in the nightly ones.
"""

import pytest

from benchmarks import strangers

TESTED = [script for script in strangers.ALL if script.name != "hogwild"]
"""All but one whose processes change the same weights without waiting for each other: each run has other figures."""


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, id=script.name, marks=[] if script.daily else [pytest.mark.nightly]) for script in TESTED],
)
def test_strangers_record_equals_the_independent_count(script: strangers.Script) -> None:
    result = strangers.outcome(script)
    assert result.cells, result.note
    assert not result.wrong, "\n".join((*result.wrong, result.note))


def test_strangers_are_thirty_styles_and_import_nothing_of_the_package() -> None:
    assert len({script.path for script in strangers.ALL}) >= 30
    for script in strangers.ALL:
        text = script.path.read_text(encoding="utf-8")
        assert "dlojz" not in text
        assert len(text.splitlines()) <= 60
        assert script.style


def test_strangers_count_imports_nothing_of_the_package() -> None:
    assert "import dlojz" not in (text := strangers.COUNT.read_text(encoding="utf-8")) and "from dlojz" not in text


def test_printed_steps_are_means_of_losses_and_sums_of_samples() -> None:
    output = "step 0 loss 1.0 samples 4 tokens 8\nstep 0 loss 3.0 samples 4 tokens 8\nstep 1 loss nan samples 2\n"
    first, second = strangers.Printed.read(output, copies=1).steps
    assert (first.losses, first.samples, first.tokens) == ({"loss": 2.0}, 8, 16)
    assert second.samples == 2
    assert strangers.Printed.read(output, copies=2).steps[0].samples == 4


def test_cell_is_wrong_unknown_or_right() -> None:
    assert strangers.cell(3, [3, 4]).verdict == "right"
    assert strangers.cell(5, [3, 4]).verdict == "wrong"
    assert strangers.cell(None, [3]).verdict == "unknown"
    assert strangers.cell(5, []).verdict == "none"


def test_allocator_peaks_are_those_of_each_step() -> None:
    log = b"""
[I C] C10 alloc 10 bytes, total alloc 10 bytes.
forward
[I C] C10 alloc 30 bytes, total alloc 40 bytes.
[I C] C10 deleted 30 bytes, total alloc 10 bytes.
step
[I C] C10 alloc 5 bytes, total alloc 15 bytes.
step
"""
    assert strangers.allocator_peaks(log) == (10, [40, 15])
