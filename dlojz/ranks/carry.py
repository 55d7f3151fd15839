"""What goes along with a cell: `--with NAME` takes a function, a class or a value of the notebook to the ranks.

Layer 5. Invariant: the ranks get source text for what was written in the notebook, the name of a module for what can be
imported, and a copy for any other value; nothing is sent that was not named, but what a named function needs to run:
the functions, classes and modules it mentions.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from dlojz.ranks.limits import Refused
from dlojz.schema import one_of
from dlojz.text import say

# Every rank has its own.
_OWN = frozenset({"rank", "world_size", "torch", "dist", "device", "ranks", "get_ipython"})


def belongings(names: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """All that goes to the ranks with a cell.

    Args:
        names: of the notebook.
        namespace: of the notebook.

    Returns:
        `modules` (name to module and attribute), `sources` (in the order in which they must run) and `values`.

    Raises:
        Refused: if a name is unknown or cannot be sent.
    """
    packed: dict[str, Any] = {"modules": {}, "sources": [], "values": {}}
    seen: set[str] = set()
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in namespace:
            raise Refused(one_of(say(en="name", fr="nom"), name, _visible(namespace)))
        _pack(name, namespace, packed, seen, names)
    return packed


def _visible(namespace: Mapping[str, Any]) -> list[str]:
    hidden = {"In", "Out", "exit", "quit", "open"} | _OWN
    return [name for name in namespace if not name.startswith("_") and name not in hidden]


def _pack(name: str, namespace: Mapping[str, Any], packed: dict[str, Any], seen: set[str], named: list[str]) -> None:
    if name in seen or name not in namespace:
        return
    seen.add(name)
    thing = namespace[name]
    if isinstance(thing, ModuleType):
        packed["modules"][name] = (thing.__name__, "")
    elif isinstance(thing, type | FunctionType) and thing.__module__ == "__main__":
        source = _source(name, thing)
        for mentioned in sorted(_mentioned(source)):
            _pack(mentioned, namespace, packed, seen, named)
        packed["sources"].append(
            source if thing.__name__ in (name, "<lambda>") else f"{source}\n{name} = {thing.__name__}"
        )
    elif _importable(thing):
        packed["modules"][name] = (thing.__module__, thing.__qualname__)
    elif name in named:
        _refuse_what_cannot_travel(name, thing)
        packed["values"][name] = thing


def _importable(thing: Any) -> bool:
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    found: Any = module
    for part in str(getattr(thing, "__qualname__", "")).split("."):
        found = getattr(found, part, None)
    return module is not None and module.__name__ != "__main__" and found is thing and callable(thing)


def _mentioned(source: str) -> set[str]:
    """Names a piece of source reads, those of its own arguments and of Python itself aside."""
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return {name for name in names if not hasattr(builtins, name)} - _OWN


def _source(name: str, thing: Any) -> str:
    try:
        source = _class_source(thing) if isinstance(thing, type) else inspect.getsource(thing)
        source = textwrap.dedent(source)
        if isinstance(thing, FunctionType) and thing.__closure__:
            raise OSError("a function made by a function")
        defined = {
            target
            for node in ast.parse(source).body
            for target in (
                [node.name]
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                else [target.id for target in node.targets if isinstance(target, ast.Name)]
                if isinstance(node, ast.Assign)
                else []
            )
        }
        if not defined & {name, thing.__name__}:
            raise OSError("not a definition")
    except (OSError, TypeError, SyntaxError):
        raise Refused(
            say(
                en=f"{name} cannot be sent to the ranks: its source is not known or not whole. Define it with def or "
                "class in a cell of its own, or inside the %%ranks cell.",
                fr=f"{name} ne peut pas être envoyé aux rangs : son code source n’est pas connu ou pas entier. "
                "Définissez-le par def ou class dans une cellule à part, ou dans la cellule %%ranks.",
            )
        ) from None
    return source


def _class_source(thing: type) -> str:
    """The source of a class of a cell, which `inspect` looks for in a file: found through one of its methods."""
    # An `autograd.Function` has static methods only.
    methods = [getattr(value, "__func__", value) for value in vars(thing).values()]
    for method in (value for value in methods if isinstance(value, FunctionType)):
        lines = linecache.getlines(method.__code__.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno])
    raise OSError("no method tells where the class was written")


def _refuse_what_cannot_travel(name: str, thing: Any) -> None:
    from ipyparallel.serialize import serialize_object

    try:
        if type(thing).__module__ == "__main__" or isinstance(thing, FunctionType):
            raise TypeError(f"{type(thing).__name__} is a class of the notebook")
        serialize_object(thing)
    except Exception as error:
        raise Refused(
            say(
                en=f"{name} ({type(thing).__name__}) cannot be sent to the ranks: {error}. Make it inside the %%ranks "
                "cell.",
                fr=f"{name} ({type(thing).__name__}) ne peut pas être envoyé aux rangs : {error}. Créez-le dans la "
                "cellule %%ranks.",
            )
        ) from None
