// SPDX-License-Identifier: Apache-2.0
// One instant of a timeline in words and figures: beside the cursor, for screen readers, and as a table.

const READOUT_CATEGORIES = 12;

function sizesAt(view, row) {
  return Object.fromEntries(view.shown.map(({ name, sizes }) => [name, sizes[row]]));
}

function placeOf(timeline, row) {
  return `step ${timeline.step[row]} · ${words(timeline.phaseOf(row))}`;
}

function readout(view, row) {
  const { timeline } = view;
  const sizes = largestFirst(sizesAt(view, row));
  const rest = sizes.slice(READOUT_CATEGORIES);
  const lines = sizes.slice(0, READOUT_CATEGORIES).map(([name, size]) => readoutLine(labelled(name), size));
  if (rest.length) lines.push(readoutLine(`${rest.length} more`, sum(Object.fromEntries(rest))));
  return [
    element("p", { class: "total" }, bytes(view.totals[row]), muted("span", placeOf(timeline, row))),
    muted("p", `event ${formatCount(timeline.event[row])} · ${formatDuration(timeline.time[row])}`),
    element("table", {}, element("tbody", {}, lines)),
  ];
}

function muted(tag, text) {
  return element(tag, { class: "muted" }, text);
}

function readoutLine(name, size) {
  return element("tr", {}, element("td", {}, name), element("td", { class: "number" }, bytes(size)));
}

function rowInWords(view, row) {
  const largest = largestFirst(sizesAt(view, row)).slice(0, 3);
  const parts = largest.map(([name, size]) => `${words(name)} ${formatBytes(size)}`).join(", ");
  const { timeline } = view;
  return `${formatBytes(view.totals[row])}, ${placeOf(timeline, row)}, event ${timeline.event[row]}: ${parts}`;
}

/** The part in view as a table, made when the reader opens it. */
function timelineTable(view) {
  const content = element("div");
  const details = element("details", {}, element("summary", {}, "The part in view as a table"), content);
  const update = () => {
    if (!details.open) return;
    const rows = view.picked(100).map(({ row }) => row);
    const { timeline } = view;
    const columns = [
      { title: "event", number: true, cell: (row) => formatCount(timeline.event[row]) },
      { title: "time", number: true, cell: (row) => formatDuration(timeline.time[row]) },
      { title: "step", number: true, cell: (row) => formatCount(timeline.step[row]) },
      { title: "phase", as: "when", cell: (row) => words(timeline.phaseOf(row)) },
      { title: "bytes", number: true, value: (row) => view.totals[row], cell: (row) => bytes(view.totals[row]) },
      { title: "mostly", as: "category", cell: (row) => largestFirst(sizesAt(view, row))[0]?.[0] ?? "" },
    ];
    const label = "Instants of the part in view, at most 100, the highest of each stretch";
    content.replaceChildren(table(label, columns, rows));
  };
  details.addEventListener("toggle", update);
  return { details, update };
}
