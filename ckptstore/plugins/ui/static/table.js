// A table of any length: only the rows in sight are elements.

import { h } from "./dom.js";

const ROW = 30;
const MORE = 8;

// columns: {name, cell(i), sort(i)?, wide?, right?}; rows are numbers. `open(i)` is for Enter.
export function virtualTable(columns, count, { open, label, height = 420 } = {}) {
  let order = Array.from({ length: count }, (_, i) => i);
  let shown = order;
  let sorted = null;
  let at = -1;
  const template = columns
    .map((column) => column.width || (column.wide ? "minmax(12rem, 3fr)" : "minmax(5rem, 1fr)"))
    .join(" ");
  const body = h("div", { class: "rows", role: "rowgroup" });
  const head = h("div", { class: "row head", role: "row" });
  const box = h(
    "div",
    { class: "vtable", tabindex: 0, role: "grid", "aria-label": label, "aria-rowcount": count },
    head,
    body,
  );
  box.style.setProperty("--columns", template);
  box.style.maxHeight = `${height}px`;

  function heads() {
    head.replaceChildren(
      ...columns.map((column) =>
        h(
          "div",
          {
            role: "columnheader",
            class: column.right ? "right" : "",
            "aria-sort":
              sorted?.column === column ? (sorted.down ? "descending" : "ascending") : null,
          },
          column.sort
            ? h(
                "button",
                { class: "plain", onclick: () => sortBy(column) },
                column.name,
                sorted?.column === column ? (sorted.down ? " ↓" : " ↑") : "",
              )
            : column.name,
        ),
      ),
    );
  }

  function sortBy(column) {
    const down = sorted?.column === column ? !sorted.down : Boolean(column.right);
    sorted = { column, down };
    const empty = (value) => value === null || value === undefined || Number.isNaN(value);
    shown = [...shown].sort((a, b) => {
      const [x, y] = [column.sort(a), column.sort(b)];
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    at = -1;
    heads();
    draw();
  }

  function draw() {
    body.style.height = `${shown.length * ROW}px`;
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - MORE);
    const last = Math.min(
      shown.length,
      first + Math.ceil((box.clientHeight || height) / ROW) + 2 * MORE,
    );
    const rows = [];
    for (let place = first; place < last; place += 1) {
      const i = shown[place];
      const row = h(
        "div",
        {
          class: place === at ? "row at" : "row",
          role: "row",
          "aria-rowindex": place + 1,
          onclick: () => {
            at = place;
            mark();
          },
        },
        columns.map((column) =>
          h("div", { role: "gridcell", class: column.right ? "right" : "" }, column.cell(i)),
        ),
      );
      row.style.top = `${place * ROW}px`;
      row.dataset.place = place;
      rows.push(row);
    }
    body.replaceChildren(...rows);
  }

  function mark() {
    for (const row of body.children) row.classList.toggle("at", Number(row.dataset.place) === at);
  }

  function move(by) {
    at = Math.max(0, Math.min(shown.length - 1, at + by));
    const top = at * ROW;
    const room = box.clientHeight - 2 * ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top > box.scrollTop + room) box.scrollTop = top - room;
    draw();
  }

  const keys = {
    ArrowDown: 1,
    ArrowUp: -1,
    PageDown: 12,
    PageUp: -12,
    Home: -Infinity,
    End: Infinity,
  };
  box.addEventListener("keydown", (event) => {
    if (event.target !== box) return;
    if (event.key in keys) {
      event.preventDefault();
      move(
        Number.isFinite(keys[event.key])
          ? keys[event.key]
          : Math.sign(keys[event.key]) * shown.length,
      );
    } else if (event.key === "Enter" && at >= 0 && open) open(shown[at]);
  });
  box.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(box);
  heads();
  draw();
  return {
    element: box,
    rows: () => shown,
    filter(accepts) {
      shown = accepts ? order.filter(accepts) : order;
      at = -1;
      box.scrollTop = 0;
      if (sorted) {
        sorted.down = !sorted.down;
        sortBy(sorted.column);
      } else draw();
      return shown.length;
    },
    grow(more) {
      order = Array.from({ length: more }, (_, i) => i);
      shown = order;
      box.setAttribute("aria-rowcount", more);
      draw();
    },
    redraw: draw,
  };
}
