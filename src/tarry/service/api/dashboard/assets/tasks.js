/** The page Tasks: search with filters, in pages. */
import { getPage } from "./api.js";
import { breakable, field, h, pageLink, select, table } from "./dom.js";
import { count, relative, statusBadge, time } from "./format.js";

const PAGE_SIZE = 50;
const STATUSES = ["PENDING", "IN_FLIGHT", "SUCCEEDED", "EXHAUSTED", "CANCELLED"];
const TASK_ID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/;
const TEXT_FILTERS = [
  ["idempotencyKey", "Idempotency key"],
  ["urlPrefix", "Target URL starts with"],
  ["lane", "Downstream"],
  ["policyId", "Policy"],
  ["lastStatus", "Last response status"],
  ["error", "Last error contains"],
];
const TIME_FILTERS = [["createdAfter", "Created after"], ["createdBefore", "Created before"]];

/** Return the value of a `datetime-local` input for a time in epoch milliseconds. */
function toLocalInput(epochMs) {
  const ms = Number(epochMs);
  if (!epochMs || !Number.isFinite(ms)) return "";
  return new Date(ms - new Date(ms).getTimezoneOffset() * 60000).toISOString().slice(0, 19);
}

/** Return the query of the API for a submitted form. */
export function readFilters(form) {
  const query = {};
  for (const [name, value] of new FormData(form)) {
    const isTime = TIME_FILTERS.some(([timeName]) => timeName === name);
    if (value.trim()) query[name] = isTime ? new Date(value).getTime() : value.trim();
  }
  return query;
}

/** Return the fields of the filters that tasks and dead letters share. */
export function filterFields(query, names) {
  const texts = TEXT_FILTERS.filter(([name]) => names.includes(name)).map(([name, label]) =>
    field(label, h("input", { name, value: query[name], autocomplete: "off", spellcheck: "false" })));
  const times = TIME_FILTERS.map(([name, label]) =>
    field(label, h("input", { name, type: "datetime-local", step: "1", value: toLocalInput(query[name]) })));
  return [...texts, ...times];
}

/** Return the columns of a table of tasks. */
export function taskColumns() {
  return [
    { label: "Task", class: "mono", cell: (task) => h("a", { href: pageLink(`tasks/${encodeURIComponent(task.taskId)}`) }, task.taskId) },
    { label: "Status", cell: (task) => [statusBadge(task.status), task.cancelling ? " cancelling" : null] },
    { label: "Target", class: "target", cell: (task) => h("span", { title: task.targetUrl }, `${task.method} `, breakable(task.targetUrl)) },
    { label: "Key", class: "key", cell: (task) => (task.idempotencyKey === task.taskId ? "" : task.idempotencyKey) },
    { label: "Policy", class: "policy", cell: (task) => task.policyId },
    { label: "Attempts", class: "number", cell: (task) => count(task.attemptNumber) },
    { label: "Last result", cell: (task) => [task.lastStatus, task.lastError].filter((text) => text !== null).join(" ") },
    { label: "Next attempt or end", class: "nowrap", cell: (task) => nextOrEnd(task) },
    { label: "Created", class: "nowrap", cell: (task) => time(task.createdAt) },
  ];
}

function nextOrEnd(task) {
  if (task.nextAttemptAt !== null) return `${task.nextAttemptAt < Date.now() ? "due " : ""}${relative(task.nextAttemptAt)}`;
  return [task.finishedAt === null ? null : relative(task.finishedAt), task.reason === null ? null : h("div", { class: "hint" }, task.reason)];
}

/** Return links to the first and the next page of a list. */
export function pager(path, query, page) {
  if (!page.items.length && !query.cursor && page.nextCursor === null) return "";
  return h("nav", { class: "pager", "aria-label": "Pages of the list" },
    query.cursor ? h("a", { class: "button", href: pageLink(path, { ...query, cursor: "" }) }, "First page") : null,
    page.nextCursor === null ? h("span", { class: "soft" }, "End of the list.")
      : h("a", { class: "button", href: pageLink(path, { ...query, cursor: page.nextCursor }) }, "Next page"));
}

export async function render({ root, query, signal, show }) {
  const id = h("input", { name: "taskId", autocomplete: "off", spellcheck: "false", placeholder: "01a1dee8-4da6-…" });
  const submit = (event) => {
    event.preventDefault();
    const { taskId, ...filters } = readFilters(form);
    if (taskId && !TASK_ID.test(taskId.toLowerCase())) {
      id.setAttribute("aria-invalid", "true");
      idProblem.textContent = "A task id has 36 characters: 8-4-4-4-12 hexadecimal digits.";
      id.focus();
    } else if (taskId) location.hash = pageLink(`tasks/${taskId.toLowerCase()}`);
    else show(filters);
  };
  const idProblem = h("span", { class: "field-problem", role: "alert" });
  const statuses = [["", "any"], ...STATUSES.map((status) => [status, status])];
  const form = h("form", { class: "filters panel", role: "search", "aria-label": "Search tasks", submit },
    h("label", null, "Task id", id, idProblem),
    field("Status", select("status", statuses, query.status)),
    filterFields(query, TEXT_FILTERS.map(([name]) => name)),
    h("div", { class: "actions" },
      h("button", { type: "submit", class: "primary" }, "Search"),
      h("a", { class: "button", href: "#/tasks" }, "Clear")));
  const results = h("section", { "aria-label": "Search results" }, h("p", { class: "soft loading" }, "Searching…"));
  root.replaceChildren(h("h1", null, "Tasks"), form, results);
  const page = await getPage("retry-tasks", { ...query, limit: PAGE_SIZE }, signal);
  const list = page.items.length
    ? table("Newest tasks first", taskColumns(), page.items)
    : h("p", { class: "empty panel" }, page.nextCursor === null ? "No tasks match." : "No tasks match so far. The search continues on the next page.");
  results.replaceChildren(list, pager("tasks", query, page));
}
