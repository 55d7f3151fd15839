"""Train on two ranks, count every byte, and lay the counts over the prediction: the course's idea in one file.

    python -m dlojz.by_hand.two_rank_training

Read it from top to bottom. Nothing of the rest of the package is used: torch starts two processes, gloo connects them,
and the gradients are averaged by a ring that is written out here. The package does the same for every engine, with
probes in place of the counters below.

Shapes: B samples of a rank's batch, F features, C classes. Ψ: parameters of the model. N: ranks.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import Manager
from torch.multiprocessing.spawn import spawn

N, STEPS, B, F, C = 2, 5, 8, 16, 4
HIDDEN = 64
FP32_BYTES = 4


def build_model() -> nn.Sequential:
    """Build the model, with the same weights on every rank: the seed is set before each parameter is drawn."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(F, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, C))


def predict() -> dict[str, int]:
    """Predict what a rank keeps and sends, in bytes, from the shapes alone.

    Source: the ring sends 2 (N − 1) / N of its message per all-reduce (Patarasuk & Yuan 2009, §3); AdamW keeps two
    moments per parameter (Kingma & Ba 2015, algorithm 1), and torch one count of steps per tensor.
    """
    psi = (F + 1) * HIDDEN + (HIDDEN + 1) * C  # weights and biases of both layers
    num_tensors = 4
    message_bytes = FP32_BYTES * psi  # all gradients as one message
    return {
        "weights": FP32_BYTES * psi,
        "gradients": FP32_BYTES * psi,
        "optimizer": FP32_BYTES * (2 * psi + num_tensors),
        "sent in a step": 2 * (N - 1) * message_bytes // N,
    }


def ring_all_reduce(flat: Tensor, rank: int) -> int:
    """Add a vector up over all ranks, in place, and return the bytes that this rank has sent.

    Args:
        flat: (Ψ,), cut into N chunks; Ψ is a multiple of N here.
    """
    chunks = flat.chunk(N)  # views: what is written to them is written to `flat`
    sent_bytes = 0

    def pass_on(sent: int, received: int, *, add: bool) -> None:
        nonlocal sent_bytes
        arriving = torch.empty_like(chunks[received % N])
        # Who: this rank sends to its right neighbour and hears from its left one. How much: one chunk, 4 Ψ / N bytes.
        sending = dist.isend(chunks[sent % N].clone(), (rank + 1) % N)
        dist.recv(arriving, (rank - 1) % N)
        assert sending is not None  # this rank is in the group
        sending.wait()
        sent_bytes += chunks[sent % N].nbytes
        chunks[received % N].copy_(chunks[received % N] + arriving if add else arriving)

    for step in range(N - 1):  # reduce-scatter: after it, this rank's chunk rank + 1 holds the whole sum
        pass_on(rank - step, rank - step - 1, add=True)
    for step in range(N - 1):  # all-gather: the sums go round once more, unchanged
        pass_on(rank + 1 - step, rank - step, add=False)
    return sent_bytes


def train(rank: int, ranks: int, report: dict[str, Any]) -> None:
    """Train on this rank's part of each batch; with ranks=1 on the whole batch, which is the reference.

    Args:
        report: filled with the losses of all steps and the bytes counted.
    """
    model = build_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses, sent_bytes = [], 0
    for _ in range(STEPS):
        # Every rank draws the global batch and takes its own rows: no sample is read twice, and none is missing.
        x_BF, labels_B = torch.randn(N * B, F, generator=generator), torch.randint(C, (N * B,), generator=generator)
        if ranks > 1:
            x_BF, labels_B = x_BF[rank * B : (rank + 1) * B], labels_B[rank * B : (rank + 1) * B]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x_BF), labels_B)  # the mean over this rank's samples
        loss.backward()
        if ranks > 1:
            flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
            sent_bytes = ring_all_reduce(flat, rank)
            flat /= N  # the mean of equal parts' means is the mean over the global batch
            for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = gradient.view_as(parameter)
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)  # to be shown: 4 bytes, not counted above
            loss = mean_loss / N
        optimizer.step()
        losses.append(loss.item())
    report["losses"] = losses
    report["weights"] = sum(parameter.nbytes for parameter in parameters)
    report["gradients"] = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
    report["optimizer"] = sum(state.nbytes for states in optimizer.state.values() for state in states.values())
    report["sent in a step"] = sent_bytes


def run_rank(rank: int, folder: str, reports: Any) -> None:
    """Join the group, train, and put the report where the parent reads it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=N)
    report: dict[str, Any] = {}
    train(rank, N, report)
    reports[rank] = report
    dist.barrier()  # no rank ends while another one still waits for its message
    dist.destroy_process_group()


def main() -> None:
    """Train on one process and on two, and print predicted beside measured."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both ranks are on this machine
    reference: dict[str, Any] = {}
    train(0, 1, reference)
    with tempfile.TemporaryDirectory() as folder, Manager() as manager:
        reports = manager.dict()
        spawn(run_rank, (folder, reports), nprocs=N)
        measured = [dict(reports[rank]) for rank in range(N)]
    print(f"{'bytes of a rank':<16}{'predicted':>10}{'rank 0':>10}{'rank 1':>10}")
    for name, predicted in predict().items():
        print(f"{name:<16}{predicted:>10}{measured[0][name]:>10}{measured[1][name]:>10}")
    gaps = [abs(a - b) for a, b in zip(measured[0]["losses"], reference["losses"], strict=True)]
    print(f"losses on {N} ranks: {' '.join(f'{loss:.4f}' for loss in measured[0]['losses'])}")
    print(f"largest gap to one process: {max(gaps):.1g}")


if __name__ == "__main__":
    main()
