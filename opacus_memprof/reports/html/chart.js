// SPDX-License-Identifier: Apache-2.0
// Draws a TimelineWindow on a canvas: stacked categories, steps above them, phases and an axis below.

const MARGIN = { left: 72, right: 12, top: 22, bottom: 40 };
const PHASE_HEIGHT = 14;

/** A canvas' context in CSS pixels, at the screen's resolution. */
function prepared(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return context;
}

/** Where the chart's parts are, for a canvas of a size. */
function chartArea(width, height) {
  const right = Math.max(width - MARGIN.right, MARGIN.left + 1);
  return { left: MARGIN.left, right, width: right - MARGIN.left, top: MARGIN.top, bottom: height - MARGIN.bottom };
}

function drawChart(canvas, view, marks) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const area = chartArea(width, height);
  const context = prepared(canvas, width, height);
  const colors = Object.fromEntries(["text", "muted", "grid", "accent"].map((name) => [name, themeColor(`--${name}`)]));
  const picked = view.picked(area.width);
  const highest = picked.reduce((most, { row }) => Math.max(most, view.totals[row]), 0);
  const ceiling = view.isWhole && !view.hidden.size ? Math.max(highest, marks.peak) : highest;
  const scale = { top: (ceiling || 1) * 1.06 };
  scale.y = (size) => area.bottom - (size / scale.top) * (area.bottom - area.top);
  scale.x = (position) => area.left + ((position - view.from) / (view.to - view.from)) * area.width;

  drawGrid(context, area, scale, colors);
  drawStack(context, area, view, picked, scale.y);
  drawGaps(context, area, view, scale, colors);
  drawSteps(context, area, view, picked, scale, colors);
  drawPhases(context, area, view, scale);
  drawAxis(context, area, view, scale, colors);
  drawMarks(context, area, view, scale, marks, colors);
  return { area, scale, picked };
}

/** Runs of picked rows for which `same` holds: [{row, from, to}] in pixels of the area. */
function runs(picked, width, same) {
  const found = [];
  for (const { pixel, row } of picked) {
    const open = found[found.length - 1];
    if (open && same(open.row, row)) continue;
    if (open) open.to = pixel;
    found.push({ row, from: pixel, to: width });
  }
  return found;
}

function drawStack(context, area, view, picked, y) {
  const base = new Float64Array(picked.length);
  for (const { name, sizes } of view.shown) {
    context.fillStyle = COLORS.get(name);
    picked.forEach(({ pixel, row }, index) => {
      if (!sizes[row]) return;
      const next = index + 1 < picked.length ? picked[index + 1].pixel : area.width;
      const [below, above] = [y(base[index]), y(base[index] + sizes[row])].map(Math.round);
      context.fillRect(area.left + pixel, above, next - pixel, below - above);
      base[index] += sizes[row];
    });
  }
}

/** Nothing is known between the edges of a gap: a column without memory, along the axis of events a line. */
function drawGaps(context, area, view, scale, colors) {
  for (const gap of view.gaps) {
    const [from, to] = view.placeOfGap(gap).map((place) => Math.min(Math.max(scale.x(place), area.left), area.right));
    if (view.placeOfGap(gap)[1] < view.from || view.placeOfGap(gap)[0] > view.to) continue;
    context.fillStyle = themeColor("--background");
    context.fillRect(from, area.top, to - from, area.bottom - area.top);
    line(context, colors.accent, [from, area.top], [from, area.bottom], [6, 3]);
    line(context, colors.accent, [to, area.top], [to, area.bottom], [6, 3]);
    context.save();
    context.translate(from + 12, area.bottom - 6);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillStyle = colors.accent;
    context.fillText(translated(`${formatCount(gap.events)} events are missing`), 0, 0);
    context.restore();
  }
}

function drawGrid(context, area, scale, colors) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const size of byteTicks(scale.top)) {
    const y = Math.round(scale.y(size)) + 0.5;
    line(context, colors.grid, [area.left, y], [area.right, y]);
    context.fillStyle = colors.muted;
    context.fillText(formatTick(size), area.left - 8, y);
  }
}

/** About five sizes that are round in binary units. */
function byteTicks(top) {
  let step = 2 ** Math.ceil(Math.log2(Math.max(top / 5, 1)));
  if (top / step < 3 && step > 1) step /= 2;
  const ticks = [];
  for (let size = 0; size < top; size += step) ticks.push(size);
  return ticks;
}

function formatTick(size) {
  return formatBytes(size).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 ");
}

function drawSteps(context, area, view, picked, scale, colors) {
  const steps = runs(picked, area.width, (a, b) => view.timeline.step[a] === view.timeline.step[b]);
  const wide = steps.length && area.width / steps.length;
  const every = Math.max(1, Math.ceil(52 / wide));
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  for (const [index, { row, from, to }] of steps.entries()) {
    const x = area.left + from + 0.5;
    const color = wide < 30 ? colors.grid : colors.muted;
    if (index && wide >= 4) line(context, color, [x, area.top - 6], [x, area.bottom], [1, 3]);
    if (index % every || Math.min(to, area.width) - from < (every > 1 ? 2 : 20)) continue;
    context.fillStyle = colors.muted;
    const label = every > 1 || to - from < 52 ? `${view.timeline.step[row]}` : `step ${view.timeline.step[row]}`;
    context.fillText(translated(label), x + 3, area.top - 8);
  }
}

function drawPhases(context, area, view, scale) {
  const colors = new Map();
  for (const { phase, from, to } of view.phases()) {
    if (!colors.has(phase)) colors.set(phase, themeColor(`--phase-${phase}`));
    const [left, right] = [scale.x(from), scale.x(to)];
    context.fillStyle = colors.get(phase);
    context.fillRect(left, area.bottom + 3, right - left, PHASE_HEIGHT);
    const label = words(phase);
    if (right - left < context.measureText(label).width + 10) continue;
    context.fillStyle = themeColor("--phase-text");
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(label, left + 5, area.bottom + 4 + PHASE_HEIGHT / 2);
  }
}

function drawAxis(context, area, view, scale, colors) {
  context.textBaseline = "alphabetic";
  context.fillStyle = colors.muted;
  const span = view.to - view.from;
  const step = niceStep(span / Math.max(area.width / 130, 1));
  for (let position = Math.ceil(view.from / step) * step; position <= view.to; position += step) {
    const x = scale.x(position);
    context.textAlign = x > area.right - 40 ? "right" : x < area.left + 20 ? "left" : "center";
    context.fillText(view.label(position), x, area.bottom + 34);
    line(context, colors.grid, [x, area.bottom + 3 + PHASE_HEIGHT], [x, area.bottom + 21]);
  }
}

/** 1, 2 or 5 times a power of ten. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= Math.max(least, 1));
}

/** The peak, allocations that failed, and snapshots. */
function drawMarks(context, area, view, scale, marks, colors) {
  const level = scale.y(marks.peak);
  if (level >= area.top && !view.hidden.size) {
    line(context, colors.accent, [area.left, level], [area.right, level], [4, 4]);
  }
  for (const { position, color, dash } of marks.lines) {
    if (position < view.from || position > view.to) continue;
    const x = Math.round(scale.x(position)) + 0.5;
    line(context, themeColor(color), [x, area.top], [x, area.bottom], dash);
  }
  if (marks.peakAt !== null && marks.peakAt >= view.from && marks.peakAt <= view.to && !view.hidden.size) {
    context.fillStyle = colors.accent;
    context.strokeStyle = themeColor("--surface");
    context.lineWidth = 2;
    context.beginPath();
    context.arc(scale.x(marks.peakAt), level, 5, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    context.lineWidth = 1;
  }
}

function line(context, color, start, end, dash = []) {
  context.strokeStyle = color;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(...start);
  context.lineTo(...end);
  context.stroke();
  context.setLineDash([]);
}

/** The whole run in small, with the part in view clear and the rest veiled. */
function drawOverview(canvas, view) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const context = prepared(canvas, width, height);
  const area = { ...chartArea(width, height), top: 1, bottom: height - 1 };
  const picked = view.picked(area.width, view.first, view.last);
  const highest = picked.reduce((most, { row }) => Math.max(most, view.totals[row]), 1);
  drawStack(context, area, view, picked, (size) => area.bottom - (size / highest) * (area.bottom - area.top));
  const scale = area.width / (view.last - view.first);
  const [from, to] = [view.from, view.to].map((position) => area.left + (position - view.first) * scale);
  context.fillStyle = themeColor("--veil");
  context.fillRect(area.left, 0, from - area.left, height);
  context.fillRect(to, 0, area.right - to, height);
  context.strokeStyle = themeColor("--muted");
  context.strokeRect(from + 0.5, 0.5, Math.max(to - from - 1, 1), height - 1);
}
