"""The store of traces: read where it is whole and of this version, traced anew and said once where it is not."""

import errno
import gzip
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlojz import predict
from dlojz.config.run_config import RunConfig
from dlojz.models.foreign.vision_packages import ensure_torchvision_imports
from dlojz.prediction import trace_store
from dlojz.prediction.model_trace import key_of, trace_of
from dlojz.prediction.shapes import RankPart
from dlojz.prediction.trace import MemoryTrace

RUN = RunConfig.of(model="vit_tiny", checkpointing="full", precision="bf16")
PART = RankPart(RUN)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trace_store, "_reported", set())
    return tmp_path / "dlojz" / "traces"


def never() -> MemoryTrace:
    raise AssertionError("it is kept: nothing is to be traced")


def written(store: Path) -> tuple[object, MemoryTrace, Path]:
    key, trace = key_of(PART, on_gpu=True), trace_of(PART, on_gpu=True)
    for path in store.glob("*"):  # `trace_of` keeps it too, if it is the first in this process
        path.unlink()
    assert not trace_store.is_kept(key)
    assert trace_store.kept(key, lambda: trace) is trace and trace_store.is_kept(key)
    (path,) = store.iterdir()
    return key, trace, path


def test_trace_store_reads_again_what_was_traced(store: Path) -> None:
    key, trace, path = written(store)
    again = trace_store.kept(key, never)
    assert again == trace and again is not trace
    assert (again.bytes_of, again.module_of, again.output_of) == (trace.bytes_of, trace.module_of, trace.output_of)
    assert path.stat().st_size < 2**20


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def rewritten(path: Path, **changes: object) -> None:
    data = {**json.loads(gzip.decompress(path.read_bytes())), **changes}
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "flipped": flipped,
    "empty": lambda path: path.write_bytes(b""),
    "no trace": lambda path: rewritten(path, data={"events": [[1]]}),
    "another version": lambda path: rewritten(path, code="0"),
    "another key": lambda path: rewritten(path, key="another"),
    "no object": lambda path: path.write_bytes(gzip.compress(b"[]")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_trace_store_says_a_damaged_file_once_traces_anew_and_replaces_it(
    name: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, trace, path = written(store)
    DAMAGE[name](path)
    assert trace_store.kept(key, lambda: trace) is trace
    assert capsys.readouterr().err.count("traced anew") == 1
    assert trace_store.kept(key, never) == trace
    DAMAGE[name](path)
    assert trace_store.kept(key, lambda: trace) is trace and not capsys.readouterr().err


def test_trace_store_says_that_a_disk_is_full_and_leaves_no_half_a_file(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, trace, path = written(store)
    path.unlink()

    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trace_store.os, "replace", full)
    assert trace_store.kept(key, lambda: trace) is trace
    assert list(store.iterdir()) == []
    assert f"could not be kept in {store} (No space left on device)" in capsys.readouterr().err


def test_trace_store_has_other_files_for_another_version_of_the_code(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, trace, path = written(store)
    monkeypatch.setattr(trace_store, "code_version", lambda: "another")
    assert not trace_store.is_kept(key)
    assert trace_store.kept(key, lambda: trace) is trace and len(list(store.iterdir())) == 2 and path.exists()


def test_trace_store_deletes_at_the_next_write_what_was_not_read_for_a_month(store: Path) -> None:
    key, trace, path = written(store)
    old_s = time.time() - (trace_store.UNREAD_DAYS + 1) * 86_400
    former, unfinished = store / "0.json.gz", store / "0.json.gzabc"  # of another version, and of a process that died
    for file in (path, former, unfinished):
        file.touch()
        os.utime(file, (old_s, old_s))
    assert trace_store.kept(key, never) == trace, "it is read: from now on it is young"
    assert former.exists(), "reading deletes nothing"
    trace_store.kept("another key", lambda: trace)
    assert path.exists() and not former.exists() and not unfinished.exists() and len(list(store.iterdir())) == 2


def test_trace_store_says_once_that_a_folder_cannot_be_written_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(trace_store, "_reported", set())
    trace = trace_of(PART, on_gpu=True)
    for _ in range(2):
        assert trace_store.kept(key_of(PART, on_gpu=True), lambda: trace) is trace
    assert capsys.readouterr().err.count("XDG_CACHE_HOME") == 1


TIMM = {"model": "timm:vit_tiny_patch16_224", "image_size": 384, "micro_batch": 4}
FUSED_MIB, UNFUSED_MIB = 405.2, 593.5
"""Peaks on 4 images of 384 × 384, with attention in one kernel and written out."""


def _peak_mib() -> float:
    return (predict(RunConfig.of(**TIMM)).memory.peak_bytes or 0) / 2**20


@pytest.mark.timeout(900)
def test_trace_store_has_switches_of_the_environment_in_its_key(store: Path) -> None:
    """Each in a process of its own, with one store."""
    code = (
        "import dlojz; from dlojz.config.run_config import RunConfig; "
        f"print(dlojz.predict(RunConfig.of(**{TIMM})).memory.peak_bytes / 2**20)"
    )
    root = Path(__file__).parents[2]
    for fused, mib in (("1", FUSED_MIB), ("0", UNFUSED_MIB)):
        environment = {**os.environ, "XDG_CACHE_HOME": str(store.parents[1]), "TIMM_FUSED_ATTN": fused}
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True
        )
        assert float(ran.stdout) == pytest.approx(mib, rel=0.001)
    assert len(list(store.iterdir())) == 2


@pytest.mark.timeout(900)
def test_predict_keeps_other_traces_for_other_switches_of_a_process(store: Path) -> None:
    """timm's own function, and torch's choice of an attention kernel: other traces in the same process."""
    ensure_torchvision_imports()
    layers = importlib.import_module("timm.layers")
    try:
        layers.set_fused_attn(False)
        assert _peak_mib() == pytest.approx(UNFUSED_MIB, rel=0.001)
    finally:
        layers.set_fused_attn(True)
    fused = _peak_mib()
    assert fused == pytest.approx(FUSED_MIB, rel=0.001)
    with sdpa_kernel(SDPBackend.MATH):
        assert _peak_mib() > 1.2 * fused
    assert _peak_mib() == fused
