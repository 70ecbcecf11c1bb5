// Markdown as nodes. Each token of the parser becomes an element, so that a model's text is only ever set as text.

import { Lexer } from "./marked/marked.esm.js";

const SAFE_LINK = /^(https?:|mailto:)/i;
const DEEPEST = 50;  // levels of lists, quotes and emphasis; what is deeper stays text
const PIECES = /(?<=\n)|(&(?:#\d+|#x[\da-f]+|[a-z]\w*);)/i;  // lines and character references
const AS_NAMED = { strong: "strong", em: "em", del: "del", blockquote: "blockquote", paragraph: "p", list_item: "li" };

export function make(name, children = [], fields = {}) {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...[children].flat());
  return made;
}

/** The blocks of a text, whose `raw` are the whole text. */
export function blocksOf(text) {
  try {
    return new Lexer().lex(text);
  } catch {  // nested too deep
    return [{ type: "html", block: true, raw: text, text }];
  }
}

/**
 * The element of a block, if it shows anything. `paint(text, at, length)` makes the nodes of a text that stands at `at` in
 * the block's `raw`; -1: it is not known where.
 */
export function nodesOf(block, paint) {
  let from = 0, level = 0;
  const cells = (name, row) => row.map((cell) => make(name, all(cell.tokens), { className: cell.align ?? "" }));

  function leaf(text, decoded = false) {
    return text.split(PIECES).filter(Boolean).flatMap((piece) => {
      const at = block.raw.indexOf(piece, from);
      if (at >= 0) from = at + piece.length;
      return paint(decoded && piece.startsWith("&") && piece.endsWith(";") ? character(piece) : piece, at, piece.length);
    });
  }

  function all(tokens) {
    level += 1;
    const made = tokens.flatMap(level > DEEPEST ? (token) => leaf(token.raw) : one);
    level -= 1;
    return made;
  }

  function one(token) {
    const { type } = token;
    if (AS_NAMED[type]) return make(AS_NAMED[type], all(token.tokens));
    switch (type) {
      case "space": case "def": return [];
      case "heading": return make(`h${Math.min(6, token.depth + 2)}`, all(token.tokens));  // below those of the page
      case "code": return codeBlock(leaf(token.text), token.lang);
      case "codespan": return make("code", leaf(token.text));
      case "list": return token.ordered ? make("ol", all(token.items), { start: token.start }) : make("ul", all(token.items));
      case "checkbox": return make("input", [], { type: "checkbox", checked: token.checked, disabled: true });
      case "table": {
        const head = make("thead", make("tr", cells("th", token.header)));
        const body = make("tbody", token.rows.map((row) => make("tr", cells("td", row))));
        return make("div", make("table", [head, body]), { className: "wide" });
      }
      case "hr": case "br": return make(type);
      case "link": case "image":  // no image is loaded
        return SAFE_LINK.test(token.href)
          ? make("a", token.text ? all(token.tokens) : leaf(token.href), { href: token.href, target: "_blank", rel: "noopener noreferrer" })
          : leaf(token.raw);
      case "text": return token.tokens ? all(token.tokens) : leaf(token.text, true);
      case "html":
        return /^<br\s*\/?>$/i.test(token.text) ? make("br") : leaf(token.text);
      default: return leaf(token.text ?? token.raw);
    }
  }

  const made = one(block);
  return made.length ? [make("p", made)] : [made].flat();
}

/** What a character reference such as &amp; stands for. */
function character(reference) {
  return new DOMParser().parseFromString(reference, "text/html").body.textContent;
}

function codeBlock(nodes, language = "") {
  const code = make("code", nodes), name = make("span", language.split(/\s/, 1));
  return make("div", [make("div", [name, copyButton(() => code.textContent)], { className: "bar" }), make("pre", code)],
    { className: "code" });
}

export function copyButton(text) {
  const button = make("button", "Copy", { type: "button" });
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const box = make("textarea", [], { value: text }), focused = document.activeElement;  // without https there is only this
  document.body.append(box);
  box.select();
  try {
    return document.execCommand("copy");
  } finally {
    box.remove();
    focused.focus();
  }
}
