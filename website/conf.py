"""Sphinx' settings for the site, of which site_pages.py puts the pages together.

Why Sphinx with MyST-NB and the PyData theme: all of it comes from PyPI, with styles, fonts and search, so that a page
fetches nothing from elsewhere and the build needs no network. Jupyter Book 2 downloads its theme when it builds
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
exclude_patterns = ["clean", "extra"]  # to be taken along, not read
suppress_warnings = [
    "myst.header",
    "mystnb.unknown_mime_type",
]  # what a lesson leaves out between two levels is no fault

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"type": "module"})]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "Fit bigger, train faster"},  # as a phone has room for
    "show_prev_next": True,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "calculator": [], "class": [], "claims": [], "claims/*": []}
