"""How Sphinx builds the site: `sphinx-build -W docs docs/_build`; pages are Markdown, the reference is docstrings."""

import os
from importlib import metadata

os.environ.setdefault("KERAS_BACKEND", "jax")  # for the reference of ipujax.keras

project = "ipujax"
copyright = "the ipujax authors"
release = metadata.version("ipujax")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ipujax {release}"

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
