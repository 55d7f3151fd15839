"""The server of the game: its token, its Host, its limits; and what its answers hold."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import main
from dlojz.display.widgets.schedule_game import MAX_REQUEST_BYTES, GameServer, ScheduleGame
from dlojz.pipeline.exchange_formats import to_csv
from dlojz.pipeline.game.position import level_of


@pytest.fixture(scope="module")
def server() -> Iterator[GameServer]:
    with GameServer(1) as started:
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def asked(
    server: GameServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    answer = response.status, response.read().decode(), dict(response.getheaders())
    connection.close()
    return answer


def test_the_page_and_its_files_are_served_below_the_token(server: GameServer) -> None:
    for name, kind in (
        *(("", "text/html"), ("schedule_game.js", "text/javascript"), ("schedule_game.css", "text/css")),
        *(("palette.css", "text/css"), ("words.json", "application/json")),
    ):
        status, text, headers = asked(server, "GET", f"/{server.token}/{name}")
        assert status == 200 and text
        assert headers["Content-Type"].startswith(kind)
        assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert asked(server, "GET", f"/{server.token}/../position.py")[0] == 404
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_missing_or_wrong_token_and_another_host_are_refused(server: GameServer, method: str) -> None:
    for path, host in (
        ("/", None),
        ("/ask", None),
        (f"/{server.token[:-1]}x/ask", None),
        ("/%C3%A9/ask", None),
        (f"/{server.token}/ask", "example.org"),
        (f"/{server.token}/ask", f"example.org:{server.server_port}"),
    ):
        headers = {} if host is None else {"Host": host}
        status, text, _ = asked(server, method, path, {"do": "open"}, **headers)
        assert status == 403 and "this address is not the game’s" in text


def test_requests_are_json_objects_of_a_limited_size(server: GameServer) -> None:
    path = f"/{server.token}/ask"
    status, text, _ = asked(server, "POST", path, {"do": "place", "action": "0F0", "rank": 0, "level": 1})
    assert status == 200 and json.loads(text)["message"] == "0F0 runs on rank 0 from 0 to 1."
    assert asked(server, "POST", path, b"x" * (MAX_REQUEST_BYTES + 1))[0] == 413
    assert asked(server, "POST", path, b"{")[0] == 400
    assert asked(server, "POST", path, b"[" * 50_000)[0] == 400
    assert asked(server, "POST", path, [1])[0] == 400
    assert asked(server, "POST", f"/{server.token}/other", {})[0] == 400
    assert asked(server, "POST", path, {"do": "open"}, **{"Content-Type": "text/plain"})[0] == 400


@pytest.mark.parametrize(
    ("request_fields", "sentence"),
    [
        ({}, "unknown do 'None'"),
        ({"do": "eval"}, "unknown do 'eval'"),
        ({"do": "open", "level": 11}, "there are levels 1 to 10, but 11 was received"),
        ({"do": "open", "level": "1"}, "a level is a whole number"),
        ({"do": "open", "level": True}, "a level is a whole number"),
        ({"do": "open", "position": ["1"]}, "a level is a whole number and a position a text"),
        ({"do": "open", "position": "1.1.0F.00000000"}, "is no whole position"),
        ({"do": "place", "action": "<b>"}, "is no action"),
        ({"do": "place", "action": "0F0", "rank": 1}, "0F0 belongs to rank 0"),
        ({"do": "paste", "position": "0F0,0B0"}, "no level is open"),
        ({"do": "run", "level": 1}, "6 of 6 actions are not placed"),
        ({"do": "progress"}, "no schedule has been run"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_in_one_sentence(
    request_fields: dict[str, Any], sentence: str
) -> None:
    answer = ScheduleGame().answer(request_fields)
    assert set(answer) == {"error"} and sentence in answer["error"] and "\n" not in answer["error"]


def test_an_answer_has_buttons_memory_figures_waits_and_the_drawing() -> None:
    game = ScheduleGame()
    rows = "0F0,0F1,0F2\n1F0\n2F0"
    state = game.answer({"do": "paste", "level": 4, "position": to_csv(level_of(4).reference)})
    assert state["solved"] and state["message"].startswith("Goal reached: 21. You built: 1F1B")
    assert dict(state["figures"])["above the bound"] == "0"
    assert "error" in game.answer({"do": "paste", "level": 4, "position": rows}), "micro-batches are missing"
    position = ""
    for move in ("0F0", "0F1", "0F2", "1F0"):
        state = game.answer({"do": "place", "level": 4, "position": position, "action": move})
        position = state["position"]
    assert [rank["memory"] for rank in state["ranks"]] == ["keeps 3 of 3", "keeps 1 of 3", "keeps 0 of 3"]
    ready = [button["move"] for rank in state["ranks"] for button in rank["buttons"] if button["ready"]]
    assert ready == ["1F1", "2F0"]
    assert "memory wall" in state["ranks"][0]["buttons"][0]["hint"]
    assert state["svg"].startswith("<svg") and "goal 21" in state["svg"]
    assert game.answer({"do": "coach", "position": position})["coach"] == ["1F1", "2F0"]


def test_the_page_is_in_both_languages(server: GameServer) -> None:
    pages = []
    for language in ("en", "fr"):
        use_language(language)
        assert f'lang="{language}"' in asked(server, "GET", f"/{server.token}/")[1]
        pages.append(json.loads(asked(server, "GET", f"/{server.token}/words.json")[1]))
    assert [page["undo"] for page in pages] == ["Undo (U)", "Annuler (U)"]
    assert len(pages[1]["levels"]) == 10
    assert [name for name in pages[0] if pages[0][name] == pages[1][name]] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--play", "11"], "there are levels 1 to 10, but 11 was received"),
        (["--play", "four"], "--play takes a number, but 'four' was received"),
        (["--play", "1", "2"], "--play takes one level, but '1 2' was received"),
        (["--play", "--compare"], "--compare does nothing beside --play"),
        (["--no-browser"], "--no-browser does nothing without --play"),
    ],
)
def test_main_pipeline_refuses_what_is_no_level(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", *words]) == 2
    assert sentence in capsys.readouterr().err
