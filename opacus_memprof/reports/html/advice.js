// SPDX-License-Identifier: Apache-2.0
// After an allocation failed: what to change so that the training fits.

const FITS = new Map([[true, ["good", "fits"]], [false, ["bad", "not enough alone"]]]);

/** Parts of the card of failures; empty where the run has left no advice for the device. */
function advice({ run, deviceName }) {
  if (run.advice?.device !== deviceName) return [];
  const needed = element("p", {}, "The whole step needs ", bytes(run.advice.needed_bytes), ".");
  const items = run.advice.suggestions.map((one) => {
    const [style, verdict] = FITS.get(one.fits) ?? [null, null];
    return element(
      "li",
      { class: "suggestion" },
      element("h4", {}, one.title, verdict && element("span", { class: `chip ${style}` }, verdict)),
      element("p", {}, "peak ", bytes(one.predicted_peak_bytes), ", ", bytes(one.saved_bytes), " less"),
      element("pre", {}, one.code),
      element("p", { class: "muted" }, one.computed),
    );
  });
  const none = element("p", {}, "Nothing is known that would make it fit.");
  return [element("h3", {}, "What to change"), needed, items.length ? element("ol", {}, items) : none];
}
