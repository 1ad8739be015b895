// SPDX-License-Identifier: Apache-2.0
// What people see first: the verdict on a device, and what to change, as terminals print it.

const EFFECT_CLASS = { "too large": "bad", "fits tightly": "bad", fails: "bad" };

function verdictCard({ device: { verdict } }) {
  if (!verdict) return null;
  const style = verdict.outcome === "failed" ? "headline bad" : "headline";
  const lines = verdict.lines.map(([label, text]) => element("p", {}, label && element("strong", {}, `${label} `), text));
  const content = [element("p", { class: style }, element("strong", {}, verdict.headline), ` ${verdict.where}`), lines];
  if (verdict.fixes.length) content.push(element("h3", {}, verdict.heading), element("ol", {}, verdict.fixes.map(fixItem)));
  else if (verdict.outcome === "failed") content.push(element("p", {}, verdict.heading));
  return card("verdict", "The verdict", content);
}

function fixItem({ title, code, peak, effect, evidence, note }) {
  const chips = [
    effect && element("span", { class: `chip ${EFFECT_CLASS[effect] ?? "good"}` }, effect),
    element("span", { class: "chip" }, evidence),
  ];
  return element(
    "li",
    { class: "suggestion" },
    element("h4", {}, title, chips.filter(Boolean)),
    element("p", {}, `peak ${peak}`),
    note ? element("p", { class: "muted" }, note) : null,
    copyable(code),
  );
}

/** Code beside a button that copies it. */
function copyable(code) {
  const text = element("pre", {}, code);
  const button = element("button", { type: "button", class: "copy", onclick: () => copy(text, button) }, "Copy");
  return element("div", { class: "copyable" }, text, button);
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text.textContent);
  } catch {
    // In a frame, or from a file in some browsers, only the selection can be copied.
    getSelection().selectAllChildren(text);
    document.execCommand("copy");
  }
  button.textContent = translated("Copied");
}
