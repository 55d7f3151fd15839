"""Dimensions of every model in the catalogue, from the paper named beside them; parameters and FLOPs are counted."""

from dataclasses import asdict, dataclass
from typing import Literal

from dlojz.models.experts.routing import Routing


@dataclass(frozen=True, kw_only=True)
class StageSize:
    """Stage of ``depth`` blocks of one kind and width; ``stride`` 2 halves the side in the first of them."""

    kind: Literal["convolution", "attention"]
    depth: int
    width: int
    stride: Literal[1, 2] = 2


@dataclass(frozen=True, kw_only=True)
class CoAtNetSize:
    """Widths and depths of a CoAtNet: the stem (S0), then the stages S1 to S4."""

    stem_width: int
    stages: tuple[StageSize, ...]
    head_dim: int = 32


@dataclass(frozen=True, kw_only=True)
class ViTSize:
    """Dimensions of a Vision Transformer."""

    patch: int
    width: int
    depth: int
    num_heads: int
    mlp_width: int


@dataclass(frozen=True, kw_only=True)
class AlexNetSize:
    """Channels of the five convolutions and width of the two hidden dense layers of an AlexNet."""

    channels: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)
    dense_width: int = 4096


@dataclass(frozen=True, kw_only=True)
class ExpertsSize:
    """Mixtures of experts that replace a decoder's MLPs, with their default routing (see `Routing`).

    Args:
        num_experts: feed-forward networks of each mixture.
        top_k: experts that see each token.
        every: the last of so many blocks has a mixture, the others an MLP; 1 is all of them.
        capacity_factor: tokens that an expert takes, in units of its fair share.
        balance_loss: weight of the loss that balances the load.
        mlp_width: of an expert's hidden layer; 0 is that of the decoder's MLPs.
        shared: experts beside them that see every token.
        dense: blocks at the beginning that have no mixture.
    """

    num_experts: int
    top_k: int
    every: int = 1
    capacity_factor: float = 1.25
    balance_loss: float = 0.01
    mlp_width: int = 0
    shared: int = 0
    dense: int = 0

    def defaults(self) -> dict[str, int | float]:
        """Default routing under the names of a run's fields."""
        routing = asdict(self.routing())
        return {("expert_groups" if name == "groups" else name): value for name, value in routing.items()}

    def routing(self) -> Routing:
        """Default routing of a mixture."""
        return Routing(
            experts=self.num_experts,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            balance_loss=self.balance_loss,
        )

    def has_mixture(self, block: int) -> bool:
        """Whether a block of the decoder, counted from 0, has a mixture."""
        return block >= self.dense and (block + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """Dimensions of a GPT; MLP and experts are four times as wide; `tied_head`: the output reuses the embedding."""

    width: int
    depth: int
    num_heads: int
    tied_head: bool = False
    experts: ExpertsSize | None = None


@dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """Dimensions of a Llama-like decoder; fewer ``num_kv_heads`` than ``num_heads`` is grouped-query attention."""

    width: int
    depth: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    tied_head: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    experts: ExpertsSize | None = None


@dataclass(frozen=True, kw_only=True)
class QwenSize:
    """Dimensions of a Qwen-3-like decoder; heads are ``head_dim`` wide, whatever its width."""

    width: int
    depth: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    head_dim: int = 128
    tied_head: bool = False
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    experts: ExpertsSize | None = None


@dataclass(frozen=True, kw_only=True)
class DeepSeekSize:
    """Dimensions of a DeepSeek-like decoder.

    Args:
        latent: width of the vector that keys and values of a token are made of.
        query_latent: the same of its queries; 0 where they are made of the token itself.
        head_dim: width of a head's values, and of the part of its keys that is not rotated.
        rotated_dim: width of the rotated part.
    """

    width: int
    depth: int
    num_heads: int
    mlp_width: int
    latent: int
    query_latent: int = 0
    head_dim: int = 128
    rotated_dim: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    experts: ExpertsSize | None = None


def _coatnet(
    depths: tuple[int, int, int, int], widths: tuple[int, int, int, int, int], head_dim: int = 32
) -> CoAtNetSize:
    stem_width, *stage_widths = widths
    kinds: tuple[Literal["convolution", "attention"], ...] = ("convolution",) * 2 + ("attention",) * 2
    stages = tuple(
        StageSize(kind=kind, depth=depth, width=width)
        for kind, depth, width in zip(kinds, depths, stage_widths, strict=True)
    )
    return CoAtNetSize(stem_width=stem_width, stages=stages, head_dim=head_dim)


def _coatnet_mixed(widths: tuple[int, int, int, int, int, int]) -> CoAtNetSize:
    stem, s1, s2, s3_convolution, s3_attention, s4 = widths
    # Two thirds of the MBConv blocks of S2 move into S3, in front of its attention blocks and at the same resolution
    # (appendix A.2), hence the stage with stride 1.
    stages = (
        StageSize(kind="convolution", depth=2, width=s1),
        StageSize(kind="convolution", depth=4, width=s2),
        StageSize(kind="convolution", depth=8, width=s3_convolution),
        StageSize(kind="attention", depth=42, width=s3_attention, stride=1),
        StageSize(kind="attention", depth=2, width=s4),
    )
    return CoAtNetSize(stem_width=stem, stages=stages, head_dim=128)


# Dai et al. 2021 (arXiv 2106.04803), table 3 for 0-4, 11 for 5, 12 for 6-7; tiny is ours, for CPUs.
COATNET_SIZES: dict[str, CoAtNetSize] = {
    "coatnet_tiny": _coatnet((1, 2, 3, 2), (8, 16, 32, 64, 128), head_dim=16),
    "coatnet_0": _coatnet((2, 3, 5, 2), (64, 96, 192, 384, 768)),
    "coatnet_1": _coatnet((2, 6, 14, 2), (64, 96, 192, 384, 768)),
    "coatnet_2": _coatnet((2, 6, 14, 2), (128, 128, 256, 512, 1024)),
    "coatnet_3": _coatnet((2, 6, 14, 2), (192, 192, 384, 768, 1536)),
    "coatnet_4": _coatnet((2, 12, 28, 2), (192, 192, 384, 768, 1536)),
    "coatnet_5": _coatnet((2, 12, 28, 2), (192, 256, 512, 1280, 2048), head_dim=64),
    # Table 12 prints 2048 for the last width, but then neither of table 5's totals comes out (1.35 B parameters for
    # 1.47 B); the missing 120 M cost about 30 G multiply-adds, so they lie in S4: 3072 gives both totals.
    "coatnet_6": _coatnet_mixed((192, 192, 384, 768, 1536, 3072)),
    "coatnet_7": _coatnet_mixed((192, 256, 512, 1024, 2048, 3072)),
}

# Dosovitskiy et al. 2020 (arXiv 2010.11929), table 1; Ti and S: Touvron et al. 2020 (arXiv 2012.12877), table 1. Tiny
# is ours, for CPUs; mini is to tiny what DistilBERT is to BERT (Sanh et al. 2019, arXiv 1910.01108), half its blocks.
VIT_SIZES: dict[str, ViTSize] = {
    "vit_mini": ViTSize(patch=8, width=128, depth=2, num_heads=4, mlp_width=512),
    "vit_tiny": ViTSize(patch=8, width=128, depth=4, num_heads=4, mlp_width=512),
    "vit_ti_16": ViTSize(patch=16, width=192, depth=12, num_heads=3, mlp_width=768),
    "vit_s_16": ViTSize(patch=16, width=384, depth=12, num_heads=6, mlp_width=1536),
    "vit_b_16": ViTSize(patch=16, width=768, depth=12, num_heads=12, mlp_width=3072),
    "vit_l_16": ViTSize(patch=16, width=1024, depth=24, num_heads=16, mlp_width=4096),
    "vit_h_14": ViTSize(patch=14, width=1280, depth=32, num_heads=16, mlp_width=5120),
}

# Krizhevsky 2014 (arXiv 1404.5997), figure 1: the one-tower AlexNet.
ALEXNET_SIZES: dict[str, AlexNetSize] = {
    "alexnet_tiny": AlexNetSize(channels=(16, 48, 96, 64, 64), dense_width=256),
    "alexnet": AlexNetSize(),
}

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
GPT_SIZES: dict[str, GPTSize] = {
    "gpt_tiny": GPTSize(width=128, depth=4, num_heads=4),
    # Ours, for CPUs: gpt_tiny with experts in every second block, a habit of Lepikhin et al. 2020 (arXiv 2006.16668).
    "moe_tiny": GPTSize(width=128, depth=4, num_heads=4, experts=ExpertsSize(num_experts=8, top_k=1, every=2)),
    "gpt2_tiny": GPTSize(width=128, depth=4, num_heads=4, tied_head=True),
    "gpt2": GPTSize(width=768, depth=12, num_heads=12, tied_head=True),
    "gpt2_medium": GPTSize(width=1024, depth=24, num_heads=16, tied_head=True),
    "gpt2_large": GPTSize(width=1280, depth=36, num_heads=20, tied_head=True),
    "gpt2_xl": GPTSize(width=1600, depth=48, num_heads=25, tied_head=True),
}

# Touvron et al. 2023 (arXiv 2307.09288), table 1 and appendix A.2.1; Llama Team 2024 (arXiv 2407.21783), table 3; Jiang
# et al. 2024 (arXiv 2401.04088), table 1, for 8x7B; the configuration released with the weights of 8x22B. Mixtral drops
# no token, for which no capacity is large enough but that of all tokens: 1.25 is ours, and so is the balance loss.
LLAMA_SIZES: dict[str, LlamaSize] = {
    "llama_tiny": LlamaSize(width=128, depth=4, num_heads=4, num_kv_heads=2, mlp_width=352),
    "tinyllama_1b": LlamaSize(width=2048, depth=22, num_heads=32, num_kv_heads=4, mlp_width=5632),
    "llama_2_7b": LlamaSize(width=4096, depth=32, num_heads=32, num_kv_heads=32, mlp_width=11008),
    "llama_2_13b": LlamaSize(width=5120, depth=40, num_heads=40, num_kv_heads=40, mlp_width=13824),
    "llama_2_70b": LlamaSize(width=8192, depth=80, num_heads=64, num_kv_heads=8, mlp_width=28672),
    "llama_3_8b": LlamaSize(width=4096, depth=32, num_heads=32, num_kv_heads=8, mlp_width=14336, rope_theta=500_000.0),
    "llama_3_70b": LlamaSize(width=8192, depth=80, num_heads=64, num_kv_heads=8, mlp_width=28672, rope_theta=500_000.0),
    "llama_3_1_405b": LlamaSize(
        width=16384, depth=126, num_heads=128, num_kv_heads=8, mlp_width=53248, rope_theta=500_000.0
    ),
    "mixtral_8x7b": LlamaSize(
        width=4096,
        depth=32,
        num_heads=32,
        num_kv_heads=8,
        mlp_width=14336,
        rope_theta=1_000_000.0,
        experts=ExpertsSize(num_experts=8, top_k=2),
    ),
    "mixtral_8x22b": LlamaSize(
        width=6144,
        depth=56,
        num_heads=48,
        num_kv_heads=8,
        mlp_width=16384,
        rope_theta=1_000_000.0,
        experts=ExpertsSize(num_experts=8, top_k=2),
    ),
}

_OF_128 = ExpertsSize(num_experts=128, top_k=8, balance_loss=0.001)
# Qwen Team 2025 (arXiv 2505.09388), tables 1 and 2, and the configurations released with the weights; tiny is ours.
QWEN_SIZES: dict[str, QwenSize] = {
    "qwen_tiny": QwenSize(width=128, depth=4, num_heads=4, num_kv_heads=2, mlp_width=352, head_dim=48, tied_head=True),
    "qwen_3_0_6b": QwenSize(width=1024, depth=28, num_heads=16, num_kv_heads=8, mlp_width=3072, tied_head=True),
    "qwen_3_4b": QwenSize(width=2560, depth=36, num_heads=32, num_kv_heads=8, mlp_width=9728, tied_head=True),
    "qwen_3_8b": QwenSize(width=4096, depth=36, num_heads=32, num_kv_heads=8, mlp_width=12288),
    "qwen_3_32b": QwenSize(width=5120, depth=64, num_heads=64, num_kv_heads=8, mlp_width=25600),
    "qwen_3_30b_a3b": QwenSize(width=2048, depth=48, num_heads=32, num_kv_heads=4, mlp_width=768, experts=_OF_128),
    "qwen_3_235b_a22b": QwenSize(width=4096, depth=94, num_heads=64, num_kv_heads=4, mlp_width=1536, experts=_OF_128),
}

# DeepSeek-AI 2024 (arXiv 2405.04434), appendix B, for Lite; (arXiv 2412.19437), section 4.2, for V3; tiny is ours.
DEEPSEEK_SIZES: dict[str, DeepSeekSize] = {
    "deepseek_tiny": DeepSeekSize(
        width=128, depth=4, num_heads=4, mlp_width=352, latent=32, query_latent=48, head_dim=32, rotated_dim=16,
        experts=ExpertsSize(num_experts=8, top_k=2, mlp_width=64, shared=1, dense=1),
    ),
    "deepseek_v2_lite": DeepSeekSize(
        width=2048, depth=27, num_heads=16, mlp_width=10944, latent=512,
        experts=ExpertsSize(num_experts=64, top_k=6, mlp_width=1408, shared=2, dense=1),
    ),
    "deepseek_v3": DeepSeekSize(
        width=7168, depth=61, num_heads=128, mlp_width=18432, latent=512, query_latent=1536,
        experts=ExpertsSize(num_experts=256, top_k=8, mlp_width=2048, shared=1, dense=3),
    ),
}  # fmt: skip

Size = CoAtNetSize | ViTSize | AlexNetSize | GPTSize | LlamaSize | QwenSize | DeepSeekSize
IMAGE_SIZES: dict[str, CoAtNetSize | ViTSize | AlexNetSize] = {**COATNET_SIZES, **VIT_SIZES, **ALEXNET_SIZES}
TEXT_SIZES: dict[str, GPTSize | LlamaSize | QwenSize | DeepSeekSize] = {
    **GPT_SIZES,
    **LLAMA_SIZES,
    **QWEN_SIZES,
    **DEEPSEEK_SIZES,
}
