// SPDX-License-Identifier: Apache-2.0
// What is shown, as a part of the page's address: whoever is sent the address sees the same.

/** {run, device, unit, from, to, module, find, line, find_line, part, card} as text, without what is as at the beginning. */
function readAddress() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Changes parts of the address; a part that is null goes. */
function writeAddress(change) {
  const address = Object.entries({ ...readAddress(), ...change }).filter(([, value]) => value !== null && value !== "");
  const text = new URLSearchParams(address).toString();
  try {
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  } catch {
    // A notebook's frame has no address of its own.
  }
}
