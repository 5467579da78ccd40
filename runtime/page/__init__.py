"""Pages of HTML for profiles and comparisons, drawn from the values of `runtime.views`."""

from ipujax.runtime.page.comparison_page import ComparedFigures as ComparedFigures, comparison_page as comparison_page
from ipujax.runtime.page.document import PageFrame as PageFrame
from ipujax.runtime.page.profile_page import profile_page as profile_page
