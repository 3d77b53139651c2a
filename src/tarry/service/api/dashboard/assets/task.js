/** The page of one task: its details, its timeline of attempts and waits, and actions. */
import { ApiError, call, get } from "./api.js";
import { changeItem } from "./breaker.js";
import { curlCommand, headerText } from "./curl.js";
import { details, h, notify, openDialog, pageLink, replaceContent, showError, svg } from "./dom.js";
import { count, duration, outcomeTone, relative, statusBadge, time } from "./format.js";
import { connectionState, follow } from "./live.js";

const FINISHED = ["SUCCEEDED", "EXHAUSTED", "CANCELLED"];
const EARLIER_ATTEMPTS = 100;

export async function render({ root, id, signal }) {
  const path = `retry-tasks/${encodeURIComponent(id)}`;
  const status = h("span", { role: "status" });
  const summary = h("p");
  const actions = h("div", { class: "actions" });
  const facts = h("section", { class: "panel", "aria-labelledby": "facts" });
  const timeline = h("section", { class: "panel", "aria-labelledby": "timeline" });
  const next = h("span"), untilNext = h("span");
  const { element: connection, setState } = connectionState();
  let earlier = [];
  let shownVersion = null;
  let updates = null; // an AbortController while the task is not finished

  async function load() {
    const [task, explanation] = await Promise.all([get(path, {}, signal), get(`${path}/explain`, {}, signal)]);
    const changes = (await readBreakerChanges(task, signal)).filter((change) => change.at >= task.createdAt && change.at <= (task.finishedAt ?? Infinity));
    const version = JSON.stringify([task, changes]);
    const hasChanged = version !== shownVersion;
    shownVersion = version;
    // These texts change with the time. The others stay, with the focus and what the user has opened.
    summary.textContent = next.textContent = explanation.next.text;
    untilNext.textContent = task.nextAttemptAt === null ? "" : ` (${relative(task.nextAttemptAt)})`;
    if (hasChanged) update(task, explanation, changes);
    followUntilFinished(task, hasChanged);
    return hasChanged;
  }
  function followUntilFinished(task, hasChanged) {
    // The change of the breaker by the last attempt may be recorded a moment after its result, so a finished task is read once more.
    if (FINISHED.includes(task.status) && !(updates && hasChanged)) {
      updates?.abort();
      updates = null;
      setState("");
    } else if (!updates) {
      updates = new AbortController();
      follow(AbortSignal.any([signal, updates.signal]), load, setState);
    }
  }
  function update(task, explanation, changes) {
    status.replaceChildren(statusBadge(task.status));
    replaceContent(actions, ...taskActions(task, path, load));
    facts.replaceChildren(h("h2", { id: "facts" }, "Details"), taskDetails(task, untilNext), requestBody(explanation));
    showTimeline(task, explanation, changes);
  }
  function showTimeline(task, explanation, changes) {
    const steps = [...earlier, ...explanation.steps];
    const first = steps[0]?.attemptNumber ?? 1;
    const loadEarlier = async () => {
      const cursor = Math.max(0, first - 1 - EARLIER_ATTEMPTS);
      try {
        const page = await get(`${path}/attempts`, { cursor, limit: Math.min(EARLIER_ATTEMPTS, first - 1) }, signal);
        earlier = [...page.items.map((attempt) => ({ attemptNumber: attempt.attemptNumber, attempt })), ...earlier];
        showTimeline(task, explanation, changes);
      } catch (error) {
        showError(error);
      }
    };
    const button = h("button", { type: "button", click: loadEarlier }, `Show earlier attempts (${count(first - 1)})`);
    timeline.replaceChildren(
      h("h2", { id: "timeline" }, "Timeline"),
      ...(first > 1 ? [button] : []),
      h("ol", { class: "timeline" },
        h("li", null, h("p", { class: "line" }, h("strong", null, "Created"), time(task.createdAt, { withMs: true }))),
        stepItems(steps, changes),
        endItem(task, next)));
  }

  root.replaceChildren(
    h("p", { class: "hint" }, h("a", { href: "#/tasks" }, "Tasks")),
    h("div", { class: "heading" }, h("div", { class: "title" }, h("h1", null, "Task ", h("span", { class: "mono" }, id)), status), connection),
    summary, actions, h("div", { class: "columns" }, timeline, facts));
  await load();
}

/** Return the last changes of the breaker of the task's downstream, oldest first; none if the downstream does not exist any more. */
async function readBreakerChanges(task, signal) {
  try {
    const { breakerHistory } = await get(`downstreams/${encodeURIComponent(task.lane)}`, {}, signal);
    return (breakerHistory ?? []).reverse();
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return [];
    throw error;
  }
}

/** Return the attempts and waits of a timeline, with the changes of the breaker between them. Both are sorted, oldest first. */
function stepItems(steps, changes) {
  // The change to half-open is recorded when the first probe has started, but it is the reason for this attempt.
  const isBefore = (change, { startedAt, durationMs }) => change.at < startedAt || (change.to === "half-open" && change.at <= startedAt + (durationMs ?? 0));
  const items = [];
  let shownChanges = 0, before = {};
  for (const step of steps) {
    for (; shownChanges < changes.length && isBefore(changes[shownChanges], step.attempt); shownChanges += 1) {
      // Changes before a first step that is not attempt 1 are shown with the earlier attempts.
      if (step !== steps[0] || step.attemptNumber === 1) items.push(breakerChange(changes[shownChanges]));
    }
    items.push(attemptItem(step.attempt), decisionItem(step, before));
    const { decision } = step.attempt;
    before = { breaker: decision?.breaker ?? before.breaker, budget: decision?.budget ?? before.budget };
  }
  return [...items, ...changes.slice(shownChanges).map(breakerChange)];
}

function breakerChange(change) {
  return changeItem(change, "Breaker ");
}

function taskDetails(task, untilNext) {
  const headers = Object.entries(task.headers ?? {}).map(([name, value]) => h("div", { class: "mono" }, `${name}: ${headerText(value)}`));
  const overrides = task.policy === null ? null : h("code", null, JSON.stringify(task.policy));
  return details([
    ["Target", h("span", { class: "mono" }, `${task.method} ${task.targetUrl}`)],
    ["Idempotency key", h("span", { class: "mono" }, task.idempotencyKey)],
    ["Downstream", h("a", { href: pageLink(`downstreams/${encodeURIComponent(task.lane)}`) }, task.lane)],
    ["Policy", [task.policyId, task.policyVersion === null ? null : ` (version ${task.policyVersion})`]],
    ["Policy overrides", overrides],
    ["Headers", headers.length ? headers : null],
    ["Body", task.bodyRef ?? (task.bodySize ? `${count(task.bodySize)} bytes` : "none")],
    ["Callback", task.callbackUrl],
    ["Attempts", count(task.attemptNumber)],
    ["Replays", task.replays ? count(task.replays) : null],
    ["Created", time(task.createdAt)],
    ["Next attempt", task.nextAttemptAt === null ? null : [time(task.nextAttemptAt), untilNext]],
    ["Finished", time(task.finishedAt)],
    ["Reason", task.reason],
  ]);
}

function requestBody({ requestExcerpt, requestTruncated }) {
  if (!requestExcerpt) return "";
  return h("details", { open: true },
    h("summary", null, requestTruncated ? "Beginning of the request body" : "Request body"), h("pre", { tabindex: "0" }, requestExcerpt));
}

function attemptItem(attempt) {
  const tone = outcomeTone(attempt.outcome);
  const result = attempt.responseStatus ?? attempt.errorClass ?? attempt.outcome;
  const phases = [["DNS", attempt.dnsMs], ["connect", attempt.connectMs], ["TLS", attempt.tlsMs], ["first byte", attempt.firstByteMs]]
    .filter(([, ms]) => ms !== null).map(([name, ms]) => `${name} ${duration(ms)}`).join(", ");
  const late = attempt.startedAt - attempt.scheduledAt;
  return h("li", { class: `tone-${tone}` },
    h("p", { class: "line" }, h("strong", null, `Attempt ${attempt.attemptNumber}`), h("strong", { class: "outcome" }, String(result)), time(attempt.startedAt, { withMs: true })),
    h("p", { class: "hint" }, [
      attempt.outcome,
      attempt.durationMs === null ? null : `took ${duration(attempt.durationMs)}${phases ? ` (${phases})` : ""}`,
      attempt.remoteAddress, late >= 100 ? `started ${duration(late)} after its due time` : null,
    ].filter(Boolean).join(" · ")),
    attempt.errorMessage ? h("p", null, attempt.errorMessage) : null,
    attempt.responseExcerpt ? h("details", { open: true },
      h("summary", null, attempt.responseTruncated ? "Beginning of the response" : "Response"), h("pre", { tabindex: "0" }, attempt.responseExcerpt)) : null);
}

/** Return the wait after an attempt, or that it was the last one. `before` has the breaker and the budget at the attempt before it. */
function decisionItem({ attempt, text }, before) {
  const decision = attempt.decision;
  if (!decision || decision.action === "done") return null;
  if (decision.delayMs === null) {
    return h("li", { class: "tone-permanent" },
      h("p", null, h("strong", null, "Stopped"), decision.reason ? `: ${decision.reason}` : null), laneNotes(decision, before));
  }
  const notes = [
    decision.ceilingMs === null ? null : `ceiling ${duration(decision.ceilingMs)}`,
    decision.jitter === null ? null : `${decision.jitter} jitter`,
    decision.hintMs === null ? null : `${decision.hintSource ?? "hint"}: ${duration(decision.hintMs)}`,
  ].filter(Boolean).join(" · ");
  return h("li", { class: "wait" },
    h("p", null, h("strong", null, `Wait ${duration(decision.delayMs)}`)),
    decision.ceilingMs === null ? null : waitBar(decision),
    notes ? h("p", { class: "hint" }, notes) : null,
    laneNotes(decision, before),
    text && text.includes("; was replayed") ? h("p", null, "Replayed.") : null);
}

/** Return the retry budget and the state of the breaker when a decision was made, with the values `before` if these were others. */
function laneNotes({ budget, breaker }, before) {
  const round = (number) => (typeof number === "number" ? Number(number.toFixed(1)) : number);
  const note = (tag, name, value, previous) => {
    if (value === null) return null;
    if (previous === undefined || previous === value) return h("span", null, `${name} ${value}`);
    return h("span", null, h(tag, null, `${name} ${value}`), `, before: ${previous}`);
  };
  const notes = [note("span", "retry budget", round(budget), round(before.budget)), note("strong", "breaker", breaker, before.breaker)].filter(Boolean);
  return notes.length ? h("p", { class: "line hint" }, notes) : null;
}

/** Draw the delay within its ceiling, and the server's hint as a line. */
function waitBar(decision) {
  const width = 280;
  const longest = Math.max(decision.ceilingMs, decision.delayMs, decision.hintMs ?? 0) || 1;
  const x = (ms) => (width * ms) / longest;
  const label = `Delay ${duration(decision.delayMs)} of a ceiling of ${duration(decision.ceilingMs)}`;
  return svg("svg", { role: "img", "aria-label": label, width, height: 10, viewBox: `0 0 ${width} 10` },
    svg("rect", { class: "bar-track", width: x(decision.ceilingMs), height: 10, rx: 3 }),
    svg("rect", { class: "bar-delay", width: Math.max(2, x(decision.delayMs)), height: 10, rx: 3 }),
    decision.hintMs === null ? null : svg("line", { class: "bar-hint", x1: x(decision.hintMs), x2: x(decision.hintMs), y1: -2, y2: 12 }));
}

function endItem(task, next) {
  if (FINISHED.includes(task.status)) {
    const tone = task.status === "SUCCEEDED" ? "success" : task.status === "EXHAUSTED" ? "permanent" : "lost";
    return h("li", { class: `tone-${tone}` }, h("p", { class: "line" },
      h("strong", { class: "outcome" }, task.status), task.reason, time(task.finishedAt, { withMs: true })));
  }
  return h("li", { class: "tone-waiting" }, h("p", { class: "line" }, h("strong", null, "Next"), next));
}

function taskActions(task, path, reload) {
  const change = (method, changePath, message) => async () => {
    await call(method, changePath);
    notify(message);
    await reload();
  };
  const isFinished = FINISHED.includes(task.status);
  const retry = h("button", {
    type: "button", class: "primary", "data-needs": "write",
    click: async () => {
      try {
        await change("POST", `${path}/retry`, "The next attempt starts now.")();
      } catch (error) {
        showError(error);
      }
    },
  }, "Retry now");
  const cancel = h("button", {
    type: "button", class: "danger", "data-needs": "write",
    click: () => openDialog({
      title: "Cancel this task?", label: "Cancel the task", danger: true,
      content: h("p", null, "No further attempt is made. An attempt that is running may still succeed."),
      submit: change("DELETE", path, "The task was cancelled."),
    }),
  }, "Cancel…");
  const isHttp = /^https?:/.test(task.targetUrl);
  const copy = h("button", { type: "button", click: () => showCurl(task) }, "Copy as curl…");
  return [
    task.status === "SUCCEEDED" || task.cancelling ? null : retry,
    isFinished || task.cancelling ? null : cancel,
    isHttp ? copy : null,
  ].filter(Boolean);
}

function showCurl(task) {
  const command = curlCommand(task);
  const text = h("pre", { tabindex: "0", class: "curl" }, command);
  const result = h("span", { role: "status", class: "soft" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(command);
      result.textContent = "Copied.";
    } catch {
      // The clipboard needs HTTPS or localhost, and a permission.
      getSelection().selectAllChildren(text);
      result.textContent = "Selected: copy it with your keyboard.";
    }
  };
  openDialog({
    title: "The request as a curl command",
    content: [
      h("p", { class: "hint" }, "It sends the request to the target once, without the service. Redacted secrets have to be filled in",
        task.bodySize > 0 ? `, and the body (${count(task.bodySize)} bytes) is read from the file body.` : "."),
      text,
      h("div", { class: "actions" }, result, h("button", { type: "button", class: "primary", click: copy }, "Copy")),
    ],
  });
}
