// SPDX-License-Identifier: Apache-2.0
// Mouse, touch and wheel on a TimelineChart.

const LEAST_DRAG = 4; // pixels; less is a click

function onPointer(chart) {
  const { frame, view, selection } = chart;
  let drag = null;

  const pixel = (event) => event.clientX - frame.getBoundingClientRect().left;
  const position = (x) => {
    const { area } = chart.drawn;
    const inside = Math.min(Math.max(x, area.left), area.right);
    return view.from + ((inside - area.left) / area.width) * (view.to - view.from);
  };

  frame.addEventListener("pointerdown", (event) => {
    if (event.button > 1) return;
    drag = { start: pixel(event), last: pixel(event), pan: event.shiftKey || event.button === 1 };
    frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointermove", (event) => {
    const x = pixel(event);
    if (drag?.pan) {
      chart.change(() => view.pan(position(drag.last) - position(x)));
      drag.last = x;
    } else if (drag) {
      showSelection(selection, drag.start, x);
    } else {
      chart.point(rowUnder(chart, x));
    }
  });
  frame.addEventListener("pointerup", (event) => {
    const x = pixel(event);
    const done = drag;
    drag = null;
    selection.hidden = true;
    if (!done || done.pan) return;
    if (Math.abs(x - done.start) < LEAST_DRAG) {
      chart.point(rowUnder(chart, x));
    } else {
      const [from, to] = [position(done.start), position(x)].sort((a, b) => a - b);
      chart.change(() => view.show(from, to));
    }
  });
  frame.addEventListener("pointercancel", () => {
    drag = null;
    selection.hidden = true;
  });
  frame.addEventListener("pointerleave", () => {
    if (!drag) chart.point(null);
  });
  frame.addEventListener("dblclick", () => chart.change(() => view.all()));
  frame.addEventListener(
    "wheel",
    (event) => {
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.ctrlKey || event.metaKey) {
        chart.change(() => view.zoom(2 ** (event.deltaY / 200), position(pixel(event))));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        chart.change(() => view.pan((sideways / chart.drawn.area.width) * (view.to - view.from)));
      } else {
        return; // the page scrolls
      }
      event.preventDefault();
    },
    { passive: false },
  );
}

/** The row that is drawn at a pixel of the chart. */
function rowUnder({ drawn }, x) {
  const column = Math.floor(x - drawn.area.left);
  if (column < 0 || column > drawn.area.width) return null;
  let found = null;
  for (const { pixel, row } of drawn.picked) {
    if (pixel > column) break;
    found = row;
  }
  return found;
}

function showSelection(selection, start, end) {
  selection.hidden = false;
  selection.style.left = `${Math.min(start, end)}px`;
  selection.style.width = `${Math.abs(end - start)}px`;
}

/** The small picture of the whole run: what is grabbed there moves the part in view. */
function onOverview(chart) {
  const { overview, view } = chart;
  let grabbed = null;

  const position = (event) => {
    const area = chartArea(overview.clientWidth, overview.clientHeight);
    const x = event.clientX - overview.getBoundingClientRect().left;
    return view.first + ((x - area.left) / area.width) * (view.last - view.first);
  };

  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    const at = position(event);
    if (at < view.from || at > view.to) chart.change(() => view.centre(at, view.to - view.from));
    grabbed = at - view.from;
  });
  overview.addEventListener("pointermove", (event) => {
    if (grabbed !== null) chart.change(() => view.pan(position(event) - grabbed - view.from));
  });
  for (const name of ["pointerup", "pointercancel"]) overview.addEventListener(name, () => (grabbed = null));
}
