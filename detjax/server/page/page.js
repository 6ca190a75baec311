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

let server = null; // the card of the model, and `made`: what else an answer's bits follow
let absent = ""; // why there is no card
let timer = 0; // of the next look at the server
let isChat = false;
let messages = []; // the conversation
let asked = null; // the question of the answer that is shown, once that is whole: {path, body, digest, made}
let running = null; // an AbortController while something is asked

// ------------------------------------------------------------------------------------- the server

const LOST = "The connection to the server was lost. If the server has stopped, start it again; " +
  "ask again when the state above is ready.";

function headers() {
  const found = { "Content-Type": "application/json" };
  // WHY: fetch cannot send other letters, which no key has. The server then says that the key is wrong.
  const key = by("key").value.replace(/[^\x20-\x7e]/g, "?");
  if (key) found.Authorization = "Bearer " + key;
  return found;
}

function keyError() {
  return by("key").value
    ? "The API key in the field above is wrong: the server does not take it."
    : "This server wants an API key: put it into the field above.";
}

/** What a fetch or a read gives. If the network fails, look at the server at once. */
async function reached(wanted) {
  try {
    return await wanted;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    connect();
    throw new Error(LOST);
  }
}

async function post(path, body, signal) {
  const asking = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await reached(fetch(path, asking));
  if (response.status === 401) {
    connect();
    throw new Error(keyError());
  }
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

/** Show what the server is now, and look again later. */
async function connect() {
  clearTimeout(timer);
  let status = "unreachable";
  try {
    const found = (await (await fetch("/health")).json()).status;
    if (found === "starting") forget("The server is not ready yet.");
    else await readCard();
    status = found;
  } catch {
    forget(LOST);
  }
  by("state").textContent = status;
  by("state").className = "pill " + (status === "unreachable" ? "failed" : status);
  clearTimeout(timer); // of another look that was on its way
  timer = setTimeout(connect, server ? 10000 : 1000);
}

async function readCard() {
  const { system_fingerprint: fingerprint } = await (await fetch("/version")).json();
  const models = await fetch("/v1/models", { headers: headers() });
  if (models.ok) return open((await models.json()).data[0], fingerprint);
  const isKey = models.status === 401;
  forget(isKey ? keyError() : `The server does not tell its model: ${models.status}.`, fingerprint);
  if (isKey) showError(absent);
}

function open(card, fingerprint) {
  const made = [card.id, fingerprint, card.weights, card.weight_version].join();
  if (server?.made !== made) showError(""); // it was about another server, or about none
  server = { ...card, made };
  by("fingerprint").textContent = fingerprint;
  by("model").textContent = `${card.id}, ${card.max_model_len} tokens`;
  tellMode(card);
  document.title = `detjax: ${card.id}`;
  if (isChat && !card.has_chat_template) choose(true);
  tellButtons();
}

function forget(why, fingerprint = "–") {
  server = null;
  absent = why;
  by("fingerprint").textContent = fingerprint;
  by("model").textContent = by("mode").textContent = "–";
  document.title = "detjax";
  tellButtons();
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

/** The number in a field; undefined, which JSON leaves out, if there is none. */
function numberOf(id, name) {
  const { value, validity } = by(id);
  if (validity.badInput) throw new Error(`${name} is not a number.`);
  if (Number(value) > Number.MAX_SAFE_INTEGER) {
    const most = Number.MAX_SAFE_INTEGER;
    throw new Error(`${name} ${value} is above ${most}, the largest that this page sends exactly.`);
  }
  return value ? Number(value) : undefined;
}

function question(chat) {
  const text = by("prompt").value;
  const common = {
    model: server.id,
    temperature: numberOf("temperature", "Temperature"),
    seed: numberOf("seed", "Seed"),
    max_tokens: numberOf("max-tokens", "Tokens"),
  };
  if (!chat) return { path: "/v1/completions", body: { ...common, prompt: text, logprobs: NUM_TOP } };
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
    const { value, done } = await reached(reader.read());
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
  const chat = isChat;
  begin();
  try {
    if (!server) await connect();
    if (!server) throw new Error(absent);
    const { path, body } = question(chat), { made } = server;
    clearAnswer(chat ? "" : body.prompt);
    const beginMs = performance.now();
    const response = await post(path, { ...body, stream: true }, running.signal);
    const { said, last, count, fingerprint } = await follow(response, chat);
    tellFacts(last, fingerprint, count, (performance.now() - beginMs) / 1000);
    // WHY: with the seed that was drawn if the field is empty, so that the same is asked again.
    const { digest, sampling } = last.detjax;
    asked = { path, body: { ...body, seed: sampling.seed }, digest, made };
    if (chat) {
      messages = [...body.messages, { role: "assistant", ...said }];
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

function clearAnswer(prompt) {
  asked = null;
  for (const id of ["answer", "thoughts", "facts"]) by(id).replaceChildren();
  by("load-panel").hidden = by("reasoning").hidden = true;
  by("answer-panel").hidden = false;
  by("answer").classList.add("streaming");
  if (prompt) by("answer").append(element("span", "asked", prompt));
}

/** Show an answer while it streams. */
async function follow(response, chat) {
  const said = { content: "" };
  let count = 0, last = null, fingerprint = "";
  for await (const chunk of chunks(response)) {
    fingerprint = chunk.system_fingerprint;
    for (const choice of chunk.choices) {
      const content = chat ? choice.delta.content : choice.text;
      const thought = chat && choice.delta.reasoning_content;
      const tokens = tokensOf(choice.logprobs);
      count += tokens.length;
      if (thought) {
        said.reasoning_content = (said.reasoning_content ?? "") + thought;
        by("reasoning").hidden = false;
        show(by("thoughts"), thought, content ? [] : tokens);
      }
      said.content += content;
      show(by("answer"), content, tokens);
      if (choice.finish_reason) last = choice;
    }
  }
  if (!last) throw new Error(LOST);
  return { said, last, count, fingerprint };
}

function begin() {
  running = new AbortController();
  showError("");
  tellButtons();
}

function end() {
  running = null;
  tellButtons();
}

function tellButtons() {
  for (const id of ["ask", "tab-completion", "tab-chat", "new-chat"]) by(id).disabled = Boolean(running);
  by("stop").disabled = !running;
  // The digest of another model or build says nothing of this one.
  by("load").disabled = Boolean(running) || !asked || asked.made !== server?.made;
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

function show(box, piece, tokens) {
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
    box.append(span);
    if (token && !box.querySelector("[tabindex]")) giveTabStop(span);
  }
}

function percent(logprob) {
  const share = Math.exp(logprob);
  return `${(100 * share).toFixed(share < 0.001 ? 3 : 1)} %`;
}

/** Make a token the one that Tab reaches in its box; only it is named, so that the text reads as one. */
function giveTabStop(span) {
  const before = span.parentElement.querySelector("[tabindex]");
  for (const name of ["tabindex", "role", "aria-label", "aria-describedby"]) before?.removeAttribute(name);
  const { text, logprob } = span.token;
  span.tabIndex = 0;
  span.setAttribute("role", "note");
  span.setAttribute("aria-label", `token ${JSON.stringify(text)}, ${percent(logprob)}`);
  span.setAttribute("aria-describedby", "tip");
}

function moveTabStop(event) {
  const span = event.target;
  if (!span.token || event.ctrlKey || event.altKey || event.metaKey) return;
  const tokens = [...span.parentElement.querySelectorAll(".token")].filter((one) => one.token);
  const at = tokens.indexOf(span);
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (!tokens[to]) return;
  event.preventDefault();
  giveTabStop(tokens[to]);
  tokens[to].focus();
}

function tip(event) {
  const span = event.target.closest?.(".token") ?? document.querySelector(".token:focus-visible");
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
    const row = element("div", text === token.text ? "row chosen" : "row", "");
    const bar = element("span", "bar", "");
    bar.style.width = `${100 * Math.exp(logprob)}%`;
    row.append(element("span", "", JSON.stringify(text).slice(1, -1)), bar,
      element("span", "number", percent(logprob)));
    return row;
  }), element("div", "note", `logprob ${token.logprob}`));
  by("tip").hidden = false;
  const box = span.getBoundingClientRect(), own = by("tip").getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - own.width - 8));
  by("tip").style.left = `${left + scrollX}px`;
  by("tip").style.top = `${box.bottom + scrollY + 6}px`;
}

function tellFacts(choice, fingerprint, count, seconds) {
  const proof = choice.detjax;
  const facts = [
    ["digest", proof.digest, "digest"],
    ["fingerprint", fingerprint, "fingerprint"],
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

function randomPrompt(card) {
  // At most half of the context: a text has no more tokens than bytes, and a word has up to 9.
  const most = Math.max(1, Math.min(43, Math.floor(card.max_model_len / 20)));
  const least = Math.min(3, most);
  const count = least + Math.floor((most - least + 1) * Math.random());
  return Array.from({ length: count }, () => WORDS[Math.floor(WORDS.length * Math.random())]).join(" ");
}

/** Ask the same among `count` random requests of the model of `card`; its digest. */
async function digestAmong(card, count, deterministic, signal) {
  const company = new AbortController();
  const leave = () => company.abort();
  signal.addEventListener("abort", leave);
  const others = [];
  for (let left = count; left > 0; left -= PER_REQUEST) {
    const prompt = Array.from({ length: Math.min(left, PER_REQUEST) }, () => randomPrompt(card));
    const room = card.max_model_len - NUM_SPECIAL - Math.max(...prompt.map((text) => text.length));
    const body = {
      model: card.id, prompt, max_tokens: Math.max(1, Math.min(200, room)), temperature: Math.random(),
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
    return (await reached(response.json())).choices[0].detjax.digest;
  } finally {
    company.abort();
    signal.removeEventListener("abort", leave);
    const failed = (await crowd).find((one) => one.status === "rejected" && one.reason.name !== "AbortError");
    if (failed) showError(`A request of the load failed: ${failed.reason.message}`);
  }
}

function columns(mode) {
  const canonical = { name: "canonical", deterministic: true }, fast = { name: "fast", deterministic: false };
  const texts = {
    invariant: [[canonical], "Every step of this server is canonical. To see fast answers beside these, " +
      "start it with --mode dvr (on a CPU also --decode-batches 1 2 4 --dtype float32)."],
    dvr: [[canonical, fast], "Left as the server promises it; right with is_deterministic=false: " +
      "fast kernels, whose last bits may follow the batch."],
    fast: [[fast], "This server runs in mode fast, which promises nothing: digests may follow the batch."],
  };
  return texts[mode];
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
  const card = server; // as it is when this begins
  const [kinds, text] = columns(card.mode);
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
        const digest = await digestAmong(card, count, kind.deterministic, running.signal);
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
  by("conversation").replaceChildren(...messages.map((one) => {
    const turn = element("li", one.role, "");
    if (one.reasoning_content) {
      const details = element("details", "reasoning", "");
      details.append(element("summary", "", "Reasoning"), one.reasoning_content);
      turn.append(details);
    }
    turn.append(one.content);
    return turn;
  }));
}

function choose(chat) {
  isChat = chat && Boolean(server?.has_chat_template);
  by("no-chat").hidden = !chat || isChat || !server;
  by("tab-chat").ariaSelected = String(isChat);
  by("tab-completion").ariaSelected = String(!isChat);
  tellConversation();
}

by("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) ask();
});
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
document.addEventListener("focusin", tip);
document.addEventListener("keydown", moveTabStop);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") by("tip").hidden = true; });
connect();
