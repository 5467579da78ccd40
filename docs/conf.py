"""How Sphinx builds the site: `sphinx-build -W docs docs/_build`; pages are Markdown, the reference is docstrings."""

import os
from importlib import metadata

os.environ.setdefault("KERAS_BACKEND", "jax")  # for the reference of ipujax.keras

project = "ipujax"
copyright = "the ipujax authors"
release = metadata.version("ipujax")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Blocks of commands and of Python sessions are copied without prompts and output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_title = f"ipujax {release}"

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
