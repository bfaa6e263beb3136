// The page's router: keeps the state in the address, so that it can be shared, and shows the page for it.
"use strict";
{
  const PAGES = ["run", "step", "groups", "samples", "prompts", "dropped"];
  const REFRESH_MS = 3000; // least time between two requests for the table of a running run
  const byId = (id) => document.getElementById(id);
  const at = { page: "samples", export: "", run: "", step: 0, sample: -1, token: -1 };
  let query = new URLSearchParams();
  let overview = null;
  let step = null;
  let sample = null;
  let shownKey = "";
  let here = ""; // the address as this script last read or wrote it

  // ---------------------------------------------------------------- the address

  function address(to) {
    const parts = [to.page, to.export, to.run || "~", to.step];
    if (to.page === "samples" && to.sample >= 0) parts.push(to.sample);
    if (to.page === "samples" && to.sample >= 0 && to.token >= 0) parts.push(to.token);
    const asked = query.toString();
    return "#/" + parts.map((part) => encodeURIComponent(part)).join("/") + (asked ? "?" + asked : "");
  }

  function go(changes, replace) {
    const to = { ...at, ...changes };
    if (!replace) return void (location.hash = address(to));
    Object.assign(at, to);
    write();
  }

  // Write the choice to the address, unless the reader has already navigated: then `hashchange` is on its way.
  function write() {
    if (location.hash !== here) return;
    history.replaceState(null, "", address(at));
    here = location.hash;
  }

  // The choices made on a page. They are part of the address.
  ps.query = {
    get: (name) => query.get(name),
    set(changes) {
      for (const [name, value] of Object.entries(changes))
        if (value === null || value === undefined || value === "") query.delete(name);
        else query.set(name, value);
      if (at.export) write();
    },
    // Set them as a new entry of the history, so that the back button returns.
    open(changes) {
      history.pushState(null, "", location.hash);
      ps.query.set(changes);
      follow();
    },
  };

  function pageOf(name, run) {
    if (PAGES.includes(name) || (name === "runs" && overview.is_many)) return name;
    if (overview.is_many) return "runs";
    return ps.source.isEmbedded && run.steps.length ? "samples" : "run";
  }

  function parse() {
    here = location.hash;
    const [path, asked] = location.hash.replace(/^#\//, "").split("?");
    query = new URLSearchParams(asked || "");
    const parts = path.split("/").map(decodeURIComponent);
    const first = overview.exports[0];
    const chosen = overview.exports.find((one) => one.name === parts[1]) || first;
    const run = chosen.runs.find((one) => one.run === (parts[2] === "~" ? "" : parts[2])) || chosen.runs[0];
    const number = (text, other) => (/^\d+$/.test(text || "") ? Number(text) : other);
    const last = run.steps[run.steps.length - 1] ?? 0;
    const wanted = number(parts[3], last);
    Object.assign(at, {
      page: pageOf(parts[0], run),
      export: chosen.name,
      run: run.run,
      step: run.steps.includes(wanted) ? wanted : last,
      sample: number(parts[4], -1),
      token: number(parts[5], -1),
    });
    return run;
  }

  const runNow = () => overview.exports.find((one) => one.name === at.export).runs.find((one) => one.run === at.run);

  function notice(text) {
    byId("notice").hidden = !text;
    byId("notice").textContent = text || "";
  }

  const drawTop = () =>
    ps.top.draw(byId("top"), { at, overview, run: runNow(), address, go, toggleList, openDifference, theme, followNewest });

  // Follow the newest step as steps arrive, or stay.
  function followNewest(isOn) {
    ps.query.set({ follow: isOn ? "1" : null });
    const { steps } = runNow();
    const newest = steps[steps.length - 1];
    if (isOn && newest !== at.step) go({ step: newest, sample: -1, token: -1 });
    else drawTop();
  }

  const toggleList = () => document.body.classList.toggle("listing");

  // Where two compared runs first differ.
  function differencePlace() {
    const { export: name, run, step: number, sample: index, token } = overview.difference;
    return { page: "samples", export: name, run, step: number, sample: index ?? -1, token: token ?? -1 };
  }

  const openDifference = () => go(differencePlace());

  function theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    ps.tokens.paint({});
    ps.side.redraw();
    if (at.page !== "samples") showPage();
  }

  // ---------------------------------------------------------------- what is shown

  async function showStep(key) {
    const found = await ps.source.step(at);
    if (key !== shownKey) return; // the reader opened another step meanwhile
    step = found;
    ps.filters.prepare(step.samples);
    ps.list.show(byId("list"), step.samples, at, (index) => {
      document.body.classList.remove("listing");
      go({ sample: index, token: ps.filters.hit(index) });
    });
  }

  // The same sample of the other run, where two are compared.
  async function counterpart(row) {
    if (!overview.difference || overview.exports.length < 2 || !row || !row.sample_id) return null;
    const there = overview.exports.find((one) => one.name !== at.export);
    const run = there.runs.find((one) => one.run === at.run) || there.runs[0];
    if (!run.steps.includes(at.step)) return null;
    const place = { export: there.name, run: run.run, step: at.step };
    const found = (await ps.source.step(place)).samples.find((one) => one.sample_id === row.sample_id);
    return found ? { ...(await ps.source.sample({ ...place, sample: found.index })), home: there.folder } : null;
  }

  async function showSample() {
    const wanted = address({ ...at, token: -1 });
    const row = step.samples.find((one) => one.index === at.sample);
    const [opened, twin] = await Promise.all([ps.source.sample(at), counterpart(row)]);
    if (address({ ...at, token: -1 }) !== wanted) return; // the reader opened another sample meanwhile
    opened.home = overview.exports.find((one) => one.name === at.export).folder;
    const isFirst = at.export === overview.exports[0].name;
    const [a, b] = isFirst ? [opened, twin] : [twin, opened];
    sample = a || b;
    const holder = ps.el("div", { class: "holder" });
    byId("middle").replaceChildren(ps.bar.show(sample, at.sample, row, step.scales, openGroup), holder);
    const tell = (token, settled) => {
      ps.side.token(token);
      if (!settled) return;
      go({ token }, true);
      ps.side.settle(token);
    };
    if (overview.difference) ps.compare.show(holder, a, b, tell);
    else {
      ps.compare.end();
      ps.tokens.show(holder, sample, tell);
    }
    const shown = sample;
    ps.side.show(
      byId("side"),
      shown,
      a && b,
      (token) => ps.tokens.go(token),
      () => sample === shown && ps.bar.repaint(),
    );
    ps.bar.repaint();
    ps.list.mark(at.sample);
  }

  function openGroup(group) {
    query.set("group", group);
    go({ page: "groups" });
  }

  function openSample(index, token) {
    go({ page: "samples", sample: index, token: token ?? -1 });
  }

  function otherRuns() {
    return overview.exports.flatMap((one) =>
      one.runs
        .filter((run) => run.run !== "(evaluation)" && !(one.name === at.export && run.run === at.run))
        .map((run) => ({
          key: one.name + "/" + run.run,
          name: overview.exports.length > 1 ? [one.name, run.run].filter(Boolean).join(" ") : run.run || one.folder,
          at: { export: one.name, run: run.run },
        })),
    );
  }

  function openNearest(wanted) {
    const { steps } = runNow();
    if (!steps.length) return;
    const near = steps.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    go({ page: "step", step: near, sample: -1, token: -1 });
  }

  function openRun(run, others) {
    query = new URLSearchParams();
    if (others.length) query.set("with", others.map(encodeURIComponent).join(","));
    const steps = overview.exports.find((one) => one.name === run.export).runs.find((one) => one.run === run.run).steps;
    go({ page: "run", export: run.export, run: run.run, step: steps[steps.length - 1] ?? 0, sample: -1, token: -1 });
  }

  async function loadPrompts() {
    const gone = (step) => `Step ${step} cannot be opened: it was not exported, and its frames are freed.`;
    const open = (step) =>
      runNow().steps.includes(step) ? go({ page: "groups", step, sample: -1, token: -1 }) : notice(gone(step));
    const of = ps.query.get("of");
    if (of) {
      const name = (ps.query.get("name") || "=").slice(1);
      const found = await ps.source.overSteps(at, of, name);
      return (page) => ps.overSteps(page, found, of, name, open);
    }
    const found = await ps.source.history(at);
    return (page) => ps.promptsPage(page, found, open);
  }

  async function loadRun(place) {
    const [others, words] = [otherRuns(), ps.top.stateOf(runNow())[1]];
    const runs = await ps.runPage.load(place, others);
    return (page) => ps.runPage.show(page, runs, others, words, openNearest);
  }

  function openMicroBatch(rank, micro) {
    ps.query.set({ rank, micro });
    shownKey = "";
    go({ page: "samples", sample: -1, token: -1 });
  }

  // Ask for what the page shows. Returns the function that draws it.
  async function loadPage(place) {
    if (place.page === "run") return loadRun(place);
    if (place.page === "prompts") return loadPrompts();
    if (place.page === "runs") {
      const found = await ps.source.runs();
      return (page) => ps.runsPage(page, found, openRun);
    }
    if (place.page === "dropped") {
      const found = await ps.source.dropped(place);
      return (page) => ps.droppedPage(page, found, place);
    }
    const words = ps.top.stateOf(runNow())[1];
    if (!runNow().steps.length) return (page) => ps.fill(page, ps.el("p", { class: "empty" }, words));
    const found = await ps.source.step(place);
    if (place.page === "groups") return (page) => ps.groupsPage(page, found, place, openSample);
    return (page) => ps.stepPage(page, found, place, openMicroBatch);
  }

  let asked = 0; // pages asked for so far

  // Draw the page, unless the reader opens another one before its data arrives.
  async function showPage() {
    const mine = ++asked;
    let draw = null;
    try {
      draw = await loadPage({ ...at });
    } catch (error) {
      if (mine === asked) throw error;
    }
    if (mine === asked) draw(byId("page"));
  }

  async function showSamples(before) {
    const key = [at.export, at.run, at.step].join("\n");
    const fresh = key !== shownKey;
    if (fresh) {
      byId("middle").setAttribute("aria-busy", "true");
      shownKey = key;
      await showStep(key);
      if (key !== shownKey) return;
      byId("middle").removeAttribute("aria-busy");
    }
    const first = at.sample < 0 ? ps.list.first() : at.sample;
    if (first < 0) return byId("middle").replaceChildren(ps.el("p", { class: "empty" }, "No sample here."));
    const chosen = at.token >= 0;
    if (at.sample < 0) go({ sample: first, token: ps.filters.hit(first) }, true);
    if (fresh || before.sample !== at.sample || !sample) await showSample();
    else if (before.page !== "samples") resized();
    if (chosen || at.token >= 0) ps.tokens.go(at.token);
    else ps.tokens.go(Math.max(ps.bar.worst(), 0));
  }

  async function follow() {
    const before = { ...at };
    parse();
    if (!location.hash) write();
    notice(overview.difference ? overview.difference.sentence : "");
    drawTop();
    document.body.dataset.page = at.page;
    const isSamples = at.page === "samples" && runNow().steps.length > 0;
    for (const id of ["list", "middle", "side"]) byId(id).hidden = !isSamples;
    byId("page").hidden = isSamples;
    try {
      if (!isSamples) await showPage();
      else {
        asked += 1;
        await showSamples(before);
      }
    } catch (error) {
      shownKey = "";
      notice(error.message);
    }
  }

  // ---------------------------------------------------------------- news

  let refreshed = 0;
  let waiting = 0;

  // Reload the table on the page, unless the reader is typing in it or it has just changed.
  function refresh() {
    clearTimeout(waiting);
    const rest = refreshed + REFRESH_MS - Date.now();
    const isBusy = document.activeElement.matches("#page input:not([type=checkbox]), #page select");
    if (rest > 0 || isBusy) return void (waiting = setTimeout(refresh, Math.max(rest, 1000)));
    if (!["runs", "prompts", "dropped"].includes(at.page)) return;
    refreshed = Date.now();
    const { scrollTop } = byId("page");
    showPage().then(() => (byId("page").scrollTop = scrollTop), (error) => notice(error.message));
  }

  function onOverview(news) {
    if (!news.exports.length) return void notice("There is no run in this folder any longer.");
    const before = runNow();
    overview = { ...news, difference: overview.difference };
    const chosen = overview.exports.find((one) => one.name === at.export);
    if (!chosen || !chosen.runs.some((run) => run.run === at.run)) return void follow();
    const run = runNow();
    const newest = run.steps[run.steps.length - 1];
    // When the first step is exported, the plane's own steps are replaced by exported ones.
    const isFirst = run.steps.length > 0 && !run.steps.includes(at.step);
    const isNew = ps.query.get("follow") === "1" && newest !== undefined && newest !== at.step;
    if (isFirst) at.step = newest;
    if (run.steps.length !== before.steps.length || newest !== before.steps[before.steps.length - 1]) {
      ps.source.forgetRun(at);
      if (at.page === "run") ps.runPage.stepped(at);
    }
    if (run.events !== before.events && at.page === "run") ps.runPage.happened(at);
    drawTop();
    sayState();
    if (["runs", "prompts", "dropped"].includes(at.page)) refresh();
    if (isNew) go({ step: newest, sample: -1, token: -1 });
    else if (isFirst && at.page !== "run") follow();
  }

  // A run has just trained a step and written its metrics.
  function onRows(news) {
    const { export: name, run } = news;
    const found = overview.exports.find((one) => one.name === name)?.runs.find((one) => one.run === run);
    if (found) found.last = Date.now() / 1000;
    sayState();
    ps.runPage.add(news);
  }

  function sayState() {
    const [, words, age] = ps.top.stateOf(runNow());
    if (byId("state")) byId("state").textContent = words;
    if (byId("age")) byId("age").textContent = age;
  }

  const onLine = () => {
    drawTop();
    sayState();
  };

  // ---------------------------------------------------------------- keys

  function jump(by, wanted) {
    for (let i = ps.tokens.cursor() + by; i >= 0 && i < sample.count; i += by) if (wanted(i)) return ps.tokens.go(i);
  }

  const isMasked = (i) => (ps.side.exported() || [])[i];
  const disagrees = (i) => Boolean(isMasked(i)) !== Boolean((ps.side.masks() || [])[i]);
  const move = (by) => () => ps.tokens.go(ps.tokens.cursor() + by);
  const neighbour = (by) => () => go({ sample: ps.list.neighbour(by), token: -1 });
  const page = (name) => () => go({ page: name });

  function neighbourStep(by) {
    const { steps } = runNow();
    const next = steps[steps.indexOf(at.step) + by];
    if (next !== undefined) go({ step: next, sample: -1, token: -1 });
  }

  const KEYS = [
    ["←  →", "previous, next token", { ArrowLeft: move(-1), ArrowRight: move(1) }],
    [
      "↑  ↓",
      "line above, below",
      { ArrowUp: () => ps.tokens.go(ps.tokens.vertical(-1)), ArrowDown: () => ps.tokens.go(ps.tokens.vertical(1)) },
    ],
    ["Home  End", "first, last token", { Home: () => ps.tokens.go(0), End: () => ps.tokens.go(sample.count - 1) }],
    ["n  p", "next, previous masked token", { n: () => jump(1, isMasked), p: () => jump(-1, isMasked) }],
    ["d", "next token where the rule tried disagrees with training", { d: () => jump(1, disagrees) }],
    ["w", "worst token of the column shown", { w: () => ps.tokens.go(ps.bar.worst()) }],
    ["j  k", "next, previous sample", { j: neighbour(1), k: neighbour(-1) }],
    ["[  ]", "previous, next step", { "[": () => neighbourStep(-1), "]": () => neighbourStep(1) }],
    ["c", "colour by the next column", { c: ps.bar.cycle }],
    ["l", "list of samples, on a narrow screen", { l: toggleList }],
    [
      "1 … 6",
      "run, step, groups, samples, prompts, dropped",
      Object.fromEntries(PAGES.map((name, i) => [String(i + 1), page(name)])),
    ],
    ["0", "table of runs, for a folder of runs", { 0: () => overview.is_many && go({ page: "runs" }) }],
    ["f", "follow the newest step, while the run is running", { f: () => followNewest(ps.query.get("follow") !== "1") }],
    ["/", "search", { "/": () => byId("search") && byId("search").focus() }],
    ["t", "light or dark", { t: theme }],
  ];

  let resizing = 0;
  function resized() {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => {
      if (at.page === "run") return void ps.runPage.redraw();
      if (["step", "prompts", "runs"].includes(at.page)) return void showPage();
      if (at.page !== "samples") return;
      ps.list.redraw();
      ps.tokens.resize();
      ps.compare.resize();
      ps.side.redraw();
    });
  }

  async function start() {
    try {
      overview = await ps.source.overview();
    } catch (error) {
      return notice(error.message);
    }
    ps.runPage.again = follow;
    addEventListener("hashchange", follow);
    addEventListener("resize", resized);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => resized());
    ps.keys.start(KEYS, () => at.page === "samples" && sample);
    if (ps.source.isEmbedded && overview.start && !location.hash) history.replaceState(null, "", overview.start);
    if (overview.difference && !location.hash && overview.difference.step !== undefined)
      history.replaceState(null, "", address(differencePlace()));
    await follow();
    setInterval(sayState, 5000); // ages grow
    ps.live.start({ overview: onOverview, rows: onRows, line: onLine });
  }

  start();
}
