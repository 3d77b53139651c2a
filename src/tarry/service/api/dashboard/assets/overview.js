/** The page Overview: what the service does, over a time range, up to now. */
import { get } from "./api.js";
import { histogram, timeChart } from "./charts.js";
import { h, pageLink } from "./dom.js";
import { count, decimal, duration, outcomeTone, OUTCOMES, waitReason } from "./format.js";
import { connectionState, follow } from "./live.js";

const RANGES = [["15m", "15 minutes"], ["1h", "1 hour"], ["3h", "3 hours"], ["24h", "24 hours"], ["7d", "7 days"]];
const DEFAULT_RANGE = "1h";

const perSecond = (value, { short = false } = {}) => `${decimal(value)}${short ? "" : "/s"}`;
const sum = (points, value) => points.reduce((total, point) => total + value(point), 0);
const attemptCount = (point) => Object.values(point.attempts).reduce((total, number) => total + number, 0);
const rate = (value) => (point, seconds) => (point ? value(point) / seconds : 0);
const gauge = (name) => (point) => point?.[name] ?? null;

function buildCharts(scope) {
  const attempts = timeChart({
    title: "Attempts per second", stacked: true, format: perSecond,
    series: OUTCOMES.map((name) => ({ name, tone: outcomeTone(name), value: rate((point) => point.attempts[name] ?? 0) })),
  });
  if (scope === "tenant") return { timed: [attempts], delays: null };
  const finished = timeChart({
    title: "Finished tasks per second", stacked: true, format: perSecond,
    series: [
      { name: "success at the first attempt", tone: "success", value: rate((point) => point.succeededFirst) },
      { name: "success after retries", tone: "transient", value: rate((point) => point.succeededRetried) },
      { name: "dead letter", tone: "permanent", value: rate((point) => point.exhausted) },
      { name: "cancelled", tone: "lost", value: rate((point) => point.cancelled) },
    ],
  });
  const lag = timeChart({
    title: "Scheduling lag", format: duration, lowestTop: 10,
    hint: "Time from the due time of an attempt to its start. Values above 60 s are shown as 60 s.",
    series: [{ name: "p50", tone: "waiting", value: gauge("lagP50Ms") }, { name: "p99", tone: "throttled", value: gauge("lagP99Ms") }],
  });
  const backlog = timeChart({
    title: "Backlog", format: (value) => decimal(value), lowestTop: 4, hint: "Average number of tasks in each interval.",
    series: [
      { name: "pending", tone: "waiting", value: gauge("pending") }, { name: "in flight", tone: "success", value: gauge("inFlight") },
      { name: "dead letters", tone: "permanent", value: gauge("deadLetters") },
    ],
  });
  const age = timeChart({
    title: "Age of the oldest due task", format: duration, lowestTop: 1000, hint: "Also of tasks that wait for a parked or paused downstream. The downstreams show what their tasks wait for.",
    series: [{ name: "age", tone: "overloaded", value: gauge("oldestDueAgeMs") }],
  });
  const delays = histogram({
    title: "Delays before retries", empty: "No retries in this time.",
    hint: "Delays as they were drawn. One high bar means that retries come together; jitter spreads them over many ranges.",
  });
  return { timed: [attempts, finished, lag, backlog, age], delays };
}

function tile(label, value, note) {
  return h("div", { class: "tile" }, h("dt", null, label), h("dd", null, value), note ? h("dd", { class: "note" }, note) : null);
}

function percent(part, whole) {
  return whole ? `${decimal((100 * part) / whole)} %` : "–";
}

function buildTiles(overview) {
  const { points, current } = overview;
  const attempts = sum(points, attemptCount);
  const failed = attempts - sum(points, (point) => point.attempts.success ?? 0);
  const tiles = [tile("Attempts", count(attempts), attempts ? `${percent(failed, attempts)} failed` : "none in this time")];
  const deadLetters = h("a", { href: pageLink("dead-letters") }, `${count(current.deadLetters)} stored now`);
  if (overview.scope === "all") {
    const first = sum(points, (point) => point.succeededFirst);
    const retried = sum(points, (point) => point.succeededRetried);
    tiles.push(
      tile("Success at the first attempt", percent(first, first + retried + sum(points, (point) => point.exhausted)), `${count(first)} at once, ${count(retried)} after retries`),
      tile("New dead letters", count(sum(points, (point) => point.exhausted)), deadLetters),
      tile("Scheduling lag, p99", overview.lagP99Ms === null ? "–" : duration(overview.lagP99Ms), overview.lagP50Ms === null ? "no attempts" : `p50 ${duration(overview.lagP50Ms)}`));
  } else {
    tiles.push(tile("Dead letters", count(current.deadLetters), h("a", { href: pageLink("dead-letters") }, "show")));
  }
  tiles.push(
    tile("Pending now", count(current.pending), `${count(current.inFlight)} in flight`),
    tile("Oldest due task", current.oldestDueAgeMs < 1000 ? "on time" : duration(current.oldestDueAgeMs), current.oldestDueAgeMs < 1000 ? "no due task waits" : `waiting for: ${waitReason(current.oldestDueWaitingFor)}`));
  return tiles;
}

/** Return the buckets of the delays with their labels. */
function delayBuckets(delays) {
  return delays.map(({ upToMs, count: number }, index) => {
    const previous = delays[index - 1]?.upToMs;
    if (upToMs === null) return { label: "more", range: `above ${duration(previous ?? 0)}`, count: number };
    return { label: duration(upToMs), range: previous ? `${duration(previous)} to ${duration(upToMs)}` : `up to ${duration(upToMs)}`, count: number };
  });
}

export async function render({ root, query, signal }) {
  const range = RANGES.some(([name]) => name === query.range) ? query.range : DEFAULT_RANGE;
  const { element: state, setState } = connectionState();
  const tiles = h("dl", { class: "tiles" });
  const charts = h("div", { class: "columns" });
  const links = RANGES.map(([name, label]) => h("a", { class: "button small", href: pageLink("overview", { range: name }), "aria-current": name === range ? "true" : null }, label));
  const hint = h("p", { class: "hint", hidden: true }, "Figures of your tenant. Attempts of the last day are kept.");
  let drawn = null, shownText = "";
  const show = (overview) => {
    // `to` changes with each response; without other changes the charts move only when a new interval begins.
    const { to, ...rest } = overview;
    const text = JSON.stringify(rest);
    const hasChanged = text !== shownText;
    shownText = text;
    if (!drawn) {
      drawn = buildCharts(overview.scope);
      charts.replaceChildren(...[...drawn.timed, drawn.delays].filter(Boolean).map(({ element }) => element));
      hint.hidden = overview.scope === "all";
    }
    if (hasChanged) tiles.replaceChildren(...buildTiles(overview));
    drawn.timed.forEach((chart) => chart.update(overview));
    if (hasChanged) drawn.delays?.update(delayBuckets(overview.delays));
    return hasChanged;
  };
  const read = async () => show(await get("overview", { range }, signal));
  root.replaceChildren(
    h("div", { class: "heading" }, h("h1", null, "Overview"), h("nav", { class: "segments", "aria-label": "Time range" }, links), state),
    hint, tiles, charts);
  await read();
  follow(signal, read, setState);
}
