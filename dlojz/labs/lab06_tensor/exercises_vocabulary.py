"""Exercises of lab 06 on sharded tokens: embedding and loss by vocabulary, and sequence parallelism with dropout.

An answer is held to the outputs and gradients of one process, which draws each rank's dropout mask too, and then to
what it has sent: neither the table nor the logits are ever gathered.

Shape suffixes: B batch, T tokens, D width; V vocabulary, v = V / n words of one rank; S = T / n tokens of one rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dlojz.labs.kit.exercise import Mistake, Said
from dlojz.labs.kit.exercise_texts import Texts, edited_when_called
from dlojz.labs.kit.rank_judges import (
    NO_BACKWARD_SUM,
    NO_FORWARD_SUM,
    NO_OFFSET,
    OF_X,
    OUTPUT,
    TENSOR_CASES,
    Values,
    added,
    asked_for,
    gathers,
    gradient,
    normals,
    only,
    refuse_gathers,
    times_ranks,
)
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

VOCABULARY_BATCH, VOCABULARY_TOKENS, WORDS, VOCABULARY_WIDTH = 2, 6, 12, 4
OF_TABLE = "gradient of table"
LOSS, OF_LOGITS = "loss", "gradient of logits"
VOCABULARY_LABELS = {
    OF_TABLE: Said("the gradient of the table", "le gradient de la table"),
    LOSS: Said("the loss", "la perte"),
    OF_LOGITS: Said("the gradient of the logits", "le gradient des logits"),
}
_NO_MASK = TEXTS.sentence("shared", "words of other ranks are not left out")
_OFF_BY_ONE = TEXTS.sentence("shared", "off by one")


def _axis() -> Any:
    from dlojz.by_hand.tensor.axis import TensorAxis

    return TensorAxis(dist.group.WORLD)


def _tokens(seed: int) -> Tensor:
    """Every word at least once, so that no rank is spared."""
    return torch.randperm(WORDS, generator=torch.Generator().manual_seed(seed)).view(
        VOCABULARY_BATCH, VOCABULARY_TOKENS
    )


def _table(seed: int) -> Any:
    return normals(seed, (WORDS, VOCABULARY_WIDTH), (VOCABULARY_BATCH, VOCABULARY_TOKENS, VOCABULARY_WIDTH))


def _embedding_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    table, coefficients = _table(seed)
    shard = table.chunk(size)[rank].clone().requires_grad_()
    y = answer(_tokens(seed), shard, _axis())
    if y is not None and y.shape == coefficients.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_TABLE: shard.grad}


def _looked_up(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    table, coefficients = _table(seed)
    table.requires_grad_()
    y = table[_tokens(seed)]
    (y * coefficients).sum().backward()
    return {OUTPUT: y.detach(), OF_TABLE: gradient(table).chunk(size)[rank]}


def _found(rank: int, size: int, seed: int) -> Tensor:
    """What one rank finds before the sum."""
    # Rank r has the words from r · share to (r + 1) · share - 1, one row of the table each.
    share = WORDS // size
    start = rank * share
    tokens, table = _tokens(seed), _table(seed)[0].chunk(size)[rank]
    elsewhere = (tokens < start) | (tokens >= start + share)
    rows: Tensor = table[(tokens - start).masked_fill(elsewhere, 0)]
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _added(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return {OUTPUT: added(_found(peer, size, seed) for peer in range(size))}


def _found_otherwise(edits: str) -> Values:
    return edited_when_called((_added, _found), edits)


_INDEX = "(tokens - start).masked_fill(elsewhere, 0)"
_BLANKED = ".masked_fill(elsewhere.unsqueeze(-1), 0.0)"

VOCABULARY_EMBEDDING = TEXTS.exercise(
    "vocabulary-embedding",
    _looked_up,
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_embedding_trial,
    labels=VOCABULARY_LABELS,
    source=(_added, _found),
    faults={
        "offset of the rank's words is missing": Mistake(_found_otherwise("= rank * share → = 0"), *NO_OFFSET),
        "first row for words of other ranks": Mistake(_found_otherwise(f"{_BLANKED} →"), *_NO_MASK),
        "nearest row for words of other ranks": Mistake(
            _found_otherwise(f"{_INDEX} → (tokens - start).clamp(0, share - 1); {_BLANKED} →"), *_NO_MASK
        ),
        "every rank keeps what it has found itself": lambda rank, size, seed: {OUTPUT: _found(rank, size, seed)},
        "gradient of the table times the ranks": times_ranks(_looked_up, OF_TABLE),
        "range of words off by one": (
            Mistake(_found_otherwise(f"{_INDEX} → tokens % share; >= start + → > start +"), *_OFF_BY_ONE),
            Mistake(_found_otherwise("tokens < start → tokens <= start"), *_OFF_BY_ONE),
        ),
        "later words are looked up too": f"{_INDEX} → tokens % share; >= start + share → >= WORDS",
        # Those before are negative, and counted from the end.
        "earlier words are looked up too": f"{_INDEX} → tokens % share; tokens < start → tokens < 0",
        "the order of the ranks is reversed": "= rank * share → = (size - 1 - rank) * share",
        "you take the largest over the ranks": lambda rank, size, seed: {
            OUTPUT: _looked_up(rank, size, seed)[OUTPUT].clamp(min=0.0)
        },
    },
    inspect=refuse_gathers(TEXTS.sentence("vocabulary-embedding", "the ranks' tables or results are gathered")),
)


def _logits(seed: int) -> Tensor:
    """With an odd seed, some far larger than exp can bear: without the largest one subtracted, the loss is not finite.

    With an even one, all are of a size that tells mistakes apart by their finite values.
    """
    (logits,) = normals(seed, (VOCABULARY_BATCH, VOCABULARY_TOKENS, WORDS))
    return 40 * logits + 60 if seed % 2 else 2 * logits + 3


def _loss_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    logits = _logits(seed).chunk(size, dim=-1)[rank].clone().requires_grad_()
    loss = answer(logits, _tokens(seed), _axis())
    if loss is not None and loss.numel() == 1 and loss.requires_grad:
        loss.backward()
    return {LOSS: loss, OF_LOGITS: logits.grad}


def _loss(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    logits = _logits(seed).requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), _tokens(seed).flatten())
    loss.backward()
    return {LOSS: loss.detach(), OF_LOGITS: gradient(logits).chunk(size, dim=-1)[rank]}


def _loss_of_ranks(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The loss alone, from each rank's logits: what the usual mistakes change."""
    share, logits, tokens = WORDS // size, _logits(seed), _tokens(seed)
    sums, targets = [], []
    for peer, peer_logits in enumerate(logits.chunk(size, dim=-1)):
        shifted = peer_logits - logits.amax(-1, keepdim=True)
        start = peer * share
        elsewhere = (tokens < start) | (tokens >= start + share)
        local_index = (tokens - start).masked_fill(elsewhere, 0) % share
        target = shifted.gather(-1, local_index.unsqueeze(-1)).squeeze(-1)
        targets.append(target.masked_fill(elsewhere, 0.0))
        sums.append(shifted.exp().sum(-1))
    # Three numbers per token travel: the largest logit, this sum of exponentials, the target's logit.
    losses = added(sums).log() - added(targets)
    return {LOSS: losses.mean()}


def _loss_otherwise(edits: str) -> Values:
    return edited_when_called((_loss_of_ranks,), edits)


def _local_loss(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """Over this rank's words, with the target's number brought among them."""
    logits = _logits(seed).chunk(size, dim=-1)[rank]
    return {LOSS: F.cross_entropy(logits.flatten(0, 1), _tokens(seed).flatten() % logits.shape[-1])}


def _mean_inside(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The logarithm of a mean over the tokens; here its value is nearly right, and its gradient is not."""
    logits = _logits(seed).requires_grad_()
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    target = shifted.gather(-1, _tokens(seed).unsqueeze(-1))
    loss = shifted.exp().sum(-1).mean().log() - target.mean()
    loss.backward()
    return {LOSS: loss.detach(), OF_LOGITS: gradient(logits).chunk(size, dim=-1)[rank]}


def _inspect_logits(answers: list[RankAnswer], size: int) -> None:
    tokens = VOCABULARY_BATCH * VOCABULARY_TOKENS
    numels = [*asked_for(answers[0], "all_reduce"), *gathers(answers[0])]
    if sum(numels) > 4 * tokens and max(numels) <= tokens:
        raise TEXTS.wrong("vocabulary-loss", "too many numbers per token", numels=sum(numels), tokens=tokens)
    if max(numels, default=0) > tokens and sum(numels) > 4 * tokens:
        raise TEXTS.wrong("vocabulary-loss", "logits are gathered")


VOCABULARY_LOSS = TEXTS.exercise(
    "vocabulary-loss",
    _loss,
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_loss_trial,
    labels=VOCABULARY_LABELS,
    source=(_loss_of_ranks,),
    faults={
        "each rank subtracts its own largest logit": "- logits.amax → - peer_logits.amax",
        "offset of the rank's words is missing": Mistake(_loss_otherwise("= peer * share → = 0"), *NO_OFFSET),
        "logits not masked for words of other ranks": Mistake(
            _loss_otherwise(".masked_fill(elsewhere, 0.0) →"), *_NO_MASK
        ),
        "the logarithms of the ranks' sums are added up": "added(sums) → torch.stack(sums).prod(0)",
        "the denominator holds this rank's words only": "added(sums) → sums[rank]",
        "the target's logit is known to one rank only": "added(targets) → targets[rank]",
        "the loss is a sum over the tokens": ".mean() → .sum()",
        "m is not taken away from the target's logit": "shifted.gather → peer_logits.gather",
        "the sign is the other way round": "losses.mean() → -losses.mean()",
        "the logarithm is missing": ".log() →",
        "you add the tokens of a sample up": ".mean() → .sum(1).mean()",
        "range of words off by one": (
            Mistake(_loss_otherwise("tokens < start → tokens < start + 1"), *_OFF_BY_ONE),
            Mistake(_loss_otherwise(">= start + share → > start + share"), *_OFF_BY_ONE),
        ),
        "mean before the logarithm": _mean_inside,
        "one loss per token": ".mean() →",
        "each rank takes the cross-entropy of its words alone": _local_loss,
    },
    inspect=_inspect_logits,
)


SEQUENCE_BATCH, SEQUENCE_TOKENS, SEQUENCE_WIDTH, HIDDEN = 2, 6, 8, 12
DROP = 0.5
CASES = ((2, 11), (2, 12), (3, 13))
OF_WEIGHT, OF_BIAS = "gradient of weight", "gradient of bias"
SEQUENCE_LABELS = {
    OF_WEIGHT: Said("the gradient of the norm's weight", "le gradient du poids de la normalisation"),
    OF_BIAS: Said("the gradient of the norm's bias", "le gradient du biais de la normalisation"),
}


def shares_tokens(seed: int) -> bool:
    """Whether a case is one with sequence parallelism: every other seed."""
    return seed % 2 == 1


def _inputs(seed: int) -> Any:
    """x, the norm's weight and bias, the region's two layers, the coefficients of the loss."""
    stream = (SEQUENCE_BATCH, SEQUENCE_TOKENS, SEQUENCE_WIDTH)
    return normals(
        seed, stream, (SEQUENCE_WIDTH,), (SEQUENCE_WIDTH,), (HIDDEN, SEQUENCE_WIDTH), (SEQUENCE_WIDTH, HIDDEN), stream
    )


def _region(rank: int, size: int, seed: int) -> Callable[[Tensor], Tensor]:
    """This rank's part of a parallel region: columns, a function of each feature, rows; the sum is left to do."""
    _, _, _, expand, project, _ = _inputs(seed)
    return lambda x_BTD: torch.tanh(x_BTD @ expand.chunk(size)[rank].T) @ project.chunk(size, dim=1)[rank].T


def _own(tensor: Tensor, rank: int, size: int, seed: int) -> Tensor:
    return tensor.chunk(size, dim=1)[rank] if shares_tokens(seed) else tensor


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    from dlojz.by_hand.tensor.axis import TensorAxis
    from dlojz.by_hand.tensor.random_state import RandomStates

    x, weight, bias, _, _, coefficients = _inputs(seed)
    leaves = [leaf.clone().requires_grad_() for leaf in (_own(x, rank, size, seed), weight, bias)]
    axis = TensorAxis(dist.group.WORLD, sequence_parallel=shares_tokens(seed))
    torch.manual_seed(seed)  # who draws from torch's own generator draws the same on all ranks
    gathered = _noted_gathers()
    y = answer(*leaves, _region(rank, size, seed), RandomStates(seed, rank), axis)
    own_x = leaves[0].detach().flatten().sort().values  # in whatever order its dimensions are sent
    early = any(part.numel() == len(own_x) and torch.equal(part.flatten().sort().values, own_x) for part in gathered)
    rank_coefficients = _own(coefficients, rank, size, seed)
    if y is not None and y.shape == rank_coefficients.shape and y.requires_grad:
        (y * rank_coefficients).sum().backward()
    gradients = dict(zip((OF_X, OF_WEIGHT, OF_BIAS), (leaf.grad for leaf in leaves), strict=True))
    return {"shares tokens": shares_tokens(seed), "gathers x": early}, {OUTPUT: y, **gradients}


def _noted_gathers() -> list[Tensor]:
    """From here on, what this process hands to an all-gather; the process ends with the trial."""
    handed: list[Tensor] = []

    def noted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(received: Any, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            handed.append(tensor.detach().clone())
            return collective(received, tensor, *arguments, **options)

        return call

    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(dist, name, noted(getattr(dist, name)))
    return handed


def _mask(rank: int, seed: int, stream: str, like: Tensor) -> Tensor:
    from dlojz.by_hand.tensor.random_state import RandomStates

    return RandomStates(seed, rank).dropout(torch.ones_like(like), DROP, stream)  # type: ignore[arg-type]


def _shares(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """What each rank holds: the ranks' copies of x and of the norm are leaves of one graph, with one loss."""
    x, weight, bias, _, _, coefficients = _inputs(seed)
    split = shares_tokens(seed)
    stream = "split" if split else "replicated"
    ranks = range(size)
    xs = [_own(x, peer, size, seed).clone().requires_grad_() for peer in ranks]
    norms = [[leaf.clone().requires_grad_() for leaf in (weight, bias)] for _ in ranks]
    normed = [F.layer_norm(xs[peer], (SEQUENCE_WIDTH,), *norms[peer]) for peer in ranks]
    # With sequence parallelism the ranks' tokens are gathered, (B, T / N, D) to (B, T, D), before the region.
    region_inputs = [torch.cat(normed, dim=1)] * size if split else normed
    partials = [_region(peer, size, seed)(region_inputs[peer]) for peer in ranks]
    sums = [_own(added(partials), peer, size, seed) for peer in ranks]
    outputs = [xs[peer] + sums[peer] * _mask(peer, seed, stream, sums[peer]) for peer in ranks]
    if split:
        losses = [(outputs[peer] * _own(coefficients, peer, size, seed)).sum() for peer in ranks]
        added(losses).backward()
    else:  # one stream, which all ranks have: the shortcut is each rank's own, the region a sum of all ranks' parts
        (outputs[rank] * coefficients).sum().backward()
    leaves = [(xs[peer], *norms[peer]) for peer in ranks]
    parts = [[gradient(leaf) for leaf in rank_leaves] for rank_leaves in leaves]
    rank_gradients = parts[rank]
    totals = [added(part[number] for part in parts) for number in range(3)]
    values = {
        OUTPUT: outputs[rank],
        OF_X: rank_gradients[0] if split else totals[0],
        OF_WEIGHT: totals[1],
        OF_BIAS: totals[2],
    }
    values |= {"own x": rank_gradients[0], "own weight": rank_gradients[1], "own bias": rank_gradients[2]}
    return {name: value.detach() for name, value in values.items()}


def _half_block(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The output alone, computed in one process: what the usual mistakes change."""
    x, weight, bias, *_ = _inputs(seed)
    normed = F.layer_norm(x, (SEQUENCE_WIDTH,), weight, bias)
    summed = _own(added(_region(peer, size, seed)(normed) for peer in range(size)), rank, size, seed)
    stream = "split" if shares_tokens(seed) else "replicated"
    return {OUTPUT: _own(x, rank, size, seed) + summed * _mask(rank, seed, stream, summed)}


def _summed_again(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The gradients where that of the normed tokens is added up twice; the residual connection has its own."""
    values, shortcut = _shares(rank, size, seed), _own(_inputs(seed)[-1], rank, size, seed)
    return {OF_X: shortcut + size * (values[OF_X] - shortcut), OF_WEIGHT: size * values[OF_WEIGHT]}


def _output(edits: str) -> Values:
    return only(edited_when_called((_shares,), edits), [OUTPUT])


def _if(split: bool, values: Values) -> Callable[[int, int, int], Any]:
    """A fault of one of the two kinds of cases only."""
    return lambda rank, size, seed: values(rank, size, seed) if shares_tokens(seed) == split else None


def _inspect(answers: list[RankAnswer], size: int) -> None:
    if not answers[0].value["shares tokens"]:
        return
    if any(answer.value["gathers x"] for answer in answers):
        raise TEXTS.wrong("sequence-parallel", "x is gathered before the norm")
    if any(numel >= SEQUENCE_BATCH * SEQUENCE_TOKENS * SEQUENCE_WIDTH for numel in asked_for(answers[0], "all_reduce")):
        raise TEXTS.wrong("sequence-parallel", "an all-reduce with sequence parallelism")


SEQUENCE_PARALLEL = TEXTS.exercise(
    "sequence-parallel",
    only(_shares, (OUTPUT, OF_X, OF_WEIGHT, OF_BIAS)),
    on_ranks=True,
    trial=_trial,
    cases=CASES,
    labels=SEQUENCE_LABELS,
    source=(_half_block, _mask),
    faults={
        "one dropout mask where tokens differ": _if(True, _output('"split" if split else →')),
        "own dropout masks where tokens are the same": _if(False, _output('if split else "replicated" →')),
        "tokens taken from the own partial product": _if(True, _output("_own(added(partials), → _own(partials[peer],")),
        "no sum in forward without sequence parallelism": Mistake(
            _if(False, _output("_own(added(partials), → _own(partials[peer],")), *NO_FORWARD_SUM
        ),
        "gradient of the norm's weights not summed": _if(
            True, only(_shares, {OUTPUT: OUTPUT, OF_X: OF_X, OF_WEIGHT: "own weight"})
        ),
        "gradient of the norm's weights summed needlessly": _if(
            False, lambda *case: {**only(_shares, [OF_X])(*case), **times_ranks(_shares, OF_WEIGHT)(*case)}
        ),
        "norm's gradient summed twice without sequence parallelism": _if(False, times_ranks(_shares, OF_WEIGHT)),
        "norm's gradient summed twice with sequence parallelism": _if(True, _summed_again),
        "no sum of x's gradient in backward": Mistake(
            _if(False, only(_shares, {OUTPUT: OUTPUT, OF_X: "own x", OF_WEIGHT: "own weight"})), *NO_BACKWARD_SUM
        ),
        "the residual connection is missing": "_own(x, rank, size, seed) + →",
        "the dropout falls on x as well": "_own(x, rank, size, seed) + summed → (_own(x, rank, size, seed) + summed)",
        "the dropout has another probability": "DROP → 0.1",
        "your variance is divided by D − 1": "weight, bias) → weight * (1 - 1 / SEQUENCE_WIDTH) ** 0.5, bias)",
        "the norm's weight and bias are left out": ", weight, bias) → )",
        "the norm is missing before the region": "(normed) → (x)",
        "the norm comes at the end": (
            "(normed) → (x); OUTPUT: → OUTPUT: F.layer_norm(; summed)} → summed), (SEQUENCE_WIDTH,), weight, bias)}"
        ),
        "no gradient through the residual connection": lambda rank, size, seed: {
            OUTPUT: _shares(rank, size, seed)[OUTPUT],
            OF_X: _shares(rank, size, seed)[OF_X] - _own(_inputs(seed)[-1], rank, size, seed),
        },
    },
    inspect=_inspect,
)
