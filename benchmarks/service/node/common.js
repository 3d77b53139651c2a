// Functions that the peers on Node share; the counterpart of peers/common.py.
const readline = require('node:readline');
const { Agent, request } = require('undici');

const BODY_BYTES = 1024;
const BODY = (() => {
  const [head, tail] = ['{"event": "order.created", "data": "', '"}'];
  return head + 'x'.repeat(BODY_BYTES - head.length - tail.length) + tail;
})();
const HEADERS = {
  'Content-Type': 'application/json',
  'X-Signature': 't=1731600000,v1=' + '5a'.repeat(32),
};
const CONCURRENCY = 100;
const BATCH_SIZE = 500;
const { BENCH_TARGET: TARGET, BENCH_REDIS: REDIS, BENCH_POSTGRES: POSTGRES } = process.env;
const dispatcher = new Agent({ connections: CONCURRENCY });

const retryDelayMs = (retry) => Math.random() * Math.min(10_000, 100 * 2 ** (retry - 1));

async function post(task, body) {
  const options = { method: 'POST', body, headers: HEADERS, dispatcher };
  const response = await request(`${TARGET}/t/${task}`, options);
  await response.body.dump();
  return response.statusCode === 200;
}

function splitBatches(count) {
  const ids = Array.from({ length: count }, (_, id) => id);
  const batches = [];
  for (let start = 0; start < count; start += BATCH_SIZE) {
    batches.push(ids.slice(start, start + BATCH_SIZE));
  }
  return batches;
}

async function runEnqueuer(enqueue) {
  console.log('ready');
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const before = process.cpuUsage();
    const started = Number(process.hrtime.bigint()) / 1e9; // the monotonic clock
    await enqueue(splitBatches(Number(line)));
    const { user, system } = process.cpuUsage(before);
    console.log(JSON.stringify({ started, cpu: (user + system) / 1e6 }));
  }
}

module.exports = { BODY, CONCURRENCY, POSTGRES, REDIS, retryDelayMs, post, runEnqueuer };
