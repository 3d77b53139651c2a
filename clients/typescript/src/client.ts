import createFetchClient from "openapi-fetch";
import type { Client as FetchClient } from "openapi-fetch";

import { NotFinishedError, ServiceError, ServiceUnreachableError } from "./errors.js";
import type { Problem, RetryTask } from "./errors.js";
import type { components, paths } from "./openapi.js";
import { sleep, withRetries } from "./retries.js";

/** The fields of a new task. Only `targetUrl` is required. */
export type NewTask = components["schemas"]["RetryTaskRequest"];
/** The result for one task of `enqueueMany`: `task`, or `problem` if the task was rejected. */
export type BatchResult = components["schemas"]["BatchResult"];

export interface ClientOptions {
  /** An API key of `tarry keys create`. */
  apiKey?: string | undefined;
  /** The time for one attempt of a request, in addition to the time that the service waits. */
  timeoutMs?: number | undefined;
  /** The number of attempts of a request; 1: no retries. */
  maxAttempts?: number | undefined;
  /** Replaces the global `fetch`, for example for a proxy. */
  fetch?: ((request: Request) => Promise<Response>) | undefined;
}

export interface CallOptions {
  /** Cancels the call. The service may have processed a request that was sent before. */
  signal?: AbortSignal | undefined;
}

export interface EnqueueOptions extends CallOptions {
  /** Wait up to this time for the result; `task.response` is then the response of the target. */
  waitSeconds?: number | undefined;
}

export interface WaitOptions extends CallOptions {
  /** By default, `wait` waits until the task has finished. */
  timeoutMs?: number | undefined;
}

/** A task, or its id. */
export type TaskReference = string | Pick<RetryTask, "taskId">;

interface FetchResult<T> {
  data?: T;
  error?: unknown;
  response: Response;
}

const FINISHED_STATUSES: ReadonlySet<string> = new Set(["SUCCEEDED", "EXHAUSTED", "CANCELLED"]);
const MAX_BATCH_SIZE = 1_000;
const MAX_BATCH_BYTES = 8 << 20;
/** Shorter than the idle timeout of common proxies. */
const MAX_LONG_POLL_S = 20;
/** The pause after a poll to which the service responded at once. */
const POLL_PAUSE_MS = 250;
/** An id is a segment of a path: `..` would change the path. */
const TASK_ID = /^[\w-]+$/;

/** Return a client of the service at `baseUrl`, such as `http://127.0.0.1:8080`. */
export function createClient(baseUrl: string, options: ClientOptions = {}): Client {
  return new Client(baseUrl, options);
}

/**
 * Client of a retry service.
 *
 * Its methods repeat requests that fail for a moment. `api` sends requests to all other operations.
 */
export class Client {
  /** All operations of the OpenAPI document, with types. It does not repeat requests. */
  readonly api: FetchClient<paths>;
  readonly #timeoutMs: number;
  readonly #maxAttempts: number;

  constructor(baseUrl: string, options: ClientOptions = {}) {
    this.#timeoutMs = options.timeoutMs ?? 10_000;
    this.#maxAttempts = options.maxAttempts ?? 4;
    this.api = createFetchClient<paths>({
      baseUrl,
      headers: options.apiKey === undefined ? {} : { Authorization: `Bearer ${options.apiKey}` },
      redirect: "manual", // the API key is for this service only
      ...(options.fetch === undefined ? {} : { fetch: options.fetch }),
    });
  }

  /**
   * Add a task. When the promise resolves, the service has stored the task durably.
   *
   * A second call with the same `idempotencyKey` and content returns the first task.
   */
  async enqueue(task: NewTask, options: EnqueueOptions = {}): Promise<RetryTask> {
    const body = withKey(task);
    const waitSeconds = Math.ceil(options.waitSeconds ?? 0);
    return await this.#send(options.signal, waitSeconds, (signal) =>
      this.api.POST("/retry-tasks", { body, signal, headers: preferWait(waitSeconds) }),
    );
  }

  /** Add any number of tasks in batches; the results are in the order of the tasks. */
  async enqueueMany(tasks: Iterable<NewTask>, options: CallOptions = {}): Promise<BatchResult[]> {
    const results: BatchResult[] = [];
    for (const batch of encodeBatches(tasks)) {
      const response = await this.#send(options.signal, 0, (signal) =>
        this.api.POST("/retry-tasks/batch", {
          body: { tasks: [] },
          bodySerializer: () => batch,
          signal,
        }),
      );
      results.push(...response.results);
    }
    return results;
  }

  /** Return the current state of a task. */
  async get(task: TaskReference, options: CallOptions = {}): Promise<RetryTask> {
    return await this.#get(taskIdOf(task), 0, options.signal);
  }

  /** Cancel a task. `cancelling` is true while a running attempt has not ended. */
  async cancel(task: TaskReference, options: CallOptions = {}): Promise<RetryTask> {
    const taskId = taskIdOf(task);
    try {
      return await this.#send(options.signal, 0, (signal) =>
        this.api.DELETE("/retry-tasks/{taskId}", { params: { path: { taskId } }, signal }),
      );
    } catch (error) {
      if (error instanceof ServiceError && error.problemType === "already-finished") {
        const finished = await this.#get(taskId, 0, options.signal);
        if (finished.status === "CANCELLED") {
          return finished; // by an earlier attempt of this request, or by another call
        }
      }
      throw error;
    }
  }

  /**
   * Wait until a task has finished, and return it. A failed task is returned, too: check `status`.
   *
   * Throws a `NotFinishedError` after `timeoutMs`.
   */
  async wait(task: TaskReference, options: WaitOptions = {}): Promise<RetryTask> {
    const taskId = taskIdOf(task);
    const deadline = performance.now() + (options.timeoutMs ?? Infinity);
    for (;;) {
      const startedAt = performance.now();
      const remainingSeconds = Math.max(0, (deadline - startedAt) / 1000);
      const waitSeconds = Math.floor(Math.min(remainingSeconds, MAX_LONG_POLL_S));
      const current = await this.#get(taskId, waitSeconds, options.signal);
      if (FINISHED_STATUSES.has(current.status)) {
        return current;
      }
      const now = performance.now();
      if (now >= deadline) {
        throw new NotFinishedError(`the task ${taskId} is still ${current.status}`, current);
      }
      // Without a pause, a service that does not wait (it is stopping) would be polled in a loop.
      const pauseMs = Math.max(0, startedAt + POLL_PAUSE_MS - now);
      await sleep(Math.min(pauseMs, deadline - now), options.signal);
    }
  }

  async #get(taskId: string, waitSeconds: number, signal?: AbortSignal): Promise<RetryTask> {
    return await this.#send(signal, waitSeconds, (attemptSignal) =>
      this.api.GET("/retry-tasks/{taskId}", {
        params: { path: { taskId } },
        headers: preferWait(waitSeconds),
        signal: attemptSignal,
      }),
    );
  }

  /** Send a request, which must be safe to repeat, and return the JSON of the response. */
  async #send<T>(
    signal: AbortSignal | undefined,
    waitSeconds: number,
    send: (signal: AbortSignal) => Promise<FetchResult<T>>,
  ): Promise<T> {
    const attempt = async (): Promise<T> => {
      const timeout = AbortSignal.timeout(this.#timeoutMs + waitSeconds * 1000);
      let result: FetchResult<T>;
      try {
        result = await send(signal === undefined ? timeout : AbortSignal.any([signal, timeout]));
      } catch (error) {
        signal?.throwIfAborted();
        throw new ServiceUnreachableError(`no response from the service: ${describe(error)}`, {
          cause: error,
        });
      }
      if (result.data === undefined) {
        throw toServiceError(result);
      }
      return result.data;
    };
    return await withRetries(attempt, this.#maxAttempts, signal);
  }
}

/** Give a task a key, so that a repeated request does not add a second task. */
function withKey(task: NewTask): NewTask {
  return { ...task, idempotencyKey: task.idempotencyKey ?? crypto.randomUUID() };
}

/** Split tasks into batches within the limits of the service; yield the JSON of each batch. */
function* encodeBatches(tasks: Iterable<NewTask>): Generator<string> {
  const encoder = new TextEncoder();
  let batch: string[] = [];
  let batchBytes = 0;
  for (const task of tasks) {
    const encoded = JSON.stringify(withKey(task));
    const bytes = encoder.encode(encoded).length;
    if (batch.length === MAX_BATCH_SIZE || (batch.length && batchBytes + bytes > MAX_BATCH_BYTES)) {
      yield `{"tasks":[${batch.join()}]}`;
      batch = [];
      batchBytes = 0;
    }
    batch.push(encoded);
    batchBytes += bytes;
  }
  if (batch.length) {
    yield `{"tasks":[${batch.join()}]}`;
  }
}

function preferWait(seconds: number): Record<string, string> {
  return seconds > 0 ? { Prefer: `wait=${seconds}` } : {};
}

function taskIdOf(task: TaskReference): string {
  const taskId = typeof task === "string" ? task : task.taskId;
  if (!TASK_ID.test(taskId)) {
    throw new TypeError(`not the id of a task: ${JSON.stringify(taskId)}`);
  }
  return taskId;
}

function toServiceError({ error, response }: FetchResult<unknown>): ServiceError {
  const problem = isProblem(error) ? error : undefined;
  const text = problem === undefined ? response.statusText : (problem.detail ?? problem.title);
  const retryAfter = Number(response.headers.get("Retry-After") ?? Number.NaN);
  const retryAfterMs = Number.isFinite(retryAfter) ? retryAfter * 1000 : undefined;
  return new ServiceError(`${response.status}: ${text}`, response.status, problem, retryAfterMs);
}

function isProblem(value: unknown): value is Problem {
  return typeof value === "object" && value !== null && "type" in value && "title" in value;
}

function describe(error: unknown): string {
  if (!(error instanceof Error)) {
    return String(error);
  }
  // The message of fetch in Node is "fetch failed"; its cause says why.
  return error.cause instanceof Error ? error.cause.message : error.message;
}
