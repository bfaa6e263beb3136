// The step page: what was packed, trained and masked in a step, and what another rule would have masked of it.
"use strict";
{
  let rule = ""; // the rule being tried, kept from step to step
  let at = null;
  let asked = 0;

  function card(title, value, note) {
    return ps.el(
      "div",
      { class: "card" },
      ps.el("span", { class: "dim" }, title),
      ps.el("b", {}, value),
      note ? ps.el("span", { class: "dim small" }, note) : null,
    );
  }

  ps.panel = function (title, note, ...children) {
    return ps.el(
      "section",
      { class: "panel" },
      ps.el("h2", {}, title),
      note ? ps.el("p", { class: "dim small" }, note) : null,
      ...children,
    );
  };
  ps.card = card;

  // What the ranks compute. What is not samples is padding, or waiting for the longest rank.
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

  const spread = (of, name) => (of ? name + " " + ps.number(of.max) : "");

  function cards(found, packed) {
    const { summary, samples } = found;
    const idle = samples.filter((row) => !row.trains).length;
    const masked = summary.masked_fraction.is_masked;
    const sides = [
      ps.number(summary.masked.is_masked_high) + " high",
      ps.number(summary.masked.is_masked_low) + " low",
    ].join(", ");
    return ps.el(
      "div",
      { class: "cards" },
      card(
        "samples",
        ps.number(samples.length),
        packed.samples > samples.length
          ? "of " + ps.number(packed.samples) + " trained"
          : idle
            ? ps.number(idle) + " train nothing"
            : "",
      ),
      card("tokens", ps.number(summary.tokens), ps.number(summary.loss_tokens) + " trained"),
      card(
        "reward",
        ps.number(summary.reward && summary.reward.mean),
        summary.reward ? "mean of " + ps.number(summary.reward.count) : "none",
      ),
      // What was not recorded has no card.
      summary.mismatch_kl
        ? card("mismatch KL", ps.number(summary.mismatch_kl.mean), spread(summary.mismatch_kl, "max"))
        : null,
      summary.entropy ? card("entropy", ps.number(summary.entropy.mean), spread(summary.entropy, "max")) : null,
      masked === undefined
        ? null
        : card("masked", ps.percent(masked, 1), ps.number(summary.masked.is_masked) + " tokens: " + sides),
      packed.slots
        ? card(
            "waste",
            ps.percent(packed.room - packed.tokens, packed.room),
            ps.number(packed.padding) + " padding, rest waiting",
          )
        : null,
    );
  }

  // ---------------------------------------------------------------- what if

  async function recount(counts, thresholds) {
    const turn = ++asked;
    try {
      const found = await ps.source.whatIf(at, rule, thresholds);
      if (turn !== asked) return;
      if (!found)
        return counts.replaceChildren(ps.el("p", { class: "dim" }, "No sample of this step has values for this rule."));
      counts.replaceChildren(
        ps.ruleTable(found, "step-"),
        ps.el(
          "p",
          { class: "dim small" },
          "in " + ps.number(found.samples) + " samples; shares are of " + ps.number(found.trained) + " trained tokens",
        ),
      );
    } catch (error) {
      counts.replaceChildren(ps.el("p", { class: "dim" }, error.message));
    }
  }

  function whatIf(found, redraw) {
    const counts = ps.el("div", { id: "step-counts" });
    const tried = ps.ruleChooser("step-", "", () => {
      rule = tried.name;
      redraw(tried);
      recount(counts, tried.thresholds);
    });
    const element = ps.panel(
      "What another rule would have masked",
      "over all trained tokens of the step",
      tried.box,
      tried.inputs,
      tried.about,
      counts,
    );
    return [element, () => tried.begin(rule || ps.ruleOf(found.rule, "dppo"), { fields: found })];
  }

  // ---------------------------------------------------------------- the page

  function small(drawn, samples) {
    const values = (key) => samples.map((row) => (row[key] === null ? NaN : row[key]));
    ps.histogram(drawn.reward, values("reward"), { height: 110, label: "rewards" });
    ps.histogram(drawn.length, values("tokens"), { height: 110, label: "lengths" });
    ps.histogram(drawn.stale, values("staleness"), { height: 110, label: "staleness" });
  }

  function tokenHistograms(drawn, histograms, tried) {
    const none = { low: 0, high: 1, counts: [], values: 0 };
    ps.bars(drawn.ratio, histograms.importance_ratio || none, {
      height: 130,
      format: ps.power,
      marks: ps.edgesOf(tried.name, tried.thresholds),
      centre: 0,
      label: "ratio of all trained tokens",
    });
    ps.bars(drawn.kl, histograms.mismatch_kl || none, {
      height: 130,
      format: ps.power,
      label: "mismatch KL of all trained tokens",
    });
  }

  ps.stepPage = function (element, found, place, open) {
    at = { ...place };
    const packed = waste(found.grid);
    const canvas = (id) => ps.el("canvas", { id });
    const drawn = {
      grid: canvas("grid"),
      ratio: canvas("step-ratio"),
      kl: canvas("step-kl"),
      reward: canvas("rewards"),
      length: canvas("lengths"),
      stale: canvas("stale"),
    };
    const [tried, begin] = whatIf(found, (rule) => tokenHistograms(drawn, found.histograms, rule));
    ps.fill(
      element,
      cards(found, packed),
      found.grid.length
        ? ps.panel(
            "Packed grid",
            "Ranks down, micro-steps across. Blocks are samples, hatching is padding, the empty rest is waiting. Click a micro-batch for its samples.",
            drawn.grid,
          )
        : ps.panel("Packed grid", "How this step was packed is not recorded: it comes with a rank's export."),
      Object.keys(found.histograms).length
        ? ps.el(
            "div",
            { class: "two" },
            ps.el(
              "div",
              {},
              ps.panel("Ratio", "all trained tokens, by powers of ten", drawn.ratio),
              ps.panel("Mismatch KL", "all trained tokens, by powers of ten", drawn.kl),
            ),
            tried,
          )
        : ps.notExported(),
      ps.el(
        "div",
        { class: "two" },
        ps.panel("Rewards", "per sample", drawn.reward),
        ps.panel("Lengths", "tokens", drawn.length),
        ps.panel("Staleness", "policy versions", drawn.stale),
      ),
      found.skipped ? ps.el("p", { class: "dim" }, found.skipped + " malformed lines were skipped.") : null,
    );
    if (found.grid.length) ps.grid(drawn.grid, found.grid, { onPick: open });
    small(drawn, found.samples);
    begin();
  };
}
