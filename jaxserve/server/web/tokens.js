// Tokens with their probabilities: one shape for both endpoints, fitted to the text they make.

/** A token: its text as the server shows it, its bytes, its probability, and the likeliest ones. */
function token(text, bytes, logprob, alternatives) {
  return { text, bytes, probability: logprob === null ? null : Math.exp(logprob), alternatives };
}

const encoder = new TextEncoder();

/** Bytes of a token from its text; part of a character is spelled "bytes:\xf0\x9f". */
function bytesOf(text) {
  const spelled = text.startsWith("bytes:") && text.slice(6).match(/\\x[0-9a-f]{2}/g);
  return spelled ? Uint8Array.from(spelled, (byte) => parseInt(byte.slice(2), 16)) : encoder.encode(text);
}

/** The tokens of a choice of a chunk, of either endpoint. */
export function tokensOf({ logprobs }) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token: text, bytes, logprob, top_logprobs }) =>
      token(text, Uint8Array.from(bytes), logprob,
        top_logprobs.map((other) => ({ text: other.token, probability: Math.exp(other.logprob) }))));
  }
  return logprobs.tokens.map((text, i) => {
    const alternatives = Object.entries(logprobs.top_logprobs[i] ?? {})
      .map(([other, logprob]) => ({ text: other, probability: Math.exp(logprob) }))
      .sort((a, b) => b.probability - a.probability);
    return token(text, bytesOf(text), logprobs.token_logprobs[i], alternatives);
  });
}

/** Cuts a text, as it comes, into the pieces its tokens make of it. */
export class Cutter {
  constructor() {
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  }

  /**
   * The pieces of the next chunk, [{text, token}]: together they are its text, whatever the tokens
   * say. A token without text of its own (the end, part of a character) has an empty piece.
   */
  cut(text, tokens) {
    const pieces = [];
    let at = 0;
    for (const one of tokens) {
      const made = this.decoder.decode(one.bytes, { stream: true });
      const fits = made !== "" && text.startsWith(made, at);
      pieces.push({ text: fits ? made : "", token: one });
      if (fits) at += made.length;
    }
    if (at < text.length) pieces.push({ text: text.slice(at), token: null });
    return pieces;
  }
}
