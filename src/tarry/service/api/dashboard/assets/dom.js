/** Build elements. Text is always added as a text node, so that no data is read as HTML. */

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return an HTML element. A function as attribute value is a listener for the event of that name. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

/** Return the child nodes of a long name or URL: its text, with an optional line break (`<wbr>`) after each group of separators, but not after the `//` of a URL. */
export function breakable(text) {
  // Without a lookbehind, which Safari supports only from version 16.4 on.
  const parts = text.match(/[^]*?(?:(?:[@?&=,;]|[^/:]\/)(?![@/?&=,;])|$)/g).filter(Boolean);
  return parts.flatMap((part, index) => (index ? [h("wbr"), part] : [part]));
}

/** Return a definition list of [name, value] pairs; pairs without a value are left out. */
export function details(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "details" }, shown.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

/**
 * Return a table. A column is {label, cell(item), class}; the first column is the header of its row.
 * Roles are explicit, because narrow screens show rows as cards (`display: block` removes the roles).
 */
export function table(caption, columns, items) {
  const head = columns.map((column) => h("th", { scope: "col", role: "columnheader", class: column.class }, column.label));
  return h("table", { class: "cards", role: "table" },
    h("caption", null, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, items.map((item) => row(columns, item))));
}

/** Return one row of `table`. */
export function row(columns, item) {
  return h("tr", { role: "row" }, columns.map((column, index) => index === 0
    ? h("th", { scope: "row", role: "rowheader", "data-label": column.label, class: column.class }, h("span", null, column.cell(item)))
    : h("td", { role: "cell", "data-label": column.label, class: column.class }, h("span", null, column.cell(item)))));
}

/** Replace the cells of a table row that differ from those of `nextRow`; the others keep the focus, and a click that has begun. */
export function updateRow(element, nextRow) {
  [...nextRow.cells].forEach((cell, index) => {
    const shown = element.cells[index];
    if (!shown.isEqualNode(cell)) replaceContent(shown, ...cell.childNodes);
  });
}

/** Replace the children of an element. If one of them has the focus, the same control among the new children gets it, or else the element. */
export function replaceContent(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  element.replaceChildren(...children);
  if (!focused) return;
  const same = [...element.querySelectorAll("a, button, input")].find((control) =>
    ["aria-label", "href"].every((name) => control.getAttribute(name) === focused.getAttribute(name)) && control.textContent === focused.textContent);
  if (!same) element.tabIndex = -1;
  (same ?? element).focus({ preventScroll: true });
}

/** Return a labelled input, select or textarea. */
export function field(label, control, hint) {
  return h("label", null, label, control, hint ? h("span", { class: "hint" }, hint) : null);
}

/** Return a select with [value, text] options. */
export function select(name, options, selected) {
  const element = h("select", { name }, options.map(([value, text]) => h("option", { value }, text)));
  element.value = selected ?? "";
  return element;
}

/** Return the fragment of a page with query parameters; empty ones are left out. */
export function pageLink(path, query = {}) {
  const used = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(used).toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** Show a message in the live region of the page. */
export function notify(text) {
  document.getElementById("notice").textContent = text;
}

let nextMessage = "";

/** Open another page, and show a message when the page is complete. */
export function openPage(fragment, message) {
  nextMessage = message;
  location.hash = fragment;
}

/** Return the message of the last `openPage`, once; empty if there is none. */
export function takeNextMessage() {
  const message = nextMessage;
  nextMessage = "";
  return message;
}

/** Show an error in the alert region of the page until it is dismissed or the page changes. */
export function showError(error) {
  if (error?.name === "AbortError") return;
  const region = document.getElementById("failure");
  const text = error?.problem?.detail || error?.problem?.title || error?.message || String(error);
  const dismiss = h("button", { type: "button", class: "small", click: clearError }, "Dismiss");
  region.replaceChildren(h("div", { class: "problem" }, h("p", null, text), dismiss));
}

/** Remove the error. */
export function clearError() {
  document.getElementById("failure").replaceChildren();
}

/**
 * Show a modal dialog with a form. `submit(form)` runs when the form is submitted; the dialog closes
 * when it has succeeded, and shows its error otherwise. Without `submit`, the dialog has only a close button.
 */
export function openDialog({ title, content, label = "OK", danger = false, submit }) {
  const problem = h("p", { class: "field-problem", role: "alert" });
  const cancel = h("button", { type: "button", click: () => dialog.close() }, submit ? "Cancel" : "Close");
  const confirm = submit && h("button", { type: "submit", class: danger ? "danger" : "primary" }, label);
  const form = h("form", {
    method: "dialog",
    submit: async (event) => {
      event.preventDefault();
      if (!submit || confirm.disabled) return;
      confirm.disabled = true;
      problem.textContent = "";
      try {
        await submit(form);
        dialog.close();
      } catch (error) {
        problem.textContent = error.problem?.detail || error.message;
        confirm.disabled = false;
      }
    },
  }, h("h2", { id: "dialog-title" }, title), content, problem, h("div", { class: "actions" }, cancel, confirm));
  const opener = document.activeElement;
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", close: () => { dialog.remove(); opener?.focus?.(); } }, form);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
