// SPDX-License-Identifier: Apache-2.0
// Which part of a timeline is in view, and which rows of it a picture of some width shows.

const FEWEST = { event: 8, time: 1e3 }; // the narrowest view: events, nanoseconds

class TimelineWindow {
  /**
   * @param timeline what readTimeline returned
   * @param gaps where events are missing: along the axis of events they have no width
   */
  constructor(timeline, end, gaps) {
    this.timeline = timeline;
    this.ends = end;
    this.gaps = gaps;
    this.places = { event: timeline.event.map((event) => event - missingBefore(gaps, event)), time: timeline.time };
    const { event, time } = timeline.phaseRuns;
    this.phasePlaces = { event: event.map((each) => each - missingBefore(gaps, each)), time };
    this.hidden = new Set();
    this.measure("event");
    this.count();
  }

  /** Counts along the horizontal axis "event"s, each as wide as another, or "time". */
  measure(unit) {
    const middle = this.at && this.rowAt((this.from + this.to) / 2);
    const share = this.at && (this.to - this.from) / (this.last - this.first);
    this.unit = unit;
    this.at = this.places[unit];
    this.first = this.at[0] ?? 0;
    this.last = Math.max(this.ends[unit], this.at[this.at.length - 1] ?? 0, this.first + FEWEST[unit]);
    this.show(this.first, this.last);
    if (share < 1) this.centre(this.at[middle], (this.last - this.first) * share);
  }

  /** Where a moment is along the axis. */
  place({ event, time_ns: time }) {
    return this.unit === "event" ? event - missingBefore(this.gaps, event) : time;
  }

  /** Where a gap begins and ends. */
  placeOfGap({ first_event: event, time_ns: time, end_ns: end }) {
    const place = event - missingBefore(this.gaps, event);
    return this.unit === "event" ? [place, place] : [time, end];
  }

  /** What the axis says at a place. */
  label(place) {
    return this.unit === "time" ? formatDuration(place) : formatCount(eventAt(this.gaps, Math.round(place)));
  }

  /** Live bytes of every row, without the categories that are hidden. */
  count() {
    this.shown = this.timeline.categories.filter(({ name }) => !this.hidden.has(name));
    this.totals = new Float64Array(this.timeline.length);
    for (const { sizes } of this.shown) sizes.forEach((size, row) => (this.totals[row] += size));
  }

  show(from, to) {
    const width = Math.min(Math.max(to - from, FEWEST[this.unit]), this.last - this.first);
    this.from = Math.min(Math.max(from, this.first), this.last - width);
    this.to = this.from + width;
  }

  centre(position, width) {
    this.show(position - width / 2, position + width / 2);
  }

  /** Shows `factor` times as much, and what is at `position` stays where it is. */
  zoom(factor, position = (this.from + this.to) / 2) {
    const width = Math.min(Math.max((this.to - this.from) * factor, FEWEST[this.unit]), this.last - this.first);
    const left = ((position - this.from) / (this.to - this.from)) * width;
    this.show(position - left, position - left + width);
  }

  pan(distance) {
    this.show(this.from + distance, this.to + distance);
  }

  all() {
    this.show(this.first, this.last);
  }

  get isWhole() {
    return this.from === this.first && this.to === this.last;
  }

  /** The last row at or before a position. */
  rowAt(position) {
    let [low, high] = [0, this.timeline.length - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.at[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The phases in view, each from a place to a place. */
  phases() {
    const at = this.phasePlaces[this.unit];
    const runs = this.timeline.phaseRuns.phase.map((phase, run) => ({
      phase,
      from: Math.max(at[run], this.from),
      to: Math.min(at[run + 1] ?? this.last, this.to),
    }));
    return runs.filter(({ from, to }) => from < to);
  }

  /** For `width` pixels from `from` to `to`: [{pixel, row}], of the rows that share a pixel the highest. */
  picked(width, from = this.from, to = this.to) {
    const picked = [];
    const scale = width / (to - from);
    for (let row = this.rowAt(from); row < this.timeline.length && this.at[row] <= to; row += 1) {
      const pixel = Math.min(Math.max(Math.floor((this.at[row] - from) * scale), 0), width - 1);
      const before = picked[picked.length - 1];
      if (before?.pixel !== pixel) picked.push({ pixel, row });
      else if (this.totals[row] > this.totals[before.row]) before.row = row;
    }
    return picked;
  }
}
