"use strict";
// The conversations as lanes. Only those in sight are in the document; one of them, or a step, has the focus.

const STEP_HEIGHT = 30;
const STEP_WIDTH = 12; // with the gap to the next
const TURN_GAP = 5;
const SPARE_ROWS = 4; // beyond either edge of what is in sight

/** What a step did, in a sentence. */
function sentence(step) {
  const said = [`${place(step)}: ${STATES[step.state]}`];
  if (step.error || hasFailed(step)) said.push([step.status || "", step.error].filter(Boolean).join(" "));
  if (step.outcome) {
    said.push(`${step.outcome}, ${words(step.reason)}`);
    if (promptOf(step)) {
      said.push(`${count(step.reused)} tokens reused, ${count(step.cached)} cached, ${count(step.recomputed)} recomputed`);
      if (leftOf(step)) said.push(`${count(leftOf(step))} more found and not read`);
    }
    if (!isRunning(step)) said.push(step.generated ? `${count(step.generated)} generated` : "generated: not known");
  }
  if (step.ttft_s) {
    const estimate = step.reused ? estimateOf(step) : null;
    said.push(`first token after ${seconds(step.ttft_s)}${estimate === null ? "" : `, ${seconds(estimate)} without reuse by estimate`}`);
  }
  return `${said.join(". ")}.`;
}

function place(step) {
  return step.turn ? `Turn ${step.turn}, step ${step.step || 1}` : `Request ${step.id}`;
}

/** What a lane shows, in a sentence. */
function title(lane) {
  const known = lane.lastKnown;
  const first = lane.steps.findLast((step) => step.ttft_s);
  return [
    lane.name, `tenant ${lane.tenant}`, plural(lane.steps.length, "step", "steps"),
    hasFailed(lane.last) ? `failed ${lane.last.error}` : STATES[lane.last.state],
    known && `${known.outcome}, ${words(known.reason)}`, known && promptOf(known) && `prompt of ${count(promptOf(known))} tokens`,
    first && `first token after ${seconds(first.ttft_s)}`,
  ].filter(Boolean).join(", ");
}

/** One lane's row in the document. */
class Row {
  constructor(lane) {
    this.lane = lane;
    this.drawn = "";
    this.buttons = new Map();
    this.name = element("span", { class: "name" });
    this.about = element("span", { class: "about" });
    this.steps = element("div", { class: "steps" });
    this.more = element("span", { class: "more" });
    this.steps.append(this.more);
    this.prompt = element("div", { role: "gridcell", class: "number" });
    this.reuse = element("div", { role: "gridcell", class: "reuse" });
    this.outcome = element("span", { class: "outcome" });
    this.reason = element("span", { class: "about" });
    this.reuse.append(this.outcome, this.reason);
    this.ttft = element("span", { class: "ttft" });
    this.estimate = element("span", { class: "about" });
    this.bar = element("div", { class: "against", "aria-hidden": "true" }, element("div"));
    this.place = element("div", { role: "row", class: "row", tabindex: "-1" },
      element("div", { role: "rowheader" }, this.name, this.about),
      element("div", { role: "gridcell" }, this.steps),
      this.prompt, this.reuse,
      element("div", { role: "gridcell", class: "first" }, this.ttft, this.estimate, this.bar),
    );
    this.place.row = this;
  }

  /**
   * Bring it up to date.
   * @param {number} room how many pixels the steps may take
   * @param {string|null} reason the one whose steps stand out
   */
  draw(room, reason) {
    const lane = this.lane;
    const drawn = `${lane.version} ${room} ${reason}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const known = lane.lastKnown;
    put(this.name, lane.name);
    mark(this.place, "aria-label", title(lane));
    mark(this.steps.parentElement, "aria-label", plural(lane.steps.length, "step", "steps"));
    mark(this.name, "title", lane.name);
    const at = lane.last.turn ? `turn ${lane.last.turn}, step ${lane.last.step || 1} · ` : "";
    put(this.about, at + lane.tenant);
    this.place.classList.toggle("running", lane.isRunning);
    this.#drawSteps(room, reason);
    put(this.prompt, known && promptOf(known) ? tokens(promptOf(known)) : "–");
    mark(this.outcome, "class", `outcome ${known?.outcome ?? ""}`);
    const last = lane.last;
    const state = hasFailed(last) ? `× failed` : last.state === "gone" ? "client left" : "";
    put(this.outcome, state || (known ? `${OUTCOMES[known.outcome]} ${known.outcome}` : "–"));
    put(this.reason, state ? last.error || String(last.status || "") : isRunning(last) && last !== known ? `now ${STATES[last.state]}` : known ? words(known.reason) : STATES[last.state]);
    this.#drawFirst(lane.steps.findLast((step) => step.ttft_s));
  }

  #drawFirst(step) {
    put(this.ttft, step ? seconds(step.ttft_s) : "–");
    const estimate = step?.reused ? estimateOf(step) : null;
    put(this.estimate, estimate !== null ? `est. ${seconds(estimate)}` : step?.reused ? "est. learning" : "");
    this.bar.classList.toggle("none", estimate === null);
    if (estimate !== null) {
      const longest = Math.max(estimate, step.ttft_s);
      this.bar.style.setProperty("--part", `${(100 * step.ttft_s) / longest}%`);
      this.bar.style.setProperty("--all", `${(100 * estimate) / longest}%`);
    }
  }

  #drawSteps(room, reason) {
    const steps = this.lane.steps;
    // The latest that there is room for.
    let first = steps.length;
    for (let left = room; first > 0; first--) {
      left -= STEP_WIDTH + (first > 1 && steps[first - 1].turn !== steps[first - 2].turn ? TURN_GAP : 0);
      if (left < 0) break;
    }
    put(this.more, first ? `+${first}` : "");
    const shown = steps.slice(first);
    const most = Math.max(1, ...shown.map((step) => promptOf(step) + step.generated));
    const gone = new Set(this.buttons.keys());
    let before = this.more;
    let last = null;
    for (const step of shown) {
      gone.delete(step.id);
      let button = this.buttons.get(step.id);
      if (!button) {
        button = element("button", { type: "button", class: "step", tabindex: "-1" });
        button.step = step;
        this.buttons.set(step.id, button);
      }
      if (before.nextSibling !== button) before.after(button);
      before = button;
      const extras = [
        last !== null && last.turn !== step.turn ? "turn" : "",
        reason !== null && !(hasMissed(step) && step.reason === reason) ? "aside" : "",
      ];
      const like = last && !promptOf(step) ? promptOf(last) + last.generated : 0;
      const painted = [step.version, most, like, ...extras].join();
      if (button.painted !== painted) {
        button.painted = painted;
        paint(button, step, most, like, extras);
        mark(button, "aria-label", sentence(step));
      }
      last = step;
    }
    for (const id of gone) {
      this.buttons.get(id).remove();
      this.buttons.delete(id);
    }
  }
}

/** Set a step's bar, where `most` tokens are as high as it goes; `like` many stand for those that are not known. */
function paint(button, step, most, like, extras) {
  const prompt = promptOf(step);
  const kind = hasFailed(step) ? "failed" : step.state === "gone" ? "gone" : isRunning(step) ? "pending" : prompt ? "" : "unknown";
  mark(button, "class", ["step", kind, ...extras].filter(Boolean).join(" "));
  // Of one that prefill has not answered, the size is not known: show that of the one before.
  const all = prompt + step.generated || Math.min(most, like || most / 2);
  const height = Math.max(4, Math.round((STEP_HEIGHT * all) / most));
  button.style.setProperty("--height", `${height}px`);
  let left = height;
  const parts = { reused: step.reused, cached: step.cached, recomputed: step.recomputed, generated: step.generated };
  // What there is any of can be seen: at least a pixel of it.
  for (const [name, value] of Object.entries(parts).reverse()) {
    const part = name === "reused" ? (value ? left : 0) : Math.min(left, value ? Math.max(1.5, (height * value) / all) : 0);
    left -= part;
    button.style.setProperty(`--${name}`, `${part}px`);
  }
}

/** The grid: which lanes there are, in which order, and which of them are in sight. */
class Lanes {
  constructor(grid, rows) {
    this.grid = grid;
    this.rows = rows;
    this.order = [];
    this.drawn = new Map();
    this.reason = null;
    this.focused = null; // its lane's key, and a step's id or null
    this.isPointed = false;
    grid.addEventListener("scroll", () => this.onScroll(), { passive: true });
    grid.addEventListener("pointerenter", () => (this.isPointed = true));
    grid.addEventListener("pointerleave", () => (this.isPointed = false));
    grid.addEventListener("focusin", (event) => this.#onFocus(event.target));
    grid.addEventListener("keydown", (event) => this.#onKey(event));
  }

  onScroll() {}

  /** Open a lane's steps; set from outside. */
  onOpen() {}

  /** Whether somebody is at it, so that nothing should be put elsewhere. */
  get isHeld() {
    return this.isPointed || this.rows.contains(document.activeElement);
  }

  /** Show these lanes, in this order. What is in sight stays where it is. */
  show(order) {
    const top = this.grid.scrollTop;
    const height = this.rowHeight;
    const anchor = top > 0 ? this.order[Math.floor(top / height)] : null;
    this.order = order;
    const now = anchor ? order.indexOf(anchor) : -1;
    this.rows.style.setProperty("--rows", order.length);
    if (now >= 0 && now !== Math.floor(top / height)) this.grid.scrollTop = now * height + (top % height);
    mark(this.grid, "aria-rowcount", String(order.length + 1));
  }

  get rowHeight() {
    return parseFloat(getComputedStyle(this.grid).getPropertyValue("--row")) || 46;
  }

  /** Draw what is in sight. */
  draw() {
    const height = this.rowHeight;
    const from = Math.max(0, Math.floor(this.grid.scrollTop / height) - SPARE_ROWS);
    const to = Math.min(this.order.length, Math.ceil((this.grid.scrollTop + this.grid.clientHeight) / height) + SPARE_ROWS);
    const wanted = new Map();
    for (let index = from; index < to; index++) wanted.set(this.order[index].key, index);
    // One that has the focus stays, wherever it is.
    const focusedRow = document.activeElement?.closest?.("#rows .row")?.row;
    if (focusedRow && !wanted.has(focusedRow.lane.key)) {
      const index = this.order.indexOf(focusedRow.lane);
      if (index >= 0) wanted.set(focusedRow.lane.key, index);
    }
    for (const [key, row] of this.drawn) {
      if (!wanted.has(key) || row.lane !== this.order[wanted.get(key)]) {
        row.place.remove();
        this.drawn.delete(key);
      }
    }
    const room = this.#room();
    let next = this.rows.firstChild;
    for (const [key, index] of [...wanted].sort((one, other) => one[1] - other[1])) {
      let row = this.drawn.get(key);
      if (!row) this.drawn.set(key, (row = new Row(this.order[index])));
      // In the document they are in the order in which they are seen; moving the focused one would lose the focus.
      if (row.place === next) next = next.nextSibling;
      else if (row !== focusedRow) this.rows.insertBefore(row.place, next);
      else {
        while (next && next !== row.place) {
          const after = next.nextSibling;
          this.rows.append(next);
          next = after;
        }
        next = row.place.nextSibling;
      }
      row.place.style.setProperty("--at", index);
      mark(row.place, "aria-rowindex", String(index + 2));
      row.draw(room, this.reason);
    }
    this.#setTabStop();
  }

  #room() {
    const cell = this.grid.querySelector(".head [role=columnheader]:nth-child(2)");
    return cell.clientWidth - 30; // and a place for the number of those left out
  }

  #setTabStop() {
    const stop = this.drawn.get(this.focused?.key)?.place ?? this.rows.firstChild;
    for (const row of this.drawn.values()) mark(row.place, "tabindex", row.place === stop ? "0" : "-1");
  }

  #onFocus(target) {
    const row = target.closest("#rows .row")?.row;
    if (!row) return;
    this.focused = { key: row.lane.key, step: target.step?.id ?? null };
    this.#setTabStop();
  }

  #onKey(event) {
    const row = event.target.closest("#rows .row")?.row;
    if (!row || event.altKey || event.metaKey) return;
    const index = this.order.indexOf(row.lane);
    const buttons = [...row.steps.querySelectorAll("button")];
    const at = buttons.indexOf(event.target);
    const page = Math.max(1, Math.floor(this.grid.clientHeight / this.rowHeight) - 2);
    const last = this.order.length - 1;
    switch (event.key) {
      case "ArrowDown": this.#focusLane(index + 1, at >= 0); break;
      case "ArrowUp": this.#focusLane(index - 1, at >= 0); break;
      case "PageDown": this.#focusLane(Math.min(index + page, last), at >= 0); break;
      case "PageUp": this.#focusLane(Math.max(index - page, 0), at >= 0); break;
      case "Home": event.ctrlKey ? this.#focusLane(0, false) : row.place.focus(); break;
      case "End": event.ctrlKey ? this.#focusLane(last, false) : buttons.at(-1)?.focus(); break;
      case "ArrowRight": buttons[at + 1]?.focus(); break;
      case "ArrowLeft": at > 0 ? buttons[at - 1].focus() : row.place.focus(); break;
      case "Escape": row.place.focus(); break;
      case "Enter": case " ": this.onOpen(row.lane); break;
      default: return;
    }
    event.preventDefault();
  }

  /** Give the focus to a lane, or to its latest step. */
  #focusLane(index, isStep) {
    const lane = this.order[index];
    if (!lane) return;
    const height = this.rowHeight;
    const head = this.grid.querySelector(".head").offsetHeight;
    const sight = this.grid.clientHeight - head;
    if (index * height < this.grid.scrollTop) this.grid.scrollTop = index * height;
    else if ((index + 1) * height > this.grid.scrollTop + sight) this.grid.scrollTop = (index + 1) * height - sight;
    this.draw();
    this.focus(lane.key, isStep);
  }

  /** Give the focus to a lane in sight, or to its latest step. */
  focus(key, isStep = false) {
    const row = this.drawn.get(key);
    const target = isStep ? [...row.steps.querySelectorAll("button")].at(-1) : row?.place;
    (target ?? row?.place)?.focus({ preventScroll: true });
  }
}
