"""Lab 13's look at other formats: what pickles name, and the pieces that another number of ranks reads."""

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
from dlojz.labs.lab13_checkpoints import formats
from dlojz.labs.lab13_checkpoints.formats import (
    CASES,
    calls,
    entries,
    imported,
    refused_by_weights_only,
    shares_to_read,
    starts,
)

PLANTED = b"cbuiltins\nprint\n(S'it has run'\ntR."


def archive(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
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


def test_imported_spells_out_a_planted_pickle_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_imported_builds_a_name_from_texts_that_were_kept_before() -> None:
    """Module and function from the memo, the other way round than they were put there."""
    content = b"\x80\x04\x8c\x06system\x94\x8c\x02os\x940" + b"h\x01h\x00\x93\x8c\x04true\x85R."
    assert imported(content) == ["os.system"]
    assert calls(content) == 1


def test_entries_of_archives_in_a_row_are_each_read() -> None:
    one, other = archive({"a": torch.ones(3)}), archive(OrderedDict(b=torch.ones(3, dtype=torch.int64)))
    assert starts(PLANTED) == [0]
    assert len(starts(one + other)) == 2
    assert imported(one + other) == sorted({*imported(one), *imported(other)})
    assert {"torch.FloatStorage", "torch.LongStorage"} <= set(imported(one + other))
    assert len(entries(one + other)) == len(entries(one)) + len(entries(other))
    assert entries(PLANTED) == []


@pytest.mark.parametrize("content", [b"", b"no pickle", PLANTED[:-1], b"\x80\x04\x8c\xff"])
def test_imported_refuses_what_is_no_pickle_in_a_sentence(content: bytes) -> None:
    with pytest.raises(LabError, match="is no pickle"):
        imported(content)


def test_what_weights_only_refuses_is_named(tmp_path: Path) -> None:
    class_of_its_own, plain, bare = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / ".metadata"
    class_of_its_own.write_bytes(archive({"share": Fraction(1, 3), "flat": torch.ones(2)}))
    plain.write_bytes(archive({"flat": torch.ones(2)}))
    bare.write_bytes(pickle.dumps(PurePosixPath("a"), 4))
    assert refused_by_weights_only(class_of_its_own) == "refused: “Unsupported global: GLOBAL fractions.Fraction”"
    assert refused_by_weights_only(plain) == "read"
    assert "Unsupported operand" in refused_by_weights_only(bare)
    assert refused_by_weights_only(tmp_path / "__0_0.distcp") == "(read in pieces)"


@pytest.mark.parametrize("language", ["en", "fr"])
def test_the_table_names_what_the_pickles_import(folders: dict[str, Path], language: str) -> None:
    use_language(language)  # type: ignore[arg-type]
    pickles = str(formats.pickle_table(folders))
    assert "from pathlib import PurePosixPath" in pickles
    assert ("aucun pickle" if language == "fr" else "no pickle") in pickles


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
