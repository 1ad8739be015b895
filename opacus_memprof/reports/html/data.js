// SPDX-License-Identifier: Apache-2.0
// What shell.py has embedded.

const REPORT = JSON.parse(document.getElementById("report-data").textContent);

/** Labels with {names} and their translations, the longest first; none in English. */
const PATTERNS = Object.entries(REPORT.labels)
  .filter(([label]) => label.includes("{"))
  .sort(([a], [b]) => b.length - a.length)
  .map(([label, said]) => [new RegExp(`^${escaped(label).replace(/\{(\w+)\}/g, "(?<$1>.+?)")}$`), said]);

function escaped(label) {
  return label.replace(/[.*+?^$()|[\]\\]/g, "\\$&");
}

/** A label in the language of the page's reader, with the parts of it that are labels, too. */
function translated(text) {
  if (Object.hasOwn(REPORT.labels, text)) return REPORT.labels[text];
  for (const [pattern, said] of PATTERNS) {
    const found = text.match(pattern);
    if (found) return said.replace(/\{(\w+)\}/g, (_, name) => translated(found.groups[name]));
  }
  return text;
}

/** Category → colour, in the order of a stack from its bottom. */
const COLORS = new Map(REPORT.colors);

/** Columns of a device's timeline. They are embedded as differences from row to row. */
function readTimeline(encoded) {
  const phase = accumulated(encoded.phase);
  const sizes = new Map(encoded.categories.map(([name, differences]) => [name, accumulated(differences)]));
  return {
    length: phase.length,
    event: accumulated(encoded.event),
    time: accumulated(encoded.time_ns),
    step: accumulated(encoded.step),
    logicalStep: accumulated(encoded.logical_step),
    phaseOf: (row) => encoded.phases[phase[row]],
    phaseRuns: {
      event: accumulated(encoded.phase_runs.event),
      time: accumulated(encoded.phase_runs.time_ns),
      phase: encoded.phase_runs.phase.map((index) => encoded.phases[index]),
    },
    endOfFirstProof: endOfFirstProof(phase.map((index) => encoded.phases[index]), accumulated(encoded.step)),
    categories: [...COLORS.keys()].filter((name) => sizes.has(name)).map((name) => ({ name, sizes: sizes.get(name) })),
  };
}

/** The row behind flash_clip's proof in the first step that has one; 0 without one, or if nothing follows it. */
function endOfFirstProof(phases, steps) {
  const step = steps[phases.indexOf("proof")];
  const last = phases.findLastIndex((phase, row) => phase === "proof" && steps[row] === step);
  return last + 1 < phases.length ? last + 1 : 0;
}

/** How many events are missing before the event with this number. */
function missingBefore(gaps, event) {
  return gaps.reduce((sum, gap) => (gap.first_event + gap.events <= event ? sum + gap.events : sum), 0);
}

/** The number of the event before which a profile has so many. */
function eventAt(gaps, place) {
  return gaps.reduce((event, gap) => (event >= gap.first_event ? event + gap.events : event), place);
}

function accumulated(differences) {
  const values = new Float64Array(differences.length);
  let value = 0;
  for (let row = 0; row < values.length; row += 1) {
    value += differences[row];
    values[row] = value;
  }
  return values;
}

function swatch(category) {
  return element("span", { class: "swatch", style: { background: COLORS.get(category) }, "aria-hidden": "true" });
}

/** A category's name beside its colour. */
function labelled(category) {
  return [swatch(category), category];
}

function moduleName(name) {
  return name || translated("(no module)");
}
