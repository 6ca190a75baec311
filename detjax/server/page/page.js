// SPDX-License-Identifier: Apache-2.0
// The page at `/`: asks, shows each token's probability, and asks again under load.
"use strict";

const by = (id) => document.getElementById(id);
const NUM_TOP = 5;
const LOADS = [4, 16, 64]; // other requests at the same time
const PER_REQUEST = 16; // WHY: a browser opens six connections to a server, so prompts go in lists
const NUM_SPECIAL = 2; // tokens that a tokenizer may put before a text
const WORDS = ("sea house lamp tower winter letter river morning garden window stranger road candle " +
  "captain sister village storm silver church market horse mirror island harbour forest").split(" ");

let server = null; // the card of the model
let isChat = false;
let messages = []; // the conversation
let asked = null; // the last question that was answered whole: {path, body, digest}
let running = null; // an AbortController while something is asked

// ------------------------------------------------------------------------------------- the server

function headers() {
  const found = { "Content-Type": "application/json" };
  if (by("key").value) found.Authorization = "Bearer " + by("key").value;
  return found;
}

async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

async function connect() {
  let status = "unreachable";
  try {
    status = (await (await fetch("/health")).json()).status;
    by("state").textContent = status;
    by("state").className = "pill " + status;
    if (status === "ready" && server) {
      const models = await fetch("/v1/models", { headers: headers() });
      if (models.ok) tellMode((await models.json()).data[0]);
    } else if (status === "ready") {
      const version = await (await fetch("/version")).json();
      by("fingerprint").textContent = version.system_fingerprint;
      const models = await fetch("/v1/models", { headers: headers() });
      if (models.status === 401) showError("This server wants an API key: put it into the field above.");
      else if (models.ok) open((await models.json()).data[0]);
    }
  } catch {
    by("state").textContent = status;
    by("state").className = "pill failed";
  }
  setTimeout(connect, server ? 10000 : 1000);
}

function open(card) {
  server = card;
  by("model").textContent = `${card.id}, ${card.max_model_len} tokens`;
  tellMode(card);
  document.title = `detjax: ${card.id}`;
  showError("");
}

function tellMode(card) {
  const drafts = Object.entries(card.drafts).map(([source, counts]) =>
    `${source}: ${Math.round(100 * counts.acceptance)} % of drafts accepted, ` +
    `${counts.tokens_per_window.toFixed(2)} tokens a window`);
  by("mode").textContent = [card.mode, ...drafts].join("; ");
}

function showError(text) {
  by("error").hidden = !text;
  by("error").textContent = text;
}

// ---------------------------------------------------------------------------------------- asking

function question() {
  const text = by("prompt").value;
  const common = {
    model: server.id,
    temperature: Number(by("temperature").value),
    seed: Number(by("seed").value),
    max_tokens: Number(by("max-tokens").value),
  };
  if (!isChat) return { path: "/v1/completions", body: { ...common, prompt: text, logprobs: NUM_TOP } };
  const said = [...messages, { role: "user", content: text }];
  return {
    path: "/v1/chat/completions",
    body: { ...common, messages: said, logprobs: true, top_logprobs: NUM_TOP },
  };
}

async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const chunk = JSON.parse(part.slice("data: ".length));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

async function ask() {
  if (!server) return showError("The server is not ready yet.");
  const { path, body } = question();
  begin();
  by("answer").replaceChildren();
  by("facts").replaceChildren();
  by("load-panel").hidden = true;
  by("answer-panel").hidden = false;
  by("answer").classList.add("streaming");
  if (!isChat) by("answer").append(element("span", "asked", body.prompt));
  const beginMs = performance.now();
  let text = "", count = 0, last = null;
  try {
    const response = await post(path, { ...body, stream: true }, running.signal);
    for await (const chunk of chunks(response)) {
      for (const choice of chunk.choices) {
        const piece = isChat ? choice.delta.content : choice.text;
        const tokens = tokensOf(choice.logprobs);
        text += piece;
        count += tokens.length;
        show(piece, tokens);
        if (choice.finish_reason) last = choice;
      }
    }
    const seconds = (performance.now() - beginMs) / 1000;
    if (!last) throw new Error("the stream ended before the answer did");
    tellFacts(last, count, seconds);
    asked = { path, body, digest: last.detjax.digest };
    by("load").disabled = false;
    if (isChat) {
      messages = [...body.messages, { role: "assistant", content: text }];
      by("prompt").value = "";
      tellConversation();
    }
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message);
  } finally {
    by("answer").classList.remove("streaming");
    end();
  }
}

function begin() {
  running = new AbortController();
  by("ask").disabled = by("load").disabled = true;
  by("stop").disabled = false;
  showError("");
}

function end() {
  running = null;
  by("ask").disabled = false;
  by("stop").disabled = true;
  by("load").disabled = !asked;
}

// ---------------------------------------------------------------------------------------- tokens

function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      text: one.token, logprob: one.logprob, top: one.top_logprobs.map((t) => [t.token, t.logprob]),
    }));
  }
  return logprobs.tokens.map((text, i) => ({
    text, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs[i]),
  }));
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function show(piece, tokens) {
  // WHY: a token that is a part of a character has no text of its own; its piece is shown whole.
  const isWhole = tokens.map((token) => token.text).join("") === piece;
  const shown = isWhole ? tokens.map((token) => [token.text, token]) : [[piece, tokens.at(-1)]];
  for (const [text, token] of shown) {
    if (!text) continue;
    const span = element("span", "token", text);
    if (token) {
      span.style.setProperty("--share", `${Math.min(55, 9 * -token.logprob)}%`);
      span.token = token;
    }
    by("answer").append(span);
  }
}

function tip(event) {
  const span = event.target.closest?.(".token");
  document.querySelectorAll(".token.shown").forEach((one) => one.classList.remove("shown"));
  if (!span?.token) return (by("tip").hidden = true);
  span.classList.add("shown");
  const { token } = span;
  const rows = [...token.top];
  if (!rows.some(([text, logprob]) => text === token.text && logprob === token.logprob)) {
    rows.push([token.text, token.logprob]);
  }
  rows.sort((a, b) => b[1] - a[1]);
  by("tip").replaceChildren(...rows.map(([text, logprob]) => {
    const share = Math.exp(logprob), isChosen = text === token.text;
    const row = element("div", isChosen ? "row chosen" : "row", "");
    const bar = element("span", "bar", "");
    bar.style.width = `${100 * share}%`;
    row.append(element("span", "", JSON.stringify(text).slice(1, -1)), bar,
      element("span", "number", `${(100 * share).toFixed(share < 0.001 ? 3 : 1)} %`));
    return row;
  }), element("div", "note", `logprob ${token.logprob}`));
  by("tip").hidden = false;
  const box = span.getBoundingClientRect(), own = by("tip").getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - own.width - 8));
  by("tip").style.left = `${left + scrollX}px`;
  by("tip").style.top = `${box.bottom + scrollY + 6}px`;
}

function tellFacts(choice, count, seconds) {
  const proof = choice.detjax;
  const facts = [
    ["digest", proof.digest, "digest"],
    ["canonical", proof.is_deterministic ? "yes" : "no"],
    ["tokens", `${count}, ended by ${choice.finish_reason}`],
    ["seed", proof.sampling.seed],
    ["speed", `${(count / seconds).toFixed(1)} tokens a second`],
  ];
  if (proof.rollbacks.windows) {
    const { windows, windows_rolled_back: back } = proof.rollbacks;
    facts.push(["windows", `${windows} verified, ${back} rolled back`]);
  }
  by("facts").replaceChildren(...facts.map(([name, value, kind]) => {
    const row = element("div", "", "");
    row.append(element("dt", "", name), element("dd", kind ?? "", String(value)));
    return row;
  }));
}

// -------------------------------------------------------------------------------- under other loads

function randomPrompt() {
  // At most half of the context: a text has no more tokens than bytes, and a word has up to 9.
  const most = Math.max(1, Math.min(43, Math.floor(server.max_model_len / 20)));
  const least = Math.min(3, most);
  const count = least + Math.floor((most - least + 1) * Math.random());
  return Array.from({ length: count }, () => WORDS[Math.floor(WORDS.length * Math.random())]).join(" ");
}

/** Ask the same among `count` random requests; its digest. */
async function digestAmong(count, deterministic, signal) {
  const company = new AbortController();
  const leave = () => company.abort();
  signal.addEventListener("abort", leave);
  const others = [];
  for (let left = count; left > 0; left -= PER_REQUEST) {
    const prompt = Array.from({ length: Math.min(left, PER_REQUEST) }, randomPrompt);
    const room = server.max_model_len - NUM_SPECIAL - Math.max(...prompt.map((text) => text.length));
    const body = {
      model: server.id, prompt, max_tokens: Math.max(1, Math.min(200, room)), temperature: Math.random(),
      seed: Math.floor(1e6 * Math.random()), is_deterministic: deterministic,
    };
    others.push(post("/v1/completions", body, company.signal));
  }
  const crowd = Promise.allSettled(others);
  try {
    if (count) await new Promise((done) => setTimeout(done, 300));
    // WHY: a salt of its own, so that the prompt is computed anew and not found in the cache.
    const body = { ...asked.body, is_deterministic: deterministic, cache_salt: String(Math.random()), priority: 1 };
    const response = await post(asked.path, body, signal);
    return (await response.json()).choices[0].detjax.digest;
  } finally {
    company.abort();
    signal.removeEventListener("abort", leave);
    const failed = (await crowd).find((one) => one.status === "rejected" && one.reason.name !== "AbortError");
    if (failed) showError(`A request of the load failed: ${failed.reason.message}`);
  }
}

function columns() {
  const canonical = { name: "canonical", deterministic: true }, fast = { name: "fast", deterministic: false };
  const texts = {
    invariant: [[canonical], "Every step of this server is canonical. To see fast answers beside these, " +
      "start it with --mode dvr (on a CPU also --decode-batches 1 2 4 --dtype float32)."],
    dvr: [[canonical, fast], "Left as the server promises it; right with is_deterministic=false: " +
      "fast kernels, whose last bits may follow the batch."],
    fast: [[fast], "This server runs in mode fast, which promises nothing: digests may follow the batch."],
  };
  return texts[server.mode];
}

function cell(digest, expected) {
  const made = element("td", "", "");
  const code = element("span", "digest", digest.slice(0, 12));
  code.title = digest;
  made.append(code);
  if (expected) {
    const isSame = digest === expected;
    made.append(element("span", "mark " + (isSame ? "same" : "differs"), isSame ? "same bits" : "other bits"));
  }
  return made;
}

async function underLoad() {
  begin();
  const [kinds, text] = columns();
  by("load-text").textContent = text;
  by("load-head").replaceChildren(element("th", "", "asked"), ...kinds.map((kind) => element("th", "", kind.name)));
  by("load-rows").replaceChildren();
  by("load-panel").hidden = false;
  by("verdict").className = "";
  const alone = {}, numOther = {};
  try {
    for (const count of [0, ...LOADS]) {
      by("verdict").textContent = count ? `asking among ${count} random requests …` : "asking alone …";
      const row = element("tr", "", "");
      row.append(element("th", "", count ? `among ${count} others` : "alone"));
      by("load-rows").append(row);
      for (const kind of kinds) {
        const digest = await digestAmong(count, kind.deterministic, running.signal);
        alone[kind.name] ??= digest;
        numOther[kind.name] = (numOther[kind.name] ?? 0) + (digest !== alone[kind.name]);
        row.append(cell(digest, count ? alone[kind.name] : ""));
      }
    }
    tellVerdict(kinds, numOther, alone);
  } catch (error) {
    by("verdict").textContent = "";
    if (error.name !== "AbortError") showError(error.message);
  } finally {
    end();
  }
}

function tellVerdict(kinds, numOther, alone) {
  const parts = kinds.map(({ name, deterministic }) => numOther[name]
    ? `${name}: ${numOther[name]} of ${LOADS.length} loads changed a bit`
    : `${name}: the same bits under every load` + (deterministic ? "" : " this time, without a promise"));
  if (alone.canonical && alone.canonical !== asked.digest) {
    parts.unshift("the answer above has another digest than the same asked alone");
    numOther.canonical = 1;
  }
  by("verdict").textContent = parts.join("; ") + ".";
  by("verdict").className = numOther[kinds[0].name] ? "differs" : "same";
}

// ------------------------------------------------------------------------------------------ chat

function tellConversation() {
  by("conversation").hidden = !isChat || !messages.length;
  by("new-chat").hidden = !isChat || !messages.length;
  by("conversation").replaceChildren(...messages.map((one) => element("li", one.role, one.content)));
}

function choose(chat) {
  isChat = chat && Boolean(server?.has_chat_template);
  by("no-chat").hidden = !chat || isChat || !server;
  by("tab-chat").ariaSelected = String(isChat);
  by("tab-completion").ariaSelected = String(!isChat);
  tellConversation();
}

by("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) by("form").requestSubmit();
});
by("stop").addEventListener("click", () => running?.abort());
by("load").addEventListener("click", underLoad);
by("new-chat").addEventListener("click", () => { messages = []; tellConversation(); });
by("tab-chat").addEventListener("click", () => choose(true));
by("tab-completion").addEventListener("click", () => choose(false));
document.addEventListener("pointerover", tip);
document.addEventListener("click", tip);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") by("tip").hidden = true; });
connect();
