// SPDX-License-Identifier: Apache-2.0
// Tables that sort by a click on a column's name.

/**
 * @param {string} label what the table lists, for screen readers
 * @param {{title: string, value?: (row) => any, cell: (row) => any, number?: boolean, as?: string}[]} columns
 *     a column without `value` cannot be sorted by; `as`: "name", which may be long, "category", "when", "narrow" or
 *     "wide" for bars
 * @param {any[]} rows in their first order
 * @param {{first?: number}} options `first`: how many rows are shown before the reader asks for all
 */
function table(label, columns, rows, { first = Infinity } = {}) {
  const body = element("tbody");
  const state = { column: null, descending: false, all: rows.length <= first };
  const more = element("button", { type: "button", onclick: () => show({ all: true }) }, `Show all ${rows.length}`);
  const headings = columns.map((column) => heading(column, () => show(sortedBy(column))));

  function sortedBy(column) {
    const again = state.column === column;
    return { column, descending: again ? !state.descending : Boolean(column.number) };
  }

  function show(change) {
    Object.assign(state, change);
    const sorted = state.column ? [...rows].sort(comparison(state)) : rows;
    const visible = state.all ? sorted : sorted.slice(0, first);
    body.replaceChildren(...visible.map((row) => tableRow(columns, row)));
    more.hidden = state.all;
    columns.forEach((column, index) => {
      const order = state.descending ? "descending" : "ascending";
      if (column.value) headings[index].setAttribute("aria-sort", column === state.column ? order : "none");
    });
  }

  show({});
  const head = element("thead", {}, element("tr", {}, headings));
  const scroller = element(
    "div",
    { class: "scroller", tabindex: "0", role: "region", "aria-label": label },
    element("table", { "aria-label": label }, head, body),
  );
  return element("div", { class: "table" }, scroller, more);
}

function heading(column, onSort) {
  const content = column.value ? element("button", { type: "button", onclick: onSort }, column.title) : column.title;
  return element("th", { scope: "col", class: columnClass(column) }, content);
}

function tableRow(columns, row) {
  return element("tr", {}, columns.map((column) => element("td", { class: columnClass(column) }, column.cell(row))));
}

function columnClass(column) {
  return column.number ? "number" : column.as;
}

function comparison({ column, descending }) {
  const sign = descending ? -1 : 1;
  return (a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    return x < y ? -sign : x > y ? sign : 0;
  };
}

/** A bar of bytes by category, `whole` being its full length. */
function stackedBar(sizes, whole) {
  const parts = [...COLORS.keys()].filter((name) => sizes[name] > 0);
  const bars = parts.map((name) =>
    element("span", {
      style: { width: `${(100 * sizes[name]) / whole}%`, background: COLORS.get(name) },
      title: `${name}: ${formatBytes(sizes[name])}`,
    }),
  );
  return element("div", { class: "bar", "aria-hidden": "true" }, bars);
}

/** A bar of bytes whose categories are not known, `part` of them in a stronger colour. */
function plainBar(size, part, whole) {
  const width = (bytes) => ({ width: `${(100 * bytes) / whole}%` });
  const [strong, weak] = [Math.min(part, size), Math.max(size - part, 0)];
  return element(
    "div",
    { class: "bar plain", "aria-hidden": "true" },
    element("span", { style: width(strong) }),
    element("span", { class: "rest", style: width(weak) }),
  );
}
