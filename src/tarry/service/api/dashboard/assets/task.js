/** The page of one task: its details, its timeline of attempts and waits, and actions. */
import { call, get } from "./api.js";
import { curlCommand, headerText } from "./curl.js";
import { details, h, notify, openDialog, pageLink, showError, svg } from "./dom.js";
import { count, duration, outcomeTone, relative, statusBadge, time } from "./format.js";

const REFRESH_MS = 2000;
const FINISHED = ["SUCCEEDED", "EXHAUSTED", "CANCELLED"];
const EARLIER_ATTEMPTS = 100;

export async function render({ root, id, signal }) {
  const path = `retry-tasks/${encodeURIComponent(id)}`;
  const status = h("span", { role: "status" });
  const summary = h("p");
  const actions = h("div", { class: "actions" });
  const facts = h("section", { class: "panel", "aria-labelledby": "facts" });
  const timeline = h("section", { class: "panel", "aria-labelledby": "timeline" });
  let earlier = [];
  let shownVersion = null;

  async function load() {
    const [task, explanation] = await Promise.all([get(path, {}, signal), get(`${path}/explain`, {}, signal)]);
    const version = JSON.stringify([task, explanation.next]);
    if (version !== shownVersion) {
      shownVersion = version;
      update(task, explanation);
    }
    if (!FINISHED.includes(task.status)) {
      setTimeout(refresh, REFRESH_MS);
    }
  }
  async function refresh() {
    if (signal.aborted) return;
    if (document.visibilityState === "hidden") {
      document.addEventListener("visibilitychange", refresh, { once: true, signal });
      return;
    }
    try {
      await load();
    } catch (error) {
      if (!signal.aborted) showError(error);
    }
  }
  function update(task, explanation) {
    status.replaceChildren(statusBadge(task.status));
    summary.textContent = explanation.next.text;
    actions.replaceChildren(...taskActions(task, path, load));
    facts.replaceChildren(h("h2", { id: "facts" }, "Details"), taskDetails(task), requestBody(explanation));
    showTimeline(task, explanation);
  }
  function showTimeline(task, explanation) {
    const steps = [...earlier, ...explanation.steps];
    const first = steps[0]?.attemptNumber ?? 1;
    const loadEarlier = async () => {
      const cursor = Math.max(0, first - 1 - EARLIER_ATTEMPTS);
      try {
        const page = await get(`${path}/attempts`, { cursor, limit: Math.min(EARLIER_ATTEMPTS, first - 1) }, signal);
        earlier = [...page.items.map((attempt) => ({ attemptNumber: attempt.attemptNumber, attempt })), ...earlier];
        showTimeline(task, explanation);
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
        steps.map((step) => [attemptItem(step.attempt), waitItem(step)]),
        endItem(task, explanation)));
  }

  root.replaceChildren(
    h("p", { class: "hint" }, h("a", { href: "#/tasks" }, "Tasks")),
    h("div", { class: "heading" }, h("h1", null, "Task ", h("span", { class: "mono" }, id)), status),
    summary, actions, h("div", { class: "columns" }, timeline, facts));
  await load();
}

function taskDetails(task) {
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
    ["Next attempt", task.nextAttemptAt === null ? null : [time(task.nextAttemptAt), ` (${relative(task.nextAttemptAt)})`]],
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

function waitItem({ attempt, text }) {
  const decision = attempt.decision;
  if (!decision || decision.action === "done") return null;
  if (decision.delayMs === null) {
    return h("li", { class: "tone-permanent" }, h("p", null, h("strong", null, "Stopped"), decision.reason ? `: ${decision.reason}` : null));
  }
  const notes = [
    decision.ceilingMs === null ? null : `ceiling ${duration(decision.ceilingMs)}`,
    decision.jitter === null ? null : `${decision.jitter} jitter`,
    decision.hintMs === null ? null : `${decision.hintSource ?? "hint"}: ${duration(decision.hintMs)}`,
    decision.budget === null ? null : `retry budget ${Number(decision.budget.toFixed(1))}`,
    decision.breaker === null ? null : `breaker ${decision.breaker}`,
  ].filter(Boolean).join(" · ");
  return h("li", { class: "wait" },
    h("p", null, h("strong", null, `Wait ${duration(decision.delayMs)}`)),
    decision.ceilingMs === null ? null : waitBar(decision),
    h("p", { class: "hint" }, notes),
    text && text.includes("; was replayed") ? h("p", null, "Replayed.") : null);
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

function endItem(task, explanation) {
  if (FINISHED.includes(task.status)) {
    const tone = task.status === "SUCCEEDED" ? "success" : task.status === "EXHAUSTED" ? "permanent" : "lost";
    return h("li", { class: `tone-${tone}` }, h("p", { class: "line" },
      h("strong", { class: "outcome" }, task.status), task.reason, time(task.finishedAt, { withMs: true })));
  }
  return h("li", { class: "tone-waiting" }, h("p", { class: "line" }, h("strong", null, "Next"), h("span", null, explanation.next.text)));
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
