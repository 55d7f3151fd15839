"""Our integers, scales and answers beside torchao's and torch's: equal to the last bit, or why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlojz import models
from dlojz.compress import torchao_import
from dlojz.compress.int8_linear import QuantizedLinear
from dlojz.compress.measuring import payload_bytes
from dlojz.compress.quantized_model import predicted_quantized_bytes, quantize_model
from dlojz.compress.quantizers import Scheme, parameters_from_range, quantize, weight_grid
from dlojz.compress.torchao_import import torchao_module
from dlojz.compress.torchao_quantization import (
    FORMS,
    Form,
    fits_int4,
    predicted_torchao_bytes,
    stored_torch_dynamic,
    stored_torchao,
    torch_dynamic_model,
    torchao_model,
)
from dlojz.schema import LabError
from dlojz.text import use_language

SHAPES = ((384, 128), (97, 33), (10, 128))


def linear(shape: tuple[int, int], bias: bool = True) -> nn.Linear:
    torch.manual_seed(shape[0])
    return nn.Linear(shape[1], shape[0], bias=bias)


def rows(width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 17, width, generator=torch.Generator().manual_seed(seed))


def vit() -> nn.Module:
    torch.manual_seed(0)
    return models.build("vit_tiny", image_size=16, num_classes=10).eval()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["int8_weight_only", "int8_dynamic"])
@pytest.mark.parametrize("bias", [True, False])
def test_integers_scales_and_answers_are_torchaos_to_the_last_bit(
    shape: tuple[int, int], form: Form, bias: bool
) -> None:
    own = linear(shape, bias)
    theirs = torchao_model(nn.Sequential(own), form)
    ours = QuantizedLinear(own, Scheme(), activations="dynamic" if form == "int8_dynamic" else "float")
    weight: Any = theirs[0].weight  # type: ignore[index]
    assert torch.equal(weight.qdata, ours.integers_OI)
    assert torch.equal(weight.scale, ours.scale_O1)
    assert not weight.zero_point.any()
    with torch.no_grad():
        assert torch.equal(theirs(rows(shape[1])), ours(rows(shape[1])))


@pytest.mark.parametrize("form", ["int8_weight_only", "int8_dynamic"])
def test_a_whole_model_answers_as_torchaos_to_the_last_bit(form: Form) -> None:
    model = vit()
    ours = quantize_model(model, Scheme(), activations="dynamic" if form == "int8_dynamic" else "float")
    x = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(torchao_model(model, form)(x), ours(x))


def test_affine_inputs_differ_from_torchaos_by_a_rounding_and_why() -> None:
    """torchao subtracts the zero points' share in float32 after the product, we in integers before: one rounding."""
    own, x = linear((384, 128)), rows(128) + 0.5
    quantization = torchao_module()
    kinds = torchao_module("quantization.quant_primitives")
    theirs = nn.Sequential(nn.Linear(128, 384))
    theirs[0].load_state_dict(own.state_dict())
    configuration = quantization.Int8DynamicActivationInt8WeightConfig(
        act_mapping_type=kinds.MappingType.ASYMMETRIC,
        granularity=[quantization.PerTensor(), quantization.PerRow()],
        set_inductor_config=False,
    )
    quantization.quantize_(theirs, configuration)
    ours = QuantizedLinear(
        own, Scheme(), activations="static", activation_range=(x.min().reshape(1, 1), x.max().reshape(1, 1))
    )
    with torch.no_grad():
        difference = (theirs(x) - ours(x)).abs().max()
        assert float(difference) <= 2e-6 * float(ours(x).abs().max())


def test_fp8_is_a_scale_per_output_and_torchs_own_rounding() -> None:
    own = linear((384, 128))
    weight: Any = torchao_model(nn.Sequential(own), "fp8_weight_only")[0].weight  # type: ignore[index]
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = own.weight.detach().abs().amax(1, keepdim=True) / largest
    integers = (own.weight.detach() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
    assert torch.equal(weight.scale, scale)
    assert torch.equal(weight.qdata.view(torch.int8), integers.view(torch.int8))


def test_int4_runs_on_this_processor_and_leaves_what_its_kernel_does_not_take() -> None:
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


def test_an_unknown_form_is_refused() -> None:
    use_language("en")
    with pytest.raises(LabError, match="did you mean 'int4_weight_only'"):
        torchao_model(vit(), "int4_weights_only")  # type: ignore[arg-type]


def test_without_torchao_a_sentence_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="torchao")

    monkeypatch.setattr(torchao_import.importlib, "import_module", missing)
    for language in ("en", "fr"):
        use_language(language)  # type: ignore[arg-type]
        with pytest.raises(LabError, match="pip install torchao=="):
            torchao_module()


def test_what_torchao_itself_cannot_find_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'something'", name="something")

    monkeypatch.setattr(torchao_import.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="something"):
        torchao_module()


def test_importing_torchao_prints_nothing_and_silences_nothing_else() -> None:
    code = (
        "import logging; from dlojz.compress.torchao_import import torchao_module; torchao_module();"
        "logging.getLogger('torchao').warning('something else');"
        "print([len(logging.getLogger(name).filters) for name in ('torchao', 'torch.utils._pytree')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[0,", "0]"]
    assert done.stderr.strip() == "something else"


def test_the_version_is_the_one_that_is_required() -> None:
    required = Path(torchao_import.__file__).parents[2] / "requirements.txt"
    assert f"torchao=={torchao_import.VERSION}" in required.read_text(encoding="utf-8").splitlines()
