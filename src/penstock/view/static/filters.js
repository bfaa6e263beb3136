// Which samples are shown and in which order: kept in the address, the same for the list and for the groups.
"use strict";
{
  // What a sample can be sorted, filtered and shown by; `text` columns are compared as text.
  ps.sampleColumns = [
    { key: "reward", label: "reward" },
    { key: "advantage", label: "advantage" },
    { key: "tokens", label: "length" },
    { key: "loss_tokens", label: "trained" },
    { key: "staleness", label: "staleness" },
    { key: "max_kl", label: "worst mismatch KL" },
    { key: "mean_kl", label: "mean mismatch KL" },
    { key: "mean_ratio", label: "mean ratio" },
    { key: "max_ratio", label: "largest ratio" },
    { key: "masked", label: "masked tokens" },
    { key: "max_entropy", label: "worst entropy" },
    { key: "mean_entropy", label: "mean entropy" },
    { key: "disagreement", label: "DPPO / IcePop disagreement" },
    { key: "policy_version", label: "policy" },
    { key: "rank", label: "rank" },
    { key: "micro_step", label: "micro-step" },
    { key: "images", label: "images" },
    { key: "env_name", label: "env", text: true },
    { key: "training_mode", label: "mode", text: true },
    { key: "run_id", label: "run", text: true },
    { key: "prompt", label: "prompt", text: true },
    { key: "group_id", label: "group", text: true },
    { key: "sample_id", label: "sample", text: true },
    { key: "index", label: "order in the step" },
  ];
  const ALIASES = { kl: "max_kl", ratio: "max_ratio", entropy: "max_entropy", length: "tokens", env: "env_name" };
  Object.assign(ALIASES, {
    mode: "training_mode",
    run: "run_id",
    group: "group_id",
    sample: "sample_id",
    version: "policy_version",
  });
  const known = Object.fromEntries(ps.sampleColumns.map((column) => [column.key, column]));
  const COMPARE = {
    ">=": (a, b) => a >= b,
    "<=": (a, b) => a <= b,
    "!=": (a, b) => a !== b,
    ">": (a, b) => a > b,
    "<": (a, b) => a < b,
    "=": (a, b) => a === b,
  };
  let hits = null; // by sample: the token where the search text begins; null: not searched yet

  // "reward>=0.5 env=math": every term must hold. Anything else is returned as an error message.
  ps.parseWhere = function (text) {
    const terms = text.trim().split(/\s+/).filter(Boolean);
    return terms.map((term) => {
      const match = /^([a-z_]+)(>=|<=|!=|=|>|<)(.+)$/i.exec(term);
      const key = match && (ALIASES[match[1]] || match[1]);
      if (!match || !known[key]) throw new Error(term + ": write NAME>=VALUE, as in reward>=0.5 or env=math");
      const text_ = known[key].text;
      if (!text_ && Number.isNaN(Number(match[3]))) throw new Error(term + ": " + match[1] + " is a number");
      const wanted = text_ ? match[3].toLowerCase() : Number(match[3]);
      return (row) => {
        const value = row[key];
        if (value === null || value === undefined) return match[2] === "!=";
        return COMPARE[match[2]](text_ ? String(value).toLowerCase() : value, wanted);
      };
    });
  };

  function where() {
    try {
      return ps.parseWhere(get("where"));
    } catch {
      return [];
    }
  }

  const get = (name) => ps.query.get(name) || "";
  const number = (name) => (get(name) === "" ? NaN : Number(get(name)));

  // Return a predicate for the rows to show, from the current address.
  function chosen() {
    const search = get("search").trim().toLowerCase();
    const terms = where();
    const [low, high, stale] = ["low", "high", "stale"].map(number);
    const same = [
      ["env", (row) => row.env_name || "–"],
      ["rank", (row) => String(row.rank)],
      ["mode", (row) => row.training_mode],
      ["micro", (row) => String(row.micro_step)],
    ].filter(([name]) => get(name) !== "");
    return (row) => {
      if (search && !row.haystack.includes(search) && !(hits && hits.has(row.index))) return false;
      if (!same.every(([name, of]) => of(row) === get(name))) return false;
      if (!Number.isNaN(low) && !(row.reward !== null && row.reward >= low)) return false;
      if (!Number.isNaN(high) && !(row.reward !== null && row.reward <= high)) return false;
      if (!Number.isNaN(stale) && !((row.staleness ?? -Infinity) >= stale)) return false;
      if (get("masked") && !(row.masked > 0)) return false;
      return terms.every((term) => term(row));
    };
  }

  // Unknown values come last in either direction. Equal ones keep the order of the step.
  function order(key, sign) {
    return (a, b) => {
      const [x, y] = [a[key], b[key]];
      if (x === y) return (a.index ?? 0) - (b.index ?? 0);
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
    };
  }

  // The requested order: a column and a direction. "-reward" starts with the highest.
  function sorting(other) {
    const text = get("sort") || other;
    const key = text.replace(/^-/, "");
    return known[key] ? { key, sign: text.startsWith("-") ? -1 : 1 } : { key: "max_kl", sign: -1 };
  }

  ps.filters = {
    prepare(rows) {
      for (const row of rows)
        row.haystack = ["sample_id", "group_id", "prompt", "env_name", "run_id", "training_mode"]
          .map((key) => row[key] || "")
          .join(" ")
          .toLowerCase();
    },
    chosen,
    order,
    sorting,
    // Search the samples' tokens; `then` is called with the result.
    async search(at, then) {
      const asked = get("search").trim();
      hits = null;
      if (!asked) return then();
      try {
        const { found } = await ps.source.search(at, asked);
        if (asked !== get("search").trim()) return;
        hits = new Map(found);
      } catch {
        hits = null; // names are searched all the same
      }
      then();
    },
    // The token at which the search text begins in a sample; -1 if it does not occur.
    hit: (index) => (hits && hits.has(index) ? hits.get(index) : -1),
  };
}
