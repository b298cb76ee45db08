// One small chart of the last quarter of an hour, in SVG: lines, stacked areas or stacked bars. Its
// legend is its read-out: it shows the newest values, or those of the moment pointed at.

import { el, svg } from "./dom.js";
import { ago } from "./format.js";

const HEIGHT = 148;
const MARGIN = { top: 10, right: 10, bottom: 20, left: 54 };
/** Minutes before now on the time axis. The first that reaches back to the oldest sample is used. */
const TIME_TICKS = [[2, 1, 0], [4, 2, 0], [6, 3, 0], [10, 5, 0], [15, 10, 5, 0]];

/** The least of a few digits times a power of ten that is not below. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

/** A path through points, broken where there is none. */
function path(points) {
  let pen = "M";
  let drawn = "";
  for (const point of points) {
    if (point === null) {
      pen = "M";
      continue;
    }
    drawn += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = "L";
  }
  return drawn;
}

export class Chart {
  /**
   * @param title what it shows
   * @param note a few words on what that means
   * @param series [{name, label, color}]: `name` is a column, `color` 1 to 4
   * @param format a value for the legend
   * @param axis a value for the axis, by default as `format` has it
   * @param kind "lines", "stack" or "bars"
   * @param top the least the axis reaches up to
   */
  constructor({ title, note, series, format, axis = format, kind = "lines", top = 0 }) {
    Object.assign(this, { title, series, format, axis, kind, top });
    this.data = null;
    this.chosen = null;
    this.width = 0;
    this.values = series.map(() => el("span", { class: "value" }));
    this.limitValue = el("span", { class: "value" });
    this.limitItem = el("li", { hidden: true }, el("span", { class: "key limit" }), "limit ", this.limitValue);
    this.moment = el("span", { class: "moment" });
    this.said = el("p", { class: "unseen", "aria-live": "polite" });
    this.svg = svg("svg", { role: "img", height: HEIGHT });
    this.plot = el("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `${title}, chart` }, this.svg);
    this.element = el(
      "figure",
      { class: "chart" },
      el("figcaption", {}, el("h2", {}, title), el("p", { class: "muted small" }, note)),
      el(
        "ul",
        { class: "legend" },
        ...series.map(({ label, color }, i) =>
          el("li", {}, el("span", { class: `key s${color}` }), `${label} `, this.values[i])),
        this.limitItem,
        el("li", { class: "when" }, this.moment),
      ),
      this.plot,
      this.said,
    );
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.choose(null));
    this.plot.addEventListener("blur", () => this.choose(null));
    this.plot.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.draw();
    }).observe(this.plot);
  }

  /**
   * Show other data.
   * @param times Unix seconds, rising; `columns` has a list of numbers or nulls for each series
   * @param limit a line to stay under, or null
   * @param now the right edge
   * @param gap seconds without a sample over which no line is drawn
   */
  update({ times, columns, limit = null, now, gap }) {
    this.data = { times, columns, limit, now, gap };
    this.draw();
  }

  /** Heights of a sample's series as they are drawn: stacked ones stand on each other. */
  heights(i) {
    let base = 0;
    return this.series.map(({ name }) => {
      const value = this.data.columns[name][i];
      if (this.kind === "lines" || value === null) return value;
      base += value;
      return base;
    });
  }

  draw() {
    if (this.data === null || this.width < 80) return;
    const { times, limit, now, gap } = this.data;
    const minutes = TIME_TICKS.find(([first]) => now - times[0] <= first * 60) ?? TIME_TICKS.at(times.length ? -1 : 0);
    const span = minutes[0] * 60;
    const right = this.width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const heights = times.map((_, i) => this.heights(i));
    const highest = Math.max(this.top, (limit ?? 0) * 1.15, ...heights.flat().filter((h) => h !== null));
    const ceiling = roundUp(highest || 1);
    const x = (time) => right - ((now - time) / span) * (right - MARGIN.left);
    const y = (value) => bottom - (value / ceiling) * (bottom - MARGIN.top);
    this.x = x;
    const marks = [...this.grid(ceiling, minutes, x, y)];
    const line = (s) =>
      path(times.flatMap((time, i) => {
        const value = heights[i][s];
        const point = value === null ? null : [x(time), y(value)];
        return i > 0 && time - times[i - 1] > gap ? [null, point] : [point];
      }));
    const drawn = this.series.map(({ color }, s) => {
      if (this.kind === "bars") return this.bars(s, color, heights, x, y);
      return svg("path", { class: `line s${color}`, d: line(s) });
    });
    if (this.kind === "stack") marks.push(...this.areas(heights, x, y));
    marks.push(...drawn.reverse());
    if (limit !== null) {
      marks.push(svg("line", { class: "line limit", x1: MARGIN.left, x2: right, y1: y(limit), y2: y(limit) }));
    }
    this.cursor = svg("g");
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("aria-label", this.summary());
    this.svg.replaceChildren(...marks, this.cursor);
    this.position = (i, s) => [x(times[i]), y(heights[i][s])];
    this.show();
  }

  *grid(ceiling, ticks, x, y) {
    for (const part of [0, 0.5, 1]) {
      const at = y(ceiling * part);
      yield svg("line", { class: part ? "grid" : "base", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: at, y2: at });
      yield svg("text", { class: "tick", x: MARGIN.left - 7, y: at + 3.5, "text-anchor": "end" }, part ? this.axis(ceiling * part) : "0");
    }
    for (const minutes of ticks) {
      const label = minutes ? `−${minutes} min` : "now";
      const anchor = minutes === ticks[0] ? "start" : minutes ? "middle" : "end";
      yield svg("text", { class: "tick", x: x(this.data.now - minutes * 60), y: HEIGHT - 5, "text-anchor": anchor }, label);
    }
  }

  *areas(heights, x, y) {
    const { times, gap } = this.data;
    for (let s = this.series.length - 1; s >= 0; s--) {
      let from = 0;
      for (let i = 1; i <= times.length; i++) {
        if (i < times.length && times[i] - times[i - 1] <= gap) continue;
        const run = times.slice(from, i).map((time, k) => [time, heights[from + k]]);
        const upper = run.map(([time, h]) => [x(time), y(h[s])]);
        const lower = run.map(([time, h]) => [x(time), y(s ? h[s - 1] : 0)]).reverse();
        yield svg("path", { class: `area s${this.series[s].color}`, d: `${path([...upper, ...lower])}Z` });
        from = i;
      }
    }
  }

  bars(s, color, heights, x, y) {
    const { times } = this.data;
    const drawn = times.flatMap((time, i) => {
      const below = s ? heights[i][s - 1] : 0;
      return heights[i][s] > below ? [`M${x(time).toFixed(1)} ${y(below).toFixed(1)}V${y(heights[i][s]).toFixed(1)}`] : [];
    });
    return svg("path", { class: `bar s${color}`, d: drawn.join("") });
  }

  point(event) {
    if (this.data === null || !this.data.times.length) return;
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    const distances = this.data.times.map((time) => Math.abs(this.x(time) - at));
    this.choose(distances.indexOf(Math.min(...distances)));
  }

  move(event) {
    if (this.data === null || !this.data.times.length) return;
    const last = this.data.times.length - 1;
    const from = this.chosenIndex() ?? last + 1;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, PageUp: from - 30, PageDown: from + 30, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (to === undefined) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, to)));
    this.said.textContent = this.sentence(this.chosenIndex());
  }

  /** Keep a moment, not an index: samples leave on the left. */
  choose(i) {
    this.chosen = i === null ? null : this.data.times[i];
    this.show();
  }

  chosenIndex() {
    const i = this.chosen === null ? -1 : this.data.times.indexOf(this.chosen);
    return i < 0 ? null : i;
  }

  show() {
    if (this.data === null) return;
    const { times, columns, limit, now } = this.data;
    const chosen = this.chosenIndex();
    const i = chosen ?? times.length - 1;
    this.series.forEach(({ name }, s) => {
      this.values[s].textContent = this.format(i < 0 ? null : columns[name][i]);
    });
    this.limitItem.hidden = limit === null;
    this.limitValue.textContent = limit === null ? "" : this.format(limit);
    this.moment.textContent = chosen === null ? "" : ago(now - times[i]);
    if (!this.cursor) return;
    if (chosen === null) {
      this.cursor.replaceChildren();
      return;
    }
    const at = this.x(times[i]);
    const dots = this.series.flatMap(({ name, color }, s) => {
      if (this.kind === "bars" || columns[name][i] === null) return [];
      const [cx, cy] = this.position(i, s);
      return [svg("circle", { class: `dot s${color}`, cx, cy, r: 3.5 })];
    });
    const line = svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.cursor.replaceChildren(line, ...dots);
  }

  sentence(i) {
    const { times, columns, now } = this.data;
    const values = this.series.map(({ name, label }) => `${label} ${this.format(columns[name][i])}`);
    return `${ago(now - times[i])}: ${values.join(", ")}`;
  }

  summary() {
    const { times, limit } = this.data;
    if (!times.length) return `${this.title}: no samples yet`;
    const bound = limit === null ? "" : `, limit ${this.format(limit)}`;
    return `${this.title}, ${this.sentence(times.length - 1)}${bound}`;
  }
}
