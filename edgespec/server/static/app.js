// The page: a chat, and where each token of the answer comes from. Text is only ever set as text.

import { drawTree } from "./tree.js";

// In the order of `Source` in loop/tree.py.
const SOURCES = ["target", "draft", "input", "datastore", "grammar", "prediction"];
const MEANING = { target: "the model itself", draft: "draft", input: "text so far", datastore: "datastore", grammar: "grammar", prediction: "prediction" };
const PARTS = ["prefill", "draft", "wait", "target", "plan"];
const PART_NAMES = { prefill: "reading the prompt", draft: "draft", wait: "disk", target: "computing", plan: "planning" };
const $ = (id) => document.getElementById(id);

const state = { messages: [], passes: [], current: 0, running: null, last: null, seed: 0, id: "", telling: false };

// A key comes in the address's fragment, which browsers do not send, and stays in this tab.
const key = new URLSearchParams(location.hash.slice(1)).get("key") ?? sessionStorage.getItem("key") ?? "";
if (key) { sessionStorage.setItem("key", key); $("key").value = key; }
if (location.hash) history.replaceState(null, "", location.pathname);
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); greet(); });

function headers() {
  const found = { "Content-Type": "application/json" };
  if ($("key").value) found.Authorization = `Bearer ${$("key").value}`;
  return found;
}

// ---------------------------------------------------------------- asking

function request(messages) {
  const body = { messages, stream: true, stream_options: { include_usage: true }, edgespec: { trace: "passes" } };
  for (const name of ["temperature", "top_p", "max_tokens"]) if ($(name).value) body[name] = Number($(name).value);
  body.seed = Number($("seed").value || state.seed);
  return body;
}

function conversation(text) {
  const start = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  return [...start, ...state.messages, { role: "user", content: text }];
}

// ---------------------------------------------------------------- typing

const draw32 = () => crypto.getRandomValues(new Uint32Array(1))[0];
const TYPING = 150, PAUSE = 700;  // ms after a key: the prompt is read so far; it may be all of it

/** Tell the server what is being typed, one request at a time, so that Enter finds the answer's beginning. */
async function tellDraft(pause) {
  const text = $("prompt").value.trim();
  if (!text || state.running) return;
  if (state.telling) {
    state.paused ||= pause;  // told as soon as the server has answered
    return;
  }
  state.telling = true;
  try {
    await fetch("edgespec/draft-prompt", {
      method: "PUT", headers: headers(), body: JSON.stringify({ ...request(conversation(text)), pause, id: state.id }),
    });
  } catch {
    // it only saves time
  } finally {
    state.telling = false;
  }
  if (state.paused) {
    state.paused = false;
    tellDraft(true);
  }
}

function typed() {
  clearTimeout(state.typing);
  clearTimeout(state.pausing);
  state.paused = false;
  state.typing = setTimeout(() => tellDraft(false), TYPING);
  state.pausing = setTimeout(() => tellDraft(true), PAUSE);
}

/** Ask, and call `onChunk` for every event; what the last one told of the whole. */
async function ask(body, onChunk) {
  const control = new AbortController();
  state.running = control;
  busy(true);
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: control.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    let whole = null;
    for await (const chunk of events(answer.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) whole = chunk.edgespec;
      else onChunk(chunk);
    }
    if (!whole) throw new Error("the server ended the answer early");
    return whole;
  } finally {
    state.running = null;
    busy(false);
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

function message(role) {
  const outer = document.createElement("div"), name = document.createElement("strong"), text = document.createElement("div");
  outer.className = "message";
  name.textContent = role;
  outer.append(name, text);
  $("log").append(outer);
  return text;
}

function addTokens(place, tokens) {
  for (const { text, source } of tokens) {
    const span = document.createElement("span");
    span.className = `token source-${source}`;
    span.textContent = text;
    span.title = MEANING[source];
    place.append(span);
  }
  $("log").scrollTop = $("log").scrollHeight;
}

/** Show the tokens of a chunk, and add to the answer what the server found in them: a thought has a field of its own. */
function takeChunk(chunk, place, answer) {
  for (const { delta } of chunk.choices) {
    answer.content += delta.content ?? "";
    if (delta.reasoning_content) answer.reasoning_content = (answer.reasoning_content ?? "") + delta.reasoning_content;
  }
  if (!chunk.edgespec?.tokens) return;
  addTokens(place, chunk.edgespec.tokens);
  state.passes.push(chunk.edgespec);
  state.current = state.passes.length - 1;
  draw();
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || state.running) return;
  const messages = conversation(text);
  clearTimeout(state.typing);
  clearTimeout(state.pausing);
  $("prompt").value = "";
  message("you").textContent = text;
  const place = message("model"), answer = { role: "assistant", content: "" };
  state.passes = [];
  state.last = null;
  notice("reading …");
  const started = performance.now();
  try {
    const body = request(messages);
    state.seed = draw32();
    const whole = await ask(body, (chunk) => takeChunk(chunk, place, answer));
    const stats = whole.stats[0];
    state.last = { body: { ...body, seed: whole.seed }, place, tokens: state.passes.flatMap((pass) => pass.tokens) };
    const seconds = ((performance.now() - started) / 1000).toFixed(1);
    const times = stats.times_plain ? ` (${stats.times_plain.toFixed(2)} x plain)` : "";
    const approximate = stats.approximate ? `, approximate: ${stats.approximate}` : "";
    notice(`done: ${stats.tokens} tokens in ${seconds} s${times}${approximate}, seed ${whole.seed}`);
  } catch (error) {
    notice(error.name === "AbortError" ? "stopped" : error.message);
  }
  if (place.isConnected && place.textContent) {  // what got no answer, or was forgotten meanwhile, is not part of the conversation
    state.messages.push({ role: "user", content: text }, answer);
  }
  $("compare").disabled = !state.last;
}

/** The same request without draft tokens: its text must be the same. */
async function compare() {
  const { body, tokens, place: first } = state.last;
  const place = message("model, plainly"), plain = [];
  notice("writing the same plainly …");
  try {
    const stats = (await ask({ ...body, edgespec: { trace: "passes", plain: true } }, (chunk) => {
      if (!chunk.edgespec?.tokens) return;
      plain.push(...chunk.edgespec.tokens);
      addTokens(place, chunk.edgespec.tokens);
    })).stats[0];
    const length = Math.max(tokens.length, plain.length);
    const at = Array.from({ length }, (_, i) => i).find((i) => tokens[i]?.text !== plain[i]?.text);
    if (at !== undefined) for (const text of [first, place]) text.children[at]?.classList.add("different");
    const approximate = stats.approximate ? `, approximate: ${stats.approximate}` : "";
    const speed = `plainly ${stats.passes} passes, ${stats.tokens_per_second.toFixed(1)} tokens/s`;
    notice((at === undefined ? `the same ${plain.length} tokens` : `they differ from token ${at + 1} on`) + `${approximate}; ${speed}`);
  } catch (error) {
    notice(error.name === "AbortError" ? "stopped" : error.message);
  }
}

// ---------------------------------------------------------------- showing

function draw() {
  const pass = state.passes[state.current];
  drawStrip();
  if (!pass) return;
  drawTree($("tree"), pass.pass, SOURCES);
  const counts = Object.fromEntries(SOURCES.map((source) => [source, 0]));
  let tokens = 0;
  for (const { tokens: written } of state.passes) for (const { source } of written) { counts[source] += 1; tokens += 1; }
  for (const item of $("legend").children) item.lastChild.textContent = ` ${counts[item.dataset.source]}`;
  const last = state.passes.at(-1).seconds, written = last.draft + last.target + last.plan;
  const passes = state.passes.length - 1, gained = tokens - 1;  // the first token comes with the prompt
  figures({
    "tokens": tokens, "passes": passes, "tokens per pass": (passes ? gained / passes : 0).toFixed(2),
    "tokens/s": (written ? gained / written : 0).toFixed(1), "pass shown": state.current || "prompt",
  });
  drawTime({ ...last, target: last.target - last.wait });
}

function figures(values) {
  $("figures").replaceChildren(...Object.entries(values).map(([name, value]) => {
    const row = document.createElement("div"), term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    row.append(term, text);
    return row;
  }));
}

function drawStrip() {
  const strip = $("strip"), most = Math.max(1, ...state.passes.map((pass) => pass.tokens.length));
  while (strip.children.length > state.passes.length) strip.lastChild.remove();
  while (strip.children.length < state.passes.length) strip.append(document.createElement("i"));
  state.passes.forEach((pass, i) => {
    strip.children[i].style.height = `${(100 * pass.tokens.length) / most}%`;
    strip.children[i].classList.toggle("current", i === state.current);
  });
  strip.setAttribute("aria-valuemax", Math.max(1, state.passes.length));
  strip.setAttribute("aria-valuenow", state.current + 1);
  const shown = state.passes[state.current];
  strip.setAttribute("aria-valuetext",
    shown ? `${state.current ? `pass ${state.current}` : "prompt"}: ${shown.tokens.length} tokens` : "no pass yet");
  strip.children[state.current]?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function drawTime(seconds) {
  const total = PARTS.reduce((sum, part) => sum + seconds[part], 0), table = document.createElement("table");
  for (const part of PARTS) {
    const row = table.insertRow(), bar = document.createElement("i");
    row.insertCell().textContent = PART_NAMES[part];
    bar.style.width = `${(100 * seconds[part]) / (total || 1)}%`;
    row.insertCell().append(bar);
    row.insertCell().textContent = `${seconds[part].toFixed(2)} s`;
  }
  $("time").replaceChildren(table);
}

function notice(text) { $("notice").textContent = text; }

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("compare").disabled = on || !state.last;
  $("log").setAttribute("aria-busy", on);
}

function step(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined || !state.passes.length) return;
  event.preventDefault();
  state.current = Math.min(state.passes.length - 1, Math.max(0, state.current + by));
  draw();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").setAttribute("aria-pressed", name === "dark");
  localStorage.setItem("theme", name);
}

const AGAIN = 1000;  // ms

/** Show which model is served; while it loads, or nobody answers, say so and ask again. */
async function greet() {
  clearTimeout(state.greeting);
  const health = await fetch("health").then((answer) => answer.json())
    .catch(() => ({ error: { message: "the server does not answer" } }));
  const line = health.error ? health.error.message
    : `${health.model} · ${health.engine} · planner ${health.planner}`
      + (health.exact ? ` · passes agree to the bit (${health.exact})` : "") + (health.streams ? " · streamed" : "")
      + (health.approximate ? ` · approximate: ${health.approximate}` : "");
  if ($("model").textContent !== line) $("model").textContent = line;  // screen readers read each change
  if (health.error) state.greeting = setTimeout(greet, AGAIN);
}

$("legend").replaceChildren(...SOURCES.map((source) => {
  const item = document.createElement("li"), name = document.createElement("span");
  item.dataset.source = source;
  name.className = `source-${source}`;
  name.textContent = MEANING[source];
  item.append(name, document.createTextNode(""));
  return item;
}));
$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("prompt").addEventListener("input", typed);
Object.assign(state, { seed: draw32(), id: String(draw32()) });
$("stop").addEventListener("click", () => state.running?.abort());
$("compare").addEventListener("click", compare);
$("forget").addEventListener("click", () => {
  state.running?.abort();
  Object.assign(state, { messages: [], passes: [], current: 0, last: null });
  $("log").replaceChildren();
  $("tree").replaceChildren();
  $("compare").disabled = true;
  draw();
  notice("forgotten");
});
for (const id of ["strip", "tree"]) $(id).addEventListener("keydown", step);
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
theme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
greet();
$("prompt").focus();
