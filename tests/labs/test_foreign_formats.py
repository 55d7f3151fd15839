"""Lab 04's look at other formats: what pickles name, who writes what, what one flipped bit does."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure
from dlojz.labs.lab04_zero import checkpoint_formats as formats
from dlojz.labs.lab04_zero.checkpoint_formats import (
    CASES,
    calls,
    differing,
    entries,
    imported,
    numbers_after,
    refused_by_weights_only,
    shares_to_read,
    starts,
    who_writes_what,
)
from dlojz.prediction.shapes import model_shapes

CONFIG = RunConfig.of(model="coatnet_tiny", dp=2, micro_batch=4, steps=2)
PLANTED = b"cbuiltins\nprint\n(S'it has run'\ntR."


def archive(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


@pytest.fixture
def folders(tmp_path: Path) -> dict[formats.Format, Path]:
    """Files of the names and the kinds that the libraries write; what they really write the notebook shows."""
    shares = {"partition_count": [2], "flat": torch.arange(4096.0)}
    for name, content in {
        "deepspeed/latest": b"global_step2",
        "deepspeed/global_step2/mp_rank_00_model_states.pt": archive({"module": torch.ones(64)}),
        "deepspeed/global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt": archive(shares),
        "deepspeed/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt": archive(shares),
        "dcp/.metadata": pickle.dumps(PurePosixPath("a")),
        "dcp/__0_0.distcp": archive(torch.ones(8)) + archive(torch.arange(4096.0)) + archive(torch.ones(8)),
        "dcp/__1_0.distcp": archive(torch.ones(8)),
        "dlojz/tensors-0000.safetensors": bytes(4096),
        "dlojz/COMMIT": b"{}",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return {"deepspeed": tmp_path / "deepspeed", "dcp": tmp_path / "dcp", "dlojz": tmp_path / "dlojz"}


def test_a_planted_pickle_is_spelt_out_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert imported(PLANTED) == ["builtins.print"]
    assert calls(PLANTED) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_pickle_imports_is_named_in_every_protocol(protocol: int) -> None:
    """The second and third use of a name come from the memo."""
    value = [PurePosixPath("a"), OrderedDict(a=1), PurePosixPath("b"), Fraction(1, 3), Fraction(2, 3), "collections"]
    named = set(imported(pickle.dumps(value, protocol)))
    assert named >= {"pathlib.PurePosixPath", "collections.OrderedDict", "fractions.Fraction"}
    assert {name.partition(".")[0] for name in named} <= {
        "pathlib",
        "collections",
        "fractions",
        "copyreg",
        "copy_reg",
        "__builtin__",
        "builtins",
    }


def test_a_name_is_built_from_texts_that_were_kept_before() -> None:
    """Module and function from the memo, the other way round than they were put there."""
    content = b"\x80\x04\x8c\x06system\x94\x8c\x02os\x940" + b"h\x01h\x00\x93\x8c\x04true\x85R."
    assert imported(content) == ["os.system"]
    assert calls(content) == 1


def test_archives_in_a_row_are_each_read() -> None:
    one, other = archive({"a": torch.ones(3)}), archive(OrderedDict(b=torch.ones(3, dtype=torch.int64)))
    assert starts(PLANTED) == [0]
    assert len(starts(one + other)) == 2
    assert imported(one + other) == sorted({*imported(one), *imported(other)})
    assert {"torch.FloatStorage", "torch.LongStorage"} <= set(imported(one + other))
    assert len(entries(one + other)) == len(entries(one)) + len(entries(other))
    assert entries(PLANTED) == []


def test_numbers_after_a_text() -> None:
    content = archive({"other": [7], "partition_count": [2, 300], "next": 5, "flag": True})
    assert numbers_after(content, "partition_count") == [2, 300]
    assert numbers_after(content, "absent") == []


@pytest.mark.parametrize("content", [b"", b"no pickle", PLANTED[:-1], b"\x80\x04\x8c\xff"])
def test_what_is_no_pickle_is_refused_in_a_sentence(content: bytes) -> None:
    with pytest.raises(LabError, match="is no pickle"):
        imported(content)


def test_what_weights_only_refuses_is_named(tmp_path: Path) -> None:
    class_of_its_own, plain, bare = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / ".metadata"
    class_of_its_own.write_bytes(archive({"share": Fraction(1, 3), "flat": torch.ones(2)}))
    plain.write_bytes(archive({"flat": torch.ones(2)}))
    bare.write_bytes(pickle.dumps(PurePosixPath("a"), 4))
    assert refused_by_weights_only(class_of_its_own) == "weights_only: Unsupported global: GLOBAL fractions.Fraction"
    assert refused_by_weights_only(plain) == "weights_only: read"
    assert "Unsupported operand" in refused_by_weights_only(bare)
    assert refused_by_weights_only(tmp_path / "__0_0.distcp") == ""


def test_each_file_is_put_down_to_the_rank_that_writes_it(folders: dict[formats.Format, Path]) -> None:
    found = {file.name: (file.rank, file.pickled) for file in formats.files(folders)}
    assert found == {
        "latest": (0, False),
        "global_step2/mp_rank_00_model_states.pt": (0, True),
        "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt": (0, True),
        "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt": (1, True),
        ".metadata": (0, True),
        "__0_0.distcp": (0, True),
        "__1_0.distcp": (1, True),
        "tensors-0000.safetensors": (0, False),
        "COMMIT": (0, False),
    }


def test_the_shares_of_all_ranks_are_the_whole_state() -> None:
    """DeepSpeed keeps a master copy besides: 16Ψ; DCP and dlojz keep 12Ψ, with one set of buffers and with two."""
    shapes = model_shapes(CONFIG)
    replica_bytes = 4 * shapes.float_buffer_elements + shapes.integer_buffer_bytes
    sums = {
        kind: sum(sum(formats.predicted_bytes(CONFIG, kind, rank).values()) for rank in (0, 1))
        for kind in formats.FORMATS
    }
    assert sums["deepspeed"] == 16 * shapes.num_parameters + replica_bytes
    assert sums["dcp"] == 12 * shapes.num_parameters + replica_bytes
    assert sums["dlojz"] == 12 * shapes.num_parameters + 2 * replica_bytes + 2 * 5056 + 8


@pytest.mark.parametrize("language", ["en", "fr"])
def test_tables_and_figure_tell_who_writes_what(folders: dict[formats.Format, Path], language: str) -> None:
    use_language(language)  # type: ignore[arg-type]
    table = formats.FileTable(folders, CONFIG)
    assert table.written_bytes("dlojz", 0) == 4096 + 2
    assert table.written_bytes("dlojz", 1) == 0
    assert all(file.name in repr(table) for file in table.files)
    pickles = str(formats.pickle_table(folders))
    assert "pathlib: PurePosixPath" in pickles
    assert ("aucun pickle" if language == "fr" else "no pickle") in pickles
    figure = who_writes_what(table)
    assert isinstance(figure, LabFigure)
    assert figure.alt.count("rang" if language == "fr" else "rank") == 6
    grey = [bar.get_width() for bar in figure.axes[0].patches if bar.get_facecolor()[:3] == (0xDD / 255,) * 3]
    assert sum(grey) * 2**20 == pytest.approx(sum(file.bytes for file in table.files))


def test_the_number_of_ranks_is_read_off_each_share(folders: dict[formats.Format, Path]) -> None:
    assert formats.frozen_ranks(folders["deepspeed"]) == [2, 2]


def test_one_bit_of_a_tensor_is_flipped_in_a_copy(folders: dict[formats.Format, Path], tmp_path: Path) -> None:
    """Of archives, in the largest tensor; what is copied stays as it was."""
    for kind, folder in folders.items():
        before = {file.name: file.path.read_bytes() for file in formats.files({kind: folder})}
        name = formats.with_a_flipped_bit(folder, tmp_path / "altered" / kind)
        after = {file.name: file.path.read_bytes() for file in formats.files({kind: tmp_path / "altered" / kind})}
        assert {file.name: file.path.read_bytes() for file in formats.files({kind: folder})} == before
        assert [other for other in before if before[other] != after[other]] == [name]
        changed = [a ^ b for a, b in zip(before[name], after[name], strict=True)]
        assert [bits.bit_count() for bits in changed if bits] == [1]
    share = tmp_path / "altered/deepspeed/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    found = torch.load(share, weights_only=True)["flat"]  # without a word
    assert (found != torch.arange(4096.0)).sum() == 1


def test_a_folder_that_is_not_there_is_said_to_be_to_write(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="run the cell that writes it first"):
        formats.FileTable({"dcp": tmp_path / "dcp"}, CONFIG)


def test_tensors_are_compared_bit_by_bit() -> None:
    """A NaN equals itself, -0 is not 0, and a scalar is a tensor, too."""
    one = {"a": torch.tensor([1.0, float("nan")]), "b": [torch.tensor(0.0), {"c": torch.tensor(3)}]}
    other = {"a": torch.tensor([1.0, float("nan")]), "b": [torch.tensor(-0.0), {"c": torch.tensor(3)}]}
    assert differing(one, one) == {"sharded": 0, "whole": 0}
    assert differing(one, other) == {"sharded": 0, "whole": 1}


@pytest.mark.parametrize("case", CASES)
def test_the_pieces_laid_end_to_end_are_the_new_share(case: tuple[int, int, int]) -> None:
    elements, old_ranks, new_ranks = case
    vector = torch.arange(elements)
    files = vector.split(-(-elements // old_ranks))
    shares = [
        torch.cat([files[other][start:stop] for other, start, stop in shares_to_read(*case, rank)] or [vector[:0]])
        for rank in range(new_ranks)
    ]
    for rank, share in enumerate(vector.split(-(-elements // new_ranks))):
        assert torch.equal(shares[rank], share)
    assert torch.equal(torch.cat(shares), vector)
