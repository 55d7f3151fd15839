"""Workloads of the catalogue's models: decoders by their size, image models block by block from the meta device.

Layer 3. Invariant: an image model's operators are read off its own forward, with shapes and without memory; a
convolution is the product that it comes to. Blocks that follow each other and do the same are one kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlojz import models
from dlojz.evidence import DecoderSize
from dlojz.models.sizes import GPTSize, LlamaSize
from dlojz.predict.time.operators import Operator, Product, product_operator
from dlojz.predict.time.workload import Cut, Kind, Workload, decoder_workload

if TYPE_CHECKING:
    from torch import Tensor, nn

PASS_BACKWARD: Final = 2.0
"""Bytes of the backward of what is no product, over those of its forward: it reads gradient and input, and writes."""
_VIEWS: Final = ("view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "reshape")


class Traced(NamedTuple):
    """One operation of one sample's forward.

    Attributes:
        product: as which it is computed; None for a pass over memory.
        per_sample: whether the batch multiplies the product's `batch` and not its rows.
        num_bytes: read and written, in 16 bit; 0 for a product.
    """

    product: Product | None
    per_sample: bool
    num_bytes: float


class Block(NamedTuple):
    """A block of a model, for one sample.

    Attributes:
        name: of its class.
        parameters: of it.
        elements: of what it hands on.
        traced: its operations in order.
    """

    name: str
    parameters: int
    elements: int
    traced: tuple[Traced, ...]


def catalogue_workload(model: str, image_size: int | None = None, sequence_length: int | None = None) -> Workload:
    """What a model of the catalogue computes.

    Args:
        model: its name.
        image_size: pixels of a side; by default the catalogue's.
        sequence_length: tokens; by default the catalogue's.

    Raises:
        LabError: if there is no such model, or the size does not fit it.
    """
    spec = models.spec(model)
    models.check_input(model, image_size=image_size, sequence_length=sequence_length)
    size = spec.size
    if isinstance(size, GPTSize | LlamaSize):
        tokens = sequence_length or spec.sequence_length or 1
        return decoder_workload(_decoder_size(size, spec.num_classes, tokens))
    return _image_workload(model, image_size or spec.image_size or 1, spec.num_classes)


def _decoder_size(size: GPTSize | LlamaSize, vocabulary: int, tokens: int) -> DecoderSize:
    common: dict[str, Any] = {
        "layers": size.depth,
        "hidden": size.width,
        "heads": size.num_heads,
        "vocabulary": vocabulary,
    }
    if size.experts is not None:
        common |= {"experts": size.experts.num_experts, "top_k": size.experts.top_k, "every": size.experts.every}
        common["capacity_factor"] = size.experts.capacity_factor
    if isinstance(size, GPTSize):
        return DecoderSize(**common, sequence_length=tokens, tied=False)
    return DecoderSize(
        **common,
        sequence_length=tokens,
        mlp_width=size.mlp_width,
        kv_heads=size.num_kv_heads,
        gated=True,
        tied=False,
        biased=False,
        positions="none",
    )


@lru_cache(maxsize=32)
def _image_workload(model: str, image_size: int, num_classes: int) -> Workload:
    kinds: list[Kind] = []
    former: Block | None = None
    for block in traced_blocks(model, image_size, num_classes):
        if former is not None and former == block:
            kinds[-1] = kinds[-1].repeated()
            continue
        former = block
        has_attention = any(one.per_sample for one in block.traced)
        name = f"{len(kinds)} {block.name}"
        sums = (2, 2) if has_attention else (1, 1)
        kinds.append(Kind(name, 1, block.parameters, _operators(block), block.elements, sums))
    return Workload(f"{model}-{image_size}", tuple(kinds))


def _operators(block: Block) -> Callable[[Cut], tuple[Operator, ...]]:
    @lru_cache(maxsize=256)
    def of(cut: Cut) -> tuple[Operator, ...]:
        return tuple(_operator(one, cut) for one in block.traced)

    return of


def _operator(one: Traced, cut: Cut) -> Operator:
    """An operation for a micro-batch; tensor-parallel ranks share heads, columns and elements out."""
    if one.product is None:
        moved = one.num_bytes * cut.micro_batch / cut.tp
        return Operator("pass", forward_bytes=moved, backward_bytes=PASS_BACKWARD * moved)
    product = one.product
    if one.per_sample:
        batch = math.ceil(product.batch / cut.tp) * cut.micro_batch
        return product_operator("attention", product._replace(batch=batch), core=True)
    shared = product._replace(m=product.m * cut.micro_batch, n=math.ceil(product.n / cut.tp))
    return product_operator("product", shared)


@lru_cache(maxsize=32)
def traced_blocks(model: str, image_size: int, num_classes: int) -> tuple[Block, ...]:
    """The blocks of an image model with the operations of one sample's forward, in order."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from dlojz.predict.shapes import build_on_meta

    built = build_on_meta(model, image_size, None, num_classes).eval()
    x = torch.empty(1, 3, image_size, image_size, device="meta")
    found = []
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for block in _children(built):
            recorder = _recorder()
            with recorder:
                x = block(x)
            parameters = sum(one.numel() for one in block.parameters())
            found.append(Block(type(block).__name__, parameters, x.numel(), tuple(recorder.traced)))
    return tuple(found)


def _children(built: nn.Module) -> Iterator[Any]:
    blocks: Any = built.blocks
    yield from blocks


def _recorder() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        """Notes every operation on tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.traced: list[Traced] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            traced = traced_operation(func.overloadpacket.__name__, args, result)
            if traced is not None:
                self.traced.append(traced)
            return result

    return Recorder()


def traced_operation(name: str, args: Any, result: Any) -> Traced | None:
    """What one operator of PyTorch comes to; None for a view, which does nothing.

    Args:
        name: of the operator, e.g. `addmm`.
        args: positional.
        result: what it gave.
    """
    tensors = [one for one in _flat(args) if _is_tensor(one)]
    if name in ("mm", "addmm"):
        left, right = tensors[-2:]
        return Traced(Product(left.shape[0], right.shape[1], left.shape[1]), False, 0.0)
    if name in ("bmm", "baddbmm"):
        left, right = tensors[-2:]
        batch, rows, inner = left.shape
        return Traced(Product(rows, right.shape[2], inner, batch, attention=True), True, 0.0)
    if name == "convolution":
        weight, groups = tensors[1], int(args[8])
        outputs = result.shape[0] * math.prod(result.shape[2:])
        inner = math.prod(weight.shape[1:])
        if groups == weight.shape[0]:  # one filter per channel: bound by the bytes, not by the products
            return Traced(None, False, 2.0 * (tensors[0].numel() + result.numel()))
        return Traced(Product(outputs, weight.shape[0] // groups, inner, groups), False, 0.0)
    if name.lstrip("_").startswith(_VIEWS) or name in ("detach", "alias", "unsafe_view", "_unsafe_view"):
        return None
    written = [one for one in _flat((result,)) if _is_tensor(one)]
    return Traced(None, False, 2.0 * sum(one.numel() for one in (*tensors, *written)))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _is_tensor(value: Tensor | object) -> bool:
    return hasattr(value, "numel") and hasattr(value, "shape")
