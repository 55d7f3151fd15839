"""Blocks that models share: a flat list of blocks, the transformer block, the text head, tied weights, the loss.

A model is its list of blocks: ``for block in model.blocks: x = block(x)`` is the whole forward pass. Every block takes
one tensor and returns one contiguous tensor, so that a pipeline can cut between any two. No block has a buffer except
BatchNorm's running statistics, so that a model can be built on the meta device and receive its weights later. No block
has dropout: a model has the same losses in every layout.

Shape suffixes: B batch, T tokens, D width, N heads, H = D / N width of a head, E = N × 3 × H rows of the projection, V
vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.checkpointing import Checkpointing, level_of, run_checkpointed
from dlojz.models.experts.layer import MixtureOfExperts
from dlojz.models.experts.routing import Routing
from dlojz.models.foreign.example import run_on
from dlojz.models.foreign.names import model_sentence
from dlojz.models.foreign.tensor_regions import Region

Loss = Callable[[Any, Tensor], Tensor]
"""Mean loss of a model's output and the targets: a scalar."""


class BlockList(nn.Module):
    """Model as a flat list of blocks, run one after the other.

    Args:
        blocks: Modules in the order of the forward pass, stem and head included.
        checkpointing: What the backward pass computes again: nothing (`none`, or False), each block from its input
            (`full`, or True), all but its matrix products, convolutions and attention (`selective`), or these and every
            second product of a layer (`every_second`).

    Raises:
        LabError: another word for `checkpointing`.
    """

    is_chain = True
    """Whether the forward pass is that of the blocks, one after the other."""
    tensor_plan: Callable[[int, str], tuple[Region, ...]] | None = None
    """Regions of a module from elsewhere that so many tensor-parallel ranks share, of those that match a pattern."""
    parts: Mapping[str, nn.Module] = MappingProxyType({})
    """Repeated parts of a module from elsewhere, by their paths in it."""
    logits_heads: tuple[nn.Linear, ...] = ()
    """The layer whose output is the logits of a module from elsewhere as they are; none where more is done to them."""
    targets: Tensor | None = None
    """Targets of what is read now, where the loss is computed in parts (`dlojz.by_hand.chunked_loss`)."""

    def __init__(self, blocks: Iterable[nn.Module], *, checkpointing: Checkpointing | bool = "none") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpointing = level_of(checkpointing)

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks: ``x_BCHW`` (images) or ``tokens_BT`` (text) to logits."""
        graph = self.training and torch.is_grad_enabled()  # without backward nothing is kept or recomputed
        for block in self.blocks:
            # A block that an activation plan marks is recomputed whole, whatever the model's level.
            level = "full" if getattr(block, "activations", "") == "recompute" else self.checkpointing
            # A head whose loss comes in parts recomputes each of them itself.
            level = "none" if self.targets is not None and block is self.blocks[-1] else level
            x = run_checkpointed(block, x, level) if graph and level != "none" else block(x)
        return x

    def plan_activations(self, choices: Sequence[str]) -> None:
        """Note in each block what becomes of its activations: `keep`, `recompute`, or `offload`.

        Blocks that offload do so where the forward pass runs within `dlojz.by_hand.activation_offload.planned_offload`.

        Raises:
            LabError: if the choices are not as many as the blocks.
        """
        if len(choices) != len(self.blocks):
            raise model_sentence.refused(
                "choices of an activation plan", count=len(self.blocks), received_count=len(choices)
            )
        for block, choice in zip(self.blocks, choices, strict=True):
            block.activations = choice  # type: ignore[assignment]


class NestedBlocks(BlockList):
    """Any module as a list of blocks: its repeated parts, and last the module itself, which calls them.

    A parameter belongs to the first block that holds it: `blocks.3.mlp.fc1.weight` to a part, `blocks.12.head.weight`
    to the rest. What treats a model block by block (sharding, prediction) thus treats any module.

    Args:
        module: Its forward pass stays as it is.
        parts: Paths of the repeated parts, in the order in which they are called, each once.
        loss: Mean loss of its output and the targets.
    """

    is_chain = False

    def __init__(self, module: nn.Module, parts: Iterable[str], loss: Loss | None = None) -> None:
        paths = tuple(parts)
        # The module comes last: a parameter that a part holds too has the part's name, which is found first.
        super().__init__([*(module.get_submodule(path) for path in paths), module])
        self.loss = loss or mean_loss
        self.paths = (*paths, type(module).__name__)
        """Names of the blocks in the module: the paths of its parts, and for the rest its class."""

    def forward(self, x: Any) -> Any:
        """Run the module on a tensor, on a tuple as its arguments, or on a dict as its keywords."""
        return run_on(self.blocks[-1], x)


def split_heads(qkv_BTE: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a fused projection into queries, keys and values, each ``BNTH``.

    The last dimension E is laid out head by head, (N, 3, H), so that a contiguous slice of the projection's rows is a
    whole number of heads: what tensor parallelism shards.
    """
    # (B, T, E) → (B, T, N, 3, H), then three of (B, T, N, H).
    q_BTNH, k_BTNH, v_BTNH = qkv_BTE.unflatten(-1, (-1, 3, head_dim)).unbind(dim=-2)
    return q_BTNH.transpose(1, 2), k_BTNH.transpose(1, 2), v_BTNH.transpose(1, 2)  # views, (B, N, T, H)


def merge_heads(x_BNTH: Tensor) -> Tensor:
    """Concatenate the heads: ``BNTH`` to ``BTE`` with E = N × H."""
    return x_BNTH.transpose(1, 2).flatten(start_dim=-2)  # (B, N, T, H) → (B, T, N, H) → (B, T, E), a copy


class SequenceShare:
    """Tokens of each sequence that a process holds, and how they attend to each other: here all of them, in one kernel.

    Context parallelism (`dlojz.by_hand.context_parallel`) puts another one in its place, in each module that asks it.
    """

    def positions(self, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the positions in the sequence of this process's tokens, shape ``(T,)``."""
        return torch.arange(tokens, device=device, dtype=dtype)

    def attend(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, *, causal: bool = True) -> Tensor:
        """Compute attention: ``BNTH``; with fewer keys than queries, a group of queries reads one."""
        # With G < N heads of keys and values, torch's kernel asks for `enable_gqa`.
        grouped = q_BNTH.shape[1] > k_BGTH.shape[1]
        return F.scaled_dot_product_attention(q_BNTH, k_BGTH, v_BGTH, is_causal=causal, enable_gqa=grouped)


WHOLE_SEQUENCE = SequenceShare()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in fp32, averaged over samples (and over positions of a text)."""
    # Images: (B, K) and (B,). Text: (B, T, V) → (B·T, V), and (B, T) → (B·T,).
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


def loss_of(model: nn.Module) -> Loss:
    """Return the mean loss of a model: its own, or the cross-entropy of its logits."""
    loss: Loss = getattr(model, "loss", mean_loss)
    return loss


class TransformerBlock(nn.Module):
    """Pre-norm transformer block of ViT and GPT: self-attention, then an MLP, each with a residual connection.

    Args:
        width: Width D of the stream.
        num_heads: Attention heads; divides ``width``.
        mlp_width: Width of the MLP's hidden layer.
        causal: Let a token see only itself and earlier tokens.
        norm_eps: Term added to the variance in the layer norms.
        gelu: ``"none"`` is the exact GELU, ``"tanh"`` the approximation that GPT-2 uses, and experts always.
        routing: of the mixture of experts that replaces the MLP; None for an MLP.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3; pre-norm: Xiong et al. 2020 (arXiv 2002.04745).
    """

    sequence = WHOLE_SEQUENCE

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_width: int,
        *,
        causal: bool,
        norm_eps: float,
        gelu: Literal["none", "tanh"] = "none",
        routing: Routing | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.causal = causal
        self.gelu = gelu
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mixture: MixtureOfExperts | None = None
        if routing is None:
            self.mlp_expand = nn.Linear(width, mlp_width)
            self.mlp_project = nn.Linear(mlp_width, width)
        else:
            self.mixture = MixtureOfExperts(width, mlp_width, routing, "gelu")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape."""
        # (B, T, D) @ (D, 3D) → (B, T, E), E = 3D; then three of (B, N, T, H).
        q_BNTH, k_BNTH, v_BNTH = split_heads(self.qkv(self.norm1(x_BTD)), self.head_dim)
        attended_BNTH = self.sequence.attend(q_BNTH, k_BNTH, v_BNTH, causal=self.causal)
        x_BTD = x_BTD + self.attention_project(merge_heads(attended_BNTH))  # (B, T, D) @ (D, D)
        return x_BTD + self._feed_forward(self.norm2(x_BTD))

    def _feed_forward(self, x_BTD: Tensor) -> Tensor:
        if self.mixture is not None:
            mixed_BTD: Tensor = self.mixture(x_BTD)
            return mixed_BTD
        # (B, T, D) @ (D, F) → (B, T, F) @ (F, D), F = mlp_width.
        projected_BTD: Tensor = self.mlp_project(F.gelu(self.mlp_expand(x_BTD), approximate=self.gelu))
        return projected_BTD


class VocabularyHead(nn.Module):
    """Head of a text model: norm, then one logit per word of the vocabulary, ``x_BTD`` to ``logits_BTV``.

    Args:
        norm: Over the width D.
        vocabulary_size: V.
        tied: Token embedding whose weight, ``(V, D)``, is that of the output layer too; None for a separate weight.

    Source: Press & Wolf 2017, "Using the Output Embedding to Improve Language Models" (arXiv 1608.05859).
    """

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, vocabulary_size: int, tied: nn.Embedding | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.output = nn.Linear(norm.normalized_shape[0], vocabulary_size, bias=False)
        if tied is not None:
            self.output.weight = tied.weight  # one parameter with two names: its gradient is the sum of both uses

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to ``(B, T, vocabulary_size)``."""
        logits_BTV: Tensor = self.output(self.norm(x_BTD))
        return logits_BTV


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map every further name of a shared parameter to its first name: that of a tied head to the embedding's."""
    first_names: dict[nn.Parameter, str] = {}
    # `_parameters`, since `named_parameters()` gives a shared parameter once only.
    owned = ((path, part._parameters.items()) for path, part in model.named_modules())
    parameters = [
        (f"{path}.{leaf}".lstrip("."), parameter)
        for path, leaves in owned
        for leaf, parameter in leaves
        if parameter is not None
    ]
    # `setdefault` notes a parameter's first name and returns it: only the later names differ from it.
    return {
        name: first_names[parameter]
        for name, parameter in parameters
        if first_names.setdefault(parameter, name) != name
    }


def tie(model: nn.Module, names: Mapping[str, str]) -> None:
    """Share parameters (again): `names` as `tied_names` gives them."""
    for name, source in names.items():
        _set_parameter(model, name, model.get_parameter(source))


def untie(model: nn.Module) -> dict[str, str]:
    """Copy a shared parameter for each of its further names; returns what `tied_names` gave before."""
    names = tied_names(model)
    for name in names:
        _set_parameter(model, name, nn.Parameter(model.get_parameter(name).detach().clone()))
    return names


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)


def initialise_transformer(module: nn.Module) -> None:
    """Initialise one module: truncated normal of deviation 0.02, biases zero; for ``model.apply``.

    Source: Radford et al. 2018 (GPT), section 4.1.
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
