// What pages add where scripts run: news of a job that runs, and a file that is dropped. Every page works without it.
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
function chat(form) {
  form.addEventListener("submit", () => {
    const told = form.querySelector("[data-working]");
    const start = Date.now();
    const tell = () => (told.textContent = `${told.dataset.working}, ${Math.round((Date.now() - start) / 1000)} s`);
    form.querySelector("button.primary").disabled = true;
    tell();
    setInterval(tell, 1000);
  });
  // The system prompt belongs to the model, so that another model begins another conversation.
  const model = form.querySelector("[data-open]");
  model.addEventListener("change", () => location.assign(model.dataset.open + encodeURIComponent(model.value)));
  if (form.querySelector(".turns")) form.querySelector("#question").focus();
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
