"""Page of the game of schedules: answers its requests with what the engine says, draws, and runs on ranks.

The page holds no rule of its own: it sends a request and shows the answer, both JSON data. A request has `do` (one of
`DEEDS`) and the text of a position; every answer has the whole state of the position that follows, or `error`, one
sentence. Nothing typed is executed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import colon, language, one_of, refusal, say, shortest, spaced_percent
from dlojz.base.machine import cores_available
from dlojz.base.table import safe
from dlojz.display import style
from dlojz.display.pipeline_drawing import (
    BoundMark,
    action_words,
    amount,
    facts_of,
    scene_drawing,
    scene_of,
    unit_words,
)
from dlojz.pipeline.analysis import BARRIER
from dlojz.pipeline.exchange_formats import torch_refusal
from dlojz.pipeline.game.coach import advice_of
from dlojz.pipeline.game.execution import ScheduleExecution
from dlojz.pipeline.game.position import SAME, Level, Position, level_count, level_of, position_of, position_of_csv
from dlojz.pipeline.schedule import parse_action
from dlojz.pipeline.simulator import Timeline, simulate

DATA = Path(__file__).with_name("data")
SCRIPT, LOOKS = "schedule_game.js", "schedule_game.css"
DEEDS = ("open", "place", "undo", "paste", "coach", "run", "progress")


class ScheduleGame:
    """Game of one page: answers requests, and keeps the one execution that may be under way."""

    def __init__(self) -> None:
        self._execution: ScheduleExecution | None = None
        self._lock = threading.Lock()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request: the state of the position that follows, or the sentence that refuses it."""
        try:
            deed = request.get("do")
            if deed not in DEEDS:
                raise LabError(one_of("do", deed, DEEDS))
            if deed == "progress":
                return {"run": self._progress()}
            position, message = _position(request)
            if deed == "run":
                self._run(position)
                return {"run": self._progress()}
            return _state(position, message) | (_coached(position) if deed == "coach" else {})
        except LabError as error:
            return {"error": str(error)}

    def stop(self) -> None:
        """End an execution that is under way."""
        if self._execution is not None:
            self._execution.stop()

    def _run(self, position: Position) -> None:
        missing = len(position.level.reference.actions) - len(position.moves)
        if missing:
            raise refusal(
                en=f"{missing} of {len(position.level.reference.actions)} actions are not placed: place all of them, "
                "then run the schedule.",
                fr=f"{missing} actions sur {len(position.level.reference.actions)} ne sont pas placées : placez-les "
                "toutes, puis exécutez l’ordonnancement.",
            )
        with self._lock:
            if self._execution is not None and self._execution.is_running:
                raise refusal(
                    en="a schedule is running: wait for its end before the next one is started.",
                    fr="un ordonnancement s’exécute : attendez sa fin avant d’en lancer un autre.",
                )
            self._execution = ScheduleExecution(position.schedule, position.level.costs)

    def _progress(self) -> dict[str, Any]:
        execution = self._execution
        if execution is None:
            raise refusal(
                en="no schedule has been run: run one.", fr="aucun ordonnancement n’a été exécuté : lancez-en un."
            )
        if execution.is_running:
            ranks = execution.schedule.ranks
            return {
                "running": True,
                "sentence": say(
                    en=f"Running on {ranks} ranks of this machine{colon()}{execution.progress} …",
                    fr=f"Exécution sur {ranks} rangs de cette machine{colon()}{execution.progress} …",
                ),
            }
        result = execution.overlay()
        # matplotlib comes with it, which the rest of the page does without.
        from dlojz.display.figures.partition_figures import overlay_scene

        scene = overlay_scene(result.simulated, result.measured)
        return {"running": False, "sentence": _executed(execution), "svg": scene_drawing(scene).svg()}


def _executed(execution: ScheduleExecution) -> str:
    """What to know of a picture of measured times."""
    ranks, cores = execution.schedule.ranks, cores_available()
    sentence = say(
        en="Your schedule, executed by the package’s runtime; simulated with the mean times that were measured.",
        fr="Votre ordonnancement, exécuté par le runtime du paquet ; simulé avec les durées moyennes mesurées.",
    )
    if cores < ranks:
        sentence += say(
            en=f" {ranks} ranks share {cores} cores here, so they hold each other up.",
            fr=f" {ranks} rangs se partagent ici {cores} cœurs : ils se ralentissent mutuellement.",
        )
    reason = torch_refusal(execution.schedule)
    if reason:
        sentence += say(
            en=f" torch’s own runtime refuses it: {reason}", fr=f" Le runtime de torch le refuse : {reason}"
        )
    return sentence


def _position(request: Mapping[str, Any]) -> tuple[Position, str]:
    """The position that follows from a request, and what to say of it."""
    number, text, deed = request.get("level"), request.get("position") or "", request["do"]
    if not isinstance(text, str) or not (number is None or type(number) is int):
        raise refusal(
            en=f"a level is a whole number and a position a text, but {str(number)[:20]!r} and {str(text)[:20]!r} were "
            "received: open a level again.",
            fr=f"un niveau est un entier et une position un texte, mais {str(number)[:20]!r} et {str(text)[:20]!r} ont "
            "été reçus : ouvrez un niveau.",
        )
    level = None if number is None else level_of(number)
    if deed == "paste":
        if level is None:
            raise refusal(en="no level is open: open one.", fr="aucun niveau n’est ouvert : ouvrez-en un.")
        # Orders in rows have commas; a position has none.
        position = position_of_csv(text, level) if "," in text else position_of(text, level)
        return position, _verdict(position) or say(en="The position is taken over.", fr="La position est reprise.")
    position = position_of(text, level) if text else Position(level or level_of(1))
    if deed == "undo":
        if not position.moves:
            return position, say(
                en="Nothing is placed: there is nothing to undo.", fr="Rien n’est placé : rien à annuler."
            )
        undone = position.moves[-1]
        return position.undone, say(en=f"{undone} is taken back.", fr=f"{undone} est retirée.")
    if deed == "place":
        action, rank = parse_action(str(request.get("action"))[:64]), request.get("rank")
        position = position.after(action, rank if isinstance(rank, int) else None)
        return position, _verdict(position) or _placed(position)
    return position, _verdict(position)


def _placed(position: Position) -> str:
    """Where the latest action lies."""
    action, schedule = position.moves[-1], position.schedule
    number = schedule.actions.index(action)
    start, end = (shortest(float(times[number])) for times in (position.timeline.starts, position.timeline.ends))
    rank = schedule.rank_of(action)
    sentence = say(
        en=f"{action} runs on rank {rank} from {start} to {end}.",
        fr=f"{action} tourne sur le rang {rank} de {start} à {end}.",
    )
    if not position.ready:
        sentence += say(
            en=" Dead end: no action can follow; undo.", fr=" Impasse : aucune action ne peut suivre ; annulez."
        )
    return sentence


def _verdict(position: Position) -> str:
    """What a complete schedule has reached; empty before."""
    if not position.is_complete:
        return ""
    level = position.level
    value, goal = level.value_of(position.timeline), level.goal
    named = ", ".join(position.recognised)
    built = say(en=f" You built{colon()}{named}.", fr=f" Vous avez construit{colon()}{named}.") if named else ""
    if not position.reaches_goal:
        over = shortest(value - goal)
        return built.strip() + say(
            en=f" Complete, but {shortest(value)} is {over} more than the goal {shortest(goal)}: undo, or begin again.",
            fr=f" Complet, mais {shortest(value)} dépasse de {over} le but {shortest(goal)} : annulez, ou recommencez.",
        )
    better = say(en=" You beat the goal!", fr=" Vous battez le but !") if value < goal - SAME else ""
    return say(en="Goal reached", fr="But atteint") + f"{colon()}{shortest(value)}.{better}{built}"


def _state(position: Position, message: str) -> dict[str, Any]:
    level = position.level
    return {
        "level": level.number,
        "title": say(en=f"Level {level.number}", fr=f"Niveau {level.number}") + colon() + level.title,
        "text": level.text,
        "goal": _goal(level),
        "position": position.text,
        "message": message.strip(),
        "complete": position.is_complete,
        "solved": position.reaches_goal,
        "ranks": list(_ranks(position)),
        "figures": list(_figures(position)),
        "waits": [sentence[:1].upper() + sentence[1:] for sentence in position.waits()] if position.moves else [],
        "svg": _drawing(position),
    }


def _measure(level: Level) -> str:
    if level.measure == "makespan":
        return say(en="makespan", fr="durée totale (makespan)")
    return say(en="span", fr="portée (span)")


def _goal(level: Level) -> str:
    goal, limit = shortest(level.goal), level.memory_limit
    wall = say(en="no memory wall", fr="sans mur de mémoire")
    if limit is not None:
        units = shortest(limit)
        wall = say(
            en=f"at most {units} stage-micro-batches kept on a rank",
            fr=f"au plus {units} micro-batches d’étage par rang",
        )
    bubble = spaced_percent(_bubble(level, simulate(level.reference, level.costs)))
    return say(
        en=f"Goal: {_measure(level)} {goal}{unit_words()} (bubble {bubble}), {wall}",
        fr=f"But : {_measure(level)} de {goal}{unit_words()} (bulle de {bubble}), {wall}",
    )


def _bubble(level: Level, timeline: Timeline) -> float:
    """Share of idle time in what the level measures."""
    total = timeline.schedule.ranks * level.value_of(timeline)
    return 1 - sum(timeline.work) / total if total else 0.0


def _ranks(position: Position) -> Iterator[dict[str, Any]]:
    """Per rank what it keeps, and a button for each of its streams: the next action, or why it cannot be placed."""
    level, limit = position.level, position.level.memory_limit
    for rank in range(level.reference.ranks):
        kept_units = shortest(position.memory[rank])
        memory = say(en=f"keeps {kept_units}", fr=f"garde {kept_units}")
        if limit is not None:
            memory += say(en=f" of {shortest(limit)}", fr=f" sur {shortest(limit)}")
        buttons = []
        for stream in (stream for stream in level.streams if level.rank_of(stream) == rank):
            action = position.next_of(stream)
            reason = position.refusal_of(action or level.streams[stream][-1])
            words = action_words([action])[0] if action else ""
            buttons.append(
                {
                    "move": str(action or level.streams[stream][-1]),
                    "label": str(action) if action else f"{stream} ✓",
                    "kind": stream.kind,
                    "ready": reason is None,
                    "hint": words if reason is None else reason,
                }
            )
        yield {"name": say(en=f"rank {rank}", fr=f"rang {rank}"), "memory": memory, "buttons": buttons}


def _figures(position: Position) -> Iterator[tuple[str, str]]:
    level, timeline = position.level, position.timeline
    placed = len(position.moves), len(level.reference.actions)
    yield say(en="placed", fr="placées"), say(en=f"{placed[0]} of {placed[1]}", fr=f"{placed[0]} sur {placed[1]}")
    yield _measure(level), amount(level.value_of(timeline))
    yield say(en="bubble", fr="bulle"), spaced_percent(_bubble(level, timeline))
    bound, is_reached = level.bound
    how = say(en="a schedule reaches it", fr="un ordonnancement l’atteint")
    if not is_reached:
        how = say(en="a bound only: ask the coach for more", fr="une borne seulement : demandez conseil")
    yield say(en="proven bound", fr="borne prouvée"), f"{amount(bound)} ({how})"
    if position.is_complete:
        yield say(en="above the bound", fr="au-dessus de la borne"), amount(level.value_of(timeline) - bound)


def _drawing(position: Position) -> str:
    level, timeline = position.level, position.timeline
    facts = facts_of(timeline, critical=position.is_complete, idle=True, bounds=False)
    if not position.is_complete:  # what lies behind the latest action is still free
        facts["idle"] = tuple(band for band in facts["idle"] if band.name != BARRIER)
    scene = scene_of(timeline, memory_limit=level.memory_limit, **facts)
    marks = ()
    if level.measure == "makespan":
        marks = (BoundMark(level.goal, say(en="goal ", fr="but ") + amount(level.goal), "--"),)
    title = say(en=f"Level {level.number}", fr=f"Niveau {level.number}") + colon() + level.title
    # The goal lies on the axis from the beginning, so that the picture keeps its scale.
    scene = replace(
        scene,
        title=title,
        alt=f"{title}. {scene.subtitle}.",
        width=max(scene.width, level.goal),
        marks=marks,
        bars=tuple(
            bar._replace(label=str(action)) for bar, action in zip(scene.bars, position.schedule.actions, strict=True)
        ),
    )
    return scene_drawing(scene).svg()


def _coached(position: Position) -> dict[str, Any]:
    """What the coach says, and the moves to mark."""
    if position.is_complete:
        return {
            "message": say(
                en="All actions are placed: undo to ask again.", fr="Tout est placé : annulez pour redemander."
            )
        }
    advice = advice_of(position.text)
    equal, best = [str(action) for action in advice.equal], shortest(advice.best)
    others = [str(action) for action in advice.unknown]
    if not equal and not others:
        sentence = say(
            en="Coach: from here no schedule can be completed; undo.",
            fr="Conseil : d’ici, aucun ordonnancement ne peut être achevé ; annulez.",
        )
    elif advice.is_proven:
        moves = ", ".join(equal)
        sentence = say(
            en=f"Coach: the best that can still be reached is {best} (proven), "
            + (f"by {moves} alike." if len(equal) > 1 else f"by {moves} only."),
            fr=f"Conseil : on peut encore atteindre {best} au mieux (prouvé), "
            + (f"avec {moves} indifféremment." if len(equal) > 1 else f"avec {moves} seulement."),
        )
    else:
        bound = shortest(advice.bound)
        reached = say(en=f"{best} by {', '.join(equal)}", fr=f"{best} avec {', '.join(equal)}") if equal else "—"
        sentence = say(
            en=f"Coach: too many orders to search them all. Nothing beats {bound}; found so far: {reached}.",
            fr=f"Conseil : trop d’ordres pour les chercher tous. Rien ne bat {bound} ; trouvé : {reached}.",
        )
    return {"message": sentence, "coach": equal}


def game_page() -> str:
    """Write the page: words in the reader's language, colours of the palette; all else its script asks for."""
    words = {
        "level": say(en="Level", fr="Niveau"),
        "previous": say(en="Previous level", fr="Niveau précédent"),
        "next": say(en="Next level", fr="Niveau suivant"),
        "undo": say(en="Undo (U)", fr="Annuler (U)"),
        "restart": say(en="Begin again", fr="Recommencer"),
        "coach": say(en="Coach (C)", fr="Conseil (C)"),
        "run": say(en="Run on ranks (R)", fr="Exécuter sur des rangs (R)"),
        "ranks": say(en="Actions of each rank", fr="Actions de chaque rang"),
        "waits": say(en="Why ranks wait", fr="Pourquoi des rangs attendent"),
        "share": say(
            en="Position (copy it; or paste one, or one row of actions per rank)",
            fr="Position (à copier ; ou collez-en une, ou une ligne d’actions par rang)",
        ),
        "take": say(en="Take over", fr="Reprendre"),
        "copy": say(en="Copy", fr="Copier"),
        "copied": say(en="Copied.", fr="Copié."),
        "lost": say(
            en="The server does not answer: start `dlojz pipeline --play` again.",
            fr="Le serveur ne répond pas : relancez `dlojz pipeline --play`.",
        ),
        "thinking": say(en="The coach searches …", fr="Le conseil cherche …"),
        "help": say(
            en="An action is stage, kind, micro-batch: 2F0 is the forward of micro-batch 0 in stage 2. Arrows choose, "
            "Enter places, U or Backspace takes back, C asks the coach, R runs.",
            fr="Une action s’écrit étage, genre, micro-batch : 2F0 est la passe avant du micro-batch 0 dans l’étage 2. "
            "Les flèches choisissent, Entrée place, U ou Retour arrière annule, C demande conseil, R exécute.",
        ),
        "levels": [level_of(number).title for number in range(1, level_count() + 1)],
    }
    names = ("ink", "edge", "quiet", "frame", "rule", "pale", "white", "blue", "vermilion", "green_tint", "sky_tint")
    palette = {name.replace("_", "-"): getattr(style, name.upper()) for name in names}
    palette |= {f"kind-{kind}": style.SCHEDULE_STYLES[kind].color for kind in "FBIW"}
    colours = "".join(f"--{name}:{color};" for name, color in palette.items())
    title = say(en="dlojz: build a pipeline schedule", fr="dlojz : construire un ordonnancement de pipeline")
    return (
        f'<!DOCTYPE html><html lang="{language()}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>:root{{{colours}}}</style>"
        f'<link rel="stylesheet" href="{LOOKS}"><link rel="icon" href="data:,"></head><body>'
        f'<main id="game" data-words="{safe_json(words)}"></main>'
        f'<script type="module" src="{SCRIPT}"></script></body></html>'
    )


def safe_json(words: Mapping[str, Any]) -> str:
    """Write data as JSON for an attribute of HTML."""
    # Quotes and angle brackets are escaped; `safe` would cut a long text.
    text = json.dumps(words, ensure_ascii=True)
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
