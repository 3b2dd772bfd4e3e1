// Where the time of a request went: from the gateway's request log, and what this page measured of its own requests.

import { $, count, h, ms } from "./dom.js";

const SHOWN_REQUESTS = 10;

export class Account {
  constructor() {
    this.mine = new Map(); // id -> Timing
    this.chosen = null; // the newest request is shown until the reader chooses one
    this.drawn = "";
  }

  /** Keep the times that this page measured of one of its requests. */
  measured(id, timing) {
    this.mine.set(id, timing);
    this.chosen = null;
  }

  show(accounts) {
    this.accounts = accounts;
    const chosen = accounts.find((facts) => facts.id === this.chosen) ?? accounts[0];
    $("no-account").hidden = chosen !== undefined;
    $("account-body").hidden = chosen === undefined;
    if (chosen === undefined) return;
    const key = JSON.stringify([chosen.id, accounts.map((facts) => facts.id), this.mine.has(chosen.id)]);
    if (key === this.drawn) return; // drawing again would move the focus
    this.drawn = key;
    const parts = split(chosen, this.mine.get(chosen.id));
    drawLanes(parts);
    $("stages").tBodies[0].replaceChildren(...parts.map(stageRow));
    this.#drawRequests(accounts, chosen);
  }

  #drawRequests(accounts, chosen) {
    const focused = document.activeElement?.dataset.request;
    const rows = accounts.slice(0, SHOWN_REQUESTS).map((facts) => requestRow(facts, facts === chosen, () => this.#choose(facts.id)));
    $("requests").tBodies[0].replaceChildren(...rows);
    if (focused) document.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
  }

  #choose(id) {
    this.chosen = id;
    this.show(this.accounts);
  }
}

/**
 * Return the parts {lane, name, fromMs, ms, meaning} of a request's time; zero is when the gateway took the request.
 *
 * The services' clocks are not compared: each lane is placed so that it ends when the gateway heard of its end. Time
 * that no stage covers is shown as the gateway and the way to the workers and back.
 */
export function split(facts, timing) {
  const stages = Object.fromEntries(Object.entries(facts.stages_s).map(([name, seconds]) => [name, 1000 * seconds]));
  const total = 1000 * facts.total_s;
  const first = facts.ttft_s === null ? total : 1000 * facts.ttft_s;
  const here = timing ? page(timing, first) : [];
  const prefill = lay("prefill", facts.prefill, first, [
    ["queue", stages.prefill_queue, "waited for its turn"],
    ["load", stages.prefill_load, "read KV that was computed earlier from memory, disk or store"],
    ["compute", stages.prefill_prefill, `computed ${facts.prompt_tokens - facts.cached_tokens} of ${facts.prompt_tokens} prompt tokens, sampled token 0`],
  ]);
  const produced = `produced the other tokens${guessed(facts)}`;
  const isLocal = stages.prefill !== undefined; // one worker did both, and its account repeats the prefill side's
  const decode = lay("decode", facts.decode, total, isLocal ? [["decode", stages.decode, produced]] : [
    ["expect", stages.expect, "had the job; the offer was not yet there"],
    ["land", stages.land, "granted pages; took chunks until the last was checked"],
    ["join", stages.queue, "committed; waited for the next batch"],
    ["replay", stages.replay, "lost its worker; went on with another"],
    ["migrate", stages.migrate, "moved to another worker, while it went on"],
    ["decode", stages.decode, produced],
  ]);
  return [...here, ...gateway(stages, prefill, first, total), ...prefill, ...decode];
}

/** Return what speculative decoding did for an answer, in words. */
function guessed({ accepted_tokens: right = 0, rejected_tokens: wrong = 0 }) {
  return right + wrong === 0 ? "" : `, ${right} of them guessed ahead; ${wrong} guessed in vain`;
}

function page(timing, first) {
  if (timing.ttftMs === null) return [];
  const way = timing.ttftMs - first;
  return [{ lane: "page", where: "this page", name: "browser, network", fromMs: 0, ms: way, tint: 1, isApart: true, meaning: `this page saw token 0 after ${ms(timing.ttftMs)} ms, the gateway after ${ms(first)} ms` }];
}

function gateway(stages, prefill, first, total) {
  const before = first - prefill.reduce((sum, part) => sum + part.ms, 0);
  const { prepare = 0, place = 0 } = stages; // a request that was not placed has neither
  const where = { lane: "gateway", where: "gateway" };
  return [
    { ...where, name: "prepare", fromMs: 0, ms: prepare, tint: 0, meaning: "parsed it; template, tokens, grammar" },
    { ...where, name: "place", fromMs: prepare, ms: place, tint: 1, meaning: "asked the registry for two workers" },
    { ...where, name: "send", fromMs: prepare + place, ms: Math.max(0, before - prepare - place), tint: 2, meaning: "to the worker, and its token 0 back" },
    { ...where, name: "stream", fromMs: first, ms: total - first, tint: 3, meaning: "token 0 to the end of the answer" },
  ];
}

function lay(lane, where, endMs, stages) {
  const known = stages.filter(([, span]) => span !== undefined);
  let fromMs = endMs - known.reduce((sum, [, span]) => sum + span, 0);
  return known.map(([name, span, meaning], index) => {
    const part = { lane, where, name, fromMs, ms: span, tint: index % 4, meaning };
    fromMs += span;
    return part;
  });
}

function drawLanes(parts) {
  const onLanes = parts.filter((part) => !part.isApart);
  const start = Math.min(0, ...onLanes.map((part) => part.fromMs));
  const end = Math.max(...onLanes.map((part) => part.fromMs + part.ms));
  const lanes = Map.groupBy(onLanes, (part) => part.lane);
  $("lanes").setAttribute("aria-label", onLanes.map((part) => `${part.where} ${part.name} ${ms(part.ms)} ms`).join(", "));
  $("lanes").replaceChildren(
    ...[...lanes].map(([lane, own]) => h(`div.lane.${lane}`, {}, h("span", {}, own[0].where), track(own, start, end - start))),
    h("div.axis", {}, h("span"), h("div", {}, h("span", {}, "0"), h("span", {}, `${ms(end / 2)}`), h("span", {}, `${ms(end)} ms`))));
}

function track(parts, start, span) {
  const bars = parts.map((part) => {
    const bar = h(`div.bar.tint${part.tint}`, { title: `${part.name} ${ms(part.ms)} ms: ${part.meaning}` });
    bar.style.left = `${(100 * (part.fromMs - start)) / span}%`;
    bar.style.width = `${(100 * part.ms) / span}%`;
    return bar;
  });
  return h("div.track", {}, ...bars);
}

const stageRow = (part) =>
  h(`tr.${part.lane}`, {}, h("td", {}, part.where), h("td", {}, h(`i.swatch.tint${part.tint}`), h("b", {}, part.name), " ", h("small", {}, part.meaning)), h("td.number", {}, ms(part.ms)));

function requestRow(facts, isChosen, choose) {
  const button = h("button.quiet", { type: "button", "data-request": facts.id, "aria-pressed": String(isChosen) }, shortId(facts.id));
  button.addEventListener("click", choose);
  const times = [facts.ttft_s, facts.itl_mean_s, facts.total_s].map((seconds) => (seconds === null ? "–" : ms(1000 * seconds)));
  const cells = [facts.prompt_tokens, facts.cached_tokens, facts.completion_tokens].map(count);
  return h(`tr${isChosen ? ".chosen" : ""}`, {}, h("td", {}, button),
    ...[...cells, ...times].map((text) => h("td.number", {}, text)), h("td", {}, facts.code));
}

const shortId = (id) => (id.length > 18 ? `…${id.slice(-12)}` : id);
