// What the drivers on Node share: see peers/common.py, of which this is the counterpart.
const readline = require('node:readline');
const { Agent, request } = require('undici');

const size = 1024;
const BODY = (() => {
  const [head, tail] = ['{"event": "order.created", "data": "', '"}'];
  return head + 'x'.repeat(size - head.length - tail.length) + tail;
})();
const HEADERS = {
  'Content-Type': 'application/json',
  'X-Signature': 't=1731600000,v1=' + '5a'.repeat(32),
};
const CONCURRENCY = 100;
const BATCH = 500;
const { BENCH_TARGET: TARGET, BENCH_REDIS: REDIS, BENCH_POSTGRES: POSTGRES } = process.env;
const dispatcher = new Agent({ connections: CONCURRENCY });

const delay = (retry) => Math.random() * Math.min(10_000, 100 * 2 ** (retry - 1));

async function post(task, body) {
  const options = { method: 'POST', body, headers: HEADERS, dispatcher };
  const response = await request(`${TARGET}/t/${task}`, options);
  await response.body.dump();
  return response.statusCode === 200;
}

function batches(count) {
  const ids = Array.from({ length: count }, (_, id) => id);
  const parts = [];
  for (let begin = 0; begin < count; begin += BATCH) parts.push(ids.slice(begin, begin + BATCH));
  return parts;
}

async function serve(enqueue) {
  console.log('ready');
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const before = process.cpuUsage();
    const began = Number(process.hrtime.bigint()) / 1e9; // the monotonic clock
    await enqueue(batches(Number(line)));
    const { user, system } = process.cpuUsage(before);
    console.log(JSON.stringify({ began, cpu: (user + system) / 1e6 }));
  }
}

module.exports = { BODY, CONCURRENCY, POSTGRES, REDIS, delay, post, serve };
