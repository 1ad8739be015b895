// SPDX-License-Identifier: Apache-2.0
// The peak by what else is known of its blocks: component, op, line, phase of birth, stream, thread.

const GROUPS = {
  components: ["Components", "component"],
  ops: ["Ops", "op that made the block"],
  lines: ["Lines", "line of the program that made the block"],
  born_in: ["Phases of birth", "phase in which the block was born"],
  streams: ["Streams", "stream"],
  threads: ["Threads", "thread"],
};

function groupsCard({ device }) {
  const { peak } = device;
  const known = Object.keys(GROUPS).filter((key) => Object.keys(peak[key] ?? {}).length);
  if (!known.length) return null;
  const content = element("div");
  const open = (key) => {
    writeAddress({ part: key === known[0] ? null : key });
    show(key);
  };
  const buttons = known.map((key) => element("button", { type: "button", onclick: () => open(key) }, GROUPS[key][0]));
  function show(key) {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(known[index] === key)));
    content.replaceChildren(groupTable(GROUPS[key][1], peak[key], peak.requested_bytes));
  }
  const { part } = readAddress();
  show(known.includes(part) ? part : known[0]);
  const toolbar = element("div", { class: "toolbar", role: "toolbar", "aria-label": "Group the peak by" }, [
    element("div", { class: "group" }, buttons),
  ]);
  return card("groups", "The peak in other parts", toolbar, content);
}

/** `groups`: {name: {category: bytes}}. */
function groupTable(title, groups, whole) {
  const rows = Object.entries(groups).map(([name, sizes]) => ({ name, sizes, total: sum(sizes) }));
  rows.sort((a, b) => b.total - a.total);
  const columns = [
    { title, as: "name", value: (row) => row.name, cell: (row) => row.name || translated("(none)") },
    { title: "bytes", number: true, value: (row) => row.total, cell: (row) => bytes(row.total) },
    { title: "share", number: true, cell: (row) => formatShare(row.total, whole) },
    { title: "by category", as: "wide", cell: (row) => stackedBar(row.sizes, rows[0].total) },
    { title: "mostly", as: "category", cell: (row) => largestFirst(row.sizes)[0]?.[0] ?? "" },
  ];
  return table(`The peak by ${title}`, columns, rows, { first: 15 });
}
