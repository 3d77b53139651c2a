/** Keep a page up to date: `/events` reports that something has happened, and the page then reads its data. */
import { ApiError, send } from "./api.js";
import { h } from "./dom.js";

const BUSY_INTERVAL_MS = 500;
/** If a read takes long, the next one starts later: a page reads during at most a fifth of the time. */
const MIN_PAUSE_PER_READ = 4;
const IDLE_INTERVAL_MS = 10_000;
const RETRY_INTERVAL_MS = 5000;
const UNCHANGED_READS = 3;

/** Wait; returns at once when the signal is aborted. */
function sleep(ms, signal) {
  return new Promise((resolve) => {
    const finish = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", finish);
      resolve();
    };
    const timer = setTimeout(finish, ms);
    signal.addEventListener("abort", finish);
    if (signal.aborted) finish();
  });
}

function waitUntilVisible(signal) {
  if (document.visibilityState === "visible") return Promise.resolve();
  return new Promise((resolve) => {
    signal.addEventListener("abort", () => resolve(), { once: true });
    document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") resolve(); }, { signal });
  });
}

/** Open the stream of events. Returns a promise that is fulfilled at the first event, or when the stream ends. */
async function openEvents(signal) {
  const response = await send("GET", "events", { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const first = (async () => {
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        rest += value;
        // Lines that begin with a colon only keep the connection open.
        if (/^event:/m.test(rest)) return;
        rest = rest.slice(rest.lastIndexOf("\n") + 1);
      }
    } catch {
      // The stream was closed.
    }
  })();
  return { first };
}

/** Return an element with the state of the connection, and the function that sets its text; without a text it is hidden. */
export function connectionState() {
  const element = h("span", { class: "live hint", role: "status" });
  const setState = (text) => {
    if (element.textContent === text) return;
    element.textContent = text;
    element.hidden = text === "";
    element.classList.toggle("stale", text !== "Live");
  };
  return { element, setState };
}

/**
 * Call `read()` whenever there may be new data, until `signal` is aborted. `read` returns whether the data has changed;
 * `setState(text)` is called when the state of the connection changes.
 *
 * While nothing happens, an open stream of events tells when to read again, and the page also reads every 10 seconds,
 * because the stream has only the events of one process. While tasks run, the stream is closed, and the page reads twice a second:
 * this costs the service less than sending each event.
 */
export async function follow(signal, read, setState) {
  let hasEvents = true;
  const readAndReport = async () => {
    const hasChanged = await read();
    if (!signal.aborted) setState("Live");
    return hasChanged;
  };
  while (!signal.aborted) {
    await waitUntilVisible(signal);
    if (signal.aborted) return;
    const stream = new AbortController();
    const close = () => stream.abort();
    signal.addEventListener("abort", close, { once: true });
    try {
      let first = new Promise(() => {});
      if (hasEvents) {
        try {
          ({ first } = await openEvents(stream.signal));
        } catch (error) {
          if (!(error instanceof ApiError)) throw error;
          hasEvents = false; // this process has no events, or too many streams are open
        }
      }
      let hasEvent = await readAndReport();
      while (!hasEvent && !signal.aborted && document.visibilityState === "visible") {
        const interval = sleep(hasEvents ? IDLE_INTERVAL_MS : RETRY_INTERVAL_MS, stream.signal).then(() => false);
        hasEvent = await Promise.race([first.then(() => true), interval]) || await readAndReport();
      }
      close();
      for (let unchanged = 0; unchanged < UNCHANGED_READS && !signal.aborted && document.visibilityState === "visible";) {
        const startedAt = performance.now();
        unchanged = await readAndReport() ? 0 : unchanged + 1;
        await sleep(Math.max(BUSY_INTERVAL_MS, MIN_PAUSE_PER_READ * (performance.now() - startedAt)), signal);
      }
    } catch (error) {
      if (signal.aborted) return;
      setState(`Not up to date: ${error.message}`);
      await sleep(RETRY_INTERVAL_MS, signal);
    } finally {
      close();
      signal.removeEventListener("abort", close);
    }
  }
}
