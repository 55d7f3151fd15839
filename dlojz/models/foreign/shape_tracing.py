"""Trace a forward pass that asks for shapes: each value is computed on the meta device too, so that `if` is decided.

`torch.fx` alone stops where a forward pass branches on a shape, as transformers' masks do. What depends on the input
only by its shape (positions, masks, rotary embeddings) is marked: each block of a chain computes it from its own input.
"""

import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dlojz.models.foreign.hugging_face.task_modules import without_values

_SHAPES = ("shape", "device", "dtype", "ndim", "is_meta")
_SHAPE_METHODS = ("size", "dim", "numel", "new_zeros", "new_ones", "new_full", "new_empty")
_LIKE = (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)
_MAKERS = ("zeros", "ones", "empty", "full")
_MASKS = "create_"
"""How transformers' functions that make a mask begin; of hidden states they read only the shape and the dtype."""


class ShapeTracer(Tracer):
    """Tracer that knows the value of each node on the meta device.

    Args:
        parts: Paths of the repeated parts; what encloses none of them is one call.
        sample: Input on the meta device.

    Attributes:
        values: Of the nodes, on the meta device.
        by_shape: Nodes that depend on the input only by shapes.
    """

    proxy_buffer_attributes = True

    def __init__(self, parts: Sequence[str], sample: Tensor) -> None:
        super().__init__()
        self._parts, self._sample = parts, sample
        self._computing = False
        self.values: dict[Node, Any] = {}
        self.by_shape: set[Node] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module is called as it is: where it encloses no part."""
        return not any(part.startswith(f"{module_qualified_name}.") for part in self._parts)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module, or note its call; within a computation on the meta device nothing is noted."""
        return forward(*args, **kwargs) if self._computing else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Read an attribute of a module, or note that it is read."""
        return attr_val if self._computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: Proxy) -> bool:
        """Decide a branch by the value on the meta device; one by the values of data raises `TraceError`."""
        value = self.values.get(obj.node)
        return super().to_bool(obj) if isinstance(value, Tensor) else bool(value)

    def iter(self, obj: Proxy) -> Iterator[Any]:
        """Unpack a tuple, a list or a shape."""
        value = self.values.get(obj.node)
        if isinstance(value, tuple | list):
            parts: Any = obj  # a proxy's items are proxies
            return iter([parts[number] for number in range(len(value))])
        return super().iter(obj)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *extra_args: Any, **options: Any) -> Any:
        """Note a node and compute its value; what is a truth, a word, a dtype or nothing is returned as it is."""
        proxy = super().create_proxy(kind, target, args, kwargs, *extra_args, **options)
        node = proxy.node
        if kind != "output":
            value = self.values[node] = self._value(node)
            if self._reads_shapes(node, value):
                self.by_shape.add(node)
            if target is not getattr and (value is None or isinstance(value, bool | str | torch.dtype)):
                return value
        return proxy

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._sample
        args: Any = map_arg(node.args, lambda argument: self.values[argument])
        kwargs: Any = map_arg(node.kwargs, lambda argument: self.values[argument])
        self._computing = True
        try:
            with torch.enable_grad(), torch.device("meta"):
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                if node.op == "call_function":
                    assert callable(node.target)
                    return node.target(*args, **kwargs)
                attribute = operator.attrgetter(str(node.target))(self.root)
                return attribute(*args, **kwargs) if node.op == "call_module" else attribute
        finally:
            self._computing = False

    def _reads_shapes(self, node: Node, value: Any) -> bool:
        """Tell whether a node depends on the input, and only by shapes."""
        if node.op in ("placeholder", "get_attr") or node.target in self._parts:
            return False
        # Inputs that carry the data itself, neither shapes nor weights.
        data = [source for source in node.all_input_nodes if source not in self.by_shape and source.op != "get_attr"]
        if not data:
            return bool(node.all_input_nodes)
        if node.op == "call_method" or node.target is getattr:
            return node.target in _SHAPE_METHODS or (node.target is getattr and node.args[1] in _SHAPES)
        if node.target in _LIKE:
            return True
        # Rotary embeddings and masks read hidden states for their shape: no gradient reaches what they give.
        floats = all(isinstance(self.values[source], Tensor) and self.values[source].requires_grad for source in data)
        leaf = node.op == "call_module" or getattr(node.target, "is_mask", False)
        return (
            leaf
            and floats
            and not any(tensor.requires_grad for tensor in tree_leaves(value) if isinstance(tensor, Tensor))
        )


def trace_shapes(module: nn.Module, parts: Sequence[str], sample: Tensor) -> tuple[Graph, ShapeTracer]:
    """Trace the forward pass of a module on the meta device around its parts, for inputs of a sample's shape.

    Raises:
        Exception: whatever the forward pass raises where it branches on the values of its data.
    """
    tracer = ShapeTracer(parts, sample)
    with torch.random.fork_rng(devices=[]), _masks_as_calls(module, tracer):
        return tracer.trace(module), tracer


@contextmanager
def _masks_as_calls(module: nn.Module, tracer: ShapeTracer) -> Iterator[None]:
    """Note each call of a function of transformers that makes a mask as one node."""
    masks = importlib.import_module("transformers.masking_utils")
    makers: dict[str, Any] = {
        name: maker for name, maker in vars(masks).items() if name.startswith(_MASKS) and callable(maker)
    }
    rooms = {type(part).__module__ for part in module.modules()}
    with ExitStack() as stack:
        for name in _MAKERS:
            stack.enter_context(patch.object(torch, name, _made_as_call(getattr(torch, name), tracer)))
        for room in filter(None, map(sys.modules.get, rooms)):
            for name, maker in makers.items():  # as the model's own module imported it
                if getattr(room, name, None) is maker:
                    stack.enter_context(patch.object(room, name, _as_call(cast(Any, maker), tracer)))
        yield


def _made_as_call(maker: Callable[..., Any], tracer: ShapeTracer) -> Callable[..., Any]:
    """Note a new tensor whose size is traced; torch refuses such sizes one by one."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, Proxy) for leaf in tree_leaves((args, kwargs))):
            return tracer.create_proxy("call_function", maker, args, kwargs)
        return maker(*args, **kwargs)

    return noted


def _as_call(maker: Callable[..., Any], tracer: ShapeTracer) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        proxy_positions = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Proxy)]
        if not proxy_positions:
            return maker(*args, **kwargs)

        def mask(*tensors: Any) -> Any:
            filled = list(leaves)
            for position, tensor in zip(proxy_positions, tensors, strict=True):
                filled[position] = tensor
            positional, keywords = tree_unflatten(filled, form)
            with without_values(any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors)):
                return maker(*positional, **keywords)

        mask.is_mask = True  # type: ignore[attr-defined]
        tensors = tuple(leaves[position] for position in proxy_positions)
        for position in proxy_positions:
            leaves[position] = None  # a block keeps no tracer
        return tracer.create_proxy("call_function", mask, tensors, {})

    return noted


def copy_by_shape(
    node: Node,
    graph: Graph,
    copies: dict[Node, Node],
    enters: Node,
    tracer: ShapeTracer,
    copied: Callable[[Node], Node],
) -> Node:
    """Copy into a block what depends on shapes alone, computed from the shape of the block's own input.

    Raises:
        ValueError: if it reads a shape that the block's input does not have.
    """

    def read(source: Node) -> Node:
        if source in copies or source in tracer.by_shape or source.op == "get_attr":
            return copied(source)
        value, entering = tracer.values[source], tracer.values[enters]
        if not (isinstance(value, Tensor) and isinstance(entering, Tensor)):
            raise ValueError(source.name)
        if value.shape == entering.shape or (node.target is getattr and node.args[1] == "device"):
            return copies[enters]
        is_shape = (node.target is getattr and node.args[1] == "shape") or node.target == "size"
        if value.shape != entering.shape[: value.dim()] or not is_shape:
            raise ValueError(source.name)
        # Tokens (B, T) give the first two sizes of hidden states (B, T, D).
        shape_node = graph.call_function(getattr, (copies[enters], "shape"))
        shape_nodes.append(graph.call_function(operator.getitem, (shape_node, slice(value.dim()))))
        if node.target == "size" and len(node.args) > 1:
            shape_nodes.append(graph.call_function(operator.getitem, (shape_nodes[0], node.args[1])))
        return copies[enters]

    shape_nodes: list[Node] = []
    node_copy = graph.node_copy(node, read)
    if shape_nodes:
        graph.erase_node(node_copy)
        return shape_nodes[-1]
    return node_copy
