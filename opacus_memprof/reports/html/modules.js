// SPDX-License-Identifier: Apache-2.0
// The modules at the peak as an icicle: below each module those inside it, as wide as their bytes. The lines of the
// program in the same way: below each line the lines that it called.

const ICICLE_LEVELS = 6;
const ICICLE_ROW = 34; // pixels, as in report.css
const NARROWEST = 3; // pixels; narrower modules are in the table only
const ROOMY = 60; // pixels, from which a label keeps its distance from the edges

function modulesCard({ device }) {
  const { peak } = device;
  if (!Object.keys(peak.modules).some((name) => name)) return null;
  return new ModuleView(moduleTree(peak.modules), peak.requested_bytes, "module").card;
}

function linesCard({ device }) {
  const { peak } = device;
  if (!Object.keys(peak.lines ?? {}).length) return null;
  return new ModuleView(lineTree(peak.lines, peak.categories), peak.requested_bytes, "line").card;
}

class ModuleView {
  /** `noun` is what the nodes are: "module" or "line". */
  constructor(root, whole, noun) {
    this.whole = whole;
    this.noun = noun;
    this.nouns = noun === "module" ? "Modules" : "Lines";
    this.find = noun === "module" ? "find" : "find_line";
    this.breadcrumb = element("nav", { class: "breadcrumb", "aria-label": `${words(noun)} path` });
    this.tree = element("div", { class: "icicle", role: "tree", "aria-label": `${this.nouns} by bytes at the peak` });
    this.list = element("div");
    const searched = `Search ${this.nouns.toLowerCase()}`;
    this.search = element("input", { type: "search", placeholder: searched, "aria-label": searched });
    this.search.addEventListener("input", () => {
      writeAddress({ [this.find]: this.search.value });
      this.showList();
    });
    this.live = element("p", { class: "visually-hidden", "aria-live": "polite" });
    const help =
      `Click a ${noun}, or press Enter on it, to look inside. Keys: ← → siblings, ↓ inside, ↑ outside, Esc back.`;
    this.tree.addEventListener("keydown", (event) => this.key(event));
    this.card = card(
      this.nouns.toLowerCase(),
      `${this.nouns} at the peak`,
      [this.breadcrumb, this.tree, element("p", { class: "hint" }, help), this.search, this.list, this.live],
    );
    new ResizeObserver(() => this.resized()).observe(this.tree);
    this.nodes = [...inTree(root)];
    const address = readAddress();
    this.search.value = address[this.find] ?? "";
    const shown = this.nodes.find((node) => node.name === address[noun] && !node.itself && node.children.length);
    this.show(shown ?? root);
  }

  /** Makes a module the widest; what is inside it fills the rows below. */
  open(node, { focus = false } = {}) {
    this.search.value = "";
    writeAddress({ [this.noun]: node.name, [this.find]: null });
    this.show(node);
    if (focus) this.focusOn(node);
    this.live.textContent = `${moduleLabel(node)}, ${formatBytes(node.total)}`;
  }

  show(node) {
    this.node = node;
    this.draw();
    this.showPath();
    this.showList();
    this.tree.dataset.module = node.name;
  }

  /** What is inside the module, or all modules that the search finds. */
  showList() {
    const text = this.search.value.trim().toLowerCase();
    if (!text) {
      this.list.replaceChildren(this.childrenTable());
      return;
    }
    const found = this.nodes.filter(({ name, itself }) => !itself && name.toLowerCase().includes(text));
    const none = element("p", { class: "muted" }, `No ${this.noun} has a name with this text.`);
    this.list.replaceChildren(found.length ? this.moduleTable(`${this.nouns} with ${text}`, found, ({ name }) => name) : none);
  }

  resized() {
    if (this.tree.clientWidth !== this.width) this.draw();
  }

  draw() {
    this.width = this.tree.clientWidth;
    this.cells = new Map();
    const cells = [];
    const levels = this.lay(this.node, 0, this.width || 800, 0, cells);
    this.tree.style.height = `${levels * ICICLE_ROW}px`;
    this.tree.replaceChildren(...cells);
  }

  /** Adds the cells of a node and of what is inside; returns the number of levels. */
  lay(node, left, width, depth, cells) {
    const cell = this.cell(node, left, width, depth);
    this.cells.set(node, cell);
    cells.push(cell);
    let levels = depth + 1;
    if (levels >= ICICLE_LEVELS) return levels;
    let at = left;
    for (const child of node.children) {
      const share = (width * child.total) / node.total;
      if (share >= NARROWEST) levels = Math.max(levels, this.lay(child, at, share, depth + 1, cells));
      at += share;
    }
    return levels;
  }

  cell(node, left, width, depth) {
    const share = formatShare(node.total, this.whole);
    const label = `${moduleLabel(node)}, ${formatBytes(node.total)}, ${share}`;
    return element(
      "div",
      {
        class: width < ROOMY ? "cell tight" : "cell",
        role: "treeitem",
        tabindex: depth === 0 ? "0" : "-1",
        title: [label, ...largestLines(node.sizes)].join("\n"),
        "aria-label": label,
        "aria-level": depth + 1,
        "data-module": node.name,
        "data-bytes": node.total,
        style: { left: `${left}px`, width: `${width}px`, top: `${depth * ICICLE_ROW}px` },
        onclick: () => this.drill(node),
      },
      width > 20 ? element("span", { class: "label" }, node.label) : null,
      width > 130 ? element("span", { class: "size" }, formatBytes(node.total)) : null,
      stackedBar(node.sizes, node.total),
    );
  }

  drill(node) {
    if (node.itself) return;
    if (node === this.node && node.parent) this.open(node.parent, { focus: true });
    else if (node !== this.node && node.children.length) this.open(node, { focus: true });
    else this.focusOn(node);
  }

  focusOn(node) {
    for (const cell of this.cells.values()) cell.tabIndex = -1;
    const cell = this.cells.get(node);
    cell.tabIndex = 0;
    cell.focus({ preventScroll: true });
  }

  key(event) {
    const [node] = [...this.cells].find(([, cell]) => cell === event.target) ?? [];
    if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
    const siblings = node === this.node ? [node] : node.parent.children.filter((child) => this.cells.has(child));
    const at = siblings.indexOf(node);
    const actions = {
      ArrowLeft: () => siblings[at - 1],
      ArrowRight: () => siblings[at + 1],
      Home: () => siblings[0],
      End: () => siblings[siblings.length - 1],
      ArrowDown: () => node.children.find((child) => this.cells.has(child)),
      ArrowUp: () => (node === this.node ? this.out() : node.parent),
      Enter: () => this.drill(node),
      " ": () => this.drill(node),
      Escape: () => this.out(),
      Backspace: () => this.out(),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    const next = actions[event.key]();
    if (next) this.focusOn(next);
  }

  out() {
    if (this.node.parent) this.open(this.node.parent, { focus: true });
  }

  showPath() {
    const path = [];
    for (let node = this.node; node; node = node.parent) path.unshift(node);
    const items = path.map((node) => {
      const current = node === this.node;
      if (current) return element("li", { "aria-current": "location" }, node.label, " ", bytes(node.total));
      return element("li", {}, element("button", { type: "button", translate: "no", onclick: () => this.open(node) }, node.label));
    });
    this.breadcrumb.replaceChildren(element("ol", {}, items));
  }

  childrenTable() {
    const { node } = this;
    const rows = node.children.length ? folded(node.children) : [node];
    return this.moduleTable(`${this.nouns} inside ${moduleLabel(node)}`, rows, ({ label }) => label);
  }

  /** A table of modules. A row of several, which repeat, is replaced by them when it is opened. */
  moduleTable(title, rows, labelOf) {
    const largest = Math.max(...rows.map(({ total }) => total));
    const open = (row) => {
      if (row.together) this.list.replaceChildren(this.moduleTable(title, row.together, labelOf));
      else this.open(row);
    };
    const name = (row) =>
      row.together || (row.children.length && row !== this.node)
        ? element("button", { type: "button", class: "link", onclick: () => open(row) }, labelOf(row))
        : labelOf(row);
    const most = (row) => Math.max(...row.together.map(({ total }) => total));
    const differ = (row) => row.total < row.together.length * most(row);
    const each = (row) =>
      row.together ? element("span", {}, differ(row) ? "≤ " : "", bytes(most(row))) : bytes(row.total);
    const columns = [
      { title: this.noun, as: "name", value: (row) => labelOf(row), cell: name },
      { title: "bytes", number: true, value: (row) => row.total, cell: (row) => bytes(row.total) },
      { title: "share", number: true, cell: (row) => formatShare(row.total, this.whole) },
      { title: "by category", as: "wide", cell: (row) => stackedBar(row.sizes, largest) },
      { title: "mostly", as: "category", cell: (row) => largestFirst(row.sizes)[0]?.[0] ?? "" },
    ];
    if (rows.some(({ together }) => together)) columns.splice(1, 0, { title: "each", number: true, cell: each });
    return table(title, columns, rows, { first: 12 });
  }
}

const FEWEST_FOLDED = 3;

/** Modules whose labels differ in their number only are one row, `[0-11].mlp ×12`; the largest one is `each`. */
function folded(children) {
  const groups = new Map();
  for (const child of children) {
    const [, number, rest] = child.label.match(/^(\d+)(\..*)?$/) ?? [];
    const key = number === undefined ? child.label : `#${rest ?? ""}`;
    groups.set(key, [...(groups.get(key) ?? []), child]);
  }
  return [...groups].flatMap(([key, together]) => {
    if (!key.startsWith("#") || together.length < FEWEST_FOLDED) return together;
    const sizes = {};
    for (const child of together) addSizes(sizes, child.sizes);
    const numbers = together.map(({ label }) => parseInt(label, 10));
    const ranges = numbers[numbers.length - 1] - numbers[0] === numbers.length - 1;
    const which = ranges ? `${numbers[0]}-${numbers[numbers.length - 1]}` : numbers.join(",");
    return { label: `[${which}]${key.slice(1)} ×${numbers.length}`, sizes, total: sum(sizes), children: [], together };
  });
}

function* inTree(node) {
  yield node;
  for (const child of node.children) yield* inTree(child);
}

function largestLines(sizes) {
  return largestFirst(sizes)
    .slice(0, 6)
    .map(([name, size]) => `${name}: ${formatBytes(size)}`);
}

function moduleLabel(node) {
  if (node.itself) return `${node.name || node.parent.label} ${node.label}`;
  return node.name || node.label;
}
