"""The notebooks that no source is behind: the page of contents and the glossary, in each language.

Layer 6 (labs). Invariant: they are made from `contents.py` and the glossary alone, hold no answer, and have ids and
metadata of their own, so that building them twice changes no byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dlojz.labs.contents import LABS, PROGRAMMES, duration, total_minutes
from dlojz.labs.glossary import glossary_markdown
from dlojz.labs.links import CONTENTS, GLOSSARY
from dlojz.labs.source import french_spaces
from dlojz.text import Language

PROGRESS_CODE = "from dlojz import labs\n\nlabs.overview()"


def pages(root: Path, language: Language) -> Iterator[tuple[Path, Any]]:
    """Where each page of a language lies in a checkout, and the notebook."""
    folder = root / "notebooks" / language
    yield folder / CONTENTS, contents_notebook(language)
    yield folder / GLOSSARY, glossary_notebook(language)


def contents_notebook(language: Language) -> Any:
    """All labs with links, durations and what comes before, and a cell that shows the student's progress."""
    before, after = contents_markdown(language)
    cells = [("introduction", before), ("progress", None), ("further", after)]
    return _notebook("contents", language, cells)


def glossary_notebook(language: Language) -> Any:
    """The glossary, one cell per initial letter."""
    texts = glossary_markdown(language)
    return _notebook("glossary", language, [(f"part-{number:02d}", text) for number, text in enumerate(texts)])


def _notebook(page: str, language: Language, cells: list[tuple[str, str | None]]) -> Any:
    import nbformat.v4

    notebook = nbformat.v4.new_notebook(
        metadata={
            "dlojz": {"language": language, "page": page},
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
        }
    )
    notebook.nbformat_minor = 5
    for name, text in cells:
        made = (
            nbformat.v4.new_code_cell(PROGRESS_CODE, id=f"{page}-{name}")
            if text is None
            else nbformat.v4.new_markdown_cell(text, id=f"{page}-{name}")
        )
        notebook.cells.append(made)
    return notebook


def contents_markdown(language: Language) -> tuple[str, str]:
    """The page of contents as Markdown: what stands before the student's progress, and what stands after it."""
    if language == "fr":
        before, after = _french()
        return french_spaces(before), french_spaces(after)
    return _english()


def labs_table(language: Language) -> str:
    """The labs as a Markdown table: link, what it teaches, duration, labs before it, processes."""
    french = language == "fr"
    titles = (
        ("TP", "vous y apprenez", "durée", "après", "processus")
        if french
        else ("lab", "what you learn", "time", "after", "processes")
    )
    lines = ["| " + " | ".join(titles) + " |", "|:--|:--|:--|:--|--:|"]
    for entry in LABS:
        cells = (
            f"[{entry.heading(language)}]({entry.notebook})",
            entry.teaches[french],
            duration(entry.minutes),
            ", ".join(entry.after) or "—",
            str(entry.processes),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _english() -> tuple[str, str]:
    first, half, two = LABS[0], *PROGRAMMES[:2]
    added, rest = _added()
    before = f"""# Contents

{len(LABS)} labs on model parallelism, about {duration(total_minutes())} in all. Each has four beats: you **predict** \
a figure, **run** it for real, most often on several processes, **compare**, and **explain** the difference. No lab \
needs a GPU.

{labs_table("en")}

*After* names the labs that a lab builds on; *processes* is the most ranks that one of its cells or checks needs.

New here? Begin with [{first.heading("en")}]({first.notebook}). With {half.days.en}, take \
{listed(half.numbers, "en")}; with {two.days.en}, add {listed(added, "en")}; {listed(rest, "en")} can be taken in any \
order. If attention is new to you, take 01 first: the other labs use it without explaining it again.

## Where you stand

Run this cell (Shift + Enter). It reads what your checks and predictions have left in the folder of your runs; nobody \
is marked by it."""
    after = f"""## When something is in the way

- A word is new: the [glossary]({GLOSSARY}) has it in English and in French.
- An exercise resists: `lab.hint("its-name")` gives a hint, and a second one if you ask again.
- A cell of the lab itself has been changed or deleted: `dlojz labs repair NOTEBOOK` in a terminal brings it back and \
keeps your answers.
- A run fails: `run.diagnosis()` names the cause, `dlojz doctor` examines the machine."""
    return before, after


def _french() -> tuple[str, str]:
    first, half, two = LABS[0], *PROGRAMMES[:2]
    added, rest = _added()
    before = f"""# Sommaire

{len(LABS)} TP sur les parallélismes de modèle, environ {duration(total_minutes())} en tout. Chacun suit quatre \
temps : vous **prédisez** un chiffre, vous **exécutez** pour de vrai, le plus souvent sur plusieurs processus, vous \
**comparez**, puis vous **expliquez** l’écart. Aucun ne demande de GPU.

{labs_table("fr")}

La colonne *après* donne les TP sur lesquels un autre s’appuie ; la colonne *processus*, le plus grand nombre de rangs \
dont une cellule ou une vérification a besoin.

Vous commencez ? Ouvrez [{first.heading("fr")}]({first.notebook}). En {half.days.fr}, faites \
{listed(half.numbers, "fr")} ; en {two.days.fr}, ajoutez {listed(added, "fr")} ; les TP {listed(rest, "fr")} se \
font dans l’ordre que l’on veut. Si l’attention vous est inconnue, faites d’abord le 01 : les autres TP s’en servent \
sans la réexpliquer.

## Où en êtes-vous ?

Exécutez cette cellule (Maj + Entrée). Elle lit ce que vos vérifications et vos prédictions ont laissé dans le dossier \
de vos exécutions ; personne n’est noté là-dessus."""
    after = f"""## Si quelque chose vous arrête

- Un mot est nouveau : le [glossaire]({GLOSSARY}) l’explique, en français et en anglais.
- Un exercice résiste : `lab.hint("son-nom")` donne un indice, puis un second si vous insistez.
- Une cellule du TP a été modifiée ou supprimée : `dlojz labs repair NOTEBOOK`, dans un terminal, la rétablit et garde \
vos réponses.
- Une exécution échoue : `run.diagnosis()` en nomme la cause, `dlojz doctor` examine la machine."""
    return before, after


def _added() -> tuple[list[str], list[str]]:
    """What two days add to half a day, and what comes after them."""
    half, two = (programme.numbers for programme in PROGRAMMES[:2])
    return [number for number in two if number not in half], [one.number for one in LABS if one.number > max(two)]


def listed(numbers: Sequence[str], language: Language) -> str:
    """Numbers of labs as one says them, e.g. `00, 02 and 03`; three and more that follow one another as `04 to 08`."""
    french = language == "fr"
    parts: list[list[str]] = []
    for number in numbers:
        if parts and int(number) == int(parts[-1][-1]) + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    said: list[str] = []
    for part in parts:
        said += [f"{part[0]} {'à' if french else 'to'} {part[-1]}"] if len(part) > 2 else part
    *first, last = said
    return f"{', '.join(first)} {'et' if french else 'and'} {last}" if first else last
