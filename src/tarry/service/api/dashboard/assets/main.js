/** The entry point: navigation between the pages, and signing in. */
import { apiKey, get, setApiKey } from "./api.js";
import { clearError, field, h, notify, pageLink, showError, takeNextMessage } from "./dom.js";
import * as deadLetters from "./dead_letters.js";
import * as downstreams from "./downstreams.js";
import * as overview from "./overview.js";
import * as policies from "./policies.js";
import * as task from "./task.js";
import * as tasks from "./tasks.js";

const PAGES = [
  { name: "overview", label: "Overview", render: overview.render },
  { name: "tasks", label: "Tasks", render: tasks.render, renderItem: task.render },
  { name: "downstreams", label: "Downstreams", render: downstreams.render, renderItem: downstreams.renderItem },
  { name: "dead-letters", label: "Dead letters", render: deadLetters.render },
  { name: "policies", label: "Policies", render: policies.render, renderItem: policies.renderItem },
];

const main = document.getElementById("main");
const navigation = document.getElementById("navigation");
const signOut = document.getElementById("sign-out");
const requiresKey = document.documentElement.dataset.apiKeys === "required";
let controller = new AbortController();

/** Return the parts of the URL's fragment: `#/tasks/ID?status=PENDING`. */
function parseFragment() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const page = PAGES.find((candidate) => candidate.name === name) ?? PAGES[0];
  let id = "";
  try {
    id = decodeURIComponent(rest.join("/"));
  } catch {
    // An invalid escape sequence: show the list.
  }
  return { page, id, query: Object.fromEntries(new URLSearchParams(query)) };
}

/** Set `data-key-role` to the role of the API key: the style sheet hides buttons that need another role. */
async function readRole() {
  const { dataset } = document.documentElement;
  if (!requiresKey || dataset.keyRole) return;
  try {
    dataset.keyRole = (await get("whoami")).role;
  } catch {
    // Without the role all buttons are shown; the service still rejects what the key may not do.
  }
}

async function show() {
  controller.abort();
  controller = new AbortController();
  const { signal } = controller;
  clearError();
  signOut.hidden = !requiresKey || apiKey() === null;
  navigation.hidden = requiresKey && apiKey() === null;
  if (navigation.hidden) return showSignIn();
  readRole();
  const { page, id, query } = parseFragment();
  navigation.replaceChildren(...PAGES.map(({ name, label }) =>
    h("a", { href: `#/${name}`, "aria-current": name === page.name ? "page" : null }, label)));
  const render = id && page.renderItem ? page.renderItem : page.render;
  const view = { root: main, id, query, signal, show: (nextQuery) => { location.hash = pageLink(page.name, nextQuery); } };
  main.setAttribute("aria-busy", "true");
  try {
    await render(view);
  } catch (error) {
    if (signal.aborted) return;
    main.querySelectorAll(".loading").forEach((note) => note.remove());
    showError(error);
  } finally {
    if (!signal.aborted) {
      main.removeAttribute("aria-busy");
      document.title = `${main.querySelector("h1")?.textContent ?? page.label} - tarry`;
    }
  }
}

function showSignIn(message = "") {
  navigation.hidden = true;
  signOut.hidden = true;
  const input = h("input", { type: "password", name: "key", required: true, autocomplete: "current-password", spellcheck: "false" });
  const problem = h("p", { class: "field-problem", role: "alert" }, message);
  const submit = async (event) => {
    event.preventDefault();
    setApiKey(input.value.trim());
    delete document.documentElement.dataset.keyRole;
    try {
      await get("retry-tasks", { limit: 1 });
      notify("Signed in.");
      await show();
    } catch (error) {
      setApiKey(null);
      showSignIn(error.message);
    }
  };
  main.replaceChildren(h("div", { class: "sign-in panel" },
    h("h1", null, "Sign in"),
    h("form", { submit },
      // Password managers need a user name.
      h("input", { type: "text", name: "username", value: "tarry", autocomplete: "username", hidden: true }),
      field("API key", input),
      problem,
      h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Sign in"))),
    h("p", { class: "hint" }, "An operator creates a key with the command ", h("code", null, "tarry keys create"),
      ". The key is kept in this browser tab until the tab is closed.")));
  document.title = "Sign in - tarry";
  input.focus();
}

document.addEventListener("signed-out", () => {
  if (!requiresKey || apiKey() === null || main.querySelector(".sign-in")) return;
  controller.abort();
  setApiKey(null);
  showSignIn("The API key is not valid any more.");
});
signOut.addEventListener("click", () => {
  setApiKey(null);
  notify("Signed out.");
  show();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", async () => {
  const message = takeNextMessage();
  notify("");
  await show();
  // Only when the new page is complete. Until then the old form is shown, and a user who reads that it was saved might
  // continue to edit it: these changes would be lost.
  if (message) notify(message);
  // A screen reader continues at the heading of the new page.
  const heading = main.querySelector("h1");
  heading?.setAttribute("tabindex", "-1");
  if (document.activeElement === document.body) heading?.focus({ preventScroll: true });
});
show();
