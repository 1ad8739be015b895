// SPDX-License-Identifier: Apache-2.0
// The head of the page: which run this is, and the choice of run, device and theme.

const RUN = REPORT.job ? "Rank" : "Run";
const STATUS_CLASS = { finished: "good", running: "busy" };

function header({ profile, run, deviceName }, choices) {
  const status = words(profile.status);
  const code = profile.exit_code === null ? "" : `, exit code ${profile.exit_code}`;
  const chip = element("span", { class: `chip ${STATUS_CLASS[profile.status] ?? "bad"}` }, `${status}${code}`);
  const title = element("h1", {}, run.name);
  return element(
    "header",
    { class: "page" },
    brand(choices.theme),
    element("div", { class: "title" }, title, chip, runChoice(run, choices), deviceChoice(run, deviceName, choices)),
    virtualMark(profile.virtual_mark),
    profile.error ? element("p", { class: "error" }, profile.error) : null,
    ...run.privacy_check.map((sentence) => element("p", {}, `Privacy check: ${sentence}`)),
    facts(profile),
  );
}

function facts(profile) {
  const versions = ["torch", "opacus", "cuda", "python"].filter((name) => profile.versions[name]);
  const { recorded, dropped } = profile.events;
  const entries = [
    ...versions.map((name) => [name, profile.versions[name]]),
    ["started", new Date(profile.started_unix_ns / 1e6).toLocaleString()],
    ["recorded for", formatDuration(profile.duration_ns)],
    ["events", dropped ? `${formatCount(recorded)}, ${formatCount(dropped)} dropped` : formatCount(recorded)],
    ["process", String(profile.pid)],
    ...(profile.launch ? [["rank", `${profile.launch.rank} of ${profile.launch.world_size}`]] : []),
  ];
  const items = entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return element("dl", { class: "facts" }, items);
}

function runChoice(run, { chooseRun }) {
  if (REPORT.runs.length < 2) return null;
  return choice(RUN, REPORT.runs.map(({ name }) => name), REPORT.runs.indexOf(run), chooseRun);
}

function deviceChoice(run, deviceName, { chooseDevice }) {
  const names = Object.keys(run.profile.devices);
  if (!names.length) return null;
  if (names.length === 1) return element("span", { class: "choice" }, "Device ", element("strong", {}, deviceName));
  return choice("Device", names, names.indexOf(deviceName), (index) => chooseDevice(names[index]));
}

function choice(label, names, selected, onChoose) {
  const options = names.map((name, index) => element("option", { value: index, selected: index === selected }, name));
  const select = element("select", { onchange: () => onChoose(select.selectedIndex) }, options);
  return element("label", { class: "choice", "data-choice": label }, `${label} `, select);
}

/** Links to the cards of the page. In a notebook's frame, where `#id` would be the notebook's, they work as well. */
function contents(cards) {
  const links = cards.map((section) => {
    const heading = section.querySelector("h2");
    const go = (event) => {
      event.preventDefault();
      writeAddress({ card: section.id });
      section.scrollIntoView();
      heading.tabIndex = -1;
      heading.focus({ preventScroll: true });
    };
    return element("a", { href: `#${section.id}`, onclick: go }, heading.textContent);
  });
  return element("nav", { class: "contents", "aria-label": "Contents" }, links);
}
