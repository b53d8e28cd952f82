"""Sphinx's settings for the site; site_pages.py writes the pages.

Why Sphinx with MyST-NB and the PyData theme: PyPI has all of it, with styles, fonts and search, so that pages load
nothing from other sites and the build needs no network. Jupyter Book 2 downloads its theme when it builds
(github.com/jupyter-book/mystmd/issues/1451); Material for MkDocs is maintained until November 2026 only.
"""

project = "Fit bigger transformers, train them faster"
author = "The perf_helpers authors"
copyright = author

extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
exclude_patterns = ["clean", "extra"]  # files for download, not pages
suppress_warnings = [
    "myst.header",
    "mystnb.unknown_mime_type",
]  # a lesson may skip a heading level

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"type": "module"})]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "Fit bigger, train faster"},  # short enough for a phone
    "show_prev_next": True,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "calculator": [], "class": [], "claims": [], "claims/*": []}
