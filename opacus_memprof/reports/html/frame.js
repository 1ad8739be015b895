// SPDX-License-Identifier: Apache-2.0
// What stands around the cards of a page.

function brand(theme) {
  return element("div", { class: "brand" }, element("span", {}, "opacus-memprof"), theme);
}

/** On which virtual GPU the run was; nothing of a real one. */
function virtualMark(sentence) {
  return sentence ? element("p", { class: "virtual" }, sentence) : null;
}

function footer() {
  const units = "All sizes are requested bytes in binary units (1 MiB = 1,048,576 bytes)";
  const exact = "hover over one for its exact number";
  return element("footer", {}, `${units}; ${exact}. Made by opacus-memprof ${REPORT.version}, works offline.`);
}
