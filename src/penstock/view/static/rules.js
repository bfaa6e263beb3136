// Masking rules on exported values: what another rule, or another threshold, would have masked.
"use strict";
{
  const HIGH = 1;
  const LOW = 2;
  const OTHER = 3; // masked, by neither side: an advantage of zero has no direction

  ps.rules = {
    dppo: {
      label: "DPPO",
      needs: ["prob_delta", "advantages"],
      inputs: { high: 0.2, low: 0.2 },
      about: "whose probability rose by more than high with an advantage above 0, or fell by more than low otherwise",
      judge: (c, t, i) =>
        c.advantages[i] > 0
          ? c.prob_delta[i] > t.high
            ? HIGH
            : 0
          : c.prob_delta[i] < -t.low
            ? c.advantages[i] < 0
              ? LOW
              : OTHER
            : 0,
    },
    icepop: {
      label: "IcePop",
      needs: ["importance_ratio"],
      inputs: { low: 0.2, high: 5 },
      about: "whose ratio is below low or above high, whatever the advantage",
      judge: (c, t, i) => (c.importance_ratio[i] > t.high ? HIGH : c.importance_ratio[i] < t.low ? LOW : 0),
    },
    ppo: {
      label: "PPO clip",
      needs: ["importance_ratio", "advantages"],
      inputs: { low: 0.2, high: 0.2 },
      about: "whose ratio is above 1 + high with an advantage above 0, or below 1 − low with one below 0",
      judge: (c, t, i) =>
        c.advantages[i] > 0 && c.importance_ratio[i] > 1 + t.high
          ? HIGH
          : c.advantages[i] < 0 && c.importance_ratio[i] < 1 - t.low
            ? LOW
            : 0,
    },
    ipo: {
      label: "IPO",
      needs: ["prob_delta"],
      inputs: { threshold: 0.1 },
      about: "whose probability moved by more than the threshold, either way",
      judge: (c, t, i) => (c.prob_delta[i] > t.threshold ? HIGH : c.prob_delta[i] < -t.threshold ? LOW : 0),
    },
  };

  // Per token 0, or which side masks it; null where the sample lacks what the rule looks at.
  ps.judge = function (sample, name, thresholds) {
    const rule = ps.rules[name];
    const columns = sample.columns;
    if (!rule || !rule.needs.every((key) => columns[key])) return null;
    const out = new Uint8Array(sample.count);
    for (let i = 0; i < sample.count; i++) if (columns.loss_mask[i]) out[i] = rule.judge(columns, thresholds, i);
    return out;
  };

  // The masks the loss itself reported, in the same coding.
  ps.exported = function (sample) {
    const { is_masked: any, is_masked_high: high, is_masked_low: low } = sample.columns;
    if (!any) return null;
    return any.map((masked, i) => (masked ? (high && high[i] ? HIGH : low && low[i] ? LOW : OTHER) : 0));
  };

  // Count what a rule masks in samples, beside what training masked. Null if no sample has the columns it uses.
  ps.countRule = function (samples, name, thresholds) {
    const sum = { trained: 0, masked: 0, high: 0, low: 0, samples: 0 };
    const beside = { in_training: 0, both: 0, now_only: 0, training_only: 0 };
    let [known, exported] = [false, false];
    for (const sample of samples) {
      const live = ps.judge(sample, name, thresholds);
      const trained = ps.exported(sample);
      sum.trained += sample.columns.loss_mask.reduce((a, b) => a + b, 0);
      [known, exported] = [known || live !== null, exported || trained !== null];
      if (live && live.some(Boolean)) sum.samples += 1;
      for (let i = 0; live && i < sample.count; i++) {
        const was = trained && trained[i];
        if (was) beside.in_training += 1;
        if (live[i]) {
          sum.masked += 1;
          sum[live[i] === 1 ? "high" : "low"] += 1;
          beside[was ? "both" : "now_only"] += 1;
        } else if (was) beside.training_only += 1;
      }
    }
    return known ? { ...sum, ...(exported ? beside : {}) } : null;
  };

  // Boxes for thresholds; `changed` is called as valid ones are typed.
  ps.thresholdBoxes = function (thresholds, changed, prefix) {
    return Object.entries(thresholds).map(([name, value]) => {
      const shown = { type: "number", step: "any", min: "0", value: String(value), "aria-label": name };
      const box = ps.input({ id: prefix + name, ...shown }, (text) => {
        const typed = Number(text);
        const valid = text !== "" && Number.isFinite(typed) && typed >= 0;
        box.setCustomValidity(valid ? "" : "a number of 0 or more");
        if (!valid) return;
        thresholds[name] = typed;
        changed();
      });
      return ps.el("label", {}, name, box);
    });
  };

  // A box to choose a rule and boxes for its thresholds. `begin(name, sample)` starts with the thresholds of a sample (or
  // of what has its `fields`), `changed` is called whenever rule or thresholds are others.
  ps.ruleChooser = function (prefix, note, changed) {
    const self = { name: "dppo", thresholds: {}, inputs: ps.el("div", { class: "inputs" }) };
    const names = Object.entries(ps.rules).map(([name, one]) => [name, one.label]);
    let sample = null;
    const reset = () => {
      self.thresholds = ps.thresholdsOf(sample, self.name);
      self.about.textContent = "Masks a trained token " + ps.rules[self.name].about + "." + note;
      const boxes = ps.thresholdBoxes(self.thresholds, changed, prefix + "threshold-");
      self.inputs.replaceChildren(...boxes, ps.button("reset", reset, { id: prefix + "reset" }));
      changed();
    };
    self.about = ps.el("p", { class: "dim small" });
    self.box = ps.select(prefix + "rule", "Rule", names, self.name, (name) => self.begin(name, sample));
    self.begin = (name, of) => {
      [self.name, self.box.value, sample] = [name, name, of];
      reset();
    };
    return self;
  };

  // The rule to try first: the one that training used, if it is among them; DPPO's thresholds are those of OPD.
  ps.ruleOf = (own, other) => (own && ps.rules[own.kind] ? own.kind : own && own.kind === "opd" ? "dppo" : other);

  // The thresholds a sample was trained with, if recorded.
  ps.thresholdsOf = function (sample, name) {
    const own = sample.fields.rule;
    const found = { ...ps.rules[name].inputs };
    if (own && (own.kind === name || (own.kind === "opd" && name === "dppo")))
      for (const key of Object.keys(found)) if (typeof own[key] === "number") found[key] = own[key];
    return found;
  };
}
