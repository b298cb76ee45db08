// The way to the server: the key, errors in words, and server-sent events.

import { byId } from "./dom.js";

const KEY = "jaxserve-key";
const KEPT = "It stays in this tab and is sent to this server alone.";

/** What went wrong, for a person. */
export class Failure extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

let asking = null;
let declined = false;

/** Ask for the key, once however many requests wait for it. False if it was not given. */
function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const form = byId("key-form");
    byId("key-why").textContent = why ? `The server says: ${why}.` : KEPT;
    const done = new AbortController();
    const close = (given) => {
      declined = !given;
      done.abort();
      dialog.close();
      form.reset();
      asking = null;
      resolve(given);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("key").value.trim());
      close(true);
    }, done);
    byId("key-cancel").addEventListener("click", () => close(false), done);
    dialog.addEventListener("cancel", () => close(false), done);
    dialog.showModal();
  });
  return asking;
}

async function send(path, options, key) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached. It may be restarting, or the network is gone.");
  }
}

/**
 * A response that is not an error; Failure for one that is. Asks for the key where one is needed:
 * in the `background` until somebody has said "not now".
 */
export async function request(path, { background = false, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await send(path, options, key);
    if (response.ok) return response;
    const wrong = await failure(response);
    if (response.status !== 401 || (background && declined)) throw wrong;
    const isNew = sessionStorage.getItem(KEY) !== key; // given while this one was on its way
    if (!isNew && !(await askForKey(key ? wrong.message : ""))) throw wrong;
  }
}

/** The failure a response tells of, in the server's own words where it has some. */
async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON: whatever stands between says so, and the status has to do
  }
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  const message = error.message ?? `The server answered ${response.status}.`;
  return new Failure(message, { status: response.status, param: error.param ?? null, retryAfter });
}

/** The events of a stream, decoded. Throws Failure if it breaks off. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      piece = { done: true };
    }
    if (piece.done) throw new Failure("The connection was lost before the answer was complete.");
    const blocks = (rest + piece.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(event.error.message, { status: 500 });
      yield event;
    }
  }
}
