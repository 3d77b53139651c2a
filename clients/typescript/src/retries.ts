import { ServiceError, ServiceUnreachableError } from "./errors.js";

const RETRYABLE_CLIENT_ERRORS = new Set([408, 425, 429]);
/** Statuses 5xx with which the same request fails again, as in the default policy of the service. */
const PERMANENT_SERVER_ERRORS = new Set([501, 505, 506, 508, 510, 511]);
const INITIAL_DELAY_MS = 100;
const MAX_DELAY_MS = 5_000;
/** A request is not repeated if the service asks for a longer wait. */
const MAX_RETRY_AFTER_MS = 60_000;

/** Call `send` until it succeeds, fails permanently, or has been called `maxAttempts` times. */
export async function withRetries<T>(
  send: () => Promise<T>,
  maxAttempts: number,
  signal?: AbortSignal,
): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await send();
    } catch (error) {
      const retryAfterMs = error instanceof ServiceError ? (error.retryAfterMs ?? 0) : 0;
      if (attempt >= maxAttempts || !isRetryable(error) || retryAfterMs > MAX_RETRY_AFTER_MS) {
        throw error;
      }
      // Full jitter: many clients that fail at the same time do not retry at the same time.
      const ceilingMs = Math.min(INITIAL_DELAY_MS * 2 ** (attempt - 1), MAX_DELAY_MS);
      await sleep(retryAfterMs + Math.random() * ceilingMs, signal);
    }
  }
}

function isRetryable(error: unknown): boolean {
  if (error instanceof ServiceError) {
    return isRetryableStatus(error.status);
  }
  return error instanceof ServiceUnreachableError;
}

export function isRetryableStatus(status: number): boolean {
  return status >= 500 ? !PERMANENT_SERVER_ERRORS.has(status) : RETRYABLE_CLIENT_ERRORS.has(status);
}

/** Resolve after a time; reject with the reason of the signal if it is aborted before. */
export function sleep(delayMs: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, delayMs);
    if (signal?.aborted) {
      abort();
    } else {
      signal?.addEventListener("abort", abort, { once: true });
    }
  });
}
