"""Game of schedules in a notebook: the engine of the page, its moves as buttons whose clicks reach the kernel.

A click sends the engine the same request as the page does, so that it works wherever widgets do: on this machine, on a
hub, on a node. Every text is escaped.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.table import safe
from dlojz.display import style
from dlojz.display.widgets.panel import import_widgets, status_html
from dlojz.display.widgets.schedule_game import ScheduleGame
from dlojz.pipeline.game.position import level_count, level_of, page_words

POLL_S = 0.5
"""Seconds between two looks at what runs on ranks."""


def schedule_game(level: int = 1, position: str = "") -> Any:
    """Show the game: build a pipeline schedule action by action, and run it on ranks of the kernel's machine.

    Args:
        level: number of the level that opens, from 1.
        position: text of a position of this level, to go on from.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: if there is no such level or position, or ipywidgets is not installed.
    """
    return NotebookGame(level, position).box


class NotebookGame:
    """Game of one cell; the arguments are those of `schedule_game`."""

    def __init__(self, level: int = 1, position: str = "") -> None:
        widgets = import_widgets(
            en="the game in a notebook", fr="le jeu dans un notebook", instead="`dlojz pipeline --play`"
        )
        self._widgets, self._game, words = widgets, ScheduleGame(), page_words()
        self.state = self._game.answer({"do": "open", "level": level, "position": position})
        if "error" in self.state:
            raise LabError(self.state["error"])
        titles = [(f"{number}. {level_of(number).title}", number) for number in range(1, level_count() + 1)]
        self.levels = widgets.Dropdown(options=titles, value=self.state["level"], description=words["level"])
        self.levels.observe(lambda change: self.ask(do="open", level=change["new"], position=""), names="value")
        self.position = widgets.Textarea(rows=2, layout=widgets.Layout(width="98%"))
        # Labels of the page name its keys in parentheses, which a notebook has for other ends.
        self.tools = {
            name: self._button(words[name].partition(" (")[0]) for name in ("undo", "restart", "coach", "run")
        }
        self.tools["take"] = self._button(words["take"])
        self.tools["undo"].on_click(lambda _: self.ask(do="undo"))
        self.tools["restart"].on_click(lambda _: self.ask(do="open", position=""))
        self.tools["coach"].on_click(lambda _: self.ask(do="coach"))
        self.tools["run"].on_click(lambda _: self._run())
        self.tools["take"].on_click(lambda _: self.ask(do="paste", position=self.position.value))
        self.head, self.message, self.drawing, self.facts = (widgets.HTML() for _ in range(4))
        self.result, self.measured = widgets.HTML(), widgets.HTML()
        self.ranks = widgets.VBox()
        self._waits_name, share = words["waits"], widgets.HTML()
        share.value = safe(words["share"])
        tools = widgets.HBox(list(self.tools.values())[:-1], layout=widgets.Layout(flex_flow="row wrap"))
        above = (self.levels, self.head, self.ranks, tools, self.message, self.drawing, self.facts)
        below = (self.result, self.measured, share, self.position, self.tools["take"])
        self.box = widgets.VBox([*above, *below])
        self._show(self.state)

    def ask(self, **request: Any) -> None:
        """Ask the engine, and show its answer."""
        answer = self._game.answer({"level": self.state["level"], "position": self.state["position"]} | request)
        if "error" in answer:
            self.message.value = status_html(answer["error"])
        else:
            self._show(answer)

    def _button(self, label: str) -> Any:
        return self._widgets.Button(description=label, layout=self._widgets.Layout(width="auto"))

    def _show(self, state: dict[str, Any]) -> None:
        if not self.ranks.children or state["level"] != self.state["level"]:
            # Kept from move to move, so that the focus of the keyboard stays.
            self.ranks.children = [self._row(number, rank) for number, rank in enumerate(state["ranks"])]
        self.state = state
        self.head.value = f"<h4>{safe(state['title'])}</h4><p>{safe(state['text'])}</p><b>{safe(state['goal'])}</b>"
        for row, rank in zip(self.ranks.children, state["ranks"], strict=True):
            name, *buttons, memory = row.children
            name.value, memory.value = safe(rank["name"]), safe(rank["memory"])
            for button, entry in zip(buttons, rank["buttons"], strict=True):
                button.description = entry["label"] + (" ★" if entry["move"] in state.get("coach", ()) else "")
                button.tooltip = entry["hint"]
                # Not by colour alone: the tooltip says why, and so does a click.
                button.style.button_color = style.SCHEDULE_STYLES[entry["kind"]].color if entry["ready"] else style.PALE
        self.message.value = status_html(state["message"])
        figures = " · ".join(f"{safe(name)} <b>{safe(value)}</b>" for name, value in state["figures"])
        waits = "".join(f"<li>{safe(wait)}</li>" for wait in state["waits"])
        reasons = f"<details><summary>{safe(self._waits_name)}</summary><ul>{waits}</ul></details>" if waits else ""
        self.drawing.value = state["svg"]
        self.facts.value = f"<p>{figures}</p>{reasons}"
        self.position.value = state["position"]

    def _row(self, number: int, rank: dict[str, Any]) -> Any:
        buttons = [self._button("") for _ in rank["buttons"]]
        for column, button in enumerate(buttons):
            button.on_click(lambda _, column=column: self._place(number, column))
        row = [self._widgets.HTML(), *buttons, self._widgets.HTML()]
        return self._widgets.HBox(row, layout=self._widgets.Layout(flex_flow="row wrap"))

    def _place(self, rank: int, column: int) -> None:
        entry = self.state["ranks"][rank]["buttons"][column]
        if entry["ready"]:
            self.ask(do="place", action=entry["move"], rank=rank)
        else:
            self.message.value = status_html(entry["hint"])

    def _run(self) -> None:
        answer = self._game.answer({"do": "run", "level": self.state["level"], "position": self.state["position"]})
        if "error" in answer:
            self.message.value = status_html(answer["error"])
        else:
            threading.Thread(target=self._follow, name="schedule game", daemon=True).start()

    def _follow(self) -> None:
        """Show how the execution goes on, until its end."""
        while (answer := self._game.answer({"do": "progress"})).get("run", {}).get("running"):
            self.result.value = status_html(answer["run"]["sentence"])
            time.sleep(POLL_S)
        run = answer.get("run", {})
        self.result.value = status_html(answer.get("error") or run["sentence"])
        self.measured.value = run.get("svg", "")
