"""The site: `sphinx-build -W --keep-going -n docs build/site`; runs and downloads nothing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import toolkit

project = "toolkit"
author = "the toolkit authors"
copyright = f"2026, {author}"
version = release = toolkit.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "docstrings",
    "pages",
    "replays",
]
exclude_patterns = ["_ext"]

# Notebooks show the stills they were saved with.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# Signatures carry the shapes, one argument a line; the text says what they mean.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # what a panel overrides is described where it is asked for
autosummary_generate = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

# Other projects are named, not linked: their inventories are on the network.
nitpick_ignore_regex = [("py:.*", r"(?!toolkit\.).*")]

# Brought by `toolkit export-site`; without it formulas come from the network.
if (Path(__file__).parent / "_static/mathjax/tex-svg.js").exists():
    mathjax_path = "mathjax/tex-svg.js"

html_theme = "furo"
html_title = "toolkit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/mlsys-toolkit/toolkit/",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
