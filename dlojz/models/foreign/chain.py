"""Cut a module into a chain of blocks, for pipelines and activation checkpointing.

In a chain each block's output is the only input of the next one.
The forward pass around the repeated parts is traced (`torch.fx`), the parts and all other modules being called as they
are. A block is what is computed after one part up to the end of the next: the first is the stem, with nothing of a
part, the last the head. Where other than one tensor passes between two blocks, the module is no chain.

Source: Reed et al. 2022, "torch.fx" (arXiv 2112.08429).
"""

import copy
import inspect
import operator
import traceback
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Tracer

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.models.blocks import BlockList
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.foreign.meta_checks import error_with_line
from dlojz.models.foreign.names import model_sentence, shown_name
from dlojz.models.foreign.shape_tracing import ShapeTracer, copy_by_shape, trace_shapes

Traced = TypeVar("Traced")

NAMES_SHOWN = 3
"""Values named where a chain breaks."""


class _Link(NamedTuple):
    """Block of a chain in the traced forward pass.

    Attributes:
        nodes: What it computes.
        enters, leaves: The one tensor that it reads, and the one that it gives.
        part: Path of the repeated part at its end; empty for stem and head.
    """

    nodes: list[Node]
    enters: Node
    leaves: Node
    part: str


class _AroundParts(Tracer):
    """Tracer of what encloses the parts; every other module is one call."""

    proxy_buffer_attributes = True

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self._parts = parts

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module is called as it is: where it encloses no part."""
        return not any(part.startswith(f"{module_qualified_name}.") for part in self._parts)


def chain_of(
    name: str,
    module: nn.Module,
    parts: Sequence[str],
    checkpointing: Checkpointing | bool = "none",
    on_meta: Callable[[], tuple[nn.Module, Tensor]] | None = None,
) -> BlockList:
    """Cut a module into stem, one block for each part, and head; the weights are the module's own.

    Args:
        name: Of the model, for refusals.
        parts: Paths of its repeated parts, in the order in which they are called.
        on_meta: Makes the module on the meta device and an input of its, where its forward pass branches on shapes.

    Raises:
        LabError: if the module is no chain; the sentence says where it breaks.
    """
    if not parts:
        raise not_a_chain(name, say(en="it has no blocks that repeat", fr="il n’a pas de blocs qui se répètent"))
    tracer: ShapeTracer | None = None
    try:
        links = _links(name, _forward(name, _around_parts(module, parts)), parts)
    except LabError:
        if on_meta is None:
            raise
        # The forward pass branches on shapes: a twin on the meta device decides the branches.
        twin, sample = on_meta()
        graph, tracer = _traced(name, lambda: trace_shapes(twin, parts, sample))
        links = _links(name, _forward(name, lambda: graph, tracer.by_shape), parts)
    blocks = [_block(name, module, link, tracer) for link in links]
    _copy_shared_buffers(blocks)
    return BlockList(blocks, checkpointing=checkpointing)


def _links(name: str, forward: tuple[list[Node], Node, Node], parts: Sequence[str]) -> list[_Link]:
    """Divide the traced forward pass at the parts."""
    nodes, source, result = forward
    positions = {node: number for number, node in enumerate(nodes)}
    called = [node for node in nodes if node.op == "call_module" and node.target in parts]
    # The first cut is before the first part is called, each other one behind a part's result.
    cuts = [positions[called[0]], *(positions[_end_of_part(node)] + 1 for node in called)]
    titles = ["", *(str(node.target) for node in called), ""]
    links: list[_Link] = []
    start, enters = 0, source
    for cut, before, after in zip(cuts, titles, titles[1:], strict=False):
        leaves = _passing(name, nodes, positions, cut, (source, result), (before, after))
        if cut > start:  # no stem, where the input goes straight into the first part
            links.append(_Link(nodes[start:cut], enters, leaves, before))
        start, enters = cut, leaves
    return [*links, _Link(nodes[start:], enters, result, "")] if start < len(nodes) else links


def _end_of_part(node: Node) -> Node:
    """Return the call of a part, or what takes the one tensor out of the tuple that it returns."""
    # Only what is read counts: an unused entry of a part's tuple has no users.
    users = [user for user in node.users if user.users]
    return users[0] if len(users) == 1 and users[0].target is operator.getitem else node


def _around_parts(module: nn.Module, parts: Sequence[str]) -> Callable[[], Graph]:
    """Return what traces the forward pass of a module around its parts."""
    options = list(inspect.signature(module.forward).parameters.values())[1:]  # all arguments but the input
    # Arguments with a default are constants of the graph, as in a plain call.
    plain = {option.name: option.default for option in options if option.default is not inspect.Parameter.empty}

    def traced() -> Graph:
        tracer = _AroundParts(parts)
        try:
            return tracer.trace(module, concrete_args=plain or None)
        finally:
            # Garbage that is collected late must not keep the weights of other ranks' blocks.
            del tracer.root, tracer.submodule_paths, tracer.tensor_attrs

    return traced


def _traced(name: str, trace: Callable[[], Traced]) -> Traced:
    """Trace a forward pass, or refuse the module with the line at which that fails."""
    try:
        return trace()
    except LabError:
        raise
    except Exception as error:
        message = error_with_line(error)
        traceback.clear_frames(error.__traceback__)  # nor may an error whose frames name the module
        untraced = model_sentence("cannot be traced", message=message)
        raise not_a_chain(name, untraced) from error


def _forward(name: str, trace: Callable[[], Graph], by_shape: Set[Node] = frozenset()) -> tuple[list[Node], Node, Node]:
    """Computations of the forward pass in their order, its input and its output; what is constant is left out.

    So is what depends on the input by its shape alone: each block computes it.
    """
    graph = _traced(name, trace)
    source = next(node for node in graph.nodes if node.op == "placeholder")
    depends = {source}
    for node in graph.nodes:
        if node not in by_shape and depends.intersection(node.all_input_nodes):
            depends.add(node)
    output = next(node for node in graph.nodes if node.op == "output")
    result = output.args[0]
    if not isinstance(result, Node) or result not in depends:
        raise not_a_chain(name, say(en="it does not return one tensor", fr="il ne renvoie pas un seul tenseur"))
    return [node for node in graph.nodes if node in depends - {source, output}], source, result


def _passing(
    name: str, nodes: list[Node], positions: dict[Node, int], cut: int, ends: tuple[Node, Node], titles: tuple[str, str]
) -> Node:
    """Find the one tensor that passes a cut.

    Args:
        cut: number of the first computation after it.
        ends: input and output of the forward pass.
        titles: the parts before and after, for the refusal.
    """
    source, result = ends
    # What is made before the cut and read behind it; the model's result is read at the end.
    passing = [
        node
        for node in (source, *nodes[:cut])
        if any(positions.get(user, 0) >= cut for user in node.users) or (node is result and cut <= len(nodes))
    ]
    if len(passing) == 1:
        return passing[0]
    before, after = (title or end for title, end in zip(titles, _ends(), strict=True))
    value_names = ", ".join(node.name for node in passing[:NAMES_SHOWN])
    raise not_a_chain(
        name,
        model_sentence(
            "several values between blocks", before=before, after=after, count=len(passing), value_names=value_names
        ),
    )


def _ends() -> tuple[str, str]:
    return say(en="the input", fr="l’entrée"), say(en="the output", fr="la sortie")


def _block(name: str, module: nn.Module, link: _Link, tracer: ShapeTracer | None = None) -> nn.Module:
    """Make a block: the part itself where it is all, else a module of its computations.

    What depends on shapes alone (masks, rotary embeddings) is computed from the shape of the block's own input.
    """
    end_node = link.nodes[-1]
    is_part = len(link.nodes) == 1 and end_node.target == link.part
    if is_part and end_node.args == (link.enters,) and not end_node.kwargs:
        return module.get_submodule(link.part)
    graph = Graph()
    copies = {link.enters: graph.placeholder("x")}

    def copied(node: Node) -> Node:
        if node in copies:
            return copies[node]
        if tracer is not None and node in tracer.by_shape:
            copies[node] = copy_by_shape(node, graph, copies, link.enters, tracer, copied)
            if node.op == "call_module":
                repeated.append(str(node.target))  # the block gets a copy of this module below
        else:  # a weight, or what is computed from weights alone
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    repeated: list[str] = []

    try:
        for node in link.nodes:
            copied(node)
    except ValueError as error:
        shape = say(en=f"a block needs the shape of {error}", fr=f"un bloc a besoin de la forme de {error}")
        raise not_a_chain(name, shape) from error
    graph.output(copies[link.leaves])
    block = GraphModule(module, graph, class_name="ChainBlock")
    block.graph.owning_module = None  # nor may a circle
    for path in repeated:
        owner, _, leaf = path.rpartition(".")
        setattr(block.get_submodule(owner), leaf, copy.deepcopy(module.get_submodule(path)))
    return cast(nn.Module, block)


def _copy_shared_buffers(blocks: Sequence[nn.Module]) -> None:
    """Give each block that reads a buffer a copy, as blocks may be on different ranks."""
    buffer_ids: set[int] = set()
    for block in blocks:
        for path, buffer in list(block.named_buffers()):
            if id(buffer) in buffer_ids:
                owner, _, leaf = path.rpartition(".")
                setattr(block.get_submodule(owner), leaf, buffer.clone())
        buffer_ids.update(id(buffer) for buffer in block.buffers())


def not_a_chain(name: str, reason: str) -> LabError:
    """Make the refusal of a module whose blocks do not follow one another, with the reason."""
    name = shown_name(name)
    return model_sentence.refused("no chain of blocks", name=name, reason=reason)
