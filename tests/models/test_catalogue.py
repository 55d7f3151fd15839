"""The catalogue: light to import, plain-spoken when it refuses."""

import subprocess
import sys

import pytest
import torch

from dlojz import models


def test_models_catalogue_is_imported_without_torch() -> None:
    code = "import sys, dlojz.models as m; m.check_input('coatnet_0', 224); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_unique_and_each_has_an_entry() -> None:
    assert len(models.names()) == len(set(models.names()))
    for name in models.names():
        entry = models.spec(name)
        assert entry.name == name
        assert entry.summary
        assert entry.source
        assert (entry.image_size is None) == (entry.family == "text")
        assert (entry.sequence_length is None) == (entry.family == "image")
        models.check_input(name, entry.image_size, entry.sequence_length)


def test_a_file_without_its_function_is_no_unknown_model() -> None:
    with pytest.raises(ValueError, match=r"^two\.py is a file: name the .*two\.py:build.*dlojz run two\.py\.$"):
        models.spec("two.py")


def test_unknown_model_names_a_close_one_and_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'coatnet_tin': did you mean 'coatnet_tiny'\?.*llama_3_8b"):
        models.spec("coatnet_tin")
    with pytest.raises(ValueError, match=r"unknown model '7'"):
        models.spec(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "image_size", "sentence"),
    [
        ("coatnet_0", 100, "image_size of coatnet_0 must be a multiple of 32 (pixels), but 100 was received: "
         "use 96 or 128."),
        ("coatnet_0", 20, "but 20 was received: use 32."),
        ("vit_b_16", 230, "must be a multiple of 16 (pixels), but 230 was received: use 224 or 240."),
        ("vit_h_14", 512, "must be a multiple of 14 (pixels), but 512 was received: use 504 or 518."),
        ("alexnet", 32, "must be at least 63 (pixels), but 32 was received: use 63."),
        ("coatnet_0", 0, "image_size of coatnet_0 must be a whole number, at least 1, but 0 was received."),
        ("coatnet_0", -32, "but -32 was received."),
        ("coatnet_0", 224.0, "but 224.0 was received."),
        ("coatnet_0", True, "but True was received."),
        ("gpt_tiny", 64, "gpt_tiny reads text: image_size has no meaning for it, but 64 was received: "
         "give sequence_length, or leave it out."),
    ],
)  # fmt: skip
def test_check_input_refuses_image_size_in_one_sentence(name: str, image_size: int, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        models.check_input(name, image_size)
    assert str(refused.value).endswith(sentence)
    with pytest.raises(ValueError) as also:
        models.build(name, image_size=image_size)
    assert str(also.value) == str(refused.value)


def test_check_input_refuses_sequence_length_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="sequence_length of gpt_tiny must be a whole number, at least 1, but 0 was"):
        models.check_input("gpt_tiny", sequence_length=0)
    with pytest.raises(ValueError, match="vit_tiny reads images: sequence_length has no meaning for it, but 8 was"):
        models.check_input("vit_tiny", sequence_length=8)


@pytest.mark.parametrize("option", [{"num_classes": 0}, {"in_channels": -1}, {"num_classes": True}])
def test_models_build_refuses_counts_that_are_not_positive(option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be a whole number, at least 1, but"):
        models.build("coatnet_tiny", **option)  # type: ignore[arg-type]


def test_models_build_of_text_has_no_channels() -> None:
    with pytest.raises(ValueError, match="gpt_tiny reads text: in_channels has no meaning for it, but 3 was received"):
        models.build("gpt_tiny", in_channels=3)


def test_models_build_has_the_number_of_classes_asked_for() -> None:
    assert models.build("vit_tiny", num_classes=7)(torch.randn(1, 3, 64, 64)).shape == (1, 7)
    assert models.build("llama_tiny", num_classes=11)(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 11)
