// The passes of the last answer: tokens by source, figures, the strip of passes, and the tree and times of one.

import { make } from "./markdown.js";
import { drawTree } from "./tree.js";

// In the order of `Source` in loop/tree.py.
export const MEANING = {
  target: "the model itself", draft: "draft", input: "text so far", datastore: "datastore", grammar: "grammar", prediction: "prediction",
};
const SOURCES = Object.keys(MEANING);
const PARTS = { prefill: "reading the prompt", draft: "draft", wait: "disk", target: "computing", plan: "planning" };
const $ = (id) => document.getElementById(id);

const shown = { passes: [], current: 0, counts: {}, tokens: 0, most: 1 };

export function clear() {
  Object.assign(shown, { passes: [], current: 0, counts: Object.fromEntries(SOURCES.map((source) => [source, 0])), tokens: 0, most: 1 });
  $("strip").replaceChildren();
  $("tree").replaceChildren();
  draw();
}

/** Add what a chunk tells of its pass; `draw` shows it. */
export function add(pass) {
  shown.passes.push(pass);
  shown.current = shown.passes.length - 1;
  for (const { source } of pass.tokens) shown.counts[source] += 1;
  shown.tokens += pass.tokens.length;
}

export function draw() {
  const { passes, tokens } = shown, pass = passes[shown.current];
  drawStrip();
  for (const item of $("legend").children) item.lastChild.textContent = pass ? ` ${shown.counts[item.dataset.source]}` : "";
  if (!pass) {
    $("figures").replaceChildren();
    $("time").replaceChildren();
    return;
  }
  drawTree($("tree"), pass.pass, SOURCES);
  const last = passes.at(-1).seconds, written = last.draft + last.target + last.plan;
  const after = passes.length - 1, gained = tokens - 1;  // the first token comes with the prompt
  figures({
    "tokens": tokens, "passes": after, "tokens per pass": (after ? gained / after : 0).toFixed(2),
    "tokens/s": (written ? gained / written : 0).toFixed(1), "pass shown": shown.current || "prompt",
  });
  drawTime({ ...last, target: last.target - last.wait });
}

function figures(values) {
  $("figures").replaceChildren(...Object.entries(values).map(([name, value]) => make("div", [make("dt", name), make("dd", String(value))])));
}

function drawStrip() {
  const strip = $("strip"), { passes, current } = shown, pass = passes[current];
  const most = passes.slice(strip.children.length).reduce((so_far, { tokens }) => Math.max(so_far, tokens.length), shown.most);
  if (most > shown.most) strip.replaceChildren();  // all become lower
  shown.most = most;
  for (const { tokens } of passes.slice(strip.children.length)) {
    const bar = make("i");
    bar.style.height = `${(100 * tokens.length) / most}%`;
    strip.append(bar);
  }
  strip.querySelector(".current")?.classList.remove("current");
  strip.children[current]?.classList.add("current");
  strip.setAttribute("aria-valuemax", Math.max(1, passes.length));
  strip.setAttribute("aria-valuenow", current + 1);
  strip.setAttribute("aria-valuetext", pass ? `${current ? `pass ${current}` : "prompt"}: ${pass.tokens.length} tokens` : "no pass yet");
  if (!pass) return;
  const bar = strip.children[current], at = bar.offsetLeft - strip.offsetLeft;
  strip.scrollLeft = Math.min(at, Math.max(strip.scrollLeft, at + bar.offsetWidth - strip.clientWidth));
}

function drawTime(seconds) {
  const total = Object.keys(PARTS).reduce((sum, part) => sum + seconds[part], 0), table = make("table");
  for (const [part, name] of Object.entries(PARTS)) {
    const row = table.insertRow(), bar = make("i");
    row.insertCell().textContent = name;
    bar.style.width = `${(100 * seconds[part]) / (total || 1)}%`;
    row.insertCell().append(bar);
    row.insertCell().textContent = `${seconds[part].toFixed(2)} s`;
  }
  $("time").replaceChildren(table);
}

function step(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined || !shown.passes.length) return;
  event.preventDefault();
  shown.current = Math.min(shown.passes.length - 1, Math.max(0, shown.current + by));
  draw();
}

$("legend").replaceChildren(...SOURCES.map((source) => {
  const item = make("li", [make("span", MEANING[source], { className: `source-${source}` }), ""]);
  item.dataset.source = source;
  return item;
}));
for (const id of ["strip", "tree"]) $(id).addEventListener("keydown", step);
clear();
