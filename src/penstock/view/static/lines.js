// Lines over steps with axes: ticks, a cursor shared by all charts of the page, a range to look at more closely.
"use strict";
{
  const LEFT = 52;
  const RIGHT = 10;
  const TOP = 8;
  const BOTTOM = 20;
  const TALL = 150;

  // Round numbers that divide a range into about the given number of parts.
  ps.ticks = function (low, high, wanted) {
    const rough = (high - low) / Math.max(wanted, 1);
    if (!(rough > 0) || !Number.isFinite(rough)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const out = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
      out.push(Number((i * step).toPrecision(12)));
    return out;
  };

  // Exponential smoothing that begins unbiased; 0 leaves the values as they are, gaps stay gaps.
  ps.smoothed = function (values, amount) {
    if (!(amount > 0)) return values;
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (!Number.isFinite(value)) return NaN;
      sum = sum * amount + (1 - amount) * value;
      weight = weight * amount + (1 - amount);
      return sum / weight;
    });
  };

  const tick = (value) => {
    const size = Math.abs(value);
    if (size >= 1e9) return Number((value / 1e9).toPrecision(3)) + "G";
    if (size >= 1e6) return Number((value / 1e6).toPrecision(3)) + "M";
    if (size >= 1e4) return Number((value / 1e3).toPrecision(3)) + "k";
    if (size > 0 && size < 1e-3) return Number(value.toPrecision(3)).toExponential().replaceAll("-", "−");
    return ps.number(value);
  };

  // The index of the value nearest to x in a rising list.
  ps.nearest = function (xs, x) {
    const low = ps.lastUpTo(xs, x);
    const high = Math.min(low + 1, xs.length - 1);
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  };

  // Draw a line through points. If several fall on one pixel column, draw their lowest and highest.
  function trace(pen, xs, ys, x, y) {
    let open = false;
    let column = NaN;
    let [low, high] = [Infinity, -Infinity];
    const flush = () => {
      if (high > low) {
        pen.moveTo(column, y(low));
        pen.lineTo(column, y(high));
      }
    };
    pen.beginPath();
    for (let i = 0; i < xs.length; i++) {
      if (!Number.isFinite(ys[i])) {
        open = false;
        continue;
      }
      const px = Math.round(x(xs[i]) * 2) / 2;
      if (px === column && open) {
        low = Math.min(low, ys[i]);
        high = Math.max(high, ys[i]);
        continue;
      }
      const before = open ? y(ys[i - 1]) : 0;
      const from = column;
      flush();
      if (open) pen.moveTo(from, before);
      if (open) pen.lineTo(px, y(ys[i]));
      else pen.moveTo(px, y(ys[i]));
      [column, low, high, open] = [px, ys[i], ys[i], true];
    }
    flush();
    pen.stroke();
  }

  function extent(series, range, isLog) {
    let [low, high] = [Infinity, -Infinity];
    for (const { xs, ys } of series)
      for (let i = 0; i < xs.length; i++)
        if (xs[i] >= range[0] && xs[i] <= range[1] && Number.isFinite(ys[i]) && (!isLog || ys[i] > 0)) {
          if (ys[i] < low) low = ys[i];
          if (ys[i] > high) high = ys[i];
        }
    if (low > high) return null;
    const flat = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high)); // ignore rounding errors
    if (isLog) return flat ? [low / 2, high * 2] : [low / 1.06, high * 1.06];
    if (flat) return [low - (Math.abs(low) * 0.1 || 0.5), low + (Math.abs(low) * 0.1 || 0.5)];
    const room = (high - low) * 0.06;
    // A line that comes near zero is drawn from zero: otherwise a small change would look like a large one.
    if (low >= 0 && low < high / 3) return [0, high + room];
    return [low - room, high + room];
  }

  function yTicks([low, high], isLog) {
    if (!isLog) return ps.ticks(low, high, 4);
    const powers = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) powers.push(power);
    const wanted = powers.length > 4 ? [1] : powers.length > 2 ? [1, 3] : [1, 2, 3, 5, 7];
    const all = powers.flatMap((power) => wanted.map((digit) => Number((digit * 10 ** power).toPrecision(1))));
    const inside = all.filter((value) => value >= low && value <= high);
    if (inside.length < 2) return ps.ticks(low, high, 3);
    return inside.filter((_, i) => i % Math.ceil(inside.length / 6) === 0);
  }

  // Draw series ({ xs, ys, colour, faint }) between two steps. Returns functions between steps and pixels.
  ps.drawLines = function (canvas, series, range, isLog) {
    const { pen, width, height } = ps.prepare(canvas, TALL);
    const colour = ps.palette();
    const floor = height - BOTTOM;
    const limits = extent(series, range, isLog);
    const wide = Math.max(width - LEFT - RIGHT, 10);
    const x = (step) =>
      range[1] === range[0] ? LEFT + wide / 2 : LEFT + ((step - range[0]) / (range[1] - range[0])) * wide;
    const back = (px) => range[0] + ((px - LEFT) / wide) * (range[1] - range[0]);
    pen.fillStyle = colour.ink;
    pen.strokeStyle = colour.faint;
    pen.lineWidth = 1;
    if (!limits) {
      pen.textAlign = "center";
      pen.fillText("nothing here yet", width / 2, height / 2);
      return { x, back, left: LEFT, right: width - RIGHT };
    }
    const of = isLog ? Math.log10 : (value) => value;
    const [low, high] = limits.map(of);
    const y = (value) => floor - ((of(value) - low) / (high - low)) * (floor - TOP);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const value of yTicks(limits, isLog)) {
      const at = Math.round(y(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, at);
      pen.lineTo(width - RIGHT, at);
      pen.stroke();
      pen.fillText(tick(value), LEFT - 6, at);
    }
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    const steps = ps.ticks(range[0], range[1], Math.max(2, Math.floor(wide / 70))).filter(Number.isInteger);
    for (const step of steps) {
      pen.fillText(step.toLocaleString("en"), x(step), height - 5);
      pen.fillRect(Math.round(x(step)), floor, 1, 4);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT - 1, 0, wide + 2, floor + 1);
    pen.clip();
    pen.lineJoin = "round";
    for (const { ys, ...one } of series) {
      one.ys = isLog ? ys.map((value) => (value > 0 ? value : NaN)) : ys;
      pen.strokeStyle = pen.fillStyle = one.colour;
      pen.globalAlpha = one.faint ? 0.28 : 1;
      pen.lineWidth = one.faint ? 1 : 1.7;
      trace(pen, one.xs, one.ys, x, y);
      const known = (i) => Number.isFinite(one.ys[i]);
      const inside = one.xs.filter((step, i) => known(i) && step >= range[0] && step <= range[1]).length;
      const isAlone = (i) => !known(i - 1) && !known(i + 1); // no line leads to it
      if (!one.faint)
        one.xs.forEach((step, i) => {
          if (!known(i) || (inside > wide / 16 && !isAlone(i))) return;
          pen.beginPath();
          pen.arc(x(step), y(one.ys[i]), 2.2, 0, 7);
          pen.fill();
        });
    }
    pen.restore();
    return { x, back, left: LEFT, right: width - RIGHT };
  };
}
