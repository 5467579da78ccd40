// Behaviour of a page: light and dark, sorting, folding, zooming, contents of a tile, live variables of a step.
"use strict";
window.ipujaxPage = (() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const byId = (id) => document.getElementById(id);
  const number = (value) => Math.round(value).toLocaleString("en-US");

  function size(bytes) {
    for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (Math.abs(bytes) >= factor) return (bytes / factor).toLocaleString("en-US", { maximumFractionDigits: 1 }) + " " + unit;
    }
    return number(bytes) + " B";
  }

  // Rows of plain text; names are never markup.
  function table(heads, rows) {
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    for (const text of heads) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = text;
      head.append(cell);
    }
    const body = made.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      for (const text of row) line.insertCell().textContent = text;
    }
    return made;
  }

  // --- charts -------------------------------------------------------------------------------------------------------

  const charts = () => (window.Bokeh ? window.Bokeh.documents.flatMap((one) => one.roots()) : []);
  const chart = (name) => charts().find((figure) => figure.name === name);

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(["front", "quiet", "line", "back"].map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  }

  function paint() {
    const { front, quiet, line, back } = colours();
    for (const figure of charts()) {
      const parts = [...figure.left, ...figure.below, ...figure.right, ...figure.above, ...figure.center];
      for (const part of parts) {
        if (part.major_tick_line_color !== undefined && part.axis_label !== undefined) {
          part.setv({
            axis_label_text_color: front, major_label_text_color: front, axis_line_color: quiet,
            major_tick_line_color: quiet, minor_tick_line_color: quiet,
          });
        } else if (part.grid_line_color !== undefined) {
          part.setv({ grid_line_color: line, grid_line_alpha: 0.7 });
        } else if (part.label_text_color !== undefined) {
          part.setv({ label_text_color: front, background_fill_color: back, background_fill_alpha: 0.8, border_line_color: line });
        } else if (part.name === "capacity") {
          if (part.text === undefined) part.setv({ line_color: front });
          else part.setv({ text_color: front, background_fill_color: back, background_fill_alpha: 0.8 });
        } else if (part.color_mapper !== undefined) {
          part.setv({ major_label_text_color: front, title_text_color: front, major_tick_line_color: quiet });
        }
      }
      for (const drawn of figure.renderers) {
        if (drawn.name === "labels") drawn.glyph.setv({ text_color: { value: front } });
      }
    }
    if (chart("trace")) labelSlices();
  }

  function theme(name) {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
    byId("theme").setAttribute("aria-pressed", String(name === "dark"));
    paint();
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const whole = (range) => range.bounds; // of charts that zoom

  function zoom(name, step) {
    const range = chart(name).x_range;
    const [first, last] = whole(range);
    const width = range.end - range.start;
    const middle = (range.start + range.end) / 2;
    const moves = {
      in: [middle - width / 4, middle + width / 4],
      out: [middle - width, middle + width],
      left: [range.start - width / 4, range.end - width / 4],
      right: [range.start + width / 4, range.end + width / 4],
      all: [first, last],
    };
    let [start, end] = moves[step];
    const wanted = Math.min(Math.max(end - start, range.min_interval), last - first);
    start = Math.min(Math.max(start, first), last - wanted);
    range.setv({ start, end: start + wanted });
  }

  // BokehJS answers a double click by undoing the last zoom; the handler shows all instead.
  function showAll(name) {
    setTimeout(() => zoom(name, "all"), 0);
  }

  // Where nothing more is to be seen, the wheel scrolls the page.
  function passWheel(name) {
    byId("chart-" + name).addEventListener("wheel", (event) => {
      const range = chart(name) && chart(name).x_range;
      const [first, last] = range ? whole(range) : [0, 0];
      if (event.deltaY > 0 && range && range.end - range.start >= 0.999 * (last - first)) event.stopImmediatePropagation();
    }, { capture: true, passive: true });
  }

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
    byId("trace-range").textContent = `cycles ${number(start)} to ${number(end)} of ${number(figure.x_range.bounds[1])}`;
    const found = { x: [], y: [], text: [], colour: [], back: [] };
    const drawn = (name) => figure.renderers.filter((part) => part.name && part.name.startsWith(name));
    const [folded] = drawn("folded");
    const isFolded = new Set(folded.data_source.data.label);
    const { back, front } = colours();
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

  // --- tables and trees -----------------------------------------------------------------------------------------------

  function sort(button) {
    const head = button.closest("th");
    const list = head.closest("table").tBodies[0];
    const column = Number(button.dataset.sort);
    const isText = column < 2;
    const shown = head.getAttribute("aria-sort");
    const down = shown ? shown === "ascending" : !isText; // numbers begin with the largest, names with A
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value;
    const order = (a, b) => (isText ? value(b).localeCompare(value(a)) : Number(value(b)) - Number(value(a)));
    const rows = [...list.rows].sort((a, b) => (down ? order(a, b) : order(b, a)));
    list.append(...rows);
  }

  function fold(button) {
    const open = button.dataset.fold === "open";
    for (const part of button.closest("section").querySelectorAll(".tree details")) part.open = open;
  }

  // --- what is on a tile ----------------------------------------------------------------------------------------------

  function showTile(tile) {
    const memory = data.memory;
    if (!(Number.isInteger(tile) && tile >= 0 && tile < memory.tileBytes.length)) {
      byId("tile-total").textContent = `There is no such tile: 0 to ${number(memory.tileBytes.length - 1)}`;
      byId("tile-contents").replaceChildren();
      return;
    }
    byId("tile").value = tile;
    const used = memory.tileBytes[tile];
    byId("tile-total").textContent = `${size(used)} of ${size(memory.have)} (${((100 * used) / memory.have).toFixed(1)} %)`;
    const parts = [];
    const place = memory.listed.indexOf(tile);
    const named = memory.contents;
    const at = named ? named.tiles.indexOf(tile) : -1;
    if (at >= 0) {
      const rows = [];
      let sum = 0;
      for (let row = named.first[at]; row < named.first[at + 1]; row++) {
        const [name, category, line] = named.items[named.item[row]];
        sum += named.bytes[row];
        rows.push([size(named.bytes[row]), name, category, line === "unknown" ? "" : line]);
      }
      if (used > sum) rows.push([size(used - sum), "smaller things", "", ""]);
      parts.push(paragraph(`Fullest at ${named.steps[named.peak[at]]}. The largest things then:`));
      parts.push(table(["Bytes", "Name", "Category", "Line"], rows));
    }
    if (place >= 0) {
      const rows = memory.parts.map(([name, when], n) => [name, when, memory.byPart[n][place]]);
      const shown = rows.filter((row) => row[2] > 0).sort((a, b) => b[2] - a[2]);
      parts.push(table(["Bytes", memory.kind, "When"], shown.map(([name, when, bytes]) => [size(bytes), name, when])));
    }
    if (!parts.length) parts.push(paragraph("Only the total of this tile is known."));
    byId("tile-contents").replaceChildren(...parts);
    window.ipujaxPage?.filterAgain?.(byId("tile-contents"));
  }

  // Ends the scale of colours at the fullest tile, or at what a tile has.
  function contrast(isFullest) {
    const figure = chart("chip");
    const high = isFullest ? Math.max(...data.memory.tileBytes) : data.memory.have;
    const scale = [...figure.right].find((part) => part.color_mapper !== undefined);
    scale.color_mapper.setv({ high });
    scale.ticker.setv({ ticks: [0, 1, 2, 3, 4].map((part) => (part * high) / 4) });
  }

  function paragraph(text) {
    const made = document.createElement("p");
    made.textContent = text;
    return made;
  }

  function tileAt(x, y) {
    const { chips, grid, perIpu } = data.memory;
    const [columns, rows] = grid;
    chips.forEach(([left, top], ipu) => {
      const column = Math.floor(x - left);
      const row = Math.floor(-y - top); // the first tile is at the upper left
      const tile = row * columns + column;
      if (column >= 0 && column < columns && row >= 0 && row < rows && tile < perIpu) showTile(ipu * perIpu + tile);
    });
  }

  // --- what is live at a step -------------------------------------------------------------------------------------------

  function showStep(step) {
    const live = data.liveness;
    if (!(step >= 0 && step < live.names.length)) return;
    byId("step").value = step;
    byId("step-name").textContent = `${number(step)}: ${live.names[step]}, ${size(live.bytes[step])} live`;
    const rows = live.largest[step].map((n) => live.variables[n]).map(([name, bytes, line]) => [size(bytes), name, line]);
    byId("step-variables").replaceChildren(table(["Bytes", "Largest that are not always live", "Line"], rows));
    window.ipujaxPage?.filterAgain?.(byId("step-variables"));
    const figure = chart("liveness");
    const cursor = figure && figure.center.find((part) => part.name === "cursor");
    if (cursor) cursor.setv({ location: step });
  }

  // --- start ------------------------------------------------------------------------------------------------------------

  function start() {
    byId("theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"));
    byId("theme").textContent = isDark() ? "Light" : "Dark";
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    for (const button of document.querySelectorAll("[data-sort]")) button.addEventListener("click", () => sort(button));
    for (const button of document.querySelectorAll("[data-fold]")) {
      button.addEventListener("click", () => fold(button));
    }
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => zoom(button.dataset.zoom, button.dataset.step));
    }
    if (data.memory && byId("tile")) {
      byId("tile").addEventListener("input", (event) => showTile(event.target.value ? Number(event.target.value) : NaN));
      showTile(Number(byId("tile").value));
    }
    if (byId("contrast")) byId("contrast").addEventListener("change", (event) => contrast(event.target.checked));
    if (data.liveness && byId("step")) {
      byId("step").addEventListener("input", (event) => showStep(Number(event.target.value)));
      showStep(Number(byId("step").value));
    }
    for (const line of document.querySelectorAll("tr[data-dearest]")) {
      const region = line.closest(".scroll");
      const see = () => (region.scrollTop = line.offsetTop - region.clientHeight / 2);
      region.closest("details").addEventListener("toggle", see);
      see();
    }
    for (const button of document.querySelectorAll("[data-step='all']")) passWheel(button.dataset.zoom);
    waitForCharts(50);
  }

  // BokehJS draws after the page has loaded; its figures get the colours of the page then.
  function waitForCharts(left) {
    const expected = document.querySelectorAll(".chart").length;
    if (charts().length >= expected) {
      paint();
      if (chart("trace")) labelSlices();
      if (data.liveness && byId("step")) showStep(Number(byId("step").value));
      document.documentElement.dataset.ready = "true";
      window.ipujaxPage.reveal?.(location.hash); // charts have moved what is below them
    } else if (left) {
      setTimeout(() => waitForCharts(left - 1), 100);
    }
  }

  document.addEventListener("DOMContentLoaded", start);
  return { data, byId, number, size, tileAt, label: (n) => data.labels[n], stepAt: (x) => showStep(Math.round(x)), showTile, zoom, showAll, labelSlices, chart };
})();
