"""Markup that a parser accepts, with what was given and nothing from elsewhere."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from rolemesh.launch import html
from rolemesh.launch.pictures import svg

VOID = {"meta", "br"}


class Balance(HTMLParser):
    """Collects text and checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


def parsed(markup: str) -> Balance:
    balance = Balance()
    balance.feed(markup)
    assert balance.open == []
    return balance


def rectangles(chart: str) -> list[dict[str, str]]:
    return [element.attrib for element in ElementTree.fromstring(chart).iter("rect")]


BARS = [
    html.Bar("actor", "generate", 0.0, 4.0),
    html.Bar("critic", "values", 4.0, 5.0, "2 ranks"),
    html.Bar("actor", "update <actor>", 4.0, 8.0),
]


def test_a_page_is_whole_and_asks_for_nothing():
    document = html.page(
        "Run <1>",
        html.section("Step & time", html.gantt(BARS), html.legend(svg.colours(["a", "b"]))),
        html.figure(html.bar_chart({"actor": {"weights": 1.0}}), "memory"),
        "plain <text>",
    )
    texts = parsed(document).texts
    assert {"Run <1>", "Step & time", "plain <text>", "memory"} <= set(texts)
    assert not re.search(r"https?:|<script|<link|<img|src=|url\(|@import", document)


def test_tables_align_numbers_and_escape_text():
    markup = html.table(["name", "s"], [["<b>", 1.23456], ["x", None]])
    assert parsed(markup).texts == ["name", "s", "<b>", "1.235", "x", "–"]
    assert markup.count('class="n"') == 3  # the head, the number and the dash


def test_gantt_bars_are_as_long_as_their_time_and_start_when_it_starts():
    first, second, third = rectangles(html.gantt(BARS))
    assert float(first["width"]) == pytest.approx(float(third["width"]), abs=0.2)
    assert float(second["width"]) == pytest.approx(float(first["width"]) / 4, abs=0.2)
    assert float(third["x"]) == pytest.approx(float(first["x"]) + float(first["width"]), abs=0.2)
    assert first["y"] == third["y"] != second["y"]
    assert float(third["x"]) + float(third["width"]) <= svg.WIDTH


def test_two_gantts_with_one_end_have_one_scale():
    whole, half = (rectangles(html.gantt([bar], end=8.0, lanes=["actor"]))[0] for bar in (BARS[0], BARS[0]))
    wide = rectangles(html.gantt([html.Bar("actor", "generate", 0.0, 8.0)], end=8.0))[0]
    assert whole["width"] == half["width"]
    assert float(wide["width"]) == pytest.approx(2 * float(half["width"]), abs=0.2)


def test_a_short_bar_drops_its_label_but_keeps_its_detail():
    chart = html.gantt([html.Bar("p", "update_actor", 0, 100), html.Bar("p", "sync", 100, 100.1, "why")])
    texts = parsed(chart).texts
    assert "update_actor" in texts
    assert "sync" not in texts
    assert any(text.startswith("sync:") and text.endswith("why") for text in texts)


def test_stacked_bars_follow_one_another_and_state_their_sum():
    chart = html.bar_chart(
        {"actor": {"weights": 10.0, "grads": 20.0}}, unit="GiB", stacked=True, limits={"actor": 40.0}
    )
    weights, grads = rectangles(chart)
    assert float(grads["x"]) == pytest.approx(float(weights["x"]) + float(weights["width"]), abs=0.2)
    assert float(grads["width"]) == pytest.approx(2 * float(weights["width"]), abs=0.2)
    assert "30" in parsed(chart).texts
    assert 'class="limit"' in chart


def test_lines_on_logarithmic_axes_keep_to_the_chart_and_leave_out_what_has_no_logarithm():
    chart = html.line_chart(
        {"a": [(8, 10.0), (1024, 900.0), (16, 0.0)]}, x_label="devices", y_label="tokens/s", log=True
    )
    circles = [element.attrib for element in ElementTree.fromstring(chart).iter("circle")]
    assert len(circles) == 2
    assert all(0 <= float(c["cx"]) <= svg.WIDTH and 0 <= float(c["cy"]) <= 344 for c in circles)


@pytest.mark.parametrize(
    "chart",
    [
        html.gantt([]),
        html.bar_chart({}),
        html.line_chart({}, x_label="x", y_label="y"),
        html.line_chart({"a": [(1.0, 2.0)]}, x_label="x", y_label="y"),
    ],
)
def test_nothing_to_draw_is_no_error(chart):
    parsed(chart)


def test_colours_follow_first_appearance_and_repeat():
    chosen = svg.colours(["a", "b", "a", *"cdefghijklmnop"])
    assert chosen["a"] == svg.PALETTE[0]
    assert chosen["b"] == svg.PALETTE[1]
    assert chosen["p"] == svg.PALETTE[0]
