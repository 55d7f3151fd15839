"""Contract: frozen data that is checked when it is made, in JSON and out of it; refusals are one plain sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say

__all__ = ["Contract", "LabError", "check_at_least", "explain", "one_of", "parse_json"]

_BOUNDS = (
    ("gt", "greater than", "plus grand que"),
    ("ge", "at least", "au moins égal à"),
    ("lt", "less than", "plus petit que"),
    ("le", "at most", "au plus égal à"),
)


def _sentence(error: ErrorDetails, legal_keys: Iterable[str]) -> str:
    """Say one pydantic error in plain words."""
    # The path of the field, such as `layout.dp`.
    field = ".".join(str(part) for part in error["loc"]) or "value"
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "value_error":
        return str(context["error"])
    if kind == "extra_forbidden":
        return one_of(say(en="key", fr="clé"), error["loc"][-1], legal_keys)
    if kind == "literal_error":
        # pydantic writes "'a', 'b' or 'c'".
        legal = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
        return one_of(field, value, legal)
    if kind == "missing":
        return say(en=f"{field} is missing: give it a value.", fr=f"{field} manque : donnez-lui une valeur.")
    for bound, english, french in _BOUNDS:
        if bound in context:
            return say(
                en=f"{field} must be {english} {context[bound]}, but {value!r} was received.",
                fr=f"{field} doit être {french} {context[bound]}, mais {value!r} a été reçu.",
            )
    return f"{field}: {error['msg'][0].lower()}{error['msg'][1:]}, but {value!r} was received."


def check_at_least(minimum: float, **values: float) -> None:
    """Refuse a value that is below a bound.

    Raises:
        LabError: naming it.
    """
    for name, value in values.items():
        if value < minimum:
            raise refusal(
                en=f"{name} must be at least {minimum}, but {value} was received.",
                fr=f"{name} doit être au moins égal à {minimum}, mais {value} a été reçu.",
            )


def check_whole(name: str, value: object, maximum: int) -> int:
    """Check a whole number from 1 to `maximum`.

    Raises:
        LabError: naming it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise refusal(
            en=f"{name} must be a whole number from 1 to {maximum}, but {value!r} was received.",
            fr=f"{name} doit être un nombre entier de 1 à {maximum}, mais {value!r} a été reçu.",
        )
    return value


def explain(error: ValidationError, legal_keys: Iterable[str]) -> str:
    """Say all that is wrong, one sentence per fault, in the order of the fields."""
    legal_keys = list(legal_keys)
    return " ".join(_sentence(detail, legal_keys) for detail in error.errors(include_url=False))


class Contract(BaseModel):
    """Base of every contract: frozen, no unknown key, no NaN, JSON in and JSON out.

    Raises:
        LabError: if a value is illegal; the message is a plain sentence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise LabError(explain(error, type(self).model_fields)) from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build from plain JSON data; an unknown key is refused and the legal ones are listed."""
        if not isinstance(data, Mapping):
            raise LabError(f"{cls.__name__} is made from a JSON object, but {type(data).__name__} was received.")
        return cls(**data)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Build from a JSON document.

        Raises:
            LabError: if the text is no JSON, or holds NaN, a repeated key, or an illegal value.
        """
        return cls.from_dict(parse_json(text))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data (lists, dictionaries, numbers, strings)."""
        return self.model_dump(mode="json")

    def to_json(self, indent: int | None = 2) -> str:
        """Write the JSON document that `from_json` reads back to an equal object."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise LabError(f"the JSON document repeats the key {repeated[0]!r}; keep one of them.")
    return dict(pairs)


def _refuse_constant(name: str) -> float:
    raise LabError(f"the JSON document holds {name}, which is no JSON number.")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise LabError(f"the JSON document holds the number {text}, which is too large.")
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse strict JSON: no NaN, no repeated key, no byte-order mark, no number or nesting beyond reason.

    Raises:
        LabError: in one sentence, for anything that is not such a document.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except LabError:  # a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        raise LabError(f"not a readable JSON document: {error}.") from None
