// SPDX-License-Identifier: Apache-2.0
// The page: one run and one device at a time.

// Each makes a card of {profile, run, device, deviceName, chart}, or null where there is nothing to show.
const CARDS = [
  verdictCard,
  (context) => ranksCard(context, choices.chooseRun),
  failuresCard,
  warningsCard,
  ({ chart }) => chart?.card ?? null,
  breakdown,
  findingsCard,
  modulesCard,
  linesCard,
  groupsCard,
  taxCard,
  phasesCard,
  stepsCard,
  blocksCard,
  snapshotsCard,
];

const page = { run: null, deviceName: null, chart: null };
const choices = {
  theme: themeSwitch(() => page.chart?.draw()),
  chooseRun: (index) => choose({ run: index || null }, RUN),
  chooseDevice: (device) => choose({ device }, "Device"),
};

function choose(change, focus) {
  const anew = { unit: null, from: null, to: null, module: null, find: null, line: null, find_line: null };
  writeAddress({ ...anew, part: null, card: null, ...change });
  show(focus);
}

/** Shows what the address says; `focus` names the choice that had the keyboard's focus. */
function show(focus = null) {
  const address = readAddress();
  page.run = REPORT.runs[address.run] ?? REPORT.runs[0];
  const { run } = page;
  const { profile } = run;
  page.deviceName = Object.hasOwn(profile.devices, address.device) ? address.device : highestDevice(profile);
  const { deviceName } = page;
  const device = deviceName === null ? null : profile.devices[deviceName];
  page.chart = device && timelineCard({ profile, device });
  const context = { profile, run, device, deviceName, chart: page.chart };
  const made = (device ? CARDS : [warningsCard, findingsCard]).map((make) => make(context));
  const cards = made.filter((section) => section !== null);
  const body = device ? [peakFigures(context), contents(cards), ...cards] : [nothing(), ...cards];
  document.body.replaceChildren(header(context, choices), element("main", {}, body), footer());
  document.title = `${run.name} · opacus-memprof`;
  page.chart?.draw();
  if (address.card) document.getElementById(address.card)?.scrollIntoView();
  if (focus) document.querySelector(`label.choice[data-choice="${focus}"] select`)?.focus();
}

/** The device with the highest peak; null where none was used. */
function highestDevice({ devices }) {
  const names = Object.keys(devices);
  const peak = (name) => devices[name].peak.requested_bytes;
  return names.reduce((best, name) => (best === null || peak(name) > peak(best) ? name : best), null);
}

function nothing() {
  return element("p", { class: "card lead" }, "No memory was allocated on a device that was profiled.");
}

printLight(() => page.chart?.draw());
addEventListener("hashchange", () => show());
show();
