// One answer on the page: its text as it comes, its tokens' probabilities, and what it took.

import { byId, el } from "./dom.js";
import { count, milliseconds, number, percent, visible } from "./format.js";
import { Cutter } from "./tokens.js";

const ENDINGS = { stop: "ended by itself", length: "cut at max tokens", abort: "aborted on the server" };

export class Answer {
  constructor(label) {
    this.text = "";
    this.numTokens = 0;
    this.numChunks = 0;
    this.cutter = new Cutter();
    this.thoughts = null;
    this.started = performance.now();
    this.first = this.last = null;
    this.body = el("div", { class: "text", "data-waiting": true });
    this.foot = el("p", { class: "muted small foot" });
    this.element = el("article", { class: "turn answer", "aria-label": label, "aria-busy": "true" }, this.body, this.foot);
    this.body.addEventListener("keydown", (event) => this.move(event));
    this.timer = setInterval(() => this.sayWaiting(), 100);
  }

  sayWaiting() {
    if (this.first === null) this.foot.textContent = `waiting for the first token, ${number((performance.now() - this.started) / 1000)} s`;
  }

  /** Add a chunk of the answer's text, and its tokens where probabilities were asked for. */
  add(text, tokens) {
    this.text += text;
    this.write(this.body, text, tokens);
  }

  /** Add a chunk of what the model thinks before it answers. */
  think(text, tokens) {
    if (this.thoughts === null) {
      this.thoughts = el("div", { class: "text" });
      this.body.before(el("details", { class: "thoughts", open: true }, el("summary", {}, "Thoughts"), this.thoughts));
    }
    this.write(this.thoughts, text, tokens);
  }

  write(place, text, tokens) {
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      delete this.body.dataset.waiting;
    }
    this.numChunks += 1;
    this.numTokens += tokens.length;
    if (!tokens.length) {
      const end = place.lastChild;
      if (end?.nodeType === Node.TEXT_NODE) end.appendData(text);
      else place.append(text);
    }
    for (const piece of tokens.length ? this.cutter.cut(text, tokens) : []) place.append(tokenSpan(piece));
    const pace = this.pace(this.numTokens || this.numChunks);
    this.foot.textContent = [`TTFT ${milliseconds(this.ttft)}`, pace].filter(Boolean).join(" · ");
  }

  get ttft() {
    return this.first === null ? null : (this.first - this.started) / 1000;
  }

  pace(tokens) {
    const seconds = (this.last - this.first) / 1000;
    return tokens > 1 && seconds > 0 ? `${number((tokens - 1) / seconds)} tok/s` : "";
  }

  /** No more comes. `usage` is the server's count, if the stream got as far as that. */
  end(ending, usage = null) {
    clearInterval(this.timer);
    this.element.setAttribute("aria-busy", "false");
    delete this.body.dataset.waiting;
    const tokens = usage?.completion_tokens ?? (this.numTokens || this.numChunks);
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    this.foot.textContent = [
      this.first === null ? "" : `TTFT ${milliseconds(this.ttft)}`,
      this.first === null ? "" : this.pace(tokens),
      `${usage || this.numTokens ? "" : "about "}${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`,
      usage ? `prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} of it cached` : ""}` : "",
      ENDINGS[ending] ?? ending,
    ].filter(Boolean).join(" · ");
    const tokenSpans = this.body.querySelectorAll(".token");
    if (!tokenSpans.length) return;
    tokenSpans[0].tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", "Answer by tokens: the arrow keys go from one to the next");
  }

  /** One tab stop for all tokens, arrows between them. */
  move(event) {
    const tokens = [...this.body.querySelectorAll(".token")];
    const from = tokens.indexOf(document.activeElement);
    const to = { ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (from < 0 || to === undefined || !tokens[to]) return;
    event.preventDefault();
    tokens[from].tabIndex = -1;
    tokens[to].tabIndex = 0;
    tokens[to].focus();
  }
}

function tokenSpan({ text, token }) {
  if (token === null) return document.createTextNode(text);
  const span = el("span", { class: text ? "token" : "token ghost", tabindex: -1 }, text || visible(token.text) || "∅");
  span.style.setProperty("--doubt", String(1 - (token.probability ?? 1)));
  span.addEventListener("pointerenter", () => showPopover(span, token));
  span.addEventListener("pointerleave", hidePopover);
  span.addEventListener("focus", () => showPopover(span, token));
  span.addEventListener("blur", hidePopover);
  return span;
}

function showPopover(span, token) {
  const popover = byId("popover");
  const row = ({ text, probability }) => {
    const bar = el("span", { class: "bar" });
    bar.style.setProperty("--share", String(probability));
    const chosen = text === token.text;
    return el("li", { class: chosen ? "chosen" : "" }, el("code", {}, visible(text) || "∅"),
      el("span", { class: "track", "aria-hidden": "true" }, bar), el("span", { class: "number" }, percent(probability)));
  };
  const known = token.probability === null
    ? "the prompt's first token: nothing comes before it"
    : `${percent(token.probability)} likely`;
  popover.replaceChildren(
    el("p", {}, el("code", {}, visible(token.text) || "∅"), ` ${known}`),
    el("ol", {}, ...token.alternatives.map(row)),
  );
  popover.hidden = false;
  span.setAttribute("aria-describedby", "popover");
  const at = span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = popover;
  const left = Math.max(8, Math.min(at.left, innerWidth - width - 8));
  const above = at.top - height - 6;
  popover.style.left = `${left}px`;
  popover.style.top = `${above > 8 ? above : at.bottom + 6}px`;
}

function hidePopover(event) {
  event.currentTarget.removeAttribute("aria-describedby");
  byId("popover").hidden = true;
}
