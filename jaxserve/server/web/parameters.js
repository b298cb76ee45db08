// The Playground's settings as fields of a request. One left empty is the server's own business.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "seed"];
const ALTERNATIVES = 5;

/** A request's body but for what is asked; a chat's begins with the system prompt. */
export function readParameters(mode) {
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const { value } = byId(name);
    if (value !== "") body[name] = Number(value);
  }
  const stops = byId("stop_strings").value.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
  if (byId("probabilities").checked) {
    Object.assign(body, mode === "chat" ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES });
  }
  if (mode === "chat") {
    const system = byId("system").value;
    body.messages = system.trim() ? [{ role: "system", content: system }] : [];
  }
  return body;
}
