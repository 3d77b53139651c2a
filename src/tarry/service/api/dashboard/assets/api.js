/** Requests to the API of the service, relative to the page, with the API key of this browser tab. */

const KEY_NAME = "tarry-api-key";

export class ApiError extends Error {
  constructor(status, problem) {
    super(problem?.detail || problem?.title || `The service responded with status ${status}.`);
    this.status = status;
    this.problem = problem;
  }
}

/** The API key, which is kept until the tab is closed; null if there is none. */
export function apiKey() {
  return sessionStorage.getItem(KEY_NAME);
}

/** Keep an API key for this tab; null removes it. */
export function setApiKey(key) {
  if (key === null) sessionStorage.removeItem(KEY_NAME);
  else sessionStorage.setItem(KEY_NAME, key);
}

/** Send a request and return the response. Raises ApiError if the status is not 2xx. */
export async function send(method, path, { body, signal } = {}) {
  const headers = {};
  if (apiKey() !== null) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, credentials: "same-origin", redirect: "error",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The service cannot be reached. Check whether it runs, and try again.");
  }
  if (response.ok) return response;
  let problem = null;
  try {
    problem = await response.json();
  } catch {
    // A proxy may respond with something else than problem details.
  }
  if (response.status === 401) document.dispatchEvent(new CustomEvent("signed-out"));
  throw new ApiError(response.status, problem);
}

/** Send a request and return the decoded JSON of the response. */
export async function call(method, path, options) {
  const response = await send(method, path, options);
  return response.status === 204 ? null : response.json();
}

/** GET a path with query parameters; empty ones are left out. */
export function get(path, parameters = {}, signal) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const text = query.toString();
  return call("GET", text ? `${path}?${text}` : path, { signal });
}

/**
 * GET the first page of a list that has items. A search may return empty pages although more follow;
 * after `maxPages` of them the last page is returned, with its cursor.
 */
export async function getPage(path, parameters, signal, maxPages = 20) {
  let page = await get(path, parameters, signal);
  for (let count = 1; page.items.length === 0 && page.nextCursor !== null && count < maxPages; count += 1) {
    page = await get(path, { ...parameters, cursor: page.nextCursor }, signal);
  }
  return page;
}
