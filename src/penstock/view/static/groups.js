// The groups page: all rollouts of a prompt together, what they share and where they branch, and any column to sort by.
"use strict";
{
  const DEFAULT = ["reward", "advantage", "tokens", "staleness", "max_kl", "masked", "env_name"];
  const PAGE = 100;
  let rows = [];
  let at = null;
  let rewards = [0, 1];
  let element = null;
  let open = () => {};
  let limit = PAGE;

  const chosenColumns = () => {
    const wanted = (ps.query.get("columns") || DEFAULT.join(",")).split(",");
    return ps.sampleColumns.filter((column) => wanted.includes(column.key));
  };
  const isFlat = () => ps.query.get("flat") === "1";

  function mean(values) {
    const known = values.filter((value) => Number.isFinite(value));
    return known.length ? ps.mean(known) : null;
  }

  // A group's value in a column: the mean, the largest of extremes, or a name that all share.
  function together(members, column) {
    const values = members.map((row) => row[column.key]);
    if (column.text) return new Set(values).size === 1 ? values[0] : null;
    const known = values.filter((value) => value !== null && value !== undefined);
    if (!known.length) return null;
    return /^max_|^advantage/.test(column.key)
      ? Math.max(...known)
      : column.key === "masked"
        ? known.reduce((a, b) => a + b, 0)
        : mean(known);
  }

  function grouped(chosen) {
    const by = new Map();
    for (const row of rows.filter(chosen)) {
      const key = row.group_id || "";
      if (!by.has(key)) by.set(key, []);
      by.get(key).push(row);
    }
    return [...by].map(([id, members]) => ({
      id,
      members,
      index: members[0].index,
      trains: members.some((row) => row.trains),
      ...Object.fromEntries(ps.sampleColumns.map((column) => [column.key, together(members, column)])),
    }));
  }

  const cell = (value) => (typeof value === "string" ? ps.visible(value) : ps.number(value));

  function header(first) {
    const { key, sign } = ps.filters.sorting("index");
    const head = chosenColumns().map((column) => {
      const on = column.key === key;
      const sort = () => {
        ps.query.set({ sort: (on && sign < 0 ? "" : "-") + column.key });
        fill();
      };
      const arrow = on ? (sign > 0 ? " ↑" : " ↓") : "";
      const button = ps.button(column.label + arrow, sort, { data: { sort: column.key } });
      return ps.el(
        "th",
        {
          scope: "col",
          "aria-sort": on ? (sign > 0 ? "ascending" : "descending") : "none",
          class: column.text ? "name" : "",
        },
        button,
      );
    });
    return ps.el("thead", {}, ps.el("tr", {}, ps.el("th", { scope: "col", class: "name" }, first), ...head));
  }

  // Advantages of a group add up to about 0, so show their range.
  function shown(of, column) {
    if (column.key !== "advantage" || !of.members || of.advantage === null) return cell(of[column.key]);
    const low = Math.min(...of.members.map((row) => row.advantage ?? Infinity));
    return low === of.advantage ? ps.signed(low) : ps.signed(low) + " … " + ps.signed(of.advantage);
  }

  const cells = (of) =>
    chosenColumns().map((column) =>
      ps.el("td", { class: column.text ? "name" : "", data: { column: column.key } }, shown(of, column)),
    );

  function sampleRow(row) {
    const name = link(row, ps.filters.hit(row.index));
    return ps.el("tr", { class: row.trains ? "" : "idle" }, ps.el("td", { class: "name" }, name), ...cells(row));
  }

  // ---------------------------------------------------------------- one group

  function textOf(ids, texts, total) {
    const named = ids.map((id) => texts[id]);
    const text = named.every((one) => one !== undefined) ? named.join("") : ids.join(" ");
    return ps.visible(text) + (total > ids.length ? " … " + (total - ids.length) + " more tokens" : "");
  }

  function link(row, token) {
    const name = ps.visible(row.sample_id || "sample " + row.index);
    return ps.link(name, () => open(row.index, token), { data: { sample: row.index } });
  }

  // Rollouts that end in the same way: their rewards, last tokens and names.
  function leaf(rows, text, token) {
    const worth = rows.map((row) => ps.rewardPill(row.reward, rewards));
    const advantages = new Set(rows.map((row) => (row.advantage === null ? "" : "A " + ps.signed(row.advantage))));
    return ps.el(
      "li",
      { class: "leaf" },
      ps.el("span", { class: "pills" }, ...worth.filter(Boolean)),
      ps.el("span", { class: "dim" }, [...advantages].join(", ")),
      ps.el("code", {}, text || "(end here)"),
      ...rows.map((row) => link(row, token)),
    );
  }

  // A branch with its children. What all rollouts share is collapsed.
  function branch(found, i, members) {
    const one = found.branches[i];
    const count = one.end - one.start;
    const text = textOf(one.ids, found.texts, count);
    if (one.members.length === 1) return leaf([members[one.members[0]]], text, one.start);
    const all = one.members.length === members.length;
    const tokens = ps.number(count) + (count === 1 ? " token" : " tokens");
    const label = tokens + (all ? " common to all " : " common to ") + one.members.length;
    const piece = ps.el("code", {}, text);
    const head = all
      ? ps.el("details", { class: "shared" }, ps.el("summary", {}, label), piece)
      : ps.el("div", { class: "leaf" }, piece, ps.el("span", { class: "dim small" }, label));
    return ps.el("li", {}, head, ps.el("ul", {}, ...below(found, i, members)));
  }

  function below(found, i, members) {
    const next = found.branches.map((one, j) => [one, j]).filter(([one]) => one.parent === i);
    const ended = next.filter(([one]) => one.end === one.start).map(([one]) => members[one.members[0]]);
    const others = next.filter(([one]) => one.end > one.start).map(([, j]) => branch(found, j, members));
    return ended.length ? [...others, leaf(ended, "", i < 0 ? 0 : found.branches[i].end - 1)] : others;
  }

  async function body(group, holder) {
    try {
      const found = await ps.source.group(at, group.id);
      const byIndex = new Map(rows.map((row) => [row.index, row]));
      const members = found.members.map((index) => byIndex.get(index));
      const roots = below(found, -1, members);
      ps.fill(
        holder,
        ps.el("table", { class: "grid" }, header("rollout"), ps.el("tbody", {}, ...sorted(members).map(sampleRow))),
        ps.el("h2", {}, "Branches"),
        ps.el("ul", { class: "tree" }, ...roots),
      );
    } catch (error) {
      holder.replaceChildren(ps.el("p", { class: "dim" }, error.message));
    }
  }

  const sorted = (list) => {
    const { key, sign } = ps.filters.sorting("index");
    return list.slice().sort(ps.filters.order(key, sign));
  };

  function groupRows(group) {
    const isOpen = ps.query.get("group") === group.id;
    const label = (isOpen ? "▾ " : "▸ ") + ps.visible(group.members[0].prompt || group.id || "no group");
    const toggle = () => {
      ps.query.set({ group: isOpen ? null : group.id });
      fill();
    };
    const name = ps.link(label, toggle, { "aria-expanded": String(isOpen), data: { group: group.id } });
    const idle = { class: "mark", title: "All advantages are 0, so there is no gradient" };
    const pills = group.members.slice(0, 16).map((row) => ps.rewardPill(row.reward, rewards));
    const rest = group.members.length - 16;
    const row = ps.el(
      "tr",
      { class: "group" + (group.trains ? "" : " idle") },
      ps.el(
        "td",
        { class: "name" },
        ps.el(
          "div",
          { class: "who" },
          name,
          ps.el("span", { class: "pills" }, ...pills.filter(Boolean), rest > 0 ? "+" + rest : ""),
          group.trains ? null : ps.el("span", idle, "trains nothing"),
        ),
      ),
      ...cells(group),
    );
    if (!isOpen) return [row];
    const holder = ps.el("td", { colSpan: chosenColumns().length + 1, class: "body" });
    body(group, holder);
    return [row, ps.el("tr", { class: "open" }, holder)];
  }

  // ---------------------------------------------------------------- the page

  function chooser() {
    const boxes = ps.sampleColumns.map((column) => {
      const choose = (isOn) => {
        const now = ps.sampleColumns.filter((one) => (one === column ? isOn : chosenColumns().includes(one)));
        ps.query.set({ columns: now.map((one) => one.key).join(",") });
        fill();
      };
      return ps.check(column.label, chosenColumns().includes(column), choose, { data: { choose: column.key } });
    });
    return ps.el("details", { class: "chooser" }, ps.el("summary", {}, "columns"), ps.el("div", {}, ...boxes));
  }

  function fill() {
    const chosen = ps.filters.chosen();
    const all = isFlat() ? sorted(rows.filter(chosen)) : sorted(grouped(chosen));
    const idle = isFlat() ? 0 : all.filter((group) => !group.trains).length;
    const what = isFlat() ? "samples" : "groups";
    element.querySelector("#group-count").textContent =
      ps.number(all.length) + " " + what + (idle ? ", " + ps.number(idle) + " of them train nothing" : "");
    const found = all.slice(0, limit).flatMap((one) => (isFlat() ? [sampleRow(one)] : groupRows(one)));
    const showMore = () => {
      limit += PAGE;
      fill();
    };
    ps.fill(
      element.querySelector(".table"),
      ps.el(
        "table",
        { class: "grid", id: "groups" },
        header(isFlat() ? "sample" : "prompt, rewards of its rollouts"),
        ps.el("tbody", {}, ...found),
      ),
      all.length > limit ? ps.button("show " + PAGE + " more", showMore, { id: "more" }) : null,
    );
  }

  ps.groupsPage = function (holder, found, place, opens) {
    rows = found.samples;
    at = { ...place };
    open = opens;
    element = holder;
    limit = PAGE;
    ps.filters.prepare(rows);
    rewards = ps.extent(
      rows.map((row) => row.reward),
      [0, 1],
    );
    const setFlat = (isOn) => {
      ps.query.set({ flat: isOn ? "1" : null });
      fill();
    };
    ps.fill(
      holder,
      ps.el(
        "div",
        { class: "controls tools" },
        ps.searchBox(() => at, fill, "search"),
        ps.whereBox(fill, "where"),
        ps.check("all samples in one table", isFlat(), setFlat, { id: "flat" }),
        chooser(),
        ps.el("span", { class: "dim", id: "group-count", role: "status" }),
      ),
      ps.el("div", { class: "table" }),
    );
    fill();
    if (ps.query.get("search")) ps.filters.search(at, fill);
  };
}
