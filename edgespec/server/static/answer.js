// An answer while it is written: its thought folded, its text as Markdown, both tinted by who guessed their tokens.

import { blocksOf, make, nodesOf } from "./markdown.js";
import { MEANING } from "./passes.js";

/** The first block that more text can change: the last one, or the one before while the last one's first line is not whole. */
function firstOpen(blocks) {
  const isShown = ({ type }) => type !== "space", last = blocks.findLastIndex(isShown);
  if (blocks.slice(Math.max(0, last)).some(({ raw }) => raw.trimStart().includes("\n"))) return last;
  return Math.max(0, blocks.slice(0, Math.max(0, last)).findLastIndex(isShown));
}

/** Make the children of a place, from one on, those that are given; what is equal stays, as the reader may have selected it. */
function become(place, children, from = 0) {
  children.forEach((made, i) => {
    const old = place.childNodes[from + i];
    if (!old) place.append(made);
    else if (old.isEqualNode(made)) return;
    else if (old.firstChild && old.cloneNode(false).isEqualNode(made.cloneNode(false))) become(old, [...made.childNodes]);
    else old.replaceWith(made);
  });
  while (place.childNodes.length > from + children.length) place.lastChild.remove();
}

/** A text that grows. Blocks that cannot change any more stay, those after them are drawn again. */
class Growing {
  text = "";
  tokens = [];  // with the `end` of each in the text
  place = make("div", [], { className: "markdown" });
  #from = 0;  // the text before it stays as it is drawn
  #first = 0;  // the token there
  #token = 0;  // the token at the place that is being drawn
  #settled = 0;  // nodes of it
  #drawn = 0;  // length of the text

  /** `token` is that of the text, if it is known. */
  add(text, token) {
    this.text += text.replaceAll("\r", "");
    this.tokens.push({ ...token, end: this.text.length });
  }

  draw() {
    if (this.#drawn === this.text.length) return;
    this.#drawn = this.text.length;
    const blocks = blocksOf(this.text.slice(this.#from)), open = firstOpen(blocks);
    this.#token = this.#first;
    const settled = this.#nodes(blocks.slice(0, open));
    for (const { raw } of blocks.slice(0, open)) this.#from += raw.length;
    this.#first = this.#token;
    become(this.place, [...settled, ...this.#nodes(blocks.slice(open))], this.#settled);
    this.#settled += settled.length;
  }

  #nodes(blocks) {
    let next = this.#from;
    return blocks.flatMap((block) => {
      const start = next;
      next += block.raw.length;
      return nodesOf(block, (text, at, length) => this.#paint(text, at < 0 ? at : start + at, length));
    });
  }

  #paint(text, start, length) {
    if (start < 0) return [text];
    while (this.tokens[this.#token]?.end <= start) this.#token += 1;
    if (text.length !== length) return [tinted(text, this.tokens[this.#token])];
    const nodes = [];
    for (let at = start, i = this.#token; at < start + length; i += 1) {
      const end = Math.min(start + length, this.tokens[i].end);
      nodes.push(tinted(text.slice(at - start, end - start), this.tokens[i]));
      at = end;
    }
    return nodes;
  }
}

function tinted(text, token) {
  if (!token.source) return text;
  const span = make("span", text, { className: `token source-${token.source}`, title: MEANING[token.source] });
  span.dataset.token = token.number;
  return span;
}

export class Answer {
  #thought = null;
  #fold = null;
  #content = new Growing();
  #unused = [];  // tokens, or ends of them, whose text has not come yet
  #tokens = 0;

  constructor(place) {
    this.place = place;
    place.append(this.#content.place);
  }

  /** Add a part of a message, and the tokens that came with it. */
  add({ content, reasoning_content: thought }, tokens = []) {
    for (const token of tokens) this.#unused.push({ ...token, number: this.#tokens++ });
    if (thought) {
      if (!this.#thought) this.#think();
      this.#addTo(this.#thought, thought);
    }
    if (content) this.#addTo(this.#content, content);
  }

  #think() {
    this.#thought = new Growing();
    this.#fold = make("details", [make("summary"), this.#thought.place], { className: "thought" });
    this.place.prepend(this.#fold);
  }

  /** The server leaves out marks, as of thoughts, and holds back what may become one. */
  #addTo(growing, text) {
    let skipped = this.#unused.map((token) => token.text).join("").indexOf(text);
    if (skipped < 0) {
      this.#unused = [];
      growing.add(text);
      return;
    }
    for (let left = text; left || skipped; ) {
      const token = this.#unused[0], before = Math.min(skipped, token.text.length);
      const taken = token.text.slice(before, before + left.length);
      skipped -= before;
      if (taken) growing.add(taken, token);
      left = left.slice(taken.length);
      token.text = token.text.slice(before + taken.length);
      if (!token.text) this.#unused.shift();
    }
  }

  draw(writing) {
    this.#content.draw();
    if (!this.#thought) return;
    this.#thought.draw();
    this.#fold.firstChild.textContent = writing && !this.#content.text ? "Thinking …" : "Thought";
  }

  mark(number) {
    for (const span of this.place.querySelectorAll(`[data-token="${number}"]`)) span.classList.add("different");
  }
}
