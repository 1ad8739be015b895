// SPDX-License-Identifier: Apache-2.0
// All ranks of a job: which has the highest peak, and of which category it has more than the others.

const HEAT = {
  bytes: ["Bytes at the peak", (size) => size, formatBytes],
  above: ["Above the mean", (size, mean) => size - mean, formatSigned],
};

function ranksCard({ run }, chooseRun) {
  const { job } = REPORT;
  if (!job) return null;
  const content = element("div");
  const keys = Object.keys(HEAT);
  const buttons = keys.map((key) => element("button", { type: "button", onclick: () => show(key) }, HEAT[key][0]));
  function show(key) {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(keys[index] === key)));
    content.replaceChildren(heatMap(job, key, run, chooseRun));
  }
  show("bytes");
  const toolbar = element("div", { class: "toolbar", role: "toolbar", "aria-label": "Cells show" }, [
    element("div", { class: "group" }, buttons),
  ]);
  const items = job.warnings.map((warning) => element("li", {}, warning));
  const warnings = items.length ? element("ul", { class: "hint" }, items) : null;
  return card("ranks", "Ranks", imbalance(job), toolbar, content, warnings);
}

function imbalance({ ranks, imbalance, world_size }) {
  const { ratio, rank, cause, cause_bytes, max_bytes, mean_bytes } = imbalance;
  const all = ranks.length < world_size ? ` of ${world_size}` : "";
  const lead = `${plural(ranks.length, "rank")}${all}; the highest peak is ${ratio.toFixed(3)} times the mean.`;
  if (cause_bytes <= 0) return element("p", { class: "lead" }, lead);
  const more = [` Rank ${rank} has `, bytes(max_bytes - mean_bytes), " more than the mean, and of ", cause, " "];
  return element("p", { class: "lead" }, lead, more, bytes(cause_bytes), " more.");
}

/** A row for each rank and a column for each category, the largest first. */
function heatMap({ ranks, imbalance }, key, run, chooseRun) {
  const means = Object.entries(imbalance.categories).sort((a, b) => b[1].mean_bytes - a[1].mean_bytes);
  const [title, value, format] = HEAT[key];
  const of = (row, [category, { mean_bytes: mean }]) => value(row.categories[category] ?? 0, mean);
  const strongest = Math.max(1, ...ranks.flatMap((row) => means.map((column) => Math.abs(of(row, column)))));
  const hosts = new Set(ranks.map((row) => row.host));
  const columns = [
    { title: "rank", number: true, value: (row) => row.rank, cell: (row) => rankName(row, run, chooseRun) },
    hosts.size > 1 ? { title: "host", as: "category", value: (row) => row.host, cell: (row) => row.host } : null,
    { title: "peak", number: true, value: (row) => row.peak_bytes, cell: (row) => bytes(row.peak_bytes) },
    { title: "steps", number: true, value: (row) => row.steps, cell: (row) => formatCount(row.steps) },
    { title: "", value: (row) => row.status, cell: (row) => rankStatus(row) },
    ...means.map((column) => ({
      title: words(column[0]),
      number: true,
      value: (row) => of(row, column),
      cell: (row) => heatCell(of(row, column), strongest, format),
    })),
  ];
  return table(`Ranks and categories: ${title.toLowerCase()}`, columns.filter(Boolean), ranks, { first: 32 });
}

function heatCell(size, strongest, format) {
  if (size === 0) return "";
  const share = Math.round(100 * Math.sqrt(Math.abs(size) / strongest));
  const color = size < 0 ? "var(--link)" : "var(--accent)";
  const background = `color-mix(in srgb, ${color} ${Math.round(0.6 * share)}%, transparent)`;
  return element("div", { class: "heat", style: { background } }, bytes(size, format));
}

/** Leads to the rank's own page, where this file has it. */
function rankName(row, run, chooseRun) {
  const index = REPORT.runs.findIndex(({ name }) => name === `rank ${row.rank}`);
  if (index < 0) return String(row.rank);
  const attributes = { type: "button", class: "link", "aria-current": REPORT.runs[index] === run };
  return element("button", { ...attributes, onclick: () => chooseRun(index) }, String(row.rank));
}

function rankStatus({ status }) {
  return status === "finished" ? "" : element("span", { class: STATUS_CLASS[status] ?? "bad" }, words(status));
}
