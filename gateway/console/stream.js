// The server's side of a chat: one streamed answer.

/** The error of an answer that did not come, in the server's words. `status` is 0 if it broke off after it had begun. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Yield the parsed chunks of the answer. Throws Refused, and what fetch throws. */
export async function* answer(body, key, signal) {
  const headers = { "Content-Type": "application/json", ...authorization(key) };
  const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw new Refused(await reason(response), response.status);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, 0);
    yield chunk;
  }
  throw new Refused("the answer broke off", 0);
}

export const authorization = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `HTTP ${response.status}`; // a proxy in between answers in its own form
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
