// The Promise view: what is promised, whether it is kept, and what the engine is doing.

import { Chart } from "./chart.js";
import { byId, el } from "./dom.js";
import { count, milliseconds, number, percent } from "./format.js";

const RUNGS = ["none", "shorter answers", "refusing requests"];
const REASONS = { late: "too late", full: "queue full", deadline: "own deadline", pending: "too many open", rate: "key's limit" };

/** The charts, by the names of their columns. `upper` is the promised percentile, such as "p95". */
function makeCharts(upper) {
  const latency = (kind) => [
    { name: `${kind}_tail`, label: upper, color: 1 },
    { name: `${kind}_p50`, label: "p50", color: 2 },
  ];
  return {
    ttft: new Chart({
      title: "Time to first token", note: "of the last minute's requests, without the batch class",
      series: latency("ttft"), format: milliseconds,
    }),
    tpot: new Chart({
      title: "Time per output token", note: "a request's mean, of the last minute's",
      series: latency("tpot"), format: milliseconds,
    }),
    sequences: new Chart({
      title: "Sequences", note: "with pages, and waiting for them",
      series: [{ name: "running", label: "running", color: 1 }, { name: "waiting", label: "waiting", color: 3 }],
      format: count, axis: number, top: 4,
    }),
    tokens: new Chart({
      title: "Tokens per second", note: "generated, and of prompts computed",
      series: [{ name: "output_rate", label: "output", color: 1 }, { name: "prompt_rate", label: "prompt", color: 2 }],
      format: number, top: 10,
    }),
    pages: new Chart({
      title: "KV pages", note: "held, free but reusable, and free",
      series: [
        { name: "pages_live", label: "live", color: 1 },
        { name: "pages_cached", label: "cached", color: 2 },
        { name: "pages_free", label: "free", color: 4 },
      ],
      format: count, kind: "stack", top: 10,
    }),
    step: new Chart({
      title: "Step time", note: "the last step, and what the next was expected to take",
      series: [{ name: "step_seconds", label: "measured", color: 1 }, { name: "predicted_seconds", label: "predicted", color: 3 }],
      format: milliseconds, top: 0.001,
    }),
    ratio: new Chart({
      title: "Prefill to decode", note: "prompt tokens computed for each token generated",
      series: [{ name: "ratio", label: "ratio", color: 2 }], format: number, top: 1,
    }),
    refused: new Chart({
      title: "Refused", note: "sequences in two seconds, by reason",
      series: Object.entries(REASONS).map(([name, label], i) => ({ name, label, color: i + 1 })),
      format: count, axis: number, kind: "bars", top: 4,
    }),
    rung: new Chart({
      title: "Degradation", note: "what is done so that the promise holds",
      series: [{ name: "rung", label: "rung", color: 3 }],
      format: (value) => RUNGS[value] ?? number(value), axis: number, top: 2,
    }),
  };
}

export class PromiseView {
  constructor() {
    this.charts = null;
    this.upper = null;
  }

  /** Show what the server said last. `log` is the page's SampleLog. */
  update(log) {
    const { promise } = log;
    const upper = `p${number(promise?.percentile ?? 95)}`;
    if (upper !== this.upper) {
      this.upper = upper;
      this.charts = makeCharts(upper);
      byId("charts").replaceChildren(...Object.values(this.charts).map((chart) => chart.element));
    }
    this.say(log);
    const limits = { ttft: promise?.ttft, tpot: promise?.tpot, sequences: log.latest("running_limit") || null };
    for (const [name, chart] of Object.entries(this.charts)) {
      chart.update({
        times: log.times, columns: log.columns, limit: limits[name] ?? null,
        now: log.now, gap: 2.5 * log.interval,
      });
    }
  }

  say({ promise, engine, ...log }) {
    byId("promise-detail").textContent = engine;
    if (promise === null) {
      byId("promise-sentence").textContent = "Nothing is promised here: these are the times as they are.";
      byId("verdicts").replaceChildren();
      return;
    }
    byId("promise-sentence").textContent =
      `${percent(promise.percentile / 100)} of the requests get their first token within ` +
      `${milliseconds(promise.ttft)}, and the next ones within ${milliseconds(promise.tpot)} each.`;
    const column = (name) => log.columns[name]?.at(-1) ?? null;
    byId("verdicts").replaceChildren(
      this.verdict("First token", column("ttft_tail"), promise.ttft),
      this.verdict("Next tokens", column("tpot_tail"), promise.tpot),
      el("li", { class: "verdict", "data-state": "plain" }, el("strong", {}, "Steps"),
        ` predicted to within ${percent(column("prediction_error") ?? 0)}`),
    );
  }

  verdict(what, value, limit) {
    const state = value === null ? "plain" : value <= limit ? "kept" : "broken";
    const words = {
      plain: "nobody asked in the last minute",
      kept: `kept: ${this.upper} ${milliseconds(value)}`,
      broken: `not kept: ${this.upper} ${milliseconds(value)}`,
    };
    return el("li", { class: "verdict", "data-state": state }, el("strong", {}, what), ` ${words[state]}`);
  }
}
