"""The configuration of Sphinx; `make docs` builds this folder as a site, and a warning is an error."""

project = "Tandem"
copyright = "the Tandem authors"  # Sphinx asks for this name
extensions = ["myst_parser"]
exclude_patterns = ["history"]  # notebooks, kept as they were written
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Tandem"
html_show_sphinx = False
html_copy_source = False
