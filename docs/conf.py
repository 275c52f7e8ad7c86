"""Sphinx's settings; `make docs` builds docs/ into build/docs."""

import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "extensions"))

project = "specjax"
author = "specjax authors"
copyright = "specjax authors, Apache-2.0"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "autodoc_fields"]
exclude_patterns = ["extensions"]
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make notebooks` runs them, and this takes what it leaves in build/notebooks
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "sphinx_book_theme"
html_title = "specjax"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "use_fullscreen_button": False}


def copy_notebooks() -> None:
    """Put the notebooks where Sphinx finds them: with their outputs where `make notebooks` has run, else without."""
    copies = DOCS / "notebooks"
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        executed = ROOT / "build/notebooks" / notebook.name
        shutil.copy2(executed if executed.exists() else notebook, copies)


copy_notebooks()
