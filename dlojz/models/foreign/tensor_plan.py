"""Find what tensor parallelism can split of a module from elsewhere, and prove it without the weights of its layers.

A region goes from the linear layers that are split by columns to the one behind them that is split by rows. It can be
split where each rank, given its part of the columns' outputs, computes its part of the row layer's input:

    MLP            fc1 → fc2, gate and up → down           each feature stands alone
    attention      query, key, value → out; qkv → out      each head stands alone

Nothing is read off names. Each repeated block is run on a few samples with random numbers for the outputs of its linear
layers, so that their weights are not needed. Changed outputs of one layer tell which layers read them. A candidate is
then run as a rank would run it: its part of the columns (of each part of a fused projection, or consecutive ones), and
the numbers of heads, or widths, in the attributes of its modules divided by the ranks. It is kept if it runs, gives the
row layer this rank's part of its input, and every other layer, and whoever reads the block, what it was given before.

Parameters that are read between the two layers, such as norms of queries, stay whole on each rank; each rank's gradient
of them is of its heads alone (`Region.inner`). A region that reads the block's trained input itself is not split.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3, for the two regions of a transformer block.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say

STYLES = ("colwise", "rowwise", "whole")
"""Words of a plan for a layer; a layer that no pattern names is whole."""
MOST_RANKS, PRIMES = 16, (2, 3, 5, 7, 11, 13)
"""Largest number of ranks that is tried for a refusal to name what works, and the primes up to there."""
SEED = 0
TOLERANCE = 1e-4
"""A wrong split is wrong by the size of the numbers themselves."""


class SplitLayer(NamedTuple):
    """Linear layer of which each rank holds a part.

    Attributes:
        path: in the block.
        style: of its split: by columns (outputs) or by rows (inputs).
        parts: outputs of each fused part, each of which is split (`(768, 768, 768)` of queries, keys and values); of a
            row layer its inputs.
    """

    path: str
    style: Literal["colwise", "rowwise"]
    parts: tuple[int, ...]


class Region(NamedTuple):
    """Linear layers that are split together.

    Attributes:
        block: path of the repeated block that it is in; all other paths are in the block.
        columns: those that begin it.
        row: the one that ends it.
        heads: attention heads that are distributed; 0 in an MLP.
        settings: module, attribute and its value on a rank.
        inner: parameters that are read within it, whole on each rank.
    """

    block: str
    columns: tuple[SplitLayer, ...]
    row: SplitLayer
    heads: int
    settings: tuple[tuple[str, str, int], ...]
    inner: tuple[str, ...]

    @property
    def layers(self) -> tuple[SplitLayer, ...]:
        """All of them, in the order of the forward pass."""
        return (*self.columns, self.row)


Styles = Mapping[str, str]
"""A plan as it is written: patterns of paths, with `*`, and a word of `STYLES`."""


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer that is called.

    transformers' `Conv1D` is one, whose weight is (in, out); the last layer of `nn.MultiheadAttention` is not called.
    """
    kind = type(module).__name__
    return kind == "Conv1D" or (isinstance(module, nn.Linear) and kind != "NonDynamicallyQuantizableLinear")


def widths(layer: nn.Module) -> tuple[int, int]:
    """Return the inputs and the outputs of a linear layer."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    one, other = weight.shape
    return (other, one) if isinstance(layer, nn.Linear) else (one, other)


def find_plan(
    name: str,
    module: nn.Module,
    blocks: Sequence[str],
    run: Callable[[], Any],
    size: int,
    pattern: str = "",
    given: Styles | None = None,
) -> tuple[Region, ...]:
    """Find the regions of a module that so many ranks can share.

    Args:
        name: of the model, for refusals.
        module: on the meta device, in evaluation mode.
        blocks: paths of its repeated blocks; each is called once.
        run: runs the module there.
        size: ranks of the tensor axis, at least 2.
        pattern: regular expression; only regions with a layer in whose path it is found are split.
        given: the plan of the model's author, which is checked; by default all that can be split is.

    Raises:
        LabError: if nothing can be split, or not among so many ranks; or a given plan cannot be followed.
    """
    found: list[Region] = []
    probes: dict[object, _Probe] = {}
    for path, block, args, kwargs in _called(module, blocks, run):
        kind = _kind(block, (args, kwargs))
        if kind not in probes:
            probes[kind] = _Probe(block, args, kwargs)
        probe = probes[kind]
        found += [region._replace(block=path) for region in probe.regions(name, path, size, pattern, given)]
    if given is not None and not pattern:
        _check_all_used(name, module, given, found)
    if not found:
        raise refusal(
            en=f"tp={size} was received with {name}, in whose repeated blocks no two linear layers "
            f"{_matching(pattern)}were found that tensor parallelism can split: use tp=1.",
            fr=f"tp={size} a été reçu avec {name}, dans les blocs répétés duquel aucune paire de couches linéaires "
            f"{_matching(pattern)}que le Tensor Parallelism sache découper n’a été trouvée : prenez tp=1.",
        )
    return tuple(found)


def _matching(pattern: str) -> str:
    return pattern and say(en=f"that match {pattern!r} ", fr=f"qui correspondent à {pattern!r} ")


def style_of(path: str, given: Styles) -> str:
    """Look a layer up in a plan: the last pattern that matches its path speaks."""
    return next((style for pattern, style in reversed(list(given.items())) if fnmatchcase(path, pattern)), "whole")


def check_styles(source: str, given: object) -> dict[str, str]:
    """Check the form of a written plan.

    Raises:
        LabError: if it is no mapping of patterns to `STYLES`.
    """
    if not isinstance(given, Mapping) or not all(isinstance(one, str) for one in given):
        found: object = given
    else:
        found = next((style for style in given.values() if style not in STYLES), None)
        if found is None:
            return dict(given)
    raise refusal(
        en=f"tp_plan of {source} maps patterns of layers to {', '.join(STYLES)}, but {found!r} was received: write "
        'e.g. {"blocks.*.mlp.fc1": "colwise", "blocks.*.mlp.fc2": "rowwise"}.',
        fr=f"tp_plan de {source} associe à des motifs de couches {', '.join(STYLES)}, mais {found!r} a été reçu : "
        'écrivez par exemple {"blocks.*.mlp.fc1": "colwise", "blocks.*.mlp.fc2": "rowwise"}.',
    )


def _check_all_used(name: str, module: nn.Module, given: Styles, found: Sequence[Region]) -> None:
    split = {f"{region.block}.{layer.path}" for region in found for layer in region.layers}
    for named, style in given.items():
        layers = {path for path, one in module.named_modules() if fnmatchcase(path, named) and is_linear(one)}
        unsplit = {path for path in layers - split if style_of(path, given) != "whole"}
        if style != "whole" and (unsplit or not layers):
            raise refusal(
                en=f"tp_plan of {name} says {style!r} of {min(unsplit, default=named)}, which is no linear layer of a "
                "repeated block that begins or ends a region with the others: `dlojz partition --tp` without a plan "
                "shows those that do.",
                fr=f"tp_plan de {name} dit {style!r} de {min(unsplit, default=named)}, qui n’est pas une couche "
                "linéaire d’un bloc répété qui commence ou termine une région avec les autres : `dlojz partition --tp` "
                "sans plan montre celles qui le font.",
            )


def _called(
    module: nn.Module, blocks: Sequence[str], run: Callable[[], Any]
) -> Iterator[tuple[str, nn.Module, Any, Any]]:
    """Each block with what it was called with."""
    calls: dict[str, tuple[Any, Any]] = {}
    handles = []
    for path in blocks:

        def note(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls[path] = (args, kwargs)

        handles.append(module.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    yield from ((path, module.get_submodule(path), *call) for path, call in calls.items())


def _kind(block: nn.Module, call: Any) -> object:
    """Equal for blocks that compute alike; their numbers in the model are no matter."""
    parts = tuple(
        (path, type(one), tuple((key, value) for key, value in sorted(vars(one).items()) if _is_setting(key, value)))
        for path, one in block.named_modules()
    )
    shapes = tuple((path, one.shape) for path, one in block.named_parameters())
    leaves = tree_leaves(call)
    read = tuple((one.shape, one.requires_grad) if isinstance(one, Tensor) else str(one) for one in leaves)
    return parts, shapes, read


def _is_setting(key: str, value: object) -> bool:
    return isinstance(value, bool | int | float | str) and not re.search(r"idx|index|layer_id|^_", key)


class _Run(NamedTuple):
    """What a run of a block gave its linear layers, and whoever called it."""

    inputs: dict[str, Tensor]
    outputs: list[Any]


class _Candidate(NamedTuple):
    columns: tuple[str, ...]
    row: str


class _Probe:
    """Block whose linear layers give random numbers, so that what happens between them can be looked at."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
            torch.manual_seed(SEED)
            self.block = copy.deepcopy(block).eval()
            owners = Counter(id(one) for part in block.modules() for one in part._parameters.values())
            self.layers = {path: one for path, one in self.block.named_modules() if is_linear(one)}
            self._alone = {
                path for path in self.layers if owners[id(block.get_submodule(path).weight)] == 1
            }  # a shared weight is not split
            for path, layer in self.layers.items():
                layer.forward = self._stub(path)
            for part in self.block.modules():
                if part not in self.layers.values():
                    _fill(part)
            self.call = tree_map(_made, (args, kwargs))
            self._given: dict[str, Tensor] = {}
            self._calls: Counter[str] = Counter()
            self._inputs: dict[str, Tensor] = {}
            self.whole: _Run | None = self._run({})
            self.given = dict(self._given)
            self.candidates = [] if self.whole is None else list(self._candidates())
        self._kept: dict[tuple[_Candidate, int], Region | None] = {}

    def _stub(self, path: str) -> Callable[[Tensor], Tensor]:
        width = widths(self.layers[path])[1]

        def forward(x: Tensor) -> Tensor:
            self._calls[path] += 1
            self._inputs[path] = x
            if path not in self._given:
                self._given[path] = torch.rand(*x.shape[:-1], width) * 2 - 1
            if self._given[path].shape[:-1] != x.shape[:-1] or self._calls[path] > 1:
                raise ValueError(path)
            return self._given[path]

        return forward

    def _run(self, given: Mapping[str, Tensor]) -> _Run | None:
        """Run the block with these outputs of its layers; None where it fails, or calls one of them twice."""
        self._given, self._inputs = dict(given), {}
        self._calls.clear()
        args, kwargs = self.call
        try:
            output = self.block(*args, **kwargs)
        except Exception:  # of code from elsewhere, with shapes that it may not expect
            return None
        return _Run(self._inputs, tree_leaves(output))

    def _candidates(self) -> Iterator[_Candidate]:
        """Layers that alone read the outputs of some layers, with these."""
        assert self.whole is not None
        readers: dict[str, set[str]] = {}
        for path in self.whole.inputs:
            changed = self._run({**self.given, path: self.given[path].flip(-1)})
            read = {} if changed is None else changed.inputs
            readers[path] = {
                other for other, x in self.whole.inputs.items() if other in read and not _same(x, read[other])
            }
        for row in self.whole.inputs:
            columns = tuple(path for path, read in readers.items() if row in read)
            if columns and {row, *columns} <= self._alone and all(readers[path] == {row} for path in columns):
                yield _Candidate(columns, row)

    def regions(self, name: str, path: str, size: int, pattern: str, given: Styles | None) -> list[Region]:
        """List the regions that so many ranks can share, first those of the first layers; none has a layer twice."""
        found: list[Region] = []
        used: set[str] = set()
        changed: set[tuple[str, str]] = set()
        for candidate in self.candidates:
            layers = {candidate.row, *candidate.columns}
            if used & layers or not any(re.search(pattern, f"{path}.{layer}") for layer in layers):
                continue
            if given is not None and not _is_asked(candidate, path, given):
                continue
            region = self.split(candidate, size)
            if region is not None and not changed & {setting[:2] for setting in region.settings}:
                found.append(region)
                used |= layers
                changed |= {setting[:2] for setting in region.settings}
            elif region is None and (works := self.degrees(candidate)):
                raise self._uneven(name, path, candidate, size, works)
            elif given is not None:
                raise _not_separate(name, path, candidate)
        return found

    def degrees(self, candidate: _Candidate) -> list[int]:
        """Numbers of ranks that can share a region: none where no prime number of them can."""
        inputs = widths(self.layers[candidate.row])[0]
        if all(inputs % prime or self.split(candidate, prime) is None for prime in PRIMES):
            return []
        return [size for size in range(2, MOST_RANKS + 1) if self.split(candidate, size) is not None]

    def split(self, candidate: _Candidate, size: int) -> Region | None:
        """Split a region among so many ranks; None where they would not compute what one process does."""
        if (candidate, size) not in self._kept:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
                self._kept[candidate, size] = self._split(candidate, size)
        return self._kept[candidate, size]

    def _split(self, candidate: _Candidate, size: int) -> Region | None:
        inner = self._inner(candidate)
        inputs = widths(self.layers[candidate.row])[0]
        if inner is None or inputs % size:
            return None
        ways = [_fused(widths(self.layers[path])[1], inputs) for path in candidate.columns]
        heads, others = self._attributes(candidate, {inputs, *(one for way in ways for parts in way for one in parts)})
        in_config = [(path, f"config.{key}", value) for path, one in self._around(candidate) for key, value in _heads(
            getattr(one, "config", None)
        )]  # fmt: skip
        tried = [[], heads, [*heads, *others], *([[*heads, *in_config]] if in_config else [])]
        for parts, settings in product(product(*ways), tried):
            if any(one % size for each in parts for one in each) or any(value % size for *_, value in settings):
                continue
            if all(self._is_right(candidate, parts, settings, size, rank) for rank in (0, size - 1)):
                columns = (SplitLayer(one, "colwise", each) for one, each in zip(candidate.columns, parts, strict=True))
                return Region(
                    "",
                    tuple(columns),
                    SplitLayer(candidate.row, "rowwise", (inputs,)),
                    self.heads(candidate),
                    tuple((owner, attribute, value // size) for owner, attribute, value in settings),
                    inner,
                )
        return None

    def _inner(self, candidate: _Candidate) -> tuple[str, ...] | None:
        """Parameters that a region reads; None where it reads what others do too, or the block's trained input."""
        assert self.whole is not None
        read = {path for path, one in self._trained() if _depends([self.whole.inputs[candidate.row]], one)}
        rest = [one for path, one in self.whole.inputs.items() if path != candidate.row]
        rest += [one for one in self.whole.outputs if isinstance(one, Tensor)]
        shared = any(_depends(rest, one) for path, one in self._trained() if path in read)
        arguments = [one for one in tree_leaves(self.call) if isinstance(one, Tensor) and one.requires_grad]
        if shared or any(_depends([self.whole.inputs[candidate.row]], one) for one in arguments):
            return None
        return tuple(sorted(read))

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(path, one) for path, one in self.block.named_parameters() if one.device.type != "meta"]

    def _attributes(
        self, candidate: _Candidate, sizes: set[int]
    ) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
        """Numbers of heads, and widths, in the attributes of the modules around a region's layers."""
        around = self._around(candidate)
        heads = [(path, key, value) for path, one in around for key, value in _heads(one)]
        others = [
            (path, key, value)
            for path, one in around
            for key, value in vars(one).items()
            if type(value) is int and value in sizes and (path, key, value) not in heads and not key.startswith("_")
        ]
        return heads, others

    def _around(self, candidate: _Candidate) -> list[tuple[str, nn.Module]]:
        """Modules that hold a region's layers, from the innermost one with all of them inward."""
        names = [path.split(".")[:-1] for path in (candidate.row, *candidate.columns)]
        owners = [{".".join(own[:depth]) for depth in range(len(own) + 1)} for own in names]
        common = max(set.intersection(*owners), key=len)
        paths = {path for own in owners for path in own if path.startswith(common)}
        return [(path, self.block.get_submodule(path)) for path in sorted(paths)]

    def heads(self, candidate: _Candidate) -> int:
        """Count the heads of a region whose features do not stand alone, where its modules tell; else 0."""
        told = [value for *_, value in self._attributes(candidate, set())[0]]
        sizes = [
            value
            for _, one in self._around(candidate)
            for key, value in vars(one).items()
            if key in ("head_dim", "head_size", "attention_head_size") and type(value) is int
        ]
        if not (told or sizes) or self._is_even(candidate):
            return 0
        return widths(self.layers[candidate.row])[0] // sizes[0] if sizes else max(told)

    def _is_even(self, candidate: _Candidate) -> bool:
        """Whether each feature stands alone, as in an MLP: with all but the first of them changed, it is the same."""
        assert self.whole is not None
        inputs = widths(self.layers[candidate.row])[0]
        changed = dict(self.given)
        for path in candidate.columns:
            parts = _fused(widths(self.layers[path])[1], inputs)[0]
            kept = torch.cat([torch.arange(one) == 0 for one in parts])
            changed[path] = torch.where(kept, self.given[path], self.given[path].flip(-1))
        run = self._run(changed)
        first, whole = run and run.inputs.get(candidate.row), self.whole.inputs[candidate.row]
        return first is not None and _same(first[..., :1], whole[..., :1])

    def _is_right(
        self,
        candidate: _Candidate,
        parts: Sequence[tuple[int, ...]],
        settings: Sequence[tuple[str, str, int]],
        size: int,
        rank: int,
    ) -> bool:
        """Run a rank's part of a region, and compare."""
        assert self.whole is not None
        given = dict(self.given)
        for path, each in zip(candidate.columns, parts, strict=True):
            given[path] = self.given[path].index_select(-1, own_columns(each, size, rank))
        changed = tuple((owner, attribute, value // size) for owner, attribute, value in settings)
        with setting(self.block, changed):
            found = self._run(given)
        if found is None or found.inputs.keys() != self.whole.inputs.keys():
            return False
        expected = dict(self.whole.inputs)
        row = expected[candidate.row]
        expected[candidate.row] = row.index_select(-1, own_columns(row.shape[-1:], size, rank))
        same = all(_same(found.inputs[path], x) for path, x in expected.items())
        pairs = zip(found.outputs, self.whole.outputs, strict=False)
        return (
            same
            and len(found.outputs) == len(self.whole.outputs)
            and all(_same(one, other) if isinstance(one, Tensor) else True for one, other in pairs)
        )

    def _uneven(self, name: str, path: str, candidate: _Candidate, size: int, works: list[int]) -> LabError:
        heads, where = self.heads(candidate), f"{path}.{candidate.row}"
        degrees = say(en=" or ", fr=" ou ").join(f"tp={one}" for one in works)
        features = widths(self.layers[candidate.row])[0]
        what = say(en=f"{features} features", fr=f"{features} neurones")
        what = say(en=f"{heads} heads", fr=f"{heads} têtes") if heads else what
        return refusal(
            en=f"tp={size} does not divide the {what} before {where} of {name} equally, keys and values included: use "
            f"{degrees}, or leave this layer out by tensor_parts (e.g. mlp) or a tp_plan.",
            fr=f"tp={size} ne divise pas également les {what} avant {where} de {name}, clés et valeurs comprises : "
            f"prenez {degrees}, ou laissez cette couche de côté par tensor_parts (par exemple mlp) ou un tp_plan.",
        )


@contextmanager
def setting(module: nn.Module, settings: Sequence[tuple[str, str, int]]) -> Iterator[None]:
    """Give modules a rank's numbers of heads, and widths, within this context."""
    former = [(owner, dict(vars(owner))) for owner in {module.get_submodule(path) for path, *_ in settings}]
    try:
        put(module, settings)
        yield
    finally:
        for owner, attributes in former:
            vars(owner).update(attributes)


def put(module: nn.Module, settings: Sequence[tuple[str, str, int]]) -> None:
    """Give modules a rank's numbers of heads, and widths; of a configuration that others read too, a copy."""
    for path, attribute, value in settings:
        owner: Any = module.get_submodule(path)
        if attribute.startswith("config."):
            owner.config = copy.copy(owner.config)
            owner = owner.config
        setattr(owner, attribute.removeprefix("config."), value)


def _heads(owner: object) -> list[tuple[str, int]]:
    """Attributes of a module, or of its configuration, that are numbers of heads, by their names."""
    named = getattr(owner, "__dict__", {}).items()
    return [
        (key, value)
        for key, value in named
        if type(value) is int and "head" in key and not re.search("dim|size|width|per", key)
    ]


def _is_asked(candidate: _Candidate, path: str, given: Styles) -> bool:
    asked = {layer: style_of(f"{path}.{layer}", given) for layer in (candidate.row, *candidate.columns)}
    return asked.pop(candidate.row) == "rowwise" and set(asked.values()) == {"colwise"}


def _not_separate(name: str, path: str, candidate: _Candidate) -> LabError:
    columns = ", ".join(f"{path}.{one}" for one in candidate.columns)
    return refusal(
        en=f"tp_plan of {name} splits {columns} by columns and {path}.{candidate.row} by rows, but what is computed "
        "between them mixes the parts: leave them whole.",
        fr=f"tp_plan de {name} découpe {columns} par colonnes et {path}.{candidate.row} par lignes, mais ce qui est "
        "calculé entre elles mélange les parties : laissez-les entières.",
    )


def own_columns(parts: Sequence[int], size: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Return the indices that a rank holds: its equal share of each part, one part after the other.

    Example:
        >>> own_columns((4, 4), 2, 1).tolist()
        [2, 3, 6, 7]
    """
    found, start = [], 0
    for part in parts:
        share = part // size
        found.append(torch.arange(start + rank * share, start + (rank + 1) * share, device=device))
        start += part
    return torch.cat(found)


def _fused(outputs: int, inputs: int) -> list[tuple[int, ...]]:
    """Ways in which a layer's outputs may be fused, before a row layer with so many inputs: the commonest first."""
    ways = [(inputs,) * (outputs // inputs)] if outputs in (2 * inputs, 3 * inputs) else []
    if outputs > inputs and (outputs - inputs) % 2 == 0 and outputs != 3 * inputs:
        ways.append((inputs, *[(outputs - inputs) // 2] * 2))  # fewer keys and values than queries
    return [*ways, (outputs,)]


def _fill(part: nn.Module) -> None:
    """Give a module numbers instead of the meta device's."""
    for name, parameter in part._parameters.items():
        if parameter is not None:
            part._parameters[name] = nn.Parameter(_made(parameter).detach())
    for name, buffer in part._buffers.items():
        if buffer is not None:
            part._buffers[name] = _made(buffer)


def _made(one: Any) -> Any:
    """A tensor of the shape of another with random numbers; whole numbers are 0, and booleans True."""
    if not isinstance(one, Tensor):
        return one
    if one.is_floating_point():
        return (torch.rand(one.shape, dtype=one.dtype) + 0.1).requires_grad_(one.requires_grad)
    return torch.full(one.shape, one.dtype == torch.bool, dtype=one.dtype)


def _same(one: Tensor, other: object) -> bool:
    return isinstance(other, Tensor) and one.shape == other.shape and torch.allclose(one, other, TOLERANCE, TOLERANCE)


def _depends(results: Sequence[Tensor], on: Tensor) -> bool:
    reached = [one for one in results if one.requires_grad]
    if not reached or not on.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(
        reached, [on], [torch.rand_like(one) for one in reached], retain_graph=True, allow_unused=True
    )
    return gradient is not None
