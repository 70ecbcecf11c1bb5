// The page: conversations, and where each token of an answer comes from. Text is only ever set as text.

import { Answer } from "./answer.js";
import * as conversations from "./conversations.js";
import { copyButton, make } from "./markdown.js";
import * as passes from "./passes.js";
import "./theme.js";

const $ = (id) => document.getElementById(id);

/** `editing`: the message that the next one takes the place of, and what stood in the box before. */
const state = { conversation: null, editing: null, running: null, last: null, context: 0, telling: false };
const parts = new WeakMap();  // of the log, by message

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

/** The place in the conversation that the text in the box would have. */
function placeOfNext() {
  const { messages } = state.conversation;
  return state.editing ? messages.indexOf(state.editing.message) : messages.length;
}

function messagesWith(text, place) {
  const start = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  return [...start, ...state.conversation.messages.slice(0, place), { role: "user", content: text }];
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

/** Write an answer into a part of the log; what was told of the whole, its tokens, and why it ended. */
async function write(body, place, onChunk = () => {}) {
  const shown = new Answer(place), tokens = [];
  let reason = null, writing = true;
  const draw = seldom(() => following(() => { shown.draw(writing); passes.draw(); }));
  try {
    const whole = await ask(body, (chunk) => {
      for (const choice of chunk.choices) {
        shown.add(choice.delta, chunk.edgespec?.tokens);
        reason = choice.finish_reason ?? reason;
      }
      tokens.push(...chunk.edgespec?.tokens ?? []);
      onChunk(chunk);
      draw();
    });
    return { whole, stats: whole.stats[0], tokens, reason, shown };
  } finally {
    writing = false;
    following(() => shown.draw(writing));
  }
}

async function send(text, place) {
  const { conversation } = state, body = request(messagesWith(text, place));
  clearTimeout(state.typing);
  clearTimeout(state.pausing);
  conversation.system = $("system").value;
  const answer = conversations.ask(conversation, text, place);
  state.seed = draw32();
  state.last = null;
  keep(conversation);
  showFrom(place);
  $("log").scrollTop = $("log").scrollHeight;
  passes.clear();
  notice("reading …");
  const started = performance.now();
  try {
    const written = await write(body, parts.get(answer).text, (chunk) => {
      for (const { delta } of chunk.choices) {
        answer.content += delta.content ?? "";
        if (delta.reasoning_content) answer.reasoning_content = (answer.reasoning_content ?? "") + delta.reasoning_content;
      }
      if (chunk.edgespec?.tokens && state.conversation === conversation) passes.add(chunk.edgespec);
    });
    const { whole, stats } = written;
    if (state.conversation === conversation) state.last = { body: { ...body, seed: whole.seed }, ...written };
    const seconds = ((performance.now() - started) / 1000).toFixed(1);
    const times = stats.times_plain ? ` (${stats.times_plain.toFixed(2)} x plain)` : "";
    notice(`done: ${stats.tokens} tokens in ${seconds} s${times}${approximately(stats)}, seed ${whole.seed}${cutOff(written, body)}`);
  } catch (error) {
    notice(told(error));
  }
  settle(conversation);
}

/** After an answer, or none: keep the conversation; a message without an answer goes back into the box. */
function settle(conversation) {
  if (state.left) return;  // the browser ends the request; the page that comes next settles
  const place = conversation.messages.length - 2, text = conversations.settle(conversation);
  keep(conversation);
  if (state.conversation !== conversation) return;
  passes.draw();
  if (text !== null) {
    showFrom(place);
    $("prompt").value ||= text;
  }
  $("compare").disabled = !state.last;
}

function cutOff({ reason, stats }, { max_tokens: most }) {
  if (reason !== "length") return "";
  return stats.tokens === most ? "; it was cut off there, as Settings say" : `; the context of ${state.context} tokens is full`;
}

const approximately = (stats) => stats.approximate ? `, approximate: ${stats.approximate}` : "";
const told = (error) => error.name === "AbortError" ? "stopped" : error.message;

/** The same request without draft tokens: its text must be the same. */
async function compare() {
  const { body, tokens, shown } = state.last;
  notice("writing the same plainly …");
  try {
    const place = part("model, plainly").text;
    const plain = await write({ ...body, edgespec: { trace: "passes", plain: true } }, place);
    const length = Math.max(tokens.length, plain.tokens.length);
    const at = Array.from({ length }, (_, i) => i).find((i) => tokens[i]?.text !== plain.tokens[i]?.text);
    if (at !== undefined) for (const one of [shown, plain.shown]) one.mark(at);
    const speed = `plainly ${plain.stats.passes} passes, ${plain.stats.tokens_per_second.toFixed(1)} tokens/s`;
    notice((at === undefined ? `the same ${length} tokens` : `they differ from token ${at + 1} on`) + `${approximately(plain.stats)}; ${speed}`);
  } catch (error) {
    notice(told(error));
  }
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
      method: "PUT", headers: headers(), body: JSON.stringify({ ...request(messagesWith(text, placeOfNext())), pause, id: state.id }),
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

// ---------------------------------------------------------------- conversations

function keep(conversation) {
  if (!conversations.keep(conversation)) notice("this browser's store is full: delete a conversation, or this one is lost");
  list();
}

function list() {
  const { conversation } = state, kept = conversations.all();
  if (!kept.some(({ id }) => id === conversation.id)) kept.unshift(conversation);
  $("conversations").replaceChildren(...kept.map((one) => new Option(conversations.title(one), one.id, false, one.id === conversation.id)));
  $("delete").disabled = !conversation.messages.length;
}

/** Show a conversation, which ends the answer that is being written. */
function show(conversation) {
  state.running?.abort();
  Object.assign(state, { conversation, last: null, editing: null });
  sessionStorage.setItem("conversation", conversation.id);
  if (conversation.messages.length) $("system").value = conversation.system;
  $("prompt").value ||= conversations.settle(conversation) ?? "";
  $("compare").disabled = true;
  showFrom(0);
  $("log").scrollTop = $("log").scrollHeight;
  list();
  passes.clear();
  notice("");
}

/** Draw the messages from a place on; those before it stay as they are. */
function showFrom(place) {
  const { messages } = state.conversation;
  const before = place ? parts.get(messages[place - 1])?.outer : null;
  while ($("log").lastChild !== before && $("log").lastChild) $("log").lastChild.remove();
  for (const message of messages.slice(place)) {
    const mine = message.role === "user", { outer, text, buttons } = part(mine ? "you" : "model");
    parts.set(message, { outer, text });
    const change = make("button", mine ? "Edit" : "Write again", { type: "button", className: "change" });
    change.addEventListener("click", () => mine ? edit(message) : writeAgain(message));
    buttons.append(copyButton(() => message.content), change);
    if (mine) text.textContent = message.content;
    else if (message.content || message.reasoning_content) {
      const answer = new Answer(text);
      answer.add(message);
      answer.draw(false);
    }
  }
}

function part(name) {
  const text = make("div", [], { className: "text" }), buttons = make("div", [], { className: "buttons" });
  const outer = make("div", [make("strong", name), text, buttons], { className: "message" });
  $("log").append(outer);
  return { outer, text, buttons };
}

function writeAgain(answer) {
  const { messages } = state.conversation, place = messages.indexOf(answer) - 1;
  leaveEditing();
  $("log").focus();  // the button goes
  send(messages[place].content, place);
}

function edit(message) {
  leaveEditing();
  state.editing = { message, before: $("prompt").value };
  parts.get(message).outer.classList.add("edited");
  $("prompt").value = message.content;
  $("prompt").focus();
  notice("Send puts it in place of the message and all after it. Escape leaves them.");
}

function leaveEditing() {
  if (!state.editing) return;
  parts.get(state.editing.message).outer.classList.remove("edited");
  $("prompt").value = state.editing.before;
  state.editing = null;
  notice("");
}

// ---------------------------------------------------------------- showing

/** A function that calls `draw` at the next frame, and so seldom that drawing takes a third of the time at most. */
function seldom(draw) {
  let due = false, next = 0;
  const run = () => {
    const started = performance.now();
    due = false;
    draw();
    next = performance.now() + 2 * (performance.now() - started);
  };
  return () => {
    if (due) return;
    due = true;
    setTimeout(() => requestAnimationFrame(run), next - performance.now());
  };
}

/** Draw, and stay at the log's end, unless the reader has scrolled away from it. */
function following(draw) {
  const log = $("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  draw();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function notice(text) { $("notice").textContent = text; }

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("compare").disabled = on || !state.last;
  $("log").classList.toggle("busy", on);
  $("log").setAttribute("aria-busy", on);
}

const AGAIN = 1000;  // ms

/** Show which model is served; while it loads, or nobody answers, say so and ask again. */
async function greet() {
  clearTimeout(state.greeting);
  const health = await fetch("health").then((answer) => answer.json())
    .catch(() => ({ error: { message: "the server does not answer" } }));
  const line = health.error ? health.error.message
    : !health.loaded ? `${health.model} · is loaded when it is asked`
    : `${health.model} · ${health.engine} · planner ${health.planner}`
      + (health.exact ? ` · passes agree to the bit (${health.exact})` : "") + (health.streams ? " · streamed" : "")
      + (health.approximate ? ` · approximate: ${health.approximate}` : "");
  if ($("model").textContent !== line) $("model").textContent = line;  // screen readers read each change
  if (health.error || !health.loaded) state.greeting = setTimeout(greet, AGAIN);
  else state.context = health.context_length;
}

function submit() {
  const text = $("prompt").value.trim(), place = placeOfNext();
  if (!text || state.running) return;
  $("prompt").value = state.editing?.before ?? "";
  state.editing = null;
  send(text, place);
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  if (event.key === "Escape") leaveEditing();
});
$("prompt").addEventListener("input", typed);
$("stop").addEventListener("click", () => state.running?.abort());
$("compare").addEventListener("click", compare);
$("new").addEventListener("click", () => { show(conversations.begun()); $("prompt").focus(); });
$("delete").addEventListener("click", () => {
  if (!confirm("Delete this conversation?")) return;
  const gone = state.conversation;
  gone.messages = [];
  conversations.remove(gone);
  show(conversations.begun());
});
$("conversations").addEventListener("change", ({ target }) => show(conversations.find(target.value) ?? conversations.begun()));
addEventListener("visibilitychange", () => state.running && keep(state.conversation));
addEventListener("pagehide", () => { state.running && keep(state.conversation); state.left = true; });
addEventListener("pageshow", () => { state.left = false; });
addEventListener("storage", ({ key }) => {  // another tab has written
  const other = conversations.find(state.conversation.id);
  if (other && !state.running && conversations.isKept(other, key)) show(other);
  else list();
});
Object.assign(state, { seed: draw32(), id: String(draw32()) });
show(conversations.find(sessionStorage.getItem("conversation")) ?? conversations.begun());
greet();
$("prompt").focus();
