"""Register the engines: one entry for each way of training on several ranks, with the facts that other rooms ask for.

An entry names what implements the engine, and one table in each room above holds the implementations under these names:
trainers are classes of `dlojz.train.engines`, states are in `dlojz.prediction.states`, traffic in
`dlojz.prediction.communication`, overlays in `dlojz.prediction.forecast`. `tests/config/test_engines.py` says which
name a table lacks. To add an engine, add its entry to `data/engines.toml` and what it names there.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from dlojz.base.language import say

Provider = Literal["torch", "by_hand", "deepspeed", "single"]
"""Who implements the engine: the field `engine` of a layout."""
Strategy = Literal[
    "single", "ddp", "by_hand", "by_hand-1", "by_hand-2", "by_hand-3", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3"
]
"""Engines along the data axis, as the degrees, the ZeRO stage and the provider of a layout name them."""
Form = Literal["one_bit", "local_steps", "hooks", "experts", "in_backward", "in_forward", "megatron"]
"""Variants of a strategy with an engine of their own; they exclude each other."""
STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)
DEEPSPEED_BUCKET_ELEMENTS: Final = 2_000_000
"""Elements per bucket of DeepSpeed, run and predicted; its own default, 5e8, would take 2 GB for the smallest model."""
SUB_GROUP_ELEMENTS: Final = 10**9
"""Elements of a shard that DeepSpeed's stage 3 updates at once, by its default (`sub_group_size`)."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Describe one engine.

    Args:
        name: `STRATEGY`, or `STRATEGY+FORM` where a form has its own engine.
        provider: who implements it.
        zero: ZeRO stages that it runs.
        trainer: `module.Class` that trains with it, in `dlojz.train.engines.base`.
        states: what counts the weights, gradients and optimizer states that a rank keeps.
        traffic: what counts the collectives along the data axis.
        overlay: what else a rank allocates, and when.
        pipeline_zero: those of its ZeRO stages that are run in a pipeline too.
        programs: libraries whose program (`dlojz.libraries`) has an equal of it.
        autocast: whether weights and buffers stay fp32 in every precision, and it computes in another by autocast.
        replicates: whether every rank keeps weights, gradients and optimizer states whole.
        takes_bucket_mib: whether gradients leave in buckets whose size can be chosen.
        torch_buckets: whether gradients live in the buckets of torch's DDP: they may be views of them, its hooks may
            compress them, and none is freed before the step ends.
        leaves_averaging: whether an optimizer may average over the ranks in its place.
        saves_inputs_late: whether a linear layer saves its inputs after its product, as weights are gathered around it.
        gathers_experts: False where the weights of a gate are missing in its backward pass.
        gathers_per_step: whether a pipeline gathers its shards once per step, and reduces after its last micro-batch.
        averages_each_micro_batch: whether it wants torch's tensor-parallel gradients whole after each micro-batch.
        keeps_dtypes: whether it is predicted and run with weights in other types than fp32.
        takes_frozen: whether it is predicted and run with frozen parameters.
        gathers_frozen: whether it gathers frozen parameters too.
        skips_unreached: whether it keeps neither gradient nor optimizer state of a parameter that backward does not
            reach: torch's optimizers make states with the first gradient, and FSDP2 reduces those that are there (torch
            2.13, `optim/optimizer.py`; `distributed/fsdp/_fully_shard/_fsdp_param_group.py`, `post_backward`).
        flattens_unreached: whether such a parameter stays in its flat weights and optimizer states, with zeros as its
            gradient where one is needed, and is not reduced but by stage 0 (DeepSpeed 0.19, `runtime/engine.py`,
            `_get_gradients_for_reduction`; `runtime/zero/stage_1_and_2.py`, `get_all_grad_tensors`). An engine of
            neither kind fills in zeros and reduces them.
    """

    name: str
    provider: Provider
    zero: tuple[int, ...]
    en: str
    fr: str
    trainer: str
    states: str
    traffic: str
    overlay: str
    pipeline_zero: tuple[int, ...] = ()
    programs: tuple[str, ...] = ()
    autocast: bool = False
    replicates: bool = False
    takes_bucket_mib: bool = False
    torch_buckets: bool = False
    leaves_averaging: bool = False
    saves_inputs_late: bool = False
    gathers_experts: bool = True
    gathers_per_step: bool = False
    averages_each_micro_batch: bool = False
    keeps_dtypes: bool = False
    takes_frozen: bool = False
    gathers_frozen: bool = False
    skips_unreached: bool = False
    flattens_unreached: bool = False

    def title(self, zero: int) -> str:
        """Return its title, with the ZeRO stage where it is not the last of several."""
        return say(en=self.en, fr=self.fr) + (f" (ZeRO-{zero})" if zero != self.zero[-1] else "")


def _registered() -> Iterator[EngineSpec]:
    """Read the engines from `data/engines.toml`."""
    path = Path(__file__).with_name("data") / "engines.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, facts in tables.items():
        # What a form does not name is the strategy's.
        whole: dict[str, Any] = tables[name.partition("+")[0]] | facts
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in whole.items()
        }
        yield EngineSpec(name=name, **values)


ENGINES: Final[dict[str, EngineSpec]] = {spec.name: spec for spec in _registered()}
"""Every engine by its name: the strategies first, then their forms."""
_PLAIN: Final = tuple(ENGINES[name] for name in STRATEGIES)
# One entry per provider and stage; FSDP2 has two.
_STRATEGY_OF: Final[dict[tuple[str, int], Strategy]] = {
    (ENGINES[name].provider, stage): name for name in STRATEGIES for stage in ENGINES[name].zero
}


def strategy_of(provider: str, zero: int, *, replicas: bool, pipeline: bool) -> Strategy:
    """Return the engine along the data axis of a legal layout.

    Args:
        pipeline: whether each is a pipeline; torch's averages the gradients of its stages itself.
    """
    # Only torch's stage 0 also depends on whether there are replicas, and pipelines.
    if provider != "torch" or zero:
        return _STRATEGY_OF[provider, zero]
    if not replicas:
        return "single"
    return "by_hand" if pipeline else "ddp"


def zero_stages(provider: str) -> tuple[int, ...]:
    """Return the ZeRO stages that the engines of a provider have, ascending."""
    return _stages(spec.zero for spec in _PLAIN if spec.provider == provider)


def pipeline_stages(provider: str) -> tuple[int, ...]:
    """Return the ZeRO stages that the engines of a provider run in a pipeline, ascending."""
    return _stages(spec.pipeline_zero for spec in _PLAIN if spec.provider == provider)


def program_layouts(program: str) -> tuple[tuple[Provider, tuple[int, ...]], ...]:
    """Return the `engine` and the ZeRO stages of the layouts that a library's program has an equal of.

    Args:
        program: name of the library; an unknown one has none.
    """
    specs = [spec for spec in _PLAIN if program in spec.programs and spec.provider != "single"]
    # Each provider once, in the order of the registry.
    providers = dict.fromkeys(spec.provider for spec in specs)
    return tuple(
        (provider, _stages(spec.zero for spec in specs if spec.provider == provider)) for provider in providers
    )


def _stages(stages: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({stage for spec_stages in stages for stage in spec_stages}))
