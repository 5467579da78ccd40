"""Profiles and comparisons as pages of HTML: what `runtime.views` computes, drawn."""

from ipujax.runtime.page.comparison_page import ComparedFigures as ComparedFigures, comparison_page as comparison_page
from ipujax.runtime.page.profile_page import profile_page as profile_page
