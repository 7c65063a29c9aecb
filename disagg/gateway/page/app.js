// The dashboard: one stream of server-sent events in, DOM out. Text is always inserted as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const PHASES = ["queue", "loading", "prefill", "transfer", "decode"];
const MAX_SAMPLES = 300;
const RETRY_MS = 1000;
const SILENT_MS = 5000; // the gateway sends an event at least once a second

// ---- text

const count = (value) => Math.round(value).toLocaleString("en");

function seconds(value) {
  if (value == null) return "–";
  if (value < 0.9995) return `${value < 0.00995 ? (value * 1e3).toFixed(1) : Math.round(value * 1e3)} ms`;
  return `${value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : Math.round(value)} s`;
}

function speed(value) {
  if (!value) return "–";
  return `${value < 99.95 ? value.toFixed(1) : count(value)} tok/s`;
}

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024 || unit === "GiB") return `${unit === "B" || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${unit}`;
    bytes /= 1024;
  }
}

// ---- DOM

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const shown = new Map();

// Draw a part of the page anew only if what it shows has changed: a selection in it stays otherwise.
function show(id, data, draw) {
  const key = JSON.stringify(data);
  if (shown.get(id) === key) return;
  shown.set(id, key);
  $(id).replaceChildren(...[draw(data)].flat());
}

function table(caption, heads, rows, empty) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const head = heads.map(([text, kind]) => el("th", { scope: "col", class: kind }, text));
  for (const row of rows) heads.forEach(([text], place) => (row.children[place].dataset.head = text));
  return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": `Table: ${caption}` }, el("table", {},
    el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

const cell = (content, kind) => el("td", { class: kind }, content ?? "–");

function state(kind, text) {
  return el("span", { class: "state" }, el("span", { class: `dot ${kind}` }), el("span", {}, text));
}

// ---- overview

const figure = (name, value, unit) => el("div", {}, el("dt", {}, name), el("dd", {}, value, unit ? el("small", {}, unit) : null));

function drawTogether(totals) {
  return [
    figure("Running", count(totals.running)),
    figure("Waiting", count(totals.waiting)),
    figure("Generated", count(totals.completion_tokens_s), "tok/s"),
    figure("Prompts", count(totals.prompt_tokens_s), "tok/s"),
    figure("Answers", count(totals.ok)),
    figure("Fallbacks", count(totals.fallbacks)),
    figure("Failed", count(totals.failed)),
    figure("KV", size(totals.kv_bytes)),
    figure("KV reused", totals.prompt_tokens ? `${Math.round((100 * totals.held_tokens) / totals.prompt_tokens)}` : "–", totals.prompt_tokens ? "%" : ""),
  ];
}

function drawModel({ name, totals, last }) {
  const line = (label, time, rate) => [
    el("dt", {}, label), el("dd", {}, time), el("dd", { class: "rate" }, rate ? `@ ${rate}` : ""),
  ];
  const body = last
    ? el("dl", { class: "lines" },
        ...line("prefill", seconds(last.prefill_time || null), last.prefill_speed && speed(last.prefill_speed)),
        ...line("decode", seconds(last.decode_time || null), last.decode_speed && speed(last.decode_speed)),
        ...line("first token", seconds(last.ttft)),
        ...line("total", seconds(last.total_time)))
    : el("p", { class: "empty" }, "No answer yet.");
  const route = last && [last.prefill_server, last.decode_server].filter(Boolean).join(" → ");
  return el("article", { class: "card model", "aria-label": name },
    el("div", { class: "head" }, el("h3", {}, name),
      el("span", { class: "muted" }, `${totals.running} running, ${totals.waiting} waiting, ${count(totals.completion_tokens_s)} tok/s`)),
    body,
    route ? el("p", { class: "muted" }, `last: ${route}${fellBack(last) ? ", fallback" : ""}, ${count(last.prompt_tokens)} + ${count(last.completion_tokens)} tokens`) : null);
}

function drawPhase(phase) {
  const reached = Math.max(0, PHASES.indexOf(phase)); // a request that waits for a load is in its queue
  return el("span", { class: "phases" },
    ...PHASES.map((one, at) => el("i", { class: at <= reached ? one : "", "aria-hidden": "true" })), el("span", {}, phase));
}

function drawNow(requests) {
  const rows = requests.map((one) => el("tr", {},
    el("th", { scope: "row" }, one.model), cell(drawPhase(one.phase)),
    cell([one.prefill_server, one.decode_server].filter(Boolean).join(" → ") || null),
    cell(one.prompt_tokens ? count(one.prompt_tokens) : null, "n"), cell(one.tokens ? count(one.tokens) : null, "n"),
    cell(seconds(one.seconds), "n"), cell(one.key ?? one.api, "muted")));
  return table("Requests now", [["model"], ["phase"], ["hosts"], ["prompt", "n"], ["answer", "n"], ["time", "n"], ["caller"]],
    rows, "No request runs.");
}

const fellBack = (one) => one.method === "fallback" || one.reason === "no decode host is left";

// ---- models on demand

const WORDS = { ready: "good", loading: "warn", draining: "warn", asleep: "", absent: "bad", failed: "bad", down: "bad" };
const TURNS = { ready: ["Unload", unload], asleep: ["Load", load], failed: ["Load", load], absent: ["Pull", pull] };

// A button is drawn anew only when its row changes, so that no click is lost: times are rounded.
const turning = (models) => models.filter(({ on_demand }) => on_demand).map(({ name, state, size_bytes, expires_s, left_s }) =>
  ({ name, state, size_bytes, goes: expires_s == null ? null : Math.ceil(expires_s / 60), left: left_s == null ? null : Math.ceil(left_s) }));

function drawLoads(models) {
  const rows = models.map(({ name, state: word, size_bytes, goes, left }) => {
    const [text, turn] = TURNS[word] ?? [];
    const button = text && el("button", { type: "button", "aria-label": `${text} ${name}` }, text);
    button?.addEventListener("click", () => turnModel(button, name, turn));
    const more = word === "loading" && left != null ? `, ${left} s left` : word === "ready" && goes != null ? `, unloads in ${goes} min` : "";
    return el("tr", {}, el("th", { scope: "row" }, name), cell(state(WORDS[word] ?? "bad", `${word}${more}`)),
      cell(size_bytes ? size(size_bytes) : null, "n"), cell(button ?? ""));
  });
  return table("Models on demand", [["model"], ["state"], ["size", "n"], ["change"]], rows, "None.");
}

async function turnModel(button, name, turn) {
  button.disabled = true;
  $("load-news").textContent = "";
  try {
    await turn(name);
  } catch (error) {
    $("load-news").textContent = `${name}: ${error.message}`;
  } finally {
    button.disabled = false;
  }
}

async function post(path, body) {
  const response = await fetch(path, {
    method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  if (response.ok) return response;
  const { error } = await response.json();
  throw new Error(error?.message ?? error ?? `status ${response.status}`);
}

async function load(model) {
  await post("api/v1/models/load", { model });
}

async function unload(model) {
  await post("api/v1/models/unload", { instance_id: model });
}

async function pull(model) {
  const reader = (await post("api/pull", { model })).body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (buffer + value).split("\n");
    buffer = lines.pop();
    for (const { error, status, total, completed } of lines.filter(Boolean).map((line) => JSON.parse(line))) {
      if (error) throw new Error(error);
      $("load-news").textContent = `${model}: ${status}${total ? `, ${size(completed ?? 0)} of ${size(total)}` : ""}`;
    }
  }
}

const STATES = { up: "good", loading: "warn", draining: "warn", failing: "warn", unknown: "", asleep: "" };

function drawMeter(host) {
  if (!host.kv_limit) return "–";
  const share = (bytes) => Math.min(100, (100 * bytes) / host.kv_limit);
  const used = share(host.kv_bytes);
  return el("span", {}, size(host.kv_bytes + host.kv_held_bytes), el("span", { class: "meter" },
    svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "used", width: used, height: 10 }),
      svg("rect", { class: "held", x: used, width: Math.min(100 - used, share(host.kv_held_bytes)), height: 10 }))));
}

function drawHosts(hosts) {
  const rows = hosts.map((host) => el("tr", {},
    el("th", { scope: "row" }, host.name), cell(host.role), cell(host.model),
    cell(state(STATES[host.state] ?? "bad", host.state)), cell(count(host.running), "n"), cell(count(host.queue), "n"),
    cell(drawMeter(host)), cell(speed(host.role === "prefill" ? host.prefill_tokens_s : host.decode_tokens_s), "n"),
    cell(host.reason ? el("span", {}, host.reason, host.hint ? ": " : "", host.hint ? el("code", {}, host.hint) : null) : "", "wide")));
  return table("Hosts", [["host"], ["role"], ["model"], ["state"], ["running", "n"], ["waiting", "n"], ["KV"], ["speed", "n"], ["what to do"]],
    rows, "This fleet has no hosts.");
}

function announceHosts(before, now) {
  const was = new Map(before.map((host) => [host.name, host.state]));
  const news = now.filter((host) => was.has(host.name) && was.get(host.name) !== host.state);
  if (news.length) $("host-news").textContent = news.map((host) => `${host.name} is ${host.state}`).join(", ");
}

function drawLast(entries) {
  const rows = entries.map((one) => el("tr", {},
    cell(new Date(one.time * 1000).toLocaleTimeString("en-GB")), el("th", { scope: "row" }, one.model),
    cell(count(one.prompt_tokens), "n"), cell(count(one.completion_tokens), "n"), cell(seconds(one.ttft), "n"),
    cell(speed(one.prefill_speed), "n"), cell(speed(one.decode_speed), "n"), cell(seconds(one.total_time), "n"),
    cell([one.prefill_server, one.decode_server].filter(Boolean).join(" → ") || null), cell(remark(one), "wide")));
  return table("Last requests", [["time"], ["model"], ["prompt", "n"], ["answer", "n"], ["first token", "n"], ["prefill", "n"],
    ["decode", "n"], ["total", "n"], ["hosts"], ["remark"]], rows, "None since this gateway started.");
}

function remark(one) {
  if (one.state === "failed") return el("span", { class: "bad" }, one.error ?? "failed");
  if (one.state === "cancelled") return el("span", { class: "muted" }, "cancelled");
  if (fellBack(one)) return el("span", { class: "warn" }, "fallback");
  if (one.resumed_at != null) return el("span", { class: "warn" }, `prefill host failed after ${count(one.resumed_at)} tokens`);
  const notes = [one.held_tokens && `${count(one.held_tokens)} tokens held`, one.layers != null && `split after ${one.layers} layers`].filter(Boolean);
  return notes.length ? el("span", { class: "muted" }, notes.join(", ")) : "";
}

// ---- plots

const samples = [];
const PLOTS = [
  ["Generated", (one) => one.completion_tokens_s, (value) => `${count(value)} tok/s`],
  ["Requests", (one) => one.running + one.waiting, (value) => count(value)],
  ["First token", (one) => one.ttft, (value) => seconds(value)],
  ["KV", (one) => one.kv_bytes, (value) => size(value)],
];

function drawPlot([name, read, text]) {
  const values = samples.map(read);
  const known = values.filter((value) => value != null);
  const top = Math.max(...known, 0);
  const now = values.length ? values[values.length - 1] : null;
  const at = (index) => (values.length > 1 ? (400 * index) / (values.length - 1) : 400);
  const points = values.map((value, index) => (value == null ? null : `${at(index).toFixed(1)} ${(60 - (54 * value) / (top || 1)).toFixed(1)}`));
  const path = points.reduce((drawn, point, index) => (point ? `${drawn}${index && points[index - 1] ? "L" : "M"}${point}` : drawn), "");
  const box = svg("svg", { viewBox: "0 0 400 60", preserveAspectRatio: "none", role: "img",
    "aria-label": `${name} of the last ten minutes: ${now == null ? "none" : text(now)} now, at most ${text(top)}` },
    svg("line", { x1: 0, x2: 400, y1: 60, y2: 60 }), svg("path", { d: path || "M0 60" }));
  if (path && !points.includes(null)) box.prepend(svg("path", { class: "area", d: `${path}L400 60L0 60Z` }));
  return el("div", { class: "card plot" },
    el("h3", {}, name, el("b", {}, now == null ? "–" : text(now))), box,
    el("p", { class: "muted" }, known.length ? `highest ${text(top)}` : "nothing yet"));
}

function addSample(sample) {
  if (!sample || (samples.length && samples[samples.length - 1].time >= sample.time)) return;
  samples.push(sample);
  while (samples.length > MAX_SAMPLES) samples.shift();
}

// ---- live

let latest = null;

function draw(now) {
  announceHosts(latest ? latest.hosts : [], now.hosts);
  const first = latest === null;
  latest = now;
  addSample(now.sample);
  $("fleet").textContent = now.fleet;
  const down = now.hosts.filter((host) => host.state !== "up" && host.state !== "asleep").length;
  const [kind, text] = down ? ["warn", `${down} of ${now.hosts.length} hosts ${down === 1 ? "takes" : "take"} no requests`] : ["good", `${now.hosts.length} ${now.hosts.length === 1 ? "host" : "hosts"} up`];
  show("connection", [kind, text], () => state(kind, text));
  show("together", now.totals, drawTogether);
  show("models", now.models, (models) => models.map(drawModel));
  $("on-demand").hidden = !now.models.some(({ on_demand }) => on_demand);
  show("loads", turning(now.models), drawLoads);
  show("now", now.requests, drawNow);
  show("hosts", now.hosts, drawHosts);
  show("last", now.last, drawLast);
  show("plots", samples.length ? samples[samples.length - 1].time : 0, () => PLOTS.map(drawPlot));
  if (first) {
    drawChoices(now.models.map((model) => model.name));
    drawConnect();
  }
}

const KEY_FORM = /^[\x21-\x7e]+$/; // fetch throws for a header outside Latin-1

const headers = () => {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
};

async function* eventsOf(response, alive = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const lines = buffer.slice(0, end).split("\n");
      buffer = buffer.slice(end + 2);
      const field = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
      if (field("data")) yield { name: field("event"), data: field("data") };
    }
  }
}

const sleep = (milliseconds) => new Promise((resume) => setTimeout(resume, milliseconds));

async function follow() {
  for (;;) {
    const abort = new AbortController();
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENT_MS);
    };
    try {
      alive();
      const response = await fetch("api/live", { headers: headers(), signal: abort.signal, cache: "no-store" });
      if (response.status === 401) {
        clearTimeout(timer);
        await askKey();
        continue;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      for await (const { name, data } of eventsOf(response, alive)) {
        if (name === "past") samples.splice(0, samples.length, ...JSON.parse(data).samples);
        if (name === "state") draw(JSON.parse(data));
      }
      throw new Error("the stream ended");
    } catch {
      clearTimeout(timer);
      show("connection", "lost", () => state("bad", "the gateway does not answer"));
      await sleep(RETRY_MS);
    }
  }
}

function askKey() {
  const dialog = $("ask-key");
  if (sessionStorage.getItem("key")) $("key-problem").textContent = "This key is not accepted.";
  sessionStorage.removeItem("key");
  if (!dialog.open) dialog.showModal();
  return new Promise((resume) => {
    dialog.addEventListener("close", () => {
      const key = $("key").value.trim();
      if (KEY_FORM.test(key)) sessionStorage.setItem("key", key);
      else $("key-problem").textContent = "A key has only letters, digits and signs of ASCII.";
      $("key").value = "";
      resume();
    }, { once: true });
  });
}

// ---- try it

let running = null;

function drawChoices(models) {
  $("choices").replaceChildren(...models.map((name, at) =>
    el("label", {}, el("input", { type: "checkbox", name: "model", value: name, checked: at < 2 }), name)));
}

async function ask(model, abort) {
  const answer = el("div", { class: "answer", role: "log", tabindex: 0, "aria-label": `Answer of ${model}` });
  const note = el("p", { class: "muted" }, "waiting");
  $("answers").append(el("article", { class: "card" }, el("div", { class: "head" }, el("h3", {}, model)), answer, note));
  const body = {
    model, stream: true, stream_options: { include_usage: true }, max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value), messages: [{ role: "user", content: $("text").value }],
  };
  const began = performance.now();
  let figures = null;
  let tokens = 0;
  let ended = false;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body), signal: abort.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") {
        ended = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      const [choice] = chunk.choices;
      if (!choice) continue;
      figures = choice.disagg ?? figures;
      answer.append(choice.delta?.content ?? "");
      answer.scrollTop = answer.scrollHeight;
      if (note.textContent === "waiting" && choice.delta?.content) note.textContent = "generating";
    }
    if (!ended) throw new Error("the answer was cut off");
    const route = figures ? [figures.prefill_server, figures.decode_server].filter(Boolean).join(" → ") : "";
    const time = (performance.now() - began) / 1000;
    note.textContent = [
      figures && `first token ${seconds(figures.ttft)}`, `${tokens} tokens`, `total ${seconds(time)}`, route,
      ...(figures?.warnings ?? []),
    ].filter(Boolean).join(", ");
    return { tokens, time };
  } catch (error) {
    note.className = abort.signal.aborted ? "muted" : "bad";
    note.textContent = abort.signal.aborted ? "stopped" : error.message;
    return null;
  }
}

async function send(event) {
  event.preventDefault();
  const models = [...document.querySelectorAll("input[name=model]:checked")].map((input) => input.value);
  if (running || !models.length || !$("text").value.trim()) return;
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("answers").replaceChildren();
  $("side-by-side").textContent = `${models.join(" and ")} ${models.length > 1 ? "answer" : "answers"}.`;
  const began = performance.now();
  const done = (await Promise.all(models.map((model) => ask(model, running)))).filter(Boolean);
  const wall = (performance.now() - began) / 1000;
  const sum = done.reduce((total, one) => total + one.time, 0);
  const tokens = done.reduce((total, one) => total + one.tokens, 0);
  $("side-by-side").textContent = done.length > 1
    ? `Together ${seconds(wall)}, one after the other ${seconds(sum)}; ${count(tokens)} tokens, ${speed(tokens / wall)} in sum.`
    : done.length ? "Done." : "No answer is complete.";
  $("send").disabled = false;
  $("stop").disabled = true;
  running = null;
}

// ---- connect

const LOOPBACK = /^https?:\/\/(127\.|localhost|\[::1\])/; // an address that a container has for itself
const NO_KEY = "unused"; // in the place of a key, where a client wants one
const CLIENTS = [
  ["curl", null, (base, model, key) => `curl ${base}/v1/chat/completions \\\n  -H "Authorization: Bearer ${key}" \\\n  -H "Content-Type: application/json" \\\n  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello"}]}'`],
  ["OpenAI for Python", null, (base, model, key) => `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}/v1", api_key="${key}")\nanswer = client.chat.completions.create(\n    model="${model}",\n    messages=[{"role": "user", "content": "Hello"}],\n)\nprint(answer.choices[0].message.content)`],
  ["LangChain", null, (base, model, key) => `from langchain_openai import ChatOpenAI\n\nllm = ChatOpenAI(\n    base_url="${base}/v1",\n    api_key="${key}",\n    model="${model}",\n)\nprint(llm.invoke("Hello").content)`],
  ["Continue (config.yaml)", null, (base, model, key, context) => `name: disagg\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: ${model}\n    provider: openai\n    model: ${model}\n    apiBase: ${base}/v1\n    apiKey: ${key}\n    roles: [chat, edit, apply]\n    defaultCompletionOptions:\n      contextLength: ${context}`],
  ["Open WebUI", null, (base, model, key) => `docker run -d ${LOOPBACK.test(base) ? "--network host -e PORT=3000" : "-p 3000:8080"} \\\n  -e OPENAI_API_BASE_URL=${base}/v1 \\\n  -e OPENAI_API_KEY=${key} \\\n  ghcr.io/open-webui/open-webui:main`],
  ["Ollama", "/api/show", (base, model) => `OLLAMA_HOST=${base} ollama run ${model}`],
  ["Claude Code", "/v1/messages", (base, model, key, context) => `export ANTHROPIC_BASE_URL=${base}\nexport ANTHROPIC_AUTH_TOKEN=${key}\nexport ANTHROPIC_MODEL=${model}\nexport ANTHROPIC_DEFAULT_HAIKU_MODEL=${model}\nexport CLAUDE_CODE_MAX_CONTEXT_TOKENS=${context}\nexport CLAUDE_CODE_AUTO_COMPACT_WINDOW=${context}\nclaude`],
  ["Codex (config.toml)", "/v1/responses", (base, model, key, context) => `${key === NO_KEY ? "" : `# before codex: export DISAGG_API_KEY=${key}\n`}model = "${model}"\nmodel_provider = "disagg"\nmodel_context_window = ${context}\n\n[model_providers.disagg]\nname = "disagg"\nbase_url = "${base}/v1"\n${key === NO_KEY ? "" : 'env_key = "DISAGG_API_KEY"\n'}wire_api = "responses"`],
];

function drawConnect() {
  const select = el("select", { id: "model-of-clients" }, ...latest.models.map(({ name }) => el("option", {}, name)));
  const context = el("span", { class: "muted" });
  $("connect-model").replaceChildren(el("label", { for: "model-of-clients" }, "Model"), select, context);
  const base = location.origin + location.pathname.replace(/\/[^/]*$/, "");
  const drawClients = () => {
    const model = latest.models.find(({ name }) => name === select.value);
    context.textContent = `context: ${count(model.context)} tokens, prompt and answer together`;
    const served = CLIENTS.filter(([, path]) => !path || latest.apis.includes(path));
    $("clients").replaceChildren(...served.map(([name, , write]) => {
      const text = write(base, model.name, sessionStorage.getItem("key") ? "YOUR-KEY" : NO_KEY, model.context);
      const copy = el("button", { type: "button", "aria-label": `Copy the settings of ${name}` }, "Copy");
      copy.addEventListener("click", async () => {
        await navigator.clipboard.writeText(text);
        copy.textContent = "Copied";
        setTimeout(() => (copy.textContent = "Copy"), 1500);
      });
      return el("article", { class: "card" }, el("div", { class: "head" }, el("h3", {}, name), copy), el("pre", { tabindex: 0 }, text));
    }));
  };
  select.addEventListener("change", drawClients);
  drawClients();
}

// ---- pages

function openPage() {
  const wanted = location.hash.slice(1);
  const names = [...document.querySelectorAll(".page")].map((page) => page.id);
  const open = names.includes(wanted) ? wanted : "overview";
  for (const name of names) $(name).hidden = name !== open;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${open}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

addEventListener("hashchange", openPage);
openPage();
$("prompt").addEventListener("submit", send);
$("stop").addEventListener("click", () => running?.abort());
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("prompt").requestSubmit();
});
follow();
