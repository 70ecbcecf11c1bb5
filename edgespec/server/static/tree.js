// Draws a draft tree: depth to the right, leaves one below the other, the kept path bold.

const WIDTH = 92, HEIGHT = 22, BOX = 84;
const SVG = "http://www.w3.org/2000/svg";

/** Rows of the nodes: a leaf has one of its own, a parent stands beside its first child. */
export function rows(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const row = new Array(parents.length).fill(0);
  let next = 0;
  const visit = (node) => {
    row[node] = next;
    if (children[node].length === 0) next += 1;
    children[node].forEach((child, i) => {
      visit(child);
      if (i === 0) row[node] = row[child];
    });
  };
  if (parents.length) visit(0);
  return { row, count: next };
}

const shown = (text) => JSON.stringify(text).slice(1, -1).replaceAll(" ", "·").slice(0, 10) || "∅";

export function drawTree(place, pass, sources) {
  const { row, count } = rows(pass.parents);
  const depth = [];
  pass.parents.forEach((parent, node) => { depth[node] = parent < 0 ? 0 : depth[parent] + 1; });
  const kept = new Set(pass.path);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("width", (Math.max(...depth) + 1) * WIDTH);
  svg.setAttribute("height", count * HEIGHT + 4);
  const add = (parent, name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  pass.parents.forEach((parent, node) => {
    if (parent < 0) return;
    add(svg, "line", {
      x1: depth[parent] * WIDTH + BOX, y1: row[parent] * HEIGHT + 12, x2: depth[node] * WIDTH, y2: row[node] * HEIGHT + 12,
      class: kept.has(node) ? "kept" : "",
    });
  });
  pass.texts.forEach((text, node) => {
    const x = depth[node] * WIDTH, y = row[node] * HEIGHT + 2, source = sources[pass.sources[node]];
    const group = add(svg, "g", { class: kept.has(node) ? "kept" : "" });
    add(group, "title", {}, `${JSON.stringify(text)}, ${source}, p = ${Math.exp(pass.log_probs[node]).toFixed(3)}`);
    add(group, "rect", { x: x + 1, y, width: BOX, height: HEIGHT - 3, rx: 3, class: `source-${source}` });
    add(group, "text", { x: x + 5, y: y + 14 }, shown(text));
  });
  place.replaceChildren(svg);
  place.setAttribute("aria-label",
    `${pass.parents.length - 1} draft tokens; kept: ${pass.path.slice(1).map((node) => pass.texts[node]).join("") || "none"}`);
}
