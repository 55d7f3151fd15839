"""What is read is what was written, or it is not read at all."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.train.checkpoint_files import listing, newest, verify
from dlojz.train.checkpoint_tensors import CheckpointTensors

Write = Callable[..., Path]
FILES = ("COMMIT", "manifest.json", "tensors-0000.safetensors", "tensors-0001.safetensors", "tensors-0002.safetensors")


def weights_of(folder: Path) -> list[torch.Tensor]:
    with CheckpointTensors(folder, verify(folder)) as source:
        return [source.tensor(name) for name in sorted(source.manifest.tensors)]


def test_verify_and_listing_give_back_what_was_written(write: Write, tmp_path: Path, config: RunConfig) -> None:
    folder = write(7)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert all(torch.equal(weight, torch.full((5, 4), 7.0)) for weight in weights_of(folder))
    manifest = verify(folder)
    assert (manifest.step, manifest.config) == (7, config)
    [one] = listing(tmp_path)
    assert (one.step, one.folder, one.layout) == (7, folder, config.layout)
    assert one.bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert one.committed_utc.endswith("+00:00")


def test_the_newest_whole_one_is_found(write: Write, tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, None, ())
    for step in (5, 10, 20):
        write(step)
    assert newest(tmp_path).folder == tmp_path / "checkpoints" / "step-000020"
    assert [one.step for one in listing(tmp_path)] == [20, 10, 5]


@pytest.fixture
def two(write: Write, tmp_path: Path) -> Path:
    write(5)
    write(10)
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "link", "grow"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    two: Path, tmp_path: Path, name: str, damage: str
) -> None:
    path = two / "step-000010" / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "grow":
        path.write_bytes(bytes(content) + b" x")
    else:
        path.unlink()
        if damage == "link":
            path.symlink_to(two / "step-000005" / name)
    found = newest(tmp_path)
    assert found.folder == two / "step-000005"
    assert all(torch.equal(weight, torch.full((5, 4), 5.0)) for weight in weights_of(two / "step-000005"))
    if (name, damage) == ("COMMIT", "remove"):
        assert found.passed_over == ()  # it was never finished
    else:
        [said] = found.passed_over
        assert "step-000010 is not used" in said
        assert name in said or name == "COMMIT"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_byte_and_no_cut_is_overlooked(write: Write, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "checkpoints" / "step-000010"
    whole = folder if folder.is_dir() else write(10)
    damaged = tmp_path / "damaged" / "step-000010"
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(whole, damaged)
    path = damaged / data.draw(st.sampled_from(FILES))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        content = content[:position]
    path.write_bytes(content)
    if path.name == "COMMIT" and json_equal(bytes(content), (whole / "COMMIT").read_bytes()):
        return
    with pytest.raises(LabError, match="step-000010 is not used"):
        verify(damaged)


def json_equal(one: bytes, other: bytes) -> bool:
    """A flipped bit may make white space of white space."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_newest_does_not_believe_the_name_of_another_checkpoint(two: Path, tmp_path: Path) -> None:
    """A checkpoint renamed to a later step would be trained on as if the data up to there had been seen."""
    (two / "step-000010").rename(two / "step-000030")
    found = newest(tmp_path)
    assert found.folder == two / "step-000005"
    assert "it is the checkpoint of step 10, under another name" in found.passed_over[0]


def test_newest_and_listing_follow_no_links_and_nothing_that_is_not_ours(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (two / "step-000010").rename(elsewhere)
    (two / "step-000010").symlink_to(elsewhere, target_is_directory=True)
    assert newest(tmp_path).folder == two / "step-000005"
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(two, target_is_directory=True)
    assert newest(run).folder is None
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    found = newest(tmp_path)
    assert found.folder is None
    assert "no folder of yours" in found.passed_over[0]
    assert listing(tmp_path) == []


class Planted:
    """Unpickled, it tells."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return Path.write_text, (Path(os.environ["PLANTED"]), "executed")  # type: ignore[return-value]


def test_newest_and_checkpoint_tensors_do_not_run_a_planted_pickle(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file beside, under the names that torch and DeepSpeed load, or in place of the tensors."""
    told = tmp_path / "told"
    monkeypatch.setenv("PLANTED", str(told))
    content = pickle.dumps(Planted())
    for name in (".metadata", "model.pt", "mp_rank_00_model_states.pt", "__0_0.distcp"):
        (two / "step-000010" / name).write_bytes(content)
    assert newest(tmp_path).folder == two / "step-000010"
    assert len(weights_of(two / "step-000010")) == 3
    # Even with a manifest that vouches for it, it is read as safetensors and refused as such.
    path = two / "step-000010" / "tensors-0000.safetensors"
    path.write_bytes(content)
    vouch_for(two / "step-000010", path.name)
    with pytest.raises(LabError, match=r"tensors-0000.safetensors of step-000010 cannot be read"):
        weights_of(two / "step-000010")
    assert not told.exists()


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/passwd", "model.pt", "tensors-0000.safetensors\n"])
def test_verify_refuses_a_manifest_that_names_a_file_not_its_own(two: Path, name: str) -> None:
    folder = two / "step-000010"
    vouch_for(folder, "tensors-0000.safetensors", name)
    with pytest.raises(LabError, match="is not used"):
        verify(folder)


@pytest.mark.parametrize(
    ("language", "words"),
    [
        (
            "en",
            "the checkpoint step-000010 is not used: it has schema version 2, newer than this dlojz knows: "
            "update dlojz.",
        ),
        (
            "fr",
            "le checkpoint step-000010 n’est pas utilisé : il est d’une version 2 du schéma, plus récente que ce "
            "dlojz n’en connaît : mettez dlojz à jour.",
        ),
    ],
)
def test_verify_refuses_a_newer_version_readably(two: Path, language: str, words: str) -> None:
    folder = two / "step-000010"
    rewrite(folder, {**json.loads((folder / "manifest.json").read_text()), "schema_version": 2})
    use_language(language)
    with pytest.raises(LabError) as refusal:
        verify(folder)
    assert str(refusal.value) == words


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("grow", r"tensors-0000.safetensors fait \d+ octets, alors que \d+ ont été écrits\.$"),
        ("flip", r"le contenu de tensors-0000.safetensors a changé depuis son écriture \(sha256\)\.$"),
        ("link", r"tensors-0000.safetensors est un lien symbolique\.$"),
        ("folder", r"tensors-0000.safetensors n’est pas un fichier ordinaire\.$"),
        ("remove", r"tensors-0000.safetensors est illisible : No such file or directory\.$"),
        ("commit", r"il n’a pas été terminé : COMMIT manque\.$"),
        ("manifest", r"manifest.json et COMMIT ne vont pas ensemble\.$"),
        ("name", r"c’est le checkpoint du pas 10, sous un autre nom\.$"),
    ],
)
def test_verify_says_in_french_too_what_is_damaged(two: Path, damage: str, words: str) -> None:
    folder = two / "step-000010"
    path = folder / "tensors-0000.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "grow":
        path.write_bytes(bytes(content) + b" ")
    elif damage == "flip":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "commit":
        (folder / "COMMIT").unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text("{}")
    elif damage == "name":
        folder = folder.rename(two / "step-000011")
    else:
        path.unlink()
        if damage == "link":
            path.symlink_to(two / "step-000005" / path.name)
        elif damage == "folder":
            path.mkdir()
    use_language("fr")
    with pytest.raises(LabError, match=rf"^le checkpoint {folder.name} n’est pas utilisé : {words}"):
        verify(folder)


def test_check_goes_on_refuses_another_training(two: Path, config: RunConfig) -> None:
    manifest = verify(two / "step-000010")
    manifest.check_goes_on(RunConfig.of(model="llama_tiny", steps=7, dp=2, micro_batch=8, zero=3))
    with pytest.raises(LabError, match="kept with seed=0, but this run has seed=1: only the layout may differ"):
        manifest.check_goes_on(RunConfig.of(model="llama_tiny", seed=1))
    with pytest.raises(LabError, match="global_batch=16, but this run has global_batch=32"):
        manifest.check_goes_on(RunConfig.of(model="llama_tiny", dp=2))
    use_language("fr")
    with pytest.raises(LabError, match="seed=0, mais cette exécution a seed=1 : seul le layout peut différer"):
        manifest.check_goes_on(RunConfig.of(model="llama_tiny", seed=1))


def vouch_for(folder: Path, file: str, name: str | None = None) -> None:
    """Make the manifest and the commit say that a file is right, under its own name or another."""
    content = (folder / file).read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    for kept in manifest["files"]:
        if kept["name"] == file:
            kept |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "name": name or file}
    rewrite(folder, manifest)


def rewrite(folder: Path, manifest: dict[str, object]) -> None:
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    said = {"manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "COMMIT").write_text(json.dumps(said))
