"""The training script that grows from lab to lab: it runs at every stage, and trains the same in every layout."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.language import LANGUAGES, Language
from dlojz.cli.main import main
from dlojz.labs.script.growing_script import LAST, parts_of_script, script_of, write_script
from dlojz.results.record import RunRecord

LABS = range(LAST + 1)
SHORT = ["--epochs", "1", "--batch", "256"]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("lab", LABS)
def test_every_script_can_be_read_and_leaves_to_do_what_its_lab_adds(lab: int, language: Language) -> None:
    solved, begun = (script_of(lab, language, solved=one) for one in (True, False))
    for text in (solved, begun):
        compile(text, "train.py", "exec")
        assert "#@" not in text and "dlojz" not in text
        assert not [line for line in text.splitlines() if re.search(r"# .* // ", line)]
    if lab == 0:
        assert begun == solved and len(solved.splitlines()) == 41
        return
    before = {line.strip() for line in script_of(lab - 1, language).splitlines()}
    added = {line.strip() for line in solved.splitlines()} - before
    assert not added & {line.strip() for line in begun.splitlines()}, lab
    asked = [part for part in parts_of_script() if part.first == lab and part.task]
    assert begun.count("# TODO") == len(asked) > 0 and "TODO" not in solved
    assert 1 <= len(added) <= 40


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the scripts and their runs."""
    return tmp_path_factory.mktemp("scripts")


@cache
def trained(root: Path, lab: int, processes: int, *words: str, status: str = "completed") -> RunRecord:
    """Run a lab's script."""
    folder = root / f"lab-{lab}"
    path = folder / "train.py" if folder.exists() else write_script(f"{lab:02}", folder, "en", solved=True)
    run = dlojz.run(path, processes=processes, args=[*SHORT, *words], device="cpu", root=root / "runs", progress=False)
    assert run.record is not None and run.record.status == status, run.logs()
    return run.record


@pytest.mark.parametrize(
    ("lab", "processes", "words", "wrapper"),
    [
        (3, 2, "--accumulation 2", "DistributedDataParallel"),
        (4, 2, "--parallel fsdp", "FSDPViT"),
        (5, 2, "--parallel 1f1b --accumulation 4", "ViT"),
        (6, 2, "--parallel tp", "ViT"),
        (7, 4, "--parallel tp-fsdp", "FSDPViT"),
    ],
)
def test_every_layout_has_the_losses_of_one_process(
    lab: int, processes: int, words: str, wrapper: str, root: Path
) -> None:
    kept = ["--save", str(root / "kept")] if lab == 4 else []  # for the test below
    record, alone = trained(root, lab, processes, *words.split(), *kept), trained(root, 3, 1)
    assert record.losses == pytest.approx(alone.losses, rel=1e-4)
    assert record.environment["wrapped_in"] == wrapper
    row = dlojz.compare(record).rows[0]
    assert row.exact is True and row.unequal_ranks == ()


def test_the_plain_script_learns(root: Path) -> None:
    losses = trained(root, 0, 1, "--epochs", "8").losses
    assert len(losses) == 8 * (1797 // 256) and losses[-1] < losses[0] / 3


def test_checkpointing_changes_no_loss_and_bf16_little(root: Path) -> None:
    plain = trained(root, 1, 1).losses
    assert trained(root, 2, 1, "--checkpointing").losses == pytest.approx(plain, rel=1e-5)
    rounded = trained(root, 2, 1, "--bf16").losses
    assert rounded == pytest.approx(plain, rel=0.05) and rounded != pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("processes", "words", "said"),
    [
        (2, "--parallel 1f1b", "--accumulation must be at least the number of ranks"),
        (3, "--parallel 1f1b --accumulation 4", "the number of ranks must divide that of the blocks"),
        (3, "--parallel ddp", "--batch must be a multiple of replicas"),
    ],
)
def test_what_does_not_come_out_even_is_refused(processes: int, words: str, said: str, root: Path) -> None:
    record = trained(root, 7, processes, *words.split(), status="failed")
    assert said in record.reason


def test_a_checkpoint_of_two_ranks_is_read_by_one(root: Path) -> None:
    folder = str(root / "kept")
    trained(root, 4, 2, "--parallel", "fsdp", "--save", folder)  # run above
    two = trained(root, 4, 2, "--parallel", "fsdp", "--load", folder)
    one = trained(root, 7, 1, "--load", folder)
    assert one.losses == pytest.approx(two.losses, rel=1e-4)
    assert one.losses[0] < trained(root, 3, 1).losses[0]


def test_the_command_writes_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert main(["labs", "script", "03", str(folder), "--language", "fr"]) == 0
    assert f"dlojz run {folder / 'train.py'} --nproc 2" in capsys.readouterr().out
    assert (folder / "train.py").read_text(encoding="utf-8") == script_of(3, "fr", solved=False)
    assert main(["labs", "script", "03", str(folder)]) == 2
    assert "is there already, and perhaps your work" in capsys.readouterr().err
    with pytest.raises(LabError, match="unknown lab '08'"):
        write_script("08", tmp_path, "en")
