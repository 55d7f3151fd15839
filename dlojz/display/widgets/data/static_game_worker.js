// The engine in a thread of its own: Pyodide with the package's modules. It answers messages of {number, request}.
import { loadPyodide } from "./pyodide.mjs";

const start = async () => {
  const python = await loadPyodide({ indexURL: "./", env: { DLOJZ_LANG: self.name } });
  for (const name of await (await fetch("archives.json")).json()) {
    const archive = await (await fetch(name)).arrayBuffer();
    python.unpackArchive(archive, name.endsWith(".whl") ? "wheel" : "zip", { extractDir: "/engine" });
  }
  return python.runPython(`
import json
import sys

sys.path.insert(0, "/engine")
from dlojz.display.widgets.schedule_game import ScheduleGame

game = ScheduleGame()
lambda request: json.dumps(game.answer(json.loads(request)))
`);
};

const started = start();
started.then(() => postMessage({ ready: true }), (error) => postMessage({ failed: String(error) }));
onmessage = async ({ data: { number, request } }) => {
  try {
    const answer = await started;
    postMessage({ number, answer: JSON.parse(answer(JSON.stringify(request))) });
  } catch (error) {
    postMessage({ number, failed: String(error) });
  }
};
