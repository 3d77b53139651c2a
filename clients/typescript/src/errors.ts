import type { components } from "./openapi.js";

/** A problem document (RFC 9457). `field`, `rule` and `value` describe an invalid field. */
export type Problem = components["schemas"]["Problem"];
export type RetryTask = components["schemas"]["RetryTask"];

/** The service rejected a request, failed, or sent an invalid response. */
export class ServiceError extends Error {
  override readonly name: string = "ServiceError";

  constructor(
    message: string,
    /** The HTTP status of the response. */
    readonly status: number,
    /** The problem document of the response, if it has one. */
    readonly problem?: Problem,
    /** The time after which the request can be repeated, from the header Retry-After. */
    readonly retryAfterMs?: number,
  ) {
    super(message);
  }

  /** The name of the problem type, such as `invalid` or `idempotency-key-reused`. */
  get problemType(): string | undefined {
    return this.problem?.type.replace(/^.*#problem-/, "");
  }

  /** The path of the invalid field in the JSON of the request, such as `policy.maxAttempts`. */
  get field(): string | undefined {
    return this.problem?.field;
  }
}

/** No response was received. The service may have processed the request. */
export class ServiceUnreachableError extends Error {
  override readonly name = "ServiceUnreachableError";
}

/** A task did not finish within the timeout of `wait`. */
export class NotFinishedError extends Error {
  override readonly name = "NotFinishedError";

  constructor(
    message: string,
    /** The task when it was last fetched. */
    readonly task: RetryTask,
  ) {
    super(message);
  }
}
