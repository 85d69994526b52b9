"""How the page looks: the report page's colours and system fonts, light and dark, any width."""

from __future__ import annotations

from typing import Any

_COLOURS = {
    # name: light, dark; those of `core/html_page.py`, and what controls need besides
    "body_background_fill": ("#ffffff", "#0f1419"),
    "body_text_color": ("#1f2328", "#e6edf3"),
    "body_text_color_subdued": ("#59636e", "#9aa4ae"),
    "background_fill_primary": ("#ffffff", "#0f1419"),
    "background_fill_secondary": ("#f6f8fa", "#161c23"),
    "border_color_primary": ("#d8dee4", "#3a424b"),
    "border_color_accent": ("#4477aa", "#7fb0de"),
    "color_accent_soft": ("#e8eff6", "#1c2a38"),
    "block_background_fill": ("#ffffff", "#0f1419"),
    "block_label_text_color": ("#59636e", "#9aa4ae"),
    "block_title_text_color": ("#59636e", "#9aa4ae"),
    "block_info_text_color": ("#59636e", "#9aa4ae"),
    "input_background_fill": ("#ffffff", "#161c23"),
    "input_border_color": ("#c4ccd4", "#4a535d"),
    "input_border_color_focus": ("#4477aa", "#7fb0de"),
    "input_placeholder_color": ("#6b7580", "#8b95a0"),
    "button_primary_background_fill": ("#36648f", "#3f74a6"),
    "button_primary_background_fill_hover": ("#2b5276", "#4b83b8"),
    "button_primary_text_color": ("#ffffff", "#ffffff"),
    "button_secondary_background_fill": ("#f6f8fa", "#1c232b"),
    "button_secondary_background_fill_hover": ("#e9eef3", "#27303a"),
    "button_secondary_text_color": ("#1f2328", "#e6edf3"),
    "button_secondary_border_color": ("#d8dee4", "#3a424b"),
    "slider_color": ("#4477aa", "#7fb0de"),
    "checkbox_background_color_selected": ("#36648f", "#3f74a6"),
    "checkbox_border_color_selected": ("#36648f", "#3f74a6"),
    "checkbox_label_background_fill": ("#f6f8fa", "#1c232b"),
    "checkbox_label_background_fill_selected": ("#e8eff6", "#1c2a38"),
    "checkbox_label_text_color_selected": ("#1f2328", "#e6edf3"),
    "link_text_color": ("#36648f", "#7fb0de"),
}

CSS = """
.gradio-container { --tf-line: var(--border-color-primary); --tf-soft:
  var(--body-text-color-subdued);
  --tf-one: #dbe7f3; --tf-one-line: #4477aa; --tf-two: #fbe3e1; --tf-two-line: #c2554f;
  --tf-limit: #b3261e; --tf-good: #1f7a2e;
  width: 100% !important; box-sizing: border-box; max-width: 76rem !important;
  margin: 0 auto !important; padding: 1rem 1.2rem 2rem !important;
  font-size: 15px; }
.gradio-container > .main.fillable {
  max-width: none !important; padding: 0 !important; margin: 0 !important; width: 100%; }
.gradio-container .form { border: 0; background: none; gap: 1rem; box-shadow: none; overflow:
  visible; }
.gradio-container .html-container { padding: 0 !important; }
.gradio-container .tf-settings { border: 1px solid var(--tf-line);
  border-radius: .5rem; padding: .5rem .8rem; }
.dark, .dark .gradio-container, .gradio-container.dark { --color-accent: #7fb0de; --tf-one:
  #1d3348; --tf-one-line: #7fb0de;
  --tf-two: #46201f; --tf-two-line: #ff8a80; --tf-limit: #ff8a80; --tf-good: #6fce7f; }
.gradio-container .prose { font-size: inherit; }
.tf-head { display: flex; flex-wrap: wrap; gap: .2rem .8rem; align-items: baseline; }
.tf-head h1 { font-size: 1.25rem; font-weight: 650; margin: 0; }
.tf-head p { color: var(--tf-soft); margin: 0; overflow-wrap: anywhere; }
.tf-card .html-container, .tf-card .html-container > * { height: 100%; box-sizing: border-box; }
.tf-side { border: 1px solid var(--tf-line); border-radius: .5rem; padding: .75rem .9rem .4rem;
  display: flex; flex-direction: column; min-height: 11rem; }
.tf-side h3 { display: flex; flex-wrap: wrap; align-items: baseline; gap: .2rem .5rem; margin: 0;
  padding-bottom: .5rem; font-size: 1rem; font-weight: 600; border-bottom: 1px solid
    var(--tf-line); }
.tf-side h3 small { color: var(--tf-soft); font-weight: 400; font-size: .82rem; }
.tf-number { flex: none; width: 1.5em; height: 1.5em; line-height: 1.5em; border-radius: 50%;
  text-align: center; font-size: .85rem; background: var(--tf-one);
  box-shadow: inset 0 0 0 1px var(--tf-one-line); }
.tf-two .tf-number { background: var(--tf-two); box-shadow: inset 0 0 0 1px var(--tf-two-line); }
.tf-name { overflow-wrap: anywhere; } .tf-hidden { color: var(--tf-soft); font-weight: 400;
  font-style: italic; }
.tf-answer { flex: 1; white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem 0;
  line-height: 1.55; }
.tf-answer mark { background: var(--tf-one); color: inherit; border-radius: 2px; padding: .05em 0;
  border-bottom: 2px solid var(--tf-one-line); }
.tf-two .tf-answer mark { background: var(--tf-two); border-bottom: 2px dotted var(--tf-two-line);
  }
.tf-none { color: var(--tf-soft); }
.tf-figures { color: var(--tf-soft); font-size: .82rem; margin: 0; border-top: 1px solid
  var(--tf-line);
  padding: .4rem 0 .2rem; font-variant-numeric: tabular-nums; }
.tf-cursor { display: inline-block; width: .5em; height: 1.05em; margin-left: .1em;
  vertical-align: -.15em; background: var(--color-accent); animation: tf-blink 1s steps(2)
    infinite; }
@keyframes tf-blink { 50% { opacity: 0; } }
@media (prefers-reduced-motion: reduce) { .tf-cursor { animation: none; } }
.tf-fault { border-left: 3px solid var(--tf-limit); padding: .4rem .8rem; margin: .6rem 0;
  overflow-wrap: anywhere; }
.tf-fault b { color: var(--tf-limit); font-weight: 600; } .tf-fault p { color: var(--tf-soft);
  margin: .2rem 0 0; }
.tf-note { color: var(--tf-soft); margin: .1rem 0; overflow-wrap: anywhere; }
.tf-tally { color: var(--tf-soft); font-size: .9rem; display: flex; flex-wrap: wrap;
  gap: .5rem 1rem; justify-content: space-between; align-items: center; min-height: 2.2rem; }
.tf-export { border: 1px solid var(--tf-line); border-radius: .4rem; padding: .25rem .8rem;
  color: var(--body-text-color) !important; text-decoration: none !important; white-space: nowrap;
    }
.tf-export:hover { background: var(--button-secondary-background-fill-hover); }
.tf-tally span { color: var(--tf-good); } .tf-tally ul { list-style: none; display: inline-flex;
  flex-wrap: wrap; gap: .1rem 1rem; padding: 0; margin: 0; }
.tf-tally li { margin: 0; padding: 0; } .tf-tally b { color: var(--body-text-color); }
.tf-vote { gap: .5rem !important; } .tf-vote button { min-width: 7rem !important; }
.tf-thread { border: 1px solid var(--tf-line); border-radius: .5rem; padding: .9rem; min-height:
  14rem;
  max-height: 32rem; overflow-y: auto; display: flex; flex-direction: column-reverse; }
.tf-turns { display: flex; flex-direction: column; gap: .7rem; margin-bottom: auto; }
.tf-turn { max-width: 88%; } .tf-turn small { color: var(--tf-soft); display: block; }
.tf-turn > div { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.5; padding: 0; }
.tf-user { align-self: flex-end; } .tf-user > div { background: var(--color-accent-soft);
  border-radius: .7rem; padding: .5rem .8rem; }
.tf-plan { border: 1px solid var(--tf-line); border-radius: .5rem; padding: .7rem .9rem; margin:
  .7rem 0; }
.tf-plan h3 { margin: 0; font-size: 1rem; font-weight: 600; display: flex; flex-wrap: wrap;
  gap: .3rem .6rem; align-items: baseline; }
.tf-badge { border: 1px solid currentColor; border-radius: 1rem; padding: 0 .55rem; font-size:
  .8rem;
  font-weight: 500; } .tf-fits { color: var(--tf-good); } .tf-tight { color: #946200; }
.dark .tf-tight { color: #e6b34d; }
.tf-bars { display: grid; grid-template-columns: 5.2rem 1fr 5rem; gap: .3rem .7rem;
  align-items: center; margin: .5rem 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
.tf-track { position: relative; height: 1rem; display: flex; background:
  var(--background-fill-secondary);
  border-radius: 2px; } .tf-track i { height: 100%; min-width: 1px; }
.tf-track u { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 2px dashed
  var(--tf-limit); }
.tf-legend { list-style: none !important; display: flex; flex-wrap: wrap; gap: .2rem 1rem;
  padding: 0;
  margin: .3rem 0; font-size: .85rem; color: var(--tf-soft); }
.tf-legend li { margin: 0; padding: 0; } .tf-legend span { display: inline-block; width: .8em;
  height: .8em; border-radius: 2px; margin-right: .4em; vertical-align: -1px; }
.tf-table { width: 100%; border: 0 !important; border-collapse: collapse; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
.tf-table th, .tf-table td { text-align: left; padding: .35rem .8rem .35rem 0;
  border: 0 !important; border-bottom: 1px solid var(--tf-line) !important; vertical-align: top;
  background: none !important; }
.tf-table th { font-weight: 600; color: var(--tf-soft); }
.tf-frame { width: 100%; min-height: 30rem; border: 0; display: block; }
.tf-visually-hidden { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap; }
button:focus-visible, textarea:focus-visible, input:focus-visible, [tabindex]:focus-visible,
summary:focus-visible { outline: 2px solid var(--color-accent) !important; outline-offset: 1px; }
textarea:focus-visible, input:focus-visible { outline-offset: -2px !important; }
@media (max-width: 640px) {
  .gradio-container { padding: .7rem .7rem 1.5rem !important; }
  .tf-pair { flex-direction: column !important; } .tf-pair > * { min-width: 0 !important; width:
    100%; }
  .tf-side { min-height: 0; } .tf-vote button { flex: 1 1 40% !important; min-width: 0 !important;
    }
  .tf-table thead { display: none; } .tf-table tr { display: block; padding: .4rem 0;
    border-bottom: 1px solid var(--tf-line); }
  .tf-table td { display: flex; gap: .6rem; border: 0 !important; padding: .1rem 0;
    overflow-wrap: anywhere; }
  .tf-table td::before { content: attr(data-label); color: var(--tf-soft); flex: none; width:
    7.5rem; }
  .tf-bars { grid-template-columns: 5.2rem 1fr; } .tf-bars .tf-size { grid-column: 2;
    margin-top: -.25rem; color: var(--tf-soft); }
}
"""

SCRIPT = """
<script>
document.addEventListener('keydown', event => {
  if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey)) return;
  const place = event.target.closest && event.target.closest('[id^="tf-ask-"]');
  const button = place && document.getElementById(place.id.replace('ask', 'go'));
  if (button && !button.disabled) { event.preventDefault(); button.click(); }
}, true);
</script>
"""
"""Ctrl+Enter and Cmd+Enter send, from every field of a form."""

HEAD = f"<style>{CSS}</style>{SCRIPT}"
"""Written into the page as it is: gradio's own option for style sheets rewrites their rules."""


def make_theme() -> Any:
    """System fonts and plain surfaces: nothing is fetched for it."""
    import gradio as gr

    theme = gr.themes.Base(
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
    )
    chosen = {
        "color_accent": "#4477aa",  # the theme knows no dark one; the style sheet has it
        "block_shadow": "none",
        "block_border_width": "0px",
        "block_padding": "0px",
        "block_label_text_weight": "500",
        "input_border_width": "1px",
        "button_large_text_weight": "500",
        "button_large_text_size": "*text_md",
        "button_large_padding": "8px 16px",
        "checkbox_label_padding": "6px 10px",
        "button_primary_border_color": "transparent",
    }
    for name, (light, dark) in _COLOURS.items():
        chosen |= {name: light, f"{name}_dark": dark}
    return theme.set(**chosen)
