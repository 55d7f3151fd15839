"""A campaign that is run, interrupted, resumed: what is done is done, and one point's refusal stops no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dlojz.running.launch
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.campaign.campaign import Campaign, CampaignPlan, expand
from dlojz.campaign.results import Outlook, account_of, drive, outlook, unfit_backend
from dlojz.config.run_config import RunConfig
from dlojz.running.run import Run

Keep = Callable[..., Path]


class Launcher:
    """In place of `dlojz.running.launch.run`: every run ends at once, as told."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.launched: list[RunConfig] = []
        self.fate: dict[int, str | BaseException] = {}
        self.many: list[dict[str, Any]] = []

    def run(self, config: RunConfig, *, root: Path, **_: Any) -> Run:
        self.launched.append(config)
        fate = self.fate.get(len(self.launched), "completed")
        if isinstance(fate, BaseException):
            raise fate
        return Run(self.keep(config, root, status=fate))

    def submit_many(self, configs: list[RunConfig], **options: Any) -> list[Run]:
        self.many.append(options)
        return [self.run(config, root=options["root"]) for config in configs]


@pytest.fixture
def launcher(keep_record: Keep, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    own = Launcher(keep_record)
    monkeypatch.setattr(dlojz.running.launch, "run", own.run)
    monkeypatch.setattr(dlojz.running.launch, "submit_many", own.submit_many, raising=False)
    return own


def _drive(plan: CampaignPlan, root: Path, **options: Any) -> list[str]:
    told: list[str] = []
    results = drive(
        plan,
        [Outlook()] * len(plan.points),
        root,
        on_change=lambda results: told.append(" ".join(result.state for result in results)),
        **{"on": "local", **options},
    )
    assert told[-1] == " ".join(result.state for result in results)
    return [result.state for result in results]


def test_done_points_are_not_run_again_and_failed_ones_are(
    campaign: Campaign, launcher: Launcher, tmp_path: Path
) -> None:
    plan = expand(campaign)
    launcher.fate = {2: "failed", 3: "oom", 4: "timeout"}
    assert _drive(plan, tmp_path) == ["completed", "failed", "oom", "timeout"]
    launcher.launched.clear()
    launcher.fate = {}
    assert _drive(plan, tmp_path) == ["completed", "completed", "oom", "completed"]
    assert launcher.launched == [plan.points[1].config, plan.points[3].config]
    launcher.launched.clear()
    _drive(plan, tmp_path, again=True)
    assert len(launcher.launched) == 4


def test_interrupted_it_loses_nothing_and_goes_on(campaign: Campaign, launcher: Launcher, tmp_path: Path) -> None:
    plan = expand(campaign)
    launcher.fate = {3: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        _drive(plan, tmp_path)
    launcher.launched.clear()
    launcher.fate = {}
    assert _drive(plan, tmp_path) == ["completed"] * 4
    assert launcher.launched == [point.config for point in plan.points[2:]]


def test_a_point_that_is_refused_stops_no_other(campaign: Campaign, launcher: Launcher, tmp_path: Path) -> None:
    launcher.fate = {1: LabError("there is no such data here.")}
    assert _drive(expand(campaign), tmp_path) == ["refused", *["completed"] * 3]


def test_a_scheduler_gets_one_array_per_machine_with_what_is_missing(
    launcher: Launcher, keep_record: Keep, tmp_path: Path
) -> None:
    plan = expand(Campaign(title="t", base={"model": "vit_tiny"}, axes={"machine": ["a", "b"], "dp": [1, 2]}))
    keep_record(plan.points[0].config, tmp_path / "on-a")
    assert _drive(plan, tmp_path, on="slurm", time_limit_s=60.0) == ["completed"] * 4
    assert [(each["machine"], each["root"], each["time_limit_s"]) for each in launcher.many] == [
        ("a", tmp_path / "on-a", 60.0),
        ("b", tmp_path / "on-b", 60.0),
    ]
    assert launcher.launched == [plan.points[1].config, plan.points[2].config, plan.points[3].config]


def test_what_cannot_be_run_so_is_refused_before_anything_is_started(campaign: Campaign) -> None:
    here = expand(campaign)
    assert unfit_backend(here, "local") == ""
    assert "names no machine" in unfit_backend(here, "slurm")
    assert "not for this machine" in unfit_backend(expand(campaign, "v100-32"), "local")
    assert unfit_backend(expand(campaign, "v100-32"), "slurm") == ""
    many = expand(Campaign(title="t", base={"model": "vit_tiny"}, axes={"dp": [1, 4096]}))
    assert "2 (dp 4096): 4096" in unfit_backend(many, "local")


def test_a_project_without_an_ending_gets_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLOJZ_ACCOUNT", "other")
    assert account_of("jean_zay_a100", {"account": "abc"}) == "abc@a100"
    assert account_of("jean_zay_a100", {"account": "abc@v100"}) == "abc@v100"
    assert account_of("jean_zay_h100", {}) == "other@h100"
    assert account_of("local", {}) == "other"


@pytest.mark.parametrize(
    ("language", "words", "correct"),
    [
        ("en", "is a name that the scheduler knows, of at most 64 letters", "was received: correct "),
        ("fr", "est un nom connu de l’ordonnanceur, d’au plus 64 lettres", "a été reçu : corrigez "),
    ],
)
@pytest.mark.parametrize("option", ["account", "qos", "reservation"])
@pytest.mark.parametrize("name", ["x; rm -rf ~", "$(id)", "a\n#SBATCH --array=0-9999", "-x", "a" * 65, "\u202egnp"])
def test_what_no_scheduler_knows_is_refused_in_one_sentence(
    name: str, option: str, language: Any, words: str, correct: str
) -> None:
    [point] = expand(Campaign(title="t", base={"model": "vit_tiny", "machine": "local"})).points
    use_language(language)
    with pytest.raises(LabError) as refusal:
        outlook(point, 60.0, {option: name})
    said = str(refusal.value)
    assert said.startswith(f"{option} {words}") and f"{correct}--{option}" in said and "pattern" not in said
    assert "\n" not in said and name[:80] in (said if name.isprintable() else name)


def test_an_account_of_the_environment_is_looked_at_with_its_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLOJZ_ACCOUNT", "a" * 60)
    assert account_of("local", {}) == "a" * 60
    with pytest.raises(LabError, match=r"correct --account or \$DLOJZ_ACCOUNT"):
        account_of("jean_zay_a100", {})  # whose ending makes it too long
