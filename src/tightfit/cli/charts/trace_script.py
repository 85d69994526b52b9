"""Style and script of the traced chart's page: the plot, and the sizes of a moment."""

from __future__ import annotations

STYLE = """
h2 { border-top: 1px solid var(--line); padding-top: 1rem; } h3 { font-size: .95rem;
  margin: 1.2rem 0 .2rem; }
.trace { --scale: 4.2rem; margin: .6rem 0 1rem; }
.trace .row { display: flex; } .trace .scale { position: relative; flex: 0 0 var(--scale); }
.trace .scale span { position: absolute; right: .5rem; transform: translateY(-50%);
  font-size: .78rem; color: var(--soft); white-space: nowrap; }
.trace .plot { position: relative; flex: 1; height: 22rem; touch-action: pan-y; cursor: crosshair;
  border-bottom: 1px solid var(--soft); }
.trace .plot:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
.trace svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.trace line { vector-effect: non-scaling-stroke; } line.stage { stroke: var(--ink); opacity: .55; }
line.moment { stroke: var(--ink); opacity: .35; stroke-dasharray: 2 4; }
.trace .card { position: absolute; transform: translateY(-115%); color: var(--limit);
  font-size: .82rem; background: var(--paper); border-radius: .3rem; padding: 0 .3rem;
  pointer-events: none; } .trace .card.below { transform: translateY(15%); }
.trace .peak { margin-left: var(--scale); } .trace .peak p { margin: 0; font-size: .82rem;
  font-weight: 600; color: var(--ink); overflow-wrap: anywhere; }
.trace .peak p.late { text-align: right; }
.trace .lead { position: absolute; top: 0; width: 0; pointer-events: none;
  border-left: 1.5px solid var(--ink); } .trace .lead::after { content: ""; position: absolute;
  left: -4.25px; bottom: -3.5px; width: 7px; height: 7px; border-radius: 50%;
  background: var(--ink); }
.trace .names { margin-left: var(--scale); position: relative; height: 2.6rem; }
.trace .names span { position: absolute; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; text-align: center; font-size: .78rem; }
.trace .names .stage { top: 1.2rem; font-weight: 600; } .trace .names .moment { top: .1rem;
  color: var(--soft); }
.trace .cursor { position: absolute; top: 0; bottom: 0; width: 0; pointer-events: none;
  border-left: 1.5px dashed var(--ink); }
.trace .tip { position: absolute; top: .4rem; pointer-events: none; background: var(--paper);
  border: 1px solid var(--line); border-radius: .4rem; padding: .35rem .6rem; font-size: .82rem;
  white-space: nowrap; z-index: 2; font-variant-numeric: tabular-nums; }
.trace .tip div { display: flex; gap: .5rem; } .trace .tip div > :last-child { margin-left: auto; }
.trace .tip span:first-child { flex: 0 0 .7em; height: .7em; border-radius: 2px;
  align-self: center; } .trace .tip .over { color: var(--limit); }
.trace .tip small { display: block; max-width: 18rem; white-space: normal; color: var(--soft);
  overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .3rem 0; font-size: .88rem; }
th, td { text-align: left; padding: .22rem .9rem .22rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } th { font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) { body { margin: 1rem auto; } .trace { --scale: 3.4rem; }
  .trace .plot { height: 17rem; } .trace .names .moment { display: none; }
  .trace .names .narrow { display: none; }
  .trace .names .stage { top: .2rem; } .trace .names { height: 1.5rem; }
  .trace .tip { top: calc(100% + 1.6rem); left: calc(-1 * var(--scale)) !important; right: 0; }
  .scroll td { white-space: nowrap; } }
@media print { .trace .tip, .trace .cursor { display: none; } }
"""

SCRIPT = """
for (const trace of document.querySelectorAll('.trace')) {
  const data = JSON.parse(trace.dataset.trace);
  const plot = trace.querySelector('.plot'), tip = trace.querySelector('.tip');
  const cursor = trace.querySelector('.cursor');
  let at = data.peak;
  const size = bytes => {
    for (const [unit, word] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']])
      if (bytes >= 0.95 * unit) return (bytes / unit).toFixed(1) + ' ' + word;
    return bytes + ' B';
  };
  const find = (rows, column) => {
    let low = 0, high = rows.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1;
      if (rows[mid][0] <= column) low = mid; else high = mid - 1; }
    return rows[low];
  };
  const add = (...cells) => {
    const row = document.createElement('div');
    for (const [text, style] of cells) {
      const cell = document.createElement('span');
      cell.textContent = text;
      if (style) cell.style.background = style;
      row.append(cell);
    }
    tip.append(row);
    return row;
  };
  const show = column => {
    at = Math.max(0, Math.min(data.columns - 1, column));
    tip.replaceChildren();
    const head = document.createElement('b');
    head.textContent = find(data.moments, at)[1] + (at === data.peak ? ': the peak' : '');
    tip.append(head);
    let whole = 0;
    for (const part of data.parts) {
      const bytes = find(part.runs, at)[2];
      whole += bytes;
      if (bytes) add(['', part.colour], [part.name], [size(bytes)]);
    }
    add(['', 'transparent'], ['together'], [size(whole)]);
    const over = whole - data.capacity;
    if (over > 0) add(['', 'transparent'], ['over the card by'], [size(over)]).className = 'over';
    if (at === data.peak) {
      const place = document.createElement('small');
      place.textContent = data.place;
      tip.append(place);
    }
    tip.hidden = cursor.hidden = false;
    const wide = plot.clientWidth, x = (at + 0.5) / data.columns * wide;
    cursor.style.left = x + 'px';
    const room = wide - tip.offsetWidth;
    tip.style.left = Math.max(Math.min(0, room), Math.min(room,
      x + 12 + tip.offsetWidth > wide ? x - tip.offsetWidth - 12 : x + 12)) + 'px';
  };
  const hide = () => { tip.hidden = cursor.hidden = true; };
  const point = event => {
    const box = plot.getBoundingClientRect();
    show(Math.floor((event.clientX - box.left) / box.width * data.columns));
  };
  plot.addEventListener('pointermove', point);
  plot.addEventListener('pointerdown', point);
  plot.addEventListener('pointerleave', event => {
    if (event.pointerType === 'mouse' && document.activeElement !== plot) hide();
  });
  plot.addEventListener('focus', () => show(at));
  plot.addEventListener('blur', hide);
  plot.addEventListener('keydown', event => {
    const leap = event.shiftKey ? Math.ceil(data.columns / 40) : 1;
    const starts = data.moments.map(moment => moment[0]);
    const to = {
      ArrowLeft: () => at - leap, ArrowRight: () => at + leap,
      PageUp: () => [...starts].reverse().find(start => start < at) ?? 0,
      PageDown: () => starts.find(start => start > at) ?? data.columns - 1,
      Home: () => 0, End: () => data.columns - 1, p: () => data.peak,
    }[event.key];
    if (event.key === 'Escape') hide();
    if (!to || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    show(to());
  });
}
"""
