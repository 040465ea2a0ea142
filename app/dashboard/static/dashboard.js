// What pages add where scripts run: news of a job that runs, replies as they are written, and a file that is dropped. Every page works without it.
"use strict";

// Functions alone, no constants: after a refused upload the page's answer runs this once more in the same window.

function follow(live) {
  const everyMs = 1500; // at most, so that a job with fast steps does not load the page more often
  const stream = new EventSource(live.dataset.stream);
  let due = false;
  const tell = () => {
    if (due) return;
    due = true;
    setTimeout(() => {
      due = false;
      if (!live.querySelector(".shown")) htmx.trigger(live, "job-news");
    }, everyMs);
  };
  for (const kind of ["event", "metrics", "heartbeat"]) stream.addEventListener(kind, tell);
  const away = document.getElementById("away");
  let lost = 0;
  stream.onerror = (news) => {
    if (news.data) {
      // The service has ended the stream: the key is no longer good, or the browser is signed out.
      stream.close();
      location.reload();
      return;
    }
    lost ||= setTimeout(() => (away.textContent = "The connection to the service is lost: this is how the job was before. Reload the page."), 5000);
  };
  stream.onopen = () => {
    lost = clearTimeout(lost);
    away.textContent = "";
  };
  stream.addEventListener("done", () => {
    stream.close();
    location.reload();
  });
}

function upload(form) {
  const input = form.querySelector("input[type=file]");
  const bar = form.querySelector("progress");
  const told = form.querySelector("[role=status]");
  const send = () => {
    const request = new XMLHttpRequest();
    bar.hidden = false;
    told.textContent = `Uploading ${input.files[0].name}`;
    request.upload.onprogress = (event) => {
      bar.max = event.total;
      bar.value = event.loaded;
      if (event.loaded === event.total) told.textContent = "Checking every row";
    };
    request.onload = () => {
      if (request.responseURL.includes("file=")) location.assign(request.responseURL);
      else document.open(), document.write(request.responseText), document.close();
    };
    request.onerror = () => (told.textContent = "The connection broke. Try again.");
    request.open("POST", form.action);
    request.setRequestHeader("accept", "text/html"); // what goes wrong is a page, too
    request.send(new FormData(form));
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.files.length) send();
  });
  input.addEventListener("change", () => input.files.length && send());
  for (const kind of ["dragover", "dragleave", "drop"]) {
    form.addEventListener(kind, (event) => {
      event.preventDefault();
      form.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files.length) {
        input.files = event.dataTransfer.files;
        send();
      }
    });
  }
}

// A reply is labeled with the keys 1 to 5, wherever the focus is, except in a field.
function pressByKey(form) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    if (event.target.closest("input, select, textarea")) return;
    const button = form.querySelector(`button[aria-keyshortcuts="${CSS.escape(event.key)}"]`);
    if (button && !form.dataset.sent) {
      form.dataset.sent = "yes"; // a second key before the next page must not label this reply again
      form.requestSubmit(button);
    }
  });
}

for (const form of document.querySelectorAll("form.scores")) pressByKey(form);

document.addEventListener("htmx:responseError", (event) => {
  const waiting = document.querySelector("#estimate .waiting");
  if (waiting && event.detail.elt.id === "preview") waiting.textContent = "The estimate could not be made. Reload the page to try again.";
});
// Yield the objects of an event stream of `/v1/chat/completions`; an end before its last event is an error.
async function* readChunks(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection broke. Try again.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Ask one model, and pass each piece of its text to `show` as it arrives.
async function streamReply(body, signal, show, markUnattested) {
  const answer = await fetch("/chat/reply", { method: "POST", body, signal });
  const kind = answer.headers.get("content-type") || "";
  if (!answer.ok && kind.includes("json")) {
    const after = answer.headers.get("retry-after");
    throw new Error((await answer.json()).error.message + (after ? ` Try again in ${after} s.` : ""));
  }
  if (!kind.startsWith("text/event-stream")) throw new Error("You are signed out. Reload the page to sign in.");
  if (answer.headers.get("x-spard-attested") === "false") markUnattested();
  for await (const chunk of readChunks(answer)) {
    if (chunk.error) throw new Error(chunk.error.message);
    show(chunk.choices[0]?.delta.content || "");
  }
}

// One model's part of a turn: show its reply as it arrives; return its text and how it ended.
async function fillPart(part, body, stopping) {
  const shown = part.querySelector(".reply");
  const result = { head: "", text: "", note: "", isFault: false };
  const show = (piece) => {
    result.text += piece;
    shown.textContent = result.text;
  };
  shown.textContent = "";
  body.set("side", part.dataset.side);
  try {
    await streamReply(body, stopping.signal, show, () => (part.querySelector(".unattested").hidden = false));
  } catch (error) {
    result.isFault = !stopping.signal.aborted;
    const isNetwork = error instanceof TypeError; // the browser's own words for it differ, and say nothing
    result.note = !result.isFault ? "Stopped." : isNetwork ? "The connection broke. Try again." : error.message;
  }
  if (result.note) {
    const note = document.createElement("p");
    note.className = result.isFault ? "note bad" : "note";
    note.textContent = result.note;
    part.append(note);
  } else if (!result.text) shown.textContent = "(nothing)";
  result.head = part.querySelector("h3").innerText;
  return result;
}

function chat(form) {
  const find = (selector) => form.querySelector(selector);
  const [ask, stop, working, spoken] = [".primary", ".stop", "[data-working]", "[role=status]"].map(find);
  const [question, turns, system] = ["#question", ".turns", "#system"].map(find);
  const settle = () => {
    find("[for=question]").textContent = "Next question";
    find(".again").hidden = false;
    const prompt = system.value.trim();
    const end = prompt.length > 60 ? "..." : "";
    find("summary").textContent = prompt ? `System prompt: ${prompt.slice(0, 60)}${end}` : "System prompt";
    find("details").open = false;
  };
  const answer = async (stopping) => {
    for (const old of form.querySelectorAll(".failed, :scope > .note")) old.remove();
    const asked = question.value.trim();
    const turn = find("template").content.firstElementChild.cloneNode(true);
    const parts = [...turn.querySelectorAll("[data-side]")];
    const bodies = parts.map(() => new FormData(form)); // before the turn, which has no answer yet, adds its fields
    turn.querySelector(".question").textContent = asked;
    turns.append(turn);
    turns.hidden = false;
    question.value = spoken.textContent = "";
    const results = await Promise.all(parts.map((part, i) => fillPart(part, bodies[i], stopping)));
    // A screen reader is told once, of the whole replies.
    spoken.textContent = results.map((each) => `${each.head}: ${each.text} ${each.note}`).join(" ");
    if (results.some((each) => each.isFault)) {
      // Not a part of the conversation: the question is back in its field, to be asked again.
      question.value ||= asked;
      turn.classList.add("failed");
      for (const field of turn.querySelectorAll("input")) field.remove();
    } else if (!results.some((each) => each.text) && stopping.signal.aborted) {
      question.value ||= asked;
      turn.remove();
      turns.hidden = !turns.children.length;
    } else {
      const field = (name) => turn.querySelector(`[name=${name}]`);
      field("asked").value = asked;
      parts.forEach((part, i) => (field(`${part.dataset.side}_reply`).value = results[i].text));
      settle();
    }
  };
  const run = async () => {
    const stopping = new AbortController();
    const start = Date.now();
    const tell = () => (working.textContent = `${working.dataset.working}, ${Math.round((Date.now() - start) / 1000)} s`);
    const clock = setInterval(tell, 1000);
    tell();
    stop.onclick = () => stopping.abort();
    ask.disabled = true; // beside the other button, so that a double click does not stop what it has asked
    stop.hidden = false;
    stop.focus();
    try {
      await answer(stopping);
    } finally {
      clearInterval(clock);
      working.textContent = "";
      ask.disabled = false;
      const isFocused = document.activeElement === stop;
      stop.hidden = true;
      if (isFocused) question.focus();
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!ask.disabled) run();
  });
  // The system prompt belongs to the model, so that another model begins another conversation.
  const model = find("[data-open]");
  model.addEventListener("change", () => location.assign(model.dataset.open + encodeURIComponent(model.value)));
  if (turns.children.length) question.focus();
}

// A job's panels: the one that has what the address names, or the first.
function openPanel() {
  const target = document.getElementById(location.hash.slice(1));
  const shown = target?.closest(".panel") || document.querySelector(".panel.first");
  for (const panel of document.querySelectorAll(".panel")) panel.classList.toggle("open", panel === shown);
  for (const link of document.querySelectorAll(".sections a")) {
    if (shown && link.hash === `#${shown.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  return target;
}

if (document.querySelector(".panels")) {
  openPanel()?.scrollIntoView();
  addEventListener("popstate", openPanel);
  document.addEventListener("htmx:afterSwap", openPanel);
  document.addEventListener("htmx:afterSettle", openPanel); // which gives new elements the classes that the server sent
  document.addEventListener("click", (event) => {
    const link = event.target.closest(".sections a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault(); // by itself, the browser would scroll the headline away
    history.pushState(null, "", link.hash);
    openPanel();
    const panels = document.querySelector(".panels");
    if (panels.getBoundingClientRect().top < 0) document.querySelector(".panel.open").scrollIntoView();
  });
}

for (const form of document.querySelectorAll("form.chat")) chat(form);
for (const live of document.querySelectorAll("[data-stream]")) follow(live);
for (const form of document.querySelectorAll("form.upload")) upload(form);
// A file that was mended and is chosen again under its name is a change, too.
for (const input of document.querySelectorAll("input[type=file]")) input.addEventListener("click", () => (input.value = ""));
// A form that was refused is gone on with at the first field that is wrong.
document.querySelector("[aria-invalid]")?.focus();

// Ids and lines of a terminal are copied by a button behind them; without scripts they are there to be selected.
function addCopyButtons(root) {
  for (const place of root.querySelectorAll("[data-copy], pre")) {
    if (place.nextElementSibling?.classList.contains("copy")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy ${place.dataset.copy || "these lines"}`);
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(place.dataset.copy || place.innerText);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    place.after(button);
  }
}

if (navigator.clipboard) {
  addCopyButtons(document);
  document.addEventListener("htmx:afterSwap", (event) => addCopyButtons(event.target));
}
