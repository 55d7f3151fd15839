"""Compare what memory estimators from PyPI answer with what was measured on a GPU, and this package with them.

    python -m venv estimators --system-site-packages
    estimators/bin/pip install --no-deps vramcalc vram-check hf-vram-calc gpu-estimator llm-analysis fire
    estimators/bin/python benchmarks/estimators.py --page docs/estimators.md

The truth is not ours: the author of vramcalc measured `torch.cuda.max_memory_allocated()` on an RTX A6000 in thirteen
fine-tunings and published the figures with the tool (README of 0.1.2, "Validation"; GB are 10⁹ bytes). Each tool gets
the question in its own words, as far as it has words for it; what it cannot be asked is "—". `zero_grad` keeps the
gradients there (`set_to_none=False`), so that the loss's peak has them too: here, a second micro-batch says the same.

Exit code 1 if this package is more than 12 % off where the setting can be said.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
GB = 10**9
LIMIT_PERCENT = 12.0

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "num_key_value_heads": 8,
}  # fmt: skip
CONFIGS = {
    "Llama-3.2-1B": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "Llama-3.2-3B": _LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "Qwen2.5-1.5B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072, "num_key_value_heads": 2, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Sizes of the models, from their public config.json."""


@dataclass(frozen=True)
class Question:
    """One fine-tuning of 2,048 tokens and one sample with AdamW: how it was set, and what was measured."""

    model: str
    measured_gb: float
    pure: bool = False
    """Weights in bf16; otherwise fp32 under bf16 autocast."""
    checkpointing: bool = False
    lora: bool = False
    """LoRA of rank 16 on the four projections of attention."""
    eager: bool = False
    """Attention that keeps its scores."""

    @property
    def title(self) -> str:
        """The setting in words."""
        words = ["bf16" if self.pure else "autocast"]
        words += [word for word in ("eager", "lora", "checkpointing") if getattr(self, word)]
        return f"{self.model}, {', '.join(words)}".replace("lora", "LoRA 16")


QUESTIONS = (
    Question("Llama-3.2-1B", 17.51, pure=True),
    Question("Llama-3.2-1B", 13.76, pure=True, checkpointing=True),
    Question("Llama-3.2-1B", 30.55),
    Question("Llama-3.2-1B", 25.22, checkpointing=True),
    Question("Llama-3.2-1B", 30.26, pure=True, eager=True),
    Question("Llama-3.2-3B", 32.15, pure=True, checkpointing=True),
    Question("Qwen2.5-1.5B", 23.40, pure=True),
    Question("Llama-3.2-1B", 10.13, pure=True, lora=True),
    Question("Llama-3.2-1B", 14.52, lora=True),
    Question("Llama-3.2-1B", 9.51, lora=True, checkpointing=True),
    Question("Llama-3.2-3B", 18.98, pure=True, lora=True),
    Question("Llama-3.1-8B", 20.55, pure=True, lora=True, checkpointing=True),
    Question("Qwen2.5-1.5B", 13.78, pure=True, lora=True),
)


def words(question: Question, folder: Path) -> list[str]:
    """Write the question for `dlojz memory`; the model is a folder with its config.json."""
    options = ["--sequence-length", "2048", "--micro-batch", "1", "--device", "a6000"]
    options += ["--precision", "bf16-true" if question.pure else "bf16"]
    options += ["--checkpointing", "full"] if question.checkpointing else []
    targets = ["--lora", "16", "--lora-targets", "q_proj,k_proj,v_proj,o_proj"]
    # The gradients of adapters are small enough to be left out of a second micro-batch.
    options += targets if question.lora else ["--micro-batches", "2"]
    return [f"hf:{folder}", *options]


def write_config(question: Question, root: Path) -> Path:
    """Write the config.json of a question's model into a folder of its own, and return that."""
    attention = {"_attn_implementation": "eager"} if question.eager else {}
    folder = root / f"{question.model}{'-eager' if question.eager else ''}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[question.model] | attention))
    return folder


def ours(question: Question, folder: Path) -> float | None:
    """Ask this package; None where the setting is refused."""
    command = [sys.executable, "-m", "dlojz", "memory", *words(question, folder), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if answer.returncode:
        print(answer.stderr.strip(), file=sys.stderr)
        return None
    return float(json.loads(answer.stdout)["memory"]["peak_bytes"]) / GB


def _num_parameters(question: Question, folder: Path) -> int:
    return sum(parameter.numel() for parameter in _empty(folder).parameters())


def _empty(folder: Path):  # a transformers model on the meta device
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def _vramcalc(question: Question, folder: Path) -> float | None:
    from vramcalc import estimate

    return estimate(
        str(folder), mode="train", batch=1, seq_len=2048, precision="pure" if question.pure else "amp",
        grad_checkpoint=question.checkpointing, lora_rank=16 if question.lora else None,
        attn_impl="eager" if question.eager else "sdpa",
    ).total / GB  # fmt: skip


def _accelerate(question: Question, folder: Path) -> float | None:
    """`accelerate estimate-memory`: the line "training with Adam", whatever the batch."""
    from accelerate.commands.estimate import estimate_training_usage

    if question.lora:
        return None
    return max(estimate_training_usage(4 * _num_parameters(question, folder), "bfloat16").values()) / GB


def _deepspeed(question: Question, folder: Path) -> float | None:
    """`estimate_zero2_model_states_mem_needs` of one GPU: weights and states alone, in mixed precision."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if question.lora or question.pure:
        return None
    return estimate_zero2_model_states_mem_needs(_num_parameters(question, folder), cpu_offload=False)[1] / GB


def _llm_analysis(question: Question, folder: Path) -> float | None:
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
    from llm_analysis.config import ModelConfig, get_dtype_config_by_name, get_gpu_config_by_name

    if question.lora or question.pure:
        return None
    sizes = CONFIGS[question.model]
    model = ModelConfig(
        question.model, sizes["num_hidden_layers"], sizes["num_attention_heads"], sizes["hidden_size"],
        sizes["vocab_size"], max_seq_len=2048, num_key_value_heads=sizes["num_key_value_heads"],
        ffn_embed_dim=sizes["intermediate_size"], model_type="llama",
    )  # fmt: skip
    analysis = LLMAnalysis(
        model, get_gpu_config_by_name("a100-sxm-80gb"), get_dtype_config_by_name("w16a16e16"), achieved_tflops=100,
        achieved_memory_bandwidth_GBs=1000,
    )  # fmt: skip
    summary = analysis.training(
        batch_size_per_gpu=1, seq_len=2048, total_num_tokens=2048, mlp_gated_linear_units=True, output_dir=None,
        activation_recomputation=ActivationRecomputation.FULL if question.checkpointing else (
            ActivationRecomputation.NONE
        ),
    )  # fmt: skip
    return (summary["memory_used_per_gpu"] if "memory_used_per_gpu" in summary else _total(summary)) / GB


def _total(summary: dict[str, float]) -> float:
    names = ("weight_memory_per_gpu", "gradient_memory_per_gpu", "optimizer_state_memory_per_gpu")
    return sum(summary[name] for name in (*names, "activation_memory_per_gpu"))


def _gpu_estimator(question: Question, folder: Path) -> float | None:
    from gpu_estimator import GPUEstimator

    if question.lora:
        return None
    sizes = CONFIGS[question.model]
    result = GPUEstimator().estimate_from_architecture(
        sizes["num_hidden_layers"], sizes["hidden_size"], sizes["num_attention_heads"], sizes["vocab_size"],
        batch_size=1, sequence_length=2048, precision="bf16", gradient_checkpointing=question.checkpointing,
    )  # fmt: skip
    return result.total_memory_gb * 2**30 / GB


def _vram_check(question: Question, folder: Path) -> float | None:
    import vram_check

    if question.lora:
        return None
    count = _num_parameters(question, folder)
    dtype = "bf16" if question.pure else "fp32"
    return vram_check.estimate(count, batch_size=1, dtype=dtype, seq_len=2048).total_gb * 2**30 / GB


def _hf_vram_calc(question: Question, folder: Path) -> float | None:
    from hf_vram_calc.calculator import ConfigManager, VRAMCalculator

    calculator, dtype = VRAMCalculator(ConfigManager()), "bf16" if question.pure else "fp32"
    count = _num_parameters(question, folder)
    weights = calculator.calculate_model_memory(count, dtype)
    if question.lora:
        return calculator.calculate_lora_memory(weights, count, 16) * 2**30 / GB
    return calculator.calculate_training_memory(weights) * 2**30 / GB


TOOLS: dict[str, Callable[[Question, Path], float | None]] = {
    "dlojz": ours,
    "vramcalc": _vramcalc,
    "llm-analysis": _llm_analysis,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "gpu-estimator": _gpu_estimator,
    "vram-check": _vram_check,
    "hf-vram-calc": _hf_vram_calc,
}


def answers() -> dict[str, list[float | None]]:
    """Ask each tool each question: GB, None where it has no words for it."""
    with tempfile.TemporaryDirectory() as name:
        folders = [write_config(row, Path(name)) for row in QUESTIONS]
        return {
            tool: [ask(row, folder) for row, folder in zip(QUESTIONS, folders, strict=True)]
            for tool, ask in TOOLS.items()
        }


def _percent(answer_gb: float, measured_gb: float) -> float:
    return 100 * (answer_gb / measured_gb - 1)


def _signed(answer_gb: float, measured_gb: float) -> str:
    return f"{round(_percent(answer_gb, measured_gb)):+d} %".replace("-", "−")


def table(asked: dict[str, list[float | None]]) -> str:
    """Write the answers as a table: GB and how far off, in percent."""
    lines = [f"| fine-tuning | measured GB | {' | '.join(asked)} |", f"|--|--:|{'--:|' * len(asked)}"]
    for index, question in enumerate(QUESTIONS):
        cells = [
            "—" if answer is None else f"{answer:.1f} ({_signed(answer, question.measured_gb)})"
            for answer in (column[index] for column in asked.values())
        ]
        lines.append(f"| {question.title} | {question.measured_gb:.2f} | {' | '.join(cells)} |")
    shares = [
        [abs(_percent(answer, row.measured_gb)) for answer, row in zip(column, QUESTIONS, strict=True) if answer]
        for column in asked.values()
    ]
    lines.append(f"| asked, of {len(QUESTIONS)} | | {' | '.join(str(len(errors)) for errors in shares)} |")
    lines.append(f"| off in the median | | {' | '.join(f'{median(e):.1f} %' if e else '—' for e in shares)} |")
    lines.append(f"| off at worst | | {' | '.join(f'{max(e):.1f} %' if e else '—' for e in shares)} |")
    return "\n".join(lines)


PAGE = """# Memory estimators on the same questions

Written by `python benchmarks/estimators.py --page docs/estimators.md`, which says how each tool is asked. Fine-tunings
of 2,048 tokens and one sample with AdamW on one RTX A6000: what the allocator held at its peak, as the author of
vramcalc measured and published it; nothing here was fitted to it. GB are 10⁹ bytes. "—": the tool has no words for it.
Versions: {versions}.

{table}

What each counts: vramcalc, decoders like LLaMA, its formulas corrected after these very measurements; llm-analysis,
weights, states and activations by formula; accelerate and DeepSpeed's estimator, weights and states; gpu-estimator,
vram-check and hf-vram-calc, factors of the number of parameters. Ours traces the model (`dlojz memory hf:FOLDER`); it
does not know that the measuring script holds the logits until backward has ended: 0.5 to 0.6 GB of each row.
"""


def main() -> int:
    """Print the table, or write the page; 1 if this package is off by more than the limit."""
    from dlojz.models.foreign.vision_packages import ensure_torchvision_imports

    ensure_torchvision_imports()
    asked = answers()
    print(table(asked))
    if sys.argv[1:2] == ["--page"]:
        versions = ", ".join(f"{tool} {version(tool)}" for tool in asked if tool != "dlojz")
        Path(sys.argv[2]).write_text(PAGE.format(versions=versions, table=table(asked)), encoding="utf-8")
    errors = [
        abs(_percent(answer, row.measured_gb))
        for answer, row in zip(asked["dlojz"], QUESTIONS, strict=True)
        if answer is not None
    ]
    return int(max(errors, default=0.0) > LIMIT_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
