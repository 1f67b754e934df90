"use strict";
// What the router has said: conversations ("lanes") with their latest steps, and figures over them.

const NOTHING = {
  turn: "", step: 0, outcome: "", reason: "", found: 0, reused: 0, cached: 0, recomputed: 0, generated: 0,
  ttft_s: 0, prefill_s: 0, saved_s: null, duration_s: 0, prefill_engine: "", decode_engine: "",
  retries: 0, status: 0, error: "",
};

const isRunning = (step) => ["prefill", "decode", "answer"].includes(step.state);
const hasFailed = (step) => step.state === "failed";
const hasMissed = (step) => step.outcome === "miss" || step.outcome === "partial";
const promptOf = (step) => step.reused + step.cached + step.recomputed;
// What a decode engine had, and nobody took.
const leftOf = (step) => Math.max(step.found - step.reused - step.cached, 0);

/** When the first token would have come without reuse, in seconds; null if that is not known. */
function estimateOf(step) {
  if (!step.ttft_s || !step.outcome) return null;
  if (!step.reused) return step.ttft_s;
  return step.saved_s === null ? null : Math.max(step.ttft_s + step.saved_s, 0);
}

class Lane {
  constructor(key, step) {
    this.key = key;
    this.tenant = step.tenant;
    this.conversation = step.conversation;
    this.name = step.conversation || "no conversation";
    this.began = step.id; // the number of the first step that was seen
    this.steps = [];
    this.version = 0;
  }

  get last() {
    return this.steps[this.steps.length - 1];
  }

  /** The last step of which it is known what it reused. */
  get lastKnown() {
    return this.steps.findLast((step) => step.outcome) ?? null;
  }

  get isRunning() {
    return this.steps.some(isRunning);
  }

  /** The text that the filter looks at. */
  get text() {
    if (this.textVersion !== this.version) {
      this.textVersion = this.version;
      const seen = new Set([this.tenant, this.name]);
      for (const step of this.steps) {
        for (const each of [step.turn, step.reason, step.error, step.prefill_engine, step.decode_engine]) seen.add(each);
      }
      this.cachedText = [...seen].join(" ").toLowerCase();
    }
    return this.cachedText;
  }
}

class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.lanes = new Map(); // the one used last is the last
    this.steps = new Map();
  }

  /** Take in an answer of `/admin/live`. */
  apply(answer) {
    if (answer.is_reset) this.clear();
    for (const given of answer.data) this.#take(given);
    const most = answer.limits;
    while (this.lanes.size > most.conversations || this.steps.size > most.steps) {
      const [key, lane] = this.lanes.entries().next().value;
      this.lanes.delete(key);
      for (const step of lane.steps) this.steps.delete(step.id);
    }
    this.stepsEach = most.steps_each;
  }

  #take(given) {
    const known = this.steps.get(given.id);
    if (known) {
      Object.assign(known, given);
      known.version++;
      known.lane.version++;
      return;
    }
    const key = JSON.stringify([given.tenant, given.conversation]);
    const lane = this.lanes.get(key) ?? new Lane(key, given);
    const step = { ...NOTHING, ...given, lane, version: 0 };
    // What changed last comes last, which need not be what began last.
    const place = lane.steps.findLastIndex((each) => each.id < step.id) + 1;
    lane.steps.splice(place, 0, step);
    lane.began = Math.min(lane.began, step.id);
    lane.version++;
    this.steps.set(step.id, step);
    this.lanes.delete(key);
    this.lanes.set(key, lane);
    if (lane.steps.length > (this.stepsEach ?? 64)) this.steps.delete(lane.steps.shift().id);
  }

  /** Figures over the steps that began at or after a time. */
  figures(since) {
    const found = {
      requests: 0, failed: 0, running: 0, prefilling: 0, first: Infinity,
      tokens: { reused: 0, cached: 0, recomputed: 0, generated: 0 },
      outcomes: { hit: 0, partial: 0, miss: 0 }, news: 0, reasons: new Map(),
      ttfts: [], reusedTtfts: [], estimates: [],
    };
    for (const step of this.steps.values()) {
      if (isRunning(step)) {
        found.running++;
        found.prefilling += step.state === "prefill";
      }
      if (step.began < since) continue;
      found.first = Math.min(found.first, step.began);
      found.requests++;
      found.failed += hasFailed(step);
      if (!step.outcome) continue;
      for (const kind in found.tokens) found.tokens[kind] += step[kind];
      found.outcomes[step.outcome]++;
      if (hasMissed(step)) {
        found.news += step.reason === "new";
        found.reasons.set(step.reason, (found.reasons.get(step.reason) ?? 0) + 1);
      }
      if (step.ttft_s) found.ttfts.push(step.ttft_s);
      const estimate = estimateOf(step);
      if (step.reused && estimate !== null) {
        found.reusedTtfts.push(step.ttft_s);
        found.estimates.push(estimate);
      }
    }
    return found;
  }
}

function median(values) {
  if (!values.length) return null;
  const sorted = Float64Array.from(values).sort();
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
