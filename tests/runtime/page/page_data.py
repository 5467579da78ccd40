"""Tables of data of a page, read from its text."""

from __future__ import annotations

import json
import re


def data_of(text):
    """The data of a page's scripts."""
    (data,) = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def table_of(text, name):
    """Rows of a table of data, each a dict by heading, and "id" where rows have addresses."""
    spec = data_of(text)["tables"][name]
    columns = {
        column["title"]: [column["values"][n] for n in column["at"]] if "at" in column else column["values"]
        for column in spec["columns"]
    } | ({"id": spec["ids"]} if spec["ids"] else {})
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def cells_of(text):
    """Texts of all cells of all tables of data, links by their text."""
    columns = [column for table in data_of(text)["tables"].values() for column in table["columns"]]
    values = [value for column in columns for value in column["values"] if column["kind"] in ("text", "link")]
    return [value[0] if isinstance(value, list) else value for value in values]
