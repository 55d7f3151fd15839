"""Read the sentences of a lab's exercises from the Markdown file beside their code.

An exercise is `# its-id`, then one pair of `- English` and `- French` for its title, and further pairs under headings:
`## praise`, `## hint`, `## nearer` (the second hint), `## unit` of a challenge, and one for each mistake, under the key
that its way has in the code. What is computed stands in braces, as in a format string: `{ranks} lists are expected`.
Sentences that several exercises have in common stand under `# shared`.

A mistake is a function, or what a student writes in place of the right text, such as `"mask → 1 - mask"`: an edit of
the reference. Where it is nothing else, it stands beneath the sentences of its key, as `* mask → 1 - mask`; several
such lines are several ways to one mistake. `*0` in place of the star: in the first of several numbers alone.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dlojz.labs.kit.exercise import Challenge, Exercise, Mistake, Prediction, Said, Sentences
from dlojz.labs.kit.judges import Judge

Way = Callable[..., Any]


@dataclass(frozen=True)
class MistakeWay:
    """Compute what a mistake gives, where a `Mistake` has more than a way: fields as there, or edits for the way."""

    way: Way | str
    part: int | None = None
    seen: Callable[[list[Any]], bool] | None = None


Mistaken = Way | MistakeWay | Mistake | str
"""A way, or edits of the reference, whose sentences stand under its key, or a mistake with sentences of its own."""
Ways = Mapping[str, Mistaken | Sequence[Mistaken]] | Sequence[Mistake]


@cache
def edited(source: tuple[Way, ...], edits: str) -> Way:
    """Make a function whose text is that of another one, but for some edits.

    Args:
        source: functions at the top of one module: the one to make, and those it calls that edits reach.
        edits: `before → after`, several of them parted by `; `. Every occurrence is replaced; each edit sees those
            before it.

    Raises:
        ValueError: if the text to replace is not there.
    """
    way, text = source[0], "\n".join(map(inspect.getsource, source))
    for edit in edits.split("; "):
        before, _, after = (part.strip() for part in edit.partition("→"))
        if before not in text:
            raise ValueError(f"{way.__name__} has no {before!r} to replace")
        text = text.replace(before, after)
    # In a copy of the module's names, so that the right way stays as it is there.
    names = dict(way.__globals__)
    exec(compile(text, f"<{way.__name__}, {edits}>", "exec"), names)
    function: Way = names[way.__name__]
    return function


def edited_when_called(source: tuple[Way, ...], edits: str, part: int | None = None) -> Way:
    """`edited`, when it is called: most mistakes of a lab are never looked for, and reading sources takes time.

    Args:
        source, edits: as `edited` takes them.
        part: which of several numbers is wanted; None: all that the function returns.
    """
    return partial(_results_of_edited, source, edits, part)


def _results_of_edited(source: tuple[Way, ...], edits: str, part: int | None, *case: Any) -> Any:
    results = edited(source, edits)(*case)
    return results if part is None else results[part]


def by_part(way: Way | str, count: int) -> list[MistakeWay]:
    """Ways of a mistake in several numbers: in all of them, and once for each, where an answer makes it there alone."""
    if isinstance(way, str):
        return [MistakeWay(way), *(MistakeWay(way, part) for part in range(count))]
    return [MistakeWay(way), *(MistakeWay(lambda *case, part=part: way(*case)[part], part) for part in range(count))]


class Texts(Sentences):
    """Sentences of the exercises of one module, by exercise and key.

    Args:
        module: `__file__` of the module; its sentences stand in the file of the same name that ends in `.md`.
    """

    def __init__(self, module: str) -> None:
        super().__init__(Path(module).with_suffix(".md"))

    @cached_property
    def edits(self) -> dict[str, dict[str, list[MistakeWay]]]:
        """Edits of the reference by exercise and key: the points with a star."""
        edits: dict[str, dict[str, list[MistakeWay]]] = {}
        exercise, key = "", ""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            mark, _, text = line.partition(" ")
            if mark == "#":
                exercise = text
            elif mark == "##":
                key = text
            elif mark.startswith("*"):
                way = MistakeWay(text, int(mark[1:]) if mark[1:] else None)
                edits.setdefault(exercise, {}).setdefault(key, []).append(way)
        return edits

    def mistake(
        self,
        exercise: str,
        key: str,
        way: Callable[..., Any],
        part: int | None = None,
        seen: Callable[[list[Any]], bool] | None = None,
        **values: object,
    ) -> Mistake:
        """Make a mistake with the sentence of a key; the other fields are those of `Mistake`."""
        return Mistake(way, *self.sentence(exercise, key, **values), part, seen)

    def exercise(
        self,
        exercise: str,
        reference: Callable[..., Any] | None = None,
        *,
        mistakes: Ways = (),
        faults: Ways = (),
        repairs: Ways = (),
        source: tuple[Way, ...] = (),
        **judge: Any,
    ) -> Exercise:
        """Make an exercise that a `Judge` judges, whose mistakes are named by their keys.

        Args:
            exercise: its id.
            reference, mistakes, faults, repairs: as in `Judge`; a mapping has the sentence's key before each way, which
                may be edits of the reference. The edits of the file are mistakes too, all in the order of its keys.
            source: functions that edits reach, in place of the reference alone; see `edited`.
            judge: further fields of `Judge`.
        """
        source = source or ((reference,) if reference else ())
        return self.judged(
            exercise,
            Judge(
                reference,
                mistakes=self._mistakes(exercise, self._with_edits(exercise, mistakes), source),
                faults=self._mistakes(exercise, faults, source),
                repairs=self._mistakes(exercise, repairs, source),
                **judge,
            ),
        )

    def judged(self, exercise: str, judge: Callable[[Callable[..., Any]], float | None]) -> Exercise:
        """Make an exercise that another judge judges."""
        return Exercise(id=exercise, judge=judge, **self._said(exercise))

    def challenge(
        self, exercise: str, judge: Callable[[Callable[..., Any]], float | None], *, target: float
    ) -> Challenge:
        """Make a challenge; its unit stands under `## unit`."""
        unit = self.sentence(exercise, "unit")
        return Challenge(id=exercise, judge=judge, target=target, unit=unit, **self._said(exercise))

    def _said(self, exercise: str) -> dict[str, Said]:
        return {key: self.sentence(exercise, key) for key in ("title", "praise", "hint", "nearer")}

    def _with_edits(self, exercise: str, ways: Ways) -> Ways:
        if exercise not in self.edits:
            return ways
        assert isinstance(ways, Mapping) or not ways, "mistakes with sentences of their own beside edits"
        with_sentences = ways if isinstance(ways, Mapping) else {}
        by_key: dict[str, Mistaken | Sequence[Mistaken]] = {**self.edits[exercise], **with_sentences}
        # Last those whose sentences stand elsewhere.
        return {key: by_key[key] for key in (*self.sentences[exercise], *by_key) if key in by_key}

    def _mistakes(self, exercise: str, ways: Ways, source: tuple[Way, ...]) -> tuple[Mistake, ...]:
        if not isinstance(ways, Mapping):
            return tuple(ways)
        mistakes: list[Mistake] = []
        for key, entry in ways.items():
            # A text is a sequence too, but of letters.
            for mistaken in (entry,) if isinstance(entry, str) or not isinstance(entry, Sequence) else entry:
                if isinstance(mistaken, Mistake):
                    mistakes.append(mistaken)
                    continue
                variant = mistaken if isinstance(mistaken, MistakeWay) else MistakeWay(mistaken)
                way, part = variant.way, variant.part
                way = edited_when_called(source, way, part) if isinstance(way, str) else way
                mistakes.append(self.mistake(exercise, key, way, part, variant.seen))
        return tuple(mistakes)


def asked_in_notebook(package: str, *modules: ModuleType) -> tuple[tuple[Exercise, ...], tuple[Prediction, ...]]:
    """Read what a lab's notebook asks for: its exercises in their order, and its predictions.

    Args:
        package: `__file__` of the lab's package; `notebook.toml` lies beside it.
        modules: where the exercises are made.

    Raises:
        ValueError: if an exercise of these modules is not listed.
    """
    content = tomllib.loads(Path(package).with_name("notebook.toml").read_text(encoding="utf-8"))
    names = content.pop("exercises")
    made = {value.id: value for module in modules for value in vars(module).values() if isinstance(value, Exercise)}
    if unlisted := made.keys() - set(names):
        raise ValueError(f"not in the order of the notebook: {', '.join(sorted(unlisted))}")
    return tuple(made[name] for name in names), tuple(Prediction(id=name, **row) for name, row in content.items())
