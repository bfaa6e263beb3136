// The run page: every number over steps, one cursor through all charts, several runs over one another.
"use strict";
{
  let charts = []; // { title, lines, canvas, read, box, scale, rule }
  let shown = []; // runs: { at, name, found }
  let page = null;
  let open = () => {};
  let full = [0, 1];
  let cursor = NaN;

  const state = {
    smooth: () => Number(ps.query.get("smooth") || 0),
    isLog: () => ps.query.get("log") === "1",
    range() {
      const [low, high] = (ps.query.get("range") || "").split("-").map(Number);
      return high > low ? [low, high] : full;
    },
    over: () => (ps.query.get("with") || "").split(",").filter(Boolean).map(decodeURIComponent),
  };

  const nameOf = (at) => (at.run === "" ? at.export : at.run);

  function merged() {
    const out = new Map();
    shown.forEach((run, r) => {
      for (const chart of ps.curvesOf(run.found)) {
        const kept = out.get(chart.title) || { ...chart, lines: [] };
        chart.lines.forEach((line, i) => kept.lines.push({ ...line, run: run.name, colour: r * 3 + i }));
        out.set(chart.title, kept);
      }
    });
    return [...out.values()];
  }

  function limits(found) {
    return ps.extent(found.flatMap((chart) => chart.lines.flatMap(({ xs }) => ps.extent(xs, []))), [0, 1]);
  }

  // ---------------------------------------------------------------- one chart

  function series(chart) {
    const colours = ps.palette().lines;
    const amount = state.smooth();
    return chart.lines.flatMap((line) => {
      const colour = colours[line.colour % colours.length];
      const raw = { ...line, colour };
      return amount > 0
        ? [
            { ...raw, faint: true },
            { ...raw, ys: ps.smoothed(line.ys, amount) },
          ]
        : [raw];
    });
  }

  function draw(chart) {
    if (chart.canvas.clientWidth) {
      chart.scale = ps.drawLines(chart.canvas, series(chart), state.range(), state.isLog());
      ps.fill(chart.marks, ...ps.eventMarks(shown[0].found.events || [], chart.scale, state.range(), full[1]));
    }
    const last = chart.lines[0] && [...chart.lines[0].ys].reverse().find(Number.isFinite);
    chart.canvas.setAttribute(
      "aria-label",
      chart.title + " over steps " + full[0] + " to " + full[1] + ", latest " + ps.number(last ?? NaN),
    );
    point(chart);
  }

  // The values at the cursor, or the latest ones, beside the names of the lines.
  function point(chart) {
    const colours = ps.palette().lines;
    const many = chart.lines.length > 1 || chart.named;
    const values = chart.lines.map((line) => {
      const known = line.xs.length > 0;
      let i = Number.isNaN(cursor) ? line.xs.length - 1 : ps.nearest(line.xs, cursor);
      while (known && Number.isNaN(cursor) && i > 0 && !Number.isFinite(line.ys[i])) i -= 1;
      const value = ps.el("b", {}, known ? chart.format(line.ys[i]) : "–");
      if (!many) return ps.el("span", { class: "key" }, value);
      const dot = ps.el("i", {});
      dot.style.background = colours[line.colour % colours.length];
      const alone = new Set(chart.lines.map((other) => other.run)).size === chart.lines.length;
      const name = shown.length < 2 ? line.label : line.run + (alone ? "" : " " + line.label);
      return ps.el("span", { class: "key" }, dot, ps.visible(name), value);
    });
    ps.fill(chart.read, ...values);
    const hidden = Number.isNaN(cursor) || !chart.scale;
    const x = hidden ? 0 : chart.scale.x(cursor);
    chart.rule.hidden = hidden || x < chart.scale.left - 1 || x > chart.scale.right + 1;
    chart.rule.style.left = x + "px";
  }

  function moveTo(step) {
    cursor = step;
    for (const chart of charts) point(chart);
    const at = document.getElementById("at-step");
    if (at) at.textContent = Number.isNaN(step) ? "latest values" : "step " + step;
  }

  function stepAt(chart, event) {
    const x = event.clientX - chart.canvas.getBoundingClientRect().left;
    const xs = chart.lines[0].xs;
    return xs.length ? xs[ps.nearest(xs, chart.scale.back(x))] : NaN;
  }

  function listen(chart) {
    const { canvas, band } = chart;
    let from = null;
    canvas.addEventListener("pointermove", (event) => {
      moveTo(stepAt(chart, event));
      if (from === null) return;
      const x = event.clientX - canvas.getBoundingClientRect().left;
      band.hidden = Math.abs(x - from) < 5;
      band.style.left = Math.min(x, from) + "px";
      band.style.width = Math.abs(x - from) + "px";
    });
    canvas.addEventListener("pointerleave", () => from === null && moveTo(NaN));
    canvas.addEventListener("pointerdown", (event) => {
      from = event.clientX - canvas.getBoundingClientRect().left;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      const x = event.clientX - canvas.getBoundingClientRect().left;
      const far = from !== null && Math.abs(x - from) > 5;
      band.hidden = true;
      const [a, b] = [from, x].map((px) => Math.round(chart.scale.back(px))).sort((p, q) => p - q);
      from = null;
      if (!far) return open(stepAt(chart, event));
      if (b > a) zoom([Math.max(a, full[0]), Math.min(b, full[1])]);
    });
    canvas.addEventListener("dblclick", () => zoom(null));
    canvas.addEventListener("keydown", (event) => {
      const xs = chart.lines[0].xs;
      const i = Number.isNaN(cursor) ? xs.length - 1 : ps.nearest(xs, cursor);
      const next = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: xs.length - 1 }[event.key];
      if (next !== undefined) moveTo(xs[Math.max(0, Math.min(xs.length - 1, next))]);
      else if (event.key === "Enter") open(xs[i]);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  function zoom(range) {
    ps.query.set({ range: range ? range.join("-") : null });
    redraw();
  }

  function panel(found) {
    const canvas = ps.el("canvas", { data: { curve: found.title }, tabIndex: 0, role: "img" });
    const chart = { ...found, canvas, read: ps.el("div", { class: "keys" }) };
    chart.rule = ps.el("i", { class: "rule", hidden: true });
    chart.band = ps.el("i", { class: "band", hidden: true });
    chart.marks = ps.el("div", { class: "marks" });
    chart.element = ps.el(
      "section",
      { class: "panel chart" },
      ps.el("div", { class: "head" }, ps.el("h2", {}, found.title), ps.el("span", { class: "dim small" }, found.note)),
      chart.read,
      ps.el("div", { class: "canvas" }, canvas, chart.rule, chart.band, chart.marks),
    );
    listen(chart);
    return chart;
  }

  // ---------------------------------------------------------------- export

  function save(name, blob) {
    const link = ps.el("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function csv() {
    const quoted = (text) => (/[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text);
    const lines = charts.flatMap((chart) => chart.lines.map((line) => ({ ...line, title: chart.title })));
    const head = lines.map((line) =>
      quoted((shown.length > 1 ? line.run + " " : "") + line.title + " / " + line.label),
    );
    const steps = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
    const tables = lines.map((line) => new Map(line.xs.map((x, i) => [x, line.ys[i]])));
    const rows = steps.map((step) =>
      [step, ...tables.map((table) => (Number.isFinite(table.get(step)) ? table.get(step) : ""))].join(","),
    );
    save(
      shown[0].name + ".csv",
      new Blob([["step", ...head].join(",") + "\n" + rows.join("\n") + "\n"], { type: "text/csv" }),
    );
  }

  function png() {
    const ratio = window.devicePixelRatio || 1;
    const drawn = charts.filter((chart) => chart.canvas.clientWidth);
    const wide = Math.max(...drawn.map((chart) => chart.canvas.width));
    const tall = Math.max(...drawn.map((chart) => chart.canvas.height)) + 26 * ratio;
    const across = Math.min(3, drawn.length);
    const sheet = ps.el("canvas", { width: wide * across, height: tall * Math.ceil(drawn.length / across) });
    const pen = sheet.getContext("2d");
    const colour = ps.palette();
    pen.fillStyle = colour.paper;
    pen.fillRect(0, 0, sheet.width, sheet.height);
    pen.font = 600 + " " + 13 * ratio + "px system-ui, sans-serif";
    pen.fillStyle = colour.text;
    drawn.forEach((chart, i) => {
      const [x, y] = [(i % across) * wide, Math.floor(i / across) * tall];
      pen.fillText(chart.title, x + 10 * ratio, y + 18 * ratio);
      pen.drawImage(chart.canvas, x, y + 26 * ratio);
    });
    sheet.toBlob((blob) => save(shown[0].name + ".png", blob));
  }

  // ---------------------------------------------------------------- the page

  function controls(others) {
    const set = (changes) => {
      ps.query.set(changes);
      redraw();
    };
    const slider = { type: "range", id: "smooth", min: "0", max: "0.98", step: "0.02", value: String(state.smooth()) };
    const smooth = ps.input(slider, (value) => set({ smooth: Number(value) || null }));
    const over = others.map((other) => {
      const choose = (isOn) => {
        const now = state.over().filter((key) => key !== other.key);
        if (isOn) now.push(other.key);
        ps.query.set({ with: now.map(encodeURIComponent).join(",") || null });
        ps.runPage.again();
      };
      return ps.check(ps.visible(other.name), state.over().includes(other.key), choose, { data: { run: other.key } });
    });
    return ps.el(
      "div",
      { class: "controls tools" },
      ps.el("label", {}, "smoothing", smooth),
      ps.check("logarithmic", state.isLog(), (isOn) => set({ log: isOn ? "1" : null }), { id: "log" }),
      ps.button("all steps", () => zoom(null), { id: "whole" }),
      ps.button("CSV", csv, { id: "csv" }),
      ps.button("PNG", png, { id: "png" }),
      ps.el("span", { class: "dim", id: "at-step" }, "latest values"),
      over.length ? together(over) : null,
    );
  }

  // Boxes for the other runs to draw with this one. Many are collapsed.
  function together(over) {
    const chosen = state.over().length;
    if (over.length < 6)
      return ps.el("fieldset", { class: "over" }, ps.el("legend", {}, "together with"), ...over);
    const summary = ps.el("summary", {}, `together with ${chosen} of ${ps.number(over.length)} runs`);
    return ps.el("details", { class: "chooser", id: "together" }, summary, ps.el("div", {}, ...over));
  }

  function redraw() {
    for (const chart of charts) draw(chart);
    const zoomed = state.range() !== full;
    const all = document.getElementById("whole");
    if (all) all.hidden = !zoomed;
  }

  function fill() {
    const all = merged();
    full = limits(all);
    const flat = all.filter(ps.isConstant);
    const found = [...all.filter((one) => !flat.includes(one)), ...flat];
    const moving = found.length - flat.length;
    const same =
      charts.length &&
      found.length === charts.length &&
      moving === charts.moving &&
      found.every((one, i) => one.title === charts[i].title);
    if (same) found.forEach((one, i) => (charts[i].lines = one.lines));
    else {
      charts = found.map(panel);
      charts.moving = moving;
      const elements = charts.map((chart) => chart.element);
      ps.fill(page.querySelector(".curves"), ...elements.slice(0, moving));
      ps.fill(page.querySelector("#constant .curves"), ...elements.slice(moving));
      const count = flat.length === 1 ? "1 chart" : ps.number(flat.length) + " charts";
      page.querySelector("#constant summary").textContent = count + " with constant values";
      page.querySelector("#constant").hidden = !flat.length;
    }
    ps.eventList(page.querySelector("#events"), shown[0].found.events || []);
    page.querySelector(".tools").hidden = !charts.length;
    page.querySelector("#verdict").textContent = ps.verdictOf(shown[0].found);
    page.querySelector(".said").textContent = charts.length
      ? "Drag over a chart to look closer, double-click to see all. A click opens the nearest step that can be opened."
      : "No number yet: the curves begin when the first step is trained.";
    redraw();
  }

  const isDrawn = () => page && !page.hidden && page.querySelector(".curves");
  const find = ({ export: name, run }) => shown.find((one) => one.at.export === name && one.at.run === run);

  function opened(event) {
    ps.query.set({ constant: event.target.open ? "1" : null });
    redraw();
  }

  ps.runPage = {
    // Ask for a run, and for those chosen to be shown with it; `others` are all runs there are.
    load(at, others) {
      const wanted = others.filter((other) => state.over().includes(other.key));
      const load = async (one) => ({ at: one, name: nameOf(one), found: await ps.source.run(one) });
      return Promise.all([at, ...wanted.map((other) => other.at)].map(load));
    },
    show(element, runs, others, words, opens) {
      open = opens;
      shown = runs;
      for (const run of runs) ps.live.follow(run.at, run.found.at);
      page = element;
      charts = [];
      ps.fill(
        element,
        ps.el("p", { class: "state", id: "state", role: "status" }, words),
        ps.el("p", { id: "verdict" }),
        controls(others),
        ps.el("details", { id: "events", hidden: true }),
        ps.el(
          "details",
          { id: "settings", hidden: !runs[0].found.settings },
          ps.el("summary", {}, "settings of its plane"),
          ps.el("pre", {}, runs[0].found.settings || ""),
        ),
        ps.el("p", { class: "dim small said" }),
        ps.el("div", { class: "curves" }),
        ps.el(
          "details",
          { id: "constant", hidden: true, open: ps.query.get("constant") === "1", on: { toggle: opened } },
          ps.el("summary", {}),
          ps.el("div", { class: "curves" }),
        ),
      );
      fill();
    },
    // A run, maybe one that is shown, has new rows.
    add(news) {
      const one = find(news);
      if (one) one.found.metrics = ps.mergeRows(one.found.metrics, news.metrics);
      if (isDrawn()) fill();
    },
    // The run has new exported steps.
    async stepped(at) {
      const one = find(at);
      if (!one) return;
      const known = one.found.steps;
      const first = known.length ? known[known.length - 1].step + 1 : 0;
      known.push(...(await ps.source.points(one.at, first)).steps.filter((point) => point.step >= first));
      if (isDrawn()) fill();
    },
    // The run has new events.
    async happened(at) {
      const one = find(at);
      if (!one) return;
      one.found.events = await ps.source.events(one.at);
      if (isDrawn()) fill();
    },
    redraw: () => page && page.querySelector(".curves") && redraw(),
    again: () => {},
  };
}
