// SPDX-License-Identifier: Apache-2.0
// Light and dark: the system's choice until the reader makes another, which the browser remembers.

const THEMES = ["auto", "light", "dark"];
const THEME_KEY = "opacus-memprof-theme";

function themeSwitch(onChange) {
  const button = element("button", { type: "button", class: "theme", onclick: () => choose(next()) });
  const choose = (theme) => {
    setTheme(theme);
    remember(theme);
    show();
    onChange();
  };
  const current = () => document.documentElement.dataset.theme ?? "auto";
  const next = () => THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length];
  const show = () => {
    button.textContent = `${{ auto: "◐", light: "☀", dark: "☾" }[current()]} ${translated(current())}`;
    button.setAttribute("aria-label", translated(`Theme: ${current()}. Switch to ${next()}`));
  };
  setTheme(remembered());
  show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    themeColors.clear();
    onChange();
  });
  return button;
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  themeColors.clear();
}

// Storage is refused in some frames, such as a notebook's.
function remembered() {
  try {
    const theme = localStorage.getItem(THEME_KEY);
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

function remember(theme) {
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // Then it lasts as long as the page.
  }
}

/** Paper is light, also for what is drawn on canvases. */
function printLight(redraw) {
  let before = "auto";
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme ?? "auto";
    setTheme("light");
    redraw();
  });
  addEventListener("afterprint", () => {
    setTheme(before);
    redraw();
  });
}

const themeColors = new Map();

/** A colour of the style sheet as it is now, for a canvas. */
function themeColor(variable) {
  if (!themeColors.has(variable)) {
    const probe = element("span", { style: { color: `var(${variable})` } });
    document.body.append(probe);
    themeColors.set(variable, getComputedStyle(probe).color);
    probe.remove();
  }
  return themeColors.get(variable);
}
