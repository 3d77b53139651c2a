// graphile-worker (PostgreSQL): jobs added in bulk and completed in batches, a local queue.
// Its own retry waits at least e (2.7) seconds; a new job with `runAt` is faster.
const { Logger, makeWorkerUtils, run } = require('graphile-worker');
const { BODY, CONCURRENCY, POSTGRES, retryDelayMs, post, runEnqueuer } = require('./common.js');

const connectionString = POSTGRES;
const logger = new Logger(() => () => {});

async function deliver({ task, body, retry = 1 }, { addJob }) {
  if (await post(task, body)) return;
  const runAt = new Date(Date.now() + retryDelayMs(retry));
  await addJob('deliver', { task, body, retry: retry + 1 }, { runAt });
}

const work = () =>
  run({
    connectionString,
    concurrency: CONCURRENCY,
    pollInterval: 100,
    maxPoolSize: 10,
    noHandleSignals: true,
    logger,
    preset: {
      worker: {
        localQueue: { size: 2 * CONCURRENCY },
        completeJobBatchDelay: 5,
        failJobBatchDelay: 5,
      },
    },
    taskList: { deliver },
  });

async function enqueue() {
  const utils = await makeWorkerUtils({ connectionString, logger });
  await runEnqueuer(async (batches) => {
    for (const ids of batches) {
      const jobs = ids.map((task) => ({ identifier: 'deliver', payload: { task, body: BODY } }));
      await utils.addJobs(jobs);
    }
  });
}

async function setUp() {
  const utils = await makeWorkerUtils({ connectionString, logger });
  await utils.migrate();
  await utils.release();
}

({ work, 'set-up': setUp, enqueue })[process.argv[2]]();
