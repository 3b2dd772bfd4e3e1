// Starts the page: the theme, the chat, and the loop that asks for the state.

import { Account } from "./account.js";
import { Chat } from "./chat.js";
import { $ } from "./dom.js";
import { authorization } from "./stream.js";
import { System } from "./system.js";

const BUSY_MS = 250;
const IDLE_MS = 500;
const LOST_MS = 2000;

const key = () => $("key").value.trim();
const system = new System();
const account = new Account();
const chat = new Chat(key, (id, timing) => account.measured(id, timing));
let timer = 0;
let isLooking = false;

function watchTheme() {
  const root = document.documentElement;
  const now = root.dataset.theme ?? "auto";
  for (const radio of document.getElementsByName("theme")) {
    radio.checked = radio.value === now;
    radio.addEventListener("change", () => {
      if (radio.value === "auto") delete root.dataset.theme;
      else root.dataset.theme = radio.value;
      localStorage.setItem("theme", radio.value);
    });
  }
}

/** Ask for the state again and again while the page is visible; there is one request at a time, whoever calls. */
async function look() {
  clearTimeout(timer);
  if (document.hidden || isLooking) return;
  isLooking = true;
  let waitMs = LOST_MS;
  try {
    waitMs = await lookOnce();
  } finally {
    isLooking = false;
    timer = setTimeout(look, waitMs);
  }
}

/** Return how long to wait before the next request. */
async function lookOnce() {
  const response = await fetch("/console/state", { headers: authorization(key()) }).catch(() => null); // no server
  if (!response?.ok) {
    say(response?.status === 401 ? "an API key is needed: see Options" : "the gateway does not answer", "bad");
    return LOST_MS;
  }
  const state = await response.json();
  system.show(state);
  account.show(state.accounts);
  const ready = state.workers.filter((worker) => worker.connected && worker.status === "ok").length;
  say(`${ready} of ${state.workers.length} workers ready, ${state.num_inflight} in flight`, ready ? "good" : "bad");
  if (!$("model").textContent) await nameModel();
  return state.num_inflight || chat.running ? BUSY_MS : IDLE_MS;
}

async function nameModel() {
  const response = await fetch("/v1/models", { headers: authorization(key()) }).catch(() => null);
  if (!response?.ok) return; // the next request tries again
  const [card] = (await response.json()).data;
  $("model").textContent = `${card.id}, ${card.max_model_len} tokens`;
}

function say(text, mood) {
  const condition = $("condition");
  if (condition.textContent !== text) condition.textContent = text; // a screen reader reads a status when it changes
  condition.dataset.mood = mood;
}

watchTheme();
document.addEventListener("visibilitychange", look);
$("key").addEventListener("change", look);
$("ask").addEventListener("submit", () => setTimeout(look, 50));
look();
