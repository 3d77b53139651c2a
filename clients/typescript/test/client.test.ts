// Uses the client with a real service, which tests/integration/test_typescript_client.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";

import { createClient, NotFinishedError, ServiceError, ServiceUnreachableError } from "tarry-client";

const { TARRY_URL = "", TARRY_API_KEY = "", TARGET_URL = "" } = process.env;
const client = createClient(TARRY_URL, { apiKey: TARRY_API_KEY });
const LATER_MS = 3_600_000;

test("a task is delivered, and wait returns its final state", async () => {
  const task = await client.enqueue({ targetUrl: `${TARGET_URL}/orders`, body: { order: 7 } });

  const finished = await client.wait(task, { timeoutMs: 30_000 });

  assert.equal(finished.status, "SUCCEEDED");
  // Only a request that waited while the attempt ran has the response of the target.
  assert.deepEqual(await client.get(task.taskId), { ...finished, response: null });
});

test("with waitSeconds, enqueue returns the response of the target", async () => {
  const targetUrl = `${TARGET_URL}/waits`;

  const task = await client.enqueue({ targetUrl, method: "GET" }, { waitSeconds: 30 });

  assert.equal(task.response?.status, 200);
});

test("a second task with the same idempotency key is the first task", async () => {
  const task = { targetUrl: `${TARGET_URL}/once`, idempotencyKey: "once-7" };

  const first = await client.enqueue(task);
  const second = await client.enqueue(task);

  assert.equal(second.taskId, first.taskId);
});

test("a key that was used with other content is a typed error", async () => {
  const task = { targetUrl: `${TARGET_URL}/conflict`, idempotencyKey: "conflict-7" };
  await client.enqueue(task);

  const error = await rejection(client.enqueue({ ...task, body: "other" }));

  assert.ok(error instanceof ServiceError);
  assert.equal(error.status, 422);
  assert.equal(error.problemType, "idempotency-key-reused");
  assert.match(error.message, /idempotencyKey/);
});

test("the error of an invalid field names the field", async () => {
  const error = await rejection(
    client.enqueue({ targetUrl: `${TARGET_URL}/`, policy: { maxAttempts: 0 } }),
  );

  assert.ok(error instanceof ServiceError);
  assert.equal(error.problemType, "invalid");
  assert.equal(error.field, "policy.maxAttempts");
});

test("fields and values that the OpenAPI document does not have are errors of the compiler", () => {
  assert.ok(() => [
    // @ts-expect-error - there is no such field
    client.enqueue({ targetUrl: TARGET_URL, retries: 3 }),
    // @ts-expect-error - not a jitter
    client.enqueue({ targetUrl: TARGET_URL, policy: { jitterType: "SOME" } }),
    // @ts-expect-error - no target
    client.enqueue({ body: "text" }),
    // @ts-expect-error - there is no such path
    client.api.GET("/tasks"),
  ]);
});

test("a batch has a result for each task, in the order of the tasks", async () => {
  const tasks = Array.from({ length: 1_001 }, (_, number) => ({
    targetUrl: number === 1_000 ? "ftp://example.com/" : `${TARGET_URL}/batch`,
    idempotencyKey: `batch-${number}`,
    delayMs: LATER_MS,
  }));

  const results = await client.enqueueMany(tasks);

  assert.deepEqual(
    results.map((result) => result.task?.idempotencyKey),
    [...tasks.slice(0, -1).map((task) => task.idempotencyKey), undefined],
  );
  assert.equal(results.at(-1)?.status, 422);
  assert.equal(results.at(-1)?.problem?.field, "targetUrl");
});

test("a task is cancelled once, and a second cancel returns it", async () => {
  const task = await client.enqueue({ targetUrl: `${TARGET_URL}/never`, delayMs: LATER_MS });

  assert.equal((await client.cancel(task)).status, "CANCELLED");
  assert.equal((await client.cancel(task)).status, "CANCELLED");
});

test("a finished task cannot be cancelled", async () => {
  const task = await client.enqueue({ targetUrl: `${TARGET_URL}/done` }, { waitSeconds: 30 });

  const error = await rejection(client.cancel(task));

  assert.ok(error instanceof ServiceError);
  assert.equal(error.problemType, "already-finished");
});

test("wait ends with the task after its timeout", async () => {
  const task = await client.enqueue({ targetUrl: `${TARGET_URL}/later`, delayMs: LATER_MS });

  const error = await rejection(client.wait(task, { timeoutMs: 1 }));

  assert.ok(error instanceof NotFinishedError);
  assert.equal(error.task.status, "PENDING");
});

test("wait ends with the reason of an aborted signal", async () => {
  const task = await client.enqueue({ targetUrl: `${TARGET_URL}/later`, delayMs: LATER_MS });
  const controller = new AbortController();

  const waiting = rejection(client.wait(task, { signal: controller.signal }));
  controller.abort(new Error("no longer needed"));

  assert.equal((await waiting).message, "no longer needed");
});

test("a wrong API key is a typed error, and the request is sent once", async () => {
  let requests = 0;
  const counting = createClient(TARRY_URL, {
    apiKey: "wrong",
    fetch: (request) => {
      requests += 1;
      return fetch(request);
    },
  });

  const error = await rejection(counting.enqueue({ targetUrl: `${TARGET_URL}/` }));

  assert.ok(error instanceof ServiceError);
  assert.equal(error.status, 401);
  assert.equal(requests, 1);
});

test("a request whose response is lost is repeated, and adds one task", async () => {
  const ids: string[] = [];
  const unreliable = createClient(TARRY_URL, {
    apiKey: TARRY_API_KEY,
    fetch: async (request) => {
      const response = await fetch(request);
      ids.push((await response.clone().json()).taskId);
      if (ids.length === 1) {
        throw new TypeError("connection lost");
      }
      return response;
    },
  });

  const task = await unreliable.enqueue({ targetUrl: `${TARGET_URL}/lost` });

  assert.deepEqual(ids, [task.taskId, task.taskId]);
});

test("a service that cannot be reached is a typed error with its cause", async () => {
  const stopped = createClient("http://127.0.0.1:1", { maxAttempts: 2 });

  const error = await rejection(stopped.get("01a1dee8-4da6-777c-bd58-a99cd6e4fecb"));

  assert.ok(error instanceof ServiceUnreachableError);
  assert.ok(error.cause instanceof Error);
});

test("a text that is not an id is rejected without a request", async () => {
  await assert.rejects(client.get(".."), TypeError);
});

test("other operations of the API have types, too", async () => {
  const { data, error } = await client.api.GET("/retry-policies", { params: { query: { limit: 50 } } });

  assert.equal(error, undefined);
  assert.ok(data?.items.some((policy) => policy.policyId === "default"));
});

/** Return the error of a promise that must reject. */
async function rejection(promise: Promise<unknown>): Promise<Error> {
  return await promise.then(
    () => assert.fail("no error"),
    (error: Error) => error,
  );
}
