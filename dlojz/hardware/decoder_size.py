"""A decoder's size, its parameters and its floating-point operations, as the published tables count them.

Plain arithmetic on integers; a formula that has a name here gives what its paper prints, whatever one may think of it
(most count attention whole, as if it were not causal).
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from dlojz.base.contract import check_at_least
from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal

Positions = Literal["learned", "none"]
Formula = Literal["recompute", "model", "causal", "layers", "parameters", ""]
FORMULAS: Final = tuple(name for name in get_args(Formula) if name)
"""How a table came to its TFLOP/s; see `flops_per_sequence`. Empty: it does not say."""


@dataclass(frozen=True)
class DecoderSize:
    """The size of a decoder-only Transformer.

    Args:
        layers: Transformer layers, at least 1.
        hidden: width, a multiple of `heads`.
        vocabulary: entries of the embedding, without padding.
        sequence_length: tokens of one sequence.
        mlp_width: of the MLP between its layers; 0 stands for 4 × hidden.
        kv_heads: heads of keys and values; 0 stands for `heads`, less is grouped-query attention.
        gated: whether the MLP has a third matrix (SwiGLU).
        tied: whether embedding and logits share one matrix.
        biased: whether linear layers and norms have biases.
        positions: `learned` adds an embedding of positions; `none` is for rotary positions and ALiBi.
        experts: feed-forward networks of each mixture that stands in the place of an MLP; 0 for a dense decoder.
        top_k: experts that see each token.
        every: of so many layers one has a mixture.
        capacity_factor: rows that the experts compute, in units of what the tokens need.
        head_width: of one attention head; 0 stands for hidden / heads, another one is Qwen's.
        expert_width: of the hidden layer of one expert; 0 stands for `mlp_width`.
        shared_experts: experts of each mixture that see every token.
        dense_layers: so many at the beginning have no mixture.
        latent: width of the vector that keys and values are made of (multi-head latent attention); 0 without it.
        query_latent: the same of queries; 0 where they are made of the token itself.
        rotated_width: of latent attention, the part of a head's query and key that is rotated, beside `head_width`.

    Raises:
        LabError: if a number is not positive, or the heads do not divide what they must.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence_length: int
    mlp_width: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = True
    biased: bool = True
    positions: Positions = "learned"
    experts: int = 0
    top_k: int = 1
    every: int = 1
    capacity_factor: float = 1.0
    head_width: int = 0
    expert_width: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    latent: int = 0
    query_latent: int = 0
    rotated_width: int = 0

    def __post_init__(self) -> None:
        # A frozen dataclass can set its fields in no other way.
        object.__setattr__(self, "mlp_width", self.mlp_width or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "expert_width", self.expert_width or self.mlp_width)
        counts = ("layers", "hidden", "heads", "vocabulary", "sequence_length", "mlp_width", "kv_heads")
        check_at_least(1, **{name: getattr(self, name) for name in counts})
        # Where heads have a width of their own, the heads need not divide hidden.
        for divisor, dividend in (("heads", "hidden"), ("kv_heads", "heads"))[bool(self.head_width) :]:
            if getattr(self, dividend) % getattr(self, divisor):
                raise refusal(
                    en=f"{divisor} must divide {dividend}, but {getattr(self, dividend)} is no multiple of "
                    f"{getattr(self, divisor)}.",
                    fr=f"{divisor} doit diviser {dividend}, or {getattr(self, dividend)} n’est pas un multiple de "
                    f"{getattr(self, divisor)}.",
                )
        if self.positions not in get_args(Positions):
            raise LabError(one_of("positions", self.positions, get_args(Positions)))

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.hidden // self.heads

    @property
    def queries(self) -> int:
        """Width of the queries of all heads that are no rotated part: hidden, unless `head_width` says otherwise."""
        return self.heads * self.head_size

    @property
    def core_width(self) -> int:
        """Mean of the widths of a head's keys and values: of latent attention d + d_R and d, else both are equal."""
        return self.head_size + self.rotated_width // 2

    @property
    def mixtures(self) -> tuple[int, int]:
        """Share of the layers that have a mixture, as numerator and denominator."""
        return self.layers - self.dense_layers, self.layers * self.every

    @property
    def period(self) -> float:
        """Layers for each mixture, on average: `every`, more where the first layers are dense."""
        mixtures, of_layers = self.mixtures
        return of_layers / mixtures

    @property
    def _expert_weights(self) -> int:
        """Elements of the matrices of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.expert_width

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of one attention.

        Queries and output h × q each, keys and values h × (kv_heads × head_size) each. Latent attention: W^DKV and W^KR
        h × (L + R), W^UK and W^UV L × q each, W^O q × h, and W^DQ h × L', W^UQ and W^QR L' × (q + heads × R); without
        a latent of the queries h × (q + heads × R) in their place.

        Source: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434), section 2.1, equations 9 to 19.
        """
        if not self.latent:
            return 2 * self.hidden * (self.queries + self.kv_heads * self.head_size)
        rotated_queries = self.queries + self.heads * self.rotated_width
        keys = self.hidden * (self.latent + self.rotated_width) + 2 * self.latent * self.queries
        down = self.hidden * self.query_latent
        return keys + self.hidden * self.queries + down + (self.query_latent or self.hidden) * rotated_queries

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer that a token meets: 12 h² of the classic decoder.

        With experts, the mean over the layers, of which a token meets `top_k`, the shared ones and the gate in each
        mixture.
        """
        mlp = (3 if self.gated else 2) * self.hidden * self.mlp_width
        if not self.experts:
            return self.attention_weights + mlp
        mixtures, of_layers = self.mixtures
        met = self._expert_weights * (self.top_k + self.shared_experts) + self.hidden * self.experts
        return self.attention_weights + (mlp * (of_layers - mixtures) + met * mixtures) // of_layers

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a layer, of the mean one where not each has a mixture; 0 for a dense decoder."""
        biases = self.expert_width + self.hidden if self.biased else 0
        mixtures, of_layers = self.mixtures
        return self.experts * (self._expert_weights + biases) * mixtures // of_layers

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: 12 h² + 13 h of the classic decoder.

        Source: Narayanan et al., SC21, "Efficient Large-Scale Language Model Training on GPU Clusters", section 5.1.
        """
        if self.experts:
            return self._mixed_parameters
        if not self.biased:
            # Norms of the latents, or of queries and keys.
            norms = self.latent + self.query_latent if self.latent else 2 * self.head_width
            return self.layer_weights + 2 * self.hidden + norms
        # Biases of the output (h), the queries, and keys and values.
        attention = self.hidden + self.queries + 2 * self.kv_heads * self.head_size
        # Biases of the matrices into the MLP, and of the one out of it.
        mlp = (2 if self.gated else 1) * self.mlp_width + self.hidden
        # 4 h: weights and biases of two norms.
        return self.layer_weights + attention + mlp + 4 * self.hidden

    @property
    def _mixed_parameters(self) -> int:
        """A layer's, of the mean one: of the dense decoder's, a share changes its MLP for experts."""
        dense = replace(self, experts=0).layer_parameters
        mlp_parameters = (3 if self.gated else 2) * self.hidden * self.mlp_width
        mlp_parameters += (2 if self.gated else 1) * self.mlp_width + self.hidden if self.biased else 0
        mixtures, of_layers = self.mixtures
        changed = self.hidden * self.experts + self.shared_experts * self._expert_weights - mlp_parameters
        return dense + changed * mixtures // of_layers + self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding of tokens, and of positions where there is one."""
        learned = self.sequence_length * self.hidden if self.positions == "learned" else 0
        return self.vocabulary * self.hidden + learned

    @property
    def num_parameters(self) -> int:
        """All parameters; without the last norm, 12 l h² (1 + 13/12h + (V + s)/12lh) of the classic decoder.

        Source: as `layer_parameters`, equation 2, which leaves the last norm out.
        """
        last_norm = (2 if self.biased else 1) * self.hidden
        logits = 0 if self.tied else self.vocabulary * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + last_norm + logits


def forward_layer_flops(size: DecoderSize) -> int:
    """Operations of one layer's forward for one sequence: 24 s h² + 4 s² h of the classic decoder.

    Source: Narayanan et al., SC21, appendix.
    """
    tokens = size.sequence_length
    # 2 operations per weight and token; attention has 2 s² q for the scores, 2 s² q for what they weigh.
    return 2 * tokens * size.layer_weights + 4 * tokens**2 * size.heads * size.core_width


def logit_flops(size: DecoderSize) -> int:
    """Operations of the logits' forward for one sequence: 2 s h V.

    Source: as `forward_layer_flops`.
    """
    return 2 * size.sequence_length * size.hidden * size.vocabulary


def flops_per_sequence(size: DecoderSize, formula: Formula) -> int:
    """Operations of one sequence in one step, as the table of that formula counts them.

    Args:
        formula: `recompute`: layers four times, logits three times, which is 96 s l h² (1 + s/6h + V/16lh), of
            Narayanan et al., SC21, equation 3, and of the Jean Zay rows since 21 February 2022; `model`: both three
            times, 72 s l h² (1 + s/6h + V/12lh), of Korthikanti et al. 2022, appendix A, of PaLM's model FLOPs and of
            Megatron Core; `causal`: the same with half of attention (Megatron Bridge); `layers`: 8 operations for each
            token and parameter of the layers (earlier Jean Zay A100 rows); `parameters`: the same for all parameters
            (Jean Zay V100 rows).

    Raises:
        LabError: for an unknown formula.
    """
    match formula:
        case "recompute":
            return 4 * size.layers * forward_layer_flops(size) + 3 * logit_flops(size)
        case "model":
            return 3 * size.layers * forward_layer_flops(size) + 3 * logit_flops(size)
        case "causal":
            # Half of the 4 s² q of attention: the tokens after its own, which a token does not see.
            unseen = 2 * size.sequence_length**2 * size.heads * size.core_width
            return 3 * size.layers * (forward_layer_flops(size) - unseen) + 3 * logit_flops(size)
        case "layers":
            return 8 * size.sequence_length * size.layers * size.layer_parameters
        case "parameters":
            return 8 * size.sequence_length * size.num_parameters
    raise LabError(one_of("formula", formula, FORMULAS))
