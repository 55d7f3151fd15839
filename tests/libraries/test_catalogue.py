"""The catalogue: what is installed, what is not, the lines that change, the command line of a program."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig, fallback_note
from dlojz.libraries import library_catalogue
from dlojz.libraries.library_catalogue import (
    LIBRARIES,
    absence,
    bridge_lines,
    change,
    check_checkpoints,
    code_lines,
    library,
    lines_changed,
    require,
    words_of,
)
from dlojz.runnable import check_runnable
from tests.train.counted import check_refused

COMMANDS = {
    "torch": "pip install torch",
    "deepspeed": "pip install 'dlojz[deepspeed]'",
    "accelerate": "pip install 'dlojz[libraries]'",
    "megatron": "pip install 'dlojz[libraries]'",
    "colossalai": "make colossalai",
}


def test_each_library_has_a_program_a_command_and_words_in_both_languages() -> None:
    for one in LIBRARIES.values():
        assert one.program.is_file(), one.name
        assert one.command == COMMANDS[one.name]
        english = (one.hides(), one.runs())
        use_language("fr")
        french = (one.hides(), one.runs())
        use_language("en")
        assert all(english) and all(french) and english[0] != french[0]


@pytest.mark.parametrize("name", ["accelerate", "megatron", "colossalai"])
def test_a_library_that_is_not_there_is_refused_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_catalogue, "found", lambda module: False)
    monkeypatch.setattr(library_catalogue.Library, "python", property(lambda self: None))
    command = LIBRARIES[name].command
    for language, words in (("en", "is not installed"), ("fr", "n’est pas installé")):
        use_language(language)
        said = absence(name) or ""
        with pytest.raises(LabError, match=words):
            require(name)
        with pytest.raises(LabError, match=re.escape(command)):
            check_runnable(RunConfig.of(model="gpt_tiny", dp=2, library=name))
        use_language("en")
        assert command in said and words in said and said.count(". ") == 0


def test_absence_names_no_makefile_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_catalogue, "CHECKOUT", tmp_path)
    monkeypatch.delenv("DLOJZ_COLOSSALAI", raising=False)
    assert [one.name for one in LIBRARIES.values() if "make" in one.command] == []
    assert absence("colossalai") == (
        "Colossal-AI is not installed (Python package colossalai): install it in a separate environment, whose Python "
        "DLOJZ_COLOSSALAI names."
    )


def test_check_runnable_never_looks_for_a_library_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_catalogue, "found", lambda module: pytest.fail("looked for"))
    check_runnable(RunConfig.of(model="gpt_tiny", dp=2))


@pytest.mark.skipif("CI" not in os.environ, reason="a student may leave the optional libraries out")
@pytest.mark.parametrize("name", ["torch", "deepspeed", "accelerate", "megatron"])
def test_in_ci_no_test_is_skipped_for_want_of_a_library(name: str) -> None:
    assert library(name).installed, LIBRARIES[name].command


def test_a_package_whose_parent_is_absent_is_not_found() -> None:
    found = library_catalogue.found
    assert found("json") and not found("dlojz_absent") and not found("dlojz_absent.core")
    assert importlib.util.find_spec("dlojz") is not None


def test_an_unknown_library_is_refused_with_the_nearest() -> None:
    with pytest.raises(LabError, match="did you mean 'accelerate'"):
        library("accelerated")


def test_library_has_a_python_of_its_own_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("")
    monkeypatch.setenv("DLOJZ_COLOSSALAI", str(python))
    assert LIBRARIES["colossalai"].python == python
    monkeypatch.setenv("DLOJZ_COLOSSALAI", str(tmp_path / "absent"))
    assert library("colossalai").python is None
    assert LIBRARIES["torch"].python is None


@pytest.mark.parametrize("named", ["/bin/false", "/bin/no_such_python"])
def test_absence_names_a_python_without_the_library_as_no_environment(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the sentence names the variable: installing alone would change nothing."""
    monkeypatch.setenv("DLOJZ_COLOSSALAI", named)
    for language, words in (("en", "unset this variable, then"), ("fr", "retirez cette variable, puis")):
        use_language(language)
        said = absence("colossalai") or ""
        assert words in said and "DLOJZ_COLOSSALAI" in said and named in said
        assert "make colossalai" in said and said.count(". ") == 0


def test_an_environment_that_was_given_up_half_way_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that was interrupted leaves a Python alone; the Makefile marks an environment that is whole."""
    monkeypatch.delenv("DLOJZ_COLOSSALAI", raising=False)
    monkeypatch.setattr(library_catalogue, "CHECKOUT", tmp_path)
    monkeypatch.setattr(library_catalogue, "found", lambda module: False)
    one = LIBRARIES["colossalai"]
    folder = tmp_path / one.environment
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("")
    (tmp_path / "Makefile").touch()
    assert "make colossalai" in (absence("colossalai") or "")
    packages = folder / "lib" / "python3.11" / "site-packages" / "colossalai-0.5.0.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: colossalai\nVersion: 0.5.0\n")
    assert "make colossalai" in (absence("colossalai") or ""), "what comes behind it may still be missing"
    (folder / library_catalogue.READY).touch()
    assert (absence("colossalai"), one.python, one.version) == (None, folder / "bin" / "python", "0.5.0")
    (folder / "bin" / "python").unlink()
    assert absence("colossalai"), "the Makefile takes it away where nothing could be made of it"


def test_library_catalogue_looks_for_what_the_makefile_marks() -> None:
    text = (Path(library_catalogue.__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    assert f"COLOSSALAI := {LIBRARIES['colossalai'].environment}\n" in text
    assert f"$(COLOSSALAI)/{library_catalogue.READY}: " in text


def test_only_code_counts_as_lines() -> None:
    text = '"""Docs,\n\nlong."""\n\nimport os  # why\n\n\ndef f():\n    """Docs."""\n    # alone\n    return "# no"\n'
    assert code_lines(text) == ["import os", "def f():", 'return "# no"']


def test_lines_are_counted_from_the_plain_program() -> None:
    assert change("a = 1\nb = 2\n", "a = 1\nc = 3\nd = 4\n") == (2, 1, 2, 3)
    plain = lines_changed("torch")
    assert (plain.added, plain.removed, plain.changed) == (0, 0, 0) and plain.lines == plain.reference_lines
    for name in LIBRARIES:
        one = lines_changed(name)
        assert one.lines == one.reference_lines + one.added - one.removed
    assert lines_changed("deepspeed").lines < plain.lines


def test_what_bridges_the_lab_and_a_library_is_counted_too() -> None:
    """Other names of weights, what stands in for CUDA: but not the course's, which all have."""
    adapter = library_catalogue.PROGRAMS.parent / "megatron_adapter.py"
    for name in LIBRARIES:
        assert bridge_lines(name) == (len(code_lines(adapter.read_text())) if name == "megatron" else 0), name
    assert bridge_lines("megatron") > 50


def test_a_programs_words_are_those_a_user_would_type() -> None:
    config = RunConfig.of(model="gpt_tiny", dp=2, library="deepspeed", zero=2, micro_batches=2, steps=3)
    words = words_of(config, Path("/run/ds_config.json"))
    assert words[-3:] == ["--deepspeed", "--deepspeed_config", "/run/ds_config.json"]
    assert words[words.index("--accumulation") + 1] == "2" and "--zero" not in words, "the stage is in the JSON file"
    sharded = words_of(RunConfig.of(model="gpt_tiny", dp=2, library="torch", zero=2))
    assert sharded[sharded.index("--zero") + 1] == "2"
    plain = words_of(RunConfig.of(model="gpt_tiny", dp=2, library="torch"))
    assert "--zero" not in plain and "--deepspeed" not in plain and "--tp" not in plain


def test_run_config_has_deepspeeds_program_run_by_its_engine() -> None:
    assert RunConfig.of(model="gpt_tiny", dp=2, library="deepspeed").layout.engine == "deepspeed"
    assert RunConfig(library="deepspeed").layout.engine == "deepspeed"
    assert RunConfig.of(model="gpt_tiny", dp=2, library="torch").layout.engine == "torch"
    one = RunConfig.of(model="gpt_tiny", dp=2, library="deepspeed", zero=1)
    assert RunConfig.from_json(one.to_json()) == one


def test_a_run_with_a_library_is_another_run_with_a_title_of_its_own() -> None:
    plain, written = RunConfig.of(model="gpt_tiny", dp=2), RunConfig.of(model="gpt_tiny", dp=2, library="torch")
    assert plain.hash != written.hash and written.title == plain.title + ", library=torch"


TEXT = {"model": "gpt_tiny", "dp": 2}


@pytest.mark.parametrize(("fields", "english", "french"), [
    ({"library": "accelerate", "tp": 2}, "tp=2 was received, but .* splits no model", "ne découpe pas ainsi"),
    ({"library": "torch", "precision": "bf16"}, "use precision='fp32'", "prenez precision='fp32'"),
    ({"library": "torch", "optimizer": "sgd"}, "use optimizer='adamw'", "prenez optimizer='adamw'"),
    ({"library": "deepspeed", "engine": "torch"}, "use engine='deepspeed', zero=0|1", "prenez engine='deepspeed'"),
    ({"library": "torch", "engine": "by_hand"}, "has no such layout", "n’a pas cette répartition"),
    ({"library": "torch", "checkpointing": "full"}, "use checkpointing='none'", "prenez checkpointing='none'"),
])  # fmt: skip
def test_run_config_refuses_in_one_sentence_what_a_program_does_not_do(
    fields: dict[str, object], english: str, french: str
) -> None:
    check_refused({**TEXT, **fields}, english, french)


def test_checkpoints_of_a_program_are_refused() -> None:
    config = RunConfig.of(**TEXT, library="torch")
    with pytest.raises(LabError, match="checkpoint_every=5 was received with library='torch'"):
        check_checkpoints(config, 5)
    check_checkpoints(config, None)
    check_checkpoints(RunConfig.of(**TEXT), 5)


def test_fallback_note_says_that_a_sharding_was_left_aside() -> None:
    config = RunConfig.of(**TEXT, library="accelerate", zero=3)
    assert "trained with DDP" in fallback_note(config, "DistributedDataParallel")
    assert fallback_note(config, "FSDPWithLoss") == ""
    stage_0 = RunConfig.of(**TEXT, library="accelerate", engine="deepspeed")
    assert "trained with DDP" in fallback_note(stage_0, "DistributedDataParallel")
    plain = RunConfig.of(**TEXT, library="accelerate")
    assert fallback_note(plain, "DistributedDataParallel") == ""
