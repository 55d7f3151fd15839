"""Whatever is typed after `dlojz run` is understood or refused in one sentence."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlojz.cli.main import main

WORDS = st.sampled_from(
    ["--dp", "--tp", "--zero", "--engine", "--model", "--seed", "--steps", "--learning-rate", "--micro-batch", "--json"]
) | st.sampled_from(
    ["0", "-1", "2", "1e999", "nan", "torch", "coatnet_tiny", "9" * 400, "--", "-", "=", "--=", "--dp="]
)
ANYTHING = st.text("a0-=\n\x1b\u202e\ud800{[\"'$;é ", max_size=6)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS | ANYTHING, max_size=6))
def test_whatever_is_typed_is_refused_in_a_sentence(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The backend is none, so that no line is legal, and nothing can start."""
    try:
        code: object = main(["run", "--on", "moon", *words])
    except SystemExit as end:
        code = end.code
    told = capfd.readouterr()
    assert (code, told.out) == (2, ""), told.err
    assert told.err.startswith("dlojz: ") and told.err.count("\n") == 1
    assert "\x1b" not in told.err and "\u202e" not in told.err
