// BullMQ (Redis): jobs added in bulk, and its own exponential backoff with full jitter.
const { Queue, Worker } = require('bullmq');
const { BODY, CONCURRENCY, REDIS, post, runEnqueuer } = require('./common.js');

const { hostname: host, port } = new URL(REDIS);
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const opts = {
  attempts: 10,
  backoff: { type: 'exponential', delay: 100, jitter: 1 },
  removeOnComplete: true,
  removeOnFail: true,
};

function work() {
  const deliver = async ({ data }) => {
    if (!(await post(data.task, data.body))) throw new Error('503');
  };
  const worker = new Worker('deliver', deliver, { connection, concurrency: CONCURRENCY });
  worker.on('error', console.error);
}

async function enqueue() {
  const queue = new Queue('deliver', { connection });
  await queue.waitUntilReady();
  await runEnqueuer(async (batches) => {
    for (const ids of batches) {
      await queue.addBulk(ids.map((task) => ({ name: 'd', data: { task, body: BODY }, opts })));
    }
  });
}

process.argv[2] === 'work' ? work() : enqueue();
