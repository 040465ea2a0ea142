// Real answers against the types that OpenAI publishes with its Node client, which are made from its OpenAPI document:
// `node types.cjs URL KEY ADMIN_KEY FOLDER JOB [--with-inference]`. TypeScript's compiler judges, at its strictest, so
// that a null where the document has an optional field is an error, and so is a value outside an enum.
const fs = require("node:fs");
const path = require("node:path");
const ts = require("typescript");

const [url, key, adminKey, folder, jobId, ...flags] = process.argv.slice(2);
const train = fs.readFileSync(path.join(folder, "train.jsonl"));

const ask = async (method, route, { json, form, as = key } = {}) => {
  const headers = { authorization: `Bearer ${as}`, ...(json && { "content-type": "application/json" }) };
  const answer = await fetch(url + route, { method, headers, body: json ? JSON.stringify(json) : form });
  return answer.json();
};
const upload = (fields) => {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  form.append("file", new Blob([train]), "train.jsonl");
  return ask("POST", "/files", { form });
};
const page = (each) => ({ each, whole: '{ object: "list"; data: []; has_more: boolean }' });
const list = (each) => ({ each, whole: '{ object: "list"; data: [] }' });

const tuning = "OpenAI.FineTuning";
const [Job, Event] = [`${tuning}.FineTuningJob`, `${tuning}.FineTuningJobEvent`];
const [Checkpoint, permission] = [`${tuning}.Jobs.FineTuningJobCheckpoint`, `${tuning}.Checkpoints.Permission`];
const [File, Model] = ["OpenAI.FileObject", "OpenAI.Model"];
const Failure = "{ error: OpenAI.ErrorObject }";

/** Ask for everything once; each entry is the name of a check, a type, and an answer. */
async function answers() {
  const found = [];
  const note = (name, type, value) => (found.push([name, type, value]), value);
  const file = note("a file", File, await upload({ purpose: "fine-tune" }));
  const expiring = { purpose: "fine-tune", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600" };
  note("a file that expires", File, await upload(expiring));
  note("a file retrieved", File, await ask("GET", `/files/${file.id}`));
  note("files", page(File), await ask("GET", "/files"));
  const about = { filename: "a.jsonl", bytes: train.length, mime_type: "text/jsonl", purpose: "fine-tune" };
  const begun = note("an upload", "OpenAI.Upload", await ask("POST", "/uploads", { json: about }));
  const data = new FormData();
  data.append("data", new Blob([train]), "upload");
  const part = note("a part", "OpenAI.Uploads.UploadPart", await ask("POST", `/uploads/${begun.id}/parts`, { form: data }));
  const complete = ask("POST", `/uploads/${begun.id}/complete`, { json: { part_ids: [part.id] } });
  note("an upload completed", "OpenAI.Upload", await complete);
  const given = await ask("POST", "/uploads", { json: about });
  note("an upload cancelled", "OpenAI.Upload", await ask("POST", `/uploads/${given.id}/cancel`));

  const wish = { model: process.env.CLIENT_MODEL ?? "lab", training_file: file.id, validation_file: file.id, metadata: { a: "b" }, suffix: "types" };
  const job = note("a job created", Job, await ask("POST", "/fine_tuning/jobs", { json: wish }));
  let paused = await ask("POST", `/fine_tuning/jobs/${job.id}/pause`);
  while (paused.status !== "paused") paused = await ask("GET", `/fine_tuning/jobs/${job.id}`);
  note("a job paused", Job, paused);
  note("jobs, one of them paused", page(Job), await ask("GET", "/fine_tuning/jobs?limit=100"));
  note("a job resumed", Job, await ask("POST", `/fine_tuning/jobs/${job.id}/resume`));
  note("a page of jobs", page(Job), await ask("GET", "/fine_tuning/jobs?limit=1"));
  note("a job cancelled", Job, await ask("POST", `/fine_tuning/jobs/${job.id}/cancel`));
  const ended = note("a job that succeeded", Job, await ask("GET", `/fine_tuning/jobs/${jobId}`));
  const events = await ask("GET", `/fine_tuning/jobs/${jobId}/events?limit=100`);
  const audits = events.data.filter((event) => event.type === "moderation_checks");
  const others = events.data.filter((event) => event.type !== "moderation_checks");
  note("events", page(Event), { ...events, data: others });
  if (audits.length) note("an event of the audit", Event, audits[0]); // a service without a worker has none
  const checkpoints = await ask("GET", `/fine_tuning/jobs/${jobId}/checkpoints`);
  note("checkpoints", page(Checkpoint), checkpoints);
  const permissions = `/fine_tuning/checkpoints/${checkpoints.data[0].fine_tuned_model_checkpoint}/permissions`;
  const made = await ask("POST", permissions, { json: { project_ids: ["proj_a"] }, as: adminKey });
  note("permissions created", list(`${permission}CreateResponse`), made);
  note("permissions", page(`${permission}ListResponse`), await ask("GET", permissions, { as: adminKey }));
  const gone = await ask("DELETE", `${permissions}/${made.data[0].id}`, { as: adminKey });
  note("a permission deleted", `${permission}DeleteResponse`, gone);
  note("models", list(Model), await ask("GET", "/models"));
  note("a model", Model, await ask("GET", `/models/${ended.fine_tuned_model}`));
  note("a file deleted", "OpenAI.FileDeleted", await ask("DELETE", `/files/${file.id}`));

  note("400", Failure, await ask("POST", "/fine_tuning/jobs", { json: { model: 7 } }));
  note("401", Failure, await ask("GET", "/models", { as: "sk-no" }));
  note("403", Failure, await ask("GET", permissions));
  note("404", Failure, await ask("GET", "/files/file-0"));
  note("405", Failure, await ask("PUT", "/files"));

  if (flags.includes("--with-inference")) {
    const [model, content] = [ended.fine_tuned_model, "hello"];
    const chat = { model, max_tokens: 8, messages: [{ role: "user", content }] };
    note("a chat", "OpenAI.ChatCompletion", await ask("POST", "/chat/completions", { json: chat }));
    const completion = { model, max_tokens: 8, prompt: content };
    note("a completion", "OpenAI.Completion", await ask("POST", "/completions", { json: completion }));
    const response = { model, max_output_tokens: 16, input: content };
    note("a response", "Omit<OpenAI.Responses.Response, 'output_text'>", await ask("POST", "/responses", { json: response }));
  }
  return found;
}

const fits = (type, value) => `fits<${type}>()(${JSON.stringify(value)});`;
const line = ([, type, value]) =>
  typeof type === "string"
    ? fits(type, value)
    : [fits(type.whole, { ...value, data: [] }), ...value.data.map((each) => fits(type.each, each))].join(" ");

/** What the compiler says of each answer, which stands in a line of its own: fields of ours beside OpenAI's are fine. */
function judge(found) {
  const lines = found.map(line);
  const source = ['import OpenAI from "openai";', "const fits = <T>() => <U extends T>(value: U) => value;", ...lines];
  const name = path.join(folder, "answers.ts");
  fs.writeFileSync(name, source.join("\n"));
  const modules = process.env.NODE_PATH;
  const program = ts.createProgram([name], {
    strict: true,
    exactOptionalPropertyTypes: true,
    noEmit: true,
    skipLibCheck: true,
    types: [],
    lib: ["lib.es2022.d.ts", "lib.dom.d.ts", "lib.dom.asynciterable.d.ts"],
    target: ts.ScriptTarget.ES2022,
    module: ts.ModuleKind.ESNext,
    moduleResolution: ts.ModuleResolutionKind.Bundler,
    paths: { openai: [path.join(modules, "openai/index.d.ts")] },
  });
  const said = ts.getPreEmitDiagnostics(program).filter((each) => each.file?.fileName.endsWith("answers.ts"));
  const errors = source.map(() => null);
  for (const { file, start, messageText } of said) {
    const { line } = file.getLineAndCharacterOfPosition(start);
    errors[line] = `${errors[line] ?? ""}${ts.flattenDiagnosticMessageText(messageText, "\n")}\n`;
  }
  if (errors[0]) throw new Error(errors[0]);
  return errors.slice(2);
}

(async () => {
  const found = await answers();
  const [, type, job] = found.find(([name]) => name === "a job that succeeded");
  const { seed, ...without } = job;
  const wrong = [without, { ...job, seed: String(seed) }, { ...job, status: "done" }, { ...job, method: null }];
  const errors = judge([...found, ...wrong.map((value) => ["", type, value])]);
  found.forEach(([check], i) => console.log(JSON.stringify({ check, error: errors[i]?.slice(0, 3000) ?? null })));
  const missed = errors.slice(found.length).filter((error) => error === null).length;
  console.log(JSON.stringify({ check: "a wrong answer is found", error: missed ? `${missed} of 4 were not` : null }));
})();
