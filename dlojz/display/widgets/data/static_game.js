// The static page of the game: the same front end, which asks the engine in the worker. Until that is there, the page
// says words.loading.
import { mount } from "./schedule_game.js";

const root = document.querySelector("main");
const language = document.documentElement.lang;
const words = await (await fetch(`words.${language}.json`)).json();
words.lost = words.engine_lost;
delete words.run; // only a machine behind the page can do that
const engine = new Worker("static_game_worker.js", { type: "module", name: language });
const questions = new Map();

const send = (request) => new Promise((resolve, reject) => {
  const number = questions.size;
  questions.set(number, { resolve, reject });
  engine.postMessage({ number, request });
});
const fail = (reason) => {
  console.error(reason);
  root.replaceChildren(Object.assign(document.createElement("p"), { role: "alert", textContent: words.engine_failed }));
};

engine.onerror = (event) => fail(event.message);
engine.onmessage = ({ data }) => {
  const question = questions.get(data.number);
  if (data.ready) mount(root, words, send);
  else if (!question) fail(data.failed);
  else if (data.failed) question.reject(new Error(data.failed));
  else question.resolve(data.answer);
};
