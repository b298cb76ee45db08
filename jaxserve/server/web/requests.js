// The Requests view: what runs and what waits, and a way to end it.

import { Failure, request } from "./api.js";
import { byId, el } from "./dom.js";
import { count, duration, milliseconds, NOTHING } from "./format.js";

const STATES = { decode: "generating", prefill: "computing prompt", preempted: "preempted", waiting: "waiting" };

export class RequestsView {
  constructor() {
    this.rows = new Map();
  }

  async refresh() {
    try {
      const response = await request("/requests", { background: true });
      this.show((await response.json()).requests);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      byId("requests-summary").textContent = error.message;
    }
  }

  show(requests) {
    const waiting = requests.filter(({ state }) => state === "waiting" || state === "preempted").length;
    const summary = requests.length
      ? `${requests.length - waiting} in progress, ${waiting} waiting`
      : "Nothing runs and nothing waits.";
    if (byId("requests-summary").textContent !== summary) byId("requests-summary").textContent = summary;
    byId("requests-table").hidden = !requests.length;
    const present = new Set(requests.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (present.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    for (const entry of requests) {
      if (!this.rows.has(entry.id)) {
        const row = new Row(entry.id, () => this.abort(entry.id));
        this.rows.set(entry.id, row);
        byId("requests-rows").append(row.element);
      }
      this.rows.get(entry.id).update(entry);
    }
  }

  async abort(id) {
    try {
      await request(`/requests/${encodeURIComponent(id)}/abort`, { method: "POST" });
      byId("requests-said").textContent = `Aborted ${id}.`;
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      byId("requests-said").textContent = error.message;
    }
    await this.refresh();
  }
}

/** One request. Its cells change in place, so that focus stays on its button. */
class Row {
  constructor(id, abort) {
    const cell = (label, kind = "") => el("td", { "data-label": label, class: kind });
    this.state = cell("State");
    this.prompt = cell("Prompt", "number");
    this.cached = cell("Cached", "number");
    this.output = cell("Output", "number");
    this.pages = cell("Pages", "number");
    this.kind = cell("Class");
    this.tenant = cell("Tenant");
    this.age = cell("Age", "number");
    this.ttft = cell("TTFT", "number");
    const button = el("button", { class: "quiet danger-text", type: "button", "aria-label": `Abort ${id}` }, "Abort");
    button.addEventListener("click", () => {
      button.disabled = true;
      abort();
    });
    const name = el("th", { scope: "row", title: id }, el("code", {}, id));
    const cells = [this.state, this.prompt, this.cached, this.output, this.pages, this.kind, this.tenant, this.age, this.ttft];
    this.element = el("tr", {}, name, ...cells, el("td", { class: "act" }, button));
  }

  update(entry) {
    const choices = entry.choices > 1 ? ` × ${entry.choices}` : "";
    this.set(this.state, (STATES[entry.state] ?? "in a long step") + choices);
    this.element.dataset.state = entry.state ?? "unknown";
    this.set(this.prompt, count(entry.prompt_tokens));
    this.set(this.cached, entry.ttft_seconds === null ? NOTHING : count(entry.cached_tokens));
    this.set(this.output, `${count(entry.output_tokens)} / ${count(entry.max_tokens)}`);
    this.set(this.pages, count(entry.pages));
    this.set(this.kind, entry.service_class);
    this.set(this.tenant, entry.tenant || NOTHING);
    this.set(this.age, duration(entry.age_seconds));
    this.set(this.ttft, milliseconds(entry.ttft_seconds));
  }

  set(cell, text) {
    if (cell.textContent !== text) cell.textContent = text;
  }
}
