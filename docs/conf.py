"""The documentation as a site: ``make docs`` builds it and fails on a link that leads nowhere."""

import re
from pathlib import Path
from runpy import run_path
from typing import Any

project = "pbfl-flwr"
html_title = "pbfl-flwr"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
smartquotes = False  # keys and options begin with hyphens
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_copyright = False


def escape(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Let |N_j| and (n, *input_shape) stand as they are: docstrings have no substitutions and no emphasis."""
    for number, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = [re.sub(r"([|*])", r"\\\1", part) for part in parts[::2]]
        # "num_clients: M." would begin a list of roman numbers.
        lines[number] = re.sub(r": ([A-Z])\.$", r": \1\\.", "``".join(parts))


def setup(app: Any) -> None:
    """Write the page of keys, and take docstrings before they are read as Google's."""
    keys_page = run_path(str(Path(__file__).with_name("keys.py")))["keys_page"]
    Path(__file__).with_name("keys.md").write_text(keys_page(), encoding="utf-8")
    app.connect("autodoc-process-docstring", escape, priority=100)
