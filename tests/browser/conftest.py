"""A real hub with its proxy, a real Chromium, two students who are users of the system; all of it gone afterwards."""

import importlib.util
import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hubs import StartedHub, need, started_hub

STUDENTS = {"dlojz-a": "fr", "dlojz-b": "en"}
READY_S = 600
CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a screen."""
    chromium = shutil.which("chromium")
    need(chromium, "Debian's chromium")
    need(importlib.util.find_spec("playwright"), "playwright (extra test)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM))
        yield started
        started.close()


@dataclass(frozen=True)
class Hub(StartedHub):
    """A hub that is up."""

    @property
    def url(self) -> str:
        """Where one logs in."""
        return str(self.told["url"])

    @property
    def passwords(self) -> dict[str, str]:
        """Of the students, by name."""
        return {name: one["password"] for name, one in self.told["users"].items()}

    def home(self, student: str) -> Path:
        """A student's own folder."""
        return self.folder / "home" / student

    def wait_until_up(self) -> None:
        """Until the page to log in is there."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            with suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"{self.url}/hub/login", timeout=5).close()
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.3)
        pytest.fail(f"the hub did not come up:\n{self.log()}")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """Proxy and hub, up."""
    if os.geteuid() != 0:
        pytest.skip("students that are users of the system are made by root only")
    need(importlib.util.find_spec("jupyterhub"), "jupyterhub (extra test)")
    users = ",".join(f"{name}:{language}" for name, language in STUDENTS.items())
    with started_hub("dlojz-hub-", f"--users={users}", patience_s=READY_S, end=signal.SIGKILL) as started:
        up = Hub(started.process, started.folder, started.told)
        up.wait_until_up()
        yield up


# Runs in the page, with the student's own cookies: what JupyterLab itself does to speak with a server and a kernel.
ASK = """async ([path, method, body]) => {
  const token = (document.cookie.match(/(?:^|; )_xsrf=([^;]*)/) || [])[1] || "";
  const told = {method, headers: {"X-XSRFToken": decodeURIComponent(token), "Content-Type": "application/json"}};
  if (body !== null) told.body = JSON.stringify(body);
  const answer = await fetch(path, told);
  return [answer.status, await answer.text()];
}"""
EXECUTE = """([path, code]) => new Promise((resolve, reject) => {
  const socket = new WebSocket(location.origin.replace("http", "ws") + path);
  const id = crypto.randomUUID();
  let said = "";
  const header = {msg_id: id, msg_type: "execute_request", session: id, username: "", version: "5.3", date: ""};
  const content = {code, silent: false, store_history: false, user_expressions: {}, allow_stdin: false};
  socket.onopen = () => socket.send(
    JSON.stringify({channel: "shell", header, parent_header: {}, metadata: {}, content, buffers: []}));
  socket.onerror = () => reject(new Error("no connection to the kernel"));
  socket.onmessage = (event) => {
    if (typeof event.data !== "string") return;
    const message = JSON.parse(event.data);
    if (message.parent_header.msg_id !== id) return;
    if (message.msg_type === "stream") said += message.content.text;
    if (message.msg_type === "error") said += message.content.ename + ": " + message.content.evalue;
    if (message.msg_type === "status" && message.content.execution_state === "idle") { socket.close(); resolve(said); }
  };
})"""

TYPE = """([path, line, end]) => new Promise((resolve, reject) => {
  const socket = new WebSocket(location.origin.replace("http", "ws") + path);
  let said = "";
  socket.onopen = () => socket.send(JSON.stringify(["stdin", line + "\\r"]));
  socket.onerror = () => reject(new Error("no connection to the terminal"));
  socket.onmessage = (event) => {
    const [kind, text] = JSON.parse(event.data);
    if (kind === "stdout") said += text;
    if (said.includes(end)) { socket.close(); resolve(said); }
  };
})"""


@dataclass
class Student:
    """A student who has logged in.

    Args:
        name: of the user.
        page: of the browser, on JupyterLab.
        hub: the hub.
        logged: what the page wrote to its console as errors.
    """

    name: str
    page: Any
    hub: Hub

    @property
    def base(self) -> str:
        """Where the student's own server is, ending in a slash."""
        return f"/user/{self.name}/"

    def ask(self, path: str, method: str = "GET", body: object = None) -> tuple[int, str]:
        """Status and text that a server gives to the student."""
        status, text = self.page.evaluate(ASK, [path, method, body])
        return int(status), str(text)

    def get(self, path: str) -> Any:
        """What the student's own server answers."""
        status, text = self.ask(self.base + path)
        assert status == 200, text[:500]
        return json.loads(text)

    def kernel(self, notebook: str = "") -> str:
        """The kernel of an open notebook, once it has one; without a notebook, a new one."""
        if not notebook:
            status, text = self.ask(self.base + "api/kernels", "POST", {"name": "python3"})
            assert status == 201, text[:500]
            return str(json.loads(text)["id"])
        return str(
            self.until(lambda: next((s["kernel"]["id"] for s in self.get("api/sessions") if s["path"] == notebook), ""))
        )

    def state(self, kernel: str) -> str:
        """What a kernel does."""
        return str(self.get(f"api/kernels/{kernel}")["execution_state"])

    def execute(self, kernel: str, code: str) -> str:
        """What some code prints on a kernel, or the error it ends with."""
        return str(self.page.evaluate(EXECUTE, [f"{self.base}api/kernels/{kernel}/channels", code]))

    def type(self, line: str, end: str) -> str:
        """Type a line into a new terminal of JupyterLab; what it shows until `end` is among it."""
        status, text = self.ask(self.base + "api/terminals", "POST", {})
        assert status == 200, text[:500]
        return str(self.page.evaluate(TYPE, [f"{self.base}terminals/websocket/{json.loads(text)['name']}", line, end]))

    def open(self, notebook: str) -> str:
        """Open a notebook in JupyterLab; its kernel, once it waits for work."""
        self.page.goto(f"{self.hub.url}{self.base}lab/tree/{notebook}")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=READY_S * 1000)
        kernel = self.kernel(notebook)
        self.until(lambda: self.state(kernel) == "idle")
        return kernel

    def cells(self, notebook: str) -> list[dict[str, Any]]:
        """The code cells of a notebook as it is saved, after saving it."""
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        self.page.wait_for_timeout(1500)
        if self.page.locator(".jp-Dialog").count():  # the server was slow to say that it had saved before
            self.page.click(".jp-Dialog .jp-mod-warn, .jp-Dialog .jp-mod-accept")
            self.page.wait_for_timeout(1500)
        content = self.get(f"api/contents/{notebook}?content=1")["content"]
        return [cell for cell in content["cells"] if cell["cell_type"] == "code"]

    def until(self, found: Callable[[], Any], seconds: float = READY_S) -> Any:
        """What a question answers, as soon as that is something."""
        deadline_s = time.monotonic() + seconds
        while not (answer := found()):
            assert time.monotonic() < deadline_s, "it did not come to that in time"
            self.page.wait_for_timeout(300)
        return answer


@pytest.fixture(scope="module")
def log_in(browser: Any, hub: Hub) -> Callable[[str], Student]:
    """Logs a student in, with cookies of their own, and waits for JupyterLab."""

    def enter(name: str) -> Student:
        page = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
        page.set_default_timeout(READY_S * 1000)
        page.goto(f"{hub.url}/hub/login")
        page.fill("#username_input", name)
        page.fill("#password_input", hub.passwords[name])
        page.click("#login_submit")
        page.wait_for_url(f"**/user/{name}/lab**")
        return Student(name, page, hub)

    return enter
