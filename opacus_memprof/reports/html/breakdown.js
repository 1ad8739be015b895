// SPDX-License-Identifier: Apache-2.0
// The peak: its figures, its categories, and how they add up to what the allocator counts.

const HOOKS_PARTS = { opacus_only: "only Opacus holds them", shared_with_autograd: "autograd holds them as well" };

function peakFigures({ device }) {
  const { peak } = device;
  const figures = [
    ["peak", bytes(peak.requested_bytes), `${formatCount(peak.requested_bytes)} bytes requested`],
    ["when", words(peak.phase), `step ${peak.step}${ofLogical(peak)}`],
    ["live at the end", bytes(device.end_bytes), `${formatCount(device.end_bytes)} bytes requested`],
  ];
  if (peak.allocated_bytes !== null) {
    figures.push(["allocated", bytes(peak.allocated_bytes), "handed out then, with rounding"]);
  }
  if (peak.reserved_bytes !== null) {
    figures.push(["reserved", bytes(peak.reserved_bytes), "taken from the device then"]);
  }
  if (device.reserved_peak) {
    const { bytes: most, phase, step } = device.reserved_peak;
    figures.push(["largest reserved", bytes(most), `in ${words(phase)} of step ${step}, of the whole run`]);
  }
  const items = figures.map(([name, value, note]) =>
    element("div", { "data-figure": name }, element("dt", {}, name), element("dd", {}, value), element("p", {}, note)),
  );
  return element("dl", { class: "figures" }, items);
}

function ofLogical(peak) {
  return peak.logical_step === null || peak.logical_step === peak.step ? "" : ` (logical step ${peak.logical_step})`;
}

function breakdown({ device }) {
  const { peak } = device;
  const sizes = largestFirst(peak.categories);
  if (!sizes.length) return null;
  const rows = [];
  for (const [category, size] of sizes) {
    rows.push({ category, size });
    if (category !== "activation_hooks") continue;
    for (const [part, held] of largestFirst(peak.activation_hooks)) rows.push({ part, size: held });
  }
  const columns = [
    { title: "category", as: "category", cell: (row) => (row.part ? part(row) : labelled(row.category)) },
    { title: "bytes", number: true, cell: (row) => bytes(row.size) },
    { title: "share", number: true, cell: (row) => (row.part ? "" : formatShare(row.size, peak.requested_bytes)) },
    { title: "", as: "wide", cell: (row) => (row.part ? "" : stackedBar({ [row.category]: row.size }, sizes[0][1])) },
  ];
  const content = element(
    "div",
    { class: "columns" },
    table("Bytes by category at the peak", columns, rows),
    reconciliation(peak),
  );
  return card("breakdown", "The peak by category", content, meanings(sizes.map(([category]) => category)));
}

function part(row) {
  return element("span", { class: "part" }, HOOKS_PARTS[row.part] ?? words(row.part));
}

function reconciliation(peak) {
  const total = sum(peak.categories);
  const lines = [
    ["Σ categories", total, "sum"],
    ["remainder", peak.remainder_bytes, "remainder"],
    ["= requested", peak.requested_bytes, "requested"],
    ["+ rounding", peak.rounding, "rounding"],
    ["= allocated", peak.allocated_bytes, "allocated"],
    ["+ cached", peak.cached, "cached"],
    ["= reserved", peak.reserved_bytes, "reserved"],
  ].filter(([, size]) => size !== null && size !== undefined);
  const rows = lines.map(([name, size, key]) =>
    element(
      "tr",
      { class: name.startsWith("=") ? "result" : null, "data-line": key },
      element("th", { scope: "row" }, name),
      element("td", { class: "number" }, bytes(size)),
      element("td", { class: "number muted exact" }, formatCount(size)),
    ),
  );
  return element(
    "aside",
    { class: "sums", "aria-label": "How the bytes add up" },
    element("h3", {}, "It adds up"),
    element("table", {}, element("tbody", {}, rows)),
    verdict(peak, total),
  );
}

function verdict(peak, total) {
  const wrong = [];
  if (peak.remainder_bytes || total !== peak.requested_bytes) {
    wrong.push(`the categories miss ${formatCount(peak.requested_bytes - total)} bytes of the requested ones`);
  }
  if (peak.counted_bytes !== null && peak.counted_bytes !== peak.requested_bytes) {
    const difference = formatBytes(peak.counted_bytes - peak.requested_bytes);
    wrong.push(`the allocator counted ${difference} more as requested: freed, and still used by a side stream`);
  }
  if (wrong.length) return element("p", { class: "bad" }, wrong.join("; "));
  const counted = peak.counted_bytes === null ? "" : ", and is what the allocator counted";
  return element("p", { class: "good" }, `✓ exact: Σ categories = requested bytes${counted}`);
}
