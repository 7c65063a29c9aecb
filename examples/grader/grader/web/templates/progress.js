"use strict";
// Cells change in place, so that the focus stays on a link.
const rows = document.getElementById("rows");
const layers = rows.dataset.layers.split(" ");
function set(element, text) {
  if (element.textContent !== text) element.textContent = text;  // a status that is the same is not announced again
}
async function poll() {
  const summary = document.getElementById("summary");
  try {
    const state = await (await fetch(`/batches/${rows.dataset.batch}/state`)).json();
    state.forEach((row, index) => {
      const cells = rows.rows[index].cells;
      const texts = [`${row.state} ${row.error}`, row.points, row.review, ...layers.map((layer) => row.layers[layer])];
      texts.forEach((text, column) => set(cells[column + 1], text));
    });
    const count = (name) => state.filter((row) => row.state === name).length;
    const ended = count("done") + count("failed");
    set(summary, `${ended} of ${state.length} notebooks ended`);
    document.getElementById("again").hidden = count("failed") === 0;
    if (ended === state.length) return;
  } catch {
    set(summary, "The grader does not answer; trying again.");
  }
  setTimeout(poll, 1000);
}
poll();
