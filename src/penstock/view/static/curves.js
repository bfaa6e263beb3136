// The charts of a run: from the metrics it wrote for every step, and from its exported steps.
"use strict";
{
  const minus = (a, b) => a && b && a.map((value, i) => value - b[i]);
  const over = (a, b) => a && b && a.map((value, i) => value / b[i]);
  const shareOf = (part, rest) => part && rest && part.map((value, i) => value / (value + rest[i]));

  // A line is a label and the sources of its numbers, best first: a name of the run's metrics, "@name.field" of
  // an exported step, or a function of such names.
  const CHARTS = [
    ["Reward", "mean of samples: trained in the step, put before it",
      [["trained", "train/reward", "@reward.mean"], ["generated", "gen/reward"]]],
    ["Loss", "mean over trained tokens", [["loss", "train/loss", "@loss.mean"]]],
    ["Grad norm", "before clipping", [["grad norm", "train/grad_norm", "grad_norm"]]],
    ["Entropy", "mean over trained tokens", [["entropy", "train/entropy", "@entropy.mean"]]],
    ["Mismatch KL", "trainer against sampler, mean", [["mismatch KL", "train/mismatch_kl", "@mismatch_kl.mean"]]],
    ["Worst mismatch", "largest of the step",
      [["log ratio", "train/max_log_ratio"], ["KL of a token", "@mismatch_kl.max"]]],
    ["Clipped or masked", "share of trained tokens", [["masked", "train/masked", "@masked_fraction"]]],
    ["Staleness", "policy versions behind",
      [["mean", "train/staleness", "buffer/staleness", "@staleness.mean"],
       ["oldest", "train/max_staleness", "buffer/max_staleness", "@staleness.max"]]],
    ["Wait against compute", "seconds of a step",
      [["waiting for samples", "perf/wait_s"],
       ["computing", (get) => minus(get("perf/step_s"), get("perf/wait_s"))]]],
    ["Tokens per second", "computed tokens, wall clock", [["tokens/s", "perf/tokens_per_s", "@tokens_per_s"]]],
    ["Padding and waste", "share of what was computed",
      [["waste", "perf/waste", "@waste"],
       ["padding", (get) => shareOf(get("perf/padding_tokens"), get("perf/tokens"))]]],
    ["Largest micro-batch", "tokens, and the configured cap",
      [["largest", "pack/total_max_micro_batch_tokens"], ["cap", "pack/micro_batch_max_tokens"]]],
    ["Micro-batches", "of the step",
      [["all ranks", "pack/total_micro_batches"], ["rank 0", "pack/local_micro_batches", "perf/micro_batches"]]],
    ["Accepted and trained", "samples since the start",
      [["accepted", "gen/accepted"], ["trained", "train/committed"]]],
    ["Held", "samples that wait for training", [["held", "buffer/held"]]],
    ["Dropped, by reason", "samples since the start", "buffer/dropped/"],
    ["Memory", "of rank 0 and of its device", [["host", "perf/memory_bytes"], ["device", "perf/device_bytes"]], ps.bytes],
    ["Length", "tokens of a sample: trained in the step, put before it",
      [["trained", (get) => over(get("pack/total_tokens"), get("pack/total_samples")), "@length.mean"],
       ["generated", "gen/length"],
       ["longest", "@length.max"]]],
    ["Trained tokens of a sample", "mean: trained in the step, put before it",
      [["trained", (get) => over(get("train/loss_tokens"), get("pack/total_samples"))],
       ["generated", "gen/completion_length"]]],
    ["Trains nothing", "share of the step's samples: no advantage", [["share", "@idle"]]],
    ["Truncated rollouts", "share of samples put before the step", [["truncated", "gen/truncated"]]],
    ["Seconds of a rollout", "mean of samples put before the step", [["seconds", "gen/seconds"]]],
    ["Generated samples", "put between two steps", [["samples", "gen/samples"]]],
    ["On-policy gap", "largest log ratio of samples of the newest version", [["gap", "train/on_policy_gap"]]],
    ["Packing error", "difference to computing samples one by one", [["error", "train/packing_error"]]],
    ["Truncated tokens", "of samples longer than seq_len", [["tokens", "pack/truncated_tokens"]]],
    ["Over the cap", "micro-batches larger than the cap", [["micro-batches", "pack/over_cap"]]],
    ["Shared tokens", "computed once for several samples", [["tokens", "perf/shared_tokens"]]],
    ["Trained samples", "of the step", [["samples", "train/samples"]]],
    ["Groups held", "when the step was planned", [["groups", "buffer/items"]]],
    ["Staleness of held groups", "policy versions behind",
      [["mean", "buffer/staleness_mean"], ["oldest", "buffer/staleness_max"]]],
    ["Trained tokens", "of the step", [["tokens", "train/loss_tokens", "@loss_tokens"]]],
  ];
  const PACKED = ["tokens", "loss_tokens", "samples"].flatMap((name) => [`pack/local_${name}`, `pack/total_${name}`]);
  const USED = new Set(["step", "pack/local_max_micro_batch_tokens", "perf/step_s", "perf/padding_tokens", "perf/tokens", ...PACKED]);

  const numbers = (list) => list.map((value) => (value === null || value === undefined ? NaN : value));

  function reader(found) {
    const metrics = found.metrics || {};
    const at = numbers(metrics.step || []);
    const steps = found.steps.map((point) => point.step);
    return (name) => {
      if (name.startsWith("@")) {
        const [key, field] = name.slice(1).split(".");
        const ys = numbers(found.steps.map((p) => (field ? p[key] && p[key][field] : p[key])));
        return ys.some(Number.isFinite) ? { xs: steps, ys } : null;
      }
      if (metrics[name] && metrics[name].some(Number.isFinite)) return { xs: at, ys: numbers(metrics[name]) };
      const own = numbers(found.steps.map((point) => point.metrics[name]));
      return own.some(Number.isFinite) ? { xs: steps, ys: own } : null;
    };
  }

  function line(read, found, label, sources) {
    for (const source of sources) {
      if (typeof source === "string") {
        const one = read(source);
        if (one) return { label, ...one };
        continue;
      }
      const ys = source((name) => (found.metrics && found.metrics[name] ? numbers(found.metrics[name]) : null));
      if (ys && ys.some(Number.isFinite)) return { label, xs: numbers(found.metrics.step), ys };
    }
    return null;
  }

  // The charts of a run: title, note and lines ({ label, xs, ys }). Those without a number are left out.
  ps.curvesOf = function (found) {
    const read = reader(found);
    const names = [
      ...Object.keys(found.metrics || {}),
      ...new Set(found.steps.flatMap((point) => Object.keys(point.metrics))),
    ];
    const used = new Set(USED);
    const charts = [];
    for (const [title, note, wanted, format] of CHARTS) {
      const specs =
        typeof wanted === "string"
          ? names.filter((name) => name.startsWith(wanted)).map((name) => [name.slice(wanted.length), name])
          : wanted;
      const lines = specs.map(([label, ...sources]) => line(read, found, label, sources)).filter(Boolean);
      for (const [, ...sources] of specs) for (const source of sources) used.add(source);
      if (lines.length)
        charts.push({ title, note, lines, format: format || ps.number, named: typeof wanted === "string" });
    }
    for (const name of [...new Set(names)].filter((one) => !used.has(one)).sort()) {
      const one = read(name);
      if (one && one.ys.some(Number.isFinite))
        charts.push({
          title: name.replaceAll("_", " "),
          note: "as the training loop gave it",
          format: ps.number,
          lines: [{ label: name, ...one }],
        });
    }
    return charts;
  };

  // Whether a chart is constant: it has three steps or more, and each of its lines has one value.
  ps.isConstant = function (chart) {
    if (chart.title === "Reward" || Math.max(...chart.lines.map((line) => line.xs.length)) < 3) return false;
    return chart.lines.every((line) => {
      const [low, high] = ps.extent(line.ys, [0, 0]);
      return high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
    });
  };

  const RECENT = 20;
  const tenths = (share) => ps.number(Math.round(share * 1000) / 10) + " %";
  const { mean } = ps;

  // One sentence about how the run is doing, from its last steps. Empty if nothing is known.
  ps.verdictOf = function (found) {
    const charts = ps.curvesOf(found);
    const values = (title, label) => {
      const chart = charts.find((one) => one.title === title);
      const line = chart && chart.lines.find((one) => one.label === label);
      return line ? line.ys.filter(Number.isFinite) : [];
    };
    const parts = [];
    const reward = values("Reward", "trained");
    if (reward.length > 2 * RECENT)
      parts.push(
        `Reward went from ${ps.number(mean(reward.slice(0, RECENT)))} to ${ps.number(mean(reward.slice(-RECENT)))}`,
      );
    const wait = values("Wait against compute", "waiting for samples").slice(-RECENT);
    const compute = values("Wait against compute", "computing").slice(-RECENT);
    if (wait.length && compute.length) {
      const share = mean(wait) / (mean(wait) + mean(compute) || 1);
      parts.push(`the trainer waits ${tenths(share)} of the time`);
    }
    const stale = values("Staleness", "mean").slice(-RECENT);
    if (stale.length) parts.push(`samples are ${ps.number(mean(stale))} policy versions old`);
    const idle = values("Trains nothing", "share").slice(-RECENT);
    if (idle.length) parts.push(`${tenths(mean(idle))} of them have no advantage and train nothing`);
    const kl = values("Mismatch KL", "mismatch KL");
    if (kl.length > 2 * RECENT) {
      const [before, now] = [mean(kl.slice(0, RECENT)), mean(kl.slice(-RECENT))];
      const trend = now > 2 * before ? "has risen" : now < before / 2 ? "has fallen" : "is steady";
      parts.push(`mismatch KL ${trend} (${ps.number(now)})`);
    }
    const [made, used] = ["generated", "trained"].map((label) => values("Length", label).slice(-RECENT));
    if (made.length && used.length && Math.abs(mean(used) / mean(made) - 1) > 0.05)
      parts.push(
        `samples are ${ps.number(Math.round(mean(used)))} tokens long where they are trained and ` +
          `${ps.number(Math.round(mean(made)))} where they are put: lengths are not trained alike`,
      );
    const text = parts.join("; ");
    return text && text[0].toUpperCase() + text.slice(1) + ".";
  };

  // Merge new rows into the metrics of a run. A step that was trained again replaces the earlier one.
  ps.mergeRows = function (metrics, more) {
    if (!metrics.step) metrics.step = [];
    const place = new Map(metrics.step.map((step, i) => [step, i]));
    more.step.forEach((step, row) => {
      let i = place.get(step);
      if (i === undefined) {
        i = metrics.step.findLastIndex((one) => one < step) + 1;
        for (const values of Object.values(metrics)) values.splice(i, 0, null);
        metrics.step[i] = step;
        place.set(step, i);
        if (i < metrics.step.length - 1) metrics.step.forEach((one, at) => place.set(one, at));
      }
      for (const [name, values] of Object.entries(more)) {
        if (!metrics[name]) metrics[name] = metrics.step.map(() => null);
        if (values[row] !== null) metrics[name][i] = values[row];
      }
    });
    return metrics;
  };
}
