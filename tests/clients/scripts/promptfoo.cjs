// promptfoo by its routes for OpenAI: `node promptfoo.cjs URL KEY ADMIN_KEY FOLDER JOB [--with-training] [--with-inference]`.
// Each check is an evaluation of its own by its command, told as `checks.py` beside this tells it.
const { spawnSync } = require("node:child_process");
const assert = require("node:assert/strict");
const fs = require("node:fs");
const os = require("node:os");
const path = require("node:path");

const [url, key, , , , ...flags] = process.argv.slice(2);
const base = process.env.CLIENT_MODEL ?? "lab";
const folder = fs.mkdtempSync(path.join(os.tmpdir(), "promptfoo-"));
const packaged = path.join(process.env.NODE_PATH, "promptfoo");
const { bin } = JSON.parse(fs.readFileSync(path.join(packaged, "package.json"), "utf8"));
const command = path.join(packaged, bin.promptfoo);
const quiet = { PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: folder };

const evaluate = (id, config) => {
  const [asked, out] = ["promptfooconfig.json", "out.json"].map((name) => path.join(folder, name));
  const providers = [{ id, config }];
  fs.writeFileSync(asked, JSON.stringify({ prompts: ["{{q}}"], providers, tests: [{ vars: { q: "hello" } }] }));
  fs.rmSync(out, { force: true });
  const env = { ...process.env, ...quiet, OPENAI_BASE_URL: url, OPENAI_API_KEY: key };
  const words = [command, "eval", "-c", asked, "-o", out, "--no-cache", "--no-progress-bar", "--no-table"];
  const done = spawnSync(process.execPath, words, { env, cwd: folder, encoding: "utf8" });
  assert.ok(fs.existsSync(out), done.stdout + done.stderr);
  return JSON.parse(fs.readFileSync(out, "utf8")).results.results[0];
};
const answers = (id, config) => () => {
  const found = evaluate(id, config);
  assert.ok(!found.error && found.response.output, JSON.stringify(found));
};

const checks = {
  "a model that is not offered": () => assert.match(evaluate("openai:chat:nowhere", {}).error, /does not exist/),
};
const inferring = {
  "its default route": answers(`openai:${base}`, { max_tokens: 8 }),
  "chat completions": answers(`openai:chat:${base}`, { max_tokens: 8 }),
  completions: answers(`openai:completion:${base}`, { max_tokens: 8 }),
  responses: answers(`openai:responses:${base}`, { max_output_tokens: 8 }),
};
for (const [check, run] of Object.entries({ ...checks, ...(flags.includes("--with-inference") ? inferring : {}) })) {
  let error = null;
  try {
    run();
  } catch (fault) {
    error = String(fault.stack).slice(-4000);
  }
  process.stdout.write(`${JSON.stringify({ check, error })}\n`);
}
fs.rmSync(folder, { recursive: true, force: true });
