/** The page Downstreams: one row per lane, and the actions of an operator on it. The page of one lane has its latency and breaker history. */
import { call, get } from "./api.js";
import { breakerTimeline, latencyTiles } from "./breaker.js";
import { breakable, field, h, notify, openDialog, pageLink, replaceContent, row, select, table, updateRow } from "./dom.js";
import { count, decimal, duration, relative, shortTime, statusBadge, waitReason } from "./format.js";
import { connectionState, follow } from "./live.js";
import { pager } from "./tasks.js";

const PAGE_SIZE = 50;
const STATES = ["PARKED", "PAUSED", "PROBING", "ACTIVE"];
/** The API has no filter by state: a search reads all downstreams in pages of this size until `PAGE_SIZE` of them match. */
const SEARCH_PAGE_SIZE = 200;
/** A search of 10,000 downstreams takes the service about a second, so an open page repeats it less often than other reads. */
const SEARCH_INTERVAL_MS = 10_000;
const BREAKER_FIELDS = [
  ["failureRate", "Failure rate (0 to 1)", 0.01], ["minCalls", "Minimum attempts", 1], ["windowMs", "Window (ms)", 1],
  ["consecutiveFailures", "Failures in a row", 1], ["openForMs", "Open for (ms)", 1], ["maxOpenMs", "Open for at most (ms)", 1], ["probes", "Probes", 1],
];
const BUDGET_FIELDS = [["ratio", "Retries per attempt (0 to 1)", 0.01], ["minPerSecond", "Retries per second in addition", 0.01]];

const lanePath = (lane) => `downstreams/${encodeURIComponent(lane)}`;

function columns(actions) {
  return [
    { label: "Downstream", class: "mono lane", cell: (item) => h("a", { href: pageLink(lanePath(item.lane)) }, breakable(item.lane)) },
    { label: "State", cell: (item) => [statusBadge(item.state), stateNote(item)] },
    { label: "Breaker", cell: (item) => [item.breaker, item.consecutiveOpens > 1 ? ` (opened ${item.consecutiveOpens} times)` : null, breakerNote(item)] },
    { label: "Retry budget", class: "number", cell: (item) => decimal(item.local?.budget) },
    { label: "Limits", class: "limits", cell: (item) => describeLimits(item) },
    { label: "In flight", class: "number", cell: (item) => count(item.inFlight) },
    { label: "Pending", class: "number", cell: (item) => count(item.pending) },
    { label: "Dead", class: "number", cell: (item) => count(item.dead) },
    { label: "p50 / p99", class: "number", cell: ({ latency }) => (latency ? `${duration(latency.p50Ms)} / ${duration(latency.p99Ms)}` : "") },
    { label: "Actions", class: "lane-actions", cell: actions },
  ];
}

function stateNote(item) {
  const notes = [item.local?.waitReason];
  if (item.parkedUntil !== null && item.state === "PARKED") {
    notes.unshift(item.parkedUntil > Date.now() ? `probes ${relative(item.parkedUntil)}` : "probes are due");
  }
  if (item.waitingFor) notes.push(`waiting for: ${waitReason(item.waitingFor)}`);
  return notes.filter(Boolean).map((note) => h("div", { class: "hint" }, note));
}

function breakerNote(item) {
  // A breaker is half-open as soon as its open period ends, but the change is recorded when the first probe starts. Until
  // then, the last recorded change is an older one.
  if (item.breakerChangedAt == null || item.breaker === "half-open") return null;
  return h("div", { class: "hint" }, "since ", shortTime(item.breakerChangedAt));
}

function describeLimits(item) {
  const { limits, local } = item;
  const parts = [];
  if (limits.ratePerSecond != null) parts.push(`${decimal(limits.ratePerSecond)}/s`);
  if (limits.concurrency != null) parts.push(`${count(limits.concurrency)} at a time`);
  if (limits.breaker) parts.push(limits.breaker.enabled === false ? "breaker off" : "breaker set");
  if (limits.budget) parts.push(limits.budget.enabled === false ? "budget off" : "budget set");
  const current = [
    local?.ratePerSecond == null ? null : `now ${decimal(local.ratePerSecond)}/s`,
    local?.concurrencyLimit == null ? null : `now ${count(local.concurrencyLimit)} at a time`,
  ].filter(Boolean).join(", ");
  return [parts.join(", ") || "default", current ? h("div", { class: "hint" }, current) : null];
}

/** Return the buttons of a lane; `latest()` returns the lane as it was read last, `onChange(item)` is called with the changed lane. */
function laneActions(item, latest, onChange) {
  const confirm = (verb, title, text, done, danger) => () => openDialog({
    title, label: title.replace(/\?$/, ""), danger, content: [h("p", { class: "mono" }, item.lane), h("p", null, text)],
    submit: async () => {
      onChange(await call("POST", `${lanePath(item.lane)}/${verb}`));
      notify(`${done}: ${item.lane}`);
    },
  });
  const button = (label, click) => h("button", { type: "button", class: "small", "data-needs": "write", click, "aria-label": `${label} ${item.lane}` }, label);
  return h("span", { class: "actions" },
    item.state === "PAUSED" ? null : button("Pause", confirm("pause", "Pause this downstream?", "No attempt starts until it is resumed. The pause counts towards the total budget of waiting tasks.", "Paused", true)),
    item.state === "ACTIVE" ? null : button("Resume", confirm("resume", "Resume this downstream?", "Attempts start again, slowly at first, even if the breaker is open.", "Resumed")),
    button("Reset", confirm("reset", "Reset this downstream?", "Breaker, retry budget, latency and current limits start from their initial state, and the downstream is resumed. Limits that were set stay.", "Reset")),
    button("Limits…", () => editLimits(latest(), onChange)));
}

function numberInput(name, value, step) {
  return h("input", { name, type: "number", step: step < 1 ? "any" : "1", min: "0", value: value ?? null, placeholder: "default" });
}

function editLimits(item, onChange) {
  const { limits } = item;
  const group = (name, title, fields, settings) => h("fieldset", null, h("legend", null, title),
    h("label", { class: "check" }, h("input", { name: `${name}.enabled`, type: "checkbox", checked: settings?.enabled !== false }), "Enabled"),
    h("div", { class: "form-grid" }, fields.map(([key, label, step]) => field(label, numberInput(`${name}.${key}`, settings?.[key], step)))));
  const readGroup = (form, name, fields) => {
    const values = form.elements.namedItem(`${name}.enabled`).checked ? {} : { enabled: false };
    for (const [key] of fields) {
      const text = form.elements.namedItem(`${name}.${key}`).value;
      if (text !== "") values[key] = Number(text);
    }
    return Object.keys(values).length ? values : null;
  };
  openDialog({
    title: "Limits of this downstream", label: "Set limits",
    content: [
      h("p", { class: "mono" }, item.lane),
      h("p", { class: "hint" }, "These values replace all limits of the downstream, for all processes. Empty fields have the default; without any value, limits are removed."),
      h("div", { class: "form-grid" },
        field("Attempts per second", numberInput("ratePerSecond", limits.ratePerSecond, 0.01)),
        field("Attempts at a time", numberInput("concurrency", limits.concurrency, 1))),
      group("breaker", "Breaker", BREAKER_FIELDS, limits.breaker),
      group("budget", "Retry budget", BUDGET_FIELDS, limits.budget),
    ],
    submit: async (form) => {
      const body = {};
      for (const name of ["ratePerSecond", "concurrency"]) {
        if (form.elements.namedItem(name).value !== "") body[name] = Number(form.elements.namedItem(name).value);
      }
      const breaker = readGroup(form, "breaker", BREAKER_FIELDS);
      const budget = readGroup(form, "budget", BUDGET_FIELDS);
      if (breaker) body.breaker = breaker;
      if (budget) body.budget = budget;
      onChange(await call("PUT", lanePath(item.lane), { body }));
      notify(`${Object.keys(body).length ? "Limits set" : "Limits removed"}: ${item.lane}`);
    },
  });
}

/**
 * Show lanes and keep them up to date; `read()` returns a page of lanes, or null to keep the current rows. `caption` is the
 * caption of the table. `emptyText` is shown if there are no lanes. `onItem(item)` is called for each lane that was read.
 */
async function showLanes({ signal }, setState, section, { read, caption, emptyText = "", footer, onItem = () => {} }) {
  const rows = new Map();
  let shownText = "";
  let actionCount = 0;
  const onAction = (item) => {
    actionCount += 1;
    update(item);
  };
  const shown = columns((item) => laneActions(item, () => rows.get(item.lane).item, onAction));
  function update(item) {
    onItem(item);
    const known = rows.get(item.lane);
    if (!known) return;
    known.item = item;
    updateRow(known.element, row(shown, item));
  }
  function show(page) {
    if (page === null) {
      rows.forEach(({ item }) => update(item)); // relative times, such as "in 9 min", change even if the data has not
      return false;
    }
    // A retry budget fills up again for seconds after an attempt: this is no reason to read more often.
    const text = JSON.stringify(page, (name, value) => (name === "budget" && typeof value === "number" ? null : value));
    const hasChanged = text !== shownText;
    shownText = text;
    const isSame = page.items.length === rows.size && page.items.every((item) => rows.has(item.lane));
    if (isSame && (rows.size || !hasChanged)) {
      page.items.forEach(update); // relative times, such as "in 9 min", change even if the data has not
      return hasChanged;
    }
    replaceContent(section, page.items.length ? table(caption, shown, page.items)
      : h("p", { class: "empty panel" }, emptyText), ...footer(page));
    rows.clear();
    page.items.forEach(onItem);
    page.items.forEach((item, index) => rows.set(item.lane, { item, element: section.querySelector("tbody").rows[index] }));
    return hasChanged;
  }
  const readAndShow = async () => {
    const countBefore = actionCount;
    const page = await read();
    // A read that began before an action may have the lane as it was before: the row keeps the result of the action.
    return actionCount === countBefore ? show(page) : true;
  };
  await readAndShow();
  follow(signal, readAndShow, setState);
}

/** Return the lanes in `state` from `cursor` on. Reads pages until `PAGE_SIZE` lanes match, and returns all matches on these pages. */
async function searchLanes(state, cursor, signal) {
  const items = [];
  let nextCursor = cursor;
  do {
    const page = await get("downstreams", { cursor: nextCursor, limit: SEARCH_PAGE_SIZE }, signal);
    items.push(...page.items.filter((item) => item.state === state));
    nextCursor = page.nextCursor;
  } while (items.length < PAGE_SIZE && nextCursor !== null);
  return { items, nextCursor };
}

/** Return a function that searches lanes by state. It returns null if its last search was less than `SEARCH_INTERVAL_MS` ago. */
function laneSearch(state, cursor, signal) {
  let nextSearchAt = 0;
  return async () => {
    if (performance.now() < nextSearchAt) return null;
    const begin = performance.now();
    const page = await searchLanes(state, cursor, signal);
    const end = performance.now();
    nextSearchAt = end + Math.max(SEARCH_INTERVAL_MS, 4 * (end - begin)); // searches take at most a fifth of the time
    return page;
  };
}

export async function render(view) {
  const { root, query, signal, show } = view;
  const input = h("input", { name: "lane", autocomplete: "off", spellcheck: "false", placeholder: "https:api.example.com:443" });
  const submit = (event) => {
    event.preventDefault();
    if (input.value.trim()) location.hash = pageLink(lanePath(input.value.trim()));
    else show({ state: states.value });
  };
  const state = STATES.includes(query.state) ? query.state : "";
  const states = select("state", [["", "any"], ...STATES.map((name) => [name, name])], state);
  const section = h("section", { "aria-label": "Downstreams" }, h("p", { class: "soft loading" }, "Loading…"));
  const { element: connection, setState } = connectionState();
  root.replaceChildren(h("div", { class: "heading" }, h("h1", null, "Downstreams"), connection),
    h("form", { class: "filters panel", role: "search", "aria-label": "Find a downstream", submit },
      field("Exact name of a downstream (opens its page)", input), field("State", states),
      h("div", { class: "actions" },
        h("button", { type: "submit", class: "primary" }, "Show"),
        h("a", { class: "button", href: "#/downstreams" }, "Clear"))),
    section);
  const more = query.cursor ? "more " : "";
  await showLanes(view, setState, section, {
    read: state ? laneSearch(state, query.cursor, signal) : () => get("downstreams", { cursor: query.cursor, limit: PAGE_SIZE }, signal),
    caption: `Downstreams${state ? ` in the state ${state}` : ""}, sorted by name`,
    emptyText: state ? `No ${more}downstream is in the state ${state}.` : `There are no ${more}downstreams.`,
    footer: (page) => [pager("downstreams", query, page)],
  });
}

/** Return a section that `build(item)` builds again only when `parts(item)` has changed, so that a screen reader keeps its position otherwise. */
function activitySection(parts, build) {
  const section = { element: h("section"), update };
  let shownText = null;
  function update(item) {
    const text = JSON.stringify(parts(item));
    if (text === shownText) return;
    shownText = text;
    const next = build(item);
    section.element.replaceWith(next);
    section.element = next;
  }
  return section;
}

export async function renderItem(view) {
  const { root, id, signal } = view;
  const section = h("section", { "aria-label": "Downstream" }, h("p", { class: "soft loading" }, "Loading…"));
  const { element: connection, setState } = connectionState();
  const latency = activitySection((item) => [item.latency], (item) => latencyTiles(item.latency));
  const breaker = activitySection((item) => [item.breaker, item.breakerHistory], (item) => breakerTimeline(item.breaker, item.breakerHistory ?? []));
  const activity = h("div", null, latency.element, breaker.element);
  root.replaceChildren(
    h("p", { class: "hint" }, h("a", { href: "#/downstreams" }, "Downstreams")),
    h("div", { class: "heading" }, h("h1", null, "Downstream ", h("span", { class: "mono" }, id)), connection), section, activity);
  const read = async () => ({ items: [await get(lanePath(id), {}, signal)], nextCursor: null });
  const showActivity = (item) => [latency, breaker].forEach(({ update }) => update(item));
  const footer = () => [h("p", { class: "actions" },
    h("a", { class: "button", href: pageLink("tasks", { lane: id }) }, "Tasks of this downstream"),
    h("a", { class: "button", href: pageLink("tasks", { lane: id, status: "EXHAUSTED" }) }, "Its dead letters"))];
  await showLanes(view, setState, section, { read, caption: "State, limits and backlog", footer, onItem: showActivity });
}
