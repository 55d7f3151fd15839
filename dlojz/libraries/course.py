"""What the programs share, whatever the library: the command line, the model with its loss, the samples, the report.

Layer 3, loads torch. Invariant: same command line, same training: the same weights on every rank, the same samples in
every step, whichever program asks. Nothing here knows of a library, nor of a probe.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from dlojz import data as datasets
from dlojz import models
from dlojz.config import RunConfig
from dlojz.data.sampling import MicroBatchSampler
from dlojz.text import say
from dlojz.train import loop
from dlojz.train.engines.base import mean_loss
from dlojz.train.stop import ignore_stop_signal

Batch = Sequence[Tensor]
"""A micro-batch: (inputs, targets)."""


class OneSentence(argparse.ArgumentParser):
    """A command line that ends the program with one sentence where it cannot be followed."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options' values; a word that is none of them ends the program."""
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = " ".join(option for action in self._actions for option in action.option_strings[-1:])
            self.error(
                say(
                    en=f"{' '.join(unknown)} was received, which this program does not do; its options are {options}.",
                    fr=f"{' '.join(unknown)} a été reçu, ce que ce programme ne fait pas ; ses options sont {options}.",
                )
            )
        return given

    def error(self, message: str) -> NoReturn:
        """End the program with this sentence."""
        self.exit(2, f"{self.prog}{say(en=':', fr=' :')} {message}\n")


def parser() -> argparse.ArgumentParser:
    """The command line of every program; the short options are the course's, and a program adds its own."""
    made = OneSentence(allow_abbrev=False)
    made.add_argument("--model", default="coatnet_tiny")
    made.add_argument("--data", default=None)
    made.add_argument("--data-root", default=None)
    made.add_argument("--image-size", type=int, default=None)
    made.add_argument("--sequence-length", type=int, default=None)
    made.add_argument("-b", "--batch-size", type=int, default=16, help="samples per micro-batch and rank")
    made.add_argument("--accumulation", type=int, default=1, help="micro-batches per step and rank")
    made.add_argument("-s", "--steps", type=int, default=20)
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--weight-decay", type=float, default=0.0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.set_defaults(zero=0, tp=1, pp=1)  # a program adds those of them that it has
    return made


def _config(args: argparse.Namespace) -> RunConfig:
    """The model and the data of a command line, filled in with what suits the model."""
    return RunConfig.of(
        model=args.model,
        data=args.data,
        data_root=args.data_root,
        image_size=args.image_size,
        sequence_length=args.sequence_length,
        seed=args.seed,
    )


def device(args: argparse.Namespace) -> torch.device:
    """The device of this rank, from here on its current one: the GPU of its number on this node, or the CPU."""
    if args.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(found)  # what asks for "cuda" alone, NCCL's barrier too, would else meet on the first GPU
    return found


class WithLoss(nn.Module):
    """A model that answers a batch with its loss, as the course's slide has it, and models of the Hugging Face hub.

    Args:
        network: from inputs to logits.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a micro-batch `(inputs, targets)`, a scalar in fp32."""
        inputs, targets = batch
        return mean_loss(self.network(inputs), targets)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the network, in order."""
        found = self.network.blocks
        assert isinstance(found, nn.ModuleList)  # every model of the catalogue is a flat list of blocks
        return found


def build_model(args: argparse.Namespace) -> WithLoss:
    """The model, on the CPU, with the same weights on every rank."""
    return WithLoss(loop.build_model(_config(args)))


class Counted(Sampler[list[int]]):
    """The first so many micro-batches of a replica.

    Args:
        sampler: deals them out without end.
        number: how many.
    """

    def __init__(self, sampler: MicroBatchSampler, number: int) -> None:
        self._sampler, self._number = sampler, number

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._sampler), self._number)

    def __len__(self) -> int:
        return self._number


def data_loader(args: argparse.Namespace, rank: int = 0, world_size: int = 1) -> DataLoader[tuple[Tensor, Tensor]]:
    """This replica's micro-batches `(inputs, targets)`, all those of the training; rank 0 of 1 has every replica's.

    Args:
        args: the command line.
        rank: number of the replica.
        world_size: replicas. Micro-batch j of replica r is number j · world_size + r of all.
    """
    config = _config(args)
    replicas = world_size if world_size > 1 else int(os.environ.get("WORLD_SIZE", "1")) // (args.tp * args.pp)
    dataset = datasets.load(
        config.data_name,
        family=models.spec(config.model).family,
        num_classes=config.num_classes,
        seed=config.seed,
        image_size=config.image_size,
        sequence_length=config.sequence_length,
        data_root=config.data_root,
    )
    sampler = MicroBatchSampler(
        len(dataset),  # type: ignore[arg-type]
        micro_batch=args.batch_size,
        global_batch=args.batch_size * args.accumulation * replicas,
        dp=world_size,
        dp_rank=rank,
        seed=args.seed,
    )
    number = args.steps * args.accumulation * (replicas // world_size)
    workers = 4 if config.data_name == "imagenet" else 0
    return DataLoader(
        dataset,
        batch_sampler=Counted(sampler, number),
        num_workers=workers,
        worker_init_fn=ignore_stop_signal if workers else None,
    )


def report(loss: Tensor) -> None:
    """Print a loss on the first rank: called at the end of every micro-batch, after the update if there was one."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss {float(loss.detach()):.6f}", flush=True)
