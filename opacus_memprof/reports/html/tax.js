// SPDX-License-Identifier: Apache-2.0
// What privacy costs: this peak less the one of the same training without it.

function taxCard({ run, deviceName }) {
  const tax = run.tax?.devices[deviceName];
  if (!tax) return null;
  const cost = element("strong", {}, bytes(tax.total, formatSigned));
  const ratio = tax.vanilla_bytes ? `, ${(tax.private_bytes / tax.vanilla_bytes).toFixed(2)} times as much` : "";
  const sentence = element(
    "p",
    { class: "lead" },
    ["Privacy takes ", cost, " at the peak: ", bytes(tax.private_bytes), " with it, "],
    [bytes(tax.vanilla_bytes), ` without${ratio}.`],
  );
  const held = element("p", {}, bytes(tax.opacus_only), " of captured activations are held by Opacus alone.");
  const modules = Object.entries(tax.modules).map(([name, sizes]) => [moduleName(name), sum(sizes)]);
  return card("tax", "What privacy costs", [
    sentence,
    tax.opacus_only ? held : null,
    differences("category", largestFirst(tax.categories), labelled),
    differences("module", modules.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])), (name) => name),
  ]);
}

/** Signed bytes: more to the right, less to the left. */
function differences(title, pairs, cell) {
  if (!pairs.length) return null;
  const largest = Math.max(...pairs.map(([, size]) => Math.abs(size)), 1);
  const columns = [
    { title, as: title === "category" ? "category" : "name", value: ([name]) => name, cell: ([name]) => cell(name) },
    { title: "difference", number: true, value: ([, size]) => size, cell: ([, size]) => bytes(size, formatSigned) },
    { title: "less · more", as: "wide", cell: ([, size]) => signedBar(size / largest) },
  ];
  return table(`Difference by ${title}`, columns, pairs, { first: 12 });
}

function signedBar(share) {
  const width = `${50 * Math.abs(share)}%`;
  const left = share < 0 ? `${50 * (1 + share)}%` : "50%";
  const bar = element("span", { class: share < 0 ? "less" : "more", style: { width, left } });
  return element("div", { class: "signed", "aria-hidden": "true" }, bar);
}
