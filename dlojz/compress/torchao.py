"""Quantization by libraries: torch's fast INT8 kernels, torchao's INT8, FP8 and INT4.

The model is the library's own; only the layers, what is stored and its bytes are decided here. The teacher is copied.
torchao is imported without the lines that it prints on a machine that it has no kernels for.

Source: torchao (https://github.com/pytorch/ao), `quantize_`; torch.ao.quantization, `quantize_dynamic`; Micikevicius et
al. 2022, "FP8 Formats for Deep Learning" (arXiv 2209.05433), for e4m3.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say
from dlojz.base.requirements import missing_library
from dlojz.compress.method import TORCHAO_VERSION
from dlojz.compress.quantizers import linear_layers

Form = Literal["int8_weight_only", "int8_dynamic", "fp8_weight_only", "int4_weight_only"]
FORMS: tuple[Form, ...] = get_args(Form)
INT4_GROUP = 32
"""Weights that share a scale in torchao's INT4."""
_INT4_ROWS = 16


_NOISE = {
    "torchao": ("Failed to load ",),  # GPU kernels, built for another machine
    "torchao.kernel.intmm": ("Warning: Detected no triton",),
    "torch.utils._pytree": ("<enum 'KernelPreference'> is an Enum subclass",),  # torchao's own business with torch
}


@contextmanager
def _without_noise() -> Iterator[None]:
    def silence(beginnings: tuple[str, ...]) -> logging.Filter:
        noise = logging.Filter()
        noise.filter = lambda record: not record.getMessage().startswith(beginnings)  # type: ignore[method-assign]
        return noise

    filters = {logging.getLogger(name): silence(beginnings) for name, beginnings in _NOISE.items()}
    for logger, noise in filters.items():
        logger.addFilter(noise)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        for logger, noise in filters.items():
            logger.removeFilter(noise)


def torchao_module(name: str = "quantization") -> Any:
    """Import a module of torchao, such as `quantization`.

    Raises:
        LabError: if torchao is not installed, or is another version, without this module.
    """
    try:
        with _without_noise():
            return importlib.import_module(f"torchao.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchao":
            # Another package, which torchao imports, is missing: its own error tells which.
            raise
        if error.name != "torchao":
            raise _other_version() from None  # torchao is here, but not this module
        requirement = f"torchao=={TORCHAO_VERSION}"
        raise LabError(missing_library(requirement, en="this method", fr="cette méthode")) from None


def _other_version() -> LabError:
    """Say which version of torchao is here, and which one is needed."""
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        version = say(en="without a version", fr="sans version")
    requirement = f"torchao=={TORCHAO_VERSION}"
    return refusal(
        en=f"torchao {version} is here, {TORCHAO_VERSION} is needed: pip install {requirement} replaces it.",
        fr=f"torchao {version} est ici, il faut {TORCHAO_VERSION} : pip install {requirement} le remplace.",
    )


def _configuration(form: Form) -> Any:
    try:
        return _chosen(form)
    except (AttributeError, TypeError) as error:  # a name or an argument that another version does not have
        raise _other_version() from error


def _chosen(form: Form) -> Any:
    quantization = torchao_module()
    if form == "int8_weight_only":
        return quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    if form == "int8_dynamic":
        return quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    if form == "fp8_weight_only":
        return quantization.Float8WeightOnlyConfig(set_inductor_config=False)
    # torchao's public INT4 wants a GPU (its mslk kernels, or CUDA); its prototype packs for torch's kernel for CPUs.
    prototype = torchao_module("prototype.quantization.int4.inference_workflow")
    return prototype.PrototypeInt4WeightOnlyConfig(group_size=INT4_GROUP, set_inductor_config=False)


def fits_int4(outputs: int, inputs: int) -> bool:
    """Tell whether the INT4 kernel for CPUs takes a layer: inputs in groups of 32, outputs by 16."""
    return outputs % _INT4_ROWS == 0 and inputs % INT4_GROUP == 0


class Narrow(nn.Module):
    """Wrapper of a bfloat16 model with float32 inputs and outputs.

    Args:
        model: already in bfloat16.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Call the model in bfloat16, and return float32."""
        answer: Tensor = self.model(x.to(torch.bfloat16))
        return answer.float()


def torchao_model(model: nn.Module, form: Form) -> nn.Module:
    """Copy a model with its linear layers quantized by torchao.

    INT4 weights are for bfloat16 inputs, for which torch's CPU kernel was written (in float32 it is dozens of times
    slower), so that the whole model becomes bfloat16; layers that the kernel does not take are left so.

    Raises:
        LabError: for another form, or if torchao is not installed or too different a version.
    """
    if form not in FORMS:
        raise LabError(one_of(say(en="form of torchao", fr="forme de torchao"), form, FORMS))
    configuration, quantize_ = _configuration(form), torchao_module().quantize_
    changed = copy.deepcopy(model).eval()
    if form == "int4_weight_only":
        changed = changed.to(torch.bfloat16)

    def chosen(module: nn.Module, _: str) -> bool:
        return isinstance(module, nn.Linear) and (form != "int4_weight_only" or fits_int4(*module.weight.shape))

    quantize_(changed, configuration, chosen)
    return Narrow(changed).eval() if form == "int4_weight_only" else changed


def parts(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Split a tensor of torchao into plain tensors; a plain one stays."""
    # torchao's tensor classes list the plain tensors that they are made of.
    names = [*getattr(tensor, "tensor_data_names", ()), *getattr(tensor, "optional_tensor_data_names", ())]
    if not names:
        yield name, tensor.detach().contiguous()
    for part in names:
        value = getattr(tensor, part)
        if value is not None:
            yield f"{name}.{part}", value.detach().contiguous()


def stored_torchao(model: nn.Module) -> dict[str, Tensor]:
    """List what a file keeps of a model quantized by torchao: integers, scales, zero points, and the rest."""
    return dict(part for name, tensor in model.state_dict().items() for part in parts(name, tensor))


def predicted_torchao_bytes(model: nn.Module, form: Form) -> int:
    """Predict the bytes of `stored_torchao` from shapes alone.

    Per layer of O outputs and I inputs: INT8 O·I + 4·O for scales + O for zero points (kept although they are 0); FP8
    O·I + 4·O; INT4 O·I/2 + 4·O·I/32 (a bfloat16 scale and zero point per group of 32). The rest is float32, bfloat16
    beside INT4.
    """
    layers = linear_layers(model)
    element_bytes = 2 if form == "int4_weight_only" else 4
    total = 0
    for name, tensor in model.state_dict().items():
        path, _, leaf = name.rpartition(".")
        if path not in layers or leaf != "weight":
            # INT4 makes every real number of the model bfloat16.
            total += tensor.numel() * (element_bytes if tensor.is_floating_point() else tensor.element_size())
            continue
        outputs, inputs = tensor.shape
        if form == "int4_weight_only":
            fits = fits_int4(outputs, inputs)
            total += outputs * inputs // 2 + 4 * outputs * inputs // INT4_GROUP if fits else 2 * outputs * inputs
        else:
            total += outputs * inputs + outputs * (4 if form == "fp8_weight_only" else 5)
    return total


def torch_dynamic_model(model: nn.Module) -> nn.Module:
    """Copy a model with its linear layers replaced by torch's dynamic INT8 ones, the fast kernels of a CPU.

    Weights are symmetric in 8 bits, one scale a layer; inputs are put, at every call, on one affine grid of 7 bits for
    the whole batch (so that sums of two products fit in 16 bits on older processors).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
        changed: nn.Module = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model).eval(), {nn.Linear})
    return changed


def stored_torch_dynamic(model: nn.Module) -> dict[str, Tensor]:
    """List what a file keeps of a dynamic INT8 model: integers, a scale for each layer, biases, the rest."""
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.ao.nn.quantized.dynamic.Linear):
            weight = module.weight()
            tensors[f"{name}.weight"] = weight.int_repr()
            tensors[f"{name}.scale"] = torch.tensor([weight.q_scale()], dtype=torch.float32)
            if module.bias() is not None:
                tensors[f"{name}.bias"] = module.bias().detach()
    tensors.update(
        (name, tensor.detach().contiguous())
        for name, tensor in model.state_dict().items()
        # What the packed layers add to the state dictionary is stored above, in plain form.
        if isinstance(tensor, Tensor)
        and not tensor.is_quantized
        and "_packed_params" not in name
        and not name.endswith((".scale", ".zero_point"))
    )
    return tensors
