// The step page and the run page: what was packed and trained in a step, and how a run went over its steps.
"use strict";
{
  function card(title, value, note) {
    return ps.el(
      "div",
      { class: "card" },
      ps.el("span", { class: "dim" }, title),
      ps.el("b", {}, value),
      note ? ps.el("span", { class: "dim small" }, note) : null,
    );
  }

  function panel(title, note, ...children) {
    return ps.el(
      "section",
      { class: "panel" },
      ps.el("h2", {}, title),
      note ? ps.el("p", { class: "dim small" }, note) : null,
      ...children,
    );
  }

  // A title with the latest value beside it, and below them what is drawn and between which values.
  function plot(title, note, points, canvas) {
    const known = points.filter((point) => Number.isFinite(point.y));
    const every = known.flatMap((point) => [point.low ?? point.y, point.high ?? point.y]);
    const latest = known.length ? ps.number(known[known.length - 1].y) : "–";
    const between = every.length ? ps.number(Math.min(...every)) + " … " + ps.number(Math.max(...every)) : "";
    return ps.el(
      "section",
      { class: "panel" },
      ps.el("div", { class: "head" }, ps.el("h2", {}, title), ps.el("b", {}, latest)),
      ps.el("div", { class: "head dim small" }, ps.el("span", {}, note), ps.el("span", {}, between)),
      canvas,
    );
  }

  // What the ranks compute, and what of it is samples: padding and waiting for the longest rank are the rest.
  function waste(grid) {
    const slots = Math.max(...grid.map((rank) => rank.micro_batches.length), 0);
    let room = 0;
    for (let m = 0; m < slots; m++)
      room += grid.length * Math.max(...grid.map((rank) => (rank.micro_batches[m] || { tokens: 0 }).tokens));
    const batches = grid.flatMap((rank) => rank.micro_batches);
    const padding = batches.reduce((sum, batch) => sum + batch.padding, 0);
    const tokens = batches.reduce((sum, batch) => sum + batch.tokens - batch.padding, 0);
    return { room, padding, tokens, slots, samples: batches.reduce((sum, batch) => sum + batch.samples.length, 0) };
  }

  ps.stepPage = function (element, found, open) {
    const { summary, samples, grid } = found;
    const packed = waste(grid);
    const canvas = (id) => ps.el("canvas", { id });
    const drawn = {
      grid: canvas("grid"),
      reward: canvas("rewards"),
      length: canvas("lengths"),
      kl: canvas("kls"),
      stale: canvas("stale"),
    };
    const masked = summary.masked_fraction.is_masked;
    ps.fill(
      element,
      ps.el(
        "div",
        { class: "cards" },
        card(
          "samples",
          ps.number(samples.length),
          packed.samples > samples.length ? "of " + ps.number(packed.samples) + " trained" : "",
        ),
        card("tokens", ps.number(summary.tokens), ps.number(summary.loss_tokens) + " trained"),
        card(
          "reward",
          ps.number(summary.reward && summary.reward.mean),
          summary.reward ? "mean of " + ps.number(summary.reward.count) : "none",
        ),
        card(
          "mismatch KL",
          ps.number(summary.mismatch_kl && summary.mismatch_kl.mean),
          "max " + ps.number(summary.mismatch_kl && summary.mismatch_kl.max),
        ),
        card(
          "entropy",
          ps.number(summary.entropy && summary.entropy.mean),
          "max " + ps.number(summary.entropy && summary.entropy.max),
        ),
        card(
          "masked",
          masked === undefined ? "–" : ps.percent(masked, 1),
          ps.number(summary.masked.is_masked) + " tokens",
        ),
        card(
          "waste",
          ps.percent(packed.room - packed.tokens, packed.room),
          ps.number(packed.padding) + " padding, rest waiting",
        ),
      ),
      grid.length
        ? panel(
            "Packed grid",
            "Ranks down, micro-steps across. Blocks are samples, hatching is padding, the empty rest is waiting. Click a micro-batch for its samples.",
            drawn.grid,
          )
        : panel("Packed grid", "This export has no markers, so how it was packed is not known."),
      ps.el(
        "div",
        { class: "two" },
        panel("Rewards", "per sample", drawn.reward),
        panel("Lengths", "tokens", drawn.length),
        panel("Worst mismatch KL", "per sample, logarithmic", drawn.kl),
        panel("Staleness", "policy versions", drawn.stale),
      ),
      found.skipped ? ps.el("p", { class: "dim" }, found.skipped + " malformed lines were skipped.") : null,
    );
    const values = (key) => samples.map((row) => (row[key] === null ? NaN : row[key]));
    if (grid.length) ps.grid(drawn.grid, grid, { onPick: open });
    ps.histogram(drawn.reward, values("reward"), { height: 120, label: "rewards" });
    ps.histogram(drawn.length, values("tokens"), { height: 120, label: "lengths" });
    ps.histogram(drawn.kl, values("max_kl"), {
      height: 120,
      transform: (v) => Math.log10(Math.max(v, 1e-9)),
      format: (v) => ps.number(Number((10 ** v).toPrecision(2))),
      label: "worst mismatch KL",
    });
    ps.histogram(drawn.stale, values("staleness"), { height: 120, label: "staleness" });
  };

  const spread = (name) => (point) =>
    point[name] && { y: point[name].mean, low: point[name].min, high: point[name].max };
  const mean = (name) => (point) => point[name] && { y: point[name].mean };
  const worst = (name) => (point) => point[name] && { y: point[name].max };
  const plain = (name) => (point) => ({ y: point[name] ?? NaN });

  const CURVES = [
    ["Reward", "mean", mean("reward")],
    ["Mismatch KL", "mean over trained tokens", mean("mismatch_kl")],
    ["Worst mismatch KL", "maximum", worst("mismatch_kl")],
    ["Entropy", "mean over trained tokens", mean("entropy")],
    ["Masked", "share of trained tokens", plain("masked_fraction")],
    ["Staleness", "mean, with extremes", spread("staleness")],
    ["Length", "mean tokens, with extremes", spread("length")],
    ["Trained tokens", "per step", plain("loss_tokens")],
    ["Tokens per second", "wall clock, step to step", plain("tokens_per_s")],
    ["Padding", "share of computed tokens", plain("waste")],
  ];

  ps.runPage = function (element, found, open) {
    const names = [...new Set(found.steps.flatMap((point) => Object.keys(point.metrics)))].sort();
    const own = names.map((name) => [
      name.replaceAll("_", " "),
      "as the training loop gave it",
      (point) => ({ y: point.metrics[name] ?? NaN }),
    ]);
    const drawn = [];
    const panels = [...CURVES, ...own].map(([title, note, get]) => {
      const canvas = ps.el("canvas", { data: { curve: title } });
      const points = found.steps.map((point) => ({ x: point.step, ...(get(point) || { y: NaN }) }));
      drawn.push([canvas, points]);
      return plot(title, note, points, canvas);
    });
    element.replaceChildren(
      ps.el("p", { class: "dim" }, found.steps.length + " finished steps. Click a curve to open the step."),
      ps.el("div", { class: "curves" }, ...panels),
    );
    for (const [canvas, points] of drawn) ps.curve(canvas, points, { onPick: open });
  };
}
