"use strict";
// Numbers and words as the page says them, and the elements that hold them.

const $ = (id) => document.getElementById(id);

/** A new element; `attributes` other than `text` and `class` are set as they are. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Set an element's text, if it is another. */
function put(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** Set an attribute, if it is another. */
function mark(place, name, value) {
  if (place.getAttribute(name) !== value) place.setAttribute(name, value);
}

const whole = new Intl.NumberFormat("en");
const brief = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

const count = (number) => whole.format(number);
const tokens = (number) => (number < 10_000 ? whole.format(number) : brief.format(number));
const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

function seconds(time) {
  if (time < 0.00995) return `${(time * 1000).toFixed(1)} ms`;
  if (time < 0.9995) return `${(time * 1000).toFixed(0)} ms`;
  if (time < 9.995) return `${time.toFixed(2)} s`;
  return time < 120 ? `${time.toFixed(1)} s` : `${(time / 60).toFixed(1)} min`;
}

function percent(part, all) {
  const share = (100 * part) / all;
  // Nothing is all of it that is not.
  if (share > 99 && share < 100) return `${Math.min(share, 99.9).toFixed(1)}%`;
  return `${share.toFixed(share > 0 && share < 10 ? 1 : 0)}%`;
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

const OUTCOMES = { hit: "●", partial: "◐", miss: "○" };
const STATES = {
  prefill: "prefilling", decode: "waiting for decode", answer: "answering", done: "done",
  failed: "failed", gone: "client left",
};

// What an operator can make of a reason; the router's documentation says more.
const REASONS = {
  history_changed: "the prompt does not begin with what the conversation left",
  overwritten: "other requests have overwritten it",
  new: "the conversation's first request",
  below_threshold: "so few tokens that computing is quicker",
  too_short: "no full block",
  local_cache: "all in the prefill engine's own cache",
  no_answer: "no decode engine said in time what it had, or it was paused",
  too_many_leases: "the decode engine would lend no more KV to readers",
  engine_lost: "the decode engine that had it is gone",
  off: "the request asked for no reuse",
  several_answers: "more than one answer was asked for",
  several_prompts: "a list of prompts",
  prompt_logprobs: "prompt_logprobs or echo was asked for",
  prompt_embeds: "the prompt is embeddings",
  load_failed: "the read failed, and prefill computed instead",
  plugin_failed: "a fault of the prefill engine's plug-in",
  layouts_differ: "the engines' block sizes or KV cache groups differ",
  unsupported_layout: "the connector cannot read such a model's KV back",
  unverified: "no valid seal: the engines have different keys",
  prefill_failed: "prefill failed; decode did all of it",
  prefill_unavailable: "no prefill engine is up; decode did all of it",
  prefill_refused: "prefill refused it; decode did all of it",
  no_plugin: "the prefill engine runs without carryback's connector",
};

const words = (reason) => reason.replaceAll("_", " ");
