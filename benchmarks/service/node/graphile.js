// graphile-worker (PostgreSQL): bulk adds, a local queue, jobs completed in batches.
// Its own retry waits e seconds or more; a new job with `runAt` is the quicker way.
const { Logger, makeWorkerUtils, run } = require('graphile-worker');
const { BODY, CONCURRENCY, POSTGRES, delay, post, serve } = require('./common.js');

const connectionString = POSTGRES;
const logger = new Logger(() => () => {});

async function deliver({ task, body, retry = 1 }, { addJob }) {
  if (await post(task, body)) return;
  const runAt = new Date(Date.now() + delay(retry));
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
  await serve(async (batches) => {
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
