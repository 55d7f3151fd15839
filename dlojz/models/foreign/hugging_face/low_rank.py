"""Low-rank adapters (LoRA) beside the frozen linear layers of a model of transformers, whose weights may be quantized.

W stays as it is, and y = W·x + B·A·x · α/r with A (r × in) and B (out × r) trained, as peft computes it, without
dropout: A and B stay in fp32 where the model is in 16 bits, and keep a copy of x in fp32 for the gradient of A. In 4
bits (QLoRA) W is NormalFloat in blocks of 64 numbers, each with the largest of its block as a scale; the scales are 8
bits themselves, in blocks of 256: 4.127 bits per weight. In 8 bits each row has one scale in fp32. Forward and backward
each make a copy of one layer's weights in the type of its input, and drop it.

Source: Hu et al. 2021, "LoRA" (arXiv 2106.09685), §4; Dettmers et al. 2023, "QLoRA" (arXiv 2305.14314), §3 and appendix
E for the 16 values; peft 0.21, `tuners/lora/layer.py`, `Linear.forward`, and `autocast_adapter_dtype`; Dettmers et al.
2022, "LLM.int8()" (arXiv 2208.07339), §2, for rows of 8 bits (there inputs are 8 bits too, but for outliers);
bitsandbytes, `autograd/_functions.py`, `MatMul4Bit`, for the copy that is not kept.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import refusal
from dlojz.models.foreign.elsewhere import Adapters

ALPHA = 16
"""Numerator of the factor α/r; it changes no byte."""
BLOCK, SCALES_BLOCK = 64, 256
CHUNK = 2**16
"""Numbers that are dequantized at once, so that what is needed beside them stays small."""
NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, scaled to [-1, 1]: what the 16 codes stand for."""
USUAL = (
    *(("q_proj", "v_proj"), ("query_key_value",), ("qkv_proj",), ("Wqkv",), ("c_attn",)),
    *(("query", "value"), ("q", "v"), ("q_lin", "v_lin")),
)
"""Queries and values of attention, as transformers' architectures name them; the first that a model has get adapters.
"""


def adapt(model: Any, adapters: Adapters) -> None:
    """Freeze a model of transformers, quantize its linear layers but the head, and put adapters beside some of them.

    A head of classes, of labels or of answers is new, and trained too.

    Raises:
        LabError: it has no linear layer of these names.
    """
    head, body = model.get_output_embeddings(), f"{model.base_model_prefix}."
    has_new_head = head is None and hasattr(model, model.base_model_prefix)
    layers = {
        path: part
        for path, part in model.named_modules()
        if _is_linear(part) and part is not head and (path.startswith(body) or not has_new_head)
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(has_new_head and not name.startswith(body))
    targets = _targets(type(model).__name__, layers, adapters.targets)
    for path, layer in layers.items():
        if adapters.base == "none" and path not in targets:
            continue
        base = layer if adapters.base == "none" else QuantizedBase(layer, adapters.base)
        model.set_submodule(path, LowRank(base, *_sides(layer), adapters.rank) if path in targets else base)


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"  # GPT-2's: its weight is (in, out)


def _sides(layer: nn.Module) -> tuple[int, int]:
    """Numbers of inputs and outputs of a linear layer."""
    weight: Any = layer.weight
    rows, columns = weight.shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)


def _targets(title: str, layers: dict[str, nn.Module], names: tuple[str, ...]) -> set[str]:
    """Find the paths whose ends are such names; by default those of queries and values."""
    ends = {path.rpartition(".")[2]: None for path in layers}
    if names == ("all-linear",):
        return set(layers)
    names = names or next((usual for usual in USUAL if ends.keys() >= set(usual)), ())
    missing = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in layers)]
    if missing or not names:
        known, received = ", ".join(ends), ", ".join(map(repr, missing)) or "lora_targets=''"
        raise refusal(
            en=f"{title} has linear layers named {known}, but {received} was received: name some of them, as in "
            f"--lora-targets {next(iter(ends), 'NAME')}, or all-linear.",
            fr=f"les couches linéaires de {title} s’appellent {known}, mais {received} a été reçu : nommez-en, par "
            f"exemple --lora-targets {next(iter(ends), 'NOM')}, ou all-linear.",
        )
    return {path for path in layers if any(f".{path}".endswith(f".{name}") for name in names)}


class LowRank(nn.Module):
    """Frozen linear layer with two trained matrices beside it; modules are named as in peft."""

    def __init__(self, base_layer: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)  # training begins with the model as it is
        self.scaling = ALPHA / rank

    def forward(self, x: Tensor) -> Tensor:
        """``(…, in)`` to ``(…, out)``."""
        y: Tensor = self.base_layer(x)
        adapted = y + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scaling
        return adapted.to(y.dtype)


class QuantizedBase(nn.Module):
    """Linear layer whose frozen weight is codes of 4 or 8 bits; it is computed with a copy in the type of its input.

    All of it is bytes, constants in fp32 too, so that what casts a model leaves them as they are.
    """

    def __init__(self, layer: nn.Module, base: Literal["8bit", "4bit"]) -> None:
        super().__init__()
        weight: Any = layer.weight
        # (out, in), also of GPT-2's layers.
        matrix = weight.detach() if isinstance(layer, nn.Linear) else weight.detach().t()
        self.shape, self.bits = tuple(matrix.shape), 4 if base == "4bit" else 8
        quantized = _normal_float(matrix) if self.bits == 4 else _rows_of_8_bits(matrix)
        names = ("codes", "scales", "constants")
        for name, tensor in zip(names, quantized, strict=True):
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", getattr(layer, "bias", None))

    def forward(self, x: Tensor) -> Tensor:
        """``(…, in)`` to ``(…, out)``."""
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        quantized = (self.codes, self.scales, self.constants)
        product: Tensor = _DequantizedProduct.apply(x, bias, *quantized, *self.shape)
        return product


class _DequantizedProduct(torch.autograd.Function):
    """Product with dequantized weights, which backward makes once more instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *quantized: Any) -> Tensor:
        ctx.save_for_backward(*quantized[:3])
        ctx.sides = quantized[3:]
        return F.linear(x, dequantize(*quantized, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad,) = gradients
        weight = dequantize(*ctx.saved_tensors, *ctx.sides, grad.dtype)  # (out, in)
        return grad @ weight, *[None] * 6


@torch.library.custom_op("dlojz::dequantize", mutates_args=())
def dequantize(
    codes: Tensor, scales: Tensor | None, constants: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Dequantize a weight: one operator, as the GPU's kernel is one, so that only its result is seen.

    Args:
        codes: two codes of 4 bits in a byte, or bytes of 8 bits.
        scales: 8 bits per block of codes; None for rows of 8 bits.
        constants: fp32 as bytes: the mean of the scales and one factor for each of their blocks; or one for each row.

    Returns:
        ``(rows, columns)``.
    """
    factors = constants.view(torch.float32)
    weight = torch.empty(rows * columns, dtype=dtype, device=codes.device)
    if scales is None:
        signed, step = codes.view(torch.int8).view(rows, columns), max(1, CHUNK // columns)
        for row in range(0, rows, step):
            chunk = slice(row, row + step)
            weight.view(rows, columns)[chunk] = signed[chunk] * factors[chunk, None]
        return weight.view(rows, columns)
    values = torch.tensor(NORMAL_FLOAT, device=codes.device)
    block_scales = scales.view(torch.int8).float() * factors[1:].repeat_interleave(SCALES_BLOCK)[: len(scales)]
    block_scales += factors[0]
    for start in range(0, len(weight), CHUNK):
        pairs = codes[start // 2 : (start + CHUNK) // 2]
        numbers = values[torch.stack((pairs >> 4, pairs & 15), 1).flatten().int()]
        of_blocks = block_scales[start // BLOCK : -(-(start + CHUNK) // BLOCK)].repeat_interleave(BLOCK)
        end = min(start + CHUNK, len(weight))
        weight[start:end] = (numbers * of_blocks)[: end - start]
    return weight.view(rows, columns)


@dequantize.register_fake
def _(codes: Tensor, scales: Tensor | None, constants: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


def _normal_float(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and constants of a weight in 4 bits; its last block is padded."""
    blocks = -(-matrix.numel() // BLOCK)
    groups = -(-blocks // SCALES_BLOCK)
    if matrix.is_meta:
        codes, scales, constants = _bytes_on_meta(blocks * BLOCK // 2, blocks, 4 * (1 + groups))
        return codes, scales, constants
    numbers = F.pad(matrix.flatten().float(), (0, blocks * BLOCK - matrix.numel())).view(blocks, BLOCK)
    largest = numbers.abs().amax(1)
    mean = largest.mean()
    centred = F.pad(largest - mean, (0, groups * SCALES_BLOCK - blocks)).view(groups, SCALES_BLOCK)
    factors = centred.abs().amax(1).clamp(min=1e-12) / 127
    scales = (centred / factors[:, None]).round().to(torch.int8).flatten()[:blocks].clone()  # without the padding
    values = torch.tensor(NORMAL_FLOAT)
    scaled = numbers / largest.clamp(min=1e-12)[:, None]
    codes = torch.bucketize(scaled.flatten(), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    constants = torch.cat((mean[None], factors))
    return codes[::2] << 4 | codes[1::2], scales.view(torch.uint8), constants.view(torch.uint8)


def _rows_of_8_bits(matrix: Tensor) -> tuple[Tensor, None, Tensor]:
    """Codes, no scales, and one constant for each row of a weight in 8 bits."""
    if matrix.is_meta:
        codes, constants = _bytes_on_meta(matrix.numel(), 4 * len(matrix))
        return codes, None, constants
    factors = matrix.float().abs().amax(1).clamp(min=1e-12) / 127
    codes = (matrix / factors[:, None]).round().to(torch.int8).flatten()
    return codes.view(torch.uint8), None, factors.view(torch.uint8)


def _bytes_on_meta(*sizes: int) -> list[Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
