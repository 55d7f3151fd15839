"""Train as the course's slides do: the command line, model, samples, report and DeepSpeed JSON of all programs.

The same command line gives the same training with every library: the same weights on every rank, the same samples in
every step, in the older torch of Colossal-AI's environment too, whose `nn.init.trunc_normal_` draws other numbers (once
a uniform number through the inverse of the error function, now a normal one, drawn again where it falls outside the
bounds). DeepSpeed's JSON file takes sizes that it leaves out, or gives as `"auto"`, from the command line, as
Accelerate and the Hugging Face Trainer do, and is refused where it says otherwise: DeepSpeed alone would follow the
file, while the samples follow the command line.

Source: the source of `torch.nn.init` in torch 2.5 and 2.13, for `trunc_normal_`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlojz.base.language import Sentences, colon
from dlojz.base.machine import ignore_stop_signal
from dlojz.config.run_config import RunConfig
from dlojz.data.datasets import MicroBatchSampler
from dlojz.models.blocks import mean_loss
from dlojz.train import loop

TEXTS = Sentences(Path(__file__).parent / "data" / "course_training.md")

Batch = Sequence[Tensor]
"""A micro-batch: (inputs, targets)."""


class OneSentence(argparse.ArgumentParser):
    """Command-line parser that ends the program with one sentence on an error."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the options; an unknown word ends the program."""
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            # The last form of each option is the long one.
            options = " ".join(option for action in self._actions for option in action.option_strings[-1:])
            self.error(TEXTS.say("options", "unknown", unknown=" ".join(unknown), options=options))
        return arguments

    def error(self, message: str) -> NoReturn:
        """End the program with this sentence."""
        self.exit(2, f"{self.prog}{colon()}{message}\n")


def parser() -> argparse.ArgumentParser:
    """Build the parser of every program; the short options are the course's, and a program adds its own."""
    arguments = OneSentence(allow_abbrev=False)  # `--acc` is an error, not `--accumulation`
    arguments.add_argument("--model", default="coatnet_tiny")
    arguments.add_argument("--data", default=None)
    arguments.add_argument("--data-root", default=None)
    arguments.add_argument("--image-size", type=int, default=None)
    arguments.add_argument("--sequence-length", type=int, default=None)
    arguments.add_argument("-b", "--batch-size", type=int, default=16, help="samples per micro-batch and rank")
    arguments.add_argument("--accumulation", type=int, default=1, help="micro-batches per step and rank")
    arguments.add_argument("-s", "--steps", type=int, default=20)
    arguments.add_argument("--lr", type=float, default=1e-3)
    arguments.add_argument("--weight-decay", type=float, default=0.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments.set_defaults(zero=0, tp=1, pp=1)  # a program adds the options it has
    return arguments


def _config(args: argparse.Namespace) -> RunConfig:
    """Fill in the model and the data of a command line with the model's defaults."""
    return RunConfig.of(
        model=args.model,
        data=args.data,
        data_root=args.data_root,
        image_size=args.image_size,
        sequence_length=args.sequence_length,
        seed=args.seed,
    )


def device(args: argparse.Namespace) -> torch.device:
    """Choose and set the device of this rank: the GPU of its number on this node, or the CPU."""
    if args.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(gpu)  # otherwise plain "cuda", and NCCL's barrier, would be the first GPU
    return gpu


class WithLoss(nn.Module):
    """Model that returns the loss of a batch, as on the course's slide and on the Hugging Face hub."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a micro-batch `(inputs, targets)`, a scalar in fp32."""
        inputs, targets = batch
        return mean_loss(self.network(inputs), targets)

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks of the network, for FSDP's units."""
        blocks = self.network.blocks
        assert isinstance(blocks, nn.ModuleList)  # every model of the catalogue is a flat list of blocks
        return blocks


@torch.no_grad()
def trunc_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fill a tensor from a normal distribution of mean 0, truncated to [−2, 2], as torch 2.13 does; returns it."""
    drawn = tensor.normal_(0.0, std)
    # Drawn again and not clamped, which would pile numbers up at the two bounds.
    while bool((outside := drawn.abs() > 2.0).any()):
        drawn = torch.where(outside, torch.empty_like(drawn).normal_(0.0, std), drawn)
    return tensor if drawn is tensor else tensor.copy_(drawn)  # `normal_` works in place


def build_model(args: argparse.Namespace) -> WithLoss:
    """Build the model on the CPU, with the same weights on every rank and with every library's torch."""
    before = nn.init.trunc_normal_
    nn.init.trunc_normal_ = trunc_normal_  # type: ignore[assignment]
    try:
        return WithLoss(loop.build_model(_config(args)))
    finally:
        nn.init.trunc_normal_ = before


def data_loader(args: argparse.Namespace, rank: int = 0, world_size: int = 1) -> DataLoader[tuple[Tensor, Tensor]]:
    """Load this replica's micro-batches `(inputs, targets)` of the whole training; rank 0 of 1 has every replica's.

    Args:
        world_size: replicas. Micro-batch j of replica r is number j · world_size + r of all.
    """
    config = _config(args)
    # Rank 0 of 1 reads for all replicas: a library that divides the samples itself gets all of them.
    replicas = world_size if world_size > 1 else int(os.environ.get("WORLD_SIZE", "1")) // (args.tp * args.pp)
    dataset = loop.open_dataset(config)
    sampler = MicroBatchSampler(
        len(dataset),
        micro_batch=args.batch_size,
        global_batch=args.batch_size * args.accumulation * replicas,
        dp=world_size,
        dp_rank=rank,
        seed=args.seed,
        number=args.steps * args.accumulation * (replicas // world_size),  # micro-batches of this loader
    )
    workers = 4 if config.data_name == "imagenet" else 0
    return DataLoader(
        dataset, batch_sampler=sampler, num_workers=workers, worker_init_fn=ignore_stop_signal if workers else None
    )


def report(loss: Tensor) -> None:
    """Print a loss on the first rank: called at the end of every micro-batch, after the update if there was one."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss {float(loss.detach()):.6f}", flush=True)


def completed(args: argparse.Namespace) -> dict[str, Any]:
    """Read DeepSpeed's JSON file of a command line, completed with the sizes that it leaves out.

    Args:
        args: with `deepspeed_config`, the path of the file.

    Raises:
        SystemExit: with one sentence, if there is no such file, or it contradicts the command line.
    """
    document = _document(args.deepspeed_config)
    sizes = {
        "train_micro_batch_size_per_gpu": ("-b", args.batch_size),
        "gradient_accumulation_steps": ("--accumulation", args.accumulation),
    }
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    expected_sizes = {
        **sizes,
        "train_batch_size": (f"-b × --accumulation × {ranks}", args.batch_size * args.accumulation * ranks),
    }
    # "auto", or no entry at all, leaves a size to the command line.
    for key, (option, size) in expected_sizes.items():
        if document.get(key, "auto") not in ("auto", size):
            _differ(args.deepspeed_config, key, document[key], option, size)
    zero = document.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if args.zero and args.zero != stage:
        _differ(args.deepspeed_config, "stage", stage, "--zero", args.zero)
    # The sizes are filled in below; any other "auto" stays.
    settings = {key: value for key, value in document.items() if value != "auto" or key not in expected_sizes}
    return {**settings, **{key: size for key, (_, size) in sizes.items()}}


def _document(path: str | None) -> dict[str, Any]:
    if path is None:
        raise SystemExit(TEXTS.say("deepspeed", "no file"))
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise SystemExit(TEXTS.say("deepspeed", "cannot be read", path=path, text=text)) from None
    if not isinstance(document, dict):
        raise SystemExit(TEXTS.say("deepspeed", "no object", path=path))
    return document


def _differ(path: str, key: str, entry: object, option: str, value: object) -> NoReturn:
    raise SystemExit(
        TEXTS.say("deepspeed", "another value", path=path, key=key, entry=entry, option=option, value=value)
    )
