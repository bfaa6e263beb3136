// Text from a model is untrusted: it only becomes text nodes, and invisible characters (controls, direction marks,
// zero-width characters) are escaped.
"use strict";
const ps = {};

{
  const HIDDEN = new RegExp(
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
      "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb]|" +
      "[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]|\\udb40[\\udc00-\\uddef]",
    "g",
  );
  const LONGEST = 240;

  function escaped(found) {
    return [...found].map((char) => "\\u{" + char.codePointAt(0).toString(16) + "}").join("");
  }

  // The text with everything invisible made visible; newlines and tabs as arrows.
  ps.visible = function (text) {
    const cut = text.length > LONGEST ? text.slice(0, LONGEST) + "…(+" + (text.length - LONGEST) + ")" : text;
    return cut.replace(HIDDEN, escaped).replace(/\n/g, "↵").replace(/\t/g, "⇥");
  };

  // An element with properties and children; strings become text nodes, never markup.
  ps.el = function (tag, properties, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties || {})) {
      if (name === "class") element.className = value;
      else if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
      else if (name === "data") Object.assign(element.dataset, value);
      else if (name in element && name !== "list") element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };

  // Replace the children of an element. Null ones are left out.
  ps.fill = function (element, ...children) {
    element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  };

  // A select box; options are pairs of value and text.
  ps.select = function (id, label, options, value, act) {
    const box = ps.el(
      "select",
      { id, "aria-label": label, on: { change: () => act(box.value) } },
      ...options.map(([key, text]) => ps.el("option", { value: key }, text)),
    );
    box.value = value;
    return box;
  };

  ps.button = (text, click, properties) => ps.el("button", { type: "button", ...properties, on: { click } }, text);

  // A button that looks like a link.
  ps.link = (text, click, properties) => ps.button(text, click, { class: "link", ...properties });

  // A checkbox with its label; `act` is called with whether it is checked.
  ps.check = function (label, checked, act, properties) {
    const box = ps.el("input", { type: "checkbox", checked, ...properties, on: { change: () => act(box.checked) } });
    return ps.el("label", { class: "check" }, box, label);
  };

  // A box to type into; `act` is called with its value as it changes.
  ps.input = function (properties, act) {
    const box = ps.el("input", { ...properties, on: { input: () => act(box.value, box) } });
    return box;
  };

  ps.cell = (content, isText) => ps.el("td", { class: isText ? "name" : "" }, content);

  // A table. Columns for which `isText` holds are aligned left, the others are numbers.
  ps.table = function (id, names, isText, rows) {
    const head = names.map((name, i) => ps.el("th", { scope: "col", class: isText(i) ? "name" : "" }, name));
    const table = ps.el("table", { class: "grid" }, ps.el("thead", {}, ps.el("tr", {}, ...head)), ps.el("tbody", {}, ...rows));
    if (id) table.id = id;
    return ps.el("div", { class: "table" }, table);
  };

  // A list with a box for its order and one for a part of a name, both kept in the address. `orders` has texts and
  // comparisons by key, `fill` draws the list from rows that are chosen and sorted. Returns the boxes, and a function
  // that draws.
  ps.orderedList = function ({ id, orders, order, find, rows, nameOf, fill }) {
    const draw = () => {
      const wanted = search.value.toLowerCase();
      const [, compare] = orders[ps.query.get(order)] || Object.values(orders)[0];
      fill(rows.filter((one) => nameOf(one).toLowerCase().includes(wanted)).sort(compare));
    };
    const set = (name) => (value) => {
      ps.query.set({ [name]: value || null });
      draw();
    };
    const shown = { id: "find-" + id, placeholder: "part of a name", value: ps.query.get(find) || "" };
    const search = ps.input(shown, set(find));
    const texts = Object.entries(orders).map(([key, [text]]) => [key, text]);
    const box = ps.select(id + "-order", "Order", texts, ps.query.get(order) || texts[0][0], set(order));
    return [[ps.el("label", {}, "order", box), ps.el("label", {}, "find", search)], draw];
  };

  ps.mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

  // The last place in a rising list whose value is at most x; 0 if all are larger.
  ps.lastUpTo = function (rising, x) {
    let [low, high] = [0, rising.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (rising[middle] <= x) low = middle;
      else high = middle - 1;
    }
    return low;
  };

  // Format a number with four digits, or with an exponent if those would be zeros.
  ps.number = function (value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
    const size = Math.abs(value);
    if (size >= 1000 && size < 1e6) return Math.round(value).toLocaleString("en").replace("-", "−");
    const text = size >= 1e6 || size < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
    return text.replace("-", "−");
  };

  // Format a column's value on one token: a number, or as many of a list as fit.
  ps.value = function (value) {
    if (!Array.isArray(value)) return ps.number(value);
    const text = JSON.stringify(value);
    return text.length > LONGEST ? text.slice(0, LONGEST) + "…" : text;
  };

  // The lowest and highest number of a list. Nulls do not count.
  ps.extent = function (values, other) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values)
      if (value !== null && Number.isFinite(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
    return low > high ? other : [low, high];
  };

  // How long ago a Unix time is.
  ps.ago = function (at) {
    const seconds = Math.max(0, Date.now() / 1000 - at);
    const [amount, unit] =
      seconds < 90
        ? [seconds, "s"]
        : seconds < 5400
          ? [seconds / 60, "min"]
          : seconds < 129600
            ? [seconds / 3600, "h"]
            : [seconds / 86400, "days"];
    return Math.round(amount) + " " + unit + " ago";
  };

  // Format a duration in seconds.
  ps.duration = (seconds) =>
    seconds < 120
      ? Math.round(seconds) + " s"
      : seconds < 7200
        ? Math.round(seconds / 60) + " min"
        : Math.round(seconds / 360) / 10 + " h";

  // Format a Unix time: the time of day, with the date if that is not today.
  ps.clock = function (at) {
    const time = new Date(at * 1000);
    const isToday = time.toDateString() === new Date().toDateString();
    return isToday ? time.toLocaleTimeString() : time.toLocaleString();
  };

  ps.bytes = (value) => (Number.isFinite(value) ? ps.number(Number((value / 1e6).toPrecision(4))) + " MB" : "–");

  ps.percent = (part, whole) => (whole ? ps.number(Number(((100 * part) / whole).toPrecision(3))) + " %" : "–");
}
