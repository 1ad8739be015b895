// SPDX-License-Identifier: Apache-2.0
// The page of a plan: what each candidate takes, against what may be reserved.

const { candidates: CANDIDATES, cells: CELLS, search: SEARCH } = REPORT;

function candidatesCard() {
  const whole = Math.max(...CANDIDATES.flatMap((one) => [one.room ?? 0, one.reserved_bytes ?? 0, one.requested_bytes ?? 0]), 1);
  const columns = [
    { title: "candidate", as: "name", cell: (row) => row.label },
    SEARCH ? { title: SEARCH.argument, number: true, value: (row) => row.value, cell: (row) => formatCount(row.value) } : null,
    { title: "", cell: (row) => element("span", { class: row.fits ? "good" : "bad" }, row.fits ? "fits" : "does not fit") },
    size("peak", "requested_bytes"),
    size("reserved", "reserved_bytes"),
    size("may be reserved", "room"),
    { title: "", as: "wide", cell: (row) => candidateBar(row, whole) },
  ];
  const shown = [...COLORS.keys()].filter((name) => CANDIDATES.some(({ categories }) => categories[name] > 0));
  const legend = element("p", { class: "caption plan-legend" }, shown.map((name) => element("span", {}, labelled(words(name)), " ")));
  legend.querySelectorAll(".swatch").forEach((node, index) => node.style.setProperty("background", COLORS.get(shown[index])));
  const hint = element("p", { class: "hint" }, "A bar is the peak of requested bytes by category, the thin mark what was reserved, the line what may be.");
  return card("candidates", "Candidates", table("Candidates", columns.filter(Boolean), CANDIDATES), legend, hint);
}

function size(title, key) {
  const cell = (row) => (row[key] === null ? "" : bytes(row[key]));
  return { title, number: true, value: (row) => row[key] ?? 0, cell };
}

/** The peak by category, with marks at what was reserved and what may be. */
function candidateBar({ categories, reserved_bytes: reserved, room }, whole) {
  const mark = (kind, at) => (at === null ? null : element("span", { class: kind, style: { left: `${(100 * at) / whole}%` } }));
  return element("div", { class: "candidate" }, stackedBar(categories, whole), mark("reserved", reserved), mark("capacity", room));
}

/** A row for each mode (and settings, and other arguments), a column for each GPU. */
function largestCard() {
  if (!SEARCH) return null;
  const kinds = [...new Set(CELLS.map(({ gpu }) => gpu))];
  const name = ({ fixed, mode, settings }) => {
    const others = Object.entries(fixed).map(([argument, value]) => `${argument}=${value}`);
    return [...others, mode, settings].filter(Boolean).join(", ") || translated("as it is");
  };
  const rows = [...new Set(CELLS.map(name))].map((label) => {
    return { label, of: new Map(CELLS.filter((cell) => name(cell) === label).map((cell) => [cell.gpu, cell])) };
  });
  const most = Math.max(1, ...CELLS.map(({ largest }) => largest ?? 0));
  const columns = [
    { title: "", as: "name", value: (row) => row.label, cell: (row) => row.label },
    ...kinds.map((gpu) => ({
      title: gpu,
      number: true,
      value: (row) => row.of.get(gpu)?.largest ?? -1,
      cell: (row) => largestCell(row.of.get(gpu), most),
    })),
  ];
  return card("largest", `The largest ${SEARCH.argument} that fits`, table(`Largest ${SEARCH.argument}`, columns, rows), errors());
}

function largestCell(cell, most) {
  if (!cell) return "";
  if (cell.largest === null) return element("span", { class: "bad", title: cell.error }, "none");
  const background = `color-mix(in srgb, var(--link) ${Math.round((45 * cell.largest) / most)}%, transparent)`;
  return element("div", { class: "heat", style: { background } }, formatCount(cell.largest));
}

function errors() {
  const items = CELLS.filter(({ error }) => error).map(({ label, error }) => element("li", {}, `${label}: ${error}`));
  return items.length ? element("ul", { class: "hint" }, items) : null;
}

function adviceCard() {
  if (!REPORT.advice.length) return null;
  const items = REPORT.advice.map(({ title, code, predicted_peak_bytes: predicted, tried, failure }) => {
    const [style, verdict] = !tried ? ["busy", "not tried"] : tried.fits ? ["good", "fits"] : ["bad", "does not fit"];
    const outcome = tried
      ? ["peak ", bytes(tried.requested_bytes), ", reserved ", bytes(tried.reserved_bytes)]
      : ["predicted peak ", bytes(predicted), failure ? `; ${failure}` : ""];
    const named = element("h4", {}, title, element("span", { class: `chip ${style}` }, verdict));
    return element("li", { class: "suggestion" }, named, element("p", {}, outcome), copyable(code));
  });
  return card("advice", "What would make it fit", element("ol", {}, items));
}

const cards = [candidatesCard(), largestCard(), adviceCard(), drawsCard(REPORT.draws)].filter(Boolean);
const title = element("div", { class: "title" }, element("h1", {}, REPORT.title));
const lead = element("p", { class: "lead" }, REPORT.lead);
const head = element("header", { class: "page" }, brand(themeSwitch(() => {})), title, virtualMark(REPORT.virtual_mark), lead);
document.body.replaceChildren(head, element("main", {}, cards), footer());
printLight(() => {});
