"use strict";
// Cells change in place, so that the focus stays on a link.
const rows = document.getElementById("rows");
const layers = rows.dataset.layers.split(" ");
async function poll() {
  try {
    const state = await (await fetch(`/batches/${rows.dataset.batch}/state`)).json();
    state.forEach((row, index) => {
      const cells = rows.rows[index].cells;
      const texts = [`${row.state} ${row.error}`, row.points, row.review, ...layers.map((layer) => row.layers[layer])];
      texts.forEach((text, column) => { cells[column + 1].textContent = text; });
    });
    const ended = state.filter((row) => row.state === "done" || row.state === "failed").length;
    document.getElementById("summary").textContent = `${ended} of ${state.length} notebooks ended`;
    if (ended === state.length) return;
  } catch {
    document.getElementById("summary").textContent = "The grader does not answer; trying again.";
  }
  setTimeout(poll, 1000);
}
poll();
