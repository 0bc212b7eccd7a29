"""One table, and what the terminal, Markdown and a page make of it."""

import io
import re

from rich.console import Console

from mheads.common.markdown_table import table_lines
from mheads.common.table import Cell, Head, Table, text_rows
from mheads.common.terminal_table import terminal_table
from mheads.report.page.html import Page, PageSection

TABLE = Table(
    "Pets",
    ["name", Head("weight of one", short="weight"), Head("food", optional=True), Head("seen", right=True)],
    [
        [Cell("<cat|dog>"), Cell("4.50", 4.5, strong=True), Cell("fish"), Cell("today")],
        [Cell("mouse"), Cell(""), Cell("cheese"), Cell("twice\na day")],
    ],
    note="In kg.",
)


def test_columns_with_a_number_are_aligned_to_the_right():
    assert [head.right for head in TABLE.heads] == [False, True, False, True]
    assert text_rows([["a", "b"]]) == [[Cell("a"), Cell("b")]]


def test_the_terminal_has_short_heads_and_leaves_optional_columns_out():
    text = io.StringIO()
    Console(file=text, width=80).print(terminal_table(TABLE))
    lines = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["name", "weight", "seen"]
    assert lines[2] == ["<cat|dog>", "4.50", "today"]
    assert "fish" not in text.getvalue()


def test_markdown_has_whole_heads_all_columns_and_cells_that_end_no_row():
    assert table_lines(TABLE) == [
        "| name | weight of one | food | seen |",
        "| --- | --- | --- | --- |",
        "| <cat\\|dog> | **4.50** | fish | today |",
        "| mouse |  | cheese | twice a day |",
        "",
        "In kg.",
    ]


def test_a_page_escapes_texts_and_sorts_and_aligns_by_value():
    page = Page("pets", "", [], [PageSection("pets", "Pets", [TABLE])]).html()
    cells = re.findall(r"<t[dh] ?([^>]*)>(.*?)</t[dh]>", page, re.DOTALL)
    assert ('class="number" data-value="4.5"', "<strong>4.50</strong>") in cells
    assert ('class="right"', "today") in cells
    assert ('scope="row"', "&lt;cat|dog&gt;") in cells
    assert ('scope="col" class="number"', "weight of one") in cells
