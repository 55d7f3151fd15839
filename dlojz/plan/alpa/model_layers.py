"""The blocks of a model of the catalogue as graphs of operators: what the inner level shares out.

Layer 4. Invariant: the FLOPs of a block's graph are those counted on the meta device (the tests compare them), and its
weights are all matrices and kernels; vectors (biases, norms, relative positions), about 1 % of a model, are left out.
What goes from one block to the next lies along the batch on axis 0 and whole on axis 1, so that the costs of
neighbouring blocks add up. No torch.

Letters: b batch, t and u tokens, d and c width or channels, p and q positions of an image before and after a stride,
r rows and columns of a kernel, n heads, g queries, keys and values, h width of a head, f width of the MLP, s squeezed
channels, v vocabulary, k classes.

Sources: `dlojz.models.coatnet`, `dlojz.models.transformer`, `dlojz.models.gpt`; Zheng et al. 2022 (Alpa, OSDI 22),
§5.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dlojz import models
from dlojz.models.sizes import CoAtNetSize, GPTSize
from dlojz.plan.alpa.graph import Graph, add_backward
from dlojz.plan.alpa.sharding_spec import ShardingSpec
from dlojz.schema import LabError
from dlojz.text import say

KERNEL = 9
EXPANSION = 4
SQUEEZE = 4
ALONG_BATCH = ShardingSpec(((0,), (), ()))
WHOLE = "tupqrhg"
"""Letters that are never shared out: the lab's models shard channels, heads and batches."""

Write = Callable[[Graph, str], str]


@dataclass(frozen=True)
class ModelBlock:
    """One block of a model.

    Args:
        name: what it is.
        kind: equal for blocks that cost the same.
        reads: elements of one sample's input, without the batch.
        gives: elements of one sample's output.
        write: adds its forward operators to a graph, given the name of its input; returns that of its output.
        data: it reads data, which needs no gradient.
        last: the loss stands behind it.
    """

    name: str
    kind: tuple[object, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    write: Write
    data: bool = False
    last: bool = False

    def graph(self, micro_batch: int, *, across: bool, element_bytes: int = 2, weight_states: float = 6.0) -> Graph:
        """Forward and backward of one micro-batch.

        Args:
            micro_batch: samples.
            across: the mesh has more than one device along axis 0, so activations between blocks are cut there.
            element_bytes: 2 for bf16 and fp16.
            weight_states: in copies of the weights; 6 × 2 B are a master copy and Adam's two moments in fp32.
        """
        graph = Graph(element_bytes, weight_states)
        spec = ALONG_BATCH if across else ShardingSpec(((), (), ()))
        x = graph.input("x", micro_batch, *self.reads, spec=None if self.data else spec)
        y = self.write(graph, x)
        if self.last:
            gradients = add_backward(graph, y)
        else:
            y = graph.operator("y", "bdq->bdq", y, spec=spec, whole="dq")
            gradients = add_backward(graph, y, graph.input("dy", micro_batch, *self.gives, spec=spec))
        if not self.data:
            graph.operator("dx→", "bdq->bdq", gradients["x"], spec=spec, whole="dq", kind="backward")
        return graph


def blocks_of(model: str, image_size: int | None = None, sequence_length: int | None = None) -> tuple[ModelBlock, ...]:
    """The blocks of a CoAtNet or a GPT of the catalogue, in order.

    Raises:
        LabError: another model, or an input that it cannot read.
    """
    models.check_input(model, image_size, sequence_length)
    entry = models.spec(model)
    if isinstance(entry.size, CoAtNetSize):
        return _coatnet(entry.size, image_size or entry.image_size or 224, entry.num_classes)
    if isinstance(entry.size, GPTSize):
        return gpt_blocks(entry.size, sequence_length or entry.sequence_length or 1024, entry.num_classes)
    legal = [name for name in models.names() if isinstance(models.spec(name).size, CoAtNetSize | GPTSize)]
    raise LabError(
        say(
            en=f"the two levels are written for CoAtNet and GPT, but {model} was received: use one of "
            f"{', '.join(legal)}.",
            fr=f"les deux niveaux sont écrits pour CoAtNet et GPT, mais {model} a été reçu : prenez l’un de "
            f"{', '.join(legal)}.",
        )
    )


def gpt_blocks(size: GPTSize, tokens: int, vocabulary: int) -> tuple[ModelBlock, ...]:
    """The blocks of a GPT of any size.

    Args:
        size: width, depth, heads.
        tokens: of a sample.
        vocabulary: words.
    """
    width, stream = size.width, (tokens, size.width)
    embedding = partial(_embedding, vocabulary=vocabulary, tokens=tokens, width=width)
    decoder = partial(_decoder, width=width, heads=size.num_heads)
    logits = partial(_logits, width=width, vocabulary=vocabulary)
    return (
        ModelBlock("embedding", ("embedding",), (tokens,), stream, embedding, data=True),
        *(ModelBlock(f"decoder {number}", ("decoder",), stream, stream, decoder) for number in range(size.depth)),
        ModelBlock("logits", ("logits",), stream, (tokens, vocabulary), logits, last=True),
    )


def _embedding(graph: Graph, x: str, *, vocabulary: int, tokens: int, width: int) -> str:
    # A look-up: a device that holds part of the vocabulary gives zero for the other words, hence a sum over v.
    table = graph.weight("table", vocabulary, width)
    looked_up = graph.operator("token", "bt,vd->btd", x, table, whole=WHOLE, work=0.0)
    return graph.operator("stream", "+btd,+td->btd", looked_up, graph.weight("position", tokens, width), whole=WHOLE)


def _decoder(graph: Graph, x: str, *, width: int, heads: int) -> str:
    weight = graph.weight("w_qkv", width, 3, heads, width // heads, whole=(1, 3))
    graph.operator("qkv", "btd,dgnh->btgnh", x, weight, whole=WHOLE)
    # Each product reads one or two of the three, hence a third of the FLOPs that the letters would make.
    batch, tokens, _ = graph.nodes[x].shape
    work = 2.0 * batch * tokens**2 * width
    graph.operator("scores", "btgnh,bugnh->bntu", "qkv", "qkv", whole=WHOLE, work=work)
    graph.operator("context", "bntu,bugnh->btnh", "scores", "qkv", whole=WHOLE, work=work)
    out = graph.weight("w_out", heads, width // heads, width)
    graph.operator("attended", "btnh,nhd->btd", "context", out, whole=WHOLE)
    graph.operator("stream1", "+btd,+btd->btd", x, "attended", whole=WHOLE)
    graph.operator("hidden", "btd,df->btf", "stream1", graph.weight("w_1", width, EXPANSION * width), whole=WHOLE)
    graph.operator("mlp", "btf,fd->btd", "hidden", graph.weight("w_2", EXPANSION * width, width), whole=WHOLE)
    return graph.operator("stream2", "+btd,+btd->btd", "stream1", "mlp", whole=WHOLE)


def _logits(graph: Graph, x: str, *, width: int, vocabulary: int) -> str:
    return graph.operator("logits", "btd,dv->btv", x, graph.weight("w_logits", width, vocabulary), whole=WHOLE)


def _coatnet(size: CoAtNetSize, image_size: int, classes: int) -> tuple[ModelBlock, ...]:
    side, width = image_size // 2, size.stem_width
    stem = partial(_stem, width=width, positions=side**2)
    blocks = [ModelBlock("stem", ("stem",), (3, image_size**2), (width, side**2), stem, data=True)]
    for number, stage in enumerate(size.stages, 1):
        for index in range(stage.depth):
            stride = stage.stride if index == 0 else 1
            before, side = side, side // stride
            kind = (stage.kind, width, stage.width, before, side)
            write: Write
            if stage.kind == "convolution":
                write = partial(_mbconv, width=width, out=stage.width, before=before**2, after=side**2)
            else:
                heads = stage.width // size.head_dim
                write = partial(_attention, width=width, out=stage.width, heads=heads, before=before**2, after=side**2)
            name = f"S{number} {'conv' if stage.kind == 'convolution' else 'attn'} {index}"
            blocks.append(ModelBlock(name, kind, (width, before**2), (stage.width, side**2), write))
            width = stage.width
    head = partial(_head, width=width, classes=classes)
    return (*blocks, ModelBlock("head", ("head",), (width, side**2), (classes,), head, last=True))


def _stem(graph: Graph, x: str, *, width: int, positions: int) -> str:
    first = graph.weight("k_1", width, 3, KERNEL, whole=(2,))
    graph.operator("conv1", "bcp,dcr->bdq", x, first, sizes={"q": positions}, whole=WHOLE)
    second = graph.weight("k_2", width, width, KERNEL, whole=(2,))
    return graph.operator("conv2", "bcp,dcr->bdq", "conv1", second, sizes={"q": positions}, whole=WHOLE)


def _shortcut(graph: Graph, x: str, *, width: int, out: int, before: int, after: int) -> str:
    if before != after:
        x = graph.operator("pooled", "bcp->bcq", x, sizes={"q": after}, whole=WHOLE)
    if width != out:
        x = graph.operator("shortcut", "bcq,cd->bdq", x, graph.weight("k_shortcut", width, out), whole=WHOLE)
    return x


def _mbconv(graph: Graph, x: str, *, width: int, out: int, before: int, after: int) -> str:
    wide, squeezed = EXPANSION * out, out // SQUEEZE
    graph.operator("expanded", "bcp,cd->bdp", x, graph.weight("k_expand", width, wide), whole=WHOLE)
    kernel = graph.weight("k_depth", wide, KERNEL, whole=(1,))
    graph.operator("depthwise", "bdp,dr->bdq", "expanded", kernel, sizes={"q": after}, whole=WHOLE, heavy=True)
    graph.operator("mean", "bdq->bd", "depthwise", whole=WHOLE)
    graph.operator("squeezed", "bd,ds->bs", "mean", graph.weight("w_squeeze", wide, squeezed), whole=WHOLE)
    graph.operator("gate", "bs,sd->bd", "squeezed", graph.weight("w_excite", squeezed, wide), whole=WHOLE)
    graph.operator("scaled", "bdq,bd->bdq", "depthwise", "gate", whole=WHOLE)
    graph.operator("projected", "bcq,cd->bdq", "scaled", graph.weight("k_project", wide, out), whole=WHOLE)
    beside = _shortcut(graph, x, width=width, out=out, before=before, after=after)
    return graph.operator("stream", "+bdq,+bdq->bdq", beside, "projected", whole=WHOLE)


def _attention(graph: Graph, x: str, *, width: int, out: int, heads: int, before: int, after: int) -> str:
    shortcut = _shortcut(graph, x, width=width, out=out, before=before, after=after)
    read = "pooled" if before != after else x
    weight = graph.weight("w_qkv", width, 3, heads, out // heads, whole=(1, 3))
    graph.operator("qkv", "bcq,cgnh->bgnhq", read, weight, whole=WHOLE)
    work = 2.0 * graph.nodes[x].shape[0] * after**2 * out
    graph.operator("scores", "bgnhq,bgnhu->bnqu", "qkv", "qkv", whole=WHOLE, work=work)
    graph.operator("context", "bnqu,bgnhu->bnhq", "scores", "qkv", whole=WHOLE, work=work)
    project = graph.weight("w_out", heads, out // heads, out)
    graph.operator("attended", "bnhq,nhd->bdq", "context", project, whole=WHOLE)
    graph.operator("stream1", "+bdq,+bdq->bdq", shortcut, "attended", whole=WHOLE)
    graph.operator("hidden", "bdq,df->bfq", "stream1", graph.weight("w_1", out, EXPANSION * out), whole=WHOLE)
    graph.operator("mlp", "bfq,fd->bdq", "hidden", graph.weight("w_2", EXPANSION * out, out), whole=WHOLE)
    return graph.operator("stream2", "+bdq,+bdq->bdq", "stream1", "mlp", whole=WHOLE)


def _head(graph: Graph, x: str, *, width: int, classes: int) -> str:
    graph.operator("mean", "bdq->bd", x, whole=WHOLE)
    graph.operator("hidden", "bd,de->be", "mean", graph.weight("w_hidden", width, width), whole=WHOLE)
    return graph.operator("logits", "be,ek->bk", "hidden", graph.weight("w_logits", width, classes), whole=WHOLE)
