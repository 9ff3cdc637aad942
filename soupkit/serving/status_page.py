"""The status page: one HTML file that asks for nothing but /status, every two seconds.

No build step and no resource from elsewhere; its policy lets no other script run. What the server
says is written as text, never as HTML.
"""

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; --line: #d5d8dd; --soft: #666d78; --card: #f5f6f8;
  --device: #17692c; --host: #1f5fa8; --busy: #7a5b00; --bad: #a3201b; }
@media (prefers-color-scheme: dark) { :root { --line: #3a3f47; --soft: #9aa2ae; --card: #22262c;
  --device: #6fce89; --host: #7db4f2; --busy: #e0bd5a; --bad: #f08a84; } }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; }
header { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; align-items: baseline; }
h1 { font-size: 1.3rem; margin: 0; }
h2 { font-size: 0.8rem; margin: 0; color: var(--soft); font-weight: normal; }
.soft { color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
.good { color: var(--device); font-weight: 600; }
#cards { display: grid; gap: 0.7rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); }
#cards section { background: var(--card); border-radius: 0.5rem; padding: 0.6rem 0.8rem; }
#cards p { margin: 0.1rem 0; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
#cards small { color: var(--soft); font-size: 0.8rem; }
.bar { height: 0.35rem; border-radius: 0.2rem; background: var(--line); overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--device); }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 0.35rem 0.5rem; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { font-weight: normal; color: var(--soft); font-size: 0.8rem; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
td:first-child { font-weight: 600; white-space: normal; overflow-wrap: anywhere; }
.resident, .draining { color: var(--device); } .host { color: var(--host); }
.queued, .loading, .installing { color: var(--busy); } .failed { color: var(--bad); }
.disk { color: var(--soft); }
@media (max-width: 60rem) {
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 1.2rem;
    padding: 0.6rem 0; border-bottom: 1px solid var(--line); }
  td { border: 0; padding: 0.1rem 0; display: flex; justify-content: space-between; gap: 0.5rem;
    white-space: normal; }
  td:first-child { font-size: 1.05rem; }
  td:nth-child(11), td:nth-child(12) { grid-column: 1 / -1; }
  td:nth-child(n+3)::before { content: attr(data-label); color: var(--soft); }
}
"""
SCRIPT = """
"use strict";
const EVERY = 2000;
const PHASES = { disk: "on disk", queued: "waits to load", loading: "loading",
  host: "in host memory", installing: "moving in", resident: "on device",
  draining: "on device, leaving", failed: "failed" };
const COLUMNS = ["model", "where", "device", "host", "running", "waiting", "requests", "hit rate",
  "tokens", "tokens/s", "first token p50 / p99", "per token p50 / p99", "load"];
let before = null;

function make(tag, text, name) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (name) found.className = name;
  return found;
}
function bytes(count) {
  if (!count) return "0";
  const unit = Math.min(4, Math.floor(Math.log10(count) / 3));
  return (count / 1000 ** unit).toFixed(unit ? 1 : 0) + " " + ["B", "kB", "MB", "GB", "TB"][unit];
}
function seconds(value) {
  if (value === null) return "-";
  return value < 1 ? (1000 * value).toFixed(value < 0.1 ? 1 : 0) + " ms" : value.toFixed(2) + " s";
}
function pair(model, name) {
  if (model[name + "_p50"] === null) return "-";
  return seconds(model[name + "_p50"]) + " / " + seconds(model[name + "_p99"]);
}
function speed(model, now) {
  const old = before && before.tokens.get(model.name);
  if (old === undefined || old === null) return "-";
  return (Math.max(0, model.tokens - old) / ((now - before.time) / 1000)).toFixed(1);
}
function card(title, value, note, share) {
  const found = make("section");
  found.append(make("h2", title), make("p", value), make("small", note));
  if (share !== undefined) {
    const bar = make("div", undefined, "bar"), fill = make("i");
    fill.style.width = Math.min(100, 100 * share) + "%";
    bar.append(fill);
    found.append(bar);
  }
  return found;
}
function cards(status, now) {
  const { queue, device, host } = status;
  const rates = status.models.map((model) => Number(speed(model, now))).filter((r) => r >= 0);
  const found = [
    card("Running", queue.running + " of " + queue.max_running, "sequences in the batch",
      queue.running / queue.max_running),
    card("Queue", queue.waiting + " of " + queue.max_queue, "waiting for a load or a turn",
      queue.waiting / queue.max_queue),
    card("Device cache", bytes(device.used_bytes), "of " + bytes(device.budget_bytes) + ", "
      + device.used_slots + " of " + device.slots + " slots",
      device.used_bytes / device.budget_bytes),
    card("Speed", rates.length ? rates.reduce((a, b) => a + b, 0).toFixed(1) : "-", "tokens/s"),
  ];
  if (host.budget_bytes) {
    found.push(card("Host cache", bytes(host.used_bytes), "of " + bytes(host.budget_bytes),
      host.used_bytes / host.budget_bytes));
  }
  if (status.replicas) {
    const up = status.replicas.filter((one) => one.state === "ready").length;
    const starts = status.replicas.reduce((sum, one) => sum + one.restarts, 0);
    found.push(card("Replicas", up + " of " + status.replicas.length, "ready, " + starts
      + (starts === 1 ? " restart" : " restarts"), up / status.replicas.length));
  }
  document.getElementById("cards").replaceChildren(...found);
}
function row(model, now) {
  const held = model.variant, found = make("tr");
  const seen = held ? held.hits + held.misses : 0;
  const where = make("span", held ? PHASES[held.phase] + (held.pinned ? ", pinned" : "") : "base",
    held ? held.phase : "soft");
  const texts = [model.name, where, held ? bytes(held.device_bytes) : "-",
    held ? bytes(held.host_bytes) : "-", held ? held.users : "-", held ? held.waiting : "-",
    model.requests, seen ? Math.round(100 * held.hits / seen) + " %" : "-", model.tokens,
    speed(model, now), pair(model, "first_token"), pair(model, "next_token"),
    held && held.loads ? seconds(held.load_seconds) : "-"];
  texts.forEach((text, at) => {
    const cell = make("td");
    cell.dataset.label = COLUMNS[at];
    cell.append(text instanceof Node ? text : make("span", String(text)));
    found.append(cell);
  });
  return found;
}
function show(status) {
  const now = performance.now();
  const state = document.getElementById("state");
  state.textContent = status.state;
  state.className = status.state === "ready" ? "good" : "bad";
  document.getElementById("version").textContent = "soupkit " + status.version;
  cards(status, now);
  document.getElementById("models").replaceChildren(...status.models.map((m) => row(m, now)));
  before = { time: now, tokens: new Map(status.models.map((m) => [m.name, m.tokens])) };
}
async function refresh() {
  const when = document.getElementById("when");
  try {
    if (document.hidden) return;
    const answer = await fetch("status", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error("HTTP " + answer.status);
    show(await answer.json());
    when.textContent = new Date().toLocaleTimeString();
    when.className = "soft";
  } catch (error) {
    when.textContent = "no answer (" + error.message + "); trying again";
    when.className = "bad";
  } finally {
    setTimeout(refresh, EVERY);
  }
}
document.getElementById("heads").append(...COLUMNS.map((name) => make("th", name)));
document.addEventListener("visibilitychange", () => { before = null; });
refresh();
"""
PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>soupkit</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>soupkit</h1><span id="state" class="soft">asking</span>
<span id="when" class="soft"></span> <span id="version" class="soft"></span></header>
<div id="cards"></div>
<table><thead><tr id="heads"></tr></thead><tbody id="models"></tbody></table>
<noscript>This page needs JavaScript; /status and /metrics have the same numbers.</noscript>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


PAGE_HEADERS = {
    # fill.style.width is set by the script, which no policy forbids.
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    f"script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
