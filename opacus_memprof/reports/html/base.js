// SPDX-License-Identifier: Apache-2.0
// Elements and figures. All scripts are joined into one module, in the order that Python gives.

// Where a page's own words stand, which are translated. Names come from the profiled program and are not.
const OWN_TAGS = new Set(["h1", "h2", "h3", "h4", "p", "th", "dt", "button", "summary", "label", "footer"]);
const OWN_CLASSES = new Set(["own", "chip", "choice", "muted", "good", "bad", "busy", "part", "peak-label", "when"]);
const OWN_ATTRIBUTES = new Set(["aria-label", "placeholder"]);

/** An element. Children are elements or text: names come from the profiled program and are never read as HTML. */
function element(tag, attributes = {}, ...children) {
  const classes = (attributes.class ?? "").split(" ");
  const isOwn = OWN_TAGS.has(tag) ? !classes.includes("link") : classes.some((name) => OWN_CLASSES.has(name));
  const own = (child) => (isOwn && attributes.translate !== "no" && typeof child === "string" ? translated(child) : child);
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      node.addEventListener(name.slice(2), value);
    } else if (name === "style") {
      for (const [property, setting] of Object.entries(value)) node.style.setProperty(property, setting);
    } else {
      node.setAttribute(name, value === true ? "" : OWN_ATTRIBUTES.has(name) ? translated(value) : value);
    }
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(own));
  return node;
}

/** As the terminal's summary prints it: binary units, two decimals, ties to the even digit. */
function formatBytes(size) {
  if (Math.abs(size) < 1024) return `${size} B`;
  for (const [power, unit] of [[1, "KiB"], [2, "MiB"], [3, "GiB"], [4, "TiB"]]) {
    const hundredths = roundHalfEven((size * 100) / 1024 ** power);
    if (Math.abs(hundredths) < 102400 || power === 4) return `${(hundredths / 100).toFixed(2)} ${unit}`;
  }
}

function roundHalfEven(value) {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 !== 0) ? below + 1 : below;
}

function formatSigned(size) {
  return size > 0 ? `+${formatBytes(size)}` : formatBytes(size);
}

function formatCount(number) {
  return number.toLocaleString("en");
}

function formatShare(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "";
}

/** A duration in nanoseconds. */
function formatDuration(ns) {
  if (Math.abs(ns) < 1e3) return `${ns} ns`;
  if (Math.abs(ns) < 1e6) return `${trimmed(ns / 1e3)} µs`;
  if (Math.abs(ns) < 1e9) return `${trimmed(ns / 1e6)} ms`;
  if (Math.abs(ns) < 60e9) return `${trimmed(ns / 1e9)} s`;
  const seconds = Math.round(ns / 1e9);
  const hours = Math.floor(seconds / 3600);
  const minutes = Math.floor((seconds % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${seconds % 60} s`;
}

function trimmed(value) {
  return value.toFixed(3).replace(/\.?0+$/, "");
}

/** Bytes as people read them; the exact number is its title and `data-bytes`. */
function bytes(size, format = formatBytes) {
  if (size === null || size === undefined) return element("span", { class: "muted" }, "not counted");
  return element("span", { class: "bytes", "data-bytes": size, title: `${formatCount(size)} bytes` }, format(size));
}

/** `sizes` {name: bytes} as pairs without zeros, the largest first. */
function largestFirst(sizes) {
  const pairs = Object.entries(sizes).filter(([, size]) => size !== 0);
  return pairs.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]) || (a[0] < b[0] ? -1 : 1));
}

function sum(sizes) {
  return Object.values(sizes).reduce((total, size) => total + size, 0);
}

function words(name) {
  return name.replaceAll("_", " ");
}

function plural(count, noun) {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function card(id, title, ...content) {
  const heading = element("h2", { id: `${id}-title` }, title);
  return element("section", { class: "card", id, "aria-labelledby": `${id}-title` }, heading, content);
}
