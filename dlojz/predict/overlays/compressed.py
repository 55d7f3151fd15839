"""Optimizers that communicate: nothing is sent or held before the update, which takes as much as the weights.

Layer 3. Invariant: see `base`; the moments below follow the lines of `dlojz.optim` one by one.
"""

from __future__ import annotations

from itertools import pairwise

from dlojz.optim.messages import SIGNS_PER_BYTE, chunk_bytes, chunk_elements
from dlojz.predict.overlays.base import Overlay
from dlojz.predict.states import FP32_BYTES

_UPDATE_TENSORS = {"one_bit_adam": 2, "one_bit_lamb": 4, "zero_one_adam": 2}
"""Tensors of a parameter's size that its own update takes, besides the mean."""


class Compressed(Overlay):
    """The second stage of 1-bit Adam, 1-bit LAMB and 0/1 Adam."""

    def update_bytes(self, sizes: list[int]) -> int:
        """The most that the update takes at one moment, besides the errors, which are states.

        While parameters are told, one after the other: the momentum, the root of its variance twice, the quotient and
        where the variance is 0 (a byte each), and what was told last. While chunks are compressed: the messages, and of
        one chunk the signs as bytes and as numbers. Then the mean of all, and the update of one parameter.
        """
        dp, last = self.config.layout.dp, sizes[-1]
        telling = max(3 * FP32_BYTES * size + size + FP32_BYTES * former for former, size in pairwise([0, *sizes]))
        updating = _UPDATE_TENSORS[self.config.optimizer] * FP32_BYTES * max(sizes)
        if dp == 1:  # all that is told, and the same end to end
            whole = FP32_BYTES * sum(sizes)
            return max(2 * whole, whole + updating)
        chunk = chunk_elements(sum(sizes), dp)
        messages = 2 * dp * chunk_bytes(chunk) + FP32_BYTES * last
        mean = FP32_BYTES * dp * chunk
        reading = FP32_BYTES * chunk + chunk + chunk // SIGNS_PER_BYTE
        return max(telling, messages + mean + reading, mean + updating)
