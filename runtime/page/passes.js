// What passes changed: the kinds of equations that two passes differ in, and the difference of their texts.
"use strict";
(() => {
  const page = window.ipujaxPage;
  const { data, byId, number, element } = page;
  const CONTEXT = 3; // lines around a change
  const MOST_LINES = 1500; // that are shown
  const MOST_CHANGES = 2000; // of which the shortest script is searched; its memory takes the square
  const LEVELS = 8; // of `program_tree.py`

  function chosen() {
    return ["pass-from", "pass-to"].map((id) => Number(byId(id).value));
  }

  // Leaves the kinds of equations whose number differs between two passes.
  function compareCounts(spec, kinds) {
    const [from, to] = chosen();
    const added = new Map();
    for (const change of data.passes.slice(Math.min(from, to) + 1, Math.max(from, to) + 1)) {
      for (const [kind, count] of change) added.set(kind, (added.get(kind) ?? 0) + (from <= to ? count : -count));
    }
    spec.rows = [...added].filter(([, count]) => count).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).map(([kind, count]) => ({ ...kinds[kind], c0: count }));
    spec.texts = new Map();
  }

  // Numbers of kinds that are equal but for their line: an inlined equation has that of its call.
  let likes = [];

  // The lines of two texts in order, as [sign, line]: by the greedy search of Myers, all replaced where it is too long.
  function difference(before, after) {
    const like = (line) => likes[Math.floor(line / LEVELS)];
    const same = (a, b) => like(before[a]) === like(after[b]);
    let begin = 0;
    while (begin < before.length && begin < after.length && same(begin, begin)) begin += 1;
    let [endBefore, endAfter] = [before.length, after.length];
    while (endBefore > begin && endAfter > begin && same(endBefore - 1, endAfter - 1)) [endBefore, endAfter] = [endBefore - 1, endAfter - 1];
    const equal = (lines) => lines.map((line) => [" ", line]);
    const middle = shortest(before, after, begin, endBefore, endAfter, same);
    return [...equal(after.slice(0, begin)), ...middle, ...equal(after.slice(endAfter))];
  }

  function shortest(before, after, begin, endBefore, endAfter, same) {
    const [numBefore, numAfter] = [endBefore - begin, endAfter - begin];
    const farthest = [];
    let reached = new Int32Array(3); // by diagonal, from −changes − 1 on
    for (let changes = 0; changes <= Math.min(numBefore + numAfter, MOST_CHANGES); changes += 1) {
      const next = new Int32Array(2 * changes + 5);
      for (let diagonal = -changes; diagonal <= changes; diagonal += 2) {
        const at = (d) => reached[d + changes] ?? 0; // of one change less
        const down = diagonal === -changes || (diagonal !== changes && at(diagonal - 1) < at(diagonal + 1));
        let place = changes === 0 ? 0 : down ? at(diagonal + 1) : at(diagonal - 1) + 1;
        while (place < numBefore && place - diagonal < numAfter && same(begin + place, begin + place - diagonal)) place += 1;
        next[diagonal + changes + 1] = place;
        if (place >= numBefore && place - diagonal >= numAfter) return retraced(before, after, begin, farthest, place, diagonal);
      }
      farthest.push(next);
      reached = next;
    }
    return [...before.slice(begin, endBefore).map((line) => ["−", line]), ...after.slice(begin, endAfter).map((line) => ["+", line])];
  }

  // The lines on the way to a diagonal, from the last to the first.
  function retraced(before, after, begin, farthest, place, diagonal) {
    const lines = [];
    for (let changes = farthest.length; changes > 0; changes -= 1) {
      const at = (d) => farthest[changes - 1][d + changes] ?? 0;
      const down = diagonal === -changes || (diagonal !== changes && at(diagonal - 1) < at(diagonal + 1));
      const from = down ? diagonal + 1 : diagonal - 1;
      const start = down ? at(from) : at(from) + 1;
      for (; place > start; place -= 1) lines.push([" ", after[begin + place - 1 - diagonal]]);
      if (down) lines.push(["+", after[begin + place - 1 - diagonal]]);
      else lines.push(["−", before[begin + place - 1]]);
      place = at(from);
      diagonal = from;
    }
    for (; place > 0; place -= 1) lines.push([" ", after[begin + place - 1]]);
    return lines.reverse();
  }

  function showDifference(kinds) {
    const box = byId("pass-difference");
    const [before, after] = chosen().map((pass) => (typeof data.orders[pass] === "number" ? data.orders[data.orders[pass]] : data.orders[pass]));
    if (!before || !after) {
      box.textContent = "These texts are too long for the page; lowered.as_text(after=…) has them.";
      return;
    }
    const lines = difference(before, after);
    const isNear = new Uint8Array(lines.length);
    lines.forEach(([sign], n) => sign !== " " && isNear.fill(1, Math.max(0, n - CONTEXT), n + CONTEXT + 1));
    const shown = [];
    for (let n = 0, skipped = 0; n <= lines.length && shown.length < MOST_LINES; n += 1) {
      if (n < lines.length && !isNear[n]) { skipped += 1; continue; }
      if (skipped) shown.push(element("span", `  … ${number(skipped)} equal\n`, { class: "equal" }));
      skipped = 0;
      if (n < lines.length) shown.push(line(lines[n], kinds));
    }
    const rest = shown.length >= MOST_LINES ? "… more changes follow\n" : "";
    box.replaceChildren(...shown, element("span", lines.some(([sign]) => sign !== " ") ? rest : "No equation differs.", { class: "equal" }));
  }

  function line([sign, code], kinds) {
    const { c1, c2, c3 } = kinds[Math.floor(code / LEVELS)];
    const text = `${sign} ${"  ".repeat(code % LEVELS)}${c1}  ${c2}${c3 ? `  # ${c3}` : ""}\n`;
    return element("span", text, { class: { "+": "added", "−": "removed" }[sign] ?? "kept" });
  }

  function prepare() {
    const { spec, rows: kinds } = page.tableSpec("passes-table");
    const numbers = new Map();
    likes = kinds.map(({ c1, c2 }) => { const text = `${c1} ${c2}`; if (!numbers.has(text)) numbers.set(text, numbers.size); return numbers.get(text); });
    compareCounts(spec, kinds);
    let isSeen = false; // a text is compared when it is first in sight
    new IntersectionObserver(([{ isIntersecting }]) => {
      if (isIntersecting && !isSeen) { isSeen = true; showDifference(kinds); }
    }).observe(byId("pass-difference"));
    for (const id of ["pass-from", "pass-to"]) {
      byId(id).addEventListener("change", () => {
        compareCounts(spec, kinds);
        page.dataTable("passes-table")?.replaceData(spec.rows);
        isSeen = true;
        showDifference(kinds);
      });
    }
  }

  if (data.passes) prepare();
})();
