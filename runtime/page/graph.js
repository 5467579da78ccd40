// The program as a graph: nodes that unfold, one inside the other, and the bytes that they hand on.
"use strict";
(() => {
  const page = window.ipujaxPage;
  const { data, byId, number, size, element } = page;
  const { graph, operations } = data;
  if (!graph || !operations) return;
  // Sizes in pixels; those of a folded node are in `page.css` too.
  const BOX = { width: 224, height: 58 };
  const HEAD = 30; // of an unfolded node, which is wide enough for its name
  const LEAST_WIDTH = 330;
  const ASIDE = 26; // right of the nodes inside one, for what goes back
  const PADDING = 10;
  const [BESIDE, BELOW] = [14, 40]; // between nodes
  const MOST_SHOWN = 40; // nodes, when the costliest are unfolded
  const MOST_NAMED = 4; // nodes that the chosen one reads from, or hands on to
  const share = (cycles) => `${((100 * cycles) / Math.max(1, root.cycles)).toFixed(1)} %`;
  const sum = (numbers) => numbers.reduce((total, value) => total + value, 0);

  // --- nodes --------------------------------------------------------------------------------------------------------

  const nodes = [];
  const operationOf = new Map(); // by row
  const cyclesOf = new Map(graph.rows.map((row, n) => [row, graph.cycles[n]]));

  function made(spec, parent) {
    const isOperation = typeof spec === "number";
    const node = { id: nodes.length, parent, depth: parent ? parent.depth + 1 : 0, children: [], rows: [] };
    nodes.push(node);
    if (isOperation) {
      Object.assign(node, { name: operations.rows[spec][0], rows: [spec], phases: cyclesOf.get(spec) });
      operationOf.set(spec, node);
    } else {
      node.children = spec[1].map((inner) => made(inner, node));
      node.rows = node.children.flatMap(({ rows }) => rows);
      node.name = spec[0];
      node.phases = graph.phases.map((_, n) => sum(node.children.map(({ phases }) => phases[n])));
    }
    node.cycles = sum(node.phases);
    return node;
  }

  const root = made(graph.root, null);
  const opened = new Set();
  const sides = new Map(); // layouts are made again where the page is wider
  let chosen = root;

  function openCostliest() {
    opened.clear();
    opened.add(root);
    let shown = root.children;
    for (;;) {
      const foldable = shown.filter(({ children }) => children.length && shown.length + children.length <= MOST_SHOWN);
      if (!foldable.length) return;
      const costliest = foldable.reduce((most, node) => (node.cycles > most.cycles ? node : most));
      opened.add(costliest);
      shown = [...shown.filter((node) => node !== costliest), ...costliest.children];
    }
  }

  // --- values that are handed on ------------------------------------------------------------------------------------------

  const handed = graph.values[0].map((writer, n) => [operationOf.get(writer), operationOf.get(graph.values[1][n]), graph.values[2][n]]);

  function ancestor(node, depth) {
    let at = node;
    while (at.depth > depth) at = at.parent;
    return at;
  }

  // Bytes between the nodes inside one, as [from, to, bytes].
  function valuesInside(node) {
    if (sides.has(node)) return sides.get(node);
    const sums = new Map();
    for (const [writer, reader, bytes] of handed) {
      if (writer.depth <= node.depth || reader.depth <= node.depth) continue;
      const [from, to] = [ancestor(writer, node.depth + 1), ancestor(reader, node.depth + 1)];
      if (from === to || from.parent !== node || to.parent !== node) continue;
      const key = `${from.id} ${to.id}`;
      sums.set(key, [from, to, (sums.get(key)?.[2] ?? 0) + bytes]);
    }
    sides.set(node, [...sums.values()]);
    return sides.get(node);
  }

  // Bytes that a node reads from others, or hands on to others: those beside it and the nodes around it, most first.
  function partners(node, isReader) {
    const sums = new Map();
    for (const [writer, reader, bytes] of handed) {
      const [inside, outside] = isReader ? [reader, writer] : [writer, reader];
      if (ancestor(inside, node.depth) !== node || ancestor(outside, node.depth) === node) continue;
      let at = outside; // the largest node that the chosen one is not inside of
      while (ancestor(node, at.parent.depth) !== at.parent) at = at.parent;
      sums.set(at, (sums.get(at) ?? 0) + bytes);
    }
    return [...sums].sort((a, b) => b[1] - a[1]);
  }

  // --- layout ---------------------------------------------------------------------------------------------------------

  // Ranks of the nodes inside one: each below all that it reads from, of those before it in the program.
  function ranks(node, values) {
    const place = new Map(node.children.map((child, n) => [child, n]));
    const rank = new Map(node.children.map((child) => [child, 0]));
    const forward = values.filter(([from, to]) => place.get(from) < place.get(to)).sort((a, b) => place.get(a[0]) - place.get(b[0]));
    for (const [from, to] of forward) rank.set(to, Math.max(rank.get(to), rank.get(from) + 1));
    const rows = [];
    for (const child of node.children) (rows[rank.get(child)] ??= []).push(child);
    return rows;
  }

  // Size of a node and places of all inside it, at most `most` wide if its nodes are not wider.
  function layout(node, most) {
    if (!opened.has(node)) return { node, ...BOX };
    const values = valuesInside(node);
    const inner = most - 2 * PADDING - ASIDE;
    const lines = [];
    for (const rank of ranks(node, values)) {
      let line = { parts: [], width: -BESIDE, height: 0 };
      for (const part of rank.map((child) => layout(child, inner))) {
        if (line.parts.length && line.width + BESIDE + part.width > inner) {
          lines.push(line);
          line = { parts: [], width: -BESIDE, height: 0 };
        }
        line.parts.push(part);
        line.width += BESIDE + part.width;
        line.height = Math.max(line.height, part.height);
      }
      lines.push(line);
    }
    const width = Math.max(LEAST_WIDTH, ...lines.map((line) => line.width + 2 * PADDING + ASIDE));
    let top = HEAD + BELOW / 2;
    for (const line of lines) {
      let left = (width - ASIDE - line.width) / 2;
      for (const part of line.parts) {
        Object.assign(part, { left, top });
        left += part.width + BESIDE;
      }
      top += line.height + BELOW;
    }
    return { node, values, parts: lines.flatMap(({ parts }) => parts), width, height: top - BELOW + PADDING };
  }

  // --- drawing --------------------------------------------------------------------------------------------------------

  function drawn(part) {
    const { node } = part;
    const box = element("div", "", { class: opened.has(node) ? "node unfolded" : "node", "data-node": String(node.id) });
    Object.assign(box.style, { left: `${part.left ?? 0}px`, top: `${part.top ?? 0}px`, width: `${part.width}px`, height: `${part.height}px` });
    const head = element("div", "", { class: "node-head" });
    if (node.children.length && node !== root) {
      const isOpen = opened.has(node);
      const fold = element("button", isOpen ? "▾" : "▸", { type: "button", class: "node-fold", "aria-expanded": String(isOpen), "aria-label": `${isOpen ? "Fold" : "Unfold"} ${node.name}` });
      fold.addEventListener("click", () => toggle(node, fold));
      head.append(fold);
    }
    const name = element("button", node.name, { type: "button", class: "node-name", "aria-pressed": String(node === chosen), title: node.name });
    name.addEventListener("click", () => choose(node));
    head.append(name);
    box.append(head);
    const cycles = element("span", node.cycles ? `${number(node.cycles)}, ${share(node.cycles)}` : "no cycles", { class: "node-cycles", title: "Cycles of all IPUs, and their share" });
    if (part.parts) {
      head.append(cycles);
      box.append(lines(part), ...part.parts.map(drawn));
    } else box.append(cycles);
    box.append(phases(node));
    return box;
  }

  function phases(node) {
    const bar = element("div", "", { class: "node-phases" });
    node.phases.forEach((cycles, n) => {
      if (!cycles) return;
      const part = element("span", "", { title: `${graph.phases[n]}: ${number(cycles)} cycles` });
      Object.assign(part.style, { width: `${(100 * cycles) / node.cycles}%`, background: graph.colours[n] });
      bar.append(part);
    });
    return bar;
  }

  function svg(name, attributes) {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, String(value));
    return shape;
  }

  function down(a, b) {
    const [x, y, u, v] = [a.left + a.width / 2, a.top + a.height, b.left + b.width / 2, b.top];
    const bend = Math.min(60, (v - y) / 2);
    return `M${x} ${y}C${x} ${y + bend} ${u} ${v - bend} ${u} ${v}`;
  }

  // From side to side, by a column at the right of all nodes.
  function back(a, b, column) {
    const [x, y, u, v] = [a.left + a.width, a.top + a.height / 2, b.left + b.width, b.top + b.height / 2];
    return `M${x} ${y}C${column} ${y} ${column} ${y} ${column} ${(y + v) / 2}S${column} ${v} ${u} ${v}`;
  }

  // The values between the parts of an unfolded node, with the bytes that each reads above it.
  function lines({ values, parts, width, height }) {
    const picture = svg("svg", { width, height, "aria-hidden": "true" });
    const partOf = new Map(parts.map((part) => [part.node, part]));
    const read = new Map();
    for (const [from, to, bytes] of values) {
      const [a, b] = [partOf.get(from), partOf.get(to)];
      const isForward = b.top > a.top;
      if (isForward) read.set(b, (read.get(b) ?? 0) + bytes);
      const path = svg("path", {
        d: isForward ? down(a, b) : back(a, b, width - ASIDE / 2), "stroke-width": (1 + Math.log2(1 + bytes / 1024) / 4).toFixed(1),
        class: `value ${isForward ? "" : "back"}`, "data-from": from.id, "data-to": to.id,
      });
      const title = svg("title", {});
      title.textContent = `${from.name} → ${to.name}: ${size(bytes)}`;
      path.append(title);
      picture.append(path);
    }
    for (const [part, bytes] of read) {
      const text = svg("text", { x: part.left + part.width / 2, y: part.top - 5, "text-anchor": "middle" });
      text.textContent = size(bytes);
      picture.append(text);
    }
    return picture;
  }

  const place = byId("graph-drawing");
  let width = 0;

  // Draws the nodes again; the button that has the focus keeps it.
  function draw() {
    const top = place.scrollTop;
    const focused = place.contains(document.activeElement) ? document.activeElement : null;
    const button = focused?.closest(".node") && `[data-node="${focused.closest(".node").dataset.node}"] > .node-head > .${focused.className}`;
    place.replaceChildren(drawn(layout(root, Math.max(BOX.width, width - 20))));
    place.scrollTop = top;
    if (button) place.querySelector(button)?.focus({ preventScroll: true });
    mark();
  }

  function toggle(node, button) {
    const at = button.getBoundingClientRect().top;
    button.focus({ preventScroll: true });
    if (!opened.delete(node)) opened.add(node);
    draw();
    place.scrollTop += document.activeElement.getBoundingClientRect().top - at; // it stays under the pointer
  }

  function mark() {
    for (const name of place.querySelectorAll(".node-name")) {
      const box = name.closest(".node");
      const isChosen = Number(box.dataset.node) === chosen.id;
      box.classList.toggle("chosen", isChosen && chosen !== root);
      name.setAttribute("aria-pressed", String(isChosen));
    }
    for (const line of place.querySelectorAll(".value")) {
      line.classList.toggle("of-chosen", [line.dataset.from, line.dataset.to].includes(String(chosen.id)));
    }
  }

  // --- the chosen node ------------------------------------------------------------------------------------------------

  function choose(node) {
    chosen = node;
    mark();
    const path = [];
    for (let at = node; at; at = at.parent) if (at !== root || node === root) path.unshift(at.name);
    const parts = node.phases.flatMap((cycles, n) => (cycles ? [`${graph.phases[n]} ${share(cycles)}`] : []));
    const told = element("p", "");
    told.append(element("strong", path.join(" / ")), `: ${number(node.cycles)} cycles, ${share(node.cycles)}${parts.length ? ` (${parts.join(", ")})` : ""}, ${number(node.rows.length)} operations.`);
    byId("graph-chosen").replaceChildren(told, ...[["Reads", "from", true], ["Hands on", "to", false]].flatMap(([verb, way, isReader]) => {
      const rows = partners(node, isReader);
      if (!rows.length) return [];
      const rest = rows.length > MOST_NAMED ? `, and ${number(rows.length - MOST_NAMED)} more` : "";
      return [element("p", `${verb} ${size(sum(rows.map(([, bytes]) => bytes)))}: ${rows.slice(0, MOST_NAMED).map(([other, bytes]) => `${size(bytes)} ${way} ${other.name}`).join(", ")}${rest}.`)];
    }));
    filter();
  }

  function filter() {
    const rows = new Set(chosen.rows.map((row) => `op-${row}`));
    const table = page.dataTable("graph-table");
    const act = () => (chosen === root ? table.clearFilter() : table.setFilter(({ id }) => rows.has(id)));
    if (table?.initialized) act();
    else table?.on("tableBuilt", act);
  }

  // --- start ------------------------------------------------------------------------------------------------------------

  openCostliest();
  new ResizeObserver(([{ contentRect }]) => {
    if (!contentRect.width || contentRect.width === width) return;
    width = contentRect.width;
    draw();
  }).observe(place);
  for (const button of document.querySelectorAll("[data-graph]")) {
    button.addEventListener("click", () => {
      if (button.dataset.graph === "costliest") openCostliest();
      else { opened.clear(); opened.add(root); }
      draw();
    });
  }
})();
