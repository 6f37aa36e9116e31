"use strict";
// A click on a column title sorts ascending, a second one descending. Cells without a number come last.
const units = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9 };
function number(text) {
  const found = text.replace(/[,\s](?=\d{3}\b)/g, "").replace("−", "-").match(/^<?\s*([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(kB|MB|GB|B)?/);
  return found ? parseFloat(found[1]) * (units[found[2]] || 1) : NaN;
}
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const column = head.cellIndex;
    const body = head.closest("table").tBodies[0];
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
    const byNumber = head.classList.contains("number");
    const rows = Array.from(body.rows, (row) => {
      const text = row.cells[column].textContent.trim();
      return { row, text, value: byNumber ? number(text) : NaN };
    });
    rows.sort((a, b) => {
      if (!byNumber) return sign * a.text.localeCompare(b.text, undefined, { numeric: true });
      if (Number.isNaN(a.value) || Number.isNaN(b.value)) return Number.isNaN(a.value) - Number.isNaN(b.value);
      return sign * (a.value - b.value);
    });
    body.append(...rows.map((entry) => entry.row));
  });
}
