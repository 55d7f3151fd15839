"""Two random states for tensor parallelism: one gives the same numbers on all ranks, one different numbers.

Drawing from one stream moves neither the other one nor torch's own generators.

    what is dropped                       each rank has        stream        so that
    output of a parallel region           the same numbers     replicated    the ranks' streams stay equal
    attention weights, inside a region    its own heads        split         masks of different heads differ
    tokens, with sequence parallelism     its own tokens       split         masks of different tokens differ

With the wrong one nothing fails: equal masks inside a region drop the same places in every rank's heads, and different
masks outside of it make the replicas differ.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), appendix B.2; Megatron-LM's `CudaRNGStatesTracker`
(megatron/core/tensor_parallel/random.py), whose offset 2718 this is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Where = Literal["replicated", "split"]
STREAMS: tuple[Where, ...] = get_args(Where)
SPLIT_OFFSET = 2718

_State = dict[str, Tensor]
"""State of the generator of each device: `cpu`, and `cuda` where there is one."""


class RandomStates:
    """Random streams of one rank, `replicated` and `split`.

    Args:
        seed: 0 or more; the same on all ranks of a tensor-parallel group, another one for each replica and pipeline
            stage, which draw for other samples and other layers.
        tp_rank: this rank's number in its tensor-parallel group.

    Raises:
        LabError: if one of the two is no whole number from 0.
    """

    def __init__(self, seed: int, tp_rank: int) -> None:
        for name, value in (("seed", seed), ("tp_rank", tp_rank)):
            # bool is a subclass of int.
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise phrase.refused("no seed", name=name, value=value)
        self._states: dict[Where, _State] = {
            "replicated": _seeded(seed),
            # The offset keeps rank 0's stream apart from `replicated`.
            "split": _seeded(seed + SPLIT_OFFSET + tp_rank),
        }
        self._drawing: Where | None = None

    def replicated(self) -> AbstractContextManager[None]:
        """Draw the same numbers on all ranks of the group within this context; nothing is sent."""
        return self._stream("replicated")

    def split(self) -> AbstractContextManager[None]:
        """Draw this rank's own numbers within this context."""
        return self._stream("split")

    @contextmanager
    def _stream(self, name: Where) -> Iterator[None]:
        if self._drawing is not None:
            raise phrase.refused("stream within a stream", name=name, drawing=self._drawing)
        # torch's dropout draws from the global generators: their state is swapped for the stream's, then restored.
        before = _current()
        _set(self._states[name])
        self._drawing = name
        try:
            yield
        finally:
            # After an exception too: what was drawn is drawn.
            self._states[name] = _current()
            self._drawing = None
            _set(before)

    def dropout(self, x: Tensor, p: float, stream: Where, training: bool = True) -> Tensor:
        """Set each number to 0 with probability `p`, and divide the others by 1 − p.

        Args:
            x: any shape; the same values on all ranks where `stream` is `replicated`.
            stream: `replicated` outside of the parallel regions, `split` inside, and for this rank's own tokens.
            training: otherwise `x` is returned, and nothing is drawn.

        Raises:
            LabError: if `p` is no probability, or there is no such stream.
        """
        if stream not in STREAMS:
            raise LabError(one_of("stream", stream, STREAMS))
        if not 0 <= p <= 1:
            raise phrase.refused("no probability", p=p)
        if not training:
            return x
        with self._stream(stream):
            return F.dropout(x, p)

    def checkpointed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function, keep its inputs only, and call it again in backward with the same random numbers.

        torch's `checkpoint(preserve_rng_state=True)` restores its own generators, not these streams: the second call
        would draw other masks. Megatron's `CheckpointFunction` restores its tracker's states for the same reason.
        """
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=self.checkpoint_contexts)

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for torch's `checkpoint(context_fn=…)`: the second call draws the numbers of the first."""
        # A copy of the states of now; later draws replace the entries of the original.
        return nullcontext(), self._as_it_was(dict(self._states))

    @contextmanager
    def _as_it_was(self, states: dict[Where, _State]) -> Iterator[None]:
        # The second call draws on a copy; afterwards the streams go on where they were.
        current_states, self._states = self._states, dict(states)
        try:
            yield
        finally:
            self._states = current_states


def _seeded(seed: int) -> _State:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return {device: torch.Generator(device).manual_seed(seed).get_state() for device in devices}


def _current() -> _State:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set(state: _State) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
