// SPDX-License-Identifier: Apache-2.0
// The words of the report, for those who see one for the first time.

function meanings(categories) {
  const known = categories.filter((name) => Object.hasOwn(REPORT.meanings, name));
  const items = known.map((name) => element("div", {}, element("dt", {}, name), element("dd", {}, REPORT.meanings[name])));
  const list = element("dl", { class: "meanings" }, items);
  return element("details", {}, element("summary", {}, "What the categories are"), list);
}
