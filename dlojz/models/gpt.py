"""GPT: a causal decoder with learned positions.

``tokens_BT`` (integers) in, ``logits_BTV`` out; the logits of a token depend on no later token. Where the size has a
tied head (GPT-2's have), the weight of the output layer is the token embedding. A size with experts has mixtures
instead of some MLPs; if these send a token to several experts and drop choices, a later token can be the cause (see
`dlojz.models.experts.gate.rows`).

Shape suffixes: B batch, T tokens, D width, V vocabulary.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), sections 2.2 and 2.3.
"""

import math

import torch
from torch import Tensor, nn

from dlojz.models.blocks import WHOLE_SEQUENCE, BlockList, TransformerBlock, VocabularyHead, initialise_transformer
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.experts.routing import Routing
from dlojz.models.sizes import GPTSize

NORM_EPS = 1e-5
EXPANSION = 4


class GPT(BlockList):
    """GPT of any size: ``tokens_BT`` in, ``logits_BTV`` out.

    Args:
        size: Width, depth, heads.
        sequence_length: Longest sequence in tokens, at least 1; fixes the position table.
        vocabulary_size: Number of different tokens (256 for bytes).
        checkpointing: Recomputation in the backward pass (see `BlockList`).
        routing: Of the mixtures of experts, in the blocks that ``size.experts`` chooses; None without.
    """

    def __init__(
        self,
        size: GPTSize,
        *,
        sequence_length: int,
        vocabulary_size: int,
        checkpointing: Checkpointing | bool = "none",
        routing: Routing | None = None,
    ) -> None:
        decoder = [
            TransformerBlock(
                size.width,
                size.num_heads,
                EXPANSION * size.width,
                causal=True,
                norm_eps=NORM_EPS,
                gelu="tanh",
                routing=routing if size.experts and size.experts.has_mixture(index) else None,
            )
            for index in range(size.depth)
        ]
        embedding = Embedding(vocabulary_size, sequence_length, size.width)
        tied = embedding.token if size.tied_head else None
        blocks = [embedding, *decoder, VocabularyHead(nn.LayerNorm(size.width, eps=NORM_EPS), vocabulary_size, tied)]
        super().__init__(blocks, checkpointing=checkpointing)
        self.apply(initialise_transformer)
        for block in decoder:
            # Every block adds two terms to the stream: their scaled sum keeps the variance of one (section 2.3).
            second = block.mlp_project.weight if block.mixture is None else block.mixture.experts.down_EFD
            for projection in (block.attention_project.weight, second):
                nn.init.trunc_normal_(projection, std=0.02 / math.sqrt(2 * size.depth))


class Embedding(nn.Module):
    """Token and position vectors, added: ``tokens_BT`` to ``x_BTD``."""

    sequence = WHOLE_SEQUENCE

    def __init__(self, vocabulary_size: int, sequence_length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(sequence_length, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """``(B, T)`` integers below ``vocabulary_size``, T at most ``sequence_length``, to ``(B, T, width)``."""
        position_T = self.sequence.positions(tokens_BT.shape[1], tokens_BT.device, torch.long)  # (T,)
        x_BTD: Tensor = self.token(tokens_BT) + self.position(position_T)  # (B, T, D) + (T, D)
        return x_BTD
