"""The order in which backward makes the gradients ready, which decides what goes into which of DDP's buckets.

Layer 3. Invariant: autograd itself says it, in the trace of the run (see `tracing`): the reverse of the parameters'
order is near, but a layer's bias and weight may come the other way round.

Source: torch `csrc/distributed/c10d/reducer.cpp`, `push_rebuilt_params` and `rebuild_buckets`.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.predict.following import Mark
from dlojz.predict.model_trace import trace_of
from dlojz.predict.shapes import model_shapes


def ready_order(config: RunConfig) -> tuple[int, ...]:
    """Numbers of the parameters, as `model.parameters()` lists them, in the order in which gradients are ready."""
    number_of = {parameter.name: number for number, parameter in enumerate(model_shapes(config).parameters)}
    # Of one sample autograd's graph may lack a copy or a sum; from two on it is the same, and the order with it.
    few = config.layout.model_copy(update={"micro_batch": min(config.layout.micro_batch, 2)})
    events = trace_of(config.model_copy(update={"layout": few})).events
    marks = (event for event in events if isinstance(event, Mark))
    return tuple(number_of[mark.name] for mark in marks if mark.what == "ready")
