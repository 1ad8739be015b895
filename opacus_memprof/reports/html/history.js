// SPDX-License-Identifier: Apache-2.0
// Phases, steps, snapshots, the blocks of the peak, and allocations that failed.

function phasesCard({ device }) {
  const rows = Object.entries(device.phases).map(([name, moment]) => ({ name, ...moment }));
  if (!rows.length) return null;
  const columns = [
    { title: "phase", as: "when", cell: (row) => [phaseSwatch(row.name), words(row.name)] },
    { title: "highest", number: true, value: (row) => row.peak_bytes, cell: (row) => bytes(row.peak_bytes) },
    { title: "in step", number: true, value: (row) => row.step, cell: (row) => formatCount(row.step) },
    { title: "by category", as: "wide", cell: (row) => stackedBar(row.categories, device.peak.requested_bytes) },
    { title: "mostly", as: "category", cell: (row) => largestFirst(row.categories)[0]?.[0] ?? "" },
  ];
  const hint = element("p", { class: "hint" }, device.explanation);
  return card("phases", "Phases", table("The highest instant of each phase", columns, rows), hint);
}

function phaseSwatch(phase) {
  return element("span", { class: "swatch", style: { background: `var(--phase-${phase})` }, "aria-hidden": "true" });
}

function stepsCard({ device, chart }) {
  const { steps } = device;
  if (!steps.length) return null;
  const show = (row) =>
    element(
      "button",
      {
        type: "button",
        class: "link",
        "aria-label": `Show step ${row.step} in the timeline`,
        onclick: () => chart.showStep(row.step),
      },
      translated("show"),
    );
  const columns = [
    { title: "step", number: true, value: (row) => row.step, cell: (row) => formatCount(row.step) },
    { title: "logical step", number: true, value: (row) => row.logical_step, cell: (row) => formatCount(row.logical_step) },
    { title: "peak", number: true, value: (row) => row.peak_bytes, cell: (row) => bytes(row.peak_bytes) },
    { title: "in phase", as: "when", cell: (row) => words(row.phase) },
    { title: "left at its end", number: true, value: (row) => row.end_bytes, cell: (row) => bytes(row.end_bytes) },
    { title: "", as: "wide", cell: (row) => plainBar(row.peak_bytes, row.end_bytes, device.peak.requested_bytes) },
    { title: "", cell: (row) => [row.complete ? null : notEnded(), chart && show(row)] },
  ];
  const left = `${plural(device.steps_left_out, "step")} between these had lower peaks and are left out.`;
  const hint = device.steps_left_out ? element("p", { class: "hint" }, left) : null;
  return card("steps", "Steps", table("Steps", columns, steps, { first: 12 }), hint);
}

function notEnded() {
  return element("span", { class: "muted" }, "not ended ");
}

function byteColumn(title, key) {
  return { title, number: true, value: (row) => row[key] ?? -1, cell: (row) => bytes(row[key]) };
}

function snapshotsCard({ device }) {
  const { snapshots } = device;
  if (!snapshots.length) return null;
  const columns = [
    { title: "snapshot", as: "name", cell: (row) => row.name },
    { title: "step", number: true, value: (row) => row.step, cell: (row) => formatCount(row.step) },
    byteColumn("Σ categories", "requested_bytes"),
    byteColumn("+ rounding", "rounding"),
    byteColumn("= allocated", "allocated_bytes"),
    byteColumn("+ cached", "cached"),
    byteColumn("= reserved", "reserved_bytes"),
    byteColumn("+ outside PyTorch", "outside_pytorch"),
    { title: "remainder", number: true, cell: (row) => remainder(row.remainder) },
  ].filter(({ title }) => title !== "+ outside PyTorch" || snapshots.some((row) => row.outside_pytorch !== null));
  const left = device.snapshots_left_out
    ? element("p", { class: "hint" }, `${plural(device.snapshots_left_out, "snapshot")} more are in profile.json.`)
    : null;
  return card("snapshots", "Snapshots", table("Snapshots", columns, snapshots, { first: 12 }), left);
}

function remainder(size) {
  if (size === null || size === undefined) return element("span", { class: "muted" }, "not counted");
  return size ? element("span", { class: "bad" }, bytes(size)) : element("span", { class: "good" }, "✓ 0");
}

function blocksCard({ device }) {
  const { largest_blocks: largest, newest_blocks: newest } = device.peak;
  if (!largest.length) return null;
  const columns = [
    { title: "bytes", number: true, value: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
    { title: "category", as: "category", value: (row) => row.category, cell: (row) => labelled(row.category) },
    { title: "module", as: "name", value: (row) => row.module, cell: (row) => moduleName(row.module) },
    { title: "op", as: "name", value: (row) => row.op, cell: (row) => row.op },
    { title: "born in", as: "when", value: (row) => row.phase, cell: (row) => words(row.phase) },
    { title: "step", number: true, value: (row) => row.step, cell: (row) => formatCount(row.step) },
  ];
  return card("blocks", "Largest blocks at the peak", [
    table("Largest live blocks at the peak", columns, largest, { first: 15 }),
    newest.length ? element("h3", {}, "The last to come, which made the peak") : null,
    newest.length ? table("Newest live blocks at the peak, the newest first", columns, newest, { first: 5 }) : null,
  ]);
}

function failuresCard(context) {
  const { device } = context;
  const { out_of_memory: failures } = device;
  if (!failures.length) return null;
  const columns = [
    byteColumn("asked for", "requested_bytes"),
    { title: "of category", as: "category", cell: (row) => labelled(row.category) },
    { title: "for module", as: "name", cell: (row) => moduleName(row.module) },
    { title: "by op", as: "name", cell: (row) => row.op },
    { title: "in", as: "when", cell: (row) => `${words(row.phase)}, step ${row.step}` },
    byteColumn("live then", "live_bytes"),
    { title: "by category", as: "narrow", cell: (row) => stackedBar(row.categories, row.live_bytes) },
  ];
  const count = failures.length + device.out_of_memory_left_out;
  const last = count > failures.length ? `, of which the last ${failures.length} are here` : "";
  const lead = element("p", { class: "lead" }, `${plural(count, "allocation")} failed${last}.`);
  const failed = card("failures", "Out of memory", [
    lead,
    table("Allocations that failed", columns, failures, { first: 8 }),
    advice(context),
  ]);
  failed.classList.add("alarm");
  return failed;
}

/** Parts of the card of failures; empty where the run has left no advice for the device. */
function advice({ run, deviceName }) {
  if (run.advice?.device !== deviceName) return [];
  const needed = element("p", {}, "The whole step needs ", bytes(run.advice.needed_bytes), ".");
  return [element("h3", {}, "What to change"), needed, suggestionList(run.advice.suggestions)];
}
