"use strict";
// Asks the router what has changed, some times a second, and draws it when the browser is about to draw.

const POLL_MS = 250;
const ENGINES_MS = 1000;
const COSTS_MS = 5000;
const FIGURES_MS = 1000;
const SUMMARY_MS = 20_000;
const PATIENCE_MS = 5000;
const RETRY_MS = [500, 1000, 2000, 5000];

const store = new Store();
const lanes = new Lanes($("lanes"), $("rows"));
const details = new Details();
const view = { filter: "", show: "all", order: "newest", reason: null, windowS: 300 };

let after = "";
let router = null; // the last answer, without its steps
let isPaused = false;
let wake = () => {};
let goneSince = null;
let isStale = true; // there is more to draw than a change of place
let drawnFigures = 0;
let said = { text: "", at: -Infinity };

/** The router's clock at its last answer, in seconds: what the page shows is of then. */
const now = () => router?.now ?? 0;

// -- asking

class Refused extends Error {}

async function get(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!answer.ok) throw new Refused(`status ${answer.status}`);
  return answer.json();
}

const sleep = (time) => new Promise((done) => setTimeout(done, time));
const woken = () => new Promise((done) => (wake = done));

async function ask() {
  let failures = 0;
  let nextEngines = 0;
  let nextCosts = 0;
  for (;;) {
    if (isPaused || document.hidden) {
      await woken();
      continue;
    }
    try {
      const { data, ...rest } = await get(`/admin/live?after=${encodeURIComponent(after)}`);
      store.apply({ data, ...rest });
      after = rest.after;
      router = rest;
      failures = 0;
      if (goneSince !== null) {
        goneSince = null;
        nextEngines = nextCosts = 0;
      }
      // One after the other: of several workers, one connection reaches one.
      const time = performance.now();
      if (!rest.has_more && time >= nextEngines) {
        nextEngines = time + ENGINES_MS;
        drawEngines((await get("/admin/engines")).data, rest.pin_budget);
      }
      if (!rest.has_more && time >= nextCosts) {
        nextCosts = time + COSTS_MS;
        drawCosts((await get("/admin/costs")).data);
      }
      showConnection();
      if (data.length || rest.is_reset) isStale = true;
      drawSoon();
      if (rest.has_more) continue;
      await sleep(POLL_MS);
    } catch (error) {
      if (!(error instanceof Refused || error instanceof TypeError || error instanceof SyntaxError || error.name === "TimeoutError" || error.name === "AbortError")) throw error;
      goneSince ??= Date.now() / 1000;
      showConnection(error instanceof Refused ? `The router answers with ${error.message}` : "The router does not answer");
      await sleep(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
    }
  }
}

function showConnection(problem = "") {
  const state = problem ? "gone" : isPaused ? "paused" : "live";
  document.body.dataset.connection = state;
  put($("connection-mark"), { gone: "×", paused: "‖", live: "●" }[state]);
  put($("connection-text"), problem ? `${problem} since ${clock(goneSince)}; trying again` : isPaused ? "Paused" : "Live");
}

// -- drawing

let isAsked = false;

function drawSoon() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    draw();
  });
}

function draw() {
  const time = performance.now();
  const isFigures = time - drawnFigures >= FIGURES_MS || isStale === "all";
  const since = view.windowS ? now() - view.windowS : 0;
  if (isStale) arrange(since);
  isStale = false;
  lanes.draw();
  details.draw();
  if (!isFigures) return;
  drawnFigures = time;
  const figures = store.figures(since);
  drawFigures(figures, now());
  drawReasons(figures.reasons, view.reason, choose);
  const title = figures.running ? `${figures.running} running · carryback` : "carryback";
  if (document.title !== title) document.title = title;
  const text = summarize(figures, store.lanes.size);
  if (time - said.at >= SUMMARY_MS && text !== said.text && store.lanes.size) {
    said = { text, at: time };
    put($("summary"), text);
  }
  if (router) {
    put($("where"), clientsUrl());
    put($("scope"), router.worker === null
      ? "This page shows what this router process served since it started; of several routers, each knows only its own."
      : `This page shows worker ${router.worker} only: each of the router's workers knows what it served itself, and a connection reaches one of them.`);
  }
}

const ORDERS = {
  newest: (lane) => lane.began,
  active: (lane) => lane.last.id,
  slowest: (lane) => lane.steps.findLast((step) => step.ttft_s)?.ttft_s ?? 0,
  recomputed: (lane) => lane.lastKnown?.recomputed ?? 0,
};

/** Find out which lanes are to be seen, and in which order. */
function arrange(since) {
  const asked = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const lane of store.lanes.values()) {
    if (view.show === "running" && !lane.isRunning) continue;
    if (view.show === "failed" && !lane.steps.some((step) => hasFailed(step) && step.began >= since)) continue;
    if (view.show === "missed" && !lane.steps.some((step) => hasMissed(step) && step.reason !== "new" && step.began >= since)) continue;
    if (view.reason !== null && !lane.steps.some((step) => hasMissed(step) && step.reason === view.reason && step.began >= since)) continue;
    if (asked.length && !asked.every((word) => lane.text.includes(word))) continue;
    found.push(lane);
  }
  if (view.order !== "newest" && isStale !== "all" && lanes.isHeld) {
    // Somebody reads or walks there: those that were there stay where they are.
    const places = new Map(lanes.order.map((lane, index) => [lane, index]));
    found.sort((one, other) => (places.get(one) ?? Infinity) - (places.get(other) ?? Infinity) || 0);
  } else {
    const ranks = new Map(found.map((lane) => [lane, ORDERS[view.order](lane)]));
    found.sort((one, other) => ranks.get(other) - ranks.get(one) || other.began - one.began);
  }
  lanes.reason = view.reason;
  lanes.show(found);
  const all = store.lanes.size;
  put($("count"), found.length === all ? count(all) : `${count(found.length)} of ${count(all)}`);
  $("lanes").hidden = !found.length;
  $("empty").hidden = found.length > 0;
  if (!found.length) {
    put($("empty-text"), all ? "No conversation is like this." : `No conversation yet. Send a request to ${clientsUrl()}, for example:`);
    $("empty-command").hidden = all > 0;
    put($("empty-command"), `curl ${clientsUrl()}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{"messages": [{"role": "user", "content": "Hello"}]}'`);
  }
}

/** The clients' address, as it can be reached from here. */
function clientsUrl() {
  const url = new URL(router?.url ?? location.origin);
  if (["0.0.0.0", "[::]"].includes(url.hostname)) url.hostname = location.hostname;
  return url.origin;
}

// -- what people do

function change(changes) {
  Object.assign(view, changes);
  isStale = "all";
  $("reason-off").hidden = view.reason === null;
  put($("reason-off"), view.reason === null ? "" : `reason: ${words(view.reason)} ✕`);
  mark($("reason-off"), "aria-label", `No longer only the reason ${words(view.reason ?? "")}`);
  drawSoon();
}

function choose(reason) {
  change({ reason: view.reason === reason ? null : reason });
}

function pause() {
  isPaused = !isPaused;
  mark($("pause"), "aria-pressed", String(isPaused));
  if (goneSince === null) showConnection();
  wake();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
}

$("filter").addEventListener("input", () => change({ filter: $("filter").value }));
$("show").addEventListener("change", () => change({ show: $("show").value }));
$("order").addEventListener("change", () => change({ order: $("order").value }));
$("window").addEventListener("change", () => change({ windowS: Number($("window").value) }));
$("reason-off").addEventListener("click", () => {
  change({ reason: null });
  $("filter").focus();
});
$("pause").addEventListener("click", pause);
$("theme").addEventListener("change", () => {
  setTheme($("theme").value);
  localStorage.setItem("theme", $("theme").value);
});
lanes.onScroll = drawSoon;
lanes.onOpen = (lane) => details.open(lane);
details.onClose = (lane) => {
  drawSoon();
  lanes.focus(lane.key);
};
$("rows").addEventListener("click", (event) => {
  const row = event.target.closest(".row")?.row;
  if (row) lanes.onOpen(row.lane);
});

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, select, textarea");
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape" && event.target === $("filter") && $("filter").value) {
    $("filter").value = "";
    change({ filter: "" });
  } else if (isTyping) return;
  else if (event.key === "/") {
    $("filter").focus();
    event.preventDefault();
  } else if (event.key === "p") pause();
});
document.addEventListener("visibilitychange", () => wake());
new ResizeObserver(drawSoon).observe($("lanes"));

// -- the card beside a step

function showTip(button) {
  const tip = $("tip");
  const step = button?.step;
  tip.hidden = !step;
  if (!step) return;
  const line = (name, value) => element("li", {}, element("span", { class: `swatch ${name}` }), `${count(value)} ${name}`);
  const estimate = step.reused ? estimateOf(step) : null;
  const parts = [element("strong", { text: place(step) }),
    element("span", { text: step.outcome ? `${OUTCOMES[step.outcome]} ${step.outcome}, ${words(step.reason)}` : STATES[step.state] })];
  if (promptOf(step)) parts.push(element("ul", {}, ...["reused", "cached", "recomputed"].map((name) => line(name, step[name])), ...(step.generated ? [line("generated", step.generated)] : [])));
  if (leftOf(step)) parts.push(element("span", { text: `${count(leftOf(step))} more found at a decode engine and not read` }));
  if (step.ttft_s) parts.push(element("span", { text: `first token ${seconds(step.ttft_s)}${estimate === null ? "" : `, est. ${seconds(estimate)} without reuse`}` }));
  if (hasFailed(step) || step.state === "gone") parts.push(element("span", { class: "bad", text: `${STATES[step.state]} ${step.error}` }));
  tip.replaceChildren(...parts);
  const at = button.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
  const isBelow = at.top < tip.offsetHeight + 16;
  tip.style.setProperty("left", `${left}px`);
  tip.style.setProperty("top", `${isBelow ? at.bottom + 8 : at.top - tip.offsetHeight - 8}px`);
}

for (const [kind, isIn] of [["pointerover", true], ["focusin", true], ["pointerout", false], ["focusout", false]]) {
  $("rows").addEventListener(kind, (event) => showTip(isIn ? event.target.closest(".step") : null));
}
document.addEventListener("keydown", (event) => event.key === "Escape" && showTip(null), true);
$("lanes").addEventListener("scroll", () => showTip(null), { passive: true });

setTheme(localStorage.getItem("theme") ?? "");
ask();
