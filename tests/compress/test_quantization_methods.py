"""The methods of the catalogue on a teacher that learnt: bytes as foreseen, accuracy kept, and where it is not."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import method as quantization_methods
from dlojz.compress import quantization
from dlojz.compress.method import Method, Shrunk, Start
from dlojz.compress.quantizers import linear_layers
from dlojz.compress.task import Settings, Task, accuracy, digits, fit, new_model, payload_bytes, saved_bytes

METHODS = {method.name: method for method in quantization_methods.QUANTIZATION_METHODS}
pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def task() -> Task:
    return digits()


@pytest.fixture(scope="module")
def teacher(task: Task) -> nn.Module:
    model = new_model("vit_tiny", task, seed=0)
    fit(model, task, Settings(epochs=4))
    return model


def applied(teacher: nn.Module, task: Task, method: str, **options: object) -> Shrunk:
    return METHODS[method](Start(teacher, "vit_tiny", task, options=options))


QUICK = {"ptq_2bit_tuned": {"epochs": 1}, "qat_2bit": {"epochs": 1}, "int8_static": {"samples": 64}}


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_every_method_gives_a_model_of_the_bytes_that_it_foresaw(
    teacher: nn.Module, task: Task, method: Method
) -> None:
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    shrunk = applied(teacher, task, method.name, **QUICK.get(method.name, {}))
    assert payload_bytes(shrunk.stored) == shrunk.predicted_bytes
    # A header of JSON is all that a file adds: some 150 bytes per tensor.
    assert shrunk.predicted_bytes < saved_bytes(shrunk.stored) < shrunk.predicted_bytes + 150 * len(shrunk.stored) + 64
    assert shrunk.parameters == sum(one.numel() for one in teacher.parameters())
    assert shrunk.predicted_latency_ratio is None or shrunk.predicted_latency_ratio > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    with torch.inference_mode():
        assert shrunk.model(task.held_out_NCHW[:3]).shape == (3, 10)
    if "2bit" not in method.name:
        assert accuracy(shrunk.model, task) >= accuracy(teacher, task) - 0.02
        assert all(one.measured_sqnr_db > 15 for one in shrunk.layer_errors)
    assert [one.name for one in shrunk.layer_errors] == list(linear_layers(teacher))
    assert all(math.isfinite(one.measured_sqnr_db) for one in shrunk.layer_errors)
    bits = {one.bits for one in shrunk.layer_errors}
    assert bits == ({2} if "2bit" in method.name else {4, 16} if "torchao_int4" in method.name else bits & {4, 8})


def test_two_bits_break_the_model_and_training_mends_it(teacher: nn.Module, task: Task) -> None:
    alone = accuracy(applied(teacher, task, "ptq_2bit").model, task)
    tuned = accuracy(applied(teacher, task, "ptq_2bit_tuned").model, task)
    aware = accuracy(applied(teacher, task, "qat_2bit").model, task)
    assert alone < accuracy(teacher, task) - 0.1
    assert tuned > alone + 0.1 and aware > alone + 0.1


def test_layers_have_the_noise_that_was_foreseen(teacher: nn.Module, task: Task) -> None:
    for method in ("int8_weight_only", "int8_dynamic", "int4_weight_only"):
        errors = applied(teacher, task, method).layer_errors
        assert len(errors) == 17
        for one in errors:
            # Errors average out over a layer's weights: the classifier has 1,280 of them, the others 16,384 and more.
            within = 1.5 if "classifier" in one.name else 0.6
            assert one.predicted_sqnr_db == pytest.approx(one.measured_sqnr_db, abs=within)


def test_quantization_options_are_those_of_the_catalogue(teacher: nn.Module, task: Task) -> None:
    use_language("en")
    with pytest.raises(LabError, match="unknown option of int8_static 'bit': did you mean 'bits'"):
        applied(teacher, task, "int8_static", bit=4)
    with pytest.raises(LabError, match="bits must be a whole number from 2 to 8, but 16 was received"):
        applied(teacher, task, "int8_weight_only", bits=16)
    with pytest.raises(LabError, match="unknown choice of a range 'mean'"):
        applied(teacher, task, "int8_weight_only", weight_range="mean")


@pytest.mark.parametrize(("language", "words"), [("en", "given 0 images"), ("fr", "reçu 0 image")])
def test_int8_static_refuses_calibration_without_data(
    teacher: nn.Module, task: Task, language: str, words: str
) -> None:
    use_language(language)
    with pytest.raises(LabError, match=words):
        applied(teacher, task, "int8_static", samples=0)


def test_qat_2bit_gives_the_same_integers_by_the_same_seed(teacher: nn.Module, task: Task) -> None:
    few = task.few(128)
    first, second = (applied(teacher, few, "qat_2bit", epochs=1) for _ in range(2))
    assert all(torch.equal(tensor, second.stored[name]) for name, tensor in first.stored.items())


def test_every_summary_is_written_in_both_languages() -> None:
    for method in METHODS.values():
        use_language("en")
        english = method.summary()
        use_language("fr")
        assert english and method.summary() and english != method.summary()


def test_quantization_note_says_of_the_products_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for language, kernel, without in (
        ("en", "the product is torch's integer kernel", "taken in float64, exact and slower"),
        ("fr", "le produit est le noyau entier de torch", "en float64, exacts mais plus lents"),
    ):
        use_language(language)
        for exact, words in ((True, kernel), (False, without)):
            monkeypatch.setattr(quantization, "kernel_is_exact", lambda exact=exact: exact)
            assert words in quantization._note("dynamic")
