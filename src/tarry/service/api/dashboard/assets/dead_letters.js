/** The page Dead letters: groups, filters, and replays with their progress. */
import { call, get, getPage } from "./api.js";
import { breakable, field, h, notify, openDialog, pageLink, replaceContent, select, showError, table } from "./dom.js";
import { count, decimal, relative, statusBadge, time } from "./format.js";
import { filterFields, pager, readFilters, taskColumns } from "./tasks.js";

const PAGE_SIZE = 50;
/** Number of requests, each for up to 10,000 dead letters, when older dead letters are counted. */
const OLDER_GROUP_REQUESTS = 10;
/** Number of groups that are shown at first: a browser needs seconds for the rows of 10,000 groups. */
const SHOWN_GROUPS = 100;
const REFRESH_MS = 1000;
/** While a replay runs, the dead letters are listed and counted again after this time. */
const LIST_REFRESH_MS = 5000;
const DEFAULT_RATE = 50;
/** The reasons of the API (`Reason` in tarry.core.verdict), the most frequent ones first. */
const REASONS = ["attempts", "total-budget", "permanent", "overloaded", "hint-too-long", "not-repeatable", "deadline", "stopped", "retries-off", "retried-below", "breaker-open", "budget-empty", "limit"];
const FILTERS = ["idempotencyKey", "urlPrefix", "lane", "policyId", "lastStatus", "error"];

/** Return the filter of a replay for the query of the page. */
function replayFilter(query) {
  const filter = {};
  for (const name of [...FILTERS, "reason", "createdAfter", "createdBefore"]) {
    if (query[name]) filter[name] = name.startsWith("created") ? Number(query[name]) : query[name];
  }
  return filter;
}

/** Add the groups of older dead letters to `groups`, by reason and downstream. */
function addGroups(groups, olderGroups) {
  for (const group of olderGroups) {
    const key = JSON.stringify([group.reason, group.lane]);
    const known = groups.get(key);
    groups.set(key, known ? { ...known, count: known.count + group.count } : group);
  }
}

/** Return the field of a dialog for the rate of a replay. */
function rateField() {
  return field("Tasks per second", h("input", { name: "rate", type: "number", min: "0", step: "any", required: true, value: String(DEFAULT_RATE) }), "0 replays all of them at once.");
}

/** Return the rate in the form of a dialog. */
function readRate(form) {
  return Number(form.elements.namedItem("rate").value);
}

function openReplay(query, started) {
  const filter = replayFilter(query);
  const hasFilter = Object.keys(filter).length > 0;
  const counted = h("p", { role: "status" }, "Counting…");
  const dialog = openDialog({
    title: "Replay dead letters", label: "Start the replay",
    content: [
      h("p", null, hasFilter ? "All dead letters that match the filter are tried again:" : "All dead letters are tried again."),
      hasFilter ? h("ul", null, Object.entries(query).filter(([name]) => name in filter)
        .map(([name, value]) => h("li", { class: "mono" }, `${name}: ${value}`))) : null,
      counted,
      rateField(),
    ],
    submit: async (form) => {
      const rate = readRate(form);
      const replay = await call("POST", "dead-letters/replays", { body: { filter, all: !hasFilter, rate } });
      notify(`The replay of ${count(replay.matched)} dead letters was started.`);
      started();
    },
  });
  call("POST", "dead-letters/replays", { body: { filter, dryRun: true } }).then(
    ({ matched }) => { counted.replaceChildren(h("strong", null, count(matched)), ` dead ${matched === 1 ? "letter matches" : "letters match"} now.`); },
    (error) => { if (dialog.isConnected) counted.textContent = error.message; });
}

/**
 * Replay single dead letters, one request after another until the dialog is closed. Replayed ones are removed from the set
 * `selected`. `ended()` is called at the end, also after an error.
 */
function openReplayOfSelected(selected, ended) {
  const total = selected.size;
  const progress = h("p", { role: "status" });
  const dialog = openDialog({
    title: "Replay the selected dead letters", label: "Start the replay",
    content: [
      h("p", null, h("strong", null, count(total)), ` selected dead ${total === 1 ? "letter is" : "letters are"} tried again. Close the dialog to stop.`),
      rateField(), progress,
    ],
    submit: async (form) => {
      const pauseMs = readRate(form) > 0 ? 1000 / readRate(form) : 0;
      let replayed = 0;
      const report = () => `${count(replayed)} of ${count(total)}`;
      try {
        for (const taskId of [...selected]) {
          if (replayed) await new Promise((resolve) => { setTimeout(resolve, pauseMs); });
          if (!dialog.isConnected) return;
          if (!selected.has(taskId)) continue; // it is no longer a dead letter
          await call("POST", `retry-tasks/${encodeURIComponent(taskId)}/retry`);
          selected.delete(taskId);
          replayed += 1;
          progress.textContent = `${report()} replayed`;
        }
      } finally {
        if (replayed) notify(`${report()} selected dead letters replayed.`);
        ended();
      }
    },
  });
}

function replayColumns(reload) {
  const cancel = (replay) => openDialog({
    title: "Cancel this replay?", label: "Cancel the replay", danger: true,
    content: h("p", null, "Dead letters that were not replayed yet stay dead letters. Replayed tasks are not affected."),
    submit: async () => {
      await call("DELETE", `dead-letters/replays/${encodeURIComponent(replay.replayId)}`);
      notify("The replay was cancelled.");
      await reload();
    },
  });
  return [
    { label: "Started", class: "nowrap", cell: (replay) => time(replay.createdAt) },
    { label: "Status", cell: (replay) => statusBadge(replay.status) },
    { label: "Filter", cell: (replay) => describeFilter(replay.filter) },
    { label: "Rate", class: "number", cell: (replay) => (replay.rate === 0 ? "at once" : `${decimal(replay.rate)}/s`) },
    { label: "Progress", cell: (replay) => [
      h("progress", { max: Math.max(1, replay.matched), value: replay.replayed, "aria-label": "Replayed dead letters" }),
      h("div", { class: "hint" }, `${count(replay.replayed)} of ${count(replay.matched)} replayed`)] },
    { label: "Results", cell: (replay) => Object.entries(replay.finished).map(([status, number]) => `${count(number)} ${status}`).join(", ") },
    { label: "Actions", cell: (replay) => (replay.status === "RUNNING" ? h("button", { type: "button", class: "small danger", "data-needs": "write", click: () => cancel(replay) }, "Cancel…") : "") },
  ];
}

function describeFilter(filter) {
  const used = Object.entries(filter).filter(([name]) => name !== "before");
  return used.length ? used.map(([name, value]) => h("div", { class: "mono" }, `${name}: ${value}`)) : "all";
}

export async function render({ root, query, signal, show }) {
  const reasons = [["", "any"], ...REASONS.map((reason) => [reason, reason])];
  const form = h("form", {
    class: "filters panel", role: "search", "aria-label": "Filter dead letters",
    submit: (event) => { event.preventDefault(); show(readFilters(form)); },
  },
  field("Reason", select("reason", reasons, query.reason)), filterFields(query, FILTERS),
  h("div", { class: "actions" },
    h("button", { type: "submit", class: "primary" }, "Filter"),
    h("a", { class: "button", href: "#/dead-letters" }, "Clear"),
    h("button", { type: "button", "data-needs": "write", click: () => openReplay(readFilters(form), showReplays) }, "Replay…")));
  const replays = h("section", { "aria-labelledby": "replays" });
  const groups = h("section", { "aria-labelledby": "groups" }, h("p", { class: "soft loading" }, "Loading…"));
  const list = h("section", { "aria-label": "Dead letters" });
  root.replaceChildren(h("h1", null, "Dead letters"), form, replays, groups, list);

  let timer = null;
  let shown = "";
  let latest = null;
  let listedAt = Date.now();
  async function showReplays() {
    clearTimeout(timer);
    try {
      const { items } = await get("dead-letters/replays", {}, signal);
      const text = JSON.stringify(items);
      if (text !== shown && !(replays.contains(document.activeElement) && shown)) {
        shown = text;
        replays.replaceChildren(...(items.length ? [h("h2", { id: "replays" }, "Replays"), table("Latest replays first", replayColumns(showReplays), items.slice(0, 10))] : []));
      }
      const isRunning = items.some((replay) => replay.status === "RUNNING");
      if (latest !== null && text !== latest && (!isRunning || Date.now() - listedAt >= LIST_REFRESH_MS)) await showDeadLetters();
      latest = text;
      if (isRunning && !signal.aborted) timer = setTimeout(showReplays, REFRESH_MS);
    } catch (error) {
      if (!signal.aborted) showError(error);
    }
  }
  const { cursor, ...filters } = query;
  const groupColumns = [
    { label: "Reason", class: "nowrap", cell: (group) => h("strong", null, group.reason) },
    { label: "Downstream", class: "mono", cell: (group) => h("a", { href: pageLink(`downstreams/${encodeURIComponent(group.lane)}`) }, breakable(group.lane)) },
    { label: "Count", class: "number", cell: (group) => count(group.count) },
    { label: "Last error", cell: (group) => [group.newestStatus, group.newestError].filter((text) => text !== null).join(" ") },
    { label: "Latest", class: "nowrap", cell: (group) => (group.newestFinishedAt === null ? "" : relative(group.newestFinishedAt)) },
    { label: "Actions", cell: (group) => h("span", { class: "actions" },
      h("a", { class: "button small", href: pageLink("dead-letters", { ...filters, reason: group.reason, lane: group.lane }), "aria-label": `Show ${group.reason} ${group.lane}` }, "Show"),
      h("button", { type: "button", class: "small", "data-needs": "write", "aria-label": `Replay ${group.reason} ${group.lane}`,
        click: () => openReplay({ ...filters, reason: group.reason, lane: group.lane }, showReplays) }, "Replay…")) },
  ];
  let counted = { groups: new Map(), cursor: "", requests: 0 };
  let counting = Promise.resolve();
  let showsAllGroups = false;
  /** Count older dead letters, or all that were counted again. Counts run one after another: each continues where the last one ended. */
  function countGroups({ again = false } = {}) {
    const result = counting.then(async () => {
      const total = again ? { groups: new Map(), cursor: "", requests: 0 } : counted;
      const end = again ? Math.max(1, counted.requests) : total.requests + OLDER_GROUP_REQUESTS;
      while (total.requests < end && total.cursor !== null) {
        const page = await get("dead-letters/groups", { ...filters, cursor: total.cursor }, signal);
        addGroups(total.groups, page.items);
        total.cursor = page.nextCursor;
        total.requests += 1;
      }
      counted = total;
      showGroups(total);
    });
    counting = result.catch(() => {});
    return result;
  }
  function showGroups({ groups: byKey, cursor: nextCursor }) {
    const sorted = [...byKey.values()].sort((a, b) => b.count - a.count);
    const total = count(sorted.reduce((sum, group) => sum + group.count, 0));
    const countMore = async (event) => {
      event.target.disabled = true;
      try {
        await countGroups();
      } catch (error) {
        event.target.disabled = false;
        showError(error);
      }
    };
    const showAll = () => {
      showsAllGroups = true;
      showGroups(counted);
    };
    const shownGroups = showsAllGroups ? sorted : sorted.slice(0, SHOWN_GROUPS);
    const isPart = shownGroups.length < sorted.length;
    const caption = (nextCursor === null ? `All ${total} dead letters` : `The newest ${total} dead letters`)
      + (isPart ? `: the ${count(SHOWN_GROUPS)} largest of ${count(sorted.length)} groups` : "");
    const buttons = [
      isPart ? h("button", { type: "button", click: showAll }, `Show all ${count(sorted.length)} groups`) : null,
      nextCursor === null ? null : h("button", { type: "button", click: countMore }, "Count older dead letters"),
    ].filter(Boolean);
    replaceContent(groups,
      ...(sorted.length ? [h("h2", { id: "groups" }, "By reason and downstream"), table(caption, groupColumns, shownGroups)] : []),
      ...(buttons.length ? [h("p", { class: "actions" }, buttons)] : []));
  }
  async function showDeadLetters() {
    listedAt = Date.now();
    // The list does not wait for the groups, which take longer to count.
    const listed = getPage("dead-letters", { ...query, limit: PAGE_SIZE }, signal).then(showList);
    await Promise.all([listed, countGroups({ again: true })]);
  }
  const selected = new Set(); // ids of tasks of the shown page
  function showList(page) {
    const ids = page.items.map((task) => task.taskId);
    for (const taskId of selected) if (!ids.includes(taskId)) selected.delete(taskId);
    const reload = () => showDeadLetters().catch((error) => { if (!signal.aborted) showError(error); });
    const replaySelected = h("button", { type: "button", "data-needs": "write", click: () => openReplayOfSelected(selected, reload) }, "Replay selected…");
    const all = h("input", {
      type: "checkbox",
      change: () => {
        boxes.forEach((box) => { box.checked = all.checked; });
        updateSelection();
      },
    });
    const updateSelection = () => {
      selected.clear();
      boxes.forEach((box, index) => { if (box.checked) selected.add(ids[index]); });
      updateControls();
    };
    const updateControls = () => {
      replaySelected.disabled = selected.size === 0;
      all.checked = selected.size === ids.length;
    };
    const boxes = ids.map((taskId) => h("input", {
      type: "checkbox", class: "row-select", "data-needs": "write", "aria-label": `Select ${taskId}`, checked: selected.has(taskId),
      change: updateSelection,
    }));
    updateControls();
    const [taskColumn, ...otherColumns] = taskColumns();
    const selectColumn = { ...taskColumn, cell: (task) => [boxes[ids.indexOf(task.taskId)], taskColumn.cell(task)] };
    replaceContent(list,
      ...(page.items.length ? [
        h("h2", null, "List"),
        h("p", { class: "actions" }, h("label", { class: "check", "data-needs": "write" }, all, "Select all on this page"), replaySelected),
        table("Newest dead letters first", [selectColumn, ...otherColumns], page.items),
      ] : [h("p", { class: "empty panel" }, page.nextCursor === null ? "There are no dead letters that match." : "No dead letters match so far. The search continues on the next page.")]),
      pager("dead-letters", query, page));
  }
  await Promise.all([showReplays(), showDeadLetters()]);
}
