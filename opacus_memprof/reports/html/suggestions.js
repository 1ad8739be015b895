// SPDX-License-Identifier: Apache-2.0
// After an allocation failed: what to change so that the training fits.

const FITS = new Map([[true, ["good", "fits"]], [false, ["bad", "not enough alone"]]]);

/** `suggestions` as oom_report.json has them. */
function suggestionList(suggestions) {
  if (!suggestions.length) return element("p", {}, "No known change would make it fit.");
  const items = suggestions.map((one) => {
    const [style, verdict] = one.is_tight ? ["bad", "fits tightly"] : (FITS.get(one.fits) ?? [null, null]);
    return element(
      "li",
      { class: "suggestion" },
      element("h4", {}, one.title, verdict && element("span", { class: `chip ${style}` }, verdict)),
      element("p", {}, "peak ", bytes(one.predicted_peak_bytes), ", ", bytes(one.saved_bytes), " less"),
      copyable(one.code),
      element("p", { class: "muted" }, one.computed),
    );
  });
  return element("ol", {}, items);
}
