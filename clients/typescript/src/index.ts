export { Client, createClient } from "./client.js";
export type {
  BatchResult,
  CallOptions,
  ClientOptions,
  EnqueueOptions,
  NewTask,
  TaskReference,
  WaitOptions,
} from "./client.js";
export { NotFinishedError, ServiceError, ServiceUnreachableError } from "./errors.js";
export type { Problem, RetryTask } from "./errors.js";
/** All types of the OpenAPI document: `components["schemas"]["DownstreamInfo"]`. */
export type { components, operations, paths } from "./openapi.js";
