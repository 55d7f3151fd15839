"""Colossal-AI in an environment of its own: real runs where that is, and what bridges two versions of torch."""

import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.libraries import course_training
from dlojz.libraries.course_training import trunc_normal_
from dlojz.libraries.library_catalogue import LIBRARIES, absence
from dlojz.prediction import predict
from dlojz.results.footprint import STATES

TEXT = {"model": "gpt_tiny", "sequence_length": 32, "micro_batch": 4, "steps": 4, "dp": 2, "device": "cpu"}
needs_environment = pytest.mark.skipif(
    LIBRARIES["colossalai"].python is None, reason="Colossal-AI has no environment here: `make colossalai` makes it"
)


@needs_environment
def test_dlojz_run_with_colossalai_trains_as_plain_torch_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Started from this environment, run in its own: the same losses, states and bytes, and a record that says so."""
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path))
    records = {}
    for library in ("torch", "colossalai"):
        for micro_batches in (1, 2):
            run = dlojz.run(RunConfig.of(**TEXT, micro_batches=micro_batches, library=library))
            run.wait()
            assert run.record is not None and run.record.status == "completed", run.logs()
            records[library, micro_batches] = run.record
    for micro_batches in (1, 2):
        plain, own = (records[library, micro_batches] for library in ("torch", "colossalai"))
        assert len(own.losses) == 4 and own.losses == pytest.approx(plain.losses, abs=1e-5)
        for counted, expected in zip(own.footprints, plain.footprints, strict=True):
            for category in STATES:
                assert counted.memory.category(category) == expected.memory.category(category), category
            sent, expected_sent = (
                {(one.collective, one.group): one.message_bytes for one in side.communication}
                for side in (counted, expected)
            )
            assert sent == expected_sent
        counts = [one.count for one in own.footprints[0].communication if one.group == "dp"]
        assert counts == [one.count for one in predict(own.config).communication if one.group == "dp"] == [1]
        assert own.environment["library"].startswith("Colossal-AI 0.")
        assert own.environment["torch"] != plain.environment["torch"]
        assert own.environment["wrapped_in"] == "TorchDDPModel"


@pytest.mark.parametrize("std", [0.02, 1.0, 3.0])
def test_trunc_normal_gives_the_older_torch_the_draws_of_this_one(std: float) -> None:
    """To the bit, whether some numbers are drawn again or none is; and the generator is left at the same place."""
    found = []
    for function in (nn.init.trunc_normal_, trunc_normal_):
        torch.manual_seed(3)
        weight = torch.empty(50, 40)
        assert function(weight, std=std) is weight
        found.append((weight, torch.rand(3)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert float(found[0][0].abs().max()) <= 2


def test_models_are_built_with_them_and_torch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch draws otherwise, the programs' model still has the weights of the lab's."""
    args = course_training.parser().parse_args(["--model", "vit_tiny"])
    expected = course_training.loop.build_model(RunConfig.of(model="vit_tiny")).state_dict()
    monkeypatch.setattr(nn.init, "trunc_normal_", older := lambda tensor, **_: tensor.fill_(0.1))
    built = course_training.build_model(args).network.state_dict()
    assert all(torch.equal(built[name], weight) for name, weight in expected.items())
    assert nn.init.trunc_normal_ is older


def test_libraries_have_colossalai_in_the_environment_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And its version asked there, without starting its Python; a variable that leads nowhere is no environment."""
    python = tmp_path / "bin" / "python"
    packages = tmp_path / "lib" / "python3.11" / "site-packages" / "colossalai-9.8.7.dist-info"
    for folder in (python.parent, packages):
        folder.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: colossalai\nVersion: 9.8.7\n")
    monkeypatch.setenv("DLOJZ_COLOSSALAI", str(python))
    one = LIBRARIES["colossalai"]
    assert (one.python, one.installed, one.version) == (python, True, "9.8.7")
    monkeypatch.setenv("DLOJZ_COLOSSALAI", str(tmp_path / "elsewhere"))
    assert (one.python, one.version) == (None, "")
    for language, words in (("en", "install it by make colossalai"), ("fr", "installez-le par make colossalai")):
        use_language(language)
        assert words in (absence("colossalai") or "")


def test_run_config_refuses_colossalai_a_model_with_batch_norm() -> None:
    for language, words in (("en", "use a vit, gpt or llama model"), ("fr", "prenez un modèle vit, gpt ou llama")):
        use_language(language)
        with pytest.raises(LabError, match=words):
            RunConfig.of(model="coatnet_tiny", dp=2, library="colossalai")
    assert RunConfig.of(model="vit_tiny", dp=2, library="colossalai").library == "colossalai"
