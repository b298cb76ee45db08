// What the page knows of the last quarter of an hour: the server's samples, fetched as they come.

import { request } from "./api.js";

export class SampleLog {
  constructor() {
    this.times = [];
    this.columns = {};
    this.promise = null;
    this.engine = "";
    this.model = "";
    this.unavailable = null;
    this.interval = 2;
    this.span = 900;
    this.offset = 0;
  }

  /** The server's time, by the newest sample and how long ago that came. */
  get now() {
    return performance.now() / 1000 + this.offset;
  }

  latest(name) {
    return this.columns[name]?.at(-1) ?? null;
  }

  /** Fetch what is new. Throws Failure. */
  async refresh() {
    const since = this.times.at(-1) ?? 0;
    const response = await request(`/history?since=${since}`, { background: true });
    const { samples, refused, ...about } = await response.json();
    Object.assign(this, about);
    const fresh = { ...samples, ...refused };
    fresh.ratio = samples.prompt_rate.map((rate, i) =>
      samples.output_rate[i] > 0 ? rate / samples.output_rate[i] : null);
    const { time, ...columns } = fresh;
    this.times.push(...time);
    for (const [name, values] of Object.entries(columns)) (this.columns[name] ??= []).push(...values);
    if (time.length) this.offset = time.at(-1) - performance.now() / 1000;
    const old = this.times.findIndex((t) => t > this.now - this.span);
    for (const list of [this.times, ...Object.values(this.columns)]) list.splice(0, Math.max(0, old));
  }
}
