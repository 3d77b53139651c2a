/** The request of a task as a curl command. */

/** Return a text as one word of a POSIX shell. */
export function shellQuote(text) {
  return `'${String(text).replaceAll("'", "'\\''")}'`;
}

/** Return the curl command that sends the request of a task to its target once, without the service. */
export function curlCommand(task, keyHeader = "Idempotency-Key") {
  const parts = [`curl --globoff --request ${shellQuote(task.method)} ${shellQuote(task.targetUrl)}`];
  const headers = Object.entries(task.headers ?? {});
  if (!headers.some(([name]) => name.toLowerCase() === keyHeader.toLowerCase())) headers.push([keyHeader, task.idempotencyKey]);
  for (const [name, value] of headers) parts.push(`--header ${shellQuote(value === "" ? `${name};` : `${name}: ${value}`)}`);
  if (task.bodySize > 0) parts.push("--data-binary @body");
  return parts.join(" \\\n  ");
}
