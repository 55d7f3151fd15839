"""Plan what tensor parallelism splits of a module from elsewhere: all that is proved, or what its author writes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, say
from dlojz.models.foreign.tensor_probe import Candidate, Probe
from dlojz.models.foreign.tensor_regions import Region, is_linear, widths

TEXTS = Sentences(Path(__file__).parent / "data" / "tensor_plan.md")

STYLES = ("colwise", "rowwise", "whole")
"""Words of a plan for a layer; a layer that no pattern names is whole."""
Styles = Mapping[str, str]
"""A plan as it is written: patterns of paths, with `*`, and a word of `STYLES`."""


def find_plan(
    name: str,
    module: nn.Module,
    blocks: Sequence[str],
    run: Callable[[], Any],
    size: int,
    pattern: str = "",
    tp_plan: Styles | None = None,
) -> tuple[Region, ...]:
    """Find the regions of a module that so many ranks can share.

    Args:
        name: of the model, for refusals.
        module: on the meta device, in evaluation mode.
        blocks: paths of its repeated blocks; each is called once.
        run: runs the module there.
        size: ranks of the tensor axis, at least 2.
        pattern: regular expression; only regions with a layer in whose path it is found are split.
        tp_plan: the plan of the model's author, which is checked; by default all that can be split is.

    Raises:
        LabError: if nothing can be split, or not among so many ranks; or a given plan cannot be followed.
    """
    regions: list[Region] = []
    probes: dict[object, Probe] = {}
    for path, block, args, kwargs in _called(module, blocks, run):
        # Blocks of one kind are tried once: twelve equal layers cost one probe.
        kind = _kind(block, (args, kwargs))
        if kind not in probes:
            probes[kind] = Probe(block, args, kwargs)
        probe = probes[kind]
        regions += [region._replace(block=path) for region in _regions(probe, name, path, size, pattern, tp_plan)]
    # A pattern leaves layers out on purpose: the plan must be used up only without one.
    if tp_plan is not None and not pattern:
        _check_all_used(name, module, tp_plan, regions)
    if not regions:
        raise TEXTS.refusal("plan", "nothing to split", size=size, name=name, matching=_matching(pattern))
    return tuple(regions)


def _matching(pattern: str) -> str:
    return pattern and say(en=f"that match {pattern!r} ", fr=f"qui correspondent à {pattern!r} ")


def style_of(path: str, tp_plan: Styles) -> str:
    """Look a layer up in a plan: the last pattern that matches its path speaks."""
    return next((style for pattern, style in reversed(list(tp_plan.items())) if fnmatchcase(path, pattern)), "whole")


def check_styles(source: str, tp_plan: object) -> dict[str, str] | None:
    """Check the form of a written plan; None where there is none.

    Raises:
        LabError: if it is no mapping of patterns to `STYLES`.
    """
    if tp_plan is None:
        return None
    if not isinstance(tp_plan, Mapping) or not all(isinstance(pattern, str) for pattern in tp_plan):
        offender: object = tp_plan
    else:
        offender = next((style for style in tp_plan.values() if style not in STYLES), None)
        if offender is None:
            return dict(tp_plan)
    raise TEXTS.refusal("plan", "other styles", source=source, styles=", ".join(STYLES), offender=offender)


def _check_all_used(name: str, module: nn.Module, tp_plan: Styles, regions: Sequence[Region]) -> None:
    split = {f"{region.block}.{layer.path}" for region in regions for layer in region.layers}
    for glob, style in tp_plan.items():
        layers = {path for path, layer in module.named_modules() if fnmatchcase(path, glob) and is_linear(layer)}
        unsplit = {path for path in layers - split if style_of(path, tp_plan) != "whole"}
        if style != "whole" and (unsplit or not layers):
            raise TEXTS.refusal("plan", "no linear layer", name=name, style=style, layer=min(unsplit, default=glob))


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
        (
            path,
            type(module),
            tuple((key, value) for key, value in sorted(vars(module).items()) if _is_setting(key, value)),
        )
        for path, module in block.named_modules()
    )
    shapes = tuple((path, parameter.shape) for path, parameter in block.named_parameters())
    leaves = tree_leaves(call)
    inputs = tuple((leaf.shape, leaf.requires_grad) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves)
    return parts, shapes, inputs


def _is_setting(key: str, value: object) -> bool:
    # The number of a layer in the model is no setting.
    return isinstance(value, bool | int | float | str) and not re.search(r"idx|index|layer_id|^_", key)


def _regions(probe: Probe, name: str, path: str, size: int, pattern: str, tp_plan: Styles | None) -> list[Region]:
    """List the regions that so many ranks can share, first those of the first layers; none has a layer twice."""
    regions: list[Region] = []
    used_layers: set[str] = set()
    changed: set[tuple[str, str]] = set()
    for candidate in probe.candidates:
        layers = {candidate.row, *candidate.columns}
        # A layer belongs to the first region that holds it.
        if used_layers & layers or not any(re.search(pattern, f"{path}.{layer}") for layer in layers):
            continue
        if tp_plan is not None and not _is_asked(candidate, path, tp_plan):
            continue
        region = probe.split(candidate, size)
        # Nor may two regions divide the same number of heads.
        if region is not None and not changed & {setting[:2] for setting in region.settings}:
            regions.append(region)
            used_layers |= layers
            changed |= {setting[:2] for setting in region.settings}
        # Another number of ranks could share it: say which, rather than leave it whole.
        elif region is None and (works := probe.degrees(candidate)):
            raise _uneven(probe, name, path, candidate, size, works)
        elif tp_plan is not None:
            raise _not_separate(name, path, candidate)
    return regions


def _uneven(probe: Probe, name: str, path: str, candidate: Candidate, size: int, works: list[int]) -> LabError:
    heads, row_path = probe.heads(candidate), f"{path}.{candidate.row}"
    degrees = say(en=" or ", fr=" ou ").join(f"tp={degree}" for degree in works)
    features = widths(probe.layers[candidate.row])[0]
    amount = TEXTS.sentence("uneven", "heads" if heads else "features", count=heads or features)
    return TEXTS.refusal("uneven", "refusal", size=size, amount=amount, row_path=row_path, name=name, degrees=degrees)


def _is_asked(candidate: Candidate, path: str, tp_plan: Styles) -> bool:
    styles = {layer: style_of(f"{path}.{layer}", tp_plan) for layer in (candidate.row, *candidate.columns)}
    return styles.pop(candidate.row) == "rowwise" and set(styles.values()) == {"colwise"}


def _not_separate(name: str, path: str, candidate: Candidate) -> LabError:
    columns = ", ".join(f"{path}.{column}" for column in candidate.columns)
    return TEXTS.refusal("plan", "not separate", name=name, columns=columns, path=path, row=candidate.row)
