// The middle column: a sample token by token. Lines are laid out once from measured widths, and only visible ones are
// in the page, so a hundred thousand tokens scroll like a hundred.
"use strict";
{
  const LINE = 23;
  const IMAGE_LINES = 8;
  const OVERSCAN = 12;
  const MARKS = ["", " high", " low", " other"];

  const widths = new Map(); // of texts, in the font they were measured in
  let measured = "";
  let measuring = null;

  // A view of one sample at a time; a comparison has two of them.
  ps.newTokens = function (id, label) {
    let sample = null;
    let view = null; // { scroller, spacer, tops, starts, blocks }
    let lines = new Map(); // line number -> its element
    const look = { column: ps.columns[0], scale: 1, exported: null, live: null, differs: null };
    let cursor = -1;
    let onCursor = () => {};
    let shownTexts = [];

    function widthOf(text) {
      let width = widths.get(text);
      if (width === undefined) {
        width = measuring.measureText(text).width;
        if (widths.size < 200000) widths.set(text, width);
      }
      return width;
    }

    function textOf(i) {
      const id = sample.columns.token_ids[i];
      const text = sample.texts[id];
      return text === undefined ? String(id) : text;
    }

    // Where each block begins, and its label: chat roles if the texts show them, otherwise changes of the loss mask.
    function blocksOf() {
      const found = [];
      for (let i = 0; i < sample.count; i++)
        if (shownTexts[i] === "<|im_start|>")
          found.push({ start: i, label: (shownTexts[i + 1] || "").trim() || "message" });
      if (found.length) {
        if (found[0].start > 0) found.unshift({ start: 0, label: "context" });
        return found;
      }
      const mask = sample.columns.loss_mask;
      for (let i = 0; i < sample.count; i++)
        if (i === 0 || mask[i] !== mask[i - 1]) found.push({ start: i, label: mask[i] ? "trained" : "context" });
      return found;
    }

    function layOut(width) {
      const starts = []; // first token of each line
      const tops = [];
      const images = new Map((sample.fields.images || []).map((image) => [image.offset, image]));
      const labels = new Map(view.blocks.map((block) => [block.start, block.label]));
      const hasTexts = Object.keys(sample.texts).length > 0;
      const gap = hasTexts ? 1 : 7;
      let x = Infinity;
      let top = 6;
      const begin = (i) => {
        starts.push(i);
        tops.push(top);
        top += LINE;
        x = 0;
      };
      view.pictures = new Map();
      for (let i = 0; i < sample.count; i++) {
        const image = images.get(i);
        if (image) {
          if (labels.has(i) && starts.length) top += 10;
          begin(i);
          view.pictures.set(starts.length - 1, image);
          top += LINE * (IMAGE_LINES - 1);
          i += image.length - 1;
          x = Infinity;
          continue;
        }
        const text = shownTexts[i];
        const wide = widthOf(text) + gap;
        if (labels.has(i) && starts.length) {
          top += 10;
          begin(i);
        } else if (x === Infinity || (x > 0 && x + wide > width)) begin(i);
        x += wide;
        if (hasTexts && text.endsWith("↵")) x = Infinity;
      }
      Object.assign(view, { starts, tops, labels, height: top + 40 });
    }

    const lineAt = (position) => ps.lastUpTo(view.tops, position);
    const lineOf = (token) => ps.lastUpTo(view.starts, token);
    const endOf = (line) => view.starts[line + 1] ?? sample.count;

    function tokenElement(i) {
      const trained = sample.columns.loss_mask[i];
      let name = "tok" + (trained ? "" : " context") + (i === cursor ? " cursor" : "");
      if (look.exported && look.exported[i]) name += " masked" + MARKS[look.exported[i]];
      if (look.live && look.live[i]) name += " live";
      if (look.differs && look.differs[i]) name += " differs";
      const element = document.createElement("span");
      element.className = name;
      element.dataset.i = i;
      element.textContent = shownTexts[i];
      const values = sample.columns[look.column.key];
      if (trained && values)
        element.style.backgroundColor = ps.colour(ps.strength(values[i], look.column, look.scale), look.column);
      return element;
    }

    function pictureElement(image, first) {
      const source = ps.source.image(image.hash);
      const caption = image.width + " × " + image.height + " · " + image.length + " tokens from " + first;
      const shown = source
        ? ps.el("img", {
            src: source,
            alt: "image of the sample",
            loading: "lazy",
            on: { error: () => shown.replaceWith("image " + image.hash.slice(0, 12)) },
          })
        : ps.el("span", { class: "dim" }, "image " + image.hash.slice(0, 12));
      return ps.el("figure", {}, shown, ps.el("figcaption", {}, caption));
    }

    function lineElement(line) {
      const start = view.starts[line];
      const element = ps.el("div", { class: "tokline" });
      const label = view.labels.get(start);
      const number = label && view.isNarrow ? null : String(start);
      element.append(ps.el("span", { class: "gutter" }, label ? ps.el("b", {}, label) : null, number));
      const image = view.pictures.get(line);
      if (image) element.append(pictureElement(image, start));
      else for (let i = start; i < endOf(line); i++) element.append(tokenElement(i));
      element.style.top = view.tops[line] + "px";
      return element;
    }

    function draw() {
      if (!view) return;
      const { scroller, spacer } = view;
      const first = Math.max(0, lineAt(scroller.scrollTop) - OVERSCAN);
      const last = Math.min(view.tops.length - 1, lineAt(scroller.scrollTop + scroller.clientHeight) + OVERSCAN);
      for (const [line, element] of lines)
        if (line < first || line > last) {
          element.remove();
          lines.delete(line);
        }
      for (let line = first; line <= last; line++)
        if (!lines.has(line)) {
          const element = lineElement(line);
          lines.set(line, element);
          spacer.append(element);
        }
    }

    function redraw() {
      for (const element of lines.values()) element.remove();
      lines = new Map();
      draw();
    }

    function reflow() {
      const style = getComputedStyle(view.scroller);
      measuring = document.createElement("canvas").getContext("2d");
      const font = style.fontSize + " " + style.fontFamily;
      measuring.font = font;
      if (measured !== font) widths.clear();
      measured = font;
      const gutter = view.scroller.clientWidth < 520 ? 70 : 96;
      view.isNarrow = gutter < 96;
      view.scroller.style.setProperty("--gutter", gutter + "px");
      layOut(view.scroller.clientWidth - gutter - 24);
      view.spacer.style.height = view.height + "px";
      redraw();
    }

    function place(token) {
      view.spacer.querySelector(".cursor")?.classList.remove("cursor");
      cursor = token;
      view.spacer.querySelector('[data-i="' + token + '"]')?.classList.add("cursor");
    }

    const self = {
      // Show a sample in the column; `tell` is called with the token under the cursor.
      show(element, opened, tell) {
        sample = opened;
        cursor = -1;
        onCursor = tell;
        shownTexts = Array.from({ length: sample.count }, (_, i) => ps.visible(textOf(i)));
        const spacer = ps.el("div", { class: "spacer" });
        const named = Object.keys(sample.texts).length > 0;
        const scroller = ps.el(
          "div",
          { class: "scroller tokens" + (named ? "" : " ids"), id, tabIndex: 0, role: "application" },
          spacer,
        );
        scroller.setAttribute("aria-label", label);
        scroller.addEventListener("scroll", () => requestAnimationFrame(draw));
        const onToken = (act) => (event) => event.target.dataset?.i !== undefined && act(Number(event.target.dataset.i));
        scroller.addEventListener("mouseover", onToken((token) => onCursor(token, false)));
        scroller.addEventListener("click", onToken((token) => self.go(token, false)));
        view = { scroller, spacer, blocks: blocksOf() };
        lines = new Map();
        element.replaceChildren(scroller);
        reflow();
        return scroller;
      },
      // Change what tokens are coloured and marked by.
      paint(changes) {
        Object.assign(look, changes);
        if (view) redraw();
      },
      // Put the cursor on a token, and scroll to it if it is out of sight.
      go(token, scroll = true) {
        if (!view || !(token >= 0 && token < sample.count)) return;
        const line = lineOf(token);
        const { scroller } = view;
        const top = view.tops[line];
        if (
          scroll &&
          (top < scroller.scrollTop + LINE || top > scroller.scrollTop + scroller.clientHeight - 2 * LINE)
        ) {
          scroller.scrollTop = top - scroller.clientHeight / 2;
          draw();
        }
        place(token);
        onCursor(token, true);
      },
      // The token above or below the cursor, at about the same distance from the margin.
      vertical(by) {
        const line = lineOf(Math.max(cursor, 0));
        const next = Math.max(0, Math.min(view.starts.length - 1, line + by));
        return Math.min(view.starts[next] + Math.max(cursor, 0) - view.starts[line], endOf(next) - 1);
      },
      cursor: () => cursor,
      text: (i) => shownTexts[i],
      resize() {
        if (!view || !sample) return;
        reflow();
        if (cursor >= 0) self.go(cursor);
      },
      clear: () => {
        view = null;
        sample = null;
      },
    };
    return self;
  };

  ps.tokens = ps.newTokens("tokens", "Tokens; arrow keys move between them");
}
