"use strict";
// What is beside the lanes: figures, reasons, engines, costs, and all steps of one conversation.

/** Fill a bar: parts of a whole, each `[class, value]`. */
function fill(bar, parts, whole) {
  while (bar.children.length < parts.length) bar.append(element("span"));
  parts.forEach(([name, value], index) => {
    mark(bar.children[index], "class", name);
    bar.children[index].style.setProperty("--part", `${whole ? Math.min(100, (100 * value) / whole) : 0}%`);
  });
}

function drawFigures(figures, now) {
  const { reused, cached, recomputed, generated } = figures.tokens;
  const prompt = reused + cached + recomputed;
  put($("kept"), prompt ? percent(reused + cached, prompt) : "–");
  fill($("kept-bar"), [["reused", reused], ["cached", cached], ["recomputed", recomputed]], prompt);
  put($("kept-counts"), prompt
    ? `of ${tokens(prompt)}: ${tokens(reused)} reused, ${tokens(cached)} cached`
    : "no prompt yet");

  const all = median(figures.ttfts);
  const read = median(figures.reusedTtfts);
  const estimate = median(figures.estimates);
  const times = estimate !== null && read ? estimate / read : 0;
  put($("ttft"), all === null ? "–" : seconds(all));
  put($("ttft-times"), times >= 1.05 ? `${times.toFixed(1)}× sooner by reuse` : "");
  const longest = Math.max(estimate ?? 0, read ?? 0);
  fill($("ttft-bar"), [["reused", read ?? 0], ["ghost", Math.max((estimate ?? 0) - (read ?? 0), 0)]], longest);
  put($("ttft-estimate"), estimate !== null
    ? `reusing ${seconds(read)}; without, est. ${seconds(estimate)}`
    : figures.outcomes.hit || figures.outcomes.partial ? "estimate without reuse: learning" : "nothing reused yet");

  const { hit, partial, miss } = figures.outcomes;
  const returning = hit + partial + miss - figures.news;
  put($("hits"), returning ? percent(hit, returning) : "–");
  fill($("hits-bar"), [["reused", hit], ["cached", partial], ["recomputed", miss - figures.news]], returning);
  put($("hits-counts"), `${tokens(hit)} hit, ${tokens(partial)} partial, ${tokens(miss - figures.news)} miss; ${tokens(figures.news)} new`);

  put($("running"), count(figures.running));
  put($("running-hops"), `${count(figures.prefilling)} at prefill, ${count(figures.running - figures.prefilling)} at decode`);
  const spanned = Math.max(now - figures.first, 1);
  const perMinute = (number) => tokens(Math.round((60 * number) / Math.max(spanned, 10)));
  put($("running-rate"), [
    figures.requests && `${perMinute(figures.requests)} requests`, generated && `${perMinute(generated)} tokens`,
  ].filter(Boolean).join(", ") + (figures.requests ? " per min" : ""));
  put($("running-failed"), figures.failed ? `× ${plural(figures.failed, "request", "requests")} failed` : "");
}

/** A sentence for those who do not see the page. */
function summarize(figures, lanes) {
  const { reused, cached, recomputed } = figures.tokens;
  const prompt = reused + cached + recomputed;
  const { hit, partial, miss } = figures.outcomes;
  const ttft = median(figures.ttfts);
  return `${plural(figures.running, "request", "requests")} running, ${plural(lanes, "conversation", "conversations")}.`
    + (prompt ? ` ${percent(reused + cached, prompt)} of prompt tokens not recomputed. ${count(hit)} hits, ${count(partial)} partial, ${count(miss)} misses.` : "")
    + (ttft === null ? "" : ` Median time to the first token ${seconds(ttft)}.`)
    + (figures.failed ? ` ${count(figures.failed)} failed.` : "");
}

function drawReasons(reasons, chosen, onChoose) {
  const list = $("reasons");
  // That a conversation is new is nothing to look into: it comes last.
  const rank = ([reason, number]) => (reason === "new" ? -1 : number);
  const sorted = [...reasons].sort((one, other) => rank(other) - rank(one) || (one[0] < other[0] ? -1 : 1));
  if (chosen !== null && !reasons.has(chosen)) sorted.push([chosen, 0]);
  const most = Math.max(0, ...reasons.values());
  const known = new Map([...list.querySelectorAll("button")].map((button) => [button.dataset.reason, button]));
  if (!sorted.length) {
    if (!list.querySelector(".none")) list.replaceChildren(element("li", { class: "none small", text: "No misses in this window." }));
    return;
  }
  list.querySelector(".none")?.remove();
  sorted.forEach(([reason, number], index) => {
    let button = known.get(reason);
    if (!button) {
      button = element("button", { type: "button", "data-reason": reason },
        element("span", { class: "reason", text: words(reason) }), element("span", { class: "number" }),
        element("span", { class: "bar", "aria-hidden": "true" }, element("span", { class: "recomputed" })),
        element("span", { class: "about", text: REASONS[reason] ?? "" }));
      button.addEventListener("click", () => onChoose(reason));
    }
    known.delete(reason);
    put(button.querySelector(".number"), count(number));
    button.querySelector(".recomputed").style.setProperty("--part", `${most ? (100 * number) / most : 0}%`);
    mark(button, "aria-pressed", String(reason === chosen));
    const item = button.parentElement ?? element("li", {}, button);
    // Counts that overtake each other must not take a button from under the focus.
    if (list.children[index] !== item && !item.contains(document.activeElement)) list.insertBefore(item, list.children[index] ?? null);
  });
  for (const button of known.values()) button.parentElement.remove();
}

const STATE_MARKS = { up: "●", down: "×", ejected: "!", draining: "◌", paused: "‖" };

function drawEngines(engines, pinBudget) {
  const table = $("engines");
  const busiest = Math.max(1, ...engines.map((engine) => engine.load_tokens));
  for (const role of ["prefill", "decode"]) {
    let body = table.querySelector(`[data-role=${role}]`);
    if (!body) {
      body = element("tbody", { "data-role": role }, element("tr", {}, 
        element("th", { scope: "rowgroup", text: role === "prefill" ? "Prefill" : "Decode" }),
        element("td", { class: "number small", colspan: "3", text: role === "prefill" ? "blocks until decode has read them" : "share of the pin budget" })));
      table.append(body);
    }
    const mine = engines.filter((engine) => engine.role === role);
    const rows = new Map([...body.querySelectorAll("tr[data-name]")].map((row) => [row.dataset.name, row]));
    for (const engine of mine) {
      let row = rows.get(engine.name);
      if (!row) {
        row = element("tr", { "data-name": engine.name },
          element("th", { scope: "row" }, element("span", { class: "state" }), element("span", { class: "name", text: engine.name, title: engine.url })),
          element("td", { class: "number" }), element("td", { class: "number" }, element("span"), element("div", { class: "bar", "aria-hidden": "true" })),
          element("td", { class: "number" }, element("span"), element("div", { class: "bar budget", "aria-hidden": "true" })));
        body.append(row);
      }
      rows.delete(engine.name);
      const [head, flight, load, held] = row.children;
      mark(head.firstChild, "class", `state ${engine.state}`);
      put(head.firstChild, `${STATE_MARKS[engine.state]} ${engine.state}`);
      put(flight, count(engine.in_flight));
      put(load.firstChild, tokens(engine.load_tokens));
      fill(load.lastChild, [["load", engine.load_tokens]], busiest);
      const budget = pinBudget * engine.capacity_blocks;
      const isOver = role === "decode" && engine.pinned_blocks > budget;
      const isKnown = engine.capacity_blocks > 0;
      put(held.firstChild, !isKnown ? "–" : role === "decode" && budget
        ? percent(engine.pinned_blocks, budget) : tokens(engine.pinned_blocks));
      fill(held.lastChild, [[isOver ? "recomputed" : "reused", engine.pinned_blocks]], engine.capacity_blocks);
      held.lastChild.classList.toggle("budget", role === "decode" && isKnown);
      held.lastChild.style.setProperty("--budget", `${100 * pinBudget}%`);
      mark(held, "title", isKnown ? `${count(engine.pinned_blocks)} of ${count(engine.capacity_blocks)} blocks` : "the engine has not said what it has");
    }
    for (const row of rows.values()) row.remove();
  }

  const decoders = engines.filter((engine) => engine.role === "decode");
  const pinned = decoders.reduce((sum, engine) => sum + engine.pinned_blocks, 0);
  const capacity = decoders.reduce((sum, engine) => sum + engine.capacity_blocks, 0);
  const budget = pinBudget * capacity;
  put($("held"), budget ? percent(pinned, budget) : "–");
  fill($("held-bar"), [["reused", pinned]], budget);
  put($("held-counts"), capacity
    ? `${tokens(pinned)} of ${tokens(Math.round(budget))} blocks`
    : "no decode engine has said what it has");
}

const MOST_PAIRS = 40;

function drawCosts(costs) {
  const body = $("costs").tBodies[0];
  $("costs").hidden = !costs?.length;
  put($("costs-none"), costs === null ? "Not known here." : !costs.length ? "Learning: nothing was read back yet."
    : costs.length > MOST_PAIRS ? `And ${count(costs.length - MOST_PAIRS)} more pairs: see /admin/costs.` : "");
  const shown = [...(costs ?? [])].sort((one, other) => other.samples.read - one.samples.read).slice(0, MOST_PAIRS);
  body.replaceChildren(...shown.map((pair) => {
    const at = pair.break_even_tokens;
    const rates = pair.prefill_s_per_token === null || pair.read_s === null ? `${count(pair.samples.read)} reads so far`
      : `computing ${(1e6 * pair.prefill_s_per_token).toPrecision(2)} µs a token; reading ${seconds(pair.read_s)} and ${(1e6 * pair.read_s_per_token).toPrecision(2)} µs a token`;
    return element("tr", { title: rates },
      element("th", { scope: "row", text: pair.prefill }), element("td", { text: pair.decode }),
      element("td", { class: "number", text: at === null ? "learning" : at < 0 ? "never" : tokens(at) }));
  }));
}

/** The table with all that is known of one conversation. */
class Details {
  constructor() {
    this.lane = null;
    this.drawn = "";
    $("details-close").addEventListener("click", () => this.close());
    $("details").addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  onClose() {}

  open(lane) {
    this.lane = lane;
    this.drawn = "";
    put($("details-title"), lane.name);
    $("details-explain").hidden = !lane.conversation;
    $("details-explain").href = `/admin/conversations/${encodeURIComponent(lane.tenant)}/${encodeURIComponent(lane.conversation)}/explain`;
    $("details").hidden = false;
    this.draw();
    $("details-title").focus();
  }

  close() {
    const lane = this.lane;
    this.lane = null;
    $("details").hidden = true;
    this.onClose(lane);
  }

  draw() {
    const lane = this.lane;
    if (!lane || this.drawn === `${lane.version}`) return;
    this.drawn = `${lane.version}`;
    put($("details-note"), `tenant ${lane.tenant}, ${plural(lane.steps.length, "step", "steps")}, the latest first`);
    $("details-steps").replaceChildren(...lane.steps.toReversed().map((step) => {
      const known = (value, isKnown) => element("td", { class: "number", text: isKnown ? count(value) : "–" });
      const time = (value) => element("td", { class: "number", text: value ? seconds(value) : "–" });
      const estimate = step.reused ? estimateOf(step) : null;
      const isTold = promptOf(step) > 0;
      const problem = [step.status >= 400 ? step.status : "", step.error].filter(Boolean).join(" ");
      return element("tr", {},
        element("th", { scope: "row", text: step.turn ? `${step.turn}, ${step.step || 1}` : "–" }),
        element("td", { text: clock(step.began) }),
        element("td", { class: hasFailed(step) ? "bad" : "", text: STATES[step.state] + (problem ? `: ${problem}` : "") + (step.retries ? `, ${step.retries} retried` : "") }),
        element("td", { text: step.outcome ? `${OUTCOMES[step.outcome]} ${step.outcome}, ${words(step.reason)}` : "–" }),
        known(step.reused, isTold), known(step.cached, isTold), known(step.recomputed, isTold), known(step.generated, step.generated > 0),
        time(step.ttft_s), element("td", { class: "number", text: estimate === null ? (step.reused ? "learning" : "–") : seconds(estimate) }), time(step.duration_s),
        element("td", { text: step.prefill_engine || "–" }), element("td", { text: step.decode_engine || "–" }));
    }));
  }
}
