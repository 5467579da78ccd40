// Links between the tables and the execution trace, and the search box of the page.
"use strict";
(() => {
  const page = window.ipujaxPage;
  const { data, byId, number, chart } = page;
  const { trace, operations } = data;
  const MOST_MARKED = 4000; // slices with a frame
  const MOST_ROWS = 12; // operations of a slice that are listed
  const AROUND = 8; // lengths of a slice that are shown when a link leads to it

  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // --- addresses --------------------------------------------------------------------------------------------------------

  function idOf(hash) {
    try {
      return decodeURIComponent(hash.slice(1));
    } catch {
      return hash.slice(1); // no address of this page
    }
  }

  // Shows the row of an address: unfolds the nodes around it, and ends a search that hides it.
  function reveal(hash) {
    const row = byId(idOf(hash));
    if (!row || row.tagName === "SECTION" || row.tagName === "MAIN") return;
    if (row.closest("[hidden]")) clearSearch();
    for (let part = row.parentElement; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    row.scrollIntoView({ block: "center" });
  }

  function follow(event) {
    const link = event.target.closest("a[href^='#']");
    if (!link) return;
    if (link.dataset.show) {
      event.preventDefault();
      history.pushState(null, "", "#trace");
      show(link.dataset.show);
    } else if (link.getAttribute("href") === location.hash) {
      reveal(location.hash); // an address that stays the same is no event
    }
  }

  // --- slices of the trace ----------------------------------------------------------------------------------------------

  let spansOfSet; // numbers of slices by the number of their set of operations
  let setsOfRow; // numbers of sets by the number of an operation
  let chosen = null; // { title, spans, at, marked }

  function prepare() {
    if (spansOfSet) return;
    spansOfSet = trace.sets.map(() => []);
    setsOfRow = new Map();
    trace.step.forEach((step, span) => spansOfSet[trace.rows[step]].push(span));
    trace.sets.forEach((rows, set) => {
      for (const row of rows) setsOfRow.set(row, [...(setsOfRow.get(row) ?? []), set]);
    });
  }

  function spansOf(rows) {
    prepare();
    const sets = new Set(rows.flatMap((row) => setsOfRow.get(row) ?? []));
    const spans = [...sets].flatMap((set) => spansOfSet[set]);
    return spans.sort((a, b) => trace.start[a] - trace.start[b] || trace.ipu[a] - trace.ipu[b]);
  }

  const numbers = (isMeant) => operations.rows.flatMap((row, n) => (isMeant(row) ? [n] : []));

  // Selects the slices that a link names.
  function show(meant) {
    if (!chart("trace")) return; // it is not drawn yet
    const [kind, ...values] = meant.split(" ");
    const rest = values.join(" ");
    if (kind === "span") {
      const [ipu, start, end] = values.map(Number);
      const inside = (n) => trace.ipu[n] === ipu && trace.start[n] < end && trace.end[n] > start;
      choose(`IPU ${ipu}, cycles ${number(start)} to ${number(end)}`, spansWhere(inside), [start, end]);
    } else if (kind === "op") {
      const rows = values.map(Number);
      choose(operations.rows[rows[0]][0], spansOf(rows));
    } else if (kind === "line") {
      const line = operations.lines.findIndex(([, id]) => id === rest);
      choose(operations.lines[line][0], spansOf(numbers((row) => row[1] === line)));
    } else {
      const isInside = (path) => path === rest || path.startsWith(rest + "/") || (!path && rest.startsWith("("));
      const meantLayers = new Set(operations.layers.flatMap(([path], n) => (isInside(path) ? [n] : [])));
      choose(rest, spansOf(numbers((row) => meantLayers.has(row[2]))));
    }
    byId("chart-trace").scrollIntoView({ block: "center" });
    byId("picked").closest(".picked").querySelector("[data-pick='next']").focus({ preventScroll: true });
  }

  const spansWhere = (isMeant) => trace.step.flatMap((_, n) => (isMeant(n) ? [n] : []));

  function choose(title, spans, range = null) {
    chosen = { title, spans, at: 0, marked: spans };
    if (!spans.length) {
      mark([]);
      byId("picked").replaceChildren(element("p", `${title}: no slice of the trace is of it alone; it is folded, or takes no time.`));
    } else if (range) {
      look(range[0], range[1]);
      describe();
    } else {
      go(0);
    }
  }

  // Goes to one of the chosen slices.
  function go(at) {
    const { spans } = chosen;
    chosen.at = (at + spans.length) % spans.length;
    const span = spans[chosen.at];
    const margin = ((AROUND - 1) / 2) * Math.max(1, trace.end[span] - trace.start[span]);
    look(trace.start[span] - margin, trace.end[span] + margin);
    describe();
  }

  function look(start, end) {
    const range = chart("trace").x_range;
    const [first, last] = range.bounds;
    const width = Math.min(Math.max(end - start, range.min_interval), last - first);
    const from = Math.min(Math.max(start, first), last - width);
    range.setv({ start: from, end: from + width });
  }

  function mark(spans) {
    const shown = spans.slice(0, MOST_MARKED);
    const drawn = chart("trace").renderers.find((part) => part.name === "selected");
    drawn.data_source.data = {
      left: shown.map((n) => trace.start[n]), right: shown.map((n) => trace.end[n]),
      top: shown.map((n) => trace.ipu[n] - 0.4), bottom: shown.map((n) => trace.ipu[n] + 0.36),
    };
  }

  // Describes the chosen slice, with links to the rows of its operations.
  function describe() {
    const { title, spans, at, marked } = chosen;
    const span = spans[at];
    mark(marked ?? [span]);
    const length = trace.end[span] - trace.start[span];
    const place = `IPU ${trace.ipu[span]}, cycles ${number(trace.start[span])} to ${number(trace.end[span])} (${number(length)})`;
    const heading = element("p", "");
    heading.append(element("strong", data.labels[trace.step[span]]), ` on ${place}; slice ${number(at + 1)} of ${number(spans.length)} of ${title}.`);
    const rows = trace.sets[trace.rows[trace.step[span]]];
    const list = element("ul", "");
    for (const row of rows.slice(0, MOST_ROWS)) list.append(operation(row));
    if (rows.length > MOST_ROWS) list.append(element("li", `… and ${number(rows.length - MOST_ROWS)} more operations`));
    byId("picked").replaceChildren(heading, list);
  }

  const listed = new Set(operations?.listed);
  const linked = (text, id) => (id ? element("a", text, { href: "#" + encodeURIComponent(id) }) : element("span", text));

  function operation(row) {
    const [name, line, layer, part] = operations.rows[row];
    const item = element("li", "");
    item.append(linked(name, listed.has(row) && `op-${row}`), " at ", linked(...operations.lines[line]));
    if (operations.layers[layer][0]) item.append(" in ", linked(...operations.layers[layer]));
    if (part) item.append(`, ${part}`);
    return item;
  }

  function pickAt(x, y) {
    const ipu = Math.round(y);
    const spans = spansWhere((n) => trace.ipu[n] === ipu);
    const at = spans.findIndex((n) => trace.start[n] <= x && x < trace.end[n]);
    if (at >= 0) pick(ipu, spans, at);
    else if (spans.length) byId("picked").replaceChildren(element("p", `IPU ${ipu} is idle at cycle ${number(x)}.`));
  }

  function pick(ipu, spans, at) {
    chosen = { title: `IPU ${ipu}`, spans, at, marked: null };
    describe();
  }

  function pickBy(step) {
    if (step === "none") {
      chosen = null;
      mark([]);
      byId("picked").replaceChildren(element("p", "No slice is chosen."));
    } else if (step === "longest" || !chosen?.spans.length) {
      const { start, end } = chart("trace").x_range;
      const shown = (n) => Math.min(trace.end[n], end) - Math.max(trace.start[n], start);
      const span = trace.step.reduce((best, _, n) => (shown(n) > shown(best) ? n : best), 0);
      const spans = spansWhere((n) => trace.ipu[n] === trace.ipu[span]);
      if (spans.length) pick(trace.ipu[span], spans, spans.indexOf(span));
    } else {
      go(chosen.at + (step === "next" ? 1 : -1));
    }
  }

  // --- search -----------------------------------------------------------------------------------------------------------

  const texts = new WeakMap(); // of rows, in lower case
  const folds = new Map(); // whether a part was open before the search
  let words = [];

  function textOf(row, shown) {
    if (!texts.has(row)) texts.set(row, `${shown.textContent} ${row.dataset.find ?? ""} ${row.title}`.toLowerCase());
    return texts.get(row);
  }

  const has = (text) => words.every((word) => text.includes(word));

  function unfold(part) {
    if (!folds.has(part)) folds.set(part, part.open);
    part.open = true;
  }

  // Hides the rows that do not match; returns the number of the others.
  function filterRows(area) {
    let shown = 0;
    for (const row of area.querySelectorAll("tbody tr")) {
      row.hidden = !has(textOf(row, row));
      shown += !row.hidden;
    }
    const part = area.closest("details");
    if (part && words.length && shown) unfold(part);
    return shown;
  }

  // Nodes that match, with the nodes inside and around them.
  function filterTree(node, isInside) {
    const label = node.querySelector(":scope > summary") ?? node;
    const isMeant = has(textOf(node, label));
    let shown = isMeant && !isInside ? 1 : 0;
    let below = 0;
    for (const child of node.querySelectorAll(":scope > details, :scope > .leaf")) below += filterTree(child, isInside || isMeant);
    if (below && words.length) unfold(node);
    node.hidden = !(isInside || isMeant || below);
    return shown + below;
  }

  function filterArea(area) {
    if (!area.classList.contains("tree")) return filterRows(area);
    return [...area.querySelectorAll(":scope > details, :scope > .leaf")].reduce((sum, node) => sum + filterTree(node, false), 0);
  }

  function search() {
    words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) {
      folds.forEach((open, part) => (part.open = open));
      folds.clear();
    }
    const counts = new Map();
    for (const area of document.querySelectorAll("[data-search]")) {
      const section = area.closest("section");
      counts.set(section, (counts.get(section) ?? 0) + filterArea(area));
    }
    const results = [...counts].filter(([, count]) => count).map(([section, count]) => {
      return element("a", `${section.querySelector("h2").textContent} ${number(count)}`, { href: `#${section.id}` });
    });
    if (trace) {
      const text = ([name, line, layer, part]) => `${name} ${operations.lines[line][0]} ${operations.layers[layer][0]} ${part}`;
      const spans = words.length ? spansOf(numbers((row) => has(text(row).toLowerCase()))) : [];
      if (chart("trace")) mark(spans);
      if (spans.length) {
        const link = element("a", `Trace ${number(spans.length)}`, { href: "#trace" });
        link.addEventListener("click", () => choose(byId("search").value, spans));
        results.push(link);
      }
    }
    if (!words.length) byId("found").replaceChildren();
    else byId("found").replaceChildren(...(results.length ? results : ["Nothing has all these words."]));
  }

  function clearSearch() {
    byId("search").value = "";
    search();
  }

  function keys(event) {
    const field = byId("search");
    const isWriting = event.target.matches("input, textarea, select");
    if (event.key === "/" && !isWriting && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      field.focus();
      field.select();
    } else if (event.key === "Escape" && (event.target === field || !isWriting) && field.value) {
      event.preventDefault();
      clearSearch();
    } else if (event.key === "Enter" && event.target === field) {
      search();
      byId("found").querySelector("a")?.click();
    }
  }

  // --- start ------------------------------------------------------------------------------------------------------------

  function start() {
    if (!byId("search")) return;
    byId("search").parentElement.hidden = false;
    let later;
    byId("search").addEventListener("input", () => {
      clearTimeout(later);
      later = setTimeout(search, 120); // not at each of several keys
    });
    document.addEventListener("keydown", keys);
    document.addEventListener("click", follow);
    window.addEventListener("hashchange", () => reveal(location.hash));
    for (const button of document.querySelectorAll("[data-pick]")) button.addEventListener("click", () => pickBy(button.dataset.pick));
    reveal(location.hash);
  }

  document.addEventListener("DOMContentLoaded", start);
  Object.assign(page, { pickAt, show, search, reveal, filterAgain: (area) => words.length && filterArea(area) });
})();
