"""Compress to one bit per number: signs with error feedback, and the all-reduce that sends them.

A number becomes its sign, one bit of a byte, the first number in the lowest bit; zero counts as positive. A block of
numbers has one scale, the mean of its magnitudes: of all c, c × sign(x) is then the nearest to x, and the error is
smaller than x: ‖x − c sign(x)‖² = ‖x‖² − ‖x‖₁²/n < ‖x‖². Who compresses keeps the error: compressed + error = original.

Source: Bernstein et al. 2018, "signSGD" (arXiv 1802.04434), for the sign; Karimireddy et al. 2019, "Error Feedback
Fixes SignSGD" (arXiv 1901.09847), for the scale and its bound. DeepSpeed's `compressed_allreduce` scales so that the
norm is kept, ‖x‖₂/√n; that overshoots where few numbers are large, and has no such bound.

The all-reduce gives all ranks the same bits, and only delays what it drops: over any number of calls, the sum of the
results + the mean of the workers' errors + the servers' errors = the sum of the means of the inputs. Every rank is a
worker, and the server of one chunk.

    worker i        C[xᵢ + δᵢ] in N chunks ──all-to-all──► server j: the mean of the N chunks j, C[mean + δ̄ⱼ]
    every rank      the N chunks of the result ◄──all-gather──┘

Source: Li et al. 2021, "1-bit LAMB" (arXiv 2104.06069), algorithm 1, lines 7 to 11, as Tang et al. 2021, "1-bit Adam"
(arXiv 2102.02888), algorithm 1; the two collectives are those of DeepSpeed's `NcclBackend.compressed_allreduce`; double
error feedback is Tang et al. 2019, "DoubleSqueeze" (arXiv 1905.05957).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.by_hand.ddp import ranks_of
from dlojz.by_hand.optimizers.sent_bytes import BLOCK_ELEMENTS, SIGNS_PER_BYTE, chunk_bytes, chunk_elements


def pack(values: Tensor) -> Tensor:
    """Pack the signs of numbers, eight to a byte.

    Args:
        values: shape (n,), any n.

    Returns:
        uint8, shape (⌈n/8⌉,); bit i of byte j is 1 where `values[8 j + i]` is not negative, or is not there.
    """
    bits = torch.ones(-(-values.numel() // SIGNS_PER_BYTE) * SIGNS_PER_BYTE, dtype=torch.uint8, device=values.device)
    bits[: values.numel()] = values >= 0
    bits_J8 = bits.view(-1, SIGNS_PER_BYTE)  # noqa: N806 - J bytes of 8 signs
    packed = bits_J8[:, 0].clone()
    # (J,) at a time: bit 0 of all bytes, then the others, shifted into place.
    for bit in range(1, SIGNS_PER_BYTE):
        packed |= bits_J8[:, bit] << bit
    return packed


def unpack(packed: Tensor, numel: int) -> Tensor:
    """Unpack `numel` signs as numbers, +1 or −1: fp32, shape (numel,)."""
    bits_J8 = torch.stack([(packed >> bit) & 1 for bit in range(SIGNS_PER_BYTE)], dim=1)  # noqa: N806
    return bits_J8.view(-1)[:numel].float().mul_(2).sub_(1)  # 0, 1 to −1, +1


def scales_of(values: Tensor, numel: int) -> Tensor:
    """Average the magnitudes of every block of `BLOCK_ELEMENTS` numbers.

    Args:
        values: shape (n,); beyond the first `numel` there is padding, of zeros, which does not count.
        numel: numbers that count, from 0 to n.

    Returns:
        fp32, shape (⌈n/BLOCK_ELEMENTS⌉,); 0 for a block of padding.
    """
    blocks = -(-values.numel() // BLOCK_ELEMENTS)
    full_numel = values.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    sums = values.new_zeros(blocks, dtype=torch.float32)
    # (full blocks, 2048) in one sum; a shorter last block alone.
    sums[: full_numel // BLOCK_ELEMENTS] = values[:full_numel].view(-1, BLOCK_ELEMENTS).abs().sum(dim=1)
    if full_numel < values.numel():
        sums[-1] = values[full_numel:].abs().sum()
    starts = torch.arange(blocks, device=values.device) * BLOCK_ELEMENTS
    # Numbers of each block that count; a block of padding has none, and the clamp avoids 0 / 0.
    return sums / (numel - starts).clamp(1, BLOCK_ELEMENTS)


def decompress(packed: Tensor, scales: Tensor, numel: int) -> Tensor:
    """Multiply `numel` packed signs by the scales of their blocks: fp32, shape (numel,)."""
    values = unpack(packed, numel)
    full_numel = numel // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    # In place: (full blocks, 2048) × (full blocks, 1).
    values[:full_numel].view(-1, BLOCK_ELEMENTS).mul_(scales[: full_numel // BLOCK_ELEMENTS, None])
    values[full_numel:].mul_(scales[-1] if full_numel < numel else 1.0)
    return values


class CompressedAllReduce:
    """All-reduce of one bit per number, for tensors of one size, call after call.

    Args:
        numel: elements of the tensors.
        device: where they are.
        group: the ranks; by default all. One process gets back what it gave, and nothing is compressed.

    Attributes:
        worker_error: δᵢ, what this rank has not sent yet of its tensors, fp32, shape (ranks × chunk,).
        server_error: δ̄ⱼ, what it has not sent yet of the means of its chunk, fp32, shape (chunk,).
    """

    def __init__(self, numel: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.numel = group, numel
        self.rank, self.size = ranks_of(group)
        # One rank sends nothing and keeps no errors.
        self.chunk = chunk_elements(numel, self.size) if self.size > 1 else 0
        self.worker_error = torch.zeros(self.size * self.chunk, device=device)
        self.server_error = torch.zeros(self.chunk, device=device)

    def __call__(self, pieces: Iterable[Tensor]) -> Tensor:
        """Average over the ranks by one bit per number; a collective call.

        Args:
            pieces: this rank's tensor, cut in any way, of fp32: `numel` elements in all. Each is taken as it comes.

        Returns:
            fp32, shape (numel,), the same on all ranks.
        """
        if self.size == 1:
            return torch.cat([piece.reshape(-1) for piece in pieces])
        start = 0
        for piece in pieces:
            self.worker_error[start : start + piece.numel()] += piece.reshape(-1)  # x + δ
            start += piece.numel()
        chunks = self.worker_error.view(self.size, self.chunk)
        messages = torch.empty(self.size, chunk_bytes(self.chunk), dtype=torch.uint8, device=chunks.device)
        for server in range(self.size):
            write_message(chunks[server], self._share(server), messages[server])
        received = torch.empty_like(messages)
        # Who: every rank to every server. What: the chunk it serves, as signs and scales, (ranks, chunk bytes) of
        # uint8. How much: Ψ/8 bytes and 4 for every 2048 elements, as `sent_bytes.message_bytes` says.
        dist.all_to_all_single(received, messages, group=self.group)
        for message in received:  # in the order of the ranks
            # Adds the mean of the N chunks to δ̄, what this server still owes.
            self.server_error.add_(read_message(message, self.chunk), alpha=1 / self.size)
        write_message(self.server_error, self._share(self.rank), messages[0])
        # Who: every server to all ranks. What: the mean of its chunk, as signs and scales. How much: as above.
        dist.all_gather_into_tensor(received.view(-1), messages[0], group=self.group)
        mean = torch.empty_like(self.worker_error)
        for server in range(self.size):
            mean[server * self.chunk : (server + 1) * self.chunk] = read_message(received[server], self.chunk)
        return mean[: self.numel]

    def _share(self, server: int) -> int:
        """Count the elements of a server's chunk without padding."""
        return min(max(self.numel - server * self.chunk, 0), self.chunk)


def write_message(values: Tensor, numel: int, message: Tensor) -> None:
    """Compress one chunk into a message and leave its error in the chunk: compressed + error = original.

    Args:
        values: the chunk, fp32, shape (chunk,), a multiple of 8; becomes δ = x − C[x].
        numel: numbers of it that count; beyond is padding, which takes no part in a scale and of which nothing is kept.
        message: uint8, shape (`sent_bytes.chunk_bytes(chunk)`,), which is filled: the signs, then the scales.
    """
    values[numel:] = 0  # the workers' signs of the padding
    scales, packed = scales_of(values, numel), pack(values)
    # x − C[x], with C[x] exactly as the receiver decompresses it.
    values -= decompress(packed, scales, values.numel())
    values[numel:] = 0
    message[: packed.numel()] = packed
    # fp32 scales as bytes, 4 each, behind the signs.
    message[packed.numel() :] = scales.view(torch.uint8)


def read_message(message: Tensor, chunk: int) -> Tensor:
    """Decompress a message of `chunk` elements, a multiple of 8: fp32, shape (chunk,)."""
    signs = chunk // SIGNS_PER_BYTE
    # A copy: four bytes can be read as one number only where they begin at a multiple of four.
    scales = message[signs : chunk_bytes(chunk)].clone().view(torch.float32)
    return decompress(message[:signs], scales, chunk)
