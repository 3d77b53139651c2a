/** The latency of a downstream, and the history of its breaker as a strip of colours and as text. */
import { h, svg } from "./dom.js";
import { breakerTone, clockTime, count, duration, time } from "./format.js";

const WIDTH = 1000, HEIGHT = 22, MIN_SEGMENT_WIDTH = 3;
const DAY_MS = 86_400_000;
const STATES = ["closed", "half-open", "open"];

/** Return a section with the quantiles of the latency, or with a note if there were no attempts. */
export function latencyTiles(latency) {
  const tile = (name, value) => h("div", { class: "tile" }, h("dt", null, name), h("dd", null, value));
  return h("section", { "aria-labelledby": "latency" },
    h("h2", { id: "latency" }, "Latency of attempts"),
    latency ? [
      h("dl", { class: "tiles" }, tile("p50", duration(latency.p50Ms)), tile("p90", duration(latency.p90Ms)),
        tile("p99", duration(latency.p99Ms)), tile("Attempts", count(latency.attempts))),
      h("p", { class: "hint" }, "Durations of attempts with any outcome, in all processes, since ", time(latency.since), ": the last 5 to 10 minutes in which there were attempts."),
    ] : h("p", { class: "soft" }, "No attempt was made since the downstream was created or reset."));
}

/** Return a section with the changes of a breaker as a strip and as a list. `changes` are sorted, newest first. */
export function breakerTimeline(state, changes) {
  return h("section", { class: "panel", "aria-labelledby": "breaker-history" },
    h("h2", { id: "breaker-history" }, "Breaker history"),
    changes.length ? [strip(changes, Date.now()), h("ol", { class: "timeline", "aria-label": "Changes of the breaker, newest first" }, changes.map((change, index) => entry(change, changes[index - 1])))]
      : h("p", { class: "soft" }, `The breaker is ${state}. No change is recorded.`));
}

function entry(change, next) {
  return changeItem(change, "", next ? `for ${duration(Math.max(0, next.at - change.at))}` : "the last change");
}

/** Return a change of a breaker as an item of a timeline, with a text before the states and a note after the time. */
export function changeItem(change, prefix, note) {
  return h("li", { class: `tone-${breakerTone(change.to)}` },
    h("p", { class: "line" }, h("strong", null, prefix, change.from, " → ", change.to), time(change.at, { withMs: true }),
      note ? h("span", { class: "soft" }, note) : null),
    change.reason ? h("p", null, change.reason) : null);
}

/**
 * Return a strip with a segment for each state, and a legend. The last of several states gets at most half of the strip:
 * if it lasts long, the others would otherwise be too short to see.
 */
function strip(changes, now) {
  const oldestFirst = [...changes].reverse();
  const from = oldestFirst[0].at, last = oldestFirst.at(-1).at;
  const to = Math.max(last + 1, last > from ? Math.min(now, last + (last - from)) : now);
  const x = (at) => ((Math.min(at, to) - from) / (to - from)) * WIDTH;
  const segments = oldestFirst.map(({ at, to: state }, index) => ({ state, start: x(at), end: x(oldestFirst[index + 1]?.at ?? to) }));
  const opened = changes.filter((change) => change.to === "open").length;
  const format = (at) => clockTime(at, { withDay: now - from > DAY_MS });
  const label = `Breaker from ${format(from)} to ${format(to)}: opened ${count(opened)} ${opened === 1 ? "time" : "times"}, now ${changes[0].to}. The list below has all changes.`;
  return h("div", null,
    svg("svg", { class: "strip", role: "img", "aria-label": label, width: "100%", height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" },
      // Later segments are drawn on top, so a short one stays visible.
      segments.map(({ state, start, end }) => svg("rect", { class: `fill-${breakerTone(state)}`, x: start.toFixed(1), width: Math.max(MIN_SEGMENT_WIDTH, end - start).toFixed(1), height: HEIGHT }))),
    h("p", { class: "strip-times hint", "aria-hidden": "true" }, h("span", null, format(from)), h("span", null, format(to))),
    h("ul", { class: "legend" }, STATES.map((state) => h("li", null, h("span", { class: `swatch tone-${breakerTone(state)}`, "aria-hidden": "true" }), state))));
}
