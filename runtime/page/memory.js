// Memory of a page: contents of a tile, tiles of a variable, live variables of a step.
"use strict";
(() => {
  const page = window.ipujaxPage;
  const { data, byId, number, size, table, element, chart } = page;

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
    page.filterAgain?.(byId("tile-contents"));
  }

  // Ends the scale of colours at the fullest tile, or at what a tile has.
  function contrast(isFullest) {
    scaleTo(isFullest ? Math.max(...data.memory.tileBytes) : data.memory.have);
  }

  function scaleTo(high) {
    const scale = [...chart("chip").right].find((part) => part.color_mapper !== undefined);
    scale.color_mapper.setv({ high });
    scale.ticker.setv({ ticks: [0, 1, 2, 3, 4].map((part) => (part * high) / 4) });
  }

  function paragraph(text) {
    const made = document.createElement("p");
    made.textContent = text;
    return made;
  }

  // Colours the chips by the bytes of a variable, or by all bytes for null.
  function showVariable(number) {
    const { variables, layouts, tileBytes, chips, grid, perIpu } = data.memory;
    const bytes = number === null ? tileBytes : numbersOf(layouts[variables[number][1]]);
    const [columns, rows] = grid;
    const source = chart("chip").renderers[0].data_source;
    source.data.image.forEach((image, ipu) => {
      for (let tile = 0; tile < perIpu; tile++) { // the last row has the first tile
        const row = rows - 1 - Math.floor(tile / columns);
        image[row * columns + (tile % columns)] = bytes[ipu * perIpu + tile];
      }
    });
    source.change.emit();
    const most = Math.max(...bytes);
    scaleTo(number === null ? data.memory.have : Math.max(1, most));
    const on = bytes.filter((each) => each).length;
    const back = element("button", "All bytes", { type: "button", id: "unmap" });
    back.addEventListener("click", () => showVariable(null));
    byId("mapped").replaceChildren(...(number === null ? [] : [`Shown: ${variables[number][0]}, on ${page.number(on)} of ${page.number(bytes.length)} tiles, at most ${size(most)}. `, back]));
    if (number !== null) byId("chart-chip").scrollIntoView({ block: "center" });
  }

  // "7 0*3" is 7, 0, 0, 0.
  function numbersOf(runs) {
    return runs.split(" ").flatMap((run) => {
      const [value, count] = run.split("*").map(Number);
      return Array(count ?? 1).fill(value);
    });
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
    page.filterAgain?.(byId("step-variables"));
    const figure = chart("liveness");
    const cursor = figure && figure.center.find((part) => part.name === "cursor");
    if (cursor) cursor.setv({ location: step });
  }

  // --- start ------------------------------------------------------------------------------------------------------------

  function start() {
    if (data.memory && byId("tile")) {
      byId("tile").addEventListener("input", (event) => showTile(event.target.value ? Number(event.target.value) : NaN));
      showTile(Number(byId("tile").value));
    }
    if (byId("contrast")) byId("contrast").addEventListener("change", (event) => contrast(event.target.checked));
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-map]");
      if (button) showVariable(Number(button.dataset.map));
    });
    if (data.liveness && byId("step")) {
      byId("step").addEventListener("input", (event) => showStep(Number(event.target.value)));
      showStep(Number(byId("step").value));
    }
  }

  document.addEventListener("DOMContentLoaded", start);
  page.afterDrawing.liveness = () => showStep(Number(byId("step").value));
  Object.assign(page, { showTile, showVariable, tileAt, stepAt: (x) => showStep(Math.round(x)) });
})();
