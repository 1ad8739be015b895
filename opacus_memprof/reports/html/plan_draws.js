// SPDX-License-Identifier: Apache-2.0
// Batches that are drawn: how probable it is that one of all steps is larger than what fits.

const SVG = "http://www.w3.org/2000/svg";
const LEAST = -12; // power of ten, below which nothing is drawn
const AREA = { left: 60, right: 12, top: 22, bottom: 34, width: 720, height: 260 };

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat(Infinity));
  return node;
}

function drawsCard(draws) {
  if (!draws) return null;
  const { samples, rate, steps, largest_batch_that_fits: fits, out_of_memory_probability: probability } = draws;
  const lead = element("p", { class: "lead" }, [
    `Each of ${formatCount(samples)} samples is drawn with probability ${rate}, ${formatCount(steps)} times. `,
    `Batches of up to ${fits} fit; memory runs out with probability ${probability.toPrecision(2)}.`,
  ]);
  const columns = [
    { title: "with probability", number: true, cell: (row) => String(row.probability) },
    { title: "no batch is above", number: true, cell: (row) => formatCount(row.batch) },
    { title: "its peak, computed", number: true, cell: (row) => bytes(row.requested_bytes) },
  ];
  const remedy = draws.max_physical_batch_size
    ? element("p", { class: "remedy" }, `max_physical_batch_size=${draws.max_physical_batch_size} was tried, and fits.`)
    : null;
  return card("draws", "Batches that are drawn", lead, curve(draws), table("Largest batches", columns, draws.peaks), remedy);
}

/** P(a batch is larger) against its size, on a logarithmic axis. */
function curve({ above, largest_batch_that_fits: fits }) {
  const points = above.filter(({ probability }) => probability > 10 ** LEAST);
  const sizes = [...points.map(({ batch }) => batch), fits];
  const [low, high] = [Math.min(...sizes), Math.max(...sizes) + 1];
  const x = (batch) => AREA.left + ((batch - low) / (high - low)) * (AREA.width - AREA.left - AREA.right);
  const y = (power) => AREA.top + (power / LEAST) * (AREA.height - AREA.top - AREA.bottom);
  const bottom = AREA.height - AREA.bottom;
  const grid = [0, -3, -6, -9, -12].map((power) => [
    svg("line", { class: "grid", x1: AREA.left, x2: AREA.width - AREA.right, y1: y(power), y2: y(power) }),
    svg("text", { x: AREA.left - 8, y: y(power) + 4, "text-anchor": "end" }, power ? `1e${power}` : "1"),
  ]);
  const path = points.map(({ batch, probability }, index) => {
    return `${index ? "L" : "M"}${x(batch).toFixed(1)},${y(Math.log10(probability)).toFixed(1)}`;
  });
  const near = x(fits) > AREA.width / 2 ? "end" : "start";
  return svg(
    "svg",
    { class: "curve", viewBox: `0 0 ${AREA.width} ${AREA.height}`, role: "img", "aria-label": "P(a batch is larger)" },
    grid,
    svg("path", { class: "line", d: path.join("") }),
    svg("line", { class: "capacity", x1: x(fits), x2: x(fits), y1: AREA.top, y2: bottom, "data-fits": fits }),
    svg("text", { class: "capacity", x: x(fits), y: AREA.top - 8, "text-anchor": near }, `up to ${fits} fit`),
    svg("text", { x: AREA.left, y: AREA.height - 12 }, String(low)),
    svg("text", { x: AREA.width - AREA.right, y: AREA.height - 12, "text-anchor": "end" }, `${high} samples`),
  );
}
