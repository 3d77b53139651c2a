/** Format times, durations and states for people. */
import { h } from "./dom.js";

const STATUS_TONES = {
  PENDING: "waiting", IN_FLIGHT: "waiting", SUCCEEDED: "success", EXHAUSTED: "permanent", CANCELLED: "lost",
  ACTIVE: "success", PAUSED: "transient", PARKED: "permanent", PROBING: "throttled",
  RUNNING: "waiting", DONE: "success",
};
/** The outcomes of attempts. */
export const OUTCOMES = ["success", "transient", "throttled", "overloaded", "permanent", "lost"];

/** Return the colour class of an outcome; unknown outcomes have that of `lost`. */
export function outcomeTone(outcome) {
  return OUTCOMES.includes(outcome) ? outcome : "lost";
}

/** Return the colour class of a state of a breaker. */
export function breakerTone(state) {
  return { closed: "success", open: "permanent", "half-open": "throttled" }[state] ?? "lost";
}

/** Return a coloured badge for a status or state. */
export function statusBadge(status) {
  return h("span", { class: `badge tone-${STATUS_TONES[status] ?? "lost"}` }, status);
}

const pad = (number, length = 2) => String(number).padStart(length, "0");

/** Return a `time` element in local time; its tooltip has UTC. */
export function time(epochMs, { withMs = false } = {}) {
  if (epochMs === null || epochMs === undefined) return null;
  const at = new Date(epochMs);
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  const clock = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  const text = `${day} ${clock}${withMs ? `.${pad(at.getMilliseconds(), 3)}` : ""}`;
  return h("time", { datetime: at.toISOString(), title: at.toISOString() }, text);
}

/** Return a `time` element with the local time of day, preceded by the date unless that is today; its tooltip has UTC. */
export function shortTime(epochMs) {
  const at = new Date(epochMs);
  const withDay = at.toDateString() !== new Date().toDateString();
  return h("time", { datetime: at.toISOString(), title: at.toISOString() }, clockTime(epochMs, { withDay }));
}

/** Return a local time as text, such as "14:05:10" or "11-18 14:05:10". */
export function clockTime(epochMs, { withDay = false, withSeconds = true } = {}) {
  const at = new Date(epochMs);
  const day = withDay ? `${pad(at.getMonth() + 1)}-${pad(at.getDate())} ` : "";
  return `${day}${pad(at.getHours())}:${pad(at.getMinutes())}${withSeconds ? `:${pad(at.getSeconds())}` : ""}`;
}

/** Return a duration such as "350 ms", "1.5 s", "4 min 10 s" or "2 d 3 h". */
export function duration(ms) {
  if (ms === null || ms === undefined) return "";
  if (ms < 1) return `${Number(ms.toPrecision(2))} ms`;
  if (ms < 1000) return `${ms < 10 ? Number(ms.toFixed(1)) : Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 2 : 1))} s`;
  for (const [unit, size, smallUnit, smallSize] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
    if (seconds >= size) {
      const rest = Math.floor((seconds % size) / smallSize);
      return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${smallUnit}` : ""}`;
    }
  }
  return "";
}

/** Return how far a time is from now: "in 5 s" or "3 min ago". */
export function relative(epochMs, now = Date.now()) {
  const difference = epochMs - now;
  if (Math.abs(difference) < 1000) return "now";
  return difference > 0 ? `in ${duration(difference)}` : `${duration(-difference)} ago`;
}

/** Return a number with thousands separators. */
export function count(number) {
  return new Intl.NumberFormat("en").format(number);
}

/** Return a number with at most three significant digits. */
export function decimal(number) {
  return number === null || number === undefined ? "" : new Intl.NumberFormat("en", { maximumSignificantDigits: 3 }).format(number);
}

/** Return why tasks wait, in words. */
export function waitReason(reason) {
  return reason === null ? "" : reason.replace("-", " ");
}
