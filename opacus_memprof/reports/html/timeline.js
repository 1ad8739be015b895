// SPDX-License-Identifier: Apache-2.0
// The card with the chart, and what mouse, touch and keyboard do with it.

const TIMELINE_HELP =
  "Drag to zoom in, Shift+drag or the small picture to move, double-click to see all. Ctrl+wheel zooms. " +
  "Keys: ← → cursor, Shift+← → move, + − zoom, P peak, 0 all.";

const PROOF_HINT = "It begins behind flash_clip's proof in the first step; All shows the proof, too.";

/** A chart for one device: {card, draw(), showStep(step)}; null where nothing was recorded. */
function timelineCard({ profile, device }) {
  const timeline = readTimeline(device.timeline);
  if (!timeline.length) return null;
  const ends = { event: profile.events.recorded, time: profile.duration_ns };
  const view = new TimelineWindow(timeline, ends, profile.events.gaps);
  const { unit, from, to } = readAddress();
  if (unit === "time") view.measure(unit);
  const proofEnd = device.peak.phase === "proof" ? 0 : timeline.endOfFirstProof;
  if (Number(to) > Number(from)) view.show(Number(from), Number(to));
  else if (proofEnd) view.show(view.at[proofEnd], view.last);
  const chart = new TimelineChart(view, device);
  const shown = resolution(profile.events, device.timeline.events_a_row);
  const caption = element("p", { class: "caption" }, peakSentence(device), " ", shown, proofEnd ? ` ${PROOF_HINT}` : "");
  const content = [chart.toolbar, chart.frame, chart.overview, chart.legend, caption, chart.help, chart.table.details];
  return {
    card: card("timeline", "Memory over time", ...content, chart.live),
    draw: () => chart.draw(),
    showStep: (step) => chart.showStep(step),
  };
}

function peakSentence({ peak }) {
  const where = `in ${words(peak.phase)} of step ${peak.step}`;
  const when = peak.event === null ? "not among the recorded events" : `at event ${formatCount(peak.event)}`;
  return element(
    "span",
    { class: "own", "data-peak": peak.requested_bytes },
    `The peak: ${formatCount(peak.requested_bytes)} bytes, ${where}, ${when}.`,
  );
}

function resolution({ recorded }, eventsARow) {
  if (eventsARow === 1) return "Every event is shown.";
  return `${formatCount(recorded)} events: of each ${formatCount(eventsARow)} in a row the highest instant is shown.`;
}

class TimelineChart {
  constructor(view, device) {
    this.view = view;
    this.device = device;
    this.cursor = null;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.peakLabel = element("span", { class: "peak-label" }, `peak ${formatBytes(device.peak.requested_bytes)}`);
    this.selection = element("div", { class: "selection", hidden: true });
    this.tooltip = element("div", { class: "tooltip", hidden: true });
    this.cursorLine = element("div", { class: "cursor", hidden: true });
    this.frame = element(
      "div",
      {
        class: "chart",
        tabindex: "0",
        role: "application",
        "aria-roledescription": "timeline",
        "aria-label": `Live bytes by category, peak ${formatBytes(device.peak.requested_bytes)}`,
        "aria-describedby": "timeline-help",
      },
      [this.canvas, this.cursorLine, this.selection, this.peakLabel, this.tooltip],
    );
    this.overview = element("canvas", { class: "overview", "aria-hidden": "true" });
    this.help = element("p", { class: "hint", id: "timeline-help" }, TIMELINE_HELP);
    this.live = element("p", { class: "visually-hidden", "aria-live": "polite" });
    this.table = timelineTable(view);
    this.toolbar = this.makeToolbar();
    this.legend = this.makeLegend();
    onPointer(this);
    onOverview(this);
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.frame.addEventListener("blur", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  makeToolbar() {
    const units = [["event", "By event"], ["time", "By time"]].map(([unit, label]) => {
      const attributes = { type: "button", "data-unit": unit, "aria-pressed": String(unit === this.view.unit) };
      return element("button", { ...attributes, onclick: () => this.measure(unit) }, label);
    });
    this.units = units;
    const button = (label, title, action) =>
      element("button", { type: "button", title, "aria-label": title, onclick: () => this.change(action) }, label);
    return element(
      "div",
      { class: "toolbar", role: "toolbar", "aria-label": "Timeline" },
      element("div", { class: "group" }, units),
      element(
        "div",
        { class: "group" },
        button("−", "Zoom out", () => this.view.zoom(2, this.anchor())),
        button("+", "Zoom in", () => this.view.zoom(0.5, this.anchor())),
        button("All", "Show the whole run", () => this.view.all()),
        button("Peak", "Show the peak", () => this.showPeak()),
      ),
      (this.range = element("span", { class: "range muted" })),
    );
  }

  makeLegend() {
    const largest = (sizes) => sizes.reduce((most, size) => Math.max(most, size), 0);
    const items = this.view.timeline.categories.filter(({ sizes }) => largest(sizes) > 0).reverse();
    const buttons = items.map(({ name }) => {
      const button = element("button", { type: "button", translate: "no", "aria-pressed": "true" }, swatch(name), name);
      button.addEventListener("click", () => {
        const shown = this.view.hidden.has(name);
        if (shown) this.view.hidden.delete(name);
        else this.view.hidden.add(name);
        button.setAttribute("aria-pressed", String(shown));
        this.change(() => this.view.count());
      });
      return button;
    });
    return element("div", { class: "legend", role: "group", "aria-label": "Categories in the timeline" }, buttons);
  }

  measure(unit) {
    this.units.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.unit === unit)));
    this.change(() => this.view.measure(unit));
  }

  /** Changes the view and shows it. */
  change(action) {
    action();
    this.draw();
    this.table.update();
    const { unit, from, to, isWhole } = this.view;
    const range = isWhole ? { from: null, to: null } : { from: Math.round(from), to: Math.round(to) };
    writeAddress({ unit: unit === "event" ? null : unit, ...range });
  }

  showStep(step) {
    const rows = this.view.timeline.step;
    const [first, after] = [rows.indexOf(step), rows.indexOf(step + 1)];
    if (first < 0) return;
    const end = after < 0 ? this.view.last : this.view.at[after];
    this.change(() => this.view.show(this.view.at[first], end));
    this.frame.scrollIntoView({ block: "center" });
    this.frame.focus({ preventScroll: true });
  }

  /** A hundredth of the run around the peak, with the cursor on it. */
  showPeak() {
    const row = this.peakRow();
    if (row < 0) return;
    this.cursor = row;
    this.view.centre(this.view.at[row], (this.view.last - this.view.first) / 20);
    this.live.textContent = rowInWords(this.view, row);
  }

  peakRow() {
    return this.view.timeline.event.indexOf(this.device.peak.event);
  }

  anchor() {
    const position = this.cursor === null ? null : this.view.at[this.cursor];
    return position !== null && position >= this.view.from && position <= this.view.to ? position : undefined;
  }

  marks() {
    const { peak, out_of_memory: failures, snapshots } = this.device;
    const recorded = snapshots.filter(({ event }) => event !== null);
    const lines = [
      ...recorded.map((moment) => ({ position: this.view.place(moment), color: "--muted", dash: [2, 4] })),
      ...failures.map((moment) => ({ position: this.view.place(moment), color: "--accent", dash: [] })),
    ];
    const row = this.peakRow();
    return { peak: peak.requested_bytes, peakAt: row < 0 ? null : this.view.at[row], lines };
  }

  draw() {
    if (!this.frame.clientWidth) return;
    const marks = this.marks();
    this.drawn = drawChart(this.canvas, this.view, marks);
    drawOverview(this.overview, this.view);
    this.placePeakLabel(marks);
    this.placeCursor();
    const unit = this.view.unit === "event" ? "events " : "";
    const whole = this.view.isWhole ? "whole run" : `${unit}${this.view.label(this.view.from)} to ${this.view.label(this.view.to)}`;
    this.range.textContent = translated(whole);
    Object.assign(this.frame.dataset, { from: this.view.from, to: this.view.to });
  }

  placePeakLabel({ peak, peakAt }) {
    const { area, scale } = this.drawn;
    const level = scale.y(peak);
    this.peakLabel.hidden = level < area.top || this.view.hidden.size > 0;
    const x = peakAt === null ? area.right : Math.min(Math.max(scale.x(peakAt), area.left), area.right);
    const onLeft = x > (area.left + area.right) / 2;
    this.peakLabel.style.top = `${level}px`;
    this.peakLabel.style.left = onLeft ? "auto" : `${x + 9}px`;
    this.peakLabel.style.right = onLeft ? `${this.frame.clientWidth - x + 9}px` : "auto";
  }

  placeCursor() {
    const { area, scale } = this.drawn;
    const x = this.cursor === null ? -1 : scale.x(this.view.at[this.cursor]);
    const outside = x < area.left - 1 || x > area.right + 1;
    this.tooltip.hidden = outside;
    this.cursorLine.hidden = outside;
    if (outside) return;
    this.cursorLine.style.left = `${x}px`;
    this.tooltip.replaceChildren(...readout(this.view, this.cursor));
    const onLeft = x > (area.left + area.right) / 2;
    this.tooltip.style.left = onLeft ? "auto" : `${x + 14}px`;
    this.tooltip.style.right = onLeft ? `${this.frame.clientWidth - x + 14}px` : "auto";
  }

  /** Puts the cursor on a row, or nowhere. */
  point(row) {
    if (row === this.cursor) return;
    this.cursor = row;
    this.placeCursor();
  }

  /** Moves the cursor by columns of the picture; at its edge the picture moves along. */
  step(columns) {
    const { picked } = this.drawn;
    let at = picked.findIndex(({ row }) => row === this.cursor);
    if (at < 0) at = columns > 0 ? -1 : picked.length;
    const next = picked[at + columns];
    if (next) {
      this.point(next.row);
    } else if (this.cursor !== null) {
      this.cursor = Math.min(Math.max(this.cursor + Math.sign(columns), 0), this.view.timeline.length - 1);
      this.change(() => this.view.centre(this.view.at[this.cursor], this.view.to - this.view.from));
    }
    if (this.cursor !== null) this.live.textContent = rowInWords(this.view, this.cursor);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const width = this.view.to - this.view.from;
    const actions = {
      ArrowLeft: () => (event.shiftKey ? this.change(() => this.view.pan(-width / 5)) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? this.change(() => this.view.pan(width / 5)) : this.step(1)),
      PageUp: () => this.step(-20),
      PageDown: () => this.step(20),
      Home: () => this.change(() => this.view.pan(this.view.first - this.view.from)),
      End: () => this.change(() => this.view.pan(this.view.last - this.view.to)),
      "+": () => this.change(() => this.view.zoom(0.5, this.anchor())),
      "=": () => this.change(() => this.view.zoom(0.5, this.anchor())),
      "-": () => this.change(() => this.view.zoom(2, this.anchor())),
      0: () => this.change(() => this.view.all()),
      p: () => this.change(() => this.showPeak()),
      P: () => this.change(() => this.showPeak()),
      Escape: () => this.point(null),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
}
