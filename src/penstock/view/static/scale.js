// Map numbers to colours: which columns, their neutral value, and how strong a value is shown.
"use strict";
{
  // centre: the value without colour. fixed: how far from it a value has full colour, in every sample, step and run.
  // Two-sided columns show above in the warm, below in the cool colour.
  ps.columns = [
    { key: "mismatch_kl", label: "mismatch KL", centre: 0, fixed: 0.1 },
    { key: "importance_ratio", label: "ratio", centre: 1, fixed: 0.5, twoSided: true },
    { key: "log_importance_ratio", label: "log ratio", centre: 0, fixed: 0.5, twoSided: true },
    { key: "prob_delta", label: "probability delta", centre: 0, fixed: 0.2, twoSided: true },
    { key: "advantages", label: "advantage", centre: 0, fixed: 1, twoSided: true },
    { key: "entropy", label: "entropy", centre: 0, fixed: 2 },
    { key: "trainer_logprobs", label: "logprob, trainer", centre: 0, fixed: 5, negative: true },
    { key: "inference_logprobs", label: "logprob, sampler", centre: 0, fixed: 5, negative: true },
    { key: "teacher_logprobs", label: "logprob, teacher", centre: 0, fixed: 5, negative: true },
    { key: "loss", label: "loss", centre: 0, fixed: 1, twoSided: true },
    { key: "rewards", label: "reward", centre: 0, fixed: 1, twoSided: true },
  ];
  ps.labels = Object.fromEntries(ps.columns.map((column) => [column.key, column.label]));
  Object.assign(ps.labels, {
    token_ids: "token id",
    position_ids: "position",
    loss_mask: "trained",
    is_masked: "masked",
    is_masked_high: "masked high",
    is_masked_low: "masked low",
    temperatures: "temperature",
    rl_weights: "weight, RL",
    ce_weights: "weight, CE",
    ref_kl_weights: "weight, ref KL",
    weight_versions: "weight version",
  });

  // The columns a sample can be coloured by: those above, and the run's own with one number per token.
  ps.columnsOf = function (sample) {
    const own = Object.entries(sample.fields.columns || {})
      .filter(([name, [, trailing, ragged]]) => !trailing && !ragged && sample.columns[name])
      .map(([name]) => ({ key: name, label: name, centre: 0, twoSided: true }));
    return ps.columns.filter((column) => sample.columns[column.key]).concat(own);
  };

  function percentile(values, percent) {
    const sorted = Float64Array.from(values).sort();
    return sorted[Math.min(sorted.length - 1, Math.floor((sorted.length * percent) / 100))];
  }

  function ofSample(sample, column) {
    const values = sample.columns[column.key];
    const mask = sample.columns.loss_mask;
    const sizes = [];
    for (let i = 0; values && i < values.length; i++) {
      const size = Math.abs(values[i] - column.centre);
      if (mask[i] && size > 0 && Number.isFinite(size)) sizes.push(size);
    }
    return sizes.length ? Math.max(percentile(sizes, 95), 1e-9) : 1;
  }

  // The distance from the centre at full colour, and a text that explains it.
  ps.scaleOf = function (sample, column, kind, scales, typed) {
    const ofStep = scales && scales[column.key];
    if (typed > 0) return { scale: typed, name: "value you typed" };
    if (kind === "sample") return { scale: ofSample(sample, column), name: "95 % of this sample" };
    if (kind === "step" && ofStep) return { scale: ofStep.p95, name: "95 % of this step" };
    if (column.fixed) return { scale: column.fixed, name: "fixed, the same everywhere" };
    return ofStep
      ? { scale: ofStep.p95, name: "95 % of this step" }
      : { scale: ofSample(sample, column), name: "95 % of this sample" };
  };

  ps.strength = (value, column, scale) => Math.max(-1, Math.min(1, (value - column.centre) / scale));

  // The background for a strength between -1 and 1; the theme decides how the two colours look.
  ps.colour = function (strength, column) {
    if (!Number.isFinite(strength) || Math.abs(strength) < 0.004) return "";
    const warm = !column.twoSided || strength > 0;
    const amount = Math.round((0.07 + 0.68 * Math.abs(strength)) * 1000) / 10;
    return "color-mix(in srgb, var(" + (warm ? "--warm" : "--cool") + ") " + amount + "%, transparent)";
  };
}
