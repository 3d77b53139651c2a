/** Charts as SVG: values over time, and a histogram. Each has a legend, a text with the values at the cursor, and a table. */
import { h, svg, table } from "./dom.js";
import { clockTime, count, duration } from "./format.js";

const HEIGHT = 190, LEFT = 52, RIGHT = 6, TOP = 8, BOTTOM = 22;
const TICK_SPACING = 84;
const MINUTE_MS = 60_000, HOUR_MS = 3_600_000, DAY_MS = 86_400_000;
const TIME_STEPS_MS = [MINUTE_MS, 2 * MINUTE_MS, 5 * MINUTE_MS, 10 * MINUTE_MS, 15 * MINUTE_MS, 30 * MINUTE_MS, HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS, 6 * HOUR_MS, 12 * HOUR_MS, DAY_MS, 2 * DAY_MS];
const ELAPSED_STEPS_MS = [10_000, 20_000, 30_000, MINUTE_MS];
const MAX_TABLE_ROWS = 60;

/** Return round values from 0 to at least `highest`, at most five. */
function valueTicks(highest) {
  const rough = highest / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  return Array.from({ length: Math.ceil(highest / step) + 1 }, (_, index) => index * step);
}

/** Return times at round local hours and minutes. */
function timeTicks(from, to, maxCount) {
  const step = TIME_STEPS_MS.find((candidate) => (to - from) / candidate <= maxCount) ?? TIME_STEPS_MS.at(-1);
  const offset = new Date(to).getTimezoneOffset() * MINUTE_MS;
  const ticks = [];
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) ticks.push(at);
  return { ticks, withDay: step >= DAY_MS };
}

/** Return round times since the start of a chart. */
function elapsedTicks(to, maxCount) {
  const step = ELAPSED_STEPS_MS.find((candidate) => to / candidate <= maxCount) ?? ELAPSED_STEPS_MS.at(-1);
  return Array.from({ length: Math.floor(to / step) + 1 }, (_, index) => index * step);
}

const elapsedTime = (ms) => (ms ? duration(ms) : "0 s");

/** Return a frame for a chart. `draw(width)` returns an SVG; it is called again when the width changes. */
function chartFrame({ title, hint, legend, draw, move }) {
  const plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${title}: move with the arrow keys to read values` });
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const tableHolder = h("div");
  const details = h("details", null, h("summary", null, "As a table"), tableHolder);
  const element = h("section", { class: "panel chart", "aria-label": title },
    h("h2", null, title), plot, readout,
    legend?.length ? h("ul", { class: "legend" }, legend.map(({ name, tone }) => h("li", null, h("span", { class: `swatch tone-${tone}`, "aria-hidden": "true" }), name))) : null,
    hint ? h("p", { class: "hint" }, hint) : null, details);
  const redraw = () => { if (plot.clientWidth > 0) plot.replaceChildren(draw(plot.clientWidth)); };
  new ResizeObserver(redraw).observe(plot);
  plot.addEventListener("pointermove", (event) => move({ x: event.clientX - plot.getBoundingClientRect().left, width: plot.clientWidth }));
  plot.addEventListener("pointerleave", () => move({ clear: true }));
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") move({ clear: true });
    if (by === undefined) return;
    event.preventDefault();
    move({ by });
  });
  return { element, readout, details, tableHolder, redraw };
}

/**
 * Return a chart of values over time: `{element, update(data)}`. `data` is {from, to, stepMs, points}. A series is
 * {name, tone, value(point, seconds)}; `point` is undefined for an interval without data, `seconds` is its length so far.
 * Stacked series are drawn on top of each other, other series as lines with gaps where the value is null. The axis ends
 * at `lowestTop` or above. With `elapsed`, times are relative to the start, and `data.shaded` is a marked period [from, to].
 */
export function timeChart({ title, hint, series, stacked = false, format, lowestTop = 0, elapsed = false }) {
  const timeText = (at, options) => (elapsed ? elapsedTime(at) : clockTime(at, options));
  let slots = [], data = null, cursor = null;
  // The height of an interval: the sum of stacked values, or else the highest value, or null.
  const total = ({ values }) => {
    const known = values.filter((value) => value !== null);
    if (!known.length) return null;
    return stacked ? known.reduce((sum, value) => sum + value, 0) : Math.max(...known);
  };
  const scale = (width) => {
    const ticks = valueTicks(Math.max(...slots.map(total), lowestTop) || 1);
    const highest = ticks.at(-1);
    return {
      ticks,
      x: (at) => LEFT + ((at - data.from) / (data.to - data.from)) * (width - LEFT - RIGHT),
      y: (value) => TOP + (1 - value / highest) * (HEIGHT - TOP - BOTTOM),
    };
  };
  const bands = ({ x, y }) => {
    const sums = slots.map(() => 0);
    return series.map(({ tone }, index) => {
      const edges = slots.map(({ at, end, values }, slot) => {
        const bottom = sums[slot];
        sums[slot] += values[index];
        return { left: x(at).toFixed(1), right: x(end).toFixed(1), top: y(sums[slot]).toFixed(1), bottom: y(bottom).toFixed(1) };
      });
      if (!slots.some(({ values }) => values[index] > 0)) return null;
      const upper = edges.map(({ left, right, top }) => `${left},${top} ${right},${top}`);
      const lower = edges.reverse().map(({ left, right, bottom }) => `${right},${bottom} ${left},${bottom}`);
      return svg("polygon", { class: `fill-${tone}`, points: [...upper, ...lower].join(" ") });
    });
  };
  const lines = ({ x, y }) => series.map(({ tone }, index) => {
    let path = "", isOpen = false;
    for (const { at, end, values } of slots) {
      const value = values[index];
      if (value !== null) path += `${isOpen ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}H${x(end).toFixed(1)}`;
      isOpen = value !== null;
    }
    return path ? svg("path", { class: `line-${tone}`, d: path }) : null;
  });
  const describe = () => {
    const totals = slots.map(total);
    const known = totals.filter((value) => value !== null);
    const highest = Math.max(...known, 0);
    if (stacked && !highest) return "None in this time.";
    if (!known.length) return "No data in this time.";
    const average = known.reduce((sum, value) => sum + value, 0) / known.length;
    const at = timeText(slots[totals.indexOf(highest)].at, { withDay: data.to - data.from > DAY_MS });
    if (elapsed) return `Highest ${format(highest)} at ${at}.`;
    return `Highest ${format(highest)} at ${at}, ${stacked ? `average ${format(average)}` : `latest ${format(known.at(-1))}`}.`;
  };
  const valueText = (value) => (value === null ? "no data" : format(value));
  const draw = (width) => {
    if (!data) return "";
    const scales = scale(width);
    const maxTicks = Math.max(2, (width - LEFT) / TICK_SPACING);
    const { ticks, withDay } = elapsed ? { ticks: elapsedTicks(data.to, maxTicks), withDay: false } : timeTicks(data.from, data.to, maxTicks);
    return svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}. ${describe()}` },
      data.shaded ? svg("rect", { class: "shaded", x: scales.x(data.shaded[0]), width: scales.x(data.shaded[1]) - scales.x(data.shaded[0]), y: TOP, height: HEIGHT - TOP - BOTTOM }) : null,
      scales.ticks.map((value) => [
        svg("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: scales.y(value), y2: scales.y(value) }),
        svg("text", { x: LEFT - 6, y: scales.y(value) + 4, "text-anchor": "end" }, format(value, { short: true }))]),
      stacked ? bands(scales) : lines(scales),
      ticks.map((at) => {
        const x = scales.x(at);
        const anchor = x > width - 24 ? "end" : "middle";
        return [svg("line", { class: "axis-tick", x1: x, x2: x, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }),
          svg("text", { x: anchor === "end" ? width - RIGHT : x, y: HEIGHT - 5, "text-anchor": anchor }, timeText(at, { withDay, withSeconds: false }))];
      }),
      cursor === null || !slots[cursor] ? null : svg("line", { class: "cursor", x1: scales.x((slots[cursor].at + slots[cursor].end) / 2), x2: scales.x((slots[cursor].at + slots[cursor].end) / 2), y1: TOP, y2: HEIGHT - BOTTOM }));
  };
  const showReadout = () => {
    const slot = cursor === null ? null : slots[cursor];
    if (!slot) return void (frame.readout.textContent = describe());
    const texts = series.map(({ name }, index) => (stacked && !slot.values[index] ? null : `${name} ${valueText(slot.values[index])}`)).filter(Boolean);
    frame.readout.textContent = `${timeText(slot.at, { withDay: data.to - data.from > DAY_MS })}: ${texts.join(", ") || "none"}`;
  };
  const move = ({ x, width, by, clear }) => {
    if (!slots.length || (clear && cursor === null)) return;
    const last = slots.length - 1;
    if (clear) cursor = null;
    else if (by !== undefined) cursor = Math.min(last, Math.max(0, (cursor ?? (by < 0 ? last + 1 : -1)) + by));
    else cursor = Math.min(last, Math.max(0, Math.floor(((x - LEFT) / (width - LEFT - RIGHT)) * slots.length)));
    frame.redraw();
    showReadout();
  };
  const frame = chartFrame({ title, hint, legend: series.length > 1 ? series : [], draw, move });
  const showTable = () => {
    if (!frame.details.open || !data) return;
    const known = slots.filter(({ point }) => point);
    const rows = elapsed ? known : known.slice(-MAX_TABLE_ROWS).reverse();
    const columns = [{ label: "From", cell: ({ at }) => timeText(at, { withDay: data.to - data.from >= DAY_MS }) },
      ...series.map(({ name }, index) => ({ label: name, class: "number", cell: ({ values }) => valueText(values[index]) }))];
    const caption = elapsed ? `${title}: all intervals` : `${title}: the latest ${count(rows.length)} intervals with data`;
    frame.tableHolder.replaceChildren(table(caption, columns, rows));
  };
  frame.details.addEventListener("toggle", showTable);
  return {
    element: frame.element,
    update(nextData) {
      data = nextData;
      const byTime = new Map(data.points.map((point) => [point.at, point]));
      slots = [];
      for (let at = data.from; at < data.to; at += data.stepMs) {
        const end = Math.min(at + data.stepMs, data.to);
        const seconds = Math.max(1, (end - at) / 1000);
        slots.push({ at, end, point: byTime.get(at), values: series.map(({ value }) => value(byTime.get(at), seconds)) });
      }
      frame.redraw();
      if (cursor === null) showReadout();
      showTable();
    },
  };
}

/** Return a chart of counts in buckets: `{element, update(buckets)}`. A bucket is {label, range, count}. */
export function histogram({ title, hint, empty }) {
  let buckets = [], cursor = null;
  const total = () => buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  const describe = () => {
    if (!total()) return empty;
    const most = buckets.reduce((best, bucket) => (bucket.count > best.count ? bucket : best));
    return `${count(total())} in ${count(buckets.filter((bucket) => bucket.count).length)} of ${count(buckets.length)} ranges, most (${count(most.count)}) ${most.range}.`;
  };
  const draw = (width) => {
    if (!total()) return "";
    const ticks = valueTicks(Math.max(...buckets.map((bucket) => bucket.count)));
    const y = (value) => TOP + (1 - value / ticks.at(-1)) * (HEIGHT - TOP - BOTTOM);
    const step = Math.min(72, (width - LEFT - RIGHT) / buckets.length);
    const labelled = Math.ceil(54 / step);
    return svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}. ${describe()}` },
      ticks.map((value) => [
        svg("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        Number.isInteger(value) ? svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, count(value)) : null]),
      buckets.map((bucket, index) => {
        const x = LEFT + index * step;
        return [
          svg("rect", { class: index === cursor ? "fill-accent" : "fill-waiting", x: x + step * 0.1, width: step * 0.8, y: y(bucket.count), height: y(0) - y(bucket.count) }),
          index % labelled ? null : svg("text", { x: x + step / 2, y: HEIGHT - 5, "text-anchor": "middle" }, bucket.label)];
      }));
  };
  const showReadout = () => {
    const bucket = cursor === null ? null : buckets[cursor];
    frame.readout.textContent = bucket ? `${bucket.range}: ${count(bucket.count)}` : describe();
  };
  const move = ({ x, width, by, clear }) => {
    if (!buckets.length || (clear && cursor === null)) return;
    const last = buckets.length - 1;
    if (clear) cursor = null;
    else if (by !== undefined) cursor = Math.min(last, Math.max(0, (cursor ?? (by < 0 ? last + 1 : -1)) + by));
    else cursor = Math.min(last, Math.max(0, Math.floor((x - LEFT) / Math.min(72, (width - LEFT - RIGHT) / buckets.length))));
    frame.redraw();
    showReadout();
  };
  const frame = chartFrame({ title, hint, draw, move });
  const showTable = () => {
    if (!frame.details.open) return;
    frame.tableHolder.replaceChildren(table(title, [
      { label: "Range", cell: (bucket) => bucket.range }, { label: "Count", class: "number", cell: (bucket) => count(bucket.count) }], buckets));
  };
  frame.details.addEventListener("toggle", showTable);
  return {
    element: frame.element,
    update(nextBuckets) {
      buckets = nextBuckets;
      frame.redraw();
      if (cursor === null) showReadout();
      showTable();
    },
  };
}
