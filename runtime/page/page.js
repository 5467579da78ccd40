// Behaviour of a page: tabs, which draw their charts when they are opened, light and dark, folding, zooming.
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

  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) if (value) made.setAttribute(key, value);
    return made;
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
  const afterDrawing = {}; // functions by name of a chart

  async function draw(place) {
    const { chart: name } = place.dataset;
    await window.Bokeh.embed.embed_item(JSON.parse(byId("drawing-" + name).textContent), place.id);
    if (document.querySelector(`[data-zoom='${name}']`)) passWheel(name);
    paint();
    afterDrawing[name]?.();
  }

  // --- tabs ---------------------------------------------------------------------------------------------------------

  const isFramed = location.protocol === "about:"; // the page of a notebook's frame has no address of its own
  const tabs = () => [...document.querySelectorAll("[role='tab']")];
  const panelOf = (tab) => byId(tab.getAttribute("aria-controls"));
  const prepared = new Map(); // promise that the charts and tables of a panel are there

  // Shows a panel, and draws what is in it when it is shown first.
  function open(panel) {
    for (const tab of tabs()) {
      const isChosen = panelOf(tab) === panel;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      panelOf(tab).hidden = !isChosen;
    }
    document.documentElement.dataset.ready = "false";
    if (!prepared.has(panel)) prepared.set(panel, prepare(panel));
    return prepared.get(panel).then(() => {
      if (!panel.hidden) document.documentElement.dataset.ready = "true"; // of the shown panel, not of one left meanwhile
    });
  }

  async function prepare(panel) {
    window.ipujaxPage.buildTables(panel);
    await Promise.all([...panel.querySelectorAll("[data-chart]")].map(draw));
    for (const line of panel.querySelectorAll("tr[data-dearest]")) {
      const region = line.closest(".scroll");
      const see = () => (region.scrollTop = line.offsetTop - region.clientHeight / 2);
      region.closest("details").addEventListener("toggle", see);
      see();
    }
  }

  const openAround = (part) => open(part.closest("[role='tabpanel']"));

  function chooseTab(tab) {
    if (!isFramed) history.pushState(null, "", tab.getAttribute("href"));
    open(panelOf(tab));
    window.scrollTo({ top: 0 });
  }

  // Left and right go from tab to tab, Home and End to the first and the last.
  function moveInTabs(event) {
    const all = tabs();
    const at = all.indexOf(event.target);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: -1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const tab = all.at(to % all.length);
    chooseTab(tab);
    tab.focus();
  }

  const afterPainting = [];

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
    afterPainting.forEach((act) => act());
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

  // --- folding -----------------------------------------------------------------------------------------------------

  function fold(button) {
    const open = button.dataset.fold === "open";
    for (const part of button.closest("section").querySelectorAll(".tree details")) part.open = open;
  }

  // --- start ------------------------------------------------------------------------------------------------------------

  function start() {
    byId("theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"));
    byId("theme").textContent = isDark() ? "Light" : "Dark";
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    for (const button of document.querySelectorAll("[data-fold]")) button.addEventListener("click", () => fold(button));
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => zoom(button.dataset.zoom, button.dataset.step));
    }
    for (const tab of tabs()) {
      tab.addEventListener("click", (event) => { event.preventDefault(); chooseTab(tab); });
      tab.addEventListener("keydown", moveInTabs);
    }
    open(panelOf(tabs()[0])).then(() => window.ipujaxPage.reveal?.(location.hash));
  }

  document.addEventListener("DOMContentLoaded", start);
  return { data, isFramed, byId, number, size, element, table, colours, afterDrawing, afterPainting, zoom, showAll, chart, openAround };
})();
