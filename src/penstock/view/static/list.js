// The left column: samples of a step, found by text, filtered by what they are, sorted by what is worst in them.
"use strict";
{
  const ROW = 50;
  const SORTS = [
    ["max_kl", "worst mismatch KL", -1],
    ["mean_kl", "mean mismatch KL", -1],
    ["disagreement", "DPPO / IcePop disagreement", -1],
    ["masked", "masked tokens", -1],
    ["max_entropy", "worst entropy", -1],
    ["mean_entropy", "mean entropy", -1],
    ["tokens", "length", -1],
    ["reward", "reward, highest", -1],
    ["reward", "reward, lowest", 1],
    ["staleness", "staleness", -1],
    ["index", "order in the step", 1],
  ];

  const filters = {
    search: "",
    env: "",
    rank: "",
    mode: "",
    low: NaN,
    high: NaN,
    stale: NaN,
    masked: false,
    micro: -1,
    sort: 0,
  };
  let samples = [];
  let shown = [];
  let current = -1;
  let onOpen = () => {};
  let parts = null;

  function accepts(row) {
    if (filters.search && !row.haystack.includes(filters.search)) return false;
    if (filters.env && (row.env_name || "–") !== filters.env) return false;
    if (filters.rank !== "" && String(row.rank) !== filters.rank) return false;
    if (filters.micro >= 0 && row.micro_step !== filters.micro) return false;
    if (filters.mode && row.training_mode !== filters.mode) return false;
    if (!Number.isNaN(filters.low) && !(row.reward >= filters.low && row.reward !== null)) return false;
    if (!Number.isNaN(filters.high) && !(row.reward <= filters.high && row.reward !== null)) return false;
    if (!Number.isNaN(filters.stale) && !((row.staleness ?? -Infinity) >= filters.stale)) return false;
    return !filters.masked || row.masked > 0;
  }

  // Unknown values come last, whichever way the order goes; equal ones keep the order of the step.
  function compare(key, sign) {
    return (a, b) => {
      const [x, y] = [a[key], b[key]];
      if (x === y) return a.index - b.index;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return sign * (x - y);
    };
  }

  function refresh() {
    const [key, , sign] = SORTS[filters.sort];
    shown = samples.filter(accepts).sort(compare(key, sign));
    const all = ps.number(samples.length) + (samples.length === 1 ? " sample" : " samples");
    parts.count.textContent = shown.length === samples.length ? all : ps.number(shown.length) + " of " + all;
    parts.micro.hidden = filters.micro < 0;
    parts.micro.textContent = "micro-step " + filters.micro + "  ×";
    parts.spacer.style.height = shown.length * ROW + "px";
    parts.scroller.scrollTop = 0;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(parts.scroller.scrollTop / ROW) - 4);
    const last = Math.min(shown.length, first + Math.ceil(parts.scroller.clientHeight / ROW) + 8);
    const worst = Math.max(...samples.map((row) => row.max_kl || 0), 1e-9);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(rowOf(shown[i], i, worst));
    parts.spacer.replaceChildren(...rows);
  }

  function rowOf(row, place, worst) {
    const reward =
      row.reward === null
        ? null
        : ps.el("span", { class: "pill" + (row.reward > 0 ? " good" : "") }, ps.number(row.reward));
    const bar = ps.el("i", { class: "bar" });
    bar.style.width = (row.max_kl === null ? 0 : Math.max(2, 100 * Math.sqrt(row.max_kl / worst))) + "%";
    const element = ps.el(
      "button",
      {
        class: "row" + (row.index === current ? " current" : ""),
        type: "button",
        data: { index: row.index },
        title: "worst mismatch KL " + ps.number(row.max_kl) + ", mean " + ps.number(row.mean_kl),
        on: { click: () => onOpen(row.index) },
      },
      ps.el("span", { class: "line" }, ps.el("b", {}, ps.visible(row.sample_id || "sample " + row.index)), reward),
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
      ps.el("span", { class: "track" }, bar),
    );
    element.style.top = place * ROW + "px";
    return element;
  }

  function select(label, options, act, id) {
    const box = ps.el("select", { id, "aria-label": label, on: { change: () => act(box.value) } });
    for (const [value, text] of options) box.append(ps.el("option", { value }, text));
    return box;
  }

  function field(label, act, id) {
    const box = ps.el("input", { id, type: "number", step: "any", placeholder: label, "aria-label": label });
    box.addEventListener("input", () => act(box.value === "" ? NaN : Number(box.value)));
    return box;
  }

  function choices(all, key, rows) {
    const found = [...new Set(rows.map((row) => (row[key] === null ? "–" : String(row[key]))))].sort();
    return [["", all], ...found.map((value) => [value, ps.visible(value)])];
  }

  function set(name) {
    return (value) => {
      filters[name] = value;
      refresh();
    };
  }

  ps.list = {
    // Fill the column with a step's samples; filters are kept from step to step where they still mean something.
    show(element, rows, open) {
      samples = rows;
      onOpen = open;
      for (const row of samples)
        row.haystack = Object.entries(row)
          .flatMap(([key, value]) => (key !== "haystack" && typeof value === "string" ? [value] : []))
          .join(" ")
          .toLowerCase();
      for (const [name, key] of [
        ["env", "env_name"],
        ["rank", "rank"],
        ["mode", "training_mode"],
      ])
        if (!rows.some((row) => (row[key] === null ? "–" : String(row[key])) === filters[name])) filters[name] = "";
      const search = ps.el("input", {
        type: "search",
        id: "search",
        placeholder: "Search samples  /",
        "aria-label": "Search samples",
        value: filters.search,
      });
      search.addEventListener("input", () => set("search")(search.value.trim().toLowerCase()));
      const masked = ps.el("input", { type: "checkbox", id: "only-masked", checked: filters.masked });
      masked.addEventListener("change", () => set("masked")(masked.checked));
      const count = ps.el("span", { class: "count", id: "count", role: "status" });
      const micro = ps.el("button", {
        type: "button",
        class: "chip",
        id: "micro",
        title: "Show all micro-steps again",
      });
      micro.addEventListener("click", () => set("micro")(-1));
      const spacer = ps.el("div", { class: "spacer" });
      const scroller = ps.el(
        "div",
        { class: "scroller", id: "rows", on: { scroll: () => requestAnimationFrame(draw) } },
        spacer,
      );
      const kept = [
        ["env", select("Environment", choices("all envs", "env_name", rows), set("env"), "filter-env")],
        ["rank", select("Rank", choices("all ranks", "rank", rows), set("rank"), "filter-rank")],
        ["mode", select("Mode", choices("all modes", "training_mode", rows), set("mode"), "filter-mode")],
        ["low", field("reward ≥", set("low"), "filter-low")],
        ["high", field("reward ≤", set("high"), "filter-high")],
        ["stale", field("stale ≥", set("stale"), "filter-stale")],
      ];
      for (const [name, box] of kept) box.value = Number.isNaN(filters[name]) ? "" : filters[name];
      const sort = select(
        "Sort by",
        SORTS.map(([, label], i) => [String(i), label]),
        (value) => set("sort")(Number(value)),
        "sort",
      );
      sort.value = String(filters.sort);
      parts = { count, micro, spacer, scroller };
      element.replaceChildren(
        ps.el(
          "div",
          { class: "filters" },
          search,
          ps.el("div", { class: "three" }, ...kept.map(([, box]) => box)),
          ps.el("label", { class: "check" }, masked, "only with masked tokens"),
          ps.el("label", { class: "sort" }, "sort by", sort),
          ps.el("div", { class: "found" }, count, micro),
        ),
        scroller,
      );
      refresh();
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
    // The sample `by` places further down the list as it is now.
    neighbour(by) {
      const place = shown.findIndex((row) => row.index === current);
      const next = shown[Math.max(0, Math.min(shown.length - 1, place + by))];
      return next ? next.index : -1;
    },
    first: () => (shown.length ? shown[0].index : -1),
    // Show only what one micro-batch of one rank held.
    only(rank, micro) {
      filters.rank = String(rank);
      filters.micro = micro;
    },
    redraw: () => parts && draw(),
  };
}
