"""Style and script of a run's HTML page: tables, charts, and the numbers under the pointer."""

from __future__ import annotations

STYLE = """
h2 { border-top: 1px solid var(--line); padding-top: 1rem; }
.state { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .85rem;
  border: 1px solid var(--line); vertical-align: 3px; margin-left: .4rem; }
.finished { border-color: #228833; color: #228833; }
.failed, .died, .out-of-memory { border-color: var(--limit); color: var(--limit); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem;
  margin: 1rem 0; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.3rem; } .card small { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
td.soft { color: var(--soft); } .far { color: var(--limit); }
td.bar { width: 30%; } .track { position: relative; height: .9rem; background: var(--line);
  border-radius: 2px; margin-top: .25rem; } .track i { position: absolute; inset: 0 auto 0 0;
  border-radius: 2px; } .track u { position: absolute; top: -.2rem; bottom: -.2rem; left: 50%;
  border-left: 2px dashed var(--ink); }
ul.legend span { background: var(--c); } ul.legend span.dots { border-radius: 50%; }
ul.legend span.level, ul.legend span.upright { background: none; width: 1.4em; height: 0;
  border-top: 2px dashed var(--c); vertical-align: 4px; border-radius: 0; }
ul.legend span.upright { width: 0; height: 1em; border-top: 0; border-left: 2px dotted var(--c);
  vertical-align: -2px; }
details { margin: .4rem 0; } summary { cursor: pointer; }
.chart { position: relative; } polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.faint { stroke-width: 1; opacity: .35; } polyline.dots { stroke-width: 1;
  stroke-dasharray: 2 4; } circle { stroke: var(--paper); stroke-width: 1.5; }
line.mark { stroke: var(--limit); stroke-dasharray: 2 3; stroke-width: 1.5; }
line.cursor { stroke: var(--soft); stroke-width: 1; pointer-events: none; }
.tip { position: absolute; top: .4rem; pointer-events: none; background: var(--paper);
  border: 1px solid var(--line); border-radius: .4rem; padding: .3rem .6rem; font-size: .82rem;
  white-space: nowrap; z-index: 2; }
.tip span { display: inline-block; width: .7em; height: .7em; border-radius: 2px;
  margin-right: .35em; }
@media print { .tip, .cursor { display: none; } }
"""

SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.dataset.chart);
  const svg = chart.querySelector('svg'), tip = chart.querySelector('.tip');
  const cursor = chart.querySelector('.cursor');
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid + 1;
      else high = mid; }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  const hide = () => { tip.hidden = true; cursor.setAttribute('x1', -9);
    cursor.setAttribute('x2', -9); };
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * data.width;
    const found = data.series.map(line => [line, nearest(line.x, x)]);
    const close = found.reduce((best, item) =>
      Math.abs(item[0].x[item[1]] - x) < Math.abs(best[0].x[best[1]] - x) ? item : best);
    const place = close[0].x[close[1]];
    cursor.setAttribute('x1', place); cursor.setAttribute('x2', place);
    tip.replaceChildren();
    const head = document.createElement('b');
    head.textContent = 'step ' + close[0].step[close[1]].toLocaleString('en');
    tip.append(head);
    for (const [line, at] of found) {
      if (Math.abs(line.x[at] - place) > 8) continue;
      const row = document.createElement('div'), dot = document.createElement('span');
      dot.style.background = line.colour;
      row.append(dot, line.label + ': ' + line.y[at] + (data.unit ? ' ' + data.unit : ''));
      tip.append(row);
    }
    tip.hidden = false;
    const left = place / data.width * box.width;
    tip.style.left = (left + tip.offsetWidth + 24 > box.width
      ? left - tip.offsetWidth - 12 : left + 12) + 'px';
  });
}
"""
