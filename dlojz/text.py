"""The language of the reader: every sentence a student sees is written twice, side by side.

Layer 0. Invariant: English and French stand at the same place in the source, so that neither is forgotten.
"""

from __future__ import annotations

import os
from typing import Literal, get_args

Language = Literal["en", "fr"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
_chosen: Language | None = None


def use_language(name: str) -> None:
    """Choose the language of all that follows in this process (`en` or `fr`).

    Raises:
        LabError: if the language is another one.
    """
    global _chosen
    for known in LANGUAGES:
        if name == known:
            _chosen = known
            return
    from dlojz.schema import LabError, one_of  # which says its own sentences in the language chosen here

    raise LabError(one_of("language", name, LANGUAGES))


def language() -> Language:
    """The language chosen, else that of `$DLOJZ_LANG`, else English."""
    if _chosen is not None:
        return _chosen
    return "fr" if os.environ.get("DLOJZ_LANG", "").lower().startswith("fr") else "en"


def say(*, en: str, fr: str) -> str:
    """The sentence in the reader's language."""
    return fr if language() == "fr" else en
