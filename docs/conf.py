"""The documentation as a site: ``make docs`` builds it and fails on a link that leads nowhere."""

project = "pbfl-flwr"
html_title = "pbfl-flwr"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
