/** The advice on a policy: proposed values with their reasons, next to the current values. */
import { h, table } from "./dom.js";
import { count, duration } from "./format.js";

const isChanged = ({ current, proposed }) => current !== proposed;

function format(name, value) {
  if (value === null) return "none";
  return name.endsWith("Ms") ? duration(value) : count(value);
}

/**
 * Show the advice in a section; return a sentence that summarizes it. `labels` maps the names of fields to their labels
 * in the form. `onAccept(values)` is called with the proposed values when the user accepts them.
 */
export function showAdvice(section, advice, labels, onAccept) {
  const { lane, attempts, calls, outages, spanMs, suggestions, warnings, simulation } = advice;
  const columns = [
    { label: "Field", cell: ({ field }) => labels[field] ?? field },
    { label: "Current", class: "number", cell: ({ field, current }) => format(field, current) },
    { label: "Proposed", class: "number", cell: (item) => (isChanged(item) ? h("strong", null, format(item.field, item.proposed)) : format(item.field, item.proposed)) },
    { label: "Reason", cell: ({ reason, basis }) => [reason, basis ? h("span", { class: "hint" }, ` (${basis})`) : null] },
  ];
  const changed = suggestions.filter(isChanged);
  const values = Object.fromEntries(changed.map(({ field, proposed }) => [field, proposed]));
  section.replaceChildren(
    h("h2", null, "Advice"),
    h("p", null, `From ${count(attempts)} attempts of ${count(calls)} calls to `, h("span", { class: "mono" }, lane), `, in ${duration(spanMs)} with ${count(outages)} ${outages === 1 ? "outage" : "outages"}.`),
    ...warnings.map((warning) => h("p", null, `Warning: ${warning}.`)),
    table("Proposed values", columns, suggestions),
    h("p", null, simulation),
    changed.length ? h("div", { class: "actions" }, h("button", { type: "button", click: () => onAccept(values) }, "Use these values")) : "");
  return changed.length ? `The advice changes ${count(changed.length)} of ${count(suggestions.length)} fields.` : "The advice changes no field.";
}
