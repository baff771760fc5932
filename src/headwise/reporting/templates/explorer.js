// The plan explorer. A choice (budgets, granularity, rounding) becomes an answer (widths, costs,
// predicted loss): asked of the server, or looked up in the grid a saved page holds. Everything
// shown is made from the answer and from the facts of the profiled model.
"use strict";

const facts = JSON.parse(document.getElementById("facts").textContent);
const BUDGETS = ["attn_params", "kv_bytes", "flops", "traffic", "params", "ffn_params"];
const NAMES = {
  params: "total parameters",
  attn_params: "attention parameters",
  ffn_params: "MLP parameters",
  kv_bytes: "key-value bytes per token",
  flops: "FLOPs per token",
  traffic: "bytes read per generated token",
};
const WIDTHS = { head: "free per head", layer: "equal in a layer", model: "equal in the model" };
const MLPS = { cut: "narrowed too, where a limit counts them", whole: "left whole" };
const shown = Object.keys(NAMES).filter((name) => facts.mlps.some((mlps) => facts.levels[mlps][name]));
const limited = (choice) => shown.filter((name) => facts.levels[choice.mlps][name]);
const layers = unpacked(facts.plan.layers).map((layer) => ({ ...layer, heads: unpacked(layer.heads) }));
const $ = (id) => document.getElementById(id);
let current = null; // {choice, answer}
let kept = null;

// ── choices and answers ───────────────────────────────────────────────────────────────────────

function firstChoice() {
  const near = (list, value) => list.reduce((a, b) => (Math.abs(b - value) < Math.abs(a - value) ? b : a));
  const words = new URLSearchParams(location.hash.slice(1));
  const choice = {
    granularity: facts.granularities.includes(words.get("granularity")) ? words.get("granularity") : facts.granularities[0],
    multiple_of: near(facts.multiples, Number(words.get("multiple_of")) || 8),
    mlps: facts.mlps.includes(words.get("mlps")) ? words.get("mlps") : facts.mlps[0],
  };
  const begin = choice.mlps === "cut" ? { params: 90 } : { attn_params: 75 };
  for (const name of limited(choice)) {
    const start = (!location.hash && begin[name]) || 100;
    choice[name] = near(facts.levels[choice.mlps][name], Number(words.get(name)) || start);
  }
  return choice;
}

const cache = new Map();

async function answerTo(choice) {
  const query = new URLSearchParams(choice).toString();
  if (!cache.has(query)) {
    if (cache.size > 2000) cache.clear();
    cache.set(query, facts.plans ? lookedUp(choice) : await asked(query));
  }
  const answer = cache.get(query);
  if (answer.error) throw new Error(answer.error);
  return answer;
}

async function asked(query) {
  const response = await fetch(`/plan?${query}`);
  return response.json();
}

function lookedUp(choice) {
  let place = 0;
  for (const name of BUDGETS) {
    const levels = facts.levels[choice.mlps][name] || [100];
    place = place * levels.length + levels.indexOf(choice[name] ?? 100);
  }
  const number = facts.index[`${choice.mlps} ${choice.granularity} ${choice.multiple_of}`][place];
  return number < 0 ? { error: "No plan is that small with these rules; raise the budget or lower the rounding." } : facts.plans[number];
}

// ── plan files and commands ───────────────────────────────────────────────────────────────────

function unpacked(list) {
  return list.flatMap(({ repeat = 1, ...item }) => Array(repeat).fill(item));
}

function packed(list) {
  const runs = [];
  for (const item of list) {
    const text = JSON.stringify(item);
    if (runs.length && runs.at(-1).text === text) runs.at(-1).repeat += 1;
    else runs.push({ text, item, repeat: 1 });
  }
  return runs.map(({ item, repeat }) => (repeat > 1 ? { repeat, ...item } : item));
}

// The same plan as `headwise plan fit` writes: a head keeps its most sensitive planes, in order.
function planOf({ choice, answer }) {
  const cut = layers.map((layer, i) => {
    const order = answer.order[i] ?? layer.heads.map((_, j) => j); // as in the dense model
    const moved = order.some((j, place) => j !== place);
    return {
      ...layer,
      ...(answer.ffn[i] ? { ffn_dim: answer.ffn[i] } : {}),
      heads: packed(order.map((j) => {
        const planes = facts.plane_order[i][j].slice(0, answer.planes[i][j]).sort((a, b) => a - b);
        return {
          ...layer.heads[j],
          qk_dim: answer.qk[i][j],
          vo_dim: answer.vo[i][j],
          rotary_planes: planes.map((p) => layer.heads[j].rotary_planes[p]),
          ...(moved ? { source: j } : {}),
        };
      })),
    };
  });
  const origin = {
    command: fitCommand(choice),
    policy: "sensitivity",
    versions: facts.versions,
    profile_sha256: facts.profile_sha256,
    predicted_loss: answer.loss,
    loss_unit: facts.unit,
    ...(facts.qk_weight === 1 ? {} : { qk_weight: facts.qk_weight }),
    notes: [...facts.notes, ...answer.notes],
  };
  return { ...facts.plan, layers: packed(cut), origin };
}

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

function fitCommand(choice) {
  const words = ["headwise", "plan", "fit", facts.profile];
  const limits = limited(choice).filter((name) => choice[name] < 100);
  for (const name of limits.length ? limits : ["attn_params"]) {
    words.push(`--${name.replace("_", "-")}`, `${choice[name] ?? 100}%`);
  }
  if (choice.mlps === "whole" && (limits.includes("flops") || limits.includes("traffic"))) words.push("--no-cut-ffn");
  if (choice.granularity !== facts.granularities[0]) words.push("--granularity", choice.granularity);
  if (choice.multiple_of !== 8) words.push("--multiple-of", String(choice.multiple_of));
  for (const target of facts.targets) words.push("--for", target);
  if (facts.context !== null) words.push("--context", String(facts.context));
  if (facts.told_qk_weight !== null) words.push("--qk-weight", String(facts.told_qk_weight));
  if (facts.dense.batch > 1) words.push("--batch", String(facts.dense.batch));
  return [...words, "-o", "plan.json"].map(quoted).join(" ");
}

function cutCommand() {
  const words = ["headwise", "compress", facts.model, "--plan", "plan.json", "--profile", facts.profile];
  return [...words, facts.option, facts.text, "-o", "smaller"].map(quoted).join(" ");
}

// ── small pieces of the page ──────────────────────────────────────────────────────────────────

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "text", "line", "polyline", "circle", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

function short(number) {
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (number >= size) return (number / size * (unit === " k" ? 10 : 1)).toPrecision(3) + unit;
  }
  return number.toLocaleString("en");
}

// Which engines run the plan as it is, the reasons folded away.
function engineList(engines) {
  const yes = engines.filter((one) => one.runs).map((one) => one.target);
  const rows = engines.map((one) => element("li", {}, `${one.target}: ${one.runs ? "yes" : "no"}, ${one.why}`));
  return element("details", { class: "quiet" },
    element("summary", {}, `Runs in: ${yes.join(", ") || "headwise only"}`), element("ul", {}, ...rows));
}

function lossWords(loss) {
  if (facts.objective === "embedding") return `1 − cosine ${loss.toPrecision(3)}`;
  if (facts.objective === "label") return `divergence ${loss.toPrecision(3)}`;
  return loss > 20 ? "unusable" : `perplexity ×${Math.exp(loss).toFixed(Math.exp(loss) < 10 ? 3 : 0)}`;
}

// ── the form ──────────────────────────────────────────────────────────────────────────────────

function drawForm(choice) {
  const form = $("sliders");
  for (const name of shown) {
    const range = element("input", { type: "range", id: name, min: 0, step: 1 });
    const words = NAMES[name][0].toUpperCase() + NAMES[name].slice(1);
    const title = element("label", { for: name }, `${words}, at most`);
    form.append(element("div", {}, element("div", { class: "range" }, title, element("output", { for: name })), range));
  }
  const group = (title, name, values, words) => element("fieldset", {}, element("legend", {}, title),
    element("div", { class: "options" }, ...values.map((value) =>
      element("label", {}, element("input", { type: "radio", name, value }), ` ${words(value)}`))));
  if (facts.mlps.length > 1) form.append(group("MLPs", "mlps", facts.mlps, (value) => MLPS[value]));
  form.append(group("Head widths", "granularity", facts.granularities, (value) => WIDTHS[value]));
  form.append(group("Rounded to multiples of", "multiple_of", facts.multiples, String));
  setForm(choice);
  form.addEventListener("input", (event) => {
    if (event.target.name === "mlps") setForm(nearest(formChoice(), event.target.value));
    sayLimits();
    changed();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}

let mlps = null; // what the sliders are set for

// Sliders that this treatment of MLPs has no limits for are hidden.
function setForm(choice) {
  mlps = choice.mlps;
  for (const name of shown) {
    const levels = facts.levels[mlps][name];
    $(name).parentElement.hidden = !levels;
    if (!levels) continue;
    $(name).max = levels.length - 1;
    $(name).value = levels.indexOf(choice[name]);
  }
  for (const name of ["granularity", "multiple_of", "mlps"]) {
    const input = document.querySelector(`input[name=${name}][value="${choice[name]}"]`);
    if (input) input.checked = true;
  }
  const axis = $("axis").value;
  const names = limited(choice);
  $("axis").replaceChildren(...names.map((name) => element("option", { value: name }, NAMES[name])));
  if (names.includes(axis)) $("axis").value = axis;
  sayLimits();
}

// The choice with MLPs treated otherwise: the limits it has there, as near as they come.
function nearest(choice, other) {
  const found = { granularity: choice.granularity, multiple_of: choice.multiple_of, mlps: other };
  for (const name of limited(found)) {
    const wanted = choice[name] ?? 100;
    found[name] = facts.levels[other][name].reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
  }
  return found;
}

function formChoice() {
  const picked = (name) => document.querySelector(`input[name=${name}]:checked`).value;
  const choice = { granularity: picked("granularity"), multiple_of: Number(picked("multiple_of")), mlps };
  for (const name of limited(choice)) choice[name] = facts.levels[mlps][name][Number($(name).value)];
  return choice;
}

function sayLimits() {
  const choice = formChoice();
  for (const name of limited(choice)) {
    const words = choice[name] < 100 ? `${choice[name]}%` : "no limit";
    document.querySelector(`output[for=${name}]`).textContent = words;
    $(name).setAttribute("aria-valuetext", words);
  }
}

// ── a plan ────────────────────────────────────────────────────────────────────────────────────

function drawPlan(place, { answer }) {
  const rows = Object.keys(NAMES).filter((name) => facts.dense[name]).map((name) => {
    const share = answer.cost[name] / facts.dense[name];
    const bar = element("span", { class: "bar", "aria-hidden": "true" }, element("i"));
    bar.firstChild.style.width = percent(share);
    return element("tr", {}, element("th", { scope: "row" }, NAMES[name]),
      element("td", { class: "number" }, short(answer.cost[name])), element("td", { class: "number" }, percent(share)), element("td", {}, bar));
  });
  const exact = answer.exact ? "" : " (near-optimal, not proven optimal)";
  const unit = facts.objective === "embedding" ? "" : `loss +${answer.loss.toPrecision(3)} ${facts.unit}`;
  place.querySelector(".content").replaceChildren(
    element("div", { class: "big" }, lossWords(answer.loss)),
    element("p", { class: "quiet" }, `predicted; ${unit}${exact}`),
    ...answer.notes.map((note) => element("p", { class: "quiet" }, note)),
    engineList(answer.engines),
    element("table", {}, element("tbody", {}, ...rows)),
    ...drawMap("Query-key widths", answer.qk, place.clientWidth), ...drawMap("Value-output widths", answer.vo, place.clientWidth),
    ...(facts.mlps.length > 1 ? drawMap("MLP widths", answer.ffn.map((width) => [width]), place.clientWidth, facts.plan.shape.ffn_dim) : []));
}

// Drawings are as wide as their place, in its own pixels, so that their letters stay readable.
// With `neurons`, the full width of an MLP, there is one row.
function drawMap(title, widths, space, neurons = 0) {
  const full = neurons || Math.max(...layers.flatMap((layer) => layer.heads.flatMap((head) => [head.qk_dim, head.vo_dim])));
  const groups = Math.max(...widths.map((row) => row.length));
  const edge = Math.max(280, space);
  const cell = { x: (edge - 50) / widths.length, y: Math.min(24, Math.max(8, 200 / groups)) };
  const height = groups * cell.y;
  const svg = element("svg", { class: "map", viewBox: `0 0 ${edge} ${height + 18}`, role: "img" });
  widths.forEach((row, i) => row.forEach((width, j) => {
    const rect = element("rect", { x: 46 + i * cell.x, y: j * cell.y, width: cell.x, height: cell.y,
      "fill-opacity": (0.06 + 0.94 * width / full).toFixed(3) });
    rect.append(element("title", {}, `layer ${i}, ${neurons ? "MLP" : `head group ${j}`}: ${width}`));
    svg.append(rect);
  }));
  const label = (x, y, anchor, words) => svg.append(element("text", { x, y, "text-anchor": anchor }, words));
  label(42, 11, "end", neurons ? "MLP" : "head 0");
  if (groups > 1 && height > 24) label(42, height - 2, "end", String(groups - 1));
  label(46, height + 14, "start", "layer 0");
  label(edge - 4, height + 14, "end", String(widths.length - 1));
  const all = widths.flat();
  const mean = all.reduce((a, b) => a + b, 0) / all.length;
  const words = `from ${Math.min(...all)} to ${Math.max(...all)}, ${mean.toFixed(1)} on average`;
  svg.setAttribute("aria-label", `${title} by layer${neurons ? "" : " and head group"}: ${words}`);
  return [element("h3", {}, `${title}: `, element("span", { class: "quiet" }, words)), svg,
    element("div", { class: "key", "aria-hidden": "true" }, "0", element("i"), String(full)), numbers(title, widths)];
}

function numbers(title, widths) {
  const rows = widths.map((row, i) => element("tr", {}, element("th", { scope: "row" }, `layer ${i}`),
    ...row.map((width) => element("td", { class: "number" }, String(width)))));
  const table = element("table", {}, element("caption", { class: "skip" }, title), element("tbody", {}, ...rows));
  return element("details", {}, element("summary", {}, "Widths as a table"), element("div", { class: "scroll" }, table));
}

// ── the Pareto curve ──────────────────────────────────────────────────────────────────────────

let pareto = { key: "", points: [] };

// Points are asked for one at a time, and only while no slider moves, so that a moved slider
// never waits behind them.
async function fillPareto() {
  const axis = $("axis").value;
  const { granularity, multiple_of, mlps } = current.choice;
  const key = `${axis} ${granularity} ${multiple_of} ${mlps}`;
  if (pareto.key !== key) pareto = { key, points: [] };
  const mine = pareto;
  const every = Math.ceil(facts.levels[mlps][axis].length / 16);
  const levels = facts.levels[mlps][axis].filter((_, k, list) => (list.length - 1 - k) % every === 0);
  const moved = moves;
  for (const level of levels.toReversed().slice(mine.points.length)) {
    const choice = { granularity, multiple_of, mlps };
    for (const name of limited(choice)) choice[name] = name === axis ? level : 100;
    let answer = null;
    try { answer = await answerTo(choice); } catch { /* smaller than any plan: no point there */ }
    if (mine !== pareto || moved !== moves) return;
    mine.points.push(answer && { share: answer.cost[axis] / facts.dense[axis], loss: answer.loss, level });
    if (!facts.plans) drawPareto();
  }
  drawPareto();
}

function drawPareto() {
  const axis = $("axis").value;
  const points = pareto.points.filter(Boolean);
  const marks = [current, kept].map((one) => one && { share: one.answer.cost[axis] / facts.dense[axis], loss: one.answer.loss });
  const all = [...points, ...marks.filter(Boolean)];
  const positive = all.map((p) => p.loss).filter((loss) => loss > 0);
  const top = Math.ceil(Math.log10(Math.max(...positive, 1e-2)));
  const bottom = Math.max(top - 5, Math.floor(Math.log10(Math.min(...positive, 1e-2))));
  const left = Math.floor(20 * Math.min(...all.map((p) => p.share), 0.95)) / 20;
  const edge = Math.min(700, Math.max(280, $("pareto").clientWidth));
  const x = (share) => 60 + (edge - 90) * (share - left) / (1 - left);
  const y = (loss) => 230 - 210 * Math.max(0, (Math.log10(Math.max(loss, 1e-99)) - bottom) / (top - bottom));
  const svg = element("svg", { class: "curve", viewBox: `0 0 ${edge} 280`, role: "img" });
  for (let power = bottom; power <= top; power += 1) {
    svg.append(element("line", { class: "grid", x1: 60, x2: edge - 30, y1: y(10 ** power), y2: y(10 ** power) }),
      element("text", { x: 54, y: y(10 ** power) + 4, "text-anchor": "end" }, power === bottom ? `≤ ${10 ** power}` : String(10 ** power)));
  }
  for (let k = 0; k <= 4; k += 1) {
    const share = left + (1 - left) * k / 4;
    svg.append(element("text", { x: x(share), y: 250, "text-anchor": "middle" }, `${Number((100 * share).toFixed(1))}%`));
  }
  const rise = facts.objective === "embedding" ? "predicted 1 − cosine" : `predicted rise of the loss, ${facts.unit}`;
  svg.append(element("text", { x: edge / 2 + 15, y: 272, "text-anchor": "middle" }, `${NAMES[axis]} kept`),
    element("text", { x: 60, y: 12 }, rise),
    element("polyline", { class: "line", points: points.map((p) => `${x(p.share)},${y(p.loss)}`).join(" ") }));
  for (const p of points) svg.append(element("circle", { class: "dot", cx: x(p.share), cy: y(p.loss), r: 3 }));
  if (marks[1]) svg.append(element("circle", { class: "then", cx: x(marks[1].share), cy: y(marks[1].loss), r: 8 }));
  svg.append(element("circle", { class: "now", cx: x(marks[0].share), cy: y(marks[0].loss), r: 7 }));
  svg.setAttribute("aria-label", `${rise} against ${NAMES[axis]} kept; this plan keeps ${percent(marks[0].share)} and loses ${marks[0].loss.toPrecision(3)}. The table below has the numbers.`);
  $("pareto").replaceChildren(svg);
  const head = element("tr", {}, ...["limit", "kept", "predicted rise"].map((words) => element("th", { scope: "col", class: "number" }, words)));
  const rows = points.map((p) => element("tr", {}, ...[`${p.level}%`, percent(p.share), p.loss.toPrecision(3)].map((words) => element("td", { class: "number" }, words))));
  $("pareto-table").replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

// ── what happens ──────────────────────────────────────────────────────────────────────────────

let moves = 0; // counts changes, so that late answers and old work are recognised
let busy = false;
let idle = 0;

// One question at a time: while it is under way the newest position waits, the others are skipped.
async function changed() {
  moves += 1;
  if (busy) return;
  busy = true;
  for (let seen = -1; seen !== moves;) {
    seen = moves;
    const choice = formChoice();
    try {
      const answer = await answerTo(choice);
      current = { choice, answer };
      $("problem").textContent = "";
      showCurrent();
    } catch (error) {
      $("problem").textContent = error instanceof TypeError ? "The server does not answer; start `headwise explore` again." : error.message;
    }
  }
  busy = false;
  clearTimeout(idle);
  idle = setTimeout(() => { if (current) { speak(); fillPareto(); } }, facts.plans ? 0 : 250);
}

function showCurrent() {
  drawPlan($("now"), current);
  drawPareto();
  $("fit").textContent = fitCommand(current.choice);
  $("cut").textContent = cutCommand();
  history.replaceState(null, "", `#${new URLSearchParams(current.choice)}`);
}

function speak() {
  const counted = current.choice.mlps === "cut" ? "params" : "attn_params";
  const share = current.answer.cost[counted] / facts.dense[counted];
  $("spoken").textContent = `Predicted ${lossWords(current.answer.loss)} with ${percent(share)} of the ${NAMES[counted]}.`;
}

function download() {
  const text = `${JSON.stringify(planOf(current), null, 2)}\n`;
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: "plan.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function keep(one) {
  kept = one;
  const place = $("then");
  place.querySelector(".buttons").hidden = !one;
  if (one) drawPlan(place, one);
  else place.querySelector(".content").replaceChildren(element("p", { class: "quiet" }, "Nothing yet. Keep a plan, then move the sliders: both stay in view."));
  drawPareto();
}

function start() {
  const loss = facts.loss === null ? "" : `, loss ${facts.loss.toFixed(3)} ${facts.unit}`;
  $("about").textContent = `Profiled on ${facts.tokens.toLocaleString("en")} tokens of ${facts.text}${loss}. ` +
    `FLOPs and bytes read are those at a context of ${facts.dense.context.toLocaleString("en")} tokens` +
    `${facts.dense.batch > 1 ? ` with ${facts.dense.batch} sequences decoded together` : " of one sequence"}. ` +
    `${facts.plans ? "A saved page: plans on a grid of budgets." : "Every plan is the exact solver's answer."} ${facts.notes.map((note) => `Note: ${note}.`).join(" ")}`;
  $("axis").addEventListener("change", () => { pareto = { key: "", points: [] }; fillPareto(); });
  $("download").addEventListener("click", download);
  $("keep").addEventListener("click", () => keep(current));
  $("drop").addEventListener("click", () => { keep(null); $("keep").focus(); });
  $("return").addEventListener("click", () => { setForm(kept.choice); changed(); });
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText($(button.dataset.copy).textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
  addEventListener("resize", () => {
    if (current) showCurrent();
    if (kept) drawPlan($("then"), kept);
  });
  drawForm(firstChoice());
  changed();
}

start();
