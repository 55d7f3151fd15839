"""What is said before a run, in both languages: that compression does nothing, and stages that cannot be."""

from types import SimpleNamespace

import pytest

from dlojz.base.language import use_language
from dlojz.by_hand.optimizers.sent_bytes import synchronises
from dlojz.cli.main import main
from dlojz.compare import compare
from dlojz.config.run_config import RunConfig
from dlojz.display.tables import grid
from dlojz.running import launch

ALONE = {"model": "gpt_tiny", "optimizer": "one_bit_adam", "engine": "by_hand", "device": "cpu"}
NOTHING = {"en": "compression does nothing but freeze", "fr": "ne fait rien d’autre que geler"}
WORDS = ["run", *(word for name, value in ALONE.items() for word in (f"--{name}", value))]


@pytest.mark.parametrize("language", ["en", "fr"])
def test_compare_says_that_one_bit_does_nothing_with_one_process(language: str) -> None:
    use_language(language)
    for dp, said in ((1, True), (2, False)):
        run = SimpleNamespace(run_id="one", config=RunConfig.of(**ALONE, dp=dp), state="queued", record=None)
        notes = grid(compare(run)).notes
        assert any(NOTHING[language] in note for note in notes) == said


@pytest.mark.parametrize("language", ["en", "fr"])
def test_main_says_before_it_runs_that_one_process_compresses_nothing(
    language: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLOJZ_LANG", language)
    use_language(language)
    asked = []

    def run(config: RunConfig, **options: object) -> SimpleNamespace:
        asked.append(config)
        nothing = SimpleNamespace(run_id="one", record=None)
        return SimpleNamespace(run_id="one", record=None, follow=lambda: nothing)

    monkeypatch.setattr(launch, "run", run)
    main([*WORDS, "--dp", "1", "--steps", "20"])
    assert NOTHING[language] in capsys.readouterr().err
    assert asked[0].warmup_steps == 5  # a quarter, though the command line gives its numbers as texts
    main([*WORDS, "--dp", "2", "--steps", "20"])
    assert NOTHING[language] not in capsys.readouterr().err


@pytest.mark.parametrize(("language", "said"), [("en", "leaves nothing to compress"), ("fr", "ne laisse rien")])
def test_main_refuses_warmup_steps_longer_than_the_run(
    language: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLOJZ_LANG", language)
    use_language(language)
    assert main([*WORDS, "--dp", "2", "--steps", "3", "--warmup-steps", "5"]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""


def test_with_a_constant_rate_a_run_of_the_labs_synchronises_in_every_step() -> None:
    assert all(synchronises(step, 75, 300) for step in range(300))
