"""The README's table of families is what the script prints."""

import pytest

from benchmarks import families
from fastbert.testing.models import FAMILIES, heads_of


def _readme_rows() -> list[str]:
    text = families.README.read_text()
    inside = text.split(families.START)[1].split(families.END)[0]
    return inside.strip().splitlines()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_the_script_prints(family):
    rows = [row for row in _readme_rows() if row.startswith(f"| {family} |")]
    assert rows == families.rows_of(family), "run python -m benchmarks.families --write"


def test_every_family_has_rows_and_every_class_one():
    cells = [[cell.strip() for cell in row.split("|")] for row in _readme_rows()[2:]]
    listed = [family + task for _, family, tasks, *_ in cells for task in tasks.split(", ")]
    expected = [family + task for family in FAMILIES for task in ("Model", *heads_of(family))]
    assert sorted(listed) == sorted(expected)


def test_a_table_replaces_the_one_before():
    text = f"head\n{families.START}\nold\n{families.END}\ntail\n"
    assert families.with_table(text, "new") == text.replace("old", "new")
