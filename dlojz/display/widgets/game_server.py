"""Server of the game's page on this machine alone: its files, and the answers of `ScheduleGame`.

It listens on 127.0.0.1 and answers only under a random token in the path, and only requests whose Host is its own
address, so that no other page of the browser can speak with it. What is asked is data of a limited size.
"""

from __future__ import annotations

import hmac
import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dlojz.base.language import say
from dlojz.display.widgets.schedule_game import DATA, LOOKS, SCRIPT, ScheduleGame, game_page

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
