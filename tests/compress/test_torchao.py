"""Our integers, scales and answers beside torchao's and torch's: equal to the last bit, or why not."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import torchao
from dlojz.compress.quantized_model import (
    Activations,
    QuantizedLinear,
    integer_product,
    kernel_is_exact,
    predicted_quantized_bytes,
    quantize_model,
)
from dlojz.compress.quantizers import Scheme, parameters_from_range, quantize, weight_grid
from dlojz.compress.task import payload_bytes
from dlojz.compress.torchao import (
    FORMS,
    Form,
    fits_int4,
    predicted_torchao_bytes,
    stored_torch_dynamic,
    stored_torchao,
    torch_dynamic_model,
    torchao_model,
    torchao_module,
)

SHAPES = ((384, 128), (97, 33), (10, 128))


def linear(shape: tuple[int, int], bias: bool = True) -> nn.Linear:
    torch.manual_seed(shape[0])
    return nn.Linear(shape[1], shape[0], bias=bias)


def rows(width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 17, width, generator=torch.Generator().manual_seed(seed))


def vit() -> nn.Module:
    torch.manual_seed(0)
    return models.build("vit_tiny", image_size=16, num_classes=10).eval()


def exact_products_only() -> None:
    """torchao's layer takes torch's kernel whatever it does: where that saturates, its answers are no reference."""
    if torchao_module("utils").should_reduce_range(torch.device("cpu")) or not kernel_is_exact():
        pytest.skip("torchao's products of integers saturate here: no VNNI, or it is not to be used")


def quantized(own: nn.Linear, configuration: Any) -> nn.Module:
    model = nn.Sequential(copy.deepcopy(own))
    torchao_module().quantize_(model, configuration)
    return model


def configuration(activations: Activations, per_channel: bool) -> Any:
    quantization = torchao_module()
    weights = quantization.PerRow() if per_channel else quantization.PerTensor()
    if activations == "float":
        return quantization.Int8WeightOnlyConfig(granularity=weights, set_inductor_config=False)
    return quantization.Int8DynamicActivationInt8WeightConfig(
        granularity=[quantization.PerRow(), weights], set_inductor_config=False
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activations", ["float", "dynamic"])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_integers_scales_and_answers_are_torchaos_to_the_last_bit(
    shape: tuple[int, int], activations: Activations, per_channel: bool, bias: bool
) -> None:
    own = linear(shape, bias)
    theirs = quantized(own, configuration(activations, per_channel))
    ours = QuantizedLinear(own, Scheme(8, True, per_channel), activations=activations)
    weight: Any = theirs[0].weight  # type: ignore[index]
    assert torch.equal(weight.qdata, ours.integers_OI)
    assert torch.equal(weight.scale.flatten(), ours.scale_O1.flatten())
    assert not weight.zero_point.any()
    if activations != "float":
        exact_products_only()
    with torch.no_grad():
        assert torch.equal(theirs(rows(shape[1])), ours(rows(shape[1])))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("per_channel", [True, False])
def test_an_affine_grid_of_weights_is_torchaos_to_the_last_bit(shape: tuple[int, int], per_channel: bool) -> None:
    """By its primitives: its layers have symmetric weights only."""
    kinds = torchao_module("quantization.quant_primitives")
    weight, scheme = linear(shape).weight.detach(), Scheme(8, False, per_channel)
    block = [1, shape[1]] if per_channel else list(shape)
    scale, zero = kinds.choose_qparams_affine(
        weight, kinds.MappingType.ASYMMETRIC, block, torch.int8, -128, 127, eps=torch.finfo(torch.float32).eps,
        scale_dtype=torch.float32, zero_point_dtype=torch.int32, keepdim=True,
    )  # fmt: skip
    ours = weight_grid(weight, scheme)
    assert torch.equal(ours[0], scale) and torch.equal(ours[1], zero)
    integers = kinds.quantize_affine(weight, block, scale, zero, torch.int8, -128, 127)
    assert torch.equal(quantize(weight, *ours, scheme), integers)


@pytest.mark.parametrize("form", ["int8_weight_only", "int8_dynamic"])
def test_a_whole_model_answers_as_torchaos_to_the_last_bit(form: Form) -> None:
    model = vit()
    if form == "int8_dynamic":
        exact_products_only()
    ours = quantize_model(model, Scheme(), activations="dynamic" if form == "int8_dynamic" else "float")
    x = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(torchao_model(model, form)(x), ours(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_static_inputs_are_torchaos_integers_and_its_answers_come_from_them_in_another_order(
    shape: tuple[int, int],
) -> None:
    """torchao subtracts the zero point's share in float32 after the product, we in integers before.

    The integers are equal; taken in its order they give its answers to the last bit, and in ours answers that are
    close: a few roundings apart.
    """
    own, x = linear(shape), rows(shape[1]).reshape(-1, shape[1]) + 0.5
    quantization, kinds = torchao_module(), torchao_module("quantization.quant_primitives")
    allowed = (x.min().reshape(1, 1), x.max().reshape(1, 1))
    ours = QuantizedLinear(own, Scheme(), activations="static", activation_range=allowed)
    integers, scale, zero = ours.quantized_inputs(x)
    expected = kinds.quantize_affine(x, list(x.shape), scale, zero, torch.int8, -128, 127)
    assert torch.equal(integers, expected) and int(zero) != 0
    exact_products_only()
    theirs = quantized(
        own,
        quantization.Int8StaticActivationInt8WeightConfig(
            act_quant_scale=scale,
            act_quant_zero_point=zero.to(torch.int8),
            granularity=[quantization.PerTensor(), quantization.PerRow()],
            act_mapping_type=kinds.MappingType.ASYMMETRIC,
            set_inductor_config=False,
        ),
    )
    share = (zero.float() * scale) * ours.integers_OI.sum(1).float()
    with torch.no_grad():
        in_their_order = (integer_product(integers, ours.integers_OI) * scale - share) * ours.scale_O1.flatten()
        answers = theirs(x)
        assert torch.equal(answers, in_their_order + own.bias)
        assert float((answers - ours(x)).abs().max()) <= 2e-6 * float(answers.abs().max())


def test_fp8_is_a_scale_per_output_and_torchs_own_rounding() -> None:
    own = linear((384, 128))
    weight: Any = torchao_model(nn.Sequential(own), "fp8_weight_only")[0].weight  # type: ignore[index]
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = own.weight.detach().abs().amax(1, keepdim=True) / largest
    integers = (own.weight.detach() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
    assert torch.equal(weight.scale, scale)
    assert torch.equal(weight.qdata.view(torch.int8), integers.view(torch.int8))


def test_torchao_model_in_int4_runs_here_and_leaves_what_its_kernel_refuses() -> None:
    model = torchao_model(vit(), "int4_weight_only")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kinds = {name: type(model.get_submodule(name).weight).__name__ for name in names}
    assert {name for name, kind in kinds.items() if kind == "Parameter"} == {name for name in names if "class" in name}
    assert not fits_int4(10, 128) and not fits_int4(32, 40) and fits_int4(16, 32)
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        answer, teacher = model(x), vit()(x)
    assert answer.dtype == torch.float32
    assert float((answer - teacher).square().mean()) < 0.1 * float(teacher.square().mean())


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_of_torchao_are_those_that_were_foreseen(form: Form) -> None:
    model = vit()
    assert payload_bytes(stored_torchao(torchao_model(model, form))) == predicted_torchao_bytes(model, form)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization")
def test_torchs_dynamic_layer_is_seven_bits_for_the_whole_batch() -> None:
    own, x = linear((384, 128)), rows(128).reshape(-1, 128)
    model = torch_dynamic_model(nn.Sequential(own))
    weight = model[0].weight()  # type: ignore[index, operator]
    scheme = Scheme(8, True, per_channel=False)
    scale, _ = weight_grid(own.weight, scheme)
    assert float(scale) == pytest.approx(weight.q_scale(), rel=1e-6)
    ours = quantize(own.weight.detach(), torch.tensor(weight.q_scale()), torch.tensor(0), scheme)
    assert torch.equal(ours, weight.int_repr())
    grid = Scheme(7, False, per_channel=False)
    step, origin = parameters_from_range(x.min(), x.max(), grid)
    integers = quantize(x, step, origin, grid).to(torch.int32)
    sums = (integers - origin) @ ours.to(torch.int32).t()
    expected = sums.float() * (step * scale) + own.bias.detach()
    # Its kernel multiplies by a product of scales rounded in another order; 8 bits would be 0.05 off.
    torch.testing.assert_close(model(x), expected, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization")
def test_the_bytes_of_torchs_dynamic_model_are_those_that_were_foreseen() -> None:
    model = vit()
    kept = stored_torch_dynamic(torch_dynamic_model(model))
    assert payload_bytes(kept) == predicted_quantized_bytes(model, Scheme(8, True, per_channel=False))


def test_torchao_model_refuses_an_unknown_form() -> None:
    use_language("en")
    with pytest.raises(LabError, match="did you mean 'int4_weight_only'"):
        torchao_model(vit(), "int4_weights_only")  # type: ignore[arg-type]


def test_without_torchao_a_sentence_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="torchao")

    monkeypatch.setattr(torchao.importlib, "import_module", missing)
    for language in ("en", "fr"):
        use_language(language)
        with pytest.raises(LabError, match=r"pip install 'dlojz\[compress\]'"):
            torchao_module()


@pytest.mark.parametrize(("language", "words"), [("en", "is here, .* is needed"), ("fr", "est ici, il faut")])
def test_another_version_of_torchao_is_not_said_to_be_missing(
    language: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_language(language)
    monkeypatch.setattr(torchao.importlib.metadata, "version", lambda name: "0.9.1")
    for name in ("prototype.no_such_module", "no_such_module"):
        with pytest.raises(LabError, match=f"torchao 0.9.1 {words}"):
            torchao_module(name)
    monkeypatch.setattr(torchao, "torchao_module", lambda *_: object())
    with pytest.raises(LabError, match=f"torchao 0.9.1 {words}"):
        torchao_model(vit(), "int8_weight_only")


def test_what_torchao_itself_cannot_find_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'something'", name="something")

    monkeypatch.setattr(torchao.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="something"):
        torchao_module()


def test_torchao_module_prints_nothing_and_silences_nothing_else() -> None:
    code = (
        "import logging; from dlojz.compress.torchao import torchao_module; torchao_module();"
        "logging.getLogger('torchao').warning('something else');"
        "print([len(logging.getLogger(name).filters) for name in ('torchao', 'torch.utils._pytree')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[0,", "0]"]
    assert done.stderr.strip() == "something else"


def test_the_version_is_the_one_that_is_required() -> None:
    required = Path(torchao.__file__).parents[2] / "constraints.txt"
    assert f"torchao=={torchao.TORCHAO_VERSION}" in required.read_text(encoding="utf-8").splitlines()
