// The whole page: where we are (in the address, so that it can be shared and gone back to), keys, and what follows what.
"use strict";
{
  const byId = (id) => document.getElementById(id);
  const at = { page: "samples", export: "", run: "", step: 0, sample: -1, token: -1 };
  let overview = null;
  let step = null;
  let sample = null;
  let shownKey = "";

  // ---------------------------------------------------------------- the address

  function address(to) {
    const parts = [to.page, to.export, to.run || "~", to.step];
    if (to.page === "samples" && to.sample >= 0) parts.push(to.sample);
    if (to.page === "samples" && to.sample >= 0 && to.token >= 0) parts.push(to.token);
    return "#/" + parts.map((part) => encodeURIComponent(part)).join("/");
  }

  function go(changes, replace) {
    const to = { ...at, ...changes };
    if (replace) history.replaceState(null, "", address(to));
    else location.hash = address(to);
    if (replace) Object.assign(at, to);
  }

  function parse() {
    const parts = location.hash.replace(/^#\//, "").split("/").map(decodeURIComponent);
    const first = overview.exports[0];
    const chosen = overview.exports.find((one) => one.name === parts[1]) || first;
    const run = chosen.runs.find((one) => one.run === (parts[2] === "~" ? "" : parts[2])) || chosen.runs[0];
    const number = (text, other) => (/^\d+$/.test(text || "") ? Number(text) : other);
    const last = run.steps[run.steps.length - 1] ?? 0;
    const wanted = number(parts[3], last);
    Object.assign(at, {
      page: ["samples", "step", "run"].includes(parts[0]) ? parts[0] : "samples",
      export: chosen.name,
      run: run.run,
      step: run.steps.includes(wanted) ? wanted : last,
      sample: number(parts[4], -1),
      token: number(parts[5], -1),
    });
    return run;
  }

  function notice(text) {
    byId("notice").hidden = !text;
    byId("notice").textContent = text || "";
  }

  // ---------------------------------------------------------------- the top bar

  function drawTop(run) {
    const word = run.run === "(evaluation)" ? "version " : "step ";
    const steps = run.steps.map((number) => [String(number), word + number]).reverse();
    const exports = overview.exports;
    const chosen = exports.find((one) => one.name === at.export);
    const tab = (page, text) =>
      ps.el("a", { href: address({ ...at, page }), class: at.page === page ? "on" : "", id: "tab-" + page }, text);
    const runs = chosen.runs.map((one) => [one.run, one.run === "" ? chosen.folder : one.run]);
    ps.fill(
      byId("top"),
      ps.el("span", { class: "brand" }, "penstock"),
      exports.length > 1
        ? ps.select(
            "export",
            "Export",
            exports.map((one) => [one.name, one.name]),
            at.export,
            (value) => go({ export: value, sample: -1, token: -1 }),
          )
        : null,
      runs.length > 1
        ? ps.select("run", "Run", runs, at.run, (value) => go({ run: value, sample: -1, token: -1 }))
        : ps.el("span", { class: "dim" }, runs[0][1]),
      ps.select("step", "Step", steps, String(at.step), (value) => go({ step: Number(value), sample: -1, token: -1 })),
      ps.el("nav", {}, tab("samples", "Samples"), tab("step", "Step"), tab("run", "Run")),
      ps.el("span", { class: "grow" }),
      overview.parting && overview.parting.step !== undefined
        ? ps.el("button", { type: "button", id: "parting", on: { click: openParting } }, "where they differ")
        : null,
      ps.el("button", { type: "button", id: "theme", title: "Light or dark  (t)", on: { click: theme } }, "◐"),
      ps.el("button", { type: "button", id: "show-help", title: "Keyboard  (?)", on: { click: help } }, "?"),
    );
  }

  function openParting() {
    const parting = overview.parting;
    go({
      page: "samples",
      export: parting.export,
      run: parting.run,
      step: parting.step,
      sample: parting.sample,
      token: parting.token ?? -1,
    });
  }

  function theme() {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    ps.tokens.paint({});
    ps.side.redraw();
    if (at.page !== "samples") showPage();
  }

  // ---------------------------------------------------------------- what is shown

  async function showStep() {
    step = await ps.source.step(at);
    ps.list.show(byId("list"), step.samples, (index) => go({ sample: index, token: -1 }));
  }

  async function showSample() {
    const wanted = address({ ...at, token: -1 });
    const opened = await ps.source.sample(at);
    if (address({ ...at, token: -1 }) !== wanted) return; // the reader has gone on meanwhile
    sample = opened;
    const holder = ps.el("div", { class: "holder" });
    byId("middle").replaceChildren(ps.bar.show(sample, at.sample), holder);
    ps.tokens.show(holder, sample, (token, settled) => {
      ps.side.token(token);
      if (settled) {
        at.token = token;
        history.replaceState(null, "", address(at));
        ps.side.settle();
      }
    });
    ps.side.show(
      byId("side"),
      sample,
      (token) => ps.tokens.go(token),
      () => sample === opened && ps.bar.repaint(),
    );
    ps.bar.repaint();
    ps.list.mark(at.sample);
  }

  async function showPage() {
    const page = byId("page");
    if (at.page === "step") {
      const found = await ps.source.step(at);
      ps.stepPage(page, found, (rank, micro) => {
        ps.list.only(rank, micro);
        shownKey = "";
        go({ page: "samples", sample: -1, token: -1 });
      });
    } else
      ps.runPage(page, await ps.source.run(at), (number) => go({ page: "step", step: number, sample: -1, token: -1 }));
  }

  function showFirst() {
    const first = ps.list.first();
    if (first >= 0) go({ sample: first, token: -1 }, true);
    return first >= 0;
  }

  async function follow() {
    const before = { ...at };
    const run = parse();
    notice(overview.parting ? overview.parting.sentence : "");
    drawTop(run);
    if (!run.steps.length) return notice("No finished step yet. Reload when one is.");
    const samples = at.page === "samples";
    for (const id of ["list", "middle", "side"]) byId(id).hidden = !samples;
    byId("page").hidden = samples;
    try {
      if (!samples) return await showPage();
      const key = [at.export, at.run, at.step].join("\n");
      const fresh = key !== shownKey;
      if (fresh) {
        shownKey = key;
        await showStep();
      }
      if (at.sample < 0 && !showFirst())
        return byId("middle").replaceChildren(ps.el("p", { class: "empty" }, "No sample here."));
      if (fresh || before.sample !== at.sample || !sample) await showSample();
      else if (before.page !== "samples") resized();
      if (at.token >= 0) ps.tokens.go(at.token);
    } catch (error) {
      notice(error.message);
    }
  }

  // ---------------------------------------------------------------- keys

  function jump(by, wanted) {
    const from = ps.tokens.cursor();
    for (let i = from + by; i >= 0 && i < sample.count; i += by) if (wanted(i)) return ps.tokens.go(i);
  }

  const isMasked = (i) => (ps.side.exported() || [])[i];
  const disagrees = (i) => Boolean(isMasked(i)) !== Boolean((ps.side.masks() || [])[i]);

  const KEYS = [
    [
      "←  →",
      "previous, next token",
      { ArrowLeft: () => ps.tokens.go(ps.tokens.cursor() - 1), ArrowRight: () => ps.tokens.go(ps.tokens.cursor() + 1) },
    ],
    [
      "↑  ↓",
      "line above, below",
      { ArrowUp: () => ps.tokens.go(ps.tokens.vertical(-1)), ArrowDown: () => ps.tokens.go(ps.tokens.vertical(1)) },
    ],
    ["Home  End", "first, last token", { Home: () => ps.tokens.go(0), End: () => ps.tokens.go(sample.count - 1) }],
    ["n  p", "next, previous masked token", { n: () => jump(1, isMasked), p: () => jump(-1, isMasked) }],
    ["d", "next token where the rule tried disagrees with training", { d: () => jump(1, disagrees) }],
    ["w", "worst token of the column shown", { w: () => ps.tokens.go(ps.bar.worst()) }],
    [
      "j  k",
      "next, previous sample",
      {
        j: () => go({ sample: ps.list.neighbour(1), token: -1 }),
        k: () => go({ sample: ps.list.neighbour(-1), token: -1 }),
      },
    ],
    ["[  ]", "previous, next step", { "[": () => neighbourStep(-1), "]": () => neighbourStep(1) }],
    ["c", "colour by the next column", { c: ps.bar.cycle }],
    [
      "1  2  3",
      "samples, step, run",
      { 1: () => go({ page: "samples" }), 2: () => go({ page: "step" }), 3: () => go({ page: "run" }) },
    ],
    ["/", "search samples", { "/": () => byId("search") && byId("search").focus() }],
    ["t", "light or dark", { t: theme }],
    ["?", "this list", { "?": help }],
  ];
  const ANYWHERE = new Set(["1", "2", "3", "[", "]", "t", "?"]);

  function neighbourStep(by) {
    const { steps } = overview.exports.find((one) => one.name === at.export).runs.find((one) => one.run === at.run);
    const next = steps[steps.indexOf(at.step) + by];
    if (next !== undefined) go({ step: next, sample: -1, token: -1 });
  }

  function help() {
    const dialog = byId("help");
    if (dialog.open) return dialog.close();
    dialog.replaceChildren(
      ps.el("h2", {}, "Keyboard"),
      ps.el(
        "table",
        {},
        ps.el(
          "tbody",
          {},
          ...KEYS.map(([keys, text]) =>
            ps.el("tr", {}, ps.el("th", { scope: "row" }, ps.el("kbd", {}, keys)), ps.el("td", {}, text)),
          ),
        ),
      ),
      ps.el(
        "p",
        { class: "dim small" },
        "Lines under tokens: what the loss masked, solid by the upper threshold, dashed by the lower, dotted without direction. Lines over tokens: the rule being tried. Dimmed tokens are context.",
      ),
      ps.el("button", { type: "button", on: { click: () => dialog.close() } }, "close"),
    );
    dialog.showModal();
  }

  function pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (byId("help").open && event.key !== "?") return;
    if (!ANYWHERE.has(event.key) && (at.page !== "samples" || !sample)) return;
    for (const [, , acts] of KEYS)
      if (acts[event.key]) {
        event.preventDefault();
        acts[event.key]();
        return;
      }
  }

  let resizing = 0;
  function resized() {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => {
      if (at.page !== "samples") return void showPage();
      ps.list.redraw();
      ps.tokens.resize();
      ps.side.redraw();
    });
  }

  async function start() {
    try {
      overview = await ps.source.overview();
    } catch (error) {
      return notice(error.message);
    }
    addEventListener("hashchange", follow);
    addEventListener("keydown", pressed);
    addEventListener("resize", resized);
    if (ps.source.isEmbedded && overview.start && !location.hash) history.replaceState(null, "", overview.start);
    if (overview.parting && !location.hash && overview.parting.step !== undefined) return openParting();
    await follow();
  }

  start();
}
