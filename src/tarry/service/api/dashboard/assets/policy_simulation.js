/** The result of a simulation of a policy: the requests at the target, and the figures. */
import { timeChart } from "./charts.js";
import { h, table } from "./dom.js";
import { count, decimal, duration } from "./format.js";

// One failure in ten thousand calls must not look like none.
const percent = (share) => (share < 1 && share >= 0.9995 ? "> 99.9 %" : `${decimal(100 * share)} %`);
// Field of the simulation, name in the chart and the table, colour class.
const RUNS = [["withPolicy", "this policy", "waiting"], ["withoutRetries", "without retries", "throttled"]];
const FIGURES = [
  ["Requests per call", (run) => decimal(run.requestsPerCall)],
  ["Highest load after the outage", (run) => `${decimal(run.peakLoad)} times the capacity`],
  ["Crashes after the outage", (run) => count(run.crashes)],
  ["Recovered after", (run) => (run.recoveredAfterMs === null ? "not in the simulated time" : duration(run.recoveredAfterMs))],
  ["Calls that succeeded", (run) => percent(run.successRate)],
  ["Calls still waiting at the end", (run) => count(run.unfinishedCalls)],
];

/** Return a sentence that summarizes a simulation. */
function describe({ withPolicy, withoutRetries }) {
  const { recoveredAfterMs, requestsPerCall, peakLoad, crashes } = withPolicy;
  const recovery = recoveredAfterMs === null ? "The calls do not recover in the simulated time" : `The calls are healthy again ${duration(recoveredAfterMs)} after the outage`;
  const load = `the target gets ${decimal(requestsPerCall)} requests per call, at most ${decimal(peakLoad)} times its capacity`;
  const effect = crashes > withoutRetries.crashes ? `, and crashes ${count(crashes)} ${crashes === 1 ? "time" : "times"}` : "";
  return `${recovery}; ${load}${effect}.`;
}

/** Show a simulation in a section; return a sentence that summarizes it. */
export function showSimulation(section, simulation) {
  const { stepMs, outageStartMs, outageEndMs, description, clients } = simulation;
  const requests = RUNS.map(([name]) => simulation[name].requestsPerSecond);
  const chart = timeChart({
    title: "Requests at the target per second", elapsed: true, lowestTop: 1,
    format: (value, { short = false } = {}) => `${decimal(value)}${short ? "" : "/s"}`,
    series: RUNS.map(([, name, tone], index) => ({ name, tone, value: (point) => point?.values[index] ?? null })),
    hint: `Grey: the target is frozen. The ${count(clients)} simulated clients have no breaker and no retry budget. The downstreams of the service have both.`,
  });
  const columns = [
    { label: "Figure", cell: ([label]) => label },
    ...RUNS.map(([name, label]) => ({ label: label[0].toUpperCase() + label.slice(1), class: "number", cell: ([, figure]) => figure(simulation[name]) })),
  ];
  section.replaceChildren(
    h("h2", null, "Simulated outage"),
    h("p", null, description),
    h("div", { class: "columns" }, chart.element, h("div", null, table("Figures of the simulation", columns, FIGURES))));
  chart.update({
    from: 0, to: stepMs * requests[0].length, stepMs, shaded: [outageStartMs, outageEndMs],
    points: requests[0].map((_, index) => ({ at: index * stepMs, values: requests.map((values) => values[index]) })),
  });
  return describe(simulation);
}
