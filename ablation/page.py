"""The look of a page and of the charts in it, as CSS: light or dark as the reader's system is; wide tables scroll."""

from ablation.charts import FONT

# Okabe and Ito (2008), on light paper and on dark. On white their orange, sky blue and yellow are too faint, and on
# black their blue: those are shifted in lightness until they stand out 3 to 1, as WCAG 2 asks of graphics.
LIGHT = ("#0072B2", "#D55E00", "#009E73", "#B85C92", "#A86F00", "#2A8CC4", "#1B1B1B", "#8C8200")
DARK = ("#3D9BD9", "#F0793A", "#1DB992", "#DD94BC", "#E69F00", "#8CCBF2", "#F2F2F2", "#F0E442")
STYLE = (
    f"""
svg text {{ font: {FONT}px system-ui, sans-serif; fill: var(--ink); }}
:root {{ --paper: #ffffff; --ink: #1b1b1b; --muted: #595959; --rule: #dcdcdc; --wash: #f5f5f3; }}
{" ".join(f".c{i} {{ --c: {colour}; }}" for i, colour in enumerate(LIGHT))}
@media (prefers-color-scheme: dark) {{
:root {{ --paper: #121314; --ink: #ececec; --muted: #a9a9a9; --rule: #3a3b3d; --wash: #1c1d1f; }}
{" ".join(f".c{i} {{ --c: {colour}; }}" for i, colour in enumerate(DARK))}
}}
"""
    """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.25rem; margin: 0 0 1rem; color: var(--muted); font-weight: 600; overflow-wrap: anywhere; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 0 0 .75rem; }
section { border-top: 1px solid var(--rule); margin-top: 2.25rem; padding-top: 1.25rem; }
p, li { max-width: 44rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }
.lead { font-size: 1.3rem; line-height: 1.4; max-width: 52rem; }
.whole { white-space: nowrap; }
.lead + .lead { font-size: 1.05rem; }
.muted, figcaption, .caption, summary { color: var(--muted); font-size: .9rem; }
.caption { margin: 1.25rem 0 .35rem; }
summary { cursor: pointer; margin-top: 1rem; padding: .25rem 0; }
.figures { display: grid; gap: 1.5rem 2rem; margin: 0 0 1rem; }
figure { margin: 0; min-width: 0; }
.panels { grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); }
.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); }
.wide figure { display: grid; gap: .5rem 2rem; align-items: start; }
.panels figcaption, .pairs figcaption { font-weight: 600; color: var(--ink); }
.panels figure, .pairs figure { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
@media (min-width: 52rem) { .wide figure { grid-template-columns: 35rem 1fr; } }
.scroll { margin-bottom: .75rem; overflow-x: auto; border: 1px solid var(--rule); border-radius: 6px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; }
table { font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; text-align: left; white-space: nowrap; vertical-align: top; }
.number { text-align: right; }
.prose { white-space: normal; min-width: 12rem; overflow-wrap: anywhere; }
thead th { color: var(--muted); font-weight: 600; border-bottom: 1px solid var(--rule); }
tbody tr + tr > * { border-top: 1px solid var(--rule); }
tr > :first-child { position: sticky; left: 0; background: var(--paper); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
pre { background: var(--wash); border-radius: 6px; padding: .75rem 1rem; }
:focus-visible { outline: 2px solid #3D9BD9; outline-offset: 2px; }
svg { display: block; width: 100%; height: auto; }
svg .faint { fill: var(--muted); } svg .strong { font-weight: 650; } svg tspan { font-weight: 400; }
.grid { stroke: var(--rule); stroke-width: 1; fill: none; } .axis { stroke: var(--muted); stroke-width: 1; }
.bound { fill: var(--muted); opacity: .2; } .band { fill: var(--c); opacity: .22; }
.curve, .whisker { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.whisker { stroke-width: 5; } .ghost { fill: none; stroke: var(--muted); stroke-width: 1.5; stroke-dasharray: 3 3; }
.leader { stroke: var(--muted); stroke-width: .75; opacity: .7; }
.mark { fill: var(--c); stroke: var(--paper); stroke-width: 1; }
.open { fill: var(--paper); stroke: var(--c); stroke-width: 2; }
.cross { fill: none; stroke: var(--c); stroke-width: 2.5; stroke-linecap: round; }
"""
)
