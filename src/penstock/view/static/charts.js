// Small charts on canvas, in the theme's colours: histograms, a scatter plot, the packed grid.
"use strict";
{
  function colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return {
      ink: of("--ink-2"),
      text: of("--ink"),
      paper: of("--paper-2"),
      faint: of("--line"),
      warm: of("--warm"),
      cool: of("--cool"),
      accent: of("--accent"),
      lines: [1, 2, 3, 4, 5, 6, 7, 8].map((i) => of("--line-" + i)),
    };
  }

  function prepare(canvas, height) {
    const width = canvas.clientWidth || 260;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    pen.font = "10.5px system-ui, sans-serif";
    return { pen, width, height };
  }

  ps.palette = colours;
  ps.prepare = prepare;

  function finite(values, mask) {
    const out = [];
    for (let i = 0; i < values.length; i++) if ((!mask || mask[i]) && Number.isFinite(values[i])) out.push(values[i]);
    return out;
  }

  function nothing(pen, width, height, ink) {
    pen.fillStyle = ink;
    pen.textAlign = "center";
    pen.fillText("nothing to show", width / 2, height / 2);
  }

  // Bars over bins that were counted, heights on a square-root scale so that a single odd token still shows.
  ps.bars = function (canvas, binned, options) {
    const { format, marks, centre, height: tall, label } = options || {};
    const { pen, width, height } = prepare(canvas, tall || 84);
    const colour = colours();
    const { low, high, counts, values } = binned;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", (label || "histogram") + ", " + values + " values");
    if (!values) return nothing(pen, width, height, colour.ink);
    const top = Math.sqrt(Math.max(...counts));
    const floor = height - 15;
    const step = width / counts.length;
    pen.fillStyle = colour.accent;
    pen.globalAlpha = 0.75;
    counts.forEach((count, i) => {
      const tallness = Math.max(1.5, (Math.sqrt(count) / top) * (floor - 4));
      if (count) pen.fillRect(i * step + 0.5, floor - tallness, Math.max(step - 1.5, 1), tallness);
    });
    pen.globalAlpha = 1;
    pen.fillStyle = colour.faint;
    pen.fillRect(0, floor, width, 1);
    const upright = (at, top, tall) => {
      const x = (at - low) / (high - low);
      if (x >= 0 && x <= 1) pen.fillRect(x * width - 0.5, top, 1, tall);
    };
    pen.fillStyle = colour.ink;
    for (let y = 0; centre !== undefined && y < floor; y += 6) upright(centre, y, 3);
    pen.fillStyle = colour.warm;
    for (const mark of marks || []) upright(mark, 0, floor);
    const name = format || ps.number;
    pen.fillStyle = colour.ink;
    pen.textAlign = "left";
    pen.fillText(name(low), 0, height - 3);
    pen.textAlign = "right";
    pen.fillText(name(high), width, height - 3);
    pen.textAlign = "center";
    pen.fillText(values.toLocaleString("en") + (values === 1 ? " value" : " values"), width / 2, height - 3);
    // The height of the tallest bar is the axis: the scale is a square root, so ticks between would mislead.
    const tallest = "max " + Math.max(...counts).toLocaleString("en");
    pen.textAlign = "left";
    pen.globalAlpha = 0.85;
    pen.fillStyle = colour.paper;
    pen.fillRect(0, 0, pen.measureText(tallest).width + 4, 12);
    pen.globalAlpha = 1;
    pen.fillStyle = colour.ink;
    pen.fillText(tallest, 1, 9);
  };

  // A histogram of values, which are counted here.
  ps.histogram = function (canvas, values, options) {
    const { mask, transform, marks, centre } = options || {};
    const raw = finite(values, mask);
    const shown = (transform ? raw.map(transform) : raw).filter(Number.isFinite);
    let [low, high] = ps.extent(shown, [0, 0]);
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const bins = Math.max(8, Math.min(48, Math.floor((canvas.clientWidth || 260) / 7)));
    const counts = new Float64Array(bins);
    for (const value of shown) counts[Math.min(bins - 1, Math.floor(((value - low) / (high - low)) * bins))] += 1;
    const placed = (marks || []).map((mark) => (transform ? transform(mark) : mark));
    const middle = centre !== undefined && transform ? transform(centre) : centre;
    ps.bars(canvas, { low, high, counts, values: shown.length }, { ...options, marks: placed, centre: middle });
  };

  // Trainer against sampler; the diagonal is agreement. A click selects the nearest token.
  ps.scatter = function (canvas, xs, ys, options) {
    const { mask, marked, onPick, cursor } = options;
    const { pen, width, height } = prepare(canvas, Math.min(canvas.clientWidth || 240, 240));
    const colour = colours();
    const points = [];
    for (let i = 0; i < xs.length; i++) if (mask[i] && Number.isFinite(xs[i]) && Number.isFinite(ys[i])) points.push(i);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "trainer against sampler log-probability, " + points.length + " tokens");
    canvas.onclick = null;
    if (!points.length) return nothing(pen, width, height, colour.ink);
    let [low, high] = ps.extent(points.flatMap((i) => [xs[i], ys[i]]), [0, 0]);
    if (low === high) [low, high] = [low - 1, high + 1];
    const pad = 16;
    const x = (value) => pad + ((value - low) / (high - low)) * (width - pad - 6);
    const y = (value) => height - pad - ((value - low) / (high - low)) * (height - pad - 6);
    pen.strokeStyle = colour.faint;
    pen.beginPath();
    pen.moveTo(x(low), y(low));
    pen.lineTo(x(high), y(high));
    pen.stroke();
    for (const pass of [0, 1])
      for (const i of points) {
        const odd = marked && marked[i] ? 1 : 0;
        if (odd !== pass) continue;
        pen.fillStyle = odd ? colour.warm : colour.accent;
        pen.globalAlpha = odd ? 0.95 : points.length > 4000 ? 0.18 : 0.4;
        pen.beginPath();
        pen.arc(x(xs[i]), y(ys[i]), odd ? 2.8 : 1.8, 0, 7);
        pen.fill();
      }
    pen.globalAlpha = 1;
    if (cursor >= 0 && mask[cursor]) {
      pen.strokeStyle = colour.ink;
      pen.lineWidth = 1.5;
      pen.beginPath();
      pen.arc(x(xs[cursor]), y(ys[cursor]), 5, 0, 7);
      pen.stroke();
    }
    pen.fillStyle = colour.ink;
    pen.textAlign = "left";
    pen.fillText("sampler " + ps.number(low) + " … " + ps.number(high), pad, height - 3);
    pen.save();
    pen.translate(10, height - pad);
    pen.rotate(-Math.PI / 2);
    pen.fillText("trainer", 0, 0);
    pen.restore();
    canvas.onclick = (event) => {
      const box = canvas.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      let best = -1;
      let nearest = Infinity;
      for (const i of points) {
        const far = (x(xs[i]) - px) ** 2 + (y(ys[i]) - py) ** 2;
        if (far < nearest) [best, nearest] = [i, far];
      }
      if (best >= 0) onPick(best);
    };
  };

  // Ranks from top to bottom, micro-steps from left to right. Each sample is a block; padding is hatched; the rest of a
  // slot is waiting.
  ps.grid = function (canvas, ranks, options) {
    const { onPick } = options || {};
    const slots = Math.max(...ranks.map((rank) => rank.micro_batches.length), 0);
    const rowHeight = Math.max(9, Math.min(26, Math.floor(520 / Math.max(ranks.length, 1))));
    const { pen, width, height } = prepare(canvas, ranks.length * rowHeight + 18);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "packed grid of " + ranks.length + " ranks and " + slots + " micro-steps");
    const colour = colours();
    if (!slots) return nothing(pen, width, height, colour.ink);
    const longest = Array.from({ length: slots }, (_, m) =>
      Math.max(...ranks.map((rank) => (rank.micro_batches[m] ? rank.micro_batches[m].tokens : 0))),
    );
    const total = longest.reduce((a, b) => a + b, 0);
    const left = 52;
    const perToken = (width - left - 4 * slots) / total;
    pen.textBaseline = "middle";
    ranks.forEach((rank, r) => {
      const y = 16 + r * rowHeight;
      pen.fillStyle = colour.ink;
      pen.textAlign = "left";
      if (rowHeight > 11 || r % 4 === 0) pen.fillText("rank " + rank.rank, 0, y + rowHeight / 2 - 1);
      let x = left;
      rank.micro_batches.forEach((batch, m) => {
        const tall = rowHeight - 3;
        pen.fillStyle = colour.faint;
        pen.globalAlpha = 0.35;
        pen.fillRect(x, y, longest[m] * perToken, tall);
        let at = x;
        batch.samples.forEach((tokens, s) => {
          pen.fillStyle = colour.accent;
          pen.globalAlpha = s % 2 ? 0.5 : 0.75;
          pen.fillRect(at, y, Math.max(tokens * perToken - 0.7, 0.4), tall);
          at += tokens * perToken;
        });
        pen.globalAlpha = 0.8;
        pen.fillStyle = batch.is_dummy ? colour.warm : colour.faint;
        const padding = batch.padding * perToken;
        for (let bar = at; bar < at + padding - 1; bar += 3) pen.fillRect(bar, y, 1.2, tall);
        pen.globalAlpha = 1;
        x += longest[m] * perToken + 4;
      });
    });
    pen.fillStyle = colour.ink;
    let x = left;
    longest.forEach((tokens, m) => {
      if (tokens * perToken > 60 || slots < 10) pen.fillText("micro-step " + m, x, 7);
      x += tokens * perToken + 4;
    });
    canvas.onclick = (event) => {
      const box = canvas.getBoundingClientRect();
      const r = Math.floor((event.clientY - box.top - 16) / rowHeight);
      let edge = left;
      const m = longest.findIndex((tokens) => event.clientX - box.left < (edge += tokens * perToken + 4));
      if (ranks[r] && m >= 0 && onPick) onPick(ranks[r].rank, m);
    };
  };
}
