// The official Node client: `node node.cjs URL KEY ADMIN_KEY FOLDER JOB [--with-training] [--with-inference]`.
// FOLDER has train.jsonl, JOB has succeeded; each check is told as `checks.py` beside this tells it.
const { OpenAI, toFile, ...sdk } = require("openai");
const fs = require("node:fs");
const http = require("node:http");
const path = require("node:path");
const assert = require("node:assert/strict");

const [url, key, adminKey, folder, jobId, ...flags] = process.argv.slice(2);
const api = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const administering = (adminAPIKey) => new OpenAI({ baseURL: url, adminAPIKey, maxRetries: 0 });
const train = path.join(folder, "train.jsonl");
const bytes = fs.readFileSync(train);
const base = process.env.CLIENT_MODEL ?? "lab";
const ended = ["succeeded", "failed", "cancelled"];
const started = []; // jobs, which are cancelled behind each check
const jobs = api.fineTuning.jobs;

const send = async (file) => api.files.create({ file, purpose: "fine-tune" });
const upload = async () => (await send(await toFile(bytes, "train.jsonl"))).id;
const start = async (ask = {}) => {
  const job = await jobs.create({ model: base, training_file: await upload(), ...ask });
  started.push(job.id);
  return job;
};
const until = async (id, isSo) => {
  let job = await jobs.retrieve(id);
  for (; !isSo(job); job = await jobs.retrieve(id)) await new Promise((resolve) => setTimeout(resolve, 300));
  return job;
};
const waiting = async (ask = {}) => {
  const { id } = await jobs.pause((await start(ask)).id); // a worker that has just begun stops first
  return until(id, (job) => job.status === "paused");
};
const whole = async (page) => {
  const found = [];
  for await (const each of page) found.push(each);
  return found;
};
const tuned = async () => jobs.retrieve(jobId);
const fails = async (kind, code, call) => {
  const error = await call().then(() => null, (error) => error);
  assert.ok(error instanceof OpenAI[kind], `${error?.constructor?.name}: ${error?.message}`);
  assert.equal(error.code, code);
  assert.ok(error.requestID, "no request id");
};
const same = async (id) => assert.deepEqual(Buffer.from(await (await api.files.content(id)).arrayBuffer()), bytes);

const receive = async (wanted, call) => {
  let got;
  const arrived = new Promise((resolve) => (got = resolve));
  const server = http.createServer((request, response) => {
    const parts = [];
    request.on("data", (part) => parts.push(part));
    request.on("end", () => {
      response.writeHead(204).end();
      const body = Buffer.concat(parts).toString();
      if (body.includes(wanted)) got({ body, headers: new Headers(request.headers) }); // others end meanwhile
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const made = await api.post("/webhook_endpoints", { body: { url: `http://127.0.0.1:${server.address().port}/` } });
  try {
    await call();
    return { ...(await arrived), secret: made.secret };
  } finally {
    await api.delete(`/webhook_endpoints/${made.id}`);
    server.close();
    server.closeAllConnections();
  }
};

const checks = {
  "a file from a stream": async () => same((await send(fs.createReadStream(train))).id),
  "a file from a buffer": async () => same(await upload()),
  "a file from a File": async () => same((await send(new File([bytes], "train.jsonl"))).id),
  "a file from a Response": async () => same((await send(await toFile(new Response(bytes), "train.jsonl"))).id),
  "a file name in another script": async () => {
    assert.equal((await send(await toFile(bytes, "данные.jsonl"))).filename, "данные.jsonl");
  },
  "a file that expires": async () => {
    const expires_after = { anchor: "created_at", seconds: 3600 };
    const file = await api.files.create({ file: fs.createReadStream(train), purpose: "fine-tune", expires_after });
    assert.ok(Math.abs(file.expires_at - file.created_at - 3600) < 60);
  },
  "a file is waited for": async () => {
    assert.equal((await api.files.waitForProcessing(await upload())).status, "processed");
  },
  "a file is retrieved": async () => assert.equal((await api.files.retrieve(await upload())).bytes, bytes.length),
  "files over pages": async () => {
    const made = [await upload(), await upload(), await upload()].reverse();
    const listed = (await whole(api.files.list({ limit: 2 }))).map((file) => file.id);
    assert.deepEqual(listed.slice(0, 3), made);
    assert.equal(new Set(listed).size, listed.length);
  },
  "a file is deleted": async () => assert.equal((await api.files.delete(await upload())).deleted, true),
  "an upload in parts": async () => {
    const about = { filename: "train.jsonl", bytes: bytes.length, mime_type: "text/jsonl", purpose: "fine-tune" };
    const { id } = await api.uploads.create(about);
    const half = bytes.length >> 1;
    const parts = [bytes.subarray(0, half), bytes.subarray(half)];
    const sent = await Promise.all(parts.map(async (data) => api.uploads.parts.create(id, { data: await toFile(data) })));
    const done = await api.uploads.complete(id, { part_ids: sent.map((part) => part.id) });
    assert.equal(done.status, "completed");
    await same(done.file.id);
  },
  "an upload is given up": async () => {
    const about = { filename: "train.jsonl", bytes: 9, mime_type: "text/jsonl", purpose: "fine-tune" };
    assert.equal((await api.uploads.cancel((await api.uploads.create(about)).id)).status, "cancelled");
  },
  "models are listed": async () => {
    const found = (await whole(api.models.list())).map((model) => model.id);
    assert.ok(found.includes(base) && found.includes((await tuned()).fine_tuned_model));
  },
  "a tuned model is retrieved": async () => {
    const name = (await tuned()).fine_tuned_model;
    assert.equal((await api.models.retrieve(name)).id, name);
  },
  "a wrong key": () => fails("AuthenticationError", "invalid_api_key", () => api.withOptions({ apiKey: "sk-no" }).models.list()),
  "an unknown file": () => fails("NotFoundError", "file_not_found", () => api.files.retrieve("file-0")),
  "an unknown job": () => fails("NotFoundError", "fine_tune_not_found", () => jobs.retrieve("ftjob-0")),
  "a job on an unknown model": () => fails("BadRequestError", "model_not_found", () => start({ model: "gpt-9" })),
  "a job on an unknown file": () => fails("NotFoundError", "file_not_found", () => start({ training_file: "file-0" })),
  "a scope that is missing": () => {
    const permissions = administering(key).fineTuning.checkpoints.permissions;
    return fails("PermissionDeniedError", "insufficient_scope", () => permissions.create("a", { project_ids: ["b"] }));
  },
  "a job with settings": async () => {
    const method = { type: "supervised", supervised: { hyperparameters: { n_epochs: 2 } } };
    const job = await waiting({ method, seed: 7, suffix: "mine", metadata: { team: "a" } });
    assert.deepEqual([job.seed, job.metadata, job.method.supervised.hyperparameters.n_epochs], [7, { team: "a" }, 2]);
  },
  "a job from a tuned model": async () => {
    const { fine_tuned_model: model } = await tuned();
    assert.equal((await waiting({ model })).model, model);
  },
  "a job is paused": async () => assert.equal((await waiting()).status, "paused"),
  "a job is resumed": async () => assert.equal((await jobs.resume((await waiting()).id)).status, "queued"),
  "a cancelled job is not resumed": async () => {
    const { id } = await start();
    await jobs.cancel(id);
    await fails("BadRequestError", "invalid_state", () => jobs.resume(id));
  },
  "a job is cancelled, and its file deleted": async () => {
    const job = await start();
    assert.equal((await jobs.cancel(job.id)).status, "cancelled");
    assert.equal((await api.files.delete(job.training_file)).deleted, true);
  },
  "jobs over pages": async () => {
    for (let i = 0; i < 3; i++) await waiting();
    const listed = (await whole(jobs.list({ limit: 2 }))).map((job) => job.id);
    assert.equal(new Set(listed).size, listed.length);
  },
  "jobs by metadata": async () => {
    const metadata = { "ключ \"a\"[b]": `node ${sdk.VERSION ?? ""} ${process.pid}` };
    const { id } = await waiting({ metadata });
    assert.deepEqual((await whole(jobs.list({ metadata }))).map((job) => job.id), [id]);
  },
  "jobs without metadata": async () => {
    const [tagged, plain] = [await waiting({ metadata: { a: "b" } }), await waiting()];
    const found = (await whole(jobs.list({ metadata: null }))).map((job) => job.id);
    assert.deepEqual([found.includes(tagged.id), found.includes(plain.id)], [false, true]);
  },
  "an integration with W&B": async () => {
    const job = await waiting({ integrations: [{ type: "wandb", wandb: { project: "a" } }] });
    assert.equal((await jobs.retrieve(job.id)).status, "paused");
  },
  "events over pages": async () => {
    const { id } = await tuned();
    const found = (await whole(jobs.listEvents(id, { limit: 3 }))).map((event) => event.message);
    assert.equal(found.at(-1), `Created fine-tuning job: ${id}`);
    assert.ok(found.includes("The job has successfully completed"), found.join("\n"));
  },
  "checkpoints": async () => {
    const found = await whole(jobs.checkpoints.list((await tuned()).id, { limit: 1 }));
    assert.ok(found.length && found.every((each) => each.metrics.train_loss > 0 && each.step_number > 0));
  },
  "permissions on a checkpoint": async () => {
    const [checkpoint] = await whole(jobs.checkpoints.list((await tuned()).id));
    const [name, { permissions }] = [checkpoint.fine_tuned_model_checkpoint, administering(adminKey).fineTuning.checkpoints];
    const made = await whole(permissions.create(name, { project_ids: ["proj_a"] }));
    const listed = permissions.list ? (await whole(permissions.list(name))) : (await permissions.retrieve(name)).data;
    assert.ok(listed.some((each) => each.project_id === "proj_a"));
    const gone = await permissions.delete(made[0].id, { fine_tuned_model_checkpoint: name });
    assert.equal(gone.deleted, true);
  },
  "the metrics as CSV": async () => {
    const text = await (await api.files.content((await tuned()).result_files[0])).text();
    const [head, first] = text.split("\n");
    assert.match(head, /^step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy/);
    assert.match(first, /^1,/);
  },
  "a request that is sent again": async () => {
    const headers = { "Idempotency-Key": `node-${process.pid}-${Date.now()}` };
    const ask = { model: base, training_file: await upload() };
    const [one, two] = [await jobs.create(ask, { headers }), await jobs.create(ask, { headers })];
    started.push(one.id, two.id);
    assert.equal(one.id, two.id);
  },
  "an event is unwrapped": async () => {
    const { id } = await waiting();
    const { body, headers, secret } = await receive(id, () => jobs.cancel(id));
    const event = await api.webhooks.unwrap(body, headers, secret);
    assert.deepEqual([event.type, event.data.id], ["fine_tuning.job.cancelled", id]);
    await assert.rejects(api.webhooks.unwrap(`${body} `, headers, secret), OpenAI.InvalidWebhookSignatureError);
  },
};

const training = {
  "a job to its end, and its model deleted": async () => {
    const job = await until((await start()).id, (job) => ended.includes(job.status));
    assert.equal(job.status, "succeeded", JSON.stringify(job.error));
    assert.equal((await api.models.delete(job.fine_tuned_model)).deleted, true);
    await fails("NotFoundError", "model_not_found", () => api.models.retrieve(job.fine_tuned_model));
  },
};

const messages = [{ role: "user", content: "hello" }];
const inference = {
  "a chat": async () => {
    const { fine_tuned_model: model } = await tuned();
    const answer = await api.chat.completions.create({ model, messages, max_completion_tokens: 8 });
    assert.ok(answer.choices[0].message.content);
  },
  "a chat that is streamed": async () => {
    const { fine_tuned_model: model } = await tuned();
    let said = "";
    for await (const part of await api.chat.completions.create({ model, messages, stream: true, max_tokens: 8 })) {
      said += part.choices[0]?.delta?.content ?? "";
    }
    assert.ok(said);
  },
  "a completion": async () => {
    const { fine_tuned_model: model } = await tuned();
    const answer = await api.completions.create({ model, prompt: "hello", max_tokens: 8 });
    assert.equal(typeof answer.choices[0].text, "string");
  },
  "a response": async () => {
    const { fine_tuned_model: model } = await tuned();
    const answer = await api.responses.create({ model, input: "hello", max_output_tokens: 16 });
    assert.ok(answer.output_text);
  },
};

(async () => {
  if (flags.includes("--with-training")) Object.assign(checks, training);
  if (flags.includes("--with-inference")) Object.assign(checks, inference);
  for (const [check, run] of Object.entries(checks)) {
    const error = await run().then(() => null, (error) => (error.stack ?? String(error)).slice(0, 4000));
    console.log(JSON.stringify({ check, error }));
    for (const id of started.splice(0)) await jobs.cancel(id).catch(() => null); // many have ended
  }
})();
