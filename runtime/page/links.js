// Addresses of a page, and its search box.
"use strict";
(() => {
  const page = window.ipujaxPage;
  const { data, byId, number, element, chart } = page;
  const { trace, operations } = data;

  // --- addresses --------------------------------------------------------------------------------------------------------

  function idOf(hash) {
    try {
      return decodeURIComponent(hash.slice(1));
    } catch {
      return hash.slice(1); // no address of this page
    }
  }

  // Shows the place of an address: opens its tab, unfolds the nodes around it, and ends a search that hides it.
  async function reveal(hash) {
    if (!hash || page.revealRow(idOf(hash))) return;
    const place = byId(idOf(hash));
    const panel = place?.closest("[role='tabpanel']");
    if (!panel) return;
    const hiding = place.closest("[hidden]");
    if (hiding && hiding !== panel) clearSearch();
    await page.openAround(place);
    for (let part = place.parentElement; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    if (place === panel) window.scrollTo({ top: 0 });
    else place.scrollIntoView({ block: place.tagName === "SECTION" ? "start" : "center" });
  }

  function follow(event) {
    const link = event.target.closest("a[href^='#']");
    if (!link) return;
    if (link.dataset.show) {
      event.preventDefault();
      if (!page.isFramed) history.pushState(null, "", "#trace");
      page.show(link.dataset.show);
    } else if (page.isFramed || link.getAttribute("href") === location.hash) {
      if (page.isFramed) event.preventDefault(); // it would leave the frame
      reveal(link.getAttribute("href")); // an address that stays the same is no event
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

  let later; // a search that waits for more letters

  function search() {
    clearTimeout(later);
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
    for (const [name, count] of page.searchTables(words)) {
      const section = byId(name)?.closest("section");
      if (section && words.length) counts.set(section, (counts.get(section) ?? 0) + count);
    }
    const found = [...document.querySelectorAll("section")].filter((section) => counts.get(section));
    const results = found.map((section) => {
      return element("a", `${section.querySelector("h2").textContent} ${number(counts.get(section))}`, { href: `#${section.id}` });
    });
    if (trace) {
      const text = ([name, line, layer, part]) => `${name} ${operations.lines[line][0]} ${operations.layers[layer][0]} ${part}`;
      const spans = words.length ? page.spansWith((row) => has(text(row).toLowerCase())) : [];
      if (chart("trace")) page.mark(spans);
      if (spans.length) {
        const link = element("a", `Trace ${number(spans.length)}`, { href: "#trace" });
        link.addEventListener("click", async () => {
          await page.openAround(byId("trace"));
          page.choose(byId("search").value, spans);
        });
        results.push(link);
      }
    }
    if (!words.length) byId("found").replaceChildren();
    else byId("found").replaceChildren(...(results.length ? results : ["Nothing has all these words."]));
  }

  function clearSearch() {
    if (!byId("search")) return;
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
    document.addEventListener("click", follow);
    window.addEventListener("hashchange", () => reveal(location.hash || document.querySelector("[role='tab']").hash)); // without an address, the first tab
    if (!byId("search")) return;
    byId("search").parentElement.hidden = false;
    byId("search").addEventListener("input", () => {
      clearTimeout(later);
      later = setTimeout(search, 120);
    });
    document.addEventListener("keydown", keys);
  }

  document.addEventListener("DOMContentLoaded", start);
  Object.assign(page, { search, clearSearch, reveal, filterAgain: (area) => words.length && filterArea(area) });
})();
