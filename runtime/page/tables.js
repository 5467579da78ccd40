// Tables of data by Tabulator: built when their tab is first opened; sorting, filters by column, search, CSV.
"use strict";
(() => {
  const page = window.ipujaxPage;
  const { data, byId, number, size, element } = page;
  const specs = new Map(Object.entries(data.tables ?? {}));
  const built = new Map(); // Tabulator by name, of tables that were opened
  let words = []; // of the search box

  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const real = (value) => (Number.isInteger(value) ? number(value) : value.toLocaleString("en-US", { maximumSignificantDigits: 4 }));
  const NUMBERS = { number: real, bytes: size, share: percent };

  const BUTTONS = new Set(["trace", "map"]); // kinds of cells without a value

  // A cell as the reader sees it.
  function textOf(kind, value) {
    if (value === null || value === undefined) return "";
    if (kind === "link") return value[0];
    if (BUTTONS.has(kind)) return "";
    return NUMBERS[kind] ? NUMBERS[kind](value) : String(value);
  }

  function rowsOf(spec) {
    if (!spec.rows) {
      const columns = spec.columns.map(({ values, at }) => (at ? at.map((n) => values[n]) : values));
      spec.rows = columns[0].map((_, n) => Object.fromEntries([["id", spec.ids[n] ?? n], ...columns.map((cells, c) => [`c${c}`, cells[n]])]));
      spec.texts = new Map();
    }
    return spec.rows;
  }

  // --- columns ----------------------------------------------------------------------------------------------------------

  function shown(kind, value) {
    if (kind === "map") return element("button", "Show", { type: "button", "data-map": String(value) });
    if (kind === "trace") return value ? element("a", "trace", { href: "#trace", class: "to-trace", "data-show": value, title: "Show in the execution trace" }) : element("span", "");
    const text = textOf(kind, value);
    if (kind === "link" && value[1]) return element("a", text, { href: "#" + encodeURIComponent(value[1]), title: text });
    return element("span", text, { title: text });
  }

  // Texts contain the words; numbers are at least a value, at most ("<5"), or between two ("2..5").
  function isLeft(kind, wanted, value) {
    if (!NUMBERS[kind]) return textOf(kind, value).toLowerCase().includes(wanted.trim().toLowerCase());
    const [first, last] = bounds(kind, wanted);
    return value !== null && value >= first && value <= last;
  }

  const UNITS = { k: 2 ** 10, m: 2 ** 20, g: 2 ** 30 };

  function amount(kind, text) {
    const [, digits, unit] = text.replaceAll(",", "").match(/^\s*(-?[\d.]+(?:e\d+)?)\s*([kmg%]?)/i) ?? [];
    const factor = kind === "share" ? 0.01 : UNITS[unit?.toLowerCase()] ?? 1;
    return digits === undefined ? NaN : Number(digits) * factor;
  }

  function bounds(kind, text) {
    const [low, high] = text.split("..");
    if (high !== undefined) return [amount(kind, low) || -Infinity, high.trim() ? amount(kind, high) : Infinity];
    const bare = text.replace(/^\s*[<>≤≥]=?/, "");
    const value = amount(kind, bare);
    if (Number.isNaN(value)) return [-Infinity, Infinity];
    return /^\s*[<≤]/.test(text) ? [-Infinity, value] : [value, Infinity];
  }

  // Widths, in pixels.
  const LETTER = 8; // with some to spare
  const BUTTON_WIDTH = 76;
  const LEAST_WIDTH = 92;
  const FIRST_WIDTH = 190; // of the column that stays where a table is scrolled
  const MOST_LETTERS = 28; // of a text that is not cut short

  // The width that three quarters of the texts need.
  function textWidth(kind, values) {
    const lengths = values.map((value) => textOf(kind, value).length).sort((a, b) => a - b);
    return LETTER * Math.min(lengths[Math.floor(0.75 * lengths.length)] ?? 0, MOST_LETTERS) + 16;
  }

  function column({ title, kind, note, values }, n) {
    const isNumber = kind in NUMBERS;
    const needed = Math.max(LEAST_WIDTH, isNumber ? 0 : textWidth(kind, values), LETTER * title.length + 44);
    const width = BUTTONS.has(kind) ? BUTTON_WIDTH : n ? needed : FIRST_WIDTH;
    const made = {
      title, field: `c${n}`, formatter: (cell) => shown(kind, cell.getValue()),
      hozAlign: isNumber ? "right" : "left", headerSort: !BUTTONS.has(kind),
      headerSortStartingDir: isNumber ? "desc" : "asc",
      sorter: (a, b) => (isNumber ? (a ?? -Infinity) - (b ?? -Infinity) : textOf(kind, a).localeCompare(textOf(kind, b), "en", { numeric: true })),
      // A button: the keyboard sorts as the pointer does.
      titleFormatter: () => (BUTTONS.has(kind) ? element("span", title) : element("button", title, { type: "button", title: note ?? title })),
      accessorDownload: (value) => (kind === "link" ? value[0] : value),
      download: !BUTTONS.has(kind),
      minWidth: width, widthGrow: isNumber ? 1 : width / 40, frozen: !n,
    };
    if (BUTTONS.has(kind)) return { ...made, width };
    return {
      ...made, headerFilter: "input", headerFilterPlaceholder: isNumber ? "≥" : "contains",
      headerFilterParams: { elementAttributes: { "aria-label": `Filter ${title}`, title: isNumber ? "at least; <5 at most; 2..5 between; bytes also as 4k, 2m" : "contains" } },
      headerFilterFunc: (wanted, value) => isLeft(kind, String(wanted), value), headerFilterLiveFilter: true,
    };
  }

  // --- tables -----------------------------------------------------------------------------------------------------------

  function build(place) {
    const { table: name, rowsOf: source } = place.dataset; // a table may show the rows of another
    const spec = specs.get(source ?? name);
    if (built.has(name) || !spec) return;
    const count = element("output", "", { "aria-live": "polite" });
    const csv = element("button", "CSV", { type: "button", "data-csv": name, title: "Save the rows that are left as CSV" });
    const clear = element("button", "Clear filters", { type: "button" });
    const bar = element("div", "", { class: "table-bar" });
    bar.append(csv, clear, count);
    const grid = element("div", "");
    place.replaceChildren(bar, grid);
    const sorted = spec.columns.findIndex(({ title }) => title === spec.sortedBy);
    const table = new Tabulator(grid, {
      data: rowsOf(spec), columns: spec.columns.map(column), layout: "fitColumns", maxHeight: "34rem",
      initialSort: sorted >= 0 ? [{ column: `c${sorted}`, dir: "desc" }] : [], placeholder: "No row is left.",
      rowFormatter: (row) => { const { id } = row.getData(); if (!source && typeof id === "string") row.getElement().id = id; },
    });
    grid.addEventListener("input", ({ target }) => target.dispatchEvent(new Event("keyup"))); // what is pasted by the pointer filters too
    built.set(name, table);
    const tell = (rows) => (count.textContent = rows === spec.rows.length ? `${number(rows)} rows` : `${number(rows)} of ${number(spec.rows.length)} rows`);
    table.on("dataFiltered", (_, rows) => tell(rows.length));
    table.on("tableBuilt", () => {
      tell(spec.rows.length);
      if (words.length) search(words);
      place.dataset.ready = "true";
    });
    csv.addEventListener("click", () => table.download("csv", `${name}.csv`, {}, "active"));
    clear.addEventListener("click", () => { table.clearHeaderFilter(); page.clearSearch?.(); });
  }

  // Shows the row of an address; returns whether a table has it.
  function revealRow(id) {
    for (const [name, spec] of specs) {
      if (!spec.ids.includes(id)) continue;
      page.openAround(byId(name));
      const table = built.get(name);
      const show = () => {
        if (!table.getRows("active").some((row) => row.getData().id === id)) { table.clearHeaderFilter(); page.clearSearch?.(); }
        byId(name).scrollIntoView({ block: "nearest" });
        table.deselectRow();
        table.scrollToRow(id, "center", true).then(() => table.selectRow(id), () => {}); // rejected where a later address came first
      };
      if (table.initialized) show();
      else table.on("tableBuilt", show);
      return true;
    }
    return false;
  }

  // --- search -----------------------------------------------------------------------------------------------------------

  function hasWords(spec, row) {
    if (!spec.texts.has(row.id)) {
      spec.texts.set(row.id, spec.columns.map(({ kind }, n) => textOf(kind, row[`c${n}`])).join(" ").toLowerCase());
    }
    return words.every((word) => spec.texts.get(row.id).includes(word));
  }

  // Leaves the rows that have all words; returns their number by name of the table.
  function search(wanted) {
    words = wanted;
    const counts = new Map();
    for (const [name, spec] of specs) {
      counts.set(name, words.length ? rowsOf(spec).filter((row) => hasWords(spec, row)).length : 0);
      const table = built.get(name);
      if (!table?.initialized) continue;
      if (words.length) table.setFilter((row) => hasWords(spec, row));
      else table.clearFilter();
    }
    return counts;
  }

  Object.assign(page, { buildTables: (part) => part.querySelectorAll("[data-table]").forEach(build), revealRow, searchTables: search, dataTable: (name) => built.get(name), tableSpec: (name) => ({ spec: specs.get(name), rows: rowsOf(specs.get(name)) }) });
})();
