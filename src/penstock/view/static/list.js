// The left column: the samples of a step, with search, filters and sorting.
"use strict";
{
  const ROW = 66;
  const SORTS = [
    ["-max_kl", "worst mismatch KL"],
    ["-mean_kl", "mean mismatch KL"],
    ["-max_ratio", "largest ratio"],
    ["-disagreement", "DPPO / IcePop disagreement"],
    ["-masked", "masked tokens"],
    ["-max_entropy", "worst entropy"],
    ["-mean_entropy", "mean entropy"],
    ["-tokens", "length"],
    ["-reward", "reward, highest"],
    ["reward", "reward, lowest"],
    ["-advantage", "advantage, highest"],
    ["advantage", "advantage, lowest"],
    ["-staleness", "staleness"],
    ["group_id", "group"],
    ["index", "order in the step"],
  ];
  let samples = [];
  let shown = [];
  let current = -1;
  let rewards = [0, 1];
  let worst = 1;
  let at = null;
  let onOpen = () => {};
  let parts = null;

  function refresh() {
    const { key, sign } = ps.filters.sorting("-max_kl");
    shown = samples.filter(ps.filters.chosen()).sort(ps.filters.order(key, sign));
    const all = ps.number(samples.length) + (samples.length === 1 ? " sample" : " samples");
    parts.count.textContent = shown.length === samples.length ? all : ps.number(shown.length) + " of " + all;
    parts.micro.hidden = !ps.query.get("micro");
    parts.micro.textContent = "micro-step " + ps.query.get("micro") + "  ×";
    parts.spacer.style.height = shown.length * ROW + "px";
    parts.scroller.scrollTop = 0;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(parts.scroller.scrollTop / ROW) - 4);
    const last = Math.min(shown.length, first + Math.ceil((parts.scroller.clientHeight || 800) / ROW) + 8);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(rowOf(shown[i], i));
    parts.spacer.replaceChildren(...rows);
  }

  // A reward between the step's lowest, grey, and highest, green.
  ps.rewardPill = function (reward, [low, high]) {
    if (reward === null || reward === undefined) return null;
    const pill = ps.el("span", { class: "pill", title: "reward" }, ps.number(reward));
    const share = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
    pill.style.setProperty("--share", Math.round(100 * share) + "%");
    return pill;
  };

  ps.signed = (value) => (value > 0 ? "+" : "") + ps.number(value);

  function rowOf(row, place) {
    const bar = ps.el("i", { class: "bar" });
    bar.style.width = (row.max_kl === null ? 0 : Math.max(2, 100 * Math.sqrt(row.max_kl / (worst || 1)))) + "%";
    const details = [
      row.advantage === null ? null : "A " + ps.signed(row.advantage),
      row.staleness === null ? null : row.staleness + " behind",
      row.trains ? null : "trains nothing",
    ];
    const element = ps.el(
      "button",
      {
        class: "row" + (row.index === current ? " current" : "") + (row.trains ? "" : " idle"),
        type: "button",
        data: { index: row.index },
        "aria-current": row.index === current ? "true" : "false",
        on: { click: () => onOpen(row.index) },
      },
      ps.el(
        "span",
        { class: "line" },
        ps.el("b", {}, ps.visible(row.sample_id || "sample " + row.index)),
        ps.rewardPill(row.reward, rewards),
      ),
      ps.el(
        "span",
        { class: "line dim" },
        ps.el("span", {}, [ps.visible(row.env_name || "–"), row.training_mode, "rank " + row.rank].join(" · ")),
        ps.el(
          "span",
          {},
          ps.number(row.tokens) + " tok" + (row.masked ? " · " + ps.number(row.masked) + " masked" : ""),
        ),
      ),
      ps.el(
        "span",
        { class: "line dim" },
        ps.el("span", {}, details.filter(Boolean).join(" · ")),
        ps.el("span", { title: "worst mismatch KL of a trained token" }, "KL " + ps.number(row.max_kl)),
      ),
      ps.el("span", { class: "track" }, bar),
    );
    element.style.top = place * ROW + "px";
    return element;
  }

  function set(name, then) {
    return (value) => {
      ps.query.set({ [name]: value === "" || value === false ? null : String(value) });
      if (then) then();
      else refresh();
    };
  }

  function field(label, name, id) {
    const value = ps.query.get(name) || "";
    return ps.input({ id, type: "number", step: "any", placeholder: label, "aria-label": label, value }, set(name));
  }

  function choices(all, key, rows) {
    const found = [...new Set(rows.map((row) => (row[key] === null ? "–" : String(row[key]))))].sort();
    return [["", all], ...found.map((value) => [value, ps.visible(value)])];
  }

  // The search box for text and ids. Queries the server shortly after the last key.
  ps.searchBox = function (where, changed, id) {
    const label = "Search names, token text and token ids";
    const shown = { placeholder: "Search names, text, ids  /", "aria-label": label, value: ps.query.get("search") || "" };
    let waiting = 0;
    return ps.input({ type: "search", id, ...shown }, (text) => {
      set("search", changed)(text);
      clearTimeout(waiting);
      waiting = setTimeout(() => ps.filters.search(where(), changed), 180);
    });
  };

  // The box for conditions on any column.
  ps.whereBox = function (changed, id) {
    const shown = {
      placeholder: "reward<0.5 staleness>1 env=math",
      title: "Conditions on any column: NAME>=VALUE. All must hold.",
      "aria-label": "Conditions on any column, as in reward<0.5 env=math",
    };
    return ps.input({ id, value: ps.query.get("where") || "", spellcheck: false, ...shown }, (text, box) => {
      try {
        ps.parseWhere(text);
        box.setCustomValidity("");
      } catch (error) {
        box.setCustomValidity(error.message);
        return;
      }
      set("where", changed)(text.trim());
    });
  };

  function make(rows) {
    const setMasked = (isOn) => set("masked")(isOn ? "1" : "");
    const micro = ps.button("", () => set("micro")(""), { class: "chip", id: "micro", title: "Show all micro-steps again" });
    const spacer = ps.el("div", { class: "spacer" });
    const count = ps.el("span", { class: "count", id: "count", role: "status" });
    const scroller = ps.el(
      "div",
      { class: "scroller", id: "rows", on: { scroll: () => requestAnimationFrame(draw) } },
      spacer,
    );
    const select = (name, label, all, key) =>
      ps.select("filter-" + name, label, choices(all, key, rows), ps.query.get(name) || "", set(name));
    const sort = ps.select("sort", "Sort by", SORTS, ps.query.get("sort") || "-max_kl", set("sort"));
    parts = { count, micro, spacer, scroller };
    return [
      ps.el(
        "div",
        { class: "filters" },
        ps.searchBox(() => at, refresh, "search"),
        ps.el(
          "div",
          { class: "three" },
          select("env", "Environment", "all envs", "env_name"),
          select("rank", "Rank", "all ranks", "rank"),
          select("mode", "Mode", "all modes", "training_mode"),
          field("reward ≥", "low", "filter-low"),
          field("reward ≤", "high", "filter-high"),
          field("stale ≥", "stale", "filter-stale"),
        ),
        ps.whereBox(refresh, "where"),
        ps.check("only with masked tokens", Boolean(ps.query.get("masked")), setMasked, { id: "only-masked" }),
        ps.el("label", { class: "sort" }, "sort by", sort),
        ps.el("div", { class: "found" }, count, micro),
      ),
      scroller,
    ];
  }

  ps.list = {
    // Fill the column with a step's samples. Filters that still match something are kept from step to step.
    show(element, rows, place, open) {
      samples = rows;
      at = { ...place };
      onOpen = open;
      rewards = ps.extent(rows.map((row) => row.reward), [0, 1]);
      worst = ps.extent(rows.map((row) => row.max_kl), [0, 1])[1];
      for (const [name, key] of Object.entries({ env: "env_name", rank: "rank", mode: "training_mode" }))
        if (!rows.some((row) => (row[key] === null ? "–" : String(row[key])) === ps.query.get(name)))
          ps.query.set({ [name]: null });
      element.replaceChildren(...make(rows));
      refresh();
      if (ps.query.get("search")) ps.filters.search(at, refresh);
    },
    // Mark a sample as open, and bring it into sight.
    mark(index) {
      current = index;
      if (!parts) return;
      const place = shown.findIndex((row) => row.index === index);
      const top = place * ROW;
      if (
        place >= 0 &&
        (top < parts.scroller.scrollTop || top + ROW > parts.scroller.scrollTop + parts.scroller.clientHeight)
      )
        parts.scroller.scrollTop = top - parts.scroller.clientHeight / 3;
      draw();
    },
    // The sample `by` places further down the current list.
    neighbour(by) {
      const place = shown.findIndex((row) => row.index === current);
      const next = shown[Math.max(0, Math.min(shown.length - 1, place + by))];
      return next ? next.index : -1;
    },
    first: () => (shown.length ? shown[0].index : -1),
    redraw: () => parts && draw(),
  };
}
