// Draws the system: workers on their sides, handoffs by their state in the store, and links.

import { $, bytes, count, h, percent } from "./dom.js";

const MAX_PIPS = 12;

/** States of the coordinator's table that a handoff passes, in order. */
const STATIONS = [
  ["RESERVING", "Offered", "prefill computes; decode is asked for pages"],
  ["HELD", "Waits for pages", "decode has none free yet"],
  ["TRANSFERRING", "Granted", "pages granted; chunks cross"],
  ["COMMITTED", "Committed", "decode has every chunk and decodes"],
];

export class System {
  constructor() {
    this.before = null;
  }

  show(state) {
    const seconds = this.before ? state.at_s - this.before.at_s : 0;
    const earlier = new Map((this.before?.workers ?? []).map((worker) => [worker.worker_id, worker]));
    $("trouble").hidden = !state.trouble;
    $("trouble").textContent = state.trouble;
    this.#showWorkers(state.workers);
    showStations(state.states);
    showLinks(state.workers, earlier, seconds);
    if (seconds !== 0 || !this.before) this.before = state; // the same state served twice gives no rates
  }

  #showWorkers(workers) {
    const sides = { prefill: [], decode: [], mixed: [] };
    for (const worker of workers) sides[worker.role].push(card(worker));
    for (const [role, cards] of Object.entries(sides)) $(`${role}-workers`).replaceChildren(...(cards.length ? cards : [none()]));
    $("mixed").hidden = sides.mixed.length === 0;
  }
}

const none = () => h("p.hint", {}, "no worker");

function card(worker) {
  const { load, core } = worker;
  const used = worker.capacity_tokens - load.free_tokens;
  const share = worker.capacity_tokens && (core || load.free_tokens) ? used / worker.capacity_tokens : 0;
  const facts = [
    ["running", count(load.num_running)],
    ...(worker.num_of_former_role ? [["of its former role", count(worker.num_of_former_role)]] : []),
    ["queued", `${count(load.num_waiting)} · ${count(load.queue_tokens)} tok`],
    worker.role === "decode"
      ? ["reserved", `${gauge(core, "reserved")} landing`]
      : ["held", `${gauge(core, "held")} until commit`],
    worker.role === "decode"
      ? ["decode", rate(load.decode_rate)]
      : ["prefill", rate(load.prefill_rate)],
    ...tiers(core),
  ];
  return h("article.worker", { "data-worker": worker.worker_id },
    h("h4", {}, worker.worker_id, h(`span.state.${condition(worker)}`, { title: worker.status }, condition(worker))),
    meter(share, `KV in use on ${worker.worker_id}`),
    h("p.kv", {}, `KV ${percent(share)}`, h("span", {}, `${count(used)} of ${count(worker.capacity_tokens)} tok`)),
    h("dl", {}, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

/** What keeps KV below the cache, and other workers' caches: name in the metrics, name of the cell. */
const TIERS = [["host", "memory tier"], ["disk", "disk tier"], ["store", "store tier"], ["peer", "other workers"]];

/** Return a cell for each tier, how many blocks it gave that a prompt used, and how much it holds; of others only what they gave. */
function tiers(core) {
  const cells = [];
  for (const [name, label] of TIERS) {
    const hits = core?.counters[`kv_${name}_${name === "peer" ? "hit" : "loaded"}_blocks`];
    if (hits === undefined || (name === "peer" && !hits)) continue;
    const held = core.gauges[`kv_${name}_bytes`];
    const state = core.gauges[`kv_${name}_on`] === 0 ? " · off" : held === undefined ? "" : ` · ${bytes(held)} kept`;
    cells.push([label, `${count(hits)} ${hits === 1 ? "hit" : "hits"}${state}`]);
  }
  return cells;
}

const gauge = (core, name) => (core ? count(core.gauges[name]) : "?");
const rate = (value) => (value ? `${count(value)} tok/s` : "not measured");

function condition(worker) {
  if (!worker.alive) return "dead";
  if (worker.status !== "ok") return "sick";
  if (!worker.connected) return "unheard";
  if (worker.draining) return "draining";
  return worker.num_of_former_role ? "turning" : "ready";
}

function meter(share, label) {
  const fill = h("div.fill");
  fill.style.width = `${100 * share}%`;
  const now = Math.round(100 * share);
  return h("div.meter", { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": now }, fill);
}

function showStations(states) {
  $("stations").replaceChildren(...STATIONS.map(([state, name, meaning]) => {
    const number = states[state] ?? 0;
    const pips = h("span.pips", { "aria-hidden": true }, ...Array.from({ length: Math.min(number, MAX_PIPS) }, () => h("i")));
    return h(`li${number ? ".busy" : ""}`, { "data-state": state },
      h("b", {}, count(number)), h("span.name", {}, name), h("small", {}, meaning), number ? pips : null);
  }));
}

/** Show the outgoing end of each link only, so that it is counted once. */
function showLinks(workers, earlier, seconds) {
  const rows = [];
  for (const worker of workers) {
    for (const link of worker.core?.links ?? []) {
      if (link.outgoing) rows.push(linkRow(worker, link, outgoing(earlier.get(worker.worker_id), link.peer), seconds));
    }
  }
  $("links").replaceChildren(...rows);
}

const outgoing = (worker, peer) => worker?.core?.links.find((link) => link.outgoing && link.peer === peer);

function linkRow(worker, link, before, seconds) {
  const { chunks, nbytes } = link.counters;
  const moved = before && seconds > 0 ? Math.max(0, nbytes - before.counters.nbytes) / seconds : 0;
  const speed = link.nbytes_per_s ? `${bytes(link.nbytes_per_s)}/s while it sends` : "not measured";
  return h(`li${moved ? ".busy" : ""}`, {},
    h("span", {}, h("b.from", {}, worker.worker_id), " → ", h("b.to", {}, link.peer)),
    h("span", { title: link.detail }, `${link.transport}, ${link.state}`),
    h("span", {}, `${count(chunks)} ${chunks === 1 ? "chunk" : "chunks"} sent, ${bytes(nbytes)}${compression(link)}`),
    h("span", {}, moved ? `${bytes(moved)}/s now` : speed));
}

/** Return the levels at which a link's KV was compressed and the ratio, such as ", lossless 1.2x". */
function compression(link) {
  const levels = Object.entries(link.levels ?? {});
  const names = levels.filter(([name]) => name !== "raw").map(([name]) => name);
  const sum = (field) => levels.reduce((total, [, level]) => total + level[field], 0);
  return names.length ? `, ${names.join(" ")} ${(sum("nbytes") / sum("wire_nbytes")).toFixed(1)}x` : "";
}
