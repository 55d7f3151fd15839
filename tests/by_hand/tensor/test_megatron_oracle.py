"""The lab's tensor parallelism against Megatron-core's own layers: same weights, same ranks, same numbers, same bytes.

What is covered: the six conjugate operators, columns, rows, the MLP, the vocabulary's embedding and loss, each with and
without sequence parallelism where it has both forms; then a whole GPT, each of its gradients. Megatron puts the
sequence first, (T, B, D), where the lab puts the batch first, (B, T, D): tensors are turned at the border, and nothing
else is adapted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.by_hand.tensor import axis as operators
from dlojz.by_hand.tensor.axis import TensorAxis, own_slice
from dlojz.by_hand.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)
from dlojz.by_hand.tensor.split import parallel_loss, split_model
from dlojz.libraries.megatron_adapter import cuda_is_the_cpu, load_weights, model_options, own_parameters, table_options
from dlojz.models.gpt import GPT
from dlojz.models.sizes import GPTSize
from dlojz.processes.forks import spmd
from dlojz.train.dispatch_trace import StorageTrace

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed here: `make libraries` installs it"
)

SIZE = 2
B, T, D, V, F_ = 2, 6, 12, 10, 24
SIZE_OF_GPT = GPTSize(width=16, depth=2, num_heads=4)


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(x: Tensor) -> Tensor:
    """(B, T, …) as (T, B, …), or back."""
    return x.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Side:
    """What one of the two has found on a rank: tensors by name, and its collectives with their bytes."""

    found: dict[str, Tensor]
    forward: list[list[Any]]
    backward: list[list[Any]]


def compared(own: Side, theirs: Side) -> dict[str, Any]:
    largest = 0.0
    assert own.found.keys() == theirs.found.keys()
    for name, tensor in own.found.items():
        assert tensor.shape == theirs.found[name].shape, name
        largest = max(largest, float((tensor - theirs.found[name]).abs().max()))
    return {
        "difference": largest,
        "largest": max(float(tensor.abs().max()) for tensor in own.found.values()),
        "own": [own.forward, own.backward],
        "theirs": [theirs.forward, theirs.backward],
    }


def with_input(
    x: Tensor,
    function: Callable[[Tensor], Tensor],
    seed: int,
    parameters: Mapping[str, Tensor] | None = None,
    unsettled: Tensor | None = None,
) -> Side:
    """Run a function of one input and its backward under the lab's probe of communication.

    Args:
        x: the input.
        function: gives the output.
        seed: of the output's gradient.
        parameters: those whose gradients are told too.
        unsettled: one of which, with sequence parallelism, Megatron adds up the ranks' gradients after backward, in
            `finalize_model_grads`, where the lab does it in backward.
    """
    leaf = x.clone().requires_grad_()
    with StorageTrace({}) as probe:
        probe.step = 0
        output = function(leaf * 1.0)
        probe.step = 1
        output.backward(seeded(seed, *output.shape).to(output.dtype))
        if unsettled is not None:
            dist.all_reduce(unsettled.grad)
    calls = [
        [[call.collective, call.message_bytes] for call in probe.trace.calls if call.step == step] for step in (0, 1)
    ]
    found = {"input": leaf, **(parameters or {})}
    gradients = {f"gradient of {name}": one.grad for name, one in found.items() if one.grad is not None}
    return Side({"output": output.detach(), **gradients}, *calls)


# ---- the operators, on tensors of two dimensions of which the first is the sequence's (of one sample, for the lab)

OPERATORS = {
    "copy": "copy_to_tensor_model_parallel_region",
    "add_up": "reduce_from_tensor_model_parallel_region",
    "gather_tokens": "gather_from_sequence_parallel_region",
    "scatter_tokens": "reduce_scatter_to_sequence_parallel_region",
    "take_tokens": "scatter_to_sequence_parallel_region",
    "gather_features": "gather_from_tensor_model_parallel_region",
}


def operator(name: str, axis: TensorAxis) -> dict[str, Any]:
    from megatron.core import tensor_parallel

    x_TD = seeded(axis.rank, T, D)
    theirs = with_input(x_TD, getattr(tensor_parallel, OPERATORS[name]), 7)
    own = with_input(x_TD, lambda x: getattr(operators, name)(x.unsqueeze(0), axis).squeeze(0), 7)
    return compared(own, theirs)


# ---- the layers, in double precision: what is left is the order of the sums


def config(sequence_parallel: bool) -> Any:
    from megatron.core.model_parallel_config import ModelParallelConfig

    return ModelParallelConfig(
        tensor_model_parallel_size=SIZE,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
    )


def linear(seed: int, inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def their_column(whole: nn.Linear, axis: TensorAxis, *, gather_output: bool = False) -> nn.Module:
    from megatron.core import tensor_parallel

    layer = tensor_parallel.ColumnParallelLinear(
        whole.in_features,
        whole.out_features,
        config=config(axis.sequence_parallel),
        init_method=nn.init.zeros_,
        bias=True,
        gather_output=gather_output,
    )
    layer.weight.data, layer.bias.data = own_slice(whole.weight, 0, axis).data, own_slice(whole.bias, 0, axis).data
    return layer


def their_row(whole: nn.Linear, axis: TensorAxis) -> nn.Module:
    from megatron.core import tensor_parallel

    layer = tensor_parallel.RowParallelLinear(
        whole.in_features,
        whole.out_features,
        config=config(axis.sequence_parallel),
        init_method=nn.init.zeros_,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
    )
    layer.weight.data, layer.bias.data = own_slice(whole.weight, 1, axis).data, whole.bias.data.clone()
    return layer


def named(**layers: nn.Module) -> dict[str, Tensor]:
    return {f"{layer} {name}": one for layer, module in layers.items() for name, one in module.named_parameters()}


def stream(axis: TensorAxis, width: int = D) -> Tensor:
    """(B, T, width), the same on both ranks; with sequence parallelism this rank's tokens of it."""
    x_BTD = seeded(1, B, T, width)
    return axis.part(x_BTD, 1) if axis.sequence_parallel else x_BTD


def column(axis: TensorAxis, *, gather_output: bool = False) -> dict[str, Any]:
    whole, x = linear(0, D, F_), stream(axis)
    own = ColumnParallelLinear(whole, axis, gather_output=gather_output)
    theirs = their_column(whole, axis, gather_output=gather_output)
    return compared(
        with_input(x, lambda x: own(operators.enter(x, axis)), 2, named(column=own)),
        with_input(x, lambda x: turned(theirs(turned(x))[0]), 2, named(column=theirs)),
    )


def unsettled(layer: nn.Module, axis: TensorAxis) -> Tensor | None:
    return layer.bias if axis.sequence_parallel else None


def row(axis: TensorAxis) -> dict[str, Any]:
    whole, x_BTf = linear(0, F_, D), seeded(10 + axis.rank, B, T, F_ // SIZE)
    own, theirs = RowParallelLinear(whole, axis), their_row(whole, axis)
    return compared(
        with_input(x_BTf, own, 2, named(row=own)),
        with_input(x_BTf, lambda x: turned(theirs(turned(x))[0]), 2, named(row=theirs), unsettled(theirs, axis)),
    )


def mlp(axis: TensorAxis) -> dict[str, Any]:
    expand, project, x = linear(0, D, F_), linear(1, F_, D), stream(axis)
    own_column, own_row = ColumnParallelLinear(expand, axis), RowParallelLinear(project, axis)
    column, row = their_column(expand, axis), their_row(project, axis)
    return compared(
        with_input(
            x, lambda x: own_row(F.gelu(own_column(operators.enter(x, axis)))), 2, named(column=own_column, row=own_row)
        ),
        with_input(
            x,
            lambda x: turned(row(F.gelu(column(turned(x))[0]))[0]),
            2,
            named(column=column, row=row),
            unsettled(row, axis),
        ),
    )


def embedding(axis: TensorAxis) -> dict[str, Any]:
    from megatron.core import tensor_parallel

    torch.manual_seed(0)
    whole = nn.Embedding(V, D, dtype=torch.float64)
    tokens_BT = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(4))
    own = VocabularyParallelEmbedding(whole, axis)
    theirs = tensor_parallel.VocabParallelEmbedding(
        V,
        D,
        init_method=nn.init.zeros_,
        # The sum is then shared out along its first dimension: the sequence, which Megatron turns to the front first.
        reduce_scatter_embeddings=axis.sequence_parallel,
        config=config(axis.sequence_parallel),
    )
    theirs.weight.data = own_slice(whole.weight, 0, axis).data
    nothing = torch.zeros(())
    turn = turned if axis.sequence_parallel else lambda x: x
    return compared(
        with_input(nothing, lambda _: own(tokens_BT), 2, named(table=own)),
        with_input(nothing, lambda _: turn(theirs(tokens_BT)), 2, named(table=theirs)),
    )


def cross_entropy(axis: TensorAxis) -> dict[str, Any]:
    """In single precision, to which Megatron casts; the mean over tokens is taken of what it gives for each."""
    from megatron.core import tensor_parallel

    logits_BTv = seeded(5 + axis.rank, B, T, V // SIZE).float()
    targets_BT = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(4))
    start = axis.rank * (V // SIZE)

    def theirs(logits_BTv: Tensor) -> Tensor:
        losses_TB: Tensor = tensor_parallel.vocab_parallel_cross_entropy(turned(logits_BTv), turned(targets_BT))
        return losses_TB.mean()

    own = lambda x: vocabulary_parallel_cross_entropy(x, targets_BT, start, axis)  # noqa: E731
    return compared(with_input(logits_BTv, own, 2), with_input(logits_BTv, theirs, 2))


# ---- a whole GPT


def gpt(axis: TensorAxis, tied: bool = False) -> dict[str, Any]:
    """Loss, and the gradient of every parameter."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    whole = GPT(replace(SIZE_OF_GPT, tied_head=tied), sequence_length=T, vocabulary_size=V)
    theirs = GPTModel(
        TransformerConfig(**model_options(whole), tensor_model_parallel_size=SIZE),
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        **table_options(whole),
    )
    load_weights(theirs, whole)
    own = split_model(whole, axis)
    loss = parallel_loss(own)
    text_BT = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(4))
    tokens_BT, targets_BT = text_BT[:, :-1].contiguous(), text_BT[:, 1:].contiguous()
    positions_BT = torch.arange(T).expand(B, T)
    later_11TT = torch.ones(1, 1, T, T).triu(1).bool()
    own_names = dict(own.named_parameters())
    nothing = torch.zeros(())
    return compared(
        with_input(nothing, lambda _: loss(own(tokens_BT), targets_BT), 2, own_names),
        with_input(
            nothing,
            lambda _: theirs(tokens_BT, positions_BT, later_11TT, labels=targets_BT).mean(),
            2,
            dict(own_parameters(theirs, SIZE_OF_GPT.depth)),
        ),
    )


PLAIN: dict[str, Callable[[TensorAxis], dict[str, Any]]] = {
    **{name: partial(operator, name) for name in OPERATORS},
    "column": column,
    "column, gathered": partial(column, gather_output=True),
    "row": row,
    "mlp": mlp,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "gpt": gpt,
    "gpt, tied": partial(gpt, tied=True),
}
WITH_SEQUENCE = {"column": column, "row": row, "mlp": mlp, "embedding": embedding}


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """Every comparison, on two ranks that are started once."""

    def ranks(rank: int, size: int) -> dict[str, Any]:
        from megatron.core import parallel_state, tensor_parallel  # here: the tests' own process stays as it is

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)  # without dropout nothing is drawn
        with cuda_is_the_cpu():
            group = parallel_state.get_tensor_model_parallel_group()
            found = {name: compare(TensorAxis(group)) for name, compare in PLAIN.items()}
            for name, compare in WITH_SEQUENCE.items():
                found[f"{name}, sequence"] = compare(TensorAxis(group, sequence_parallel=True))
        return found

    given = spmd(ranks, SIZE)
    for answer in given:
        assert answer.error is None, (answer.rank, answer.error)
    return [answer.value for answer in given]


EXACT = (*OPERATORS, "embedding", "embedding, sequence")
"""Each element is one rank's, moved or added to zeros: there is nothing to round in another order."""
SINGLE = ("cross_entropy", "gpt", "gpt, tied")
ROUNDINGS = 16
"""How many units in the last place of the largest number the order of the sums may cost; 1 to 4 were seen."""
CASES = (*PLAIN, *(f"{name}, sequence" for name in WITH_SEQUENCE))


@pytest.mark.parametrize("case", CASES)
def test_tensor_axis_outputs_and_gradients_are_those_of_megatron(case: str, answers: list[dict[str, Any]]) -> None:
    unit = 0.0 if case in EXACT else torch.finfo(torch.float32 if case in SINGLE else torch.float64).eps
    for answer in answers:
        found = answer[case]
        assert found["largest"] > 0.1  # else nothing was compared
        assert found["difference"] <= ROUNDINGS * unit * found["largest"]


@pytest.mark.parametrize("case", [case for case in CASES if case not in (*SINGLE, "column, sequence", "mlp, sequence")])
def test_tensor_axis_has_megatrons_collectives_with_the_same_bytes(case: str, answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        (forward, backward), (their_forward, their_backward) = answer[case]["own"], answer[case]["theirs"]
        assert (forward, sorted(backward)) == (their_forward, sorted(their_backward))
        assert forward or backward


def test_vocabulary_parallel_cross_entropy_sends_two_messages_and_megatron_three(answers: list[dict[str, Any]]) -> None:
    """Sum of exponentials and logit of the target travel together: one latency less, and the same bytes."""
    token_bytes = 4 * B * T
    for answer in answers:
        assert answer["cross_entropy"]["own"] == [[["all_reduce", token_bytes], ["all_reduce", 2 * token_bytes]], []]
        assert answer["cross_entropy"]["theirs"] == [[["all_reduce", token_bytes]] * 3, []]


def test_tensor_axis_keeps_the_tokens_that_megatron_gathers_again_in_backward(answers: list[dict[str, Any]]) -> None:
    """It keeps its own tokens only, and pays a second all-gather; the lab keeps what the first one has given."""
    again = ["all_gather", 8 * B * T * D]
    for answer in answers:
        for case in ("column, sequence", "mlp, sequence"):
            (forward, backward), (their_forward, their_backward) = answer[case]["own"], answer[case]["theirs"]
            assert forward == their_forward
            assert sorted([*backward, again]) == sorted(their_backward)


def test_tensor_axis_of_a_whole_gpt_sends_what_megatron_s_sends(answers: list[dict[str, Any]]) -> None:
    """But for the loss's three numbers per token, which are two messages here and three there."""
    stream_bytes = 4 * B * T * SIZE_OF_GPT.width
    regions = [["all_reduce", stream_bytes]] * (2 * SIZE_OF_GPT.depth + 1)
    for answer in answers:
        (forward, backward), (their_forward, their_backward) = answer["gpt"]["own"], answer["gpt"]["theirs"]
        assert (forward[: len(regions)], backward) == (regions, regions)
        assert (their_forward[: len(regions)], their_backward) == (regions, regions)
        loss, their_loss = forward[len(regions) :], their_forward[len(regions) :]
        assert sum(size for _, size in loss) == sum(size for _, size in their_loss) == 3 * 4 * B * T
