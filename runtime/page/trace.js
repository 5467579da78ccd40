// The execution trace of a page: names of slices, sums of the shown range, chosen slices, waits.
"use strict";
(() => {
  const page = window.ipujaxPage;
  const { data, byId, number, element, chart } = page;
  const { trace, operations, waits } = data;
  const MOST_MARKED = 4000; // slices with a frame
  const MOST_ROWS = 12; // operations of a slice that are listed
  const AROUND = 8; // lengths of a slice that are shown when a link leads to it

  // --- names of slices --------------------------------------------------------------------------------------------------

  const LEAST = 4; // characters of a name that is cut short
  const MOST_NAMES = 600;
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "11px sans-serif"; // as the chart writes them

  const fits = (text, width) => pen.measureText(text).width <= width;

  function fitted(text, width) {
    if (fits(text, width)) return text;
    const parts = text.includes(",") ? [] : text.split("/"); // the end of a path says most
    for (let n = 1; n < parts.length; n++) {
      const end = "…/" + parts.slice(n).join("/");
      if (fits(end, width)) return end;
    }
    let low = 0;
    let high = text.length;
    while (low < high) { // the longest beginning that fits
      const middle = Math.ceil((low + high) / 2);
      if (fits(text.slice(0, middle) + "…", width)) low = middle;
      else high = middle - 1;
    }
    return low >= LEAST ? text.slice(0, low) + "…" : "";
  }

  function isDarkColour(colour) {
    const [red, green, blue] = [1, 3, 5].map((n) => parseInt(colour.slice(n, n + 2), 16));
    return 0.299 * red + 0.587 * green + 0.114 * blue < 95;
  }

  let isLabelling = false;

  function labelSlices() { // once for all changes of a moment
    if (isLabelling) return;
    isLabelling = true;
    requestAnimationFrame(() => {
      isLabelling = false;
      writeNames();
    });
  }

  function writeNames() {
    const figure = chart("trace");
    const { start, end } = figure.x_range;
    const scale = figure.inner_width / (end - start);
    sumUp(start, end, figure.x_range.bounds[1]);
    const found = { x: [], y: [], text: [], colour: [], back: [] };
    const drawn = (name) => figure.renderers.filter((part) => part.name && part.name.startsWith(name));
    const [folded] = drawn("folded");
    const isFolded = new Set(folded.data_source.data.label);
    const { back, front } = page.colours();
    for (const part of [folded, ...drawn("slices ")]) {
      const { left, right, top, bottom, label } = part.data_source.data;
      const fill = part === folded ? null : part.glyph.fill_color.value;
      const isIdle = part.name === "slices idle";
      for (let n = 0; n < left.length && found.x.length < MOST_NAMES; n++) {
        const from = Math.max(left[n], start);
        const to = Math.min(right[n], end);
        const width = (to - from) * scale - 8;
        if (!(width > 12) || (fill && isFolded.has(label[n]))) continue;
        const text = fitted(isIdle ? "idle" : data.labels[label[n]], width);
        if (!text) continue;
        found.x.push((from + to) / 2);
        found.y.push((top[n] + bottom[n]) / 2);
        found.text.push(text);
        found.colour.push(!fill || isIdle ? front : isDarkColour(fill) ? "#ffffff" : "#000000");
        found.back.push(fill ? "transparent" : back);
      }
    }
    drawn("slice labels")[0].data_source.data = found;
  }

  // --- the shown range --------------------------------------------------------------------------------------------------

  // Fills the table of phases by IPU with the cycles inside a range; of the whole run they are the exact ones.
  function sumUp(start, end, cycles) {
    const isWhole = start <= 0 && end >= cycles;
    byId("trace-range").textContent = `cycles ${number(start)} to ${number(end)} of ${number(cycles)}`;
    byId("range-from").value = Math.round(start);
    byId("range-to").value = Math.round(end);
    const rows = isWhole ? data.phaseCycles : sumsWithin(start, end);
    const total = Math.max(1, end - start);
    byId("range-sums").querySelectorAll("tbody tr").forEach((row, ipu) => {
      rows[ipu].forEach((sum, phase) => (row.cells[phase + 1].textContent = `${number(sum)} (${((100 * sum) / total).toFixed(1)}%)`));
    });
  }

  function sumsWithin(start, end) {
    const sums = data.phaseCycles.map((row) => row.map(() => 0));
    data.phases.forEach((name, phase) => {
      const { left, right, top, bottom } = chart("trace").renderers.find((part) => part.name === `slices ${name}`).data_source.data;
      for (let n = 0; n < left.length; n++) {
        const inside = Math.min(right[n], end) - Math.max(left[n], start);
        if (inside > 0) sums[Math.round((top[n] + bottom[n]) / 2)][phase] += inside;
      }
    });
    const idle = data.phases.indexOf("idle"); // also after the last slice of an IPU
    for (const row of sums) row[idle] += end - start - row.reduce((sum, part) => sum + part, 0);
    return sums;
  }

  function chooseRange() {
    const [from, to] = ["range-from", "range-to"].map((id) => byId(id).valueAsNumber);
    if (from < to) look(from, to);
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
  async function show(meant) {
    await page.openAround(byId("trace"));
    const [kind, ...values] = meant.split(" ");
    const rest = values.join(" ");
    if (kind === "span") {
      const [ipu, start, end] = values.map(Number);
      const inside = (n) => trace.ipu[n] === ipu && trace.start[n] < end && trace.end[n] > start;
      const wait = waits.ipu.findIndex((other, n) => other === ipu && waits.start[n] === start && waits.end[n] === end);
      if (wait >= 0) goToWait(wait);
      else choose(`IPU ${ipu}, cycles ${number(start)} to ${number(end)}`, spansWhere(inside), [start, end]);
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
    markRows(spans.slice(0, MOST_MARKED).map((n) => ({ ipu: trace.ipu[n], start: trace.start[n], end: trace.end[n] })));
  }

  function markRows(rows) {
    const drawn = chart("trace").renderers.find((part) => part.name === "selected");
    drawn.data_source.data = {
      left: rows.map(({ start }) => start), right: rows.map(({ end }) => end),
      top: rows.map(({ ipu }) => ipu - 0.4), bottom: rows.map(({ ipu }) => ipu + 0.36),
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
    const wait = waits.ipu.findIndex((other, n) => other === ipu && waits.start[n] <= x && x < waits.end[n]);
    if (wait >= 0) describeWait(wait);
    else if (at >= 0) pick(ipu, spans, at);
    else if (spans.length) byId("picked").replaceChildren(element("p", `IPU ${ipu} is idle at cycle ${number(x)}.`));
  }

  function goToWait(n) {
    const margin = (waits.end[n] - waits.start[n]) / 2; // of what the other IPUs do around it
    look(waits.start[n] - margin, waits.end[n] + margin);
    describeWait(n);
  }

  // Says for which IPU another one waits, and what that does meanwhile.
  function describeWait(n) {
    const [ipu, start, end, awaited, step] = ["ipu", "start", "end", "awaited", "step"].map((name) => waits[name][n]);
    const cause = waits.causes[waits.cause[n]];
    const text = element("p", "");
    text.append(element("strong", `IPU ${ipu} waits`), ` from cycle ${number(start)} to ${number(end)} (${number(end - start)}): ${cause}.`);
    if (awaited >= 0) text.append(` It waits for IPU ${awaited}${step >= 0 ? `, which runs ${data.labels[step]} until then` : ""}.`);
    chosen = null;
    markRows([{ ipu, start, end }]);
    byId("picked").replaceChildren(text);
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

  // --- start ------------------------------------------------------------------------------------------------------------

  if (!trace) return;
  for (const button of document.querySelectorAll("[data-pick]")) button.addEventListener("click", () => pickBy(button.dataset.pick));
  for (const id of ["range-from", "range-to"]) byId(id).addEventListener("change", chooseRange);
  page.afterDrawing.trace = () => page.search?.(); // marks what a search has found
  page.afterPainting.push(() => chart("trace") && labelSlices());
  Object.assign(page, { pickAt, show, choose, mark, spansWith: (isMeant) => spansOf(numbers(isMeant)), label: (n) => data.labels[n], labelSlices });
})();
