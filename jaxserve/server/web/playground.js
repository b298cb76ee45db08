// The Playground view: a conversation, or a raw completion, streamed, with everything it took.

import { Answer } from "./answer.js";
import { events, Failure, request } from "./api.js";
import { byId, el } from "./dom.js";
import { readParameters } from "./parameters.js";
import { tokensOf } from "./tokens.js";

/** What is kept of one mode: what is on the page, and the turns the model is told. */
class Conversation {
  constructor(invitation) {
    this.element = el("div", { class: "turns" });
    this.invitation = invitation;
    this.clear();
  }

  clear() {
    this.messages = [];
    this.element.replaceChildren(el("p", { class: "muted empty" }, this.invitation));
  }

  add(node) {
    this.element.querySelector(".empty")?.remove();
    this.element.append(node);
  }
}

export class Playground {
  constructor() {
    this.conversations = {
      chat: new Conversation("Ask the model something. The conversation stays in this page."),
      completion: new Conversation("Write the beginning of a text. The model goes on from there."),
    };
    this.stopping = null;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.send();
      }
    });
    byId("view-playground").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stopping?.abort();
    });
    byId("stop").addEventListener("click", () => this.stopping?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    for (const radio of byId("parameters").elements.mode) radio.addEventListener("change", () => this.showMode());
    byId("parameters").addEventListener("submit", (event) => event.preventDefault());
    if (matchMedia("(max-width: 860px)").matches) byId("settings").open = false;
    this.showMode();
  }

  get mode() {
    return byId("parameters").elements.mode.value;
  }

  shown() {
    if (!matchMedia("(pointer: coarse)").matches) byId("message").focus({ preventScroll: true });
  }

  showMode() {
    const chat = this.mode === "chat";
    byId("transcript").replaceChildren(this.conversations[this.mode].element);
    for (const node of document.querySelectorAll("[data-only=chat]")) node.hidden = !chat;
    byId("message").placeholder = chat ? "Say something" : "Once upon a time";
    byId("message-label").textContent = chat ? "Message" : "Beginning of the text";
    byId("clear").textContent = chat ? "New conversation" : "Clear";
    byId("transcript").setAttribute("aria-label", chat ? "Conversation" : "Completions");
  }

  clear() {
    this.stopping?.abort();
    this.conversations[this.mode].clear();
    byId("message").focus();
  }

  send() {
    const text = byId("message").value;
    if (this.stopping || !text.trim()) return;
    byId("message").value = "";
    this.ask(this.mode, text);
  }

  /** Put a turn to the model and show what comes of it. */
  async ask(mode, text) {
    const conversation = this.conversations[mode];
    const { messages } = conversation;
    const asked = el("article", { class: "turn asked", "aria-label": "You" }, el("div", { class: "text" }, text));
    conversation.add(asked);
    const answer = new Answer(mode === "chat" ? "The model" : "The continuation");
    conversation.add(answer.element);
    this.follow(true);
    this.setBusy(new AbortController());
    const turn = { role: "user", content: text };
    try {
      const body = readParameters(mode);
      if (mode === "chat") body.messages = [...body.messages, ...messages, turn];
      else body.prompt = text;
      await this.stream(mode, body, answer);
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped by you");
      else if (error instanceof Failure) {
        this.fail(conversation, answer, error, () => {
          if (!answer.text) asked.remove(); // it comes again
          this.ask(mode, text);
        });
      } else throw error;
    } finally {
      this.setBusy(null);
    }
    if (mode === "chat" && answer.text) messages.push(turn, { role: "assistant", content: answer.text });
  }

  async stream(mode, body, answer) {
    const response = await request(mode === "chat" ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: this.stopping.signal,
    });
    let usage = null;
    let ending = null;
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      if (!choice) continue;
      const tokens = tokensOf(choice);
      const thought = choice.delta?.reasoning_content;
      const text = (mode === "chat" ? choice.delta.content : choice.text) ?? "";
      if (thought) answer.think(thought, tokens);
      else if (text || tokens.length) answer.add(text, tokens);
      ending = choice.finish_reason ?? ending;
      this.follow();
    }
    answer.end(ending, usage);
  }

  /** Say what went wrong, and offer to try again: a server that is busy says when. */
  fail(conversation, answer, failure, retry) {
    answer.end("broken off");
    if (!answer.text) answer.element.remove();
    const headings = {
      0: "Connection lost", 400: "The server refuses this", 401: "No API key", 404: "Not here",
      429: "The server is busy", 500: "The engine failed", 503: "Not available", 504: "Too late",
    };
    const again = el("button", { class: "quiet", type: "button" }, "Try again");
    const notice = el(
      "div",
      { class: "notice", role: "alert" },
      el("p", {}, el("strong", {}, `${headings[failure.status] ?? "That did not work"}. `), sentence(failure.message)),
      again,
    );
    conversation.add(notice);
    again.addEventListener("click", () => {
      if (this.stopping) return;
      notice.remove();
      retry();
    });
    if (failure.retryAfter) waitFor(again, failure.retryAfter);
    const id = { stop: "stop_strings", max_completion_tokens: "max_tokens" }[failure.param] ?? failure.param;
    const field = id && byId("parameters").elements.namedItem(id);
    if (field) {
      byId("settings").open = true;
      field.setAttribute("aria-invalid", "true");
      field.addEventListener("input", () => field.removeAttribute("aria-invalid"), { once: true });
    }
    this.follow(true);
  }

  setBusy(stopping) {
    this.stopping = stopping;
    const busy = stopping !== null;
    const hadFocus = document.activeElement === byId("stop");
    byId("stop").hidden = !busy;
    byId("send").hidden = busy;
    byId("transcript").setAttribute("aria-busy", String(busy));
    if (!busy && hadFocus) byId("message").focus();
  }

  /** Keep the end in sight, unless somebody has gone back to read. */
  follow(always = false) {
    const box = byId("transcript");
    const near = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
    if (always || near) box.scrollTop = box.scrollHeight;
  }
}

/** Count a button down: until then the server would refuse again. */
function waitFor(button, seconds) {
  let left = Math.ceil(seconds);
  const say = () => {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    left -= 1;
    if (left >= 0) setTimeout(say, 1000);
  };
  say();
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
