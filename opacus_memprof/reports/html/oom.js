// SPDX-License-Identifier: Apache-2.0
// The page of an allocation that failed, from oom_report.json.

const FAILURE = REPORT.failure;

const ROOM = [
  ["limit_bytes", "allowed to this process"],
  ["may_reserve_bytes", "could be reserved"],
  ["reserved_bytes", "reserved"],
  ["allocated_bytes", "in use, rounding included"],
  ["cached_bytes", "free in fragments"],
  ["largest_free_bytes", "largest free block"],
  ["unreserved_bytes", "could still be reserved"],
  ["free_segments_bytes", "empty_cache would give back"],
  ["others_bytes", "used by others on the device"],
  ["device_bytes", "the device's memory"],
  ["capacity_bytes", "requested bytes that fit, with a margin"],
];

function changeCard() {
  const change = card("change", "What to change", suggestionList(FAILURE.suggestions));
  change.classList.add("alarm");
  return change;
}

function heldCard() {
  const { categories, modules, steps } = FAILURE.holders;
  const ofModules = Object.entries(modules).map(([name, sizes]) => {
    return { name: moduleName(name), sizes, size: sum(sizes) };
  });
  const ofSteps = steps.map(({ step, age, bytes: size }) => ({ name: translated(`step ${step} (${ago(age)})`), size }));
  return card("held", "Held when it failed", [
    sizesTable("Held by category", "category", byCategory(categories), labelled),
    sizesTable("Held by module", "module", ofModules),
    sizesTable("Held by age", "made in", ofSteps),
  ]);
}

function ago(age) {
  return age ? `${age} ago` : "this one";
}

function byCategory(sizes) {
  return largestFirst(sizes).map(([name, size]) => ({ name, sizes: { [name]: size }, size }));
}

/** `rows`: {name, size} with a bar, of its categories where there are `sizes` {category: bytes}. */
function sizesTable(label, title, rows, cell = (name) => name) {
  if (!rows.length) return element("p", { class: "muted" }, "nothing");
  const sorted = [...rows].sort((a, b) => b.size - a.size);
  const bar = ({ sizes, size }) => (sizes ? stackedBar(sizes, sorted[0].size) : plainBar(size, size, sorted[0].size));
  const columns = [
    { title, as: title === "category" ? "category" : "name", value: (row) => row.name, cell: (row) => cell(row.name) },
    { title: "bytes", number: true, value: (row) => row.size, cell: (row) => bytes(row.size) },
    { title: "", as: "wide", cell: bar },
  ];
  return table(label, columns, sorted, { first: 20 });
}

function neededCard() {
  const { bytes: size, parts } = FAILURE.needed;
  const content = sizesTable("Needed by category", "category", byCategory(parts), labelled);
  return card("needed", `What the whole step needs: ${formatBytes(size)}`, content);
}

function roomCard() {
  const { room, batch } = FAILURE;
  const known = ROOM.filter(([key]) => room[key] !== null && room[key] !== undefined);
  const rows = known.map(([key, name]) => ({ name: translated(name), size: bytes(room[key]) }));
  if (batch.samples) {
    rows.push({ name: translated("a sample, at the peak"), size: bytes(batch.bytes_per_sample) });
    rows.push({ name: translated("samples that fit at a time"), size: `${batch.largest_that_fits ?? 0} of ${batch.samples}` });
  }
  const columns = [
    { title: "", as: "name", cell: (row) => row.name },
    { title: "bytes", number: true, cell: (row) => row.size },
  ];
  return card("room", "What would have fitted", table("What would have fitted", columns, rows));
}

function layersCard() {
  const { layers } = FAILURE;
  const size = (title, key) => ({ title, number: true, value: (row) => row[key], cell: (row) => bytes(row[key]) });
  const columns = [
    { title: "layer", as: "name", value: (row) => row.module, cell: layerName },
    size("activations", "activations_bytes"),
    size("hooks: gradients", "per_sample_gradients_bytes"),
    size("ghost: norms", "ghost_bytes"),
    size("flash_clip keeps", "flash_clip_bytes"),
  ];
  const content = layers.length ? table("Layers", columns, layers) : element("p", { class: "muted" }, "not known");
  return card("layers", "What layers take, by mode", content);
}

function layerName({ module, kind, samples, tokens }) {
  const shape = element("span", { class: "muted" }, `${kind}, ${plural(samples, "sample")} of ${tokens}`);
  return [module || "(the model)", " ", shape];
}

const cards = [changeCard(), heldCard(), neededCard(), roomCard(), layersCard()];
const title = element("div", { class: "title" }, element("h1", {}, "Out of memory"));
const sentence = element("p", { class: "error" }, REPORT.headline);
const mark = virtualMark(REPORT.virtual_mark);
const head = element("header", { class: "page" }, brand(themeSwitch(() => {})), title, mark, sentence);
document.body.replaceChildren(head, element("main", {}, cards), footer());
printLight(() => {});
