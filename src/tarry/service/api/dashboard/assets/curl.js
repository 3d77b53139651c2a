/** The request of a task as a curl command. */

/** Return a text as one word of a POSIX shell. */
export function shellQuote(text) {
  return `'${String(text).replaceAll("'", "'\\''")}'`;
}

/** Return the value of a header of a task as text. A secret of the service has only its name. */
export function headerText(value) {
  return typeof value === "string" ? value : `[secret ${value.secret}]`;
}

/** Return the curl command that sends the request of a task to its target once, without the service. */
export function curlCommand(task, keyHeader = "Idempotency-Key") {
  const parts = [`curl --globoff --request ${shellQuote(task.method)} ${shellQuote(task.targetUrl)}`];
  const headers = Object.entries(task.headers ?? {});
  if (!headers.some(([name]) => name.toLowerCase() === keyHeader.toLowerCase())) headers.push([keyHeader, task.idempotencyKey]);
  for (const [name, value] of headers) parts.push(`--header ${shellQuote(value === "" ? `${name};` : `${name}: ${headerText(value)}`)}`);
  if (task.bodySize > 0) parts.push("--data-binary @body");
  return parts.join(" \\\n  ");
}
