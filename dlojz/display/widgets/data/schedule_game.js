// Page of the game of schedules. It holds no rule: each move is a request to the engine, whose answer is shown.
// mount(root, words, send): `send(request)` returns a promise of the engine's answer; both are plain JSON data.

const element = (tag, properties = {}, ...children) => {
  const { data = {}, aria = {}, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, data);
  for (const [name, value] of Object.entries(aria)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

export function mount(root, words, send) {
  let state = null;
  let queue = Promise.resolve(); // one move after the other: each stands on the answer before it
  let chosen = [0, 0]; // rank and column of the button that arrows have chosen
  let polling = false;

  const button = (name, action) =>
    element("button", { type: "button", textContent: words[name], onclick: action, data: { name } });
  const levels = element("select", { id: "levels", onchange: () => open(Number(levels.value)) });
  words.levels.forEach((title, index) =>
    levels.append(element("option", { value: index + 1, textContent: `${index + 1}. ${title}` })));
  const title = element("h1");
  const text = element("p");
  const goal = element("p", { className: "goal" });
  const message = element("p", { className: "message", aria: { role: "status", "aria-live": "polite" } });
  const ranks = element("div", { className: "ranks", aria: { role: "group", "aria-label": words.ranks } });
  const drawing = element("div", { className: "drawing" });
  const figures = element("dl", { className: "figures" });
  const waits = element("ul");
  const position = element("textarea", { id: "position", rows: 2, spellcheck: false, autocomplete: "off" });
  const result = element("section", { className: "result", hidden: true });
  const resultWords = element("p", { aria: { role: "status", "aria-live": "polite" } });
  const resultDrawing = element("div", { className: "drawing" });
  result.append(resultWords, resultDrawing);
  const previous = button("previous", () => open(state.level - 1));
  const next = button("next", () => open(state.level + 1));
  // A page without a machine behind it has no word for running, and says where that is done.
  const run = words.run ? button("run", () => start()) : element("span", { textContent: words.run_elsewhere });

  root.replaceChildren(
    element("nav", {}, element("label", { htmlFor: "levels", textContent: words.level }), levels, previous, next),
    title, text, goal, ranks,
    element("div", { className: "tools" },
      button("undo", () => ask({ do: "undo" })), button("restart", () => open(state.level)),
      button("coach", () => coach()), run),
    message, drawing, figures,
    element("details", { open: true }, element("summary", { textContent: words.waits }), waits),
    result,
    element("div", { className: "share" },
      element("label", { htmlFor: "position", textContent: words.share }), position,
      button("take", () => ask({ do: "paste", position: position.value })),
      button("copy", () => copy())),
    element("p", { className: "help", textContent: words.help }));

  const say = (sentence, refused = false) => {
    message.textContent = sentence;
    message.classList.toggle("refused", refused);
  };

  async function request(content) {
    try {
      return await send(content);
    } catch {
      return { error: words.lost };
    }
  }

  function ask(content) {
    queue = queue.then(async () => {
      const answer = await request({ level: state?.level, position: state?.position, ...content });
      if (answer.error) say(answer.error, true);
      else show(answer);
    });
    return queue;
  }

  const open = (level) => ask({ do: "open", level, position: "" });

  function coach() {
    say(words.thinking);
    return ask({ do: "coach" });
  }

  function show(answer) {
    state = answer;
    levels.value = String(state.level);
    title.textContent = state.title;
    text.textContent = state.text;
    goal.textContent = state.goal;
    goal.classList.toggle("solved", state.solved);
    previous.disabled = state.level === 1;
    next.disabled = state.level === words.levels.length;
    if (words.run) run.setAttribute("aria-disabled", String(!state.complete));
    position.value = state.position;
    history.replaceState(null, "", `#${state.position}`);
    drawing.innerHTML = state.svg; // the engine's own drawing, in which every text is escaped
    const marked = state.coach || [];
    const hadFocus = ranks.contains(document.activeElement) || document.activeElement === document.body;
    ranks.replaceChildren(...state.ranks.map((rank, row) => element("div", { className: "rank" },
      element("span", { className: "name", textContent: rank.name }),
      ...rank.buttons.map((entry, column) => moveButton(entry, row, column, marked.includes(entry.move))),
      element("span", { className: "memory", textContent: rank.memory }))));
    if (hadFocus) choose(...chosen);
    figures.replaceChildren(...state.figures.map(([name, value]) =>
      element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
    waits.replaceChildren(...state.waits.map((sentence) => element("li", { textContent: sentence })));
    say(state.message);
  }

  function moveButton(entry, row, column, marked) {
    const made = element("button", {
      type: "button", textContent: entry.label, title: entry.hint, className: `kind-${entry.kind}`,
      aria: { "aria-disabled": String(!entry.ready), "aria-label": `${entry.label}. ${entry.hint}` },
      data: { move: entry.move },
      onfocus: () => { chosen = [row, column]; },
      onclick: () => {
        chosen = [row, column];
        if (entry.ready) ask({ do: "place", action: entry.move, rank: row });
        else say(entry.hint, true);
      },
    });
    made.classList.toggle("marked", marked);
    return made;
  }

  function choose(row, column) {
    const rows = [...ranks.children].map((rank) => [...rank.querySelectorAll("button")]);
    const line = rows[Math.min(Math.max(row, 0), rows.length - 1)];
    line?.[Math.min(Math.max(column, 0), line.length - 1)]?.focus();
  }

  async function start() {
    if (polling) return;
    let answer = await request({ do: "run", level: state.level, position: state.position });
    if (answer.error) return say(answer.error, true);
    polling = true;
    result.hidden = false;
    resultDrawing.replaceChildren();
    while (answer.run?.running) {
      resultWords.textContent = answer.run.sentence;
      await new Promise((resolve) => setTimeout(resolve, 500));
      answer = await request({ do: "progress" });
    }
    polling = false;
    resultWords.textContent = answer.error || answer.run.sentence;
    result.classList.toggle("refused", Boolean(answer.error));
    if (answer.run) resultDrawing.innerHTML = answer.run.svg;
  }

  async function copy() {
    position.select();
    try {
      await navigator.clipboard.writeText(position.value);
      say(words.copied);
    } catch { /* the browser does not let a page copy: the text is selected */ }
  }

  const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const KEYS = { u: () => ask({ do: "undo" }), backspace: () => ask({ do: "undo" }), c: coach, ...(words.run && { r: start }) };
  root.ownerDocument.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /TEXTAREA|INPUT|SELECT/.test(event.target.tagName)) return;
    const arrow = ARROWS[event.key];
    const action = KEYS[event.key.toLowerCase()];
    if (!arrow && !action) return;
    event.preventDefault();
    if (arrow) choose(chosen[0] + arrow[0], chosen[1] + arrow[1]);
    else action();
  });

  return ask({ do: "open", position: decodeURIComponent(location.hash.slice(1)) }).then(() => {
    // A damaged position in the address: its sentence stays, above the first level.
    if (state) return;
    const sentence = message.textContent;
    return open(1).then(() => say(sentence, true));
  }).then(() => choose(0, 0));
}

const page = document.querySelector("main#game");
if (page) {
  const words = await (await fetch("words.json")).json();
  mount(page, words, async (request) => {
    const body = JSON.stringify(request);
    const answer = await fetch("ask", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (!answer.ok) return { error: await answer.text() };
    return answer.json();
  });
}
