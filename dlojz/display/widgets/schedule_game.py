"""Page of the game of schedules: answers its requests with what the engine says, draws, and runs on ranks.

The page holds no rule of its own: it sends a request and shows the answer, both JSON data. A request has `do` (one of
`DEEDS`) and the text of a position; every answer has the whole state of the position that follows, or `error`, one
sentence. Nothing typed is executed.

Its server is for this machine alone. It listens on 127.0.0.1 and answers only under a random token in the path, and
only requests whose Host is its own address, so that no other page of the browser can speak with it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import language, one_of, say, shortest, spaced_percent
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
from dlojz.pipeline.game.position import (
    SAME,
    Level,
    Position,
    level_count,
    level_of,
    page_words,
    position_of,
    position_of_csv,
    sentence,
)
from dlojz.pipeline.schedule import parse_action
from dlojz.pipeline.simulator import Timeline, simulate

DATA = Path(__file__).with_name("data")
SCRIPT, LOOKS, WORDS, PALETTE = "schedule_game.js", "schedule_game.css", "words.json", "palette.css"
"""Files of the page; the last two are written when they are asked for."""
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
            raise LabError(sentence("not_complete", missing=missing, total=len(position.level.reference.actions)))
        with self._lock:
            if self._execution is not None and self._execution.is_running:
                raise LabError(sentence("is_running"))
            self._execution = ScheduleExecution(position.schedule, position.level.costs)

    def _progress(self) -> dict[str, Any]:
        execution = self._execution
        if execution is None:
            raise LabError(sentence("never_run"))
        if execution.is_running:
            now = sentence("running", ranks=execution.schedule.ranks, progress=execution.progress)
            return {"running": True, "sentence": now}
        result = execution.overlay()
        # matplotlib comes with it, which the rest of the page does without.
        from dlojz.display.figures.partition_figures import overlay_scene

        scene = overlay_scene(result.simulated, result.measured)
        return {"running": False, "sentence": _executed(execution), "svg": scene_drawing(scene).svg()}


def _executed(execution: ScheduleExecution) -> str:
    """What to know of a picture of measured times."""
    ranks, cores = execution.schedule.ranks, cores_available()
    words = sentence("executed")
    if cores < ranks:
        words += sentence("few_cores", ranks=ranks, cores=cores)
    reason = torch_refusal(execution.schedule)
    return words + (sentence("torch_refuses", reason=reason) if reason else "")


def _position(request: Mapping[str, Any]) -> tuple[Position, str]:
    """The position that follows from a request, and what to say of it."""
    number, text, deed = request.get("level"), request.get("position") or "", request["do"]
    if not isinstance(text, str) or not (number is None or type(number) is int):
        raise LabError(sentence("wrong_request", number=repr(str(number)[:20]), text=repr(str(text)[:20])))
    level = None if number is None else level_of(number)
    if deed == "paste":
        if level is None:
            raise LabError(sentence("no_open_level"))
        # Orders in rows have commas; a position has none.
        position = position_of_csv(text, level) if "," in text else position_of(text, level)
        return position, _verdict(position) or sentence("taken_over")
    position = position_of(text, level) if text else Position(level or level_of(1))
    if deed == "undo":
        if not position.moves:
            return position, sentence("nothing_placed")
        return position.undone, sentence("undone", action=position.moves[-1])
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
    words = sentence("placed", action=action, rank=schedule.rank_of(action), start=start, end=end)
    return words if position.ready else words + sentence("dead_end")


def _verdict(position: Position) -> str:
    """What a complete schedule has reached; empty before."""
    if not position.is_complete:
        return ""
    level = position.level
    value, goal = level.value_of(position.timeline), level.goal
    named = ", ".join(position.recognised)
    built = sentence("built", names=named) if named else ""
    if not position.reaches_goal:
        over = sentence("over_goal", value=shortest(value), over=shortest(value - goal), goal=shortest(goal))
        return built + over
    beaten = sentence("goal_beaten") if value < goal - SAME else ""
    return sentence("goal_reached", value=shortest(value)) + beaten + built


def _state(position: Position, message: str) -> dict[str, Any]:
    level = position.level
    return {
        "level": level.number,
        "title": sentence("level_title", number=level.number, title=level.title),
        "text": level.text,
        "goal": _goal(level),
        "position": position.text,
        "message": message.strip(),
        "complete": position.is_complete,
        "solved": position.reaches_goal,
        "ranks": list(_ranks(position)),
        "figures": list(_figures(position)),
        "waits": [wait[:1].upper() + wait[1:] for wait in position.waits()] if position.moves else [],
        "svg": _drawing(position),
    }


def _goal(level: Level) -> str:
    limit = level.memory_limit
    return sentence(
        "goal",
        measure=sentence(level.measure),
        value=shortest(level.goal),
        unit=unit_words(),
        bubble=spaced_percent(_bubble(level, simulate(level.reference, level.costs))),
        wall=sentence("no_wall") if limit is None else sentence("wall", units=shortest(limit)),
    )


def _bubble(level: Level, timeline: Timeline) -> float:
    """Share of idle time in what the level measures."""
    total = timeline.schedule.ranks * level.value_of(timeline)
    return 1 - sum(timeline.work) / total if total else 0.0


def _ranks(position: Position) -> Iterator[dict[str, Any]]:
    """Per rank what it keeps, and a button for each of its streams: the next action, or why it cannot be placed."""
    level, limit = position.level, position.level.memory_limit
    for rank in range(level.reference.ranks):
        memory = sentence("keeps", units=shortest(position.memory[rank]))
        if limit is not None:
            memory = sentence("keeps_of", units=shortest(position.memory[rank]), limit=shortest(limit))
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
        yield {"name": sentence("rank", rank=rank), "memory": memory, "buttons": buttons}


def _figures(position: Position) -> Iterator[tuple[str, str]]:
    level, timeline = position.level, position.timeline
    total = len(level.reference.actions)
    yield sentence("placed_name"), sentence("placed_of", placed=len(position.moves), total=total)
    yield sentence(level.measure), amount(level.value_of(timeline))
    yield sentence("bubble"), spaced_percent(_bubble(level, timeline))
    bound, is_reached = level.bound
    yield sentence("bound"), sentence("bound_reached" if is_reached else "bound_alone", value=amount(bound))
    if position.is_complete:
        yield sentence("above_bound"), amount(level.value_of(timeline) - bound)


def _drawing(position: Position) -> str:
    level, timeline = position.level, position.timeline
    facts = facts_of(timeline, critical=position.is_complete, idle=True, bounds=False)
    if not position.is_complete:  # what lies behind the latest action is still free
        facts["idle"] = tuple(band for band in facts["idle"] if band.name != BARRIER)
    scene = scene_of(timeline, memory_limit=level.memory_limit, **facts)
    marks: tuple[BoundMark, ...] = ()
    if level.measure == "makespan":
        marks = (BoundMark(level.goal, sentence("goal_mark", value=amount(level.goal)), "--"),)
    title = sentence("level_title", number=level.number, title=level.title)
    # The goal lies on the axis from the beginning, so that the picture keeps its scale.
    scene = replace(
        scene,
        title=title,
        alt=f"{title}. {scene.subtitle}.",
        width=max(scene.width, level.goal),
        marks=marks,
        # Bars are named as the sentences name actions, so letters of chunks need no entry.
        legend=tuple(entry for entry in scene.legend if entry[0].color != style.WHITE),
        bars=tuple(
            bar._replace(label=str(action)) for bar, action in zip(scene.bars, position.schedule.actions, strict=True)
        ),
    )
    return scene_drawing(scene).svg()


def _coached(position: Position) -> dict[str, Any]:
    """What the coach says, and the moves to mark."""
    if position.is_complete:
        return {"message": sentence("coach_complete")}
    advice = advice_of(position.text)
    equal = [str(action) for action in advice.equal]
    values = {"best": shortest(advice.best), "moves": ", ".join(equal), "bound": shortest(advice.bound)}
    if advice.is_proven:
        key = "coach_dead_end" if not equal else "coach_only" if len(equal) == 1 else "coach_alike"
    else:
        key = "coach_bound" if equal else "coach_bound_alone"
    return {"message": sentence(key, **values), "coach": equal}


def game_page() -> str:
    """Write the page: a frame without words or colours, which its script and its looks ask for."""
    return (
        f'<!DOCTYPE html><html lang="{language()}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(page_words()['title'])}</title>"
        f'<link rel="stylesheet" href="{PALETTE}"><link rel="stylesheet" href="{LOOKS}">'
        f'<link rel="icon" href="data:,"></head><body><main id="game"></main>'
        f'<script type="module" src="{SCRIPT}"></script></body></html>'
    )


def words_of_page() -> str:
    """Write the words of the page in the reader's language, and the levels' titles, as JSON."""
    return json.dumps(page_words() | {"levels": [level_of(number).title for number in range(1, level_count() + 1)]})


def palette() -> str:
    """Write the package's colours as variables of CSS."""
    names = ("ink", "edge", "quiet", "frame", "rule", "pale", "white", "blue", "vermilion", "green_tint", "sky_tint")
    colors = {name.replace("_", "-"): getattr(style, name.upper()) for name in names}
    colors |= {f"kind-{kind}": style.SCHEDULE_STYLES[kind].color for kind in "FBIW"}
    return ":root{" + "".join(f"--{name}:{color};" for name, color in colors.items()) + "}"


MAX_REQUEST_BYTES = 64 * 1024
_TYPES = {SCRIPT: "text/javascript", LOOKS: "text/css"}
_HEADERS = {
    # Scripts and requests of this server only; the engine's SVG has style attributes.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class GameServer(ThreadingHTTPServer):
    """Server of one game, on a free port.

    Args:
        level: number of the level that opens.
    """

    daemon_threads = True

    def __init__(self, level: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.level, self.game, self.token = level, ScheduleGame(), secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        """Where the page is, token included."""
        start = self.game.answer({"do": "open", "level": self.level})
        return f"http://127.0.0.1:{self.server_port}/{self.token}/#{start['position']}"

    def server_close(self) -> None:
        """Stop, with what runs on ranks."""
        self.game.stop()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: GameServer
    timeout = 60
    """Seconds after which a client that sends nothing is left."""

    def log_message(self, *_: Any) -> None:
        """Print nothing: the terminal has the address."""

    def do_GET(self) -> None:
        name = self._admitted()
        if name == "":
            self._send(200, game_page(), "text/html")
        elif name == WORDS:
            self._send(200, words_of_page(), "application/json")
        elif name == PALETTE:
            self._send(200, palette(), "text/css")
        elif name in _TYPES:
            self._send(200, (DATA / name).read_text(encoding="utf-8"), _TYPES[name])
        elif name is not None:
            self._refuse(404, en=f"there is no page {name[:40]!r} here.", fr=f"il n’y a pas de page {name[:40]!r} ici.")

    def do_POST(self) -> None:
        name = self._admitted()
        if name is None:
            return
        size_text = self.headers.get("Content-Length", "")
        if not size_text.isdecimal() or int(size_text) > MAX_REQUEST_BYTES:
            self._refuse(
                413,
                en=f"a request has at most {MAX_REQUEST_BYTES} bytes, but {size_text[:20]!r} were announced.",
                fr=f"une requête a au plus {MAX_REQUEST_BYTES} octets, mais {size_text[:20]!r} ont été annoncés.",
            )
            return
        try:
            request = json.loads(self.rfile.read(int(size_text)))
        except (ValueError, RecursionError):
            request = None
        is_json = self.headers.get_content_type() == "application/json"
        if name != "ask" or not is_json or not isinstance(request, dict):
            self._refuse(400, en="a request is a JSON object for ask.", fr="une requête est un objet JSON pour ask.")
            return
        self._send(200, json.dumps(self.server.game.answer(request)), "application/json")

    def _admitted(self) -> str | None:
        """What is asked for, below the token; None where the request was refused."""
        port, path = self.server.server_port, self.path.partition("?")[0]
        token, _, name = path.removeprefix("/").partition("/")
        # The Host of a page that a name elsewhere leads here (DNS rebinding) is that name.
        known_host = self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")
        if known_host and hmac.compare_digest(token.encode(), self.server.token.encode()):
            return name
        self._refuse(
            403,
            en="this address is not the game’s: open the one that `dlojz pipeline --play` has printed.",
            fr="cette adresse n’est pas celle du jeu : ouvrez celle que `dlojz pipeline --play` a affichée.",
        )
        return None

    def _refuse(self, status: int, *, en: str, fr: str) -> None:
        self._send(status, say(en=en, fr=fr), "text/plain")

    def _send(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)
