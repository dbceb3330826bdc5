// The page behind /ui. What a model says reaches the document as text only.
const byId = (id) => document.getElementById(id);
const SOURCES = { ngram: ", looked up in the text", prediction: ", looked up in the prediction", heads: ", by heads on the target", other: ", by another drafter" };
const NEWEST = 18; // rounds in the lanes
const SAY_EVERY_MS = 4000; // to screen readers, while a stream runs
const REDRAW_EVERY_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 0;

let key = "", model = "", stopping = null;

const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const shape = (tag, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};
const percent = (share) => (share > 0 && share < .001 ? "under 0.1 %" : `${(100 * share).toFixed(share < 1 ? 1 : 0)} %`);
const rate = (speed) => (speed ? speed.toFixed(1) : "–");
const seconds = (s) => (s < 1 ? `${(1000 * s).toFixed(s < .01 ? 1 : 0)} ms` : `${s.toFixed(2)} s`);

/** One of the two answers: what has come of it, and how it is shown. */
class Answer {
  constructor(name) {
    this.box = byId(name);
    this.figures = byId(`${name}-figures`);
    this.clear();
    this.box.addEventListener("mouseover", (event) => this.point(event.target.closest(".t")));
    this.box.addEventListener("mouseleave", () => this.point(null));
    this.box.addEventListener("blur", () => this.walkTo(null));
    this.box.addEventListener("scroll", () => this.point(this.pointed));
    this.box.addEventListener("keydown", (event) => this.walk(event));
  }

  clear() {
    this.characters = []; // code points, as offsets count them
    this.kinds = [];
    this.sources = [];
    this.offsets = [];
    this.logprobs = [];
    this.rounds = [];
    this.numAccepted = this.numDrafted = this.open = 0;
    this.plan = null;
    this.sentAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.spans = [];
    this.now = null;
    this.box.textContent = "";
    this.show();
  }

  get text() { return this.characters.join(""); }

  get speed() {
    const passed = (this.lastAt - this.firstAt) / 1000;
    return passed > 0 ? (this.kinds.length - this.numFirst) / passed : 0;
  }

  /** Take in a choice of a chunk. */
  take(choice) {
    this.characters.push(...(choice.text ?? choice.delta.content ?? ""));
    const came = choice.specdec, shown = choice.logprobs;
    if (shown && came) {
      this.offsets.push(...came.text_offset);
      this.logprobs.push(...(shown.token_logprobs ?? shown.content.map((token) => token.logprob)));
    }
    if (!came || !came.kind.length) return;
    this.lastAt = performance.now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.numFirst = came.kind.length;
    }
    this.plan = came.plan ?? this.plan;
    came.kind.forEach((kind, i) => this.takeToken(kind, came.source[i], came.num_draft_tokens[i], came.times[i]));
  }

  takeToken(kind, source, drafted, times) {
    this.kinds.push(kind);
    this.sources.push(source);
    const isAccepted = kind === "accepted";
    this.open += isAccepted;
    if (isAccepted && !drafted) return; // its round goes on
    this.rounds.push({ drafted, accepted: this.open, times });
    this.numAccepted += this.open;
    this.numDrafted += drafted;
    this.open = 0;
  }

  /** Bring the document up to date. */
  show() {
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    const first = Math.max(0, this.spans.length - 1); // the last one's text may have grown
    for (let i = first; i < this.offsets.length; i++) {
      if (!this.spans[i]) {
        const source = this.sources[i];
        this.spans[i] = element("span", `t ${this.kinds[i][0]}${source === "heads" ? " headed" : source === "model" ? "" : " found"}`);
        this.spans[i].dataset.i = i;
        this.box.append(this.spans[i]);
      }
      this.spans[i].textContent = this.characters.slice(this.offsets[i], this.offsets[i + 1]).join("");
    }
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
    const shown = [["tokens/s", rate(this.speed)], ["tokens", this.kinds.length]];
    shown.push(["first token", this.firstAt === null ? "–" : seconds((this.firstAt - this.sentAt) / 1000)]);
    if (this.numDrafted) {
      shown.push(["accepted", percent(this.numAccepted / this.numDrafted)]);
      shown.push(["tokens/round", (this.kinds.length / this.rounds.length).toFixed(2)]);
    }
    if (this.plan) shown.push(["plan", this.plan.mode === "off" ? "off" : `${this.plan.mode}, ${this.plan.num_draft_tokens}`]);
    this.figures.replaceChildren(...shown.map(([name, value]) => {
      const pair = element("div");
      pair.append(element("dt", "", name), element("dd", "", value));
      return pair;
    }));
  }

  /** Say in the tip what is known of a token. */
  point(span) {
    const tip = byId("tip");
    this.pointed = span;
    tip.textContent = "";
    tip.style.left = tip.style.top = 0;
    if (!span || !this.box.contains(span)) return;
    const i = Number(span.dataset.i), text = span.textContent.replaceAll("\n", "⏎");
    tip.textContent = `${i + 1}: “${text}”, ${this.kinds[i]}${SOURCES[this.sources[i]] ?? ""}; the target gave it ${percent(Math.exp(this.logprobs[i]))}`;
    const place = span.getClientRects()[0] ?? this.box.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 12)) + scrollX}px`;
    tip.style.top = `${place.bottom + 6 + scrollY}px`;
  }

  walk(event) {
    const last = this.spans.length - 1, at = this.now ?? -1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.walkTo(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.walkTo(Math.max(0, Math.min(to, last)));
  }

  walkTo(i) {
    this.spans[this.now]?.classList.remove("now");
    this.now = i;
    this.spans[i]?.classList.add("now");
    this.spans[i]?.scrollIntoView({ block: "nearest" });
    this.point(this.spans[i]);
  }
}

/** The newest rounds, a lane for each model. */
function drawLanes(rounds) {
  const newest = rounds.slice(-NEWEST).filter((round) => round.times), lanes = byId("timeline");
  lanes.replaceChildren();
  if (!newest.length) return;
  const begin = newest[0].times.target[0], end = newest.at(-1).times.target[1];
  if (end <= begin) return;
  const scale = lanes.clientWidth / (end - begin);
  const bar = ([from, to], y, className, title, label) => {
    if (to <= begin) return;
    const x = (Math.max(from, begin) - begin) * scale, width = Math.max(1.5, (Math.min(to, end) - Math.max(from, begin)) * scale - 1);
    const rect = shape("rect", { x, y, width, height: 24, class: className });
    rect.append(Object.assign(shape("title", {}), { textContent: title }));
    lanes.append(rect);
    if (label && width > 8 * label.length) lanes.append(Object.assign(shape("text", { x: x + 4, y: y + 16 }), { textContent: label }));
  };
  for (const { drafted, accepted, times } of newest) {
    const kind = !drafted ? "plain" : accepted ? "some" : "none";
    const said = drafted ? `${accepted} of ${drafted} draft tokens accepted` : "no draft";
    bar(times.target, 5, `round-${kind}`, `${said}, ${seconds(times.target[1] - times.target[0])}`, drafted ? `${accepted}/${drafted}` : "");
    for (const step of times.draft) bar(step, 39, "draft-step", `draft step, ${seconds(step[1] - step[0])}`);
  }
  byId("lanes-said").textContent = lanesInWords(newest, end - begin);
}

/** What the lanes show, for those who do not see them. */
function lanesInWords(newest, length) {
  const targets = newest.map((round) => round.times.target), drafts = newest.flatMap((round) => round.times.draft);
  const sum = (spans) => spans.reduce((total, [from, to]) => total + to - from, 0);
  const shared = drafts.reduce((total, [from, to]) => total
    + targets.reduce((one, [start, end]) => one + Math.max(0, Math.min(to, end) - Math.max(from, start)), 0), 0);
  const target = `Newest ${newest.length} rounds, ${seconds(length)}: the target worked ${percent(sum(targets) / length)} of the time`;
  if (!drafts.length) return `${target}; nothing was drafted.`;
  return `${target}; ${drafts.length} draft steps of ${seconds(sum(drafts) / drafts.length)}, `
    + `${percent(shared / sum(drafts))} of their time while the target worked.`;
}

const spec = new Answer("spec"), plain = new Answer("plain");

function showAll() {
  spec.show();
  plain.show();
  drawLanes(spec.rounds);
}

let isDue = false, shownAt = 0, saidAt = 0;
/** Show soon what has come, many chunks at once. */
function showSoon() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => requestAnimationFrame(() => {
    isDue = false;
    shownAt = performance.now();
    showAll();
  }), Math.max(0, shownAt + REDRAW_EVERY_MS - performance.now()));
}

/** Tell of the run; news that are not the last are said now and then. */
function say(text, isLast) {
  if (!isLast && performance.now() < saidAt + SAY_EVERY_MS) return;
  saidAt = performance.now();
  byId("verdict").textContent = text;
}

class Refused extends Error {}

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const shown = await response.json().catch(() => ({}));
  const message = shown.error?.message ?? `the service answered ${response.status}`;
  if (response.status !== 401) throw new Error(message);
  model = "";
  throw new Refused(message);
}

/** Ask who is served; shows the form for a key where one is needed. */
async function connect() {
  model = (await (await call("v1/models")).json()).data[0].id; // the others are its adapters
  byId("model").textContent = model;
  byId("access").hidden = true;
}

function failed(error) {
  const isRefused = error instanceof Refused;
  byId("access-why").textContent = !isRefused ? "" : key ? `This key is refused: ${error.message}.` : "This service asks for an API key.";
  byId("error").textContent = isRefused ? "" : error instanceof TypeError ? `The service cannot be reached (${error.message}).` : error.message;
  if (isRefused) {
    byId("access").hidden = false;
    byId("model").textContent = key ? "API key refused" : "API key needed";
    byId("key").focus();
  }
}

function bodyOf(isSpeculated, seed) {
  const isChat = byId("kind").value !== "completions", prompt = byId("prompt").value, drafts = byId("drafts").value;
  return {
    model, seed, stream: true, stream_options: { include_speculation: true },
    max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value),
    cache_salt: crypto.getRandomValues(new Uint32Array(2)).join("-"), // neither finds the other's prompt in the cache
    ...(isChat ? { messages: [{ role: "user", content: prompt }], logprobs: true } : { prompt, logprobs: 0 }),
    ...(!isSpeculated ? { num_speculative_tokens: 0 } : drafts === "" ? {} : { num_speculative_tokens: Number(drafts) }),
  };
}

/** Stream one answer to its end. */
async function stream(answer, isSpeculated, seed, signal) {
  answer.sentAt = performance.now();
  const path = `v1/${byId("kind").value}`;
  const response = await call(path, { method: "POST", body: JSON.stringify(bodyOf(isSpeculated, seed)), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", part; !(part = await reader.read()).done;) {
    const events = (held + part.value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) continue;
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) answer.take(choice);
    }
    say(`${isSpeculated ? "With" : "Without"} speculation: ${answer.kinds.length} tokens, ${rate(answer.speed)} tokens/s.`);
    showSoon();
  }
}

/** What the two runs say when both are over. */
function compared() {
  const one = spec.characters, other = plain.characters, gain = spec.speed / plain.speed;
  const place = one.findIndex((character, i) => character !== other[i]);
  const isSame = place < 0 && one.length === other.length;
  const texts = isSame ? "The texts are the same" : `The texts differ from character ${(place < 0 ? one.length : place) + 1} on`;
  if (!Number.isFinite(gain) || !gain) return `${texts}; too short to compare speeds.`;
  const speeds = `${rate(spec.speed)} tokens/s with speculation, ${rate(plain.speed)} without`;
  return `${texts}. ${speeds}: ${gain.toFixed(2)} times${gain < 1 ? ", it does not pay here" : " as fast"}.`;
}

async function run() {
  byId("error").textContent = "";
  byId("run").disabled = true;
  byId("stop").disabled = false;
  stopping = new AbortController();
  spec.clear();
  plain.clear();
  drawLanes([]);
  try {
    if (!model) await connect();
    const given = byId("seed").value;
    const seed = given === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(given);
    say(`Seed ${seed}: with speculation first.`, true);
    await stream(spec, true, seed, stopping.signal);
    await stream(plain, false, seed, stopping.signal);
    say(compared(), true);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    say(`${isStopped ? "Stopped" : "Failed"} after ${spec.kinds.length} and ${plain.kinds.length} tokens.`, true);
    if (!isStopped) failed(error);
  } finally {
    byId("run").disabled = false;
    byId("stop").disabled = true;
    showAll();
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("run").disabled) run();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => stopping?.abort());
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  connect().then(() => byId("prompt").focus(), failed);
});
addEventListener("resize", () => drawLanes(spec.rounds));
connect().catch(failed);
