// The conversation: it lives in this page, and its text goes nowhere but to the completions endpoint.

import { $, h } from "./dom.js";
import { answer, Refused } from "./stream.js";
import { Timing, timingLine } from "./timing.js";

export class Chat {
  /** `key()` is the API key; `onAnswered(id, timing)` is called for each answer that ends. */
  constructor(key, onAnswered) {
    this.key = key;
    this.onAnswered = onAnswered;
    this.turns = [];
    this.running = null;
    $("ask").addEventListener("submit", (event) => this.#submit(event));
    $("prompt").addEventListener("keydown", (event) => this.#onKey(event));
    $("stop").addEventListener("click", () => this.stop());
    $("forget").addEventListener("click", () => this.#forget());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
  }

  stop() {
    this.running?.abort();
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  }

  #submit(event) {
    event.preventDefault();
    const text = $("prompt").value.trim();
    if (!text || this.running) return;
    $("prompt").value = "";
    this.#ask(text);
  }

  #forget() {
    this.stop();
    this.turns = [];
    $("log").replaceChildren();
    $("prompt").focus();
  }

  async #ask(text) {
    this.turns.push({ role: "user", content: text });
    const words = h("p.words");
    const thought = h("details.thought", { hidden: true, open: true }, h("summary", {}, "Reasoning"), h("p.thoughts"));
    const line = timingLine();
    append(h("article.user", {}, h("h3", {}, "You"), h("p.words", {}, text)));
    const article = append(h("article.model", {}, h("h3", {}, "Model"), thought, words, line.element));
    this.#run(new AbortController());
    try {
      const finish = await this.#stream(words, thought, line);
      if (finish === "length") article.append(h("p.hint", {}, "Cut off here: the answer may be longer with more tokens under Options."));
      if (words.textContent) this.turns.push({ role: "assistant", content: words.textContent });
      else this.turns.pop(); // an answer of reasoning alone is no answer
    } catch (error) {
      this.turns.pop(); // a question without an answer is not part of the next prompt
      article.append(h("p.failed", { role: "alert" }, explain(error)));
    } finally {
      this.#run(null);
    }
  }

  /** Return the answer's finish_reason. */
  async #stream(words, thought, line) {
    const timing = new Timing();
    let id = null;
    let finish = null;
    line.show(timing);
    try {
      for await (const chunk of answer(this.#body(), this.key(), this.running.signal)) {
        id = chunk.id;
        const delta = chunk.choices[0]?.delta ?? {};
        if (delta.reasoning) think(thought, delta.reasoning);
        if (delta.content && !words.textContent) thought.open = false; // the reader has the answer to read now
        if (delta.content) words.append(delta.content);
        finish = chunk.choices[0]?.finish_reason ?? finish;
        timing.arrived(chunk.usage.completion_tokens);
        line.show(timing);
        follow();
      }
      return finish;
    } finally {
      if (id !== null) this.onAnswered(id, timing);
    }
  }

  #body() {
    const system = $("system-prompt").value.trim();
    const head = system ? [{ role: "system", content: system }] : [];
    return {
      messages: [...head, ...this.turns],
      temperature: $("temperature").valueAsNumber,
      max_tokens: $("max-tokens").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true }, // a chunk may carry several tokens
    };
  }

  #run(controller) {
    this.running = controller;
    $("log").setAttribute("aria-busy", String(controller !== null)); // a screen reader reads it once, when it is complete
    $("send").disabled = controller !== null;
    $("stop").disabled = controller === null;
  }
}

function append(article) {
  $("log").querySelector(":scope > .hint")?.remove();
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return article;
}

function think(thought, text) {
  thought.hidden = false;
  thought.querySelector(".thoughts").append(text);
}

/** Stay at the end, unless the reader has scrolled back. */
function follow() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function explain(error) {
  if (error.name === "AbortError") return "Stopped.";
  if (error instanceof Refused) {
    if (error.status === 401) $("options").open = true;
    return error.status === 401 ? "This server wants an API key: type it under Options." : `Not answered: ${error.message}`;
  }
  return `Not answered: ${error.message}`;
}
