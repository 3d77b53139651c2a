/** The page Policies: the list, and the form of a policy with a drawing of its delays, a simulation and advice. */
import { call, get } from "./api.js";
import { field, h, notify, openDialog, openPage, pageLink, select, showError, svg, table } from "./dom.js";
import { count, duration, time } from "./format.js";
import { showAdvice } from "./policy_advice.js";
import { showSimulation } from "./policy_simulation.js";
import { pager } from "./tasks.js";

const PAGE_SIZE = 50;
const PREVIEW_DELAY_MS = 300;
/** Names of downstreams that are suggested; others can be typed. */
const MAX_SUGGESTED_DOWNSTREAMS = 100;
const TICKS_MS = [1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 21_600_000, 86_400_000, 604_800_000, 2_592_000_000, 31_536_000_000];
const POLICY_ID = "[A-Za-z0-9][A-Za-z0-9._\\-]{0,99}";
const NUMBER_FIELDS = [
  ["maxAttempts", "Attempts at most", "including the first"],
  ["initialDelayMs", "First delay (ms)"],
  ["multiplier", "Multiplier", "of an exponential backoff"],
  ["maxDelayMs", "Longest delay (ms)"],
  ["totalBudgetMs", "Total budget (ms)", "time for all attempts and delays; empty: no limit"],
  ["attemptTimeoutMs", "Attempt timeout (ms)"],
  ["throttledDelayMs", "First delay after 429 (ms)"],
  ["maxHintMs", "Longest Retry-After (ms)", "if a target asks for a longer delay, its task ends"],
];
const LIST_FIELDS = [
  ["scheduleMs", "Schedule (ms)", "delays with commas between them, for the backoff SCHEDULE", Number],
  ["retryableStatusCodes", "Retried statuses", "with commas between them: 429, 502-504, 5xx", readStatuses],
  ["retryableGrpcCodes", "Retried gRPC codes", "with commas between them", String],
];
const CHOICES = [
  ["backoffType", "Backoff", ["EXPONENTIAL", "LINEAR", "FIXED", "SCHEDULE"]],
  ["jitterType", "Jitter", ["FULL", "EQUAL", "DECORRELATED", "NONE"]],
  ["idempotencyKeyFormat", "Format of the idempotency key", ["PLAIN", "QUOTED"]],
];

const LABELS = Object.fromEntries(NUMBER_FIELDS.map(([name, label]) => [name, label]));

const policyPath = (id) => `retry-policies/${encodeURIComponent(id)}`;
const versionText = (policy) => (policy.version === null ? "Built in" : `Version ${policy.version}`);

function columns() {
  return [
    { label: "Policy", class: "mono", cell: (policy) => h("a", { href: pageLink(`policies/${encodeURIComponent(policy.policyId)}`) }, policy.policyId) },
    { label: "Version", cell: (policy) => (policy.version === null ? "built in" : count(policy.version)) },
    { label: "Attempts", class: "number", cell: (policy) => count(policy.maxAttempts) },
    { label: "First delay", class: "number", cell: (policy) => duration(policy.scheduleMs?.[0] ?? policy.initialDelayMs) },
    { label: "Longest delay", class: "number", cell: (policy) => duration(policy.maxDelayMs) },
    { label: "Jitter", cell: (policy) => policy.jitterType.toLowerCase() },
    { label: "Attempt timeout", class: "number", cell: (policy) => duration(policy.attemptTimeoutMs) },
    { label: "Total budget", class: "number", cell: (policy) => (policy.totalBudgetMs === null ? "none" : duration(policy.totalBudgetMs)) },
  ];
}

export async function render({ root, query, signal }) {
  const input = h("input", { name: "policyId", required: true, pattern: POLICY_ID, autocomplete: "off", spellcheck: "false", title: "Letters, digits, and . _ - after the first character" });
  const submit = (event) => {
    event.preventDefault();
    location.hash = pageLink(`policies/${encodeURIComponent(input.value)}`, { new: 1 });
  };
  const results = h("section", { "aria-label": "Policies" }, h("p", { class: "soft loading" }, "Loading…"));
  root.replaceChildren(h("h1", null, "Policies"),
    h("form", { class: "filters panel", "aria-label": "New policy", submit },
      field("Name of a new policy", input), h("div", { class: "actions" }, h("button", { type: "submit", class: "primary", "data-needs": "admin" }, "New policy"))),
    results);
  const page = await get("retry-policies", { cursor: query.cursor, limit: PAGE_SIZE }, signal);
  results.replaceChildren(table("Your policies, then the built-in ones", columns(), page.items), pager("policies", query, page));
}

/** Return the statuses of "503", "5xx" or "502-504": a class stays as it is, a range becomes numbers. */
function readStatuses(text) {
  if (/^[345]xx$/.test(text)) return text;
  const [first, last = first] = text.split("-").map(Number);
  if (!(last >= first && last < 1000)) return NaN;
  return Array.from({ length: last - first + 1 }, (_, index) => first + index);
}

/** Return statuses as text. Three or more in a row are a range, because most 5xx are retried by default. */
function statusText(statuses) {
  const runs = [];
  for (const status of statuses) {
    if (status === runs.at(-1)?.at(-1) + 1) runs.at(-1).push(status);
    else runs.push([status]);
  }
  return runs.map((run) => (run.length > 2 ? `${run[0]}-${run.at(-1)}` : run.join(", "))).join(", ");
}

/** Return the fields of a policy as the API expects them; throws an error if a list of numbers is invalid. */
function readForm(form) {
  const fields = {};
  for (const [name] of NUMBER_FIELDS) {
    const { value } = form.elements.namedItem(name);
    fields[name] = value === "" ? null : Number(value);
  }
  for (const [name, , , convert] of LIST_FIELDS) {
    const entries = form.elements.namedItem(name).value.split(",").map((text) => text.trim()).filter(Boolean).flatMap(convert);
    if (entries.some(Number.isNaN)) throw Object.assign(new Error(`${name} must be a list of numbers`), { problem: { field: name, detail: `${name} must be a list of numbers` } });
    fields[name] = entries;
  }
  for (const [name] of CHOICES) fields[name] = form.elements.namedItem(name).value;
  fields.idempotencyKeyHeader = form.elements.namedItem("idempotencyKeyHeader").value;
  if (fields.backoffType !== "SCHEDULE") delete fields.scheduleMs;
  return fields;
}

/** Show which field of the form the service has rejected; without an error, remove the marks. */
function markProblem(form, error) {
  for (const control of form.elements) control.removeAttribute("aria-invalid");
  form.querySelector(".field-problem").textContent = error ? error.problem?.detail || error.message : "";
  const name = error?.problem?.field?.split("[")[0];
  form.elements.namedItem(name ?? "")?.setAttribute("aria-invalid", "true");
}

function buildForm(policy) {
  const number = ([name, label, hint]) => field(label, h("input", { name, type: "number", step: "any", min: "0", value: policy[name] ?? null }), hint);
  const list = ([name, label, hint, convert]) => field(label, h("input", { class: "list", name, value: convert === readStatuses ? statusText(policy[name]) : (policy[name] ?? []).join(", "), autocomplete: "off", spellcheck: "false" }), hint);
  const choice = ([name, label, options]) => field(label, select(name, options.map((option) => [option, option]), policy[name]));
  return h("form", { class: "panel", "aria-label": "Policy", novalidate: true },
    h("div", { class: "form-grid top" },
      NUMBER_FIELDS.slice(0, 2).map(number), choice(CHOICES[0]), choice(CHOICES[1]), NUMBER_FIELDS.slice(2).map(number),
      field("Header of the idempotency key", h("input", { name: "idempotencyKeyHeader", value: policy.idempotencyKeyHeader, autocomplete: "off" })), choice(CHOICES[2]),
      LIST_FIELDS.map(list)),
    h("p", { class: "field-problem", role: "alert" }));
}

/** Return a drawing of the delays: a bar from the shortest to the longest, and a line at each ceiling. The scale is logarithmic. */
function drawSchedule(retries, width) {
  const height = 240, left = 64, bottom = 24, top = 8;
  const longest = Math.max(...retries.map((retry) => Math.max(retry.longestDelayMs, retry.ceilingMs)), 1);
  const positive = retries.flatMap((retry) => [retry.ceilingMs, retry.shortestDelayMs]).filter((ms) => ms > 0);
  const low = Math.floor(Math.log10(Math.min(...positive, longest))) - 1;
  const high = Math.max(Math.log10(longest) + 0.1, low + 1);
  const y = (ms) => top + (height - top - bottom) * (1 - Math.max(0, (Math.log10(Math.max(ms, 10 ** low)) - low) / (high - low)));
  const step = (width - left) / retries.length;
  const ticks = TICKS_MS.filter((ms) => ms >= 10 ** low && ms <= 10 ** high);
  const label = `Delays of ${retries.length} retries, from ${duration(retries[0].ceilingMs)} to ${duration(longest)}`;
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ticks.map((ms) => [
      svg("line", { class: "grid-line", x1: left, x2: width, y1: y(ms), y2: y(ms) }),
      svg("text", { x: left - 6, y: y(ms) + 4, "text-anchor": "end" }, duration(ms))]),
    retries.map((retry, index) => {
      const x = left + index * step, barWidth = Math.max(2, step * 0.7), bar = y(retry.longestDelayMs);
      return [
        svg("rect", { class: "band", x: x + (step - barWidth) / 2, width: barWidth, y: bar, height: Math.max(2, y(retry.shortestDelayMs) - bar) }),
        svg("line", { class: "ceiling", x1: x + (step - barWidth) / 2, x2: x + (step + barWidth) / 2, y1: y(retry.ceilingMs), y2: y(retry.ceilingMs) }),
        index % Math.ceil(retries.length / 12) ? null : svg("text", { x: x + step / 2, y: height - 6, "text-anchor": "middle" }, String(retry.retryNumber))];
    }));
}

function showSchedule(section, schedule) {
  const { retries, maxRetries, averageRetries, longestWaitMs } = schedule;
  const rows = [
    { label: "Retry", class: "number", cell: (retry) => count(retry.retryNumber) },
    { label: "Ceiling", class: "number", cell: (retry) => duration(retry.ceilingMs) },
    { label: "Shortest delay", class: "number", cell: (retry) => duration(retry.shortestDelayMs) },
    { label: "Longest delay", class: "number", cell: (retry) => duration(retry.longestDelayMs) },
  ];
  const facts = [`At most ${count(maxRetries)} ${maxRetries === 1 ? "retry" : "retries"}`];
  if (averageRetries !== null && averageRetries < maxRetries) facts.push(`about ${count(averageRetries)} within the total budget`);
  facts.push(`longest wait ${duration(longestWaitMs)}`);
  // Drawn in its actual width, because scaled text could not be read on a narrow screen.
  const drawing = h("div");
  section.replaceChildren(drawing);
  section.replaceChildren(
    h("h2", null, "Delays if every attempt fails"),
    h("p", null, `${facts.join(", ")}.`),
    ...(retries.length ? [
      drawSchedule(retries, drawing.clientWidth),
      h("p", { class: "hint" }, "Bar: the range from which jitter draws the delay. Line: the ceiling. The scale is logarithmic."),
      h("details", null, h("summary", null, "As a table"), table(`The first ${count(retries.length)} retries`, rows, retries)),
    ] : []));
}

export async function renderItem(view) {
  const { root, id, query, signal } = view;
  const isNew = query.new !== undefined;
  const policy = await get(policyPath(isNew ? "default" : id), {}, signal);
  const form = buildForm(policy);
  const schedule = h("section", { class: "panel", "aria-label": "Delays" });
  let timer = null;
  let requests = 0, previews = 0;
  /** Return a function that marks the problem of a request, or none, unless a later request has started. */
  const startRequest = () => {
    // A preview that started after this request would remove its problem.
    if (timer !== null) preview();
    requests += 1;
    const number = requests;
    return (error) => { if (number === requests && !signal.aborted) markProblem(form, error); };
  };
  const preview = async () => {
    clearTimeout(timer);
    timer = null;
    const mark = startRequest();
    previews += 1;
    const number = previews;
    try {
      const drawn = await call("POST", "policy-schedules", { body: readForm(form), signal });
      if (number === previews) showSchedule(schedule, drawn);
      mark(null);
    } catch (error) {
      mark(error);
    }
  };
  form.addEventListener("input", ({ target }) => {
    if (target === laneInput) return; // not a field of the policy
    clearTimeout(timer);
    timer = setTimeout(preview, PREVIEW_DELAY_MS);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const mark = startRequest();
    try {
      const saved = await call("PUT", policyPath(id), { body: readForm(form), signal });
      const message = `Saved ${saved.policyId}, version ${saved.version}.`;
      if (isNew) return openPage(pageLink(`policies/${encodeURIComponent(id)}`), message);
      await renderItem(view);
      notify(message);
    } catch (error) {
      mark(error);
    }
  });
  const remove = () => openDialog({
    title: "Delete this policy?", label: "Delete this policy", danger: true,
    content: [h("p", { class: "mono" }, id), h("p", null, "All its versions are deleted. This is not possible while unfinished tasks use the policy.")],
    submit: async () => {
      await call("DELETE", policyPath(id));
      openPage(pageLink("policies"), `Deleted ${id}.`);
    },
  });
  const status = h("p", { role: "status" });
  const simulation = h("section", { "aria-label": "Simulation" });
  const advice = h("section", { "aria-label": "Advice" });
  /**
   * Return a button that calls `run()`, and shows the sentence that it returns. Meanwhile the button is disabled, and
   * `progress` is shown.
   */
  const analysisButton = (label, progress, run) => {
    const button = h("button", { type: "button" }, label);
    button.addEventListener("click", async () => {
      button.disabled = true;
      status.textContent = progress;
      const mark = startRequest();
      try {
        const result = await run();
        mark(null);
        status.textContent = result;
        status.scrollIntoView({ block: "nearest" });
      } catch (error) {
        if (signal.aborted) return;
        status.textContent = "";
        mark(error);
      } finally {
        button.disabled = false;
        // A disabled button loses the focus. The user may be in another field by now.
        if (document.activeElement === document.body) button.focus({ preventScroll: true });
      }
    });
    return button;
  };
  const simulateButton = analysisButton("Simulate this policy", "Simulating…", async () =>
    showSimulation(simulation, await call("POST", "policy-simulations", { body: readForm(form), signal })));
  const suggestLanes = async () => {
    try {
      const { items } = await get("downstreams", { limit: MAX_SUGGESTED_DOWNSTREAMS }, signal);
      laneNames.replaceChildren(...items.map(({ lane }) => h("option", { value: lane })));
    } catch (error) {
      showError(error); // the form works without suggestions
    }
  };
  const useValues = async (values) => {
    for (const [name, value] of Object.entries(values)) form.elements.namedItem(name).value = value ?? "";
    await preview();
    status.textContent = "The form has the proposed values. They are not saved yet.";
    form.scrollIntoView({ block: "nearest" });
  };
  const laneInput = h("input", { name: "lane", list: "downstreams", spellcheck: "false", autocomplete: "off" });
  const laneNames = h("datalist", { id: "downstreams" });
  const adviseButton = analysisButton("Advise", "Reading the attempts…", async () => {
    const body = { lane: laneInput.value, policyId: isNew ? "default" : id };
    return showAdvice(advice, await call("POST", "policy-advice", { body, signal }), LABELS, useValues);
  });
  laneInput.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // else the form would be saved
    adviseButton.click();
  });
  form.append(h("fieldset", null, h("legend", null, "Advice"), laneNames,
    h("p", { class: "hint" }, "Proposes values for the saved policy, from the recorded attempts of a downstream."),
    h("div", { class: "form-row" }, field("Downstream", laneInput), h("div", { class: "actions" }, adviseButton))));
  form.append(h("div", { class: "actions" },
    h("button", { type: "submit", class: "primary", "data-needs": "admin" }, "Save"),
    simulateButton,
    isNew ? null : h("a", { class: "button", href: pageLink("tasks", { policyId: id }) }, "Tasks of this policy"),
    isNew || policy.version === null ? null : h("button", { type: "button", class: "danger", "data-needs": "admin", click: remove }, "Delete…")));
  const state = isNew ? "Not saved yet; the fields are those of the policy default."
    : [versionText(policy), policy.createdAt === null ? "; saving creates your own policy of this name, which replaces the built-in one." : [", saved ", time(policy.createdAt), "."]];
  root.replaceChildren(
    h("p", { class: "hint" }, h("a", { href: "#/policies" }, "Policies")),
    h("h1", null, "Policy ", h("span", { class: "mono" }, id)),
    h("p", { class: "hint" }, state, isNew ? null : " Tasks that name no version use a new version from their next decision."),
    h("div", { class: "columns" }, form, schedule), status, advice, simulation);
  await Promise.all([preview(), suggestLanes()]);
}
