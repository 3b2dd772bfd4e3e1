// Records when the tokens of one answer came to this page.

import { h, ms, svg } from "./dom.js";

const MAX_BARS = 160;
const HEIGHT = 28;

export class Timing {
  constructor(now = performance.now()) {
    this.startedMs = now;
    this.firstMs = null;
    this.lastMs = null;
    this.numTokens = 0;
    this.gapsMs = []; // one per token after the first; tokens that came together share their gap
  }

  /** Record that `numTokens` of the answer have come by `now`. */
  arrived(numTokens, now = performance.now()) {
    const more = numTokens - this.numTokens;
    if (more <= 0) return;
    if (this.firstMs === null) {
      this.firstMs = now;
      for (let i = 1; i < more; i++) this.gapsMs.push(0);
    } else {
      for (let i = 0; i < more; i++) this.gapsMs.push((now - this.lastMs) / more);
    }
    this.lastMs = now;
    this.numTokens = numTokens;
  }

  get ttftMs() {
    return this.firstMs === null ? null : this.firstMs - this.startedMs;
  }

  get totalMs() {
    return this.lastMs === null ? null : this.lastMs - this.startedMs;
  }

  /** Return the tokens per second after the first token, or null. */
  get tokensPerSecond() {
    const span = this.lastMs - this.firstMs;
    return span > 0 ? (1000 * (this.numTokens - 1)) / span : null;
  }

  gapAt(share) {
    if (!this.gapsMs.length) return null;
    const sorted = [...this.gapsMs].sort((a, b) => a - b);
    return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  }
}

/** Return the line under an answer, which `show(timing)` keeps up to date. */
export function timingLine() {
  const facts = h("dl.timing");
  const strip = h("div.gaps");
  const element = h("div.measured", {}, facts, strip);
  return { element, show: (timing) => show(timing, facts, strip) };
}

function show(timing, facts, strip) {
  const { ttftMs, tokensPerSecond } = timing;
  const rows = [
    ["TTFT", ttftMs === null ? "…" : `${ms(ttftMs)} ms`],
    ["tok/s", tokensPerSecond === null ? "…" : tokensPerSecond.toFixed(1)],
    ["gap p50", shown(timing.gapAt(0.5))],
    ["gap max", shown(timing.gapAt(1))],
    ["tokens", String(timing.numTokens)],
  ];
  facts.replaceChildren(...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  strip.replaceChildren(bars(timing.gapsMs));
}

const shown = (gapMs) => (gapMs === null ? "…" : `${ms(gapMs)} ms`);

/** Draw a bar per token; for an answer longer than MAX_BARS each bar is the longest gap of its share. */
function bars(gapsMs) {
  const per = Math.max(1, Math.ceil(gapsMs.length / MAX_BARS));
  const tops = [];
  for (let i = 0; i < gapsMs.length; i += per) tops.push(Math.max(...gapsMs.slice(i, i + per)));
  const top = Math.max(...tops, 1e-9);
  const heights = tops.map((gap) => Math.max(1, (HEIGHT * gap) / top));
  const path = heights.map((height, i) => `M${i * 3 + 1} ${HEIGHT}v${-height.toFixed(1)}`).join("");
  const label = gapsMs.length ? `Gaps between tokens, tallest ${ms(top)} ms` : "No gaps yet";
  const size = { viewBox: `0 0 ${MAX_BARS * 3} ${HEIGHT}`, width: MAX_BARS * 3, height: HEIGHT };
  return svg("svg", { ...size, role: "img", "aria-label": label }, svg("path", { d: path }));
}
